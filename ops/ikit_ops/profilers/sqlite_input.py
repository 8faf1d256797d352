"""SQLite files from strangers, opened so that they cannot do anything.

A SQLite file is a program as much as data: a view or a virtual table runs when it is read, a
trigger when something is written, and a query over a crafted schema can run for ever.  So the
file is opened read-only and immutable (no journal is replayed, nothing beside it is read), an
authorizer lets nothing happen but reading the columns of true tables, names are taken from the
schema and quoted, and a progress handler looks at the clock and at the cancel flag every few
thousand steps.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from ikit_ops.profilers.limits import MAX_STRING, MAX_UNPACKED, Damaged, Reading

MAGIC = b"SQLite format 3\0"
STEPS = 200_000
LONGEST_VALUE = 16 << 20
BATCH = 500
BLOCK = 8_192
_FUNCTIONS = frozenset(
    {"count", "min", "max", "sum", "total", "substr", "coalesce", "abs", "typeof"}
)
_COLUMNS = "table_xinfo"
_ROW_IDS = ("rowid", "_rowid_", "oid")
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})


class Database:
    """One open file: its true tables with their columns, and bounded queries."""

    def __init__(self, reading: Reading, connection: sqlite3.Connection) -> None:
        self.reading = reading
        self._connection = connection
        self._stopped: BaseException | None = None
        connection.set_progress_handler(self._watch, STEPS)
        self.tables = Tables(self._read_columns, self._read_names())
        connection.set_authorizer(self._allow)

    def _watch(self) -> int:
        """Called every so many steps: not 0 interrupts the query."""
        try:
            self.reading.tick()
        except BaseException as error:  # noqa: BLE001 -- raised again below, out of SQLite's frame
            self._stopped = error
            return 1
        return 0

    @staticmethod
    def _allow(action: int, one: str | None, two: str | None, *_: str | None) -> int:
        """Reading, and the few functions that the readers use; nothing else."""
        if action in _ALLOWED:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA and one == _COLUMNS:
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_FUNCTION and (two or "").lower() in _FUNCTIONS:
            return sqlite3.SQLITE_OK
        return sqlite3.SQLITE_DENY

    def _read_names(self) -> list[str]:
        """The names of true tables: no views, no virtual ones."""
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
        names = [row[0] for row in self.rows(query)]
        return [name for name in names if isinstance(name, str) and len(name) <= 200]

    def _read_columns(self, table: str) -> dict[str, str]:
        """``{lower-case column: column}`` of a table."""
        info = self.rows(f"PRAGMA {_COLUMNS}({quoted(table)})")
        # The last field is not 0 for generated columns: those are expressions.
        columns = [row[1] for row in info if isinstance(row[1], str) and row[6] == 0]
        return {column.lower(): column for column in columns}

    def row_id(self, table: str) -> str | None:
        """A name for the table's row ids; None for a table that has none."""
        for name in _ROW_IDS:
            if name in self.tables.get(table, {}):  # a column of this name hides them
                continue
            try:
                self._connection.execute(f"SELECT {name} FROM {quoted(table)} LIMIT 0")  # noqa: S608 -- quoted names of the schema
            except sqlite3.Error:
                return None
            return name
        return None

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of a query; Damaged for a file that cannot be read."""
        for block in self.blocks(query, values):
            yield from block

    def blocks(
        self, query: str, values: Sequence[Any] = (), size: int = BLOCK
    ) -> Iterator[list[tuple[Any, ...]]]:
        """The rows by the block of ``size``."""
        try:
            cursor = self._connection.execute(query, values)
            while block := cursor.fetchmany(size):
                yield block
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            stopped, self._stopped = self._stopped, None
            if stopped is not None:
                raise stopped from None
            raise self.reading.damaged(f"SQLite cannot read it ({error})") from None

    def one(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...]:
        """The first row; empty where there is none."""
        return next(self.rows(query, values), ())

    def columns(self, table: str, *names: str) -> list[str] | None:
        """The quoted names of a table's columns, in any case; None when one is missing."""
        known = self.tables.get(table, {})
        if not all(name.lower() in known for name in names):
            return None
        return [quoted(known[name.lower()]) for name in names]

    def need(self, table: str, *names: str) -> list[str]:
        """The same; Damaged, naming what is missing."""
        if table not in self.tables:
            raise self.reading.damaged(f"it has no table {table}")
        found = self.columns(table, *names)
        if found is None:
            absent = [n for n in names if n.lower() not in self.tables[table]]
            raise self.reading.damaged(f"table {table} has no column {', '.join(absent)}")
        return found

    def names(self, table: str, id_column: str, value_column: str, ids: set[int]) -> dict[int, str]:
        """The texts of some ids, each bounded; ids that the table lacks are left out."""
        self.reading.count_names(len(ids))
        columns = self.columns(table, id_column, value_column)
        if columns is None:
            return {}
        key, value = columns
        found: dict[int, str] = {}
        ordered = sorted(ids)
        for begin in range(0, len(ordered), BATCH):
            some = ordered[begin : begin + BATCH]
            marks = ",".join("?" * len(some))
            query = (
                f"SELECT {key}, substr({value}, 1, {MAX_STRING}) FROM {quoted(table)} "  # noqa: S608 -- quoted names of the schema
                f"WHERE {key} IN ({marks})"
            )
            for row in self.rows(query, some):
                if isinstance(row[1], str):
                    found[row[0]] = row[1]
        return found


class Tables(Mapping[str, dict[str, str]]):
    """``{table: {lower-case column: column}}``, columns read when they are asked for.

    A file may hold tables in their thousands; a reader asks for a dozen.
    """

    def __init__(self, columns_of: Callable[[str], dict[str, str]], names: Iterable[str]) -> None:
        self._columns_of = columns_of
        self._found: dict[str, dict[str, str] | None] = dict.fromkeys(names)

    def __getitem__(self, table: str) -> dict[str, str]:
        found = self._found[table]
        if found is None:
            found = self._found[table] = self._columns_of(table)
        return found

    def __contains__(self, table: object) -> bool:
        return table in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def whole(value: Any) -> int | None:
    """A whole number, or None for any other value of a column."""
    return value if type(value) is int else None


@contextmanager
def opened(reading: Reading) -> Iterator[Database]:
    """Open the file; Damaged when it is no SQLite database."""
    size = reading.path.stat().st_size
    if size > MAX_UNPACKED:
        raise reading.damaged(f"it is larger than {MAX_UNPACKED >> 30} GiB")
    beside = reading.path.with_name(reading.path.name + "-wal")
    if beside.exists() and beside.stat().st_size:
        reading.note("a write-ahead log lies beside the database: what it holds was not read")
    address = f"file:{quote(str(reading.path))}?mode=ro&immutable=1"
    try:
        connection = sqlite3.connect(address, uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise reading.damaged(f"SQLite cannot open it ({error})") from None
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.text_factory = _text
        try:
            for pragma in ("trusted_schema = OFF", "query_only = ON", "cache_size = -8192",
                           "mmap_size = 0", "temp_store = FILE"):  # fmt: skip
                connection.execute(f"PRAGMA {pragma}")
            database = Database(reading, connection)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # its schema may be no text
            raise reading.damaged(f"SQLite cannot read it ({error})") from None
        yield database
    finally:
        connection.close()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


__all__ = ["MAGIC", "Damaged", "Database", "opened", "quoted", "whole"]
