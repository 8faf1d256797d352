"""Models on the Hub, read from a Hub on this machine: one commit, headers only, in parallel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.checkpoints import LLAMA, llama_tensors, rehydrate, write_file, write_model
from fakes.hub import COMMIT, Hub, serving
from ikit_mcp.registry import OpError
from ikit_ops.checkpoint import hub as client
from ikit_ops.checkpoint import hub_cache
from ikit_ops.checkpoint.local import read_folder
from ikit_ops.checkpoint.model import Checkpoint
from ikit_ops.checkpoint.resolve import read_checkpoint
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.tally import Options

TOKEN = "hf_made_up_for_this_test"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a small sharded Llama, and a client that knows only that Hub."""
    tensors = list(llama_tensors().items())
    shards = {f"model-0000{n}-of-00004.safetensors": dict(tensors[n - 1 :: 4]) for n in range(1, 5)}
    folder = write_model(tmp_path / "repository", LLAMA, shards)
    (folder / "hf_quant_config.json").write_text(
        '{"quantization": {"quant_algo": "FP8"}}', encoding="utf-8"
    )
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(folder) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def cached(tmp_path: Path, source: Path, commit: str = COMMIT, ref: str = "main") -> Path:
    """Put a folder's files into the Hub's cache as a snapshot; the snapshot."""
    repository = tmp_path / "hf" / "hub" / "models--acme--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit, encoding="utf-8")
    for file in source.iterdir():
        (snapshot / file.name).symlink_to(file)
    return snapshot


def same(remote: Checkpoint, folder: Path) -> bool:
    """Whether a checkpoint holds what the folder holds."""
    local = read_folder(folder)
    return (remote.tensors, remote.files, remote.config, remote.quant_config) == (
        local.tensors,
        local.files,
        local.config,
        local.quant_config,
    )


def test_headers_are_read_at_one_commit_and_no_weights_are_downloaded(hub: Hub) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = read_checkpoint("acme/model", progress=lambda d, t: seen.append((d, t)))
    assert (checkpoint.source, checkpoint.revision) == ("hub", COMMIT)
    assert same(checkpoint, hub.folder) and checkpoint.name == "acme/model"
    assert seen == [(n, 4) for n in range(1, 5)]
    assert all(COMMIT in path for path in hub.paths()[1:]), hub.paths()
    assert len(hub.requests) == 1 + 3 + 4  # the commit, three JSON files, four shards


def test_a_shard_larger_than_the_guess_is_asked_for_its_header_alone(hub: Hub) -> None:
    write_file(hub.folder / "model-00001-of-00004.safetensors", {"big": ("U8", (50_000_000,))})
    checkpoint = read_checkpoint("acme/model")
    assert checkpoint.tensors["big"].nbytes == 50_000_000
    assert hub.sent["model-00001-of-00004.safetensors"] == client.FIRST_RANGE


@pytest.mark.parametrize("header", [99_994, 100_000, 131_064, 131_065, 400_000])
def test_a_header_of_any_length_is_read_whole(header: int, hub: Hub, tmp_path: Path) -> None:
    for file in hub.folder.glob("model*"):
        file.unlink()
    path = hub.folder / "model.safetensors"
    write_file(path, {"a": ("U8", (7,))}, {"pad": ""})
    length = int.from_bytes(path.read_bytes()[:8], "little")
    write_file(path, {"a": ("U8", (7,))}, {"pad": "x" * (header - length)})
    checkpoint = read_checkpoint("acme/model")
    assert checkpoint.tensors["a"].nbytes == 7
    size = path.stat().st_size
    assert hub.sent["model.safetensors"] == min(max(client.FIRST_RANGE, size - 7), size)


def test_a_server_that_ignores_ranges_is_hung_up_on(hub: Hub) -> None:
    hub.ranges = False
    write_file(hub.folder / "model-00001-of-00004.safetensors", {"big": ("U8", (80_000_000,))})
    assert read_checkpoint("acme/model").tensors["big"].nbytes == 80_000_000
    assert hub.sent["model-00001-of-00004.safetensors"] < 40_000_000  # socket buffers at most


