"""The caller's side of a supervised run: start the supervisor, listen, and take its place.

The two processes share one socket.  The caller sends one letter when it wants an end, the
supervisor sends the tree, whenever it changes, and at last what the end was.  The socket is
also the *lifeline*: whichever of the two dies, the kernel closes its end, and the other knows.

If it is the supervisor that died, the kernel has killed the leader already, and everything
else is ended here, from the last tree that was reported and by the run's mark.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ikit_mcp.process import platform
from ikit_mcp.process.request import MARKER_VARIABLE, Ending, Request, start_failure
from ikit_mcp.registry import OpError

if sys.platform != "linux":
    raise ImportError("the supervisor needs Linux: ikit_mcp.process.portable does without")

CANCEL_POLL = 0.1  # seconds between two looks at the caller's event
LOST_PATIENCE = 30.0  # seconds past every deadline until a silent supervisor counts as lost
MESSAGE_BYTES = 1 << 18  # no message is larger

_lingering: list[subprocess.Popen[bytes]] = []
"""Supervisors that stay with an unkillable process; they are collected by later runs."""


def supervisor_command() -> list[str]:
    """How to start one: isolated, without site, from the compiled file where there is one."""
    source = Path(__file__).with_name("supervisor.py")
    cached = source.parent / "__pycache__" / f"supervisor.{sys.implementation.cache_tag}.pyc"
    try:
        fresh = cached.stat().st_mtime >= source.stat().st_mtime
    except OSError:
        fresh = False
    return [sys.executable, "-I", "-S", str(cached if fresh else source)]


def supervisor_environment() -> dict[str, str]:
    """What the supervisor itself gets: what its interpreter may need, and the outer runs' marks.

    By the marks whoever ends an outer run finds this supervisor, and all that is below it.
    """
    names = ("LD_LIBRARY_PATH", MARKER_VARIABLE)
    return {name: os.environ[name] for name in names if name in os.environ}


def run_supervised(request: Request, stdout: int, stderr: int) -> Ending:
    """Run the request with its outputs in the two open files; nothing is left on return."""
    _lingering[:] = [process for process in _lingering if process.poll() is None]
    return _Run(request, stdout, stderr).run()


class _Run:
    """One run, from the caller's side."""

    def __init__(self, request: Request, stdout: int, stderr: int) -> None:
        self.request = request
        self.outputs = stdout, stderr
        self.tree: list[tuple[int, int]] = []
        self.begun = False
        self.asked = False
        self.survivors = False
        self.silent = False
        self.started = time.monotonic()
        self.give_up = self.started + request.timeout + request.grace + LOST_PATIENCE

    def run(self) -> Ending:
        """Start, wait and clean up, whatever exception passes through."""
        self.start()
        try:
            end = self.wait()
        except BaseException:
            # Ctrl-C: end the run as a cancel would.  A second one breaks this wait too; then
            # the lifeline closes, and the supervisor kills the tree at once.
            self.ask()
            self.wait()
            raise
        finally:
            self.control.close()
            if self.silent:
                self.process.kill()  # stopped by somebody: it would not even see the lifeline
            if self.survivors:
                _lingering.append(self.process)
            else:
                self.process.wait()
        return self.ending(end)

    def start(self) -> None:
        """Start the supervisor, with the spec on its standard input."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = {theirs.fileno(), *self.outputs, *self.request.hold_fds, *self.request.pass_fds}
        spec = os.memfd_create("ikit-spec")
        try:
            with open(spec, "wb", closefd=False) as file:
                file.write(marshal.dumps(self.spec(theirs.fileno())))
            os.lseek(spec, 0, os.SEEK_SET)
            self.process = subprocess.Popen(  # noqa: S603 - our own file, by our own interpreter
                supervisor_command(),
                stdin=spec,
                stdout=subprocess.DEVNULL,
                env=supervisor_environment(),
                pass_fds=fds,
                start_new_session=True,  # a terminal's Ctrl-C is for the caller
            )
        except OSError as error:
            self.control.close()
            raise OpError(
                f"cannot start a supervisor: {error}", "check the descriptors and free memory"
            ) from error
        finally:
            os.close(spec)
            theirs.close()

    def spec(self, control: int) -> dict[str, Any]:
        """The request in the words of the supervisor: bytes, numbers and descriptors."""
        request = self.request
        return {
            "control": control,
            "parent": os.getpid(),
            "stdout": self.outputs[0],
            "stderr": self.outputs[1],
            "hold": list(request.hold_fds),
            "pass": list(request.pass_fds),
            "argv": [os.fsencode(word) for word in request.argv],
            "path": os.fsencode(request.path),
            "env": {os.fsencode(k): os.fsencode(v) for k, v in request.env.items()},
            "cwd": None if request.cwd is None else os.fsencode(request.cwd),
            "timeout": float(request.timeout),
            "grace": float(request.grace),
            "gentle": request.gentle,
            "byte_cap": request.byte_cap,
            "memory_limit": request.memory_limit,
            "nested": request.nested,
        }

    def wait(self) -> Any:
        """Listen until the end is told; None when the supervisor is gone without a word."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        while True:
            if poller.poll(self.patience()):
                message = self.receive()
                if message is None:
                    return None
                if message[0] == "end":
                    self.survivors = bool(message[1]["survivors"])
                    return message[1]
                if message[0] == "tree":
                    self.tree = message[1]
                elif message[0] == "begun":
                    self.begin(message[1])
            elif time.monotonic() > self.give_up:
                self.silent = True
                return None
            if self.request.cancel is not None and self.request.cancel.is_set():
                self.ask()

    def patience(self) -> int:
        """Milliseconds to listen before looking at the cancel event and the clock."""
        if self.request.cancel is not None and not self.asked:
            return int(CANCEL_POLL * 1000)
        left = self.give_up - time.monotonic()
        return 60_000 if math.isinf(left) else min(60_000, max(0, int(left * 1000) + 1))

    def receive(self) -> tuple[str, Any] | None:
        """The next message; None when the other end is closed."""
        data = b""
        for _ in range(2):  # a letter it never read resets the socket once, before its last words
            with contextlib.suppress(ConnectionError):
                data = self.control.recv(MESSAGE_BYTES)
                break
        message: tuple[str, Any] | None = marshal.loads(data) if data else None  # noqa: S302 - our supervisor's words
        return message

    def begin(self, leader: int) -> None:
        """The program runs."""
        self.begun = True
        if self.request.on_start is not None:
            self.request.on_start(leader)

    def ask(self) -> None:
        """Ask the supervisor for an end, once; one that is gone needs no asking."""
        if not self.asked:
            self.asked = True
            latest = time.monotonic() + self.request.grace + LOST_PATIENCE
            self.give_up = min(self.give_up, latest)
            with contextlib.suppress(OSError):
                self.control.send(b"c")

    def ending(self, end: dict[str, Any] | None) -> Ending:
        """What came of it; ends the tree first if the supervisor could not."""
        if end is None:
            return self.take_over()
        if end["failure"] is not None:
            raise start_failure(self.request, *end["failure"])
        return Ending(
            returncode=None if end["status"] is None else os.waitstatus_to_exitcode(end["status"]),
            reason=end["reason"],
            killed=end["killed"],
            seconds=end["seconds"],
            max_rss_bytes=end["max_rss_bytes"] or None,
            leftovers=_names(end["leftovers"]),
            survivors=_names(end["survivors"]),
        )

    def take_over(self) -> Ending:
        """Do the dead supervisor's work."""
        killed, survivors = platform.end_orphans(self.tree, self.request.marker)
        if not self.begun:
            raise OpError(
                f"the supervisor of {self.request.argv[0]!r} ended before the program ran",
                "standard error says why; try again",
            )
        cancelled = self.request.cancel is not None and self.request.cancel.is_set()
        return Ending(
            reason="cancel" if cancelled else "",
            lost=True,
            seconds=time.monotonic() - self.started,
            leftovers=tuple(killed),
            survivors=tuple(survivors),
        )


def _names(processes: list[tuple[int, bytes]]) -> tuple[str, ...]:
    return tuple(f"{name.decode(errors='replace')}[{pid}]" for pid, name in processes)
