"""Recurrent state: what a layer without a KV cache carries from token to token.

Its size does not grow with the context, but all of it is read *and* written for every
token, so a token moves twice one copy.  Elements of one layer and sequence, with k the
convolution's kernel (engines keep k - 1 columns; transformers keeps k):

- Mamba 1: conv (k-1) * d_inner; state d_inner * d_state.
- Mamba 2: conv (k-1) * (heads*head_dim + 2*groups*d_state); state heads*head_dim*d_state.
- Gated DeltaNet: conv (k-1) * (2*Hk*dk + Hv*dv); state Hv*dv*dk.
- Kimi Delta Attention: conv (k-1) * 3*H*d; state H*d*d.
- Lightning attention: state H*d*d.     Short convolution: conv (k-1) * width.

The convolution's width is read from its weights (which no quantiser packs), the rest
from the configuration, and the two must agree.

The convolution's part is kept in the model's dtype.  The recurrent part is too, by
default, except: Qwen3.5 follows ``mamba_ssm_dtype``, Nemotron-H ``mamba_ssm_cache_dtype``
(float32 when absent), Kimi Delta Attention is float32 (vLLM 0.33 models/config.py and
MambaStateDtypeCalculator).  SGLang's default is float32 for all, llama.cpp's float32 for
both parts: ``state_dtype`` says which engine is meant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ikit_mcp.registry import excerpt
from ikit_ops.decode.kv import spans
from ikit_ops.decode.mixers import Mixer
from ikit_ops.decode.model_config import ModelConfig, whole
from ikit_ops.decode.weights import Slot

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
RECURRENT_FAMILIES = frozenset({"mamba1", "mamba2", "gdn", "kda", "lightning", "shortconv"})
_CONVOLUTIONS = ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d", "conv")


@dataclass(frozen=True)
class StateLayer:
    """The state of one layer, in elements of one sequence; ``heads`` may be split by TP."""

    layer: int
    family: str
    conv: int
    recurrent: int
    heads: int | None = None


@dataclass
class StatePlan:
    """The recurrent layers of a model, their dtypes, and what could not be established."""

    layers: list[StateLayer] = field(default_factory=list)
    conv_bytes: int = 2
    recurrent_bytes: int = 2
    source: str = ""
    doubts: list[str] = field(default_factory=list)

    def one_copy(self, layer: StateLayer) -> int:
        """Bytes of one copy of a layer's state; a token reads one and writes one."""
        return layer.conv * self.conv_bytes + layer.recurrent * self.recurrent_bytes


def plan_state(
    config: ModelConfig,
    layers: int,
    mixers: dict[int, list[Mixer]],
    state_dtype: str | None,
    gguf: bool = False,
) -> StatePlan:
    """The recurrent state of every decoder layer.

    Args:
        config: the model's configuration.
        layers: decoder layers of the main model.
        mixers: what each layer is, by its tensors.
        state_dtype: dtype of the recurrent part, None for the default of the family.
        gguf: whether llama.cpp's float32 for both parts applies.
    """
    plan = StatePlan()
    doubts: dict[str, list[int]] = {}
    families: set[str] = set()
    for index in range(layers):
        for mixer in mixers.get(index, []):
            if mixer.family == "unknown":
                names = ", ".join(excerpt(name, 60) for name in sorted(mixer.modules)[:3])
                doubts.setdefault(f"a token mixer of an unknown kind ({names})", []).append(index)
            elif mixer.family in RECURRENT_FAMILIES:
                families.add(mixer.family)
                found = _SIZES[mixer.family](config, mixer)
                if mixer.strange:
                    names = ", ".join(excerpt(name, 60) for name in mixer.strange[:3])
                    why = f"{mixer.family} with tensors of an unknown kind ({names})"
                    doubts.setdefault(why, []).append(index)
                if isinstance(found, str):
                    doubts.setdefault(found, []).append(index)
                else:
                    plan.layers.append(StateLayer(index, mixer.family, *found))
    plan.doubts = [f"state of {spans(at)}: {why}" for why, at in doubts.items()]
    if families:
        _dtypes(plan, config, families, state_dtype, gguf)
    return plan


