"""The index lists what the folders hold, whatever became of its file."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers.records import foreign_record, make_record, plant, plant_bytes, save_record, tree
from ikit_mcp.evidence import index, times
from ikit_mcp.evidence.record import Device, Engine, Identity, Model
from ikit_mcp.evidence.store import Store

EVERYTHING = index.Filter()


def rows(
    home: Path, wanted: index.Filter = EVERYTHING, offset: int = 0, limit: int = 10_000
) -> list[index.Row]:
    """What the index lists; its count is held against it."""

    def ask(connection: sqlite3.Connection) -> list[index.Row]:
        found, _ = index.page(connection, wanted, offset, limit)
        if offset == 0 and limit == 10_000:
            assert index.count(connection, wanted) == len(found)
        return found

    return index.ask(Store(home), ask)


def ids(home: Path, wanted: index.Filter = EVERYTHING) -> list[str]:
    return [row.evidence_id for row in rows(home, wanted)]


def brute_force(home: Path, wanted: index.Filter) -> set[str]:
    """The ids that a filter lets through, by reading every record."""
    store, found = Store(home), set()
    for evidence_id in store.ids():
        record = store.load(evidence_id)
        started = times.normalised(record.get("provenance", "started")) or times.BEGINNING
        sound = record.problem is None
        fields = {
            "model": record.get("identity", "model", "id") if sound else None,
            "engine": record.get("identity", "engine", "name") if sound else None,
            "device": record.get("identity", "device", "name") if sound else None,
        }
        valid = {True: "true", False: "false", None: "unknown"}[record.valid if sound else None]
        keep = (
            wanted.kind in (None, record.kind or "unreadable")
            and wanted.valid in (None, valid)
            and (wanted.since is None or started >= wanted.since)
            and (wanted.until is None or started <= wanted.until)
            and all(
                getattr(wanted, name) is None
                or (isinstance(value, str) and getattr(wanted, name).lower() in value.lower())
                for name, value in fields.items()
            )
        )
        if keep:
            found.add(evidence_id)
    return found


STARTS = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-02T01:00:00+01:00", "rubbish"]
NAMES = st.sampled_from(["Llama", "llama-3", "Qwen", ""])
FILTERS = st.builds(
    index.Filter,
    kind=st.none() | st.sampled_from(["bench", "roofline", "unreadable"]),
    model=st.none() | NAMES,
    engine=st.none() | NAMES,
    device=st.none() | NAMES,
    valid=st.none() | st.sampled_from(["true", "false", "unknown"]),
    since=st.none() | st.sampled_from(STARTS[:2]).map(lambda text: times.bound(text, "since")),
    until=st.none() | st.sampled_from(STARTS[:2]).map(lambda text: times.bound(text, "until")),
)


class AnySequence(RuleBasedStateMachine):
    """Saves, deletions and damage in any order: the listing is that of the folders."""

    @initialize()
    def begin(self) -> None:
        """A home of its own."""
        self.home = Path(tempfile.mkdtemp(prefix="ikit-index-"))
        self.number = 0
        self.file = self.home / "evidence" / index.NAME

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    @rule(
        kind=st.sampled_from(["bench", "roofline"]),
        valid=st.sampled_from([True, False, None]),
        started=st.sampled_from(STARTS),
        names=st.tuples(NAMES, NAMES, NAMES),
    )
    def save(
        self, kind: str, valid: bool | None, started: str, names: tuple[str, str, str]
    ) -> None:
        """One more record."""
        self.number += 1
        identity = Identity(model=Model(id=names[0]), engine=Engine(name=names[1]),
                            device=Device(name=names[2]))  # fmt: skip
        save_record(self.home, self.number, kind=kind, valid=valid, started=started,
                    identity=identity if names[0] else Identity())  # fmt: skip

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        """A person removes a record's folder."""
        if there := list(Store(self.home).ids()):
            shutil.rmtree(Store(self.home).folder(data.draw(st.sampled_from(there))))

    @rule()
    def unreadable(self) -> None:
        """A copy that went wrong."""
        self.number += 1
        plant_bytes(self.home, f"{self.number % 256:02x}" + f"{self.number:062x}", b"{")

    @rule(
        data=st.sampled_from([None, b"", b"rubbish" * 999, b"SQLite format 3\0" + b"\xff" * 5000])
    )
    def damage(self, data: bytes | None) -> None:
        """The index file goes, or is no index any more."""
        if self.file.exists():
            self.file.unlink()
        if data is not None and self.file.parent.is_dir():
            self.file.write_bytes(data)

    @rule()
    def time_passes(self) -> None:
        """The folders' times are no longer those of just now."""
        for number, folder in enumerate(sorted(self.home.glob("evidence/??"))):
            past = time.time_ns() - 10**10 - number
            os.utime(folder, ns=(past, past))

    @rule(wanted=FILTERS)
    def ask(self, wanted: index.Filter) -> None:
        """Any filter lets through what it should."""
        assert set(ids(self.home, wanted)) == brute_force(self.home, wanted)

    @invariant()
    def lists_what_is_there(self) -> None:
        """Everything, newest first."""
        found = rows(self.home)
        assert {row.evidence_id for row in found} == set(Store(self.home).ids())
        assert [row.started for row in found] == sorted((r.started for r in found), reverse=True)


