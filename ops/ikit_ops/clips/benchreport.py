"""What a benchmark of clips comes to: its numbers, its gates, and what nobody said.

Latency is the client's; everything else is the server's account, and is left unknown where it
cannot be.  Numbers of clips of different sizes are not mixed into one rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.evidence.record import Device, Draft, Engine, Gates, Identity, Metric, Model, metric
from ikit_ops.clips import resultcache
from ikit_ops.clips.account import Answer
from ikit_ops.clips.asking import SIZE_FIELDS, size_of
from ikit_ops.clips.benchmark import Benchmark
from ikit_ops.clips.resultcache import Finding

STAGE_SHARE = 0.97
Request = dict[str, Any]


def draft_of(run: Benchmark, side_by_side: int) -> Draft:
    """The record of a benchmark that has ended; its manifest was written."""
    good, asked = run.good, [run.requests.timed[answer.index] for answer in run.good]
    finding = resultcache.judge(
        run.pairs, [a for a, r in zip(good, asked, strict=True) if size_of(r) == run.probed]
    )
    violations = _violations(run, finding)
    missing = _missing(run, finding)
    unknown = finding.doubt or finding.unknown
    valid = False if violations else None if unknown else True
    return Draft(
        kind="clip-bench",
        claim_class="measured",
        valid=valid,
        summary=_summary(good, asked, violations, unknown),
        identity=_identity(run, asked, side_by_side),
        metrics=_metrics(run, asked),
        gates=Gates(
            checked=["requests", "stages", "result_cache", "dumps"],
            violations=violations, warnings=_warnings(run, asked, finding),
        ),
        missing=missing,
        limitations=_limitations(run),
        data=_data(run, asked, finding),
    )  # fmt: skip


def _summary(
    good: Sequence[Answer], asked: Sequence[Request], violations: list[str], unknown: str | None
) -> str:
    prefix = f"INVALID: {one_line(violations[0], 160)}. " if violations else ""
    if unknown and not violations:
        prefix = f"NOT ESTABLISHED ({one_line(unknown, 160)}). "
    latency = statistics.median(answer.latency_s for answer in good)
    sizes = _sizes(asked)
    size = next(iter(sizes)) if len(sizes) == 1 else f"{len(sizes)} sizes"
    steps = _per_step(good, asked)
    rate = "" if steps is None else f", {steps:.4f} s/step"
    return f"{prefix}{len(good)} clips of {size}: {latency:.3f} s each (median){rate}"


def _sizes(asked: Sequence[Request]) -> dict[str, int]:
    """The sizes in words, in order, and how many clips have each."""
    found: dict[str, int] = {}
    for request in asked:
        text = f"{request['width']}x{request['height']}, {request['num_frames']} frames"
        text += f", {request['steps']} steps"
        if len({(r["fps"], r["guidance_scale"], r["audio"]) for r in asked}) > 1:
            sound = {None: "", True: ", sound", False: ", silent"}[request["audio"]]
            text += f", {request['fps']} fps, guidance {request['guidance_scale']}{sound}"
        found[text] = found.get(text, 0) + 1
    return found


def _identity(run: Benchmark, asked: Sequence[Request], side_by_side: int) -> Identity:
    told, first = run.told, asked[0]
    model = run.good[0].model or told.get("model")
    local = told.get("device") == "cpu" and run.lanes.server.host in ("127.0.0.1", "localhost")
    device = run.call.devices()[-1] if local else None
    workload: dict[str, Any] = {
        name: first[name] if all(each[name] == first[name] for each in asked) else "mixed"
        for name in (*SIZE_FIELDS, "guidance_scale")
    }
    workload |= {"concurrency": side_by_side, "clips": len(asked)}
    sizes = _sizes(asked)
    if len(sizes) > 1:
        workload["sizes"] = sizes
    return Identity(
        model=Model(id=one_line(str(model), 120), dtype=_text(told.get("dtype")))
        if model else None,
        engine=Engine(name="ikit-clips", version=_text(told.get("version")))
        if run.dialect.ours else None,
        device=Device(name=one_line(device.name), uuid=device.uuid) if device else None,
        workload=workload,
    )  # fmt: skip


def _violations(run: Benchmark, finding: Finding) -> list[str]:
    found: list[str] = []
    failed = [answer for answer in run.answers if answer.error]
    if failed:
        named = ", ".join(str(answer.index) for answer in failed[:8])
        more = ", …" if len(failed) > 8 else ""
        found.append(f"{len(failed)} requests failed ({named}{more}): {failed[0].error}")
    if finding.violation:
        found.append(finding.violation)
    if run.room.dumps is not None:
        without = [answer for answer in run.good if run.dump_size(answer) is None]
        if without:
            found.append(f"{len(without)} of {len(run.good)} clips left no step dump")
    if len({answer.sha256 for answer in run.good}) < len(run.good):
        found.append("different requests were answered with the same mp4")
    return found


def _warnings(run: Benchmark, asked: Sequence[Request], finding: Finding) -> list[str]:
    found: list[str] = [text for text in (finding.doubt, finding.warning) if text]
    shares = _known(run.good, Answer.stage_share)
    if shares and min(shares) < STAGE_SHARE:
        found.append(f"stages explain only {100 * min(shares):.1f} % of the server's time")
    if doubted := [answer for answer in run.good if answer.doubts]:
        told = next(iter(doubted[0].doubts.values()))
        found.append(f"{len(doubted)} of {len(run.good)} clips: {told}: taken for unknown")
    sizes = {size_of(request) for request in asked}
    warmed = {size_of(request) for request in run.requests.warmup}
    if not run.warm:
        found.append("no warm-up: the first clip pays for compiling and tuning")
    elif left := len(sizes - warmed):
        found.append(f"{left} of {len(sizes)} sizes had no warm-up: pass warmup {len(sizes)}")
    if alike := run.requests.alike():
        found.append(f"{alike} requests share their prompt or noise with an earlier one: caches"
                     " of parts may have helped")  # fmt: skip
    return found


def _missing(run: Benchmark, finding: Finding) -> list[str]:
    good, found = run.good, []
    if finding.unknown:
        found.append(finding.unknown)
    for name, pronoun, known in (
        ("stages", "them", sum(bool(answer.stages_ms) for answer in good)),
        ("server time", "it", sum(answer.server_time_s is not None for answer in good)),
        ("peak memory", "it", sum(answer.peak_bytes is not None for answer in good)),
    ):
        if not known and any(name in answer.doubts for answer in good):
            found.append(f"{name} (what the server tells cannot be)")
        elif not known:
            found.append(f"{name} (the server does not tell {pronoun})")
        elif known < len(good):
            found.append(f"{name} of {len(good) - known} of {len(good)} clips")
    if any(answer.stages_ms and not answer.partition for answer in good):
        found.append("the stages' share (stages of this server may lie inside of each other)")
    if not (good[0].model or run.told.get("model")):
        found.append("the model (the server does not name it)")
    if run.room.dumps is None:
        found.append("step dumps (dumps was not given)")
    return found


def _limitations(run: Benchmark) -> list[str]:
    found = [
        "stages and memory are the server's own account; latency is the client's",
        "the clips were not checked: clip_steps tells whether their steps are right",
    ]
    if not run.dialect.ours:
        found.append("the server's stages are taken for seconds, unless their name ends in _ms,"
                     " and its MB for MiB, as vLLM-omni and SGLang have them")  # fmt: skip
    if run.dialect.jobs:
        found.append("the clips were asked for as jobs: a latency may be longer than it was, by a"
                     " hundredth (at least 0.02 s, at most 0.5 s)")  # fmt: skip
    return found


def _metrics(run: Benchmark, asked: Sequence[Request]) -> list[Metric]:
    good = run.good
    latencies = [answer.latency_s for answer in good]
    rates = [
        float(request["num_frames"]) / float(request["fps"]) / answer.latency_s
        for answer, request in zip(good, asked, strict=True)
    ]
    server = [answer.server_time_s for answer in good]
    known = [value for value in server if value is not None]
    peaks = [answer.peak_bytes for answer in good if answer.peak_bytes is not None]
    metrics = [
        metric("latency_s", statistics.median(latencies), "s", "median", latencies),
        metric("latency_max_s", max(latencies), "s", "max"),
        metric("server_time_s", statistics.median(known) if known else None, "s", "median", server),
        metric("s_per_step", _per_step(good, asked), "s", "median"),
        metric("times_real_time", statistics.median(rates), "x", "median", rates),
        metric("clips_per_s", len(good) / run.wall_s if run.wall_s > 0 else None, "1/s", "mean"),
        metric("peak_memory_bytes", max(peaks, default=None), "B", "max"),
        metric("stage_share", min(_known(good, Answer.stage_share), default=None), "1", "min"),
    ]
    for name, value in _stages(good).items():
        metrics.append(metric(f"stage_{name}_ms", value, "ms", "median"))
    return metrics


def _known(good: Sequence[Answer], read: Callable[[Answer], float | None]) -> list[float]:
    return [value for answer in good if (value := read(answer)) is not None]


def _stages(good: Sequence[Answer]) -> dict[str, float]:
    """The median of each stage in ms, of those that every clip tells."""
    names = [n for n in good[0].stages_ms if all(n in answer.stages_ms for answer in good)]
    return {n: statistics.median(answer.stages_ms[n] for answer in good) for n in names}


def _per_step(good: Sequence[Answer], asked: Sequence[Request]) -> float | None:
    """Seconds of denoising for a step.

    None where sizes are mixed, or the server does not tell how long each clip's denoising took.
    """
    values = [
        answer.stages_ms.get("denoise", 0.0) / 1e3 / request["steps"]
        for answer, request in zip(good, asked, strict=True)
    ]
    one_size = len({size_of(request) for request in asked}) == 1
    return statistics.median(values) if one_size and min(values) > 0 else None


def _by_size(run: Benchmark, asked: Sequence[Request]) -> list[dict[str, Any]]:
    """The median latency and the denoising of each size, where there are several."""
    found = []
    for size in dict.fromkeys(map(size_of, asked)):
        pairs = [(a, r) for a, r in zip(run.good, asked, strict=True) if size_of(r) == size]
        answers, requests = [a for a, _ in pairs], [r for _, r in pairs]
        found.append({
            **{name: requests[0][name] for name in (*SIZE_FIELDS, "guidance_scale", "audio")},
            "clips": len(pairs),
            "latency_s": statistics.median(answer.latency_s for answer in answers),
            "s_per_step": _per_step(answers, requests),
        })  # fmt: skip
    return found


def _data(run: Benchmark, asked: Sequence[Request], finding: Finding) -> dict[str, Any]:
    room = run.room
    told = [("requests", run.answers, run.requests.timed),
            ("warmup", run.warm, run.requests.warmup)]  # fmt: skip
    return {
        "api": run.dialect.api,
        "asked_as_jobs": run.dialect.jobs,
        "nonce": run.requests.nonce,
        "manifest": str(run.folder.path / "clips.jsonl"),
        **{name: [_row(a, r) for a, r in zip(answers, requests, strict=True)]
           for name, answers, requests in told},
        "by_size": _by_size(run, asked),
        "stages_ms": _stages(run.good),
        "repeat": finding.told,
        "dump_bytes": room.dump_bytes,
        "dump_bytes_projected": None if room.dump_bytes is None
        else room.dump_bytes * (len(run.answers) + 2 * len(run.pairs)),
        "free_bytes_before": room.free_bytes,
        "free_bytes_in_out_before": room.free_in_out,
        "server": {name: _plain(run.told.get(name)) for name in
                   ("model", "dtype", "device", "version", "dump_dir_writable")},
    }  # fmt: skip


def _row(answer: Answer, request: Request) -> dict[str, Any]:
    told = asdict(answer)
    if answer.error is not None:
        told |= {"bytes": None} | (
            {} if answer.started_s else {"latency_s": None, "started_s": None}
        )
    told["request"] = {**request, "prompt": one_line(str(request["prompt"]))}
    return told


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, type(None))) else one_line(str(value), 120)


def _text(value: Any) -> str | None:
    return None if value is None else one_line(str(value), 60)
