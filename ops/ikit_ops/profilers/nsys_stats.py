"""What ``nsys stats`` prints, as CSV or JSON: sums by name, made by the tool itself.

The tool exits with status 0 also when a report crashed, is unknown, or found no data; then it
prints a sentence instead of a table.  A table is therefore believed when its header is there,
and each report that was asked for and brought none is named.

Its two dozen reports look alike: a name, a count and a time.  What they count is told by the
columns and by the report's name: kernels, copies, API calls and ranges have their parts here,
tables of several of them are told apart row by row, and those of other things (MPI, OpenMP)
are named and not used.  Sums hold no times of single launches: gaps and busy shares cannot be
had from them.  Versions before 2022 write the columns and the reports by other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ikit_mcp.registry import excerpt
from ikit_ops.profilers.capture import Capture, KernelKey, Shape, Tally, shape
from ikit_ops.profilers.limits import MAX_STRING, Reading, lines_of
from ikit_ops.profilers.nsys_reports import Reports
from ikit_ops.profilers.sums import (
    API,
    KERNELS,
    MEMORY,
    RANGES,
    WORDS,
    Sums,
    conclude,
    say_absent,
)
from ikit_ops.profilers.tables import TIME_UNITS, Header, header_of, number, tables_of

FORMAT = "nsys-stats"
MAX_JSON = 256 << 20
MIXED, SIZES = "mixed", "sizes"
_TOTAL = "total time"
_COUNTS = ("instances", "num calls", "count", "calls", "operations")
_NAMES = ("name", "operation", "range")
_LOWS, _HIGHS = ("min", "minimum"), ("max", "maximum")
_KERNEL_COLUMNS = frozenset(
    {"time", _TOTAL, "instances", "avg", "average", "med", "median", *_LOWS, *_HIGHS, "stddev",
     "gridxyz", "blockxyz", "name"}
)  # fmt: skip
_FOREIGN = ("source", "nvtx range", "kernel name", "api name", "pid")
_CATEGORIES = {"CUDA_KERNEL": KERNELS, "MEMORY_OPER": MEMORY, "CUDA_API": API}
_SIZES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_API_VERSION = re.compile(r"_v\d+$")
_COPY = re.compile(r"^\[CUDA memcpy ([HDAP])to([HDAP])\]$")
_PLACES = {"H": "Host", "D": "Device", "A": "Array", "P": "Peer"}
_LIST = re.compile(r"^[ \t]*\[\s*(?=[{\]]|$)")


def is_header(header: Header) -> bool:
    """Whether it is the header of a table of sums."""
    summed = _TOTAL in header.columns or "total" in header.columns
    return (
        summed
        and any(c in header.columns for c in _COUNTS)
        and any(n in header.columns for n in _NAMES)
    )


def read_csv(reading: Reading) -> Capture:
    """The tables of a CSV output."""
    reports = Reports()
    return _read(reading, reports, tables_of(reading, is_header, reports.line))


def read_json(reading: Reading) -> Capture:
    """The lists of a JSON output."""
    reports = Reports()
    return _read(reading, reports, _json_tables(reading, reports))


def _read(
    reading: Reading, reports: Reports, tables: Iterable[tuple[Header, Iterator[list[str]]]]
) -> Capture:
    capture = Capture(FORMAT, tool="nsys", grid_unit="blocks")
    found: list[Sums] = []
    sizes: list[_Table] = []
    seen = unread = names = 0
    for header, rows in tables:
        seen += 1
        table = _Table(header, reports.report, reports.source, reports.unit)
        reports.found_table(header.columns, used=table.part is not None)
        for row in rows:
            names += 1
            reading.count_names(names)
            unread += not table.take(row)
        capture.limitations += table.roundings()
        if table.part == SIZES:
            sizes.append(table)
        elif table.part is not None:
            found += table.sums(capture)
    if not seen:
        raise reports.no_table(reading)
    conclude(capture, found)
    _add_sizes(capture, sizes)
    if unread:
        capture.incomplete.append(f"{unread} rows could not be read: they were left out")
    reports.say(capture)
    say_absent(capture, "the output has no table of them")
    capture.missing.append("gaps and busy share (sums hold no times of single launches)")
    return capture


def part_of(header: Header, report: str | None) -> str | None:
    """What a table counts: a part of the capture, ``mixed``, ``sizes``, or None: nothing of it."""
    if header.has("category", "operation"):
        return MIXED
    if any(column in header.columns for column in _FOREIGN):
        return None
    if _TOTAL not in header.columns:
        return SIZES if header.has("operation") else None
    if header.has("range") or header.has("style"):
        return RANGES if report is None or "nvtx" in report else None
    if header.has("operation"):
        return MEMORY
    if header.has("instances"):
        known = report is not None and re.fullmatch(r"(cuda_)?gpu_?kern(_gb)?_?sum", report)
        alike = _KERNEL_COLUMNS.issuperset(header.columns)
        return KERNELS if known or (alike and (report is None or "kern" in report)) else None
    # Of OpenMP and OpenACC, whose regions nest, there is a count and no number of calls.
    return API if header.has("num calls") or header.has("calls") else None


@dataclass
class _Row:
    part: str
    key: KernelKey
    calls: int
    values: tuple[float | None, ...]


@dataclass
class _Table:
    """One table while it is read; its numbers are kept until all are known to be exact."""

    header: Header
    report: str | None
    source: str | None
    unit_of_title: str | None
    part: str | None = None
    scale: float | None = None
    decimals: int = 0
    rows: list[_Row] = field(default_factory=list)
    other: dict[str, int] = field(default_factory=dict)
    rounded_away: int = 0

    def __post_init__(self) -> None:
        self.part = part_of(self.header, self.report)
        sized = self.part == SIZES
        self.column = "total" if sized else _TOTAL
        self.unit = self.header.units.get(self.column) or self.unit_of_title or ""
        known = _SIZES if sized else TIME_UNITS
        self.scale = known.get(self.unit.lower() if sized else self.unit)

    def take(self, row: list[str]) -> bool:
        """Keep one row; False when it is no sound row."""
        if self.part is None:
            return True
        name = next((t for n in _NAMES if (t := self.header.cell(row, n)) is not None), None)
        counts = (self.header.whole(row, n) for n in _COUNTS)
        calls = next((count for count in counts if count is not None), None)
        total = self._value(row, self.column)
        # A cell beyond the last column is a name with a comma that was not quoted.
        beyond = any(cell.strip() for cell in row[self.header.width :])
        if name is None or beyond or calls is None or total is None or total < 0:
            return False
        if calls < 0 or (calls == 0 and total > 0):
            return False
        part = self.part
        if part == MIXED:
            category = (self.header.cell(row, "category") or "").strip()
            if category not in _CATEGORIES:
                self.other[category] = self.other.get(category, 0) + 1
                return True
            part = _CATEGORIES[category]
        key = KernelKey(self._name(part, name[:MAX_STRING]))
        if part == KERNELS:
            grid, block = (_shape(self.header.cell(row, c)) for c in ("gridxyz", "blockxyz"))
            key = KernelKey(key.name, grid, block)
        low, high = (self._first(row, names) for names in (_LOWS, _HIGHS))
        self.rows.append(_Row(part, key, calls, (total, low, high)))
        return True

    def _value(self, row: list[str], column: str) -> float | None:
        """The number of a column in the table's unit, scaled; whole numbers stay exact."""
        text = (self.header.cell(row, column) or "").strip()
        if self.scale is None:
            return None
        if self.scale == 1 and (exact := self.header.whole(row, column)) is not None:
            return exact
        value = number(text)
        if value is None:
            return None
        _, _, fraction = text.partition(".")
        if column == self.column and "e" not in fraction.lower():
            self.decimals = max(self.decimals, len(fraction))
        return value * self.scale

    def _first(self, row: list[str], columns: tuple[str, ...]) -> float | None:
        return next((v for c in columns if (v := self._value(row, c)) is not None), None)

    def _name(self, part: str, name: str) -> str:
        """The name as the other format of the same capture has it."""
        if part == API:
            prefix = "os:" if self.report is not None and "osrt" in self.report else ""
            return prefix + _API_VERSION.sub("", name)
        if part in (MEMORY, SIZES) and (found := _COPY.match(name)):
            return f"[CUDA memcpy {_PLACES[found[1]]}-to-{_PLACES[found[2]]}]"
        return name

    @property
    def step(self) -> float:
        """The last printed digit of the totals, in ns or bytes; 1 where they are exact."""
        return max((self.scale or 1.0) / 10.0**self.decimals, 1.0)

    def exact(self, value: float | None) -> int | None:
        """A number as a whole one; None for what was rounded to nothing."""
        if value is None or (self.step > 1 and round(value) == 0):
            return None
        return round(value)

    def roundings(self) -> list[str]:
        """What is to be said of rounded numbers."""
        if self.part is None or self.step <= 1 or not self.rows:
            return []
        what, unit = ("sizes", "bytes") if self.part == SIZES else ("times", "ns")
        return [
            f"{what} were printed in {self.unit}: each total is rounded to {self.step:g} {unit}"
        ]

    def sums(self, capture: Capture) -> list[Sums]:
        """The table by its parts; a table of all GPU work has kernels and memory operations."""
        parts = {self.part or ""} if self.part != MIXED else {KERNELS, MEMORY}
        parts |= {row.part for row in self.rows}
        if self.part == MIXED and self.report is not None and "api" in self.report:
            parts.add(API)
        made = {
            p: Sums(p, self.report, self.source, mixed=self.part == MIXED)
            for p in WORDS
            if p in parts
        }
        lost = 0
        for row in self.rows:
            times = [self.exact(value) for value in row.values]
            lost += times[0] is None and row.calls > 0
            made[row.part].add(row.key, row.calls, times)
        if MEMORY in made:
            for tally in made[MEMORY].rows.values():
                tally.unsized = tally.calls
        if lost:
            capture.incomplete.append(
                f"{lost} rows have no time: printed in {self.unit}, it is rounded to nothing"
            )
        for category, count in self.other.items():
            capture.missing.append(
                f"{count} rows of the category {excerpt(category, 60)} (not read)"
            )
        return list(made.values())


