"""Kernel launches in a SQL table: read in one pass, millions of them.

SQL's GROUP BY over a row's whole identity (name, grid, block) sorts all rows by seven columns,
and says nothing about gaps; a second query for those reads the table again.  One pass in
Python over ``(start, end, identity...)`` costs less than that one GROUP BY and finds both.
Names stay numbers until the end: only the few hundred that occur are looked up.

Rows are read in the order of the table, which is the order of their starts in what the tools
write, as if there were one device.  Where the rows are out of order, or another device turns
up, the pass stops at once and begins again with the rows sorted, device by device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ikit_ops.profilers.capture import Shape, shape
from ikit_ops.profilers.limits import Reading
from ikit_ops.profilers.sqlite_input import Database, quoted, whole
from ikit_ops.profilers.sweep import Key, Row, Runs, Swept, Unordered, sweep

BLOCK = 512  # a block of rows that stays in the cache while it is looked at
FAR = 1 << 62
MAX_DEVICES = 1_000


@dataclass(frozen=True)
class Launches:
    """Where launches lie: a table, and the quoted columns (or expressions) that are read.

    ``parts`` identify a row: the name's id first, then the numbers of grid and block.
    ``joined`` is what follows the table in the FROM clause.
    """

    table: str
    start: str
    end: str
    device: str
    parts: tuple[str, ...]
    joined: str = ""

    def select(self, columns: str | None = None, tail: str = "") -> str:
        """A query, as a rule for ``(start, end, device, *parts)``."""
        wanted = columns or ", ".join((self.start, self.end, self.device, *self.parts))
        return f"SELECT {wanted} FROM {quoted(self.table)}{self.joined}{tail}"  # noqa: S608 -- quoted names of the schema


def shape_parts(columns: Sequence[str] | None) -> tuple[str, ...]:
    """The parts for grid and block from their six quoted columns, x, y, z each; None: unknown.

    In nearly all launches the last three of them are 1.  Saying so with one value instead of
    three saves a tenth of the pass; where they are not, the value is all three as text.
    """
    if columns is None:
        return ("NULL",) * 4
    grid_x, grid_y, grid_z, block_x, block_y, block_z = columns
    rest = (
        f"CASE WHEN {grid_z} = 1 AND {block_y} = 1 AND {block_z} = 1 THEN 1 "
        f"ELSE {grid_z} || ',' || {block_y} || ',' || {block_z} END"
    )
    return (grid_x, grid_y, block_x, rest)


def unpack_shape(parts: Sequence[object]) -> tuple[Shape | None, Shape | None]:
    """``(grid, block)`` of the values of ``shape_parts``; None for what is no three numbers."""
    grid_x, grid_y, block_x, rest = parts
    others: list[object] = [1, 1, 1] if rest == 1 else []
    if isinstance(rest, str):
        others = [int(text) for text in rest.split(",") if text.isdecimal() and len(text) < 13]
    if len(others) != 3:
        return None, None
    grid_z, block_y, block_z = others
    return shape((grid_x, grid_y, grid_z)), shape((block_x, block_y, block_z))


class _OtherDevice(Exception):
    """A row of another device than the first row's."""


def read_launches(
    database: Database, launches: Launches, extra: Mapping[int | None, Runs]
) -> list[tuple[int | None, Swept]]:
    """``[(device, what a pass found)]``; keys are ``(device, *parts)``.

    ``extra`` holds memory operations by device; their keys have one number.  Damaged when a
    time is not a whole number.
    """
    try:
        found = _as_one_device(database, launches, extra)
    except (_OtherDevice, Unordered):
        found = _by_device(database, launches, extra)
    for _, swept in found:
        _check_times(database.reading, launches, swept)
    return found


def _check_times(reading: Reading, launches: Launches, swept: Swept) -> None:
    numbers = [swept.use.first_ns, swept.use.last_ns]
    numbers += [tally.total_ns for tally in swept.tallies.values()]
    if any(n is not None and (type(n) is not int or abs(n) > FAR) for n in numbers):
        raise reading.damaged(f"times in {launches.table} are not whole numbers of ns")


