"""Bytes that one decode step reads, counted from a checkpoint's headers.

Decoding at batch 1 is bound by memory: each token streams the weights that it uses, the
KV cache that it attends to, and the recurrent state (read and written).  The sum over the
sustained bandwidth is a floor for the time of a token, and its inverse a ceiling for
tokens a second.  This module puts the terms together; each is decided where it is
explained: roles in ``names``, experts in ``experts``, cached bytes in ``pattern`` and
``kv``, state in ``state``.

What is not established is UNPROVEN: it is named, with the bytes of the count that rest on
it.  A ceiling is then computed without those bytes, so that it stays an upper bound.

More than one sequence: weights are read once per step, experts by their expected number
of distinct ones, caches and states once per sequence.  Tensor parallelism: the bytes of
one device, as ``groups`` says which weights are split.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ikit_mcp.registry import excerpt
from ikit_ops.checkpoint.model import Checkpoint
from ikit_ops.decode import embedding, mtp, settle
from ikit_ops.decode.experts import LayerExperts, by_shape, declares_experts, layer_experts
from ikit_ops.decode.formats import format_of, quantization_name, weight_bits
from ikit_ops.decode.kv import FP8_DS_MLA_BYTES, KV_BYTES, KvLayer, KvPlan, plan_kv, spans
from ikit_ops.decode.mixers import mixers_by_layer
from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.pattern import layer_kinds
from ikit_ops.decode.state import StatePlan, plan_state
from ikit_ops.decode.tally import Counts, Options, add_read
from ikit_ops.decode.weights import Slot, gather, modules_of


def count_checkpoint(checkpoint: Checkpoint, options: Options) -> Counts:
    """The bytes of one decode step, from the checkpoint's headers.

    Raises:
        OpError: the configuration holds a value that cannot be (it names the key).
    """
    config = ModelConfig(checkpoint.config)
    counts = Counts("headers", checkpoint.stored_bytes)
    counts.quant = quantization_name(config.quantization, checkpoint.quant_config)
    slots = gather(checkpoint.tensors, config.layers)
    settle.causal_masks(slots)
    settle.conditional_layers(slots)
    layers = _layers(config, slots, counts)
    stack = _main_stack(slots)
    settle.other_stacks(slots, stack)
    counts.beyond = _beyond(config, slots, stack)
    by_shape(slots, config)
    experts = layer_experts((s for s in slots if s.place.role == "routed_experts"), config)
    reads = _reads(slots, experts, options, counts)
    embedding.count(slots, config, counts, reads, options)
    if options.include_mtp:
        mtp.count(slots, config, counts, reads, options)
    _formats(slots, config, counts, reads)
    _absent(layers, stack, slots, counts)
    _doubts(checkpoint, config, slots, experts, reads, counts)
    mixers = mixers_by_layer(slots, stack)
    kv = plan_kv(config, layer_kinds(config, layers), mixers, options.mla_cache)
    gguf = checkpoint.format == "gguf"
    state = plan_state(config, layers, mixers, options.state_dtype, gguf)
    drafts = mtp.plan(slots, config, options) if options.include_mtp else KvPlan()
    count_caches(
        counts, KvPlan(kv.layers + drafts.layers, kv.doubts + drafts.doubts), state, options
    )
    counts.moe = _moe(experts, options)
    counts.per_layer = _per_layer(layers, slots, reads, kv, state, options)
    _duplicates(checkpoint, counts)
    return counts


def _layers(config: ModelConfig, slots: list[Slot], counts: Counts) -> int:
    """Decoder layers of the main model: stated, else as many as the headers show."""
    if config.layers is not None:
        return config.layers
    found = [s.place.layer for s in slots if s.place.layer is not None and s.place.role != "towers"]
    counts.doubt(
        "layers",
        "no configuration says num_hidden_layers: prediction layers cannot be told from layers of "
        "the model",
    )
    return max(found, default=-1) + 1


def _absent(layers: int, stack: str, slots: list[Slot], counts: Counts) -> None:
    """Doubt a model of which whole layers are not in the files: a part of one, perhaps."""
    there = {s.place.layer for s in slots if s.place.stack == stack}
    missing = [layer for layer in range(layers) if layer not in there]
    if missing and len(missing) < layers:
        counts.doubt(
            "layers",
            f"config.json says {layers} layers, the files hold nothing of {spans(missing)}",
        )


def _beyond(config: ModelConfig, slots: list[Slot], stack: str) -> list[int]:
    """Layers behind the model's, when the configuration announces no prediction layers."""
    announced = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "use_mtp")
    if config.get(*announced):
        return []
    behind = {s.place.layer for s in slots if s.place.role == "mtp" and s.place.stack == stack}
    return sorted(layer for layer in behind if layer is not None)


def _main_stack(slots: list[Slot]) -> str:
    """The path of the language model's decoder stack: the one with the most bytes."""
    sizes: dict[str, int] = defaultdict(int)
    for slot in slots:
        if slot.place.layer is not None and slot.place.role not in ("towers", "unknown"):
            sizes[slot.place.stack] += slot.stored
    return max(sizes, key=lambda stack: sizes[stack], default="")


