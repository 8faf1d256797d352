"""Spellings of known definitions: families met when every class of transformers was counted."""

from __future__ import annotations

from typing import Any

import pytest

from fakes.checkpoints import LLAMA, Tensors, dense_layer, ends, in_memory, llama_tensors, size_of
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.tally import Counts, Options

Shapes = dict[str, tuple[str, tuple[int, ...]]]
ONE = {**LLAMA, "num_hidden_layers": 1}


def count(config: dict[str, Any], tensors: Tensors, **options: Any) -> Counts:
    checkpoint = in_memory(config, tensors)
    counts = count_checkpoint(checkpoint, Options(**options))
    entered = sum(counts.groups.values()) + sum(counts.not_read.values()) - counts.read_twice
    assert entered == checkpoint.stored_bytes
    return counts


def proven(config: dict[str, Any], tensors: Tensors, **options: Any) -> Counts:
    counts = count(config, tensors, **options)
    assert counts.unproven == []
    return counts


def doubts(counts: Counts) -> str:
    return " ; ".join(f"{item['term']}: {item['why']}" for item in counts.unproven)


def total(tensors: Tensors) -> int:
    return sum(size_of(dtype, shape) for dtype, shape in tensors.values())


def elements(counts: Counts) -> list[int]:
    return [layer.elements for layer in counts.kv_layers]


def experts(prefix: str, number: int = 4) -> Shapes:
    tensors: Shapes = {f"{prefix}.mlp.gate.weight": ("BF16", (number, 64))}
    for at in range(number):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{prefix}.mlp.experts.{at}.{leaf}.weight"] = ("BF16", (32, 64))
    return tensors


def fused_layer(width: int, leaf: str = "self_attention.query_key_value") -> Tensors:
    """A layer of 4 query heads of 16 whose q, k and v lie in one matrix."""
    return {
        f"transformer.h.0.{leaf}.weight": ("BF16", (width, 64)),
        "transformer.h.0.self_attention.dense.weight": ("BF16", (64, 64)),
        "transformer.h.0.mlp.dense_h_to_4h.weight": ("BF16", (256, 64)),
        "transformer.h.0.mlp.dense_4h_to_h.weight": ("BF16", (64, 256)),
        "transformer.h.0.input_layernorm.weight": ("BF16", (64,)),
        "transformer.word_embeddings.weight": ("BF16", (256, 64)),
        "transformer.ln_f.weight": ("BF16", (64,)),
    }


def test_a_routers_bias_beside_the_experts_is_read_whole() -> None:
    bias = {"model.layers.0.mlp.experts.e_score_correction_bias": ("F32", (4,))}
    config = {**ONE, "num_experts": 4, "num_experts_per_tok": 1}
    without = proven(config, llama_tensors(1) | experts("model.layers.0"))
    counts = proven(config, llama_tensors(1) | experts("model.layers.0") | bias)
    assert counts.weight_bytes - without.weight_bytes == 16
    assert counts.groups["routed_experts"] == without.groups["routed_experts"]


