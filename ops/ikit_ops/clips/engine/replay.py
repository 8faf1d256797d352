"""Replay: the reference run on recorded steps, by the pipeline's own code.

Guidance is where pipelines differ and where releases change, so none of it is written again
here.  The reference is the pipeline itself, started with a steering scheduler (``steering``):
what it makes is its own output at each of the engine's latents.  A hook on the transformer keeps
the passes before they are combined, which is what the guidance is fitted on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ikit_ops.clips.engine import pipelines
from ikit_ops.clips.engine.steering import Course, Steering
from ikit_ops.clips.judge import EXPLAINED, PASS_MAX, Candidate, Step, needs_candidates
from ikit_ops.clips.reader import DumpReader

DELTA = 1e-3
FLOOR_STEPS = 4
TIME_STEPS = 2
MAX_CANDIDATES = 10
MAX_TEXT = 20_000
MIN_FLOOR = 1e-4  # a model that bf16 does not disturb would make any rounding look large

Tick = Callable[[str], None]


@dataclass
class Fit:
    """The output on the reference's passes: scale, common factor (1: no rescale), what is left."""

    scale: float
    residual: float
    factor: float = 1.0

    def against(self, own: Fit) -> float:
        """The ratio to the reference's own fit, of the scale or of the factor: what is off more."""
        ratios = [self.scale / own.scale, self.factor / own.factor]
        return max(ratios, key=lambda ratio: abs(ratio - 1))


class Reference:
    """A loaded reference: in float32, and once more in bfloat16 for the floor."""

    def __init__(self, folder: Any, device: str, recipe: Mapping[str, Any]) -> None:
        self.recipe = recipe
        self.device = device
        self.pipe = pipelines.load(folder, torch.float32, device)
        self.rough = pipelines.load(folder, torch.bfloat16, device)
        self.kind = pipelines.family(self.pipe)
        self.passes = 0

    def identity(self) -> dict[str, Any]:
        """What was run: the pipeline, its version, the dtypes."""
        import diffusers

        return {"pipeline": self.kind.pipeline, "diffusers": diffusers.__version__}

    def run(
        self,
        pipe: Any,
        request: Mapping[str, Any],
        course: Course,
        **changed: Any,
    ) -> Course:
        """Run the pipeline along a course; the outputs and the passes stay in it."""
        arguments = {**pipelines.arguments(pipe, request, self.recipe), **changed}
        pack = pipelines.packers(pipe)
        course.x = {
            name: [pack[name](x.to(self.device).float()) for x in each]
            for name, each in course.x.items()
        }
        own = pipe.scheduler

        def keep(_module: Any, _args: Any, output: Any) -> None:
            at = len(course.outs.get("video", ()))
            while len(course.calls) <= at:
                course.calls.append([])
            course.calls[at].append(tuple(part.detach().float() for part in output))
            self.passes += int(output[0].shape[0])

        models = [pipe.transformer, getattr(pipe, "transformer_2", None)]
        handles = [each.register_forward_hook(keep) for each in models if each is not None]
        pipe.scheduler = Steering.of(own, course)
        pipe.prepare_latents = lambda *_, **__: course.x["video"][0]
        if "audio" in course.x:
            pipe.prepare_audio_latents = lambda *_, **__: course.x["audio"][0]
        try:
            with torch.no_grad():
                pipe(**arguments, output_type="latent")
        finally:
            for handle in handles:
                handle.remove()
            pipe.scheduler = own
            del pipe.prepare_latents
            if "audio" in course.x:
                del pipe.prepare_audio_latents
        return course

    def guidance(self, calls: Sequence[tuple[torch.Tensor, ...]], stream: int) -> Any:
        """The conditional pass, and the differences that guidance adds multiples of; or None."""
        first = calls[0][stream]
        if self.kind.pipeline == "WanPipeline":
            if len(calls) < 2:
                return None
            conditional, unconditional, others = first, calls[1][stream], calls[2:]
        else:
            if first.shape[0] != 2:
                return None
            unconditional, conditional = first.chunk(2)
            others = calls[1:]
        return conditional, [
            conditional - each for each in (unconditional, *(o[stream] for o in others))
        ]

    def fit(
        self,
        out: torch.Tensor,
        calls: Sequence[tuple[torch.Tensor, ...]],
        stream: int,
        x: torch.Tensor,
        sigma: float,
        rescaled: bool,
    ) -> Fit | None:
        """The guidance scale that an output shows on the reference's passes.

        LTX-2 combines its passes as estimates of x0, the others as velocities; the differences
        are the same but for a factor.  A rescale multiplies everything by one number, which is
        then fitted too.
        """
        found = self.guidance(calls, stream)
        if found is None:
            return None
        base, differences = found
        if self.kind.x0_space:
            base, target = x - sigma * base, x - sigma * out
            differences = [-sigma * each for each in differences]
        else:
            target = out
        columns = [base, *differences] if rescaled else differences
        wanted = target if rescaled else target - base
        matrix = torch.stack([each.flatten().double() for each in columns], dim=1)
        vector = wanted.flatten().double()
        if float(differences[0].norm()) == 0:
            return None
        solved = torch.linalg.lstsq(matrix, vector[:, None]).solution.flatten()
        rest = float((vector - matrix @ solved).norm())
        if self.kind.x0_space:
            rest /= sigma
        factor = float(solved[0]) if rescaled else 1.0
        share = float(solved[1 if rescaled else 0])
        return Fit(1 + share / factor if factor else 1e9, rest, factor)