AnySequence.TestCase.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
test_any_sequence_of_saves_and_damage_is_listed_as_the_folders_are = AnySequence.TestCase


# --- the file ------------------------------------------------------------------


def test_a_store_that_is_not_there_lists_nothing_and_stays_so(tmp_path: Path) -> None:
    assert rows(tmp_path / "home") == [] and os.listdir(tmp_path) == []


def test_the_index_is_private_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    save_record(tmp_path)
    rows(tmp_path)
    path = tmp_path / "evidence" / index.NAME
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_nlink == 1
    assert Store(tmp_path).leftovers() == []
    assert os.listdir(tmp_path / "evidence" / ".staging") == []


def test_a_listing_without_changes_writes_nothing(tmp_path: Path) -> None:
    save_record(tmp_path)
    rows(tmp_path)  # the folder is so fresh that it will be looked at again and again
    before = tree(tmp_path)
    rows(tmp_path)
    assert tree(tmp_path) == before
    os.utime(next(tmp_path.glob("evidence/??")), ns=(10**18, 10**18))
    rows(tmp_path)
    before = tree(tmp_path)
    rows(tmp_path)
    assert tree(tmp_path) == before


def altered(sql: str) -> Callable[[Path], None]:
    def alter(path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.executescript(sql)
        connection.close()

    return alter


def in_the_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3 :] = b"\xa5" * (len(data) - len(data) // 3)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no database at all" * 500),
        lambda path: path.write_bytes(path.read_bytes()[:3_000]),
        in_the_middle,
        altered("PRAGMA user_version = 1"),
        altered("PRAGMA user_version = 99"),
        altered("DROP TABLE records"),
        altered("DROP TABLE folders"),
        altered("DROP TABLE records; CREATE TABLE records (x)"),
        altered("DROP TABLE folders; CREATE VIEW folders AS SELECT 1 AS x"),
    ],
    ids=["gone", "empty", "rubbish", "cut", "middle", "older", "newer", "no records", "no folders",
         "other columns", "a view"],
)  # fmt: skip
def test_a_missing_broken_or_outdated_index_is_made_anew(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    saved = {save_record(tmp_path, n).evidence_id for n in range(30)}
    path = tmp_path / "evidence" / index.NAME
    for folder in tmp_path.glob("evidence/??"):
        os.utime(folder, ns=(10**18, 10**18))
    assert set(ids(tmp_path)) == saved
    damage(path)
    assert set(ids(tmp_path)) == saved
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA user_version").fetchone() == (index.VERSION,)
    assert connection.execute("SELECT count(*) FROM records").fetchone() == (30,)
    connection.close()


def test_damage_that_only_a_page_of_the_listing_meets_is_mended(tmp_path: Path) -> None:
    saved = {save_record(tmp_path, n, summary="s" * 500).evidence_id for n in range(60)}
    for folder in tmp_path.glob("evidence/??"):
        os.utime(folder, ns=(10**18, 10**18))
    assert set(ids(tmp_path)) == saved
    path = tmp_path / "evidence" / index.NAME
    connection = sqlite3.connect(path)
    [size] = connection.execute("PRAGMA page_size").fetchone()
    [root] = connection.execute(
        "SELECT rootpage FROM sqlite_schema WHERE name = 'records'"
    ).fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * size : root * size] = b"\xff" * size
    path.write_bytes(data)
    with pytest.raises(sqlite3.DatabaseError), index.opened(Store(tmp_path)) as opened:
        index.page(opened, EVERYTHING, 0, 100)
    path.write_bytes(data)
    assert set(ids(tmp_path)) == saved and set(ids(tmp_path)) == saved


