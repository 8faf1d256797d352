"""Which format a file is in, by what it holds and never by its name alone.

Reports that only their own tool can read (``.nsys-rep``, ``.ncu-rep``, ``perf.data``) are
known by their first bytes, and converted by the tool where it is here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable

from ikit_mcp.registry import OpError
from ikit_ops.profilers import (
    chrome_trace,
    ncu_csv,
    nsys_reports,
    nsys_sqlite,
    nsys_stats,
    perf_output,
    rocpd,
    rocprof_csv,
    rocprof_stats,
    speedscope,
)
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import MAX_STRING, Reading, head_of
from ikit_ops.profilers.names import NCU_REPORT, NSYS_JSON, NSYS_REPORT, PERF_DATA
from ikit_ops.profilers.sqlite_input import MAGIC, opened
from ikit_ops.profilers.tables import Line, header_of

SQLITE = "sqlite"
READERS: dict[str, Callable[[Reading], Capture]] = {
    nsys_stats.FORMAT: nsys_stats.read_csv,
    NSYS_JSON: nsys_stats.read_json,
    ncu_csv.FORMAT: ncu_csv.read,
    rocprof_csv.FORMAT: rocprof_csv.read,
    chrome_trace.FORMAT: chrome_trace.read,
    perf_output.SCRIPT: perf_output.read_script,
    perf_output.STAT: perf_output.read_stat,
    speedscope.FORMAT: speedscope.read,
}
_BINARY = ((MAGIC, SQLITE), (b"NVIDIA Tegra Profiler Report", NSYS_REPORT), (b"NVR\0", NCU_REPORT),
           (b"PERFILE2", PERF_DATA))  # fmt: skip
_HEAD_LINES = 400
# The keys of a list of sums: "Time(%)" before 2022, and only a total where it is of sizes.
_SUMS = re.compile(r'"(?:Time ?\(%\)|Total(?: Time)?(?: \(\w{1,20}\))?)" ?:')
_LIST = re.compile(r"\[\s*(?:\{|\]|$)")


def detect(reading: Reading) -> str:
    """The file's format; OpError when it is none that is known."""
    head = head_of(reading.path)
    for magic, name in _BINARY:
        if head.startswith(magic):
            return name
    text = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    found = _of_json(text) or _of_lines(text)
    if found is None:
        raise OpError(
            f"{reading.label}: the format was not recognised",
            "give one of: nsys .nsys-rep/.sqlite/stats, ncu .ncu-rep/CSV, rocprofv3 .db/CSV, "
            "a torch trace, perf script or speedscope; or name it by format",
        )
    return found


def _of_json(text: str) -> str | None:
    """The format of a JSON file, or None for what is none."""
    if text[:1] not in ("{", "["):
        return None
    if speedscope.is_begin(text):
        return speedscope.FORMAT
    if '"counter-value"' in text:
        return perf_output.STAT
    if text[:1] == "[" and _SUMS.search(text) and '"ph"' not in text:
        return NSYS_JSON
    if text[:1] == "{" or '"ph"' in text:
        return chrome_trace.FORMAT
    return None


def _of_lines(text: str) -> str | None:
    """The format of a text whose lines say it: a table's header, or a sample."""
    reports = nsys_reports.Reports()
    for line in text.splitlines()[:_HEAD_LINES]:
        if _LIST.match(line):
            return NSYS_JSON if reports.named or _SUMS.search(text) else None
        if reports.line(line) is not Line.ROW:
            continue
        if perf_output.is_head(line):
            return perf_output.SCRIPT
        try:
            row = next(csv.reader([line[:MAX_STRING]]), [])
        except csv.Error:
            continue
        if len(row) < 2:
            continue
        header = header_of(row)
        if ncu_csv.is_raw(header) or ncu_csv.is_details(header):
            return ncu_csv.FORMAT
        if rocprof_csv.is_trace(header) or rocprof_stats.is_stats(header):
            return rocprof_csv.FORMAT
        if nsys_stats.is_header(header):
            return nsys_stats.FORMAT
    if reports.named or "SKIPPED:" in text or "ERROR: Report" in text:
        return nsys_stats.FORMAT  # the reader repeats what the tool said
    return None


def read(reading: Reading, name: str) -> Capture:
    """The capture of a file in a format that is read here; Damaged when it is not."""
    if name in (SQLITE, nsys_sqlite.FORMAT, rocpd.FORMAT):
        capture = _of_sqlite(reading, name)
    else:
        capture = READERS[name](reading)
    for note in reading.notes:
        if note not in capture.incomplete:
            capture.incomplete.append(note)
    return capture


def _of_sqlite(reading: Reading, name: str) -> Capture:
    if head_of(reading.path, len(MAGIC)) != MAGIC:
        raise reading.damaged("it is no SQLite database")
    with opened(reading) as database:
        if rocpd.is_rocpd(database.tables) and name != nsys_sqlite.FORMAT:
            return rocpd.read(database)
        if nsys_sqlite.is_export(database.tables) and name != rocpd.FORMAT:
            return nsys_sqlite.read(database)
    shown = ", ".join(sorted(database.tables)[:4])[:120] or "none"
    raise reading.damaged(
        f"its tables are not those of a profiler (it has: {shown})",
        "export with: nsys export --type sqlite, or give a rocpd file",
    )
