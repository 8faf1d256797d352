"""Benchmarks: an engine runs a model at batch 1, is timed, and is judged.

Decoding one sequence is what the user of a chat feels, and it is bound by memory, so it
can be held against a ceiling.  The time per output token (TPOT) is ``(last token - first
token) / (n - 1)`` of one request, the median over rounds; serving benchmarks call the same
TPOT at concurrency 1.  Medians of the gaps between tokens, rates that divide by n, and
rates that include the prompt are other quantities.

A decode rate belongs to the context it was taken at, ``prompt_len`` to ``prompt_len +
gen_len``; the ceiling is therefore computed at the middle.  Whether the number is what it
claims to be is for the gates to say (``engines/gates.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.evidence.record import Device, EvidenceRecord
from ikit_mcp.registry import EXECUTES, Arg, Varying, operation
from ikit_ops.engines import adapters, again, ceiling, planning, report
from ikit_ops.engines.adapter import Adapter, Plan
from ikit_ops.engines.beside import Watch
from ikit_ops.engines.drive import Outcome, drive
from ikit_ops.engines.gates import Check, Seen, common_checks, evaluate
from ikit_ops.engines.report import Measured
from ikit_ops.measure.host import is_virtual

ENGINES = ("auto", *adapters())


@operation(
    "bench",
    ("bench",),
    "Measure an engine's decode rate, TTFT and TPOT at batch 1, and check that the run is valid.",
    [
        Arg("model", "string", "Hub id, model folder or .gguf", required=True, positional=True),
        Arg("engine", "string", "Inference engine", default="auto", choices=ENGINES),
        Arg("python", "string", "The engine's interpreter (or llama-server)"),
        Arg("revision", "string", "Branch, tag or commit on the Hub"),
        Arg("engine_args", "array", "key=value (llamacpp: --key value)", default=(),
            items="string"),
        Arg("command", "array", "engine=cmd: the command's words", default=(), items="string"),
        Arg("url", "string", "engine=openai: base URL of the server"),
        Arg("api_key_env", "string", "Name of the variable with the API key"),
        Arg("prompt_len", "integer", "Prompt tokens", default=512, minimum=1, maximum=1_000_000),
        Arg("gen_len", "integer", "Tokens to generate", default=128, minimum=2,
            maximum=1_000_000),
        Arg("rounds", "integer", "Timed requests", default=5, minimum=1, maximum=1000),
        Arg("warmup", "integer", "Untimed requests before them", default=2, minimum=0,
            maximum=100),
        Arg("seed", "integer", "Seed of the prompts", default=0, minimum=0),
        Arg("round_offset", "integer", "Number of the first round", default=0, minimum=0),
        Arg("device", "string", "auto, cpu, cuda:0, or a uuid", default="auto"),
        Arg("threads", "integer", "CPU threads of the engine", minimum=1, maximum=4096),
        Arg("roofline", "string", "Id of a roofline record to compare with"),
        Arg("reference", "string", "Id of a benchmark whose tokens to compare"),
        Arg("keep_going", "boolean", "Go on after a failed round", default=False),
        Arg("timeout", "number", "The longest it may run", default=3600, minimum=1,
            maximum=604_800, unit="s"),
    ],
    effects=Varying(EXECUTES, planning.effects_of),
    long=True,
    open_world=True,
    early=planning.refuse_early,
)  # fmt: skip
def bench(
    call: Call,
    model: str,
    engine: str,
    python: str | None,
    revision: str | None,
    engine_args: list[str],
    command: list[str],
    url: str | None,
    api_key_env: str | None,
    prompt_len: int,
    gen_len: int,
    rounds: int,
    warmup: int,
    seed: int,
    round_offset: int,
    device: str,
    threads: int | None,
    roofline: str | None,
    reference: str | None,
    keep_going: bool,
    timeout: float,
) -> EvidenceRecord:
    """A record of kind bench; ``data.rounds`` has each request, ``gates`` the verdict.

    Raises:
        OpError: the engine is not here, or it failed: with phase, reason and last lines.
    """
    arguments = dict(call.args)  # the same values, by name
    adapter, plan = planning.make_plan(call, arguments)
    limit = _fitting(call, plan, roofline)
    other = call.store.require(reference, "bench") if reference else None
    found = adapter.find(call, plan)
    with Watch(plan) as watch:
        outcome = drive(call, adapter, plan, found, on_phase=watch.entered)
    measured = _judge(call, adapter, plan, found, outcome, watch, limit, other)
    record = call.save(
        report.draft(measured),
        resolved=_resolved(adapter, plan, measured),
        reply=("attention_backend", "flags", "timing", "ceiling"),
    )
    _propose(call, record, measured, arguments)
    return record


def _fitting(call: Call, plan: Plan, roofline_id: str | None) -> ceiling.Ceiling | None:
    """The ceiling, before anything runs: a wrong id must not cost an hour."""
    if roofline_id is None:
        return None
    call.progress(0, None, "roofline at the benchmark's context")
    return ceiling.fitting_ceiling(call, plan, roofline_id)


def _judge(
    call: Call,
    adapter: Adapter,
    plan: Plan,
    found: Any,
    outcome: Outcome,
    watch: Watch,
    limit: ceiling.Ceiling | None,
    other: EvidenceRecord | None,
) -> Measured:
    """Everything that was seen, held against the gates."""
    result = outcome.result
    result.flags = planning.without_secrets(call, result.flags)
    result.requested_flags = planning.without_secrets(call, result.requested_flags)
    flags = result.flags or {}
    platform = result.platform or plan.platform
    if platform == "gpu":  # an engine that does not say whose
        platform = plan.platform
    device = _device(call, plan, platform)
    used = flags.get("n_threads") or flags.get("threads") or plan.threads
    threads = used if platform == "cpu" and isinstance(used, int) else None
    if limit is not None:
        asdict = None if device is None else {"name": device.name, "uuid": device.uuid}
        ceiling.find_mismatches(call, limit, plan, asdict, flags, threads)
    # What a CPU's cache and neighbours explain; a GPU's are small against any model worth one,
    # and a bandwidth that the user named stands as it was named.
    excused = limit is not None and limit.measured and platform == "cpu"
    requested = adapter.requested(plan)
    seen = Seen(
        plan=plan,
        result=result,
        platform=platform,
        requested=requested,
        log=outcome.log,
        beside=watch.beside(result, platform),
        usable_threads=call.cpu().usable_threads or call.cpu().threads,
        ceiling_tok_s=None if limit is None else limit.usable_tok_s,
        ceiling_doubtful=limit is not None and limit.doubtful,
        shared_memory=excused and is_virtual() is True,
        cached_part=limit.cached_part(call.last_level_cache_bytes()) if limit and excused else 0.0,
        environment=outcome.variables.kept,
        reports_cache=adapter.reports_cache,
    )
    checks = [*common_checks(seen), *adapter.checks(seen)]
    checks += [Check("process", "warning", text) for text in outcome.warnings]
    checks += [Check("ceiling", "warning", text) for text in (limit.warnings if limit else ())]
    reference = None
    if other is not None:
        why = report.other_question(plan, result, other)
        data = other.get("data") or {}
        reference, check = report.compare_tokens(result, data, other.evidence_id, why)
        checks.append(check)
    return Measured(
        adapter=adapter,
        plan=plan,
        found=found,
        outcome=outcome,
        verdict=evaluate(checks),
        device=device,
        platform=platform,
        threads=threads,
        requested=requested,
        telemetry=watch.telemetry(result),
        peak_bytes=watch.peak_bytes(outcome, platform),
        ceiling=limit,
        reference=reference,
    )


def _device(call: Call, plan: Plan, platform: str | None) -> Device | None:
    """The device that the engine really ran on; None when nobody knows."""
    device = plan.device
    if device is not None and platform == "cpu" and device.id != "cpu":
        device = call.devices()[-1]  # the CPU is the last
    if device is None:
        return None
    return Device(name=one_line(device.name), uuid=device.uuid, driver=device.driver)


def _resolved(adapter: Adapter, plan: Plan, measured: Measured) -> dict[str, Any]:
    """What of the request was left open, and what it became."""
    found: dict[str, Any] = {"engine": adapter.name}
    if not again.names_threads(adapter, plan.engine_args):  # the same, given twice, is refused
        found["threads"] = measured.threads or plan.threads
    if plan.path is not None:
        found["model"] = str(plan.path)
    if plan.device is not None and plan.device_asked == "auto":
        found["device"] = "cpu" if measured.platform == "cpu" else plan.device.id
    program = measured.found.program or measured.found.python
    if program is not None and plan.python is not None:
        found["python"] = program
    return found


def _propose(
    call: Call, record: EvidenceRecord, measured: Measured, arguments: Mapping[str, Any]
) -> None:
    """The next call: the same without what spoiled it, a ceiling, a profile."""
    plan, adapter = measured.plan, measured.adapter
    if not again.is_ours(adapter):
        return  # nothing about a server or a command can be mended from here
    same = again.given(call.operation.args, arguments) | {"engine": adapter.name}
    if measured.verdict.blamed:
        mended, out = again.without(adapter, same, measured.verdict.blamed)
        if out and again.is_plain(mended):
            call.propose("bench", mended, f"the same without {', '.join(sorted(out))}")
    elif measured.ceiling is None or _above(measured):
        wanted = {
            "model": plan.model,
            "gpu_bw": "measure",
            "context": plan.prompt_len + plan.gen_len // 2,
        } | ({} if plan.revision is None else {"revision": plan.revision})
        if again.is_plain(wanted):
            why = "the ceiling at this context; give its id to bench as roofline"
            if measured.ceiling is not None:
                why = "the ceiling again, its bandwidth measured close to the benchmark"
            call.propose("roofline", wanted, why)
    elif measured.verdict.valid and measured.platform in ("cuda", "rocm"):
        call.propose("profile", {"bench_id": record.evidence_id}, "where the time goes")


def _above(measured: Measured) -> bool:
    """Whether the rate was above the ceiling, and so the ceiling is what to look at."""
    texts = [*measured.verdict.gates.violations, *measured.verdict.unknown]
    return measured.verdict.valid is not True and any("above the ceiling" in t for t in texts)
