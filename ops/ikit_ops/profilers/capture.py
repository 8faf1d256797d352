"""What a capture says, whichever profiler made it.

A kernel table groups launches by name, grid and block: the same kernel on another grid is
another piece of work.  Its sums are whole nanoseconds as the profiler stored them; nothing is
averaged before it is added up.  Beside it stand what a table alone cannot tell: when the GPU
did nothing (gaps), what the host did meanwhile (API time, ranges), and what the capture did
not see.  A part that a format does not have is None, which is not an empty list: a capture
that *could* have held copies and holds none says ``[]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ikit_ops.profilers.categories import category_of, short_name_of
from ikit_ops.profilers.limits import shown_name

Shape = tuple[int, int, int]


@dataclass(slots=True)
class Tally:
    """Calls, and their summed, shortest and longest time in ns.

    ``untimed`` of the calls have no time: ``total_ns`` is the sum of the others, and says
    nothing where there are none.  ``bytes`` is None until one size is known; ``unsized`` calls
    have none.
    """

    calls: int = 0
    total_ns: int = 0
    min_ns: int | None = None
    max_ns: int | None = None
    bytes: int | None = None
    untimed: int = 0
    unsized: int = 0

    @property
    def timed(self) -> int:
        """The calls whose time is known."""
        return self.calls - self.untimed

    @property
    def known_ns(self) -> int | None:
        """The time of the timed calls; None where calls were made and none was timed."""
        return None if self.untimed and not self.timed else self.total_ns

    def add(self, duration: int | None) -> None:
        """Count one call; None is a call whose time is not known."""
        self.calls += 1
        if duration is None:
            self.untimed += 1
            return
        self.total_ns += duration
        if self.min_ns is None or duration < self.min_ns:
            self.min_ns = duration
        if self.max_ns is None or duration > self.max_ns:
            self.max_ns = duration

    def add_all(self, durations: list[int]) -> None:
        """Count many calls; the list must not be empty."""
        self.merge(len(durations), sum(durations), min(durations), max(durations))

    def add_bytes(self, size: int | None) -> None:
        """Add the size of one call; None is a size that is not known."""
        if size is None:
            self.unsized += 1
        else:
            self.bytes = (self.bytes or 0) + size

    def merge(self, calls: int, total: int | None, low: int | None, high: int | None) -> None:
        """Count calls that were added up before; None is a total that is not known."""
        self.calls += calls
        self.untimed += calls if total is None else 0
        self.total_ns += total or 0
        lows = [x for x in (self.min_ns, low) if x is not None]
        highs = [x for x in (self.max_ns, high) if x is not None]
        self.min_ns, self.max_ns = min(lows, default=None), max(highs, default=None)

    def join(self, other: Tally) -> None:
        """Count all that another tally counted."""
        self.merge(other.calls, other.total_ns, other.min_ns, other.max_ns)
        self.untimed += other.untimed
        self.unsized += other.unsized
        if other.bytes is not None:
            self.bytes = (self.bytes or 0) + other.bytes

    def row(self) -> dict[str, Any]:
        """The fields as records hold them; ``timed_calls`` where it is not all of them."""
        row = {
            "calls": self.calls,
            "total_ns": self.known_ns,
            "mean_ns": self.total_ns / self.timed if self.timed else None,
            "min_ns": self.min_ns,
            "max_ns": self.max_ns,
        }
        if self.untimed:
            row["timed_calls"] = self.timed
        return row


@dataclass(frozen=True)
class KernelKey:
    """What makes two launches one row of the table."""

    name: str
    grid: Shape | None = None
    block: Shape | None = None
    short: str | None = field(default=None, compare=False)


@dataclass(slots=True)
class Kernel:
    """One row of the kernel table; ``short`` is the tool's own short name, if it has one."""

    key: KernelKey
    tally: Tally
    metrics: dict[str, float | None] | None = None

    @property
    def category(self) -> str:
        """The category by the rules of ``categories``."""
        return category_of(self.key.name)

    def row(self, whole: int | None) -> dict[str, Any]:
        """The row as records hold it; ``whole`` is the time of all kernels together."""
        key = self.key
        row: dict[str, Any] = {
            "name": shown_name(key.name),
            "short_name": shown_name(short_name_of(key.name, key.short)),
            "category": self.category,
            **self.tally.row(),
            "share": self.tally.total_ns / whole if whole and self.tally.timed else None,
            "grid": None if key.grid is None else list(key.grid),
            "block": None if key.block is None else list(key.block),
        }
        if self.metrics is not None:
            row["metrics"] = self.metrics
        return row