def rescales(pipe: Any, request: Mapping[str, Any], recipe: Mapping[str, Any], stream: str) -> bool:
    """Whether the pipeline rescales the guided output of a stream under this recipe."""
    import inspect

    given = pipelines.arguments(pipe, request, recipe)
    parameters = inspect.signature(type(pipe).__call__).parameters
    name = "audio_guidance_rescale" if stream == "audio" else "guidance_rescale"
    if name not in parameters:
        return False
    value = given.get(name, parameters[name].default)
    if value is None and stream == "audio":
        return rescales(pipe, request, recipe, "video")
    return bool(value)


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
        sigmas, after = reader.sigmas()
        self.sigmas = sigmas
        self.levels = [sigmas[step] for step in self.picked]
        self.after = [after[step] for step in self.picked]
        self.streams = reader.streams
        pack = pipelines.packers(reference.pipe)
        self.outs = {
            name: [
                pack[name](reader.get(f"step.{step}.{name}.out").to(reference.device).float())
                for step in self.picked
            ]
            for name in self.streams
        }

    def course(
        self, rows: Sequence[int] | None = None, times: Sequence[float] | None = None
    ) -> Course:
        """A course over some of the picked steps (by their row), perhaps at other times."""
        rows = range(len(self.picked)) if rows is None else rows
        levels = [self.levels[row] for row in rows]
        x = {
            name: [self.reader.get(f"step.{self.picked[row]}.{name}.x") for row in rows]
            for name in self.streams
        }
        return Course(x, levels, list(levels if times is None else times))

    def run(self, others: Sequence[Mapping[str, Any]] = ()) -> Replayed:
        """Replay, measure the floor, fit, and try what may explain it.

        ``others`` are requests of other clips, whose prompts an engine may have mixed up.
        """
        reference = self.reference
        self.tick("reference")
        exact = reference.run(reference.pipe, self.request, self.course())
        if not all(bool(out.isfinite().all()) for outs in exact.outs.values() for out in outs):
            raise ValueError("the reference gives no finite output at these latents")
        apart = [self._apart(row, exact) for row in range(len(self.picked))]
        floors = self._floors(exact, apart)
        self.floor = {
            name: [self._floor(name, row, exact, floors) for row in range(len(self.picked))]
            for name in self.streams
        }
        times = self._times(exact, apart)
        steps = [
            self._step(row, name, exact, floors, times)
            for row in range(len(self.picked))
            for name in self.streams
        ]
        steps = with_noise(steps)
        candidates: list[Candidate] = []
        if needs_candidates(steps):
            candidates = self._candidates(steps, others)
        return Replayed(
            steps, candidates, exact.schedule, pipelines.shapes(reference.pipe, self.request)
        )

    def _apart(self, row: int, exact: Course) -> float:
        """The largest relative distance over the streams."""
        return max(_relative(self.outs[n][row], exact.outs[n][row]) for n in self.streams)

    def _floors(self, exact: Course, apart: Sequence[float]) -> dict[str, list[Any]]:
        """For each stream and row, the bf16 run's output; None where it is interpolated.

        Measured where the engine is furthest off, and at both ends; between them it is smooth.
        """
        count = len(self.picked)
        first = [0, count - 1, *_largest(apart, count)]
        rows = sorted(list(dict.fromkeys(first))[:FLOOR_STEPS])
        self.tick("bf16 floor")
        made = self.reference.run(self.reference.rough, self.request, self.course(rows))
        found: dict[str, list[Any]] = {}
        for name in self.streams:
            found[name] = [None] * count
            for place, row in enumerate(rows):
                found[name][row] = made.outs[name][place]
        doubtful = [
            row
            for row in range(count)
            if any(
                found[n][row] is None
                and _relative(self.outs[n][row], exact.outs[n][row])
                > 1.2 * self._floor(n, row, exact, found)
                for n in self.streams
            )
        ]
        if doubtful:
            again = self.reference.run(self.reference.rough, self.request, self.course(doubtful))
            for name in self.streams:
                for place, row in enumerate(doubtful):
                    found[name][row] = again.outs[name][place]
        return found

    def _floor(self, name: str, row: int, exact: Course, rough: Mapping[str, list[Any]]) -> float:
        """The bf16 floor of a row, relative; between measured rows by their distance in sigma."""
        known = [
            (self.levels[n], _relative(out, exact.outs[name][n]))
            for n, out in enumerate(rough[name])
            if out is not None
        ]
        if rough[name][row] is not None:
            return max(MIN_FLOOR, _relative(rough[name][row], exact.outs[name][row]))
        level = self.levels[row]
        above = min((k for k in known if k[0] >= level), key=lambda k: k[0], default=known[0])
        below = max((k for k in known if k[0] <= level), key=lambda k: k[0], default=known[-1])
        if above[0] == below[0]:
            return max(MIN_FLOOR, above[1])
        share = (level - below[0]) / (above[0] - below[0])
        return max(MIN_FLOOR, below[1] + share * (above[1] - below[1]))

    def _times(self, exact: Course, apart: Sequence[float]) -> dict[str, dict[int, torch.Tensor]]:
        """The derivative of the output by the model's time, at the rows that are furthest off."""
        worth = [
            apart[row] / max(self.floor[n][row] for n in self.streams)
            for row in range(len(self.picked))
        ]
        rows = sorted(_largest(worth, TIME_STEPS))
        times = [self.levels[row] - DELTA for row in rows]
        self.tick("time derivative")
        moved = self.reference.run(self.reference.pipe, self.request, self.course(rows, times))
        return {
            name: {
                row: (exact.outs[name][row] - moved.outs[name][place]) / DELTA
                for place, row in enumerate(rows)
            }
            for name in self.streams
        }

    def _step(
        self, row: int, name: str, exact: Course, floors: Mapping[str, list[Any]],
        times: Mapping[str, Mapping[int, torch.Tensor]],
    ) -> Step:  # fmt: skip
        out, wanted = self.outs[name][row], exact.outs[name][row]
        relative, floor = _relative(out, wanted), self.floor[name][row]
        size = float(wanted.norm())
        made: dict[str, Any] = self._guidance(row, name, exact, floors, floor * size)
        slope = times[name].get(row)
        if slope is not None:
            fitted, rest = _project(out - wanted, slope)
            rough = floors[name][row]
            noise = None if rough is None else abs(_project(rough - wanted, slope)[0])
            made |= {
                "dsigma_fit": fitted, "dsigma_noise": noise,
                "dsigma_residual": rest / (floor * size),
            }  # fmt: skip
        return Step(name, self.picked[row], relative / floor, relative, _cosine(out, wanted), floor,
                    **made)  # fmt: skip

    def _guidance(
        self, row: int, name: str, exact: Course, floors: Mapping[str, list[Any]], unit: float
    ) -> dict[str, Any]:
        reference, stream = self.reference, self.streams.index(name)
        rescaled = rescales(reference.pipe, self.request, reference.recipe, name)

        def fit(out: torch.Tensor, free: bool = rescaled) -> Fit | None:
            return reference.fit(
                out, exact.calls[row], stream, exact.x[name][row], self.levels[row], free
            )

        own, seen = fit(exact.outs[name][row]), fit(self.outs[name][row])
        if own is None or seen is None or not own.scale or not own.factor:
            return {}
        if not rescaled and seen.residual / unit > EXPLAINED:
            loose = fit(self.outs[name][row], True)  # a rescale that nobody asked for?
            seen = loose if loose is not None and loose.residual / unit <= EXPLAINED else seen
        rough = floors[name][row]
        noisy = None if rough is None else fit(rough)
        return {
            "guidance_fit": seen.scale,
            "guidance_ratio": seen.against(own),
            "guidance_noise": None if noisy is None else abs(noisy.against(own) - 1),
            "guidance_residual": seen.residual / unit,
        }

    def _candidates(
        self, steps: Sequence[Step], others: Sequence[Mapping[str, Any]]
    ) -> list[Candidate]:
        """Other times and texts, each on the first and the last step that are off."""
        off = {step.step for step in steps if step.r > PASS_MAX}
        far = [row for row, step in enumerate(self.picked) if step in off] or [0]
        rows = sorted({far[0], far[-1]})
        tried: list[Candidate] = []

        def attempt(
            verdict: str, what: str, times: Sequence[float] | None = None, **changed: Any
        ) -> None:
            self.tick(f"trying {what}")
            course = self.course(rows, times)
            made = self.reference.run(self.reference.pipe, self.request, course, **changed)
            values = []
            for name in self.streams:
                for place, row in enumerate(rows):
                    wanted = made.outs[name][place]
                    values.append(_relative(self.outs[name][row], wanted) / self.floor[name][row])
            tried.append(Candidate(verdict, what, max(values)))

        attempt("timestep", "the model's time being sigma_next",
                [max(self.after[row], 0.0) for row in rows])  # fmt: skip
        if all(self.picked[row] for row in rows):
            before = [self.sigmas[self.picked[row] - 1] for row in rows]
            attempt("timestep", "the model's time being that of the step before", before)
        negative = self.reference.recipe.get("negative_prompt") or ""
        if negative:
            attempt("conditioning", "an empty negative prompt", negative_prompt="")
        if declared := self._declared():
            attempt("conditioning", "the recipe that the dump itself names", **declared)
        attempt("conditioning", "prompt and negative prompt exchanged",
                prompt=negative, negative_prompt=self.request["prompt"])  # fmt: skip
        attempt("conditioning", "an empty prompt", prompt="")
        seen = {self.request["prompt"], negative, ""}
        for other in others:
            prompt = other.get("prompt")
            if len(tried) < MAX_CANDIDATES and isinstance(prompt, str) and prompt not in seen:
                seen.add(prompt)
                attempt("conditioning", "the prompt of another request", prompt=prompt)
        return tried

    def _declared(self) -> dict[str, Any]:
        """What of the text the dump's own recipe says otherwise than ours."""
        try:
            told = json.loads(self.reader.meta.get("recipe", ""))
        except (ValueError, RecursionError):
            return {}
        found: dict[str, Any] = {}
        own = self.reference.recipe
        if isinstance(told, dict):
            negative, length = told.get("negative_prompt"), told.get("max_sequence_length")
            if (
                isinstance(negative, str)
                and len(negative) <= MAX_TEXT
                and negative != (own.get("negative_prompt") or "")
            ):
                found["negative_prompt"] = negative
            if (
                type(length) is int
                and 0 < length <= 4096
                and length != own.get("max_sequence_length")
            ):
                found["max_sequence_length"] = length
        return found


