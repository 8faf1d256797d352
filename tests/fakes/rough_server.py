"""Servers that answer one connection after the other with whatever bytes a test wants.

What a client can be sent is not bound by HTTP: a byte now and then, half an answer, nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Answering = Callable[[socket.socket, bytes], None]
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
FTYP = b"\0\0\0\x18ftypisom\0\0\2\0isommp42"


def reply(body: bytes, *headers: str, status: str = "200 OK", length: int | None = -1) -> bytes:
    """An answer; ``length`` None leaves Content-Length out, other numbers than -1 are a lie."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == -1 else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def request_of(connection: socket.socket) -> bytes:
    """A whole request."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (block := connection.recv(65536)):
            return data
        data += block
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n")
                   if line.lower().startswith(b"content-length")), 0)  # fmt: skip
    while len(body) < length and (block := connection.recv(65536)):
        body += block
    return head + b"\r\n\r\n" + body


class Drip:
    """Sends a byte every 20 ms until the client has gone, and says that it has begun."""

    def __init__(self, first: bytes, again: bytes = b" ") -> None:
        self.first, self.again = first, again
        self.begun = threading.Event()
        self.gone = threading.Event()

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(self.first)
            self.begun.set()
            while not self.gone.wait(0.02):
                connection.sendall(self.again)
        self.gone.set()


@contextlib.contextmanager
def answering(answer: Answering, health: Answering | None = None) -> Iterator[str]:
    """A running server: its URL.  GET /health is answered well, unless ``health`` says how."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            request = request_of(connection)
            if not request.startswith(b"GET /health"):
                answer(connection, request)
            elif health is not None:
                health(connection, request)
            else:
                connection.sendall(HEALTHY)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                if ended.is_set():
                    connection.close()
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        ended.set()
        with contextlib.suppress(OSError):
            socket.create_connection(listener.getsockname(), 5).close()
        thread.join()
        listener.close()


def sending(data: bytes) -> Answering:
    """The same bytes for everybody."""
    return lambda connection, request: connection.sendall(data)
