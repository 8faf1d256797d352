"""What the checker's own files may say: a slip in them is refused, and never the engine's fault."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes import clips
from helpers.bench import run_here
from ikit_mcp.call import Settings
from ikit_mcp.process import devices, lock
from ikit_mcp.registry import OpError, Registry, operations_in
from ikit_mcp.runner import Control, Runner
from ikit_ops import clip_steps as module
from ikit_ops.clips import rules, torchside
from ikit_ops.clips.manifest import read_manifest, read_recipe

GIVEN = '{"video": "a.mp4", "request": {"prompt": "a kite", "steps": 6}}'


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python of this machine may help."""
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: None)


def manifest_of(folder: Path, *lines: str) -> Path:
    path = folder / "clips.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"video": "a.mp4"}', '{"video": 3, "request": {}}', '{"request": {}}',
     '{"video": "a", "request": []}', '{"video": "", "request": {}}', '{"video": NaN}',
     '{"video": "a\\u0000", "request": {}}', '{"video": "\\ud800", "request": {}}', "[" * 100_000],
)  # fmt: skip
def test_a_manifest_line_that_is_no_clip_is_refused_by_its_number(
    tmp_path: Path, line: str
) -> None:
    with pytest.raises(OpError, match="line 3 of the manifest"):
        read_manifest(manifest_of(tmp_path, "", GIVEN, line))


@pytest.mark.parametrize(
    ("field", "text", "allowed"),
    [("width", "1e999", "whole number from 1"), ("width", "NaN", "whole number from 1"),
     ("guidance_scale", "NaN", "finite number"), ("fps", "Infinity", "finite number"),
     ("seed", "-Infinity", "64 bits"), ("width", "64.5", "whole number from 1"),
     ("width", '"64"', "whole number from 1"), ("height", "0", "whole number from 1"),
     ("num_frames", "true", "whole number from 1"), ("steps", "-1", "whole number from 1"),
     ("steps", "9" * 400, "whole number from 1"), ("width", '{"a": 1}', "whole number from 1"),
     ("guidance_scale", "1e999", "finite number"), ("guidance_scale", "-1e999", "finite number"),
     ("guidance_scale", "[3]", "finite number"), ("fps", "0", "above 0"), ("fps", "true", "finite"),
     ("seed", "true", "64 bits"), ("noise_seed", "9" * 40, "64 bits"), ("seed", "0.5", "64 bits"),
     ("prompt", "3", "is a text"), ("prompt", '"\\ud800"', "is a text"), ("task", "[]", "a text"),
     ("audio", '"yes"', "true or false"), ("audio", "1", "true or false")],
)  # fmt: skip
def test_a_field_that_cannot_be_asked_for_is_named_with_its_line(
    tmp_path: Path, field: str, text: str, allowed: str
) -> None:
    line = f'{{"video": "a", "request": {{"{field}": {text}}}}}'
    with pytest.raises(OpError, match=rf"line 2 of the manifest: the request's {field} is") as told:
        read_manifest(manifest_of(tmp_path, GIVEN, line))
    assert allowed in told.value.next_step


def test_a_manifest_may_begin_as_some_editors_begin_a_file(tmp_path: Path) -> None:
    assert len(read_manifest(manifest_of(tmp_path, "\ufeff" + GIVEN, GIVEN))) == 2