def test_shards_are_asked_for_together(hub: Hub) -> None:
    hub.together = 4
    read_checkpoint("acme/model")
    assert hub.most == 4


def test_a_corpus_model_of_many_shards_counts_the_same_from_the_hub(
    hub: Hub, tmp_path: Path
) -> None:
    hub.folder = rehydrate("glm-4.5-air", tmp_path / "air")
    remote = count_checkpoint(read_checkpoint("acme/model"), Options())
    local = count_checkpoint(read_folder(hub.folder), Options())
    assert remote.to_json() == local.to_json()


def test_a_cached_commit_is_read_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, hub.folder)
    with pytest.raises(OpError, match="ends outside"):  # the cache must hold what it links to
        read_folder(snapshot)
    blobs = snapshot.parent.parent / "blobs"
    blobs.mkdir()
    for file in list(snapshot.iterdir()):
        (blobs / file.name).write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(f"../../blobs/{file.name}")
    checkpoint = read_checkpoint("acme/model")
    assert (checkpoint.source, checkpoint.revision) == ("hub-cache", COMMIT)
    assert hub.paths() == ["/api/models/acme/model"] and checkpoint.location == "acme/model"
    read_checkpoint("acme/model", revision=COMMIT)
    assert len(hub.requests) == 1  # a commit that is cached is not asked for


def test_an_interrupted_download_is_completed_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    snapshot = cached(tmp_path, hub.folder)
    (snapshot / "model-00002-of-00004.safetensors").unlink()
    checkpoint = read_checkpoint("acme/model")
    assert checkpoint.source == "hub" and same(checkpoint, hub.folder)


