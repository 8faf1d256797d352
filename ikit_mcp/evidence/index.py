"""The index: one row a record, so that listing costs a page and not the whole store.

The folders are the truth and the index a cache of them.  A record's arrival or removal
changes the modification time of its two-digit folder, so 256 ``stat`` calls tell which
folders need another look; only those are read.  A time that lies within the clock's
grain of the look itself proves nothing (another record may arrive within the same
tick), so such a folder is looked at again next time.

Records of one start are listed in the order of their arrival, and a record that is
found later always arrived later: its arrival is moved behind all that was listed before
where the clocks say otherwise.  So the pages of a listing do not shift while others save.

A missing, broken or outdated file is rebuilt.  One that cannot be written -- a read-only
home, a full disk, another process holding it -- is copied into memory and brought up to
date there.  No write-ahead log: homes can be on NFS, where shared memory is not.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ikit_mcp.evidence import claims, files, times
from ikit_mcp.evidence.record import MAX_SUMMARY, EvidenceRecord
from ikit_mcp.evidence.store import STAGING, Store
from ikit_mcp.registry import excerpt

VERSION = 3
NAME = "index.sqlite"
JOURNAL = NAME + "-journal"
GRAIN_NS = 2_000_000_000
BUSY_SECONDS = 5.0
FOLDERS_AT_ONCE = 16
MAX_TEXT = 400
# The row of ``folders`` that says that everything was looked at once; its time is the
# latest arrival that anybody may have been shown.
SHOWN = ""
COLUMNS = (
    "evidence_id", "kind", "claim_class", "started", "summary", "valid", "complete",
    "model", "engine", "device", "stored_ns",
)  # fmt: skip
# ``records`` lies in the order of the listing and holds what filters ask for, no more: a
# filter that fits little then reads a few megabytes in one go and looks nothing up.
_SCHEMA = f"""
BEGIN;
CREATE TABLE folders (prefix TEXT PRIMARY KEY, mtime_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records (started TEXT, stored_ns INTEGER, evidence_id TEXT, kind TEXT, valid INTEGER,
    model TEXT, engine TEXT, device TEXT, PRIMARY KEY (started DESC, stored_ns, evidence_id))
    WITHOUT ROWID;
CREATE UNIQUE INDEX by_id ON records (evidence_id);
CREATE INDEX newest_of_kind ON records (kind, started DESC, stored_ns, evidence_id);
CREATE TABLE details (evidence_id TEXT PRIMARY KEY, claim_class TEXT, summary TEXT,
    complete INTEGER) WITHOUT ROWID;
PRAGMA user_version = {VERSION};
COMMIT;
"""
_INSERT = (
    "INSERT OR REPLACE INTO records VALUES (:started, :stored_ns, :evidence_id, :kind, :valid,"
    " :model, :engine, :device)",
    "INSERT OR REPLACE INTO details VALUES (:evidence_id, :claim_class, :summary, :complete)",
)
_NOTE = "INSERT OR REPLACE INTO folders VALUES (?, ?)"
# What a sound file may answer when it cannot be used just now.
_PASSING = frozenset({
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_PROTOCOL,
})  # fmt: skip
T = TypeVar("T")


class Filter(NamedTuple):
    """What to list; None does not restrict. ``until`` is inclusive, ``since`` too."""

    kind: str | None = None
    model: str | None = None
    engine: str | None = None
    device: str | None = None
    valid: str | None = None
    since: str | None = None
    until: str | None = None


class Row(NamedTuple):
    """One listed record, in the order of ``COLUMNS``."""

    evidence_id: str
    kind: str
    claim_class: str | None
    started: str
    summary: str
    valid: int | None
    complete: int | None
    model: str | None
    engine: str | None
    device: str | None
    stored_ns: int


def ask(store: Store, question: Callable[[sqlite3.Connection], T]) -> T:
    """The answer of an index that is up to date with the folders.

    A page of the file that only this question reads may be damaged: the index is then
    made anew, and asked again.
    """
    try:
        with opened(store) as connection:
            return question(connection)
    except sqlite3.DatabaseError:
        with opened(store) as connection:
            return question(connection)


@contextmanager
def opened(store: Store) -> Iterator[sqlite3.Connection]:
    """A connection to an index that is up to date with the folders.

    A file that turns out to be damaged while it is used is removed.
    """
    connection = _up_to_date(store)
    try:
        yield connection
    except sqlite3.DatabaseError as error:
        if not _passing(error):
            _remove(store.root / NAME)
        raise
    finally:
        connection.close()


def _up_to_date(store: Store) -> sqlite3.Connection:
    """The index file brought up to date, else one in memory."""
    path = store.root / NAME
    copy = None
    for _ in range(2):
        connection = _connect(path) if store.root.is_dir() else None
        if connection is None:
            break
        try:
            refresh(connection, store)
            return connection
        except sqlite3.DatabaseError as error:
            passing = _passing(error)
            copy = _copied(connection) if passing else None
        connection.close()
        if passing:  # read-only, full, or held by another process
            break
        _remove(path)  # not an index any more: it is made anew
    if copy is not None:
        try:
            refresh(copy, store)
            return copy
        except sqlite3.DatabaseError:
            copy.close()
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(_SCHEMA)
    refresh(connection, store)
    return connection


def _passing(error: sqlite3.Error) -> bool:
    """Whether an error says that the file cannot be used now, not that it is damaged."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING


def _connect(path: Path) -> sqlite3.Connection | None:
    """The index file, made anew when it is missing or outdated; None when it cannot be used."""
    try:
        if not os.path.lexists(path):
            _create(path)
        if not stat.S_ISREG(path.lstat().st_mode):  # a link, a pipe: nothing of ours
            return None
        connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except (OSError, sqlite3.DatabaseError):
        return None
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            return connection
    except sqlite3.DatabaseError as error:
        if _passing(error):
            connection.close()
            return None
    connection.close()
    _remove(path)
    try:
        _create(path)
        return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except (OSError, sqlite3.DatabaseError):
        return None


def _create(path: Path) -> None:
    """Put an empty index in place as a whole, unless another process was faster."""
    with claims.claimed_folder(path.parent / STAGING) as folder:
        fresh = folder / NAME
        files.write_private(fresh, b"")
        connection = sqlite3.connect(fresh, isolation_level=None)
        try:
            connection.executescript(_SCHEMA)
        finally:
            connection.close()
        try:
            # Not a rename: one that is in use must not be taken from below its users.
            os.link(fresh, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            fresh.rename(path)


def _remove(path: Path) -> None:
    """Remove a useless index, and its journal first: it must not be played into the next one."""
    with suppress(OSError):
        path.with_name(JOURNAL).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


class _TooSlow(Exception):
    """Another process holds the file for longer than a copy is worth."""


def _copied(source: sqlite3.Connection) -> sqlite3.Connection | None:
    """A copy in memory of what the file holds; None when it cannot be read."""
    deadline = time.monotonic() + BUSY_SECONDS

    def watch(*_: int) -> None:
        """Called after each step, also after one that found the file locked."""
        if time.monotonic() > deadline:
            raise _TooSlow

    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        source.backup(connection, pages=4_096, progress=watch)
        return connection
    except (sqlite3.DatabaseError, _TooSlow):
        connection.close()
        return None


def refresh(connection: sqlite3.Connection, store: Store) -> None:
    """Bring the index up to date: read what is new in the folders whose time has changed."""
    known: dict[str, int] = dict(connection.execute("SELECT prefix, mtime_ns FROM folders"))
    changed = _changed(known, store)
    if SHOWN in known and not _any_difference(connection, store, known, changed):
        return
    connection.execute("PRAGMA cache_spill = OFF")  # readers are locked out at COMMIT alone
    folders = list(changed.items())
    for start in range(0, len(folders), FOLDERS_AT_ONCE):
        with _writing(connection):
            _refresh_some(connection, store, folders[start : start + FOLDERS_AT_ONCE])
    if SHOWN not in known:
        with _writing(connection):
            latest = "SELECT coalesce(max(stored_ns), 0) FROM records"
            connection.execute(_NOTE, (SHOWN, connection.execute(latest).fetchone()[0]))


def _changed(known: dict[str, int], store: Store) -> dict[str, int]:
    """The two-digit folders to look at, with the time to note down (0: look again next time)."""
    now = time.time_ns()
    changed = {}
    for number in range(256):
        prefix = f"{number:02x}"
        try:
            mtime = os.stat(f"{store.root}/{prefix}").st_mtime_ns  # noqa: PTH116 -- 3 ms less
        except OSError:
            mtime = -1
        if mtime != known.get(prefix, -1):
            changed[prefix] = mtime if mtime < now - GRAIN_NS else 0
    return changed


def _any_difference(
    connection: sqlite3.Connection, store: Store, known: dict[str, int], changed: dict[str, int]
) -> bool:
    """Whether anything is to be written: mostly a fresh folder only has to be looked at."""
    return any(
        mtime_ns != known.get(prefix) or set(store.ids_under(prefix)) != _rows(connection, prefix)
        for prefix, mtime_ns in changed.items()
    )


def _rows(connection: sqlite3.Connection, prefix: str) -> set[str]:
    """The ids that the index has of one two-digit folder."""
    query = "SELECT evidence_id FROM records WHERE evidence_id >= ? AND evidence_id < ?"
    return {row[0] for row in connection.execute(query, (prefix, prefix + "g"))}


@contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction, which waits for its turn at the start and not in the middle."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _refresh_some(
    connection: sqlite3.Connection, store: Store, folders: Sequence[tuple[str, int]]
) -> None:
    """Make the rows of some folders those of their records: a large rebuild goes in parts."""
    row = connection.execute("SELECT mtime_ns FROM folders WHERE prefix = ?", (SHOWN,)).fetchone()
    behind = None if row is None else int(row[0]) + 1
    latest = -1 if row is None else int(row[0])
    for prefix, mtime_ns in folders:
        ids, known = set(store.ids_under(prefix)), _rows(connection, prefix)
        for table in ("records", "details"):
            connection.executemany(
                f"DELETE FROM {table} WHERE evidence_id = ?",  # noqa: S608 -- constants alone
                [(gone,) for gone in known - ids],
            )
        rows = [row_of(store.load(new)) for new in sorted(ids - known)]
        if behind is not None:
            rows = [row._replace(stored_ns=max(row.stored_ns, behind)) for row in rows]
        latest = max([latest, *(row.stored_ns for row in rows)])
        named = [row._asdict() for row in rows]
        for statement in _INSERT:
            connection.executemany(statement, named)
        connection.execute(_NOTE, (prefix, mtime_ns))
    if behind is not None:
        connection.execute(_NOTE, (SHOWN, latest))


def row_of(record: EvidenceRecord) -> Row:
    """The row of a record; a damaged one is listed with its problem as the summary."""
    started = times.normalised(record.get("provenance", "started")) or times.BEGINNING
    stored = _stored_ns(record)
    if record.problem is not None:
        kind, why = _text(record.get("kind")) or "unreadable", record.problem
        return Row(record.evidence_id, kind, None, started, why, None, 0, None, None, None, stored)
    complete = record.get("coverage", "complete")
    return Row(
        record.evidence_id,
        excerpt(record.kind, MAX_TEXT),
        _text(record.get("claim_class")),
        started,
        excerpt(record.summary, MAX_SUMMARY),
        None if record.valid is None else int(record.valid),
        int(complete) if isinstance(complete, bool) else None,
        _text(record.get("identity", "model", "id")),
        _text(record.get("identity", "engine", "name")),
        _text(record.get("identity", "device", "name")),
        stored,
    )


def _stored_ns(record: EvidenceRecord) -> int:
    """When the record arrived in its folder: the order among records of the same start."""
    try:
        return record.folder.stat().st_ctime_ns if record.folder is not None else 0
    except OSError:
        return 0


def _text(value: Any) -> str | None:
    return excerpt(value, MAX_TEXT) if isinstance(value, str) else None


def count(connection: sqlite3.Connection, wanted: Filter) -> int:
    """How many records the filter lets through."""
    where, values = _where(wanted)
    query = f"SELECT count(*) FROM records{where}"  # noqa: S608 -- built from constants below
    return int(connection.execute(query, values).fetchone()[0])


def page(
    connection: sqlite3.Connection, wanted: Filter, offset: int, limit: int
) -> tuple[list[Row], tuple[str, int] | None]:
    """A page of records, newest first, and where the next one starts (None: nowhere).

    Those of one start are in the order of their arrival.  The next page starts at
    ``(until, offset)``: the last row's start, and how many records of that start were
    shown.  Unlike a number of rows from the top, that does not shift: what is saved
    meanwhile is newer, or comes last among those of its start.
    """
    where, values = _where(wanted)
    order = "ORDER BY started DESC, stored_ns, evidence_id"
    query = (
        f"SELECT {', '.join(COLUMNS)} FROM"  # noqa: S608 -- constants alone
        f" (SELECT * FROM records{where} {order} LIMIT ? OFFSET ?)"
        f" JOIN details USING (evidence_id) {order}"
    )
    found = [Row(*row) for row in connection.execute(query, [*values, limit + 1, offset])]
    rows = found[:limit]
    if len(found) <= limit or not rows:
        return rows, None
    return rows, (rows[-1].started, _shown_of_start(connection, wanted, rows[-1]))


def _shown_of_start(connection: sqlite3.Connection, wanted: Filter, last: Row) -> int:
    """How many records of the last row's start come up to and with it."""
    where, values = _where(wanted._replace(since=last.started, until=last.started))
    query = (
        f"SELECT count(*) FROM records{where}"  # noqa: S608 -- constants alone
        " AND (stored_ns, evidence_id) <= (?, ?)"
    )
    found = connection.execute(query, [*values, last.stored_ns, last.evidence_id]).fetchone()
    return int(found[0])


def _where(wanted: Filter) -> tuple[str, list[Any]]:
    """The WHERE clause and its values; names are matched in part, without regard to case."""
    clauses: list[str] = []
    values: list[Any] = []
    for clause, value in (
        ("kind = ?", wanted.kind),
        ("started >= ?", wanted.since),
        ("started <= ?", wanted.until),
    ):
        if value is not None:
            clauses.append(clause)
            values.append(value)
    for column in ("model", "engine", "device"):
        part = getattr(wanted, column)
        if part is not None and len(part) > MAX_TEXT:  # longer than any name that is kept
            clauses.append("0")
        elif part is not None:
            clauses.append(f"{column} LIKE ? ESCAPE '!'")
            plain = re.sub("([%_!])", r"!\1", part)
            values.append(f"%{plain}%")
    if wanted.valid is not None:
        clauses.append(
            {"true": "valid = 1", "false": "valid = 0"}.get(wanted.valid, "valid IS NULL")
        )
    return (" WHERE " + " AND ".join(clauses) if clauses else ""), values


def ids_with_prefix(connection: sqlite3.Connection, prefix: str, limit: int) -> Sequence[str]:
    """Ids that begin with ``prefix`` (hex digits), newest first: for completion."""
    if not all(c in "0123456789abcdef" for c in prefix):
        return []
    # With a prefix, the few ids of that range are sorted; without one, the newest come first.
    where = "WHERE evidence_id >= ? AND evidence_id < ?" if prefix else "WHERE ? < ?"
    query = (
        f"SELECT evidence_id FROM records {where}"  # noqa: S608 -- constants alone
        " ORDER BY started DESC, stored_ns, evidence_id LIMIT ?"
    )
    return [row[0] for row in connection.execute(query, (prefix, prefix + "g", limit))]
