"""The rocpd database of rocprofv3: SQLite, its tables named with the run's id.

What queries are meant to use are views, and views are programs of the file's author; so the
tables behind them are read.  Each run in the file has tables of its own (``rocpd_string_ID``).
Since version 4 of the schema times lie in a table of their own, and a dispatch names its track
instead of its agent.  The environment and the command line, which the process table may hold,
are never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ikit_ops.profilers.capture import Capture, KernelKey, Tally
from ikit_ops.profilers.gather import Label, Labels, Work, conclude, identical
from ikit_ops.profilers.launches import Launches, read_launches, shape_parts, unpack_shape
from ikit_ops.profilers.sqlite_input import Database, quoted, whole
from ikit_ops.profilers.sweep import Key, Swept, sweep

FORMAT = "rocpd"
DISPATCH = "rocpd_kernel_dispatch"
SHAPE = ("grid_size_x", "grid_size_y", "grid_size_z",
         "workgroup_size_x", "workgroup_size_y", "workgroup_size_z")  # fmt: skip
API_PREFIXES = ("hip", "hsa_", "__hip", "roc", "nccl", "rccl")


def is_rocpd(tables: Iterable[str]) -> bool:
    """Whether the tables are those of a rocpd file."""
    return any(name.startswith(DISPATCH) for name in tables)


def read(database: Database) -> Capture:
    """The capture of all runs in the file."""
    capture = Capture(FORMAT, tool="rocprofv3", grid_unit="work-items")
    capture.memory_ops, capture.host_api, capture.ranges = {}, {}, {}
    found: list[tuple[int | None, Swept, Labels]] = []
    for suffix in sorted(_suffixes(database)):
        run = _Run(database, suffix)
        found += run.launches(capture.memory_ops)
        run.regions(capture)
    conclude(capture, found, _agent_names(database))
    return capture


def _suffixes(database: Database) -> Iterator[str]:
    """What the names of each run's tables end with."""
    for name in database.tables:
        if name.startswith(DISPATCH):
            yield name.removeprefix(DISPATCH)


