"""What ``nsys stats`` prints, as CSV or JSON: sums by name, made by the tool itself.

The tool exits with status 0 also when a report crashed, is unknown, or found no data; then it
prints a sentence instead of a table.  A table is therefore believed when its header is there.
Sums hold no times of single launches: gaps and busy shares cannot be had from them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Shape, Tally, shape
from ikit_ops.profilers.limits import MAX_STRING, Reading, lines_of
from ikit_ops.profilers.tables import Header, header_of, tables_of

FORMAT = "nsys-stats"
MAX_JSON = 256 << 20
_FAILED = re.compile(r"^(ERROR|SKIPPED)\b.{0,300}")
_TOTAL, _MEAN = "total time", "avg"
_COUNTS = ("instances", "num calls", "count", "calls", "operations")
_NAMES = ("name", "operation", "range")


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
    return _read(reading, tables_of(reading, is_header))


def read_json(reading: Reading) -> Capture:
    """The lists of a JSON output."""
    return _read(reading, _json_tables(reading))


def _read(reading: Reading, tables: Iterable[tuple[Header, Iterator[list[str]]]]) -> Capture:
    capture = Capture(FORMAT, tool="nsys", grid_unit="blocks")
    kernels: dict[KernelKey, Tally] = {}
    seen = unread = 0
    for header, rows in tables:
        seen += 1
        for row in rows:
            unread += not _take(capture, kernels, header, row)
            reading.count_names(len(kernels))
    if not seen:
        raise _no_table(reading)
    if capture.kernels is not None:
        capture.kernels = [Kernel(key, tally) for key, tally in kernels.items()]
    if unread:
        capture.incomplete.append(f"{unread} rows could not be read: they were left out")
    capture.missing += [
        "gaps and busy share (sums hold no times of single launches)",
    ]
    return capture


def _no_table(reading: Reading) -> Exception:
    """The error for an output without a table: the tool's own sentence, where there is one."""
    for line in itertools.islice(lines_of(reading), 200):
        if _FAILED.match(line.strip()):
            return reading.damaged(f"the tool failed and said: {line.strip()[:160]}")
    return reading.damaged("it holds no table of nsys stats", "export the report to SQLite instead")


def _take(
    capture: Capture, kernels: dict[KernelKey, Tally], header: Header, row: list[str]
) -> bool:
    """One row into the part that its columns say; False when it is no sound row."""
    name = next((text for n in _NAMES if (text := header.cell(row, n)) is not None), None)
    count = next((calls for n in _COUNTS if (calls := header.whole(row, n)) is not None), None)
    if name is None or count is None or count < 0:
        return False
    name = name[:MAX_STRING]
    if _TOTAL not in header.columns:
        _sizes(capture, header, row, name)
        return True
    total = header.nanoseconds(row, _TOTAL)
    if total is None or total < 0:
        return False
    low, high = (header.nanoseconds(row, c) for c in ("min", "max"))
    if header.has("instances") and not header.has("style") and not header.has("range"):
        capture.kernels = capture.kernels or []
        grid, block = (_shape(header.cell(row, c)) for c in ("gridxyz", "blockxyz"))
        kernels.setdefault(KernelKey(name, grid, block), Tally()).merge(count, total, low, high)
        return True
    part = _part(capture, header, name)
    if part is not None:
        part.setdefault(name, Tally()).merge(count, total, low, high)
    return True


def _part(capture: Capture, header: Header, name: str) -> dict[str, Tally] | None:
    """Ranges, memory operations or API calls."""
    if header.has("range") or header.has("style"):
        capture.ranges = capture.ranges or {}
        return capture.ranges
    if header.has("operation"):
        capture.memory_ops = capture.memory_ops or {}
        return capture.memory_ops
    capture.host_api = capture.host_api or {}
    return capture.host_api


def _sizes(capture: Capture, header: Header, row: list[str], name: str) -> None:
    """The table of sizes: bytes of memory operations."""
    scale = {"mb": 1e6, "mib": 2**20, "kb": 1e3, "gb": 1e9, "b": 1}.get(
        header.units.get("total", "").lower()
    )
    total = header.number(row, "total")
    if scale is not None and total is not None and header.has("operation"):
        capture.memory_ops = capture.memory_ops or {}
        capture.memory_ops.setdefault(name, Tally()).bytes = round(total * scale)


def _shape(text: str | None) -> Shape | None:
    """``'   1   40    3'`` as three numbers."""
    return shape(int(word) for word in (text or "").split() if word.isdecimal() and len(word) < 13)


def _json_tables(reading: Reading) -> Iterator[tuple[Header, Iterator[list[str]]]]:
    """The lists of objects in the output, as tables; lines around them are passed over."""
    size, lines = 0, []
    for line in lines_of(reading):
        size += len(line)
        if size > MAX_JSON:
            raise reading.damaged(f"it is larger than {MAX_JSON >> 20} MiB", "use CSV or SQLite")
        lines.append(line)
    for text in _lists("\n".join(lines)):
        try:
            listed = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            raise reading.damaged("a list in it is no JSON") from None
        objects = [entry for entry in listed if isinstance(entry, dict)]
        if objects:
            names = list(objects[0])
            header = header_of(names)
            if is_header(header):
                yield header, ([_cell(entry.get(n)) for n in names] for entry in objects)


def _lists(text: str) -> Iterator[str]:
    """Each ``[ ... ]`` that begins and ends at the start of a line."""
    begin: int | None = None
    for found in re.finditer(r"^([\[\]])", text, re.MULTILINE):
        if found[1] == "[" and begin is None:
            begin = found.start()
        elif found[1] == "]" and begin is not None:
            yield text[begin : found.end()]
            begin = None


def _cell(value: Any) -> str:
    return "" if value is None else str(value)
