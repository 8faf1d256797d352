"""rocprofv3: AMD's tracer of kernels, copies, HIP calls and ranges.

It writes a SQLite file (rocpd) since ROCm 7, CSV files before; no format is asked for, so that
each version writes its own.  Its ``%argv%`` and ``%env%`` keys would put secrets into names of
files: the names are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ikit_mcp.call import Call, Device
from ikit_ops.profilers.adapter import REPORT, Job, Left, Profiler, has_device


class Rocprofv3(Profiler):
    """The adapter."""

    name = "rocprofv3"
    title = "rocprofv3"
    rank = 20
    program = "rocprofv3"
    inside = True

    def hindrance(self, version: str | None, devices: Sequence[Device]) -> str | None:
        """It needs an AMD GPU."""
        if version is not None and not has_device(devices, "rocm"):
            return "no AMD GPU is visible"
        return super().hindrance(version, devices)

    def suits(self, devices: Sequence[Device]) -> bool:
        """It is the choice where there is an AMD GPU."""
        return has_device(devices, "rocm")

    def command(self, job: Job) -> list[str]:
        """``rocprofv3`` with kernels, copies, HIP calls and markers."""
        return [
            job.program or "rocprofv3",
            "--kernel-trace", "--memory-copy-trace", "--hip-runtime-trace", "--marker-trace",
            "--output-directory", str(job.folder), "--output-file", REPORT,
            "--", *job.target,
        ]  # fmt: skip

    def collect(self, call: Call, job: Job) -> Left | None:
        """The database, or else the trace of kernels."""
        notes = []
        if job.window:
            notes.append("rocprofv3 has no capture window here: loading and warm-up are in it")
        for pattern, name, media_type in (
            (f"{REPORT}*.db", "rocpd", "application/vnd.sqlite3"),
            (f"{REPORT}*kernel_trace.csv", "rocprofv3-csv", "text/csv"),
        ):
            found = sorted(p for p in job.folder.rglob(pattern) if p.is_file())
            if found:
                if len(found) > 1:
                    notes.append(f"{len(found)} processes were traced: only the first is read")
                return Left(found[0], name, found[0], media_type, tuple(found[1:]), notes)
        return None


PROFILER = Rocprofv3()
