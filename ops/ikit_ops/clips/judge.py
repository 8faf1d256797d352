"""From the replayed steps of a clip to its word.

Each replayed step was run by the reference, in float32, on the very latent that the engine had.
How far the engine's output is from that is measured in units of what bfloat16 alone does at the
same place: r = |engine - reference| / |reference in bf16 - reference|.  An absolute bound could
not work, for that floor varies twofold from step to step and with the model; and the cosine is
useless, for low precision and wrong guidance keep it above 0.995.

r says how much is off.  What is off is told in three ways: by the directions that the error holds
(``fits``), by other times and texts that fit where the request's do not (``Candidate``), and, where
neither explains it, by the pattern of r over the steps (``pattern``).  Streams are judged one by
one, as the video may hide what the audio shows; the clip takes the worst.

The costlier evidence is asked for in this order, and only where the cheaper gives reason: an
honest engine's clip needs no more than the steps themselves and their floor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ikit_ops.clips import fits as fitting
from ikit_ops.clips import pattern
from ikit_ops.clips.fits import Fit
from ikit_ops.clips.pattern import BANDS, Bands
from ikit_ops.clips.verdicts import VERDICTS

PASS_MEDIAN, PASS_MAX = BANDS["float32"].median, BANDS["float32"].most
NOTEWORTHY, UNEVEN = 0.2, 2.0
A_LITTLE_MORE = 1.15  # r of honest bf16 kernels that are not torch's
MARGIN = 1.2
TO_THE_BIT, BETTER = 0.2, 0.8
UNNAMED = ("low_precision", "step_caching", "wrong_model")  # words of the pattern alone
TEXT = 0.5
NOTHING = 0.02
COARSE = 0.15  # guidance that is not known better does not pass


@dataclass(frozen=True)
class Step:
    """One replayed step of one stream.

    ``guidance_fit`` is the scale that the engine's output shows, ``dsigma_fit`` how far the
    model's time was from the sampler's, None where they were not measured; ``fits`` what the
    error holds of each direction.  ``numbers`` is how many numbers the output has, ``exact`` the
    dtype that the reference computed in, ``int8_weights`` the r that it shows with its weights in
    int8 (None: not looked), ``unseen`` guidance passes that change too little to be measured.
    """

    stream: str
    step: int
    r: float
    rel_l2: float
    cosine: float
    floor: float
    guidance_fit: float | None = None
    dsigma_fit: float | None = None
    fits: Mapping[str, Fit] = field(default_factory=dict)
    numbers: int = 1 << 20
    exact: str = "float32"
    int8_weights: float | None = None
    unseen: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Take what comes from JSON too."""
        object.__setattr__(self, "unseen", tuple(self.unseen))
        made = {k: Fit(**v) if isinstance(v, dict) else v for k, v in self.fits.items()}
        object.__setattr__(self, "fits", made)

    def to_json(self) -> dict[str, Any]:
        """As it stands in the record: the contract's fields first."""
        return asdict(self)


@dataclass(frozen=True)
class Candidate:
    """Another way to run the reference that was tried, and how far off it is (the largest r).

    ``share`` is set where it is no one way but all directions that texts have: the least part of
    an error that lies in them.
    """

    verdict: str
    what: str
    r: float
    share: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The word and the sentence."""

    verdict: str
    detail: str


def judge(steps: Sequence[Step], candidates: Sequence[Candidate] = ()) -> Judgement:
    """The verdict of a clip's replayed steps: pass, inconclusive, or what is wrong."""
    if not steps:
        return Judgement("inconclusive", "no step was replayed")
    bands = bands_of(steps)
    found = [fitting.found(rows, bands.median, bands.most) for rows in by_stream(steps)]
    left = min((each.left() for each in found if each is not None), default=math.inf)
    ways = [candidate for candidate in candidates if candidate.share is None]
    best = min(ways, key=lambda candidate: candidate.r, default=None)
    if best is not None and best.r <= min(bands.median, BETTER * left):
        told = f"{best.what} fits ({best.r:.2f} x the floor); {_shown(steps)}"
        return Judgement(best.verdict, told)
    text = max(candidates, key=lambda candidate: candidate.share or 0.0, default=None)
    if text is not None and (text.share or 0.0) >= TEXT and not any(found):
        told = f"{text.what}: {100 * (text.share or 0.0):.0f} % of what is off is what texts change"
        return Judgement(text.verdict, f"{told}; {_shown(steps)}")
    words = [_stream(rows, bands) for rows in by_stream(steps)]
    return min(words, key=lambda each: VERDICTS.index(each.verdict))


def bands_of(steps: Sequence[Step]) -> Bands:
    """The bands for the dtype that the reference computed in."""
    return BANDS[steps[0].exact]


