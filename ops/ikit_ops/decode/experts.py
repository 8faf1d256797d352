"""Mixture of experts: which share of a layer's routed weights one token reads.

A router picks k of E experts in each layer, so a token reads k/E of the routed bytes:
weights, every scale, every bias.  That is exact at batch 1 when the experts of a layer
are alike, and an expectation when they are not.  B sequences that route independently
touch ``E * (1 - (1 - k/E)^B)`` distinct experts of a layer in expectation, and each is
read once per step.  Router, score-correction bias, shared experts and dense layers are
always read in full.

E stands in the headers (numbered experts, or a leading dimension of E when they are
fused: gpt-oss, Llama-4, Granite, Gemma-4, Qwen3.5, MLX ``switch_mlp``); k only in the
configuration.  Where they contradict each other, or the configuration describes a router
that is not plain top-k (zero experts, hash layers), the term is UNPROVEN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ikit_mcp.registry import excerpt
from ikit_ops.decode.model_config import EXPERT_COUNT_KEYS, TOP_K_KEYS, ModelConfig, whole
from ikit_ops.decode.weights import Slot

_NOT_PLAIN_TOP_K = (
    "zero_expert_num",
    "zero_expert_type",
    "num_hash_layers",
    "moe_num_zero_experts",
    "zero_experts_num",
    "mix_n_zero_experts",
)


@dataclass
class LayerExperts:
    """The routed experts of one layer.

    Attributes:
        experts: how many are stored; None when the headers do not show it.
        top_k: how many a token reads; None when the configuration does not say.
        stored: bytes of their tensors.
        equal: whether all are of one size.
        whole: names of slots that have no expert dimension, and so are read in full.
    """

    experts: int | None = None
    top_k: int | None = None
    stored: int = 0
    equal: bool = True
    doubt: str | None = None
    whole: set[str] = field(default_factory=set)

    def share(self, batch: int) -> Fraction:
        """Expected share of the routed bytes that one step of ``batch`` sequences reads."""
        if not self.experts or self.top_k is None:
            return Fraction(0)
        one = Fraction(min(self.top_k, self.experts), self.experts)
        return one if batch == 1 else expected_share(one, batch)


def declares_experts(config: ModelConfig) -> bool:
    """Whether the configuration says that there are experts to choose from."""
    for key, routed in (("layers_block_type", "moe"), ("mlp_layer_types", "sparse")):
        kinds = config.listed(key)
        if kinds and all(isinstance(kind, str) and kind != routed for kind in kinds):
            return False  # a class default that no layer uses
    return any(config.get(key) not in (None, 0, 1, []) for key in EXPERT_COUNT_KEYS)


def by_shape(slots: Iterable[Slot], config: ModelConfig) -> None:
    """Recognise experts that only their shape gives away (Step-3.5's ``moe.up_proj``).

    A feed-forward weight of three dimensions is one matrix for each of its first: those
    of E experts are routed, anything else is unknown.  Its scales follow it.
    """
    modules: dict[tuple[str, int | None, str], list[Slot]] = {}
    for slot in slots:
        if slot.place.role == "mlp":
            place = slot.place
            modules.setdefault((place.stack, place.layer, place.module), []).append(slot)
    for members in modules.values():
        deep = [slot for slot in members if len(slot.shape) >= 3]
        if not deep:
            continue
        declared = _per_layer(config, EXPERT_COUNT_KEYS, deep[0].place.layer)
        routed = declared is not None and declared > 1 and deep[0].shape[0] == declared
        for slot in members:
            slot.place = slot.place._replace(role="routed_experts" if routed else "unknown")


def expected_share(one: Fraction, batch: int) -> Fraction:
    """``1 - (1 - k/E)^B``: the expected share of distinct experts of B independent tokens."""
    return Fraction(-math.expm1(batch * math.log1p(-float(one)))) if one < 1 else Fraction(1)


def layer_experts(
    slots: Iterable[Slot], config: ModelConfig
) -> dict[tuple[str, int | None], LayerExperts]:
    """The routed experts by (stack, layer), from the slots whose role is routed_experts."""
    by_layer: dict[tuple[str, int | None], list[Slot]] = {}
    for slot in slots:
        by_layer.setdefault((slot.place.stack, slot.place.layer), []).append(slot)
    strange = next((key for key in _NOT_PLAIN_TOP_K if config.get(key)), None)
    return {
        key: _one_layer(members, config, key[1], strange)
        for key, members in sorted(by_layer.items(), key=lambda item: (item[0][0], item[0][1] or 0))
    }


def _one_layer(
    members: list[Slot], config: ModelConfig, layer: int | None, strange: str | None
) -> LayerExperts:
    """Count the experts of one layer and look for what would make k/E wrong."""
    declared = _per_layer(config, EXPERT_COUNT_KEYS, layer)
    top_k = _per_layer(config, TOP_K_KEYS, layer)
    result = LayerExperts(top_k=top_k, stored=sum(slot.stored for slot in members))
    numbered = [slot for slot in members if slot.experts is not None]
    if numbered:
        result.experts = len(set().union(*(slot.experts or set() for slot in numbered)))
        result.equal = all(s.count == result.experts and len(s.sizes) == 1 for s in numbered)
    else:
        _fused(members, declared, config, result)
    if strange is not None:
        result.doubt = f"{strange} in config.json: the router is not a plain top-k"
    elif top_k is None:
        result.doubt = f"config.json does not say how many experts a token uses ({TOP_K_KEYS[0]})"
    elif declared is None:
        result.doubt = (
            f"config.json does not say how many experts there are ({EXPERT_COUNT_KEYS[0]})"
        )
    elif declared != result.experts and result.doubt is None:
        result.doubt = f"config.json says {declared} experts, the headers hold {result.experts}"
    elif result.experts is not None and top_k > result.experts:
        result.doubt = f"config.json says {top_k} of {result.experts} experts a token"
    return result


def _fused(
    members: list[Slot], declared: int | None, config: ModelConfig, result: LayerExperts
) -> None:
    """Experts stacked in one tensor: the leading dimension must be E, or E times their width.

    DBRX stacks the rows of all experts in one matrix of ``E * ffn_hidden_size`` rows.
    """
    result.experts = declared
    width = config.integer("ffn_hidden_size", "moe_intermediate_size")
    for slot in members:
        if slot.shape and declared is not None and slot.shape[0] == declared:
            continue
        rows = declared * width if declared is not None and width else None
        if len(slot.shape) == 2 and slot.shape[0] == rows:
            continue
        if len(slot.shape) <= 1 and (not slot.shape or slot.shape[0] == 1):
            result.whole.add(slot.name)  # one scale for all experts
            result.stored -= slot.stored
        elif result.doubt is None:
            result.doubt = (
                f"{excerpt(slot.name, 120)} has shape {list(slot.shape)}: its first dimension is "
                f"not the {declared} experts that config.json says"
            )


def _per_layer(config: ModelConfig, keys: tuple[str, ...], layer: int | None) -> int | None:
    """A number that may be given once, or as a list by layer (Hunyuan)."""
    for key in keys:
        value: Any = config.get(key)
        if isinstance(value, list):
            if layer is not None and layer < len(value) and len(value) == config.layers:
                return whole(value[layer], key)
            if value and all(item == value[0] for item in value) and config.layers is not None:
                return whole(value[0], key) if len(value) >= config.layers else None
            return None
        if value is not None:
            return whole(value, key)
    return None
