"""The SQLite export of Nsight Systems: one table for each kind of event.

Tables that would be empty are absent, columns come and go with versions, and names are ids
into ``StringIds``; so tables and columns are looked up, never assumed.  Times are ns since the
capture began.  Kernels of a CUDA graph are rows like any other when graphs were traced node by
node; traced as whole graphs (the tool's default), a graph is one row in a table of its own, and
its kernels are nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from ikit_ops.profilers.capture import Capture, Graphs, KernelKey, Tally
from ikit_ops.profilers.gather import GRAPH, Label, Work, conclude, identical
from ikit_ops.profilers.launches import Launches, read_launches, shape_parts, unpack_shape
from ikit_ops.profilers.limits import MAX_STRING
from ikit_ops.profilers.sqlite_input import Database, quoted, whole
from ikit_ops.profilers.sweep import Key, Runs, Swept, sweep

FORMAT = "nsys-sqlite"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
NVTX = "NVTX_EVENTS"
OSRT = "OSRT_API"
DIAGNOSTICS = "DIAGNOSTIC_EVENT"
SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
COPY_KINDS = {
    0: "Unknown", 1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array",
    4: "Array-to-Host", 5: "Array-to-Array", 6: "Array-to-Device", 7: "Device-to-Array",
    8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
}  # fmt: skip
WHOLE_GRAPHS = (
    "CUDA graphs were traced as whole graphs: kernels inside {count} graph launches were not seen"
)
_LOSS = re.compile(r"\b(dropped|lost|discarded|overflow|not collected|missing)\b", re.IGNORECASE)
_API_VERSION = re.compile(r"_v\d+$")


def is_export(tables: Iterable[str]) -> bool:
    """Whether the tables are those of an export."""
    names = set(tables)
    marks = {"META_DATA_EXPORT", "EXPORT_META_DATA", KERNELS, NVTX, OSRT, RUNTIME}
    return "StringIds" in names and bool(marks & names)


def read(database: Database) -> Capture:
    """The capture; Damaged where a table is not what it should be."""
    capture = Capture(FORMAT, tool="nsys", grid_unit="blocks")
    capture.facts |= _facts(database)
    capture.version = capture.facts.pop("product_version", None)
    extra = Work(database.reading)
    capture.memory_ops = _memory(database, extra)
    _graphs(database, extra, capture)
    _kernels(database, extra, capture)
    capture.host_api = _host_api(database)
    capture.ranges = _ranges(database)
    _losses(database, capture)
    return capture


def _facts(database: Database) -> dict[str, Any]:
    """Versions, as the export says them."""
    found: dict[str, Any] = {}
    wanted = {
        "EXPORT_PRODUCT_VERSION": "product_version",
        "EXPORT_SCHEMA_VERSION": "schema_version",
    }
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        columns = database.columns(table, "name", "value")
        if columns is None:
            continue
        query = f"SELECT {columns[0]}, substr({columns[1]}, 1, 100) FROM {quoted(table)} LIMIT 1000"  # noqa: S608 -- quoted names of the schema
        for name, value in database.rows(query):
            if name in wanted and isinstance(value, str):
                found[wanted[name]] = value
    return found


# --- what is not a kernel, but keeps the GPU busy ----------------------------------------


def _memory(database: Database, extra: Work) -> dict[str, Tally]:
    """Copies and sets by kind, with their bytes."""
    found: dict[str, Tally] = {}
    labels = _copy_labels(database)
    for table in (MEMCPY, MEMSET):
        if table not in database.tables:
            continue
        start, end, device, size = database.need(table, "start", "end", "deviceId", "bytes")
        kind = (database.columns(table, "copyKind") or ["NULL"])[0]
        query = f"SELECT {start}, {end}, {device}, {kind}, {size} FROM {quoted(table)}"  # noqa: S608 -- as above
        for row in database.rows(query):
            begin, stop = whole(row[0]), whole(row[1])
            if begin is None or stop is None or stop < begin:
                raise database.reading.damaged(f"times in {table} are not sound")
            label = "[CUDA memset]"
            if table == MEMCPY:
                label = f"[CUDA memcpy {labels.get(row[3], 'of an unknown kind')}]"
            tally = found.setdefault(label, Tally(bytes=0))
            tally.add(stop - begin)
            tally.bytes = (tally.bytes or 0) + (whole(row[4]) or 0)
            extra.add(whole(row[2]), begin, stop, label, identical)
    return found


def _copy_labels(database: Database) -> dict[Any, str]:
    columns = database.columns("ENUM_CUDA_MEMCPY_OPER", "id", "label")
    found: dict[Any, str] = dict(COPY_KINDS)
    if columns is not None:
        query = f'SELECT {columns[0]}, substr({columns[1]}, 1, 60) FROM "ENUM_CUDA_MEMCPY_OPER"'  # noqa: S608 -- as above
        told = {row[0]: row[1] for row in database.rows(query + " LIMIT 100")}
        found |= {key: text for key, text in told.items() if isinstance(text, str)}
    return found


def _graphs(database: Database, extra: Work, capture: Capture) -> None:
    """Whole-graph rows: the GPU was busy, with nobody knows what."""
    if GRAPHS not in database.tables:
        return
    start, end, device = database.need(GRAPHS, "start", "end", "deviceId")
    graphs = Graphs()
    for row in database.rows(f"SELECT {start}, {end}, {device} FROM {quoted(GRAPHS)}"):  # noqa: S608 -- as above
        begin, stop = whole(row[0]), whole(row[1])
        if begin is None or stop is None or stop < begin:
            raise database.reading.damaged(f"times in {GRAPHS} are not sound")
        graphs.whole += 1
        graphs.whole_ns += stop - begin
        extra.add(whole(row[2]), begin, stop, GRAPH, identical)
    capture.graphs = graphs
    if graphs.whole:
        capture.incomplete.append(WHOLE_GRAPHS.format(count=graphs.whole))


# --- kernels ---------------------------------------------------------------------------


def _kernels(database: Database, extra: Work, capture: Capture) -> None:
    """The table, the devices and the picture."""
    if KERNELS in database.tables:
        found = read_launches(database, _launches(database), extra.runs)
    else:
        found = read_without_kernels(extra.runs)
    names = _kernel_names(database, found)

    def label(key: Key) -> Label:
        """What a key stands for; a launch's begins with its device and its name."""
        if len(key) == 1:
            return extra.label(key)
        return KernelKey(names(key), *unpack_shape(key[2:]))

    labelled = [(device, swept, label) for device, swept in found]
    conclude(capture, labelled, _gpu_names(database))


