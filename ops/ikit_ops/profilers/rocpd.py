"""The rocpd database of rocprofv3: SQLite, its tables named with the run's id.

What queries are meant to use are views, and views are programs of the file's author; so the
tables behind them are read.  Each run in the file has tables of its own (``rocpd_string_ID``).
Since version 4 of the schema times lie in a table of their own, and a dispatch names its track
instead of its agent.  The environment and the command line, which the process table may hold,
are never read.

Several processes may have worked on one agent: its busy time is the union of what all of them
did, so the dispatches of all runs go through one pass.  A copy to the host belongs to the
agent that it comes from: the host's own agent is no device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ikit_ops.profilers.capture import Capture, KernelKey, Tally
from ikit_ops.profilers.gather import Label, Work, conclude, identical
from ikit_ops.profilers.launches import Launches, read_launches, shape_parts, unpack_shape
from ikit_ops.profilers.rocpd_agents import NOWHERE, Agents
from ikit_ops.profilers.rocprof_stats import is_api
from ikit_ops.profilers.sqlite_input import Database, quoted, whole
from ikit_ops.profilers.sums import say_absent
from ikit_ops.profilers.sweep import Key, Swept

FORMAT = "rocpd"
DISPATCH = "rocpd_kernel_dispatch"
MAX_RUNS = 256
SHAPE = ("grid_size_x", "grid_size_y", "grid_size_z",
         "workgroup_size_x", "workgroup_size_y", "workgroup_size_z")  # fmt: skip
_MARKER = re.compile(r"MARKER|ROCTX", re.IGNORECASE)


def is_rocpd(tables: Iterable[str]) -> bool:
    """Whether the tables are those of a rocpd file."""
    return any(name.startswith(DISPATCH) for name in tables)


def read(database: Database) -> Capture:
    """The capture of all runs in the file."""
    capture = Capture(FORMAT, tool="rocprofv3", grid_unit="work-items")
    suffixes = sorted(_suffixes(database))
    if len(suffixes) > MAX_RUNS:
        raise database.reading.damaged(f"it holds more than {MAX_RUNS} runs")
    agents = Agents(database)
    runs = [_Run(database, suffix, agents) for suffix in suffixes]
    copies = Work(database.reading)
    for run in runs:
        run.copies(capture, copies)
        run.regions(capture)
    tables = [run.launches(number, len(runs)) for number, run in enumerate(runs)]
    swept = read_launches(database, tables, copies.runs)
    label = _labels(runs, swept, copies)
    conclude(capture, [(device, one, label) for device, one in swept], agents.names)
    for device in capture.devices or ():
        device.id = agents.own_id(device.id)
    say_absent(capture, "the file has no table of them")
    return capture


def _suffixes(database: Database) -> Iterator[str]:
    """What the names of each run's tables end with."""
    for name in database.tables:
        if name.startswith(DISPATCH):
            yield name.removeprefix(DISPATCH)


