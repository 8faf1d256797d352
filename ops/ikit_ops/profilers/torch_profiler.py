"""torch.profiler: kernels and operators of a Python program, seen from inside.

It needs no permission and no program, but has to run in the target's own interpreter: the
target is started through a small launcher, which opens the profiler, runs the script, and
writes the trace.  Child processes (the workers of vLLM, say) are not seen.  The trace holds the
host's name, and neither environment nor command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path, PurePath

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError
from ikit_ops.profilers.adapter import Job, Left, Profiler

TRACE = "torch-trace"
LAUNCHER = Path(__file__).parent / "workers" / "torch_launcher.py"
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:\.exe)?")
# Options of an interpreter that stand before the script, and take no value.
_FLAGS = re.compile(r"-[bBdEiIOPqsSuvx]+")


class TorchProfiler(Profiler):
    """The adapter."""

    name = "torch"
    title = "torch profiler"
    rank = 30
    inside = True

    def version(self, call: Call, path: str | None) -> str | None:
        """The version of torch in this Python."""
        try:
            return metadata.version("torch")
        except metadata.PackageNotFoundError:
            return None

    def hindrance(self, version: str | None, devices: Sequence[Device]) -> str | None:
        """It lives in an engine's own Python."""
        return (
            "torch is not in this Python; it is used in an engine's own"
            if version is None
            else None
        )

    def suits(self, devices: Sequence[Device]) -> bool:
        """Never chosen for somebody: most commands are no Python script."""
        return False

    def command(self, job: Job) -> list[str]:
        """The interpreter, its flags, the launcher, then the script and its arguments."""
        python, *words = job.command
        if not _PYTHON.fullmatch(PurePath(python).name):
            raise OpError(
                "the torch profiler runs inside Python, and the command is not a Python script",
                "give a command like: python script.py; or another profiler",
            )
        flags = []
        while words and _FLAGS.fullmatch(words[0]):
            flags.append(words.pop(0))
        if not words or (words[0].startswith("-") and words[0] != "-m"):
            raise OpError(
                "the torch profiler needs a script or -m MODULE right after the interpreter",
                "write the program into a file",
            )
        trace = str(job.report.with_suffix(".json"))
        mode = "window" if job.window else "all"
        inner = Job(
            (python, *flags, str(LAUNCHER), trace, mode, *words), job.folder, None, None
        )  # fmt: skip
        return inner.target

    def collect(self, call: Call, job: Job) -> Left | None:
        """The trace."""
        report = job.report.with_suffix(".json")
        if not report.is_file():
            return None
        notes = ["work of the target's child processes is not seen by the torch profiler"]
        return Left(report, TRACE, report, "application/json", (), notes)


PROFILER = TorchProfiler()
