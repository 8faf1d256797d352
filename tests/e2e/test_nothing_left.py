"""Over a real pipe: whatever ends a call, nothing of what it started is left.

The trees are those of ``tests/data/cases/process_tree.py``: a child in the leader's group, and
daemons that left it, one with its environment cleared, one with its streams closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import plugin
from helpers.stdio import Wire

TREE = Path(__file__).resolve().parents[1] / "data" / "cases" / "process_tree.py"
SECONDS = 30.0
SIZES = {"all": 5, "exit": 2}


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A server with the third-party operations."""
    with Wire(tmp_path / "home", env=plugin.environment()) as running:
        running.initialize()
        yield running


def processes(tag: str) -> list[int]:
    """Pids of the tree's processes: the tag is in their command line, whatever else they hid."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if tag.encode() in command and b"ikit_mcp" not in command:
                found.append(int(entry.name))
    return found


def wait_for(count: int, tag: str) -> list[int]:
    """Wait until so many processes of the tree are there (0: until none is)."""
    end = time.monotonic() + SECONDS
    while True:
        found = processes(tag)
        if len(found) >= count if count else not found:
            return found
        assert time.monotonic() < end, f"{len(found)} processes, {count} wanted"
        time.sleep(0.05)


def parent(pid: int) -> int:
    """The parent's pid."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])


@pytest.mark.parametrize(
    "how",
    ["cancel", "cancel_job", "end of input", "SIGTERM", "SIGKILL", "supervisor", "worker"],
)
def test_the_whole_tree_is_gone_however_the_call_ends(wire: Wire, tmp_path: Path, how: str) -> None:
    tag = f"tree-{tmp_path.name}-{os.getpid()}"
    arguments = {"script": str(TREE), "tag": tag, "wait_seconds": 60}
    call = wire.ask("tools/call", {"name": "acme_tree", "arguments": arguments})
    wait_for(SIZES["all"], tag)
    supervisor = parent(leader_of(tag))
    if how == "cancel":
        wire.notify("notifications/cancelled", {"requestId": call.id, "reason": "no more"})
    elif how == "cancel_job":
        [job] = wire.structured("job_status")["jobs"]
        assert wire.structured("cancel_job", job_id=job["job_id"])["status"] == "cancelled"
        assert not processes(tag)
    elif how == "end of input":
        wire.close()
    elif how in ("SIGTERM", "SIGKILL"):
        wire.process.send_signal(signal.Signals[how])
    elif how == "supervisor":
        time.sleep(1.0)  # it reports its tree four times a second; trees of a second are known
        os.kill(supervisor, signal.SIGKILL)
    else:
        os.kill(parent(supervisor), signal.SIGKILL)
    wait_for(0, tag)


def leader_of(tag: str) -> int:
    """The process that runs the tree's own program, once its forks have become something else."""
    end = time.monotonic() + SECONDS
    while True:
        found = []
        for pid in processes(tag):
            with contextlib.suppress(OSError):
                if TREE.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        if len(found) == 1:
            return found[0]
        assert time.monotonic() < end, f"{len(found)} leaders"
        time.sleep(0.05)


@pytest.mark.parametrize("mode", ["all", "exit"])
def test_a_timeout_or_an_early_end_leaves_nothing_and_says_what_was_left(
    wire: Wire, tmp_path: Path, mode: str
) -> None:
    tag = f"tree-{tmp_path.name}-{os.getpid()}"
    reply = wire.structured("acme_tree", script=str(TREE), tag=tag, mode=mode, timeout=2)
    assert reply["data"]["timed_out"] is (mode == "all")
    assert reply["data"]["leftovers"] >= 2 and reply["data"]["survivors"] == 0
    assert not processes(tag)


@pytest.mark.parametrize("how", ["gigabyte", "rubbish", "silent", "stubborn", "forks"])
def test_the_server_stays_small_and_answers_while_a_child_misbehaves(wire: Wire, how: str) -> None:
    before = resident(wire)
    timeout = {"stubborn": 2, "forks": 3}.get(how, 60)
    call = wire.ask(
        "tools/call", {"name": "acme_noise", "arguments": {"how": how, "timeout": timeout}}
    )
    slowest = 0.0
    answers = 0
    while True:
        begun = time.monotonic()
        assert wire.ask("tools/list")()["result"]["tools"]
        slowest = max(slowest, time.monotonic() - begun)
        answers += 1
        with contextlib.suppress(queue.Empty):
            frame: dict[str, Any] = call(0.1)
            break
    data = frame["result"]["structuredContent"]["data"]
    assert answers > 1 and data["survivors"] == 0
    assert resident(wire) - before < 32 * 2**20
    assert data["kept"] < 300_000
    if how == "gigabyte":
        assert data["bytes"] == 1 << 30
    assert data["timed_out"] is (how in ("stubborn", "forks"))
    print(f"{how}: slowest of {answers} tools/list while it ran: {slowest:.2f} s")


def resident(wire: Wire) -> int:
    """The server's resident memory, bytes."""
    status = Path(f"/proc/{wire.process.pid}/status").read_text(encoding="utf-8")
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def test_frames_of_all_this_hold_no_stray_text(wire: Wire) -> None:
    wire.structured("acme_noise", how="rubbish")
    json.dumps(wire.frames).encode("utf-8")  # no lone surrogate came through
