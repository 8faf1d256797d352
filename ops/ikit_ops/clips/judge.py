"""From the replayed steps of a clip to its word.

Each replayed step was run by the reference, in float32, on the very latent that the engine had.
How far the engine's output is from that is measured in units of what bfloat16 alone does at the
same place: r = |engine - reference| / |reference in bf16 - reference|.  An absolute bound could
not work, for that floor varies twofold from step to step and with the model; and the cosine is
useless, for low precision and wrong guidance keep it above 0.995.

Two kinds of error hide below the floor and still are errors: a guidance a little too strong and
a time a little off, because they push in one direction while rounding pushes in all.  So the
output is also projected on the two directions.  The pattern of r over the steps tells the rest:
even and moderate is precision, some at the floor and some far away is skipped work, far away
everywhere is another model, prompt or time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

PASS_MEDIAN, PASS_MAX = 1.5, 2.0
SUSPECT = 3.0
FAR = 10.0
EVEN = 2.5
GUIDANCE_PASS, GUIDANCE_MEAN, GUIDANCE_FAIL = 0.01, 0.0125, 0.02
ALIGNED = 0.2
TIME_PASS = 5e-4
EXPLAINED = 1.5


@dataclass(frozen=True)
class Step:
    """One replayed step of one stream.

    ``guidance_fit`` is the scale that the engine's output shows, ``guidance_ratio`` that over
    the reference's own, ``guidance_noise`` the ratio's noise as the bf16 run shows it;
    ``dsigma_fit`` how far the model's time was from the sampler's.  ``*_residual`` is r after
    that fit.  None where it was not measured.
    """

    stream: str
    step: int
    r: float
    rel_l2: float
    cosine: float
    floor: float
    guidance_fit: float | None = None
    guidance_ratio: float | None = None
    guidance_noise: float | None = None
    guidance_residual: float | None = None
    dsigma_fit: float | None = None
    dsigma_noise: float | None = None
    dsigma_residual: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As it stands in the record: the contract's fields first."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """Another way to run the reference that was tried, and how well it fits (median r)."""

    verdict: str
    what: str
    r: float


@dataclass(frozen=True)
class Judgement:
    """The word and the sentence."""

    verdict: str
    detail: str


def needs_candidates(steps: Sequence[Step]) -> bool:
    """Whether steps are so far from the reference that another time or text may explain them."""
    verdict = judge(steps).verdict
    return verdict in ("wrong_model", "timestep", "step_caching") or (
        verdict == "low_precision" and max(step.r for step in steps) > FAR
    )


def judge(steps: Sequence[Step], candidates: Sequence[Candidate] = ()) -> Judgement:
    """The verdict of a clip's replayed steps: pass, inconclusive, or what is wrong."""
    if not steps:
        return Judgement("inconclusive", "no step was replayed")
    bad = [step for step in steps if step.r > PASS_MAX]
    values = sorted(step.r for step in steps)
    shown = f"r median {statistics.median(values):.2f}, max {values[-1]:.2f} x the bf16 floor"
    best = min(candidates, key=lambda candidate: candidate.r, default=None)
    if best is not None and best.r <= EXPLAINED:
        return Judgement(best.verdict, f"{best.what} fits ({best.r:.2f} x the floor); {shown}")
    for found in (_guidance(steps, bad), _timestep(steps, bad)):
        if found is not None:
            return Judgement(found.verdict, f"{found.detail}; {shown}")
    if not bad and statistics.median(values) <= PASS_MEDIAN:
        return _passed(steps, shown)
    return _by_pattern(steps, values, shown)


def _passed(steps: Sequence[Step], shown: str) -> Judgement:
    doubt = [
        step
        for step in steps
        if step.guidance_ratio is not None
        and abs(step.guidance_ratio - 1) > GUIDANCE_PASS + 3 * (step.guidance_noise or 0)
    ]
    if doubt:
        return Judgement(
            "inconclusive",
            f"guidance fits {doubt[0].guidance_fit:.3f} at step {doubt[0].step}; {shown}",
        )
    return Judgement("pass", shown)


