"""Process trees for tests: started below ``run``, counted by a tag in their command lines."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ikit_mcp.process import supervised
from ikit_mcp.process.procfs import stat_of

ROOT = Path(__file__).parents[2]
TREE = ROOT / "tests" / "data" / "cases" / "process_tree.py"
SLEEPERS = {"plain": 1, "daemon": 1, "clear": 1, "close": 1, "exit": 2, "all": 4}
"""How many processes, besides the leader, each case leaves sleeping."""

CALLER = """
import os, sys
from ikit_mcp.process.run import run
result = run(sys.argv[1:], timeout=60, grace=5, env=dict(os.environ),
             on_start=lambda pid: print(pid, flush=True))
print("over", result.returncode, flush=True)
sys.stdin.read()
"""
"""A program that runs its arguments, says the leader's pid, and then waits to be killed."""


def measured_supervisors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under coverage, let supervisors start as coverage needs it, so that they are measured too.

    (A fixture; otherwise they start isolated and without site, and coverage never sees them.)
    """
    config = os.environ.get("COVERAGE_PROCESS_CONFIG")
    if config is not None:
        command = [sys.executable, "-m", "ikit_mcp.process.supervisor"]
        real = supervised.supervisor_environment
        more = {"COVERAGE_PROCESS_CONFIG": config}
        monkeypatch.setattr(supervised, "supervisor_command", lambda: command)
        monkeypatch.setattr(supervised, "supervisor_environment", lambda: {**real(), **more})


def new_tag() -> str:
    """A word that no other command line on the machine holds."""
    return f"ikit-test-{uuid.uuid4().hex}"


def tree_command(tag: str, mode: str) -> list[str]:
    """The command that starts a tree of this case."""
    return [sys.executable, "-S", str(TREE), tag, mode]


def caller_environment() -> dict[str, str]:
    """An environment in which a child of the tests finds the package."""
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def tagged(tag: str) -> list[int]:
    """The living processes that have the tag on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if tag.encode() in line:
                found.append(int(entry.name))
    return found


def sleepers(tag: str) -> list[int]:
    """The processes of the tree that have reached their sleep."""
    return tagged(f"#{tag}")


def handles(pid: int, number: int, how: str) -> bool:
    """Whether the process catches (``SigCgt``) or ignores (``SigIgn``) the signal by now."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    mask = next(line for line in status.splitlines() if line.startswith(f"{how}:"))
    return bool(int(mask.split()[1], 16) & 1 << (number - 1))


def age(pid: int) -> float:
    """Seconds since the process started; 0 when it is gone."""
    stat = stat_of(pid)
    if stat is None:
        return 0.0
    uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    return uptime - stat.start / os.sysconf("SC_CLK_TCK")


def until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Look until the condition holds; False when it did not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
