"""Counters of rocprofv3: one row for each counter of each dispatch.

A dispatch of which five counters were read is five rows with the same times, and was yet one
dispatch: it is known by its number.  To count for one kernel alone, the tool lets no two run at
a time, so that the times are not those of the program.
"""

from __future__ import annotations

from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Tally
from ikit_ops.profilers.gather import Work, identical
from ikit_ops.profilers.limits import Reading, shown_name
from ikit_ops.profilers.tables import Header

MAX_DISPATCHES = 5_000_000
MAX_COUNTERS = 200
SERIALISED = (
    "counters were read: the kernels ran one after another, so that times and gaps are not those "
    "of the program; each counter is the mean of its rows"
)


def is_counters(header: Header) -> bool:
    """Whether it is a table of counters."""
    return header.has("kernel_name", "counter_name", "counter_value")


class Counters:
    """Dispatches, each counted once, and their counters by kernel."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.work = Work(reading)
        self.seen = self.unnumbered = 0
        self.untimed: dict[KernelKey, Tally] = {}
        self._ids: dict[tuple[str, ...], set[int]] = {}
        self._values: dict[KernelKey, dict[str, list[float]]] = {}
        self._names: set[str] = set()

    def take(
        self,
        header: Header,
        row: list[str],
        key: KernelKey,
        agent: int | None,
        times: tuple[int, int] | None,
    ) -> None:
        """One row; a dispatch without sound times is counted, and has none."""
        number = header.whole(row, "dispatch_id")
        if number is None:
            number = header.whole(row, "correlation_id")
        if number is None or not key.name:
            self.unnumbered += 1
            return
        where = tuple(header.cell(row, column) or "" for column in ("process_id", "agent_id"))
        ids = self._ids.setdefault(where, set())
        self.reading.count_names(len(self._ids))
        if number not in ids:
            ids.add(number)
            self._dispatch(key, agent, times)
        name, value = header.cell(row, "counter_name"), header.number(row, "counter_value")
        if name and value is not None and (name in self._names or len(self._names) < MAX_COUNTERS):
            self._names.add(name)
            told = self._values.setdefault(key, {}).setdefault(name, [0.0, 0.0])
            told[0] += value
            told[1] += 1

    def _dispatch(self, key: KernelKey, agent: int | None, times: tuple[int, int] | None) -> None:
        self.seen += 1
        if self.seen > MAX_DISPATCHES:
            raise self.reading.damaged(f"it counts more than {MAX_DISPATCHES} dispatches")
        if times is not None:
            self.work.add(agent, *times, key, identical)
            return
        self.untimed.setdefault(key, Tally()).add(None)
        self.reading.count_names(len(self.untimed))

    def finish(self, capture: Capture, copies: Work) -> None:
        """The kernels with their counters; ``copies`` is other work of the same devices."""
        for device, runs in copies.runs.items():
            for block in runs.blocks():
                for start, end, number in block:
                    self.work.add(device, start, end, copies.labels[number], identical)
        if self.work.runs:
            self.work.finish(capture, {}, kernels=True)
        kernels = {kernel.key: kernel for kernel in capture.kernels or ()}
        for key, tally in self.untimed.items():
            kernels.setdefault(key, Kernel(key, Tally())).tally.join(tally)
        for key, kernel in kernels.items():
            told = self._values.get(key, {})
            kernel.metrics = {shown_name(name): told[name][0] / told[name][1] for name in told}
        capture.kernels = list(kernels.values())
        capture.limitations.append(SERIALISED)
        if self.untimed:
            calls = sum(tally.calls for tally in self.untimed.values())
            capture.incomplete.append(f"{calls} dispatches have no sound times")
        self._say(capture)

    def leave_out(self, capture: Capture) -> None:
        """Say that a trace of the same file counts the dispatches."""
        if self.seen:
            capture.missing.append(
                f"counters of {self.seen} dispatches (the trace in the same file was taken)"
            )
        self._say(capture)

    def _say(self, capture: Capture) -> None:
        if self.unnumbered:
            capture.incomplete.append(
                f"{self.unnumbered} rows of counters have no dispatch or no kernel: left out"
            )
        if len(self._names) >= MAX_COUNTERS:
            capture.missing.append(f"counters beyond the first {MAX_COUNTERS}")
