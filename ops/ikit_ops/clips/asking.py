"""What is asked of a clip server: requests that are whole, distinct, and new to it.

A benchmark that asks for the same clip twice times a cache.  So no two of its requests are the
same, those that it makes up have a prompt and a seed that no run before has used (a nonce is
drawn for each run, and recorded), and so have the variants that stand in where a file holds too
few, or one twice.  What a file says stays as it is.

Every field is checked before anything is sent: a number that cannot be one would be found by the
engine at best, and by our own arithmetic at the end of a long run at worst.
"""

from __future__ import annotations

import difflib
import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ikit_mcp.call import expanded, one_line
from ikit_mcp.registry import OpError
from ikit_ops.clips import manifest
from ikit_ops.clips.recorder import MAX_STEPS, REQUEST_FIELDS, request_of

DEFAULT = {"task": None, "width": 768, "height": 512, "num_frames": 121, "fps": 24, "steps": 30,
           "guidance_scale": 3.0, "audio": None}  # fmt: skip
SUBJECTS = (
    "a red kite over the sea", "a train in the snow", "rain on a window", "a market at dawn",
    "two dogs on a beach", "a candle in the dark", "clouds over a field", "a clock tower",
)  # fmt: skip
SIZE_FIELDS = ("width", "height", "num_frames", "fps", "steps")
MAX_PROMPT = 19_000
WHOLE = {"width": (1, 16_384), "height": (1, 16_384), "num_frames": (1, 100_000),
         "steps": (1, MAX_STEPS), "seed": (0, 2**63 - 1),
         "noise_seed": (0, 2**63 - 1)}  # fmt: skip
NUMBERS = {"fps": (0.1, 1_000), "guidance_scale": (0, 1_000)}
ELSEWHERE = {
    "negative_prompt": "the recipe holds it, which the engine and clip_steps are given",
    "num_inference_steps": "it is steps here", "size": "it is width and height here",
    "seconds": "it is num_frames and fps here", "generate_sound": "it is audio here",
}  # fmt: skip
_SPARE = 2**31


def read_requests(path: str | None) -> list[dict[str, Any]]:
    """The requests of a JSON-lines file, each checked; OpError names the line that is none."""
    if path is None:
        return []
    data = manifest.read_small(expanded(path), manifest.MAX_MANIFEST_BYTES, "requests")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise OpError(f"line {line} of requests is no UTF-8", "save the file as UTF-8") from None
    found = []
    for number, line_text in enumerate(text.split("\n"), 1):
        if line_text.strip():
            found.append(_request(line_text, number))
    if not found:
        raise OpError("requests holds no request", "one JSON object a line")
    return found


def _request(line: str, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise OpError(
            f"line {number} of requests is no request: {one_line(line, 80)}",
            'each line is {"prompt": …, "width": …, "height": …, "num_frames": …, …}',
        )
    if problem := request_problem(fields):
        raise OpError(f"line {number} of requests: {problem[0]}", problem[1])
    return fields


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a field is given twice")
    return dict(pairs)


def request_problem(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """What is wrong with the fields of a request, and what to do; None: nothing.

    All but the prompt may be left out, or null.
    """
    for name in fields:
        if name not in REQUEST_FIELDS:
            close = difflib.get_close_matches(name[:64], REQUEST_FIELDS, n=1, cutoff=0.5)
            near = f"it is {close[0]} here" if close else f"fields: {', '.join(REQUEST_FIELDS)}"
            return f"unknown field {one_line(name, 60)!r}", ELSEWHERE.get(name, near)
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip() or len(prompt) > MAX_PROMPT:
        return f"prompt is no text of 1 to {MAX_PROMPT} characters", "give one"
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        return "prompt has half of a character (a lone surrogate)", "write the whole character"
    for name, (least, most) in {**WHOLE, **NUMBERS}.items():
        value = fields.get(name)
        if value is not None and not (_right_type(name, value) and least <= value <= most):
            kind = "whole number" if name in WHOLE else "number"
            told = one_line(json.dumps(value), 40)
            return f"{name} is {told}, no {kind} from {least} to {most}", f"correct {name}"
    if not isinstance(fields.get("audio"), (bool, type(None))):
        return "audio is neither true nor false", "correct audio"
    task = fields.get("task")
    if task is not None and not (isinstance(task, str) and task.isascii() and len(task) <= 40):
        return "task is no short text", "t2v or t2av, or leave it out"
    return None


def _right_type(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if name in WHOLE else (int, float)):
        return False
    return isinstance(value, int) or math.isfinite(value)


def size_of(request: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a clip's cost depends on: its size, length, steps, guidance and sound."""
    return tuple(request[name] for name in (*SIZE_FIELDS, "guidance_scale", "audio"))


class Requests:
    """The requests of one run: ``warmup``, then ``timed``, and as many ``fresh`` as are wanted."""

    def __init__(
        self, given: Sequence[Mapping[str, Any]], warmup: int, count: int, seed: int, nonce: str
    ) -> None:
        self.nonce = nonce
        self._random = random.Random(f"{seed}:{nonce}")  # noqa: S311 -- seeds, not secrets
        self._used: set[int] = {
            value for fields in given for name in ("seed", "noise_seed")
            if isinstance(value := fields.get(name), int)
        }  # fmt: skip
        self._takes = 0
        self.timed = self._timed(given, count)
        sizes: dict[tuple[Any, ...], dict[str, Any]] = {}
        for request in self.timed:
            sizes.setdefault(size_of(request), request)
        first = list(sizes.values())
        self.warmup = [self.fresh(first[number % len(first)]) for number in range(warmup)]

    def _timed(self, given: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        seen: set[tuple[Any, ...]] = set()
        for number in range(count):
            if number < len(given):
                request = self._whole(given[number])
            elif given:
                request = self.fresh(self._whole(given[number % len(given)]))
            else:
                request = self.fresh(self._whole({"prompt": SUBJECTS[number % len(SUBJECTS)]}))
            if tuple(request.values()) in seen:
                request = self.fresh(request)
            seen.add(tuple(request.values()))
            made.append(request)
        return made

    def _whole(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The request with its defaults, and a seed of its own where it names none."""
        given = {name: value for name, value in fields.items() if value is not None}
        return request_of({**DEFAULT, "seed": None, **given} | self._seed(given))

    def _seed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {} if "seed" in given else {"seed": self._new_seed()}

    def _new_seed(self) -> int:
        while (seed := self._random.randrange(_SPARE)) in self._used:
            pass
        self._used.add(seed)
        return seed

    def fresh(self, like: Mapping[str, Any]) -> dict[str, Any]:
        """A request of that size that nobody has seen: another prompt and another seed."""
        self._takes += 1
        prompt = f"{like['prompt']}, take {self._takes} of run {self.nonce}"
        seed = self._new_seed()
        return {**like, "prompt": prompt, "seed": seed, "noise_seed": seed}

    def alike(self) -> int:
        """How many timed requests share their prompt, or their noise, with one before them."""
        prompts, noises, count = set(), set(), 0
        for request in self.timed:
            count += request["prompt"] in prompts or request["noise_seed"] in noises
            prompts.add(request["prompt"])
            noises.add(request["noise_seed"])
        return count
