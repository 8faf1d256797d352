"""CSV tables as profilers print them: found by their header, read by the names of columns.

What a profiler prints as CSV is a log with a table in it: lines about the processing stand
before it, several tables may follow one another, columns come and go, and their case changes
with the converter.  So a table is what follows a header that has the columns a reader needs,
and a cell is looked up by its column's name.  Without such a header there is no table, whatever
exit status the tool had.

Nor does a table end where something else is printed into it: a tool's remarks (``==PROF== ...``),
an empty line, the program's own output.  Those are passed over and the rows behind them belong
to the table; what is neither a row nor a known remark is counted, and spoils the capture.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ikit_mcp.call import one_line
from ikit_ops.profilers.limits import MAX_STRING, Reading, lines_of

MAX_COLUMNS = 5_000
MAX_CELL_LINES = 50
_LARGEST = (1 << 63) - 1
_REMARK = re.compile(r"==([A-Z][A-Z ]{0,20})==")
_UNIT = re.compile(r"^(.*?)\s*\(([^()]*)\)$")
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
TIME_UNITS = {
    "ns": 1.0, "nsecond": 1.0, "nsec": 1.0, "nseconds": 1.0,
    "us": 1e3, "usecond": 1e3, "usec": 1e3, "μs": 1e3, "useconds": 1e3,
    "ms": 1e6, "msecond": 1e6, "msec": 1e6, "mseconds": 1e6,
    "s": 1e9, "sec": 1e9, "second": 1e9, "seconds": 1e9,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """A table's columns: index and unit by lower-case name without the unit."""

    columns: Mapping[str, int]
    units: Mapping[str, str]
    width: int

    def has(self, *names: str) -> bool:
        """Whether all these columns are there."""
        return all(name in self.columns for name in names)

    def cell(self, row: list[str], name: str) -> str | None:
        """The text of a column, or None where the row has none."""
        index = self.columns.get(name)
        return row[index] if index is not None and index < len(row) else None

    def number(self, row: list[str], name: str) -> float | None:
        """The number in a column, or None."""
        text = self.cell(row, name)
        return None if text is None else number(text)

    def whole(self, row: list[str], name: str) -> int | None:
        """The whole number in a column, exact however large; None where it is none."""
        return whole_number(self.cell(row, name))


def number(text: str) -> float | None:
    """A number as profilers print it, thousands commas and all; None for anything else."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text.replace(",", ""))
    return value if abs(value) < 1e300 else None


def whole_number(text: str | None) -> int | None:
    """A whole number that 64 bits hold with its sign, exact; None for anything else."""
    text = (text or "").strip().replace(",", "")
    digits = text[1:] if text[:1] == "-" else text
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 19:
        return None
    value = int(text)
    return value if abs(value) <= _LARGEST else None


def integral(text: str | None) -> int | None:
    """A whole number that may be printed with decimals (``256.000000``); None for another."""
    if (exact := whole_number(text)) is not None:
        return exact
    value = number(text or "")
    return int(value) if value is not None and value.is_integer() and abs(value) < 2**53 else None


def header_of(row: list[str]) -> Header:
    """The columns of a header row; a name that comes twice is its first column."""
    columns: dict[str, int] = {}
    units: dict[str, str] = {}
    for index, text in enumerate(row[:MAX_COLUMNS]):
        name, unit = text.strip(), ""
        if found := _UNIT.match(name):
            name, unit = found[1], found[2].strip()
        key = name.lower()
        if key not in columns:
            columns[key] = index
            units[key] = unit
    return Header(columns, units, len(row))


class Line(Enum):
    """What a line is that stands where a row could."""

    ROW = "a row, or nothing that is known"
    REMARK = "something else, which is passed over"
    END = "the beginning of something new: the table before it ends"


def tables_of(
    reading: Reading,
    is_header: Callable[[Header], bool],
    says: Callable[[str], Line] = lambda line: Line.ROW,
) -> Iterator[tuple[Header, Iterator[list[str]]]]:
    """``(header, rows)`` of each table in the file; rows must be used up before the next.

    ``says`` sees every line before it is taken for a row.  Lines that are none are counted,
    and errors that the tool printed are kept, as notes of the reading.
    """
    source = _Rows(reading, says)
    while (row := source.next(None)) is not None:
        header = header_of(row)
        if is_header(header):
            yield header, source.table(header, is_header)
    if source.stray:
        reading.note(f"{source.stray} lines among the rows of a table are no rows: left out")


class _Open(Exception):
    """A quoted cell that does not end within the bound."""


class _Rows:
    """The CSV rows of a file; a row and lines can be given back."""

    def __init__(self, reading: Reading, says: Callable[[str], Line]) -> None:
        self.stray = 0
        self._reading = reading
        self._says = says
        self._lines = lines_of(reading)
        self._given_back: deque[str] = deque()
        self._kept: list[str] | None = None

    def table(self, header: Header, is_header: Callable[[Header], bool]) -> Iterator[list[str]]:
        """Rows of a table: up to the next header, the beginning of something new, or the end."""
        while (row := self.next(header.width)) is not None:
            # Headers have no digits in their first two names, rows nearly always have.
            if row[0] and not _DIGIT.search(row[0] + row[1]) and is_header(header_of(row)):
                self._kept = row
                return
            yield row

    def next(self, width: int | None) -> list[str] | None:
        """The next row of two cells or more; None at the end.

        ``width`` is how many columns the table has; None looks for the next table.
        """
        if self._kept is not None:
            row, self._kept = self._kept, None
            return row
        while (line := self._line()) is not None:
            what = self._what(line)
            if what is Line.END and width is not None:
                return None
            if what is not Line.ROW:
                continue
            row = self._cells(line, width)
            if len(row) > 1:
                return row
            if width is not None and line.strip():
                self.stray += 1
        return None

    def _line(self) -> str | None:
        if self._given_back:
            return self._given_back.popleft()
        line = next(self._lines, None)
        return line.replace("\0", "") if line is not None and "\0" in line else line

    def _what(self, line: str) -> Line:
        if line.startswith("==") and (found := _REMARK.match(line)):
            if found[1] == "ERROR":
                self._reading.note(f"the tool said: {one_line(line, 200)}")
            return Line.REMARK
        return self._says(line)

    def _cells(self, line: str, width: int | None) -> list[str]:
        """A line's cells, each cut to its bound; none where the parser takes it for no row."""
        row = None
        if width is not None and line.count('"') % 2:
            row = self._joined(line, width)
        if row is None:
            try:
                row = next(csv.reader([line]), [])
            except csv.Error:  # a cell longer than the parser takes
                row = []
        return [cell[:MAX_STRING] for cell in row]

    def _joined(self, line: str, width: int) -> list[str] | None:
        """The row of a quoted cell that goes over several lines; None where that is no row.

        A reader must not swallow a file for one open quote: so many lines are tried, the row
        must fit the table, and otherwise the lines are read one by one.
        """
        pulled: list[str] = []

        def feed() -> Iterator[str]:
            """The line, and further ones as long as the parser asks for them."""
            yield line + "\n"
            size = len(line)
            while len(pulled) < MAX_CELL_LINES and size < MAX_STRING:
                more = self._line()
                if more is None:
                    break
                pulled.append(more)
                size += len(more)
                yield more + "\n"
            raise _Open

        try:
            row = next(csv.reader(feed()))
        except (_Open, csv.Error):
            row = []
        if 1 < len(row) <= width:
            return row
        self._given_back.extendleft(reversed(pulled))
        self._reading.note("a quoted cell has no end: its row may be wrong")
        return None