def _dtypes(
    plan: StatePlan, config: ModelConfig, families: set[str], asked: str | None, gguf: bool
) -> None:
    """Set the bytes of an element, and say where they come from."""
    model = config.dtype or "bf16"
    plan.conv_bytes = 4 if gguf else DTYPE_BYTES[model]
    declared = config.get("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if asked is not None:
        dtype, plan.source = asked, "as asked (state_dtype)"
    elif gguf:
        dtype, plan.source = "fp32", "llama.cpp keeps it in float32"
    elif isinstance(declared, str) and declared in names:
        dtype, plan.source = names[declared], "config.json's mamba_ssm dtype"
    elif "kda" in families:
        dtype, plan.source = "fp32", "vLLM keeps Kimi Delta Attention in float32"
    elif config.family.startswith("nemotron_h"):
        dtype, plan.source = "fp32", "vLLM's default for Nemotron-H"
    else:
        dtype, plan.source = model, f"the model's dtype ({model}), vLLM's auto; SGLang uses float32"
    plan.recurrent_bytes = DTYPE_BYTES[dtype]


Sizes = tuple[int, int, int | None]


def _conv_width(mixer: Mixer) -> tuple[int, int] | None:
    """(channels, elements a sequence keeps) of the mixer's convolutions, from their weights."""
    channels = elements = 0
    for leaf in _CONVOLUTIONS:
        slot: Slot | None = mixer.modules.get(leaf, {}).get("weight")
        if slot is None:
            continue
        if len(slot.shape) < 2 or not slot.shape[0]:
            return None
        kernel = math.prod(slot.shape) // slot.shape[0]
        channels += slot.shape[0]
        elements += slot.shape[0] * max(kernel - 1, 0)
    return (channels, elements) if channels else None


def _mamba1(config: ModelConfig, mixer: Mixer) -> Sizes | str:
    conv, decay = _conv_width(mixer), mixer.slot("A_log")
    if conv is None or decay is None or len(decay.shape) != 2:
        return "Mamba without a conv1d and a two-dimensional A_log"
    inner, state = decay.shape
    declared = config.integer("mamba_d_state", "state_size", "ssm_state_size", "d_state")
    if conv[0] != inner or (declared is not None and declared != state):
        return f"Mamba's A_log is {inner} x {state}, its conv1d {conv[0]} wide"
    return conv[1], inner * state, inner


def _mamba2(config: ModelConfig, mixer: Mixer) -> Sizes | str:
    conv, decay = _conv_width(mixer), mixer.slot("A_log")
    if conv is None or decay is None:
        return "Mamba 2 without a conv1d and an A_log"
    heads = math.prod(decay.shape)
    state = config.integer("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")
    groups = config.integer("mamba_n_groups", "n_groups", "mamba_ngroups", "mamba_num_groups")
    if not state or not groups:
        return "Mamba 2, but config.json does not say its state size and groups"
    inner = conv[0] - 2 * groups * state
    width = config.get("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if config.family == "mamba2":
        width = config.get("head_dim")
    declared = heads * whole(width, "mamba_d_head") if type(width) is int else inner
    if not heads or inner <= 0 or inner != declared or inner % heads:
        return (
            f"Mamba 2's conv1d is {conv[0]} wide, config.json says {declared + 2 * groups * state}"
        )
    return conv[1], inner * state, heads


def _gated_delta(config: ModelConfig, mixer: Mixer) -> Sizes | str:
    conv = _conv_width(mixer)
    keys, key = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    values = config.integer("linear_num_value_heads")
    value = config.integer("linear_value_head_dim")
    if conv is None or not keys or not key or not values or not value:
        return "Gated DeltaNet, but config.json does not say its linear_* heads and widths"
    declared = 2 * keys * key + values * value
    if conv[0] != declared:
        return f"Gated DeltaNet's conv1d is {conv[0]} wide, config.json says {declared}"
    return conv[1], values * value * key, values


def _kimi_delta(config: ModelConfig, mixer: Mixer) -> Sizes | str:
    section = config.get("linear_attn_config")
    section = section if isinstance(section, dict) else {}
    heads, width = section.get("num_heads"), section.get("head_dim")
    heads = config.integer("linear_num_heads", "linear_num_key_heads") if heads is None else heads
    width = config.integer("linear_head_dim", "linear_key_head_dim") if width is None else width
    conv = _conv_width(mixer)
    if conv is None or not heads or not width:
        return "Kimi Delta Attention, but config.json has no linear_attn_config"
    heads, width = whole(heads, "linear_attn_config"), whole(width, "linear_attn_config")
    if conv[0] != 3 * heads * width:
        return f"the convolutions are {conv[0]} wide, config.json says {3 * heads * width}"
    return conv[1], heads * width * width, heads


def _lightning(config: ModelConfig, mixer: Mixer) -> Sizes | str:
    heads, width = config.heads, config.head_dim
    if not heads or not width:
        return "lightning attention, but config.json does not say its heads"
    slot = mixer.slot("out_proj") or mixer.slot("o_proj")
    if slot is not None and len(slot.shape) == 2 and heads * width not in slot.shape:
        return f"lightning attention of {heads} x {width}, but its projection is {list(slot.shape)}"
    return 0, heads * width * width, heads


def _short_convolution(config: ModelConfig, mixer: Mixer) -> Sizes | str:
    conv = _conv_width(mixer)
    return "a short convolution without weights" if conv is None else (conv[1], 0, None)


_SIZES = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _gated_delta,
    "kda": _kimi_delta,
    "lightning": _lightning,
    "shortconv": _short_convolution,
}
