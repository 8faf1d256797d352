"""From a finished run to a record: metrics, identity, summary, limits of the claim.

Every number here is computed from the times and counts of the rounds; what was not seen is
null and named in ``missing``.  The summary leads with what spoils the number, because a
reader who sees the rate first keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.evidence import record as evidence
from ikit_mcp.evidence.record import Draft, EvidenceRecord, Identity, Metric, metric
from ikit_ops.engines.adapter import Adapter, Found, Plan
from ikit_ops.engines.ceiling import Ceiling, same_model
from ikit_ops.engines.drive import Outcome, is_configuration
from ikit_ops.engines.gates import Check, Verdict
from ikit_ops.engines.result import MAX_TOKENS, Round, WorkerResult, median, tokens_digest

TPOT = "tpot = (last token - first token) / (n - 1) of one request, median over rounds"
_EVIDENCE_WORDS = (
    "attention backend", "Flash Attention", "flash_attn", "CUDAGraph", "cudagraph", "uda graph",
    "offloaded", "n_threads", "capture", "Enforce eager", "KV cache", "llama_kv_cache",
    "Graph capturing", " graph: ",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """All that a report is made of."""

    adapter: Adapter
    plan: Plan
    found: Found
    outcome: Outcome
    verdict: Verdict
    device: evidence.Device | None
    platform: str | None
    threads: int | None
    requested: Mapping[str, Any]
    telemetry: dict[str, Any] | None
    peak_bytes: int | None
    ceiling: Ceiling | None = None
    reference: dict[str, Any] | None = None

    @property
    def result(self) -> WorkerResult:
        """The worker's result."""
        return self.outcome.result


def draft(measured: Measured) -> Draft:
    """The record's content."""
    verdict, result = measured.verdict, measured.result
    metrics = metrics_of(measured)
    missing = list(verdict.unknown)
    missing += [
        f"{m.name} (not seen)" for m in metrics if m.value is None and _expected(m, measured)
    ]
    if measured.device is None:
        missing.append("device (the server does not say where it runs)")
    told = measured.telemetry or {"missing": ["telemetry"]}
    missing += [str(line) for line in told["missing"]]
    if measured.ceiling is not None:
        missing += [f"pct_of_ceiling: {why}" for why in measured.ceiling.mismatches]
    parents = measured.ceiling.parents if measured.ceiling is not None else []
    if measured.reference is not None:
        parents = [*parents, str(measured.reference["evidence_id"])]
    variables = measured.outcome.variables
    return Draft(
        kind="bench",
        claim_class="measured",
        valid=verdict.valid,
        summary=summary(measured, metrics),
        identity=identity(measured),
        metrics=metrics,
        gates=verdict.gates,
        missing=[one_line(line, 300) for line in missing],
        limitations=[one_line(line, 400) for line in limitations(measured)],
        data={
            "rounds": [row_of(row) for row in result.rounds],
            "failed_rounds": result.failed_rounds,
            "flags": result.flags,
            "requested_flags": dict(measured.requested) | (result.requested_flags or {}),
            "flags_source": result.flags_source,
            "attention_backend": result.attention_backend,
            "attention_candidates": result.attention_candidates,
            "platform": measured.platform,
            "devices": result.devices,
            "telemetry": measured.telemetry,
            "prompt": {**(result.prompt or {}), "nonce": measured.plan.nonce},
            "tokens": tokens_of(result),
            "reference": measured.reference,
            "timing": {
                **(result.timing or {"definition": None}),
                "tpot_definition": TPOT,
                "two_call_check": two_call(result),
                "import_s": result.import_s,
            },
            "ceiling": ceiling_of(measured.ceiling),
            "log": [
                one_line(line)
                for line in measured.outcome.log
                if any(word in line for word in _EVIDENCE_WORDS) and not is_configuration(line)
            ][:40],
            "notes": result.notes,
        },
        parents=parents,
        env_kept=list(variables.kept),
        env_dropped=list(variables.dropped),
    )


def row_of(row: Round) -> dict[str, Any]:
    """A round as records hold it."""
    rate = row.rate()
    return {
        "index": row.index,
        "t_start": row.t_start,
        "t_end": row.t_end,
        "ttft_ms": row.ttft_ms,
        "total_ms": row.total_ms,
        "gen_tokens": row.gen_tokens,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "finish_reason": row.finish_reason,
        "decode_tok_s": rate,
        "tpot_ms": 1e3 / rate if rate else None,
        "engine_decode_tok_s": row.engine_rate(),
    }


