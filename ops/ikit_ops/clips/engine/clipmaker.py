"""Make one clip: run the pipeline, record its steps, encode the mp4, and time every stage.

Stages are told apart by the pipeline's own edges: text encoding by its method, denoising from
the moment the schedule is set to the end of the last step, decoding by the decoder's.  Between
two steps nothing synchronises the device, because that would slow what is being timed; only at
the edges of stages, where the next stage needs the result anyway.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ikit_ops.clips.engine import mp4, pipelines
from ikit_ops.clips.engine.hook import RecorderSink, RecordingFlowMatchEuler
from ikit_ops.clips.recorder import StepRecorder


@dataclass
class Made:
    """A clip: its bytes, and the milliseconds of each stage."""

    mp4: bytes
    sha256: str
    dump: Path
    stages: dict[str, float] = field(default_factory=dict)
    steps_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


class Timer:
    """Milliseconds by stage, and the time at which the denoising began and ended."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.spent: dict[str, float] = {}
        self.marks: list[float] = []

    def now(self) -> float:
        """The time in ms, when the device has done what it was given."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the body's time to a stage."""
        started = self.now()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + self.now() - started

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time counts to a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return function(*args, **kwargs)

        return timed


class _TimedSink:
    """A recorder's sink that counts its own time apart, and marks when each step was over."""

    def __init__(self, sink: RecorderSink, timer: Timer, streams: int) -> None:
        self._sink, self._timer, self._streams = sink, timer, streams
        self._heard = 0
        self.marks: list[float] = []

    def step(self, *told: Any) -> None:
        """Record a step."""
        started = time.perf_counter() * 1e3
        self._sink.step(*told)
        ended = time.perf_counter() * 1e3
        self._timer.spent["step_dump"] = self._timer.spent.get("step_dump", 0.0) + ended - started
        self._heard += 1
        if self._heard % self._streams == 0:
            self.marks.append(ended)


@contextmanager
def _patched(pipe: Any, timer: Timer) -> Iterator[None]:
    """Time the pipeline's stages while the body runs."""
    kind = pipelines.family(pipe)
    pipe.encode_prompt = timer.wrapped("text_encode", pipe.encode_prompt)
    decode = pipe.vae.decode
    pipe.vae.decode = timer.wrapped("decode_video", decode)
    if kind.audio:
        pipe.audio_vae.decode = timer.wrapped("decode_audio", pipe.audio_vae.decode)
        forward = pipe.vocoder.forward
        pipe.vocoder.forward = timer.wrapped("decode_audio", forward)
    try:
        yield
    finally:
        del pipe.encode_prompt
        del pipe.vae.decode
        if kind.audio:
            del pipe.audio_vae.decode
            del pipe.vocoder.forward


def make(
    pipe: Any, request: Mapping[str, Any], dumps: Path, recipe: Mapping[str, Any],
    metadata: Mapping[str, str],
) -> Made:  # fmt: skip
    """Make the clip of a request, its dump named and in place when this returns.

    StepDumpError when the dump cannot be written: then there is no clip either.
    """
    timer = Timer(str(pipe.device))
    kind, shapes, kinds = (
        pipelines.family(pipe),
        pipelines.shapes(pipe, request),
        pipelines.dtypes(pipe),
    )
    streams = {name: (shape, kinds[name]) for name, shape in shapes.items()}
    own = pipe.scheduler
    if timer.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    with timer.stage("step_dump"):
        recorder = StepRecorder(request, dumps, streams=streams, metadata=metadata)
    with recorder:
        sink = _TimedSink(
            RecorderSink(recorder, pipelines.unpackers(pipe, request)), timer, len(streams)
        )
        arguments = pipelines.arguments(pipe, request, recipe)
        generator = torch.Generator("cpu").manual_seed(int(request["noise_seed"]))
        before = timer.now()
        try:
            pipe.scheduler = RecordingFlowMatchEuler.of(own, sink)
            with torch.no_grad(), _patched(pipe, timer):
                made = pipe(**arguments, generator=generator, output_type="np")
        finally:
            began = pipe.scheduler.began or before
            pipe.scheduler = own
        after = timer.now()
        _attribute(timer, before, began, sink.marks, after)
        with timer.stage("mux"):
            data = _encode(pipe, kind, made, request)
        with timer.stage("step_dump"):
            digest = hashlib.sha256(data).hexdigest()
            path = recorder.save(digest)
    steps = [b - a for a, b in zip([began, *sink.marks], sink.marks, strict=False)]
    return Made(data, digest, path, timer.spent, steps, _peak(timer.device))


def _attribute(timer: Timer, before: float, began: float, marks: list[float], after: float) -> None:
    """Give every part of the pipeline's time to a stage."""
    spent = timer.spent
    last = marks[-1] if marks else began
    recorded = spent.get("step_dump", 0.0)
    spent["prepare"] = max(0.0, began - before - spent.get("text_encode", 0.0))
    spent["denoise"] = max(0.0, last - began - recorded)
    decoding = spent.get("decode_video", 0.0) + spent.get("decode_audio", 0.0)
    spent["decode_video"] = spent.get("decode_video", 0.0) + max(0.0, after - last - decoding)


def _encode(pipe: Any, kind: pipelines.Family, made: Any, request: Mapping[str, Any]) -> bytes:
    frames = (made.frames[0] * 255).round().clip(0, 255).astype("uint8")
    audio, rate = None, 0
    if kind.audio and request.get("audio") is not False:
        audio = made.audio[0].float().cpu().numpy()
        rate = int(pipe.vocoder.config.output_sampling_rate)
    return mp4.encode(frames, float(request["fps"]), audio, rate)


def _peak(device: str) -> int | None:
    """Peak memory in bytes: of the device, or of this process; None where it is not said."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return None
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
