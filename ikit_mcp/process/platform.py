"""All that is Linux's own, with what the other systems can offer in its place.

Linux shows its processes as files: ``/proc/PID/stat`` holds parent and start time,
``/proc/PID/environ`` the environment a process was started with, ``/sys`` the caches and
memory nodes of the machine.  A pid alone names nobody -- the kernel reuses it -- but pid and
start time together do, and a *pidfd* holds on to the very process while it is checked.

``procfs.py`` reads ``/proc``, because the supervisor must run alone, without this package; its
functions are given on here, so that the rest of the program need not know.

Elsewhere psutil answers what it can, and what nobody can answer is None.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

if sys.platform == "linux":
    from ikit_mcp.process.procfs import (
        Stat,
        all_pids,
        descendants,
        has_children_files,
        read_file,
        send_signal,
        stat_of,
    )

FREEZE_PASSES = 64  # looks at a tree that keeps growing before what is known is killed

SUPERVISED = sys.platform == "linux"
"""Whether runs have a supervisor here, which can prove that nothing is left."""

ENVIRON_LIMIT = 8 << 20  # bytes of one /proc/PID/environ: more than the kernel allows to exec
SYSTEM = Path("/sys/devices/system")
CPU_FILE = Path("/proc/cpuinfo")
MACHINE_ID_FILES = ("/etc/machine-id", "/var/lib/dbus/machine-id")


@dataclass(frozen=True)
class Cpu:
    """The processor of this machine; what could not be seen is None.

    ``cores`` are physical, ``threads`` logical, ``usable_threads`` those that this process may
    run on; ``memory_bytes`` is the machine's, whatever limits a container sets.
    """

    model: str | None
    cores: int | None
    threads: int | None
    usable_threads: int | None
    memory_bytes: int
    numa_nodes: int | None


def start_time(pid: int) -> int | None:
    """When the process started: an opaque number that with the pid names it; None when gone."""
    if sys.platform == "linux":
        found = stat_of(pid)
        return None if found is None or found.state == b"Z" else found.start
    import psutil  # costs 20 ms: not at the top

    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return None


if sys.platform == "linux":

    def marked(marker: str) -> list[int]:
        """The pids, other than ours, whose environment at their start held ``marker``.

        Only processes of this user can be read (all, as root).
        """
        needle = marker.encode("ascii")
        us = os.getpid()
        return [
            pid
            for pid in all_pids()
            if pid != us and needle in read_file(f"/proc/{pid}/environ", ENVIRON_LIMIT)
        ]

    def end_orphans(
        known: Iterable[tuple[int, int]], marker: str, patience: float = 5.0
    ) -> tuple[list[str], list[str]]:
        """End what a killed supervisor left behind; ``(killed, survivors)`` as ``name[pid]``.

        That is: the processes of its last report (``known``: pid and start time, so that no
        later owner of a pid is hit), their descendants, and whoever carries the run's
        ``marker``.  They are stopped until a look finds nobody new, then killed, until nobody
        is found.
        """
        names: dict[tuple[int, int], str] = {}
        wanted = set(known)
        deadline = time.monotonic() + patience
        quiet = 0
        while True:
            alive = _freeze_orphans(wanted, marker)
            names.update({p.identity: f"{p.name.decode(errors='replace')}[{p.pid}]" for p in alive})
            quiet = 0 if alive else quiet + 1
            # One empty look is not enough: amid an exec, a process shows no environment.
            if quiet == 2 or time.monotonic() > deadline:
                left = {process.identity for process in alive}
                killed = [name for who, name in names.items() if who not in left]
                return killed, [names[who] for who in left]
            for process in alive:
                send_signal(process, signal.SIGKILL)
            time.sleep(0.01)  # they are not our children: nothing tells us when they are gone

    def _freeze_orphans(wanted: set[tuple[int, int]], marker: str) -> list[Stat]:
        """Stop the wanted, the marked and all below them until a look finds nobody new.

        Whoever was stopped is wanted from then on: his parent may die meanwhile, and the next
        look would not lead to him.
        """
        stopped: set[tuple[int, int]] = set()
        alive: dict[tuple[int, int], Stat] = {}
        for _ in range(FREEZE_PASSES):
            roots = {pid for pid, start in wanted if start_time(pid) == start} | set(marked(marker))
            found = [stat for stat in map(stat_of, roots) if stat is not None]
            for root in roots:
                found += descendants(root, not has_children_files())
            alive = {p.identity: p for p in found if p.state not in (b"Z", b"X")}
            new = [process for who, process in alive.items() if who not in stopped]
            if not new:
                break
            for process in new:
                send_signal(process, signal.SIGSTOP)
            stopped |= alive.keys()
            wanted |= alive.keys()
        return list(alive.values())


def machine_id() -> str | None:
    """The identity that the operating system gave this installation; None where unknown."""
    for path in MACHINE_ID_FILES:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if re.fullmatch(r"[0-9a-f]{32}", text):
            return text
    return None


def cpu_uuid() -> str | None:
    """A CPU's name in records: 16 hex digits that do not give the machine id away, or None."""
    key = machine_id()
    return key and hmac.new(key.encode("ascii"), b"ikit", hashlib.sha256).hexdigest()[:16]


@functools.cache
def cpu_info() -> Cpu:
    """The processor of this machine (read once)."""
    import psutil  # costs 20 ms: not at the top

    usable = psutil.cpu_count()
    if sys.platform == "linux":
        usable = len(os.sched_getaffinity(0))
    return Cpu(
        model=_cpu_model(),
        cores=psutil.cpu_count(logical=False),
        threads=psutil.cpu_count(),
        usable_threads=usable,
        memory_bytes=psutil.virtual_memory().total,
        numa_nodes=len(list(SYSTEM.glob("node/node[0-9]*"))) or None,
    )


def _cpu_model() -> str | None:
    """The model's name as the kernel or the system library says it."""
    try:
        text = CPU_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(\S.*)$", text, re.MULTILINE)
    if found:
        return found[1].strip()
    import platform  # the standard library's; rarely needed

    return platform.processor() or None


def last_level_cache_bytes() -> int | None:
    """The size of all last-level caches together, in bytes; None where the system hides it.

    A socket, or a core complex, has its own: data that must come from memory has to be
    larger than the sum of them.
    """
    instances: dict[tuple[int, str], int] = {}
    for index in SYSTEM.glob("cpu/cpu[0-9]*/cache/index[0-9]*"):
        try:
            kind, level, size, shared = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("type", "level", "size", "shared_cpu_list")
            )
        except OSError:
            continue
        amount = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind != "Instruction" and amount:
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[amount[2]]
            instances[int(level), shared] = int(amount[1]) * scale
    if not instances:
        return None
    last = max(level for level, _ in instances)
    return sum(size for (level, _), size in instances.items() if level == last)
