"""Ending a target without its profiler, so that the profiler still writes its report.

When time runs out, profiler and target are interrupted together.  A target that ignores that
keeps its profiler waiting until the grace is over and both are killed, and then there is no
report.  So the target is killed alone while there is still time to write one.

A target is not told from its profiler by the tree of processes: perf is its parent, the agent
of Nsight Systems is neither above nor below it.  But the target's output goes to its log, and
the profiler's does not: whoever holds the log open as standard output or error is of the target,
and so is whatever is below it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

STREAMS = (1, 2)


def kill_holders(log: Path) -> int:
    """Kill the processes that write to the log, and all below them; how many they were.

    Nobody is killed where the system does not say who holds a file (it is no Linux).
    """
    if sys.platform != "linux":
        return 0
    import psutil  # costs 20 ms: not at the top

    try:
        wanted = log.stat()
    except OSError:
        return 0
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid != os.getpid() and _holds(process.pid, wanted):
            found[process.pid] = process
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                found |= {child.pid: child for child in process.children(recursive=True)}
    killed = 0
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil looks whether the pid is still the same process's
            killed += 1
    return killed


def _holds(pid: int, wanted: os.stat_result) -> bool:
    """Whether the file is the process's standard output or error."""
    for stream in STREAMS:
        try:
            held = os.stat(f"/proc/{pid}/fd/{stream}")  # noqa: PTH116 -- a pid of the system's list
        except OSError:
            continue
        if os.path.samestat(held, wanted):
            return True
    return False
