"""Whatever tensors a checkpoint holds, every byte is in one group, and nothing crashes."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.checkpoints import LLAMA, in_memory, llama_tensors
from ikit_mcp.registry import OpError
from ikit_ops.checkpoint.dtypes import SAFETENSORS_BITS
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.limits import limitations
from ikit_ops.decode.names import Place, place_of
from ikit_ops.decode.tally import Options

PARTS = st.sampled_from(
    [
        "model",
        "language_model",
        "layers",
        "0",
        "1",
        "2",
        "77",
        "self_attn",
        "mlp",
        "experts",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate",
        "router",
        "gate_proj",
        "up_proj",
        "down_proj",
        "weight",
        "bias",
        "weight_scale",
        "scales",
        "qweight",
        "weight_packed",
        "embed_tokens",
        "embed_tokens_per_layer",
        "lm_head",
        "norm",
        "input_layernorm",
        "mtp",
        "visual",
        "vision_tower",
        "mamba",
        "A_log",
        "conv1d",
        "in_proj",
        "x_proj",
        "linear_attn",
        "in_proj_qkvz",
        "shared_experts",
        "block_sparse_moe",
        "input_linear",
        "kv_a_proj_with_mqa",
        "indexer",
        "conv",
        "backbone",
        "mixer",
        "blk",
        "switch_mlp",
        "altup",
        "sinks",
        "e_score_correction_bias",
        "inv_freq",
        "quant_state",
        "weight_shape",
        "cross_attn",
        "warp_core",
    ]
)
NAMES = st.lists(PARTS, min_size=1, max_size=7).map(".".join)
DTYPES = st.sampled_from([dtype for dtype, bits in SAFETENSORS_BITS.items() if bits >= 8])
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)
TENSORS = st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=25)

KEYS = [
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
    "sliding_window_pattern",
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_topk",
    "index_head_dim",
    "hybrid_override_pattern",
    "attn_layer_indices",
    "attn_type_list",
    "full_attention_interval",
    "linear_attn_config",
    "num_kv_shared_layers",
    "attention_k_eq_v",
    "mamba_d_state",
    "mamba_n_groups",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "tie_word_embeddings",
    "torch_dtype",
    "quantization_config",
    "text_config",
    "global_head_dim",
    "attention_chunk_size",
    "no_rope_layers",
    "max_window_layers",
    "use_sliding_window",
]
VALUES = st.one_of(
    st.integers(0, 9),
    st.integers(-3, 2**70),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=True),
    st.sampled_from(["llama", "gemma3", "mamba2", "qwen3_next", "bfloat16", "M*-E", "", "fp8"]),
    st.lists(
        st.sampled_from([0, 1, 2, "full_attention", "sliding_attention", "x", None]), max_size=5
    ),
    st.dictionaries(
        st.sampled_from(["full_attn_layers", "num_heads", "head_dim", "bits", "quant_method"]),
        st.one_of(st.integers(0, 4), st.lists(st.integers(0, 4), max_size=3)),
        max_size=3,
    ),
)
CONFIGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12)
OPTIONS = st.builds(
    Options,
    context=st.integers(0, 5000),
    kv_dtype=st.sampled_from(["bf16", "fp8", "q8_0"]),
    state_dtype=st.sampled_from([None, "fp32"]),
    include_mtp=st.booleans(),
    mla_cache=st.sampled_from(["latent", "expanded", "fp8_ds_mla"]),
    batch=st.integers(1, 50),
    tensor_parallel=st.sampled_from([1, 1, 1, 2, 7]),
)


def check(config: dict[str, Any], tensors: dict[str, Any], options: Options) -> None:
    """Count, and hold the count to what must be true of every count."""
    checkpoint = in_memory(config, tensors)
    try:
        counts = count_checkpoint(checkpoint, options)
    except OpError as error:
        assert error.what.startswith("config.json: ") and error.next_step
        return
    if options.tensor_parallel == 1:
        entered = sum(counts.groups.values()) + sum(counts.not_read.values()) - counts.read_twice
        assert entered == checkpoint.stored_bytes
    assert sum(counts.by_format.values()) == counts.weight_bytes
    assert min([*counts.groups.values(), *counts.not_read.values(), 0]) == 0
    assert 0 <= counts.proven_bytes <= counts.step_bytes
    assert counts.kv is None or counts.kv["strict_read_bytes"] <= counts.kv["read_bytes"]
    json = counts.to_json()
    assert sum(json["groups"].values()) == counts.weight_bytes
    assert limitations(checkpoint, counts, options, None)


@settings(max_examples=300, deadline=None)
@given(TENSORS, OPTIONS)
def test_random_tensors_are_all_accounted_for(tensors: dict[str, Any], options: Options) -> None:
    check({**LLAMA, "num_experts": 2, "num_experts_per_tok": 1}, tensors, options)


@settings(max_examples=300, deadline=None)
@given(CONFIGS, st.booleans(), TENSORS, OPTIONS)
def test_any_configuration_is_counted_doubted_or_refused_by_its_key(
    config: dict[str, Any], real: bool, tensors: dict[str, Any], options: Options
) -> None:
    base = {**LLAMA, **config} if real else config
    check(base, {**(llama_tensors() if real else {}), **tensors}, options)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60), st.none() | st.integers(0, 5))
def test_any_text_has_a_place(name: str, layers: int | None) -> None:
    place = place_of(name, layers)
    assert isinstance(place, Place) and place.role


def test_a_layer_number_too_long_to_be_one_is_no_layer() -> None:
    assert place_of("model.layers." + "9" * 5000 + ".mlp.up_proj.weight", 2).layer is None
