"""The index: one row a record, so that listing costs a page and not the whole store.

The folders are the truth and the index a cache of them.  A record's arrival or removal
changes the modification time of its two-digit folder, so 256 ``stat`` calls tell which
folders need another look; only those are read.  A time that lies within the clock's
grain of the look itself proves nothing (another record may arrive within the same
tick), so such a folder is looked at again next time.

A missing, broken or outdated file is rebuilt.  One that cannot be written -- a read-only
home, a full disk, another process holding it -- is copied into memory and brought up to
date there.  No write-ahead log: homes can be on NFS, where shared memory is not.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ikit_mcp.evidence import files, times
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.evidence.store import Store

VERSION = 1
NAME = "index.sqlite"
GRAIN_NS = 2_000_000_000
BUSY_SECONDS = 5.0
FOLDERS_AT_ONCE = 16
COLUMNS = (
    "evidence_id", "kind", "claim_class", "started", "summary", "valid", "complete",
    "model", "engine", "device", "stored_ns",
)  # fmt: skip
_SCHEMA = f"""
CREATE TABLE folders (prefix TEXT PRIMARY KEY, mtime_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records (evidence_id TEXT PRIMARY KEY, kind TEXT, claim_class TEXT, started TEXT,
    summary TEXT, valid INTEGER, complete INTEGER, model TEXT, engine TEXT, device TEXT,
    stored_ns INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX newest ON records (started DESC, stored_ns ASC, evidence_id ASC);
CREATE INDEX newest_of_kind ON records (kind, started DESC, stored_ns ASC, evidence_id ASC);
PRAGMA user_version = {VERSION};
"""
_INSERT = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


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


@contextmanager
def opened(store: Store) -> Iterator[sqlite3.Connection]:
    """A connection to an index that is up to date with the folders."""
    path = store.root / NAME
    connection = _connect(path) if store.root.is_dir() else _in_memory(None)
    try:
        try:
            refresh(connection, store)
        except sqlite3.OperationalError:  # read-only, full, or held by another process
            copy = _in_memory(connection)
            connection.close()
            connection = copy
            refresh(connection, store)
        except sqlite3.DatabaseError:  # not a database any more
            connection.close()
            connection = _rebuilt(path)
            refresh(connection, store)
        yield connection
    finally:
        connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    """The index file, made anew when it is missing or not one of this version."""
    if not path.exists():
        return _rebuilt(path)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        if connection.execute("PRAGMA user_version").fetchone()[0] == VERSION:
            return connection
    except sqlite3.OperationalError:  # unreadable, or held for longer than we wait
        connection.close()
        return _in_memory(None)
    except sqlite3.DatabaseError:  # not a database: it is made anew
        pass
    connection.close()
    return _rebuilt(path)


def _rebuilt(path: Path) -> sqlite3.Connection:
    """An empty index, put in place as a whole so that no reader sees half a schema."""
    fresh = path.with_name(f"{NAME}.{secrets.token_hex(8)}.new")
    try:
        files.write_private(fresh, b"")
        connection = sqlite3.connect(fresh, isolation_level=None)
        connection.executescript(_SCHEMA)
        connection.close()
        fresh.replace(path)
        return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    except (sqlite3.OperationalError, OSError):
        return _in_memory(None)


def _in_memory(source: sqlite3.Connection | None) -> sqlite3.Connection:
    """An index in memory, with what the source has, if it has anything."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    if source is not None:
        try:
            source.backup(connection)
        except sqlite3.DatabaseError:
            connection.close()
            connection = sqlite3.connect(":memory:", isolation_level=None)
    if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
        connection.executescript(_SCHEMA)
    return connection


def refresh(connection: sqlite3.Connection, store: Store) -> None:
    """Bring the index up to date: read what is new in the folders whose time has changed."""
    changed = _changed(connection, store)
    if not changed:
        return
    connection.execute("PRAGMA synchronous = OFF")  # a cache: a lost write is read again
    connection.execute("PRAGMA cache_spill = OFF")  # readers are locked out at COMMIT alone
    folders = list(changed.items())
    for start in range(0, len(folders), FOLDERS_AT_ONCE):
        _refresh_some(connection, store, folders[start : start + FOLDERS_AT_ONCE])


def _refresh_some(
    connection: sqlite3.Connection, store: Store, folders: Sequence[tuple[str, int]]
) -> None:
    """One transaction: some folders' rows, so that a large rebuild keeps what it has done."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for prefix, mtime_ns in folders:
            _refresh_folder(connection, store, prefix)
            connection.execute("INSERT OR REPLACE INTO folders VALUES (?, ?)", (prefix, mtime_ns))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _changed(connection: sqlite3.Connection, store: Store) -> dict[str, int]:
    """The two-digit folders to look at, with the time to note down (0: look again next time)."""
    known: dict[str, int] = dict(connection.execute("SELECT prefix, mtime_ns FROM folders"))
    now = time.time_ns()
    changed = {}
    for number in range(256):
        prefix = f"{number:02x}"
        try:
            mtime = (store.root / prefix).stat().st_mtime_ns
        except OSError:
            mtime = -1
        if mtime != known.get(prefix, -1):
            changed[prefix] = mtime if mtime < now - GRAIN_NS else 0
    return changed


def _refresh_folder(connection: sqlite3.Connection, store: Store, prefix: str) -> None:
    """Make the rows of one two-digit folder those of its records."""
    ids = set(store.ids_under(prefix))
    query = "SELECT evidence_id FROM records WHERE evidence_id >= ? AND evidence_id < ?"
    known = {row[0] for row in connection.execute(query, (prefix, prefix + "g"))}
    connection.executemany(
        "DELETE FROM records WHERE evidence_id = ?", [(gone,) for gone in known - ids]
    )
    connection.executemany(_INSERT, (row_of(store.load(new)) for new in sorted(ids - known)))


def row_of(record: EvidenceRecord) -> Row:
    """The row of a record; a damaged one is listed with its problem as the summary."""
    started = times.normalised(record.get("provenance", "started")) or ""
    stored = _stored_ns(record)
    if record.problem is not None:
        kind, why = _text(record.get("kind")) or "unreadable", record.problem
        return Row(record.evidence_id, kind, None, started, why, None, 0, None, None, None, stored)
    complete = record.get("coverage", "complete")
    return Row(
        record.evidence_id,
        record.kind,
        _text(record.get("claim_class")),
        started,
        record.summary,
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
    return value if isinstance(value, str) else None


def count(connection: sqlite3.Connection, wanted: Filter) -> int:
    """How many records the filter lets through."""
    where, values = _where(wanted)
    query = f"SELECT count(*) FROM records{where}"  # noqa: S608 -- built from constants below
    return int(connection.execute(query, values).fetchone()[0])


def page(connection: sqlite3.Connection, wanted: Filter, offset: int, limit: int) -> list[Row]:
    """Records newest first; those of one start in the order of their arrival."""
    where, values = _where(wanted)
    query = (
        f"SELECT {', '.join(COLUMNS)} FROM records{where}"  # noqa: S608 -- constants alone
        " ORDER BY started DESC, stored_ns ASC, evidence_id ASC LIMIT ? OFFSET ?"
    )
    return [Row(*row) for row in connection.execute(query, [*values, limit, offset])]


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
        if part is not None:
            clauses.append(f"instr(lower({column}), lower(?)) > 0")
            values.append(part)
    if wanted.valid is not None:
        clauses.append(
            {"true": "valid = 1", "false": "valid = 0"}.get(wanted.valid, "valid IS NULL")
        )
    return (" WHERE " + " AND ".join(clauses) if clauses else ""), values


def ids_with_prefix(connection: sqlite3.Connection, prefix: str, limit: int) -> Sequence[str]:
    """Ids that begin with ``prefix`` (hex digits), newest first: for completion."""
    if not all(c in "0123456789abcdef" for c in prefix):
        return []
    query = (
        "SELECT evidence_id FROM records WHERE evidence_id >= ? AND evidence_id < ?"
        " ORDER BY started DESC, stored_ns ASC LIMIT ?"
    )
    return [row[0] for row in connection.execute(query, (prefix, prefix + "g", limit))]