def test_a_useless_index_goes_with_its_journal_or_not_at_all(tmp_path: Path) -> None:
    path, journal = tmp_path / index.NAME, tmp_path / index.JOURNAL
    path.write_bytes(b"rubbish")
    journal.mkdir()  # what cannot be removed here could be played into a new index
    index._remove(path)
    assert path.exists()
    journal.rmdir()
    journal.write_bytes(b"stale")
    index._remove(path)
    assert os.listdir(tmp_path) == []
    index._remove(path)


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "dangling"])
def test_something_else_in_the_place_of_the_index_is_done_without(
    tmp_path: Path, what: str
) -> None:
    home, other = tmp_path / "home", tmp_path / "other.sqlite"
    saved = {save_record(home, n).evidence_id for n in range(5)}
    path = home / "evidence" / index.NAME
    altered("CREATE TABLE precious (x); PRAGMA user_version = 2")(other)
    before = other.read_bytes()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(other if what == "link" else tmp_path / "nothing")
    was = tree(home)
    assert set(ids(home)) == saved and set(ids(home)) == saved
    assert other.read_bytes() == before and tree(home) == was
    saved.add(save_record(home, 6).evidence_id)
    assert set(ids(home)) == saved


def test_an_index_that_cannot_be_written_is_copied_and_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {save_record(tmp_path, n).evidence_id for n in range(5)}
    assert set(ids(tmp_path)) == saved
    path = tmp_path / "evidence" / index.NAME
    saved.add(save_record(tmp_path, 5).evidence_id)
    before = path.read_bytes()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def read_only(database: Any, **options: Any) -> sqlite3.Connection:
        """What a read-only home gives to anybody but root, whom no mode stops."""
        if database == path:
            return connect(f"file:{database}?mode=ro", uri=True, **options)
        return connect(database, **options)

    monkeypatch.setattr(sqlite3, "connect", read_only)
    assert set(ids(tmp_path)) == saved and path.read_bytes() == before


def test_where_hard_links_are_not_known_the_index_is_renamed_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        """Some file systems have no second names."""
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    saved = save_record(tmp_path)
    assert ids(tmp_path) == [saved.evidence_id]
    assert (tmp_path / "evidence" / index.NAME).is_file()


def test_a_process_that_is_faster_keeps_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_record(tmp_path)
    path = tmp_path / "evidence" / index.NAME
    link = os.link

    def raced(source: Path, target: Path) -> None:
        """Another process puts its index there just before."""
        monkeypatch.setattr(os, "link", link)
        assert ids(tmp_path) == [saved.evidence_id]
        others.append(path.stat().st_ino)
        link(source, target)

    others: list[int] = []
    monkeypatch.setattr(os, "link", raced)
    assert ids(tmp_path) == [saved.evidence_id]
    assert others == [path.stat().st_ino]


def test_a_home_where_no_index_can_be_made_is_listed_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_record(tmp_path)

    def refused(path: Path) -> None:
        """A full disk."""
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index, "_create", refused)
    assert ids(tmp_path) == [saved.evidence_id]
    assert not (tmp_path / "evidence" / index.NAME).exists()
    (tmp_path / "evidence" / index.NAME).write_bytes(b"rubbish" * 1_000)
    assert ids(tmp_path) == [saved.evidence_id]


# --- times ---------------------------------------------------------------------


def test_a_second_save_within_the_tick_of_a_look_is_found(tmp_path: Path) -> None:
    one, other = "ab" + "0" * 62, "ab" + "1" * 62
    plant_bytes(tmp_path, one, b"{}")
    folder = tmp_path / "evidence" / "ab"
    assert ids(tmp_path) == [one]
    tick = folder.stat().st_mtime_ns
    plant_bytes(tmp_path, other, b"{}")
    os.utime(folder, ns=(tick, tick))
    assert set(ids(tmp_path)) == {one, other}
    shutil.rmtree(Store(tmp_path).folder(one))
    os.utime(folder, ns=(tick, tick))
    assert ids(tmp_path) == [other]


