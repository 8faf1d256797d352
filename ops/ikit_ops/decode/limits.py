"""What a byte count does not cover, in the words that the record carries.

A ceiling is only as good as its assumptions.  Those that bite are said every time (each
weight is read once, from memory); the others only when this model, or this call, makes
them true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ikit_mcp.registry import excerpt
from ikit_ops.checkpoint.model import Checkpoint
from ikit_ops.decode.kv import spans
from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.names import place_of
from ikit_ops.decode.tally import Counts, Options

GB = 1e9


def in_gb(size: float) -> str:
    """Bytes in GB with three decimals, or as many as a small model needs."""
    return f"{size / GB:.3f}" if size >= 1e7 or not size else f"{size / GB:.3g}"


def limitations(
    checkpoint: Checkpoint, counts: Counts, options: Options, dtype: str | None
) -> list[str]:
    """The limits of this count, one sentence each, those that decide first.

    ``dtype`` is what the caller asked for, which only the config method follows.
    """
    lines = [*_source(checkpoint, counts, dtype), *_kv(checkpoint, counts, options)]
    lines += [*_terms(counts, options), *_not_read(counts), *_streamed(checkpoint, counts)]
    lines += counts.limitations
    lines.append("assumes every weight is read once per token from DRAM, whatever caches hold")
    lines.append("activations, logits and sampling are ignored")
    return lines


def _source(checkpoint: Checkpoint, counts: Counts, dtype: str | None) -> Iterator[str]:
    """Where the numbers come from, when that is not simply the checkpoint's headers."""
    if counts.method == "config" and checkpoint.no_weights:
        yield f"counted from config.json alone: {checkpoint.no_weights}"
    if counts.method == "headers" and dtype is not None:
        yield f"dtype {dtype} was ignored: the headers say how the weights are stored"
    if counts.method == "headers" and checkpoint.source == "hub-cache":
        yield f"headers are those of the Hub cache's snapshot, commit {checkpoint.revision}"
    yield from checkpoint.notes
    if checkpoint.skipped:
        named = "; ".join(f"{excerpt(name, 80)} ({why})" for name, why in checkpoint.skipped[:3])
        more = f"; {len(checkpoint.skipped) - 3} more" if len(checkpoint.skipped) > 3 else ""
        yield f"files left out: {named}{more}"


def _kv(checkpoint: Checkpoint, counts: Counts, options: Options) -> Iterator[str]:
    """How the KV cache was counted, and what the checkpoint says about it."""
    if counts.kv is None:
        return
    layout = counts.kv["mla_cache"]
    kept = f"{options.kv_dtype} (MLA {layout})" if layout else options.kv_dtype
    if layout == "fp8_ds_mla":
        kept = "fp8_ds_mla"
    yield f"KV cache counted as {kept}; use the cache dtype the engine logged"
    declared = declared_kv_dtype(checkpoint)
    if declared is not None and declared != options.kv_dtype:
        yield f"the checkpoint declares an {declared} KV cache, counted as {options.kv_dtype}"
    if counts.kv["strict_read_bytes"] != counts.kv["read_bytes"]:
        yield (
            "windows and chunks counted as min(context, window), the most that is read; strictly "
            f"{in_gb(counts.kv['strict_read_bytes'])} GB at this position"
        )
    if counts.kv["unique_read_bytes"] != counts.kv["read_bytes"]:
        yield "layers that share a KV cache each read it: no reuse in L2 is assumed"


def _terms(counts: Counts, options: Options) -> Iterator[str]:
    """State, experts, batch, tensor parallelism, prediction layers."""
    if counts.state is not None:
        size = 8 * counts.state["recurrent_dtype_bytes"]
        yield (
            f"recurrent state counted in {size} bits ({counts.state['dtype_source']}), read and "
            "written once per token"
        )
    if counts.moe is not None:
        chosen = f"{counts.moe['top_k']} of {counts.moe['experts']} experts per layer"
        how = "equal sizes" if counts.moe["equal_sizes"] else "of unequal sizes: an expectation"
        yield f"mixture of experts: {chosen}, {how}"
    if options.batch > 1:
        yield (
            f"batch {options.batch}: weights once per step, KV and state once per sequence"
            + (", expected number of distinct experts (independent routing)" if counts.moe else "")
        )
    if options.tensor_parallel > 1:
        yield (
            f"bytes of one of {options.tensor_parallel} devices: attention, MLP, experts and head "
            "are split; norms, router, embedding row, MLA down-projections and latent cache are "
            "held by all; kv heads are split, at least one a device; communication is ignored"
        )
    if options.include_mtp and counts.method == "headers":
        yield "bytes per step with one pass of the prediction layers, not bytes per token"


def _not_read(counts: Counts) -> Iterator[str]:
    """What is resident and not read, in GB."""
    if counts.beyond:
        yield (
            f"not run by the main model: {spans(counts.beyond)}, beyond num_hidden_layers, though "
            "config.json declares no prediction layers"
        )
    for group, what in (
        ("towers", "vision and audio towers"),
        ("mtp", "multi-token-prediction layers"),
        ("dead_duplicates", "dead copies"),
    ):
        size = counts.not_read.get(group, 0)
        if size:
            yield f"{what} are stored and not read: {in_gb(size)} GB"


def _streamed(checkpoint: Checkpoint, counts: Counts) -> Iterator[str]:
    """Where an engine is known to stream other bytes than are stored."""
    if counts.method == "headers":
        yield "counted as stored, which is not always what an engine streams"
    expanded = 0
    for name, entry in checkpoint.tensors.items():
        if ".kv_b_proj.weight" in name and entry.dtype.startswith("F8_"):
            place = place_of(name, ModelConfig(checkpoint.config).layers)
            expanded += entry.nbytes if place.role == "attention" else 0
    if expanded:
        yield f"vLLM holds kv_b_proj in bf16: {expanded / GB:.2f} GB/token more than stored"
    if "mxfp4" in counts.by_format and counts.method == "headers":
        yield "without its kernels transformers expands MXFP4 to bf16 (3.76 times the bytes)"
    if {"nf4", "fp4"} & counts.by_format.keys():
        yield "vLLM 0.33 has no bitsandbytes loader: check that the engine serves this format"


def declared_kv_dtype(checkpoint: Checkpoint) -> str | None:
    """The KV dtype that the checkpoint's quantisation declares: fp8, or None.

    Written as ``kv_cache_scheme`` {num_bits 8, type float} or "FP8" (compressed-tensors,
    modelopt), or ``kv_cache_quant_algo`` in hf_quant_config.json.
    """
    inner = (checkpoint.quant_config or {}).get("quantization")
    sections: list[Any] = [ModelConfig(checkpoint.config).quantization, inner]
    for section in sections:
        if not isinstance(section, Mapping):
            continue
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            value = section.get(key)
            if isinstance(value, str) and value:
                return "".join(c for c in value.lower() if c.isalnum() or c in "_-")[:20]
            if isinstance(value, Mapping) and value.get("num_bits") == 8:
                return "fp8" if value.get("type", "float") == "float" else "int8"
    return None
