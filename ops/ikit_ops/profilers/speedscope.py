"""Speedscope files, as py-spy and other samplers write them: call stacks with weights.

A file holds frames once and profiles that refer to them: *sampled* ones as stacks with a weight
each, *evented* ones as frames that open and close at a time.  Weights are seconds, bytes or
nothing, as the profile's unit says; a share is what can be compared, and only among units of
the same kind.  A share needs sound weights: with one below nothing the others pass 100 %.
"""

from __future__ import annotations

import math
import re

import msgspec

from ikit_mcp.registry import excerpt
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import MAX_STRING, Reading, open_bytes, shown_name

FORMAT = "speedscope"
MAX_BYTES = 512 << 20
MAX_FUNCTIONS = 2_000
MARK = "speedscope.app/file-format-schema"
# The schema's address may stand at the end, or not at all: then what the file begins with tells.
_BEGINS = re.compile(
    r'"shared"\s*:\s*\{\s*"frames"\s*:|"profiles"\s*:\s*\[\s*\{\s*'
    r'"(?:type|name|unit|startValue|endValue|samples|weights|events)"\s*:'
)
_SECONDS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}


def is_begin(text: str) -> bool:
    """Whether a file that begins so is one of speedscope."""
    return text[:1] == "{" and (
        MARK in text or ('"traceEvents"' not in text and _BEGINS.search(text) is not None)
    )


class Frame(msgspec.Struct, gc=False):
    """A function, and the file it is in."""

    name: str
    file: str | None = None


class Shared(msgspec.Struct):
    """What all profiles refer to."""

    frames: list[Frame]


class Opened(msgspec.Struct, gc=False):
    """A frame that opens (O) or closes (C)."""

    type: str
    frame: int
    at: float


class Profile(msgspec.Struct):
    """One thread, as a rule."""

    type: str
    unit: str = "none"
    startValue: float | None = None
    endValue: float | None = None
    samples: list[list[int]] = []
    weights: list[float] = []
    events: list[Opened] = []


class File(msgspec.Struct):
    """The whole file."""

    shared: Shared
    profiles: list[Profile]
    exporter: str | None = None


class _Shares:
    """Self and inclusive weight by frame."""

    def __init__(self, count: int) -> None:
        self.own = [0.0] * count
        self.inclusive = [0.0] * count
        self.samples = [0] * count
        self.whole = 0.0
        self.left_open = 0

    def add(self, stack: list[int], weight: float) -> None:
        """One stack, its last frame being where it was."""
        self.whole += weight
        if not stack:
            return
        self.own[stack[-1]] += weight
        for frame in set(stack):
            self.inclusive[frame] += weight


def read(reading: Reading) -> Capture:
    """The functions of a file; Damaged when it is none."""
    data = bytearray()
    with open_bytes(reading) as stream:
        while block := stream.read(1 << 20):
            data += block
            if len(data) > MAX_BYTES:
                raise reading.damaged(f"it is larger than {MAX_BYTES >> 20} MiB")
    try:
        told = msgspec.json.decode(bytes(data), type=File)
    except (msgspec.DecodeError, RecursionError) as error:
        raise reading.damaged(f"it is no speedscope file ({excerpt(str(error), 120)})") from None
    frames = told.shared.frames
    reading.count_names(len(frames))
    shares = _Shares(len(frames))
    capture = Capture(FORMAT, tool="sampler")
    units = _units(told)
    mixed = len(units) > 1 and units <= _SECONDS.keys()
    for profile in told.profiles:
        _take(reading, profile, shares, _SECONDS.get(profile.unit, 1.0) if mixed else 1.0)
    if not math.isfinite(shares.whole):
        raise reading.damaged("its weights are too large to be added up")
    _describe(capture, told, shares)
    capture.cpu_only = True
    capture.functions = _rows(frames, shares)
    capture.missing.append("GPU kernels, memory operations and gaps (a sampler sees the CPU alone)")
    return capture


