"""What the clip server is asked: both dialects, and everything that is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_ops.clips.engine import asked
from ikit_ops.clips.engine.asked import Able, Limits
from ikit_ops.clips.engine.bodies import Refused
from ikit_ops.clips.recorder import REQUEST_FIELDS

GIVEN = {"prompt": "kite", "width": 64, "height": 64, "num_frames": 9, "fps": 24, "steps": 4,
         "guidance_scale": 3.0, "seed": 1}  # fmt: skip
HUGE = int("1" + "0" * 400)


def video(request: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    frames = (request["num_frames"] - 1) // 8 + 1
    return {"video": (1, 4, frames, request["height"] // 32, request["width"] // 32)}


def sound(request: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    length = round(request["num_frames"] / request["fps"] * 25)
    return {**video(request), "audio": (1, 2, length, 2)}


SILENT, LOUD = Able(video), Able(sound, audio=True)


def checked(able: Able = SILENT, limits: Limits = Limits(), **changed: Any) -> dict[str, Any]:  # noqa: B008 -- it is frozen
    return asked.check(asked.from_clips({**GIVEN, **changed}).request, able, limits)


def refusal(able: Able = SILENT, **changed: Any) -> dict[str, Any]:
    with pytest.raises(Refused) as caught:
        checked(able, **changed)
    assert caught.value.status == 422
    return caught.value.told


def test_a_whole_request_is_taken_and_completed() -> None:
    made = checked()
    assert tuple(made) == REQUEST_FIELDS
    assert made["noise_seed"] == 1
    assert (made["task"], made["audio"]) == ("t2v", False)
    loud = checked(LOUD, task="t2av", audio=True, noise_seed=0)
    assert (loud["task"], loud["audio"], loud["noise_seed"]) == ("t2av", True, 0)


@pytest.mark.parametrize("value", [1, 120, 29.97, 23.976])
def test_every_rate_in_its_range_is_taken_as_it_is(value: float) -> None:
    assert checked(fps=value)["fps"] == value


@pytest.mark.parametrize("name", ["width", "height", "num_frames", "steps", "seed", "noise_seed"])
@pytest.mark.parametrize("value", ["64", 64.0, True, [64], {}, float("nan")])
def test_what_is_no_whole_number_is_refused_by_its_field(name: str, value: Any) -> None:
    assert refusal(**{name: value})["field"] == name


@pytest.mark.parametrize("name", ["fps", "guidance_scale"])
@pytest.mark.parametrize("value", ["3", True, [3], {}, float("nan"), float("inf")])
def test_what_is_no_number_is_refused_by_its_field(name: str, value: Any) -> None:
    assert refusal(**{name: value})["field"] == name


@pytest.mark.parametrize(
    ("changed", "field", "nearest"),
    [
        ({"width": 65}, "width", 64), ({"width": 0}, "width", 32), ({"width": -64}, "width", 32),
        ({"width": 79}, "width", 64), ({"width": 81}, "width", 96),
        ({"width": HUGE}, "width", 4096), ({"height": HUGE}, "height", 4096),
        ({"height": 4100}, "height", 4096),
        ({"num_frames": 10}, "num_frames", 9), ({"num_frames": 14}, "num_frames", 17),
        ({"num_frames": 0}, "num_frames", 1), ({"num_frames": -9}, "num_frames", 1),
        ({"num_frames": HUGE}, "num_frames", 8185), ({"num_frames": 8192}, "num_frames", 8185),
        ({"steps": 0}, "steps", 1), ({"steps": 201}, "steps", 200), ({"steps": HUGE}, "steps", 200),
        ({"fps": 0}, "fps", 1), ({"fps": 1e-4}, "fps", 1), ({"fps": 121}, "fps", 120),
        ({"fps": HUGE}, "fps", 120), ({"guidance_scale": 0}, "guidance_scale", 1),
        ({"guidance_scale": -1}, "guidance_scale", 1),
        ({"guidance_scale": HUGE}, "guidance_scale", 100), ({"seed": -1}, "seed", 0),
        ({"noise_seed": HUGE}, "noise_seed", 2**63 - 1), ({"audio": True}, "audio", False),
        ({"audio": 0}, "audio", False), ({"task": "i2v"}, "task", "t2v"),
        ({"task": 5}, "task", "t2v"), ({"task": {"a": [1]}}, "task", "t2v"),
        ({"task": "t2av"}, "task", "t2v"),
    ],
)  # fmt: skip
def test_the_nearest_value_that_can_be_made_is_named(
    changed: dict[str, Any], field: str, nearest: Any
) -> None:
    told = refusal(**changed)
    assert (told["field"], told["nearest"]) == (field, nearest)
    assert checked(**{field: nearest})[field] == nearest


def test_a_guidance_below_one_is_served_and_its_range_is_told_rightly() -> None:
    assert checked(guidance_scale=0.5)["guidance_scale"] == 0.5
    assert refusal(guidance_scale=101)["error"] == "guidance_scale is not above 0 and at most 100"


@pytest.mark.parametrize("prompt", [3, ["x"], "x" * 20_001, "a\ud800", "\udfff"])
def test_a_prompt_that_is_no_text_is_refused(prompt: Any) -> None:
    assert refusal(prompt=prompt)["field"] == "prompt"
    with pytest.raises(Refused) as caught:
        asked.from_videos({"prompt": "a", "negative_prompt": prompt})
    assert caught.value.told["field"] == "negative_prompt"


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"colour": "red"}, "colour"), ({"prompt": None}, "prompt"), ({"seed": None}, "seed"),
     ({"negative_prompt": "no"}, "negative_prompt")],
)  # fmt: skip
def test_unknown_and_missing_fields_are_refused_by_their_names(
    changed: dict[str, Any], field: str
) -> None:
    with pytest.raises(Refused) as caught:
        asked.from_clips({**GIVEN, **changed})
    assert (caught.value.status, caught.value.told["field"]) == (422, field)


def test_a_clip_without_a_single_audio_latent_is_refused_with_the_shortest_that_has_one() -> None:
    told = refusal(LOUD, num_frames=1, fps=120)
    assert (told["field"], told["nearest"]) == ("num_frames", 9)
    assert checked(LOUD, num_frames=9, fps=120)["num_frames"] == 9


def test_audio_that_would_be_longer_than_the_server_takes_is_refused() -> None:
    told = refusal(LOUD, fps=1, num_frames=7993)
    assert (told["field"], told["nearest"]) == ("num_frames", 161)
    assert checked(LOUD, fps=1, num_frames=161)["num_frames"] == 161
    assert refusal(LOUD, fps=1, num_frames=169)["nearest"] == 161


@pytest.mark.parametrize("limits", [Limits(pixels=64 * 64 * 20), Limits(latents=4 * 4 * 3)])
def test_a_clip_that_is_too_large_is_answered_with_the_longest_that_is_not(limits: Limits) -> None:
    with pytest.raises(Refused) as caught:
        checked(limits=limits, num_frames=33)
    assert caught.value.told["nearest"] == 17
    assert checked(limits=limits, num_frames=17)["num_frames"] == 17


def test_nothing_is_proposed_where_not_even_one_frame_fits() -> None:
    with pytest.raises(Refused) as caught:
        checked(limits=Limits(pixels=10))
    assert caught.value.told["nearest"] is None


def test_a_model_of_larger_patches_takes_other_sizes() -> None:
    able = Able(video, width=48, height=32, group=4, patch_frames=2)
    assert refusal(able, num_frames=5)["nearest"] == 48  # the width, first
    for frames, nearest in ((1, 5), (8, 5), (10, 13), (14, 13)):
        assert refusal(able, width=96, num_frames=frames)["nearest"] == nearest
        assert checked(able, width=96, num_frames=nearest)["num_frames"] == nearest


def test_steps_are_those_of_the_recipes_levels_or_enough_for_a_schedule() -> None:
    assert refusal(Able(video, steps=8))["nearest"] == 8
    assert refusal(Able(video, steps=8), steps=999)["nearest"] == 8
    assert checked(Able(video, steps=8, least_steps=9), steps=8)["steps"] == 8
    assert refusal(Able(video, least_steps=2), steps=1)["nearest"] == 2


def test_latents_that_are_not_the_recipes_are_refused() -> None:
    able = Able(video, latents={"video": [1, 4, 2, 2, 2]})
    assert checked(able)["width"] == 64
    assert refusal(able, width=96)["latents"] == {"video": [1, 4, 2, 2, 2]}


numbers = st.one_of(
    st.integers(), st.integers(1, 5000), st.floats(), st.booleans(), st.none(),
    st.text(max_size=3), st.just(HUGE), st.lists(st.integers(), max_size=1),
)  # fmt: skip


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(REQUEST_FIELDS, numbers)), st.booleans())
def test_any_request_is_refused_or_can_be_made(changed: dict[str, Any], audio: bool) -> None:
    able = LOUD if audio else SILENT
    try:
        made = checked(able, **changed)
    except Refused as refused:
        assert refused.status == 422 and json.dumps(refused.told)
        nearest, field = refused.told.get("nearest"), refused.told.get("field")
        if nearest is not None and field in REQUEST_FIELDS:
            try:
                checked(able, **{**changed, field: nearest})
            except Refused as again:  # another field may be wrong too
                assert again.told["field"] != field or field == "num_frames"
        return
    shapes = able.shapes(made)
    assert min(min(shape) for shape in shapes.values()) > 0
    assert sum(math.prod(shape) for shape in shapes.values()) <= Limits().latents


def test_the_form_of_other_servers_means_the_same() -> None:
    made = asked.from_videos(
        {"prompt": "kite", "size": "64X96", "num_frames": "9", "fps": "24", "seed": "7",
         "num_inference_steps": "4", "guidance_scale": "3.5", "negative_prompt": "grey",
         "model": "m", "user": "me"}
    )  # fmt: skip
    wanted = {**GIVEN, "height": 96, "guidance_scale": 3.5, "seed": 7, "noise_seed": 7,
              "task": None, "audio": None}  # fmt: skip
    assert made == asked.Asked({name: wanted[name] for name in REQUEST_FIELDS}, "grey", "m")


def test_a_seed_and_another_one_for_the_noise_are_both_kept() -> None:
    made = asked.from_videos({"prompt": "a", "seed": "3", "noise_seed": "4"}).request
    assert (made["seed"], made["noise_seed"]) == (3, 4)


def test_what_a_form_leaves_out_takes_the_servers_defaults() -> None:
    made = asked.from_videos(
        {
            "prompt": "",
            "seconds": "2",
            "fps": 12,
            "generate_sound": "Yes",
            "width": "",
            "size": None,
        }
    )
    request = made.request
    assert (request["num_frames"], request["audio"], request["steps"]) == (25, True, 30)
    assert (request["prompt"], request["width"], made.negative_prompt) == ("", 768, None)
    assert asked.from_videos({"prompt": "a", "negative_prompt": ""}).negative_prompt == ""


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"), ({"size": "64"}, "size"), ({"size": 64}, "size"), ({"size": "64x"}, "size"),
        ({"size": "64x64x64"}, "size"), ({"n": 1}, "n"), ({"num_frames": "many"}, "num_frames"),
        ({"num_frames": "²"}, "num_frames"), ({"num_frames": "9" * 400}, "num_frames"),
        ({"fps": "--5"}, "fps"), ({"fps": "1e9999"}, "fps"), ({"seconds": "x"}, "seconds"),
        ({"seconds": "nan"}, "seconds"), ({"seconds": "inf"}, "seconds"),
        ({"seconds": [1]}, "seconds"), ({"seconds": {}}, "seconds"), ({"seconds": -1}, "seconds"),
        ({"seconds": 1e300}, "seconds"), ({"seconds": 1, "fps": [1]}, "fps"),
        ({"seconds": True}, "seconds"), ({"generate_sound": "maybe"}, "generate_sound"),
        ({"model": 3}, "model"),
    ],
)  # fmt: skip
def test_a_form_that_says_nothing_usable_is_refused(fields: dict[str, Any], field: str) -> None:
    given = {"prompt": "a", **fields} if fields else {}
    with pytest.raises(Refused) as caught:
        asked.from_videos(given)
    assert (caught.value.status, caught.value.told["field"]) == (422, field)
