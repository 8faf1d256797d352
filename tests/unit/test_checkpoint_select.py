"""Which files of a model folder count, and what a folder that lies is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fakes.checkpoints import CORPUS, LLAMA, llama_tensors, write_file, write_model
from ikit_mcp.registry import OpError
from ikit_ops.checkpoint import files
from ikit_ops.checkpoint.local import read_folder
from ikit_ops.checkpoint.model import Checkpoint
from ikit_ops.checkpoint.resolve import read_checkpoint
from ikit_ops.checkpoint.select import select_weight_files
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.tally import Options

EDGE = CORPUS / "edge"
CASES = json.loads((EDGE / "expected.json").read_text(encoding="utf-8"))
REFUSED = {
    "missing_shard": "model-00002-of-00002.safetensors, which is absent",
    "lora_only": "adapter",
    "empty_dir": "no config.json, and no safetensors files",
    "bad_index_json": "index.json: is not JSON",
}
SKIPPED = {
    "sharded_plus_consolidated": ["consolidated.safetensors"],
    "single_plus_consolidated": ["consolidated.safetensors"],
}


def _case(name: str, tmp_path: Path) -> Path:
    return tmp_path if name == "empty_dir" else EDGE / name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_folder_that_cannot_be_counted_is_refused_by_its_fault(name: str, tmp_path: Path) -> None:
    with pytest.raises(OpError) as caught:
        read_folder(_case(name, tmp_path))
    assert REFUSED[name] in caught.value.what and caught.value.next_step


@pytest.mark.parametrize("name", sorted(k for k, case in CASES.items() if "stored" in case))
def test_an_edge_folder_is_counted_by_its_headers(name: str) -> None:
    checkpoint = read_folder(EDGE / name)
    assert checkpoint.stored_bytes == CASES[name]["stored"]
    once = CASES[name].get("counted_once", checkpoint.stored_bytes)
    assert sum(entry.nbytes for entry in checkpoint.tensors.values()) == once
    assert [skipped for skipped, _ in checkpoint.skipped] == SKIPPED.get(name, [])


@pytest.mark.parametrize("name", sorted(k for k, case in CASES.items() if "active" in case))
def test_an_edge_folder_reads_the_right_bytes_a_token(name: str) -> None:
    counts = count_checkpoint(read_folder(EDGE / name), Options())
    assert counts.weight_bytes == CASES[name]["active"] and counts.unproven == []


def test_every_edge_case_is_covered_by_some_test() -> None:
    known = set(REFUSED) | {k for k, case in CASES.items() if {"stored", "active"} & set(case)}
    assert set(CASES) - known == {"bin_only", "consolidated_only", "extra_layer_no_mtp_key"}


def test_pickles_and_mistral_copies_are_named_and_never_opened() -> None:
    for name, words in (("bin_only", "pickle"), ("consolidated_only", "mistral format")):
        checkpoint = read_folder(EDGE / name)
        assert checkpoint.tensors == {} and checkpoint.format is None
        assert checkpoint.no_weights is not None and words in checkpoint.no_weights


def test_a_layer_behind_the_model_is_left_out_and_flagged() -> None:
    counts = count_checkpoint(read_folder(EDGE / "extra_layer_no_mtp_key"), Options())
    assert counts.weight_bytes == 180992 and counts.beyond == [2]
    assert counts.not_read["mtp"] > 0


def test_the_index_is_a_claim_and_its_errors_are_told() -> None:
    wrong = read_folder(EDGE / "index_wrong_shard")
    assert any("wrong file" in note for note in wrong.notes)
    double = read_folder(EDGE / "duplicate_tensor_across_shards")
    assert any("32768 bytes are dead copies" in note for note in double.notes)
    counts = count_checkpoint(double, Options())
    assert counts.not_read["dead_duplicates"] == 32768 and counts.unproven == []
    entered = sum(counts.groups.values()) + sum(counts.not_read.values()) - counts.read_twice
    assert entered == counts.stored_bytes == 246400


def _sharded(folder: Path) -> Path:
    tensors = list(llama_tensors().items())
    shards = {
        "model-00001-of-00002.safetensors": dict(tensors[:8]),
        "model-00002-of-00002.safetensors": dict(tensors[8:]),
    }
    return write_model(folder, LLAMA, shards)


def _change_index(folder: Path, change: dict[str, str | None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"].update(change)
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    path.write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "", "..", "a\0b"]
)
def test_an_index_that_names_a_path_is_refused(name: str, tmp_path: Path) -> None:
    folder = _sharded(tmp_path / "model")
    write_file(tmp_path / "secret.safetensors", llama_tensors())
    _change_index(folder, {"model.norm.weight": name})
    with pytest.raises(OpError, match="path and not a file"):
        read_folder(folder)


def test_an_index_may_only_name_safetensors_files(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    _change_index(folder, {"model.norm.weight": "model.bin"})
    with pytest.raises(OpError, match="not a safetensors file"):
        read_folder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}', encoding="utf-8")
    with pytest.raises(OpError, match="weight_map is empty"):
        read_folder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}', encoding="utf-8")
    with pytest.raises(OpError, match="no weight_map"):
        read_folder(folder)


def test_a_tensor_that_the_index_promises_and_no_file_holds_is_unproven(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    shard = "model-00001-of-00002.safetensors"
    _change_index(folder, {"model.layers.9.gone.weight": shard, "model.norm.weight": None})
    checkpoint = read_folder(folder)
    assert "1 tensors that no file holds (model.layers.9.gone.weight)" in checkpoint.unproven[0]
    assert any("not in the index (model.norm.weight)" in note for note in checkpoint.notes)
    assert count_checkpoint(checkpoint, Options()).unproven[0]["term"] == "checkpoint"


def test_the_copy_that_the_index_names_is_the_one_that_counts(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    folder = write_model(
        tmp_path,
        LLAMA,
        {first: {"a": ("U8", (4,)), "c": ("U8", (1,))}, second: {"a": ("F32", (4,))}},
    )
    checkpoint = read_folder(folder)
    assert checkpoint.tensors["a"].dtype == "F32" and checkpoint.duplicates == [("a", 4)]
    (folder / "model.safetensors.index.json").unlink()
    checkpoint = read_folder(folder)
    assert checkpoint.tensors["a"].dtype == "U8" and checkpoint.duplicates == [("a", 16)]


def test_a_single_file_beside_an_index_is_flagged(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    write_file(folder / "model.safetensors", llama_tensors())
    checkpoint = read_folder(folder)
    assert sorted(checkpoint.files) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert any("transformers would read" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"], "m-00002-of-00003"),
        (["m-00002-of-00002.safetensors"], "m-00001-of-00002"),
        (["m-00001-of-99999.safetensors"], "m-00002-of-99999"),
        (["m-00001-of-00000.safetensors"], "m-00000-of-00000"),
    ],
)
def test_a_gap_in_numbered_shards_is_an_error_without_an_index(
    present: list[str], missing: str
) -> None:
    with pytest.raises(OpError, match=missing):
        select_weight_files(set(present), None)


def test_training_state_and_other_copies_never_count() -> None:
    names = {"optimizer.safetensors", "rng_state_0.safetensors", "weights.safetensors", "x.onnx"}
    selection = select_weight_files(names, None)
    assert selection.files == ["weights.safetensors"]
    assert {name for name, _ in selection.skipped} == {
        "optimizer.safetensors",
        "rng_state_0.safetensors",
    }


def test_a_link_out_of_the_folder_is_refused_and_one_into_the_hub_cache_is_not(
    tmp_path: Path,
) -> None:
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    write_file(outside / "model.safetensors", llama_tensors())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(OpError, match="ends outside"):
        read_folder(folder)
    blobs = tmp_path / "models--acme--m" / "blobs"
    blobs.mkdir(parents=True)
    write_file(blobs / "0123", llama_tensors())
    snapshot = blobs.parent / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert len(read_folder(snapshot).tensors) == len(llama_tensors())
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(outside / "model.safetensors")
    with pytest.raises(OpError, match="ends outside"):
        read_folder(snapshot)


@pytest.mark.parametrize("kind", ["fifo", "dangling", "loop", "folder"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("config.json" if kind == "loop" else "gone.json")
    roots = files.allowed_roots(tmp_path)
    with pytest.raises(OpError, match=r"^config\.json: "):
        files.read_json(path, roots)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{not json", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_a_configuration_that_is_not_one_is_refused(text: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    write_file(tmp_path / "model.safetensors", llama_tensors())
    with pytest.raises(OpError, match=rf"config\.json: .*{why}"):
        read_folder(tmp_path)


def test_a_configuration_over_its_bound_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(files.MAX_CONFIG_BYTES + 1)
    with pytest.raises(OpError, match="more than the"):
        read_folder(tmp_path)


def test_infinity_in_a_published_configuration_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}', encoding="utf-8")
    assert files.read_json(tmp_path / "config.json", files.allowed_roots(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/folder",
        "./gone",
        "~/gone-for-sure",
        "a/b/c",
        "gone.gguf",
        "owner/gone.safetensors",
        "owner/../name",
        "bad id",
        "owner/na--me",
        "x" * 5000,
        "nul\0byte",
        "",
    ],
)
def test_what_is_neither_a_path_nor_a_hub_id_never_reaches_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> Checkpoint:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("ikit_ops.checkpoint.hub.read_hub", never)
    with pytest.raises(OpError, match=r"no such file|neither an existing path"):
        read_checkpoint(name)


def test_a_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpError, match="local path"):
        read_checkpoint(str(_sharded(tmp_path)), revision="main")


def test_the_configuration_alone_reads_no_header(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"broken")
    checkpoint = read_checkpoint(str(folder), weights=False)
    assert checkpoint.config == LLAMA and checkpoint.tensors == {}


def test_progress_counts_the_shards(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    read_checkpoint(
        str(_sharded(tmp_path)), progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 2), (2, 2)]
