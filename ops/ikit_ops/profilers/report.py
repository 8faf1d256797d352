"""From a capture to a record: the table, what it says in one line, and what it does not say.

A profile claims one thing: this is where the time of *that* run went.  The profiler was in the
way, so it claims nothing about speed, and the record says so.  It is valid when the capture is
whole; when events were lost, graphs hid their kernels, or the run was cut off, ``valid`` is
null, because the largest kernel may be the one that was not seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.evidence.record import Draft, Gates, Identity, Metric, metric
from ikit_ops.profilers.capture import Capture, Tally, tally_rows
from ikit_ops.profilers.limits import MAX_STRING, shown_name
from ikit_ops.profilers.picture import svg
from ikit_ops.profilers.sweep import merged_gaps

MAX_ROWS = 5_000
MAX_NAMED = 1_000
TOP = 10
MAX_FULL_NAMES = 4 << 20
MAX_FULL_NAME = MAX_STRING - 8_192  # readers cut names there, and what they cut is not redacted
NO_SPEED = "profiled run: no speed claim may rest on it"
REPLY = ("top_kernels", "top_functions", "categories", "gpu_busy_share", "capture")
_TOP_FIELDS = ("short_name", "category", "calls", "total_ns", "mean_ns", "share", "grid", "block")
_TITLES = {"gemm": "GEMM", "moe": "MoE"}


@dataclass
class Context:
    """What a profile is known by, beside its capture."""

    claim_class: Any
    label: str
    identity: Identity = field(default_factory=Identity)
    facts: dict[str, Any] = field(default_factory=dict)
    checked: list[str] = field(default_factory=list)
    limitations: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    env_kept: list[str] = field(default_factory=list)
    env_dropped: list[str] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    config_differences: list[dict[str, Any]] | None = None


def draft(capture: Capture, context: Context) -> Draft:
    """The record's content."""
    problems = [*capture.incomplete, *_nothing_seen(capture)]
    rows = capture.kernel_rows() if capture.kernels is not None else None
    data = _data(capture, context, rows, problems)
    missing = [*problems, *capture.missing, *context.missing]
    if rows is not None and len(rows) > MAX_ROWS:
        left = sum(row["total_ns"] or 0 for row in rows[MAX_ROWS:])
        data["kernels_left_out"] = {"rows": len(rows) - MAX_ROWS, "total_ns": left}
        missing.append(f"{len(rows) - MAX_ROWS} rows of the kernel table: the smallest, {left} ns")
    return Draft(
        kind="profile",
        claim_class=context.claim_class,
        valid=None if problems else True,
        summary=_summary(capture, context, rows, problems),
        identity=context.identity,
        metrics=_metrics(capture),
        gates=Gates(checked=["capture_complete", *context.checked], warnings=[NO_SPEED]),
        missing=[one_line(line, 300) for line in dict.fromkeys(missing)],
        limitations=[
            one_line(line, 400)
            for line in dict.fromkeys(
                [*context.limitations, *capture.limitations, f"{NO_SPEED}: the profiler slows it"]
            )
        ],
        data=data,
        parents=context.parents,
        env_kept=context.env_kept,
        env_dropped=context.env_dropped,
    )


def _nothing_seen(capture: Capture) -> list[str]:
    """Why a capture without GPU work is not the whole story, unless it is a CPU's."""
    if capture.kernels or capture.functions or capture.host_ops:
        return []
    if capture.counters:
        seen = any(row["value"] is not None for row in capture.counters)
        return [] if seen else ["the capture holds no counter that was counted"]
    if capture.functions is not None or capture.cpu_only:
        return ["the capture holds no sample and no operator"]
    return ["the capture holds no GPU kernel"]


def _data(
    capture: Capture, context: Context, rows: list[dict[str, Any]] | None, problems: list[str]
) -> dict[str, Any]:
    """The record's data, as contracts name it."""
    return {
        "kernels": None if rows is None else rows[:MAX_ROWS],
        "top_kernels": None
        if rows is None
        else [{key: row[key] for key in _TOP_FIELDS} for row in rows[:TOP]],
        "categories": categories_of(capture),
        "memory_ops": tally_rows(capture.memory_ops, MAX_NAMED),
        "gaps": merged_gaps(capture.devices or []),
        "gpu_busy_share": capture.busy_share,
        "devices": None if capture.devices is None else [d.row() for d in capture.devices],
        "ranges": tally_rows(capture.ranges, MAX_NAMED),
        "host_api": tally_rows(capture.host_api, MAX_NAMED),
        "cpu_ops": tally_rows(capture.host_ops, MAX_NAMED),
        "functions": capture.functions,
        "top_functions": _top_functions(capture),
        "counters": capture.counters,
        "capture": {
            "format": capture.format,
            "tool": capture.tool,
            "version": None if capture.version is None else shown_name(capture.version),
            "complete": not problems,
            "problems": [one_line(line, 300) for line in problems],
            "grid_unit": capture.grid_unit,
            "whole_graphs": None if capture.graphs is None else capture.graphs.whole,
            **{key: _fact(value) for key, value in capture.facts.items()},
            **context.facts,
        },
        "env_kept": sorted(context.env_kept),
        "env_dropped": sorted(context.env_dropped),
        "config_differences": context.config_differences,
    }


