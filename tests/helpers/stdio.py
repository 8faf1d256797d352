"""A client that speaks the wire itself: every line that the server writes is looked at.

SDK clients forgive; this one does not.  A line on standard output that is no JSON-RPC
message, or a reply with an unknown id, fails the test.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = 60.0
PROTOCOL = "2025-11-25"


class Asked:
    """A request that was sent; calling it gives the whole reply frame."""

    def __init__(self, number: int, replies: queue.Queue[dict[str, Any]]) -> None:
        self.id = number
        self._replies = replies

    def __call__(self, seconds: float = SECONDS) -> dict[str, Any]:
        """The reply; queue.Empty when none came in time."""
        return self._replies.get(timeout=seconds)


class Wire:
    """A running ``ikit serve`` and the frames that went back and forth."""

    def __init__(
        self,
        home: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        command: list[str] | None = None,
    ) -> None:
        self.home = home
        environment = {**os.environ, "IKIT_HOME": str(home), **(env or {})}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed with the process
        self._said: str | None = None
        self.process = subprocess.Popen(
            [*(command or [sys.executable, "-m", "ikit_mcp.cli", "serve"]), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=cwd,
        )
        self.frames: list[dict[str, Any]] = []
        self.notifications: list[dict[str, Any]] = []
        self._replies: dict[Any, queue.Queue[dict[str, Any]]] = {}
        self._next = 0
        self._bad: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                frame = json.loads(line)
                assert frame["jsonrpc"] == "2.0"
            except (ValueError, KeyError, AssertionError, TypeError):
                self._bad.append(line)
                continue
            self.frames.append(frame)
            if "id" in frame and frame["id"] in self._replies:
                self._replies[frame["id"]].put(frame)
            elif "id" not in frame:
                self.notifications.append(frame)
            else:
                self._bad.append(line)

    def send(self, frame: Mapping[str, Any]) -> None:
        """Write one frame as it is."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(frame).encode("utf-8") + b"\n")
        self.process.stdin.flush()

    def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": dict(params or {})})

    def ask(self, method: str, params: Mapping[str, Any] | None = None) -> Asked:
        """Send a request; calling what comes back waits for the reply."""
        self._next += 1
        number = self._next
        waiting: queue.Queue[dict[str, Any]] = queue.Queue()
        self._replies[number] = waiting
        self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": dict(params or {})})

        return Asked(number, waiting)

    def initialize(self) -> dict[str, Any]:
        """The handshake; the server's reply."""
        hello = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": {"name": "wire", "version": "0"},
        }
        reply: dict[str, Any] = self.ask("initialize", hello)()["result"]
        self.notify("notifications/initialized")
        return reply

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The ``result`` of a tools/call."""
        reply = self.ask("tools/call", {"name": tool, "arguments": arguments})()
        result: dict[str, Any] = reply["result"]
        return result

    def structured(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured content of a tools/call that must succeed."""
        result = self.call(tool, **arguments)
        assert not result.get("isError"), result["content"]
        content: dict[str, Any] = result["structuredContent"]
        return content

    def stderr(self) -> str:
        """All of standard error so far."""
        if self._said is not None:
            return self._said
        return os.pread(self._errors.fileno(), 1 << 26, 0).decode("utf-8", "replace")

    def close(self, seconds: float = 20.0) -> int:
        """End the input; the exit status.  A line that was no reply fails here."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            status = self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(5)
            if self.process.stdout is not None:
                self.process.stdout.close()
            self._said = self.stderr()
            self._errors.close()
        assert not self._bad, f"not a JSON-RPC message: {self._bad[:3]!r}"
        return status
