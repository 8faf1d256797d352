"""What the clip server is asked: both dialects, and everything that is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ikit_ops.clips import client
from ikit_ops.clips.engine import asked

GIVEN = {"prompt": "kite", "width": 64, "height": 64, "num_frames": 9, "fps": 24, "steps": 4,
         "guidance_scale": 3.0, "seed": 1}  # fmt: skip


def sizes(request: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [("width", request["width"], 64)] if request["width"] % 32 else []


def checked(sound: bool = False, **changed: Any) -> dict[str, Any]:
    return asked.check(asked.from_clips({**GIVEN, **changed}), sound, sizes, asked.Limits())


def test_a_whole_request_is_taken_and_completed() -> None:
    made = checked()
    assert made["noise_seed"] == 1
    assert (made["task"], made["audio"]) == ("t2v", False)
    assert checked(sound=True)["task"] == "t2av"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"colour": "red"}, "colour"), ({"prompt": None}, "prompt"), ({"seed": None}, "seed"),
        ({"width": "64"}, "width"), ({"width": 64.0}, "width"), ({"steps": True}, "steps"),
        ({"seed": -1}, "seed"), ({"noise_seed": 2**63}, "noise_seed"), ({"fps": 0}, "fps"),
        ({"fps": float("nan")}, "fps"), ({"guidance_scale": "3"}, "guidance_scale"),
        ({"guidance_scale": -1}, "guidance_scale"), ({"prompt": 3}, "prompt"),
        ({"prompt": "x" * 20_001}, "prompt"), ({"steps": 0}, "steps"), ({"steps": 201}, "steps"),
        ({"width": 65}, "width"), ({"audio": True}, "audio"), ({"num_frames": 10**9}, "num_frames"),
        ({"fps": 121}, "fps"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_by_its_field(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(asked.Refused) as caught:
        checked(**changed)
    assert caught.value.status == 422
    assert caught.value.told["field"] == field


@pytest.mark.parametrize(("changed", "nearest"), [({"width": 65}, 64), ({"steps": 500}, 200)])
def test_the_nearest_value_is_named(changed: dict[str, Any], nearest: int) -> None:
    with pytest.raises(asked.Refused) as caught:
        checked(**changed)
    assert caught.value.told["nearest"] == nearest


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(asked.Refused) as caught:
        asked.parse_json(body)
    assert caught.value.status == 400


def test_the_form_of_other_servers_means_the_same() -> None:
    request = asked.from_clips(GIVEN)
    body, kind = client.body_of(request, "videos")
    made = asked.from_videos(asked.parse_form(body, kind))
    names = ("prompt", "width", "height", "num_frames", "fps", "steps", "guidance_scale")
    assert {name: made[name] for name in names} == {name: request[name] for name in names}
    assert made["noise_seed"] == 1
    again = asked.from_videos({"prompt": "kite", "seconds": "2", "fps": 12, "generate_sound": True})
    assert (again["num_frames"], again["audio"], again["steps"]) == (25, True, 30)


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "a", "size": "64"}, {"prompt": "a", "size": "axb"}, {"prompt": "a", "n": 1},
     {"prompt": "a", "num_frames": "many"}, {"prompt": "a", "seconds": "x"}],
)  # fmt: skip
def test_a_form_that_says_nothing_usable_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(asked.Refused) as caught:
        asked.from_videos(fields)
    assert caught.value.status == 422


def test_forms_with_files_or_repeated_fields_are_refused() -> None:
    part = 'Content-Disposition: form-data; name="{}"{}\r\n\r\nx\r\n'
    for parts in ([("a", ""), ("a", "")], [("a", '; filename="f"')]):
        text = "".join("--m\r\n" + part.format(*each) for each in parts) + "--m--\r\n"
        with pytest.raises(asked.Refused):
            asked.parse_form(text.encode(), "multipart/form-data; boundary=m")
    with pytest.raises(asked.Refused):
        asked.parse_form(b"no form", "text/plain")
    assert json.loads(json.dumps(asked.Refused(422, field="a").told)) == {"field": "a"}