def _reads(
    slots: list[Slot],
    experts: dict[tuple[str, int | None], LayerExperts],
    options: Options,
    counts: Counts,
) -> dict[int, int]:
    """Slot (by identity) -> bytes that a step reads of it; fills groups and not_read.

    The embedding's slots are left to ``embedding.count``.
    """
    reads: dict[int, int] = {}
    for slot in slots:
        role, stored = slot.place.role, slot.stored
        if role in ("embedding", "per_layer_embedding", "lm_head"):
            continue
        if role in settle.NEVER_RUN:
            counts.not_read[role] = counts.not_read.get(role, 0) + stored
            continue
        read, group = stored, "other" if role == "unknown" else role
        if role == "routed_experts":
            layer = experts[slot.place.stack, slot.place.layer]
            if slot.name in layer.whole:
                group = "aux"
            else:
                read = round(stored * layer.share(options.batch))
                kept = counts.not_read.get("unrouted_experts", 0)
                counts.not_read["unrouted_experts"] = kept + stored - read
        add_read(counts, reads, slot, group, read, options)
    return reads


def _formats(slots: list[Slot], config: ModelConfig, counts: Counts, reads: dict[int, int]) -> None:
    """Bytes read by weight format: a module's bytes under its weight's format."""
    bits = weight_bits(config.quantization)
    for parameters in modules_of(slots):
        dtypes = {key: members[0].dtype for key, members in parameters.items()}
        common = format_of(dtypes, bits)
        for key, members in parameters.items():
            for at, slot in enumerate(members):
                # experts of one layer in two precisions: each weight under its own format
                own = at > 0 and key in ("weight", "weight_packed", "qweight")
                name = format_of({**dtypes, key: slot.dtype}, bits) if own else common
                counts.by_format[name] = counts.by_format.get(name, 0) + reads.get(id(slot), 0)
    counts.by_format = {name: size for name, size in counts.by_format.items() if size}


def _doubts(
    checkpoint: Checkpoint,
    config: ModelConfig,
    slots: list[Slot],
    experts: dict[tuple[str, int | None], LayerExperts],
    reads: dict[int, int],
    counts: Counts,
) -> None:
    """Name what no rule knows: tensors, routers, and what the reader was unsure of."""
    for why in checkpoint.unproven:
        counts.doubt("checkpoint", why)
    for why in settle.another_step(config):
        counts.doubt("step", why)
    unknown = [slot for slot in slots if slot.place.role == "unknown"]
    if unknown:
        names = sorted({excerpt(slot.name, 120) for slot in unknown})
        counts.doubt(
            "weights",
            f"{sum(s.count for s in unknown)} tensors of unknown use, counted as read: "
            + ", ".join(names[:3])
            + (", ..." if len(names) > 3 else ""),
            sum(reads.get(id(slot), 0) for slot in unknown),
        )
    if not experts and declares_experts(config):
        counts.doubt("routed_experts", "config.json declares experts, but no tensor is one")
    by_why: dict[str, list[tuple[str, int | None]]] = defaultdict(list)
    for key, layer in experts.items():
        if layer.doubt:
            by_why[layer.doubt].append(key)
    for why, keys in by_why.items():
        chosen = set(keys)
        size = sum(
            reads.get(id(s), 0)
            for s in slots
            if s.place.role == "routed_experts" and (s.place.stack, s.place.layer) in chosen
        )
        at = [layer for _, layer in keys if layer is not None]
        counts.doubt("routed_experts", f"{spans(at)}: {why}", size)


