"""Multi-token prediction: what a step reads more when the prediction layers run too.

A prediction layer is a decoder layer behind the model (DeepSeek-V3's layer 61) or under
``mtp.`` (Qwen3-Next), with a projection that joins the hidden state and the next token's
embedding.  One draft pass reads the layer (of its experts, the routed share), its cache,
one more row of the embedding, and the head again: its own copy where it has one
(``shared_head.head``), else the model's.  A copy of the embedding table is not read; the
model's table is shared.

How many tokens a step then yields depends on how many drafts are accepted, so these are
bytes per step, and no ceiling in tokens per second follows from them.

Sources: vLLM deepseek_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

from ikit_ops.decode import embedding
from ikit_ops.decode.experts import LayerExperts, layer_experts
from ikit_ops.decode.kv import KvPlan, plan_kv
from ikit_ops.decode.mixers import mixers_by_layer
from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.names import EMBEDDING, HEAD, layer_role
from ikit_ops.decode.pattern import LayerKind
from ikit_ops.decode.tally import Counts, Options, add_read
from ikit_ops.decode.weights import Slot

_EMBEDDING, _HEAD = "embedding", "head"


def count(
    slots: list[Slot], config: ModelConfig, counts: Counts, reads: dict[int, int], options: Options
) -> None:
    """Move what a draft pass reads from ``not_read`` into the groups.

    ``embedding.count`` must have run: the model's row and head are read once more.
    """
    members = [slot for slot in slots if slot.place.role == "mtp"]
    if not members:
        counts.limitations.append("include_mtp: the checkpoint holds no prediction layers")
        return
    doubtful: dict[str, int] = {}
    roles = {id(slot): _role(slot) for slot in members}
    experts = layer_experts((s for s in members if roles[id(s)] == "routed_experts"), config)
    for slot in members:
        role, read = roles[id(slot)], slot.stored
        if role == _EMBEDDING:
            continue  # the model's own table is gathered from
        layer = experts.get((slot.place.stack, slot.place.layer), LayerExperts())
        if slot.name in layer.whole:
            role = "aux"  # one scale for all experts
        if role == "routed_experts":
            read = round(slot.stored * layer.share(options.batch))
            kept = counts.not_read.get("unrouted_experts", 0)
            counts.not_read["unrouted_experts"] = kept + slot.stored - read
        counts.not_read["mtp"] -= slot.stored
        group = "lm_head" if role == _HEAD else role
        device = add_read(counts, reads, slot, group, read, options)
        if role == "routed_experts" and layer.doubt:
            doubtful[layer.doubt] = doubtful.get(layer.doubt, 0) + device
    for why, size in doubtful.items():
        counts.doubt("mtp", why, size)
    passes = len(_layers(members)) or 1
    heads = {s.place.module for s in members if roles[id(s)] == _HEAD}
    _again(slots, counts, reads, options, passes, max(passes - len(heads), 0))


def _again(
    slots: list[Slot],
    counts: Counts,
    reads: dict[int, int],
    options: Options,
    rows: int,
    heads: int,
) -> None:
    """Read the model's embedding row and its head that many times more."""
    table = [slot for slot in slots if slot.place.role == "embedding"]
    for slot in table:
        row = embedding.rows(slot, options.batch) * rows
        add_read(counts, reads, slot, "embedding_row", row, options)
        counts.read_twice += row
    for slot in embedding.head_of(slots, counts) if heads else ():
        add_read(counts, reads, slot, "lm_head", slot.stored * heads, options)
        counts.read_twice += slot.stored * heads


def plan(slots: list[Slot], config: ModelConfig, options: Options) -> KvPlan:
    """The cache that the prediction layers read, as layers after the model's."""
    members = [slot for slot in slots if slot.place.role == "mtp"]
    result = KvPlan()
    for stack, layer in _layers(members):
        mixers = mixers_by_layer((s for s in members if s.place.layer == layer), stack)
        found = {0: mixers.get(layer, [])}
        one = plan_kv(config, [LayerKind("full", stated=False)], found, options.mla_cache, shared=0)
        result.layers += one.layers
        result.doubts += one.doubts
    return result


def _layers(members: list[Slot]) -> list[tuple[str, int]]:
    """The prediction layers: (stack, number)."""
    found = {(s.place.stack, s.place.layer) for s in members if s.place.layer is not None}
    return sorted((stack, layer) for stack, layer in found if layer is not None)


def _role(slot: Slot) -> str:
    """What a prediction layer's tensor is for."""
    parts = slot.place.module.split(".")
    if EMBEDDING.intersection(parts):
        return _EMBEDDING
    if parts[-1] == "head" or HEAD.intersection(parts) or parts[-1] == "shared_head_head":
        return _HEAD
    inner = [part for part in parts if not part.startswith("mtp")]
    role = layer_role([*inner, slot.place.parameter] if inner else ["fc"])
    return "other" if role == "unknown" else role
