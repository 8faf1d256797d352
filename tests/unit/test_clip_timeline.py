"""Every moment of a request belongs to one stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ikit_ops.clips.engine.timeline import Timeline


def clock(*seconds: float) -> Iterator[float]:
    yield from seconds


def test_a_stage_lasts_until_the_next_begins() -> None:
    line = Timeline("receive", clock(0.0, 0.5, 2.0, 2.25).__next__)
    assert line.enter("queue") == "receive"
    assert line.enter("denoise") == "queue"
    line.enter("answer")
    assert line.spent == {"receive": 500.0, "queue": 1500.0, "denoise": 250.0}
    assert line.total() == 2250.0


def test_a_stage_inside_another_is_counted_once() -> None:
    line = Timeline("denoise", clock(0, 1, 3, 4).__next__)
    told = line.wrapped("step_dump", lambda x: x + 1)
    assert told(1) == 2
    line.enter("mux")
    assert line.spent == {"denoise": 2000.0, "step_dump": 2000.0}


def test_what_fails_inside_a_stage_is_still_counted_to_it() -> None:
    line = Timeline("denoise", clock(0, 1, 3, 4).__next__)
    with pytest.raises(ValueError, match="lost"), line.during("step_dump"):
        raise ValueError("lost")
    assert line.enter("answer") == "denoise"
    assert line.spent == {"denoise": 2000.0, "step_dump": 2000.0}


def test_the_device_is_settled_before_the_clock_is_read() -> None:
    now = [0.0]
    line = Timeline("denoise", lambda: now[0])

    def settle() -> None:
        now[0] += 7.0  # the device was still at work for the stage that is left

    line.settle = settle
    line.enter("decode_video")
    assert line.spent == {"denoise": 7000.0}
