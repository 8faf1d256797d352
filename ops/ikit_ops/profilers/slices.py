"""Time cut into equal slices: how much of each slice which work took.

A launch belongs to every slice that it ran in.  Nearly all launches are far shorter than a
slice, so their whole time is added to the slice that they start in, and only the few that run
past its edge are spread: what lies beyond the edge is taken off again, the slice where the
launch ends gets its part, and the slices between, which it fills, are kept as differences (one
more from here, one less from there), so that a launch costs the same however long it is.

Where the capture ends is known before the pass only roughly.  Slices therefore go on past the
expected end, and neighbours are put together afterwards when there came to be too many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from ikit_ops.profilers.capture import Timeline

SLICES = 60
MOST = 16 * SLICES


class Slices:
    """Times by slice and key; ``span`` is the expected first start and last end in ns."""

    def __init__(self, span: tuple[int, int]) -> None:
        self.origin = span[0]
        self.span = max(span[1] - span[0], 1)
        self._times: defaultdict[int, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
        self._filled: dict[Hashable, defaultdict[int, int]] = {}

    def index(self, time: int) -> int:
        """The slice that a time lies in."""
        # The inverse of ``edge``, exact in whole numbers.
        number = (SLICES * (time - self.origin + 1) - 1) // self.span
        return min(max(number, 0), MOST - 1)

    def edge(self, number: int) -> int:
        """Where a slice begins."""
        return self.origin + self.span * number // SLICES

    def end(self, number: int) -> int | float:
        """Where a slice ends; the last one never does."""
        return self.edge(number + 1) if number < MOST - 1 else float("inf")

    def add(self, number: int, key: Hashable, total: int) -> None:
        """Count time of launches that start in a slice."""
        if total:  # else a launch at the very end would open one more slice
            self._times[number][key] += total

    def spread(self, number: int, key: Hashable, end: int) -> None:
        """Move what a launch ran beyond its slice to the slices that it ran in."""
        last = self.index(end - 1)
        if last <= number:
            return
        self._times[number][key] -= end - self.edge(number + 1)
        self._times[last][key] += end - self.edge(last)
        if last > number + 1:
            filled = self._filled.setdefault(key, defaultdict(int))
            filled[number + 1] += 1
            filled[last] -= 1

    def settle(self) -> None:
        """Give the slices that were filled their time; nothing may be added afterwards."""
        for key, changes in self._filled.items():
            marks = sorted(changes)
            running = 0
            for mark, following in pairwise(marks):
                running += changes[mark]
                for number in range(mark, following if running else mark):
                    length = self.edge(number + 1) - self.edge(number)
                    self._times[number][key] += running * length
        self._filled.clear()

    def rename(self, names: Mapping[Any, Hashable]) -> None:
        """Put other keys in the place of those that were counted."""
        for number, times in self._times.items():
            found: dict[Any, int] = defaultdict(int)
            for key, total in times.items():
                found[names[key]] += total
            self._times[number] = found

    def __iter__(self) -> Iterator[Mapping[Any, int]]:
        """The times of each slice, up to the last one with work."""
        for number in range(max(self._times, default=-1) + 1):
            yield self._times.get(number, {})


def timeline_of(
    devices: Iterable[tuple[Slices, Mapping[Any, str]]], span: tuple[int, int]
) -> Timeline:
    """The slices of all devices together, by category; with each come its keys' categories.

    The devices' slices begin at the same time and are equally long.
    """
    found: dict[str, defaultdict[int, int]] = {}
    count = SLICES
    width = max(span[1] - span[0], 1) / SLICES
    for slices, category in devices:
        width = slices.span / SLICES
        for number, times in enumerate(slices):
            count = max(count, number + 1)
            for key, total in times.items():
                found.setdefault(category[key], defaultdict(int))[number] += total
    group = -(-count // SLICES)
    bars = -(-count // group)
    categories = {}
    for name, by_slice in found.items():
        categories[name] = [0] * bars
        for number, total in by_slice.items():
            categories[name][number // group] += total
    return Timeline(span[0], width * group, categories)