def _copy(source: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def _cache_whole(hub: Hub, tmp_path: Path, ref: str = "main") -> None:
    repository = tmp_path / "hf" / "hub" / "models--acme--model"
    _copy(hub.folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / ref).write_text(COMMIT, encoding="utf-8")


def test_offline_mode_reads_the_cache_and_asks_nobody(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OpError, match=r"offline mode is on.*no snapshot"):
        read_checkpoint("acme/model")
    _cache_whole(hub, tmp_path)
    checkpoint = read_checkpoint("acme/model")
    assert checkpoint.source == "hub-cache" and hub.requests == []
    assert any("older than the Hub" in note for note in checkpoint.notes)
    alone = read_checkpoint("acme/model", weights=False)
    assert alone.config == LLAMA and alone.tensors == {}
    with pytest.raises(OpError, match="at revision v9"):
        read_checkpoint("acme/model", revision="v9")
    with pytest.raises(OpError, match="no snapshot"):
        read_checkpoint("acme/model", revision="../../../etc")


def test_a_hub_that_is_not_reached_is_replaced_by_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(OpError, match="the Hub is not reached"):
        read_checkpoint("acme/model")
    _cache_whole(hub, tmp_path)
    checkpoint = read_checkpoint("acme/model")
    assert checkpoint.source == "hub-cache"
    assert any("not reached" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("failure", "what", "then"),
    [
        ((403, "GatedRepo"), "is gated", "accept the licence"),
        ((401, "RepoNotFound"), "no such model", "HF_TOKEN"),
        ((404, "RepoNotFound"), "no such model", "check the id"),
        ((404, "RevisionNotFound"), "no such revision", "branch, tag or commit"),
        ((403, ""), "refuses access", "HF_TOKEN"),
        ((500, ""), "HTTP 500", "download the model first"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(
    failure: tuple[int, str], what: str, then: str, hub: Hub
) -> None:
    hub.fail["info"] = failure
    with pytest.raises(OpError) as caught:
        read_checkpoint("acme/model")
    assert what in caught.value.what and then in caught.value.next_step
    assert TOKEN not in str(caught.value)


def test_a_file_that_is_listed_and_gone_is_named(hub: Hub) -> None:
    hub.fail["model-00003-of-00004.safetensors"] = (404, "EntryNotFound")
    with pytest.raises(OpError, match="not there"):
        read_checkpoint("acme/model")


def test_a_transient_failure_is_tried_again_and_a_lasting_one_reported(hub: Hub) -> None:
    hub.fail_once["model-00003-of-00004.safetensors"] = (503, "")
    assert same(read_checkpoint("acme/model"), hub.folder)
    hub.fail["model-00003-of-00004.safetensors"] = (503, "")
    with pytest.raises(OpError, match=r"model-00003-of-00004\.safetensors.*HTTP 503"):
        read_checkpoint("acme/model")


def test_a_broken_remote_header_names_its_shard(hub: Hub) -> None:
    path = hub.folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OpError, match=r"model-00002-of-00004\.safetensors: .*truncated"):
        read_checkpoint("acme/model")
    path.write_bytes(b"")
    with pytest.raises(OpError, match="too short"):
        read_checkpoint("acme/model")


def test_a_revision_is_resolved_and_the_configuration_can_be_read_alone(hub: Hub) -> None:
    assert read_checkpoint("acme/model", revision="v1").revision == COMMIT
    hub.requests.clear()
    alone = read_checkpoint("acme/model", weights=False)
    assert alone.config == LLAMA and alone.tensors == {}
    assert not any("safetensors" in path for path in hub.paths())


def test_a_repository_without_safetensors_still_gives_its_configuration(hub: Hub) -> None:
    for file in hub.folder.glob("model*"):
        file.unlink()
    (hub.folder / "pytorch_model.bin").write_bytes(b"")
    checkpoint = read_checkpoint("acme/model")
    assert checkpoint.no_weights is not None and "pickle" in checkpoint.no_weights
    (hub.folder / "config.json").unlink()
    with pytest.raises(OpError, match=r"no config\.json"):
        read_checkpoint("acme/model")


def test_the_token_goes_to_the_hub_and_not_along_a_redirect(hub: Hub, tmp_path: Path) -> None:
    with serving(hub.folder) as elsewhere:
        hub.redirect = elsewhere.url
        read_checkpoint("acme/model")
        assert elsewhere.requests
        for _, headers in elsewhere.requests:
            assert "authorization" not in {key.lower() for key in headers}
    for _, headers in hub.requests:
        assert {k.lower(): v for k, v in headers.items()}["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("endpoint", "carried"),
    [
        ("https://hub.example", True),
        ("http://127.0.0.1:80", True),
        ("http://localhost", True),
        ("http://hub.example", False),
        ("http://127.0.0.1.example", False),
    ],
)
def test_a_token_is_sent_over_https_or_to_this_machine_only(endpoint: str, carried: bool) -> None:
    assert client._may_carry_token(endpoint) is carried


def test_reading_a_local_model_imports_no_hub_client(tmp_path: Path) -> None:
    folder = write_model(tmp_path, LLAMA, {"model.safetensors": llama_tensors()})
    code = (
        "import sys; from ikit_ops.checkpoint.resolve import read_checkpoint;"
        f"read_checkpoint({str(folder)!r});"
        "print([m for m in ('huggingface_hub', 'numpy', 'torch', 'gguf') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    env = {"PYTHONPATH": f"{root}{os.pathsep}{root / 'ops'}", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_the_cache_is_where_the_hubs_own_client_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value, then in (
        ("", "", tmp_path / ".cache" / "huggingface" / "hub"),
        ("XDG_CACHE_HOME", "/x", Path("/x/huggingface/hub")),
        ("HF_HOME", "~/h", tmp_path / "h" / "hub"),
        ("HUGGINGFACE_HUB_CACHE", "/y", Path("/y")),
        ("HF_HUB_CACHE", "$HOME/z", tmp_path / "z"),
    ):
        if name:
            monkeypatch.setenv(name, value)
        assert hub_cache.cache_folder() == then
        code = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert Path(done.stdout.strip()) == then
