"""The pipelines that can be served and replayed: LTX, LTX-2 (audio and video) and Wan.

What differs between them is small and is all here: how the request's fields are called, which
sizes they take, how tokens become the latent [1, C, F, H, W], and how the guidance passes come
out of the transformer (LTX and LTX-2 in one batch of two, unconditional first; Wan in two calls,
conditional first).  Models are loaded from directories in the diffusers layout, safetensors
only, and no code of theirs is run.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch

from ikit_ops.clips.engine import recipes
from ikit_ops.clips.engine.asked import Able

Unpack = Callable[[torch.Tensor], torch.Tensor]

# Arguments of a pipeline that the request, the seed or the recorder decide.
RESERVED = frozenset(
    {"prompt", "height", "width", "num_frames", "frame_rate", "num_inference_steps", "timesteps",
     "sigmas", "guidance_scale", "negative_prompt", "num_videos_per_prompt", "generator",
     "latents", "audio_latents", "prompt_embeds", "prompt_attention_mask", "output_type",
     "negative_prompt_embeds", "negative_prompt_attention_mask", "return_dict",
     "callback_on_step_end", "callback_on_step_end_tensor_inputs", "attention_kwargs",
     "max_sequence_length", "self"}
)  # fmt: skip


class ModelError(ValueError):
    """A model directory or a request that cannot be used; the text says why."""


@dataclass(frozen=True)
class Family:
    """One kind of pipeline."""

    pipeline: str
    size: int
    audio: bool = False
    fps: str | None = "frame_rate"
    x0_space: bool = False


FAMILIES = {
    "LTXPipeline": Family("LTXPipeline", 32),
    "LTX2Pipeline": Family("LTX2Pipeline", 32, audio=True, x0_space=True),
    "WanPipeline": Family("WanPipeline", 16, fps=None),
}


def family_of(folder: Path) -> Family:
    """Which pipeline a model directory holds; ModelError when it is none of these."""
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        name = index["_class_name"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError("it has no model_index.json that names a pipeline") from None
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"{str(name)[:60]} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The pipeline of a model directory, in evaluation mode, with a flow-match Euler sampler."""
    family = family_of(folder)
    pipe = getattr(diffusers, family.pipeline).from_pretrained(
        str(folder), dtype=dtype, use_safetensors=True, local_files_only=True
    )
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    pin_euler(pipe)
    return pipe


def pin_euler(pipe: Any) -> None:
    """Give the pipeline a flow-match Euler sampler where it has another (Wan's is multistep)."""
    euler = diffusers.FlowMatchEulerDiscreteScheduler
    if not isinstance(pipe.scheduler, euler):
        shift = pipe.scheduler.config.get("flow_shift") or 1.0
        pipe.scheduler = euler(shift=float(shift))


def family(pipe: Any) -> Family:
    """The family of a loaded pipeline."""
    return FAMILIES[type(pipe).__name__]


def able(pipe: Any, recipe: Mapping[str, Any]) -> Able:
    """What a loaded pipeline can make under a recipe; ValueError when it cannot follow it.

    The multiples are what the pipeline insists on (``Family.size``) and what its own decoder
    and patches need: a Wan of another decoder or patch takes other sizes than its sisters.
    """
    recipes.check(recipe)
    check_call(pipe, recipe)
    kind = family(pipe)
    spatial, temporal = compression(pipe)
    patch_t, patch_h, patch_w = patches(pipe)
    levels = recipes.levels(recipe)
    return Able(
        shapes=lambda request: shapes(pipe, request),
        audio=kind.audio,
        width=math.lcm(kind.size, spatial * patch_w),
        height=math.lcm(kind.size, spatial * patch_h),
        group=temporal,
        patch_frames=patch_t,
        least_steps=least_steps(pipe.scheduler),
        steps=None if levels is None else len(levels) - 1,
        latents=recipe.get("latents") or None,
    )


def compression(pipe: Any) -> tuple[int, int]:
    """Pixels of a side, and frames, that a place of the latent stands for."""
    if family(pipe).pipeline == "WanPipeline":
        return int(pipe.vae_scale_factor_spatial), int(pipe.vae_scale_factor_temporal)
    return int(pipe.vae_spatial_compression_ratio), int(pipe.vae_temporal_compression_ratio)


def patches(pipe: Any) -> tuple[int, int, int]:
    """The latent places of one token: in time, height and width."""
    if family(pipe).pipeline == "WanPipeline":
        time, height, width = pipe.transformer.config.patch_size
        return int(time), int(height), int(width)
    side = int(pipe.transformer_spatial_patch_size)
    return int(pipe.transformer_temporal_patch_size), side, side


