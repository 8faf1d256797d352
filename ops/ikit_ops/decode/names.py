"""What a tensor is for, by its name.

Decoding one token reads some of a checkpoint's tensors in full, one row of others, k of
E experts, and nothing of the rest.  Names tell them apart, and they are regular: a stack
(``model.layers``, ``language_model.model.layers``, ``backbone.layers``), a layer's
number, the module's path, the parameter (``weight``, or one of a quantiser's: scales,
zero points, packed words).  A quantiser's parameters follow the weight that they belong
to.

What no rule knows gets the role ``unknown``: it is counted as read under ``other`` and
named as UNPROVEN, never silently taken for something else.

Sources: the state dicts of transformers 5, vLLM's loaders (``deepseek_v2.py`` skips the
layers behind ``num_hidden_layers``), and facts of published checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

from ikit_ops.decode.vocabulary import words

STACK_MARKERS = frozenset({"layers", "h", "blocks", "block", "blk"})
TEXT_PREFIXES = words(
    "model language_model text_model backbone transformer decoder thinker llm lm gpt_neox "
    "language base_model"
)
TOWER_PARTS = words(
    "visual vision vision_tower vision_model vision_encoder vision_embed_tokens vit audio "
    "audio_tower audio_model audio_encoder speech_encoder multi_modal_projector mm_projector "
    "mm_input_projection multimodal_projector embed_vision embed_audio img_processor "
    "image_newline patch_merger pre_mm_projector_norm vision_language_adapter vision_projection "
    "vision_projector visual_projection audio_projection vpm apm resampler connector aligner "
    "mlp1 projector sam_model view_seperator talker token2wav code2wav speech_projector "
    "mm_audio_projector embed_vision_tokens vision_resampler image_projection vq_model "
    "gen_vision_model patch_merge_mlp merger mlp_AR qformer query_tokens language_projection "
    "embed_tokens_extend vqmodel generation_aligner generation_embeddings generation_head"
)
# A module outside the decoder's layers that is named for a modality belongs to its tower.
MODALITIES = ("vision", "visual", "image", "audio", "speech", "video", "vit_")
MTP_PARTS = frozenset({"nextn", "medusa_head", "eagle"})

EMBEDDING = words(
    "embed_tokens embeddings wte word_embeddings tok_embeddings embed_in embedding token_embd "
    "shared_embedding wpe embed_positions position_embeddings"
)
PER_LAYER_EMBEDDING = frozenset({"embed_tokens_per_layer", "per_layer_token_embd"})
HEAD = frozenset({"lm_head", "embed_out", "output", "output_layer", "score_head"})
SHARED = words(
    "shared_experts shared_expert shared_expert_gate shared_mlp share_expert shared_experts_gate"
)
EXPERTS = frozenset({"experts", "switch_mlp", "local_experts"})
GRANITE_EXPERTS = frozenset({"input_linear", "output_linear"})
ROUTER = words(
    "router gate e_score_correction_bias expert_bias moe_statics wg correction_bias "
    "router_bias gate_inp exp_probs_b"
)
# The router's even where they stand beside the experts: all E entries are read (Laguna).
ROUTER_BIASES = words("e_score_correction_bias expert_bias correction_bias exp_probs_b")
MIXER = words(
    "self_attn self_attention attention attn linear_attn mamba mixer conv short_conv "
    "shortconv temporal_block delta_net lightning_attn cross_attn time_mix ssm"
)
CROSS_ATTENTION = words("cross_attn encoder_attn crossattention")
MLP = words(
    "mlp feed_forward feedforward ffn block_sparse_moe moe fc1 fc2 c_fc gate_proj up_proj "
    "down_proj gate_up_proj dense_h_to_4h dense_4h_to_h w1 w2 w3 fc1_latent_proj "
    "fc2_latent_proj pre_experts_proj"
)
OTHER = words(
    "altup laurel altup_projections altup_unembed_projections per_layer_input_gate "
    "per_layer_projection per_layer_model_projection layer_scalar per_layer_inp_gate "
    "inp_gate layer_output_scale skip_scale residual_scale learned_scale "
    "layer_scale linear project_in project_out"
)
QUANTISER_PARAMETERS = words(
    "weight_scale weight_scale_inv weight_scale_2 scale_inv input_scale weight_packed weight_shape "
    "weight_zero_point weight_g_idx weight_global_scale input_global_scale qweight qzeros "
    "scales g_idx biases absmax quant_map nested_absmax nested_quant_map quant_state k_scale "
    "v_scale q_scale output_scale input_zero_point qscale_weight qscale_act bitsandbytes__nf4 "
    "bitsandbytes__fp4 SCB weight_format in_scale"
)
PARAMETERS = QUANTISER_PARAMETERS | {"weight", "bias"}
NEVER_READ_BY_KERNELS = words(
    "weight_shape quant_state inv_freq rotary_emb rope_freqs weight_format num_batches_tracked"
)
# Buffers that a class saved beside its weights: GPT-2's causal mask, the decays by position
# of MiniMax's prefill.  Engines build their own (vLLM's gpt2.py skips them).
CONSTANTS = words("masked_bias causal_mask query_decay key_decay diagonal_decay")
ROUTED_SUFFIXES = ("_blocks", "_scales", "_bias", "_weight_scale", "_input_scale", "_scale_inv")


class Place(NamedTuple):
    """Where a tensor sits and what it is for.

    Attributes:
        role: one of the groups of the record, or ``embedding``, ``per_layer_embedding``,
            ``towers``, ``mtp``, ``dead_duplicates``, ``unknown``.
        layer: the decoder layer; None outside the stack.
        module: the path of its module within the layer (or in the whole), dotted.
        parameter: ``weight``, ``bias`` or a quantiser's; "" for a bare parameter.
        stack: the path of the stack that the layer belongs to.
    """

    role: str
    layer: int | None
    module: str
    parameter: str
    stack: str


def place_of(name: str, layers: int | None) -> Place:
    """The place of a tensor, by its name.

    Args:
        name: the tensor's name.
        layers: decoder layers of the main model; a layer behind them is a
            multi-token-prediction layer whether or not the configuration says so.
    """
    parts = name.split(".")
    stack, layer, rest = _split(parts)
    module, parameter = _module(rest)
    prefix = set(stack)
    # one look at everything before the parameters: `model.visual.merger`, `mtp.fc`
    outside = prefix if layer is not None else set(parts)
    if any(part.startswith("mtp") or part in MTP_PARTS for part in parts):
        role = "mtp"
    elif outside & TOWER_PARTS or any(name in part for part in outside for name in MODALITIES):
        role = "towers"
    elif layer is not None:
        if not prefix <= TEXT_PREFIXES:
            role = "unknown"
        elif layers is not None and layer >= layers:
            role = "mtp"
        else:
            role = layer_role(rest)
    else:
        role = _top_role(rest)
    return Place(role, layer, module, parameter, ".".join(stack))


def _split(parts: list[str]) -> tuple[list[str], int | None, list[str]]:
    """(stack, layer, rest) of a dotted name; layer None when it is not in a stack."""
    for at in range(1, len(parts)):
        if parts[at - 1] in STACK_MARKERS and parts[at].isascii() and parts[at].isdigit():
            if len(parts[at]) > 9:  # not a layer's number, and int() of it is unbounded
                break
            return parts[: at - 1], int(parts[at]), parts[at + 1 :]
    return [], None, parts


def _module(rest: list[str]) -> tuple[str, str]:
    """The module's path, and the parameter's name (bitsandbytes nests its own under weight)."""
    end = len(rest)
    while end > 1 and rest[end - 1] in PARAMETERS:
        end -= 1
    return ".".join(rest[:end]), ".".join(rest[end:])


def layer_role(rest: list[str]) -> str:
    """The role of a tensor inside a decoder layer, by its path there."""
    parts = set(rest)
    if parts & CROSS_ATTENTION or any(_is_conditional(part) for part in rest):
        return "unknown"  # read only when an image or an encoder's output is there
    if parts & CONSTANTS:
        return "dead_duplicates"
    if parts & OTHER and not parts & MIXER:
        return "other"
    if parts & SHARED:
        return "shared_experts"
    if parts & ROUTER_BIASES:
        return "router"
    if parts & EXPERTS or ("block_sparse_moe" in parts and parts & GRANITE_EXPERTS):
        return "routed_experts"
    if parts & ROUTER and not (parts & MIXER - {"mixer"}):
        return "router"
    if parts & NEVER_READ_BY_KERNELS:
        return "aux"
    if any("norm" in part or part.startswith("ln_") or part in ("ln1", "ln2") for part in rest):
        return "norms"
    if parts & MIXER and not ("mixer" in parts and parts & MLP):
        return "attention"
    if parts & MLP:
        return "mlp"
    return "unknown"


def _is_conditional(part: str) -> bool:
    """Whether a part of a layer's name says that it serves one modality, or is an adapter's."""
    return part.startswith("lora_") or any(name in part for name in MODALITIES)


def _top_role(rest: list[str]) -> str:
    """The role of a tensor outside every stack: by its first part that is not the model's own.

    What lies deeper is not looked at: a norm of a module that no rule knows is unknown too.
    """
    first = next((part for part in rest if part not in TEXT_PREFIXES), "")
    parts = {first} | (set(rest) & NEVER_READ_BY_KERNELS)
    if first in EMBEDDING:  # a table's own norm (ModernBERT's embeddings.norm)
        parts |= {part for part in rest if "norm" in part}
    if parts & NEVER_READ_BY_KERNELS:
        return "aux"
    if parts & PER_LAYER_EMBEDDING:
        return "per_layer_embedding"
    if any("norm" in part or part in ("ln_f", "ln_out") for part in parts):
        return "norms"
    if parts & EMBEDDING:
        return "embedding"
    if parts & HEAD:
        return "lm_head"
    if parts & OTHER:
        return "other"
    return "unknown"
