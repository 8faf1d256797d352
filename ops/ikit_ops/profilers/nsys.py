"""Nsight Systems: a timeline of kernels, copies, API calls and ranges.

It stores the environment of *itself*, also when told not to pass it on, the target's command
line, and what the target prints; the host's name and the working folder; and the names *and
environments* of all processes of the machine, which no option prevents (``isolation``).

By default it traces a CUDA graph as one block, so that a decode step that is replayed as a
graph shows no kernel at all; ``--cuda-graph-trace node`` shows each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError, excerpt
from ikit_ops.profilers.adapter import Job, Left, Profiler, converted, has_device
from ikit_ops.profilers.find import find_program
from ikit_ops.profilers.isolation import namespace

SQLITE = "nsys-sqlite"
STORES = "the report stores the host's name and the working folder"
EXPOSED = (
    "the report stores names and environments of other processes of this user (no namespace could "
    "be made): it was searched for the secrets that are known here, not for theirs"
)


class Nsys(Profiler):
    """The adapter."""

    name = "nsys"
    title = "Nsight Systems"
    rank = 10
    program = "nsys"

    def suits(self, devices: Sequence[Device]) -> bool:
        """It is the choice where there is an NVIDIA GPU."""
        return has_device(devices, "cuda")

    def room(self, call: Call) -> tuple[str, ...]:
        """A PID namespace: it would store the environments of all processes that it sees."""
        return namespace(call)

    def command(self, job: Job) -> list[str]:
        """``nsys profile`` with fixed names, no sampling, and graphs node by node."""
        words = [
            *job.room,
            job.program or "nsys", "profile",
            "--output", str(job.report),
            "--force-overwrite", "true",
            "--trace", "cuda,nvtx,osrt",
            "--cuda-graph-trace", "node",
            "--sample", "none",
            "--cpuctxsw", "none",
            "--stats", "false",
            "--show-output", "false",
        ]  # fmt: skip
        if job.window:
            words += ["--capture-range", "cudaProfilerApi", "--capture-range-end", "stop"]
        return [*words, *job.target]

    def collect(self, call: Call, job: Job) -> Left | None:
        """The report, and its export."""
        report = next(
            (path for suffix in (".nsys-rep", ".qdrep")
             if (path := job.report.with_suffix(suffix)).is_file()), None,
        )  # fmt: skip
        if report is None:
            return None
        path, name = self.convert(call, report, job.folder)
        notes = [STORES] if job.room else [STORES, EXPOSED]
        return Left(path, name, report, "application/octet-stream", (path,), notes)

    def convert(self, call: Call, report: Path, folder: Path) -> tuple[Path, str]:
        """``nsys export`` into a fresh SQLite file: one that lies there may be of another run."""
        program = find_program("nsys")
        if program is None:
            raise OpError(
                f"{excerpt(report.name, 80)} is an Nsight Systems report, and nsys is not here",
                "where nsys is: nsys export --type sqlite --force-overwrite true REPORT; then "
                "import the .sqlite file",
            )
        made = folder / "export.sqlite"
        made.unlink(missing_ok=True)
        argv = [program, "export", "--type", "sqlite", "--force-overwrite", "true",
                "--output", str(made), str(report)]  # fmt: skip
        return converted(call, argv, made, "the Nsight Systems report"), SQLITE


PROFILER = Nsys()
