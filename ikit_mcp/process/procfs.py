"""What Linux tells of processes, read without anything that is dear to import.

Each process is a folder in ``/proc``: ``stat`` holds its name, state, parent and start time,
``task/TID/children`` the children of each of its threads, ``environ`` what it was started
with.  A pid alone names nobody, because the kernel reuses it, but pid and start time together
do; and a *pidfd* holds on to the very process while that is checked and a signal is sent.

This module and ``supervisor.py`` also run without the package, in a process that has to start
fast; ``platform.py`` gives the functions on to the rest of the program.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # what type checkers know by name; ``typing`` itself is dear to import
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # the C part alone: ``signal`` makes enums at import, for 5 ms of CPU

if sys.platform != "linux":
    raise ImportError("only Linux has these files: see ikit_mcp.process.platform")

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call ``prctl(option, value)``; OSError says what the kernel refused."""
    # The C part of ctypes alone: the rest costs as much as half an interpreter's start.
    import _ctypes as c

    long: Any = type("c_long", (c._SimpleCData,), {"_type_": "l"})
    result: Any = type("c_int", (c._SimpleCData,), {"_type_": "i"})
    flags = c.FUNCFLAG_CDECL | c.FUNCFLAG_USE_ERRNO
    function: Any = type("Function", (c.CFuncPtr,), {"_flags_": flags, "_restype_": result})
    whole_program: Any = None
    call = function(c.dlsym(c.dlopen(whole_program, os.RTLD_NOW), "prctl"))
    if call(long(option), long(value), long(0), long(0), long(0)) != 0:
        raise OSError(c.get_errno(), "prctl")


def read_file(path: str, limit: int = 65536) -> bytes:
    """The first ``limit`` bytes of a /proc file, or b"" where the process is gone or not ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, limit)
    except OSError:
        return b""
    finally:
        os.close(fd)


class Stat:
    """What ``/proc/PID/stat`` says: name, state letter, parent pid, start time (clock ticks)."""

    __slots__ = ("name", "pid", "ppid", "start", "state")

    def __init__(self, pid: int, name: bytes, state: bytes, ppid: int, start: int) -> None:
        self.pid, self.name, self.state, self.ppid, self.start = pid, name, state, ppid, start

    @property
    def identity(self) -> tuple[int, int]:
        """Pid and start time: what no later process of the same pid shares."""
        return self.pid, self.start


def stat_of(pid: int) -> Stat | None:
    """The process's Stat; None when there is no such process."""
    data = read_file(f"/proc/{pid}/stat", 4096)
    close = data.rfind(b")")  # a process may put anything into its own name, brackets too
    if close < 0:
        return None
    fields = data[close + 2 :].split(None, 20)
    return Stat(pid, data[data.find(b"(") + 1 : close], fields[0], int(fields[1]), int(fields[19]))


def all_pids() -> list[int]:
    """The pids that /proc lists."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def process_table() -> dict[int, list[Stat]]:
    """Every process by its parent's pid: one pass over /proc, about 10 us a process."""
    table: dict[int, list[Stat]] = {}
    for pid in all_pids():
        found = stat_of(pid)
        if found is not None:
            table.setdefault(found.ppid, []).append(found)
    return table


def child_pids(pid: int) -> list[int]:
    """The pids of the direct children, of all threads, zombies too.

    The kernel promises a whole list only while the parent does not run: who needs everything
    stops the parent first and looks again.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    lists = (read_file(f"/proc/{pid}/task/{tid}/children", 1 << 20) for tid in threads)
    return [int(child) for child in b" ".join(lists).split()]


def children_of(pid: int) -> list[Stat]:
    """The direct children; cheap on a machine with many other processes."""
    stats = (stat_of(child) for child in child_pids(pid))
    # A pid that was reused, or went to another parent meanwhile, is not this process's child.
    return [stat for stat in stats if stat is not None and stat.ppid == pid]


def has_children_files() -> bool:
    """Whether the kernel was built with /proc/PID/task/TID/children."""
    return os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK)


def descendants(root: int, whole_table: bool = False, visit: Any = None) -> list[Stat]:
    """All processes below ``root``, nearest first, zombies left out.

    ``whole_table`` walks /proc once instead of asking each process for its children.
    ``visit(process)`` is called as soon as one is found, before its own children are looked
    for: a visitor that stops it makes that list a whole one.
    """
    table = process_table() if whole_table else {}
    found: list[Stat] = []
    seen = {root}
    queue = [root]
    for pid in queue:
        for child in table.get(pid, []) if whole_table else children_of(pid):
            if child.pid not in seen:
                seen.add(child.pid)
                queue.append(child.pid)
                if child.state not in (b"Z", b"X"):
                    found.append(child)
                    if visit is not None:
                        visit(child)
    return found


def send_signal(process: Stat, number: int) -> bool:
    """Signal exactly this process, never a later one of the same pid; False when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3, or a sandbox without it
        fd = -1
    try:
        now = stat_of(process.pid)
        if now is None or now.start != process.start:
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def newest_pid() -> int:
    """The pid that the kernel gave out last (threads too); 0 where it does not say."""
    fields = read_file("/proc/loadavg", 256).split()
    return int(fields[-1]) if fields and fields[-1].isdigit() else 0