def tokens_of(result: WorkerResult) -> dict[str, Any] | None:
    """The ids that answered the reference prompt, and their digest."""
    if result.tokens is None:
        return None
    return {"sha256": tokens_digest(result.tokens), "ids": result.tokens[:MAX_TOKENS]}


def two_call(result: WorkerResult) -> dict[str, Any] | None:
    """The cross-check by two calls, and how far it is from the stamps."""
    if result.two_call is None:
        return None
    rate, ours = result.two_call.decode_tok_s, median([r.rate() for r in result.rounds])
    return {
        "ttft_ms": result.two_call.ttft_ms,
        "total_ms": result.two_call.total_ms,
        "decode_tok_s": rate,
        "ratio": rate / ours if rate and ours else None,
    }


def ceiling_of(ceiling: Ceiling | None) -> dict[str, Any] | None:
    """What the share was taken of."""
    if ceiling is None:
        return None
    return {
        "evidence_id": ceiling.record.evidence_id,
        "context": ceiling.context,
        "ceiling_tok_s": ceiling.tok_s,
        "mismatches": ceiling.mismatches,
    }


def metrics_of(measured: Measured) -> list[Metric]:
    """The metrics of contracts: medians over the rounds, with their samples."""
    rounds = measured.result.rounds
    rates = [row.rate() for row in rounds]
    rate = median(rates)
    tpots = [1e3 / r if r else None for r in rates]
    prefill = [
        (row.prompt_tokens or measured.plan.prompt_len) / row.ttft_ms * 1e3 if row.ttft_ms else None
        for row in rounds
    ]
    found = [
        _median("decode_tok_s", rates, "tok/s"),
        _median("tpot_ms", tpots, "ms"),
        _median("ttft_ms", [row.ttft_ms for row in rounds], "ms"),
        _median("total_ms", [row.total_ms for row in rounds], "ms"),
        _median("prefill_tok_s", prefill, "tok/s"),
        metric("peak_device_memory_bytes", measured.peak_bytes, "B", "max"),
        metric("load_s", measured.result.load_s, "s", "single"),
    ]
    if measured.ceiling is not None:
        usable = measured.ceiling.usable_tok_s
        share = rate / usable * 100 if rate is not None and usable else None
        found.append(metric("pct_of_ceiling", share, "%", "derived"))
    return found


def _median(name: str, samples: list[float | None], unit: str) -> Metric:
    return metric(name, median(samples), unit, "median", samples)


def _expected(entry: Metric, measured: Measured) -> bool:
    """Whether the absence of a metric has to be told here: misfits of a ceiling have a line."""
    return entry.name != "pct_of_ceiling"


def identity(measured: Measured) -> Identity:
    """What the claim is about."""
    plan, result = measured.plan, measured.result
    flags = result.flags or {}
    told = result.engine
    workload: dict[str, Any] = {
        "prompt_len": plan.prompt_len,
        "gen_len": plan.gen_len,
        "batch": 1,
        "rounds": plan.rounds,
        "warmup": plan.warmup,
        "seed": plan.seed,
        "threads": measured.threads,
    }
    dtype = flags.get("dtype") or flags.get("model_ftype") or flags.get("model_type")
    quant = flags.get("quantization")
    revision = plan.revision or flags.get("revision")
    return Identity(
        model=evidence.Model(
            id=one_line(plan.model if plan.path is None else str(plan.path)),
            revision=None if revision is None else one_line(str(revision)),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            quant=None if quant is None else str(quant),
        ),
        engine=evidence.Engine(
            name=(told.name if told and told.name else None) or measured.adapter.name,
            version=(told.version if told else None) or result.version or measured.found.version,
        ),
        device=measured.device,
        workload=workload,
    )


def limitations(measured: Measured) -> list[str]:
    """What the number does not say; violations first."""
    plan = measured.plan
    lines = list(measured.verdict.gates.violations)
    lines += [
        f"batch 1, at contexts {plan.prompt_len} to {plan.prompt_len + plan.gen_len}; rates at "
        "other contexts differ",
        "prompts are random tokens, decoding is greedy or feeds random tokens too: what depends on "
        "text (routing of experts, drafts) is not that of real text",
        "one run: it cannot carry a comparison with another run",
        "prefill_tok_s is prompt tokens / TTFT, the first token's own step included",
    ]
    if measured.adapter.name == "openai":
        lines.append("stamps are the client's: network and HTTP are in them")
    if measured.adapter.name == "cmd":
        lines.append("times, counts and flags are the command's own word: no clock was checked")
    if measured.platform == "cpu":
        lines.append("peak_device_memory_bytes is the resident memory of the largest process")
    if measured.ceiling is not None:
        lines += measured.ceiling.limitations
    return lines


