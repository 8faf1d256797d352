"""One pass over launches in the order of their start: the table, the gaps, the picture.

Launches overlap: streams run beside each other, and a copy runs below a kernel.  Adding their
times up would count such a moment twice, so busy time is the length of the *union* of all
intervals.  In the order of starts the union needs one number, the furthest end so far: a start
beyond it opens a gap, anything else only pushes it on.

The pass sees every launch of a capture, millions of them, in Python; it therefore does as
little as it can for each, and adds durations up by the block.
"""

from __future__ import annotations

import gc
import heapq
from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

from ikit_ops.profilers.capture import DeviceUse, Tally
from ikit_ops.profilers.slices import SLICES, Slices, timeline_of

Row = tuple[int, int, Any]
"""Start and end in ns, and what ran: a hashable key."""
Key = tuple[Any, ...]
LARGEST_GAPS = 10
RUN_ROWS = 65_536
EDGES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
FEW_AND_LONG = 30_000
EDGE_NAMES = ("<1us", "1-10us", "10-100us", "100us-1ms", "1-10ms", ">=10ms")


class Unordered(Exception):
    """A row starts before the one before it."""


class Foreign(Exception):
    """A row is not the pass's own; ``rows`` are it and those after it, which were not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []


@dataclass
class Swept:
    """What a pass found: tallies by key, the device's use, and time by slice and key."""

    slices: Slices
    tallies: dict[Any, Tally] = field(default_factory=dict)
    use: DeviceUse = field(default_factory=lambda: DeviceUse(None))
    backwards: int = 0

    def rename(self, name: Callable[[Any], Key]) -> None:
        """Put other keys in the place of those of the rows; equal ones are put together."""
        old, self.tallies = self.tallies, {}
        names = {key: name(key) for key in old}
        for key, tally in old.items():
            self.tallies.setdefault(names[key], Tally()).merge(
                tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
            )
        for gap in self.use.largest_gaps:
            gap["before"], gap["after"] = names[gap["before"]], names[gap["after"]]
        self.slices.rename(names)


def sweep(
    blocks: Iterable[Sequence[Row]],
    span: tuple[int, int],
    tick: Callable[[int], None] = lambda rows: None,
) -> Swept:
    """Go through blocks of rows ordered by start; ``Unordered`` when they are not.

    ``span`` is the first start and last end of the whole capture, for the slices.  Rows that
    end before they start are left out and counted (``backwards``).  Keys are given back as
    tuples of one.  TypeError when a time is no number.
    """
    state = Pass(span)
    seen = 0
    with no_collecting():
        for block in blocks:
            state.take(block)
            seen += len(block)
            tick(seen)
    swept = state.finish()
    swept.rename(lambda key: (key,))
    return swept


