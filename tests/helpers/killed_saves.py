"""Save records while being killed at every single point: run as a script, prints JSON.

``python killed_saves.py HOME``: forks a child for each k that kills itself (SIGKILL) at
the k-th point of a save -- before each line of the store's code, and at each call that
the interpreter's audit hooks tell of -- until one child gets through.  After each death it
looks at what is there, saves another record, and looks again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from helpers.records import make_record
from ikit_mcp.evidence import claims, files, store
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.evidence.store import Store

# What touches the disk; the rest computes in memory, where no point differs from another.
CODE = {module.__file__ for module in (store, claims, files)}
EVENTS = ("open", "os.", "fcntl.", "shutil.")


def save(home: Path, number: int) -> EvidenceRecord:
    """One save with an artifact."""
    with Store(home).stage() as stage:
        stage.add("log.txt", b"log", "text/plain")
        raw = make_record(number, started="2026-01-01T00:00:00Z", artifacts=stage.artifacts)
        return stage.commit(raw)


def die_at(point: int) -> None:
    """From here on, count points; at the given one this process is killed."""
    passed = 0

    def pass_one() -> None:
        nonlocal passed
        passed += 1
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in CODE:
            return None
        if event == "line":
            pass_one()
        return trace

    def audit(event: str, arguments: object) -> None:
        if event.startswith(EVENTS) and not event.startswith("os.kill"):
            pass_one()

    sys.addaudithook(audit)
    sys.settrace(trace)


def child(home: Path, point: int) -> int:
    """The status of a child that saves and is killed at the point: 0 when it got through."""
    pid = os.fork()
    if pid == 0:
        die_at(point)
        try:
            save(home, point)
        finally:
            sys.settrace(None)
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    """Print ``{points, whole, none, wrong}``."""
    # Killing a process loses nothing of what it wrote: only the machine's death could, and
    # that is what syncing is for.  Without it this takes seconds, not minutes.
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    home = Path(sys.argv[1])
    there = {save(home, -1).evidence_id}
    whole = none = point = 0
    wrong: list[str] = []
    while True:
        point += 1
        status = child(home, point)
        new = set(Store(home).ids()) - there
        for evidence_id in new:
            if problems := Store(home).problems(evidence_id):
                wrong.append(f"point {point}: {problems}")
        whole, none = whole + len(new), none + (not new)
        there |= new
        if status == 0:
            break
        if status != signal.SIGKILL:
            wrong.append(f"point {point}: status {status}")
        there.add(save(home, 1_000_000 + point).evidence_id)
        if leftovers := Store(home).leftovers():
            wrong.append(f"point {point}: {leftovers}")
        if set(Store(home).ids()) != there:
            wrong.append(f"point {point}: records were lost")
    sys.stdout.write(
        json.dumps({"points": point - 1, "whole": whole, "none": none, "wrong": wrong[:20]})
    )


if __name__ == "__main__":
    main()
