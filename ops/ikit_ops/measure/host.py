"""The machine around a measurement on the CPU: where threads may run, and who else does.

Four things decide what a number from a CPU means.  *Where*: a thread may use the CPUs of its
affinity mask, as much as the control group's quota pays for, and memory is near to some CPUs and
far from others (NUMA nodes).  *How much*: the memory that is free, for the machine and for the
control group.  *Who else*: the time that the CPUs spent on other processes than ours, and the
time that a hypervisor gave to other machines (steal).  *How fast*: the clock, and whether the
processor slowed down to cool.

Times come from counters, so that nothing between two readings is lost.  What the system does
not offer is None; the paths are Linux's, and simply absent elsewhere.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikit_mcp.call import Device, one_line
from ikit_mcp.registry import OpError

ROOT = Path("/")
_BUSY = ("user", "nice", "system", "irq", "softirq")  # user holds guest time already


@dataclass(frozen=True)
class Node:
    """A memory node: its number, and those of its CPUs that this process may run on."""

    number: int
    cpus: tuple[int, ...]
    has_cpus: bool


def choose_device(there: Sequence[Device], wanted: str) -> Device:
    """The one device that a ``device`` argument means; OpError names what there is.

    ``auto`` is the first; ``cpu``, ``cuda``, ``rocm`` are the first of their kind; else an id
    (``cuda:1``) or a uuid.
    """
    for found in there:
        if wanted in ("auto", found.id, found.uuid, found.id.split(":")[0]):
            return found
    known = ", ".join(found.id for found in there)
    raise OpError(f"device {one_line(wanted, 60)!r} is not one device here", f"use one of: {known}")


def usable_cpus() -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on; () where the system does not say."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return ()


def memory_nodes(usable: Sequence[int], root: Path = ROOT) -> list[Node]:
    """The memory nodes with what of them is usable, by number; [] where the system hides them."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        listed = _text(folder / "cpulist")
        if listed is not None:
            cpus = parse_cpu_list(listed)
            mine = tuple(cpu for cpu in cpus if cpu in set(usable))
            nodes.append(Node(int(folder.name.removeprefix("node")), mine, bool(cpus)))
    return sorted(nodes, key=lambda node: node.number)


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers in the kernel's notation, as in ``0-3,8,10-11``."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.extend(range(int(first), int(last or first) + 1))
    return tuple(found)


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' worth of time the control group may use; None without such a limit."""
    group = root / "sys/fs/cgroup"
    words = (_text(group / "cpu.max") or "").split()
    if len(words) != 2:
        words = [_text(group / f"cpu/cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if all(word.isdigit() for word in words) and int(words[1]) > 0:
        return int(words[0]) / int(words[1])
    return None


def available_memory_bytes(root: Path = ROOT) -> int:
    """The memory that can be taken without swapping, for the machine and the control group."""
    import psutil  # costs 20 ms: not at the top

    available = int(psutil.virtual_memory().available)
    group = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, taken = _text(group / limit) or "", _text(group / used) or ""
        if most.isdigit() and taken.isdigit():
            available = min(available, max(0, int(most) - int(taken)))
    return available


def is_virtual(root: Path = ROOT) -> bool | None:
    """Whether a hypervisor is below, by the processor's own flag; None where it is not told."""
    flags = re.search(r"^flags\s*:(.*)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return None if flags is None else "hypervisor" in flags[1].split()


class Host:
    """The CPU side of telemetry: see ``telemetry.Source``."""

    name = "cpu"

    def __init__(self, root: Path = ROOT) -> None:
        """Look once what there is to read, so that what is missing is known from the start."""
        self._root = root
        self._counters = sorted(
            (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/*_throttle_count")
        )
        first = self.read(full=True)
        self.missing = [
            f"{what} (not offered here)"
            for key, what in (
                ("steal_s", "CPU steal time"),
                ("frequency_mhz", "CPU frequency"),
                ("throttle_events", "CPU thermal throttling"),
            )
            if first[key] is None
        ]

    def close(self) -> None:
        """Nothing is held."""

    def read(self, full: bool) -> dict[str, Any]:
        """Counters and clock now; ``full`` adds the CPU time of this process and all below it.

        That walks over all processes, so it is for the ends of a stretch, not for in between.
        """
        import psutil  # costs 20 ms: not at the top

        times = psutil.cpu_times()
        values: dict[str, Any] = {
            "cpus": psutil.cpu_count(),
            "busy_s": sum(getattr(times, name, 0.0) for name in _BUSY),
            "steal_s": getattr(times, "steal", None),
            "frequency_mhz": _frequency(),
            "throttle_events": self._throttle_events(),
            "load_1m": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }
        if full:
            values["own_s"] = _tree_seconds()
        return values

    def _throttle_events(self) -> int | None:
        """How often the cores and packages said that they slowed down to cool, since the start."""
        counts = [int(t) for t in map(_text, self._counters) if t is not None and t.isdigit()]
        return sum(counts) if counts else None

    @staticmethod
    def summarise(samples: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
        """Shares of the CPUs' time between the first and the last full sample, and the clock.

        ``others_share`` is the part of all CPU time that went to processes other than this one
        and its descendants, ``steal_share`` the part that the hypervisor gave away.
        """
        full = [sample for sample in samples if "own_s" in sample[1]]
        if len(full) < 2:
            return {}
        (begin, first), (end, last) = full[0], full[-1]
        capacity = (end - begin) * (first["cpus"] or 1)

        def share(*keys: str) -> float | None:
            """The increase of the first counter less the others', over all CPU time."""
            if capacity <= 0 or any(first[k] is None or last[k] is None for k in keys):
                return None
            grown: list[float] = [last[k] - first[k] for k in keys]
            return round(min(1.0, max(0.0, (grown[0] - sum(grown[1:])) / capacity)), 4)

        clocks = [s["frequency_mhz"] for _, s in samples if s["frequency_mhz"] is not None]
        throttled = (first["throttle_events"], last["throttle_events"])
        return {
            "seconds": round(end - begin, 3),
            "own_share": share("own_s"),
            "others_share": share("busy_s", "own_s"),
            "steal_share": share("steal_s"),
            "load_1m_before": first["load_1m"],
            "load_1m_after": last["load_1m"],
            "frequency_mhz": {"min": min(clocks), "max": max(clocks)} if clocks else None,
            "throttle_events": None if None in throttled else throttled[1] - throttled[0],
        }


def _frequency() -> float | None:
    """The mean clock of the CPUs in MHz, or None."""
    import psutil  # costs 20 ms: not at the top

    try:
        found = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    except (OSError, NotImplementedError):
        return None
    if found is None or found.current <= 0:
        return None
    return float(round(found.current, 1))


def _tree_seconds() -> float:
    """The CPU time of this process and its descendants, those that were waited for included."""
    import psutil  # costs 20 ms: not at the top

    us = psutil.Process()
    total = 0.0
    for process in [us, *us.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it ended: its time is with its parent now
        total += sum(times[:4])  # user, system, and both for the children that were waited for
    return total


def _text(path: Path) -> str | None:
    """What a file of the kernel says, or None."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
