"""Real pipelines recorded, served and replayed: what the recorder, hook and worker leave is right.

These run in a Python with torch and diffusers (``make clips``); elsewhere they are skipped.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("IKIT_TEST_CLIPS") != "inside":
    pytest.skip("make clips runs these in a Python with torch", allow_module_level=True)

import torch

from fakes import clips_engine, clips_models, clips_words
from ikit_ops.clips import judge, modelfree
from ikit_ops.clips.engine import clipmaker, mp4, noise, pipelines, pixels, task
from ikit_ops.clips.engine.hook import RecordingFlowMatchEuler
from ikit_ops.clips.engine.replay import Reference, Replay
from ikit_ops.clips.reader import DumpReader
from ikit_ops.clips.recorder import StepDumpError


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clips_models.save_ltx(tmp_path_factory.mktemp("ltx"))


@pytest.fixture(scope="module")
def reference(ltx: Path) -> Reference:
    return Reference(ltx, "cpu", clips_engine.RECIPE)


@pytest.fixture(scope="module")
def pipes(ltx: Path) -> dict[str, Any]:
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return {name: pipelines.load(ltx, dtype, "cpu") for name, dtype in kinds.items()}


def test_ltx_is_recorded_bit_for_bit(tmp_path: Path, pipes: dict[str, Any]) -> None:
    asked = clips_engine.request(2)
    seen: list[Any] = []

    def hear(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append(given["latents"].clone())
        return {}

    pipe = pipes["fp32"]
    plain = pipe(
        **pipelines.arguments(pipe, asked, clips_engine.RECIPE), output_type="latent",
        generator=torch.Generator("cpu").manual_seed(2), callback_on_step_end=hear,
    ).frames  # fmt: skip
    path = clips_engine.serve(pipe, asked, tmp_path)
    unpack = pipelines.unpackers(pipe, asked)["video"]
    with DumpReader(path) as reader:
        for step, latents in enumerate(seen):
            assert torch.equal(reader.get(f"step.{step}.video.x_next"), unpack(latents))
        assert torch.equal(reader.get("final.video"), unpack(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["ltx2", "wan"])
def test_other_pipelines_are_served_recorded_and_replayed(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = tmp_path / "model"
    getattr(clips_models, name)().save_pretrained(folder)
    recipe = clips_models.LTX2_RECIPE if name == "ltx2" else {"max_sequence_length": 24}
    frames = 17 if name == "ltx2" else 9
    asked = clips_engine.request(
        3, width=64, height=64, num_frames=frames, steps=6, audio=name == "ltx2"
    )
    made = clipmaker.make(pipelines.load(folder, dtype, "cpu"), asked, tmp_path, recipe, {})
    shapes = {"video": (1, 4, 3, 2, 2), "audio": (1, 2, 18, 2)} if name == "ltx2" else {
        "video": (1, 4, 3, 8, 8)
    }  # fmt: skip
    reference = Reference(folder, "cpu", recipe)
    with DumpReader(made.dump) as reader:
        assert {s: reader.shape(f"final.{s}") for s in reader.streams} == shapes
        assert modelfree.layout_of(reader, asked, shapes) == []
        found = modelfree.scan(reader)
        assert not (found.arithmetic or found.chain or found.final or found.reused)
        first = {stream: reader.get(f"step.0.{stream}.x") for stream in reader.streams}
        assert noise.check(first, asked)[0]
        for stream in reader.streams:
            assert torch.equal(reader.get(f"final.{stream}"), reader.get(f"step.5.{stream}.x_next"))
        done = Replay(reader, reference, asked, range(6), lambda what: None).run()
        assert modelfree.schedule_problems(*reader.sigmas(), done.schedule) == []
    found_word = judge.judge(done.steps, done.candidates)
    assert found_word.verdict == "pass", found_word.detail
    assert {step.stream for step in done.steps} == set(shapes)
    assert mp4.decode_bytes(made.mp4, 100).shape == (frames, 64, 64, 3)


def test_wrong_guidance_of_ltx2_is_found_through_its_rescale(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    clips_models.ltx2().save_pretrained(folder)
    asked = clips_engine.request(3, width=64, height=64, num_frames=17, steps=6, audio=True)
    pipe = pipelines.load(folder, torch.float32, "cpu")
    path = clips_engine.serve(
        pipe, asked, tmp_path, variant="cfg x1.1", recipe=clips_models.LTX2_RECIPE
    )
    reference = Reference(folder, "cpu", clips_models.LTX2_RECIPE)
    with DumpReader(path) as reader:
        done = Replay(reader, reference, asked, range(6), lambda what: None).run()
    assert judge.judge(done.steps).verdict == "guidance"
    fits = [step.guidance_fit for step in done.steps if step.stream == "video"]
    assert fits == pytest.approx([3.3] * 6, abs=0.01)


SHAPES = {"video": (1, 4, 3, 2, 2), "audio": (1, 2, 18, 2)}


@pytest.mark.parametrize(
    ("draw", "word"),
    [
        (lambda: noise.draw(SHAPES, 8), "it is the noise of seed 8"),
        (lambda: noise.draw(SHAPES, 7, ("audio", "video")), "audio was drawn before video"),
        (lambda: {n: noise.draw({n: s}, 7)[n] for n, s in SHAPES.items()}, "of its own"),
        (lambda: {n: 0.3 * t for n, t in noise.draw(SHAPES, 7).items()}, "standard deviation"),
        (lambda: {n: t.flip(-1) for n, t in noise.draw(SHAPES, 7).items()}, "at other places"),
        (lambda: noise.draw(SHAPES, 77), "other noise"),
    ],
)
def test_noise_that_is_not_the_seeded_one_is_diagnosed(draw: Any, word: str) -> None:
    ok, detail = noise.check(draw(), {"noise_seed": 7, "seed": 7})
    assert not ok
    assert word in detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_seeded_noise_is_recognised_in_every_dtype_and_to_a_few_ulp(dtype: torch.dtype) -> None:
    drawn = {n: t.to(dtype) for n, t in noise.draw(SHAPES, 7).items()}
    assert noise.check(drawn, {"noise_seed": 7, "seed": 3})[0]
    nudged = {n: t * (1 + 2.0**-23) for n, t in noise.draw(SHAPES, 7).items()}
    assert noise.check(nudged, {"noise_seed": 7})[0]
    off = {n: t + 1e-3 for n, t in noise.draw(SHAPES, 7).items()}
    assert not noise.check(off, {"noise_seed": 7})[0]


def test_the_same_frames_give_the_same_mp4_and_frames_come_back() -> None:
    generator = torch.Generator().manual_seed(0)
    small = torch.rand(9, 8, 8, 3, generator=generator)
    frames = (small.repeat_interleave(8, 1).repeat_interleave(8, 2) * 255).byte().numpy()
    first = mp4.encode(frames, 24.0)
    numbers = random.Random(0)
    for _ in range(10):  # whatever memory held before must not show
        used = [bytearray(numbers.randbytes(numbers.randrange(1000, 300_000))) for _ in range(30)]
        del used
        assert mp4.encode(frames, 24.0) == first
    back = mp4.decode_bytes(first, 100)
    assert back.shape == frames.shape
    assert pixels.psnr(back, frames).min() > 25
    with pytest.raises(mp4.ClipError):
        mp4.decode_bytes(b"no mp4", 100)
    with pytest.raises(mp4.ClipError, match="more than 3 frames"):
        mp4.decode_bytes(first, 3)


def test_stages_explain_the_time_and_a_full_disk_gives_no_clip(
    tmp_path: Path, pipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = clips_engine.request(6)
    made = clipmaker.make(pipes["fp32"], asked, tmp_path, clips_engine.RECIPE, {})
    assert len(made.steps_ms) == 12
    assert {"text_encode", "denoise", "decode_video", "mux", "step_dump"} <= set(made.stages)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StepDumpError, match="No space left"):
        clipmaker.make(pipes["fp32"], asked, tmp_path, clips_engine.RECIPE, {})
    assert sorted(tmp_path.iterdir()) == before
    scheduler = pipes["fp32"].scheduler
    assert not isinstance(scheduler, RecordingFlowMatchEuler)


@pytest.mark.parametrize(
    "index", ["", "{}", "[]", '{"_class_name": "StableDiffusionPipeline"}', '{"_class_name": 3}']
)
def test_a_folder_that_holds_no_such_pipeline_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model_index.json").write_text(index, encoding="utf-8")
    with pytest.raises(pipelines.ModelError):
        pipelines.family_of(tmp_path)


def test_a_recipe_may_set_what_the_pipeline_takes_and_nothing_else(pipes: dict[str, Any]) -> None:
    asked = clips_engine.request(0)
    made = pipelines.arguments(pipes["fp32"], asked, {"call": {"guidance_rescale": 0.5}})
    assert made["guidance_rescale"] == 0.5
    for name in ("callback_on_step_end", "latents", "colour"):
        with pytest.raises(pipelines.ModelError, match=name):
            pipelines.arguments(pipes["fp32"], asked, {"call": {name: 1}})
    for value in ("x", True, [0.5], None):
        with pytest.raises(pipelines.ModelError, match="guidance_rescale to something else than a"):
            pipelines.check_call(pipes["fp32"], {"call": {"guidance_rescale": value}})


def test_a_call_that_the_reference_does_not_take_is_the_recipes_fault(
    tmp_path: Path, ltx: Path, pipes: dict[str, Any]
) -> None:
    path = clips_engine.serve(pipes["fp32"], clips_engine.request(8), tmp_path)
    clip = {"index": 0, "dump": str(path), "video": "none", "request": {}, "steps": [0]}
    config = {"reference": str(ltx), "recipe": {"call": {"nope": 1}}, "device": "cpu",
              "clips": [clip]}  # fmt: skip
    found = task.run(config, Told())
    assert found["recipe_problem"] == "the recipe's call has nope, which LTXPipeline does not take"
    assert (found["problem"], found["clips"]) == (None, {})


@pytest.fixture(scope="module")
def sampler() -> Iterator[Any]:
    from diffusers import EulerDiscreteScheduler

    yield EulerDiscreteScheduler()


def test_a_sampler_that_is_not_flow_match_euler_is_not_recorded(sampler: Any) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    with pytest.raises(ValueError, match="not a flow-match"):
        RecordingFlowMatchEuler.of(sampler, None)  # type: ignore[arg-type]
    stochastic = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(ValueError, match="stochastic"):
        RecordingFlowMatchEuler.of(stochastic, None)  # type: ignore[arg-type]


class Told:
    """Progress that a test may look at."""

    done = 0

    def __init__(self) -> None:
        self.what: list[str] = []

    def tell(self, what: str) -> None:
        self.what.append(what)


def worked(ltx: Path | None, dump: Path, asked: dict[str, Any], steps: list[int]) -> dict[str, Any]:
    """What the worker finds about one clip."""
    clip = {"index": 0, "dump": str(dump), "video": "none", "request": asked, "steps": steps}
    config = {"reference": str(ltx) if ltx else None, "recipe": clips_engine.RECIPE,
              "device": "cpu", "clips": [clip]}  # fmt: skip
    found: dict[str, Any] = task.run(config, Told())["clips"]["0"]
    return found


def test_the_worker_checks_noise_without_a_reference_and_steps_with_one(
    tmp_path: Path, ltx: Path, pipes: dict[str, Any]
) -> None:
    asked = clips_engine.request(8)
    path = clips_engine.serve(pipes["fp32"], asked, tmp_path)
    alone = worked(None, path, asked, [])
    assert alone["noise"]["ok"] is True and "steps" not in alone
    both = worked(ltx, path, asked, [0, 5])
    assert [step["r"] for step in both["steps"]] == pytest.approx([0, 0], abs=1e-3)
    assert len(both["schedule"]) == 13
    other = worked(ltx, path, {**asked, "width": 512}, [0])
    assert "steps" not in other and other["shapes"]["video"] == [1, 16, 2, 6, 16]


@pytest.mark.parametrize(
    "changed",
    [{"width": None}, {"prompt": None}, {"guidance_scale": None}, {"fps": "x"}, {"steps": None}],
)
def test_a_request_that_no_pipeline_takes_is_a_problem_and_no_crash(
    tmp_path: Path, ltx: Path, pipes: dict[str, Any], changed: dict[str, Any]
) -> None:
    asked = clips_engine.request(8)
    path = clips_engine.serve(pipes["fp32"], asked, tmp_path)
    found = worked(ltx, path, {**asked, **changed}, [0, 5])
    assert found["problem"]
    assert found["noise"]["ok"] is True


def test_latents_that_the_reference_cannot_bear_are_a_problem_and_no_crash(
    tmp_path: Path, ltx: Path, pipes: dict[str, Any]
) -> None:
    asked = clips_engine.request(8)
    path = clips_engine.serve(pipes["fp32"], asked, tmp_path)
    with DumpReader(path) as reader:
        start, size = reader._entry("step.5.video.x")[2:]
    data = bytearray(path.read_bytes())
    data[start:size] = torch.full(((size - start) // 4,), 3e38).numpy().tobytes()
    path.write_bytes(data)
    assert "no finite output" in worked(ltx, path, asked, [5])["problem"]


def test_a_seed_that_is_none_leaves_the_noise_unchecked(
    tmp_path: Path, pipes: dict[str, Any]
) -> None:
    asked = clips_engine.request(8)
    path = clips_engine.serve(pipes["fp32"], asked, tmp_path)
    for seed, said in ((None, "names no noise_seed"), (-5, "no generator"), (2**63, "generator")):
        found = worked(None, path, {**asked, "noise_seed": seed}, [])["noise"]
        assert found["ok"] is None and said in found["detail"]
    path.write_bytes(path.read_bytes()[:1000])
    assert "its header claims" in worked(None, path, asked, [])["problem"]


@pytest.mark.parametrize("steps", [2, 3])
def test_clips_of_very_few_steps_are_replayed_too(
    tmp_path: Path, reference: Reference, pipes: dict[str, Any], steps: int
) -> None:
    asked = clips_engine.request(9, steps=steps)
    path = clips_engine.serve(pipes["bf16"], asked, tmp_path, variant="bf16")
    assert clips_words.word_of(path, reference, asked, 0)[0] == "pass"
    path = clips_engine.serve(pipes["fp32"], asked, tmp_path, variant="stale prompt")
    assert clips_words.word_of(path, reference, asked, 0)[0] == "conditioning"


def test_a_reference_that_cannot_be_loaded_is_told_before_any_clip(
    tmp_path: Path, pipes: dict[str, Any]
) -> None:
    asked = clips_engine.request(8)
    path = clips_engine.serve(pipes["fp32"], asked, tmp_path)
    clip = {"index": 0, "dump": str(path), "video": "none", "request": asked, "steps": [0, 5]}
    heard = Told()
    config = {"reference": str(tmp_path), "recipe": {}, "device": "cpu", "clips": [clip]}
    found = task.run(config, heard)
    assert "model_index.json" in found["problem"]
    assert found["clips"] == {}
    assert heard.what == ["loading the reference"]
