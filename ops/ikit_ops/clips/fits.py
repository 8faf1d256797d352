"""Errors below the noise: how much of a known direction an output holds, and what that proves.

Rounding pushes an output in all directions, a cheat in one.  So the error d = engine - reference
is projected on what each cheat would do to this very step: the difference of the guidance passes,
the derivative by time, the previous step's output, the output itself, what int8 activations would
do.  Along a direction v the error holds ``off = <d, v> / <v, v>``, and what is left has the size
``residual``.  An error of norm |n| that points nowhere puts |n| / (|v| sqrt(N)) of that into any
direction of N numbers, with n what is left of the error beside the direction; the reference's own
bf16 run shows how far real rounding is from that ideal.  Both together are ``noise``.

Honest errors need not point nowhere.  Weights that were rounded to int8 are wrong in the same way
at every step, and may well look like 1 to 3 % of guidance, so a mean over steps does not make
them smaller.  How large that is in a model cannot be known, but it can be measured: ``bias`` is
what the reference itself shows with its weights in int8, for an error as large as the one that is
left here.  It is measured only before somebody would be accused or doubted.

Two kinds of evidence accuse.  Either the direction explains most of what is off, which no honest
error does: nine tenths of its energy in two steps, or nearly all of it in one.  Or several steps
agree on an amount that is beyond three times noise and bias together, and that explains nearly a
third of what is off: int8 weights reach one or the other in small models, and not both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST, NEARLY_ALL, SOME = 0.9, 0.97, 0.3
SURE, SURE_OF_ONE = 3.0, 4.0  # one step of many strays further than their mean
PLAIN = 0.15  # from what r on rounding of the sampler's own numbers is no longer a reason
LEAST_NUMBERS = 32  # of fewer, a chance direction may hold a good part


@dataclass(frozen=True)
class Direction:
    """A cheat that has a direction: its word, and from what amount on it counts.

    ``fail`` accuses a single step, ``mean`` all of a stream's steps together; up to ``fine``
    (beside the noise) a step passes.
    """

    name: str
    verdict: str
    fail: float
    mean: float
    fine: float = math.inf
    unit: float = 1.0


DIRECTIONS = (
    Direction("guidance", "guidance", 0.015, 0.0125, 0.01),
    Direction("stg", "guidance", 0.03, 0.02, 0.02),
    Direction("modality", "guidance", 0.03, 0.02, 0.02),
    Direction("rescale", "guidance", 0.01, 0.0075, 0.01),
    Direction("scale", "guidance", 0.01, 0.0075),
    Direction("time", "timestep", 5e-4, 5e-4, 5e-4),
    Direction("previous", "step_caching", 0.05, 0.05),
    Direction("int8", "low_precision", 0.3, 0.3),
)


@dataclass(frozen=True)
class Fit:
    """What one output holds of one direction.

    ``off`` is the amount (0: none; of guidance, relative to what was asked for), ``noise`` and
    ``bias`` what rounding and int8 weights put there (bias is None until it was measured),
    ``residual`` the r that is left without it.
    """

    off: float
    residual: float
    noise: float
    bias: float | None = None

    def doubt(self) -> float:
        """The amount that an honest engine may show in this step."""
        return SURE_OF_ONE * math.hypot(self.noise, self.bias or 0.0)


@dataclass(frozen=True)
class Found:
    """A direction that the steps of a stream hold: which, where, and how much it explains."""

    direction: Direction
    steps: tuple[Any, ...]
    share: float

    def left(self) -> float:
        """The largest r that is left when the direction is taken out."""
        return float(max(step.fits[self.direction.name].residual for step in self.steps))


def share(step: Any, fit: Fit) -> float:
    """The part of a step's error (of its energy) that a fit explains."""
    return 1.0 - (fit.residual / step.r) ** 2 if step.r > 0 else 0.0


def found(steps: Sequence[Any], median: float, most: float) -> Found | None:
    """The direction that explains what is off in a stream's steps; the best, if several do.

    ``median`` and ``most`` are the bands of r for honest engines: what is left must be within
    the first, and every step beyond the second must be explained.
    """
    there = [each for direction in DIRECTIONS if (each := _holds(direction, steps, median, most))]
    return max(there, key=lambda each: each.share, default=None)


