"""Small video models in the diffusers layout: a trained LTX, and random LTX-2 and Wan.

Only Pythons with torch and diffusers import this.  The LTX transformer was trained for a few
hundred steps on made-up latents (``tests/data/clips/train_ltx.py``), because an untrained one
ignores its prompt and its time, and would let an engine that drops them pass.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

WEIGHTS = Path(__file__).parents[1] / "data" / "clips" / "ltx_small.safetensors"
CHANNELS = 16
TOKENS = 24


def byte_tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes that needs no file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "</s>", "<s>", "<unk>", *alphabet]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>",
        unk_token="<unk>", model_max_length=TOKENS, padding_side=side,
    )  # fmt: skip


def ltx(trained: bool = True) -> LTXPipeline:
    """The small LTX pipeline, float32: 16 latent channels, 4 layers."""
    torch.manual_seed(0)
    text_encoder = T5EncoderModel(
        T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ).eval()
    transformer = LTXVideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=4, attention_head_dim=16,
        cross_attention_dim=64, num_layers=4, caption_channels=32,
    ).eval()  # fmt: skip
    vae = AutoencoderKLLTXVideo(
        latent_channels=CHANNELS, block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8), layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
    ).eval()  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=1024, max_image_seq_len=4096,
        base_shift=0.95, max_shift=2.05, shift_terminal=0.1,
    )  # fmt: skip
    if trained:
        saved = load_file(WEIGHTS)
        for name, module in (("transformer", transformer), ("text_encoder", text_encoder)):
            part = {k.removeprefix(f"{name}."): v for k, v in saved.items() if k.startswith(name)}
            module.load_state_dict(
                {k: v.float() for k, v in part.items()}, strict=name == "transformer"
            )
    return LTXPipeline(scheduler, vae, text_encoder, byte_tokenizer(), transformer)


COLOURS = ("red", "green", "blue", "gold")
MOTIONS = ("rises", "falls", "turns", "waits")


def prompts() -> list[str]:
    """What the transformer was trained to tell apart."""
    return [f"{colour} kite {motion}" for colour in COLOURS for motion in MOTIONS]


def made_latents(prompt_index: int, count: int, generator: Any) -> Any:
    """Made-up clips of one prompt, [count, C, F, H, W]: waves whose pattern the prompt sets."""
    own = torch.Generator().manual_seed(1000 + prompt_index)
    amplitude = torch.randn(CHANNELS, 1, 1, 1, generator=own)
    speed = torch.randn(CHANNELS, 1, 1, 1, generator=own)
    along = torch.randn(CHANNELS, 1, 1, 1, 2, generator=own)
    f, h, w = torch.meshgrid(torch.arange(2.0), torch.arange(6.0), torch.arange(8.0), indexing="ij")
    phase = torch.rand(count, 1, 1, 1, 1, generator=generator) * 2 * math.pi
    wave = torch.sin(phase + speed * f + along[..., 0] * h + along[..., 1] * w)
    noise = 0.3 * torch.randn(count, CHANNELS, 2, 6, 8, generator=generator)
    return amplitude * wave + noise


def save_ltx(folder: Path) -> Path:
    """Write the small LTX as a model directory; its path."""
    ltx().save_pretrained(folder, safe_serialization=True)
    return folder
