"""Which share of its ceiling a benchmark reached, if that may be said at all.

A ceiling belongs to a model, a device, a context; on a CPU also to a number of threads,
because one thread cannot draw what the memory gives to all.  So the roofline is asked
again at the middle of the context that was decoded, and where anything else does not fit,
the share is null and the misfit is named: a percentage of the wrong ceiling looks just
like a right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import OpError, excerpt
from ikit_ops.engines.adapter import Plan

_KV_BITS = {
    **dict.fromkeys(("bf16", "fp16", "f16", "float16", "bfloat16", "half"), 16),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "q8_0"), 8),
    **dict.fromkeys(("f32", "float32"), 32),
}
"""Bits of one element of a KV cache, by the names that engines and rooflines use."""


@dataclass
class Ceiling:
    """A roofline at the context of a benchmark, and what of it does not fit."""

    record: EvidenceRecord
    parents: list[str]
    tok_s: float | None
    context: int
    mismatches: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)

    @property
    def usable_tok_s(self) -> float | None:
        """The ceiling in tokens a second, when it may be compared with."""
        return None if self.mismatches else self.tok_s

    @property
    def doubtful(self) -> bool:
        """Whether the bandwidth is in doubt; unproven bytes only make a ceiling too high."""
        unproven = self.record.get("data", "counts", "unproven")
        return self.record.valid is not True and not unproven

    @property
    def measured(self) -> bool:
        """Whether the bandwidth was measured, not named by the user."""
        return bool(self.record.get("data", "bandwidth", "source") == "evidence")

    def cached_part(self, cache_bytes: int | None) -> float:
        """The most of a token's bytes that a cache of that size can hold, 0 to 1."""
        read = self.record.metric("bytes_per_token")
        return min(1.0, cache_bytes / read) if cache_bytes and read else 0.0


def fitting_ceiling(call: Call, plan: Plan, roofline_id: str) -> Ceiling:
    """The roofline of that record, asked again at the middle of the decoded context."""
    given = call.store.require(roofline_id, "roofline")
    context = plan.prompt_len + plan.gen_len // 2
    fitting = given
    if given.get("identity", "workload", "context") != context:
        if not call.has("roofline"):
            raise OpError("the operation roofline is not here", "leave roofline out")
        args = dict(given.get("provenance", "request", "args") or {})
        fitting = call.invoke("roofline", {**args, "context": context})
    ceiling = Ceiling(
        fitting,
        list(dict.fromkeys([given.evidence_id, fitting.evidence_id])),
        fitting.metric("ceiling_tok_s"),
        context,
    )
    if ceiling.tok_s is None:
        ceiling.mismatches.append("the roofline has no ceiling: it was made without a bandwidth")
    if fitting.valid is None:
        ceiling.limitations.append(
            "the ceiling is an upper bound: a term of its bytes is UNPROVEN, or its bandwidth in "
            "doubt; the true share is larger"
        )
    if fitting.get("data", "bandwidth", "source") == "user":
        ceiling.limitations.append("the ceiling's bandwidth is the user's, not measured")
    return ceiling


def find_mismatches(
    call: Call,
    ceiling: Ceiling,
    plan: Plan,
    device: dict[str, Any] | None,
    flags: Mapping[str, Any],
    threads: int | None,
) -> None:
    """Fill in what of the ceiling does not fit the benchmark that was run.

    ``threads`` is how many the engine ran on a CPU, None elsewhere.
    """
    record = ceiling.record
    of = record.get("identity", "model") or {}
    mine = plan.model if plan.path is None else str(plan.path)
    if not same_model(str(of.get("id")), mine):
        ceiling.mismatches.append(f"the roofline is of another model ({_short(of.get('id'))})")
    elif plan.revision and of.get("revision") and not str(of["revision"]).startswith(plan.revision):
        ceiling.warnings.append("the roofline was counted at another revision of the model")
    there = record.get("identity", "device") or {}
    if there and device is not None and _differs(there, device):
        ceiling.mismatches.append(
            f"the roofline's bandwidth is of another device ({_short(there.get('name'))})"
        )
    _compare_threads(call, ceiling, threads)
    for key, words in (("batch", "batch"), ("tensor_parallel", "number of devices")):
        if (value := record.get("identity", "workload", key)) not in (None, 1):
            ceiling.mismatches.append(f"the roofline is of another {words} ({value})")
    counted = record.get("identity", "workload", "kv_dtype")
    used = flags.get("kv_cache_dtype") or flags.get("cache_type_k")
    bits = _KV_BITS.get(str(used).removeprefix("torch."))
    if bits is not None and bits != _KV_BITS.get(str(counted)):
        ceiling.warnings.append(
            f"the roofline counts a KV cache of {counted}, the engine's is {used}: ask roofline "
            "again with that kv_dtype"
        )


def _compare_threads(call: Call, ceiling: Ceiling, threads: int | None) -> None:
    """On a CPU, the bandwidth must have been drawn by as many threads."""
    measured = ceiling.record.get("data", "bandwidth", "evidence_id")
    if not measured or threads is None:
        return
    drawn = call.store.require(measured, "ceiling").get("identity", "workload", "threads")
    if drawn is not None and drawn != threads:
        ceiling.mismatches.append(
            f"the bandwidth was measured with {drawn} threads, the engine ran {threads}"
        )


def same_model(one: str, other: str) -> bool:
    """Whether two model ids are the same text or lead to the same file."""
    if one == other:
        return True
    try:
        return Path(one).exists() and Path(one).samefile(other)
    except OSError:
        return False


def _differs(one: dict[str, Any], other: dict[str, Any]) -> bool:
    key = "uuid" if one.get("uuid") and other.get("uuid") else "name"
    return one.get(key) is not None and one.get(key) != other.get(key)


def _short(value: Any) -> str:
    text = excerpt(str(value), 10_000)  # redacted before it is cut
    return text if len(text) <= 60 else "…" + text[-59:]