def test_folders_whose_times_are_long_past_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {save_record(tmp_path, n).evidence_id for n in range(20)}
    for folder in tmp_path.glob("evidence/??"):
        os.utime(folder, ns=(10**18, 10**18))
    assert set(ids(tmp_path)) == saved

    def refused(*_: object) -> list[str]:
        raise AssertionError("a folder was read")

    monkeypatch.setattr(Store, "ids_under", refused)
    monkeypatch.setattr(Store, "load", refused)
    assert set(ids(tmp_path)) == saved


def test_a_time_in_the_future_is_looked_at_until_it_is_past(tmp_path: Path) -> None:
    one = save_record(tmp_path).evidence_id
    folder = tmp_path / "evidence" / one[:2]
    future = time.time_ns() + 10**12
    os.utime(folder, ns=(future, future))
    assert ids(tmp_path) == [one]
    other = one[:2] + ("0" * 62 if one[2:] != "0" * 62 else "1" * 62)
    plant_bytes(tmp_path, other, b"{}")
    os.utime(folder, ns=(future, future))
    assert set(ids(tmp_path)) == {one, other}


# --- rows ----------------------------------------------------------------------


def test_a_row_holds_what_the_record_says(tmp_path: Path) -> None:
    saved = save_record(tmp_path, 3, started="2026-01-02T03:04:05+01:00", valid=None)
    [row] = rows(tmp_path)
    assert row._replace(stored_ns=0) == index.Row(
        saved.evidence_id, "bench", "measured", "2026-01-02T02:04:05.000000Z",
        "record 3: 123.5 tok/s", None, 0, "acme/model-3", "vllm", "H200", 0,
    )  # fmt: skip


def test_a_damaged_record_is_listed_with_its_problem(tmp_path: Path) -> None:
    saved = save_record(tmp_path)
    path = Store(tmp_path).folder(saved.evidence_id) / "evidence.json"
    path.write_bytes(path.read_bytes().replace(b"123.5", b"999.5"))
    [row] = rows(tmp_path)
    assert row.kind == "bench" and row.valid is None and row.complete == 0
    assert row.summary.startswith("altered: its content hashes to")
    plant_bytes(tmp_path, "ab" * 32, b'{"kind":"\\ud800"}')
    unreadable = [row for row in rows(tmp_path) if row.evidence_id == "ab" * 32]
    assert unreadable[0].kind == "unreadable" and unreadable[0].started == times.BEGINNING


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": ["x"]}, {"kind": 5, "summary": None, "valid": "yes"}, {"provenance": 7},
        {"provenance": {"started": ["x"]}}, {"identity": [1]}, {"identity": {"model": {"id": 5}}},
        {"coverage": {"complete": "yes"}}, {"kind": "k" * 100_000, "summary": "s" * 100_000},
        {"claim_class": {"a": 1}}, {"summary": "a\0b"},
        {"identity": {"model": {"id": "x" * 9_999}}},
    ],
    ids=lambda changed: repr(changed)[:30],
)  # fmt: skip
def test_a_record_of_an_odd_shape_is_listed(tmp_path: Path, changed: dict[str, Any]) -> None:
    evidence_id = plant(tmp_path, foreign_record(**changed))
    [row] = rows(tmp_path)
    assert row.evidence_id == evidence_id
    assert all(len(value) <= 600 for value in row if isinstance(value, str))


def test_names_are_matched_in_part_and_without_case(tmp_path: Path) -> None:
    saved = save_record(tmp_path, identity=Identity(model=Model(id="Meta/Llama_100%")))
    for part in ("llama", "META/", "_100%", ""):
        assert ids(tmp_path, index.Filter(model=part)) == [saved.evidence_id]
    for part in ("llamaX100", "%%", "qwen", "!", "Llama_100%!", "x" * 5_000):
        assert ids(tmp_path, index.Filter(model=part)) == []
    assert ids(tmp_path, index.Filter(engine="")) == []


def test_bounds_are_inclusive(tmp_path: Path) -> None:
    saved = [
        save_record(tmp_path, n, started=f"2026-01-0{n}T00:00:00Z").evidence_id for n in (1, 2, 3)
    ]
    middle = "2026-01-02T00:00:00.000000Z"
    assert ids(tmp_path, index.Filter(since=middle)) == [saved[2], saved[1]]
    assert ids(tmp_path, index.Filter(until=middle)) == [saved[1], saved[0]]
    assert ids(tmp_path, index.Filter(since=middle, until=middle)) == [saved[1]]


