"""The seeded noise that a clip starts from, and what else an engine may have drawn instead.

The contract's noise is float32, drawn on the CPU by a generator seeded with ``noise_seed``:
video first, then audio from the same generator.  A generator on a GPU gives other numbers, and
other numbers on another GPU, so that noise cannot be drawn again elsewhere.  When the first
latent is not this noise, the usual mistakes are tried, and the one that fits is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MAX_ULPS = 4  # transcendental functions differ by one or two between processors


def draw(
    shapes: Mapping[str, tuple[int, ...]], seed: int, order: tuple[str, ...] | None = None
) -> dict[str, torch.Tensor]:
    """The noise of each stream, float32, from one generator in this order (video, then audio)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    names = order or tuple(sorted(shapes, key=lambda name: (name != "video", name)))
    return {name: torch.randn(shapes[name], generator=generator) for name in names}


def matches(latent: torch.Tensor, noise: torch.Tensor) -> bool:
    """Whether a latent is this noise, rounded to the latent's dtype, to a few ulp."""
    if latent.shape != noise.shape:
        return False
    wanted = noise.to(latent.dtype).float()
    here = latent.float()
    bits = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[latent.dtype]
    allowed = MAX_ULPS * 2.0**-bits * wanted.abs().clamp_min(2.0**-10)
    return bool(((here - wanted).abs() <= allowed).all())


def check(latents: Mapping[str, torch.Tensor], request: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether every stream's first latent is the seeded noise; what it is instead."""
    shapes = {name: tuple(latent.shape) for name, latent in latents.items()}
    seed = int(request["noise_seed"])
    drawn = draw(shapes, seed)
    wrong = [name for name in latents if not matches(latents[name], drawn[name])]
    if not wrong:
        return True, f"drawn on the CPU with noise_seed {seed}"
    for dtype in (torch.bfloat16, torch.float16):  # an engine that draws or keeps it so
        if all(matches(latents[name].to(dtype), drawn[name]) for name in latents):
            return True, f"drawn with noise_seed {seed}, rounded to {_name(dtype)}"
    name = wrong[0]
    swapped = draw(shapes, seed, tuple(reversed(list(drawn))))
    if len(shapes) > 1 and all(matches(latents[each], swapped[each]) for each in latents):
        return False, "audio was drawn before video"
    return False, f"{name}: {diagnosis(name, latents[name], shapes, request)}"


def diagnosis(
    name: str,
    latent: torch.Tensor,
    shapes: Mapping[str, tuple[int, ...]],
    request: Mapping[str, Any],
) -> str:
    """Which other draw the latent is, in words."""
    seed, general = int(request["noise_seed"]), request.get("seed")
    for other in dict.fromkeys([general, 0, 42, seed + 1, seed - 1]):
        if not isinstance(other, int) or other == seed or not 0 <= other < 2**63:
            continue
        if matches(latent, draw(shapes, other)[name]):
            return f"it is the noise of seed {other}, not of {seed}"
    if matches(latent, draw({name: shapes[name]}, seed)[name]):
        return "each stream has a generator of its own"
    own = draw({name: shapes[name]}, seed)[name]
    if torch.equal(own.flatten().sort().values, latent.float().flatten().sort().values):
        return "the numbers are right, at other places: drawn as tokens"
    generator = torch.Generator("cpu").manual_seed(seed)
    double = torch.randn(shapes[name], generator=generator, dtype=torch.float64)
    if matches(latent, double.float()):
        return "it was drawn in float64, not float32"
    scale = float(latent.float().std())
    if abs(scale - 1) > max(0.02, 5 / (2 * latent.numel()) ** 0.5):
        return f"it has standard deviation {scale:.3f}, noise has 1"
    return "it is other noise: another seed, or a generator on a device, which cannot be drawn here"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
