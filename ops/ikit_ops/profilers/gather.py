"""Work on devices, gathered launch by launch, and what is concluded from it.

Readers of traces differ in how they find a launch; what they then do with it is the same:
give its identity a number, keep ``(start, end, number)`` by device, and at the end sweep each
device, name the keys, sum the table and cut the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Tally
from ikit_ops.profilers.categories import category_of
from ikit_ops.profilers.limits import Reading
from ikit_ops.profilers.sweep import Key, Runs, Swept, sweep, timeline_of

Label = KernelKey | str
"""A kernel, or the name of other work: a copy, a set, a whole graph."""
GRAPH = "[CUDA graph]"


class Work:
    """Launches by device, in any order, each with a label."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.labels: list[Label] = []
        self.runs: dict[int | None, Runs] = {}
        self.kernels = 0
        self._numbers: dict[Hashable, int] = {}

    def add(
        self,
        device: int | None,
        start: int,
        end: int,
        identity: Hashable,
        label: Callable[[Any], Label],
    ) -> None:
        """Keep one launch; ``label`` makes the label of an identity that is new."""
        number = self._numbers.get(identity)
        if number is None:
            self.reading.count_names(len(self.labels) + 1)
            number = self._numbers[identity] = len(self.labels)
            self.labels.append(label(identity))
        runs = self.runs.get(device)
        if runs is None:
            self.reading.count_names(len(self.runs) + 1)
            runs = self.runs[device] = Runs()
        try:
            runs.add(start, end, number)
        except OverflowError:
            raise self.reading.damaged("a time is out of any range") from None

    def label(self, key: Key) -> Label:
        """What a key stands for."""
        return self.labels[key[0]]

    def finish(self, capture: Capture, gpu_names: Mapping[int, str], *, kernels: bool) -> None:
        """Sweep all devices into the capture; ``kernels`` False leaves the table absent."""
        spans = [runs.span for runs in self.runs.values()]
        span = (min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0))
        found = []
        for device in sorted(self.runs, key=lambda d: -1 if d is None else d):
            swept = sweep(self.runs[device].blocks(), span, self.reading.tick)
            found.append((device, swept, self.label))
            self.runs[device] = Runs()  # the rows are not needed again
        conclude(capture, found, gpu_names)
        if not kernels:
            capture.kernels = None


def identical(label: Any) -> Label:
    """The label of an identity that is one already."""
    found: Label = label
    return found


Labels = Callable[[Key], Label]
"""From the keys of one pass to what they stand for."""


def conclude(
    capture: Capture,
    found: Sequence[tuple[int | None, Swept, Labels]],
    gpu_names: Mapping[int, str],
) -> None:
    """The capture's kernels, devices and timeline, from passes over its devices."""
    tallies: dict[KernelKey, Tally] = {}
    devices = []
    for device, swept, label in found:
        use = swept.use
        use.id = device
        use.name = None if device is None else gpu_names.get(device)
        for gap in use.largest_gaps:
            gap["before"], gap["after"] = (_words(label(gap[k])) for k in ("before", "after"))
        devices.append(use)
        for key, tally in swept.tallies.items():
            what = label(key)
            if isinstance(what, KernelKey):
                tallies.setdefault(what, Tally()).merge(
                    tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
                )
    capture.kernels = [Kernel(key, tally) for key, tally in tallies.items()]
    capture.devices = devices
    if backwards := sum(swept.backwards for _, swept, _ in found):
        capture.incomplete.append(f"{backwards} rows end before they start: they were left out")
    starts = [u.first_ns for u in devices if u.first_ns is not None]
    ends = [u.last_ns for u in devices if u.last_ns is not None]
    if starts and ends:
        slices = [(swept.slices, _categories(swept, label)) for _, swept, label in found]
        capture.timeline = timeline_of(slices, (min(starts), max(ends)))


def _words(label: Label) -> str:
    return label.name if isinstance(label, KernelKey) else label


def _categories(swept: Swept, label: Labels) -> dict[Key, str]:
    """The category of each key."""
    return {key: _category(label(key)) for key in swept.tallies}


def _category(label: Label) -> str:
    if isinstance(label, KernelKey):
        return category_of(label.name)
    return "other" if label == GRAPH else "memcpy"