def test_ids_are_completed_newest_first(tmp_path: Path) -> None:
    for number, evidence_id in enumerate(["ab" + "0" * 62, "ab" + "1" * 62, "cd" + "0" * 62]):
        made = make_record(started=f"2026-01-0{number + 1}T00:00:00Z")
        plant(tmp_path, made, evidence_id=evidence_id)
    with index.opened(Store(tmp_path)) as connection:
        assert index.ids_with_prefix(connection, "ab", 9) == ["ab" + "1" * 62, "ab" + "0" * 62]
        assert index.ids_with_prefix(connection, "ab", 1) == ["ab" + "1" * 62]
        assert len(index.ids_with_prefix(connection, "", 9)) == 3
        assert index.ids_with_prefix(connection, "a'; DROP", 9) == []


# --- pages ---------------------------------------------------------------------


def walk(home: Path, offset: int, limit: int, between: Callable[[], None]) -> list[str]:
    """Follow the pages to the end, or for 18 pages; ``between`` happens after each."""
    wanted, shown = EVERYTHING, []
    for _ in range(18):
        with index.opened(Store(home)) as connection:
            found, after = index.page(connection, wanted, offset, limit)
        shown += [row.evidence_id for row in found]
        between()
        if after is None:
            break
        wanted, offset = wanted._replace(until=after[0]), after[1]
    return shown


@pytest.mark.parametrize("start", ["2026-01-01T00:00:00Z", "rubbish", None])
@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("limit", [1, 4])
def test_pages_shift_for_nothing_that_arrives_meanwhile(
    tmp_path: Path, start: str | None, offset: int, limit: int
) -> None:
    there = [save_record(tmp_path, n, started=start).evidence_id for n in range(13)]
    order = ids(tmp_path)
    assert set(order) == set(there)
    if start is not None:
        assert order == there  # of one start: in the order of their arrival
    number = 100

    def save_some() -> None:
        nonlocal number
        for _ in range(2):
            number += 1
            save_record(tmp_path, number, started=start)

    shown = walk(tmp_path, offset, limit, save_some)
    assert len(shown) == len(set(shown))
    assert [i for i in shown if i in set(order)] == order[offset:]


def test_a_record_whose_clock_is_behind_still_comes_after_what_was_listed(tmp_path: Path) -> None:
    start = "2026-01-01T00:00:00Z"
    there = [save_record(tmp_path, n, started=start).evidence_id for n in range(3)]
    assert ids(tmp_path) == there
    stored = index._stored_ns
    try:
        index._stored_ns = lambda record: 5
        late = save_record(tmp_path, 9, started=start).evidence_id
        assert ids(tmp_path) == [*there, late]
    finally:
        index._stored_ns = stored
    later = save_record(tmp_path, 10, started=start).evidence_id
    assert ids(tmp_path) == [*there, late, later]


def test_the_last_page_says_that_there_is_no_other(tmp_path: Path) -> None:
    for number in range(4):
        save_record(tmp_path, number)
    with index.opened(Store(tmp_path)) as connection:
        assert index.page(connection, EVERYTHING, 0, 4)[1] is None
        assert index.page(connection, EVERYTHING, 2, 4)[1] is None
        assert index.page(connection, EVERYTHING, 99, 4) == ([], None)
        found, after = index.page(connection, EVERYTHING, 1, 2)
        assert after == (found[-1].started, 1)
        assert index.page(connection, index.Filter(kind="none"), 0, 4) == ([], None)


def test_a_filter_goes_along_to_the_next_page(tmp_path: Path) -> None:
    start = "2026-01-01T00:00:00Z"
    for number in range(12):
        save_record(tmp_path, number, started=start, kind="bench" if number % 3 else "roofline")
    wanted, offset, shown = index.Filter(kind="bench"), 0, []
    while True:
        with index.opened(Store(tmp_path)) as connection:
            found, after = index.page(connection, wanted, offset, 3)
        shown += [row.evidence_id for row in found]
        if after is None:
            break
        wanted, offset = wanted._replace(until=after[0]), after[1]
    assert shown == ids(tmp_path, index.Filter(kind="bench")) and len(shown) == 8
