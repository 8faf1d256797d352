"""What the spread of r over a stream's steps says, where no direction explains it.

Even and moderate is low precision: rounding to few bits hurts every step alike, and leaves the
output's direction and its guidance nearly as they were, even at twenty times the floor.  Some
steps at the floor and some far away is skipped work.  Far away everywhere is another model, or
something else was asked of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ikit_ops.clips.fits import LEAST_NUMBERS

FAR = 10.0
EVEN, EVEN_FAR = 2.5, 20.0
NEAR_GUIDANCE, NEAR_COSINE = 0.1, 0.9


@dataclass(frozen=True)
class Bands:
    """Up to where r is honest: the median, the largest; and from where a step is far off.

    Against float32 an honest bf16 engine shows 1.0 to 1.2; a reference that is itself computed
    from bf16 carries a noise of its own, so its bands are wider.
    """

    median: float = 1.5
    most: float = 2.0
    suspect: float = 3.0


BANDS = {"float32": Bands(), "bfloat16": Bands(2.0, 3.0, 4.5)}


def word(steps: Sequence[Any], bands: Bands) -> tuple[str, str]:
    """The verdict and the sentence for steps of one stream that are beyond the bands."""
    values = sorted(step.r for step in steps)
    high, middle = values[-1], statistics.median(values)
    far = sorted(step.step for step in steps if step.r > bands.suspect)
    near = [step for step in steps if step.r <= bands.most]
    where = ", ".join(map(str, far[:8]))
    if min(step.numbers for step in steps) < LEAST_NUMBERS and high <= FAR:
        return "inconclusive", "too few numbers to tell noise from an error; make a larger clip"
    if far and near and not even(values):
        return "step_caching", f"steps {where} are far off while others are at the floor"
    if high <= bands.suspect and middle <= bands.most:
        return "inconclusive", "between honest and not; replay more steps"
    if even(values) and high <= EVEN_FAR and (middle <= FAR or _recognisable(steps)):
        return "low_precision", "all steps are off alike"
    if middle > FAR:
        return "wrong_model", "far from the reference everywhere"
    if high > EVEN * middle:
        return "step_caching", f"steps {where} are much further off"
    return "low_precision", "every step is off"


def _recognisable(steps: Sequence[Any]) -> bool:
    """Whether the outputs still point where the reference's do, with the guidance asked for."""
    offs = [step.fits["guidance"].off for step in steps if "guidance" in step.fits]
    cosines = [step.cosine for step in steps]
    near = not offs or abs(statistics.median(offs)) <= NEAR_GUIDANCE
    return bool(near and statistics.median(cosines) > NEAR_COSINE)


def even(values: Sequence[float]) -> bool:
    """Whether the spread (p90 over p10) of sorted values is that of one cause."""
    tenth = max(0, round(0.1 * (len(values) - 1)))
    return values[len(values) - 1 - tenth] < EVEN * values[tenth]