# --- words -------------------------------------------------------------------------------


def summary(measured: Measured, metrics: list[Metric]) -> str:
    """One line: what spoils it, then the numbers."""
    values = {entry.name: entry.value for entry in metrics}
    name = measured.adapter.title
    told = measured.result.engine
    if measured.adapter.name == "cmd":
        name = told.name if told and told.name else "the command"
    version = identity(measured).engine
    label = f"{name} {version.version}" if version and version.version else name
    text = f"{label}: {_numbers(values, measured)}"
    verdict = measured.verdict
    if verdict.valid is False:
        first = verdict.gates.violations[0].partition(":")[0]
        more = len(verdict.gates.violations) - 1
        also = f" (and {more} more)" if more else ""
        return f"INVALID as {name}'s speed: {first}{also}. {text}"
    if verdict.valid is None:
        return f"NOT ESTABLISHED ({verdict.unknown[0].removeprefix('gate ')}). {text}"
    return text


def _numbers(values: Mapping[str, Any], measured: Measured) -> str:
    rate, ttft = values["decode_tok_s"], values["ttft_ms"]
    text = "decode rate not seen" if rate is None else f"decode {short(rate)} tok/s"
    if (share := values.get("pct_of_ceiling")) is not None:
        text += f" ({share:.0f} % of the ceiling)"
    if ttft is not None:
        text += f", TTFT {short(ttft)} ms"
    count = len(measured.result.rounds)
    text += f"; {count} round{'s' if count != 1 else ''}"
    rates = [r for row in measured.result.rounds if (r := row.rate()) is not None]
    if len(rates) > 1 and rate:
        text += f", spread {(max(rates) - min(rates)) / rate * 100:.1f} %"
    return text


def short(number: float) -> str:
    """Three or four digits of a number."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.4g}"


# --- the reference ------------------------------------------------------------------------


def other_question(plan: Plan, result: WorkerResult, other: EvidenceRecord) -> str | None:
    """Why the other benchmark was not asked the same of the same model, or None.

    Other weights give other answers, and nobody is to blame for it.
    """
    theirs = other.get("identity", "model") or {}
    mine = one_line(plan.model if plan.path is None else str(plan.path))
    if not same_model(str(theirs.get("id")), mine):
        return "the models differ"
    revision = plan.revision or (result.flags or {}).get("revision")
    if revision and theirs.get("revision") and revision != theirs["revision"]:
        return "the models' revisions differ"
    workload = other.get("identity", "workload") or {}
    for key in ("seed", "prompt_len"):
        if workload.get(key) != getattr(plan, key):
            return f"{key} differs"
    bound = (result.prompt or {}).get("vocab_bound")
    if bound is None:
        return "the vocabulary of the prompts was not told"
    if bound != other.get("data", "prompt", "vocab_bound"):
        return "the vocabularies differ"
    return None


def compare_tokens(
    mine: WorkerResult, other: Mapping[str, Any], evidence_id: str, same_prompt: str | None
) -> tuple[dict[str, Any], Check]:
    """Whether the reference prompt got the same answer as in another benchmark.

    ``same_prompt`` says why the prompts cannot be the same, None when they are.  Of answers of
    different length the common beginning is compared: what only one of them has differs from
    nothing.
    """
    name = "reference"
    found: dict[str, Any] = {"evidence_id": evidence_id, "first_difference": None, "same": None}
    ids = (other.get("tokens") or {}).get("ids")
    if same_prompt is not None or not ids or not mine.tokens:
        why = same_prompt or "one of the two kept no tokens"
        return found, Check(name, "unknown", f"tokens were not compared: {why}")
    here = mine.tokens[:MAX_TOKENS]
    common = min(len(here), len(ids))
    pairs = zip(here, ids, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    found |= {"first_difference": first, "compared": common}
    if first is not None:
        found["same"] = False
        text = (
            f"the reference prompt got another answer from token {first} of {common} on: rounding "
            "alone can do that, so can a wrong computation"
        )
        return found, Check(name, "warning", text)
    if len(here) != len(ids):
        text = (
            f"the first {common} tokens are the same; the rest were not compared: the answers are "
            f"of {len(here)} and {len(ids)} tokens"
        )
        return found, Check(name, "unknown", text)
    return found | {"same": True}, Check(name, "ok")
