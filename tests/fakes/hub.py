"""A Hub on this machine: one repository over HTTP, with ranges, commits and error codes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Hub:
    """The repository ``acme/model`` served from a folder, and what was asked of it.

    Attributes:
        folder: the files.
        url: where it listens.
        requests: (path, headers) of every request.
        sent: body bytes sent, by file name.
        fail: file name or "info" -> (status, X-Error-Code) for every request of it.
        fail_once: the same, for the first request alone.
        redirect: where ``resolve`` sends clients instead of answering, a URL.
        ranges: whether ``Range`` is honoured.
        together: with it, that many requests of shards must be in flight before any
            of them is answered; ``most`` is how many were.
    """

    folder: Path
    url: str = ""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    fail: dict[str, tuple[int, str]] = field(default_factory=dict)
    fail_once: dict[str, tuple[int, str]] = field(default_factory=dict)
    redirect: str | None = None
    ranges: bool = True
    together: int = 0
    most: int = 0
    commit: str = COMMIT
    _waiting: int = 0
    _gate: threading.Condition = field(default_factory=threading.Condition)

    def paths(self) -> list[str]:
        """Paths of all requests, in order."""
        return [path for path, _ in self.requests]

    def wait_for_company(self) -> None:
        """Hold a request until ``together`` of them are here (or ten seconds passed)."""
        with self._gate:
            self._waiting += 1
            self.most = max(self.most, self._waiting)
            self._gate.notify_all()
            self._gate.wait_for(lambda: self.most >= self.together, timeout=10)
            self._waiting -= 1


class _Server(ThreadingHTTPServer):
    """Takes as many connections at once as a client of many threads opens."""

    request_queue_size = 256
    daemon_threads = True


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            if self.path == "/api/agent-harnesses":  # the Hub's client asks this by itself
                self._error(404, "")
                return
            hub.requests.append((self.path, dict(self.headers.items())))
            info = re.fullmatch(r"/api/models/acme/model(?:/revision/([^?]+))?(?:\?.*)?", self.path)
            file = re.fullmatch(rf"/acme/model/resolve/{hub.commit}/([^/?]+)", self.path)
            name = "info" if info else file[1] if file else ""
            failure = hub.fail.get(name) or hub.fail_once.pop(name, None)
            if failure is not None:
                self._error(*failure)
            elif info is not None:
                self._info(info[1])
            elif file is None:
                self._error(404, "RepoNotFound")
            elif hub.redirect is not None:
                self.send_response(302)
                self.send_header("Location", f"{hub.redirect}{self.path}")
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self._file(hub.folder / file[1])

        def _info(self, revision: str | None) -> None:
            if revision not in (None, "main", "v1", hub.commit):
                self._error(404, "RevisionNotFound")
                return
            names = [{"rfilename": p.name} for p in sorted(hub.folder.iterdir()) if p.is_file()]
            names += [{"rfilename": "original/consolidated.00.pth"}]
            body = {
                "id": "acme/model",
                "modelId": "acme/model",
                "sha": hub.commit,
                "siblings": names,
            }
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _file(self, path: Path) -> None:
            if not path.is_file():
                self._error(404, "EntryNotFound")
                return
            if path.suffix == ".safetensors" and hub.together:
                hub.wait_for_company()
            size = path.stat().st_size
            headers = {"X-Repo-Commit": hub.commit, "ETag": '"0"', "Accept-Ranges": "bytes"}
            asked = _RANGE.fullmatch(self.headers.get("Range", "")) if hub.ranges else None
            start, end, status = 0, size, 200
            if asked is not None:
                start, end, status = int(asked[1]), min(int(asked[2]) + 1, size), 206
                if start >= size:
                    self._send(416, b"", {"Content-Range": f"bytes */{size}"})
                    return
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            self._stream(path, start, end, status, headers)

        def _stream(
            self, path: Path, start: int, end: int, status: int, headers: dict[str, str]
        ) -> None:
            """Send a part of a file in pieces; a client that hangs up ends it."""
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(end - start)}.items():
                self.send_header(key, value)
            self.end_headers()
            with path.open("rb") as file:
                file.seek(start)
                while start < end:
                    piece = file.read(min(1 << 16, end - start))
                    try:
                        self.wfile.write(piece)
                    except OSError:
                        self.close_connection = True
                        return
                    start += len(piece)
                    hub.sent[path.name] = hub.sent.get(path.name, 0) + len(piece)

        def _error(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "made up"})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

    return Handler


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Hub]:
    """Serve a folder as ``acme/model`` on a free port of the loopback."""
    hub = Hub(folder, **options)
    server = _Server(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
