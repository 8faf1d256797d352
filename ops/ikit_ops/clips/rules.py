"""What the checker's own two files may say: requests of a manifest, and a recipe.

Both are held against the engine, so a slip in them would be told as the engine's fault: a latent
of three numbers that no video has, a schedule of one level, a width that is a word.  They are
therefore read strictly, before anything is checked, and a slip is refused where it is: by its
line or field, with what may stand there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

LARGEST_SIZE = 2**31
LARGEST_SEED = 2**64
MOST_TOKENS = 1 << 20
RANKS = {"video": "[1, C, F, H, W]", "audio": "[1, C, L, M]"}
SIZES = ("width", "height", "num_frames", "steps")
NUMBERS = ("fps", "guidance_scale")
SEEDS = ("seed", "noise_seed")
REPLAYED = ("prompt", *SIZES[:3], "fps", "steps", "guidance_scale")
"""The fields without which the reference cannot be run."""

Slip = tuple[str, str]
"""What is wrong, and what is allowed in its place."""


def request_slip(request: Mapping[str, Any]) -> Slip | None:
    """The first field of a request that cannot be what was asked for; absent ones are None."""
    for name in ("task", "prompt"):
        value = request.get(name)
        if value is not None and not (isinstance(value, str) and is_unicode(value)):
            return f"{name} is {_kind(value)}", f"{name} is a text"
    for name in SIZES:
        value = request.get(name)
        if value is not None and not (_is_whole(value) and 0 < value <= LARGEST_SIZE):
            return f"{name} is {_shown(value)}", f"{name} is a whole number from 1 on"
    for name in NUMBERS:
        value = request.get(name)
        if value is not None and not (is_number(value) and abs(value) <= LARGEST_SIZE):
            return f"{name} is {_shown(value)}", f"{name} is a finite number"
    if request.get("fps") is not None and request["fps"] <= 0:
        return f"fps is {_shown(request['fps'])}", "fps is a number above 0"
    for name in SEEDS:
        value = request.get(name)
        if value is not None and not (_is_whole(value) and abs(value) < LARGEST_SEED):
            return f"{name} is {_shown(value)}", f"{name} is a whole number of 64 bits"
    audio = request.get("audio")
    if audio is not None and not isinstance(audio, bool):
        return f"audio is {_shown(audio)}", "audio is true or false"
    return None


def whole_numbers(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with 6.0 where a whole number is meant made 6."""
    return {
        name: int(value) if name in (*SIZES, *SEEDS) and isinstance(value, float) else value
        for name, value in request.items()
    }


def recipe_slip(fields: Mapping[str, Any]) -> Slip | None:
    """The first field of a recipe that no run of a model could follow."""
    for name in ("name", "model", "revision", "negative_prompt", "sampler"):
        if not isinstance(fields.get(name, ""), (str, type(None))):
            return f"{name} is {_kind(fields[name])}", f"{name} is a text"
    length = fields.get("max_sequence_length")
    if length is not None and not (type(length) is int and 0 < length <= MOST_TOKENS):
        return (
            f"max_sequence_length is {_shown(length)}",
            f"max_sequence_length is a whole number from 1 to {MOST_TOKENS}",
        )
    return _levels_slip(fields.get("sigmas")) or _call_slip(fields) or _latents_slip(fields)


def _levels_slip(levels: Any) -> Slip | None:
    if levels is None:
        return None
    allowed = "sigmas is a list of the steps' noise levels, falling from 1 at most to 0"
    if not (isinstance(levels, list) and levels and all(map(is_number, levels))):
        return "sigmas is no list of numbers", allowed
    ends = levels if levels[-1] == 0 and len(levels) > 1 else [*levels, 0.0]
    if not 0 < ends[0] <= 1 or any(a <= b for a, b in itertools.pairwise(ends)):
        return "sigmas do not fall from 1 at most to 0", allowed
    return None


def _call_slip(fields: Mapping[str, Any]) -> Slip | None:
    call = fields.get("call")
    allowed = "call maps arguments of the pipeline to numbers, texts, truth values and lists"
    if call is None:
        return None
    if not isinstance(call, dict):
        return "call is no object", allowed
    for value in call.values():
        if not isinstance(value, (int, float, bool, str, type(None), list)):
            return "call holds an object", allowed
    return None


def _latents_slip(fields: Mapping[str, Any]) -> Slip | None:
    latents = fields.get("latents")
    allowed = ", ".join(f"{name} {rank}" for name, rank in RANKS.items())
    if latents is None:
        return None
    if not isinstance(latents, dict) or "video" not in latents or set(latents) - set(RANKS):
        return "latents do not name the shape of each stream", f"latents are {allowed}"
    for name, shape in latents.items():
        rank = RANKS[name].count(",") + 1
        if not (
            isinstance(shape, list)
            and len(shape) == rank
            and all(type(n) is int and 0 < n <= LARGEST_SIZE for n in shape)
            and shape[0] == 1
        ):
            return f"latents of {name} are no shape of it", f"{name} is {RANKS[name]}"
    return None


def level_count_slip(levels: Sequence[float] | None, steps: Any) -> Slip | None:
    """Whether a recipe's noise levels can be those of a request's steps: N, or N + 1 with the 0."""
    if levels is None or not isinstance(steps, int):
        return None
    wanted = len(levels) - (levels[-1] == 0)
    if wanted == steps:
        return None
    return (
        f"sigmas are the levels of a clip of steps={wanted}, the request has steps={steps}",
        "sigmas has one level for each step, and may end with the 0 that the last goes to",
    )


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number; truth values are none."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def is_unicode(text: str) -> bool:
    """Half of a surrogate pair is JSON, and no text: it cannot be written down again."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _shown(value: Any) -> str:
    if isinstance(value, (bool, type(None))) or is_number(value):
        return str(value)[:40].lower()
    return "no finite number" if isinstance(value, float) else _kind(value)


def _kind(value: Any) -> str:
    kinds = {str: "a text", list: "a list", dict: "an object", bool: "a truth value"}
    return kinds.get(type(value), "a number")
