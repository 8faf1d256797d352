"""Clips by real pipelines: what they can make, when it is recorded, and where the time goes.

These run in a Python with torch and diffusers (``make clips``); elsewhere they are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("IKIT_TEST_CLIPS") != "inside":
    pytest.skip("make clips runs these in a Python with torch", allow_module_level=True)

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

from fakes import clips_engine, clips_models
from ikit_ops.clips import judge, modelfree
from ikit_ops.clips.engine import asked, clipmaker, noise, pipelines, recipes, service
from ikit_ops.clips.engine.bodies import Refused
from ikit_ops.clips.engine.replay import Reference, Replay
from ikit_ops.clips.engine.timeline import Timeline
from ikit_ops.clips.reader import DumpReader

# The levels that distilled releases are run at: no schedule of the scheduler's own.
LEVELS = [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875]
GIVEN = {"prompt": "red kite rises", "width": 64, "height": 64, "num_frames": 9, "fps": 24,
         "steps": 8, "guidance_scale": 3.0, "seed": 3}  # fmt: skip
NAMES = ("ltx", "ltx2", "wan")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in folders.items():
        getattr(clips_models, name)().save_pretrained(folder)
    return folders


@pytest.fixture(scope="module")
def pipes(models: dict[str, Path]) -> dict[str, Any]:
    return {name: pipelines.load(models[name], torch.float32, "cpu") for name in NAMES}


def refusal(able: asked.Able, **changed: Any) -> tuple[Any, Any]:
    with pytest.raises(Refused) as caught:
        asked.check(asked.from_clips({**GIVEN, **changed}).request, able, asked.Limits())
    return caught.value.told["field"], caught.value.told["nearest"]


def request(able: asked.Able, **changed: Any) -> dict[str, Any]:
    return asked.check(asked.from_clips({**GIVEN, **changed}).request, able, asked.Limits())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_own_noise_levels_are_the_steps_and_the_replay_agrees(
    tmp_path: Path, models: dict[str, Path], pipes: dict[str, Any], name: str
) -> None:
    recipe = {"max_sequence_length": 24, "sigmas": LEVELS}
    pipe = pipes[name]
    able = pipelines.able(pipe, recipe)
    assert refusal(able, steps=4) == ("steps", 8)
    wanted = request(able)
    made = clipmaker.make(pipe, wanted, tmp_path, recipe, {})
    assert len(made.steps_ms) == 8
    with DumpReader(made.dump) as reader:
        sigma, after = reader.sigmas()
        assert sigma == pytest.approx(LEVELS, abs=1e-7)
        assert after == pytest.approx([*LEVELS[1:], 0.0], abs=1e-7)
        assert modelfree.schedule_problems(sigma, after, LEVELS) == []
        found = modelfree.scan(reader)
        assert not (found.arithmetic or found.chain or found.final)
        first = {stream: reader.get(f"step.0.{stream}.x") for stream in reader.streams}
        assert noise.check(first, wanted)[0]
        reference = Reference(models[name], "cpu", recipe)
        done = Replay(reader, reference, wanted, range(8), lambda what: None).run()
        assert modelfree.schedule_problems(sigma, after, done.schedule) == []
    assert judge.judge(done.steps, done.candidates).verdict == "pass"


def test_an_engine_that_ignores_the_recipes_levels_is_found(
    tmp_path: Path, models: dict[str, Path], pipes: dict[str, Any]
) -> None:
    recipe = {"max_sequence_length": 24, "sigmas": LEVELS}
    wanted = request(pipelines.able(pipes["wan"], recipe))
    made = clipmaker.make(pipes["wan"], wanted, tmp_path, {"max_sequence_length": 24}, {})
    with DumpReader(made.dump) as reader:
        reference = Reference(models["wan"], "cpu", recipe)
        done = Replay(reader, reference, wanted, [0, 4], lambda what: None).run()
        assert modelfree.schedule_problems(*reader.sigmas(), LEVELS)
        assert modelfree.schedule_problems(*reader.sigmas(), done.schedule)


@pytest.mark.parametrize("recipe", [{"sampler": "unipc"}, {"sigmas": [0.5, 0.7]}])
def test_a_recipe_that_is_not_followed_makes_no_clip(
    tmp_path: Path, pipes: dict[str, Any], recipe: dict[str, Any]
) -> None:
    with pytest.raises(recipes.RecipeError):
        clipmaker.make(pipes["ltx"], clips_engine.request(0), tmp_path, recipe, {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"sampler|sigmas"):
        pipelines.able(pipes["ltx"], recipe)
    with pytest.raises(pipelines.ModelError, match="colour"):
        pipelines.able(pipes["ltx"], {"call": {"colour": 1}})


def test_sizes_are_what_the_pipelines_own_parts_need(pipes: dict[str, Any]) -> None:
    wan, ltx, ltx2 = (pipelines.able(pipes[name], {}) for name in ("wan", "ltx", "ltx2"))
    assert (wan.width, wan.height, wan.group, wan.least_steps) == (16, 16, 4, 1)
    assert (ltx.width, ltx.height, ltx.group, ltx.least_steps) == (32, 32, 8, 2)
    assert (ltx2.width, ltx2.group, ltx2.audio, ltx2.task) == (32, 8, True, "t2av")
    assert refusal(ltx, steps=1) == ("steps", 2)
    assert refusal(ltx2, num_frames=1, fps=120) == ("num_frames", 9)
    assert refusal(ltx2, num_frames=8185, fps=1)[0] == "num_frames"


def test_a_wan_of_larger_patches_takes_its_own_sizes_and_makes_them(tmp_path: Path) -> None:
    pipe = clips_models.wan()
    pipe.transformer = clips_models._set_apart(
        WanTransformer3DModel(
            patch_size=(1, 4, 4), num_attention_heads=2, attention_head_dim=12, in_channels=4,
            out_channels=4, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=64,
        )
    )  # fmt: skip
    pipelines.pin_euler(pipe)
    pipe.set_progress_bar_config(disable=True)
    able = pipelines.able(pipe, {})
    assert (able.width, able.height) == (32, 32)
    assert refusal(able, width=48) == ("width", 64)
    wanted = request(able, width=32, num_frames=5, steps=2)
    made = clipmaker.make(pipe, wanted, tmp_path, {"max_sequence_length": 24}, {})
    with DumpReader(made.dump) as reader:
        assert reader.shape("final.video") == (1, 4, 2, 8, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_fewest_steps_that_are_promised_are_made(
    tmp_path: Path, pipes: dict[str, Any], name: str, steps: int
) -> None:
    able = pipelines.able(pipes[name], {})
    if steps < able.least_steps:
        assert refusal(able, steps=steps) == ("steps", able.least_steps)
        return
    wanted = request(able, steps=steps)
    made = clipmaker.make(pipes[name], wanted, tmp_path, {"max_sequence_length": 24}, {})
    assert len(made.steps_ms) == steps


def test_a_scheduler_that_never_falls_is_given_no_steps_that_it_cannot_make() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    assert pipelines.least_steps(scheduler) in (1, 2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_every_moment_of_a_clip_belongs_to_a_stage(
    tmp_path: Path, pipes: dict[str, Any], name: str
) -> None:
    told: list[tuple[str, float]] = []
    ticks = itertools.count()

    class Watched(Timeline):
        def enter(self, stage: str) -> str:
            left = super().enter(stage)
            told.append((left, self._since))
            return left

    line = Watched("receive", lambda: float(next(ticks)))
    line.enter("prepare")
    wanted = request(pipelines.able(pipes[name], {}))
    made = clipmaker.make(pipes[name], wanted, tmp_path, {"max_sequence_length": 24}, {}, line)
    # each reading of the clock is one second later: the stages are all of them, each once
    assert made.stages is line.spent
    assert sum(line.spent.values()) == 1e3 * len(told) == 1e3 * told[-1][1]
    order = [stage for stage, _ in itertools.groupby(told, key=lambda each: each[0])]
    assert order[:4] == ["receive", "prepare", "step_dump", "prepare"]
    assert order[4] == "text_encode"
    assert order.count("denoise") == 8 * (1 + (name == "ltx2")) + 1  # each is interrupted
    assert order[-2:] == ["mux", "step_dump"]
    sound = {"decode_audio"} if name == "ltx2" else set()
    assert set(line.spent) == sound | {"receive", "prepare", "text_encode", "denoise", "step_dump",
                                       "decode_video", "mux"}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_that_nobody_waits_for_ends_at_its_next_step_and_leaves_nothing(
    tmp_path: Path, pipes: dict[str, Any], name: str
) -> None:
    asked_for: list[int] = []

    def wanted() -> bool:
        asked_for.append(len(asked_for))
        return len(asked_for) < 3

    pipe, own = pipes[name], pipes[name].scheduler
    with pytest.raises(service.Abandoned):
        clipmaker.make(
            pipe, request(pipelines.able(pipe, {})), tmp_path, {"max_sequence_length": 24}, {},
            None, wanted,
        )  # fmt: skip
    assert len(asked_for) == 3
    assert list(tmp_path.iterdir()) == []
    assert pipe.scheduler is own
    assert "encode_prompt" not in vars(pipe) and "decode" not in vars(pipe.vae)


def test_a_served_clip_names_the_recipe_that_was_followed(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    fields = {"negative_prompt": "blue kite waits", "max_sequence_length": 24}
    members = {name: json.dumps(value) for name, value in fields.items()}
    config = {"dumps": str(tmp_path), "model": str(models["ltx"]), "dtype": "fp32", "device": "cpu"}
    maker = clipmaker.ClipMaker(config, recipes.Served(fields, members))
    wanted = request(maker.able, steps=2)

    def made(negative: str | None) -> tuple[Any, dict[str, str]]:
        clip = maker.make(asked.Asked(wanted, negative), Timeline("prepare"), lambda: True)
        with DumpReader(clip.dump) as reader:
            assert clip.recipe_sha256 == reader.meta["recipe_sha256"]
            return reader.get("final.video"), json.loads(reader.meta["recipe"])

    plain, recipe = made(None)
    other, changed = made("gold kite falls")
    again, same = made("blue kite waits")
    assert recipe == same == fields
    assert changed == {**fields, "negative_prompt": "gold kite falls"}
    assert torch.equal(plain, again) and not torch.equal(plain, other)


def test_a_maker_refuses_its_recipe_before_it_loads_a_model(tmp_path: Path) -> None:
    config = {"dumps": str(tmp_path), "model": str(tmp_path), "dtype": "fp32", "device": "cpu"}
    with pytest.raises(recipes.RecipeError, match="sampler"):
        clipmaker.ClipMaker(config, recipes.Served({"sampler": "unipc"}))
    left = tmp_path / f".999999999-5-{'0' * 32}.partial"
    left.touch()
    with pytest.raises(pipelines.ModelError, match="model_index"):
        clipmaker.ClipMaker(config, recipes.Served({}))
    assert not left.exists()
