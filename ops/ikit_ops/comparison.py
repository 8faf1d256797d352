"""Two records side by side: what differs, and what may be concluded (almost nothing).

Two benchmarks that were run one after the other cannot carry "faster".  Clocks, heat,
neighbours and caches drift between them, and a simulation shows what that does: with a
drift of 3 to 5 % and no true difference, common tests call one of the two faster in a
third to nine tenths of the cases, and more rounds make it *worse*, because they measure
the drift more exactly.  Only pairs that are interleaved in random order can (Kalibera and
Jones 2013; Bulej et al. 2020).  So the ratio is reported, every difference between the two
is listed field by field, and the verdict is ``not_established``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.evidence.record import (
    Device,
    Draft,
    Engine,
    EvidenceRecord,
    Gates,
    Identity,
    Model,
    metric,
)
from ikit_mcp.registry import DERIVES, Arg, OpError, excerpt, operation

MAX_DIFFERENCES = 200
PAIRS = 7
T_SUM = 2.447 + 0.906
"""Quantiles .975 and .80 of Student's t with PAIRS - 1 degrees of freedom, added."""
DRIFT = 0.10
"""Drifts up to here are seen on shared and on hot machines."""
_COMPARED = (
    ("identity",),
    ("valid",),
    ("data", "flags"),
    ("data", "requested_flags"),
    ("data", "attention_backend"),
    ("data", "platform"),
    ("data", "prompt"),
    ("data", "timing", "definition"),
    ("data", "tokens", "sha256"),
    ("provenance", "env_kept"),
    ("provenance", "tool", "version"),
)


@operation(
    "compare_evidence",
    ("compare",),
    "Compare two records: the ratio, every difference, and whether a verdict is established.",
    [
        Arg("baseline", "string", "Id of the record to compare with", True, positional=True),
        Arg("candidate", "string", "Id of the record to judge", True, positional=True),
        Arg("metric", "string", "Name of the metric", default="decode_tok_s"),
    ],
    effects=DERIVES,
)  # fmt: skip
def compare_evidence(call: Call, baseline: str, candidate: str, metric: str) -> EvidenceRecord:
    """A record of kind comparison; ``data.ratio`` is candidate / baseline, or null.

    Raises:
        OpError: a record is not sound, both are the same, or the metric is in neither.
    """
    one, other = call.store.require(baseline), call.store.require(candidate)
    if one.evidence_id == other.evidence_id:
        raise OpError("baseline and candidate are the same record", "give two records")
    if one.kind != other.kind:
        raise OpError(
            f"baseline is a {one.kind} record, candidate a {other.kind} record",
            "compare two records of one kind",
        )
    unit = common_unit(one, other, metric)
    record = call.save(
        _draft(one, other, metric, unit),
        resolved={"baseline": one.evidence_id, "candidate": other.evidence_id},
        reply=("verdict", "ratio", "differences", "percent_of_ceiling"),
    )
    call.propose(
        "inspect_evidence",
        {"id": other.evidence_id, "path": f"metrics.{metric}"},
        "the samples of the candidate",
    )
    return record


def common_unit(one: EvidenceRecord, other: EvidenceRecord, name: str) -> str:
    """The unit of the metric; OpError when it is in neither record, or in two units."""
    units = [unit for record in (one, other) if (unit := _unit(record, name)) is not None]
    if not units:
        known = sorted(_metrics(one).keys() & _metrics(other).keys())
        raise OpError(
            f"neither record has a metric {excerpt(name, 60)!r}",
            f"use one of: {excerpt(', '.join(known), 400)}"
            if known
            else "compare two other records",
        )
    if len(set(units)) > 1:
        raise OpError(
            f"{excerpt(name, 60)} is in {units[0]} there and in {units[1]} here",
            "use another metric",
        )
    return units[0]


def _metrics(record: EvidenceRecord) -> dict[str, dict[str, Any]]:
    found = record.get("metrics") or []
    return {str(m.get("name")): m for m in found if isinstance(m, dict)}


def _unit(record: EvidenceRecord, name: str) -> str | None:
    unit = _metrics(record).get(name, {}).get("unit")
    return None if unit is None else str(unit)


