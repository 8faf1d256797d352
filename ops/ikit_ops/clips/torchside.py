"""Start the worker that has torch, pass on what it is doing, and read what it found.

Torch may live in another Python than ours, as engines do: the first of this one and those that
IKIT_PYTHONS names which has torch and diffusers runs ``engine/worker.py``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Cancelled, Device, one_line
from ikit_mcp.registry import OpError
from ikit_ops.engines.find import listed_pythons, version_in

WORKER = Path(__file__).parent / "engine" / "worker.py"
TIMEOUT = 6 * 3600.0
GRACE = 10.0
LOG_CAP = 64 << 20
LOOK_SECONDS = 0.2
HEARTBEAT_SECONDS = 5.0


def find_python(call: Call, needed: tuple[str, ...]) -> str | None:
    """The first Python that has all these distributions: ours, then those of IKIT_PYTHONS."""
    for python in (sys.executable, *listed_pythons()):
        try:
            if all(version_in(call, python, (name,)) is not None for name in needed):
                return python
        except OpError:
            continue  # an entry that is no interpreter hides no other
    return None


def choose(there: list[Device], wanted: str) -> Device:
    """The device that the argument means; OpError names what there is."""
    for found in there:
        if wanted in ("auto", found.id, found.uuid, found.id.split(":")[0]):
            return found
    known = ", ".join(found.id for found in there)
    raise OpError(f"device {one_line(wanted, 60)!r} is not one device here", f"use one of: {known}")


def run_worker(call: Call, python: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """What the worker found; OpError with its last words when it left nothing."""
    folder = call.folder / f"clips-{time.monotonic_ns()}"
    folder.mkdir(mode=0o700)
    config, progress = folder / "config.json", folder / "progress.json"
    result, log = folder / "result.json", folder / "worker.log"
    told = {**task, "progress": str(progress), "result": str(result)}
    config.touch(mode=0o600)
    config.write_text(json.dumps(told), encoding="utf-8")
    environment = call.benchmark_environment()
    environment |= {"IKIT_CONFIG": str(config), "HF_HUB_OFFLINE": "1"}
    stop = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(call, progress, stop), name="clip-steps-progress", daemon=True
    )
    watcher.start()
    try:
        ended = call.run(
            [python, "-I", str(WORKER)],
            timeout=TIMEOUT,
            grace=GRACE,
            env=environment,
            cwd=folder,
            stdout_path=log,
            stderr_path=log,
            byte_cap=LOG_CAP,
        )
    finally:
        stop.set()
        watcher.join()
    try:
        found = json.loads(result.read_bytes())
    except (OSError, ValueError):
        lines = [one_line(line) for line in ended.stdout.splitlines() if line.strip()]
        why = "ran out of time" if ended.timed_out else f"ended with {ended.returncode}"
        raise OpError(
            f"the replay {why}: {' / '.join(lines[-3:])}",
            "check the reference, or leave it out for the model-free checks",
        ) from None
    if not isinstance(found, dict):
        raise OpError("the replay left no result", "call it again")
    return found


def _watch(call: Call, path: Path, stop: threading.Event) -> None:
    """Pass on the worker's progress, and say that it lives when it says nothing."""
    last, told_at, started = "", 0.0, time.monotonic()
    while not stop.wait(LOOK_SECONDS):
        try:
            text = path.read_text(encoding="utf-8")
            told = json.loads(text)
            done, total, what = float(told["done"]), float(told["total"]), str(told["what"])
        except (OSError, ValueError, KeyError, TypeError):
            text, done, total, what = "", 0.0, 1.0, "starting"
        now = time.monotonic()
        if text == last and now - told_at < HEARTBEAT_SECONDS:
            continue
        last, told_at = text, now
        try:
            call.progress(done, total or None, f"replay: {what} ({now - started:.0f} s so far)")
        except Cancelled:
            return