def _guidance(steps: Sequence[Step], bad: Sequence[Step]) -> Judgement | None:
    """Whether another guidance scale explains what is off: in every step, or in some."""
    for off in (_consistently_off(steps), [step for step in steps if _guidance_off(step)]):
        explained = {(step.stream, step.step) for step in off}
        if not off or any((step.stream, step.step) not in explained for step in bad):
            continue
        fits = ", ".join(f"{step.guidance_fit:.3f} at step {step.step}" for step in off[:4])
        ratio = off[0].guidance_ratio or 1.0
        streams = {step.stream for step in off}
        there = sum(step.stream in streams for step in steps)
        how = " in some steps only" if len(off) < there else ""
        how += f" ({', '.join(sorted(streams))})" if there < len(steps) else ""
        return Judgement("guidance", f"the guidance fits {fits}: {ratio:.3f} x what was asked{how}")
    return None


def _guidance_off(step: Step) -> bool:
    if step.guidance_ratio is None or step.guidance_residual is None:
        return False
    margin = max(GUIDANCE_FAIL, 4 * (step.guidance_noise or 0))
    return abs(step.guidance_ratio - 1) > margin and step.guidance_residual <= EXPLAINED


def _consistently_off(steps: Sequence[Step]) -> list[Step]:
    """The steps of a stream whose scales all err alike: their mean is surer than each of them."""
    for stream in sorted({step.stream for step in steps}):
        rows = [step for step in steps if step.stream == stream]
        fitted = [
            (step.guidance_ratio, step.guidance_noise or 0.0)
            for step in rows
            if step.guidance_ratio is not None and (step.guidance_residual or 0) <= EXPLAINED
        ]
        if len(fitted) < max(2, len(rows)):
            continue
        errors = [ratio - 1 for ratio, _ in fitted]
        middle = statistics.median(errors)
        noise = math.sqrt(sum(n * n for _, n in fitted) / len(fitted))
        spread = statistics.median(abs(error - middle) for error in errors)
        sure = 3 * max(noise, spread) / math.sqrt(len(fitted))
        if abs(middle) > max(GUIDANCE_MEAN, sure) and all(error * middle > 0 for error in errors):
            return rows
    return []


def _timestep(steps: Sequence[Step], bad: Sequence[Step]) -> Judgement | None:
    """Whether another time explains what is off; only steps with a fit are held against it."""
    off = [step for step in steps if _time_off(step)]
    fitted = {(step.stream, step.step) for step in steps if step.dsigma_fit is not None}
    explained = {(step.stream, step.step) for step in off}
    unexplained = [
        step
        for step in bad
        if (step.stream, step.step) in fitted and (step.stream, step.step) not in explained
    ]
    if not off or unexplained:
        return None
    if max(step.r for step in bad or steps) > FAR and len(fitted) < len(bad):
        return None  # two fitted steps do not explain many that are far away
    fits = ", ".join(f"{step.dsigma_fit:+.4f} at step {step.step}" for step in off[:4])
    return Judgement("timestep", f"the model's time is off by {fits}")


def _time_off(step: Step) -> bool:
    if step.dsigma_fit is None or step.dsigma_residual is None:
        return False
    margin = max(TIME_PASS, 4 * (step.dsigma_noise or 0))
    if abs(step.dsigma_fit) <= margin or step.dsigma_residual > EXPLAINED:
        return False
    # Any error has some share of any direction: a wrong time is a good part of what is off.
    return 1 - (step.dsigma_residual / step.r) ** 2 >= ALIGNED


def _by_pattern(steps: Sequence[Step], values: Sequence[float], shown: str) -> Judgement:
    """What the spread of r over the steps says."""
    low, high, middle = values[0], values[-1], statistics.median(values)
    near = [step for step in steps if step.r <= PASS_MAX]
    far = [step for step in steps if step.r > SUSPECT]
    where = ", ".join(str(step.step) for step in sorted(far, key=lambda step: step.step)[:8])
    if far and near and not _even(values):
        return Judgement(
            "step_caching", f"steps {where} are far off while others are at the floor; {shown}"
        )
    if high <= SUSPECT and middle <= PASS_MAX:
        return Judgement("inconclusive", f"between honest and not; replay more steps; {shown}")
    if _even(values) and high <= 1.5 * FAR and middle <= FAR:
        return Judgement("low_precision", f"all steps are off alike; {shown}")
    if low > FAR or middle > FAR:
        return Judgement("wrong_model", f"far from the reference everywhere; {shown}")
    if high > EVEN * middle:
        return Judgement("step_caching", f"steps {where} are much further off; {shown}")
    return Judgement("low_precision", f"every step is off; {shown}")


def _even(values: Sequence[float]) -> bool:
    """Whether the spread (p90 over p10) is that of one cause."""
    tenth = max(0, round(0.1 * (len(values) - 1)))
    return values[len(values) - 1 - tenth] < EVEN * values[tenth]
