"""A configuration alone is enough for five families, to the byte, and for nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.checkpoints import CORPUS, LLAMA, MODELS, expected, in_memory, llama_tensors
from ikit_mcp.registry import OpError
from ikit_ops.decode.config_method import FAMILIES, count_config
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.model_config import EXPERT_COUNT_KEYS, ModelConfig
from ikit_ops.decode.tally import Options


def config_of(name: str) -> dict[str, Any]:
    path = CORPUS / "roofline" / name / "config.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


EXACT = [
    name
    for name in MODELS
    if config_of(name).get("model_type") in FAMILIES
    and "quantization_config" not in config_of(name)
]


def test_the_exact_models_are_the_dense_ones_of_the_corpus() -> None:
    assert EXACT == ["llama-3.1-8b", "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b"]


@pytest.mark.parametrize("name", EXACT)
def test_a_dense_model_is_counted_to_the_byte_without_headers(name: str) -> None:
    right = expected(name)
    counts, dtype = count_config(config_of(name), Options(context=32768), None, None)
    assert (dtype, counts.unproven, counts.stored_bytes) == ("bf16", [], None)
    assert counts.weight_bytes == right["active_weight_bytes_per_token"]
    assert counts.kv_bytes == right["kv"]["read_at_32768"]
    assert counts.groups["lm_head"] == right["lm_head_read_bytes"]
    assert counts.groups["embedding_row"] == right["embedding_row_bytes"]
    assert sum(counts.by_format.values()) == counts.weight_bytes
    assert sum(row["kv"]["bytes"] for row in counts.per_layer) == counts.kv_bytes


@pytest.mark.parametrize("name", [name for name in MODELS if name not in EXACT])
def test_everything_else_is_refused_by_a_key_or_unproven(name: str) -> None:
    try:
        counts, dtype = count_config(config_of(name), Options(), None, None)
    except OpError as error:
        key = error.what.partition("config.json has ")[2].partition("=")[0]
        assert key.split(",")[0].split(" ")[0] in (*EXPERT_COUNT_KEYS, "model_type"), error.what
    else:
        declared = counts.quant or ""
        assert "quantization_config" in config_of(name)
        assert (dtype == "bf16" and declared in counts.unproven[0]["why"]) or "float" in declared


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("phi3", {"sliding_window": None}),
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_the_formula_agrees_with_the_headers_of_such_a_model(
    family: str, change: dict[str, Any]
) -> None:
    config = {**LLAMA, "model_type": family, **change}
    tensors = llama_tensors()
    bias = change.get("attention_bias")
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        sides = {"q": 64, "k": 32, "v": 32} if family == "qwen2" or bias else {}
        for name, size in (sides | ({"o": 64} if bias else {})).items():
            tensors[f"{prefix}.self_attn.{name}_proj.bias"] = ("BF16", (size,))
        if family == "qwen3":
            tensors[f"{prefix}.self_attn.q_norm.weight"] = ("BF16", (16,))
            tensors[f"{prefix}.self_attn.k_norm.weight"] = ("BF16", (16,))
        if change.get("mlp_bias"):
            for name, size in {"gate": 128, "up": 128, "down": 64}.items():
                tensors[f"{prefix}.mlp.{name}_proj.bias"] = ("BF16", (size,))
    if change.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    stored = count_checkpoint(in_memory(config, tensors), Options(context=100))
    counts, _ = count_config(config, Options(context=100), None, None)
    assert counts.groups == stored.groups and counts.kv_bytes == stored.kv_bytes
    assert counts.not_read == stored.not_read and counts.read_twice == stored.read_twice


def test_fp8_adds_a_scale_per_block_and_keeps_the_ends_in_bf16() -> None:
    counts, dtype = count_config(config_of("qwen3-8b"), Options(), "fp8", None)
    hidden, inner, heads, kv = 4096, 12288, 32 * 128, 8 * 128

    def matrix(rows: int, columns: int) -> int:
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)

    attention = matrix(heads, hidden) + 2 * matrix(kv, hidden) + matrix(hidden, heads)
    assert dtype == "fp8" and counts.groups["attention"] == 36 * attention
    assert counts.groups["mlp"] == 36 * (2 * matrix(inner, hidden) + matrix(hidden, inner))
    assert counts.groups["lm_head"] == 151936 * 4096 * 2
    assert counts.groups["embedding_row"] == 8192
    assert counts.groups["norms"] == (36 * (2 * hidden + 256) + hidden) * 2
    assert counts.dtype == "fp8+bf16"


def test_q8_0_takes_34_bytes_for_32_weights_and_float32_norms() -> None:
    counts, _ = count_config(config_of("llama-3.1-8b"), Options(), "q8_0", None)
    assert counts.groups["mlp"] == 32 * 3 * 14336 * 4096 * 34 // 32
    assert counts.groups["lm_head"] == 128256 * 4096 * 34 // 32
    assert counts.groups["embedding_row"] == 4096 * 34 // 32
    assert counts.groups["norms"] == (32 * 2 + 1) * 4096 * 4
    with pytest.raises(OpError, match="whole blocks of 32"):
        count_config({**LLAMA, "hidden_size": 40}, Options(), "q8_0", None)


def test_the_heads_format_can_be_given_apart() -> None:
    counts, _ = count_config(config_of("llama-3.1-8b"), Options(), "bf16", "fp8")
    assert counts.groups["lm_head"] == 128256 * 4096 + 4 * 1002 * 32
    assert counts.by_format["fp8"] == counts.groups["lm_head"]


@pytest.mark.parametrize(
    ("declared", "dtype", "doubtful"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", False),
        ({"quant_method": "awq", "bits": 4}, "bf16", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "bf16", True),
    ],
)
def test_a_declared_quantisation_is_followed_when_it_is_fp8_and_doubted_otherwise(
    declared: dict[str, Any], dtype: str, doubtful: bool
) -> None:
    config = {**LLAMA, "quantization_config": declared}
    counts, counted = count_config(config, Options(), None, None)
    assert counted == dtype and bool(counts.unproven) is doubtful
    asked, _ = count_config(config, Options(), "bf16", None)
    assert asked.unproven == []  # who names the dtype knows it


def test_the_models_own_dtype_is_taken_and_float32_is_said_to_be_narrowed() -> None:
    assert count_config({**LLAMA, "torch_dtype": "float16"}, Options(), None, None)[1] == "fp16"
    counts, dtype = count_config({**LLAMA, "torch_dtype": "float32"}, Options(), None, None)
    assert dtype == "bf16" and "float32" in counts.limitations[0]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "gemma3"}, "model_type='gemma3'"),
        ({"model_type": None}, "model_type=None"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"num_experts": [8, 8]}, "num_experts="),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"vision_config": {"depth": 1}}, "vision_config"),
        ({"hidden_size": None}, "hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": -4}, "num_attention_heads"),
        ({"hidden_size": 2**60}, "hidden_size"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer 0 is recurrent"),
        ({"layer_types": ["odd", "full_attention"]}, "layer type 'odd'"),
    ],
)
def test_a_refusal_names_the_key_that_decided_it(change: dict[str, Any], key: str) -> None:
    with pytest.raises(OpError) as caught:
        count_config({**LLAMA, **change}, Options(), None, None)
    assert key in caught.value.what and caught.value.next_step


def test_batch_and_tensor_parallel_apply_to_the_formula_too() -> None:
    one, _ = count_config(LLAMA, Options(context=10), None, None)
    many, _ = count_config(LLAMA, Options(context=10, batch=3), None, None)
    assert many.kv_bytes == 3 * one.kv_bytes
    assert many.groups["embedding_row"] == 3 * one.groups["embedding_row"]
    split, _ = count_config(LLAMA, Options(context=10, tensor_parallel=2), None, None)
    assert split.groups["mlp"] == one.groups["mlp"] // 2 and split.kv_bytes == one.kv_bytes // 2
    assert split.groups["norms"] == one.groups["norms"]
    drafted, _ = count_config(LLAMA, Options(include_mtp=True), None, None)
    assert any("needs headers" in line for line in drafted.limitations)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert ModelConfig({"num_hidden_layers": 2.0}).layers == 2


def test_the_language_models_part_is_found_where_it_is_nested() -> None:
    for raw in (
        {"text_config": LLAMA},
        {"llm_config": LLAMA},
        {"thinker_config": {"text_config": LLAMA}},
        LLAMA,
    ):
        assert ModelConfig(raw).family == "llama"
