"""The interface of a profiler: is it here, its command line, how it ends, what it leaves.

All profilers store more than is asked for: the environment they were started with, command
lines, and what the target prints (Nsight Systems keeps that also when told not to show it).
So they all get the same treatment: the profiler itself gets a clean environment; the target's
output is sent to a file by the target, behind the profiler's back; and names of output files
are fixed, because some profilers put variables and arguments into names.

To stop one, its process group is interrupted and it gets time to write its report: a profiler
that is killed leaves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError

REPORT = "report"
TARGET_LOG = "target.log"
PROFILER_LOG = "profiler.log"
STARTED = "started"
# The log is opened to append: whoever watches its size may cut it while it is written.  The mark
# tells a profiler that never got to start its target from a target that failed.
REDIRECT = 'log=$1; : >"${log%/*}/started"; shift; exec "$@" >>"$log" 2>&1 </dev/null'


@dataclass(frozen=True)
class Job:
    """What is to be profiled.

    ``window``: the target itself opens and closes the capture (a worker, after warm-up).
    ``launches`` bounds what a profiler that replays kernels looks at.  ``room`` are the words
    before the profiler's own (``Profiler.room``).
    """

    command: tuple[str, ...]
    folder: Path
    program: str | None
    version: str | None
    devices: Sequence[Device] = ()
    window: bool = False
    launches: int = 2_000
    room: tuple[str, ...] = ()

    @property
    def report(self) -> Path:
        """Where the report goes, without suffix."""
        return self.folder / REPORT

    @property
    def target(self) -> list[str]:
        """The command, its output redirected inside the target."""
        return ["/bin/sh", "-c", REDIRECT, "sh", str(self.folder / TARGET_LOG), *self.command]


@dataclass(frozen=True)
class Left:
    """What a profiler left: the file to read and its format, and the report to keep.

    ``searched`` are further files that must hold no secret before anything is kept.
    """

    path: Path
    format: str
    report: Path
    media_type: str
    searched: tuple[Path, ...] = ()
    notes: list[str] = field(default_factory=list)


class Profiler:
    """A profiler.  Subclasses fill in what differs; one instance a module, ``PROFILER``."""

    name = ""
    title = ""
    rank = 50
    program = ""
    """The executable; empty for one that runs inside the target's Python."""
    version_words: tuple[str, ...] = ("--version",)
    inside = False
    """Whether it lives in the target's own process, and dies with it."""

    def version(self, call: Call, path: str | None) -> str | None:
        """The version that the program prints, or None when it does not run."""
        from ikit_ops.profilers.find import version_of  # imports this module

        return None if path is None else version_of(call, [path, *self.version_words])

    def hindrance(self, version: str | None, devices: Sequence[Device]) -> str | None:
        """Why it cannot be used here, or None."""
        return "it does not run here" if version is None else None

    def suits(self, devices: Sequence[Device]) -> bool:
        """Whether ``auto`` should take it: it sees the device that does the work."""
        return True

    def room(self, call: Call) -> tuple[str, ...]:
        """Words before the command line that keep other processes out of its sight."""
        return ()

    def command(self, job: Job) -> list[str]:
        """The command line; OpError for a target that it cannot profile."""
        raise NotImplementedError

    def collect(self, call: Call, job: Job) -> Left | None:
        """What it left, converted where that needs its own tool; None when there is none."""
        raise NotImplementedError

    def convert(self, call: Call, report: Path, folder: Path) -> tuple[Path, str]:
        """``(file, format)`` of a report from elsewhere; OpError where it cannot be read here."""
        raise OpError(f"{self.title} reports are not converted here", "give its exported data")


def has_device(devices: Sequence[Device], kind: str) -> bool:
    """Whether a device of that kind (``cuda``, ``rocm``) is there."""
    return any(device.id.startswith(kind) for device in devices)


def converted(call: Call, argv: list[str], made: Path, what: str, *, to_file: bool = False) -> Path:
    """Run a converter; the file it made.  OpError with its last line when there is none.

    ``to_file``: what it prints is the file.
    """
    log = made.with_suffix(made.suffix + ".log")
    done = call.run(
        argv,
        timeout=CONVERT_SECONDS,
        grace=2.0,
        env=call.clean_environment(private_home=made.parent),
        cwd=made.parent,
        stdout_path=made if to_file else log,
        stderr_path=log,
        byte_cap=MAX_CONVERTED if to_file else MAX_LOG,
    )
    if done.ok and made.is_file() and made.stat().st_size:
        return made
    from ikit_mcp.call import one_line

    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    reason = one_line(said[-1], 160) if said else f"status {done.returncode}"
    if done.ok and not said:
        reason = "nothing was recorded"
    raise OpError(f"{what} could not be converted: {reason}", "export it where it was made")


CONVERT_SECONDS = 1_800.0
MAX_LOG = 16 << 20
MAX_CONVERTED = 8 << 30
Facts = dict[str, Any]
