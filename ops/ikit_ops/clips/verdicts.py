"""The words of the verdict, their order, and what a sample of steps can and cannot see.

A clip gets one word: that of the first check that failed.  Everything else that was found is
evidence beside it.  The order is that of the causes: a dump that is not readable says nothing
about its arithmetic, and steps that do not chain say nothing about the network.

A sample can miss.  Some of the replayed steps can be foreseen (``sampling``); of the ``M`` others
``k`` are drawn after the clip was made.  An engine that cheats in ``c`` of them is missed with
probability C(M-c, k) / C(M, k); several clips multiply.  This is the worst place where bad steps
can lie, for the foreseen ones are seen for certain.  The verdict states these odds, so that
"pass" is read as what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FAILURES = (
    "no_dump", "unreadable", "layout", "non_finite", "request_mismatch", "mp4_mismatch",
    "schedule", "arithmetic", "chain", "final", "noise", "step_reuse", "guidance", "timestep",
    "step_caching", "low_precision", "conditioning", "wrong_model", "clip_mismatch",
)  # fmt: skip
VERDICTS = (*FAILURES, "inconclusive", "not_checkable", "pass")
MEANING = {
    "pass": "the replayed steps are the reference's within its own bf16 noise",
    "no_dump": "a clip has no dump of its steps",
    "unreadable": "a dump is no safetensors file",
    "layout": "a dump is not laid out as clip-steps.v1 says",
    "non_finite": "latents hold NaN or infinity",
    "request_mismatch": "a clip was made for another request",
    "mp4_mismatch": "an mp4 is not the one that its dump was written for",
    "schedule": "the noise levels are not those of the sampler",
    "arithmetic": "x_next is not x + (sigma_next - sigma) * out",
    "chain": "a step does not start where the one before it ended",
    "final": "the final latent is not the last x_next",
    "noise": "the first latent is not the seeded noise",
    "step_reuse": "steps reuse outputs of earlier steps",
    "guidance": "the guidance is not the scale that was asked for",
    "timestep": "the model was given another time than the sampler's",
    "step_caching": "some steps are far from the reference while the others are at its noise",
    "low_precision": "every step is off as by low precision",
    "conditioning": "the model was conditioned on something else",
    "wrong_model": "the outputs are not the reference's",
    "clip_mismatch": "the mp4 does not show the final latent",
    "inconclusive": "nothing failed, but what was looked at is not enough to pass",
    "not_checkable": "files cannot be read here, or the sampler is not one that can be checked",
}
NOT_TOLD_APART = (
    "within bf16 noise the check cannot tell int8 weight-only, fp16 or weights that differ by "
    "1 % from bf16, nor anything else that stays within 1.5 x the floor, as W8A8 does with int8 "
    "activations that are scaled token by token in a part of the layers"
)
FROM_BF16 = (
    "the memory does not hold the reference in float32: it computed in float32 from bf16 weights "
    "and a bf16 text, so that more passes: r of 2.0 in the median, and 3.0 at most"
)


@dataclass(frozen=True)
class Check:
    """One check: ok is None when it could not run; ``verdict`` is the word if it failed."""

    name: str
    ok: bool | None
    detail: str
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in the record."""
        return {"name": self.name, "ok": self.ok, "detail": self.detail}


@dataclass
class ClipResult:
    """One clip: its checks in order, and its replayed steps."""

    video_sha256: str | None
    checks: list[Check] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    replayed: bool = False
    open_verdict: str | None = None

    def add(self, name: str, ok: bool | None, detail: str = "", verdict: str | None = None) -> None:
        """Add a check; its verdict is its name unless given."""
        self.checks.append(Check(name, ok, detail, verdict or name))

    @property
    def failed(self) -> Check | None:
        """The failed check that names the verdict: the first in the order of the words."""
        failed = [check for check in self.checks if check.ok is False]
        return min(failed, key=lambda check: FAILURES.index(check.verdict), default=None)

    @property
    def verdict(self) -> str:
        """The clip's word."""
        if self.failed is not None:
            return self.failed.verdict
        if any(check.verdict == "not_checkable" and check.ok is None for check in self.checks):
            return "not_checkable"
        if self.open_verdict:
            return self.open_verdict
        unseen = any(check.ok is None for check in self.checks)
        return "pass" if self.replayed and not unseen else "inconclusive"

    def to_json(self) -> dict[str, Any]:
        """As it stands in the record."""
        return {
            "video_sha256": self.video_sha256,
            "verdict": self.verdict,
            "checks": [check.to_json() for check in self.checks],
            "steps": self.steps,
        }


def worst(verdicts: Iterable[str]) -> str:
    """The record's word: any failure, in order, before inconclusive, not_checkable and pass."""
    return min(verdicts, key=VERDICTS.index, default="inconclusive")


def detection(sampled: Sequence[tuple[int, int]], cheated: int) -> float:
    """How likely ``cheated`` bad steps in every clip hit a drawn one, wherever they lie.

    ``sampled`` has for each clip the steps that are open to the draw, and how many were drawn.
    Between 0 and 1; 1 when more steps are bad than the draw leaves out.
    """
    missed = 1.0
    for count, drawn in sampled:
        bad = min(cheated, count)
        missed *= math.comb(count - bad, drawn) / math.comb(count, drawn)
    return 1.0 - missed