@pytest.mark.parametrize(
    ("config", "width", "kv_heads"),
    [
        ({"multi_query": True, "new_decoder_architecture": False, "num_kv_heads": 4}, 96, 1),
        ({"multi_query": True}, 96, 1),
        ({"multi_query": False, "num_kv_heads": 1}, 192, 4),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 128, 2),
    ],
)
def test_multi_query_attention_caches_one_head_unless_the_architecture_is_the_new_one(
    config: dict[str, Any], width: int, kv_heads: int
) -> None:
    base = {"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    counts = proven({**base, "num_hidden_layers": 1, **config}, fused_layer(width))
    assert elements(counts) == [2 * 16 * kv_heads]


def test_layers_that_only_attend_to_an_image_are_kept_out_of_the_ceiling() -> None:
    tensors = llama_tensors(2)
    cross = {k: v for k, v in tensors.items() if k.startswith("model.layers.1.")}
    kept = {k: v for k, v in tensors.items() if k not in cross}
    renamed = {k.replace("self_attn", "cross_attn"): v for k, v in cross.items()}
    counts = count({**LLAMA, "num_hidden_layers": 2}, kept | renamed)
    alone = proven(ONE, kept)
    assert "weights: 9 tensors of unknown use" in doubts(counts)
    assert counts.proven_bytes == alone.step_bytes
    assert [layer.layer for layer in counts.kv_layers] == [0]


@pytest.mark.parametrize(
    "name",
    [
        "model.merger.mlp.0.pre_norm.weight",
        "model.embed_tokens_extend.audio_embed.encoder.norm.weight",
        "model.vision_adapter.fc1.weight",
        "model.visual_embeddings_table.weight",
        "mlp_AR.pre_norm.weight",
        "vit_large_projector.weight",
        "qformer.layernorm.weight",
    ],
)
def test_what_serves_another_modality_is_stored_and_not_read(name: str) -> None:
    counts = proven(ONE, llama_tensors(1) | {name: ("BF16", (32, 64))})
    assert counts.not_read["towers"] == 32 * 64 * 2


def test_a_norm_in_a_module_that_no_rule_knows_is_as_unknown_as_the_module() -> None:
    strange = {
        "model.gadget.norm.weight": ("BF16", (64,)),
        "model.gadget.lm_head.weight": ("BF16", (64, 64)),
    }
    counts = count(ONE, llama_tensors(1) | strange)
    assert "2 tensors of unknown use" in doubts(counts)
    assert counts.unproven[0]["bytes"] == total(strange)


def test_the_norm_of_an_embedding_table_is_a_norm_and_no_row_of_it() -> None:
    tensors = llama_tensors(1) | {"model.embeddings.norm.weight": ("BF16", (64,))}
    plain = proven(ONE, llama_tensors(1))
    assert proven(ONE, tensors).groups["norms"] == plain.groups["norms"] + 128


@pytest.mark.parametrize("leaf", ["lora_A.speech", "vision_expert_gate_proj"])
def test_parts_of_a_layer_that_text_may_not_use_are_unproven(leaf: str) -> None:
    tensors = llama_tensors(1) | {f"model.layers.0.mlp.up_proj.{leaf}.weight": ("BF16", (8, 64))}
    counts = count(ONE, tensors)
    assert counts.unproven[0]["bytes"] == 8 * 64 * 2


def test_decay_tables_of_the_prefill_are_not_read() -> None:
    at = "model.layers.0.self_attn"
    tensors: Shapes = {
        f"{at}.qkv_proj.weight": ("BF16", (192, 64)),
        f"{at}.output_gate.weight": ("BF16", (64, 64)),
        f"{at}.out_proj.weight": ("BF16", (64, 64)),
        f"{at}.norm.weight": ("BF16", (64,)),
        f"{at}.slope_rate": ("BF16", (4, 1, 1)),
    } | ends()
    config = {**ONE, "layer_types": ["linear_attention"]}
    plain = proven(config, tensors)
    table: Shapes = {f"{at}.diagonal_decay": ("BF16", (1, 4, 256, 256))}
    counts = proven(config, tensors | table)
    assert counts.step_bytes == plain.step_bytes
    assert counts.not_read["dead_duplicates"] == total(table)
    assert counts.state_bytes == plain.state_bytes == 2 * 2 * 4 * 16 * 16


@pytest.mark.parametrize("leaf", ["bias", "masked_bias", "causal_mask"])
def test_causal_masks_saved_beside_the_weights_are_not_read(leaf: str) -> None:
    plain = proven(ONE, llama_tensors(1))
    mask: Shapes = {f"model.layers.0.self_attn.{leaf}": ("F32", (1, 1, 128, 128))}
    counts = proven(ONE, llama_tensors(1) | mask)
    assert counts.weight_bytes == plain.weight_bytes
    assert counts.not_read["dead_duplicates"] == total(mask)


def test_a_bias_of_attention_is_read() -> None:
    plain = proven(ONE, llama_tensors(1))
    bias: Shapes = {"model.layers.0.self_attn.bias": ("F32", (64,))}
    assert proven(ONE, llama_tensors(1) | bias).weight_bytes == plain.weight_bytes + total(bias)


def test_a_table_flattened_to_one_column_has_no_row_that_is_known() -> None:
    tensors = llama_tensors(1)
    tensors["model.embed_tokens.weight"] = ("U8", (256 * 64 // 2, 1))
    assert "8192 rows for 256 tokens" in doubts(count(ONE, tensors))


def test_a_recurrent_mixer_with_a_tensor_of_an_unknown_kind_is_unproven() -> None:
    at = "model.layers.0.conv"
    tensors: Shapes = {
        f"{at}.conv.weight": ("BF16", (64, 1, 3)),
        f"{at}.in_proj.weight": ("BF16", (192, 64)),
        f"{at}.out_proj.weight": ("BF16", (64, 64)),
    } | ends()
    config = {**ONE, "layer_types": ["conv"]}
    proven(config, tensors)
    second: Shapes = {f"{at}.second_state.weight": ("BF16", (64, 64))}
    counts = count(config, tensors | second)
    assert "shortconv with tensors of an unknown kind (second_state)" in doubts(counts)


def test_attention_in_attention_and_a_norm_for_each_head_are_plain_attention() -> None:
    tensors = {k.replace("self_attn", "attn.attention"): v for k, v in llama_tensors(1).items()}
    assert elements(proven(ONE, tensors)) == [64]
    norms = {
        f"model.layers.0.self_attn.{part}_layernorm.norms.{head}.weight": ("BF16", (16,))
        for part in "qk"
        for head in range(2)
    }
    assert elements(proven(ONE, llama_tensors(1) | norms)) == [64]


def test_local_layers_of_a_list_of_attention_layers_have_its_window() -> None:
    config = {**LLAMA, "num_hidden_layers": 2, "attention_layers": ["global", "local"]}
    counts = proven({**config, "window_size": 8}, llama_tensors(2))
    assert [layer.window for layer in counts.kv_layers] == [None, 8]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"attention_window_size": 8}, "attention_window_size"),
        ({"attn_config": {"sliding_window_size": 8}}, "sliding_window_size"),
        ({"swa_size": 8}, "swa_size"),
        ({"interleaved_sliding_window": [None, 8]}, "interleaved_sliding_window"),
        ({"layer_group_size": 8}, "layer_group_size"),
        ({"mixer_types": ["sparse"]}, "mixer_types"),
        ({"swa_layers": [1]}, "swa_layers"),
        ({"global_attn_idx": [0]}, "global_attn_idx"),
        ({"dense_attention_every_n_layers": 2}, "dense_attention_every_n_layers"),
        ({"block_configs": [{"attention": {"window_length": 8}}]}, "window_length"),
        ({"per_layer_config": {"0": {"sliding_window": 8}}}, "sliding_window of its own"),
    ],
)
def test_a_window_under_a_name_that_no_rule_knows_is_unproven(
    config: dict[str, Any], why: str
) -> None:
    counts = count({**ONE, **config}, llama_tensors(1))
    assert counts.kv is None and why in doubts(counts)


