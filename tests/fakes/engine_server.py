"""Inference servers that answer at once, as asked: OpenAI's API and llama.cpp's, good or bad.

``FakeServer(mode)`` listens on a free port of this machine and keeps what it was sent.  ``odd``
holds values of wrong types for ``usage`` and ``choices`` of answers of several tokens.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

TOKEN_SECONDS = 0.01


class FakeServer:
    """A server in a thread; ``requests`` holds (path, headers, body) of each POST."""

    def __init__(
        self, mode: str = "ids", target: str = "", odd: dict[str, Any] | None = None
    ) -> None:
        self.mode, self.target, self.odd = mode, target, odd or {}
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.release = threading.Event()
        owner = self

        class Handler(_Handler):
            """Answers for this server."""

            fake = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Plain HTTP/1.0: the end of the answer is the end of the connection."""

    fake: FakeServer

    def log_message(self, *arguments: Any) -> None:
        """Silence."""

    def do_GET(self) -> None:
        """``/version`` is there, everything else is not."""
        if self.path == "/version":
            self._answer(200, {"version": "9.9"})
        elif self.path == "/props":
            self._answer(200, {"default_generation_settings": {"n_ctx": 4096}})
        else:
            self._answer(404, {"error": {"message": "no such page"}})

    def do_POST(self) -> None:
        """A completion, by the mode."""
        size = int(self.headers.get("Content-Length", "0"))
        body = json.loads(self.rfile.read(size))
        self.fake.requests.append((self.path, dict(self.headers), body))
        mode = self.fake.mode
        ids = isinstance(body.get("prompt"), list)
        if mode == "redirect":
            self.send_response(307)
            self.send_header("Location", self.fake.target)
            self.end_headers()
        elif mode == "401":
            self._answer(401, {"error": {"message": "Invalid API Key"}})
        elif mode == "html":
            self._answer(200, "<html>hello</html>", kind="text/html")
        elif mode in ("words", "chat") and ids:
            self._answer(400, {"error": {"message": "prompt must be a string"}})
        elif mode == "chat" and "prompt" in body:
            self._answer(404, {"error": {"message": "no completions here"}})
        elif body.get("stream") is False:
            self._answer(200, {"tokens": list(range(body["n_predict"])), "stop": True})
        elif mode == "strict" and "ignore_eos" in body:
            self._answer(400, {"error": {"message": "unknown parameter ignore_eos"}})
        else:
            self._stream(body)

    def _answer(self, status: int, value: Any, kind: str = "application/json") -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def _line(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        mode = self.fake.mode
        if self.path == "/completion":
            self._llama(body)
            return
        wanted = int(body["max_tokens"])
        count = wanted // 2 if mode == "early" and wanted > 1 else wanted
        if "messages" in body:
            self._line({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        step = {"merged": 4, "merged-8": 8}.get(mode, 1)
        if mode == "bunched":  # a proxy that keeps everything back until the end
            self.fake.release.wait(TOKEN_SECONDS * count)
        for number in range(0, count, step):
            if mode == "hang" and wanted > 1 and number == 2:
                self.fake.release.wait(60)
                return
            if mode == "bad-line" and number == 3:
                self._line("{oops")
            if mode == "error-line" and number == 3:
                self._line({"error": {"message": "out of memory"}})
            if mode == "merged-8":
                self.fake.release.wait(TOKEN_SECONDS * min(step, count - number))
            if mode == "merged-once" and number == 0 and count > 1:
                continue  # comes with the next
            text = "word" * min(step, count - number)
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            self._line({"choices": [choice]})
        reason = "stop" if count < wanted else "length"
        self._line({"choices": [{"text": "", "finish_reason": reason}]})
        if mode != "no-usage":
            prompt = body.get("prompt")
            length = len(prompt) if isinstance(prompt, list) else 17
            usage: dict[str, Any] = {"prompt_tokens": length, "completion_tokens": count}
            if mode == "cached":
                usage["prompt_tokens_details"] = {"cached_tokens": 5}
            if wanted > 1:
                usage |= self.fake.odd.get("usage", {})
                if "choices" in self.fake.odd:
                    self._line({"choices": self.fake.odd["choices"]})
            self._line({"choices": [], "usage": usage})
        self._line("[DONE]")

    def _llama(self, body: dict[str, Any]) -> None:
        """llama.cpp's own stream."""
        count = int(body["n_predict"])
        for number in range(1, count + 1):
            self._line({"content": "w", "tokens": [number], "tokens_predicted": number})
        timings = {"cache_n": 0, "predicted_ms": 1.0, "predicted_n": count}
        self._line(
            {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": count,
             "tokens_evaluated": len(body["prompt"]), "timings": timings}
        )  # fmt: skip
