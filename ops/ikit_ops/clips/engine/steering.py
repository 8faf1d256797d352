"""A scheduler that leads a pipeline along recorded latents.

Teacher forcing needs the network's output at the engine's own latents, with whatever guidance the
pipeline makes of its passes.  So the pipeline itself is run, and steered: the scheduler lets it
work out its schedule, remembers that, and puts the sampled steps' levels in its place; each
``step`` keeps the guided output and hands back the next recorded latent instead of moving.  The
pipeline believes that it makes a clip of k steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler


@dataclass
class Course:
    """What a steered run is given, and what it leaves."""

    x: dict[str, list[torch.Tensor]]
    levels: list[float]
    times: list[float]
    outs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    calls: list[list[tuple[torch.Tensor, ...]]] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)


class Steering(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """A scheduler that goes where it was told and keeps what it is given."""

    _course: Course
    _stream: str
    _at: int
    sigmas: Any
    timesteps: Any

    @classmethod
    def of(cls, scheduler: Any, course: Course, stream: str = "video") -> Steering:
        """A steering scheduler with the configuration of another."""
        made: Steering = cls.from_config(scheduler.config)
        made._course, made._stream, made._at = course, stream, 0
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Steering:
        """The copy that LTX-2 makes for its audio stream."""
        return type(self).of(self, self._course, "audio")

    @functools.wraps(
        FlowMatchEulerDiscreteScheduler.set_timesteps
    )  # pipelines look at its arguments
    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        """Remember the schedule that the pipeline wants, and set the course's own."""
        super().set_timesteps(*args, **kwargs)
        course, device = self._course, self.sigmas.device
        course.schedule = [float(level) for level in self.sigmas.tolist()]
        self.sigmas = torch.tensor([*course.levels, 0.0], dtype=torch.float32, device=device)
        times = torch.tensor(course.times, dtype=torch.float32, device=device)
        self.timesteps = times * self.config.num_train_timesteps
        self.num_inference_steps = len(course.levels)
        self._at = 0

    def step(self, model_output: Any, timestep: Any, sample: Any, *_: Any, **__: Any) -> Any:
        """Keep the output; the next recorded latent comes back as if it were the result."""
        latents = self._course.x[self._stream]
        self._course.outs.setdefault(self._stream, []).append(model_output.detach().float())
        self._at += 1
        return (latents[self._at] if self._at < len(latents) else sample,)