def _holds(direction: Direction, steps: Sequence[Any], median: float, most: float) -> Found | None:
    rows = [(step, step.fits[direction.name]) for step in steps if direction.name in step.fits]
    rows = [(step, fit) for step, fit in rows if step.numbers >= LEAST_NUMBERS]
    named = [(step, fit) for step, fit in rows if _names(direction, step, fit, median, most)]
    plain = [(step, fit) for step, fit in rows if _is_plain(step, fit)]
    if len(plain) > 1:
        named = [each for each in rows if each in named or each in plain]
    sure = len(named) > 1 or any(
        step.r > most or share(step, fit) >= NEARLY_ALL for step, fit in named
    )
    if not sure:
        named = agreed(direction, rows, median)
    if not named or not _explains(steps, rows, named, most):
        return None
    return Found(direction, tuple(step for step, _ in named), _pooled(named))


def _names(direction: Direction, step: Any, fit: Fit, median: float, most: float) -> bool:
    """Whether a step holds so much of a direction that it speaks against the engine."""
    enough = abs(fit.off) > max(direction.fail, SURE_OF_ONE * fit.noise)
    return enough and fit.residual <= median and (share(step, fit) >= MOST or step.r > most)


def _is_plain(step: Any, fit: Fit) -> bool:
    """Whether a step is off by nothing but a direction, however little of it that is."""
    seen = step.r >= PLAIN and abs(fit.off) > SURE_OF_ONE * fit.noise
    return seen and share(step, fit) >= NEARLY_ALL


def _explains(steps: Sequence[Any], rows: Sequence[Any], named: Sequence[Any], most: float) -> bool:
    """Whether no step that is beyond the band is left without an explanation."""
    bad = {step.step for step in steps if step.r > most}
    looked, explained = {step.step for step, _ in rows}, {step.step for step, _ in named}
    if bad & looked - explained:
        return False
    # A few fitted steps do not explain many others that are far away.
    return not bad - looked or max(step.r for step in steps) <= 5 * most


def agreed(
    direction: Direction, rows: Sequence[tuple[Any, Fit]], median: float
) -> list[tuple[Any, Fit]]:
    """The steps, where all that can tell agree on an amount beyond noise and bias."""
    if len(rows) < 2 or any(fit.residual > median for _, fit in rows):
        return []
    middle, doubt = mean([fit for _, fit in rows])
    clear = [fit for _, fit in rows if abs(fit.off) > 2 * fit.noise]
    if len(clear) < 2 or any(fit.off * middle < 0 for fit in clear):
        return []
    if abs(middle) <= max(direction.mean, doubt) or _pooled(rows) < SOME:
        return []
    return list(rows)


def mean(fits: Sequence[Fit]) -> tuple[float, float]:
    """The mean of several fits, each weighted by its noise, and how far that is to be trusted.

    Noise averages out over steps, or what they scatter where that is more; a bias does not.
    """
    least = min((fit.noise for fit in fits if fit.noise > 0), default=1.0)
    pairs = [((least / max(fit.noise, least)) ** 2, fit) for fit in fits]
    whole = sum(weight for weight, _ in pairs)
    middle = sum(weight * fit.off for weight, fit in pairs) / whole
    noise = sum((weight * fit.noise) ** 2 for weight, fit in pairs)
    scatter = sum((weight * (fit.off - middle)) ** 2 for weight, fit in pairs)
    bias = sum(weight * (fit.bias or 0.0) for weight, fit in pairs)
    return middle, SURE * math.hypot(math.sqrt(max(noise, scatter)), bias) / whole


def doubted(steps: Sequence[Any]) -> tuple[Direction, Any] | None:
    """A direction that a stream's steps hold too much of for an honest engine, and its worst step.

    In one step, or in the mean of them all.
    """
    for direction in DIRECTIONS:
        rows = [s for s in steps if direction.name in s.fits and s.numbers >= LEAST_NUMBERS]
        if not rows:
            continue
        fits = [step.fits[direction.name] for step in rows]
        middle, doubt = mean(fits)
        alone = [abs(fit.off) - direction.fine - fit.doubt() for fit in fits]
        if max(alone) > 0 or (len(fits) > 1 and abs(middle) > direction.fine + doubt):
            return direction, rows[alone.index(max(alone))]
    return None


def _pooled(rows: Sequence[tuple[Any, Fit]]) -> float:
    whole = sum(step.r**2 for step, _ in rows)
    return 1.0 - sum(fit.residual**2 for _, fit in rows) / whole if whole else 0.0
