"""The roofline of decoding: bytes per token, and the ceiling that bandwidth sets.

Generating one token moves a known number of bytes from memory to the compute units:
the weights that the token uses, the KV cache that it attends to, the recurrent state.
At batch 1 there is almost nothing to compute on each byte, so the memory's sustained
bandwidth over these bytes is the most tokens a second that any engine can make.  That
ceiling is what a benchmark is held against, so it must not be wrong in silence: bytes
come from the checkpoint's headers, and what is not established is UNPROVEN and named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.call import Call, expanded, one_line
from ikit_mcp.evidence.record import (
    Device,
    Draft,
    EvidenceRecord,
    Gates,
    Identity,
    Metric,
    Model,
    metric,
)
from ikit_mcp.registry import DERIVES, MEASURES, Arg, Effects, OpError, Varying, excerpt, operation
from ikit_ops.decode import CONFIG_DTYPES

# The rooms of decoding are many, and no other command needs them: they come with the call.
if TYPE_CHECKING:
    from ikit_ops.checkpoint.model import Checkpoint
    from ikit_ops.decode import curve, picture
    from ikit_ops.decode.tally import Counts, Options

_KV_DTYPES = ("bf16", "fp16", "fp8", "q8_0")
_NUMBER = re.compile(r"[+-]?(?P<whole>[0-9]+|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,3})?")
_MIN_GBS, _MAX_GBS = 0.01, 99_999.0
_MAX_CONTEXT = 1 << 30


@dataclass(frozen=True)
class Bandwidth:
    """The bandwidth that a ceiling is computed from, and where it comes from."""

    source: str = "none"
    gbs: float | None = None
    evidence_id: str | None = None
    device: Device | None = None
    doubt: str | None = None


def _effects(arguments: Mapping[str, Any]) -> Effects:
    """Measuring the bandwidth runs on the device; everything else only derives."""
    return MEASURES if arguments.get("gpu_bw") == "measure" else DERIVES


@operation(
    "roofline",
    ("roofline",),
    "Bytes per decoded token of a model, and the tokens/s ceiling that memory bandwidth sets.",
    [
        Arg("model", "string", "Hub id, folder, config.json or .gguf", required=True,
            positional=True),
        Arg("dtype", "string", "Weight format (config method only)", choices=CONFIG_DTYPES),
        Arg("gpu_bw", "string", "GB/s, 'measure', or id of a ceiling record", unit="GB/s"),
        Arg("context", "integer", "Cached tokens", default=1024, minimum=0, maximum=_MAX_CONTEXT),
        Arg("kv_dtype", "string", "Dtype of the KV cache", default="bf16", choices=_KV_DTYPES),
        Arg("lm_head_dtype", "string", "Head's format (config method only)", choices=CONFIG_DTYPES),
        Arg("revision", "string", "Branch, tag or commit on the Hub"),
        Arg("method", "string", "Read headers, or use config.json", default="auto",
            choices=("auto", "headers", "config")),
        Arg("state_dtype", "string", "Dtype of recurrent state", choices=("fp32", "bf16", "fp16")),
        Arg("include_mtp", "boolean", "Add the prediction layers (bytes per step)",
            default=False),
        Arg("mla_cache", "string", "Layout of an MLA cache", default="latent",
            choices=("latent", "expanded", "fp8_ds_mla")),
        Arg("batch", "integer", "Sequences decoded together", default=1, minimum=1,
            maximum=1_000_000),
        Arg("tensor_parallel", "integer", "Devices that split the model", default=1, minimum=1,
            maximum=4096),
        Arg("benches", "array", "Ids of bench records to draw as points", default=(),
            items="string"),
    ],
    effects=Varying(MEASURES, _effects),
    long=True,
    open_world=True,
)  # fmt: skip
def roofline(
    call: Call,
    model: str,
    dtype: str | None,
    gpu_bw: str | None,
    context: int,
    kv_dtype: str,
    lm_head_dtype: str | None,
    revision: str | None,
    method: str,
    state_dtype: str | None,
    include_mtp: bool,
    mla_cache: str,
    batch: int,
    tensor_parallel: int,
    benches: list[str],
) -> EvidenceRecord:
    """A record of kind roofline; ``data.counts`` holds the terms, in bytes of one step.

    Its artifact ``roofline.svg`` draws them, and the ceiling against the context.

    Raises:
        OpError: no such model, nothing that can be counted, or an unusable bandwidth.
    """
    from ikit_ops.checkpoint.resolve import read_checkpoint
    from ikit_ops.decode import curve, picture
    from ikit_ops.decode.tally import Options

    options = Options(
        context, kv_dtype, state_dtype, include_mtp, mla_cache, batch, tensor_parallel
    )
    bandwidth = _given_bandwidth(call, gpu_bw)
    records = [call.store.require(prefix, "bench") for prefix in dict.fromkeys(benches)]
    if records:
        curve.check_options(options, gpu_bw is not None)
    call.progress(0, None, f"reading {model}")
    checkpoint = read_checkpoint(
        model,
        revision=revision,
        weights=method != "config",
        progress=lambda done, total: _tell(call, done, total),
    )
    counts, counted = _count(checkpoint, options, method, dtype, lm_head_dtype)
    points = curve.points_of(records, _location(checkpoint), checkpoint.revision)
    if gpu_bw == "measure":
        bandwidth = _measured_bandwidth(call)
    resolved: dict[str, Any] = {"method": counts.method, "dtype": counted}
    if counts.method == "headers":
        resolved["lm_head_dtype"] = None
    if records:
        resolved["benches"] = [point.evidence_id for point in points]
    if checkpoint.source in ("file", "directory"):
        resolved["model"] = str(expanded(model))
    else:
        resolved["revision"] = checkpoint.revision
    if bandwidth.evidence_id is not None:
        resolved["gpu_bw"] = bandwidth.evidence_id
    draft = _draft(checkpoint, counts, options, bandwidth, dtype)
    subject = _subject(checkpoint, counts, options, bandwidth, points)
    if points:
        draft.parents += [point.evidence_id for point in points]
        draft.data["benches"] = [picture.point_json(subject, point) for point in points]
    record = call.save(
        draft,
        artifacts={"roofline.svg": (picture.draw(subject), picture.MEDIA_TYPE)},
        resolved=resolved,
        reply=("counts.groups", "counts.not_read", "counts.unproven", "bandwidth", "config_source"),
    )
    _propose(call, checkpoint, record, context, bandwidth)
    return record


def _tell(call: Call, done: int, total: int) -> None:
    """Report every tenth of the headers; notice a cancel at each."""
    call.check_cancelled()
    if done == total or done % max(total // 10, 1) == 0:
        call.progress(done, total, "headers read")


def _count(
    checkpoint: Checkpoint,
    options: Options,
    method: str,
    dtype: str | None,
    lm_head_dtype: str | None,
) -> tuple[Counts, str | None]:
    """The counts by the method that can run, and the dtype that the config method counted."""
    from ikit_ops.decode.config_method import count_config
    from ikit_ops.decode.count import count_checkpoint

    if checkpoint.tensors or (checkpoint.format and method == "headers"):
        return count_checkpoint(checkpoint, options), None
    reason = checkpoint.no_weights or "the files hold no tensors"
    if method == "headers":
        raise OpError(
            f"{checkpoint.name}: no headers to read: {reason}",
            "give a model with safetensors or GGUF files, or use method=config",
        )
    if checkpoint.config is None:
        raise OpError(
            f"{checkpoint.name}: no config.json, and {reason}",
            "give the folder of a model: config.json and its safetensors files",
        )
    return count_config(checkpoint.config, options, dtype, lm_head_dtype)


def _given_bandwidth(call: Call, gpu_bw: str | None) -> Bandwidth:
    """The bandwidth of a number or a record; checked before anything is read."""
    if gpu_bw is None:
        return Bandwidth()
    if gpu_bw == "measure":
        if not call.has("measure_bandwidth"):
            raise OpError(
                "gpu_bw=measure needs the operation measure_bandwidth, which is not here",
                "give gpu_bw as a number in GB/s",
            )
        return Bandwidth()
    number = _NUMBER.fullmatch(gpu_bw.strip())
    # Six digits and more are the start of an id: no memory moves so many GB/s.
    if number is None or len(number["whole"]) > 5:
        return _of_record(call.store.require(gpu_bw, "ceiling"))
    value = float(gpu_bw)
    if not _MIN_GBS <= value <= _MAX_GBS:
        raise OpError(
            f"gpu_bw is {excerpt(gpu_bw, 40)!r}: not a bandwidth in GB/s",
            "give GB/s (an H200 sustains about 4200), 'measure', or the id of a ceiling record",
        )
    return Bandwidth("user", value)


def _measured_bandwidth(call: Call) -> Bandwidth:
    """Measure now; the ceiling record becomes a parent."""
    record = call.invoke("measure_bandwidth", {})
    if not isinstance(record, EvidenceRecord):
        raise OpError("measure_bandwidth made no record", "call measure_bandwidth by itself")
    return _of_record(record)


def _of_record(record: EvidenceRecord) -> Bandwidth:
    """The read bandwidth of a ceiling record, and the device that it was measured on."""
    value = record.metric("dram_read_gbs")
    if value is None or not math.isfinite(value) or value <= 0:
        raise OpError(
            f"evidence {record.evidence_id[:12]} has no dram_read_gbs",
            "measure_bandwidth makes a record that has",
        )
    device = record.get("identity", "device")
    known = {key: device.get(key) for key in ("name", "uuid", "driver")} if device else {}
    doubt = None if record.valid else "the ceiling record does not claim to be valid"
    found = Device(**known) if known else None
    return Bandwidth("evidence", float(value), record.evidence_id, found, doubt)


def _draft(
    checkpoint: Checkpoint,
    counts: Counts,
    options: Options,
    bandwidth: Bandwidth,
    dtype: str | None,
) -> Draft:
    """The record's content."""
    from ikit_ops.decode.limits import limitations

    missing = [] if bandwidth.gbs is not None else ["bandwidth (pass gpu_bw)"]
    if counts.stored_bytes is None:
        missing.append("stored bytes (no headers were read)")
    if options.include_mtp and counts.method == "headers":
        missing.append("tokens per step (depends on how many drafts are accepted)")
    missing += [
        f"UNPROVEN {item['term']}: {one_line(item['why'], 400)}" for item in counts.unproven
    ]
    lines = limitations(checkpoint, counts, options, dtype)
    if bandwidth.source == "user":
        lines.insert(
            0,
            "the bandwidth is the user's: datasheet figures are 5 to 15 % above what kernels "
            "sustain",
        )
    warnings = [bandwidth.doubt] if bandwidth.doubt else []
    proven = not counts.unproven and bandwidth.doubt is None
    counted = counts.to_json()
    for item in counted["unproven"]:
        item["why"] = one_line(item["why"], 400)
    return Draft(
        kind="roofline",
        claim_class="derived",
        valid=True if proven else None,
        summary=_summary(checkpoint, counts, options, bandwidth),
        identity=Identity(
            model=Model(
                id=_location(checkpoint),
                revision=checkpoint.revision,
                dtype=counts.dtype,
                quant=counts.quant,
            ),
            device=bandwidth.device,
            workload={
                "context": options.context,
                "batch": options.batch,
                "kv_dtype": options.kv_dtype,
                "tensor_parallel": options.tensor_parallel,
            },
        ),
        metrics=_metrics(counts, options, bandwidth),
        gates=Gates(warnings=warnings),
        missing=missing,
        limitations=[one_line(line, 400) for line in lines],
        data={
            "counts": counted,
            "bandwidth": {
                "source": bandwidth.source,
                "value_gbs": bandwidth.gbs,
                "evidence_id": bandwidth.evidence_id,
            },
            "config_source": checkpoint.source,
        },
        parents=[bandwidth.evidence_id] if bandwidth.evidence_id else [],
    )


