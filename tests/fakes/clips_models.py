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
LTX2_RECIPE = {
    "negative_prompt": "blurry", "max_sequence_length": 24,
    "call": {"audio_guidance_scale": 5.0, "guidance_rescale": 0.7, "stg_scale": 1.0,
             "spatio_temporal_guidance_blocks": [1], "modality_scale": 2.0},
}  # fmt: skip
"""How the tiny LTX-2 is run: guidance of every kind."""


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
    # Grey blocks of 4x4 pixels, as a random decoder's noise is nothing that a codec can keep.
    last = vae.decoder.conv_out.conv
    last.weight.data = 6 * last.weight.data.mean(0, keepdim=True).expand_as(last.weight).clone()
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


def _set_apart(module: Any) -> Any:
    """Random weights of some size, so that the outputs depend on everything that goes in."""
    generator = torch.Generator().manual_seed(3)
    for name, value in module.named_parameters():
        if value.dim() > 1 or "scale_shift" in name:
            value.data = (
                0.3 * torch.randn(value.shape, generator=generator) / value.shape[-1] ** 0.3
            )
    return module.eval()


def ltx2() -> Any:
    """A random LTX-2, float32: video [1, 4, F, H, W] and audio [1, 2, L, 2]."""
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline
    from diffusers.models.transformers import LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(1)
    text_encoder = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                "vocab_size": 512, "hidden_size": 32, "intermediate_size": 37, "head_dim": 8,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "max_position_embeddings": 512, "sliding_window": 64,
            },
            vision_config={
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
            },
            mm_tokens_per_image=4,
        )
    ).eval()  # fmt: skip
    transformer = LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8,
        cross_attention_dim=16, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=2, audio_attention_head_dim=4, audio_cross_attention_dim=8,
        num_layers=2, caption_channels=32, rope_double_precision=False, rope_type="split",
        perturbed_attn=True,
    )  # fmt: skip
    connectors = LTX2TextConnectors(
        caption_channels=32, text_proj_in_factor=3, video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8, video_connector_num_layers=1,
        video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32,
        rope_double_precision=False, rope_type="split",
    ).eval()  # fmt: skip
    vae = AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1),
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    ).eval()  # fmt: skip
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=8,
        resolution=32,
    ).eval()  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=32, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
    ).eval()  # fmt: skip
    return LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, audio_vae=audio_vae,
        text_encoder=text_encoder, tokenizer=byte_tokenizer("left"), connectors=connectors,
        transformer=_set_apart(transformer), vocoder=vocoder,
    )  # fmt: skip


def wan() -> Any:
    """A random Wan, float32: video [1, 4, F, H, W], with the multistep sampler of its releases."""
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(2)
    text_encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    ).eval()
    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=32,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return WanPipeline(
        tokenizer=byte_tokenizer(), text_encoder=text_encoder, vae=vae, scheduler=scheduler,
        transformer=_set_apart(transformer),
    )  # fmt: skip
