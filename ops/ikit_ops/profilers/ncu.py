"""Nsight Compute: a kernel's counters, and how near it comes to the device's limits.

It runs each kernel again and again until all counters are read, so a whole program would take
days: the number of kernels is bounded.  Its reports hold the profiler's command line.  They are
read by the program itself, or by NVIDIA's package ``ncu-report`` where only that is here.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError, excerpt
from ikit_ops.profilers.adapter import Job, Left, Profiler, converted, has_device
from ikit_ops.profilers.find import find_program

CSV = "ncu-csv"
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy")
READER = Path(__file__).parent / "workers" / "ncu_report_reader.py"


class Ncu(Profiler):
    """The adapter."""

    name = "ncu"
    title = "Nsight Compute"
    rank = 60
    program = "ncu"

    def hindrance(self, version: str | None, devices: Sequence[Device]) -> str | None:
        """It needs an NVIDIA GPU; without one it still reads reports."""
        if version is not None and not has_device(devices, "cuda"):
            return "no NVIDIA GPU is visible; it can still read reports"
        return super().hindrance(version, devices)

    def suits(self, devices: Sequence[Device]) -> bool:
        """Never chosen for somebody: it changes what it measures."""
        return False

    def command(self, job: Job) -> list[str]:
        """``ncu`` with the few sections that the table shows."""
        words = [job.program or "ncu", "--export", str(job.report), "--force-overwrite",
                 "--target-processes", "all", "--graph-profiling", "node",
                 "--launch-count", str(job.launches)]  # fmt: skip
        for section in SECTIONS:
            words += ["--section", section]
        if job.window:
            words += ["--profile-from-start", "off"]
        return [*words, *job.target]

    def collect(self, call: Call, job: Job) -> Left | None:
        """The report, and its table."""
        report = job.report.with_suffix(".ncu-rep")
        if not report.is_file():
            return None
        path, name = self.convert(call, report, job.folder)
        notes = [f"at most {job.launches} kernel launches were profiled"]
        return Left(path, name, report, "application/octet-stream", (path,), notes)

    def convert(self, call: Call, report: Path, folder: Path) -> tuple[Path, str]:
        """The wide table as CSV, by the program or the package."""
        made = folder / "export.csv"
        made.unlink(missing_ok=True)
        what = "the Nsight Compute report"
        if program := find_program("ncu"):
            argv = [program, "--import", str(report), "--csv", "--page", "raw",
                    "--print-units", "base"]  # fmt: skip
            return converted(call, argv, made, what, to_file=True), CSV
        if (package := reader_folder()) is not None:
            argv = [sys.executable, "-I", str(READER), str(report), str(package)]
            return converted(call, argv, made, what, to_file=True), CSV
        raise OpError(
            f"{excerpt(report.name, 60)} is an Nsight Compute report; neither ncu nor ncu-report "
            "is here",
            "install the package ncu-report in this Python; or, where ncu is: ncu --import REPORT "
            "--csv --page raw --print-units base > FILE, and import FILE",
        )


def reader_folder() -> Path | None:
    """The folder that NVIDIA's package ``ncu_report`` lies in; None where it is not installed.

    The reader's process is isolated: it looks neither at PYTHONPATH nor at the user's packages,
    so the folder is told to it.  A module in the working folder is not taken for the package.
    """
    try:
        found = importlib.util.find_spec("ncu_report")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).absolute()
    folder = file.parent.parent if found.submodule_search_locations else file.parent
    return None if folder == Path.cwd() else folder


PROFILER = Ncu()
