"""Long calls over a real pipe: they outlive a reply, end when asked, and lose nothing."""

from __future__ import annotations

import json
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import nvidia_smi
from helpers import plugin
from helpers.stdio import Wire
from ikit_mcp.process import platform

SECONDS = 30.0
SECRET = "made-up-secret-4711-4711"


def until(what: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """Wait for something to become true, with a deadline."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def start(wire: Wire, tool: str, **arguments: Any) -> str:
    """Start a job and do not wait for it; its id."""
    reply = wire.structured(tool, wait_seconds=0, **arguments)
    assert reply["status"] == "running"
    job_id: str = reply["job_id"]
    return job_id


@pytest.fixture
def wire(tmp_path: Path) -> Any:
    """A server with the third-party operations, locks of its own, and two (made-up) GPUs."""
    path = os.pathsep.join([str(nvidia_smi.install(tmp_path / "bin")), os.environ["PATH"]])
    locks = str(tmp_path / "locks")
    env = plugin.environment(IKIT_LOCK_DIR=locks, ACME_API_KEY=SECRET, PATH=path)
    with Wire(tmp_path / "home", env=env) as running:
        running.initialize()
        yield running


def test_a_short_job_replies_with_its_record_at_once(wire: Wire) -> None:
    reply = wire.structured("acme_long", steps=1)
    assert reply["status"] == "done" and reply["valid"] is True
    shown = wire.structured("inspect_evidence", id=reply["evidence_id"])
    assert shown["record"]["provenance"]["job_id"] == reply["job_id"]
    assert reply["data"].keys() == {"start", "end"}


def test_a_job_that_outlives_its_reply_is_waited_for_and_asked_for_again(wire: Wire) -> None:
    job_id = start(wire, "acme_long", steps=30)
    first = wire.structured("job_status", job_id=job_id)
    again = wire.structured("job_status", job_id=job_id)
    assert first["status"] == "done" and first == again
    [listed] = wire.structured("job_status")["jobs"]
    assert (listed["job_id"], listed["status"]) == (job_id, "done")


def test_progress_is_told_and_never_goes_back(wire: Wire) -> None:
    wire.ask(
        "tools/call",
        {"name": "acme_long", "arguments": {"steps": 40}, "_meta": {"progressToken": "t"}},
    )()
    told = [n["params"] for n in wire.notifications if n["method"] == "notifications/progress"]
    assert len(told) >= 3 and all(n["progressToken"] == "t" for n in told)
    numbers = [n["progress"] for n in told]
    assert numbers == sorted(set(numbers))
    assert any("step" in n["message"] for n in told)


def test_a_client_that_stops_waiting_finds_the_job_and_gets_the_record(wire: Wire) -> None:
    call = wire.ask("tools/call", {"name": "acme_long", "arguments": {"steps": 60}})
    with pytest.raises(queue.Empty):
        call(1.0)
    reason = "McpError: MCP error -32001: Request timed out"
    wire.notify("notifications/cancelled", {"requestId": call.id, "reason": reason})
    [job] = wire.structured("job_status")["jobs"]
    assert job["status"] == "running"
    assert wire.structured("job_status", job_id=job["job_id"])["status"] == "done"
    assert wire.structured("list_evidence")["total"] == 1


def test_cancelling_the_call_that_started_a_job_ends_it_and_what_it_started(wire: Wire) -> None:
    call = wire.ask("tools/call", {"name": "acme_long", "arguments": {"child": True}})
    until(lambda: sleepers(wire))
    reason = "the user pressed escape"
    wire.notify("notifications/cancelled", {"requestId": call.id, "reason": reason})
    until(lambda: not sleepers(wire))
    [job] = until(lambda: [j for j in jobs(wire) if j["status"] == "cancelled"])
    assert wire.structured("job_status", job_id=job["job_id"])["status"] == "cancelled"
    assert wire.structured("list_evidence")["total"] == 0


def test_cancelling_a_job_status_ends_only_the_wait(wire: Wire) -> None:
    job_id = start(wire, "acme_long", steps=40)
    waiting = wire.ask("tools/call", {"name": "job_status", "arguments": {"job_id": job_id}})
    wire.notify("notifications/cancelled", {"requestId": waiting.id, "reason": "changed my mind"})
    assert wire.structured("job_status", job_id=job_id)["status"] == "done"


def test_cancel_job_ends_a_job_and_everything_it_started(wire: Wire) -> None:
    job_id = start(wire, "acme_long", child=True)
    until(lambda: sleepers(wire))
    assert wire.structured("cancel_job", job_id=job_id)["status"] == "cancelled"
    assert not sleepers(wire)


@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_server(wire: Wire, how: str) -> None:
    start(wire, "acme_long", child=True)
    pids = until(lambda: sleepers(wire))
    if how == "end of input":
        wire.close()
    elif how == "SIGTERM":
        wire.process.terminate()
    else:
        wire.process.kill()
    until(lambda: not any(platform.start_time(pid) for pid in pids))


def test_two_jobs_on_one_device_never_overlap_and_another_device_does_not_wait(
    wire: Wire,
) -> None:
    ids = [start(wire, "acme_long", steps=20, device="cuda:0") for _ in range(2)]
    told = "held by acme_long"
    waiting = until(lambda: [j for j in jobs(wire) if told in progress(wire, j["job_id"])])
    assert len(waiting) == 1
    other = wire.structured("acme_long", steps=1, device="cuda:1")
    assert other["status"] == "done" and len(jobs(wire)) == 3
    assert {j["status"] for j in jobs(wire) if j["job_id"] in ids} == {"running"}
    spans = []
    for job_id in ids:
        data = wire.structured("job_status", job_id=job_id)["data"]
        spans.append((data["start"], data["end"]))
    (first, second) = sorted(spans)
    assert first[1] <= second[0]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("error", "it went wrong"),
        ("secret_error", "bad key [redacted"),
        ("bug", "Internal error"),
        ("kill", "signal 9"),
        ("memory", "memory"),
        ("exit", "status 7"),
    ],
)
def test_a_job_that_fails_says_how_and_the_server_goes_on(wire: Wire, how: str, told: str) -> None:
    result = wire.call("acme_fail", how=how)
    assert result["isError"] and told in result["content"][0]["text"]
    job_id = wire.structured("job_status")["jobs"][0]["job_id"]
    again = wire.call("job_status", job_id=job_id)
    assert again["isError"] and told in again["content"][0]["text"]
    assert SECRET not in json.dumps(wire.frames)


def test_an_unknown_job_points_to_the_evidence(wire: Wire) -> None:
    for tool in ("job_status", "cancel_job"):
        result = wire.call(tool, job_id="job-000000000000")
        assert result["isError"] and "list_evidence" in result["content"][0]["text"]


def test_a_seventeenth_job_is_refused(wire: Wire) -> None:
    ids = [start(wire, "acme_long", steps=100_000) for _ in range(16)]
    result = wire.call("acme_long", steps=1)
    assert result["isError"] and "16 jobs" in result["content"][0]["text"]
    for job_id in ids:
        wire.structured("cancel_job", job_id=job_id)
    assert {job["status"] for job in jobs(wire)} == {"cancelled"}


def jobs(wire: Wire) -> list[dict[str, Any]]:
    """The server's jobs."""
    listed: list[dict[str, Any]] = wire.structured("job_status")["jobs"]
    return listed


def progress(wire: Wire, job_id: str) -> str:
    """What a job says it is doing."""
    reply = wire.structured("job_status", job_id=job_id, wait_seconds=0)
    return str(reply.get("progress", {}).get("what", ""))


def sleepers(wire: Wire) -> list[int]:
    """Pids below the server that run the program which ``child`` starts."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                variables = (entry / "environ").read_bytes()
            except OSError:
                continue
            mine = str(wire.home).encode() in variables
            if b"time.sleep(300)" in command and mine:
                found.append(int(entry.name))
    return found