def _location(checkpoint: Checkpoint) -> str:
    """What the record names as the model: an absolute path, or an id on the Hub."""
    if checkpoint.source in ("file", "directory"):
        return str(Path(checkpoint.location).absolute())
    return checkpoint.location


def _subject(
    checkpoint: Checkpoint,
    counts: Counts,
    options: Options,
    bandwidth: Bandwidth,
    points: tuple[curve.Point, ...],
) -> picture.Subject:
    """What the picture shows."""
    from ikit_ops.decode import curve, picture

    source = "given by the user; datasheet figures are 5 to 15 % above what kernels sustain"
    if bandwidth.evidence_id is not None:
        name = bandwidth.device.name if bandwidth.device else None
        source = (
            f"measured on {name or 'an unnamed device'} (evidence {bandwidth.evidence_id[:12]})"
        )
    steps = options.include_mtp and counts.method == "headers"

    def rate_of(size: int) -> float | None:
        seconds = _seconds(size, bandwidth)
        return (1 if steps else options.batch) / seconds if seconds else None

    return picture.Subject(
        model=checkpoint.name,
        counts=counts,
        options=options,
        curve=curve.trace(counts, options, checkpoint.config, [p.context for p in points]),
        bandwidth_gbs=bandwidth.gbs,
        source=source,
        rate_of=rate_of,
        rate_unit="steps/s" if steps else "tok/s",
        device=bandwidth.device,
        doubt=bandwidth.doubt,
        points=points,
    )


