"""Engines, honest and not: a diffusers pipeline with one thing changed, and its recorded steps.

Only Pythons with torch and diffusers import this.  Each variant is what some real engine does, in
the fewest lines; the dump's request always claims what was asked for.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ikit_ops.clips.engine import pipelines
from ikit_ops.clips.engine.hook import RecorderSink, RecordingFlowMatchEuler
from ikit_ops.clips.recorder import StepRecorder, request_of

RECIPE = {"negative_prompt": "blue kite waits", "max_sequence_length": 24}
NEGATIVE = RECIPE["negative_prompt"]


def request(seed: int = 0, **changed: Any) -> dict[str, Any]:
    """A request that the small LTX was made for: 192 tokens, 12 steps."""
    given = {
        "task": "t2v", "prompt": "red kite rises", "width": 256, "height": 192, "num_frames": 9,
        "fps": 24, "steps": 12, "guidance_scale": 3.0, "seed": seed, "audio": False,
    }  # fmt: skip
    return request_of({**given, **changed})


class Scheduler(RecordingFlowMatchEuler):
    """Tells the levels of the clip to the variant that needs them."""

    @functools.wraps(RecordingFlowMatchEuler.set_timesteps)
    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        SCHEDULE[:] = self._levels

    halved = False

    def step(self, model_output: Any, timestep: Any, sample: Any, *args: Any, **kw: Any) -> Any:
        if self.halved:  # latents and outputs are kept in bfloat16
            model_output, sample = model_output.bfloat16(), sample.bfloat16()
        return super().step(model_output, timestep, sample, *args, **kw)


def serve(
    pipe: Any, asked: Mapping[str, Any], dumps: Path, mp4: bytes | None = None,
    variant: str = "fp32", recipe: Mapping[str, Any] = RECIPE,
    metadata: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Make a clip's steps with the variant and write its dump; the dump's path."""
    shapes, kinds = pipelines.shapes(pipe, asked), pipelines.dtypes(pipe)
    data = mp4 if mp4 is not None else repr((variant, sorted(asked.items()))).encode()
    used = dict(asked)
    if variant == "wrong seed":
        used["noise_seed"] += 1
    changed = ARGUMENTS.get(variant, {})
    arguments = {**pipelines.arguments(pipe, used, recipe), **changed}
    if "guidance factor" in arguments:
        arguments["guidance_scale"] *= arguments.pop("guidance factor")
    own = pipe.scheduler
    if variant == "bf16 latents":
        kinds = dict.fromkeys(kinds, ("BF16", "BF16"))
    streams = {name: (shape, kinds[name]) for name, shape in shapes.items()}
    with StepRecorder(asked, dumps, streams=streams, metadata=metadata) as recorder:
        sink = RecorderSink(recorder, pipelines.unpackers(pipe, asked))
        pipe.scheduler = Scheduler.of(own, sink)
        pipe.scheduler.halved = variant == "bf16 latents"
        generator = torch.Generator("cpu").manual_seed(used["noise_seed"])
        with torch.no_grad(), changed_by(pipe, variant, asked["steps"]):
            pipe(**arguments, generator=generator, output_type="latent")
        pipe.scheduler = own
        return recorder.save(hashlib.sha256(data).hexdigest())


ARGUMENTS: dict[str, dict[str, Any]] = {
    "cfg x1.02": {"guidance factor": 1.02},
    "cfg x1.1": {"guidance factor": 1.1},
    "no cfg": {"guidance factor": 1 / 3},
    "dropped negative": {"negative_prompt": ""},
    "other negative": {"negative_prompt": "gold kite falls fast"},
    "stale prompt": {"prompt": "gold kite falls"},
    "cut prompt": {"prompt": "red kite rise"},
    "short texts": {"max_sequence_length": 8},
    "rescaled": {"guidance_rescale": 0.7},
    "modality off": {"modality_scale": 1.0},
    "modality x1.1": {"modality_scale": 2.2},
    "stg off": {"stg_scale": 0.0},
    "audio cfg x1.1": {"audio_guidance_scale": 5.5},
}

