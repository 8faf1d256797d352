"""CSV files of rocprofv3: traces with one row a dispatch, counters, or statistics by name.

Columns changed with three generations of the tool, and their case with its converter, so they
are matched by name in any case.  AMD counts a grid in work-items, not in blocks: the table
keeps what the file says, and says so.

A trace of copies, of allocations or of API calls has the same times as one of dispatches; only
dispatches and copies keep a device busy, and a copy to the host keeps the device busy that it
comes from.  Ranges (markers) are API calls of a library, in the domain of markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ikit_ops.profilers.capture import Capture, KernelKey, Tally, shape
from ikit_ops.profilers.gather import Work, identical
from ikit_ops.profilers.limits import MAX_STRING, Reading, shown_name
from ikit_ops.profilers.rocprof_counters import Counters, is_counters
from ikit_ops.profilers.rocprof_stats import Statistics, is_stats
from ikit_ops.profilers.sums import WORDS, conclude, say_absent
from ikit_ops.profilers.tables import Header, tables_of

FORMAT = "rocprofv3-csv"
GRID_UNIT = "work-items"
_GRID = ("grid_size_x", "grid_size_y", "grid_size_z")
_BLOCK = ("workgroup_size_x", "workgroup_size_y", "workgroup_size_z")
_TIMES = ("start_timestamp", "end_timestamp")
_IDENTITY = ("agent_id", "kernel_name", *_GRID, *_BLOCK)
MAX_KNOWN = 10_000
_AGENT = re.compile(r"(?:^|\s)(\d{1,18})$", re.ASCII)


def is_trace(header: Header) -> bool:
    """Whether it is a trace of dispatches, copies or API calls, or a table of counters."""
    named = any(c in header.columns for c in ("kernel_name", "function", "direction", "kind"))
    return (header.has(*_TIMES) and named) or is_counters(header)


def read(reading: Reading) -> Capture:
    """The capture of either."""
    capture = Capture(FORMAT, tool="rocprofv3", grid_unit=GRID_UNIT)
    trace, counters, stats = _Trace(reading), Counters(reading), Statistics(reading)
    seen = 0
    for header, rows in tables_of(reading, lambda h: is_trace(h) or is_stats(h)):
        seen += 1
        if is_counters(header):
            for row in rows:
                agent = agent_number(header.cell(row, "agent_id"))
                counters.take(header, row, kernel_key(header, row), agent, times_of(header, row))
        elif is_trace(header):
            trace.take(header, rows)
        else:
            stats.take(header, rows)
    if not seen:
        raise reading.damaged("it holds no table of rocprofv3", "import its .db file instead")
    trace.finish(capture, counters)
    _statistics(capture, stats)
    if capture.devices is None:
        capture.missing.append("gaps and busy share (no times of single dispatches)")
    say_absent(capture, "the file has no table of them")
    return capture


def _statistics(capture: Capture, stats: Statistics) -> None:
    """Parts that no trace told, from the tables of sums."""
    traced = [part for part in WORDS if getattr(capture, part) is not None]
    for part in traced:
        if any(table.part == part and table.rows for table in stats.tables):
            capture.limitations.append(
                f"statistics of {WORDS[part]} were left out: a trace of them is in the file"
            )
    conclude(capture, [table for table in stats.tables if table.part not in traced])
    stats.say(capture)


def kernel_key(header: Header, row: list[str]) -> KernelKey:
    """The kernel of a row, with grid and block where they have three numbers."""
    grid, block = (shape([header.whole(row, c) for c in names]) for names in (_GRID, _BLOCK))
    return KernelKey((header.cell(row, "kernel_name") or "")[:MAX_STRING], grid, block)


def times_of(header: Header, row: list[str]) -> tuple[int, int] | None:
    """``(start, end)`` in ns, or None where they are not sound."""
    start, end = (header.whole(row, c) for c in _TIMES)
    return None if start is None or end is None or end < start else (start, end)


def agent_number(text: str | None) -> int | None:
    """``Agent 2``, ``GPU 2`` and ``2`` as a number."""
    found = _AGENT.search((text or "").strip())
    return int(found[1]) if found else None


class _Trace:
    """Rows with times: dispatches and copies by agent, API calls and ranges summed."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.work = Work(reading)
        self.memory: dict[str, Tally] | None = None
        self.api: dict[str, Tally] | None = None
        self.ranges: dict[str, Tally] | None = None
        self.unused: dict[str, int] = {}
        self.dispatches = self.copies = self.repeated = False
        self.unsound = 0
        self._tables: set[tuple[int, int]] = set()

    def take(self, header: Header, rows: Iterator[list[str]]) -> None:
        """One table."""
        kernels = header.has("kernel_name")
        self.dispatches = self.dispatches or kernels
        known: dict[tuple[str | None, ...], tuple[int | None, KernelKey]] = {}
        count = digest = 0
        for row in rows:
            times = times_of(header, row)
            if times is None:
                self.unsound += 1
            elif kernels:
                count += 1
                digest = (digest + hash(tuple(row))) & 0xFFFFFFFFFFFFFFFF
                # A kernel runs thousands of times: what its cells mean is found out once.
                cells = tuple(header.cell(row, name) for name in _IDENTITY)
                if (found := known.get(cells)) is None:
                    found = agent_number(cells[0]), kernel_key(header, row)
                    if len(known) < MAX_KNOWN:
                        known[cells] = found
                self.work.add(found[0], *times, found[1], identical)
            else:
                self._other(header, row, times)
        if count:
            self.repeated = self.repeated or (count, digest) in self._tables
            self._tables.add((count, digest))

    def _other(self, header: Header, row: list[str], times: tuple[int, int]) -> None:
        """A row that is no dispatch."""
        kind = (header.cell(row, "kind") or header.cell(row, "domain") or "").upper()
        if header.has("function"):
            name = header.cell(row, "function") or ""
            if kind.startswith("MARKER"):
                self.ranges = {} if self.ranges is None else self.ranges
                self._sum(self.ranges, name, times)
            else:
                self.api = {} if self.api is None else self.api
                self._sum(self.api, name, times)
        elif header.has("direction") or kind.startswith("MEMORY_COPY"):
            self._copy(header, row, times)
        else:
            self.unused[kind] = self.unused.get(kind, 0) + 1
            self.reading.count_names(len(self.unused))

    def _copy(self, header: Header, row: list[str], times: tuple[int, int]) -> None:
        self.memory = {} if self.memory is None else self.memory
        self.copies = True
        name = (header.cell(row, "direction") or header.cell(row, "kind") or "copy")[:MAX_STRING]
        self._sum(self.memory, name, times).add_bytes(None)
        way = name.upper()
        if not way.endswith("HOST_TO_HOST"):
            side = "source" if way.endswith("DEVICE_TO_HOST") else "destination"
            agent = agent_number(header.cell(row, f"{side}_agent_id"))
            self.work.add(agent, *times, name, identical)

    def _sum(self, tallies: dict[str, Tally], name: str, times: tuple[int, int]) -> Tally:
        tally = tallies.setdefault(name[:MAX_STRING], Tally())
        tally.add(times[1] - times[0])
        self.reading.count_names(len(tallies))
        return tally

    def finish(self, capture: Capture, counters: Counters) -> None:
        """Everything into the capture; what has no times of its own there is left absent."""
        if self.dispatches:
            self.work.finish(capture, {}, kernels=True)
            counters.leave_out(capture)
        elif counters.seen:
            counters.finish(capture, self.work)
        elif self.copies:
            self.work.finish(capture, {}, kernels=False)
        capture.memory_ops, capture.host_api, capture.ranges = self.memory, self.api, self.ranges
        if self.unsound:
            capture.incomplete.append(f"{self.unsound} rows have no sound times: left out")
        if self.repeated:
            capture.incomplete.append("a table of dispatches is in the file twice: counted twice")
        for kind, count in list(self.unused.items())[:20]:
            name = shown_name(kind or "an unnamed kind")
            capture.missing.append(f"{count} rows of {name} (they keep no device busy: not used)")
