"""A server of videos as jobs, as SGLang's is: POST /v1/videos, GET it by its id, GET its content.

``/v1/videos/sync`` is not known: it is a path of the jobs, which can be asked for and deleted,
but not posted to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fakes.clips_server import mp4_of


class Jobs:
    """What the server does; a test sets what it needs."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.seen: list[str] = []
        self.polls = 2
        self.end: Any = {
            "status": "completed", "progress": 100, "peak_memory_mb": 2048.0,
            "inference_time_s": 0.015,
        }  # fmt: skip
        self.created: Any = None
        self.unknown: tuple[str, ...] = ("/v1/videos/sync",)
        self._left: dict[str, int] = {}
        self._lock = threading.Lock()

    def post(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        """The answer to a POST."""
        with self._lock:
            self.seen.append(f"POST {path}")
            if path in self.unknown:
                return 405, b'{"detail": "Method Not Allowed"}', "application/json"
            self.asked.append(json.loads(body))
            name = f"video_{len(self.asked)}"
            self._left[name] = self.polls
        return 200, self._told(name, self.created), "application/json"

    def get(self, path: str) -> tuple[int, bytes, str]:
        """The answer to a GET."""
        if path == "/health":
            return 200, b"", "text/plain"
        name = path.split("/")[3]
        with self._lock:
            self.seen.append(f"GET {path}")
            if path.endswith("/content"):
                return 200, mp4_of(name.encode()), "video/mp4"
            self._left[name] -= 1
            ended = self.end if self._left[name] <= 0 else None
        return 200, self._told(name, ended), "application/json"

    def _told(self, name: str, more: Any) -> bytes:
        if isinstance(more, list):
            return json.dumps(more).encode()
        told = {"id": name, "object": "video", "model": "sora-2", "status": "queued",
                "progress": 0, "seconds": "1", "error": None}  # fmt: skip
        return json.dumps({**told, **(more or {})}).encode()


@contextmanager
def serving() -> Iterator[tuple[str, Jobs]]:
    """A running server: its URL and what it does."""
    doing = Jobs()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(*doing.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*doing.post(self.path, body))

        def reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", doing
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
