"""Checks of what ran on the device: attention backends, CUDA graphs, variables that are dead.

Engines differ in the names of these things, not in what they do to a number.  An attention
backend is judged by lists of names only where nothing better is known: first comes the
engine's own order of candidates, which it prints, and a name that no list has is a warning,
never silently fine.  Graphs are judged by the mode and the sizes that were captured: a batch
above the largest runs without a graph, one between two sizes is padded to the larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ikit_ops.engines.adapter import AttentionNames
from ikit_ops.engines.gates import Check, Seen


def attention_check(
    names: Sequence[str],
    table: AttentionNames,
    *,
    candidates: Sequence[str] | None = None,
    requested: str | None = None,
    required: bool = True,
) -> list[Check]:
    """The attention backends of all layers against the engine's names and its own order."""
    check = "attention_backend"
    used = list(dict.fromkeys(names))
    if not used:
        text = "the engine did not say which attention backend it used"
        return [Check(check, "unknown", text, required=required)]
    found = []
    wanted = None if requested is None else _backend(requested)
    if wanted is not None and wanted not in {_backend(name) for name in used}:
        text = f"attention backend {requested} was requested, {', '.join(used)} ran"
        found.append(Check(check, "violation", text, argument="attention_backend"))
    for name in used:
        found += _one_backend(check, name, table, candidates, wanted)
    return found or [Check(check, "ok")]


def _one_backend(
    check: str,
    name: str,
    table: AttentionNames,
    candidates: Sequence[str] | None,
    wanted: str | None,
) -> list[Check]:
    key = _backend(name)
    asked = wanted == key
    if key in {_backend(n) for n in table.fallback}:
        if asked:
            return [Check(check, "warning", f"attention ran on {name}, a fallback, as requested")]
        text = f"attention ran on {name}, a fallback: decode is slower than the engine's own best"
        return [Check(check, "violation", text)]
    if key not in {_backend(n) for n in table.fast | table.legitimate}:
        text = f"unknown_backend: attention ran on {name}, which is not among {table.source}"
        return [Check(check, "warning", text)]
    if candidates and not asked and key != _backend(candidates[0]) and key in map(
        _backend, candidates
    ):  # fmt: skip
        text = f"attention ran on {name}, the engine's own first choice was {candidates[0]}"
        return [Check(check, "warning", text)]
    return []


def _backend(name: str) -> str:
    """A backend's name without the enumeration's, in one spelling."""
    return name.rpartition(".")[2].strip().upper().replace("-", "_")


def graphs_check(
    name: str,
    *,
    mode: str | None,
    sizes: Sequence[int] | None,
    largest: int | None,
    batch: int = 1,
    argument: str | None = None,
    why: str = "",
) -> list[Check]:
    """CUDA graphs for decoding a batch: ``mode`` is FULL, PIECEWISE or NONE, None unknown.

    A batch above the largest captured size runs without a graph; one between two sizes is
    padded to the larger.
    """
    because = f" ({why})" if why else ""
    if mode is None:
        text = "whether decoding used CUDA graphs was not seen"
        return [Check(name, "unknown", text, required=True)]
    if mode == "NONE":
        text = (
            f"CUDA graphs off{because}: batch-1 decode then pays a launch for every kernel; "
            "this measures launch overhead"
        )
        return [Check(name, "violation", text, argument=argument)]
    if mode == "PIECEWISE":
        text = f"piecewise CUDA graphs{because}: attention is launched eagerly in every layer"
        return [Check(name, "warning", text)]
    if largest is not None and batch > largest:
        text = (
            f"no CUDA graph covers a batch of {batch} (the largest is {largest}): decode ran "
            "eagerly and pays a launch for every kernel"
        )
        return [Check(name, "violation", text, argument=argument)]
    if sizes and batch not in sizes:
        padded = min((s for s in sizes if s >= batch), default=None)
        text = f"the batch of {batch} is padded to {padded}: it pays for a larger one"
        return [Check(name, "warning", text)]
    return [Check(name, "ok")]


def dead_variables(seen: Seen, dead: Mapping[str, str]) -> list[Check]:
    """Variables that are set, and that this version of the engine ignores."""
    return [
        Check("environment", "warning", f"{name} is set and ignored by this engine: {why}")
        for name, why in dead.items()
        if name in seen.environment
    ]
