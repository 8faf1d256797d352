"""Every checkpoint of the corpus is counted to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.checkpoints import MODELS, expected, rehydrate
from ikit_ops.checkpoint.local import read_folder
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.tally import Counts, Options

_counted: dict[str, tuple[Counts, Counts]] = {}


def _count(name: str, folder: Path) -> tuple[Counts, Counts]:
    """The counts at 1024 and 32768 tokens; each model is read once for all tests."""
    if name not in _counted:
        checkpoint = read_folder(rehydrate(name, folder / name))
        short = count_checkpoint(checkpoint, Options())
        _counted[name] = short, count_checkpoint(checkpoint, Options(context=32768))
    return _counted[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_byte_of_a_corpus_model_is_where_it_belongs(name: str, tmp_path: Path) -> None:
    right = expected(name)
    short, long = _count(name, tmp_path)
    assert short.unproven == []
    assert short.stored_bytes == right["stored_bytes"]
    assert short.weight_bytes == right["active_weight_bytes_per_token"]
    assert short.kv is not None and long.kv is not None
    assert short.kv_bytes == right["kv"]["read_at_1024"]
    assert long.kv_bytes == right["kv"]["read_at_32768"]
    assert short.kv["strict_read_bytes"] == right["kv"]["strict_read_at_1024"]
    assert long.kv["strict_read_bytes"] == right["kv"]["strict_read_at_32768"]
    assert long.kv["unique_read_bytes"] == right["kv"]["unique_at_32768"]
    assert short.kv["layers"] == right["kv"]["layers"]
    per_token = right["kv"]["bf16_bytes_per_context_token_all_layers"]
    assert short.kv["bytes_per_context_token"] == per_token
    state = right["state"]
    assert short.state_bytes == (state["bytes_read_plus_write"] if state else None)


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_a_corpus_model_fold_onto_the_expected_ones(name: str, tmp_path: Path) -> None:
    right, (count, _) = expected(name), _count(name, tmp_path)
    groups, read, rest = right["groups"], count.groups, count.not_read
    assert rest.get("towers", 0) == groups["vision_audio_towers"]
    assert rest.get("mtp", 0) == groups["mtp"]
    assert rest.get("dead_duplicates", 0) == right["dead_duplicate_lm_head_bytes"]
    rows = read["embedding_row"] + read.get("per_layer_embedding_row", 0)
    assert rows == right["embedding_row_bytes"]
    assert read["lm_head"] == right["lm_head_read_bytes"]
    routed = right["moe"]["routed_read_bytes"] if right["moe"] else 0
    assert read.get("routed_experts", 0) == routed
    assert (
        read.get("routed_experts", 0) + rest.get("unrouted_experts", 0)
        == (groups["routed_experts"])
    )
    others = count.weight_bytes - rows - read["lm_head"] - routed
    assert others == groups["everything_else"]
    entered = sum(read.values()) + sum(rest.values()) - count.read_twice
    assert entered == count.stored_bytes
    assert sum(count.by_format.values()) == count.weight_bytes


@pytest.mark.parametrize(
    ("name", "dtype", "quant"),
    [
        ("llama-3.1-8b", "bf16", None),
        ("deepseek-v3", "fp8+bf16", "fp8"),
        ("gpt-oss-20b", "bf16+mxfp4", "mxfp4"),
        ("llama-3.1-8b-bnb-nf4", "nf4+bf16", "bitsandbytes"),
        ("llama-3.1-8b-nvfp4-ct", "nvfp4+bf16", "nvfp4-pack-quantized"),
        ("llama-3.1-8b-w8a8-ct", "int8+bf16", "int-quantized"),
        ("qwen2.5-7b-awq", "int4+fp16", "awq"),
        ("qwen3-30b-a3b-nvfp4", "nvfp4+bf16", "nvfp4"),
        ("minimax-m2.5", "fp8+bf16+fp32", "fp8"),
    ],
)
def test_the_identity_names_the_formats_that_carry_the_bytes(
    name: str, dtype: str, quant: str | None, tmp_path: Path
) -> None:
    count, _ = _count(name, tmp_path)
    assert (count.dtype, count.quant) == (dtype, quant)


def test_per_layer_bytes_add_up_to_the_totals(tmp_path: Path) -> None:
    count, _ = _count("gemma-3n-e4b", tmp_path)
    layers = count.per_layer
    assert [row["layer"] for row in layers] == list(range(35))
    assert sum(row["kv"]["bytes"] for row in layers) == count.kv_bytes
    assert layers[34]["kv"]["reads_layer"] == 19 and layers[19]["kv"]["reads_layer"] is None
    attention = sum(row["weights"]["attention"] for row in layers)
    assert attention == count.groups["attention"]


def test_state_dtype_changes_the_recurrent_part_alone(tmp_path: Path) -> None:
    name = "nemotron-3-nano-30b-a3b"
    checkpoint = read_folder(rehydrate(name, tmp_path / name))
    state = expected(name)["state"]
    for dtype in ("fp32", "bf16"):
        count = count_checkpoint(checkpoint, Options(state_dtype=dtype))
        assert count.state is not None
        assert count.state["one_copy_bytes"] == state[f"bytes_one_copy_if_{dtype}"]


def test_mla_layouts_of_deepseek_are_latent_expanded_or_656_bytes(tmp_path: Path) -> None:
    checkpoint = read_folder(rehydrate("deepseek-v3", tmp_path / "v3"))

    def a_token(**options: str) -> int:
        count = count_checkpoint(checkpoint, Options(context=1, **options))  # type: ignore[arg-type]
        return count.kv_bytes // 61

    assert a_token() == 1152
    assert a_token(kv_dtype="fp8") == 576
    assert a_token(mla_cache="fp8_ds_mla") == 656
    assert a_token(mla_cache="expanded") == 2 * 40_960


def test_prediction_layers_add_their_share_and_the_head_once_more(tmp_path: Path) -> None:
    checkpoint = read_folder(rehydrate("qwen3-next-80b-a3b", tmp_path / "next"))
    plain = count_checkpoint(checkpoint, Options())
    drafted = count_checkpoint(checkpoint, Options(include_mtp=True))
    assert drafted.groups["lm_head"] == 2 * plain.groups["lm_head"]
    assert drafted.groups["embedding_row"] == 2 * plain.groups["embedding_row"]
    routed = drafted.groups["routed_experts"] - plain.groups["routed_experts"]
    assert routed == plain.groups["routed_experts"] // 48
    assert drafted.kv is not None and plain.kv is not None
    assert drafted.kv["layers"] == plain.kv["layers"] + 1
    assert drafted.stored_bytes is not None and drafted.not_read["mtp"] == 0
    stored = sum(drafted.groups.values()) + sum(drafted.not_read.values()) - drafted.read_twice
    assert stored == drafted.stored_bytes


def test_a_prediction_layers_own_head_is_read_and_its_embedding_copy_is_not(tmp_path: Path) -> None:
    checkpoint = read_folder(rehydrate("deepseek-v3", tmp_path / "v3"))
    plain = count_checkpoint(checkpoint, Options())
    drafted = count_checkpoint(checkpoint, Options(include_mtp=True))
    head = 129280 * 7168 * 2
    assert drafted.not_read["mtp"] == head  # its copy of the embedding
    assert drafted.groups["lm_head"] == plain.groups["lm_head"] + head
    stored = sum(drafted.groups.values()) + sum(drafted.not_read.values()) - drafted.read_twice
    assert stored == drafted.stored_bytes
