"""A small video engine in one of three states: plain, cached, compiled.

    python engine.py STATE FOLDER        (in a Python with torch, diffusers and av)

It makes two clips with a trained toy LTX (16 channels, 180 k weights), writes the dump of their
steps as it goes, and leaves FOLDER/clips.jsonl, FOLDER/dumps and the model in FOLDER/model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ops"), str(ROOT / "tests")]

import torch  # noqa: E402 -- found after the path is set, as its neighbours are

from fakes import clips_engine, clips_models  # noqa: E402
from ikit_ops.clips.engine import clipmaker, pipelines  # noqa: E402

RECIPE = clips_engine.RECIPE


def every_second_step_skipped(transformer: Any) -> None:
    """What a step cache does: the network's last output again, every second time."""
    forward = transformer.forward
    kept: list[Any] = []

    def cached(**given: Any) -> Any:
        kept.append(kept[-1] if len(kept) % 2 else forward(**given))
        return kept[-1]

    transformer.forward = cached


def main(state: str, folder: Path) -> None:
    """Make the clips."""
    torch.set_num_threads(1)
    dumps, model = folder / "dumps", folder / "model"
    dumps.mkdir(parents=True)
    clips_models.save_ltx(model)
    pipe = pipelines.load(model, torch.bfloat16, "cpu")
    if state == "compiled":
        pipe.transformer.forward = torch.compile(pipe.transformer.forward)
    lines = []
    for seed, prompt in enumerate(("red kite rises", "gold kite turns")):
        forward = pipe.transformer.forward
        if state == "cached":
            every_second_step_skipped(pipe.transformer)
        request = clips_engine.request(seed, prompt=prompt, width=128, height=96)
        made = clipmaker.make(pipe, request, dumps, RECIPE, {})
        pipe.transformer.forward = forward
        video = folder / f"clip-{seed}.mp4"
        video.write_bytes(made.mp4)
        lines.append({"video": video.name, "request": request})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "clips.jsonl").write_text(text, encoding="utf-8")
    (folder / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