def test_windows_that_are_off_and_lists_of_other_things_leave_attention_plain() -> None:
    config = {
        "attn_config": {"sliding_window_size": -1},
        "block_configs": [{"attention": {}}],
        "mlp_layer_types": ["dense"],
        "no_rope_layers": [1],
        "swa_layers": [],
    }
    assert elements(proven({**ONE, **config}, llama_tensors(1))) == [64]


def test_ministral_3_has_its_window_in_every_layer() -> None:
    config = {**ONE, "model_type": "ministral3", "sliding_window": 8}
    assert [x.window for x in proven(config, llama_tensors(1)).kv_layers] == [8]


def test_widths_that_differ_by_layer_are_those_of_the_layer() -> None:
    tensors = llama_tensors(2)
    for leaf in ("k_proj", "v_proj"):
        tensors[f"model.layers.1.self_attn.{leaf}.weight"] = ("BF16", (64, 64))
    apart = {"1": {"head_dim": 64, "num_key_value_heads": 1}}
    counts = proven({**LLAMA, "num_hidden_layers": 2, "per_layer_config": apart}, tensors)
    assert elements(counts) == [64, 128]


def test_the_list_of_layers_says_how_many_there_are() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}
    counts = proven({**config, "layers_block_type": ["full_attention"]}, llama_tensors(2))
    assert len(counts.per_layer) == 1 and counts.not_read["mtp"] > 0


