"""Lanes to a server: side by side, and over when the time is up or somebody cancels."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.rough_server import Drip, answering, reply, sending
from ikit_mcp.call import Call, Cancelled, Settings
from ikit_mcp.registry import MEASURES, OpError, Registry, operations_in
from ikit_ops import clip_bench
from ikit_ops.clips import driving
from ikit_ops.clips.client import Line, Server, read_told
from ikit_ops.clips.driving import Lanes


@pytest.fixture
def call(tmp_path: Path) -> Call:
    registry = Registry()
    (op,) = operations_in(clip_bench)
    registry.add(op)
    return Call(operation=registry.get("bench_clips"), args={}, settings=Settings(tmp_path),
                scope=MEASURES)  # fmt: skip


@pytest.fixture
def url() -> Iterator[str]:
    with answering(sending(reply(b"{}"))) as running:
        yield running


def lanes(call: Call, url: str, timeout: float = 30.0) -> Lanes:
    return Lanes(call, Server.of(url), timeout)


def read(line: Line) -> bytes:
    with line.request("POST", "/", b"") as response:
        return read_told(response)


def test_works_are_done_in_order_and_told(call: Call, url: str) -> None:
    told: list[int] = []
    works = [functools.partial(lambda number, line: number, n) for n in range(5)]
    made = lanes(call, url).run(works, 2, told.append)
    assert made == [0, 1, 2, 3, 4]
    assert told[-1] == 5 and told == sorted(told)


def test_no_more_lanes_than_asked_for_are_open(call: Call, url: str) -> None:
    now, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def work(line: Line) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        both.wait(20)
        with lock:
            now -= 1

    lanes(call, url).run([work] * 6, 2)
    assert most == 2


def test_what_a_work_raises_ends_the_others_and_comes_out(call: Call, url: str) -> None:
    drip = Drip(b"HTTP/1.1 200 OK\r\n\r\n")

    def fail(line: Line) -> bytes:
        drip.begun.wait(20)
        raise OpError("the disk is full")

    with answering(drip) as endless, pytest.raises(OpError, match="the disk is full"):
        lanes(call, endless).run([read, fail, read], 2)
    assert drip.gone.wait(20)


def test_what_is_not_done_in_time_is_none_and_its_connection_is_cut(call: Call) -> None:
    drip = Drip(b"HTTP/1.1 200 OK\r\n\r\n")
    with answering(drip) as endless:
        many = lanes(call, endless, timeout=0.5)
        with pytest.raises(ConnectionAbortedError):  # a read that was cut is no short answer
            many.run([read, read])
        assert many.left() == 0
        assert drip.gone.wait(20)


def test_a_part_of_the_time_may_be_given_to_some_works(call: Call, url: str) -> None:
    never = threading.Event()
    try:
        many = lanes(call, url)
        assert many.run([lambda line: never.wait(60), lambda line: True], seconds=0.2) == [
            None, None,
        ]  # fmt: skip
        assert many.left() > 20
    finally:
        never.set()


def test_a_cancelled_call_leaves_a_lane_that_hangs_behind(call: Call, url: str) -> None:
    never, begun = threading.Event(), threading.Event()

    def hang(line: Line) -> None:
        begun.set()
        never.wait(60)

    def cancel() -> None:
        begun.wait(20)
        call.cancel.set()

    threading.Thread(target=cancel, daemon=True).start()
    try:
        with pytest.raises(Cancelled):
            lanes(call, url).run([hang])
    finally:
        never.set()


def test_a_lane_that_comes_late_finds_its_line_cut(call: Call, url: str) -> None:
    batch = driving._Batch(Server.of(url), [lambda line: line.is_cut], time.monotonic() + 30)
    batch._stopped = _Late()  # stopped between the question and the line
    batch.lane()
    assert batch.made == [True]


class _Late(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > 1
