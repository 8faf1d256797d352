"""Run a worker, watch it, and turn its end into a result or a sentence.

Engines fail in more ways than they work: at import, while they load, in the middle of a
round; by an exception, by a signal (SGLang's scheduler sends SIGQUIT to its parent, the
kernel's out-of-memory killer SIGKILL), by saying nothing for ever, by filling the disk
with their log.  A caller needs to know three things of it: in which phase it was, what
ended it, and what it said last.  The log is the engine's, and may hold keys: SGLang prints
its whole configuration, key included, as one line.  Such lines are left out, the rest is
cut to short lines, and the ways out redact what is known to be secret.

A result that was written counts even if the engine dies while it shuts down: what was
measured is not lost.
"""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Cancelled, log_ends, one_line
from ikit_mcp.registry import OpError
from ikit_ops.engines import replay
from ikit_ops.engines import result as results
from ikit_ops.engines.adapter import Adapter, Found, Plan
from ikit_ops.engines.result import WorkerResult

LOG_CAP = 64 << 20
KEEP = 4 << 20
MAX_PROGRESS = 64 << 10
MAX_LOG_LINE = 32_000  # SGLang prints its configuration on one line of half that
LAST_LINES = 8
GRACE = 5.0  # less than what the run around this one waits for it
HEARTBEAT_SECONDS = 5.0
LOOK_SECONDS = 0.1
PHASES = ("start", "import", "load", "warm-up", "round", "two-call check", "reference", "flags",
          "shutdown")  # fmt: skip
_CONFIGURATION_LINE = re.compile(r"server_args=|ServerArgs\(|non-default args|hf_token|api_key")
_EXCEPTION = re.compile(r"(?:^|[\s.])[A-Z]\w{1,60}(?:Error|Exception): \S.{0,400}")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")


@dataclass
class Outcome:
    """A worker that left a result: that, its log, and how the process ended."""

    result: WorkerResult
    log: list[str]
    max_rss_bytes: int | None
    seconds: float
    variables: Any
    warnings: list[str] = field(default_factory=list)


