"""The store among processes: many save at once, some are killed, some only look."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import killed_saves
from helpers.records import save_record, tree
from ikit_mcp.evidence import index
from ikit_mcp.evidence.store import Store

TESTS = Path(__file__).resolve().parents[1]
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
SAVERS, EACH = 8, 12
SAVER = """
import sys
from pathlib import Path
from helpers.records import save_record
home, number, each = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for n in range(number * each, (number + 1) * each):
    print(save_record(home, n, files={"a.txt": str(n).encode()}).evidence_id, flush=True)
"""
HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute(sys.argv[2])
print("held", flush=True)
sys.stdin.readline()
"""


def started(code: str, *words: object) -> subprocess.Popen[str]:
    """A Python process that has said its first line."""
    argv = [sys.executable, "-c", code, *map(str, words)]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENV, text=True
    )
    assert process.stdout is not None and process.stdout.readline()
    return process


def ended(process: subprocess.Popen[str]) -> list[str]:
    """Let a process go on; its lines until it ends well."""
    out, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    return out.split()


def listed(home: Path) -> set[str]:
    def all_of(connection: sqlite3.Connection) -> set[str]:
        rows, _ = index.page(connection, index.Filter(), 0, 10_000)
        assert len(rows) == index.count(connection, index.Filter())
        return {row.evidence_id for row in rows}

    return index.ask(Store(home), all_of)


def test_eight_processes_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    savers = [started(SAVER, tmp_path, number, EACH) for number in range(SAVERS)]
    for saver in savers:
        assert saver.stdin is not None
        saver.stdin.write("\n")
        saver.stdin.flush()
    listed(tmp_path)  # others look while they save
    saved = {line for saver in savers for line in ended(saver)}
    assert len(saved) == SAVERS * EACH
    store = Store(tmp_path)
    assert set(store.ids()) == saved == listed(tmp_path)
    assert store.leftovers() == []
    assert [problem for i in saved for problem in store.problems(i)] == []


def test_a_process_killed_at_any_point_of_a_save_leaves_all_of_it_or_nothing(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, killed_saves.__file__, tmp_path / "home"],
        env=ENV, capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told["wrong"] == []
    assert told["points"] > 150 and told["whole"] > 5 and told["none"] > 100


def test_a_reader_that_is_killed_while_it_makes_the_index_leaves_a_sound_one(
    tmp_path: Path,
) -> None:
    saved = {save_record(tmp_path, n).evidence_id for n in range(12)}
    code = """
import sys, os, signal
from pathlib import Path
from helpers import killed_saves
from ikit_mcp.evidence import index
from ikit_mcp.evidence.store import Store
print("ready", flush=True)
killed_saves.die_at(int(sys.argv[2]))
with index.opened(Store(Path(sys.argv[1]))):
    pass
"""
    for point in range(1, 1000, 83):
        process = started(code, tmp_path, point)
        process.communicate("\n", timeout=60)
        assert process.returncode in (0, -signal.SIGKILL)
        assert listed(tmp_path) == saved
        (tmp_path / "evidence" / "index.sqlite").unlink()
    save_record(tmp_path, 99)
    assert Store(tmp_path).leftovers() == []


@pytest.mark.parametrize("how", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_an_index_that_another_process_holds_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    saved = {save_record(tmp_path, n).evidence_id for n in range(5)}
    assert listed(tmp_path) == saved
    path = tmp_path / "evidence" / "index.sqlite"
    holder = started(HOLDER, path, how)
    before = path.read_bytes()
    saved.add(save_record(tmp_path, 5).evidence_id)
    assert listed(tmp_path) == saved
    assert path.read_bytes() == before
    ended(holder)
    assert listed(tmp_path) == saved and path.read_bytes() != before


def test_a_lock_that_comes_between_a_look_and_a_copy_does_not_hold_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.2)
    saved = {save_record(tmp_path, n).evidence_id for n in range(5)}
    path = tmp_path / "evidence" / "index.sqlite"
    listed(tmp_path)
    holders: list[subprocess.Popen[str]] = []
    copied = index._copied

    def raced(source: sqlite3.Connection) -> sqlite3.Connection | None:
        """Another process takes the file for good just before it is copied."""
        ended(holders.pop())
        holders.append(started(HOLDER, path, "BEGIN EXCLUSIVE"))
        return copied(source)

    monkeypatch.setattr(index, "_copied", raced)
    holders.append(started(HOLDER, path, "BEGIN IMMEDIATE"))
    saved.add(save_record(tmp_path, 5).evidence_id)
    assert listed(tmp_path) == saved
    ended(holders.pop())


@pytest.mark.parametrize("equal", [False, True], ids=["own starts", "one start"])
@pytest.mark.parametrize("offset", [0, 7])
def test_pages_skip_and_repeat_nothing_while_another_process_saves(
    tmp_path: Path, equal: bool, offset: int
) -> None:
    start = "2026-01-01T00:00:00Z" if equal else None
    there = [save_record(tmp_path, n, started=start).evidence_id for n in range(40)]
    order = there if equal else there[::-1]
    code = SAVER.replace("save_record(home, n,", f"save_record(home, n, started={start!r},")
    saver = started(code, tmp_path, 10, 400)
    assert saver.stdin is not None and saver.stdout is not None
    saver.stdin.write("\n")
    saver.stdin.flush()
    shown: list[str] = []
    wanted = index.Filter()
    if not equal:
        wanted = wanted._replace(until=index.row_of(Store(tmp_path).load(there[-1])).started)
    at = offset
    while True:
        for _ in range(3):
            saver.stdout.readline()  # others arrive between any two pages
        with index.opened(Store(tmp_path)) as connection:
            rows, after = index.page(connection, wanted, at, 3)
        shown += [row.evidence_id for row in rows]
        if after is None or set(order[offset:]) <= set(shown):
            break
        wanted, at = wanted._replace(until=after[0]), after[1]
    saver.kill()
    saver.communicate()
    assert len(shown) == len(set(shown))
    assert [i for i in shown if i in set(there)] == order[offset:]


def test_verifying_and_listing_a_store_of_others_changes_no_record(tmp_path: Path) -> None:
    saved = [save_record(tmp_path, n, files={"a": b"x"}).evidence_id for n in range(4)]
    before = tree(tmp_path)
    store = Store(tmp_path)
    assert [store.problems(i) for i in saved] == [[]] * 4 and store.leftovers() == []
    assert tree(tmp_path) == before
    listed(tmp_path)
    after = {k: v for k, v in tree(tmp_path).items() if "index.sqlite" not in k}
    assert {k: v[3] for k, v in after.items()} == {k: v[3] for k, v in before.items()}
