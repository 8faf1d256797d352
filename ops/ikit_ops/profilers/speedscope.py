"""Speedscope files, as py-spy and other samplers write them: call stacks with weights.

A file holds frames once and profiles that refer to them: *sampled* ones as stacks with a weight
each, *evented* ones as frames that open and close at a time.  Weights are seconds, bytes or
nothing, as the profile's unit says; a share is what can be compared.
"""

from __future__ import annotations

import msgspec

from ikit_mcp.registry import excerpt
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import MAX_STRING, Reading, open_bytes, shown_name

FORMAT = "speedscope"
MAX_BYTES = 512 << 20
MAX_FUNCTIONS = 2_000
MARK = b"speedscope.app/file-format-schema"


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

    def add(self, stack: list[int], weight: float) -> None:
        """One stack, its last frame being where it was."""
        self.whole += weight
        if not stack:
            return
        self.own[stack[-1]] += weight
        self.samples[stack[-1]] += 1
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
    for profile in told.profiles:
        try:
            _take(profile, shares)
        except (IndexError, ValueError):
            raise reading.damaged("a stack names a frame that is not there") from None
    capture.facts["exporter"] = shown_name(told.exporter or "unknown")
    capture.facts["units"] = sorted({shown_name(p.unit) for p in told.profiles})[:10]
    capture.facts["samples"] = sum(len(p.samples) for p in told.profiles)
    if len({p.unit for p in told.profiles}) > 1:
        capture.incomplete.append("profiles of different units are in one file: shares mix them")
    capture.cpu_only = True
    capture.functions = _rows(frames, shares)
    capture.missing.append("GPU kernels, memory operations and gaps (a sampler sees the CPU alone)")
    capture.limitations.append("samples estimate shares of time, to about 1/sqrt(samples)")
    return capture


def _take(profile: Profile, shares: _Shares) -> None:
    """One profile's stacks; IndexError for a frame that is not there."""
    if profile.type == "evented":
        _take_events(profile.events, shares)
        return
    weights = profile.weights or [1.0] * len(profile.samples)
    if len(weights) != len(profile.samples):
        raise ValueError("weights")
    for stack, weight in zip(profile.samples, weights, strict=True):
        if any(frame < 0 for frame in stack):
            raise IndexError
        shares.add(stack, weight)


def _take_events(events: list[Opened], shares: _Shares) -> None:
    """Frames that open and close: between two events the open stack is running."""
    stack: list[int] = []
    last: float | None = None
    for event in events:
        if event.frame < 0:
            raise IndexError
        if last is not None and event.at > last:
            shares.add(stack, event.at - last)
        last = event.at
        if event.type == "O":
            stack.append(event.frame)
            shares.own[event.frame] += 0.0  # an unknown frame is noticed here
        elif stack and stack[-1] == event.frame:
            stack.pop()
        else:
            raise ValueError("close")


def _rows(frames: list[Frame], shares: _Shares) -> list[dict[str, object]]:
    """The functions, those with most own time first."""
    ordered = sorted(
        range(len(frames)), key=lambda n: (-shares.own[n], -shares.inclusive[n], frames[n].name)
    )
    whole = shares.whole
    return [
        {
            "name": shown_name(frames[n].name[:MAX_STRING]),
            "object": shown_name((frames[n].file or "")[:MAX_STRING]) or None,
            "samples": shares.samples[n],
            "share": shares.own[n] / whole if whole else None,
            "inclusive_share": shares.inclusive[n] / whole if whole else None,
        }
        for n in ordered[:MAX_FUNCTIONS]
        if shares.inclusive[n] or shares.samples[n]
    ]
