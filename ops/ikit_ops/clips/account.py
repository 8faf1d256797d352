"""What a server says of a clip that it made, and how much of that can be.

Latency is ours: the clock ran here.  Stages, the server's own time and its memory are its
account, in its units.  Our server tells stages in milliseconds and memory in MB.  vLLM-omni, and
FastVideo after it, tell stages in seconds, one beside and inside of the other (``forward`` holds
them all), and, under the name of MB, the allocator's reserved bytes divided by 1024 * 1024;
SGLang's jobs do that too.  All of them write 0 where they did not look.

A server cannot have worked longer than its answer took, nor in a stage longer than in all.  What
breaks that is in another unit, or false: it becomes unknown, and the doubt is kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from ikit_mcp.call import one_line

MOST_STAGES, MOST_STEPS = 20, 1_000
MOST_MEMORY, MOST_MS = 2**50, 1e12
SLACK, SLACK_S = 1.01, 0.005
MB, MIB = 1e6, float(2**20)


@dataclass
class Answer:
    """One request's answer: ``error`` is None when an mp4 came.  Times in seconds."""

    index: int
    latency_s: float = 0.0
    started_s: float = 0.0
    error: str | None = None
    sha256: str | None = None
    bytes: int = 0
    server_time_s: float | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    steps_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    model: str | None = None
    partition: bool = False
    doubts: dict[str, str] = field(default_factory=dict)

    @property
    def ended_s(self) -> float:
        """When the answer was here, or failed."""
        return self.started_s + self.latency_s

    def stage_share(self) -> float | None:
        """The part of the server's time that named stages explain.

        None where it tells none, or tells stages that may lie inside of each other.
        """
        if not self.stages_ms or not self.server_time_s or not self.partition:
            return None
        named = sum(value for name, value in self.stages_ms.items() if name != "other")
        return named / (self.server_time_s * 1e3)


def take_headers(answer: Answer, headers: Message, ours: bool) -> None:
    """Take what the headers of a clip say into its answer; ``latency_s`` must be known."""
    ours = ours or headers.get("X-Server-Time-S") is not None
    _take(
        answer,
        ours,
        time_s=headers.get("X-Server-Time-S") or headers.get("X-Inference-Time-S"),
        stages=_json(headers.get("X-Stage-Durations")),
        peak=headers.get("X-Peak-Memory-MB"),
        model=headers.get("X-Model"),
    )
    steps = _json(headers.get("X-Step-Durations"))
    if ours and isinstance(steps, list):
        kept = [value for each in steps[:MOST_STEPS] if (value := number(each)) is not None]
        answer.steps_ms = kept if _fits(sum(kept) / 1e3, answer.latency_s) else []
    named = headers.get("X-Video-Sha256")
    if named is not None and named.strip().lower() != answer.sha256:
        answer.error = "the answer's sha256 is not the one that the server names"


def take_job(answer: Answer, job: Mapping[str, Any]) -> None:
    """Take what the record of a finished job says into its answer; its model is none to trust.

    SGLang names the one that was asked for, and one of another maker where none was.
    """
    _take(
        answer,
        False,
        time_s=job.get("inference_time_s"),
        stages=job.get("stage_durations"),
        peak=job.get("peak_memory_mb"),
        model=None,
    )


def _take(answer: Answer, ours: bool, *, time_s: Any, stages: Any, peak: Any, model: Any) -> None:
    answer.model = one_line(model, 120) if isinstance(model, str) and model.strip() else None
    memory = (number(peak) or 0.0) * (MB if ours else MIB)
    answer.peak_bytes = round(memory) if 0 < memory < MOST_MEMORY else None
    told = number(time_s) or None  # 0: it did not look
    if told is not None and not _fits(told, answer.latency_s):
        answer.doubts["server time"] = (
            f"the server tells {told:.6g} s for an answer that took {answer.latency_s:.6g} s"
        )
        told = None
    answer.server_time_s = told
    found = _stages_ms(stages, ours)
    whole_s = told or answer.latency_s
    most_ms = sum(found.values()) if ours else max(found.values(), default=0.0)
    if not _fits(most_ms / 1e3, whole_s):
        answer.doubts["stages"] = f"stages of {most_ms / 1e3:.6g} s do not fit into {whole_s:.6g} s"
        found = {}
    answer.stages_ms, answer.partition = found, ours


def _fits(part_s: float, whole_s: float) -> bool:
    """Whether a part is no longer than the whole, but for rounding."""
    return part_s <= whole_s * SLACK + SLACK_S


def _stages_ms(told: Any, ours: bool) -> dict[str, float]:
    """The stages in ms, under names of our own alphabet."""
    found: dict[str, float] = {}
    for key, value in list(told.items())[:MOST_STAGES] if isinstance(told, dict) else ():
        name, in_ms = stage_name(key), ours or key.endswith("_ms")
        spent = None if isinstance(value, str) else number(value)
        if name and spent is not None and spent < MOST_MS and name not in found:
            found[name] = spent if in_ms else spent * 1e3
    return found


def stage_name(key: str) -> str:
    """A stage's name in [a-z0-9_], without its pipeline and unit; ``diffuse`` is ``denoise``."""
    head, dot, rest = key[:200].partition(".")
    path = rest if dot and head.lower().endswith("pipeline") else key[:200]
    if path.rsplit(".", 1)[-1] == "diffuse":
        path = "denoise"
    name = re.sub(r"[^a-z0-9]+", "_", path.removesuffix("_ms").lower())
    return name.strip("_")[:40].rstrip("_")


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def number(value: Any) -> float | None:
    """A finite number from 0 on, perhaps as text; else None."""
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) and found >= 0 else None