def _as_one_device(
    database: Database, launches: Launches, extra: Mapping[int | None, Runs]
) -> list[tuple[int | None, Swept]]:
    """One pass over the table as it lies."""
    first = database.one(launches.select(tail=" LIMIT 1"))
    if not first or not set(extra) <= {first[2]}:
        raise _OtherDevice
    query = launches.select(launches.end, f" ORDER BY {quoted(launches.table)}.rowid DESC LIMIT 64")
    times = [first[0], first[1], *(row[0] for row in database.rows(query))]
    numbers = [t for t in map(whole, times) if t is not None]
    if len(numbers) != len(times):
        raise database.reading.damaged(f"times in {launches.table} are not whole numbers")
    span = _span(numbers[0], max(numbers), extra)
    swept = _pass(database, launches, "", (), span, extra.get(first[2]), first[2])
    return [(whole(first[2]), swept)]


def _by_device(
    database: Database, launches: Launches, extra: Mapping[int | None, Runs]
) -> list[tuple[int | None, Swept]]:
    """A pass for each device, over sorted rows."""
    query = launches.select(f"DISTINCT {launches.device}", f" LIMIT {MAX_DEVICES + 1}")
    seen = {row[0] for row in database.rows(query)}
    if len(seen) > MAX_DEVICES:
        raise database.reading.damaged(f"it names more than {MAX_DEVICES} devices")
    bounds = database.one(launches.select(f"min({launches.start}), max({launches.end})"))
    span = _span(whole(bounds[0]) or 0, whole(bounds[1]) or 0, extra)
    found = []
    for one in sorted({*seen, *extra}, key=lambda d: (d is not None, str(d))):
        tail = f" WHERE {launches.device} IS ? ORDER BY 1"
        swept = _pass(database, launches, tail, (one,), span, extra.get(one), one)
        found.append((whole(one), swept))
    return found


def _span(low: int, high: int, extra: Mapping[int | None, Runs]) -> tuple[int, int]:
    """The first start and the last end of launches and memory operations."""
    spans = [runs.span for runs in extra.values()]
    return min([low, *(s[0] for s in spans)]), max([high, *(s[1] for s in spans)])


def _pass(
    database: Database,
    launches: Launches,
    tail: str,
    values: Sequence[int | None],
    span: tuple[int, int],
    extra: Runs | None,
    device: int | None,
) -> Swept:
    """One pass; ``_OtherDevice`` when a key has another device."""
    reading = database.reading

    def check(key: Key, count: int) -> None:
        """Refuse too many names, and notice another device."""
        if len(key) > 1 and key[0] != device:
            raise _OtherDevice
        reading.count_names(count)

    blocks: Iterator[Sequence[Row]] = database.blocks(launches.select(tail=tail), values, BLOCK)
    if extra is not None:
        blocks = _with(blocks, extra)
    try:
        return sweep(blocks, span, check_key=check)
    except TypeError:  # text or nothing where a time should be
        raise reading.damaged(f"times in {launches.table} are not numbers") from None


def _with(blocks: Iterator[Sequence[Row]], extra: Runs) -> Iterator[Sequence[Row]]:
    """Blocks of launches with the rows of ``extra`` put in where they start."""
    others = (row for block in extra.blocks() for row in block)
    following = next(others, None)
    for block in blocks:
        if following is None or following[0] > block[-1][0]:
            yield block
            continue
        merged = list(block)
        while following is not None and following[0] <= block[-1][0]:
            merged.append(following)
            following = next(others, None)
        # Sorting cannot hide launches that are out of order between blocks: the pass sees those.
        merged.sort(key=_start)
        yield merged
    rest = [] if following is None else [following, *others]
    for begin in range(0, len(rest), BLOCK):
        yield rest[begin : begin + BLOCK]


def _start(row: Row) -> int:
    return row[0]
