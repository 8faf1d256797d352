"""Launches in SQL tables: read in one pass, millions of them.

SQL's GROUP BY over a row's whole identity (name, grid, block) sorts all rows by seven columns,
and says nothing about gaps; a second query for those reads the table again.  One pass in
Python over ``(start, end, key)`` costs less than that one GROUP BY and finds both.  Handing a
column from SQL to Python costs more than reading it, so SQL packs a row's identity into one
integer (``packing``).  Names stay numbers until the end: only the few hundred that occur are
looked up.

Kernels, copies and graphs lie in tables of their own; they are read side by side and merged by
their start.  Rows are taken as they lie, which is in the order of their starts in what the
tools write; where they do not, the pass begins again with SQL sorting.  What is beside each
other in the file may be on different devices: rows of several are handed to a pass for each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

from ikit_ops.profilers.capture import Shape, shape
from ikit_ops.profilers.limits import Reading
from ikit_ops.profilers.packing import ABSENT, Packing
from ikit_ops.profilers.sqlite_input import Database, quoted, whole
from ikit_ops.profilers.sweep import (
    RUN_ROWS,
    Foreign,
    Key,
    Pass,
    Row,
    Runs,
    Swept,
    Unordered,
    no_collecting,
)

BLOCK = 512  # a block of rows that stays in the cache while it is looked at
SEVERAL_BLOCKS = 4_096  # what is put by device before the passes look at it
FAR = 1 << 62
MAX_DEVICES = 1_000
PROBES = 64
_SHAPE_BITS = (20, 6, 0, 11, 0, 0)
_NAME_BITS, _DEVICE_BITS = 20, 6


@dataclass(frozen=True)
class Launches:
    """Where launches lie: a table, and the quoted columns (or expressions) that are read.

    ``parts`` identify a row: the name's id first, then the numbers of grid and block.
    ``joined`` is what follows the table in the FROM clause.  Rows with a ``mark`` are other
    work than kernels: they have one part, and their keys end with the mark.
    """

    table: str
    start: str
    end: str
    device: str
    parts: tuple[str, ...]
    joined: str = ""
    mark: str = ""

    def select(self, columns: str | None = None, tail: str = "") -> str:
        """A query, as a rule for ``(start, end, device, *parts)``."""
        wanted = columns or ", ".join((self.start, self.end, self.device, *self.parts))
        return f"SELECT {wanted} FROM {quoted(self.table)}{self.joined}{tail}"  # noqa: S608 -- quoted names of the schema

    def packing(self, number: int, count: int) -> Packing:
        """How the identity of a row of the ``number``-th of ``count`` tables is packed."""
        bits = (_NAME_BITS, *_SHAPE_BITS)[: len(self.parts)]
        fields = [(self.parts[0], bits[0]), (self.device, _DEVICE_BITS)]
        return Packing([*fields, *zip(self.parts[1:], bits[1:], strict=True)], number, count)


def shape_parts(columns: Sequence[str] | None) -> tuple[str, ...]:
    """The parts for grid and block from their six quoted columns, x, y, z each; None: unknown."""
    return (ABSENT,) * 6 if columns is None else tuple(columns)


def unpack_shape(parts: Sequence[object]) -> tuple[Shape | None, Shape | None]:
    """``(grid, block)`` of the values of ``shape_parts``; None for what is no three numbers."""
    return shape(parts[:3]), shape(parts[3:])


def read_launches(
    database: Database,
    launches: Launches | Sequence[Launches],
    extra: Mapping[int | None, Runs] | None = None,
) -> list[tuple[int | None, Swept]]:
    """``[(device, what a pass found)]`` of one table or several.

    Keys are ``(device, *parts)`` of kernels, ``(device, part, mark)`` of marked work; what is
    no whole number is None in them.  ``extra`` holds memory operations by device; their keys
    have one number.  Damaged when a time is not a whole number.
    """
    tables = [launches] if isinstance(launches, Launches) else list(launches)
    reader = _Reader(database, tables, dict(extra or {}))
    try:
        with no_collecting():
            try:
                found = reader.read(ordered=True)
            except Unordered:
                found = reader.read(ordered=False)
    except TypeError:  # text or nothing where a time should be
        raise reader.unsound() from None
    for _, swept in found:
        numbers = [swept.use.first_ns, swept.use.last_ns]
        numbers += [tally.total_ns for tally in swept.tallies.values()]
        if any(n is not None and (type(n) is not int or abs(n) > FAR) for n in numbers):
            raise reader.unsound()
    return found


class _Reader:
    """The tables of one capture, and how their rows' keys are made and read back."""

    def __init__(
        self, database: Database, tables: Sequence[Launches], extra: dict[int | None, Runs]
    ) -> None:
        self.database = database
        self.tables = tables
        self.packings = [table.packing(n, len(tables)) for n, table in enumerate(tables)]
        self.extra = extra

    def read(self, *, ordered: bool) -> list[tuple[int | None, Swept]]:
        """One pass; ``ordered`` takes the rows as they lie, else SQL sorts them."""
        passes = _Passes(self.database.reading, self._span(exact=not ordered), self._device_of)
        for block in self._blocks("" if ordered else " ORDER BY 1"):
            passes.take(block)
        return passes.finish(self._key_of)

    def _blocks(self, tail: str) -> Iterator[Sequence[Row]]:
        """All rows by the block, merged by their start."""
        streams: list[Iterator[Sequence[Row]]] = []
        for table, packing in zip(self.tables, self.packings, strict=True):
            columns = f"{table.start}, {table.end}, {packing.sql()}"
            streams.append(self.database.blocks(table.select(columns, tail), size=BLOCK))
        streams += [_of_runs(device, runs) for device, runs in self.extra.items()]
        while len(streams) > 1:  # as a tree: a row goes through few merges
            pairs = zip(streams[::2], streams[1::2], strict=False)
            odd = streams[-1:] if len(streams) % 2 else []
            streams = [_merged(one, two) for one, two in pairs] + odd
        return streams[0] if streams else iter(())

    # --- keys ------------------------------------------------------------------------

    def _unpacked(self, key: int | str) -> tuple[Launches, list[int | None]]:
        number = self.packings[0].number_of(key)
        return self.tables[number], self.packings[number].unpack(key)

    def _device_of(self, key: Any) -> int | None:
        if isinstance(key, tuple):
            device: int | None = key[0]
            return device
        return self._unpacked(key)[1][1]

    def _key_of(self, key: Any) -> Key:
        """The key that callers see."""
        if isinstance(key, tuple):
            return key[1:]
        table, (name, device, *parts) = self._unpacked(key)
        return (device, name, table.mark) if table.mark else (device, name, *parts)

    # --- times -----------------------------------------------------------------------

    def _span(self, *, exact: bool) -> tuple[int, int]:
        """The first start and the last end: of all rows, or of some all over the tables."""
        times: list[Any] = []
        for table in self.tables:
            times += self._bounds(table) if exact else self._probed(table)
        for runs in self.extra.values():
            times += runs.span
        numbers = [number for number in map(whole, times) if number is not None]
        return min(numbers, default=0), max(numbers, default=0)

    def _bounds(self, table: Launches) -> Sequence[Any]:
        return self.database.one(table.select(f"min({table.start}), max({table.end})"))

    def _probed(self, table: Launches) -> list[Any]:
        """Times of rows in many places of the table; of all rows where it has no row ids."""
        identity = self.database.row_id(table.table)
        if identity is None:
            return list(self._bounds(table))
        here = f"{quoted(table.table)}.{identity}"
        columns = f"{table.start}, {table.end}"
        lowest, highest = (
            self.database.one(f"SELECT {end}({here}) FROM {quoted(table.table)}")[0]  # noqa: S608 -- as above
            for end in ("min", "max")
        )
        low, high = whole(lowest), whole(highest)
        if low is None or high is None:
            return []
        found: list[Any] = []
        for number in range(PROBES):
            place = low + (high - low) * number // PROBES
            query = table.select(columns, f" WHERE {here} >= ? ORDER BY {here} LIMIT 16")
            found += chain.from_iterable(self.database.rows(query, (place,)))
        query = table.select(columns, f" ORDER BY {here} DESC LIMIT 1024")
        return found + list(chain.from_iterable(self.database.rows(query)))

    def unsound(self) -> Exception:
        """The error for a table whose times are not whole numbers, naming it."""
        named = self.tables[0]
        for table in self.tables:
            wrong = " OR ".join(
                f"typeof({time}) <> 'integer' OR {time} > {FAR} OR {time} < -{FAR}"
                for time in (table.start, table.end)
            )
            if self.database.one(table.select("1", f" WHERE {wrong} LIMIT 1")):
                named = table
                break
        return self.database.reading.damaged(f"times in {named.table} are not whole numbers of ns")


