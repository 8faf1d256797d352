"""Evidence read back through the operations, as an agent asks for it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.records import foreign_record, make_record, plant, plant_bytes, save_record, tree
from ikit_mcp import registry
from ikit_mcp.call import Cancelled, Progress, Settings
from ikit_mcp.evidence import signing
from ikit_mcp.evidence.record import Identity, Model
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import OpError
from ikit_mcp.runner import Control, Runner

REGISTRY = registry.load(None)
REPLY = 11_800


class Asker:
    """Calls operations in one home; keeps what they propose next."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.next: list[dict[str, Any]] = []
        self._runner = Runner(REGISTRY, Settings(home))

    def __call__(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """The reply of an operation that reads."""
        outcome = self._runner.here(self._runner.check(operation, arguments), Control())
        assert outcome.reply is not None and outcome.record is None
        self.next = outcome.shown.next
        json.dumps(outcome.reply, ensure_ascii=False).encode("utf-8")
        return outcome.reply

    def refused(self, operation: str, **arguments: Any) -> str:
        """The error of an operation that refuses."""
        with pytest.raises(OpError) as caught:
            self(operation, **arguments)
        text = str(caught.value)
        assert len(text) <= 2_000 and "Next: " in text
        return text

    def all_pages(self, operation: str, key: str, **arguments: Any) -> list[Any]:
        """The items of all pages, by following ``next``."""
        found: list[Any] = []
        while True:
            reply = self(operation, **arguments)
            assert compact(reply) <= REPLY
            found += reply[key]
            if not self.next:
                assert reply["next_offset"] is None
                return found
            [proposed] = self.next
            assert proposed["tool"] == operation and reply["next_offset"] is not None
            arguments = proposed["arguments"]


def compact(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def ask(home: Path) -> Asker:
    return Asker(home)


def flip(home: Path, evidence_id: str) -> None:
    path = Store(home).folder(evidence_id) / "evidence.json"
    path.write_bytes(path.read_bytes().replace(b"123.5", b"123.4"))


# --- list ----------------------------------------------------------------------


def test_an_empty_home_lists_nothing_and_stays_empty(ask: Asker) -> None:
    assert ask("list_evidence") == {
        "root": str(ask.home / "evidence"), "total": 0, "offset": 0, "items": [],
        "next_offset": None,
    }  # fmt: skip
    assert not ask.home.exists() and ask.next == []


def test_a_listing_has_one_line_a_record_newest_first(ask: Asker) -> None:
    old = save_record(ask.home, 1, started="2026-01-01T00:00:00Z", kind="roofline", valid=None)
    new = save_record(ask.home, 2, started="2026-01-02T00:00:00Z", missing=[])
    reply = ask("list_evidence")
    assert [item["evidence_id"] for item in reply["items"]] == [new.evidence_id, old.evidence_id]
    assert reply["total"] == 2 and reply["next_offset"] is None and ask.next == []
    assert reply["items"][1] == {
        "evidence_id": old.evidence_id, "kind": "roofline", "claim_class": "measured",
        "started": "2026-01-01T00:00:00.000000Z", "summary": "record 1: 123.5 tok/s",
        "valid": None, "complete": False, "model": "acme/model-1", "engine": "vllm",
    }  # fmt: skip
    assert reply["items"][0]["complete"] is True and reply["items"][0]["valid"] is True


def test_a_listing_is_filtered_by_everything_it_offers(ask: Asker) -> None:
    one = save_record(ask.home, 1, started="2026-01-01T12:00:00Z", kind="roofline", valid=False)
    two = save_record(ask.home, 2, started="2026-01-02T12:00:00Z", valid=None)
    now = save_record(ask.home, 3)

    def listed(**arguments: Any) -> set[str]:
        return {item["evidence_id"] for item in ask("list_evidence", **arguments)["items"]}

    assert listed(kind="roofline") == {one.evidence_id} == listed(valid="false")
    assert listed(valid="unknown") == {two.evidence_id} == listed(model="MODEL-2")
    assert listed(engine="VLLM", device="h2") == {r.evidence_id for r in (one, two, now)}
    assert listed(since="1h") == {now.evidence_id}
    assert listed(until="2026-01-01") == {one.evidence_id}
    assert listed(since="2026-01-02", until="2026-01-02") == {two.evidence_id}
    assert listed(since="2026-01-02T13:00:00+01:00", until="7d") == {two.evidence_id}
    assert "since: got 'soon'" in ask.refused("list_evidence", since="soon")
    assert "allowed: " in ask.refused("list_evidence", kind="bunch", limit=0, offset=-1)


@pytest.mark.parametrize("start", [None, "2026-01-01T00:00:00Z", "no time"])
@pytest.mark.parametrize("arguments", [{"limit": 3}, {"limit": 5, "offset": 4}, {"limit": 100}])
def test_following_next_neither_skips_nor_repeats(
    ask: Asker, start: str | None, arguments: dict[str, Any]
) -> None:
    for number in range(14):
        save_record(ask.home, number, started=start)
    order = [item["evidence_id"] for item in ask("list_evidence", limit=100)["items"]]
    found = ask.all_pages("list_evidence", "items", **arguments)
    assert [item["evidence_id"] for item in found] == order[arguments.get("offset", 0) :]


def test_next_keeps_the_filters_and_the_moment_that_since_meant(ask: Asker) -> None:
    for number in range(6):
        save_record(ask.home, number)
    ask("list_evidence", limit=2, kind="bench", since="7d", model="acme")
    arguments = ask.next[0]["arguments"]
    assert arguments["kind"] == "bench" and arguments["model"] == "acme"
    assert arguments["since"].endswith("Z") and arguments["limit"] == 2
    assert "valid" not in arguments


def test_long_lines_cut_the_page_and_next_goes_on_from_there(ask: Asker) -> None:
    for number in range(60):
        save_record(ask.home, number, summary=f"{number} " + "é" * 590,
                    identity=Identity(model=Model(id="m" * 350)))  # fmt: skip
    reply = ask("list_evidence", limit=100)
    assert 1 < len(reply["items"]) < 60 and compact(reply) <= REPLY
    assert reply["next_offset"] == len(reply["items"])
    found = ask.all_pages("list_evidence", "items", limit=100)
    assert len({item["evidence_id"] for item in found}) == 60


def test_text_from_outside_is_one_clean_line(ask: Asker) -> None:
    evil = "a\x1b[31m\nb\u202e c\u2028"
    plant(ask.home, foreign_record(kind=evil, summary=evil, identity={"model": {"id": evil}}))
    [item] = ask("list_evidence")["items"]
    for key in ("kind", "summary", "model"):
        assert item[key].isprintable() and item[key].startswith("a")


def test_a_record_that_fails_its_check_is_listed_as_failing(ask: Asker) -> None:
    saved = save_record(ask.home)
    assert "problem" not in ask("list_evidence")["items"][0]
    flip(ask.home, saved.evidence_id)
    [item] = ask("list_evidence")["items"]
    assert item["valid"] is None and item["problem"].startswith("altered")


def test_many_unreadable_records_are_listed_to_the_last(ask: Asker) -> None:
    wanted = {f"{n:02x}" + "0" * 62 for n in range(30)}
    for evidence_id in wanted:
        plant_bytes(ask.home, evidence_id, b"\xff")
    found = ask.all_pages("list_evidence", "items", limit=7)
    assert {item["evidence_id"] for item in found} == wanted and len(found) == 30
    assert all(item["started"] is None and item["valid"] is None for item in found)


def test_an_index_that_lies_cannot_make_a_record_say_something_else(ask: Asker) -> None:
    save_record(ask.home)
    ask("list_evidence")
    connection = sqlite3.connect(ask.home / "evidence" / "index.sqlite")
    connection.execute("UPDATE records SET valid = 0, model = 'other'")
    connection.execute("UPDATE details SET summary = 'faster'")
    connection.commit()
    connection.close()
    [item] = ask("list_evidence")["items"]
    assert item["summary"] == "record 0: 123.5 tok/s" and item["model"] == "acme/model-0"
    assert item["valid"] is True


# --- inspect -------------------------------------------------------------------


def test_a_record_is_shown_whole_with_what_its_hash_says(ask: Asker) -> None:
    saved = save_record(ask.home)
    reply = ask("inspect_evidence", id=saved.evidence_id[:6])
    assert reply == {
        "evidence_id": saved.evidence_id, "path": "",
        "integrity": {"ok": True, "problem": None, "signature": None}, "record": saved.raw,
    }  # fmt: skip
    assert ask("inspect_evidence", evidence_id=f"evidence://{saved.evidence_id}") == reply


def test_an_altered_record_is_shown_as_failing(ask: Asker) -> None:
    saved = save_record(ask.home)
    flip(ask.home, saved.evidence_id)
    reply = ask("inspect_evidence", id=saved.evidence_id)
    assert reply["integrity"]["ok"] is False and "altered" in reply["integrity"]["problem"]
    assert reply["record"]["metrics"][0]["value"] == 123.4
    plant_bytes(ask.home, saved.evidence_id, b'{"root":"password"')
    reply = ask("inspect_evidence", id=saved.evidence_id)
    assert reply["record"] == {} and "altered: not a record" in reply["integrity"]["problem"]


def test_a_part_is_shown_by_its_path_and_in_pages(ask: Asker) -> None:
    rows = [{"name": f"kernel.{n}", "ns": n, "pad": "x" * 90} for n in range(300)]
    saved = save_record(ask.home, data={"kernels": rows, "log": "äö\n" * 9_000})
    show = {"id": saved.evidence_id[:12]}
    assert ask("inspect_evidence", **show, path="metrics.decode_tok_s.value")["value"] == 123.5
    assert ask("inspect_evidence", **show, path="data.kernels.kernel.7")["value"] == rows[7]
    assert ask("inspect_evidence", **show, path="data.kernels.-1.ns")["value"] == 299
    assert ask.next == []
    assert ask.all_pages("inspect_evidence", "items", **show, path="data.kernels") == rows
    assert "".join(ask.all_pages("inspect_evidence", "value", **show, path="data.log")) == (
        "äö\n" * 9_000
    )
    told = ask.refused("inspect_evidence", **show, path="nothing")
    assert "there is no nothing" in told and "provenance" in told


def test_a_record_with_too_many_members_for_an_outline_is_read_in_pages(ask: Asker) -> None:
    wide = {f"field_{n}": "v" * 40 for n in range(500)}
    evidence_id = plant(ask.home, foreign_record(**wide))
    found = ask.all_pages("inspect_evidence", "items", id=evidence_id)
    assert {m["name"]: m["value"] for m in found}.items() >= wide.items()


@pytest.mark.parametrize(
    "data",
    [
        {"k" * 9_000: ["z" * 9_000] * 50, "p": "\0" * 20_000},
        {"a": {"b" * 300: {"c" * 300: {"d" * 300: ["z" * 20_000] * 9}}}},
        {f"tensor.{n}": "x" * 80 for n in range(5_000)},
        {"rows": ["\u202e" * 900] * 300},
    ],
    ids=["huge keys", "long paths", "wide", "escapes"],
)  # fmt: skip
def test_no_reply_is_over_its_budget(ask: Asker, data: dict[str, Any]) -> None:
    key = signing.generate_key(ask.home)
    saved = save_record(ask.home, data=data, kind="bench",
                        key=signing.load_signing_key(Path(key["private"])))  # fmt: skip
    for path in ("", "data", "data.#0", "data.#0.#0", "data.rows", "metrics", "data.p"):
        for limit in (1, 1000):
            try:
                reply = ask("inspect_evidence", id=saved.evidence_id, path=path, limit=limit)
            except OpError:
                continue
            assert compact(reply) <= REPLY and reply["integrity"]["signature"]["trusted"]
            for proposed in ask.next:
                assert compact(proposed) <= 2_500


def test_the_state_of_a_signature_is_shown(ask: Asker, tmp_path: Path) -> None:
    made = signing.generate_key(ask.home)
    saved = save_record(ask.home, 1, key=signing.load_signing_key(Path(made["private"])))
    stranger = signing.generate_key(tmp_path / "other")
    foreign = save_record(ask.home, 2, key=signing.load_signing_key(Path(stranger["private"])))
    found = ask("inspect_evidence", id=saved.evidence_id)["integrity"]
    assert found["ok"] is True and found["signature"]["trusted"] is True
    found = ask("inspect_evidence", id=foreign.evidence_id)["integrity"]
    assert found["ok"] is True and found["signature"]["ok"] is None
    moved = plant(ask.home, make_record(3) | {"signature": saved.raw["signature"]})
    found = ask("inspect_evidence", id=moved)["integrity"]
    assert found["ok"] is False and found["problem"] == "the signature is of another record"


def test_a_record_whose_hash_is_right_but_not_its_shape_fails(ask: Asker) -> None:
    evidence_id = plant(ask.home, foreign_record(claim_class="guessed\u202e" * 99))
    found = ask("inspect_evidence", id=evidence_id)["integrity"]
    assert found["ok"] is False and len(found["problem"]) <= 200
    assert found["problem"].isprintable()
    other = plant(ask.home, {"schema": "ikit.evidence/7", "anything": 1})
    assert ask("inspect_evidence", id=other)["integrity"]["ok"] is True


# --- inspect, by path ------------------------------------------------------------


def test_a_copy_of_a_record_is_shown_by_its_path(ask: Asker, tmp_path: Path) -> None:
    saved = save_record(tmp_path / "other")
    path = Store(tmp_path / "other").folder(saved.evidence_id) / "evidence.json"
    reply = ask("inspect_evidence", id=str(path))
    assert reply["record"] == saved.raw and reply["integrity"]["ok"] is True
    assert reply["evidence_id"] == saved.evidence_id
    flip(tmp_path / "other", saved.evidence_id)
    assert ask("inspect_evidence", id=str(path))["integrity"]["ok"] is False


def test_a_copy_with_an_odd_id_shows_no_id(ask: Asker, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(foreign_record(evidence_id="x" * 100_000)), encoding="utf-8")
    reply = ask("inspect_evidence", id=str(path))
    assert reply["evidence_id"] == "" and reply["integrity"]["ok"] is False
    assert compact(reply) <= REPLY


SECRET = "hunter2"


@pytest.mark.parametrize(
    "content",
    [
        SECRET, f'{{"password": "{SECRET}"}}', f'{{"schema": "{SECRET}"}}', f'["{SECRET}"]',
        f'{{"schema": 5, "x": "{SECRET}"}}', f'{{"schema": "ikit.evidence/1", "x": "{SECRET}"',
        f'{{"schema": "ikit.evidence/1", "{SECRET}": 1, "{SECRET}": 2}}',
        f'{{"schema": "ikit.evidence/1", "x": 1e999, "y": "{SECRET}"}}', "",
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_is_refused_without_its_contents(
    ask: Asker, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(content, encoding="utf-8")
    text = ask.refused("inspect_evidence", id=str(path))
    assert "is not an evidence record" in text and SECRET not in text


def test_only_regular_files_of_the_right_name_are_opened(ask: Asker, tmp_path: Path) -> None:
    saved = save_record(tmp_path / "other")
    real = Store(tmp_path / "other").folder(saved.evidence_id) / "evidence.json"
    pipe, link, folder = (tmp_path / n / "evidence.json" for n in ("pipe", "link", "folder"))
    for path in (pipe, link, folder):
        path.parent.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(real)
    folder.mkdir()
    shutil.copy(real, tmp_path / "copy_evidence.json")
    shutil.copy(real, tmp_path / "record.json")
    for path in (pipe, link, folder, tmp_path / "gone" / "evidence.json"):
        assert "cannot read" in ask.refused("inspect_evidence", id=str(path))
    assert "is not an evidence record" in ask.refused(
        "inspect_evidence", id=str(tmp_path / "copy_evidence.json")
    )
    for text in ("/etc/passwd", str(tmp_path / "record.json"), "/dev/zero", "~/.ssh/id_rsa"):
        assert "is no evidence id" in ask.refused("inspect_evidence", id=text)
    assert "cannot read" in ask.refused("inspect_evidence", id="x/" * 2_000 + "evidence.json")
    assert "NUL" in ask.refused("inspect_evidence", id="/tmp/\0/evidence.json")
    uri = f"evidence://{saved.evidence_id}/evidence.json"
    assert "is no evidence id" in ask.refused("inspect_evidence", id=uri)


def test_a_file_over_the_limit_is_not_read(ask: Asker, tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    with path.open("wb") as file:
        file.truncate(65 * 1024 * 1024)
    assert "over the limit" in ask.refused("inspect_evidence", id=str(path))


# --- verify --------------------------------------------------------------------


def test_a_sound_store_verifies_and_nothing_is_changed(ask: Asker) -> None:
    for number in range(3):
        save_record(ask.home, number, files={"a.txt": b"x"})
    before = tree(ask.home)
    assert ask("verify_evidence") == {"checked": 3, "ok": True, "problems": [], "leftovers": []}
    assert tree(ask.home) == before


def test_everything_that_is_wrong_is_reported_and_nothing_is_changed(ask: Asker) -> None:
    sound, altered, orphan, changed = (
        save_record(ask.home, n, files={"a.txt": b"x"}).evidence_id for n in range(4)
    )
    store = Store(ask.home)
    flip(ask.home, altered)
    (store.folder(orphan) / "evil\x1b\u202e").write_bytes(b"")
    (store.folder(changed) / "a.txt").write_bytes(b"y")
    (store.root / ".staging" / "dead").mkdir()
    (store.root / os.fsdecode(b"odd\xff")).mkdir()
    before = tree(ask.home)
    reply = ask("verify_evidence")
    assert tree(ask.home) == before
    found = {problem["evidence_id"]: problem["problem"] for problem in reply["problems"]}
    assert set(found) == {altered, orphan, changed} and reply["ok"] is False
    assert found[altered].startswith("altered") and found[changed].endswith("was altered")
    assert found[orphan] == "a file that the record does not list: evil"
    assert reply["leftovers"] == [".staging/dead", "odd\\udcff"] and reply["checked"] == 4
    one = ask("verify_evidence", id=sound[:10])
    assert one == {"checked": 1, "ok": True, "problems": [], "leftovers": []}
    assert ask("verify_evidence", id=changed)["ok"] is False
    assert "no evidence record" in ask.refused("verify_evidence", id="abcdef123456")


def test_many_problems_are_counted_and_cut_to_the_budget(ask: Asker) -> None:
    for number in range(200):
        plant_bytes(ask.home, f"{number:02x}" + "0" * 62, b"{")
        (ask.home / "evidence" / ("stray" * 30 + str(number))).mkdir()
    reply = ask("verify_evidence")
    assert compact(reply) <= 14_000 and reply["checked"] == 200
    assert len(reply["problems"]) + reply["more_problems"] == 200
    assert len(reply["leftovers"]) + reply["more_leftovers"] == 200


def test_verifying_tells_how_far_it_is_and_can_be_cancelled(home: Path) -> None:
    for number in range(3):
        save_record(home, number)
    told: list[Progress] = []
    runner = Runner(REGISTRY, Settings(home))
    runner.here(runner.check("verify_evidence", {}), Control(report=told.append))
    assert told and told[0].total == 3
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        runner.here(runner.check("verify_evidence", {}), Control(cancel=cancel))


# --- keys and homes --------------------------------------------------------------


def test_a_new_key_is_made_in_a_new_home_and_can_sign(ask: Asker) -> None:
    made = ask("keygen")
    assert made["use"] == f"export IKIT_SIGNING_KEY={made['private']}"
    saved = save_record(ask.home, key=signing.load_signing_key(Path(made["private"])))
    found = ask("inspect_evidence", id=saved.evidence_id)["integrity"]["signature"]
    assert found["trusted"] is True and found["key_id"] == made["key_id"]
    assert not REGISTRY.get("keygen").tool


def test_a_home_that_is_not_safe_is_refused_by_every_operation(ask: Asker) -> None:
    saved = save_record(ask.home)
    ask.home.chmod(0o777)
    for operation, arguments in (
        ("list_evidence", {}), ("verify_evidence", {}), ("keygen", {}),
        ("inspect_evidence", {"id": saved.evidence_id}),
    ):  # fmt: skip
        assert "can be written by others" in ask.refused(operation, **arguments)
