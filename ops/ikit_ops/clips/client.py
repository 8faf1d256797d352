"""Talk to a clip server over plain HTTP, and never for longer than one is asked to.

A socket's timeout bounds a single read.  A server that sends a byte now and then, or one
``100 Continue`` after the other, never runs into it, and a thread that closes a file under a
reader waits for that reader.  So whoever waits holds a ``Line``: it knows the socket, and
another thread can shut that down at any moment, which ends the read at once.

What comes is a clip only when it is one: an mp4 by its content type and its first box, as long
as was told, and no larger than its pixels.  Everything else is the server's word for something
else, and is told as that.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import socket
import ssl
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import OpError

MAX_CLIP_BYTES = 4 << 30
MAX_TOLD = 64 << 10
BLOCK = 1 << 20
SPARE_BYTES = 16 << 20
PATHS = {"clips": "/clips", "videos": "/v1/videos/sync"}
KINDS = frozenset(
    {"video/mp4", "application/mp4", "application/octet-stream", "binary/octet-stream"}
)


class NoClip(Exception):
    """The server answered, and no clip came; the text says what did."""


@dataclass(frozen=True)
class Server:
    """Where the server is."""

    scheme: str
    host: str
    port: int
    base: str

    @classmethod
    def of(cls, url: str) -> Server:
        """The server of a URL; OpError when it is none, or carries a user's name or a query."""
        found = None
        with contextlib.suppress(ValueError):  # UnicodeError too: a label that is no label
            found = cls._parsed(url)
        if found is None:
            raise OpError(
                f"url {one_line(url, 80)!r} is no address of a clip server",
                "give http://HOST:PORT, as `ikit clips serve` prints it",
            )
        return found

    @classmethod
    def _parsed(cls, url: str) -> Server | None:
        if not all("!" <= letter <= "~" for letter in url):
            return None
        parts = urllib.parse.urlsplit(url)
        usual = {"http": 80, "https": 443}.get(parts.scheme)
        port = usual if parts.port is None else parts.port
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
        if not usual or not port or not parts.hostname or not plain or "@" in parts.netloc:
            return None
        parts.hostname.encode("idna")
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that was not opened yet; ``timeout`` is of every single read."""
        return _Connection(self, timeout, lambda opened: None)


class _Connection(http.client.HTTPConnection):
    """A connection whose sockets are handed out as they come to be."""

    def __init__(self, server: Server, timeout: float, opened: Any) -> None:
        super().__init__(server.host, server.port, timeout=timeout)
        self._context = ssl.create_default_context() if server.scheme == "https" else None
        self._opened = opened
        if self._context is not None:
            self.default_port = 443

    def connect(self) -> None:
        """Connect, and shake hands where that is asked for; either can be cut off."""
        self.sock = socket.create_connection((self.host, self.port), self.timeout)
        self._opened(self.sock)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            secured = self._context.wrap_socket(
                self.sock, server_hostname=self.host, do_handshake_on_connect=False
            )
            self.sock = secured
            self._opened(secured)
            secured.do_handshake()


class Line:
    """What one thread says to the server; another one may ``cut`` it at any moment."""

    def __init__(self, server: Server, ends: float) -> None:
        self.server = server
        self._ends = ends
        self._cut = threading.Event()
        self._socket: socket.socket | None = None

    @property
    def is_cut(self) -> bool:
        """Whether it was cut, or its time has passed."""
        return self._cut.is_set() or time.monotonic() >= self._ends

    def cut(self) -> None:
        """End what is under way; later requests fail at once."""
        self._cut.set()
        opened = self._socket
        if opened is not None:
            with contextlib.suppress(OSError):
                # Not the method of a TLS socket: it forgets its state under the reader's feet.
                socket.socket.shutdown(opened, socket.SHUT_RDWR)

    def wait(self, seconds: float) -> None:
        """Do nothing for a while; ConnectionAbortedError when it is cut."""
        if self._cut.wait(seconds):
            raise ConnectionAbortedError("cut")

    def _remember(self, opened: socket.socket) -> None:
        self._socket = opened  # before the question: one of the two threads sees the other
        if self._cut.is_set():
            raise ConnectionAbortedError("cut")

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: bytes | None = None, kind: str | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request over a connection of its own; its answer, the body not read."""
        left = max(0.1, self._ends - time.monotonic())
        connection = _Connection(self.server, left, self._remember)
        headers = {} if kind is None else {"Content-Type": kind}
        try:
            connection.request(method, self.server.base + path, body, headers)
            with connection.getresponse() as response:
                yield response
            if self._cut.is_set():  # what was read may have ended there, and not by itself
                raise ConnectionAbortedError("cut")
        finally:
            connection.close()


def read_told(response: http.client.HTTPResponse) -> bytes:
    """The first 64 KiB of a body that is no clip."""
    told = b""
    while len(told) < MAX_TOLD and (block := response.read1(MAX_TOLD - len(told))):
        told += block
        if response.length == 0:
            break  # older Pythons wait for more
    return told


def said(data: bytes) -> str:
    """What an answer that is no clip says, in one line."""
    text: Any = data.decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(data)
        text = told
        if isinstance(told, dict):
            text = told.get("error") or told.get("detail") or told
    return one_line(str(text), 160)


