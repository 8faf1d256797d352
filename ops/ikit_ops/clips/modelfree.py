"""The checks that need no model: a dump against its request, its schedule and its arithmetic.

What an engine writes about itself can be held against itself.  ``x_next`` must be the sampler's
update of ``x`` by ``out``; each step must start where the last one ended; what was decoded must
be where the last one ended.  An engine that skips a step's network and moves on with the last
output repeats that output bit for bit, or extrapolates it from earlier ones: that too shows
without a model.  What does *not* show is whether ``out`` is the network's; that is the replay's
part.

Everything is read once, in pieces: a piece of every step in turn, so that a step and its
successor are in memory together and a clip of any size takes a few megabytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikit_ops.clips.layout import layout_problems
from ikit_ops.clips.reader import DumpReader, json_in
from ikit_ops.clips.recorder import DTYPE_BYTES
from ikit_ops.clips.vectors import Vectors, ulp, vectors

PIECE = 1 << 15  # numbers
SAMPLE = 512  # numbers of each output that are kept to compare outputs with each other
SIGMA_TOLERANCE = 1e-6
EXTRAPOLATED = 1e-5  # of the output; an honest one is 1e-3 and more from what its predecessors say
_SHOWN = 4
_EULER = {"euler", "flowmatcheuler", "flowmatcheulerdiscrete", "flowmatcheulerdiscretescheduler"}
Levels = tuple[list[float], list[float]]
"""``sigma`` and ``sigma_next`` of each step."""


@dataclass
class Scan:
    """What one pass over the latents found, by check: the first few places, in words."""

    non_finite: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    arithmetic: list[str] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    reused: list[str] = field(default_factory=list)
    suspicion: dict[str, list[float]] = field(default_factory=dict)
    worst: float = 0.0


def schedule_problems(
    sigma: Sequence[float], after: Sequence[float], expected: Sequence[float] | None = None
) -> list[str]:
    """What is wrong with the noise levels: they fall, they chain, they end at 0.

    ``expected`` (N, or N + 1 with the last) is what the recipe or the reference's scheduler says.
    """
    problems = []
    if any(not 0 < level <= 1 + SIGMA_TOLERANCE for level in sigma):
        problems.append("a sigma is not in (0, 1]")
    for step, (here, there) in enumerate(zip(sigma, after, strict=True)):
        if not there < here:
            problems.append(f"step {step} goes from sigma {here:.6f} to {there:.6f}, not down")
        if step + 1 < len(sigma) and abs(there - sigma[step + 1]) > SIGMA_TOLERANCE:
            problems.append(
                f"step {step} ends at sigma {there:.6f}, step {step + 1} begins at "
                f"{sigma[step + 1]:.6f}"
            )
    if abs(after[-1]) > SIGMA_TOLERANCE:
        problems.append(f"the last step ends at sigma {after[-1]:.6f}, not 0")
    if expected is not None:
        problems += _against(sigma, after, expected)
    return problems[:_SHOWN]


def _against(
    sigma: Sequence[float], after: Sequence[float], expected: Sequence[float]
) -> list[str]:
    whole = [*sigma, after[-1]][: len(expected)]
    if len(whole) != len(expected) or len(expected) < len(sigma):
        return [f"{len(sigma)} noise levels, expected {len(expected)}"]
    pairs = list(zip(whole, expected, strict=True))
    apart = [abs(a - b) for a, b in pairs]
    step = max(range(len(apart)), key=apart.__getitem__)
    if apart[step] <= SIGMA_TOLERANCE:
        return []
    return [f"sigma[{step}] is {pairs[step][0]:.6f}, expected {pairs[step][1]:.6f}"]


def geometry_problems(request: Mapping[str, Any], shape: Sequence[int]) -> list[str]:
    """Whether a video latent [1, C, F, H, W] can be of the requested size at all.

    Height and width shrink by one whole factor; the first frame stands alone and the others are
    taken in groups of one size.
    """
    height, width, frames = (request.get(name) for name in ("height", "width", "num_frames"))
    if not all(type(n) is int and n > 0 for n in (height, width, frames)):
        return []
    _, _, f, h, w = shape
    problems = []
    if height % h or width % w or height // h != width // w:  # type: ignore[operator]
        problems.append(f"a latent of {h}x{w} is not of {height}x{width}")
    if not any((frames - 1) // group + 1 == f for group in range(1, 17)):  # type: ignore[operator]
        problems.append(f"a latent of {f} frames is not of {frames}")
    return problems


def layout_of(
    reader: DumpReader, request: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None
) -> list[str]:
    """The layout's problems, with the shapes that the recipe names or the request allows.

    Held against the dump's own request it says whether the dump is whole; whether that request
    is the one that was asked for is another question.
    """
    steps = request.get("steps")
    count = steps if type(steps) is int else None
    problems = layout_problems(reader, shapes, count, values=False)
    if not problems and "video" in reader.streams and shapes is None:
        problems = geometry_problems(request, reader.shape("final.video"))
    if not problems and "video" not in reader.streams:
        problems = ["there is no video stream"]
    if not problems and shapes is None:
        problems = audio_problems(reader, request)
    return problems


def audio_problems(reader: DumpReader, request: Mapping[str, Any]) -> list[str]:
    """Whether audio was asked for and is not there.

    A model that makes audio with its video does so whether or not it was asked for.
    """
    if request.get("audio") is True and "audio" not in reader.streams:
        return [f"audio was asked for, the streams are {', '.join(reader.streams)}"]
    return []


def scan(
    reader: DumpReader,
    ops: Vectors | None = None,
    tick: Callable[[float], None] = lambda share: None,
) -> Scan:
    """Read every latent of a dump whose layout is right, once.

    ``tick`` hears the share that is done, and may raise.  StepDumpError when the file is cut.
    """
    found = Scan()
    for number, stream in enumerate(reader.streams):
        part = len(reader.streams)
        _Stream(reader, stream, ops or vectors(), found).run(
            lambda share, n=number, part=part: tick((n + share) / part)  # type: ignore[misc]
        )
    return found


class _Stream:
    """One stream's pass."""

    def __init__(self, reader: DumpReader, stream: str, ops: Vectors, found: Scan) -> None:
        self.reader, self.stream, self.ops, self.found = reader, stream, ops, found
        self.steps = reader.n_steps
        self.numbers = math.prod(reader.shape(f"final.{stream}"))
        sigma, after = levels_of(reader, stream)
        self.ds = [b - a for a, b in zip(sigma, after, strict=True)]
        self.buffers = {part: bytearray(4 * PIECE) for part in ("x", "out", "next", "last")}
        self.samples: list[Any] = []
        self.digests: dict[bytes, list[int]] = {}
        self.bad: dict[tuple[str, int], int] = {}
        self.live: set[tuple[str, int]] = set()

    def run(self, tick: Callable[[float], None]) -> None:
        for start in range(0, self.numbers, PIECE):
            self._piece(start)
            tick(min(1.0, (start + PIECE) / self.numbers))
        self._tell()
        self._compare_outputs()

    def _read(self, part: str, buffer: str, start: int) -> tuple[Any, str, memoryview]:
        """A piece of a tensor: its numbers, its dtype, and its bytes."""
        name = f"final.{self.stream}" if part == "final" else f"step.{part}"
        dtype = self.reader.dtype(name)
        size = DTYPE_BYTES[dtype]
        view = memoryview(self.buffers[buffer])[: PIECE * size]
        count = self.reader.read_into(name, start * size, view)
        return self.ops.floats(view[:count], dtype), dtype, view[:count]

    def _piece(self, start: int) -> None:
        last: tuple[Any, str, memoryview] | None = None
        for step in range(self.steps):
            key = f"{step}.{self.stream}"
            x = self._read(f"{key}.x", "x", start)
            if last is not None and not self._equal(last, x):
                self._note("chain", step)
            out = self._read(f"{key}.out", "out", start)
            # the buffer that holds the last x_next is free now: it takes the next one's place
            self.buffers["next"], self.buffers["last"] = (
                self.buffers["last"], self.buffers["next"],
            )  # fmt: skip
            after = self._read(f"{key}.x_next", "next", start)
            euler = self.ops.euler(x[0], out[0], after[0], self.ds[step], (out[1], after[1]))
            if not euler.finite:
                self._note("non_finite", step)
            elif euler.bad:
                self.bad["arithmetic", step] = self.bad.get(("arithmetic", step), 0) + euler.bad
                self.found.worst = max(self.found.worst, euler.worst)
            for name, piece in (("x", x), ("out", out)):
                if ((name, step) not in self.live and any(piece[2][:64])) or any(piece[2]):
                    self.live.add((name, step))
            if start == 0:
                self._sample(step, out)
            last = after
        final = self._read("final", "x", start)
        if not self.ops.finite(final[0]):
            self._note("non_finite", self.steps)
        if last is not None and not self._equal(last, final):
            self._note("final", self.steps)

    def _equal(self, one: tuple[Any, str, memoryview], other: tuple[Any, str, memoryview]) -> bool:
        if one[1] == other[1]:
            return self.ops.identical(one[2], other[2])
        return self.ops.same(one[0], other[0])

    def _note(self, check: str, step: int) -> None:
        self.bad[check, step] = self.bad.get((check, step), 0) + 1

    def _sample(self, step: int, out: tuple[Any, str, memoryview]) -> None:
        self.digests.setdefault(hashlib.blake2b(out[2]).digest(), []).append(step)
        stride = max(1, len(out[0]) // SAMPLE)
        self.samples.append([float(value) for value in out[0][::stride][:SAMPLE]])

    def _tell(self) -> None:
        """Put what was counted into words."""
        for (check, step), count in sorted(self.bad.items(), key=lambda item: item[0][1]):
            here = f"step {step} of {self.stream}" if step < self.steps else f"final.{self.stream}"
            words = {
                "chain": f"{here} does not start at x_next of step {step - 1}",
                "final": f"final.{self.stream} is not the last x_next",
                "arithmetic": f"{here}: {count} of {self.numbers} numbers are off",
                "non_finite": here,
            }
            getattr(self.found, check).append(words[check])
        for part in ("x", "out"):
            self.found.zero += [
                f"step.{step}.{self.stream}.{part} is all zeros"
                for step in range(self.steps)
                if (part, step) not in self.live
            ]

    def _compare_outputs(self) -> None:
        """Repeats among the outputs, combinations of earlier ones, and how far each moves."""
        repeated: set[int] = set()
        for steps in self.digests.values():
            for step in steps[1:]:
                if self._repeats(steps[0], step):
                    repeated.add(step)
                    self.found.reused.append(
                        f"out of step {step} of {self.stream} is that of step {steps[0]}"
                    )
        moves = [0.0]
        for step in range(1, self.steps):
            here, back = self.samples[step], self.samples[step - 1]
            moves.append(_distance(here, back))
            if step in repeated:
                continue
            dtype = self.reader.dtype(f"step.{step}.{self.stream}.out")
            if extrapolated(here, self.samples[max(0, step - 3) : step], dtype):
                self.found.reused.append(
                    f"out of step {step} of {self.stream} is a combination of the ones before it"
                )
        self.found.suspicion[self.stream] = moves

    def _repeats(self, one: int, other: int) -> bool:
        names = [f"step.{step}.{self.stream}.out" for step in (one, other)]
        if self.reader.dtype(names[0]) != self.reader.dtype(names[1]):
            return False
        views = [memoryview(self.buffers[key]) for key in ("x", "out")]
        for start in range(0, self.reader.nbytes(names[0]), 4 * PIECE):
            counts = [
                self.reader.read_into(name, start, view)
                for name, view in zip(names, views, strict=True)
            ]
            if views[0][: counts[0]] != views[1][: counts[1]]:
                return False
        return True


def stream_sigmas(reader: DumpReader, stream: str) -> Levels | None:
    """The schedule of a stream that has its own (metadata ``sigmas``), or None."""
    try:
        both = (json_in(reader.meta, "sigmas") or {})[stream]
        lists = [[float(level) for level in both[name]] for name in ("sigma", "sigma_next")]
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    if any(len(each) != reader.n_steps or not all(map(math.isfinite, each)) for each in lists):
        return None
    return lists[0], lists[1]


def levels_of(reader: DumpReader, stream: str) -> Levels:
    """The noise levels that a stream went along: its own, or those of the tensors."""
    return stream_sigmas(reader, stream) or reader.sigmas()


def own_schedule_problems(reader: DumpReader) -> list[str]:
    """Whether the tensors ``sigma`` and ``sigma_next`` are the video's.

    A schedule of its own is for the stream beside it: else a dump could show one schedule and
    have gone along another.
    """
    problems = []
    first = "video" if "video" in reader.streams else reader.streams[0]
    for name, own, tensor in zip(
        ("sigma", "sigma_next"), levels_of(reader, first), reader.sigmas(), strict=True
    ):
        for step, (one, other) in enumerate(zip(own, tensor, strict=True)):
            if abs(one - other) > SIGMA_TOLERANCE:
                problems.append(
                    f"the {first} went by {name}[{step}] {one:.6f}, the tensor says {other:.6f}"
                )
                break
    return problems


def declared_sampler(reader: DumpReader) -> str | None:
    """The sampler that the dump's own recipe names, or None."""
    recipe = json_in(reader.meta, "recipe")
    sampler = recipe.get("sampler") if isinstance(recipe, dict) else None
    return sampler if isinstance(sampler, str) else None


def is_euler(sampler: str) -> bool:
    """Whether a sampler's name is one of those of flow-match Euler, however it is spelled."""
    return re.sub(r"[^a-z0-9]", "", sampler.lower()) in _EULER


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two outputs are apart, relative to the first; 0 for two of zeros."""
    norm = math.fsum(a * a for a in one)
    gap = math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))
    return math.sqrt(gap / norm) if norm else 0.0


def unexplained(target: Sequence[float], basis: Sequence[Sequence[float]]) -> list[float]:
    """What is left of the target after the best combination of the basis vectors.

    By Gram-Schmidt, twice, so that nearly equal vectors do not lose digits.
    """
    directions: list[list[float]] = []
    for vector in (*basis, target):
        rest = list(vector)
        size = math.sqrt(math.fsum(a * a for a in rest))
        for _ in range(2):
            for unit in directions:
                share = math.fsum(a * b for a, b in zip(rest, unit, strict=True))
                rest = [a - share * b for a, b in zip(rest, unit, strict=True)]
        if vector is target:
            return rest
        length = math.sqrt(math.fsum(a * a for a in rest))
        if length > 1e-7 * size:
            directions.append([a / length for a in rest])
    return list(target)


def extrapolated(target: Sequence[float], basis: Sequence[Sequence[float]], dtype: str) -> bool:
    """Whether an output is a combination of the ones before it, but for its dtype's rounding.

    In float32 that shows in its size.  In the half formats rounding is as large as what honest
    outputs of a long schedule leave; but a rounded combination lies within about half an ulp nearly
    everywhere, and an honest output only by chance.
    """
    rest = unexplained(target, basis)
    size = math.fsum(a * a for a in target)
    if len(target) <= 8 * len(basis) or not size:
        return False  # as many unknowns as numbers explain anything
    if dtype == "F32":
        return math.sqrt(math.fsum(a * a for a in rest) / size) <= EXTRAPOLATED
    inside = sum(
        abs(left) <= 0.6 * ulp(value, dtype) for left, value in zip(rest, target, strict=True)
    )
    return inside >= 0.95 * len(target)
