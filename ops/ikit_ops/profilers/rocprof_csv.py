"""CSV files of rocprofv3: traces with one row a dispatch, or statistics by name.

Columns changed with three generations of the tool, and their case with its converter, so they
are matched by name in any case.  AMD counts a grid in work-items, not in blocks: the table
keeps what the file says, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Tally, shape
from ikit_ops.profilers.gather import Work, identical
from ikit_ops.profilers.limits import MAX_STRING, Reading
from ikit_ops.profilers.tables import Header, tables_of, whole_number

FORMAT = "rocprofv3-csv"
GRID_UNIT = "work-items"
_GRID = ("grid_size_x", "grid_size_y", "grid_size_z")
_BLOCK = ("workgroup_size_x", "workgroup_size_y", "workgroup_size_z")
_TIMES = ("start_timestamp", "end_timestamp")


def is_trace(header: Header) -> bool:
    """Whether it is a trace of dispatches, copies or API calls."""
    named = any(c in header.columns for c in ("kernel_name", "function", "direction", "kind"))
    return header.has(*_TIMES) and named


def is_stats(header: Header) -> bool:
    """Whether it is a table of statistics."""
    return header.has("name", "calls", "totaldurationns")


def read(reading: Reading) -> Capture:
    """The capture of either."""
    capture = Capture(FORMAT, tool="rocprofv3", grid_unit=GRID_UNIT)
    trace = _Trace(reading)
    stats: dict[KernelKey, Tally] = {}
    seen = 0
    for header, rows in tables_of(reading, lambda h: is_trace(h) or is_stats(h)):
        seen += 1
        if is_trace(header):
            trace.take(header, rows)
        else:
            _statistics(capture, stats, header, rows)
        reading.count_names(len(stats))
    if not seen:
        raise reading.damaged("it holds no table of rocprofv3", "import its .db file instead")
    if trace.rows or trace.dispatches:
        trace.finish(capture)
    else:
        capture.missing.append("gaps and busy share (sums hold no times of single dispatches)")
    if stats:
        capture.kernels = [*(capture.kernels or []), *(Kernel(k, t) for k, t in stats.items())]
    return capture


def _statistics(
    capture: Capture, kernels: dict[KernelKey, Tally], header: Header, rows: Iterator[list[str]]
) -> None:
    """Sums by name: kernels, copies or API calls, told apart by their names."""
    for row in rows:
        name = header.cell(row, "name")
        calls, total = header.whole(row, "calls"), header.whole(row, "totaldurationns")
        if name is None or calls is None or total is None or total < 0:
            continue
        name = name[:MAX_STRING]
        low, high = header.whole(row, "minns"), header.whole(row, "maxns")
        if name.startswith("MEMORY_COPY_"):
            capture.memory_ops = capture.memory_ops or {}
            capture.memory_ops.setdefault(name, Tally()).merge(calls, total, low, high)
        elif name.startswith(("hip", "hsa_", "__hip")) and "(" not in name and "<" not in name:
            capture.host_api = capture.host_api or {}
            capture.host_api.setdefault(name, Tally()).merge(calls, total, low, high)
        else:
            kernels.setdefault(KernelKey(name), Tally()).merge(calls, total, low, high)


class _Trace:
    """Rows with times: dispatches and copies by agent, API calls summed."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.work = Work(reading)
        self.memory: dict[str, Tally] | None = None
        self.api: dict[str, Tally] | None = None
        self.dispatches = False
        self.rows = self.unsound = 0

    def take(self, header: Header, rows: Iterator[list[str]]) -> None:
        """One table."""
        self.dispatches = self.dispatches or header.has("kernel_name")
        for row in rows:
            self.rows += 1
            start, end = (header.whole(row, c) for c in _TIMES)
            if start is None or end is None or end < start:
                self.unsound += 1
            elif header.has("kernel_name"):
                self._dispatch(header, row, start, end)
            elif header.has("function"):
                self.api = {} if self.api is None else self.api
                self._sum(self.api, header.cell(row, "function") or "", end - start)
            else:
                self._copy(header, row, start, end)

    def _dispatch(self, header: Header, row: list[str], start: int, end: int) -> None:
        grid, block = (shape([header.whole(row, c) for c in names]) for names in (_GRID, _BLOCK))
        name = (header.cell(row, "kernel_name") or "")[:MAX_STRING]
        agent = _agent_number(header.cell(row, "agent_id"))
        self.work.add(agent, start, end, KernelKey(name, grid, block), identical)

    def _copy(self, header: Header, row: list[str], start: int, end: int) -> None:
        self.memory = {} if self.memory is None else self.memory
        name = (header.cell(row, "direction") or header.cell(row, "kind") or "copy")[:MAX_STRING]
        self._sum(self.memory, name, end - start)
        agent = _agent_number(header.cell(row, "destination_agent_id"))
        self.work.add(agent, start, end, name, identical)

    def _sum(self, tallies: dict[str, Tally], name: str, duration: int) -> None:
        tallies.setdefault(name[:MAX_STRING], Tally()).add(duration)
        self.reading.count_names(len(tallies))

    def finish(self, capture: Capture) -> None:
        """Everything into the capture."""
        self.work.finish(capture, {}, kernels=self.dispatches)
        capture.memory_ops, capture.host_api = self.memory, self.api
        if self.unsound:
            capture.incomplete.append(f"{self.unsound} rows have no sound times: left out")


def _agent_number(text: str | None) -> int | None:
    """``Agent 2`` and ``2`` as a number."""
    return whole_number((text or "").removeprefix("Agent "))