def by_stream(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps, stream by stream."""
    names = dict.fromkeys(step.stream for step in steps)
    return [[step for step in steps if step.stream == name] for name in names]


def _shown(steps: Sequence[Step]) -> str:
    values = [step.r for step in steps]
    middle, high = statistics.median(values), max(values)
    return f"r median {middle:.2f}, max {high:.2f} x the bf16 floor"


def _stream(steps: Sequence[Step], bands: Bands) -> Judgement:
    """The verdict of one stream."""
    shown = f"{steps[0].stream}: {_shown(steps)}"
    found = fitting.found(steps, bands.median, bands.most)
    if found is not None:
        if found.direction.name == "guidance" and _unguided(found.steps):
            why = "the output is the pass without the prompt: the prompt had no part in it"
            return Judgement("conditioning", f"{why}; {shown}")
        return Judgement(found.direction.verdict, f"{_told(found, steps)}; {shown}")
    values = [step.r for step in steps]
    if max(values) > bands.most or statistics.median(values) > bands.median:
        word, why = pattern.word(steps, bands)
        bound = honest_bound(steps)
        if word == "inconclusive" and bound is not None and statistics.median(values) > bound:
            word, why = "low_precision", f"bf16 with int8 weights would show {bound:.2f} at most"
        return Judgement(word, f"{why}; {shown}")
    if (doubted := fitting.doubted(steps)) is not None:
        direction, step = doubted
        what = _amount(direction.name, step)
        return Judgement(
            "inconclusive", f"{what} is more than noise and less than a proof; {shown}"
        )
    known = _resolution(steps)
    if known is not None and known > COARSE:
        return Judgement(
            "inconclusive",
            f"the guidance is known to {100 * known:.0f} % only; make a larger clip; {shown}",
        )
    guidance = f"; guidance as asked to {max(100 * known, 0.1):.1f} %" if known is not None else ""
    return Judgement("pass", f"{shown}{guidance}{_unseen(steps)}")


def _unguided(steps: Sequence[Step]) -> bool:
    """Whether a guidance of zero explains steps: the unconditional pass alone."""
    return all(abs(step.guidance_fit or 0.0) < NOTHING for step in steps)


def honest_bound(steps: Sequence[Step]) -> float | None:
    """The median r that bf16 arithmetic with int8 weights may show here, with a margin."""
    known = [step.int8_weights for step in steps if step.int8_weights is not None]
    if not known:
        return None
    usual = math.sqrt(sum(value**2 for value in known) / len(known))
    return MARGIN * math.hypot(A_LITTLE_MORE, usual)


def _resolution(steps: Sequence[Step]) -> float | None:
    """How well the guidance is known: the fraction that it may be off by."""
    known = [step.fits["guidance"] for step in steps if "guidance" in step.fits]
    if not known or min(step.numbers for step in steps) < fitting.LEAST_NUMBERS:
        return None
    middle, doubt = fitting.mean(known)
    return abs(middle) + doubt


def _unseen(steps: Sequence[Step]) -> str:
    names = sorted({name for step in steps for name in step.unseen})
    return f"; {' and '.join(names)} without effect, and so not proven" if names else ""


def _told(found: fitting.Found, steps: Sequence[Step]) -> str:
    """What a direction shows, in a sentence."""
    some = " in some steps only" if len(found.steps) < len(steps) else ""
    shown = ", ".join(_amount(found.direction.name, step) for step in found.steps[:4])
    part = f"explains {100 * max(found.share, 0.0):.0f} % of what is off"
    return f"{shown}{some if found.direction.name != 'time' else ''}: {part}"


def _amount(name: str, step: Step) -> str:
    off = step.fits[name].off
    where = f"at step {step.step}"
    if name == "guidance":
        return f"guidance {step.guidance_fit or 0:.3f} ({1 + off:.3f} x what was asked) {where}"
    if name == "time":
        return f"the model's time is off by {off:+.4f} {where}"
    if name == "previous":
        return f"{100 * off:.0f} % of the previous output {where}"
    if name == "int8":
        return f"{off:.2f} x what int8 activations do {where}"
    what = "the output" if name == "scale" else f"{name} guidance" if name != "rescale" else name
    return f"{what} is {1 + off:.3f} x the reference's {where}"


# --- what to look at next --------------------------------------------------------------------


def suspicious(steps: Sequence[Step]) -> bool:
    """Whether r gives reason for a second look: above a bf16 engine's, or uneven, or doubted."""
    for rows in by_stream(steps):
        values = [step.r for step in rows]
        high, middle = max(values), statistics.median(values)
        if high > A_LITTLE_MORE or (high > NOTEWORTHY and high > UNEVEN * middle):
            return True
        if fitting.doubted(rows) is not None:
            return True
    return False


def needs_calibration(steps: Sequence[Step]) -> bool:
    """Whether somebody would be accused or doubted for so little that int8 weights may do it."""
    bands = bands_of(steps)
    if max(step.r for step in steps) > bands.suspect:
        return False
    return judge(steps).verdict != "pass"


def needs_candidates(steps: Sequence[Step]) -> bool:
    """Whether steps are so far from the reference that another time or text may explain them.

    A direction that explains them to the last bit needs no other explanation; one that leaves
    some may itself be the shadow of another text.
    """
    bands = bands_of(steps)
    if max(step.r for step in steps) <= bands.suspect and judge(steps).verdict not in UNNAMED:
        return False
    found = [fitting.found(rows, bands.median, bands.most) for rows in by_stream(steps)]
    return not any(each is not None and each.left() <= TO_THE_BIT for each in found)