def _units(told: File) -> set[str]:
    """The units of the profiles that count."""
    return {profile.unit for profile in told.profiles if profile.samples or profile.events}


def _describe(capture: Capture, told: File, shares: _Shares) -> None:
    """The facts of the file, and what keeps its shares from being sound."""
    units = _units(told)
    capture.facts["exporter"] = shown_name(told.exporter or "unknown")
    capture.facts["units"] = sorted({shown_name(unit) for unit in units})[:10]
    capture.facts["samples"] = sum(len(p.samples) for p in told.profiles)
    if len(units) > 1 and not units <= _SECONDS.keys():
        capture.incomplete.append("profiles of different units are in one file: no shares of both")
        shares.whole = 0.0
    if unknown := sum(p.type not in ("sampled", "evented") for p in told.profiles):
        capture.incomplete.append(f"{unknown} profiles are of an unknown type: they were left out")
    if shares.left_open:
        capture.incomplete.append(
            f"{shares.left_open} frames are never closed: the profile may be cut off"
        )
    if any(profile.type == "sampled" for profile in told.profiles):
        capture.limitations.append("samples estimate shares of time, to about 1/sqrt(samples)")


def _take(reading: Reading, profile: Profile, shares: _Shares, scale: float) -> None:
    """One profile's stacks, weights times ``scale``; Damaged where they are not sound."""
    if profile.type == "evented":
        _take_events(reading, profile, scale, shares)
    if profile.type != "sampled":
        return
    weights = profile.weights or [1.0] * len(profile.samples)
    if len(weights) != len(profile.samples):
        raise reading.damaged("it has not a weight for each sample")
    for stack, weight in zip(profile.samples, weights, strict=True):
        if weight < 0:
            raise reading.damaged("a weight is less than nothing")
        if any(not 0 <= frame < len(shares.own) for frame in stack):
            raise reading.damaged(ABSENT)
        shares.add(stack, weight * scale)
        if stack:
            shares.samples[stack[-1]] += 1


def _take_events(reading: Reading, profile: Profile, scale: float, shares: _Shares) -> None:
    """Frames that open and close: between two events the open stack is running.

    Before the first event and behind the last one, up to the profile's own bounds, too: a
    frame that is left open runs on to the end.
    """
    stack: list[int] = []
    last = profile.startValue
    for event in profile.events:
        if last is not None:
            if event.at < last:
                raise reading.damaged("its times run backwards")
            shares.add(stack, (event.at - last) * scale)
        last = event.at
        if not 0 <= event.frame < len(shares.own):
            raise reading.damaged(ABSENT)
        if event.type == "O":
            stack.append(event.frame)
        elif event.type == "C" and stack and stack[-1] == event.frame:
            stack.pop()
        else:
            raise reading.damaged("a frame is closed that is not the last one opened")
    if profile.endValue is not None and last is not None:
        if profile.endValue < last:
            raise reading.damaged("its times go beyond its end")
        shares.add(stack, (profile.endValue - last) * scale)
    shares.left_open += len(stack)


ABSENT = "a stack names a frame that is not there"


def _rows(frames: list[Frame], shares: _Shares) -> list[dict[str, object]]:
    """The functions, those with most own time first; what was not sampled has no samples."""
    ordered = sorted(
        range(len(frames)), key=lambda n: (-shares.own[n], -shares.inclusive[n], frames[n].name)
    )
    whole = shares.whole
    sampled = any(shares.samples)
    return [
        {
            "name": shown_name(frames[n].name[:MAX_STRING]),
            "object": shown_name((frames[n].file or "")[:MAX_STRING]) or None,
            "samples": shares.samples[n] if sampled else None,
            "share": shares.own[n] / whole if whole else None,
            "inclusive_share": shares.inclusive[n] / whole if whole else None,
        }
        for n in ordered[:MAX_FUNCTIONS]
        if shares.inclusive[n] or shares.samples[n]
    ]
