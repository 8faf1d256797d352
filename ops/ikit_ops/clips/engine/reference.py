"""The reference: the pipeline itself, run on recorded steps by a steering scheduler.

Guidance is where pipelines differ and where releases change, so none of it is written again
here.  What the steered pipeline makes is its own output at each of the engine's latents
(``steering``).  A hook on the transformer keeps the passes before they are combined, which is
what the guidance is fitted on.

The reference is loaded in float32, and once more in bfloat16 for the floor.  Where the memory
does not hold both, it is loaded in bfloat16 alone and computes in float32 layer by layer
(``rounding.in_float32``); its text is then bf16's and its bands are wider.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ikit_ops.clips.engine import pipelines, recipes, rounding
from ikit_ops.clips.engine.gauges import Passes
from ikit_ops.clips.engine.steering import Course, Steering

BOTH_BYTES = 4 + 2  # of each weight: float32 and bfloat16
MARGIN = 1.15  # beside the weights: activations, buffers
MAX_HEADER = 100 << 20
CONTROL_GROUP = Path("/sys/fs/cgroup")


class Reference:
    """A loaded reference: ``pipe`` is the exact one, ``rough`` gives the floor."""

    def __init__(
        self, folder: Any, device: str, recipe: Mapping[str, Any], both: bool | None = None
    ) -> None:
        """``both``: whether float32 and bfloat16 are loaded; None: if the memory holds them."""
        self.recipe = recipe
        self.device = device
        if both is None:
            both = fits(Path(folder), device)
        self.exact = "float32" if both else "bfloat16"
        self.rough = pipelines.load(folder, torch.bfloat16, device)
        self.pipe = pipelines.load(folder, torch.float32, device) if both else self.rough
        self.kind = pipelines.family(self.pipe)
        self.passes = 0

    def identity(self) -> dict[str, Any]:
        """What was run: the pipeline, its version, the dtype that it computed in."""
        import diffusers

        return {
            "pipeline": self.kind.pipeline,
            "diffusers": diffusers.__version__,
            "dtype": self.exact,
        }

    @property
    def models(self) -> list[Any]:
        """The denoising models of the exact pipeline."""
        return _models(self.pipe)

    def run(self, request: Mapping[str, Any], course: Course, **changed: Any) -> Course:
        """Run the exact pipeline along a course; the outputs and the passes stay in it."""
        own: AbstractContextManager[None] = nullcontext()
        if self.pipe is self.rough:
            own = rounding.in_float32(self.models)
        with own:
            return self._run(self.pipe, request, course, **changed)

    def run_rough(self, request: Mapping[str, Any], course: Course) -> Course:
        """Run the bf16 pipeline along a course."""
        return self._run(self.rough, request, course)

    def _run(self, pipe: Any, request: Mapping[str, Any], course: Course, **changed: Any) -> Course:
        arguments = {**pipelines.arguments(pipe, request, self.recipe), **changed}
        pack = pipelines.packers(pipe)
        course.x = {
            name: [pack[name](x.to(self.device).float()) for x in each]
            for name, each in course.x.items()
        }
        own = pipe.scheduler

        def keep(_module: Any, _args: Any, output: Any) -> None:
            at = len(course.outs.get("video", ()))
            while len(course.calls) <= at:
                course.calls.append([])
            course.calls[at].append(tuple(part.detach().float() for part in output))
            self.passes += int(output[0].shape[0])

        handles = [each.register_forward_hook(keep) for each in _models(pipe)]
        pipe.scheduler = Steering.of(own, course)
        pipe.prepare_latents = lambda *_, **__: course.x["video"][0]
        if "audio" in course.x:
            pipe.prepare_audio_latents = lambda *_, **__: course.x["audio"][0]
        try:
            with torch.no_grad():
                pipe(**arguments, output_type="latent")
        finally:
            for handle in handles:
                handle.remove()
            pipe.scheduler = own
            del pipe.prepare_latents
            if "audio" in course.x:
                del pipe.prepare_audio_latents
        if (listed := recipes.levels(self.recipe)) is not None:
            course.schedule = listed  # the recipe's own levels, whatever the pipeline has
        return course

    def guidance(
        self, calls: Sequence[tuple[torch.Tensor, ...]], stream: int
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """The conditional pass, and the differences that guidance adds multiples of; or None."""
        first = calls[0][stream]
        found: dict[str, torch.Tensor] = {}
        if self.kind.pipeline == "WanPipeline":
            if len(calls) < 2:
                return None
            return first, {"guidance": first - calls[1][stream]}
        conditional = first
        if first.shape[0] == 2:
            unconditional, conditional = first.chunk(2)
            found["guidance"] = conditional - unconditional
        for name, call in zip(self._others(len(calls) - 1), calls[1:], strict=True):
            found[name] = conditional - call[stream]
        return (conditional, found) if found else None

    def _others(self, count: int) -> list[str]:
        """What the passes beside the guided pair are for, in their order."""
        names = ["stg"] if getattr(self.pipe, "do_spatio_temporal_guidance", False) else []
        return [*names, "modality"][:count] if count <= len(names) + 1 else ["other"] * count

    def passes_at(
        self, course: Course, row: int, name: str, stream: int, rescaled: bool
    ) -> Passes | None:
        """The guidance passes of a run at one of its rows, ready to be fitted on."""
        found = self.guidance(course.calls[row], stream)
        if found is None:
            return None
        base, differences = found
        return Passes(
            base, differences, course.x[name][row], course.levels[row],
            self.kind.x0_space, rescaled,
        )  # fmt: skip


def _models(pipe: Any) -> list[Any]:
    models = [pipe.transformer, getattr(pipe, "transformer_2", None)]
    return [each for each in models if each is not None]


def rescales(pipe: Any, request: Mapping[str, Any], recipe: Mapping[str, Any], stream: str) -> bool:
    """Whether the pipeline rescales the guided output of a stream under this recipe."""
    import inspect

    given = pipelines.arguments(pipe, request, recipe)
    parameters = inspect.signature(type(pipe).__call__).parameters
    name = "audio_guidance_rescale" if stream == "audio" else "guidance_rescale"
    if name not in parameters:
        return False
    value = given.get(name, parameters[name].default)
    if value is None and stream == "audio":
        return rescales(pipe, request, recipe, "video")
    return bool(value)


def fits(folder: Path, device: str) -> bool:
    """Whether the free memory holds the model in float32 and in bfloat16; yes if not known."""
    free = free_bytes(device)
    return free is None or weights(folder) * BOTH_BYTES * MARGIN <= free


def weights(folder: Path) -> int:
    """How many numbers the safetensors files of a model directory hold, by their headers."""
    total = 0
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                continue  # loading will say what is wrong with it
            try:
                header = json.loads(file.read(length))
            except ValueError:
                continue
        for name, entry in header.items() if isinstance(header, dict) else ():
            if name != "__metadata__" and isinstance(entry, dict):
                count = 1
                for size in entry.get("shape") or ():
                    count *= int(size)
                total += count
    return total


def free_bytes(device: str) -> int | None:
    """The memory that a device has left, in bytes; None where it does not tell.

    Of the processor's memory, what this machine has left or this control group, if that is less.
    """
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        told = {line.split(":")[0]: line.split()[1] for line in lines if ":" in line}
        free = int(told["MemAvailable"]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        whole, used = (
            int((CONTROL_GROUP / name).read_text(encoding="ascii"))
            for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):
        return free  # no limit, which is told as "max"
    return min(free, max(0, whole - used))
