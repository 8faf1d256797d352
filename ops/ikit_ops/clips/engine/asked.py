"""What a client asks the clip server for, checked: nothing unknown, nothing rounded in silence.

A server that ignores a field it does not know makes another clip than was asked for, and one
that rounds a size answers a question that nobody put.  So every unknown field is refused, and a
size that the model cannot make is answered with the nearest one that it can.

Types come first, then ranges, then what the model can make: integers of JSON have any number of
digits, and only numbers within small bounds are calculated with.

Two dialects are understood: the contract's request (``POST /clips``), and the one that vLLM-omni
and SGLang share (``POST /v1/videos/sync``: ``size`` as WxH, ``num_inference_steps``, ``seconds``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ikit_ops.clips.engine.bodies import Refused
from ikit_ops.clips.recorder import REQUEST_FIELDS, request_of

MAX_PROMPT = 20_000
NUMBERS = ("width", "height", "num_frames", "steps", "seed", "noise_seed")
DEFAULTS = {"width": 768, "height": 512, "num_frames": 121, "fps": 24, "steps": 30,
            "guidance_scale": 3.0, "seed": 0}  # fmt: skip
VIDEOS_FIELDS = frozenset(
    {"prompt", "negative_prompt", "model", "size", "seconds", "fps", "num_frames",
     "num_inference_steps", "guidance_scale", "seed", "noise_seed", "width", "height", "user",
     "generate_sound"}
)  # fmt: skip
TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
_SIZE = re.compile(r"([0-9]{1,6})[xX]([0-9]{1,6})")


@dataclass(frozen=True)
class Asked:
    """A request, and what else was asked that is not the contract's."""

    request: dict[str, Any]
    negative_prompt: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for.

    ``pixels`` is width x height x frames, ``latents`` the numbers of all streams' latents, and
    ``audio`` the places of the audio latent: what attention and memory grow with.
    """

    steps: int = 200
    side: int = 4096
    frames: int = 8192
    pixels: int = 768 * 1280 * 481
    latents: int = 1 << 26
    audio: int = 4096


@dataclass(frozen=True)
class Able:
    """What the loaded model can make.

    Sizes are multiples of ``width`` and ``height``; frames are ``group`` x latent frames, less
    ``group - 1``, the latent's in multiples of ``patch_frames``.  ``steps`` is the only number
    of steps where the recipe lists the noise levels, ``least_steps`` the least otherwise, and
    ``latents`` the only shapes where the recipe names them.  ``shapes`` gives a request's.
    """

    shapes: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]]
    audio: bool = False
    width: int = 32
    height: int = 32
    group: int = 8
    patch_frames: int = 1
    least_steps: int = 1
    steps: int | None = None
    latents: Mapping[str, Any] | None = None

    @property
    def task(self) -> str:
        """What it makes clips from and of."""
        return "t2av" if self.audio else "t2v"

    def frames(self, count: int) -> int:
        """The number of frames at the ``count``-th place of those that it can make."""
        return (count * self.patch_frames - 1) * self.group + 1

    def place(self, frames: int) -> int:
        """The place of the nearest number of frames."""
        step = self.patch_frames * self.group
        return max(1, (frames + self.group - 1 + step // 2) // step)


def from_clips(fields: Mapping[str, Any]) -> Asked:
    """The request of ``POST /clips``: the contract's fields, all but a few required."""
    if "negative_prompt" in fields:
        raise Refused(422, error="negative_prompt is none of the contract's fields: it belongs to"
                      " the recipe that the server is started with (or ask /v1/videos/sync)",
                      field="negative_prompt", allowed=list(REQUEST_FIELDS))  # fmt: skip
    _known(fields, REQUEST_FIELDS)
    for name in ("prompt", *DEFAULTS):
        if fields.get(name) is None:
            raise Refused(422, error=f"{name} is required", field=name)
    return Asked(request_of(fields))