def test_experts_stacked_row_by_row_in_one_matrix_are_read_by_their_share() -> None:
    stacked = {"model.layers.0.ffn.experts.mlp.w1": ("BF16", (4 * 32, 64))}
    router = {"model.layers.0.ffn.router.layer.weight": ("BF16", (4, 64))}
    section = {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 1, "ffn_hidden_size": 32}}
    counts = proven({**ONE, **section}, llama_tensors(1) | stacked | router)
    assert counts.groups["routed_experts"] == 32 * 64 * 2
    assert counts.groups["router"] == 4 * 64 * 2


def test_projections_between_the_embedding_and_the_layers_are_read() -> None:
    extra = {f"model.decoder.project_{way}.weight": ("BF16", (64, 64)) for way in ("in", "out")}
    assert proven(ONE, llama_tensors(1) | extra).groups["other"] == total(extra)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"total_ut_steps": 4}, "more than once"),
        ({"mean_recurrence": 32}, "more than once"),
        ({"loop_num": 2}, "more than once"),
        ({"mask_token_id": 126336}, "masked tokens are filled in"),
    ],
)
def test_a_step_that_is_not_one_pass_for_one_token_is_unproven(
    config: dict[str, Any], why: str
) -> None:
    assert why in doubts(count({**ONE, **config}, llama_tensors(1)))


def test_layers_that_run_once_are_no_loop() -> None:
    proven({**ONE, "total_ut_steps": 1, "mask_token_id": None}, llama_tensors(1))


def test_a_second_stack_of_layers_is_kept_out_of_the_ceiling() -> None:
    second = {k.replace("model", "decoder"): v for k, v in dense_layer("model.layers.0").items()}
    plain = proven({**LLAMA, "num_hidden_layers": 2}, llama_tensors(2))
    counts = count({**LLAMA, "num_hidden_layers": 2}, llama_tensors(2) | second)
    assert "9 tensors of unknown use" in doubts(counts)
    assert counts.proven_bytes == plain.step_bytes


def test_indexer_keys_of_another_width_than_declared_are_unproven() -> None:
    at = "model.layers.0.self_attn"
    tensors: Shapes = {
        f"{at}.q_proj.weight": ("BF16", (96, 64)),
        f"{at}.kv_a_proj_with_mqa.weight": ("BF16", (32, 64)),
        f"{at}.kv_b_proj.weight": ("BF16", (128, 24)),
        f"{at}.o_proj.weight": ("BF16", (64, 64)),
        f"{at}.indexer.wk.weight": ("BF16", (16, 64)),
    } | ends()
    config = {**ONE, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "index_topk": 4}
    assert elements(proven({**config, "index_head_dim": 16}, tensors)) == [32]
    assert "indexer keys of 32" in doubts(count({**config, "index_head_dim": 32}, tensors))
    pooled = {**config, "index_head_dim": 16, "index_kpool": 4}
    assert "index_kpool" in doubts(count(pooled, tensors))
    compressor: Shapes = {f"{at}.indexer.compressor.wkv.weight": ("BF16", (16, 64))}
    strange = count({**config, "index_head_dim": 16}, tensors | compressor)
    assert "indexer.compressor.wkv" in doubts(strange)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "smollm3"])
def test_a_window_that_is_on_in_layers_that_are_not_said_is_unproven(family: str) -> None:
    window = {"sliding_window": 8, "max_window_layers": 0, "model_type": family}
    counts = count({**ONE, **window, "use_sliding_window": True}, llama_tensors(1))
    assert "KV cache of layer 0" in doubts(counts)
    off = proven({**ONE, **window, "use_sliding_window": False}, llama_tensors(1))
    assert [layer.window for layer in off.kv_layers] == [None]


def test_experts_that_no_layer_of_the_list_uses_are_a_class_default() -> None:
    config = {**ONE, "n_routed_experts": 8, "layers_block_type": ["full_attention"]}
    proven(config, llama_tensors(1))
    with_moe = {**config, "layers_block_type": ["moe"]}
    assert "no tensor is one" in doubts(count(with_moe, llama_tensors(1)))


def test_a_model_of_which_whole_layers_are_absent_is_unproven() -> None:
    counts = count({**LLAMA, "num_hidden_layers": 3}, llama_tensors(2))
    assert "3 layers, the files hold nothing of layer 2" in doubts(counts)
