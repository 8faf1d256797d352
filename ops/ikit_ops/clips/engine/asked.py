"""What a client asks the clip server for, checked: nothing unknown, nothing rounded in silence.

A server that ignores a field it does not know makes another clip than was asked for, and one
that rounds a size answers a question that nobody put.  So every unknown field is refused, and a
size that the model cannot make is answered with the nearest one that it can.

Two dialects are understood: the contract's request (``POST /clips``), and the one that vLLM-omni
and SGLang share (``POST /v1/videos/sync``: ``size`` as WxH, ``num_inference_steps``, ``seconds``).
"""

from __future__ import annotations

import email
import email.policy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ikit_ops.clips.recorder import REQUEST_FIELDS, request_of

MAX_BODY = 1 << 20
MAX_PROMPT = 20_000
NUMBERS = ("width", "height", "num_frames", "steps", "seed", "noise_seed")
DEFAULTS = {"width": 768, "height": 512, "num_frames": 121, "fps": 24, "steps": 30,
            "guidance_scale": 3.0, "seed": 0}  # fmt: skip
VIDEOS_FIELDS = frozenset(
    {"prompt", "model", "size", "seconds", "fps", "num_frames", "num_inference_steps",
     "guidance_scale", "seed", "noise_seed", "width", "height", "user", "generate_sound"}
)  # fmt: skip


class Refused(Exception):
    """A request that is not served: the HTTP status, and what to tell."""

    def __init__(self, status: int, **told: Any) -> None:
        super().__init__(told.get("error", ""))
        self.status, self.told = status, told


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for."""

    steps: int = 200
    numbers: int = 768 * 1280 * 481


def parse_json(body: bytes) -> dict[str, Any]:
    """The object of a JSON body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, error="the body is no JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, error="the body is no JSON object")
    return found


def parse_form(body: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a multipart form; files are refused."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    if not message.is_multipart():
        raise Refused(400, error="the body is no multipart form")
    found: dict[str, Any] = {}
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        if not isinstance(name, str) or part.get_filename() is not None:
            raise Refused(422, error="only plain fields are taken", field=str(name))
        if name in found:
            raise Refused(422, error="a field is given twice", field=name)
        found[name] = part.get_content().strip("\r\n")
    return found


def from_clips(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request of ``POST /clips``: the contract's fields, all but a few required."""
    if unknown := sorted(set(fields) - set(REQUEST_FIELDS)):
        raise Refused(422, error=f"unknown field {unknown[0][:60]!r}", field=unknown[0][:60],
                      allowed=list(REQUEST_FIELDS))  # fmt: skip
    for name in ("prompt", *DEFAULTS):
        if fields.get(name) is None:
            raise Refused(422, error=f"{name} is required", field=name)
    return request_of(fields)


def from_videos(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request of ``POST /v1/videos/sync``; what is left out takes the server's defaults."""
    if unknown := sorted(set(fields) - VIDEOS_FIELDS):
        raise Refused(422, error=f"unknown field {unknown[0][:60]!r}", field=unknown[0][:60],
                      allowed=sorted(VIDEOS_FIELDS))  # fmt: skip
    given = {name: value for name, value in fields.items() if value not in (None, "")}
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
        made["num_frames"] = round(_number(given["seconds"], "seconds") * made["fps"]) + 1
    if "generate_sound" in given:
        made["audio"] = str(given["generate_sound"]).lower() in ("1", "true", "yes")
    return request_of(made)


def _size(text: Any) -> tuple[int, int]:
    width, _, height = str(text).lower().partition("x")
    if not (width.isascii() and width.isdigit() and height.isascii() and height.isdigit()):
        raise Refused(422, error="size is not WIDTHxHEIGHT", field="size")
    return int(width[:6]), int(height[:6])


def _number(value: Any, name: str) -> Any:
    """A number, perhaps given as text."""
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().lstrip("-").isdigit() else float(value)
        except (ValueError, OverflowError):
            raise Refused(422, error=f"{name} is no number", field=name) from None
    return value


def check(request: dict[str, Any], audio: bool, sizes: Any, limits: Limits) -> dict[str, Any]:
    """The request, whole, its types and limits held; ``sizes`` tells what the model cannot make."""
    for name in NUMBERS:
        if type(request[name]) is not int or request[name] < 0:
            raise Refused(422, error=f"{name} is no whole number from 0 on", field=name)
    for name in ("fps", "guidance_scale"):
        value = request[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (
            math.isfinite(value) and value > 0
        ):  # fmt: skip
            raise Refused(422, error=f"{name} is no number above 0", field=name)
    if not isinstance(request["prompt"], str) or len(request["prompt"]) > MAX_PROMPT:
        raise Refused(422, error=f"prompt is no text of at most {MAX_PROMPT}", field="prompt")
    request["task"] = request["task"] or ("t2av" if audio else "t2v")
    request["audio"] = audio if request["audio"] is None else request["audio"]
    if request["audio"] is not audio:
        raise Refused(422, error="this model makes clips " + ("with" if audio else "without")
                      + " audio", field="audio", nearest=audio)  # fmt: skip
    for name, most in (("steps", limits.steps), ("fps", 120), ("guidance_scale", 100)):
        if not 0 < request[name] <= most:
            raise Refused(422, error=f"{name} is not in 1 to {most}", field=name,
                          nearest=min(max(request[name], 1), most))  # fmt: skip
    for name in ("seed", "noise_seed"):
        if request[name] >= 2**63:
            raise Refused(422, error=f"{name} is not below 2^63", field=name)
    for field, value, nearest in sizes(request):
        raise Refused(422, error=f"{field} {value} cannot be made", field=field, nearest=nearest)
    if request["width"] * request["height"] * request["num_frames"] > limits.numbers:
        raise Refused(422, error="the clip is too large for this server", field="num_frames")
    return request
