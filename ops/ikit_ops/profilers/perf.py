"""Linux perf: samples of where the CPU is.

It needs no driver and sees every language, but the CPU alone.  Without permission for hardware
counters it falls back to a software clock by itself.  Its file holds the command line and the
host's name; what is read of it is what ``perf script`` prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError, excerpt
from ikit_ops.profilers.adapter import Job, Left, Profiler, converted
from ikit_ops.profilers.find import find_program, perf_paranoia

SCRIPT = "perf-script"
FREQUENCY = 999  # not a round number: a sampler in step with a program's own timer sees a part


class Perf(Profiler):
    """The adapter."""

    name = "perf"
    title = "perf"
    rank = 40
    program = "perf"

    def hindrance(self, version: str | None, devices: Sequence[Device]) -> str | None:
        """The kernel may forbid it."""
        level = perf_paranoia()
        # Windows has no user ids, and no perf.
        if sys.platform != "linux" or version is None or level is None:
            return super().hindrance(version, devices)
        if level > 2 and os.geteuid() != 0:
            return f"kernel.perf_event_paranoid is {level}; it must be 2 or less"
        return super().hindrance(version, devices)

    def command(self, job: Job) -> list[str]:
        """``perf record`` with call chains."""
        return [
            job.program or "perf", "record", "--output", str(job.report.with_suffix(".data")),
            "--freq", str(FREQUENCY), "-g", "--", *job.target,
        ]  # fmt: skip

    def collect(self, call: Call, job: Job) -> Left | None:
        """The samples, printed."""
        report = job.report.with_suffix(".data")
        if not report.is_file() or not report.stat().st_size:
            return None
        path, name = self.convert(call, report, job.folder)
        notes = ["the report stores the command line and the host's name"]
        if job.window:
            notes.append("perf has no capture window: loading and warm-up are in the samples")
        return Left(path, name, report, "application/octet-stream", (path,), notes)

    def convert(self, call: Call, report: Path, folder: Path) -> tuple[Path, str]:
        """``perf script`` of a file."""
        program = find_program("perf")
        if program is None:
            raise OpError(
                f"{excerpt(report.name, 80)} is a perf file, and perf is not here",
                "where perf is: perf script -i perf.data > FILE; then import FILE",
            )
        made = folder / "export.txt"
        made.unlink(missing_ok=True)
        # --force: the file may belong to another user; perf would refuse it without a word.
        argv = [program, "script", "--input", str(report), "--force", "--no-inline",
                "--fields", "comm,pid,tid,time,period,event,ip,sym,dso"]  # fmt: skip
        return converted(call, argv, made, "the perf file", to_file=True), SCRIPT


PROFILER = Perf()
