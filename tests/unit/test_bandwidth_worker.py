"""The CPU's worker: it reads all that it says it read, and a copy is a copy."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ikit_ops.measure.workers import cpu_bandwidth_worker as worker

PAGE = 1 << 16


def plan(**changed: Any) -> dict[str, Any]:
    """Two threads, two draws, a tenth of a second."""
    phases = [{"kind": "read", "seconds": 0.02}, {"kind": "copy", "seconds": 0.02}]
    given: dict[str, Any] = {
        "threads": [[], []], "slice_bytes": 16 * PAGE, "chunk_bytes": 5 * PAGE,
        "draws": [{"pages": "huge", "phases": phases}, {"pages": "default", "phases": phases}],
        "stamp_seconds": 0.001,
    }  # fmt: skip
    return {**given, **changed}


def test_the_buffers_are_equal_and_hold_no_two_equal_pages() -> None:
    part = worker.Slice(64 * PAGE, PAGE)
    pages = {part.first[start : start + 4096] for start in range(0, 64 * PAGE, 4096)}
    assert part.equal() and len(pages) == 64 * PAGE // 4096


@pytest.mark.parametrize("place", [0, 1, 12345, 16 * PAGE - 1])
def test_a_changed_byte_anywhere_in_a_chunk_is_seen_by_reading(place: int) -> None:
    part = worker.Slice(16 * PAGE, 16 * PAGE)
    part.first[place] ^= 1
    part.read_step()
    assert part.differences == 1
    assert not part.notices_a_change()


def test_reading_goes_over_every_chunk_and_starts_again() -> None:
    part = worker.Slice(16 * PAGE, 5 * PAGE)
    steps = [part.read_step() for _ in range(5)]
    assert steps == [10 * PAGE, 10 * PAGE, 10 * PAGE, 2 * PAGE, 10 * PAGE]
    assert part.differences == 0 and part.offset == 5 * PAGE


def test_a_copy_carries_the_change_that_it_was_given() -> None:
    part = worker.Slice(16 * PAGE, 5 * PAGE)
    before = part.first[0]
    times, moved = part.run("copy", 1e-9, 0.0)
    assert part.first[0] == before ^ 1 and part.equal()
    assert moved == [0, 10 * PAGE] and times[1] > times[0]


def test_a_copy_that_does_nothing_is_found_out() -> None:
    part = worker.Slice(16 * PAGE, 5 * PAGE)
    part._move = lambda *_: 0
    part.run("copy", 1e-9, 0.0)
    assert not part.notices_a_change()


def test_a_comparison_that_does_nothing_is_found_out() -> None:
    part = worker.Slice(16 * PAGE, 5 * PAGE)
    part._compare = lambda *_: 0
    assert not part.notices_a_change()


def test_a_crew_brings_stamps_of_every_thread_and_phase_home(tmp_path: Path) -> None:
    asked, answer = tmp_path / "plan.json", tmp_path / "result.json"
    asked.write_text(json.dumps(plan()), encoding="utf-8")
    assert worker.main([str(asked), str(answer)]) == 0
    told = json.loads(answer.read_text(encoding="utf-8"))
    assert told["verified"] is True and told["differences"] == 0
    assert [p["kind"] for p in told["phases"]] == ["read", "copy"] * 2
    for phase in told["phases"]:
        assert len(phase["threads"]) == 2
        for thread in phase["threads"]:
            times, moved = thread["times"], thread["bytes"]
            assert times == sorted(times) and moved == sorted(moved)
            assert moved[0] == 0 and moved[-1] > 0 and len(times) == len(moved)


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_threads_stay_where_they_were_put(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda who, cpus: put.append((who, cpus)))
    assert worker.Crew(plan(threads=[[0], []])).run()["verified"] is True
    assert put == [(0, [0])]


def test_memory_that_is_not_there_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    asked, answer = tmp_path / "plan.json", tmp_path / "result.json"
    asked.write_text(json.dumps(plan(slice_bytes=1 << 60)), encoding="utf-8")
    assert worker.main([str(asked), str(answer)]) == 1
    told = json.loads(answer.read_text(encoding="utf-8"))
    assert "Error" in told["error"] and "phases" not in told


def test_one_thread_that_fails_ends_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker.Slice.__init__
    made: list[int] = []

    def second_fails(self: worker.Slice, size: int, chunk: int, pages: str = "default") -> None:
        made.append(size)
        if len(made) == 2:
            raise MemoryError("made up")
        real(self, size, chunk, pages)

    monkeypatch.setattr(worker.Slice, "__init__", second_fails)
    assert worker.Crew(plan()).run() == {"error": "MemoryError: made up"}


def test_a_system_without_more_threads_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    real = threading.Thread.start
    started: list[threading.Thread] = []

    def second_refused(self: threading.Thread) -> None:
        started.append(self)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", second_refused)
    assert worker.Crew(plan()).run() == {"error": "can't start new thread"}


def test_the_c_library_compares_as_bytes_and_gives_lengths_whole() -> None:
    compare, move = worker.c_library()
    left, right = ctypes.create_string_buffer(b"\xffab"), ctypes.create_string_buffer(b"\x01ab")
    assert compare(ctypes.addressof(left), ctypes.addressof(right), 3) > 0
    move(ctypes.addressof(left), ctypes.addressof(right), 3)
    assert left.raw == right.raw