class _Run:
    """The tables of one run."""

    def __init__(self, database: Database, suffix: str) -> None:
        self.database = database
        self.suffix = suffix
        self._times = "rocpd_timestamp" + suffix

    def table(self, name: str) -> str:
        """The full name of one of the run's tables."""
        return f"rocpd_{name}{self.suffix}"

    def _timed(self, table: str) -> tuple[str, str, str]:
        """``(start, end, join)``: expressions, and what joins the times where they lie apart."""
        inline = self.database.columns(table, "start", "end")
        here = quoted(table)
        if inline is not None:
            return f"{here}.{inline[0]}", f"{here}.{inline[1]}", ""
        start, end = self.database.need(table, "start_id", "end_id")
        key, value = self.database.need(self._times, "id", "value")
        times = quoted(self._times)
        join = (
            f" JOIN {times} AS ikit_s ON ikit_s.{key} = {here}.{start}"
            f" JOIN {times} AS ikit_e ON ikit_e.{key} = {here}.{end}"
        )
        return f"ikit_s.{value}", f"ikit_e.{value}", join

    def _agent(self, table: str, column: str) -> tuple[str, str]:
        """``(agent, join)``: the expression of a row's agent."""
        here = quoted(table)
        if direct := self.database.columns(table, column):
            return f"{here}.{direct[0]}", ""
        track = self.database.columns(table, "track_id")
        known = self.database.columns(self.table("track"), "id", "agent_id")
        if track is None or known is None:
            return "NULL", ""
        tracks = quoted(self.table("track"))
        join = f" LEFT JOIN {tracks} AS ikit_t ON ikit_t.{known[0]} = {here}.{track[0]}"
        return f"ikit_t.{known[1]}", join

    def launches(self, memory: dict[str, Tally]) -> list[tuple[int | None, Swept, Labels]]:
        """Dispatches and copies, by agent."""
        database, table = self.database, self.table("kernel_dispatch")
        copies = Work(database.reading)
        self._copies(copies, memory)
        start, end, times = self._timed(table)
        agent, track = self._agent(table, "agent_id")
        here = quoted(table)
        name = database.need(table, "kernel_id")[0]
        columns = database.columns(table, *SHAPE)
        shapes = shape_parts(None if columns is None else [f"{here}.{c}" for c in columns])
        parts = (f"{here}.{name}", *shapes)
        launches = Launches(table, start, end, agent, parts, times + track)
        if database.one(launches.select(tail=" LIMIT 1")):
            swept = read_launches(database, launches, copies.runs)
        else:
            spans = [runs.span for runs in copies.runs.values()]
            span = (min((s[0] for s in spans), default=0), max((s[1] for s in spans), default=0))
            swept = [(device, sweep(r.blocks(), span)) for device, r in copies.runs.items()]
        label = self._labels(swept, copies)
        return [(device, one, label) for device, one in swept]

    def _labels(self, found: list[tuple[int | None, Swept]], copies: Work) -> Labels:
        """What the keys of this run stand for."""
        ids = {key[1] for _, swept in found for key in swept.tallies if len(key) > 1}
        names = self._names("info_kernel_symbol", ("display_name", "kernel_name"), ids)

        def label(key: Key) -> Label:
            """A dispatch's key begins with its agent and its kernel."""
            if len(key) == 1:
                return copies.label(key)
            return KernelKey(names(key[1]), *unpack_shape(key[2:]))

        return label

    def _names(self, table: str, columns: tuple[str, ...], ids: set[int]) -> Callable[[Any], str]:
        """A function from ids to names."""
        found: dict[int, str] = {}
        wanted = {i for i in ids if type(i) is int}
        for column in reversed(columns):
            told = self.database.names(self.table(table), "id", column, wanted)
            found |= {key: text for key, text in told.items() if text}
        if missing := sum(1 for i in ids if i not in found):
            self.database.reading.note(f"{missing} names are not in the file")
        return lambda number: found.get(number, f"[no name, id {number}]")

    def _copies(self, work: Work, memory: dict[str, Tally]) -> None:
        """Memory copies, with their bytes."""
        table = self.table("memory_copy")
        if table not in self.database.tables:
            return
        start, end, times = self._timed(table)
        agent, track = self._agent(table, "dst_agent_id")
        here = quoted(table)
        name, size = (
            f"{here}.{found[0]}" if (found := self.database.columns(table, column)) else "NULL"
            for column in ("name_id", "size")
        )
        query = f"SELECT {start}, {end}, {agent}, {name}, {size} FROM {here}{times}{track}"  # noqa: S608 -- quoted names of the schema
        rows = list(self.database.rows(query))
        self.database.reading.count_names(len(rows))
        names = self._names("string", ("string",), {row[3] for row in rows if row[3] is not None})
        for row in rows:
            begin, stop = whole(row[0]), whole(row[1])
            if begin is None or stop is None or stop < begin:
                raise self.database.reading.damaged(f"times in {table} are not sound")
            label = names(row[3]) if row[3] is not None else "memory copy"
            tally = memory.setdefault(label, Tally(bytes=0))
            tally.add(stop - begin)
            tally.bytes = (tally.bytes or 0) + (whole(row[4]) or 0)
            work.add(whole(row[2]), begin, stop, label, identical)

    def regions(self, capture: Capture) -> None:
        """Host regions: API calls by the prefix of their name, everything else is a range."""
        table = self.table("region")
        if table not in self.database.tables:
            return
        start, end, times = self._timed(table)
        name = f"{quoted(table)}.{self.database.need(table, 'name_id')[0]}"
        length = f"{end} - {start}"
        query = (
            f"SELECT {name}, count(*), sum({length}), min({length}), max({length}) "  # noqa: S608 -- as above
            f"FROM {quoted(table)}{times} WHERE {end} >= {start} GROUP BY 1"
        )
        rows = list(self.database.rows(query))
        names = self._names("string", ("string",), {row[0] for row in rows})
        for number, calls, *told in rows:
            total, low, high = map(whole, told)
            if total is None:
                raise self.database.reading.damaged(f"times in {table} are not whole numbers")
            text = names(number)
            part = capture.host_api if text.startswith(API_PREFIXES) else capture.ranges
            if part is not None:
                part.setdefault(text, Tally()).merge(calls, total, low, high)


def _agent_names(database: Database) -> dict[int, str]:
    """Agents by id."""
    found: dict[int, str] = {}
    for table in database.tables:
        if not table.startswith("rocpd_info_agent"):
            continue
        for column in ("name", "model_name", "product_name"):
            columns = database.columns(table, "id", column)
            if columns is None:
                continue
            query = f"SELECT {columns[0]}, substr({columns[1]}, 1, 100) FROM {quoted(table)}"  # noqa: S608 -- as above
            for number, text in database.rows(query + " LIMIT 1000"):
                if type(number) is int and isinstance(text, str) and text:
                    found[number] = text
    return found
