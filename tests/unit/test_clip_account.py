"""What a clip server says of itself: its units, and what of it can be."""

from __future__ import annotations

import json
from email.message import Message
from typing import Any

import pytest

from ikit_ops.clips.account import Answer, stage_name, take_headers, take_job


def told(*, ours: bool = False, latency: float = 1.0, **headers: Any) -> Answer:
    answer = Answer(0, latency_s=latency, sha256="ab" * 32)
    message = Message()
    for name, value in headers.items():
        text = value if isinstance(value, str) else json.dumps(value)
        message["X-" + name.replace("_", "-")] = text
    take_headers(answer, message, ours)
    return answer


def test_stages_of_other_servers_are_seconds_and_ours_milliseconds() -> None:
    stages = {"WanPipeline.diffuse": 0.175, "WanPipeline.vae.decode": 0.05, "mux_ms": 3}
    answer = told(Inference_Time_S="0.25", Stage_Durations=stages)
    assert answer.stages_ms == pytest.approx({"denoise": 175.0, "vae_decode": 50.0, "mux": 3.0})
    ours = told(Server_Time_S="0.25", Stage_Durations={"denoise": 175, "mux": 3})
    assert ours.stages_ms == {"denoise": 175.0, "mux": 3.0}
    assert told(ours=True, Stage_Durations={"denoise": 175}).stages_ms == {"denoise": 175.0}


def test_memory_is_in_mib_but_ours_in_mb() -> None:
    assert told(Peak_Memory_MB="4096.5").peak_bytes == round(4096.5 * 2**20)
    assert told(ours=True, Peak_Memory_MB="12.5").peak_bytes == 12_500_000


@pytest.mark.parametrize("text", ["0.0", "0", "{}", "", "-5", "nan", "inf", "1e308", "x"])
def test_memory_that_nobody_looked_at_or_can_be_is_unknown(text: str) -> None:
    assert told(Peak_Memory_MB=text).peak_bytes is None


def test_stages_that_lie_inside_of_each_other_have_no_share() -> None:
    stages = {"P.forward": 0.9, "P.diffuse": 0.8}
    assert told(Inference_Time_S="1", Stage_Durations=stages).stage_share() is None
    ours = told(Server_Time_S="1", Stage_Durations={"denoise": 900, "other": 100})
    assert ours.stage_share() == pytest.approx(0.9)


def test_our_stages_are_added_up_and_those_of_others_held_one_by_one() -> None:
    others = told(Inference_Time_S="1", Stage_Durations={"P.forward": 0.9, "P.diffuse": 0.8})
    assert len(others.stages_ms) == 2
    ours = told(Server_Time_S="1", Stage_Durations={"a": 900, "b": 800})
    assert ours.stages_ms == {}
    assert ours.doubts == {"stages": "stages of 1.7 s do not fit into 1 s"}


def test_milliseconds_that_are_taken_for_seconds_do_not_fit_and_are_unknown() -> None:
    answer = told(Inference_Time_S="0.25", Stage_Durations={"WanPipeline.diffuse": 175.0})
    assert answer.stages_ms == {}
    assert "stages of 175 s do not fit into 0.25 s" in answer.doubts["stages"]
    assert told(Stage_Durations={"diffuse": 2.0}).stages_ms == {}  # longer than the answer took


def test_a_server_cannot_have_worked_longer_than_its_answer_took() -> None:
    answer = told(latency=0.055, Inference_Time_S="500")
    assert answer.server_time_s is None
    assert "the server tells 500 s for an answer that took 0.055 s" in answer.doubts["server time"]
    assert told(latency=0.2504, Inference_Time_S="0.251").server_time_s == 0.251  # rounded up
    assert told(Inference_Time_S="0").server_time_s is None


@pytest.mark.parametrize(
    "stages",
    ["{", "[]", "3", "[" * 9000, {"denoise": "x"}, {"denoise": "3"}, {"denoise": -1},
     {"denoise": True}, '{"denoise": NaN}', '{"denoise": Infinity}', {"denoise": 1e308},
     {"": 0.1}, {"…": 0.1}, {"denoise": None}, {"denoise": [1]}],
)  # fmt: skip
def test_stages_that_are_no_numbers_or_have_no_name_are_left_out(stages: Any) -> None:
    text = stages if isinstance(stages, str) else json.dumps(stages)
    assert told(Stage_Durations=text).stages_ms == {}


def test_names_of_stages_are_of_our_own_alphabet() -> None:
    assert (
        stage_name("a b\u202e\0ignore previous instructions") == "a_b_ignore_previous_instructions"
    )
    assert stage_name("x" * 500) == "x" * 40
    assert stage_name("é.é/../") == ""
    assert stage_name("WanPipeline.text_encoder.forward") == "text_encoder_forward"
    assert stage_name("Other.diffuse") == "denoise"
    assert stage_name("decode_ms") == "decode"
    both = told(Stage_Durations={"a b": 0.1, "a_b": 0.2})
    assert both.stages_ms == {"a_b": 100.0}


def test_steps_are_taken_from_our_server_alone_and_only_when_they_fit() -> None:
    assert told(ours=True, Step_Durations=[1.0, 2.0, "x", -1]).steps_ms == [1.0, 2.0]
    assert told(Step_Durations=[1.0]).steps_ms == []
    assert told(ours=True, Step_Durations=[900.0, 900.0]).steps_ms == []


def test_a_named_hash_may_be_written_in_capitals_but_must_be_right() -> None:
    assert told(Video_Sha256=("AB" * 32)).error is None
    assert "sha256 is not the one" in (told(Video_Sha256="0" * 64).error or "")


def test_the_model_is_one_line_and_none_where_there_is_none() -> None:
    assert told(Model="Wan-AI/Wan2.2").model == "Wan-AI/Wan2.2"
    assert told(Model=" ").model is None


def test_the_record_of_a_job_is_read_like_the_headers_less_its_model() -> None:
    answer = Answer(0, latency_s=1.0)
    take_job(answer, {"inference_time_s": 0.9, "peak_memory_mb": 2048.0, "model": "sora-2",
                      "stage_durations": {"P.diffuse": 0.8}})  # fmt: skip
    assert (answer.server_time_s, answer.peak_bytes) == (0.9, 2 << 30)
    assert answer.stages_ms == {"denoise": 800.0} and answer.model is None
    take_job(answer, {"inference_time_s": None, "peak_memory_mb": [], "stage_durations": 3})
    assert (answer.server_time_s, answer.peak_bytes, answer.stages_ms) == (None, None, {})