class _Passes:
    """A pass for each device.

    As long as all rows are of one device they go to its pass as they are.  The first row of
    another one is noticed by its key, and from there on each row is put where it belongs.
    """

    def __init__(
        self, reading: Reading, span: tuple[int, int], device_of: Callable[[Any], int | None]
    ) -> None:
        self._reading = reading
        self._span = span
        self._device_of = device_of
        self._only: int | None = None
        self._keys = 0
        self._passes: dict[int | None, Pass] = {}
        self._rows: defaultdict[int | None, list[Row]] = defaultdict(list)
        self._put = _Places(self._place)
        self._waiting = 0

    def take(self, block: Sequence[Row]) -> None:
        """Add a block of rows, whichever devices they are of."""
        if not self._passes and block:
            self._only = self._device_of(block[0][2])
            self._passes[self._only] = Pass(self._span, self._admit)
        rows: Sequence[Row] = block
        if len(self._passes) == 1:
            try:
                self._passes[self._only].take(rows)
            except Foreign as found:
                rows = found.rows
            else:
                return
        put = self._put
        for row in rows:
            put[row[2]](row)
        self._waiting += len(rows)
        if self._waiting >= SEVERAL_BLOCKS:
            self._give()

    def _admit(self, key: Any) -> None:
        """Look at a key that is new to the pass of the one device."""
        if len(self._passes) > 1:
            return  # then it has been looked at by ``_place``
        self._keys += 1
        self._reading.count_names(self._keys)
        if self._device_of(key) != self._only:
            raise Foreign

    def _place(self, key: Any) -> Callable[[Row], None]:
        """Where rows with a key go that was not placed before."""
        device = self._device_of(key)
        self._reading.count_names(len(self._put) + 1)
        if device not in self._passes:
            self._passes[device] = Pass(self._span)
            if len(self._passes) > MAX_DEVICES:
                raise self._reading.damaged(f"it names more than {MAX_DEVICES} devices")
            for one in self._passes.values():
                one.hold = max(RUN_ROWS // len(self._passes), BLOCK)
        return self._rows[device].append

    def _give(self) -> None:
        """Give the rows that were put to their passes."""
        for device, rows in self._rows.items():
            if rows:
                self._passes[device].take(rows)
                rows.clear()
        self._waiting = 0

    def finish(self, key_of: Callable[[Any], Key]) -> list[tuple[int | None, Swept]]:
        """What was found of each device, in the order of their ids; the unknown one is first."""
        self._give()
        found = []
        for device in sorted(self._passes, key=lambda d: (d is not None, d or 0)):
            swept = self._passes[device].finish()
            swept.rename(key_of)
            found.append((device, swept))
        return found


class _Places(dict[Hashable, Callable[[Row], None]]):
    """Where rows go by their key, found once for each key."""

    def __init__(self, find: Callable[[Any], Callable[[Row], None]]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: Any) -> Callable[[Row], None]:
        found = self[key] = self._find(key)
        return found


_start = itemgetter(0)


def _of_runs(device: int | None, runs: Runs) -> Iterator[Sequence[Row]]:
    """Rows of memory operations, each with its device in its key."""
    keys: dict[int, tuple[int | None, int]] = {}
    for block in runs.blocks():
        for begin in range(0, len(block), BLOCK):
            yield [
                (start, end, keys.setdefault(key, (device, key)))
                for start, end, key in block[begin : begin + BLOCK]
            ]


def _merged(
    first: Iterator[Sequence[Row]], second: Iterator[Sequence[Row]]
) -> Iterator[Sequence[Row]]:
    """The rows of two streams in the order of their start.

    Each step takes what both have up to the end of the block that ends first, so that no more
    than two blocks are held.  A stream that is out of order stays so between its blocks.
    """
    one, two = next(first, None), next(second, None)
    while one and two:
        latest = min(one[-1][0], two[-1][0])
        cut = [
            len(rows) if rows[-1][0] <= latest else bisect_right(rows, latest, key=_start)
            for rows in (one, two)
        ]
        both = [*one[: cut[0]], *two[: cut[1]]]
        if cut[0] and cut[1]:
            both.sort(key=_start)
        yield both
        one = one[cut[0] :] or next(first, None)
        two = two[cut[1] :] or next(second, None)
    for rest, stream in ((one, first), (two, second)):
        if rest:
            yield rest
            yield from stream
