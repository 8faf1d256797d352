"""The host's side of an Nsight Systems export: API calls, ranges, and what the tool says it lost.

None of it is needed for the table of kernels, so what an export lacks here refuses nothing: the
part is None, or holds what could be read, and ``missing`` names the rest.
"""

from __future__ import annotations

import re
from typing import Any

from ikit_ops.profilers.capture import Capture, Tally
from ikit_ops.profilers.limits import MAX_STRING
from ikit_ops.profilers.sqlite_input import Database, quoted, whole

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
NVTX = "NVTX_EVENTS"
OSRT = "OSRT_API"
DIAGNOSTICS = "DIAGNOSTIC_EVENT"
MAX_SAID = 20
_GRAPH_LAUNCH = re.compile(r"cu(da)?GraphLaunch(_pt[sd]z)?")
_API_VERSION = re.compile(r"_v\d+$")
_RANGES = "(59, 60)"
"""Types of NVTX events that have an end: pushed and popped, started and ended."""
_LOSS = re.compile(
    r"\b(dropped|lost|discarded|overflow\w*|overrun|missing|truncated|incomplete)\b"
    r"|\bnot all\b.*\b(collected|recorded|captured|processed)\b"
    r"|\bmight (not have|have not|have been (lost|dropped))\b"
    r"|\b(not|could not be|were not|was not) (collected|recorded|captured)\b"
    r"|\bbuffers? (is|are|was|were) full\b",
    re.IGNORECASE,
)
_HOST_ONLY = re.compile(r"\b(nvtx|os runtime|osrt)\b", re.IGNORECASE)


def read_host(database: Database, capture: Capture) -> None:
    """Add the host's API calls, the ranges and the losses to the capture."""
    capture.host_api = _host_api(database, capture)
    capture.ranges = _ranges(database, capture)
    _losses(database, capture)


def graph_launches(capture: Capture) -> int:
    """How many CUDA graphs the host launched; 0 where its calls are not known."""
    calls = capture.host_api or {}
    return sum(tally.calls for name, tally in calls.items() if _GRAPH_LAUNCH.fullmatch(name))


def columns_or_line(
    database: Database, capture: Capture, what: str, table: str, *names: str
) -> list[str] | None:
    """The quoted columns of a table; None, with a line in ``missing``, where one is absent."""
    found = database.columns(table, *names)
    if found is None:
        known = database.tables[table]
        absent = ", ".join(name for name in names if name.lower() not in known)
        capture.missing.append(f"{what}: table {table} has no column {absent}")
    return found


def _host_api(database: Database, capture: Capture) -> dict[str, Tally] | None:
    """CUDA API calls, and calls into the operating system (``os:NAME``)."""
    found: dict[str, Tally] = {}
    unread = False
    for table, prefix in ((RUNTIME, ""), (OSRT, "os:")):
        if table not in database.tables:
            continue
        columns = columns_or_line(
            database, capture, "host API calls", table, "start", "end", "nameId"
        )
        if columns is None:
            unread = True
            continue
        start, end, name = columns
        grouped = _grouped(database, table, start, end, (name,))
        strings = _strings(database, {key[0] for key in grouped})
        for (number,), tally in grouped.items():
            text = strings.get(number, f"[no name, id {number}]")
            text = prefix + _API_VERSION.sub("", text)
            found.setdefault(text, Tally()).merge(
                tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
            )
        rows = whole(database.one(f"SELECT count(*) FROM {quoted(table)}")[0]) or 0  # noqa: S608 -- quoted names of the schema
        if left := rows - sum(tally.calls for tally in grouped.values()):
            capture.missing.append(
                f"host API calls: {left} of {table} have no end, or one before their start"
            )
    return None if unread and not found else found


def _strings(database: Database, ids: set[Any]) -> dict[Any, str]:
    return dict(database.names("StringIds", "id", "value", {i for i in ids if type(i) is int}))


def _grouped(
    database: Database, table: str, start: str, end: str, columns: tuple[str, ...]
) -> dict[tuple[Any, ...], Tally]:
    """Tallies by some columns; rows without an end are left out."""
    names = ", ".join(columns)
    duration = f"{end} - {start}"
    query = (
        f"SELECT count(*), sum({duration}), min({duration}), max({duration}), {names} "  # noqa: S608 -- as above
        f"FROM {quoted(table)} WHERE {end} >= {start} GROUP BY {names}"
    )
    found: dict[tuple[Any, ...], Tally] = {}
    for calls, total, low, high, *key in database.rows(query):
        numbers = [whole(n) for n in (total, low, high)]
        if None in numbers:
            raise database.reading.damaged(f"times in {table} are not whole numbers")
        tally = found[tuple(key)] = Tally()
        tally.merge(calls, numbers[0] or 0, numbers[1], numbers[2])
        database.reading.count_names(len(found))
    return found


def _ranges(database: Database, capture: Capture) -> dict[str, Tally] | None:
    """NVTX ranges by text; marks, which have no end, are left out."""
    if NVTX not in database.tables:
        return {}
    columns = columns_or_line(database, capture, "ranges", NVTX, "start", "end")
    if columns is None:
        return None
    start, end = columns
    ids = (database.columns(NVTX, "textId") or ["NULL"])[0]
    text = (database.columns(NVTX, "text") or ["NULL"])[0]
    grouped = _grouped(database, NVTX, start, end, (ids, f"substr({text}, 1, {MAX_STRING})"))
    strings = _strings(database, {key[0] for key in grouped})
    found: dict[str, Tally] = {}
    for (number, literal), tally in grouped.items():
        name = literal if isinstance(literal, str) else strings.get(number, "[no name]")
        found.setdefault(name, Tally()).merge(
            tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
        )
    if kind := database.columns(NVTX, "eventType"):
        query = (
            f"SELECT count(*) FROM {quoted(NVTX)} "  # noqa: S608 -- as above
            f"WHERE {kind[0]} IN {_RANGES} AND ({end} IS NULL OR {end} < {start})"
        )
        if open_ranges := database.one(query)[0]:
            capture.missing.append(f"ranges: {open_ranges} of them have no end")
    return found


def _losses(database: Database, capture: Capture) -> None:
    """What the profiler itself says it lost.

    The tool warns for each process and each kind of event.  Lost ranges or calls into the
    operating system leave the table of kernels whole: they are named as missing alone.
    """
    columns = database.columns(DIAGNOSTICS, "text")
    if columns is None:
        return
    query = (
        f"SELECT substr({columns[0]}, 1, 300), count(*) FROM {quoted(DIAGNOSTICS)} "  # noqa: S608 -- as above
        "GROUP BY 1 LIMIT 10000"
    )
    said = 0
    for text, count in database.rows(query):
        if said < MAX_SAID and isinstance(text, str) and _LOSS.search(text):
            said += 1
            times = f" ({count} times)" if count > 1 else ""
            host = _HOST_ONLY.search(text) and "cuda" not in text.lower()
            lines = capture.missing if host else capture.incomplete
            lines.append(f"the profiler says{times}: {text}")