HONEST = (
    "fp32", "separate passes", "int8 weights", "bf16", "fp16", "bf16 latents", "autocast",
    "int8 per tensor", "int8 per tensor in bf16", "int8 weights in bf16", "q8_0", "q8_0 in bf16",
)  # fmt: skip
DISHONEST = {
    "reuse 2": "step_reuse", "reuse 3": "step_reuse", "one reused": "step_reuse",
    "cfg x1.02": "guidance", "cfg x1.1": "guidance", "no cfg": "guidance",
    "cfg off late": "guidance", "dropped negative": "conditioning",
    "stale prompt": "conditioning", "skipped block": "wrong_model", "sigma_next": "timestep",
    "w8a8": "low_precision", "w8a8 by tokens": "low_precision", "fp8": "low_precision",
    "fp8 e5m2": "low_precision", "int4": "low_precision", "int4 by rows": "low_precision",
    "w4a8": "low_precision", "rescaled": "guidance", "time before": "timestep",
    "w8a8 and cache": "step_reuse", "wrong seed": "noise", "first block cache": "step_caching",
    "uncond cached": "step_caching", "extrapolated": "step_reuse",
    "time +5": "timestep", "time +20": "timestep", "time +50": "timestep", "time -20": "timestep",
    "time of the middle": "timestep", "unshifted time": "timestep",
    "other negative": "conditioning", "cut prompt": "conditioning", "short texts": "conditioning",
    "a tenth of the step before": "step_caching", "out x1.02": "guidance",
}  # fmt: skip
"""Variant: its word.  Those of the W8A8 that an engine may hide in bf16 are tested apart."""


def kind_of(variant: str) -> str:
    """The dtype of the pipeline that a variant is served from."""
    if variant.endswith("in bf16"):
        return "bf16"
    return {"bf16": "bf16", "fp16": "fp16"}.get(variant, "fp32")