def count_caches(counts: Counts, kv: KvPlan, state: StatePlan, options: Options) -> None:
    """Fill the KV and state terms, with their doubts."""
    for why in kv.doubts:
        counts.doubt("kv", why)
    for why in state.doubts:
        counts.doubt("state", why)
    counts.kv_layers = kv.layers
    if kv.layers:
        counts.kv = kv_json(kv, options)
    if state.layers:
        one = sum(state.one_copy(layer) for layer in state.layers)
        kinds: dict[str, int] = defaultdict(int)
        for layer in state.layers:
            kinds[layer.family] += 1
        device = sum(-(-state.one_copy(x) // options.tensor_parallel) for x in state.layers)
        counts.state = {
            "layers": len(state.layers),
            "kinds": dict(kinds),
            "conv_dtype_bytes": state.conv_bytes,
            "recurrent_dtype_bytes": state.recurrent_bytes,
            "dtype_source": state.source,
            "one_copy_bytes": one,
            "read_write_bytes": 2 * device * options.batch,
        }


def element_bytes(layer: KvLayer, options: Options) -> Fraction:
    """Bytes of a cached element of a layer, for the cache that was asked for."""
    if layer.kind in ("mla", "dsa") and options.mla_cache == "fp8_ds_mla":
        return Fraction(FP8_DS_MLA_BYTES, layer.elements)
    return KV_BYTES[options.kv_dtype]


def device_bytes(layer: KvLayer, options: Options, *, strict: bool = False) -> int:
    """KV bytes that one device reads of a layer for one sequence."""
    size = layer.bytes(options.context, element_bytes(layer, options), strict=strict)
    if options.tensor_parallel == 1 or layer.heads is None:
        return size  # a latent is held whole by every device
    heads = -(-layer.heads // options.tensor_parallel)
    return -(-size * heads // layer.heads)


def kv_bytes_at(counts: Counts, options: Options, contexts: Iterable[int]) -> list[int]:
    """KV bytes of one step at each of these contexts: the only term that depends on it.

    ``counts`` must be one that was counted with ``options``.
    """
    alike = Counter(replace(layer, layer=0, donor=None) for layer in counts.kv_layers)
    found = []
    for context in contexts:
        there = replace(options, context=context)
        found.append(there.batch * sum(n * device_bytes(x, there) for x, n in alike.items()))
    return found


def kv_json(kv: KvPlan, options: Options) -> dict[str, Any]:
    """The KV term as the record keeps it; bytes of one step at ``context``."""
    kinds: dict[str, int] = defaultdict(int)
    for layer in kv.layers:
        span = (
            f"/{layer.window}" if layer.window else f"/chunk {layer.chunk}" if layer.chunk else ""
        )
        shared = "shared " if layer.donor is not None else ""
        kinds[f"{shared}{layer.kind}{span}"] += 1
    own = [layer for layer in kv.layers if layer.donor is None]
    batch = options.batch
    mla = any(layer.kind in ("mla", "dsa") for layer in kv.layers)
    return {
        "dtype": options.kv_dtype,
        "context": options.context,
        "layers": len(kv.layers),
        "kinds": dict(kinds),
        "mla_cache": options.mla_cache if mla else None,
        "bytes_per_context_token": sum(
            layer.bytes_a_token(element_bytes(layer, options)) for layer in kv.layers
        ),
        "read_bytes": batch * sum(device_bytes(x, options) for x in kv.layers),
        "strict_read_bytes": batch * sum(device_bytes(x, options, strict=True) for x in kv.layers),
        "unique_read_bytes": batch * sum(device_bytes(x, options) for x in own),
    }


def _moe(
    experts: dict[tuple[str, int | None], LayerExperts], options: Options
) -> dict[str, Any] | None:
    """The experts term: counts, stored and read bytes, and whether k/E is exact."""
    if not experts:
        return None
    layers = list(experts.values())
    stored = sum(layer.stored for layer in layers)
    read = sum((layer.stored * layer.share(options.batch) for layer in layers), Fraction(0))
    distinct = {layer.experts for layer in layers}
    top = {layer.top_k for layer in layers}
    return {
        "layers": len(layers),
        "experts": distinct.pop() if len(distinct) == 1 else None,
        "top_k": top.pop() if len(top) == 1 else None,
        "stored_bytes": stored,
        "read_bytes": round(read),
        "equal_sizes": all(layer.equal for layer in layers),
        "expected_share": float(read / stored) if stored else None,
    }


def _per_layer(
    layers: int,
    slots: Iterable[Slot],
    reads: dict[int, int],
    kv: KvPlan,
    state: StatePlan,
    options: Options,
) -> list[dict[str, Any]]:
    """Bytes read by decoder layer: weights by group, KV with its kind, state."""
    weights: list[dict[str, int]] = [defaultdict(int) for _ in range(layers)]
    for slot in slots:
        place = slot.place
        read = reads.get(id(slot), 0)
        if place.layer is not None and place.layer < layers and read and place.role != "mtp":
            group = "other" if place.role == "unknown" else place.role
            weights[place.layer][group] += read
    return layer_rows([dict(row) for row in weights], kv, state, options)


def layer_rows(
    weights: list[dict[str, int]], kv: KvPlan, state: StatePlan, options: Options
) -> list[dict[str, Any]]:
    """The rows of ``data.counts.per_layer``: weights by group, the cache read, the state moved."""
    rows: list[dict[str, Any]] = [
        {"layer": at, "weights": groups, "kv": None, "state": None}
        for at, groups in enumerate(weights)
    ]
    for layer in kv.layers:
        rows[layer.layer]["kv"] = {
            "kind": layer.kind,
            "window": layer.window or layer.chunk,
            "reads_layer": layer.donor,
            "bytes": options.batch * device_bytes(layer, options),
        }
    for item in state.layers:
        size = 2 * -(-state.one_copy(item) // options.tensor_parallel)
        rows[item.layer]["state"] = {"kind": item.family, "bytes": options.batch * size}
    return rows


def _duplicates(checkpoint: Checkpoint, counts: Counts) -> None:
    """Copies in a second file are stored and dead."""
    dead = sum(size for _, size in checkpoint.duplicates)
    if dead:
        counts.not_read["dead_duplicates"] = counts.not_read.get("dead_duplicates", 0) + dead
