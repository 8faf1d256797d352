"""The recording hook: a flow-match Euler scheduler that writes down every step it takes.

Where in a pipeline is the guided output complete?  A callback at the end of a step sees latents
but not the output, and deriving the output from two latents would make the Euler check circular.
A loop of one's own would have to follow every change of guidance upstream.  The scheduler's
``step`` is the one place where all guidance passes are combined, both noise levels are known,
and the audio stream comes by too (LTX-2 copies its scheduler for it).  So the hook is a subclass
that takes the same step and tells a sink: ``pipe.scheduler = RecordingFlowMatchEuler.of(
pipe.scheduler, sink)``.

Pipelines hold latents as packed tokens; the contract wants the layout of the initial noise.
Unpacking is a permutation, so it is done here and costs no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from ikit_ops.clips.recorder import StepRecorder


class Sink(Protocol):
    """Hears of every step, in the pipeline's own layout."""

    def begin(self) -> None:
        """The schedule is set: denoising begins (LTX-2 sets one for each of its streams)."""

    def step(
        self, stream: str, index: int, x: Any, out: Any, x_next: Any, sigma: float, after: float
    ) -> None:
        """One step of one stream."""


class RecordingFlowMatchEuler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """A flow-match Euler scheduler whose steps a sink hears; the steps are the parent's."""

    _sink: Sink | None = None
    _stream = "video"
    _levels: list[float]
    _listed: Sequence[float] | None = None
    sigmas: Any
    timesteps: Any

    @classmethod
    def of(
        cls, scheduler: Any, sink: Sink, stream: str = "video",
        levels: Sequence[float] | None = None,
    ) -> RecordingFlowMatchEuler:  # fmt: skip
        """A recording scheduler of the same configuration; ValueError for another sampler.

        ``levels`` are the noise levels to step along, the last one 0, in place of its schedule.
        """
        if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            raise ValueError(f"{type(scheduler).__name__} is not a flow-match Euler scheduler")
        if scheduler.config.get("stochastic_sampling"):
            raise ValueError("stochastic sampling adds noise to each step, which no dump holds")
        made: RecordingFlowMatchEuler = cls.from_config(scheduler.config)
        made._sink, made._stream, made._listed = sink, stream, levels
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordingFlowMatchEuler:
        """The copy that LTX-2 makes for its audio stream; it tells the same sink."""
        if self._sink is None:
            copied: RecordingFlowMatchEuler = type(self).from_config(self.config)
            return copied
        return type(self).of(self, self._sink, "audio", self._listed)

    @functools.wraps(
        FlowMatchEulerDiscreteScheduler.set_timesteps
    )  # pipelines look at its arguments
    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """The parent's schedule; its levels are kept as floats, without a copy at each step."""
        super().set_timesteps(*args, **kwargs)
        if self._listed is not None:
            fix_levels(self, self._listed)
        self._levels = [float(level) for level in self.sigmas.tolist()]
        if self._sink is not None:
            self._sink.begin()

    def step(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """The parent's step; what came in and what goes out is told to the sink."""
        if self.step_index is None:
            self._init_step_index(timestep)
        index = int(self.step_index)
        result = super().step(model_output, timestep, sample, *args, **kwargs)
        after = result[0] if isinstance(result, tuple) else result.prev_sample
        if self._sink is not None:
            self._sink.step(
                self._stream, index, sample, model_output, after,
                self._levels[index], self._levels[index + 1],
            )  # fmt: skip
        return result


def fix_levels(scheduler: Any, levels: Sequence[float]) -> None:
    """Put these noise levels (N of the steps and the last) in place of a schedule that was set."""
    device = scheduler.sigmas.device
    scheduler.sigmas = torch.tensor(list(levels), dtype=torch.float32, device=device)
    scheduler.timesteps = scheduler.sigmas[:-1] * scheduler.config.num_train_timesteps
    scheduler.num_inference_steps = len(levels) - 1


class RecorderSink:
    """Writes the steps into a dump, each unpacked to the layout of the initial noise."""

    def __init__(
        self, recorder: StepRecorder, unpack: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]
    ) -> None:
        self._recorder, self._unpack = recorder, unpack
        self.steps = int(recorder.request["steps"])

    def begin(self) -> None:
        """Nothing is recorded of the schedule but the steps' own levels."""

    def step(
        self, stream: str, index: int, x: Any, out: Any, x_next: Any, sigma: float, after: float
    ) -> None:
        """Record one step; the last one's result is what the clip is decoded from."""
        unpack = self._unpack[stream]
        last = unpack(x_next)
        self._recorder.step(index, stream, unpack(x), unpack(out), last, sigma, after)
        if index == self.steps - 1:
            self._recorder.final(stream, last)
