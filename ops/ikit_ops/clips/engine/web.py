"""The HTTP side of the clip server: who may ask, what is answered, and that something always is.

It listens on loopback, which keeps other machines out but not the web pages that are open on this
one: a page may send requests anywhere, and by rebinding its own name it may read the answers.  So
the Host and the Origin must be loopback names, and a body must have a type that no page can send
unasked or come with an Origin.  A request that is refused before its body was read ends the
connection: what is left of it would otherwise be taken for the next request.

Whatever goes wrong is answered, with the request's id; tracebacks go to the log alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import queue
import re
import selectors
import socket
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ikit_ops.clips.engine import asked
from ikit_ops.clips.engine.bodies import Refused, fields_of
from ikit_ops.clips.engine.service import Engine, Job
from ikit_ops.clips.engine.timeline import Timeline

VERSION = "1"
MAX_BODY = 1 << 20
SOCKET_SECONDS = 60.0
DRAIN_SECONDS = 2.0
SPARE_CONNECTIONS = 32  # for health, for refusals, and for those who keep theirs open
LOG = logging.getLogger("clips")
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^][:@/\s]+)(:[0-9]{1,5})?", re.IGNORECASE)
_LENGTH = re.compile(r"[0-9]{1,18}")
_HEADER_SAFE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def loopback(authority: str) -> bool:
    """Whether a Host header, or what follows // in an Origin, is a name of this machine's own."""
    found = _AUTHORITY.fullmatch(authority.strip())
    if found is None:
        return False
    name = found[1].strip("[]").lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def header_text(text: str) -> str:
    """Text as a header may carry it: what is not printable ASCII is percent-encoded UTF-8."""
    return urllib.parse.quote(text.encode("utf-8", "surrogatepass"), safe=_HEADER_SAFE)


def waits(connection: socket.socket) -> bool:
    """Whether the client is still there: it has not closed its end."""
    try:
        with selectors.DefaultSelector() as look:
            look.register(connection, selectors.EVENT_READ)
            return not look.select(0) or connection.recv(1, socket.MSG_PEEK) != b""
    except (OSError, ValueError):
        return False


