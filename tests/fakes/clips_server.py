"""A clip server without a model: it answers bytes, writes dumps, and misbehaves on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fakes import clips


def mp4_of(data: bytes, rest: bytes = b"") -> bytes:
    """What looks like an mp4: a box that says so, and one that holds the data's hash."""
    inside = b"mdat" + hashlib.sha256(data).digest() + rest
    return b"\0\0\0\x18ftypisom\0\0\2\0isommp42" + (4 + len(inside)).to_bytes(4, "big") + inside


class Clips:
    """What the server does; a test sets what it needs."""

    def __init__(self) -> None:
        self.dumps: Path | None = None
        self.seconds = 0.0
        self.stages = True
        self.cache = False
        self.one_at_a_time = False
        self.same = False
        self.status: Callable[[int], int] = lambda number: 200
        self.headers: dict[str, str] = {}
        self.told: Any = {"status": "ready", "model": "fake", "device": "cpu", "dtype": "fp32",
                          "version": "1", "dump_dir_writable": True}  # fmt: skip
        self.bodies: list[bytes] = []
        self.kinds: list[str] = []
        self.paths: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.most = 0
        self._now = 0
        self._known: set[bytes] = set()
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def answer(self, path: str, kind: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of one POST."""
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.kinds.append(kind)
            self.paths.append(path)
            self._now += 1
            self.most = max(self.most, self._now)
            known = self.cache and body in self._known
            self._known.add(body)
        self.hold.wait(20)
        with self._turn if self.one_at_a_time else contextlib.nullcontext():
            started = time.perf_counter()
            if not known and self.seconds:
                threading.Event().wait(self.seconds)
            spent = (time.perf_counter() - started) * 1e3
        with self._lock:
            self._now -= 1
        status = self.status(number)
        if status != 200:
            return status, json.dumps({"error": f"no\nclip {number}"}).encode(), {}
        mp4 = mp4_of(b"the same" if self.same else body)
        headers = {
            "Content-Type": "video/mp4",
            "X-Video-Sha256": hashlib.sha256(mp4).hexdigest(),
            "X-Model": "fake",
        }
        if self.stages:
            denoise = 0.0 if known else spent
            headers |= {
                "X-Stage-Durations": json.dumps({"denoise": denoise, "other": 0.0}),
                "X-Step-Durations": json.dumps([1.0, 2.0]),
                "X-Server-Time-S": f"{spent / 1e3:.6f}", "X-Peak-Memory-MB": "12.5",
            }  # fmt: skip
        if self.dumps is not None:
            asked = json.loads(body)
            clips.write_dump(self.dumps, mp4, asked=asked)
        return 200, mp4, {**headers, **self.headers}


@contextmanager
def serving() -> Iterator[tuple[str, Clips]]:
    """A running server: its URL and what it does."""
    doing = Clips()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            told = doing.told
            body = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.reply(200, body, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(*doing.answer(self.path, self.headers["Content-Type"], body))

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            with contextlib.suppress(ConnectionError):  # the client may have gone
                self.end_headers()
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", doing
    finally:
        doing.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()
