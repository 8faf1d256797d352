"""Run a target below a profiler, from the first word to a report that holds no secret.

The order is what keeps secrets out: nothing that looks like one is started, the profiler gets
an environment that holds none, and what it wrote is searched before anybody reads it.  What a
target prints goes to a log that is cut while it grows; the log is evidence of what happened,
not of where time went.

Time that runs out is not a failure: the profiler is interrupted, writes what it has, and the
record says that it is a part.  A target that ignores the interrupt is killed halfway through the
grace, without its profiler.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Cancelled, Device, log_end, one_line
from ikit_mcp.registry import OpError
from ikit_ops.profilers import find, profilers
from ikit_ops.profilers.adapter import PROFILER_LOG, STARTED, TARGET_LOG, Job, Left, Profiler
from ikit_ops.profilers.holders import kill_holders

LOG_CAP = 32 << 20
KEPT_LOG = 512 << 10
HEARTBEAT_SECONDS = 5.0
LOOK_SECONDS = 0.5
LAST_LINES = 6
ATTEMPTS = 2  # only where the target was never started, so that nothing is done twice
NOT_FOUND = 127
NO_TORCH = 97
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


@dataclass
class Run:
    """A run that left a report."""

    left: Left
    seconds: float
    returncode: int | None
    timed_out: bool
    incomplete: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    log_cut: bool = False


def choose(call: Call, name: str, devices: Sequence[Device]) -> tuple[Profiler, dict[str, Any]]:
    """The profiler of that name, or the best that can be used, and what was found of it.

    OpError says why none can be used.
    """
    known = profilers()
    if name != "auto":
        found = find.look(call, known[name], devices)
        # torch may be missing here and be in the target's own Python: its launcher will tell.
        if not found["usable"] and name != "torch":
            raise OpError(
                f"{name} cannot be used here: {found['why']}",
                "inspect_environment shows which profilers can",
            )
        return known[name], found
    reasons = []
    for profiler in known.values():
        if not profiler.suits(devices):
            continue
        found = find.look(call, profiler, devices)
        if found["usable"]:
            return profiler, found
        reasons.append(f"{profiler.name}: {found['why']}")
    raise OpError(
        f"no profiler can be used here ({'; '.join(reasons)})",
        "install one (nsys for NVIDIA, rocprofv3 for AMD, perf for CPUs), or import a capture",
    )


def environment_for(call: Call, keep: Sequence[str], home: Path) -> dict[str, str]:
    """The environment of profiler and target: clean, offline, with a private home.

    OpError names the variable to keep that looks like a secret, and the rule.
    """
    for name in keep:
        rule = call.secret_rule([f"{name}=x"]) if name.isidentifier() else None
        if rule is not None:
            raise OpError(
                f"keep_env {one_line(name, 80)} looks like a secret (rule: "
                f"{rule.partition(': ')[2]}). A profiler report stores NAME=value for every "
                "variable it receives, so it would be in the file",
                "download the weights first and run offline (HF_HUB_OFFLINE=1 is set for you), "
                "then call profile without it",
            )
    private = None if "HOME" in keep else home
    home.mkdir(mode=0o700, exist_ok=True)
    return call.clean_environment(keep, private, offline=True)


def refuse_secrets(call: Call, command: Sequence[str]) -> None:
    """OpError for a command line that holds a secret: reports keep it, and ``ps`` shows it."""
    if rule := call.secret_rule(command):
        raise OpError(
            f"the command was refused: {rule} looks like a secret. Profilers keep command lines",
            "give the program its key by a file or a variable that it reads by itself",
        )


def run(
    call: Call,
    profiler: Profiler,
    job: Job,
    *,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float,
    grace: float,
) -> Run:
    """Run the job; OpError with the last lines when it left no report.

    Raises:
        OpError: no report, or a report that holds a secret (then it is removed).
    """
    target, log = job.folder / TARGET_LOG, job.folder / PROFILER_LOG
    target.touch(mode=0o600)
    for attempt in range(ATTEMPTS):
        last = math.inf if profiler.inside else timeout + grace / 2
        with _watched(_Watch(call, profiler.title, target, last)) as watch:
            ended = call.run(
                profiler.command(job), timeout=timeout, grace=grace, env=env, cwd=cwd,
                stdout_path=log, stderr_path=log, byte_cap=LOG_CAP,
            )  # fmt: skip
        call.progress(0, None, f"{profiler.title}: reading the report")
        left = profiler.collect(call, job)
        untouched = not (job.folder / STARTED).exists() and not ended.timed_out
        if left is None and untouched and attempt + 1 < ATTEMPTS:
            continue  # its agent did not come up in time: seen of nsys on busy machines
        break
    if left is None:
        raise _no_report(profiler, ended, watch, log, timeout)
    call.search([left.report, *left.searched])
    done = Run(left, ended.seconds, ended.returncode, ended.timed_out)
    _judge(done, ended, watch, timeout)
    return done


def _judge(done: Run, ended: Any, watch: _Watch, timeout: float) -> None:
    """What of the run keeps the capture from being whole."""
    if ended.timed_out:
        done.incomplete.append(
            f"the run was ended after {timeout:g} s, the timeout: the report covers what was before"
        )
        if watch.killed:
            done.incomplete.append("processes of the target ignored the interrupt, and were killed")
        if ended.killed:
            done.incomplete.append("the profiler did not end within its grace and was killed")
    elif ended.capped:
        done.incomplete.append(f"the run was ended: the profiler printed over {LOG_CAP >> 20} MiB")
    elif ended.returncode != 0:
        what = f"status {ended.returncode}" if ended.signal is None else f"signal {ended.signal}"
        done.incomplete.append(f"the run ended with {what}")
    if ended.survivors:
        done.warnings.append(f"could not be ended: {one_line(', '.join(ended.survivors))}")
    if watch.cut:
        done.log_cut = True
        done.warnings.append("the target's log grew too long: its beginning was dropped")


def _no_report(profiler: Profiler, ended: Any, watch: _Watch, log: Path, timeout: float) -> OpError:
    """The error of a run without a report: why, and what was said last."""
    if ended.returncode == NO_TORCH and profiler.name == "torch":
        return OpError(
            "the target's Python has no torch", "give a command whose interpreter has it"
        )
    if ended.timed_out:
        why = f"it was ended after {timeout:g} s, the timeout"
        next_step = "give more timeout, or more grace: large reports take long to write"
        if profiler.inside and ended.killed:
            why += "; the target did not end within the grace, and the profiler lives inside of it"
            next_step = (
                "let the program end on SIGINT, give more grace, or use a profiler that lives "
                "beside it (perf, nsys)"
            )
    elif ended.returncode == NOT_FOUND:
        why, next_step = "the command was not found", "give its full path"
    else:
        what = f"status {ended.returncode}" if ended.signal is None else f"signal {ended.signal}"
        why, next_step = f"it ended with {what}", "run the command without a profiler first"
    lines = [*last_lines(watch.log, headless=watch.cut), *last_lines(log)]
    said = [f"  {line}" for line in lines[-LAST_LINES:]]
    text = f"{profiler.title} left no report: {why}"
    return OpError("\n".join([text, *(["last lines:"] if said else []), *said]), next_step)


def last_lines(path: Path, count: int = LAST_LINES, *, headless: bool = False) -> list[str]:
    """The last lines that say something, each short."""
    text = log_text(path, headless=headless)
    lines = [one_line(_COLOURS.sub("", line), 160) for line in text.splitlines()[-200:]]
    return [line for line in lines if line][-count:]


def log_text(path: Path, *, headless: bool = False) -> str:
    """The log without secrets; of a long one its end.  ``headless``: it was cut while it grew."""
    try:
        with path.open("rb") as file:
            return log_end(file, KEPT_LOG, headless=headless)
    except OSError:
        return ""


@dataclass
class _Watch:
    """Looks at a target while it runs, and what was seen of it.

    ``last`` is when, in seconds from its start, a target that still runs is killed alone.
    """

    call: Call
    title: str
    log: Path
    last: float = math.inf
    cut: bool = False
    killed: bool = False
    stop: threading.Event = field(default_factory=threading.Event)

    def keep(self) -> None:
        """Tell that it runs, keep its log from filling the disk, and end it when it must."""
        started = time.monotonic()
        told = -HEARTBEAT_SECONDS
        while True:
            passed = time.monotonic() - started
            if passed - told >= HEARTBEAT_SECONDS:
                told = passed
                try:
                    self.call.progress(0, None, f"{self.title}: running ({passed:.0f} s so far)")
                except Cancelled:
                    return  # the run itself notices, and ends the target
            if self.log.stat().st_size > LOG_CAP:
                os.truncate(self.log, 0)  # the target appends: it goes on at the new end
                self.cut = True
            if passed > self.last and kill_holders(self.log):
                self.killed = True
            if self.stop.wait(LOOK_SECONDS):
                return


@contextmanager
def _watched(watch: _Watch) -> Iterator[_Watch]:
    """Let it look while the body runs."""
    thread = threading.Thread(target=watch.keep, name="profile-watch", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.stop.set()
        thread.join()