def test_whole_numbers_may_be_written_with_a_point(tmp_path: Path) -> None:
    fields = '{"width": 96.0, "steps": 6.0, "seed": 7.0, "fps": 23.976, "guidance_scale": 3}'
    (clip,) = read_manifest(manifest_of(tmp_path, f'{{"video": "a", "request": {fields}}}'))
    asked = clip.request
    assert [asked[name] for name in ("width", "steps", "seed", "noise_seed")] == [96, 6, 7, 7]
    assert all(type(asked[name]) is int for name in ("width", "steps", "seed", "noise_seed"))
    assert (asked["fps"], asked["guidance_scale"], clip.line) == (23.976, 3, 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "no JSON object"), ("[]", "no JSON object"), ("{", "no JSON object"),
     ("[" * 100_000, "no JSON object"), ('{"sigmas": [NaN]}', "no JSON object"),
     ('{"colour": 1}', "unknown fields: colour"), ('{"sampler": 3}', "sampler is a number"),
     ('{"name": []}', "name is a list"),
     ('{"sigmas": [true]}', "sigmas is no list of numbers"), ('{"sigmas": "1"}', "no list"),
     ('{"sigmas": []}', "no list"), ('{"sigmas": [1e999]}', "no JSON object"),
     ('{"sigmas": [0.5, 1.0]}', "sigmas do not fall"), ('{"sigmas": [1.5, 0.5]}', "do not fall"),
     ('{"sigmas": [0]}', "sigmas do not fall"), ('{"sigmas": [1, 0.5, 0.5, 0]}', "do not fall"),
     ('{"sigmas": [1, -0.5]}', "sigmas do not fall"),
     ('{"call": []}', "call is no object"), ('{"call": {"x": {}}}', "call holds an object"),
     ('{"max_sequence_length": "x"}', "max_sequence_length is a text"),
     ('{"max_sequence_length": 0}', "max_sequence_length is 0"),
     ('{"max_sequence_length": true}', "max_sequence_length is true"),
     ('{"max_sequence_length": 1.5}', "max_sequence_length is 1.5"),
     ('{"latents": []}', "latents do not name"), ('{"latents": {}}', "latents do not name"),
     ('{"latents": {"audio": [1, 2, 3, 4]}}', "latents do not name"),
     ('{"latents": {"video": [1, 2, 3, 4, 5], "depth": [1]}}', "latents do not name"),
     ('{"latents": {"video": 3}}', "latents of video"),
     ('{"latents": {"video": [1, 2, 3]}}', "latents of video are no shape of it"),
     ('{"latents": {"video": [2, 4, 2, 2, 3]}}', "latents of video"),
     ('{"latents": {"video": [1, 4, 2, 2, 0]}}', "latents of video"),
     ('{"latents": {"video": [1, 4, 2, 2, 3], "audio": [1, 2, 3]}}', "latents of audio")],
)  # fmt: skip
def test_a_recipe_that_nothing_could_follow_is_refused_by_its_field(
    tmp_path: Path, content: str, said: str
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(OpError, match=said) as told:
        read_recipe(path)
    assert told.value.next_step


def test_a_recipe_may_leave_its_fields_empty(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    fields = {"sampler": None, "sigmas": None, "call": None, "latents": None, "revision": None,
              "max_sequence_length": None}  # fmt: skip
    path.write_text(json.dumps(fields), encoding="utf-8")
    recipe = read_recipe(path)
    assert (recipe.fields, recipe.sampler, recipe.sigmas) == (fields, "euler", None)


@pytest.mark.parametrize(
    ("levels", "fits"),
    [([1.0], False), ([1.0, 0.0], False), ([1 - n / 6 for n in range(6)], True),
     ([1 - n / 6 for n in range(7)], True), ([1 - n / 8 for n in range(7)], False)],
)  # fmt: skip
def test_a_recipes_levels_must_be_those_of_the_requests_steps(
    tmp_path: Path, levels: list[float], fits: bool
) -> None:
    if fits:
        assert rules.level_count_slip(levels, 6) is None
        return
    _, line = clips.write_clip(tmp_path)
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"sigmas": levels}), encoding="utf-8")
    with pytest.raises(OpError, match="line 1 of the manifest: the recipe's sigmas are the levels"):
        checked(tmp_path, [line], recipe=str(path))
    without = {**line["request"], "steps": None}
    assert checked(tmp_path, [{**line, "request": without}], recipe=str(path)) == "schedule"


def checked(folder: Path, lines: list[dict[str, Any]], **more: Any) -> Any:
    arguments = {"manifest": str(clips.write_manifest(folder, lines)),
                 "dumps": str(folder / "dumps"), **more}  # fmt: skip
    return run_here(folder / "home", "clip_steps", **arguments).get("data", "verdict")


@pytest.mark.parametrize("field", rules.REPLAYED)
def test_a_reference_is_not_run_for_a_request_without_what_it_needs(
    tmp_path: Path, field: str
) -> None:
    _, line = clips.write_clip(tmp_path)
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    asked = {name: value for name, value in line["request"].items() if name != field}
    with pytest.raises(OpError, match=f"line 2 of the manifest: the request names no {field}"):
        checked(tmp_path, [line, {**line, "request": asked}], reference=str(tmp_path))
    assert checked(tmp_path, [{**line, "request": asked}]) == "inconclusive"


def test_a_device_without_a_reference_is_refused_and_not_ignored(tmp_path: Path) -> None:
    _, line = clips.write_clip(tmp_path)
    with pytest.raises(OpError, match="device needs a reference"):
        checked(tmp_path, [line], device="foo")


@contextmanager
def taken() -> Iterator[None]:
    """The devices of this machine, held by somebody else."""
    held = lock.acquire(devices.uuids_of("auto"), timeout=60, holder={"operation": "test"})
    try:
        yield
    finally:
        held.release()


@pytest.mark.parametrize("wrong", ["reference", "recipe", "manifest", "dumps"])
def test_a_mistyped_path_is_refused_before_the_device_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("IKIT_LOCK_DIR", str(tmp_path / "locks"))
    _, line = clips.write_clip(tmp_path)
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    arguments = {
        "manifest": str(clips.write_manifest(tmp_path, [line])), "dumps": str(tmp_path / "dumps"),
        "reference": str(tmp_path), "recipe": None, wrong: "/nowhere",
    }  # fmt: skip
    registry = Registry()
    for op in operations_in(module):
        registry.add(op)
    runner = Runner(registry, Settings(tmp_path / "home"))
    request = runner.check("clip_steps", {k: v for k, v in arguments.items() if v is not None})
    waited: list[Any] = []
    never = threading.Event()
    with taken(), pytest.raises(OpError, match="nowhere"):
        runner.here(request, Control(report=waited.append, cancel=never))
    assert waited == []


def test_a_pipe_in_the_recipes_place_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OpError, match="no regular file"):
        read_recipe(tmp_path / "pipe")
