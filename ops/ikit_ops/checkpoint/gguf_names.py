"""GGUF's names and keys in the terms of the checkpoints that they were converted from.

The converter of llama.cpp renames every tensor (``blk.3.attn_q.weight``) and every
configuration key (``llama.attention.head_count_kv``).  Translating them back lets one set
of definitions count both kinds of checkpoint.  A tensor that has no translation keeps its
name, so that it is reported as unknown under the name that the file gives it.

What llama.cpp does differently is translated too: prediction layers are part of
``block_count``, windows are given as a period or a list by layer, and some
architectures carry a window that llama.cpp does not apply.

Source: gguf-py/gguf/constants.py (gguf 0.19.0), llama.cpp's load_hparams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ikit_ops.checkpoint.safetensors_header import TensorEntry

_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)", re.DOTALL)
_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "position_embd": "model.embed_positions",
    "output": "lm_head",
    "output_norm": "model.norm",
    "rope_freqs": "model.rope_freqs",
    "rope_factors_long": "model.rope_freqs.long",
    "rope_factors_short": "model.rope_freqs.short",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections",
    "altup_unembd_proj": "model.altup_unembed_projections",
}
_TOWERS = ("v.", "a.", "mm.", "resampler.", "s.")
_ATTENTION = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "attn_qkv": "qkv_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output_norm": "o_norm",
    "attn_sub_norm": "attn_sub_norm",
    "attn_sinks": "sinks",
    "attn_gate": "gate_proj",
    "attn_rot_embd": "rotary_emb.inv_freq",
    "attn_q_a": "q_a_proj",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_b": "kv_b_proj",
    "attn_k_b": "k_b_proj",
    "attn_v_b": "v_b_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_kv_a_norm": "kv_a_layernorm",
}
_LINEAR = {"attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z"}
_STATE = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_dt_norm": "dt_layernorm",
    "ssm_a": "A_log",
    "ssm_b_norm": "b_layernorm",
    "ssm_c_norm": "c_layernorm",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
    "ssm_alpha": "a_proj",
    "ssm_beta": "b_proj",
    "ssm_ba": "in_proj_ba",
    "ssm_conv1d_q": "q_conv1d",
    "ssm_conv1d_k": "k_conv1d",
    "ssm_conv1d_v": "v_conv1d",
    "ssm_f_a": "f_a_proj",
    "ssm_f_b": "f_b_proj",
    "ssm_g_a": "g_a_proj",
    "ssm_g_b": "g_b_proj",
}
_FEED_FORWARD = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "layer_output_scale": "layer_scalar",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_WINDOW_NOT_APPLIED = frozenset({"llama", "phi3", "qwen2", "qwen3", "starcoder2", "mistral3"})
_FAMILIES = {"gpt-oss": "gpt_oss", "olmo2": "olmo3", "qwen35": "qwen3_5", "qwen3next": "qwen3_next"}


def translated(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors under the names that they had before conversion; unknown ones keep theirs."""
    state: dict[str, set[str]] = {}
    for name in tensors:
        found = _BLOCK.fullmatch(name)
        if found is not None and found[2].startswith("ssm_"):
            state.setdefault(found[1], set()).add(found[2].partition(".")[0])
    result: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        new = _one(name, state)
        result[new if new not in result and (new == name or new not in tensors) else name] = entry
    return result