def _metrics(counts: Counts, options: Options, bandwidth: Bandwidth) -> list[Metric]:
    """Bytes, and what the bandwidth makes of them; null where it is not given."""
    from ikit_ops.decode import groups

    step, batch = counts.step_bytes, options.batch
    metrics = [metric("bytes_per_token", _ratio(step, batch), "B", "derived")]
    if batch > 1 or options.include_mtp:
        metrics.append(metric("bytes_per_step", step, "B", "derived"))
    metrics.append(metric("weight_bytes", counts.weight_bytes, "B", "derived"))
    metrics.append(metric("kv_bytes", counts.kv_bytes, "B", "derived"))
    if counts.state_bytes is not None:
        metrics.append(metric("state_bytes", counts.state_bytes, "B", "derived"))
    for name in groups.READ:
        if counts.groups.get(name):
            metrics.append(metric(f"bytes_{name}", counts.groups[name], "B", "derived"))
    seconds = step_seconds(counts, bandwidth)
    rate = batch / seconds if seconds else None
    if options.include_mtp and counts.method == "headers":
        metrics.append(
            metric("ceiling_steps_s", 1 / seconds if seconds else None, "1/s", "ceiling")
        )
        rate = None
    metrics.append(metric("ceiling_tok_s", rate, "tok/s", "ceiling"))
    latency = seconds * 1e3 if seconds else None
    metrics.append(metric("min_token_latency_ms", latency, "ms", "derived"))
    metrics.append(metric("bandwidth_gbs", bandwidth.gbs, "GB/s", "input"))
    return metrics


