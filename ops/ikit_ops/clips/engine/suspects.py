"""Other times and texts: what may explain a step that is far from the reference.

Each is tried on the first and the last step that are off.  Tried are the times that engines are
known to give: of the next step, of the one before, of the middle, without the shift.  Then the time
is searched, for each step on its own: on a grid of round offsets, and by parabolas between them.
The valley around the right time may be as narrow as the fastest wave of the time's embedding, so
what lies between two points of the grid may be missed; the word is then that of the pattern.

Texts cannot be searched.  Tried are those that engines mix up: of other requests, cut short,
without the negative prompt, exchanged.  That the error lies where these texts move the output,
though none of them fits, tells of a text that is not known here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ikit_ops.clips.engine.gauges import relative
from ikit_ops.clips.judge import Candidate, Step, bands_of

if TYPE_CHECKING:
    from ikit_ops.clips.engine.replay import Replay

MOST_OTHERS = 10
MAX_TEXT = 20_000
GRID = tuple(s * m for m in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) for s in (-1, 1))
REFINE, CLOSE = 5, 5e-5
LEAST_TIME = 5e-4
LEAST_MOVES = 6
PER_DIRECTION = 16  # numbers of an output for each direction that is fitted to it


class Suspects:
    """Tries other ways to run the reference on the steps of one clip that are off."""

    def __init__(
        self, replay: Replay, steps: Sequence[Step], others: Sequence[Mapping[str, Any]]
    ) -> None:
        self.replay, self.others = replay, others
        self.bands = bands_of(steps)
        far = {step.step for step in steps if step.r > self.bands.most}
        rows = [row for row, step in enumerate(replay.picked) if step in far] or [0]
        self.rows = sorted({rows[0], rows[-1]})
        self.tried: list[Candidate] = []
        self.moves: dict[tuple[str, int], list[torch.Tensor]] = {}

    def candidates(self) -> list[Candidate]:
        """What was tried and how well it fits; the search ends with the first that does."""
        if not self._known_times():
            for what, changed in self._texts():
                if self._attempt("conditioning", what, **changed):
                    return self.tried
            self._unknown_text()
            self._search_time()
        return self.tried

    # --- times -----------------------------------------------------------------------

    def _known_times(self) -> bool:
        """The times that engines are known to give instead; whether one fits."""
        replay = self.replay
        steps = [replay.picked[row] for row in self.rows]
        levels = [replay.sigmas[step] for step in steps]
        after = [max(replay.after[step], 0.0) for step in steps]
        known = [("sigma_next", after)]
        if all(steps):
            known.append(("that of the step before", [replay.sigmas[step - 1] for step in steps]))
        middles = [(a + b) / 2 for a, b in zip(levels, after, strict=True)]
        known.append(("that of the step's middle", middles))
        count = len(replay.sigmas)
        even = [1 - step / count for step in steps]
        known.append(("that of evenly spaced steps, without the shift", even))
        known.append(
            ("rounded to a whole number", [round(1000 * level) / 1000 for level in levels])
        )
        return any(
            self._attempt("timestep", f"the model's time being {what}", times)
            for what, times in known
            if max(abs(t - level) for t, level in zip(times, levels, strict=True)) > LEAST_TIME / 5
        )

    def _search_time(self) -> None:
        """The best time of each step; one candidate for all of them."""
        best = [self._best_time(row) for row in self.rows]
        levels = [self.replay.levels[row] for row in self.rows]
        moved = [time - level for (time, _), level in zip(best, levels, strict=True)]
        told = ", ".join(
            f"{move:+.4f} at step {self.replay.picked[row]}"
            for move, row in zip(moved, self.rows, strict=True)
        )
        if all(abs(move) > LEAST_TIME for move in moved):
            worst = max(r for _, r in best)
            self.tried.append(Candidate("timestep", f"the model's time being off by {told}", worst))

    def _best_time(self, row: int) -> tuple[float, float]:
        """The time at which the reference fits a step best, and r there."""
        level = self.replay.levels[row]
        times = [level, *(level + move for move in GRID)]
        seen = dict(zip(times, self._at(row, times), strict=True))
        for _ in range(REFINE):
            if not (closer := _closer(seen)):
                break
            seen |= dict(zip(closer, self._at(row, closer), strict=True))
        return min(seen.items(), key=lambda each: each[1])

    def _at(self, row: int, times: Sequence[float]) -> list[float]:
        """r of one step against the reference at each of several times (streams pooled)."""
        replay = self.replay
        replay.tick("searching the time")
        made = replay.reference.run(replay.request, replay.course([row] * len(times), times))
        return [
            max(
                relative(replay.outs[name][row], made.outs[name][place]) / replay.floor[name][row]
                for name in replay.streams
            )
            for place in range(len(times))
        ]

    # --- texts -----------------------------------------------------------------------

    def _attempt(
        self, verdict: str, what: str, times: Sequence[float] | None = None, **changed: Any
    ) -> bool:
        """Try one way; whether it fits."""
        replay = self.replay
        replay.tick(f"trying {what}")
        try:
            made = replay.reference.run(replay.request, replay.course(self.rows, times), **changed)
        except (ValueError, RuntimeError):
            return False  # a text that this pipeline does not take is not what the engine used
        worst = max(
            relative(replay.outs[name][row], made.outs[name][place]) / replay.floor[name][row]
            for name in replay.streams
            for place, row in enumerate(self.rows)
        )
        self.tried.append(Candidate(verdict, what, worst))
        if verdict == "conditioning":
            for name in replay.streams:
                for place, row in enumerate(self.rows):
                    moved = made.outs[name][place] - replay.exact.outs[name][row]
                    self.moves.setdefault((name, row), []).append(moved.flatten().double())
        return worst <= self.bands.median

    def _unknown_text(self) -> None:
        """How much of the errors lies where texts move the output, though none of them fits.

        Beside the guidance, that is, which is one of these directions and has a fit of its own.
        """
        shares, rests = [], []
        for (name, row), moves in self.moves.items():
            out, wanted = self.replay.outs[name][row], self.replay.exact.outs[name][row]
            error = (out - wanted).flatten().double()
            most = error.numel() // PER_DIRECTION
            if len(moves) < LEAST_MOVES or most < LEAST_MOVES:
                return
            guided = list(self.replay.rulers[name, row].columns.values())
            error = _beside(error, guided)
            left = torch.stack([_beside(move, guided) for move in moves], dim=1)
            basis = torch.linalg.svd(left, full_matrices=False)[0][:, :most]
            rest = float((error - basis @ (basis.T @ error)).norm())
            size = float(wanted.double().norm()) * self.replay.floor[name][row]
            shares.append(1 - (rest / max(float(error.norm()), 1e-12)) ** 2)
            rests.append(rest / size)
        if shares:
            what = "a text that is not known here"
            self.tried.append(Candidate("conditioning", what, max(rests), min(shares)))

    def _texts(self) -> list[tuple[str, dict[str, Any]]]:
        """What to try instead of the prompts: (what it is, the changed arguments)."""
        prompt = str(self.replay.request["prompt"])
        recipe = self.replay.reference.recipe
        negative = recipe.get("negative_prompt") or ""
        found: list[tuple[str, dict[str, Any]]] = []
        if negative:
            found.append(("an empty negative prompt", {"negative_prompt": ""}))
        if declared := self._declared():
            found.append(("the recipe that the dump itself names", declared))
        found.append(
            ("prompt and negative prompt exchanged",
             {"prompt": negative, "negative_prompt": prompt})
        )  # fmt: skip
        found.append(("the prompt as negative prompt", {"negative_prompt": prompt}))
        found.append(("an empty prompt", {"prompt": ""}))
        seen = {prompt, negative, ""}
        texts = [str(other["prompt"]) for other in self.others if _is_text(other.get("prompt"))]
        for text in list(dict.fromkeys(text for text in texts if text not in seen))[:MOST_OTHERS]:
            found.append(("the prompt of another request", {"prompt": text}))
            found.append(("the prompt of another request as negative", {"negative_prompt": text}))
        for what, text in cuts(prompt):
            if text not in (prompt, "", *texts):
                found.append((what, {"prompt": text}))
        length = recipe.get("max_sequence_length")
        for shorter in (8, 16, 32, 64, 77, 128, 226, 256):
            if type(length) is not int or shorter < length:
                found.append((f"texts cut at {shorter} tokens", {"max_sequence_length": shorter}))
        return found

    def _declared(self) -> dict[str, Any]:
        """What of the text the dump's own recipe says otherwise than ours."""
        try:
            told = json.loads(self.replay.reader.meta.get("recipe", ""))
        except (ValueError, RecursionError):
            return {}
        found: dict[str, Any] = {}
        own = self.replay.reference.recipe
        if isinstance(told, dict):
            negative, length = told.get("negative_prompt"), told.get("max_sequence_length")
            if _is_text(negative) and negative != (own.get("negative_prompt") or ""):
                found["negative_prompt"] = negative
            known = type(length) is int and 0 < length <= 4096
            if known and length != own.get("max_sequence_length"):
                found["max_sequence_length"] = length
        return found