def _one(name: str, state: Mapping[str, set[str]]) -> str:
    """The former name of one tensor."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        if name.startswith(_TOWERS):
            return f"vision_tower.{name}"
        stem, dot, suffix = name.rpartition(".")
        known = _TOP.get(stem)
        return f"{known}{dot}{suffix}" if known else name
    layer, rest = found[1], found[2]
    module, dot, suffix = rest.rpartition(".")
    if not dot or suffix not in ("weight", "bias", "scale", "input_scale"):
        module, dot, suffix = rest, "", ""
    part = _module(module, state.get(layer, set()))
    if part is None:
        return name
    if part.endswith(("e_score_correction_bias", ".A_log", ".D", ".sinks")):
        dot = suffix = ""
    suffix = {"scale": "weight_scale_2"}.get(suffix, suffix)
    return f"model.layers.{layer}.{part}{dot}{suffix}"


def _module(module: str, state: set[str]) -> str | None:
    """The former path of a module in a layer; ``state`` are the layer's ssm_ modules."""
    if module.startswith("nextn."):
        return f"mtp.{module[6:]}"
    if module.startswith("indexer."):
        return f"self_attn.{module}"
    if "ssm_f_a" in state:
        container = "self_attn"  # Kimi Delta Attention keeps its own q, k and v projections
    elif state & {"ssm_ba", "ssm_alpha"}:
        container = "linear_attn"
        if module in _LINEAR:
            return f"{container}.{_LINEAR[module]}"
    else:
        container = "mamba"
    if module in _STATE:
        return f"{container}.{_STATE[module]}"
    if module in _ATTENTION:
        return f"self_attn.{_ATTENTION[module]}"
    if module.startswith("altup_"):
        return f"altup.{module[6:]}"
    if module.endswith(("_norm", "_norm_1", "_norm_2")):
        return module
    return _FEED_FORWARD.get(module)


def configuration(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as the metadata tell it, in the terms of transformers.

    Keys that the file does not have stay absent.
    """
    architecture = str(metadata.get("general.architecture", ""))

    def key(name: str) -> Any:
        value = metadata.get(f"{architecture}.{name}")
        return value if isinstance(value, (int, float, str, list)) else None

    config = {new: key(old) for new, old in _KEYS.items()}
    config["model_type"] = _FAMILIES.get(architecture, architecture.replace("-", "_"))
    blocks, extra = key("block_count"), key("nextn_predict_layers")
    if type(blocks) is int:
        config["num_hidden_layers"] = blocks - extra if type(extra) is int else blocks
    _windows(config, key("attention.sliding_window_pattern"), architecture)
    _latent(config, key)
    _state(config, key)
    return {name: value for name, value in config.items() if value is not None}


_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "swa_head_dim": "attention.key_length_swa",
    "swa_v_head_dim": "attention.value_length_swa",
    "sliding_window": "attention.sliding_window",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "full_attention_interval": "full_attention_interval",
    "index_topk": "attention.indexer.top_k",
    "index_head_dim": "attention.indexer.key_length",
}


def _windows(config: dict[str, Any], pattern: Any, architecture: str) -> None:
    """Windows as llama.cpp applies them."""
    if architecture in _WINDOW_NOT_APPLIED:
        config["sliding_window"] = None
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if p else "full_attention" for p in pattern]
    elif type(pattern) is int:
        config["sliding_window_pattern"] = pattern
    if config["model_type"] == "olmo3" and not config["sliding_window"]:
        config["model_type"] = "olmo2"
    if not config["num_experts"]:
        config["num_experts"] = None


def _latent(config: dict[str, Any], key: Any) -> None:
    """Multi-head latent attention: the cached latent, and the widths of its heads."""
    rank, rope = key("attention.kv_lora_rank"), key("rope.dimension_count")
    if not rank:
        return
    config["kv_lora_rank"], config["qk_rope_head_dim"] = rank, rope
    wide = key("attention.key_length_mla") or key("attention.key_length")
    config["v_head_dim"] = key("attention.value_length_mla") or key("attention.value_length")
    if type(wide) is int and type(rope) is int:
        config["qk_nope_head_dim"] = wide - rope
    config.update(head_dim=None, num_key_value_heads=None)


def _state(config: dict[str, Any], key: Any) -> None:
    """Recurrent state: llama.cpp keeps Mamba's and Gated DeltaNet's sizes under one set of keys."""
    inner, groups = key("ssm.inner_size"), key("ssm.group_count")
    size, rank = key("ssm.state_size"), key("ssm.time_step_rank")
    config["mamba_d_state"], config["mamba_n_groups"] = size, groups
    config["conv_L_cache"] = key("shortconv.l_cache")
    if key("kda.head_dim") and type(config["num_attention_heads"]) is int:
        config["linear_head_dim"] = key("kda.head_dim")
        config["linear_num_heads"] = config["num_attention_heads"]
    if all(type(value) is int and value > 0 for value in (inner, groups, size, rank)):
        config["linear_num_key_heads"], config["linear_key_head_dim"] = groups, size
        config["linear_num_value_heads"] = rank
        config["linear_value_head_dim"] = inner // rank