@contextmanager
def no_collecting() -> Iterator[None]:
    """Rows are flat tuples in their thousands: looking for cycles finds none, slowly."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_start = itemgetter(0)


class _Held(dict[Any, list[int]]):
    """Durations by key; a key that is new to the pass is shown to ``admit`` first."""

    def __init__(self, admit: Callable[[Any], None]) -> None:
        super().__init__()
        self._admit = admit
        self._known: set[Hashable] = set()

    def __missing__(self, key: Any) -> list[int]:
        if key not in self._known:
            self._admit(key)
            self._known.add(key)
        found: list[int] = []
        self[key] = found
        return found


class Pass:
    """A pass over one device's rows, which come by the block.

    ``admit`` sees each key before its first row is taken; it may raise ``Foreign``, and the
    pass is then as it was before that row.
    """

    def __init__(
        self, span: tuple[int, int], admit: Callable[[Any], None] = lambda key: None
    ) -> None:
        self._slices = Slices(span)
        self._swept = Swept(self._slices)
        self._slice = 0
        self._edge = self._slices.end(0)
        self._reach: int | None = None
        self._first = self._last = 0
        self._gaps: list[int] = []
        self._largest: list[tuple[int, int, Any, Any]] = []
        self._before: Hashable = None
        self._count = self._total = 0
        self._buckets = [0] * len(EDGE_NAMES)
        self._durations = _Held(admit)
        self._held = 0
        self.hold = RUN_ROWS
        """How many durations are held up before they are added."""

    def take(self, rows: Sequence[Row]) -> None:
        """Add one block, slice by slice."""
        while rows:
            start = rows[0][0]
            if start >= self._edge:
                if type(start) is not int:
                    raise TypeError(start)  # no slice begins at infinity
                self._flush()
                self._slice = self._slices.index(start)
                self._edge = self._slices.end(self._slice)
            if rows[-1][0] < self._edge:
                self._run(rows)
                return
            cut = bisect_left(rows, self._edge, key=_start)
            try:
                self._run(rows[:cut])
            except Foreign as found:
                found.rows += rows[cut:]
                raise
            rows = rows[cut:]

    def _run(self, rows: Sequence[Row]) -> None:
        """The loop over rows of one slice."""
        durations, gaps = self._durations, self._gaps
        reach, before, last, backwards = self._reach, self._before, self._last, 0
        if reach is None:
            sound = next((row for row in rows if row[1] >= row[0]), rows[0])
            reach = last = sound[0]
            before = sound[2]
        floor = self._largest[0][0] if len(self._largest) == LARGEST_GAPS else 0
        left: list[Row] = []
        remaining = iter(rows)
        try:
            for start, end, key in remaining:
                if end < start:
                    backwards += 1
                    continue
                durations[key].append(end - start)
                if start > reach:  # then it starts after all others too
                    gap = start - reach
                    gaps.append(gap)
                    if gap > floor:
                        floor = self._keep(gap, reach, before, key)
                    reach = end
                    before = key
                else:
                    if start < last:
                        raise Unordered
                    if end > reach:
                        reach = end
                        before = key
                last = start
        except Foreign as found:
            left = [(start, end, key), *remaining]
            found.rows = left
            raise
        finally:
            self._swept.backwards += backwards
            self._settle(rows[: len(rows) - len(left)], reach, before, last)

    def _settle(self, rows: Sequence[Row], reach: int, before: Hashable, last: int) -> None:
        """Keep what the loop found over some rows."""
        if self._reach is None:
            if not self._durations:
                return  # no sound row was seen yet
            self._first = next(row[0] for row in rows if row[1] >= row[0])
        self._reach, self._before, self._last = reach, before, last
        if reach > self._edge:
            self._spread(rows)
        self._held += len(rows)
        if self._held >= self.hold:
            self._flush()

    def _spread(self, rows: Sequence[Row]) -> None:
        """Give slices what launches ran in them that started in this one."""
        edge = self._edge
        for start, end, key in rows:
            if end > edge and end >= start:
                self._slices.spread(self._slice, key, end)

    def _keep(self, gap: int, at: int, before: Hashable, after: Hashable) -> int:
        """Keep one of the largest gaps; the size that the next must exceed."""
        # No two gaps begin at the same time, so keys are never compared.
        heapq.heappush(self._largest, (gap, at, before, after))
        if len(self._largest) > LARGEST_GAPS:
            heapq.heappop(self._largest)
        return self._largest[0][0] if len(self._largest) == LARGEST_GAPS else 0

    def _flush(self) -> None:
        """Add the durations and gaps that are held up; few and large blocks cost least."""
        tallies = self._swept.tallies
        for key, values in self._durations.items():
            tally = tallies.get(key)
            if tally is None:
                tally = tallies[key] = Tally()
            tally.calls += len(values)
            total = sum(values)
            tally.total_ns += total
            shortest, longest = min(values), max(values)
            if tally.min_ns is None or shortest < tally.min_ns:
                tally.min_ns = shortest
            if tally.max_ns is None or longest > tally.max_ns:
                tally.max_ns = longest
            self._slices.add(self._slice, key, total)
        self._durations.clear()
        self._held = 0
        self._bucket()

    def _bucket(self) -> None:
        """Add the gaps that are held up to the histogram; most are short, so those go first."""
        gaps = self._gaps
        self._count += len(gaps)
        self._total += (total := sum(gaps))
        # What most of them are is taken away first.
        if total > FEW_AND_LONG * len(gaps):
            self._bucket_longest_first(gaps)
        else:
            self._bucket_shortest_first(gaps)
        gaps.clear()

    def _bucket_shortest_first(self, left: list[int]) -> None:
        for number, edge in enumerate(EDGES):
            longer = [gap for gap in left if gap >= edge]
            self._buckets[number] += len(left) - len(longer)
            left = longer
        self._buckets[-1] += len(left)

    def _bucket_longest_first(self, left: list[int]) -> None:
        for number, edge in reversed([*enumerate(EDGES, 1)]):
            shorter = [gap for gap in left if gap < edge]
            self._buckets[number] += len(left) - len(shorter)
            left = shorter
        self._buckets[0] += len(left)

    def finish(self) -> Swept:
        """What was found of the device; nothing may be added afterwards."""
        self._flush()
        self._slices.settle()
        use = self._swept.use
        if self._reach is None or not self._swept.tallies:
            return self._swept
        use.first_ns, use.last_ns = self._first, self._reach
        use.busy_ns = self._reach - self._first - self._total
        use.gap_count, use.gap_total_ns = self._count, self._total
        use.gap_histogram = dict(zip(EDGE_NAMES, self._buckets, strict=True))
        use.largest_gaps = [
            {"ns": gap, "at_ns": at - self._first, "before": before, "after": after}
            for gap, at, before, after in sorted(self._largest, key=_size, reverse=True)
        ]
        return self._swept


def _size(gap: tuple[int, int, Any, Any]) -> tuple[int, int]:
    return gap[0], gap[1]


class Runs:
    """Rows that come in any order, kept as sorted runs of 24 bytes a row, given back merged.

    Traces are written by many threads.  Sorting them as Python objects would take 200 bytes a
    row; runs of plain integers take an eighth of that, and a merge of the runs is a sort.
    """

    def __init__(self, *, nested: bool = False) -> None:
        self._nested = nested
        self._open: list[tuple[int, int, int]] = []
        self._runs: list[tuple[array[int], array[int], array[int]]] = []
        self.count = 0
        self.first: int | None = None
        self.last: int | None = None

    def add(self, start: int, end: int, key: int) -> None:
        """Keep one row."""
        self._open.append((start, end, key))
        if len(self._open) >= RUN_ROWS:
            self._close()

    def _close(self) -> None:
        rows = self._open
        if not rows:
            return
        if self._nested:  # of rows that start together, the longest is the outermost
            rows.sort(key=itemgetter(1), reverse=True)
        rows.sort(key=itemgetter(0))
        starts = array("q", [row[0] for row in rows])
        ends = array("q", [row[1] for row in rows])
        self._runs.append((starts, ends, array("q", [row[2] for row in rows])))
        self.count += len(rows)
        self.first = starts[0] if self.first is None else min(self.first, starts[0])
        latest = max(ends)
        self.last = latest if self.last is None else max(self.last, latest)
        self._open = []

    def blocks(self) -> Iterator[Sequence[Row]]:
        """All rows in the order of their start, by the block."""
        self._close()
        runs = sorted(self._runs, key=lambda run: run[0][0])
        if all(a[0][-1] <= b[0][0] for a, b in pairwise(runs)):
            for run in runs:  # the usual case: they follow one another
                yield list(zip(*run, strict=True))
            return
        merged = heapq.merge(*(zip(*run, strict=True) for run in runs), key=itemgetter(0))
        block: list[Row] = []
        for row in merged:
            block.append(row)
            if len(block) >= RUN_ROWS:
                yield block
                block = []
        if block:
            yield block

    @property
    def span(self) -> tuple[int, int]:
        """The first start and the last end; (0, 0) where there is no row."""
        self._close()
        return (self.first or 0, self.last or 0)


def merged_gaps(devices: Sequence[DeviceUse]) -> dict[str, Any] | None:
    """The gaps of all devices as records hold them; None where no times are known."""
    timed = [d for d in devices if d.span_ns is not None]
    if not timed:
        return None
    count = sum(d.gap_count for d in timed)
    total = sum(d.gap_total_ns for d in timed)
    histogram = dict.fromkeys(EDGE_NAMES, 0)
    for device in timed:
        for edge, number in device.gap_histogram.items():
            histogram[edge] += number
    largest = [dict(gap, device=d.id) for d in timed for gap in d.largest_gaps]
    largest.sort(key=lambda gap: -gap["ns"])
    return {
        "count": count,
        "total_ns": total,
        "mean_ns": total / count if count else None,
        "max_ns": largest[0]["ns"] if largest else None,
        "histogram": histogram,
        "largest": largest[:LARGEST_GAPS],
    }


__all__ = [
    "SLICES", "Foreign", "Key", "Pass", "Row", "Runs", "Slices", "Swept", "Unordered",
    "merged_gaps", "no_collecting", "sweep", "timeline_of",
]  # fmt: skip
