"""What bench_clips asks for: requests that are whole, distinct, and new with every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ikit_mcp.registry import OpError
from ikit_ops.clips.asking import Requests, read_requests, request_problem

SMALL = {"prompt": "kite", "width": 96, "height": 64, "num_frames": 9, "steps": 2}


def read(folder: Path, *lines: Any) -> list[dict[str, Any]]:
    path = folder / "requests.jsonl"
    texts = [each if isinstance(each, (str, bytes)) else json.dumps(each) for each in lines]
    path.write_bytes(b"\n".join(t.encode() if isinstance(t, str) else t for t in texts))
    return read_requests(str(path))


def made(*given: dict[str, Any], count: int, warmup: int = 0, nonce: str = "n") -> Requests:
    return Requests(given, warmup, count, 1, nonce)


def test_what_a_file_says_is_kept_and_the_rest_is_new_and_distinct() -> None:
    requests = made({**SMALL, "seed": 3}, SMALL, count=5, warmup=1)
    timed = requests.timed
    assert [each["prompt"] for each in timed[:2]] == ["kite", "kite"]
    assert timed[0]["seed"] == timed[0]["noise_seed"] == 3
    everything = [*timed, *requests.warmup, requests.fresh(timed[0])]
    assert len({each["noise_seed"] for each in everything}) == len(everything)
    assert len({each["prompt"] for each in everything}) == len(everything) - 1
    assert all(each["prompt"].endswith(" of run n") for each in everything[2:])
    assert timed[0]["fps"] == 24 and timed[0]["guidance_scale"] == 3.0


def test_a_file_of_two_lines_without_seeds_gives_as_many_seeds_as_clips() -> None:
    timed = made(SMALL, {**SMALL, "prompt": "sea"}, count=5).timed
    assert len({each["seed"] for each in timed}) == 5
    assert all(each["seed"] == each["noise_seed"] for each in timed)


def test_a_line_that_is_there_twice_is_asked_for_with_another_prompt_and_seed() -> None:
    line = {**SMALL, "seed": 7}
    timed = made(line, line, {**line, "steps": 4}, count=3).timed
    assert [each["seed"] for each in timed].count(7) == 2  # the third is another clip
    assert timed[1]["prompt"] != "kite" and timed[1]["noise_seed"] != 7


def test_another_run_with_the_same_seed_asks_for_other_clips() -> None:
    one, two = made(count=9, nonce="a"), made(count=9, nonce="b")
    assert {r["prompt"] for r in one.timed}.isdisjoint(r["prompt"] for r in two.timed)
    assert {r["seed"] for r in one.timed}.isdisjoint(r["seed"] for r in two.timed)
    assert one.timed == made(count=9, nonce="a").timed  # the nonce is all that it takes


def test_a_seed_that_a_file_names_is_not_drawn_for_another_line() -> None:
    first = made(SMALL, count=1).timed[0]["seed"]
    timed = made(SMALL, {**SMALL, "seed": first}, count=2).timed
    assert timed[0]["seed"] != first == timed[1]["seed"]


def test_every_size_is_warmed_up_in_the_order_in_which_it_comes() -> None:
    requests = made(SMALL, {**SMALL, "steps": 4}, SMALL, count=3, warmup=3)
    assert [each["steps"] for each in requests.warmup] == [2, 4, 2]


def test_requests_that_share_their_prompt_or_noise_are_counted() -> None:
    given = ({**SMALL, "seed": 1}, {**SMALL, "prompt": "sea", "seed": 1}, {**SMALL, "seed": 2})
    assert made(*given, count=3).alike() == 2
    assert made(count=8).alike() == 0


def test_a_noise_seed_of_its_own_is_kept() -> None:
    (request,) = made({**SMALL, "seed": 1, "noise_seed": 2}, count=1).timed
    assert (request["seed"], request["noise_seed"]) == (1, 2)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": "abc"}, "seed"), ({"fps": 0}, "fps"), ({"fps": 1e-320}, "fps"),
        ({"num_frames": "lots"}, "num_frames"), ({"guidance_scale": float("nan")}, "guidance_sca"),
        ({"guidance_scale": float("inf")}, "guidance_scale"), ({"steps": 0}, "steps"),
        ({"steps": 10_001}, "steps"), ({"width": 64.0}, "width"), ({"height": True}, "height"),
        ({"width": 10**400}, "width"), ({"seed": -1}, "seed"), ({"noise_seed": 2**63}, "noise_s"),
        ({"audio": "yes"}, "audio"), ({"task": 3}, "task"), ({"task": "ü"}, "task"),
        ({"prompt": 3}, "prompt"), ({"prompt": " "}, "prompt"), ({"prompt": "x" * 20_000}, "pro"),
        ({"prompt": "\ud800"}, "prompt has half of a character"), ({"prompt": None}, "prompt"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_is_refused_by_its_name(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(OpError, match=f"line 2 of requests: {named}"):
        read(tmp_path, SMALL, {**SMALL, **changed})


def test_fields_may_be_left_out_or_null() -> None:
    assert request_problem({"prompt": "x", "seed": None, "audio": None, "fps": 23.976}) is None


@pytest.mark.parametrize(
    ("field", "next_step"),
    [("prompts", "it is prompt here"), ("num_frame", "it is num_frames here"),
     ("guidance", "it is guidance_scale here"), ("negative_prompt", "the recipe holds it"),
     ("num_inference_steps", "it is steps here"), ("zzz", "fields: task, prompt, ")],
)  # fmt: skip
def test_a_field_that_nobody_knows_is_refused_with_the_nearest(
    tmp_path: Path, field: str, next_step: str
) -> None:
    with pytest.raises(OpError, match=f"unknown field '{field}'") as caught:
        read(tmp_path, {**SMALL, field: "x"})
    assert next_step in caught.value.next_step


@pytest.mark.parametrize(
    "line", ["{", "[]", '"x"', "[" * 100_000, '{"prompt": "a", "prompt": "b"}']
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(OpError, match="line 2 of requests is no request"):
        read(tmp_path, SMALL, line)


def test_a_file_without_requests_or_of_another_encoding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpError, match="holds no request"):
        read(tmp_path, "", " ")
    with pytest.raises(OpError, match="line 2 of requests is no UTF-8"):
        read(tmp_path, SMALL, '{"prompt": "ü"}'.encode("latin-1"))
    assert read_requests(None) == []


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbf" + json.dumps(SMALL).encode()) == [SMALL]
