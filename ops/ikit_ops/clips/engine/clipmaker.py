"""Make one clip: run the pipeline, record its steps, encode the mp4, and time every stage.

Stages begin and end at the pipeline's own edges: text encoding by its method, denoising from the
moment the schedule is set to the end of the last step, decoding by the decoder's; what lies
between belongs to the stage that it prepares or finishes (``timeline``).  The device is waited
for only where something is copied from it anyway: at the edges of stages, and before a step is
recorded, because otherwise the step's own work would be counted to its recording.
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

from ikit_ops.clips.engine import mp4, pipelines, recipes
from ikit_ops.clips.engine.asked import Asked
from ikit_ops.clips.engine.hook import RecorderSink, RecordingFlowMatchEuler
from ikit_ops.clips.engine.service import Abandoned
from ikit_ops.clips.engine.timeline import Timeline
from ikit_ops.clips.recorder import StepRecorder, clear_leftovers


@dataclass
class Made:
    """A clip: its bytes, and the milliseconds of each stage."""

    mp4: bytes
    sha256: str
    dump: Path
    stages: dict[str, float] = field(default_factory=dict)
    steps_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    recipe_sha256: str | None = None


class ClipMaker:
    """A loaded pipeline, the recipe that it follows, and the folder of its dumps.

    ValueError or OSError when the model cannot be loaded or cannot follow the recipe.
    """

    def __init__(self, config: Mapping[str, Any], served: recipes.Served) -> None:
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        recipes.check(served.fields)  # before a model is read for minutes
        self._served, self._dumps = served, Path(config["dumps"])
        clear_leftovers(self._dumps)
        self.pipe = pipelines.load(
            Path(config["model"]), kinds[config["dtype"]], str(config["device"])
        )
        self.able = pipelines.able(self.pipe, served.fields)

    def make(self, asked: Asked, timeline: Timeline, wanted: Callable[[], bool]) -> Made:
        """The clip of a request; its dump names the recipe that was followed, and no other."""
        recipe, metadata = self._served.followed(asked.negative_prompt)
        made = make(self.pipe, asked.request, self._dumps, recipe, metadata, timeline, wanted)
        made.recipe_sha256 = metadata.get("recipe_sha256")
        return made


class _TimedSink:
    """A recorder's sink that counts its own time apart, and marks when each step was over."""

    def __init__(
        self, sink: RecorderSink, timeline: Timeline, streams: int, wanted: Callable[[], bool]
    ) -> None:
        self._sink, self._timeline, self._streams = sink, timeline, streams
        self._wanted = wanted
        self._steps, self._heard = sink.steps, 0
        self.marks: list[float] = []

    def begin(self) -> None:
        """Denoising begins, once for each stream that has a schedule."""
        self._timeline.enter("denoise")
        self.marks = [time.perf_counter() * 1e3]

    def step(self, *told: Any) -> None:
        """Record a step; Abandoned when nobody waits for the clip any more."""
        with self._timeline.during("step_dump"):
            self._sink.step(*told)
        self._heard += 1
        if self._heard % self._streams:
            return
        self.marks.append(time.perf_counter() * 1e3)
        if self._heard == self._steps * self._streams:
            self._timeline.enter("decode_video")
        elif not self._wanted():
            raise Abandoned


@contextmanager
def _patched(pipe: Any, timeline: Timeline) -> Iterator[None]:
    """Time the pipeline's stages while the body runs."""
    parts = [(pipe, "encode_prompt", "text_encode"), (pipe.vae, "decode", "decode_video")]
    if pipelines.family(pipe).audio:
        parts += [(pipe.audio_vae, "decode", "decode_audio"),
                  (pipe.vocoder, "forward", "decode_audio")]  # fmt: skip
    for owner, name, stage in parts:
        setattr(owner, name, timeline.wrapped(stage, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, _ in parts:
            delattr(owner, name)


def make(
    pipe: Any, request: Mapping[str, Any], dumps: Path, recipe: Mapping[str, Any],
    metadata: Mapping[str, str], timeline: Timeline | None = None,
    wanted: Callable[[], bool] = lambda: True,
) -> Made:  # fmt: skip
    """Make the clip of a request, its dump named and in place when this returns.

    StepDumpError when the dump cannot be written: then there is no clip either.  RecipeError
    when the recipe is none that this engine follows, Abandoned when ``wanted`` says no.
    """
    timeline = timeline or Timeline("prepare")
    device = str(pipe.device)
    if device.startswith("cuda"):
        timeline.settle = torch.cuda.synchronize
        torch.cuda.reset_peak_memory_stats()
    recipes.check(recipe)
    kinds = pipelines.dtypes(pipe)
    streams = {
        name: (shape, kinds[name]) for name, shape in pipelines.shapes(pipe, request).items()
    }
    with timeline.during("step_dump"):
        recorder = StepRecorder(request, dumps, streams=streams, metadata=metadata)
    with recorder:
        unpack = pipelines.unpackers(pipe, request)
        sink = _TimedSink(RecorderSink(recorder, unpack), timeline, len(streams), wanted)
        shown = _run(pipe, request, recipe, sink, timeline)
        timeline.enter("mux")
        data = _encode(pipe, shown, request)
        timeline.enter("step_dump")
        digest = hashlib.sha256(data).hexdigest()
        path = recorder.save(digest)
    timeline.enter("answer")
    steps = [b - a for a, b in zip(sink.marks, sink.marks[1:], strict=False)]
    return Made(data, digest, path, timeline.spent, steps, _peak(device))


def _run(
    pipe: Any, request: Mapping[str, Any], recipe: Mapping[str, Any], sink: _TimedSink,
    timeline: Timeline,
) -> Any:  # fmt: skip
    """What the pipeline makes, its steps told to the sink, and its own scheduler put back."""
    arguments = pipelines.arguments(pipe, request, recipe)
    generator = torch.Generator("cpu").manual_seed(int(request["noise_seed"]))
    own = pipe.scheduler
    try:
        pipe.scheduler = RecordingFlowMatchEuler.of(own, sink, levels=recipes.levels(recipe))
        with torch.no_grad(), _patched(pipe, timeline):
            return pipe(**arguments, generator=generator, output_type="np")
    finally:
        pipe.scheduler = own


def _encode(pipe: Any, made: Any, request: Mapping[str, Any]) -> bytes:
    frames = (made.frames[0] * 255).round().clip(0, 255).astype("uint8")
    audio, rate = None, 0
    if pipelines.family(pipe).audio and request.get("audio") is not False:
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