def cuts(prompt: str) -> list[tuple[str, str]]:
    """A prompt as engines damage it: (what was done, the text)."""
    words = prompt.split()
    return [
        ("the prompt without its last character", prompt[:-1]),
        ("the prompt without its last word", " ".join(words[:-1])),
        ("the first half of the prompt", " ".join(words[: (len(words) + 1) // 2])),
        ("the prompt stripped", prompt.strip()),
        ("the prompt in lower case", prompt.lower()),
        ("the prompt capitalised", prompt.capitalize()),
    ]


def _beside(vector: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """What of a vector lies in none of some other vectors' directions."""
    if not others:
        return vector
    basis = torch.linalg.qr(torch.stack(list(others), dim=1))[0]
    return vector - basis @ (basis.T @ vector)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _closer(seen: Mapping[float, float]) -> list[float]:
    """Times nearer to the bottom: in both halves around the lowest, and where a parabola has it."""
    points = sorted(seen.items())
    low = min(range(len(points)), key=lambda n: points[n][1])
    if not 0 < low < len(points) - 1:
        return []
    (a, fa), (b, fb), (c, fc) = ((t, r * r) for t, r in points[low - 1 : low + 2])
    found = [(a + b) / 2, (b + c) / 2]
    top = (b - a) ** 2 * (fb - fc) - (b - c) ** 2 * (fb - fa)
    bottom = (b - a) * (fb - fc) - (b - c) * (fb - fa)
    if bottom and math.isfinite(time := b - 0.5 * top / bottom) and a < time < c:
        found.append(time)
    return [time for time in dict.fromkeys(found) if all(abs(time - t) > CLOSE for t in seen)]