def with_noise(steps: Sequence[Step]) -> list[Step]:
    """The steps, each with at least the usual noise of its stream's guidance fits.

    One bf16 run is one sample of the noise, and rows without one have none; the root mean square
    over the stream's measured rows is what a single row may show.
    """
    made = []
    for step in steps:
        known = [s.guidance_noise for s in steps
                 if s.stream == step.stream and s.guidance_noise is not None]  # fmt: skip
        usual = math.sqrt(sum(n * n for n in known) / len(known)) if known else None
        if usual is not None and step.guidance_ratio is not None:
            step = replace(step, guidance_noise=max(step.guidance_noise or 0.0, usual))
        made.append(step)
    return made


def _largest(values: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda row: -values[row])[:count]


def _relative(one: torch.Tensor, wanted: torch.Tensor) -> float:
    size = float(wanted.double().norm())
    gap = float((one.double() - wanted.double()).norm())
    return gap / size if size else (0.0 if gap == 0 else 1e9)


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    a, b = one.flatten().double(), other.flatten().double()
    sizes = float(a.norm() * b.norm())
    return float(a @ b) / sizes if sizes else 0.0


def _project(rest: torch.Tensor, direction: torch.Tensor) -> tuple[float, float]:
    """The share of a direction in a difference, and the size of what is left."""
    a, b = rest.flatten().double(), direction.flatten().double()
    length = float(b @ b)
    share = float(a @ b) / length if length else 0.0
    return share, float((a - share * b).norm())