def step_seconds(counts: Counts, bandwidth: Bandwidth) -> float | None:
    """The least time of one step; from the proven bytes alone, so that it is a floor."""
    return _seconds(counts.proven_bytes, bandwidth)


def _seconds(size: int, bandwidth: Bandwidth) -> float | None:
    """The time that so many bytes take; None without bandwidth or bytes."""
    from ikit_ops.decode.limits import GB

    if bandwidth.gbs is None or size <= 0:
        return None
    return size / (bandwidth.gbs * GB)


def _ratio(step: int, batch: int) -> int | float:
    return step // batch if step % batch == 0 else step / batch


def _summary(checkpoint: Checkpoint, counts: Counts, options: Options, bandwidth: Bandwidth) -> str:
    """One line: what, how many bytes, which ceiling."""
    from ikit_ops.decode.limits import in_gb

    name = one_line(checkpoint.name.rpartition("/")[2], 80)
    terms = [f"weights {in_gb(counts.weight_bytes)}", f"KV {in_gb(counts.kv_bytes)}"]
    if counts.state_bytes:
        terms.append(f"state {in_gb(counts.state_bytes)}")
    step = options.batch > 1 or options.include_mtp
    where = f"at context {options.context}"
    if options.batch > 1:
        where += f", batch {options.batch}"
    if options.tensor_parallel > 1:
        where += f", one of {options.tensor_parallel} devices"
    text = (
        f"{name} ({counts.dtype or 'no weights'}): {in_gb(counts.step_bytes)} GB/"
        f"{'step' if step else 'token'} {where} ({' + '.join(terms)})"
    )
    seconds = step_seconds(counts, bandwidth)
    if seconds:
        unit = "steps/s" if options.include_mtp else "tok/s"
        rate = (1 if options.include_mtp else options.batch) / seconds
        source = "measured" if bandwidth.source == "evidence" else "as given"
        text += f"; ceiling {rate:.1f} {unit} at {bandwidth.gbs:.0f} GB/s {source}"
    if counts.unproven:
        terms_in_doubt = sorted({item["term"] for item in counts.unproven})
        bound = ", so the ceiling is an upper bound" if seconds else ""
        text += f"; UNPROVEN: {', '.join(terms_in_doubt)}{bound}"
    return text


def _propose(
    call: Call,
    checkpoint: Checkpoint,
    record: EvidenceRecord,
    context: int,
    bandwidth: Bandwidth,
) -> None:
    """Propose the next call: a benchmark against this ceiling, or the bandwidth that lacks."""
    model = record.get("provenance", "request", "args", "model")
    if one_line(str(model)) != model:
        return  # `next` never repeats text that was changed to be shown
    if bandwidth.gbs is None and call.has("measure_bandwidth"):
        call.propose(
            "roofline",
            {"model": model, "gpu_bw": "measure", "context": context},
            "measure the bandwidth, for a ceiling in tokens per second",
        )
    elif bandwidth.gbs is not None and checkpoint.format is not None:
        engine = "llamacpp" if checkpoint.format == "gguf" else "auto"
        call.propose(
            "bench",
            {"model": model, "engine": engine, "roofline": record.evidence_id},
            "measure how much of the ceiling the engine reaches",
        )