def from_videos(fields: Mapping[str, Any]) -> Asked:
    """The request of ``POST /v1/videos/sync``; what is left out takes the server's defaults.

    ``seed`` is the noise's, unless ``noise_seed`` names another.
    """
    _known(fields, sorted(VIDEOS_FIELDS))
    texts = ("prompt", "negative_prompt")
    given = {n: v for n, v in fields.items() if v is not None and (v != "" or n in texts)}
    if "prompt" not in given:
        raise Refused(422, error="prompt is required", field="prompt")
    made: dict[str, Any] = {**DEFAULTS, "prompt": given["prompt"]}
    if "size" in given:
        made["width"], made["height"] = _size(given["size"])
    for name in ("width", "height", "num_frames", "fps", "seed", "noise_seed"):
        if name in given:
            made[name] = _number(given[name], name)
    for ours, theirs in (("steps", "num_inference_steps"), ("guidance_scale", "guidance_scale")):
        if theirs in given:
            made[ours] = _number(given[theirs], theirs)
    if "seconds" in given and "num_frames" not in given:
        made["num_frames"] = _frames(given["seconds"], made["fps"])
    if "generate_sound" in given:
        made["audio"] = TRUTH.get(str(given["generate_sound"]).lower())
        if made["audio"] is None:
            raise Refused(422, error="generate_sound is neither true nor false",
                          field="generate_sound")  # fmt: skip
    for name in ("negative_prompt", "model"):
        _text(given.get(name, ""), name)
    return Asked(request_of(made), given.get("negative_prompt"), given.get("model"))


def _known(fields: Mapping[str, Any], allowed: Any) -> None:
    if unknown := sorted(set(fields) - set(allowed)):
        raise Refused(422, error=f"unknown field {unknown[0][:60]!r}", field=unknown[0][:60],
                      allowed=list(allowed))  # fmt: skip


def _size(text: Any) -> tuple[int, int]:
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise Refused(422, error="size is not WIDTHxHEIGHT", field="size")
    return int(found[1]), int(found[2])


def _number(value: Any, name: str) -> Any:
    """A number, perhaps given as text; what is no text is left for ``check``."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if _WHOLE.fullmatch(text):
        return int(text)
    if not _NUMBER.fullmatch(text):
        raise Refused(422, error=f"{name} is no number", field=name)
    return float(text)


def _frames(told: Any, fps: Any) -> int:
    """The frames of so many seconds, the first one apart."""
    seconds = _number(told, "seconds")
    _in_range("fps", fps, 1, 120)
    _in_range("seconds", seconds, 0, 3600)
    frames: int = round(seconds * fps) + 1
    return frames


def _in_range(name: str, value: Any, low: Any, high: Any, nearest: Any = None) -> None:
    """Refuse what is no number from ``low`` to ``high``, with the nearest that is one."""
    number = type(value) is int or (type(value) is float and math.isfinite(value))
    if not number:
        raise Refused(422, error=f"{name} is no number", field=name)
    if not low <= value <= high:
        clamped = min(max(value, low), high)
        raise Refused(422, error=f"{name} is not in {low} to {high}", field=name,
                      nearest=clamped if nearest is None else nearest(clamped))  # fmt: skip


def _text(value: Any, name: str) -> None:
    if not isinstance(value, str) or len(value) > MAX_PROMPT:
        raise Refused(422, error=f"{name} is no text of at most {MAX_PROMPT}", field=name)
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Refused(422, error=f"{name} holds half a character (a lone surrogate)", field=name)


def check(request: Mapping[str, Any], able: Able, limits: Limits) -> dict[str, Any]:
    """The request, whole: its types, its ranges, and what the model can make of it."""
    made = dict(request)
    _types(made)
    _text(made["prompt"], "prompt")
    _ranges(made, able, limits)
    _kind(made, able)
    _steps(made, able)
    _shape(made, able, limits)
    _amount(made, able, limits)
    return made


def _types(request: Mapping[str, Any]) -> None:
    for name in NUMBERS:
        if type(request[name]) is not int:
            raise Refused(422, error=f"{name} is no whole number", field=name)
    for name in ("seed", "noise_seed"):
        _in_range(name, request[name], 0, 2**63 - 1)


def _ranges(request: Mapping[str, Any], able: Able, limits: Limits) -> None:
    for name, multiple in (("width", able.width), ("height", able.height)):
        _in_range(name, request[name], 1, limits.side, lambda v, m=multiple: _side(v, m, limits))
    _in_range("fps", request["fps"], 1, 120)  # the length of the audio is by it
    _in_range("num_frames", request["num_frames"], 1, limits.frames,
              lambda value: able.frames(_fitting(request, able, limits, value)))  # fmt: skip
    _in_range("steps", request["steps"], 1, limits.steps, lambda value: able.steps or value)
    guidance = request["guidance_scale"]
    _in_range("guidance_scale", guidance, -math.inf, math.inf)
    if not 0 < guidance <= 100:
        raise Refused(422, error="guidance_scale is not above 0 and at most 100",
                      field="guidance_scale", nearest=100 if guidance > 100 else 1)  # fmt: skip


def _side(value: int, multiple: int, limits: Limits) -> int:
    """The nearest multiple that is no larger than a side may be."""
    most = max(1, limits.side // multiple)
    return min(max(1, (value + multiple // 2) // multiple), most) * multiple


def _kind(request: dict[str, Any], able: Able) -> None:
    """Task and audio: what the model makes, or nothing said."""
    if request["task"] not in (None, able.task):
        raise Refused(422, error=f"this model's task is {able.task}", field="task",
                      nearest=able.task, valid=[able.task])  # fmt: skip
    if request["audio"] is not None and request["audio"] is not able.audio:
        raise Refused(422, error="this model makes clips " + ("with" if able.audio else "without")
                      + " audio", field="audio", nearest=able.audio)  # fmt: skip
    request["task"], request["audio"] = able.task, able.audio


def _steps(request: Mapping[str, Any], able: Able) -> None:
    steps = request["steps"]
    if able.steps is not None and steps != able.steps:
        raise Refused(422, error=f"the recipe lists the noise levels of {able.steps} steps",
                      field="steps", nearest=able.steps)  # fmt: skip
    if able.steps is None and steps < able.least_steps:
        raise Refused(422, error=f"the model's schedule has {able.least_steps} steps at least",
                      field="steps", nearest=able.least_steps)  # fmt: skip


def _shape(request: Mapping[str, Any], able: Able, limits: Limits) -> None:
    """Sizes and frames that the model's patches and groups allow."""
    for name, multiple in (("width", able.width), ("height", able.height)):
        if request[name] % multiple:
            _cannot(name, request[name], _side(request[name], multiple, limits))
    frames = request["num_frames"]
    if frames != able.frames(able.place(frames)):
        _cannot("num_frames", frames, able.frames(_fitting(request, able, limits, frames)))


