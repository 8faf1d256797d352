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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Any

from ikit_ops.profilers.capture import DeviceUse, Tally, Timeline

Row = tuple[int, ...]
"""Start and end in ns, and what ran: one number or several."""
Key = tuple[int, ...]
SLICES = 60
LARGEST_GAPS = 10
RUN_ROWS = 65_536
EDGES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
EDGE_NAMES = ("<1us", "1-10us", "10-100us", "100us-1ms", "1-10ms", ">=10ms")


class Unordered(Exception):
    """A row starts before the one before it."""


@dataclass
class Swept:
    """What a pass found: tallies by key, the device's use, and time by slice and key."""

    tallies: dict[Key, Tally] = field(default_factory=dict)
    use: DeviceUse = field(default_factory=lambda: DeviceUse(None))
    slices: list[dict[Key, int]] = field(default_factory=list)
    backwards: int = 0


def sweep(
    blocks: Iterable[Sequence[Row]],
    span: tuple[int, int],
    tick: Callable[[int], None] = lambda rows: None,
    check_key: Callable[[Key, int], None] = lambda key, count: None,
) -> Swept:
    """Go through blocks of rows ordered by start; ``Unordered`` when they are not.

    ``span`` is the first start and last end of the whole capture, for the slices.  Rows that
    end before they start are left out and counted (``backwards``).  ``check_key`` gets each new
    key with the number of keys so far.  TypeError when a time is no number.
    """
    swept = Swept()
    state = _State(swept, span, check_key)
    seen = 0
    collecting = gc.isenabled()
    gc.disable()  # rows are flat tuples in their thousands: looking for cycles finds none, slowly
    try:
        for block in blocks:
            state.take(block)
            seen += len(block)
            tick(seen)
    finally:
        if collecting:
            gc.enable()
    state.finish()
    return swept


class _State:
    """The moving parts of a pass."""

    def __init__(
        self, swept: Swept, span: tuple[int, int], check_key: Callable[[Key, int], None]
    ) -> None:
        self.swept = swept
        self.check_key = check_key
        self.origin = span[0]
        self.slice_ns = max(span[1] - span[0], 1) / SLICES
        swept.slices = [defaultdict(int) for _ in range(SLICES)]
        self.reach: int | None = None
        self.first = self.started = 0
        self.gaps: list[int] = []
        self.largest: list[tuple[int, int, Key, Key]] = []
        self.before: Key = ()
        self.count = self.total = 0
        self.buckets = [0] * len(EDGE_NAMES)
        self.slice = 0
        self.durations: defaultdict[Key, list[int]] = defaultdict(list)
        self.held = 0

    def take(self, block: Sequence[Row]) -> None:
        """Add one block, slice by slice."""
        if not block:
            return
        begin = 0
        while begin < len(block):
            edge = self.origin + (self.slice + 1) * self.slice_ns
            if self.slice < SLICES - 1 and block[begin][0] >= edge:
                self._flush()
                self.slice += 1
                continue
            end = len(block)
            if self.slice < SLICES - 1 and block[-1][0] >= edge:
                end = _first_from(block, edge, begin)
            self._run(block[begin:end] if (begin, end) != (0, len(block)) else block)
            begin = end

    def _run(self, rows: Sequence[Row]) -> None:
        """The loop over rows of one slice."""
        durations = self.durations
        reach, before, gaps, backwards = self.reach, self.before, self.gaps, 0
        if reach is None:
            sound = next((row for row in rows if row[1] >= row[0]), None)
            if sound is None:
                self.swept.backwards += len(rows)
                return
            reach = self.first = sound[0]
            before = sound[2:]
            self.started = rows[0][0]
        last = self.started
        floor = self.largest[0][0] if len(self.largest) == LARGEST_GAPS else 0
        for row in rows:
            start, end = row[0], row[1]
            if start < last:
                raise Unordered
            if end < start:
                backwards += 1
                continue
            last = start
            key = row[2:]
            durations[key].append(end - start)
            if start > reach:
                gap = start - reach
                gaps.append(gap)
                if gap > floor:
                    floor = self._keep(gap, reach, before, key)
                reach, before = end, key
            elif end > reach:
                reach, before = end, key
        self.reach, self.before, self.started = reach, before, last
        self.swept.backwards += backwards
        self.held += len(rows)
        if self.held >= RUN_ROWS:
            self._flush()

    def _keep(self, gap: int, at: int, before: Key, after: Key) -> int:
        """Keep one of the largest gaps; the size that the next must exceed."""
        heapq.heappush(self.largest, (gap, at, before, after))
        if len(self.largest) > LARGEST_GAPS:
            heapq.heappop(self.largest)
        return self.largest[0][0] if len(self.largest) == LARGEST_GAPS else 0

    def _flush(self) -> None:
        """Add the durations and gaps that are held up; few and large blocks cost least."""
        tallies, slice_times = self.swept.tallies, self.swept.slices[self.slice]
        for key, values in self.durations.items():
            tally = tallies.get(key)
            if tally is None:
                self.check_key(key, len(tallies) + 1)
                tally = tallies[key] = Tally()
            tally.add_all(values)
            slice_times[key] += sum(values)
        self.durations.clear()
        self.held = 0
        self.count += len(self.gaps)
        self.total += sum(self.gaps)
        self.gaps.sort()
        below = [bisect_left(self.gaps, edge) for edge in EDGES] + [len(self.gaps)]
        for number, (low, high) in enumerate(zip([0, *below], below, strict=False)):
            self.buckets[number] += high - low
        self.gaps.clear()

    def finish(self) -> None:
        """Write down what was found of the device."""
        self._flush()
        use = self.swept.use
        if self.reach is None or not self.swept.tallies:
            return
        use.first_ns, use.last_ns = self.first, self.reach
        use.busy_ns = self.reach - self.first - self.total
        use.gap_count, use.gap_total_ns = self.count, self.total
        use.gap_histogram = dict(zip(EDGE_NAMES, self.buckets, strict=True))
        use.largest_gaps = [
            {"ns": gap, "at_ns": at - self.first, "before": before, "after": after}
            for gap, at, before, after in sorted(self.largest, reverse=True)
        ]


def _first_from(block: Sequence[Row], edge: float, low: int) -> int:
    """The first index from ``low`` whose start is at or after the edge (a binary search)."""
    high = len(block)
    while low < high:
        middle = (low + high) // 2
        if block[middle][0] < edge:
            low = middle + 1
        else:
            high = middle
    return low


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


def timeline_of(
    devices: Iterable[tuple[list[dict[Key, int]], dict[Key, str]]], span: tuple[int, int]
) -> Timeline:
    """The slices of all devices together, by category; with each come its keys' categories."""
    categories: dict[str, list[int]] = {}
    for slices, category in devices:
        for number, times in enumerate(slices):
            for key, total in times.items():
                categories.setdefault(category[key], [0] * SLICES)[number] += total
    return Timeline(span[0], max(span[1] - span[0], 1) / SLICES, categories)


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
