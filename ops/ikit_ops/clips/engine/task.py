"""What the worker does with each clip: its noise, its replay, perhaps its pixels.

A clip that cannot be read or replayed says why and does not stop the others: the dumps come
from the engine that is being checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ikit_ops.clips.engine import noise
from ikit_ops.clips.reader import MAX_TOLD, DumpReader
from ikit_ops.clips.recorder import StepDumpError

# What a dump or a request can make a pipeline raise: shapes, types, missing fields, memory.
FAILURES = (
    StepDumpError, ValueError, RuntimeError, LookupError, TypeError, AttributeError,
    ArithmeticError, OSError, MemoryError,
)  # fmt: skip
OURS = ("ModelError", "ClipError", "RecipeError")  # of rooms that need more than torch


def run(config: Mapping[str, Any], progress: Any) -> dict[str, Any]:
    """``{"clips": {index: {noise, steps, candidates, schedule, shapes, problem}}, ...}``."""
    reference, problem, recipe_problem = None, None, None
    if config.get("reference"):
        from ikit_ops.clips.engine.replay import Reference

        progress.tell("loading the reference")
        try:
            reference = Reference(
                Path(config["reference"]), config["device"], config.get("recipe") or {}
            )
        except FAILURES as error:
            problem = told(error)
        else:
            recipe_problem = call_problem(reference)
    found: dict[str, Any] = {}
    usable = problem is None and recipe_problem is None  # else the call fails as a whole
    for number, clip in enumerate(config["clips"] if usable else ()):
        progress.done = number
        progress.tell(f"clip {number + 1}")
        found[str(clip["index"])] = _clip(clip, config, reference, progress)
    return {
        "clips": found,
        "problem": problem,
        "recipe_problem": recipe_problem,
        "passes": reference.passes if reference is not None else 0,
        "model": reference.identity() if reference is not None else None,
    }


def _clip(
    clip: Mapping[str, Any], config: Mapping[str, Any], reference: Any, progress: Any
) -> dict[str, Any]:
    made: dict[str, Any] = {}
    try:
        with DumpReader(clip["dump"]) as reader:
            first = {name: reader.get(f"step.0.{name}.x") for name in reader.streams}
            made["noise"] = _noise(first, clip["request"])
            if reference is not None and clip["steps"]:
                made |= _replay(reader, clip, config, reference, progress)
    except FAILURES as error:
        made["problem"] = told(error)
    if reference is not None and config.get("decode") and clip["steps"]:
        progress.tell("decoding")
        made |= _pixels(reference, clip, config["clips"])
    return made


def told(error: BaseException) -> str:
    """An error in words: those of ours are whole sentences, others need their kind."""
    if isinstance(error, StepDumpError) or type(error).__name__ in OURS:
        return str(error)[:MAX_TOLD]
    return f"{type(error).__name__}: {error}"[:MAX_TOLD]


def call_problem(reference: Any) -> str | None:
    """What of the recipe's call the loaded reference does not take, or None."""
    from ikit_ops.clips.engine import pipelines

    try:
        pipelines.check_call(reference.pipe, reference.recipe)
    except pipelines.ModelError as error:
        return str(error)
    return None


def _pixels(reference: Any, clip: Mapping[str, Any], clips: Sequence[Any]) -> dict[str, Any]:
    """What the mp4 shows; that it cannot be looked at says nothing about the steps."""
    from ikit_ops.clips.engine.pixels import compare

    others = [each["dump"] for each in clips if each["steps"] and each is not clip]
    try:
        with DumpReader(clip["dump"]) as reader:
            return compare(reference, reader, clip, others)
    except FAILURES as error:
        return {"clip": {"ok": None, "detail": f"not compared: {told(error)}"}}


def _noise(first: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    seed = request.get("noise_seed")
    if type(seed) is not int:
        return {"ok": None, "detail": "the request names no noise_seed"}
    if not 0 <= seed < 2**63:
        return {"ok": None, "detail": "from such a noise_seed no generator draws everywhere alike"}
    ok, detail = noise.check(first, request)
    return {"ok": ok, "detail": detail}


def _replay(
    reader: DumpReader, clip: Mapping[str, Any], config: Mapping[str, Any], reference: Any,
    progress: Any,
) -> dict[str, Any]:  # fmt: skip
    from ikit_ops.clips.engine import pipelines
    from ikit_ops.clips.engine.replay import Replay

    wanted = pipelines.shapes(reference.pipe, clip["request"])
    there = {name: reader.shape(f"final.{name}") for name in reader.streams}
    if there != wanted:
        return {"shapes": {name: list(shape) for name, shape in wanted.items()}}
    replay = Replay(reader, reference, clip["request"], clip["steps"], progress.tell)
    done = replay.run(config.get("others") or ())
    if not all(math.isfinite(step.r) for step in done.steps):
        raise ValueError("the steps cannot be compared: a distance is not finite")
    return {
        "steps": [step.to_json() for step in done.steps],
        "candidates": [vars(candidate) for candidate in done.candidates],
        "schedule": done.schedule,
        "shapes": {name: list(shape) for name, shape in done.shapes.items()},
    }