def _cannot(name: str, value: Any, nearest: Any) -> None:
    raise Refused(422, error=f"{name} {value} cannot be made", field=name, nearest=nearest)


def _amount(request: Mapping[str, Any], able: Able, limits: Limits) -> None:
    """How much it is: at least one audio latent, and no more than the server takes."""
    shapes = able.shapes(request)
    if min(min(shape) for shape in shapes.values()) < 1:
        more = next((n for n in range(1, limits.frames) if _some(request, able, n)), None)
        _cannot("num_frames", request["num_frames"], more and able.frames(more))
    if not _fits(request, able, limits):
        count = _fitting(request, able, limits, request["num_frames"])
        nearest = able.frames(count) if _fits(_with(request, able, count), able, limits) else None
        raise Refused(422, error="the clip is too large for this server", field="num_frames",
                      nearest=nearest)  # fmt: skip
    if able.latents and {n: list(s) for n, s in shapes.items()} != dict(able.latents):
        raise Refused(422, error="this size makes other latents than the recipe names",
                      field="width", latents=dict(able.latents))  # fmt: skip


def _with(request: Mapping[str, Any], able: Able, count: int) -> dict[str, Any]:
    return {**request, "num_frames": able.frames(count)}


def _some(request: Mapping[str, Any], able: Able, count: int) -> bool:
    return all(min(shape) > 0 for shape in able.shapes(_with(request, able, count)).values())


def _fits(request: Mapping[str, Any], able: Able, limits: Limits) -> bool:
    shapes = able.shapes(request)
    return (
        request["width"] * request["height"] * request["num_frames"] <= limits.pixels
        and request["num_frames"] <= limits.frames
        and sum(math.prod(shape) for shape in shapes.values()) <= limits.latents
        and ("audio" not in shapes or shapes["audio"][2] <= limits.audio)
    )


def _fitting(request: Mapping[str, Any], able: Able, limits: Limits, most: int) -> int:
    """The place of the most frames, up to ``most``, that fit; at least the first."""
    low, high = 1, able.place(most)
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(_with(request, able, middle), able, limits):
            low = middle
        else:
            high = middle - 1
    return low