def least_steps(scheduler: Any) -> int:
    """The fewest steps whose schedule is one: finite and falling.

    A schedule that is stretched to end at a level of its own has no single step.
    """
    for steps in (1, 2):
        tried = type(scheduler).from_config(scheduler.config)
        sigmas = [1 - step / steps for step in range(steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dividing by zero is what is looked for
            tried.set_timesteps(sigmas=sigmas, mu=1.0)
        found = [float(level) for level in tried.sigmas.tolist()]
        if all(a > b for a, b in itertools.pairwise(found)):
            return steps
    return 3


def check_call(pipe: Any, recipe: Mapping[str, Any]) -> None:
    """ModelError when the recipe's call has an argument that is not the pipeline's to set.

    What kind of value an argument takes shows in its default, where that is a number.
    """
    kind, given = family(pipe), recipe.get("call") or {}
    parameters = inspect.signature(type(pipe).__call__).parameters
    if unknown := sorted(set(given) - (set(parameters) - RESERVED)):
        raise ModelError(f"the recipe's call has {unknown[0]}, which {kind.pipeline} does not take")
    for name, value in given.items():
        usual = parameters[name].default
        if isinstance(usual, bool) != isinstance(value, bool) and isinstance(usual, (int, float)):
            allowed = "true or false" if isinstance(usual, bool) else "a number"
            raise ModelError(f"the recipe's call sets {name} to something else than {allowed}")
        if isinstance(usual, (int, float)) and not isinstance(value, (int, float)):
            raise ModelError(f"the recipe's call sets {name} to something else than a number")


def arguments(pipe: Any, request: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The pipeline's arguments for a request under a recipe; ModelError for an unknown one.

    Noise levels that the recipe lists are none of them: they are set in the scheduler, after
    whatever a pipeline makes of its own.
    """
    check_call(pipe, recipe)
    kind = family(pipe)
    extra = dict(recipe.get("call") or {})
    made: dict[str, Any] = {
        "prompt": request["prompt"],
        "negative_prompt": recipe.get("negative_prompt") or "",
        "height": request["height"],
        "width": request["width"],
        "num_frames": request["num_frames"],
        "num_inference_steps": request["steps"],
        "guidance_scale": float(request["guidance_scale"]),
        **extra,
    }
    if kind.fps is not None:
        made[kind.fps] = float(request["fps"])
    if recipe.get("max_sequence_length"):
        made["max_sequence_length"] = int(recipe["max_sequence_length"])
    return made


def shapes(pipe: Any, request: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The latent shape of each stream for a request: [1, C, F, H, W] and [1, C, L, M]."""
    kind = family(pipe)
    spatial, temporal = compression(pipe)
    made: dict[str, tuple[int, ...]] = {
        "video": (
            1,
            int(pipe.transformer.config.in_channels),
            (request["num_frames"] - 1) // temporal + 1,
            request["height"] // spatial,
            request["width"] // spatial,
        )
    }
    if kind.audio:
        rate = pipe.audio_sampling_rate / pipe.audio_hop_length
        rate /= float(pipe.audio_vae_temporal_compression_ratio)
        length = round(request["num_frames"] / float(request["fps"]) * rate)
        mel = pipe.audio_vae.config.mel_bins // pipe.audio_vae_mel_compression_ratio
        made["audio"] = (1, int(pipe.audio_vae.config.latent_channels), length, mel)
    return made


def unpackers(pipe: Any, request: Mapping[str, Any]) -> dict[str, Unpack]:
    """For each stream, tokens to latent."""
    made = shapes(pipe, request)
    if family(pipe).pipeline == "WanPipeline":
        return {"video": lambda tokens: tokens}
    _, _, f, h, w = made["video"]
    patch, patch_t = pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size

    def video(tokens: torch.Tensor) -> torch.Tensor:
        latent: torch.Tensor = pipe._unpack_latents(tokens, f, h, w, patch, patch_t)
        return latent

    def audio(tokens: torch.Tensor) -> torch.Tensor:
        _, _, length, mel = made["audio"]
        latent: torch.Tensor = pipe._unpack_audio_latents(tokens, length, num_mel_bins=mel)
        return latent

    return {"video": video, "audio": audio} if "audio" in made else {"video": video}


def packers(pipe: Any) -> dict[str, Unpack]:
    """For each stream, latent to tokens."""
    if family(pipe).pipeline == "WanPipeline":
        return {"video": lambda latent: latent}
    patch, patch_t = pipe.transformer_spatial_patch_size, pipe.transformer_temporal_patch_size
    made: dict[str, Unpack] = {"video": lambda latent: pipe._pack_latents(latent, patch, patch_t)}
    if family(pipe).audio:
        made["audio"] = lambda latent: pipe._pack_audio_latents(latent)
    return made


def dtypes(pipe: Any) -> dict[str, tuple[str, str]]:
    """The dtype of each stream's first x and of what follows, as pipelines hold them.

    LTX and LTX-2 keep latents in float32; Wan's become the model's dtype after the first step.
    """
    model = {torch.bfloat16: "BF16", torch.float16: "F16"}.get(pipe.transformer.dtype, "F32")
    if family(pipe).pipeline == "WanPipeline":
        return {"video": ("F32", model)}
    return dict.fromkeys(("video", "audio"), ("F32", "F32"))


def decode_video(pipe: Any, latent: torch.Tensor) -> Any:
    """The frames [F, H, W, 3] uint8 of a normalised video latent, as the pipeline decodes it."""
    vae = pipe.vae
    with torch.no_grad():
        here = latent.to(pipe.device).float()
        if family(pipe).pipeline == "WanPipeline":
            mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(here)
            deviation = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(here)
            here = here * deviation + mean
        else:
            here = pipe._denormalize_latents(
                here, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
            )
        video = vae.decode(here.to(vae.dtype), return_dict=False)[0]
    frames = pipe.video_processor.postprocess_video(video.float(), output_type="np")[0]
    return (frames * 255).round().clip(0, 255).astype("uint8")
