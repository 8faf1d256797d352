"""Definitions that the corpus has no model for, each on a small model of its shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fakes.checkpoints import LLAMA, Tensors, dense_layer, ends, in_memory, llama_tensors, size_of
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.tally import Counts, Options

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def count(config: Mapping[str, Any], tensors: Tensors, **options: Any) -> Counts:
    """The count, after the identity that always holds."""
    checkpoint = in_memory(dict(config), tensors)
    counts = count_checkpoint(checkpoint, Options(**options))
    if options.get("tensor_parallel", 1) == 1:
        entered = sum(counts.groups.values()) + sum(counts.not_read.values()) - counts.read_twice
        assert entered == checkpoint.stored_bytes
    assert sum(counts.by_format.values()) == counts.weight_bytes
    return counts


def proven(config: Mapping[str, Any], tensors: Tensors, **options: Any) -> Counts:
    counts = count(config, tensors, **options)
    assert counts.unproven == []
    return counts


def doubts(counts: Counts) -> list[str]:
    return [f"{item['term']}: {item['why']}" for item in counts.unproven]


def mamba2_mixer(prefix: str, *, heads: int = 8, head: int = 16, state: int = 32) -> Shapes:
    """A Mamba-2 mixer of one group: d_inner 128, conv 192 wide."""
    inner = heads * head
    width = inner + 2 * state
    return {
        f"{prefix}.in_proj.weight": ("BF16", (inner + width + heads, 64)),
        f"{prefix}.conv1d.weight": ("BF16", (width, 1, 4)),
        f"{prefix}.conv1d.bias": ("BF16", (width,)),
        f"{prefix}.A_log": ("BF16", (heads,)),
        f"{prefix}.D": ("BF16", (heads,)),
        f"{prefix}.dt_bias": ("BF16", (heads,)),
        f"{prefix}.norm.weight": ("BF16", (inner,)),
        f"{prefix}.out_proj.weight": ("BF16", (64, inner)),
    }


MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
MAMBA_CONV, MAMBA_STATE = 3 * 192, 8 * 16 * 32


def test_falcon_h1_holds_both_a_cache_and_a_state_in_every_layer() -> None:
    tensors = ends()
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= dense_layer(prefix) | mamba2_mixer(f"{prefix}.mamba")
    counts = proven({**LLAMA, **MAMBA, "model_type": "falcon_h1"}, tensors, context=10)
    assert counts.kv_bytes == 10 * 2 * 64 * 2
    assert counts.state_bytes == 2 * 2 * (MAMBA_CONV + MAMBA_STATE) * 2


def test_granite_hybrid_fuses_experts_and_keeps_a_shared_mlp() -> None:
    tensors = ends(head=False)
    for layer, kind in enumerate(("mamba", "attention")):
        prefix = f"model.layers.{layer}"
        if kind == "mamba":
            tensors |= mamba2_mixer(f"{prefix}.mamba")
        else:
            tensors |= {k: v for k, v in dense_layer(prefix).items() if ".mlp." not in k}
        tensors |= {
            f"{prefix}.block_sparse_moe.input_linear.weight": ("BF16", (8, 64, 64)),
            f"{prefix}.block_sparse_moe.output_linear.weight": ("BF16", (8, 64, 32)),
            f"{prefix}.block_sparse_moe.router.layer.weight": ("BF16", (8, 64)),
            f"{prefix}.shared_mlp.input_linear.weight": ("BF16", (64, 64)),
            f"{prefix}.shared_mlp.output_linear.weight": ("BF16", (64, 32)),
        }
    config = {
        **LLAMA,
        **MAMBA,
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    }
    counts = proven(config, tensors, context=10)
    assert counts.groups["routed_experts"] == 2 * 2 * 2 * (64 * 64 + 64 * 32)
    assert counts.groups["router"] == 2 * 8 * 64 * 2
    assert counts.groups["shared_experts"] == 2 * 2 * (64 * 64 + 64 * 32)
    assert counts.kv_bytes == 10 * 64 * 2 and counts.kv is not None and counts.kv["layers"] == 1
    assert counts.state is not None and counts.state["kinds"] == {"mamba2": 1}


def kda_layer(prefix: str, *, heads: int = 4, width: int = 16) -> Shapes:
    side = heads * width
    shapes: Shapes = {
        f"{prefix}.self_attn.{name}_proj.weight": ("BF16", (side, 64)) for name in "qkv"
    }
    shapes |= {f"{prefix}.self_attn.{name}_conv1d.weight": ("BF16", (side, 1, 4)) for name in "qkv"}
    return shapes | {
        f"{prefix}.self_attn.A_log": ("F32", (1, 1, heads, 1)),
        f"{prefix}.self_attn.dt_bias": ("F32", (side,)),
        f"{prefix}.self_attn.f_a_proj.weight": ("BF16", (width, 64)),
        f"{prefix}.self_attn.f_b_proj.weight": ("BF16", (side, width)),
        f"{prefix}.self_attn.b_proj.weight": ("BF16", (heads, 64)),
        f"{prefix}.self_attn.g_a_proj.weight": ("BF16", (width, 64)),
        f"{prefix}.self_attn.g_b_proj.weight": ("BF16", (side, width)),
        f"{prefix}.self_attn.o_norm.weight": ("BF16", (width,)),
        f"{prefix}.self_attn.o_proj.weight": ("BF16", (64, side)),
    }


def mla_layer(prefix: str, *, indexer: bool = False, rank: int = 24, rope: int = 8) -> Shapes:
    shapes: Shapes = {
        f"{prefix}.self_attn.q_proj.weight": ("BF16", (4 * 24, 64)),
        f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": ("BF16", (rank + rope, 64)),
        f"{prefix}.self_attn.kv_a_layernorm.weight": ("BF16", (rank,)),
        f"{prefix}.self_attn.kv_b_proj.weight": ("BF16", (4 * 32, rank)),
        f"{prefix}.self_attn.o_proj.weight": ("BF16", (64, 64)),
    }
    if indexer:
        shapes |= {
            f"{prefix}.self_attn.indexer.wq_b.weight": ("BF16", (2 * 128, 32)),
            f"{prefix}.self_attn.indexer.wk.weight": ("BF16", (128, 64)),
            f"{prefix}.self_attn.indexer.k_norm.weight": ("F32", (128,)),
            f"{prefix}.self_attn.indexer.weights_proj.weight": ("BF16", (2, 64)),
        }
    return shapes


MLA = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def test_kimi_linear_numbers_its_full_layers_from_one_and_keeps_float32_state() -> None:
    tensors = ends()
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        tensors |= mla_layer(prefix) if layer == 3 else kda_layer(prefix)
        for expert in range(4):
            for name in ("w1", "w2", "w3"):
                key = f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight"
                tensors[key] = ("BF16", (32, 64))
        tensors[f"{prefix}.block_sparse_moe.gate.weight"] = ("BF16", (4, 64))
        tensors[f"{prefix}.block_sparse_moe.gate.e_score_correction_bias"] = ("F32", (4,))
    config = {
        **LLAMA,
        **MLA,
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_token": 1,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    }
    counts = proven(config, tensors, context=10)
    assert counts.kv_bytes == 10 * 32 * 2
    assert counts.state_bytes == 2 * 3 * (3 * 3 * 64 * 2 + 4 * 16 * 16 * 4)
    assert counts.groups["routed_experts"] == 4 * 3 * 32 * 64 * 2


@pytest.mark.parametrize("context", [8, 4096])
def test_sparse_attention_reads_its_top_latents_and_every_indexer_key(context: int) -> None:
    tensors = ends() | mla_layer("model.layers.0", indexer=True)
    config = {
        **LLAMA,
        **MLA,
        "model_type": "deepseek_v32",
        "num_hidden_layers": 1,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 2,
    }
    counts = proven(config, tensors, context=context)
    assert counts.kv_bytes == min(context, 2048) * 32 * 2 + context * 132


def test_an_indexed_model_whose_layer_stores_no_indexer_is_unproven() -> None:
    tensors = ends() | mla_layer("model.layers.0")
    config = {**LLAMA, **MLA, "num_hidden_layers": 1, "index_topk": 2048, "index_head_dim": 128}
    assert "stores no indexer" in doubts(count(config, tensors))[0]


def gemma4_layer(prefix: str, *, full: bool) -> Shapes:
    shapes = dense_layer(prefix, kv=32 if full else 64)
    if full:
        del shapes[f"{prefix}.self_attn.v_proj.weight"]
    return shapes | {
        f"{prefix}.layer_scalar": ("BF16", (1,)),
        f"{prefix}.router.proj.weight": ("BF16", (4, 64)),
        f"{prefix}.router.scale": ("BF16", (64,)),
        f"{prefix}.router.per_expert_scale": ("BF16", (4,)),
        f"{prefix}.experts.gate_up_proj": ("BF16", (4, 32, 64)),
        f"{prefix}.experts.down_proj": ("BF16", (4, 64, 16)),
        f"{prefix}.post_feedforward_layernorm_1.weight": ("BF16", (64,)),
    }


def test_gemma_4_shares_key_and_value_weights_but_caches_both() -> None:
    tensors = ends("model.language_model", head=False)
    tensors |= gemma4_layer("model.language_model.layers.0", full=False)
    tensors |= gemma4_layer("model.language_model.layers.1", full=True)
    tensors["model.embed_vision.embedding_projection.weight"] = ("BF16", (64, 32))
    tensors["model.vision_tower.encoder.layers.0.mlp.fc1.weight"] = ("BF16", (32, 32))
    text = {
        **LLAMA,
        "model_type": "gemma4_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_experts": 4,
        "top_k_experts": 1,
        "tie_word_embeddings": True,
    }
    counts = proven({"model_type": "gemma4", "text_config": text}, tensors, context=100)
    assert counts.kv_bytes == 8 * 128 * 2 + 100 * 64 * 2
    assert counts.groups["mlp"] == 2 * 3 * 128 * 64 * 2  # beside the experts, always read
    assert counts.groups["routed_experts"] == 2 * (32 * 64 + 64 * 16) * 2
    assert counts.groups["router"] == 2 * (4 * 64 + 64 + 4) * 2
    assert counts.groups["other"] == 2 * 2
    assert counts.not_read["towers"] == (64 * 32 + 32 * 32) * 2


@pytest.mark.parametrize("transformers_names", [False, True])
def test_mimo_has_other_widths_for_keys_and_values_and_for_windows(
    transformers_names: bool,
) -> None:
    tensors = ends()
    for layer, heads in enumerate((2, 4)):
        shapes = dense_layer(f"model.layers.{layer}")
        prefix = f"model.layers.{layer}.self_attn"
        shapes[f"{prefix}.k_proj.weight"] = ("BF16", (heads * 24, 64))
        shapes[f"{prefix}.v_proj.weight"] = ("BF16", (heads * 16, 64))
        if layer == 1:
            shapes[f"{prefix}.attention_sink_bias"] = ("F32", (4,))
        tensors |= shapes
    tensors["model.mtp.layers.0.eh_proj.weight"] = ("BF16", (64, 128))
    config = {**LLAMA, "model_type": "mimo_v2_flash", "head_dim": 24, "v_head_dim": 16}
    config |= {"sliding_window": 8, "attention_chunk_size": 8}
    if transformers_names:
        config["layer_types"] = ["full_attention", "sliding_attention"]
    else:
        config |= {"hybrid_layer_pattern": [0, 1], "swa_num_key_value_heads": 4}
        config |= {"swa_head_dim": 24, "swa_v_head_dim": 16}
    counts = proven(config, tensors, context=100)
    assert counts.kv_bytes == 100 * 2 * 40 * 2 + 8 * 4 * 40 * 2
    assert counts.not_read["mtp"] == 64 * 128 * 2
    assert counts.groups["attention"] == 2 * (64 * 64 * 4 + 6 * 40 * 64) + 4 * 4


def test_lightning_layers_carry_a_state_and_softmax_layers_a_cache() -> None:
    tensors = ends()
    tensors |= dense_layer("model.layers.1")
    prefix = "model.layers.0"
    tensors |= {
        f"{prefix}.self_attn.qkv_proj.weight": ("BF16", (192, 64)),
        f"{prefix}.self_attn.output_gate.weight": ("BF16", (64, 64)),
        f"{prefix}.self_attn.out_proj.weight": ("BF16", (64, 64)),
        f"{prefix}.self_attn.norm.weight": ("BF16", (64,)),
    }
    for config in (
        {"attn_type_list": [0, 1]},
        {"layer_types": ["linear_attention", "full_attention"]},
    ):
        counts = proven({**LLAMA, "model_type": "minimax_m1", **config}, tensors, context=10)
        assert counts.state_bytes == 2 * 4 * 16 * 16 * 2
        assert counts.kv_bytes == 10 * 64 * 2


def test_fused_projections_take_their_cache_from_the_configuration() -> None:
    tensors = ends()
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes = dense_layer(prefix)
        for name in ("q", "k", "v"):
            del shapes[f"{prefix}.self_attn.{name}_proj.weight"]
        shapes[f"{prefix}.self_attn.qkv_proj.weight"] = ("BF16", (64 + 64, 64))
        tensors |= shapes
    config = {**LLAMA, "model_type": "phi3", "sliding_window": None}
    assert proven(config, tensors, context=10).kv_bytes == 10 * 2 * 64 * 2
    wrong = count({**config, "num_key_value_heads": 4}, tensors)
    assert "fused projection" in doubts(wrong)[0]


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "olmo3"}, [0, 1, 2]),
        ({"model_type": "cohere2"}, [0, 1, 2]),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, [0, 1, 2]),
        ({"model_type": "gemma2"}, [0, 2]),
        ({"model_type": "gpt_oss"}, [0, 2]),
        ({"model_type": "gemma3", "sliding_window_pattern": 2}, [0, 2]),
        ({"model_type": "mistral"}, [0, 1, 2, 3]),
        ({"model_type": "mistral", "sliding_window": None}, []),
        ({"model_type": "qwen2", "use_sliding_window": False}, []),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}, [3]),
        (
            {"model_type": "acme", "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            [3],
        ),
        ({"model_type": "acme", "hybrid_layer_pattern": [1, 0, 0, 1]}, [0, 3]),
    ],
)
def test_windows_follow_the_pattern_that_the_family_writes(
    config: dict[str, Any], windows: list[int]
) -> None:
    base = {**LLAMA, "num_hidden_layers": 4, "sliding_window": 8, **config}
    counts = proven(base, llama_tensors(4), context=100)
    assert counts.kv is not None
    assert [row["layer"] for row in counts.per_layer if row["kv"]["window"]] == windows
    assert counts.kv_bytes == 128 * (8 * len(windows) + 100 * (4 - len(windows)))
    assert counts.kv["strict_read_bytes"] == 128 * (7 * len(windows) + 100 * (4 - len(windows)))


def test_llama_4_chunks_are_read_up_to_their_boundary() -> None:
    text = {
        **LLAMA,
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 64,
    }
    counts = proven({"model_type": "llama4", "text_config": text}, llama_tensors(4), context=100)
    assert counts.kv is not None
    assert counts.kv_bytes == 128 * (3 * 64 + 100)
    assert counts.kv["strict_read_bytes"] == 128 * (3 * 36 + 100)
    whole = proven(
        {"model_type": "llama4", "text_config": {**text, "attention_chunk_size": None}},
        llama_tensors(4),
        context=100,
    )
    assert whole.kv_bytes == 128 * 400


def test_pure_mamba_2_has_no_cache_at_all() -> None:
    tensors: Shapes = {"backbone.embeddings.weight": ("BF16", (256, 64))}
    for layer in range(2):
        tensors |= mamba2_mixer(f"backbone.layers.{layer}.mixer")
        tensors[f"backbone.layers.{layer}.norm.weight"] = ("BF16", (64,))
    tensors |= {"backbone.norm_f.weight": ("BF16", (64,)), "lm_head.weight": ("BF16", (256, 64))}
    config = {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 32,
        "n_groups": 1,
        "conv_kernel": 4,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    counts = proven(config, tensors)
    assert counts.kv is None and counts.kv_bytes == 0
    assert counts.state_bytes == 2 * 2 * (MAMBA_CONV + MAMBA_STATE) * 4
    assert counts.groups["lm_head"] == 256 * 64 * 2


def test_lfm2_short_convolutions_keep_a_few_columns() -> None:
    tensors = ends(head=False)
    del tensors["model.norm.weight"]
    tensors["model.embedding_norm.weight"] = ("BF16", (64,))
    prefix = "model.layers.0"
    tensors |= {
        f"{prefix}.conv.conv.weight": ("BF16", (64, 1, 3)),
        f"{prefix}.conv.in_proj.weight": ("BF16", (192, 64)),
        f"{prefix}.conv.out_proj.weight": ("BF16", (64, 64)),
        f"{prefix}.operator_norm.weight": ("BF16", (64,)),
        f"{prefix}.feed_forward.w1.weight": ("BF16", (128, 64)),
    }
    tensors |= {
        f"model.layers.1.self_attn.{name}.weight": ("BF16", shape)
        for name, shape in {
            "q_proj": (64, 64),
            "k_proj": (32, 64),
            "v_proj": (32, 64),
            "out_proj": (64, 64),
            "q_layernorm": (16,),
            "k_layernorm": (16,),
        }.items()
    }
    config = {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
    counts = proven({**config, "tie_word_embeddings": True}, tensors, context=10)
    assert counts.state_bytes == 2 * 2 * 64 * 2
    assert counts.kv_bytes == 10 * 64 * 2
    assert counts.groups["mlp"] == 128 * 64 * 2


def test_gated_deltanet_with_another_width_than_declared_is_unproven() -> None:
    prefix = "model.layers.0"
    tensors = ends() | {
        f"{prefix}.linear_attn.A_log": ("F32", (4,)),
        f"{prefix}.linear_attn.conv1d.weight": ("BF16", (128, 1, 4)),
        f"{prefix}.linear_attn.in_proj_qkvz.weight": ("BF16", (192, 64)),
        f"{prefix}.linear_attn.in_proj_ba.weight": ("BF16", (8, 64)),
    }
    config = {
        **LLAMA,
        "model_type": "qwen3_next",
        "num_hidden_layers": 1,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
    }
    assert proven(config, tensors).state_bytes == 2 * (3 * 128 + 4 * 16 * 16) * 2
    wrong = count({**config, "linear_num_value_heads": 8}, tensors)
    assert wrong.state is None and "conv1d is 128 wide" in doubts(wrong)[0]
    silent = count({**LLAMA, "model_type": "qwen3_next", "num_hidden_layers": 1}, tensors)
    assert silent.state is None and "linear_*" in doubts(silent)[0]


GPTQ = {"qweight": ("I32", (8, 64)), "qzeros": ("I32", (1, 8)), "scales": ("F16", (1, 64))}
W4A16 = {
    "weight_packed": ("I32", (64, 8)),
    "weight_scale": ("BF16", (64, 1)),
    "weight_shape": ("I64", (2,)),
}
NVFP4 = {
    "weight": ("U8", (64, 32)),
    "weight_scale": ("F8_E4M3", (64, 4)),
    "weight_scale_2": ("F32", ()),
}
FP8_TENSOR = {
    "weight": ("F8_E4M3", (64, 64)),
    "weight_scale": ("F32", ()),
    "input_scale": ("F32", ()),
}
MLX = {"weight": ("U32", (64, 8)), "scales": ("BF16", (64, 1)), "biases": ("BF16", (64, 1))}


@pytest.mark.parametrize(
    ("parameters", "name", "bits"),
    [
        (GPTQ, "int4", 4),
        (W4A16, "int4", 4),
        ({"weight_packed": ("U8", (64, 32)), "weight_scale": ("U8", (64, 2))}, "mxfp4", None),
        (NVFP4, "nvfp4", None),
        (FP8_TENSOR, "fp8", None),
        ({"weight": ("F8_E4M3", (64, 64)), "weight_scale": ("BF16", (1, 1))}, "fp8", None),
        (MLX, "int4", 4),
        ({"weight": ("I8", (64, 64)), "SCB": ("F32", (64,))}, "int8", None),
        ({"weight": ("U8", (64, 64)), "SCB": ("F32", (64,))}, "int8", None),
        ({"weight": ("F4", (64, 64)), "weight_scale": ("F8_E8M0", (64, 2))}, "fp4", None),
        ({"weight": ("U8", (64, 64))}, "u8", None),
    ],
)
def test_a_quantised_modules_bytes_all_go_under_its_weights_format(
    parameters: dict[str, tuple[str, tuple[int, ...]]], name: str, bits: int | None
) -> None:
    tensors = llama_tensors(1)
    prefix = "model.layers.0.mlp.up_proj"
    del tensors[f"{prefix}.weight"]
    tensors |= {f"{prefix}.{key}": value for key, value in parameters.items()}
    config = {
        **LLAMA,
        "num_hidden_layers": 1,
        "quantization_config": {"bits": bits, "quant_method": "x"},
    }
    counts = proven(config, tensors)
    assert counts.by_format[name] == sum(size_of(*value) for value in parameters.values())
    shape = sum(size_of(*v) for k, v in parameters.items() if k == "weight_shape")
    assert counts.groups.get("aux", 0) == shape


def test_packed_projections_never_give_the_width_of_the_cache() -> None:
    tensors = llama_tensors(1)
    for name in ("k", "v"):
        del tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
        tensors[f"model.layers.0.self_attn.{name}_proj.qweight"] = ("I32", (64, 4))
        tensors[f"model.layers.0.self_attn.{name}_proj.scales"] = ("F16", (1, 32))
    config = {**LLAMA, "num_hidden_layers": 1}
    assert proven(config, tensors, context=10).kv_bytes == 10 * 64 * 2


def test_mlx_rows_are_those_of_the_quantised_table() -> None:
    tensors: Shapes = {}
    for stem in ("model.embed_tokens", "lm_head"):
        tensors |= {
            f"{stem}.weight": ("U32", (256, 8)),
            f"{stem}.scales": ("BF16", (256, 1)),
            f"{stem}.biases": ("BF16", (256, 1)),
        }
    tensors |= dense_layer("model.layers.0")
    for name in ("gate", "up", "down"):
        stem = f"model.layers.0.mlp.switch_mlp.{name}_proj"
        tensors |= {
            f"{stem}.weight": ("U32", (4, 32, 8)),
            f"{stem}.scales": ("BF16", (4, 32, 1)),
            f"{stem}.biases": ("BF16", (4, 32, 1)),
        }
    config = {**LLAMA, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 1}
    counts = proven({**config, "quantization": {"bits": 4, "group_size": 64}}, tensors)
    assert counts.groups["embedding_row"] == 8 * 4 + 2 + 2
    assert counts.groups["lm_head"] == 256 * 36
    assert counts.groups["routed_experts"] == 3 * 32 * 36
    assert counts.quant == "mlx-int4"


def test_gpt2_gathers_a_position_row_and_ties_its_head() -> None:
    tensors: Shapes = {
        "wte.weight": ("F32", (256, 64)),
        "wpe.weight": ("F32", (128, 64)),
        "ln_f.weight": ("F32", (64,)),
        "h.0.attn.c_attn.weight": ("F32", (64, 192)),
        "h.0.attn.c_proj.weight": ("F32", (64, 64)),
        "h.0.mlp.c_fc.weight": ("F32", (64, 256)),
        "h.0.ln_1.weight": ("F32", (64,)),
    }
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 256}
    counts = proven(config, tensors, context=10)
    assert counts.groups["embedding_row"] == 2 * 64 * 4
    assert counts.groups["lm_head"] == 256 * 64 * 4
    assert counts.not_read["embedding_rest"] == 127 * 64 * 4
    assert counts.kv_bytes == 10 * 128 * 2


def test_a_tie_that_the_files_contradict_is_settled_by_the_files() -> None:
    untied = {**LLAMA, "tie_word_embeddings": False}
    tied = {**LLAMA, "tie_word_embeddings": True}
    head = 256 * 64 * 2
    absent = dict(llama_tensors())
    del absent["lm_head.weight"]
    assert proven(untied, absent).groups["lm_head"] == head  # not stored: it is the embedding
    stored = proven(tied, llama_tensors())
    assert stored.groups["lm_head"] == head and stored.not_read["dead_duplicates"] == head
    without_key = {k: v for k, v in LLAMA.items() if k != "tie_word_embeddings"}
    for family, dead in (("llama", 0), ("gemma", head), ("cohere", head)):
        counts = proven({**without_key, "model_type": family}, llama_tensors())
        assert counts.not_read.get("dead_duplicates", 0) == dead
    other = llama_tensors() | {"lm_head.weight": ("BF16", (512, 64))}
    assert "differ in shape" in doubts(count(tied, other))[0]


def test_a_table_packed_along_its_rows_is_unproven() -> None:
    tensors = llama_tensors() | {"model.embed_tokens.weight": ("I32", (32, 64))}
    assert "32 rows for 256 tokens" in doubts(count(LLAMA, tensors))[0]


def moe(experts: int = 4, *, stored: int | None = None) -> Shapes:
    tensors = {k: v for k, v in llama_tensors(1).items() if ".mlp." not in k}
    for expert in range(stored or experts):
        tensors[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] = ("BF16", (32, 64))
    return tensors | {"model.layers.0.mlp.gate.weight": ("BF16", (experts, 64))}


MOE = {**LLAMA, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "tensors", "why"),
    [
        ({"num_experts": 8}, moe(), "says 8 experts, the headers hold 4"),
        ({"num_experts_per_tok": None}, moe(), "how many experts a token uses"),
        ({"num_experts": None}, moe(), "how many experts there are"),
        ({"num_experts_per_tok": 9}, moe(), "9 of 4 experts"),
        ({"zero_expert_num": 2}, moe(), "zero_expert_num"),
        ({"num_hash_layers": 1}, moe(), "num_hash_layers"),
        ({}, moe(stored=3), "says 4 experts, the headers hold 3"),
        ({}, llama_tensors(1), "declares experts, but no tensor is one"),
    ],
)
def test_experts_that_are_not_a_plain_top_k_are_unproven(
    config: dict[str, Any], tensors: Shapes, why: str
) -> None:
    counts = count({**MOE, **config}, tensors)
    assert why in doubts(counts)[0]
    assert counts.proven_bytes == counts.step_bytes - counts.groups.get("routed_experts", 0)


def test_unequal_experts_are_an_expectation_and_said_to_be_one() -> None:
    tensors = moe()
    tensors["model.layers.0.mlp.experts.3.up_proj.weight"] = ("F32", (32, 64))
    counts = proven(MOE, tensors)
    assert counts.moe is not None and counts.moe["equal_sizes"] is False
    assert counts.groups["routed_experts"] == (3 * 4096 + 8192) // 2


def test_experts_listed_by_layer_are_taken_by_layer() -> None:
    tensors = moe()
    config = {**MOE, "num_experts": [4], "num_experts_per_tok": None, "moe_topk": [1]}
    assert proven(config, tensors).groups["routed_experts"] == 32 * 64 * 2
    assert "how many experts" in doubts(count({**config, "num_experts": [4, 8]}, tensors))[0]


def test_stacked_experts_without_their_name_are_known_by_their_shape() -> None:
    tensors = {k: v for k, v in llama_tensors(1).items() if ".mlp." not in k}
    tensors["model.layers.0.moe.up_proj.weight"] = ("F8_E4M3", (4, 32, 64))
    tensors["model.layers.0.moe.up_proj.weight_scale"] = ("F32", (4, 1, 1))
    tensors["model.layers.0.moe.gate.weight"] = ("BF16", (4, 64))
    tensors["model.layers.0.share_expert.up_proj.weight"] = ("BF16", (32, 64))
    counts = proven(MOE, tensors)
    assert counts.groups["routed_experts"] == 2 * (32 * 64 + 4)
    assert counts.groups["router"] == 4 * 64 * 2
    assert counts.groups["shared_experts"] == 32 * 64 * 2
    strange = count({**MOE, "num_experts": 3}, tensors)
    assert "of unknown use" in doubts(strange)[0]


def test_fused_experts_whose_first_dimension_is_not_e_are_unproven() -> None:
    tensors = {k: v for k, v in llama_tensors(1).items() if ".mlp." not in k}
    tensors["model.layers.0.mlp.experts.up_proj"] = ("BF16", (4 * 32, 64))
    tensors["model.layers.0.mlp.experts.up_proj_input_scale"] = ("F32", ())
    counts = count(MOE, tensors)
    assert "first dimension" in doubts(counts)[0]
    assert counts.groups["aux"] == 4  # one scale for all experts is read whole


def test_a_tensor_that_no_rule_knows_is_counted_named_and_kept_out_of_the_ceiling() -> None:
    tensors = llama_tensors() | {"model.layers.0.warp_core.weight": ("BF16", (64, 64))}
    counts = count(LLAMA, tensors)
    assert counts.groups["other"] == 8192
    assert counts.proven_bytes == counts.step_bytes - 8192
    assert "warp_core" in doubts(counts)[0]


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"model.layers.0.self_attn.lora_q.weight": ("BF16", (64, 64))}, "lora_q"),
        ({"model.layers.0.cross_attn.q_proj.weight": ("BF16", (64, 64))}, "unknown use"),
        ({"encoder.layers.0.mlp.up_proj.weight": ("BF16", (64, 64))}, "unknown use"),
        ({"model.layers.0.mamba.A_log": ("BF16", (4,))}, "unknown kind"),
        ({"model.layers.0.time_mix.receptance.weight": ("BF16", (64, 64))}, "unknown kind"),
    ],
)
def test_mixers_and_stacks_of_unknown_kinds_are_unproven(tensors: Shapes, why: str) -> None:
    assert why in " ".join(doubts(count(LLAMA, llama_tensors() | tensors)))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"layer_types": ["full_attention", "warp_attention"]}, "warp_attention"),
        ({"layer_types": ["full_attention"]}, "beyond layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "says recurrent"),
        ({"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ({"sliding_window": 8, "model_type": "acme"}, "which layers use it"),
        ({"hybrid_override_pattern": "*?"}, "'?'"),
        ({"attn_type_list": [1, 7]}, "flag 7"),
        ({"compress_ratios": [1, 4]}, "compress_ratios"),
        ({"use_cla": True}, "use_cla"),
        ({"num_key_value_heads": 4}, "says 128 cached elements"),
        ({"num_kv_shared_layers": 2}, "not there"),
    ],
)
def test_a_layer_that_is_not_understood_is_unproven_and_its_cache_not_invented(
    config: dict[str, Any], why: str
) -> None:
    counts = count({**LLAMA, **config}, llama_tensors())
    assert any(why in text for text in doubts(counts)), doubts(counts)
    assert counts.kv_bytes <= 2 * 1024 * 128


def test_layers_that_share_a_cache_read_the_last_of_their_kind() -> None:
    tensors = ends()
    for layer in range(4):
        shapes = dense_layer(f"model.layers.{layer}")
        if layer >= 2:
            for name in ("k", "v"):
                del shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
        tensors |= shapes
    config = {
        **LLAMA,
        "model_type": "gemma4",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
    }
    counts = proven(config, tensors, context=100)
    assert counts.kv is not None
    assert counts.kv_bytes == 2 * 128 * (8 + 100)
    assert counts.kv["unique_read_bytes"] == 128 * (8 + 100)
    assert [row["kv"]["reads_layer"] for row in counts.per_layer] == [None, None, 0, 1]
    unshared = count({**config, "num_kv_shared_layers": 0}, tensors)
    assert "queries but no keys" in doubts(unshared)[0]


def test_decilm_blocks_are_read_from_the_headers() -> None:
    tensors = llama_tensors()
    tensors["model.layers.1.self_attn.k_proj.weight"] = ("BF16", (16, 64))
    tensors["model.layers.1.self_attn.v_proj.weight"] = ("BF16", (16, 64))
    config = {**LLAMA, "num_key_value_heads": None, "block_configs": [{}, {}]}
    assert proven(config, tensors, context=10).kv_bytes == 10 * (64 + 32) * 2


def test_zamba_hybrid_layers_without_their_shared_block_are_unproven() -> None:
    tensors = ends()
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= mamba2_mixer(f"{prefix}.mamba_decoder.mamba")
        tensors[f"{prefix}.linear.weight"] = ("BF16", (64, 64))
    tensors |= {
        k.replace("layers.0", "layers.0.shared_transformer"): v
        for k, v in dense_layer("model.layers.0").items()
    }
    config = {**LLAMA, **MAMBA, "model_type": "zamba2", "hybrid_layer_ids": [0, 1]}
    counts = count(config, tensors)
    assert "not those of attention" in doubts(counts)[0]
    assert counts.state is not None and counts.state["layers"] == 2


def test_without_a_configuration_the_layers_are_counted_and_doubted() -> None:
    checkpoint = in_memory(None, llama_tensors())
    counts = count_checkpoint(checkpoint, Options())
    assert counts.unproven[0]["term"] == "layers"
    assert counts.kv_bytes == 2 * 1024 * 128  # the projections' rows are enough


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_a_batch_reads_weights_once_and_the_expected_number_of_experts(batch: int) -> None:
    one = proven(MOE, moe(), context=10)
    many = proven(MOE, moe(), context=10, batch=batch)
    share = 1 - (1 - 2 / 4) ** batch
    assert many.groups["routed_experts"] == round(4 * 32 * 64 * 2 * share)
    assert many.kv_bytes == batch * one.kv_bytes
    assert many.groups["attention"] == one.groups["attention"]
    assert many.groups["embedding_row"] == batch * one.groups["embedding_row"]


def test_tensor_parallel_splits_weights_and_kv_heads_but_never_below_one() -> None:
    one = proven(LLAMA, llama_tensors(), context=10)
    for devices, heads in ((2, 1), (4, 1)):
        split = proven(LLAMA, llama_tensors(), context=10, tensor_parallel=devices)
        assert split.groups["mlp"] == one.groups["mlp"] // devices
        assert split.groups["norms"] == one.groups["norms"]
        assert split.groups["embedding_row"] == one.groups["embedding_row"]
        assert split.kv_bytes == one.kv_bytes * heads // 2
    nobody = {**LLAMA, "num_attention_heads": 0, "num_key_value_heads": 0}
    assert proven(nobody, llama_tensors(), context=10, tensor_parallel=2).kv_bytes == one.kv_bytes
    latent = ends() | mla_layer("model.layers.0")
    config = {**LLAMA, **MLA, "num_hidden_layers": 1}
    whole = proven(config, latent, context=10)
    assert proven(config, latent, context=10, tensor_parallel=4).kv_bytes == whole.kv_bytes


def mamba1_mixer(prefix: str, *, inner: int = 128, state: int = 16) -> Shapes:
    return {
        f"{prefix}.in_proj.weight": ("BF16", (2 * inner, 64)),
        f"{prefix}.conv1d.weight": ("BF16", (inner, 1, 4)),
        f"{prefix}.x_proj.weight": ("BF16", (4 + 2 * state, inner)),
        f"{prefix}.dt_proj.weight": ("BF16", (inner, 4)),
        f"{prefix}.A_log": ("F32", (inner, state)),
        f"{prefix}.D": ("F32", (inner,)),
        f"{prefix}.out_proj.weight": ("BF16", (64, inner)),
    }


def test_mamba_1_keeps_its_states_width_from_its_decay() -> None:
    tensors = ends() | mamba1_mixer("model.layers.0.mamba")
    counts = proven({**LLAMA, "num_hidden_layers": 1, "mamba_d_state": 16}, tensors)
    assert counts.state_bytes == 2 * (3 * 128 + 128 * 16) * 2


def lightning_mixer(prefix: str) -> Shapes:
    return {
        f"{prefix}.qkv_proj.weight": ("BF16", (192, 64)),
        f"{prefix}.output_gate.weight": ("BF16", (64, 64)),
        f"{prefix}.out_proj.weight": ("BF16", (64, 64)),
    }


LINEAR = {"linear_attn_config": {"num_heads": 4, "head_dim": 16}}


@pytest.mark.parametrize(
    ("tensors", "config", "why"),
    [
        (mamba1_mixer("model.layers.0.mamba"), {"mamba_d_state": 8}, "A_log is 128 x 16"),
        (
            mamba1_mixer("model.layers.0.mamba") | {"model.layers.0.mamba.A_log": ("F32", (16,))},
            {},
            "two-dimensional A_log",
        ),
        (mamba2_mixer("model.layers.0.mamba"), {}, "state size and groups"),
        (mamba2_mixer("model.layers.0.mamba"), {**MAMBA, "mamba_d_head": 8}, "conv1d is 192 wide"),
        (mamba2_mixer("model.layers.0.mamba"), {**MAMBA, "mamba_d_state": 96}, "conv1d is 192"),
        (
            mamba2_mixer("model.layers.0.mamba")
            | {"model.layers.0.mamba.conv1d.weight": ("BF16", (768,))},
            MAMBA,
            "without a conv1d",
        ),
        (kda_layer("model.layers.0"), {}, "no linear_attn_config"),
        (kda_layer("model.layers.0", heads=2), LINEAR, "convolutions are 96 wide"),
        (lightning_mixer("model.layers.0.self_attn"), {"head_dim": 24}, "lightning attention of 4"),
        (
            lightning_mixer("model.layers.0.self_attn"),
            {"head_dim": None, "num_attention_heads": None},
            "does not say its heads",
        ),
        ({"model.layers.0.conv.conv.weight": ("BF16", (0, 1, 3))}, {}, "without weights"),
        (
            mamba2_mixer("model.layers.0.mamba") | {"model.layers.0.mamba.A_log": ("BF16", (0,))},
            {**MAMBA, "mamba_d_head": "auto"},
            "conv1d is 192 wide",
        ),
        ({"model.layers.0.conv.in_proj.weight": ("BF16", (64, 64))}, {}, "unknown kind"),
    ],
)
def test_a_state_that_headers_and_configuration_tell_differently_is_unproven(
    tensors: Shapes, config: dict[str, Any], why: str
) -> None:
    base = {**LLAMA, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    counts = count({**base, **config}, ends() | tensors)
    assert counts.state is None
    assert any(why in text for text in doubts(counts)), doubts(counts)


def test_an_auto_head_width_of_mamba_is_what_the_convolution_leaves() -> None:
    tensors = ends() | mamba2_mixer("model.layers.0.mamba")
    config = {**LLAMA, **MAMBA, "num_hidden_layers": 1, "mamba_d_head": "auto"}
    assert proven(config, tensors).state_bytes == 2 * (MAMBA_CONV + MAMBA_STATE) * 2


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({**MLA, "kv_lora_rank": None}, "no kv_lora_rank"),
        ({**MLA, "kv_lora_rank": 32}, "latent of 40, its projection makes 32"),
    ],
)
def test_a_latent_that_is_not_declared_as_stored_is_unproven(
    config: dict[str, Any], why: str
) -> None:
    tensors = ends() | mla_layer("model.layers.0")
    counts = count({**LLAMA, "num_hidden_layers": 1, **config}, tensors)
    assert counts.kv is None and why in doubts(counts)[0]


def test_an_expanded_latent_needs_the_widths_of_its_heads() -> None:
    tensors = ends() | mla_layer("model.layers.0")
    config = {**LLAMA, **MLA, "num_hidden_layers": 1, "qk_nope_head_dim": None}
    assert "expanded MLA cache needs" in doubts(count(config, tensors, mla_cache="expanded"))[0]
    indexed = ends() | mla_layer("model.layers.0", indexer=True)
    assert "no index_topk" in doubts(count({**LLAMA, **MLA, "num_hidden_layers": 1}, indexed))[0]


def test_keys_without_values_are_unproven() -> None:
    tensors = llama_tensors(1)
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    counts = count({**LLAMA, "num_hidden_layers": 1}, tensors)
    assert "stores keys but no values" in doubts(counts)[0]


def test_two_attentions_in_a_layer_are_unproven() -> None:
    tensors = llama_tensors(1)
    extra = dense_layer("model.layers.0.second")
    tensors |= {k: v for k, v in extra.items() if "self_attn" in k}
    counts = count({**LLAMA, "num_hidden_layers": 1}, tensors)
    assert "more than one attention" in " ".join(doubts(counts))


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"attn_layer_indices": [1]}, [1]),
        ({"full_attn_idxs": [0, 1]}, [0, 1]),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, [1]),
        ({"hybrid_override_pattern": "M*"}, [1]),
        ({"layers_block_type": ["mamba", "attention"]}, [1]),
        ({"linear_attn_config": {"full_attn_layers": [2]}}, [1]),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, [1]),
    ],
)
def test_the_layers_that_attend_are_found_however_the_family_lists_them(
    config: dict[str, Any], full: list[int]
) -> None:
    tensors = ends()
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors |= dense_layer(prefix) if layer in full else mamba2_mixer(f"{prefix}.mamba")
    counts = proven({**LLAMA, **MAMBA, **config}, tensors)
    assert [row["layer"] for row in counts.per_layer if row["kv"]] == full
