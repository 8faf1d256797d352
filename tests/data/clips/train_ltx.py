"""Train the small LTX of the tests and write its weights: a few minutes on one core.

    python tests/data/clips/train_ltx.py            # in a Python with torch and diffusers
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from fakes import clips_models  # noqa: E402

STEPS, BATCH = 900, 24


def main() -> None:
    torch.set_num_threads(1)
    pipe = clips_models.ltx(trained=False)
    transformer, generator = pipe.transformer.train(), torch.Generator().manual_seed(1)
    texts = ["", *clips_models.prompts()]
    with torch.no_grad():
        embeds, masks, _, _ = pipe.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=clips_models.TOKENS
        )
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for step in range(STEPS):
        which = torch.randint(0, len(texts) - 1, (BATCH,), generator=generator)
        x0 = torch.cat([clips_models.made_latents(int(n), 1, generator) for n in which])
        dropped = torch.rand(BATCH, generator=generator) < 0.15
        text = torch.where(dropped, torch.zeros_like(which), which + 1)
        sigma = torch.sigmoid(torch.randn(BATCH, generator=generator) + 0.5)
        noise = torch.randn(x0.shape, generator=generator)
        shaped = sigma[:, None, None, None, None]
        x = pipe._pack_latents((1 - shaped) * x0 + shaped * noise)
        wanted = pipe._pack_latents(noise - x0)
        out = transformer(
            hidden_states=x, encoder_hidden_states=embeds[text], timestep=sigma * 1000,
            encoder_attention_mask=masks[text], num_frames=2, height=6, width=8,
            rope_interpolation_scale=(8 / 24, 32, 32), return_dict=False,
        )[0]
        loss = (out - wanted).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(step, f"{loss.item():.4f}", flush=True)
    parts = {"transformer": transformer, "text_encoder": pipe.text_encoder}
    saved = {
        f"{name}.{key}": value.detach().to(torch.bfloat16).contiguous().clone()
        for name, part in parts.items()
        for key, value in part.state_dict().items()
        if not (name == "text_encoder" and key == "encoder.embed_tokens.weight")
    }
    save_file(saved, clips_models.WEIGHTS)
    print(clips_models.WEIGHTS.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
