"""Where profilers are, which version, and why one that is here cannot be used.

Programs are looked for on PATH, then where CUDA, Nsight and ROCm install theirs.  A profiler
that runs may still have nothing to look at, or may not be allowed to.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError

if TYPE_CHECKING:
    from ikit_ops.profilers.adapter import Profiler

PROBE_SECONDS = 20
FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-*/*/bin", "/opt/nvidia/nsight-*/bin")
_VERSION = re.compile(r"\d+(?:\.\d+)+")


def find_program(name: str) -> str | None:
    """A program on PATH, else where CUDA, Nsight and ROCm install theirs."""
    if found := shutil.which(name):
        return found
    folders = [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    for pattern in FOLDERS:
        folders += sorted(Path("/").glob(pattern[1:]), reverse=True)
    folders.append(Path("/opt/rocm/bin"))
    for folder in folders:
        if found := shutil.which(name, path=str(folder)):
            return found
    return None


def version_of(call: Call, argv: list[str]) -> str | None:
    """The version that a program prints, or None."""
    try:
        done = call.run(argv, timeout=PROBE_SECONDS, grace=1.0, env=call.clean_environment())
    except OpError:
        return None
    found = _VERSION.search(done.stdout) or _VERSION.search(done.stderr)
    return found[0] if found else None


def look(call: Call, profiler: Profiler, devices: Sequence[Device]) -> dict[str, Any]:
    """``{name, version, usable, why}`` of one profiler."""
    path = find_program(profiler.program) if profiler.program else None
    if profiler.program and path is None:
        return {"name": profiler.name, "version": None, "usable": False, "why": "not on PATH"}
    version = profiler.version(call, path)
    why = profiler.hindrance(version, devices)
    return {"name": profiler.name, "version": version, "usable": why is None, "why": why}


def look_all(call: Call, devices: Sequence[Device]) -> list[dict[str, Any]]:
    """All profilers, as ``inspect_environment`` shows them."""
    from ikit_ops.profilers import profilers

    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(lambda one: look(call, one, devices), profilers().values()))


def perf_paranoia() -> int | None:
    """The kernel's ``perf_event_paranoid``, or None where it does not say."""
    try:
        text = Path("/proc/sys/kernel/perf_event_paranoid").read_text(encoding="ascii")
        return int(text)
    except (OSError, ValueError):
        return None