def _fact(value: Any) -> Any:
    """A fact from outside: text is one short line."""
    return shown_name(value) if isinstance(value, str) else value


def _top_functions(capture: Capture) -> list[dict[str, Any]] | None:
    """Where a CPU's time went: sampled functions, or operators by their own time."""
    if capture.functions is not None:
        return capture.functions[:TOP]
    rows = tally_rows(capture.host_ops, TOP)
    if rows is None or capture.host_ops is None:
        return None
    whole = sum(t.total_ns for t in capture.host_ops.values())
    return [
        {
            "name": row["name"],
            "calls": row["calls"],
            "total_ns": row["total_ns"],
            "share": row["total_ns"] / whole if whole else None,
        }
        for row in rows
    ]


def categories_of(capture: Capture) -> list[dict[str, Any]] | None:
    """Kernel time by category, most first; None without a kernel table."""
    if capture.kernels is None:
        return None
    sums: dict[str, Tally] = {}
    for kernel in capture.kernels:
        sums.setdefault(kernel.category, Tally()).join(kernel.tally)
    whole = sum(tally.total_ns for tally in sums.values())
    return [
        {
            "category": name,
            "calls": tally.calls,
            "total_ns": tally.known_ns,
            "share": tally.total_ns / whole if whole and tally.timed else None,
        }
        for name, tally in sorted(sums.items(), key=lambda item: (-item[1].total_ns, item[0]))
        if tally.calls
    ]


def _metrics(capture: Capture) -> list[Metric]:
    """Sums of the capture; none of them is a speed."""
    if capture.kernels is None:
        return []
    return [
        metric("kernel_time_ns", capture.kernel_ns, "ns", "sum"),
        metric("kernel_calls", sum(k.tally.calls for k in capture.kernels), "calls", "count"),
        metric("gpu_busy_share", capture.busy_share, "1", "derived"),
    ]


def _summary(
    capture: Capture, context: Context, rows: list[dict[str, Any]] | None, problems: list[str]
) -> str:
    """One line: what spoils it, then where the time went."""
    parts = []
    if capture.busy_share is not None:
        parts.append(f"GPU busy {_percent(capture.busy_share)}")
    shares = [c for c in categories_of(capture) or [] if c["share"]]
    if shares:
        named = (
            f"{_TITLES.get(c['category'], c['category'])} {_percent(c['share'])}"
            for c in shares[:4]
        )
        parts.append(", ".join(named))
    if rows:
        first = rows[0]
        share = "" if first["share"] is None else f"{_percent(first['share'])} of time, "
        parts.append(
            f"largest: {one_line(first['short_name'], 80)} ({share}{first['calls']:,} calls)"
        )
    top = _top_functions(capture)
    if not rows and top:
        named = (f"{one_line(r['name'], 60)} {_percent(r['share'] or 0)}" for r in top[:3])
        parts.append("most CPU time: " + ", ".join(named))
    if not rows and not top and capture.counters:
        seen = sum(1 for row in capture.counters if row["value"] is not None)
        parts.append(f"{seen} of {len(capture.counters)} counters were counted")
    text = f"{context.label}: {'; '.join(parts) or 'no work of a device was seen'}"
    return f"INCOMPLETE ({one_line(problems[0], 160)}). {text}" if problems else text


def _percent(share: float) -> str:
    """Whole percents; 0 and 100 are said of nothing and of all alone."""
    if 0 < share < 0.005 or 0.995 <= share < 1:
        return "<1 %" if share < 0.5 else ">99 %"
    return f"{share * 100:.0f} %"


# --- artifacts ----------------------------------------------------------------------------


def artifacts_of(capture: Capture) -> dict[str, tuple[bytes, str]]:
    """The picture, and the full text of names that were cut."""
    found: dict[str, tuple[bytes, str]] = {}
    if capture.timeline is not None and capture.timeline.categories:
        devices = sum(1 for d in capture.devices or () if d.busy_ns)
        found["timeline.svg"] = (svg(capture.timeline, devices), "image/svg+xml")
    names = {k.key.name for k in capture.kernels or ()}
    cut: dict[str, str] = {}
    size = 0
    for name in sorted(names):
        short = shown_name(name)
        if short != name and size < MAX_FULL_NAMES:
            cut[short] = one_line(name, MAX_FULL_NAME)
            size += len(name)
    if cut:
        text = json.dumps(cut, indent=0, ensure_ascii=True)
        found["kernel-names.json"] = (text.encode("ascii"), "application/json")
    return found


def differences(
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    lost: Sequence[str] = (),
    added: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """How the profiled configuration differs from the benchmark's: variables and flags.

    Of variables that both had, nothing is known: records hold names alone.
    """
    found: list[dict[str, Any]] = [
        {"field": f"environment {name}", "benchmark": "set", "profile": "not passed on"}
        for name in lost
    ]
    found += [
        {"field": f"environment {name}", "benchmark": "not set", "profile": "set"} for name in added
    ]
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            found.append(
                {
                    "field": f"flag {one_line(name, 80)}",
                    "benchmark": _flag(was.get(name)),
                    "profile": _flag(now.get(name)),
                }
            )
    return found


def _flag(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return one_line(value if isinstance(value, str) else json.dumps(value, default=str))