@dataclass
class DeviceUse:
    """One device over the capture: busy time is the union of kernels and memory operations."""

    id: int | None
    name: str | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    busy_ns: int = 0
    gap_count: int = 0
    gap_total_ns: int = 0
    gap_histogram: dict[str, int] = field(default_factory=dict)
    largest_gaps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def span_ns(self) -> int | None:
        """From the first operation's start to the last one's end."""
        if self.first_ns is None or self.last_ns is None:
            return None
        return self.last_ns - self.first_ns

    @property
    def busy_share(self) -> float | None:
        """The busy part of the span; None where there is no span."""
        return self.busy_ns / self.span_ns if self.span_ns else None

    def row(self) -> dict[str, Any]:
        """The device as records hold it."""
        return {
            "id": self.id,
            "name": None if self.name is None else shown_name(self.name),
            "busy_ns": self.busy_ns,
            "span_ns": self.span_ns,
            "busy_share": self.busy_share,
            "gaps": self.gap_count,
            "gap_total_ns": self.gap_total_ns,
        }


@dataclass
class Timeline:
    """Time of each category in equal slices of the capture, for the picture."""

    start_ns: int
    slice_ns: float
    categories: dict[str, list[int]]


@dataclass
class Graphs:
    """CUDA graph launches: traced node by node, or as whole graphs that hide their kernels."""

    whole: int = 0
    whole_ns: int = 0
    node_kernels: int = 0


@dataclass
class Capture:
    """All that a reader found in one file."""

    format: str
    tool: str | None = None
    version: str | None = None
    kernels: list[Kernel] | None = None
    memory_ops: dict[str, Tally] | None = None
    ranges: dict[str, Tally] | None = None
    host_api: dict[str, Tally] | None = None
    host_ops: dict[str, Tally] | None = None
    functions: list[dict[str, Any]] | None = None
    counters: list[dict[str, Any]] | None = None
    devices: list[DeviceUse] | None = None
    graphs: Graphs | None = None
    timeline: Timeline | None = None
    grid_unit: str | None = None
    cpu_only: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    incomplete: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)

    @property
    def kernel_ns(self) -> int | None:
        """The time of all timed kernels together; None where there are kernels, and no times."""
        return known_total(kernel.tally for kernel in self.kernels or ())

    @property
    def busy_share(self) -> float | None:
        """The mean busy share of the devices that worked; None where no times are known."""
        shares = [d.busy_share for d in self.devices or () if d.busy_share is not None]
        return sum(shares) / len(shares) if shares else None

    def kernel_rows(self) -> list[dict[str, Any]]:
        """The table, most time first."""
        whole = self.kernel_ns
        ordered = sorted(
            self.kernels or (),
            key=lambda k: (-k.tally.total_ns, k.key.name, k.key.grid or (), k.key.block or ()),
        )
        return [kernel.row(whole) for kernel in ordered]


def known_total(tallies: Iterable[Tally]) -> int | None:
    """The sum of what was timed; None where there are calls and none of them was timed."""
    whole = Tally()
    for tally in tallies:
        whole.join(tally)
    return whole.known_ns


def tally_rows(tallies: Mapping[str, Tally] | None, limit: int) -> list[dict[str, Any]] | None:
    """Named tallies as rows, most time first; None stays None."""
    if tallies is None:
        return None
    ordered = sorted(tallies.items(), key=lambda item: (-item[1].total_ns, item[0]))
    rows = []
    for name, tally in ordered[:limit]:
        row = {"name": shown_name(name), **tally.row()}
        if tally.bytes is not None or tally.unsized:
            row["bytes"] = tally.bytes
        rows.append(row)
    return rows


def shape(values: Iterable[Any] | None) -> Shape | None:
    """Three whole numbers as a grid or block, or None for anything else."""
    if values is None:
        return None
    found = list(values)
    if len(found) != 3 or not all(type(v) is int and 0 <= v < 1 << 40 for v in found):
        return None
    return (found[0], found[1], found[2])
