"""A record is stored whole or not at all, for its owner alone, and any change of it shows."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from helpers.records import foreign_record, make_record, plant, plant_bytes, save_record, tree
from ikit_mcp.evidence import canonical, claims, files
from ikit_mcp.evidence.store import MAX_RECORD_BYTES, Store, check
from ikit_mcp.registry import OpError

ROOT = os.geteuid() == 0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def modes(root: Path) -> dict[str, int]:
    return {name: stat.S_IMODE(entry[0]) for name, entry in tree(root).items()}


# --- whose it is ---------------------------------------------------------------


def test_nothing_is_created_before_the_first_save(home: Path) -> None:
    store = Store(home)
    assert list(store.ids()) == [] and store.leftovers() == []
    assert not home.exists()


def test_folders_are_0700_and_files_0600_whatever_the_umask(home: Path, tmp_path: Path) -> None:
    loose = tmp_path / "loose.bin"
    loose.write_bytes(b"moved")
    loose.chmod(0o777)
    before = os.umask(0)
    try:
        with Store(home / "in" / "here").stage() as stage:
            stage.add("a.txt", b"text", "text/plain")
            stage.add("b.bin", loose, "application/octet-stream")
            stage.commit(make_record(artifacts=stage.artifacts))
    finally:
        os.umask(before)
    found = modes(home.parent / "home")
    assert stat.S_IMODE(home.stat().st_mode) == 0o700 and not loose.exists()
    assert {oct(found[name]) for name in found if (home / name).is_dir()} == {"0o700"}
    assert {oct(found[name]) for name in found if (home / name).is_file()} == {"0o600"}


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
@pytest.mark.parametrize("which", ["home", "home/evidence"])
def test_a_home_that_others_can_write_is_refused(home: Path, mode: int, which: str) -> None:
    save_record(home)
    (home.parent / which).chmod(mode)
    with pytest.raises(OpError, match="can be written by others") as caught:
        Store(home)
    assert "chmod go-w" in caught.value.next_step


@pytest.mark.skipif(not ROOT, reason="only root can give a folder away")
@pytest.mark.parametrize("which", ["home", "home/evidence"])
def test_a_home_of_another_owner_is_refused(home: Path, which: str) -> None:
    save_record(home)
    os.chown(home.parent / which, 12_345, 12_345)
    with pytest.raises(OpError, match="belongs to user 12345, not to you"):
        Store(home)


def test_a_home_that_others_can_only_read_is_used(home: Path) -> None:
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    assert save_record(home).problem is None


def test_a_home_that_became_writable_is_refused_at_the_next_save(home: Path) -> None:
    store = Store(home)
    with store.stage() as stage:
        stage.commit(make_record())
    home.chmod(0o777)
    with pytest.raises(OpError, match="can be written by others"), store.stage():
        pytest.fail("a stage was given")


def test_a_home_that_is_no_folder_is_refused(home: Path, tmp_path: Path) -> None:
    home.write_bytes(b"")
    with pytest.raises(OpError, match="is not a folder"):
        Store(home)
    with pytest.raises(OpError, match="cannot use the home"):
        Store(home / "inside")
    home.unlink()
    home.symlink_to(tmp_path / "nothing")
    with pytest.raises(OpError, match="is a link to nothing"):
        Store(home)


def test_a_home_may_be_a_link_to_a_folder_of_ones_own(home: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    home.symlink_to(tmp_path / "disk")
    saved = save_record(home)
    assert Store(tmp_path / "disk").load(saved.evidence_id).problem is None


# --- saving --------------------------------------------------------------------


def test_a_record_is_kept_as_its_canonical_bytes_under_its_id(home: Path) -> None:
    saved = save_record(home, files={"log.txt": b"hello"})
    folder = home / "evidence" / saved.evidence_id[:2] / saved.evidence_id
    data = (folder / "evidence.json").read_bytes()
    assert data == canonical.canonical_bytes(json.loads(data))
    assert canonical.evidence_id(json.loads(data)) == saved.evidence_id
    assert saved.raw == json.loads(data) and saved.folder == folder
    assert saved.raw["artifacts"] == [
        {"name": "log.txt", "bytes": 5, "sha256": hashlib.sha256(b"hello").hexdigest(),
         "media_type": "application/octet-stream"}
    ]  # fmt: skip
    assert sorted(os.listdir(home / "evidence")) == [".staging", saved.evidence_id[:2]]
    assert os.listdir(home / "evidence" / ".staging") == []


def test_what_is_not_committed_is_gone(home: Path) -> None:
    store = Store(home)
    with store.stage() as stage:
        stage.add("a.txt", b"x", "text/plain")
        assert stage.folder.is_dir()
    with pytest.raises(RuntimeError), store.stage() as stage:
        raise RuntimeError("the operation failed")
    assert list(store.ids()) == [] and store.leftovers() == []
    assert os.listdir(store.root / ".staging") == []


def test_a_record_that_is_saved_twice_is_one_record(home: Path) -> None:
    raw = make_record()
    kept = []
    for _ in range(2):
        with Store(home).stage() as stage:
            kept.append(stage.commit(raw))
    assert kept[0].raw == kept[1].raw and list(Store(home).ids()) == [kept[0].evidence_id]
    assert Store(home).leftovers() == [] and kept[1].problem is None


def test_a_damaged_record_in_the_way_is_never_written_over(home: Path) -> None:
    raw = make_record()
    with Store(home).stage() as stage:
        saved = stage.commit(raw)
    path = Store(home).folder(saved.evidence_id) / "evidence.json"
    path.write_bytes(b"{}")
    before = tree(home)
    with pytest.raises(OpError, match="is in the way: altered"), Store(home).stage() as stage:
        stage.commit(raw)
    assert {k: v[3] for k, v in tree(home).items()} == {k: v[3] for k, v in before.items()}


@pytest.mark.parametrize(
    "name",
    ["", ".hidden", "-x", "a/b", "../a", "a\\b", "a b", "ä", "a\n", "a\0", "x" * 101,
     "evidence.json", "."],
)  # fmt: skip
def test_an_artifact_name_that_is_not_plain_is_refused(home: Path, name: str) -> None:
    with Store(home).stage() as stage:
        with pytest.raises(ValueError, match="artifact name"):
            stage.add(name, b"x", "text/plain")
        assert os.listdir(stage.folder) == []
    with pytest.raises(OpError, match=r"no artifact|No such file"):
        Store(home).open_artifact("0" * 64, name or "-")


def test_plain_artifact_names_are_taken_once(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_bytes(b"second")
    with Store(home).stage() as stage:
        for name in ("a", "A.b_c-1", "9", "x" * 100):
            stage.add(name, name.encode(), "text/plain")
        for again in (b"second", source):
            with pytest.raises(ValueError, match="was added before"):
                stage.add("a", again, "text/plain")
        saved = stage.commit(make_record(artifacts=stage.artifacts))
    assert Store(home).problems(saved.evidence_id) == []
    with os.fdopen(Store(home).open_artifact(saved.evidence_id, "9"), "rb") as file:
        assert file.read() == b"9"


def test_an_artifact_that_is_no_regular_file_is_refused(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"x")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    with Store(home).stage() as stage:
        for source in (link, pipe, tmp_path):
            with pytest.raises(ValueError, match="not a regular file"):
                stage.add("a", source, "text/plain")
    assert target.read_bytes() == b"x"


def test_a_record_that_could_not_be_read_back_is_not_saved(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(home).stage() as stage, pytest.raises(ValueError, match="not the shape"):
        stage.commit({**make_record(), "claim_class": "guessed"})
    with Store(home).stage() as stage, pytest.raises(ValueError, match=r"\.data\.x is nan"):
        stage.commit({**make_record(), "data": {"x": float("nan")}})
    monkeypatch.setattr("ikit_mcp.evidence.store.MAX_RECORD_BYTES", 5_000)
    with Store(home).stage() as stage, pytest.raises(ValueError, match="belongs into artifacts"):
        stage.commit(make_record(data={"x": "y" * 5_000}))
    assert list(Store(home).ids()) == [] and Store(home).leftovers() == []


def test_a_store_that_cannot_be_written_says_what_to_do(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "evidence").mkdir(mode=0o700)
    (home / "evidence" / ".staging").write_bytes(b"a file in the way")
    with pytest.raises(OpError, match="cannot store evidence under") as caught:
        save_record(home)
    assert "IKIT_HOME" in caught.value.next_step


def test_a_full_disk_is_an_error_that_can_be_mended(home: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with Store(home).stage() as stage:
        stage.folder.rmdir()
        stage.folder.symlink_to("/dev")  # so that the next file is one that cannot grow
        with pytest.raises(OpError, match="cannot store evidence"):
            stage.add("full", b"x", "text/plain")
        stage.folder.unlink()


# --- finding -------------------------------------------------------------------


def test_an_id_is_found_by_its_digits_in_any_form(home: Path) -> None:
    store, saved = Store(home), save_record(home)
    there = saved.evidence_id
    for text in (there, there[:6], there[:10].upper(), f"evidence://{there}", f" {there[:8]} "):
        assert store.resolve(text) == there


@pytest.mark.parametrize(
    "text", ["", "abc", "xyzxyz", "/etc/passwd", "../../x", "a" * 65, "\ud800" * 7, "..", "%" * 999]
)
def test_what_is_no_id_is_refused_without_a_look(home: Path, text: str) -> None:
    save_record(home)
    with pytest.raises(OpError, match="is no evidence id") as caught:
        Store(home).resolve(text)
    assert len(str(caught.value)) < 600


def test_an_unknown_or_ambiguous_prefix_is_refused(home: Path) -> None:
    store = Store(home)
    one = "abcdef" + "0" * 58
    for evidence_id in (one, "abcdef" + "1" * 58):
        plant_bytes(home, evidence_id, b"{}")
    with pytest.raises(
        OpError, match="2 evidence records begin with abcdef: abcdef000000, abcdef1"
    ):
        store.resolve("abcdef")
    assert store.resolve("abcdef0") == one
    with pytest.raises(OpError, match="no evidence record abcdee"):
        store.resolve("abcdee")


def test_loading_by_anything_but_an_id_touches_nothing(home: Path) -> None:
    saved = save_record(home)
    for text in ("", "../..", saved.evidence_id[:10], saved.evidence_id + "/", "\0"):
        loaded = Store(home).load(text)
        assert loaded.raw == {} and "not an evidence id" in (loaded.problem or "")


# --- changes show --------------------------------------------------------------


def test_flipping_any_one_byte_of_a_record_is_found(home: Path) -> None:
    saved = save_record(home, summary="größe 😀 \x01", data={"x": [1.5, 1e-9, 1e17, -0.0, "a\\b"]})
    store = Store(home)
    path = store.folder(saved.evidence_id) / "evidence.json"
    whole = path.read_bytes()
    assert check(whole, saved.evidence_id)[1] is None
    for position in range(len(whole)):
        for flip in (0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF):
            content = bytearray(whole)
            content[position] ^= flip
            assert check(bytes(content), saved.evidence_id)[1], (position, flip)
        assert check(whole[:position], saved.evidence_id)[1], position
        for more in (b" ", b"\n", b"0"):
            assert check(whole[:position] + more + whole[position:], saved.evidence_id)[1]
    for position in (0, 1, len(whole) // 2, len(whole) - 1):
        content = bytearray(whole)
        content[position] ^= 0x01
        path.write_bytes(content)
        assert "altered" in (store.load(saved.evidence_id).problem or "")
        assert "altered" in store.problems(saved.evidence_id)[0]
        with pytest.raises(OpError, match="fails its check: altered"):
            store.require(saved.evidence_id)
    path.write_bytes(whole + b"\n")
    assert "not the bytes that were saved" in store.problems(saved.evidence_id)[0]
    path.write_bytes(whole)
    assert store.problems(saved.evidence_id) == []
    assert store.require(saved.evidence_id).raw == saved.raw


def test_flipping_any_one_byte_of_an_artifact_is_found(home: Path) -> None:
    content = bytes(range(64))
    saved = save_record(home, files={"a.bin": content, "empty": b""})
    store = Store(home)
    path = store.folder(saved.evidence_id) / "a.bin"
    for position in range(len(content)):
        altered = bytearray(content)
        altered[position] ^= 0x01
        path.write_bytes(altered)
        assert store.problems(saved.evidence_id) == ["artifact a.bin: its content was altered"]
    path.write_bytes(content + b"x")
    assert store.problems(saved.evidence_id) == ["artifact a.bin: 65 bytes, the record says 64"]
    path.unlink()
    [problem] = store.problems(saved.evidence_id)
    assert problem.startswith("artifact a.bin of") and "No such file" in problem
    path.write_bytes(content)
    assert store.problems(saved.evidence_id) == []


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"null", b"{" * 100_000, b'{"a":' * 50_000, b"\xff" * 1000,
     b'{"schema":"ikit.evidence/1","evidence_id":1}', b'{"a":1e999}', b'{"a":"\\ud800"}',
     b'{"a":' + b"9" * 10_000 + b"}", b'{"artifacts":[{"name":[1]}]}', b'{"a":NaN}'],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_a_file_that_is_no_record_is_told_and_never_used(home: Path, data: bytes) -> None:
    evidence_id = "ab" * 32
    plant_bytes(home, evidence_id, data)
    store = Store(home)
    loaded = store.load(evidence_id)
    assert "altered" in (loaded.problem or "") and len(loaded.problem or "") < 250
    (loaded.problem or "").encode("utf-8")
    assert store.problems(evidence_id) == [loaded.problem]
    with pytest.raises(OpError, match="fails its check"):
        store.require(evidence_id)


def test_a_record_over_the_limit_is_not_read(home: Path) -> None:
    path = plant_bytes(home, "ab" * 32, b"")
    with path.open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)
    assert "over the limit" in (Store(home).load("ab" * 32).problem or "")


def test_a_sound_record_in_a_folder_of_another_name_is_altered(home: Path) -> None:
    evidence_id = plant(home, make_record(), evidence_id="ab" * 32)
    assert "altered: its content hashes to" in (Store(home).load(evidence_id).problem or "")
    data = (Store(home).folder(evidence_id) / "evidence.json").read_bytes()
    assert check(data)[1] is None and check(data, evidence_id)[1] is not None


@pytest.mark.parametrize(
    "artifacts",
    [5, "text", None, {"a": 1}, [1], [{"name": ["x"]}], [{"name": {"x": 1}}], [{}],
     [{"name": "../../../etc/passwd"}], [{"name": "/etc/passwd"}], [{"name": "a\n"}]],
    ids=repr,
)  # fmt: skip
def test_a_hostile_list_of_artifacts_is_a_problem_and_nothing_worse(
    home: Path, artifacts: Any
) -> None:
    evidence_id = plant(home, foreign_record(artifacts=artifacts))
    found = Store(home).problems(evidence_id)
    assert found and "passwd" not in os.listdir(Store(home).folder(evidence_id))
    with pytest.raises(OpError, match="not of the shape"):
        Store(home).require(evidence_id)


def test_only_a_record_of_the_wanted_kind_is_used(home: Path) -> None:
    saved = save_record(home, kind="bench")
    assert Store(home).require(saved.evidence_id[:8], "bench").kind == "bench"
    with pytest.raises(OpError, match="is a bench record, not a ceiling record"):
        Store(home).require(saved.evidence_id, "ceiling")


# --- links ---------------------------------------------------------------------


def test_links_in_the_place_of_files_and_folders_are_never_followed(
    home: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    saved = save_record(elsewhere, files={"a.txt": b"x"})
    there, name = Store(elsewhere).folder(saved.evidence_id), saved.evidence_id
    store = Store(home)
    save_record(home)
    place = store.folder(name)
    place.parent.mkdir(mode=0o700, exist_ok=True)
    # The whole folder.
    place.symlink_to(there)
    assert "unreadable" in (store.load(name).problem or "")
    assert store.problems(name) == [store.load(name).problem]
    with pytest.raises(OpError):
        store.open_artifact(name, "a.txt")
    place.unlink()
    # The record.
    place.mkdir()
    (place / "evidence.json").symlink_to(there / "evidence.json")
    assert "unreadable" in (store.load(name).problem or "")
    # An artifact.
    (place / "evidence.json").unlink()
    (place / "evidence.json").write_bytes((there / "evidence.json").read_bytes())
    (place / "a.txt").symlink_to(there / "a.txt")
    assert store.load(name).problem is None
    [problem] = store.problems(name)
    assert "artifact a.txt" in problem
    with pytest.raises(OpError, match=r"artifact a\.txt of"):
        store.open_artifact(name, "a.txt")


def test_a_link_in_the_place_of_a_two_digit_folder_is_neither_read_nor_written(
    home: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    raw = make_record()
    with Store(elsewhere).stage() as stage:
        saved = stage.commit(raw)
    prefix = saved.evidence_id[:2]
    home.mkdir(mode=0o700)
    (home / "evidence").mkdir(mode=0o700)
    (home / "evidence" / prefix).symlink_to(elsewhere / "evidence" / prefix)
    assert "unreadable" in (Store(home).load(saved.evidence_id).problem or "")
    assert Store(home).leftovers() == [prefix]
    before = tree(elsewhere)
    with pytest.raises(OpError, match="a link, not a folder"), Store(home).stage() as stage:
        stage.commit(raw)
    assert tree(elsewhere) == before


def test_a_link_in_the_place_of_the_staging_folder_is_refused(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_bytes(b"x")
    home.mkdir(mode=0o700)
    (home / "evidence").mkdir(mode=0o700)
    (home / "evidence" / ".staging").symlink_to(target)
    with pytest.raises(OpError, match="a link, not a folder"):
        save_record(home)
    assert os.listdir(target) == ["precious"] and Store(home).leftovers()[-1] == ".staging"


def test_a_pipe_or_a_folder_in_the_place_of_a_file_does_not_hold_the_reader(home: Path) -> None:
    saved = save_record(home, files={"a.txt": b"x"})
    folder = Store(home).folder(saved.evidence_id)
    (folder / "a.txt").unlink()
    os.mkfifo(folder / "a.txt")
    assert "not a regular file" in Store(home).problems(saved.evidence_id)[0]
    (folder / "evidence.json").unlink()
    os.mkfifo(folder / "evidence.json")
    assert "unreadable: not a regular file" in (Store(home).load(saved.evidence_id).problem or "")
    (folder / "evidence.json").unlink()
    (folder / "evidence.json").mkdir()
    assert "unreadable" in (Store(home).load(saved.evidence_id).problem or "")


def test_where_folders_cannot_be_opened_links_are_looked_for_first(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BY_FOLDER", False)
    saved = save_record(home)
    assert Store(home).load(saved.evidence_id).problem is None
    folder = Store(home).folder(saved.evidence_id)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert "is a link" in (Store(home).load(saved.evidence_id).problem or "")


# --- leftovers -----------------------------------------------------------------


def litter(home: Path) -> list[str]:
    """Leave what killed processes, strangers and copies leave; what is to be reported."""
    saved = save_record(home)
    root, prefix = home / "evidence", saved.evidence_id[:2]
    staging = root / ".staging"
    (staging / "dead").mkdir()
    (staging / "dead" / "evidence.json").write_bytes(b"half")
    (staging / "dead.lock").write_bytes(b"")
    (staging / "no_lock").mkdir()
    (staging / "only_lock.lock").write_bytes(b"")
    (staging / "file").write_bytes(b"")
    (staging / "link").symlink_to("/etc")
    (root / "zz").mkdir()
    (root / "index.sqlite.old").write_bytes(b"")
    (root / "index.sqlite").write_bytes(b"")
    (root / prefix / "stranger").mkdir()
    (root / prefix / ("f" * 64 if prefix != "ff" else "e" * 64)).mkdir()
    (root / os.fsdecode(b"odd\xff")).write_bytes(b"")
    names = ["dead", "file", "link", "no_lock", "only_lock"]
    return sorted([
        *(f".staging/{name}" for name in names), f"{prefix}/stranger",
        f"{prefix}/{'f' * 64 if prefix != 'ff' else 'e' * 64}",
        "zz", "index.sqlite.old", "odd\\udcff",
    ])  # fmt: skip


def test_leftovers_are_reported_and_nothing_is_changed(home: Path) -> None:
    wanted = litter(home)
    saved = next(Store(home).ids())
    (Store(home).folder(saved) / "orphan").write_bytes(b"x")
    before = tree(home)
    store = Store(home)
    assert sorted(store.leftovers()) == wanted
    assert store.problems(saved) == ["a file that the record does not list: orphan"]
    assert list(store.ids()) == [saved]
    assert tree(home) == before


def test_the_next_save_clears_what_dead_processes_left(home: Path) -> None:
    wanted = litter(home)
    save_record(home, 2)
    left = Store(home).leftovers()
    assert sorted(left) == [name for name in wanted if not name.startswith(".staging")]
    assert os.listdir(home / "evidence" / ".staging") == [] and Path("/etc/passwd").exists()


def test_what_cannot_be_cleared_does_not_stop_a_save(home: Path) -> None:
    save_record(home)
    (home / "evidence" / ".staging" / "x.lock").mkdir()
    assert save_record(home, 2).problem is None
    assert Store(home).leftovers() == [".staging/x"]


def test_the_folder_of_a_living_owner_is_neither_leftover_nor_swept(tmp_path: Path) -> None:
    with claims.claimed_folder(tmp_path / "work") as folder:
        assert claims.leftovers(tmp_path / "work") == []
        assert claims.sweep(tmp_path / "work") == [] and folder.is_dir()
    assert os.listdir(tmp_path / "work") == []
    assert claims.sweep(tmp_path / "nothing") == [] == claims.leftovers(tmp_path / "nothing")


def test_a_claim_whose_lock_was_swept_before_it_was_taken_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = claims._take
    swept: list[str] = []

    def raced(descriptor: int) -> bool:
        """Let another process sweep between making the lock file and taking it."""
        if not swept:
            swept.extend(os.listdir(tmp_path))
            (tmp_path / swept[0]).unlink()
        return take(descriptor)

    monkeypatch.setattr(claims, "_take", raced)
    with claims.claimed_folder(tmp_path) as folder:
        assert swept and claims.lock_path(folder).name not in swept and folder.is_dir()


def test_a_folder_that_cannot_be_listed_is_an_error_with_a_next_step(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_record(home)
    listdir = os.listdir

    def refused(path: Any) -> list[str]:
        """Root may list everything, so that a refusal has to be made up."""
        if Path(path).name == saved.evidence_id[:2]:
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(OpError, match="cannot read the evidence folder"):
        Store(home).resolve(saved.evidence_id)