def _launches(database: Database) -> Launches:
    start, end, device = database.need(KERNELS, "start", "end", "deviceId")
    for candidate in ("demangledName", "shortName", "mangledName"):
        name = database.columns(KERNELS, candidate)
        if name is not None:
            break
    else:
        raise database.reading.damaged(f"table {KERNELS} has no column with a kernel's name")
    parts = (name[0], *shape_parts(database.columns(KERNELS, *SHAPE)))
    return Launches(KERNELS, start, end, device, parts)


def _kernel_names(
    database: Database, found: list[tuple[int | None, Swept]]
) -> Callable[[Key], str]:
    """A function from keys to kernel names; ids that no string belongs to say so."""
    ids = {key[1] for _, swept in found for key in swept.tallies if len(key) > 1}
    strings = database.names("StringIds", "id", "value", {i for i in ids if type(i) is int})
    if missing := sum(1 for i in ids if i not in strings):
        database.reading.note(f"{missing} kernel names are not in the export")

    def name(key: Key) -> str:
        """The kernel's name."""
        return strings.get(key[1], f"[no name, id {key[1]}]")

    return name


def read_without_kernels(extra: dict[int | None, Runs]) -> list[tuple[int | None, Swept]]:
    """The devices of a capture that holds memory operations alone."""
    spans = [runs.span for runs in extra.values()]
    span = (min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0))
    return [(device, sweep(runs.blocks(), span)) for device, runs in extra.items()]


def _gpu_names(database: Database) -> dict[int, str]:
    columns = database.columns("TARGET_INFO_GPU", "id", "name")
    if columns is None:
        return {}
    query = f'SELECT {columns[0]}, substr({columns[1]}, 1, 100) FROM "TARGET_INFO_GPU" LIMIT 1000'  # noqa: S608 -- as above
    return {
        row[0]: row[1]
        for row in database.rows(query)
        if type(row[0]) is int and isinstance(row[1], str)
    }


# --- the host --------------------------------------------------------------------------


def _host_api(database: Database) -> dict[str, Tally] | None:
    """CUDA API calls, and calls into the operating system (``os:NAME``)."""
    found: dict[str, Tally] = {}
    for table, prefix in ((RUNTIME, ""), (OSRT, "os:")):
        if table not in database.tables:
            continue
        start, end, name = database.need(table, "start", "end", "nameId")
        grouped = _grouped(database, table, start, end, (name,))
        strings = database.names(
            "StringIds", "id", "value", {k[0] for k in grouped if type(k[0]) is int}
        )
        for (number,), tally in grouped.items():
            text = strings.get(number, f"[no name, id {number}]")
            text = prefix + _API_VERSION.sub("", text)
            found.setdefault(text, Tally()).merge(
                tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
            )
    return found


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


def _ranges(database: Database) -> dict[str, Tally] | None:
    """NVTX ranges by text; marks, which have no end, are left out."""
    if NVTX not in database.tables:
        return {}
    start, end = database.need(NVTX, "start", "end")
    ids = (database.columns(NVTX, "textId") or ["NULL"])[0]
    text = (database.columns(NVTX, "text") or ["NULL"])[0]
    grouped = _grouped(database, NVTX, start, end, (ids, f"substr({text}, 1, {MAX_STRING})"))
    strings = database.names(
        "StringIds", "id", "value", {key[0] for key in grouped if type(key[0]) is int}
    )
    found: dict[str, Tally] = {}
    for (number, literal), tally in grouped.items():
        name = literal if isinstance(literal, str) else strings.get(number, "[no name]")
        found.setdefault(name, Tally()).merge(
            tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
        )
    return found


def _losses(database: Database, capture: Capture) -> None:
    """What the profiler itself says it lost."""
    columns = database.columns(DIAGNOSTICS, "text")
    if columns is None:
        return
    query = f"SELECT substr({columns[0]}, 1, 300) FROM {quoted(DIAGNOSTICS)} LIMIT 1000"  # noqa: S608 -- as above
    for (text,) in database.rows(query):
        if isinstance(text, str) and _LOSS.search(text):
            capture.incomplete.append(f"the profiler says: {text}")
            if len(capture.incomplete) > 20:
                return