@contextmanager
def changed_by(pipe: Any, variant: str, steps: int) -> Any:
    """Run the body with the pipeline changed as the variant says, and put it back after."""
    variant = variant.removesuffix(" in bf16")
    transformer = pipe.transformer
    saved = {name: value.clone() for name, value in transformer.state_dict().items()}
    forward, blocks = transformer.forward, getattr(transformer, "transformer_blocks", None)
    handles: list[Any] = []
    if variant in FORWARDS:
        transformer.forward = FORWARDS[variant](forward, steps)
    elif variant == "compiled":
        transformer.forward = torch.compile(forward)
    elif variant == "autocast":
        transformer.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    elif variant == "skipped block":
        kept = [block for n, block in enumerate(blocks or ()) if n != 2]
        transformer.transformer_blocks = torch.nn.ModuleList(kept)
    elif variant == "first block cache":
        from diffusers.hooks import FirstBlockCacheConfig

        transformer.enable_cache(FirstBlockCacheConfig(threshold=0.25))
    if variant in WEIGHTS:
        for module in linears(transformer):
            module.weight.data = WEIGHTS[variant](module.weight.data)
    if variant in ACTIVATIONS:
        for module in linears(transformer):
            handles.append(
                module.register_forward_pre_hook(
                    lambda _m, args, q=ACTIVATIONS[variant]: (q(args[0]),)
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if variant == "first block cache":
            transformer.disable_cache()
        if blocks is not None:
            transformer.transformer_blocks = blocks
        transformer.load_state_dict(saved)
        vars(transformer).pop("forward", None)


def linears(transformer: Any) -> list[Any]:
    """All linear layers."""
    return [m for m in transformer.modules() if isinstance(m, torch.nn.Linear)]


def integers(values: torch.Tensor, largest: int, rows: bool = True) -> torch.Tensor:
    """Rounded to whole numbers up to ``largest``, with a scale for each row or for all."""
    top = values.abs().amax(-1, keepdim=True) if rows else values.abs().amax()
    scale = top.clamp_min(1e-8) / largest
    return (values / scale).round() * scale


def int8_rows(values: torch.Tensor) -> torch.Tensor:
    """Rounded to int8 with a scale for each row."""
    return integers(values, 127)


def int8_tensor(values: torch.Tensor) -> torch.Tensor:
    """Rounded to int8 with one scale."""
    return integers(values, 127, rows=False)


def int4_rows(values: torch.Tensor) -> torch.Tensor:
    """Rounded to int4 with a scale for each row."""
    return integers(values, 7)


def groups(values: torch.Tensor, largest: int) -> torch.Tensor:
    """Rounded with a scale for each group of 32 numbers of a row, or of the whole short row."""
    size = math.gcd(values.shape[-1], 32)
    return integers(values.reshape(-1, size), largest).reshape(values.shape)


def nudged(values: torch.Tensor) -> torch.Tensor:
    """Off by 1 %, each in its own way."""
    generator = torch.Generator().manual_seed(values.numel())
    return values * (1 + 0.01 * torch.randn(values.shape, generator=generator))


def fp8(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float8 e4m3 with one scale."""
    scale = values.abs().amax().clamp_min(1e-8) / 448
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


def e5m2(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float8 e5m2 with one scale."""
    scale = values.abs().amax().clamp_min(1e-8) / 57344
    return (values / scale).to(torch.float8_e5m2).to(values.dtype) * scale


WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "weights 1 %": nudged, "int8 weights": int8_rows, "int8 per tensor": int8_tensor,
    "q8_0": lambda values: groups(values, 127), "w8a8": int8_rows, "w8a8 by tokens": int8_rows,
    "w8a8 and cache": int8_rows, "fp8": fp8, "fp8 e5m2": e5m2,
    "int4": lambda values: groups(values, 7), "int4 by rows": int4_rows, "w4a8": int4_rows,
}  # fmt: skip
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "w8a8": int8_tensor, "w8a8 by tokens": int8_rows, "w8a8 and cache": int8_tensor,
    "w4a8": int8_rows, "fp8": fp8, "fp8 e5m2": e5m2,
}  # fmt: skip
Forward = Callable[..., Any]


def reuse(every: int) -> Callable[[Forward, int], Forward]:
    """Run the network on every n-th step only."""

    def make(forward: Forward, steps: int) -> Forward:
        kept: list[Any] = []

        def run(**given: Any) -> Any:
            if len(kept) % every == 0:
                kept.append(forward(**given))
            else:
                kept.append(kept[-1])
            return kept[-1]

        return run

    return make


def one_reused(forward: Forward, steps: int) -> Forward:
    """Skip the network in one step."""
    kept: list[Any] = []

    def run(**given: Any) -> Any:
        kept.append(kept[-1] if len(kept) == steps // 2 else forward(**given))
        return kept[-1]

    return run


def extrapolated(forward: Forward, steps: int) -> Forward:
    """Skip the network on every second step, and go on in a straight line."""
    kept: list[torch.Tensor] = []

    def run(**given: Any) -> Any:
        if len(kept) > 2 and len(kept) % 2:
            kept.append(2 * kept[-1] - kept[-2])
        else:
            kept.append(forward(**given)[0])
        return (kept[-1],)

    return run


def uncond_cached(forward: Forward, steps: int) -> Forward:
    """Run the unconditional pass on every second step only."""
    kept: list[Any] = []

    def run(**given: Any) -> Any:
        out = forward(**given)[0]
        unconditional, conditional = out.chunk(2)
        if len(kept) % 2:
            unconditional = kept[-1]
        kept.append(unconditional)
        return (torch.cat([unconditional, conditional]),)

    return run


def cfg_off_late(forward: Forward, steps: int) -> Forward:
    """No guidance in the second half."""
    count = [0]

    def run(**given: Any) -> Any:
        out = forward(**given)[0]
        count[0] += 1
        if count[0] > steps // 2:
            out = torch.cat([out.chunk(2)[1]] * 2)
        return (out,)

    return run


def separate(forward: Forward, steps: int) -> Forward:
    """The two passes one after the other, not in one batch."""

    def run(**given: Any) -> Any:
        names = ("hidden_states", "encoder_hidden_states", "timestep", "encoder_attention_mask")
        outs = [
            forward(**{**given, **{name: given[name].chunk(2)[half] for name in names}})[0]
            for half in (0, 1)
        ]
        return (torch.cat(outs),)

    return run


def next_time(forward: Forward, steps: int) -> Forward:
    """The network is told the level that the step goes to."""
    told: list[Any] = []

    def run(**given: Any) -> Any:
        levels = SCHEDULE
        told.append(given["timestep"])
        time = torch.full_like(given["timestep"], 1000 * levels[len(told)])
        return forward(**{**given, "timestep": time})

    return run


SCHEDULE: list[float] = []
"""The levels of the clip that is being made."""


def time_before(forward: Forward, steps: int) -> Forward:
    """The network is told the level of the step before."""
    told: list[Any] = []

    def run(**given: Any) -> Any:
        told.append(given["timestep"])
        return forward(**{**given, "timestep": told[max(0, len(told) - 2)]})

    return run


def bf16_time(forward: Forward, steps: int) -> Forward:
    """The time is rounded to bfloat16 on its way."""

    def run(**given: Any) -> Any:
        return forward(**{**given, "timestep": given["timestep"].bfloat16().float()})

    return run


def time_off(by: float) -> Callable[[Forward, int], Forward]:
    """The network is told a time that is off by so many thousandths."""

    def make(forward: Forward, steps: int) -> Forward:
        return lambda **given: forward(**{**given, "timestep": given["timestep"] + by})

    return make


def time_of_the_middle(forward: Forward, steps: int) -> Forward:
    """The network is told the level halfway through the step."""
    done: list[int] = []

    def run(**given: Any) -> Any:
        here, after = SCHEDULE[len(done)], SCHEDULE[len(done) + 1]
        done.append(1)
        time = torch.full_like(given["timestep"], 500 * (here + after))
        return forward(**{**given, "timestep": time})

    return run


def unshifted_time(forward: Forward, steps: int) -> Forward:
    """The network is told evenly spaced levels while the sampler takes shifted ones."""
    done: list[int] = []

    def run(**given: Any) -> Any:
        time = torch.full_like(given["timestep"], 1000 * (1 - len(done) / steps))
        done.append(1)
        return forward(**{**given, "timestep": time})

    return run


def blended(forward: Forward, steps: int) -> Forward:
    """A tenth of each output is that of the step before."""
    kept: list[torch.Tensor] = []

    def run(**given: Any) -> Any:
        out = forward(**given)[0]
        kept.append(0.9 * out + 0.1 * kept[-1] if kept else out)
        return (kept[-1],)

    return run


def scaled(forward: Forward, steps: int) -> Forward:
    """Outputs that are 2 % too large."""
    return lambda **given: (1.02 * forward(**given)[0],)


FORWARDS: dict[str, Callable[[Forward, int], Forward]] = {
    "reuse 2": reuse(2), "reuse 3": reuse(3), "one reused": one_reused,
    "uncond cached": uncond_cached, "cfg off late": cfg_off_late, "separate passes": separate,
    "sigma_next": next_time, "time before": time_before, "w8a8 and cache": reuse(2),
    "bf16 time": bf16_time, "extrapolated": extrapolated, "time +5": time_off(5),
    "time +20": time_off(20), "time +50": time_off(50), "time -20": time_off(-20),
    "time of the middle": time_of_the_middle, "unshifted time": unshifted_time,
    "a tenth of the step before": blended, "out x1.02": scaled,
}  # fmt: skip
