"""The SQLite export of Nsight Systems: one table for each kind of event.

Tables that would be empty are absent, columns come and go with versions, and names are ids
into ``StringIds``; so tables and columns are looked up, never assumed.  Times are ns since the
capture began.  Kernels of a CUDA graph are rows like any other when graphs were traced node by
node; traced as whole graphs (the tool's default), a graph is one row in a table of its own, and
its kernels are nowhere.  Where the host launched graphs and neither is there, they were not
seen at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ikit_ops.profilers.capture import Capture, Graphs, KernelKey, Tally
from ikit_ops.profilers.gather import GRAPH, Label, conclude
from ikit_ops.profilers.launches import Launches, read_launches, shape_parts, unpack_shape
from ikit_ops.profilers.nsys_host import (
    NVTX,
    OSRT,
    RUNTIME,
    columns_or_line,
    graph_launches,
    read_host,
)
from ikit_ops.profilers.packing import ABSENT
from ikit_ops.profilers.sqlite_input import Database, quoted, whole
from ikit_ops.profilers.sweep import Key, Swept

FORMAT = "nsys-sqlite"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
SHAPE = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
NAMES = ("demangledName", "shortName", "mangledName")
COPY_KINDS = {
    0: "Unknown", 1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array",
    4: "Array-to-Host", 5: "Array-to-Array", 6: "Array-to-Device", 7: "Device-to-Array",
    8: "Device-to-Device", 9: "Host-to-Host", 10: "Peer-to-Peer",
}  # fmt: skip
WHOLE_GRAPHS = (
    "CUDA graphs were traced as whole graphs: kernels inside {count} graph launches were not seen"
)
_PAIRED = 50_000
Found = list[tuple[int | None, Swept]]


def is_export(tables: Iterable[str]) -> bool:
    """Whether the tables are those of an export."""
    names = set(tables)
    marks = {"META_DATA_EXPORT", "EXPORT_META_DATA", KERNELS, NVTX, OSRT, RUNTIME}
    return "StringIds" in names and bool(marks & names)


def read(database: Database) -> Capture:
    """The capture; Damaged where the table of kernels, or a time, is not what it should be."""
    capture = Capture(FORMAT, tool="nsys", grid_unit="blocks")
    capture.facts |= _facts(database)
    capture.version = capture.facts.pop("product_version", None)
    tables = [_kernels(database, capture)] if KERNELS in database.tables else []
    tables += [
        table
        for name, kind in ((MEMCPY, "copyKind"), (MEMSET, None), (GRAPHS, None))
        if (table := _other_work(database, capture, name, kind)) is not None
    ]
    found = read_launches(database, tables)
    capture.graphs = _whole_graphs(database, capture, found)
    labels = _copy_labels(database)
    capture.memory_ops = _memory(database, capture, found, labels)
    _conclude(database, capture, found, labels)
    read_host(database, capture)
    _unseen_graphs(database, capture)
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


# --- where work lies ---------------------------------------------------------------------


def _kernels(database: Database, capture: Capture) -> Launches:
    start, end = database.need(KERNELS, "start", "end")
    name = _name_column(database)
    if name is None:
        raise database.reading.damaged(f"table {KERNELS} has no column with a kernel's name")
    parts = (name, *shape_parts(database.columns(KERNELS, *SHAPE)))
    return Launches(KERNELS, start, end, _device(database, capture, KERNELS), parts)


def _name_column(database: Database) -> str | None:
    """The column with the fullest name."""
    columns = (database.columns(KERNELS, candidate) for candidate in NAMES)
    return next((found[0] for found in columns if found), None)


def _device(database: Database, capture: Capture, table: str) -> str:
    """The column with the device; rows without one are of one device of unknown id."""
    columns = columns_or_line(database, capture, "devices", table, "deviceId")
    return ABSENT if columns is None else columns[0]


def _other_work(
    database: Database, capture: Capture, table: str, kind: str | None
) -> Launches | None:
    """What is not a kernel, but keeps the GPU busy; None where it cannot be read."""
    if table not in database.tables:
        return None
    times = columns_or_line(database, capture, "busy time", table, "start", "end")
    if times is None:
        capture.incomplete.append(f"{table} has no times: GPU time that it holds was not counted")
        return None
    start, end = times
    part = (database.columns(table, kind) or [ABSENT])[0] if kind else ABSENT
    return Launches(table, start, end, _device(database, capture, table), (part,), mark=table)


def _marked(found: Found, mark: str) -> Iterable[tuple[Any, Tally]]:
    """Part and tally of the work of one table that is no kernels'."""
    for _, swept in found:
        for key, tally in swept.tallies.items():
            if key[2:] == (mark,):
                yield key[1], tally


def _whole_graphs(database: Database, capture: Capture, found: Found) -> Graphs | None:
    """Whole-graph rows: the GPU was busy, with nobody knows what."""
    if GRAPHS not in database.tables:
        return None
    graphs = Graphs()
    for _, tally in _marked(found, GRAPHS):
        graphs.whole += tally.calls
        graphs.whole_ns += tally.total_ns
    if database.columns(GRAPHS, "start", "end") is None:
        query = f"SELECT count(*) FROM {quoted(GRAPHS)}"  # noqa: S608 -- as above
        graphs.whole = whole(database.one(query)[0]) or 0
    if graphs.whole:
        capture.incomplete.append(WHOLE_GRAPHS.format(count=graphs.whole))
    return graphs