def _draft(one: EvidenceRecord, other: EvidenceRecord, name: str, unit: str) -> Draft:
    """The record's content."""
    before, after = one.metric(name), other.metric(name)
    ratio = after / before if before and after is not None else None
    found = differences(one, other)
    warnings = [
        f"the {role} is not valid: {_why(record)}"
        for role, record in (("baseline", one), ("candidate", other))
        if record.valid is not True
    ]
    missing = [_pairs_that_would_do(one, other, name)]
    missing += [
        f"{name} of the {role} (null there)"
        for role, value in (("baseline", before), ("candidate", after))
        if value is None
    ]
    return Draft(
        kind="comparison",
        claim_class="derived",
        valid=None,
        summary=summary(one, other, name, ratio, found),
        identity=_shared_identity(one, other),
        metrics=[
            metric(f"baseline_{name}", before, unit, "input"),
            metric(f"candidate_{name}", after, unit, "input"),
            metric("ratio", ratio, "candidate/baseline", "derived"),
        ],
        gates=Gates(checked=["integrity", "same_metric", "interleaved"], warnings=warnings),
        missing=[one_line(line, 300) for line in missing],
        limitations=[
            "the two runs were not interleaved: how much of the ratio is drift, nobody measured",
            "differences are those that both records name; what neither names may differ too",
        ],
        data={
            "verdict": "not_established",
            "metric": name,
            "ratio": ratio,
            "differences": found,
            "percent_of_ceiling": {
                "baseline": one.metric("pct_of_ceiling"),
                "candidate": other.metric("pct_of_ceiling"),
            },
            "seconds_apart": seconds_apart(one, other),
        },
        parents=[one.evidence_id, other.evidence_id],
    )


def _why(record: EvidenceRecord) -> str:
    violations = record.get("gates", "violations") or record.get("coverage", "missing") or []
    return one_line(str(violations[0]), 120) if violations else "it says so"


def differences(one: EvidenceRecord, other: EvidenceRecord) -> list[dict[str, Any]]:
    """``[{field, baseline, candidate}]``: every compared field whose values differ."""
    found: list[dict[str, Any]] = []
    for path in _COMPARED:
        here, there = (dict(flat(r.get(*path), ".".join(path))) for r in (one, other))
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                found.append(
                    {
                        "field": one_line(name, 120),
                        "baseline": _shown(here.get(name)),
                        "candidate": _shown(there.get(name)),
                    }
                )
    return found[:MAX_DIFFERENCES]


def flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects, by dotted path; lists are leaves."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}")
    else:
        yield path, value


def _shown(value: Any) -> Any:
    """A leaf as a short value."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return one_line(value if isinstance(value, str) else str(value))


def seconds_apart(one: EvidenceRecord, other: EvidenceRecord) -> float | None:
    """The time between the starts of both runs; None when a record does not tell it."""
    try:
        starts = [datetime.fromisoformat(str(r.get("provenance", "started"))) for r in (one, other)]
        return abs((starts[1] - starts[0]).total_seconds())
    except (ValueError, TypeError):
        return None


def _pairs_that_would_do(one: EvidenceRecord, other: EvidenceRecord, name: str) -> str:
    """What would establish a verdict, and how small a change it would show.

    The least change that PAIRS pairs show with a power of 80 % is ``(t.975 + t.80) sd(d) /
    sqrt(n)``, d the log ratio of a pair; its noise is taken from the rounds of both.
    """
    text = "interleaved pairs (bench_pair, to come"
    variances = []
    for record in (one, other):
        samples = _metrics(record).get(name, {}).get("samples") or []
        logs = [math.log(s) for s in samples if isinstance(s, (int, float)) and s > 0]
        if len(logs) >= 3:
            variances.append(statistics.variance(logs))
    if len(variances) == 2:
        least = T_SUM * math.sqrt(sum(variances)) / math.sqrt(PAIRS)
        text += f"; {PAIRS} pairs as noisy as these rounds would show a {least:.1%} change"
    return text + ")"


def summary(
    one: EvidenceRecord,
    other: EvidenceRecord,
    name: str,
    ratio: float | None,
    found: list[dict[str, Any]],
) -> str:
    """The ratio, why it proves nothing, and the first differences."""
    text = f"{name} is null in one of the two" if ratio is None else f"B/A = {ratio:.3f} on {name}"
    apart = seconds_apart(one, other)
    text += f", but the two runs are {_apart(apart)} apart and not interleaved"
    if ratio and abs(math.log(ratio)) < DRIFT:
        text += ": drift alone explains such a ratio"
    else:
        text += ": how much of it is drift, nobody measured"
    shown = [
        f"{d['field'].rpartition('.')[2]} ({_brief(d['baseline'])} -> {_brief(d['candidate'])})"
        for d in found[:4]
    ]
    if shown:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        text += f". They also differ in {', '.join(shown)}{more}"
    return text


def _apart(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _brief(value: Any) -> str:
    return "none" if value is None else one_line(str(value), 40)


def _shared_identity(one: EvidenceRecord, other: EvidenceRecord) -> Identity:
    """The parts of the identity that both records share; null where they differ."""

    def shared(part: str, fields: tuple[str, ...]) -> dict[str, Any] | None:
        here, there = one.get("identity", part), other.get("identity", part)
        if not here or here != there:
            return None
        return {name: here.get(name) for name in fields}

    model = shared("model", ("id", "revision", "dtype", "quant"))
    engine = shared("engine", ("name", "version"))
    device = shared("device", ("name", "uuid", "driver"))
    workload = one.get("identity", "workload")
    return Identity(
        model=Model(**model) if model else None,
        engine=Engine(**engine) if engine else None,
        device=Device(**device) if device else None,
        workload=workload if workload == other.get("identity", "workload") else None,
    )