def _add_sizes(capture: Capture, tables: list[_Table]) -> None:
    """Bytes of memory operations, from tables of their own; each capture's once."""
    done: set[str | None] = set()
    for table in tables:
        if table.source in done:
            capture.limitations.append("a further table of sizes was left out")
            continue
        done.add(table.source)
        capture.memory_ops = capture.memory_ops or {}
        for row in table.rows:
            tally = capture.memory_ops.get(row.key.name)
            if tally is None:
                tally = capture.memory_ops[row.key.name] = Tally()
                tally.merge(row.calls, None, None, None)
                tally.unsized = row.calls
            size = table.exact(row.values[0])
            if size is not None:
                tally.unsized = max(tally.unsized - row.calls, 0)
                tally.add_bytes(size)


def _shape(text: str | None) -> Shape | None:
    """``'   1   40    3'`` as three numbers."""
    return shape(int(word) for word in (text or "").split() if word.isdecimal() and len(word) < 13)


# --- JSON ---------------------------------------------------------------------------------


def _json_tables(
    reading: Reading, reports: Reports
) -> Iterator[tuple[Header, Iterator[list[str]]]]:
    """The lists of objects in the output, as tables; the lines around them are remarks."""
    size, lines = 0, []
    for line in lines_of(reading):
        size += len(line)
        if size > MAX_JSON:
            raise reading.damaged(f"it is larger than {MAX_JSON >> 20} MiB", "use CSV or SQLite")
        lines.append(line)
    for listed in _lists(reading, "\n".join(lines), reports):
        objects = [entry for entry in listed if isinstance(entry, dict)]
        if objects:
            names = list(objects[0])
            header = header_of(names)
            if is_header(header):
                yield header, ([_cell(entry.get(n)) for n in names] for entry in objects)


def _lists(reading: Reading, text: str, reports: Reports) -> Iterator[list[Any]]:
    """Each list that begins at the start of a line."""
    import json  # msgspec decodes no list that something follows

    decoder = json.JSONDecoder()
    place = 0
    while place < len(text):
        end = text.find("\n", place)
        line = text[place : end if end >= 0 else len(text)]
        if _LIST.match(line):
            try:
                listed, end = decoder.raw_decode(text, text.index("[", place))
            except (ValueError, RecursionError):
                raise reading.damaged("a list in it is no JSON") from None
            yield listed
            end = text.find("\n", end)
        else:
            reports.line(line)
        place = end + 1 if end >= 0 else len(text)


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