def drive(
    call: Call,
    adapter: Adapter,
    plan: Plan,
    found: Found,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Outcome:
    """Run the engine's worker to its end.

    ``on_phase`` hears of each phase and of each round, in another thread, soon after it
    began.  OpError names the phase, the reason and the last lines of the log when the worker
    left no result.
    """
    folder = call.folder / f"bench-{plan.nonce}"
    folder.mkdir(mode=0o700)
    argv, given = replay.prepare(adapter, plan, found, folder)
    log, output = folder / "engine.log", folder / "stdout.log"
    # A gated model of the Hub needs the user's token.
    allow = _HUB_TOKENS if plan.path is None else ()
    environment = call.benchmark_environment(allow) | given
    progress, result = folder / replay.PROGRESS, folder / replay.RESULT
    with _watched(_Watcher(call, progress, plan, adapter.title, on_phase)):
        ended = call.run(
            argv,
            timeout=plan.timeout,
            grace=GRACE,
            env=environment,
            # A caller's command is meant where the caller is; an engine may litter its own.
            cwd=folder if adapter.worker else None,
            stdout_path=output,
            stderr_path=log,
            byte_cap=LOG_CAP,
        )
    phase = _phase(progress, adapter)
    lines = read_log(output) + read_log(log)
    try:
        told = results.read(result, output)
    except results.Unreadable as error:
        at = "result" if adapter.worker else phase  # nothing went wrong while it shut down
        raise _failure(adapter, at, str(error), lines) from None
    if told is None:
        raise _failure(adapter, phase, _reason(ended, plan), lines)
    if told.error is not None:
        raise _failure(adapter, told.error.phase, one_line(told.error.what, 500), lines)
    if not told.rounds:
        why = "; ".join(one_line(str(row.get("why"))) for row in told.failed_rounds[:3])
        raise _failure(adapter, "round", f"no round succeeded: {why or 'none is told'}", lines)
    adapter.read(told, lines, plan)
    variables = call.engine_variables(ENGINE_PREFIXES, ENGINE_NAMES, environment)
    outcome = Outcome(told, lines, ended.max_rss_bytes, ended.seconds, variables)
    if not ended.ok:
        outcome.warnings.append(f"after its result, the worker {_reason(ended, plan)}")
    if ended.survivors:
        outcome.warnings.append(f"could not be ended: {one_line(', '.join(ended.survivors))}")
    return outcome


ENGINE_PREFIXES = (
    "VLLM_", "SGLANG_", "TORCH_", "PYTORCH_", "TRITON_", "NCCL_", "CUDA_", "CUBLAS", "CUDNN_",
    "GGML_", "LLAMA_", "FLASHINFER_", "ROCR_", "HIP_", "HSA_",
)  # fmt: skip
ENGINE_NAMES = (
    "GPU_DEVICE_ORDINAL", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "OMP_NUM_THREADS",
)  # fmt: skip
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


# --- while it runs ---------------------------------------------------------------------


@dataclass
class _Watcher:
    """Passes the worker's phases on, and says that it lives when it says nothing."""

    call: Call
    path: Path
    plan: Plan
    title: str
    on_phase: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Look at the progress file until the run has ended, or the call was cancelled."""
        started, told_at, last = time.monotonic(), 0.0, ""
        while not self.stop.wait(LOOK_SECONDS):
            told = progress_of(self.path)
            key, now = json.dumps(told), time.monotonic()
            if key != last:
                self.on_phase(str(told.get("phase")))
            elif now - told_at < HEARTBEAT_SECONDS:
                continue
            last, told_at = key, now
            done, total, what = step_of(told, self.plan)
            try:
                self.call.progress(
                    done, total, f"{self.title}: {what} ({now - started:.0f} s so far)"
                )
            except Cancelled:
                return


@contextmanager
def _watched(watcher: _Watcher) -> Iterator[None]:
    """Let the watcher look while the body runs."""
    thread = threading.Thread(target=watcher.watch, name="bench-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watcher.stop.set()
        thread.join()


def progress_of(path: Path) -> dict[str, Any]:
    """The worker's progress file; empty where there is none yet."""
    try:
        with results.open_regular(path) as file:
            told = json.loads(file.read(MAX_PROGRESS))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def step_of(told: dict[str, Any], plan: Plan) -> tuple[int, int, str]:
    """``(done, total, words)``: each request is a step, and each other phase is one."""
    counted = {"warm-up": plan.warmup, "round": plan.rounds}
    total = sum(counted.get(phase, 1) for phase in PHASES)
    phase = told.get("phase")
    if phase not in PHASES:
        return 0, total, "starting"
    before = sum(counted.get(p, 1) for p in PHASES[: PHASES.index(phase)])
    done = told.get("done")
    done = done if isinstance(done, int) else 0
    if phase in counted:
        return before + done, total, f"{phase} {done + 1} of {counted[phase]}"
    return before, total, phase


# --- how it ended ------------------------------------------------------------------------


def _phase(path: Path, adapter: Adapter) -> str:
    """The phase that the worker was last in; a command has none that we know."""
    phase = progress_of(path).get("phase")
    if isinstance(phase, str) and phase in PHASES:
        return phase
    return "start" if adapter.worker else "command"


def _reason(ended: Any, plan: Plan) -> str:
    """What ended a worker, in words."""
    if ended.timed_out:
        return f"was ended after {plan.timeout:g} s, the timeout"
    if ended.capped:
        return f"was ended: it had written more than {LOG_CAP >> 20} MiB of output"
    if ended.lost:
        return "was killed together with its supervisor"
    if ended.signal is not None:
        name = signal.Signals(ended.signal).name if ended.signal < 65 else str(ended.signal)
        hints = {
            "SIGKILL": " (most often the kernel's out-of-memory killer, or the engine itself)",
            "SIGQUIT": " (an engine's child failed and told its parent)",
            "SIGSEGV": " (a crash in native code)",
            "SIGABRT": " (an assertion in native code)",
            "SIGILL": " (the program uses instructions that this CPU does not have)",
        }
        return f"was ended by {name}{hints.get(name, '')}"
    return f"ended with status {ended.returncode} and left no result"


def _failure(adapter: Adapter, phase: str, reason: str, lines: list[str]) -> OpError:
    """The error of a run without a usable result: phase, reason, last lines."""
    what = f"{adapter.title or adapter.name} failed in phase {one_line(phase, 40)}: {reason}"
    shown = last_lines(lines)
    if cause := first_error(lines, [reason, *shown]):
        what += f"\nfirst error: {cause}"
    if shown:
        what += "\nlast lines:\n" + "\n".join(f"  {line}" for line in shown)
    hint = adapter.hints.get(phase) or {
        "import": "check that the engine's Python can import it",
        "start": "check the engine's Python, or the program",
        "load": "check the model's path and engine_args; a shorter context needs less memory",
        "command": "the command must write its result to $IKIT_RESULT_PATH, or print it after "
        "'IKIT_RESULT '",
    }.get(phase, "see the last lines; a longer timeout, or other engine_args, may help")
    return OpError(what, hint)


def last_lines(lines: list[str], count: int = LAST_LINES) -> list[str]:
    """The last lines that say something, short, without those that print a configuration."""
    kept: list[str] = []
    for line in reversed(lines):
        text = one_line(line, 160)
        if text and not is_configuration(line) and not text.startswith("IKIT_RESULT"):
            kept.append(text)
        if len(kept) == count:
            break
    return kept[::-1]


def first_error(lines: list[str], told: list[str]) -> str | None:
    """The first exception in a log, unless it was told already; None when there is none.

    Of several processes the parent's words come last ("see root cause above"), and the
    cause is far above them.
    """
    for line in lines:
        match = _EXCEPTION.search(line[:MAX_LOG_LINE])
        if match and not is_configuration(line):
            text = one_line(match[0].strip(), 300)
            return None if any(text[:120] in other for other in told) else text
    return None


def is_configuration(line: str) -> bool:
    """Whether a log line prints an engine's whole configuration, keys and all."""
    return _CONFIGURATION_LINE.search(line[:MAX_LOG_LINE]) is not None


def read_log(path: Path) -> list[str]:
    """The lines of a log, without colours, each cut; of a long log its head and its tail.

    They hold no secret: what is cut here, or line by line later, was redacted as a whole.
    """
    try:
        with results.open_regular(path) as file:
            text = log_ends(file, KEEP)
    except OSError:
        return []
    lines = re.split(r"[\r\n]+", text)
    return [_COLOURS.sub("", line[:MAX_LOG_LINE]) for line in lines if line]