def _unseen_graphs(database: Database, capture: Capture) -> None:
    """Say where the host launched graphs whose kernels are not in the export."""
    launches = graph_launches(capture)
    if not launches or (capture.graphs is not None and capture.graphs.whole):
        return
    seen = 0
    if KERNELS in database.tables:
        node = database.columns(KERNELS, "graphNodeId")
        if node is None:
            capture.incomplete.append(
                f"{launches} CUDA graph launches: the export does not say which kernels are theirs"
            )
            return
        query = (
            f"SELECT count(*) FROM (SELECT 1 FROM {quoted(KERNELS)} "  # noqa: S608 -- as above
            f"WHERE {node[0]} <> 0 LIMIT {launches})"
        )
        seen = whole(database.one(query)[0]) or 0
    if seen < launches:
        capture.incomplete.append(
            f"{launches} CUDA graph launches, and {seen} kernels of graphs: "
            "kernels of graphs were not seen"
        )


# --- copies and sets -----------------------------------------------------------------------


def _copy_labels(database: Database) -> dict[Any, str]:
    columns = database.columns("ENUM_CUDA_MEMCPY_OPER", "id", "label")
    found: dict[Any, str] = dict(COPY_KINDS)
    if columns is not None:
        query = f'SELECT {columns[0]}, substr({columns[1]}, 1, 60) FROM "ENUM_CUDA_MEMCPY_OPER"'  # noqa: S608 -- as above
        told = {row[0]: row[1] for row in database.rows(query + " LIMIT 100")}
        found |= {key: text for key, text in told.items() if isinstance(text, str)}
    return found


def _words(mark: str, part: Any, labels: dict[Any, str]) -> str:
    """What other work than a kernel is called."""
    if mark == GRAPHS:
        return GRAPH
    if mark == MEMSET:
        return "[CUDA memset]"
    return f"[CUDA memcpy {labels.get(part, 'of an unknown kind')}]"


def _memory(
    database: Database, capture: Capture, found: Found, labels: dict[Any, str]
) -> dict[str, Tally] | None:
    """Copies and sets by kind, with their bytes; None where their tables cannot be read."""
    tallies: dict[str, Tally] = {}
    unread = False
    for table in (MEMCPY, MEMSET):
        if table not in database.tables:
            continue
        if database.columns(table, "start", "end") is None:
            unread = True
            continue
        for part, tally in _marked(found, table):
            tallies.setdefault(_words(table, part, labels), Tally()).merge(
                tally.calls, tally.total_ns, tally.min_ns, tally.max_ns
            )
        _count_bytes(database, capture, table, labels, tallies)
    return None if unread and not tallies else tallies


def _count_bytes(
    database: Database,
    capture: Capture,
    table: str,
    labels: dict[Any, str],
    tallies: dict[str, Tally],
) -> None:
    """Give tallies their bytes; a sum of which some are not known is not known."""
    columns = columns_or_line(database, capture, "bytes", table, "start", "end", "bytes")
    if columns is None:
        return
    start, end, size = columns
    kind = (database.columns(table, "copyKind") or [ABSENT])[0] if table == MEMCPY else ABSENT
    known = f"CASE WHEN typeof({size}) = 'integer' AND {size} >= 0 THEN {size} END"
    query = (
        f"SELECT {kind}, count(*), count({known}), sum({known}) FROM {quoted(table)} "  # noqa: S608 -- as above
        f"WHERE {end} >= {start} GROUP BY 1"
    )
    sums: dict[str, list[int]] = {}
    for part, rows, told, total in database.rows(query):
        row = sums.setdefault(_words(table, whole(part), labels), [0, 0])
        row[0] += rows - told
        row[1] += total or 0
    for name, (unknown, total) in sums.items():
        if unknown:
            capture.missing.append(f"bytes of {name}: {unknown} rows do not say theirs")
        elif name in tallies:
            tallies[name].bytes = total


# --- kernels ---------------------------------------------------------------------------


def _conclude(database: Database, capture: Capture, found: Found, labels: dict[Any, str]) -> None:
    """The table, the devices and the picture."""
    names, shorts = _kernel_names(database, found)

    def label(key: Key) -> Label:
        """What a key stands for; a launch's is its device, its name, its grid and block."""
        if len(key) == 3:
            return _words(key[2], key[1], labels)
        return KernelKey(names(key[1]), *unpack_shape(key[2:]), short=shorts.get(key[1]))

    labelled = [(device, swept, label) for device, swept in found]
    conclude(capture, labelled, _gpu_names(database))


def _kernel_names(
    database: Database, found: Found
) -> tuple[Callable[[int | None], str], dict[int, str]]:
    """A function from ids to kernel names, and short names by id.

    Ids that no string belongs to say so.
    """
    ids = {key[1] for _, swept in found for key in swept.tallies if len(key) > 3}
    shorts = _short_ids(database, ids)
    wanted = {i for i in (*ids, *shorts.values()) if i is not None}
    strings = database.names("StringIds", "id", "value", wanted)
    if missing := sum(1 for i in ids if i not in strings):
        database.reading.note(f"{missing} kernel names are not in the export")

    def name(number: int | None) -> str:
        """The kernel's name."""
        if number is None:
            return "[no name]"
        return strings.get(number, f"[no name, id {number}]")

    return name, {i: strings[short] for i, short in shorts.items() if short in strings}


def _short_ids(database: Database, ids: set[int | None]) -> dict[int, int]:
    """Ids of short names, as far as the first rows tell: the rest is found by the name."""
    columns = database.columns(KERNELS, "demangledName", "shortName")
    if columns is None:
        return {}
    query = f"SELECT {', '.join(columns)} FROM {quoted(KERNELS)} LIMIT {_PAIRED}"  # noqa: S608 -- as above
    found: dict[int, int] = {}
    for number, short in set(database.rows(query)):
        if number in ids and type(number) is int and type(short) is int:
            found[number] = min(short, found.get(number, short))
    return found


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
