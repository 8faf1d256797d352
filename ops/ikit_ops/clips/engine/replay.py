"""Replay: the reference run on the sampled steps of a clip, and what its outputs are held to.

What every clip costs is the reference on the sampled steps, and in bf16 on a few of them (the
floor).  The rest is asked for by what was found: the derivative by time and the direction of int8
activations where r gives reason for a second look, the reference with int8 weights before a
small offset accuses, other times and texts where a step is far off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ikit_ops.clips.engine import pipelines, rounding
from ikit_ops.clips.engine.gauges import Reading, Ruler, cosine, relative
from ikit_ops.clips.engine.reference import Reference, rescales
from ikit_ops.clips.engine.steering import Course
from ikit_ops.clips.engine.suspects import Suspects
from ikit_ops.clips.fits import Fit
from ikit_ops.clips.judge import (
    A_LITTLE_MORE,
    Candidate,
    Step,
    needs_calibration,
    needs_candidates,
    suspicious,
)
from ikit_ops.clips.modelfree import levels_of
from ikit_ops.clips.reader import DumpReader

__all__ = ["Reference", "Replay", "Replayed", "rescales"]

DELTA = 1e-3
FLOOR_STEPS = 4
SECOND_LOOK = 2
BIAS_STEPS = 2
# Scales of int8 weights, by row or not, whose errors have nothing to do with each other; the root
# mean square of six samples is itself known to a third.
INT8_WAYS = ((True, 127), (True, 120), (True, 113), (True, 106), (False, 127), (False, 113))
OF_SIX = 1.3
LEAST_LEFT = 0.05
MIN_FLOOR = 1e-4  # a model that bf16 does not disturb would make any rounding look large

Tick = Callable[[str], None]
Place = tuple[str, int]  # a stream, and the row of a sampled step


@dataclass
class Replayed:
    """What the replay of one clip found."""

    steps: list[Step]
    candidates: list[Candidate]
    schedule: list[float]
    shapes: dict[str, tuple[int, ...]]


class Replay:
    """The replay of one clip's sampled steps."""

    def __init__(
        self, reader: DumpReader, reference: Reference, request: Mapping[str, Any],
        picked: Sequence[int], tick: Tick,
    ) -> None:  # fmt: skip
        self.reference, self.reader, self.request = reference, reader, request
        self.picked, self.tick = list(picked), tick
        self.rows = range(len(self.picked))
        self.sigmas, self.after = levels_of(reader, reader.streams[0])
        self.levels = [self.sigmas[step] for step in self.picked]
        self.streams = reader.streams
        self.pack = pipelines.packers(reference.pipe)
        self.outs = {
            name: [self._recorded(step, name) for step in self.picked] for name in self.streams
        }
        self.floor: dict[str, list[float]] = {}
        self.rulers: dict[Place, Ruler] = {}
        self.rough: dict[Place, Any] = {}
        self.biased: list[dict[Place, Any]] = []
        self.int8: list[dict[Place, Any]] = []

    def _recorded(self, step: int, name: str) -> Any:
        kept = self.reader.get(f"step.{step}.{name}.out")
        return self.pack[name](kept.to(self.reference.device).float())

    def course(
        self, rows: Sequence[int] | None = None, times: Sequence[float] | None = None
    ) -> Course:
        """A course over some of the sampled steps (by their row), perhaps at other times."""
        rows = self.rows if rows is None else rows
        levels = [self.levels[row] for row in rows]
        x = {
            name: [self.reader.get(f"step.{self.picked[row]}.{name}.x") for row in rows]
            for name in self.streams
        }
        return Course(x, levels, list(levels if times is None else times))

    def run(self, others: Sequence[Mapping[str, Any]] = ()) -> Replayed:
        """Replay, measure the floor, and look further where there is reason.

        ``others`` are requests of other clips, whose prompts an engine may have mixed up.
        """
        reference = self.reference
        self.tick("reference")
        exact = self.exact = reference.run(self.request, self.course())
        if not all(bool(out.isfinite().all()) for outs in exact.outs.values() for out in outs):
            raise ValueError("the reference gives no finite output at these latents")
        self._measure_floor(exact)
        self._rule(exact)
        steps = self._steps(exact)
        if suspicious(steps):
            self._look_again(exact, steps)
            steps = self._steps(exact)
        if needs_calibration(steps):
            self._calibrate()
            steps = self._steps(exact)
        candidates: list[Candidate] = []
        if needs_candidates(steps):
            candidates = Suspects(self, steps, others).candidates()
        shapes = pipelines.shapes(reference.pipe, self.request)
        return Replayed(steps, candidates, exact.schedule, shapes)

    # --- the floor -------------------------------------------------------------------

    def _measure_floor(self, exact: Course) -> None:
        """Run bf16 where the engine is furthest off, and at both ends; between it is smooth."""
        apart = [
            max(relative(self.outs[n][row], exact.outs[n][row]) for n in self.streams)
            for row in self.rows
        ]
        first = [0, len(self.rows) - 1, *_largest(apart, len(self.rows))]
        self.tick("bf16 floor")
        self._run_rough(exact, sorted(list(dict.fromkeys(first))[:FLOOR_STEPS]))
        doubtful = [
            row
            for row in self.rows
            if any(
                (n, row) not in self.rough
                and relative(self.outs[n][row], exact.outs[n][row]) > 1.2 * self.floor[n][row]
                for n in self.streams
            )
        ]
        if doubtful:
            self._run_rough(exact, doubtful)

    def _run_rough(self, exact: Course, rows: Sequence[int]) -> None:
        made = self.reference.run_rough(self.request, self.course(rows))
        for name in self.streams:
            for place, row in enumerate(rows):
                self.rough[name, row] = made.outs[name][place]
        self.floor = {
            name: [self._floor(name, row, exact) for row in self.rows] for name in self.streams
        }

    def _floor(self, name: str, row: int, exact: Course) -> float:
        """The bf16 floor of a row, relative; between measured rows by their distance in sigma."""
        known = {
            n: relative(self.rough[name, n], exact.outs[name][n])
            for n in self.rows
            if (name, n) in self.rough
        }
        if row in known:
            return max(MIN_FLOOR, known[row])
        pairs, level = [(self.levels[n], known[n]) for n in known], self.levels[row]
        above = min((k for k in pairs if k[0] >= level), key=lambda k: k[0], default=pairs[0])
        below = max((k for k in pairs if k[0] <= level), key=lambda k: k[0], default=pairs[-1])
        if above[0] == below[0]:
            return max(MIN_FLOOR, above[1])
        part = (level - below[0]) / (above[0] - below[0])
        return max(MIN_FLOOR, below[1] + part * (above[1] - below[1]))

    # --- directions ------------------------------------------------------------------

    def _rule(self, exact: Course) -> None:
        """A ruler for every step and stream: guidance, size, and the output of the step before."""
        reference = self.reference
        for stream, name in enumerate(self.streams):
            rescaled = rescales(reference.pipe, self.request, reference.recipe, name)
            for row in self.rows:
                wanted = exact.outs[name][row]
                passes = reference.passes_at(exact, row, name, stream, rescaled)
                size = self.floor[name][row] * float(wanted.double().norm())
                ruler = Ruler(wanted, size or 1.0, passes)
                if self.picked[row]:
                    before = self._recorded(self.picked[row] - 1, name)
                    ruler.add("previous", before - wanted)
                self.rulers[name, row] = ruler

    def _look_again(self, exact: Course, steps: Sequence[Step]) -> None:
        """At the worst steps: the derivative by time, and what int8 activations would do."""
        worth = [max(s.r for s in steps if s.step == step) for step in self.picked]
        rows = sorted(_largest(worth, SECOND_LOOK))
        self.tick("time derivative")
        earlier = [self.levels[row] - DELTA for row in rows]
        moved = self.reference.run(self.request, self.course(rows, earlier))
        weights = self._int8_weights(rows, *INT8_WAYS[0])
        self.tick("int8 activations")
        models = self.reference.models
        with rounding.int8_weights(models, True), rounding.int8_activations(models):
            both = self.reference.run(self.request, self.course(rows))
        for name in self.streams:
            for place, row in enumerate(rows):
                ruler, wanted = self.rulers[name, row], exact.outs[name][row]
                ruler.add("time", (wanted - moved.outs[name][place]) / DELTA)
                ruler.add("int8", both.outs[name][place] - weights[name, row])

    def _calibrate(self) -> None:
        """Run the reference with int8 weights, scaled in several ways: what is honest there."""
        known = sorted({row for _, row in self.rough})
        looked = [row for row in known if "time" in self.rulers[self.streams[0], row].directions]
        rows = sorted([*looked, *(row for row in known if row not in looked)][:BIAS_STEPS])
        for by_rows, levels in INT8_WAYS[1 if looked else 0 :]:
            self._int8_weights(rows, by_rows, levels)

    def _int8_weights(
        self, rows: Sequence[int], by_rows: bool, levels: int
    ) -> dict[Place, Any]:  # fmt: skip
        """The outputs of the reference with its weights in int8."""
        self.tick("int8 weights")
        with rounding.int8_weights(self.reference.models, by_rows, levels):
            made = self.reference.run(self.request, self.course(rows))
        found = {
            (name, row): made.outs[name][place]
            for name in self.streams
            for place, row in enumerate(rows)
        }
        self.biased.append(found)
        if levels == rounding.LEVELS:
            self.int8.append(found)
        return found

    def _usual(self, name: str, outs: Sequence[Mapping[Place, Any]]) -> dict[str, float]:
        """By direction, how much outputs of a stream hold, in units of what pure chance gives."""
        shares: dict[str, list[float]] = {}
        for each in outs:
            for (stream, row), out in each.items():
                if stream == name:
                    for key, reading in self.rulers[name, row].read(out).items():
                        part = reading.off / self._chance(name, row, reading)
                        shares.setdefault(key, []).append(part * part)
        return {key: math.sqrt(sum(parts) / len(parts)) for key, parts in shares.items()}

    def _chance(self, name: str, row: int, reading: Reading) -> float:
        """What an error of the floor's size that points nowhere puts into a direction."""
        return max(1e-12, reading.deviation / math.sqrt(self.rulers[name, row].numbers))

    def _usual_weights(self, name: str, exact: Course) -> float:
        """How far int8 weights move a stream's outputs, in floors (root mean square)."""
        found = [
            relative(out, exact.outs[name][row]) / self.floor[name][row]
            for each in self.biased
            for (stream, row), out in each.items()
            if stream == name
        ]
        return max(1e-3, math.sqrt(sum(r * r for r in found) / len(found))) if found else 1.0

    # --- what it comes to ------------------------------------------------------------

    def _steps(self, exact: Course) -> list[Step]:
        noise = {name: self._usual(name, [self.rough]) for name in self.streams}
        bias = {name: self._usual(name, self.biased) for name in self.streams}
        return [
            self._step(row, name, exact, noise[name], bias[name])
            for row in self.rows
            for name in self.streams
        ]

    def _step(
        self, row: int, name: str, exact: Course, noise: Mapping[str, float],
        bias: Mapping[str, float],
    ) -> Step:  # fmt: skip
        out, wanted, ruler = self.outs[name][row], exact.outs[name][row], self.rulers[name, row]
        far, floor = relative(out, wanted), self.floor[name][row]
        int8 = [each[name, row] for each in self.int8 if (name, row) in each]
        weights = [relative(each, wanted) / floor for each in int8]
        readings = ruler.read(out)
        usual = self._usual_weights(name, exact)
        found = {}
        for key, reading in readings.items():
            # Whatever is left without the direction is what can have put something into it.
            ours = 0.0 if self.reference.exact == "float32" else 1.0
            left = max(LEAST_LEFT, ours, reading.rest)
            chance = self._chance(name, row, reading)
            rounding_part = chance * left * max(1.0, noise.get(key, 1.0))
            weights_part = None
            if key in bias:
                weights_part = OF_SIX * chance * bias[key] * weight_part(left, usual)
            if ours:  # a bf16 text is wrong in the same way at every step
                weights_part = math.hypot(weights_part or 0.0, rounding_part)
            found[key] = Fit(reading.off, reading.rest, rounding_part, weights_part)
        return Step(
            stream=name, step=self.picked[row], r=far / floor, rel_l2=far,
            cosine=cosine(out, wanted), floor=floor, guidance_fit=ruler.guidance(out),
            dsigma_fit=readings["time"].off if "time" in readings else None, fits=found,
            numbers=ruler.numbers, exact=self.reference.exact,
            int8_weights=max(weights, default=None), unseen=ruler.unseen,
        )  # fmt: skip


def weight_part(left: float, usual: float) -> float:
    """How much of what int8 weights do an error of size ``left`` may hold.

    ``usual`` is the size of what they do.  As much as they do, where bf16 beside them explains
    the error; less of a smaller error, and more of a larger one.
    """
    both = math.hypot(A_LITTLE_MORE, usual)
    return min(1.0, left / usual) if left <= both else left / both


def _largest(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda row: -values[row])[:count]
