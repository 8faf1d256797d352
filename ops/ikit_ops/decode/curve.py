"""The ceiling against the context, and the measurements that are held against it.

Of the bytes of a step only the KV cache's grow with the context: linearly in a layer that
attends to everything, up to its window in one that does not.  The ceiling is bandwidth over
bytes, so it falls as a hyperbola with a kink at each window; the curve is sampled densely
where it is steep, and at the kinks.  Its bytes come from the functions that count one
context, asked again for each: a formula written twice would drift.

A benchmark is a point on that picture only where it measured what the curve bounds: the
same model, one sequence on one device.  Its context is the middle of what it decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.evidence.record import Device, EvidenceRecord
from ikit_mcp.registry import OpError
from ikit_ops.decode.count import kv_bytes_at
from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.tally import Counts, Options

UNSTATED_RANGE = 131_072
MAX_POINTS = 20
_MAX_CONTEXT = 1 << 30
_SAMPLES = 72
_MAXIMUM_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)


@dataclass(frozen=True)
class Curve:
    """Bytes of one step against the context.

    Attributes:
        contexts: cached tokens, rising from 0.
        step_bytes: all bytes that one step reads there.
        proven_bytes: those of them that rest on no UNPROVEN term; a ceiling uses these.
        stated: the longest context that the configuration states, None when it does not.
    """

    contexts: list[int]
    step_bytes: list[int]
    proven_bytes: list[int]
    stated: int | None


@dataclass(frozen=True)
class Point:
    """A benchmark, as a point: its rate at the middle of the context that it decoded.

    Attributes:
        rate, lowest, highest: tokens a second; the extremes of its rounds.
        label: the engine, its version, and the record's id.
        valid: the benchmark's verdict on itself.
        device: what it ran on, as its record says; None when it does not.
    """

    evidence_id: str
    context: int
    rate: float
    lowest: float
    highest: float
    label: str
    valid: bool | None
    device: dict[str, Any] | None


def model_maximum(raw: Any) -> int | None:
    """The longest context that a configuration states, or None; never an error."""
    value = ModelConfig(raw if isinstance(raw, dict) else None).outer(*_MAXIMUM_KEYS)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 < value <= _MAX_CONTEXT else None


def trace(counts: Counts, options: Options, raw: Any, more: Iterable[int] = ()) -> Curve:
    """Count the step at contexts from 0 to the model's maximum.

    Args:
        counts: the count at ``options.context``; only its KV term is counted again.
        options: what it was counted with.
        raw: the model's configuration.
        more: contexts that must be on the curve; it reaches as far as the longest.
    """
    stated = model_maximum(raw)
    wanted = {options.context, *more}
    top = max(stated or UNSTATED_RANGE, *wanted)
    wanted |= {top * n * n // _SAMPLES**2 for n in range(_SAMPLES + 1)}
    for layer in counts.kv_layers[:1000]:
        wanted |= {w for w in (layer.window, layer.chunk, layer.topk) if w and w < top}
    contexts = sorted(wanted)
    if len(contexts) > 4 * _SAMPLES:  # windows of many sizes: kinks too small to be seen
        keep = {0, options.context, top, *more}
        contexts = sorted(keep | set(contexts[:: -(-len(contexts) // (3 * _SAMPLES))]))
    kv = kv_bytes_at(counts, options, contexts)
    step, proven = counts.step_bytes - counts.kv_bytes, counts.proven_bytes - counts.kv_bytes
    return Curve(contexts, [step + n for n in kv], [proven + n for n in kv], stated)


def check_options(options: Options, bandwidth: bool) -> None:
    """Refuse benchmarks beside a curve that they cannot be held against.

    Raises:
        OpError: the roofline is not of one sequence on one device, or has no ceiling.
    """
    if not bandwidth:
        raise OpError("benches are drawn against a ceiling, which needs gpu_bw", "give gpu_bw")
    if options.batch != 1 or options.tensor_parallel != 1 or options.include_mtp:
        raise OpError(
            "benches are of one sequence on one device",
            "leave out batch, tensor_parallel and include_mtp",
        )


def points_of(
    records: Sequence[EvidenceRecord], model: str, revision: str | None
) -> tuple[Point, ...]:
    """The points of these benchmarks, in the order given.

    Args:
        records: bench records.
        model, revision: the identity of the roofline's model.

    Raises:
        OpError: a record is of another model, of several devices, or holds no rate.
    """
    if len(records) > MAX_POINTS:
        raise OpError(f"{len(records)} benches", f"give at most {MAX_POINTS}")
    return tuple(_point(record, model, revision) for record in records)


def _point(record: EvidenceRecord, model: str, revision: str | None) -> Point:
    from ikit_ops.engines.ceiling import same_model  # the engines, only where one was run

    shown = record.evidence_id[:12]
    of = record.get("identity", "model", "id")
    there = record.get("identity", "model", "revision")
    commits = isinstance(there, str) and len(there) == 40 and revision is not None
    if not isinstance(of, str) or not same_model(of, model) or (commits and there != revision):
        raise OpError(
            f"bench {shown} is of another model ({one_line(str(of), 80)})",
            "give benches of the model that this roofline is of",
        )
    for flag in ("tensor_parallel_size", "tp_size", "pipeline_parallel_size"):
        if record.get("data", "flags", flag) not in (None, 1):
            raise OpError(f"bench {shown} ran on several devices ({flag})", "leave it out")
    rate = record.metric("decode_tok_s")
    length, made = (record.get("identity", "workload", k) for k in ("prompt_len", "gen_len"))
    context = length + made // 2 if type(length) is int and type(made) is int else -1
    if rate is None or not math.isfinite(rate) or rate <= 0 or not 0 <= context <= _MAX_CONTEXT:
        raise OpError(f"bench {shown} has no decode_tok_s at a context", "leave it out")
    samples = [*_samples(record), rate]
    name, version = (record.get("identity", "engine", key) for key in ("name", "version"))
    label = one_line(f"{name or 'engine'} {version or ''}".strip(), 60)
    return Point(
        record.evidence_id,
        context,
        rate,
        min(samples),
        max(samples),
        f"{label} ({shown})",
        record.valid,
        record.get("identity", "device"),
    )


def _samples(record: EvidenceRecord) -> list[float]:
    """The rates of the rounds, as far as they are numbers."""
    for entry in record.get("metrics") or []:
        if isinstance(entry, dict) and entry.get("name") == "decode_tok_s":
            values = entry.get("samples") or []
            return [v for v in values if type(v) in (int, float) and math.isfinite(v) and v > 0]
    return []


def differs(device: Device | None, point: Point) -> bool:
    """Whether a benchmark may have run on another device than the bandwidth is of.

    A bandwidth that the user gave is taken to be of the benchmark's device.
    """
    if device is None:
        return False
    other = point.device or {}
    key = "uuid" if device.uuid and other.get("uuid") else "name"
    mine = getattr(device, key)
    return mine is None or mine != other.get(key)
