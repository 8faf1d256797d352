"""bench_clips as an agent sees it: it ends when it is cancelled, and the device is free again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import clips_server, rough_server
from helpers.stdio import Wire


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A server with locks of its own: a neighbour who measures need not be waited for."""
    with Wire(tmp_path / "home", env={"IKIT_LOCK_DIR": str(tmp_path / "locks")}) as running:
        running.initialize()
        yield running


def benchmark(wire: Wire, folder: Path, url: str, **more: Any) -> Any:
    return wire.structured("bench_clips", url=url, out=str(folder), count=1, **more)


DRIPS = {
    "body": rough_server.reply(rough_server.FTYP, "Content-Type: video/mp4", length=10**6),
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n",
}


@pytest.mark.parametrize("where", ["body", "continue", "health"])
def test_a_benchmark_of_a_server_that_never_ends_is_cancelled_and_frees_the_device(
    wire: Wire, tmp_path: Path, where: str
) -> None:
    health = where == "health"
    first = DRIPS.get(where, b"HTTP/1.1 200 OK\r\n\r\n{")
    drip = rough_server.Drip(first, first if where == "continue" else b"0")
    good = rough_server.sending(b"")
    out = tmp_path / "out"
    with rough_server.answering(good if health else drip, drip if health else None) as url:
        job = benchmark(wire, out, url, wait_seconds=0)
        assert job["status"] == "running"
        assert drip.begun.wait(60)
        assert wire.structured("cancel_job", job_id=job["job_id"])["status"] == "cancelled"
        assert drip.gone.wait(60)
    assert not out.exists()
    with clips_server.serving() as (good_url, clips):
        clips.seconds = 0.02
        assert benchmark(wire, out, good_url)["status"] == "done"  # the same folder, the same lock


def test_a_notice_of_cancellation_ends_it_too(wire: Wire, tmp_path: Path) -> None:
    drip = rough_server.Drip(DRIPS["body"], b"0")
    with rough_server.answering(drip) as url:
        arguments = {"url": url, "out": str(tmp_path / "out")}
        call = wire.ask("tools/call", {"name": "bench_clips", "arguments": arguments})
        assert drip.begun.wait(60)
        wire.notify("notifications/cancelled", {"requestId": call.id, "reason": "enough"})
        assert drip.gone.wait(60)
    end = time.monotonic() + 60
    while wire.structured("job_status")["jobs"][0]["status"] != "cancelled":
        assert time.monotonic() < end, "it was not cancelled"


def test_the_time_that_was_given_is_all_that_it_takes(wire: Wire, tmp_path: Path) -> None:
    drip = rough_server.Drip(DRIPS["body"], b"0")
    with rough_server.answering(drip) as url:
        arguments = {"url": url, "out": str(tmp_path / "out"), "timeout": 1}
        result = wire.call("bench_clips", **arguments)
        assert drip.gone.is_set() or drip.gone.wait(60)
    assert result["isError"]
    assert "no whole answer when the time was up" in result["content"][0]["text"]
