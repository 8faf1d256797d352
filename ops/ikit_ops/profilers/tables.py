"""CSV tables as profilers print them: found by their header, read by the names of columns.

What a profiler prints as CSV is a log with a table in it: lines about the processing stand
before it, several tables may follow one another, columns come and go, and their case changes
with the converter.  So a table is what follows a header that has the columns a reader needs,
and a cell is looked up by its column's name.  Without such a header there is no table, whatever
exit status the tool had.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ikit_ops.profilers.limits import MAX_STRING, Reading, lines_of

MAX_COLUMNS = 5_000
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

    def nanoseconds(self, row: list[str], name: str) -> int | None:
        """The time in a column as ns, by the unit of its header."""
        scale = TIME_UNITS.get(self.units.get(name, "ns"))
        if scale == 1.0 and (exact := self.whole(row, name)) is not None:
            return exact
        value = self.number(row, name)
        return None if value is None or scale is None else round(value * scale)


def number(text: str) -> float | None:
    """A number as profilers print it, thousands commas and all; None for anything else."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    value = float(text.replace(",", ""))
    return value if abs(value) < 1e300 else None


def whole_number(text: str | None) -> int | None:
    """A whole number of at most 18 digits, exact; None for anything else."""
    text = (text or "").strip().replace(",", "")
    digits = text[1:] if text[:1] == "-" else text
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 18:
        return None
    return int(text)


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
    return Header(columns, units)


def tables_of(
    reading: Reading, is_header: Callable[[Header], bool]
) -> Iterator[tuple[Header, Iterator[list[str]]]]:
    """``(header, rows)`` of each table in the file; rows must be used up before the next."""
    source = _Rows(reading)
    for row in source:
        if len(row) < 2:
            continue
        header = header_of(row)
        if is_header(header):
            yield header, source.until_blank(is_header)


class _Rows:
    """The CSV rows of a file; one row can be given back."""

    def __init__(self, reading: Reading) -> None:
        # A quoted cell may hold line ends: kernel names never do, but a reader must not
        # swallow a file for one open quote, so each line is parsed for itself.
        self._lines = lines_of(reading)
        self._kept: list[str] | None = None

    def __iter__(self) -> Iterator[list[str]]:
        return self

    def __next__(self) -> list[str]:
        if self._kept is not None:
            row, self._kept = self._kept, None
            return row
        while True:
            line = next(self._lines)
            if "\0" in line:
                line = line.replace("\0", "")
            try:
                row = next(csv.reader([line]), [])
            except csv.Error:  # a cell longer than the parser takes
                continue
            return [cell[:MAX_STRING] for cell in row]

    def until_blank(self, is_header: Callable[[Header], bool]) -> Iterator[list[str]]:
        """Rows of a table: up to an empty line, a line that is no row, or the next header."""
        for row in self:
            if len(row) < 2:
                return
            # Headers have no digits in their first two names, rows nearly always have.
            if row[0] and not _DIGIT.search(row[0] + row[1]) and is_header(header_of(row)):
                self._kept = row
                return
            yield row