def nobody(server: Server, why: str) -> OpError:
    """The error that there is no server there."""
    return OpError(
        f"no clip server answers at {server.host}:{server.port}: {why}",
        "start one (`ikit clips serve`), and give its url",
    )


def health(line: Line) -> dict[str, Any]:
    """What ``/health`` says; empty where it says nothing that is JSON.  OpError: nobody there."""
    server = line.server
    try:
        with line.request("GET", "/health") as response:
            status, body = response.status, read_told(response)
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = "/health does not end" if line.is_cut else one_line(str(error), 120)
        raise nobody(server, why) from None
    told = None
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(body)
    told = told if isinstance(told, dict) else {}
    if status == 503:
        raise OpError(f"the server is not ready: {said(body)}", "wait until /health says ready")
    return told


def receive(response: http.client.HTTPResponse, target: Path, most: int) -> tuple[str, int]:
    """Write the mp4 of an answer to a new file: its sha256 and size; ``most`` bytes are taken.

    Raises:
        NoClip: the answer is no whole mp4; nothing is left of it.
        OpError: the file cannot be written.
    """
    kind = (response.getheader("Content-Type") or "").split(";")[0].strip().lower()
    if kind not in KINDS:
        told = said(read_told(response))
        raise NoClip(f"no mp4 but an answer of type {one_line(kind, 40) or 'unknown'}: {told}")
    expected = response.length
    if expected is not None and expected > most:
        raise NoClip(f"{expected} bytes are announced, and the clip's pixels are {most}")
    with _on_disk(target):
        file = target.open("xb", buffering=0)
    whole = False
    try:
        with file:
            digest, size = _write(response, file, target, most)
        if expected is not None and size != expected:
            raise NoClip(f"the answer ended after {size} of {expected} bytes")
        if expected is None and not response.chunked and not _ends_with_a_box(target, size):
            raise NoClip(f"the answer ended after {size} bytes, inside of a box of the mp4")
        whole = True
    finally:
        if not whole:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
    return digest, size


def _write(
    response: http.client.HTTPResponse, file: io.FileIO, target: Path, most: int
) -> tuple[str, int]:
    expected = response.length  # http.client counts it down, but not in every release
    digest, size, head = hashlib.sha256(), 0, b""
    while size != expected:
        block = response.read1(BLOCK if expected is None else min(BLOCK, expected - size))
        if not block:
            break
        size += len(block)
        if size > most:
            raise NoClip(f"the answer goes on after the {most} bytes of the clip's pixels")
        head += block[: 16 - len(head)]
        if len(head) >= 8 and head[4:8] != b"ftyp":
            raise NoClip(f"no mp4: it begins with {one_line(repr(head), 60)}")
        digest.update(block)
        with _on_disk(target):
            rest = memoryview(block)
            while rest:
                rest = rest[file.write(rest) :]
    if len(head) < 8:
        raise NoClip(f"an answer of {size} bytes, which is no mp4")
    return digest.hexdigest(), size


@contextlib.contextmanager
def _on_disk(target: Path) -> Iterator[None]:
    """The disk's failures are ours, and not the server's."""
    try:
        yield
    except OSError as error:
        raise OpError(
            f"{one_line(str(target))} cannot be written: {error.strerror}",
            "make room, or name another out",
        ) from None


def _ends_with_a_box(path: Path, size: int) -> bool:
    """Whether the boxes of an mp4 end where the file does: the only sign where no size is told."""
    at = 0
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(16)
            length = int.from_bytes(head[:4], "big")
            if length == 1:
                length = int.from_bytes(head[8:16], "big")
            elif length == 0:  # to the end of the file
                return len(head) >= 8
            if length < 8:
                return False
            at += length
    return at == size


def most_bytes(request: Mapping[str, Any]) -> int:
    """The most that an mp4 of the request may have: its pixels as they are, and room for sound."""
    pixels = int(request["width"]) * int(request["height"]) * int(request["num_frames"])
    return min(MAX_CLIP_BYTES, 3 * pixels + SPARE_BYTES)


def fields_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request in the words of ``/v1/videos``; what is None there is left to the server.

    ``noise_seed`` is said only where it is another than ``seed``: no other server knows it.
    """
    fields = {
        "prompt": request["prompt"],
        "size": f"{request['width']}x{request['height']}",
        "num_frames": request["num_frames"],
        "fps": request["fps"],
        "num_inference_steps": request["steps"],
        "guidance_scale": request["guidance_scale"],
        "seed": request["seed"],
    }
    if request["noise_seed"] != request["seed"]:
        fields["noise_seed"] = request["noise_seed"]
    if request.get("audio") is not None:
        fields["generate_sound"] = bool(request["audio"])
    return fields


def body_of(request: Mapping[str, Any], api: str) -> tuple[bytes, str]:
    """The body of a request and its content type: JSON (``clips``), or a form (``videos``).

    A form's values are UTF-8, as RFC 7578 has it where no charset is named.
    """
    if api == "clips":
        return json.dumps(request).encode("utf-8"), "application/json"
    mark = f"ikit{uuid.uuid4().hex}"
    lines = []
    for name, value in fields_of(request).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        lines += [f"--{mark}", f'Content-Disposition: form-data; name="{name}"', "", text]
    text = "\r\n".join([*lines, f"--{mark}--", ""])
    return text.encode("utf-8"), f"multipart/form-data; boundary={mark}"