def _labels(
    runs: list[_Run], swept: list[tuple[int | None, Swept]], copies: Work
) -> Callable[[Key], Label]:
    """What the keys stand for; a dispatch's name is the kernel's id and the run in one number."""
    ids: list[set[int]] = [set() for _ in runs]
    for _, one in swept:
        for key in one.tallies:
            if len(key) > 1 and key[1] is not None:
                ids[key[1] % len(runs)].add(key[1] // len(runs))
    names = [
        run.names("info_kernel_symbol", ("display_name", "kernel_name"), wanted)
        for run, wanted in zip(runs, ids, strict=True)
    ]

    def label(key: Key) -> Label:
        """A dispatch's key begins with its agent and its kernel."""
        if len(key) == 1:
            return copies.label(key)
        if key[1] is None:
            return KernelKey("[no name]", *unpack_shape(key[2:]))
        own, number = divmod(key[1], len(runs))
        return KernelKey(names[number](own), *unpack_shape(key[2:]))

    return label


class _Run:
    """The tables of one run."""

    def __init__(self, database: Database, suffix: str, agents: Agents) -> None:
        self.database = database
        self.devices = agents.of_run(suffix)
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

    def launches(self, number: int, count: int) -> Launches:
        """Where the dispatches of this run lie, which is the ``number``-th of ``count``."""
        database, table = self.database, self.table("kernel_dispatch")
        start, end, times = self._timed(table)
        agent, track = self._agent(table, "agent_id")
        here = quoted(table)
        name = f"{here}.{database.need(table, 'kernel_id')[0]}"
        if count > 1:
            name = f"({name} * {count} + {number})"
        columns = database.columns(table, *SHAPE)
        shapes = shape_parts(None if columns is None else [f"{here}.{c}" for c in columns])
        device = self.devices.expression(agent)
        return Launches(table, start, end, device, (name, *shapes), times + track)

    def names(self, table: str, columns: tuple[str, ...], ids: set[int]) -> Callable[[Any], str]:
        """A function from ids to names."""
        found: dict[int, str] = {}
        wanted = {i for i in ids if type(i) is int}
        for column in reversed(columns):
            told = self.database.names(self.table(table), "id", column, wanted)
            found |= {key: text for key, text in told.items() if text}
        if missing := sum(1 for i in ids if i not in found):
            self.database.reading.note(f"{missing} names are not in the file")
        return lambda number: found.get(number, f"[no name, id {number}]")

    def copies(self, capture: Capture, work: Work) -> None:
        """Memory copies, with their bytes, by the agent that they keep busy."""
        database, table = self.database, self.table("memory_copy")
        if table not in database.tables:
            return
        capture.memory_ops = memory = capture.memory_ops or {}
        start, end, times = self._timed(table)
        agent, track = self._agent(table, "dst_agent_id")
        here = quoted(table)
        source, name, size = (
            f"{here}.{found[0]}" if (found := database.columns(table, column)) else "NULL"
            for column in ("src_agent_id", "name_id", "size")
        )
        different = f"SELECT DISTINCT {name} FROM {here} LIMIT {MAX_KINDS + 1}"  # noqa: S608 -- quoted names of the schema
        ids = {row[0] for row in database.rows(different) if row[0] is not None}
        if len(ids) > MAX_KINDS:
            raise database.reading.damaged(f"{table} names more than {MAX_KINDS} kinds of copies")
        names = self.names("string", ("string",), ids)
        query = (
            f"SELECT {start}, {end}, {agent}, {source}, {name}, {size} FROM {here}{times}{track}"  # noqa: S608 -- as above
        )
        for row in database.rows(query):
            begin, stop = whole(row[0]), whole(row[1])
            if begin is None or stop is None or stop < begin:
                raise database.reading.damaged(f"times in {table} are not sound")
            label = names(row[4]) if row[4] is not None else "memory copy"
            tally = memory.setdefault(label, Tally())
            tally.add(stop - begin)
            tally.add_bytes(whole(row[5]))
            busy = self.devices.device(whole(row[2]), whole(row[3]))
            if busy is not NOWHERE:
                work.add(busy, begin, stop, label, identical)

    def regions(self, capture: Capture) -> None:
        """Host regions: API calls and ranges, by their category or else by their name."""
        database, table = self.database, self.table("region")
        if table not in database.tables:
            return
        capture.host_api, capture.ranges = capture.host_api or {}, capture.ranges or {}
        start, end, times = self._timed(table)
        name = f"{quoted(table)}.{database.need(table, 'name_id')[0]}"
        category, event = self._category(table)
        length = f"{end} - {start}"
        query = (
            f"SELECT {name}, {category}, count(*), sum({length}), min({length}), max({length}) "  # noqa: S608 -- as above
            f"FROM {quoted(table)}{times}{event} WHERE {end} >= {start} GROUP BY 1, 2"
        )
        rows = list(database.rows(query))
        ids = {number for row in rows for number in row[:2] if number is not None}
        names = self.names("string", ("string",), ids)
        for number, kind, calls, *told in rows:
            total, low, high = map(whole, told)
            if total is None:
                raise database.reading.damaged(f"times in {table} are not whole numbers")
            text = names(number)
            part = capture.host_api if _is_call(text, names(kind) if kind else "") else None
            part = capture.ranges if part is None else part
            part.setdefault(text, Tally()).merge(calls, total, low, high)
        query = f"SELECT count(*) FROM {quoted(table)}"  # noqa: S608 -- as above
        if lost := (whole(database.one(query)[0]) or 0) - sum(row[2] for row in rows):
            capture.incomplete.append(f"{lost} regions have no end behind their start: left out")

    def _category(self, table: str) -> tuple[str, str]:
        """``(category, join)``: the id of a region's category, NULL where there is none."""
        event = self.database.columns(table, "event_id")
        known = self.database.columns(self.table("event"), "id", "category_id")
        if event is None or known is None:
            return "NULL", ""
        events = quoted(self.table("event"))
        join = f" LEFT JOIN {events} AS ikit_c ON ikit_c.{known[0]} = {quoted(table)}.{event[0]}"
        return f"ikit_c.{known[1]}", join


MAX_KINDS = 10_000


def _is_call(name: str, category: str) -> bool:
    """Whether a region is an API call: a marker is a range, whatever its name begins with."""
    if _MARKER.search(category):
        return False
    return "_API" in category.upper() or is_api(name)
