"""Runs where there is no supervisor: macOS, Windows, and the BSDs.

No relation between processes survives a double fork there, so what can be ended is the
process group and the descendants that psutil sees while their parents live.  A daemon that
hides from both stays.  Measuring needs Linux for that reason; here a run does its best, and
``Result.supervised`` says that it could do no more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from ikit_mcp.process.request import Ending, Request, start_failure

TICK = 0.05  # seconds between two looks at the child, the clock and the outputs


def run_unsupervised(request: Request, stdout: int, stderr: int) -> Ending:
    """Run the request with its outputs in the two open files; what was seen is ended on return."""
    run = _Run(request, stdout, stderr)
    try:
        run.watch()
    finally:
        ending = run.finish()
    return ending


class _Run:
    """One run without a supervisor."""

    def __init__(self, request: Request, stdout: int, stderr: int) -> None:
        self.request = request
        self.outputs = stdout, stderr
        self.reason = ""
        self.killed = False
        self.started = time.monotonic()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the program in a session (Windows: a group) of its own."""
        request = self.request
        try:
            return subprocess.Popen(  # noqa: S603 - starting what the caller names is the task
                list(request.argv),
                executable=request.path,
                stdin=subprocess.DEVNULL,
                stdout=self.outputs[0],
                stderr=self.outputs[1],
                cwd=request.cwd,
                env=request.env,
                pass_fds=request.pass_fds,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
        except OSError as error:
            stage = "cwd" if error.filename == request.cwd else "exec"
            raise start_failure(request, stage, error.errno or 0) from None

    def watch(self) -> None:
        """Wait until the program has ended, or must be killed."""
        if self.request.on_start is not None:
            self.request.on_start(self.process.pid)
        kill_at: float | None = None
        while self.process.poll() is None:
            now = time.monotonic()
            reason = self.due(now)
            if reason and not self.reason:
                self.reason = reason
                gentle = reason != "cap" and self.request.gentle is not None
                kill_at = now + self.request.grace if gentle else now
                if gentle:
                    self.ask_to_stop()
            if kill_at is not None and now >= kill_at:
                self.killed = True
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(TICK)

    def due(self, now: float) -> str:
        """Why the run has to be ended, or ""."""
        request = self.request
        if request.cancel is not None and request.cancel.is_set():
            return "cancel"
        if request.byte_cap is not None and any(
            os.fstat(fd).st_size > request.byte_cap for fd in self.outputs
        ):
            return "cap"
        return "timeout" if now - self.started >= request.timeout else ""

    def ask_to_stop(self) -> None:
        """SIGINT to the group, SIGTERM to a leader that has runs of its own."""
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                self.process.send_signal(signal.CTRL_BREAK_EVENT)
            elif self.request.gentle == "group":
                os.killpg(self.process.pid, signal.SIGINT)
            else:
                self.process.terminate()

    def finish(self) -> Ending:
        """Kill the group and every descendant that can still be seen."""
        leftovers = _kill_tree(self.process)
        code = self.process.wait()
        return Ending(
            returncode=code,
            reason=self.reason,
            killed=self.killed,
            seconds=time.monotonic() - self.started,
            leftovers=leftovers,
        )


def _kill_tree(process: subprocess.Popen[bytes]) -> tuple[str, ...]:
    """Kill the process, its group and its descendants; the others' ``name[pid]``."""
    import psutil  # costs 20 ms: not at the top

    try:
        below = psutil.Process(process.pid).children(recursive=True)
    except psutil.Error:
        below = []
    names = []
    for child in below:
        with contextlib.suppress(psutil.Error):
            names.append(f"{child.name()}[{child.pid}]")
            child.kill()
    if process.returncode is None:
        process.kill()
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    psutil.wait_procs(below, timeout=5)
    return tuple(names)