class Handler(BaseHTTPRequestHandler):
    """POST /clips, POST /v1/videos/sync, GET /health, GET /v1/models."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS
    request_id = ""
    _unread = _answered = False

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: prompts are nobody's business."""

    def version_string(self) -> str:
        """The Server header: this server's, not the library's."""
        return f"ikit-clips/{VERSION}"

    def parse_request(self) -> bool:
        """The base's; the request's time begins here, its first line just came."""
        self.timeline = Timeline("receive")
        self.request_id = uuid.uuid4().hex
        self._answered = False
        return super().parse_request()

    def do_GET(self) -> None:
        """Health, and the model's name."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """Make a clip; the answer is its mp4."""
        self._guarded(self._post)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do the work, and answer whatever it raises.

        Until the whole request was read, any answer ends the connection.
        """
        self._keep, self.close_connection = not self.close_connection, True
        self._unread = True
        try:
            self._welcome()
            work()
        except Refused as refused:
            self._answer(refused.status, refused.told)
        except queue.Full:
            self._answer(429, {"error": "the queue is full"}, {"Retry-After": "5"})
        except (
            Exception
        ):  # whatever it is: a client that gets no answer cannot tell it from a crash
            LOG.exception("request %s failed", self.request_id)
            self._answer(500, {"error": "the server failed; its log says why, under this id"})

    def _welcome(self) -> None:
        """Refuse what comes by another name than this machine's own, or from a foreign page."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not loopback(hosts[0]):
            raise Refused(403, error="only loopback names are served")
        for origin in self.headers.get_all("Origin", []):
            scheme, _, authority = origin.partition("://")
            if scheme not in ("http", "https") or not loopback(authority):
                raise Refused(403, error="pages of other origins are not served")

    def _was_read(self) -> None:
        self._unread, self.close_connection = False, not self._keep

    def _get(self) -> None:
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            raise Refused(400, error="a GET has no body")
        self._was_read()
        engine = self.server.engine
        if self.path == "/health":
            self._answer(200 if engine.state == "ready" else 503, self._health(engine))
        elif self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [
                {"id": self.server.model, "object": "model"}]})  # fmt: skip
        else:
            raise Refused(404, error="there is /health, /v1/models, /clips and /v1/videos/sync")

    def _health(self, engine: Engine) -> dict[str, Any]:
        return {
            "status": engine.state,
            "model": self.server.model,
            "dtype": engine.config["dtype"],
            "device": engine.config["device"],
            "dump_dir": engine.config["dumps"],
            "dump_dir_writable": os.access(engine.config["dumps"], os.W_OK),
            "queued": engine.jobs.qsize(),
            "version": VERSION,
            "problem": engine.problem or None,
        }

    def _post(self) -> None:
        read = {"/clips": asked.from_clips, "/v1/videos/sync": asked.from_videos}.get(self.path)
        if read is None:
            raise Refused(404, error="there is /clips and /v1/videos/sync")
        body = self._body()
        wanted = read(fields_of(body, self.headers.get("Content-Type"), self.path != "/clips"))
        engine = self.server.engine
        if engine.maker is None:
            raise Refused(503, error=engine.problem or "the model is loading")
        if wanted.model is not None and not self.server.is_named(wanted.model):
            raise Refused(422, error="another model is served here", field="model",
                          nearest=self.server.model)  # fmt: skip
        limits = asked.Limits(**engine.config.get("limits", {}))
        request = asked.check(wanted.request, engine.maker.able, limits)
        job = Job(
            asked.Asked(request, wanted.negative_prompt), self.timeline,
            lambda: waits(self.connection), self.request_id,
        )  # fmt: skip
        engine.submit(job)
        job.done.wait()
        self._clip(job)

    def _body(self) -> bytes:
        """The whole body, of a length that was told once and is not too much."""
        lengths = self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or not lengths:
            raise Refused(411, error="Content-Length is needed, and no Transfer-Encoding")
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0].strip()):
            raise Refused(400, error="Content-Length is no one number")
        length = int(lengths[0])
        if length > MAX_BODY:
            raise Refused(413, error=f"the body is larger than {MAX_BODY} bytes")
        try:
            body = self.rfile.read(length)
        except OSError:
            raise Refused(408, error="the body did not come") from None
        if len(body) < length:
            raise Refused(400, error="the body is shorter than its Content-Length")
        self._was_read()
        return body

    def _clip(self, job: Job) -> None:
        if job.made is None:
            self._answer(job.status, {"error": job.error})
            return
        made, line = job.made, job.timeline
        line.enter("answer")
        total, queued = line.total(), line.spent.get("queue", 0.0)
        headers = {
            "X-Model": self.server.model,
            "X-Video-Sha256": made.sha256,
            "X-Inference-Time-S": f"{(total - queued) / 1e3:.6f}",
            "X-Server-Time-S": f"{total / 1e3:.6f}",
            "X-Stage-Durations": json.dumps({n: round(ms, 3) for n, ms in line.spent.items()}),
            "X-Step-Durations": json.dumps([round(value, 3) for value in made.steps_ms[:500]]),
        }
        if made.recipe_sha256 is not None:
            headers["X-Recipe-Sha256"] = made.recipe_sha256
        if made.peak_bytes is not None:  # not every platform says it
            headers["X-Peak-Memory-MB"] = f"{made.peak_bytes / 1e6:.1f}"
        self._send(200, "video/mp4", made.mp4, headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base refuses (no HTTP, an unknown method, too long headers), as JSON."""
        self.close_connection = self._unread = True
        short, _ = self.responses.get(code, ("refused", ""))
        self._answer(code, {"error": message or short})

    def _answer(
        self, status: int, told: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        told = {**told, "request_id": self.request_id} if status >= 500 else told
        self._send(status, "application/json", json.dumps(told).encode("ascii"), headers or {})

    def _send(self, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
        if self._answered:  # half an answer cannot be taken back
            self.close_connection = True
            return
        self._answered = True
        all_headers = {"Content-Type": kind, "Content-Length": str(len(body)),
                       "X-Request-Id": self.request_id, **headers}  # fmt: skip
        if self.close_connection:
            all_headers["Connection"] = "close"
        try:
            self.send_response(status)
            for name, value in all_headers.items():
                self.send_header(name, header_text(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client went away; its clip's dump stays

    def finish(self) -> None:
        """Close; a client that is still sending reads its answer before the connection ends."""
        with contextlib.suppress(OSError):
            super().finish()
            if self._unread:
                self.connection.shutdown(socket.SHUT_WR)
                self._drain()

    def _drain(self) -> None:
        left, until = 4 * MAX_BODY, time.monotonic() + DRAIN_SECONDS
        while left > 0 and (seconds := until - time.monotonic()) > 0:
            self.connection.settimeout(seconds)
            data = self.connection.recv(1 << 16)
            if not data:
                return
            left -= len(data)


class Server(ThreadingHTTPServer):
    """A thread for each connection, of which there are so many; they end with the process."""

    daemon_threads = True
    request_queue_size = 128
    engine: Engine

    def __init__(self, address: tuple[str, int], engine: Callable[[], Engine], queued: int,
                 model: Path) -> None:  # fmt: skip
        self._room = threading.BoundedSemaphore(queued + 1 + SPARE_CONNECTIONS)
        self._path, self.model = str(model), model.name
        super().__init__(address, Handler)
        self.engine = engine()

    def is_named(self, name: str) -> bool:
        """Whether a client means the model that is served: its path, or the last part of one."""
        return name.rstrip("/") == self._path or name.rstrip("/").rpartition("/")[2] == self.model

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, or say that there are too many."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        body = b'{"error": "too many connections"}'
        head = (f"HTTP/1.1 503 Service Unavailable\r\nContent-Length: {len(body)}\r\nConnection: "
                "close\r\nRetry-After: 5\r\nContent-Type: application/json\r\n\r\n")  # fmt: skip
        with contextlib.suppress(OSError):
            request.settimeout(1.0)
            request.sendall(head.encode("ascii") + body)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The base's; the place is free again when the connection ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is no news; anything else goes to the log."""
        if not isinstance(sys.exc_info()[1], OSError):
            LOG.exception("a connection failed")
