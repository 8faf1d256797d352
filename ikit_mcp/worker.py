"""The worker: one long operation in a process of its own.

A long call must not block the server, must end when it is cancelled, and must not take
the server down when it runs out of memory or hits a bug in a parser.  So it runs in a
child, under a supervisor like every child, and talks through files in a private folder:
``request.json`` goes in, ``progress.json`` is replaced as it goes, ``result.json`` comes
out last.  Files survive what pipes do not, and nobody has to drain them.

The record itself never passes through here: the worker saves it, and names its id.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets as random
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from ikit_mcp.call import Cancelled, Progress, Settings, Shown, one_line
from ikit_mcp.evidence.store import Store
from ikit_mcp.process import run as process_run
from ikit_mcp.process import secrets
from ikit_mcp.registry import DERIVES, Effects, OpError, load
from ikit_mcp.runner import Control, Outcome, Request, Runner, device_lock

REQUEST, PROGRESS, RESULT = "request.json", "progress.json", "result.json"
INNER_GRACE = 10.0
MEMORY_LIMIT = 4 * 2**30
LONGEST_SECONDS = 7 * 86_400.0
PROGRESS_SECONDS = 0.1
_log = logging.getLogger(__name__)


class Bug(Exception):
    """An operation failed as it never should: the traceback is on stderr, under ``id``."""

    def __init__(self, bug_id: str) -> None:
        super().__init__(bug_id)
        self.id = bug_id


class _Redacting(logging.Formatter):
    """Log lines, and the tracebacks below them, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line to write."""
        return secrets.redact(super().format(record))


class _ToStderr(logging.Handler):
    """Writes to what standard error is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; a standard error that is gone is nothing to fail for."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def log_to_stderr(level: int) -> None:
    """Log to standard error, redacted, whoever logs; a second call changes nothing."""
    handler = _ToStderr()
    handler.setFormatter(_Redacting("%(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def report_bug(error: BaseException) -> Bug:
    """Write the traceback to standard error, without secrets, under a new id."""
    bug_id = random.token_hex(4)
    lines = "".join(traceback.format_exception(error))
    _log.error("bug %s: %s", bug_id, secrets.redact(lines))
    return Bug(bug_id)


# --- the side of the server ------------------------------------------------------


def run_in_worker(request: Request, control: Control, runner: Runner) -> Outcome:
    """Run the call in a child process, to its end; blocks.

    Raises what the operation raised: OpError, Cancelled, or Bug for anything else.
    """
    store = Store(runner.settings.home)
    with device_lock(request, control) as held, store.work_folder() as folder:
        _write(folder / REQUEST, _request(request, held, runner.settings))
        watcher = _Watcher(folder / PROGRESS, control)
        with watcher:
            done = process_run.run(
                [sys.executable, "-P", "-m", "ikit_mcp.worker", str(folder)],
                timeout=LONGEST_SECONDS,
                inner_grace=INNER_GRACE,
                env=dict(os.environ),  # our own code: it redacts with the secrets that it knows
                cancel=control.cancel,
                hold_fds=held.hold_fds,
                memory_limit=MEMORY_LIMIT if request.effects <= DERIVES else None,
            )
        return _outcome(request, done, folder, runner)


def _request(request: Request, control: Control, settings: Settings) -> dict[str, Any]:
    key = settings.signing_key
    return {
        "operation": request.operation.name,
        "args": request.args,
        "effects": int(request.effects),
        "home": str(settings.home),
        "signing_key": None if key is None else str(key),
        "plugins": settings.plugins,
        "job_id": control.job_id,
        "devices": sorted(control.devices),
    }


class _Watcher:
    """Passes on the worker's progress while it runs."""

    def __init__(self, path: Path, control: Control) -> None:
        self._path = path
        self._control = control
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = None
        while not self._stop.wait(PROGRESS_SECONDS):
            told = _read(self._path)
            if told is not None and told != seen:
                seen = told
                self._control.report(Progress(told["done"], told["total"], told["what"]))


def _outcome(request: Request, done: process_run.Result, folder: Path, runner: Runner) -> Outcome:
    """What the worker's result file says, or what its end says where there is none."""
    told = _read(folder / RESULT)
    if done.stderr:
        _log.info("worker: %s", secrets.redact(done.stderr)[-4_000:].rstrip())
    if told is None:
        if done.cancelled:
            raise Cancelled(request.operation.name)
        raise OpError(
            f"{request.operation.name}: its worker ended {_ending(done)} and left no result",
            "see the server's standard error; call again",
        )
    if "record" in told:
        record = Store(runner.settings.home).load(told["record"])
        return Outcome(record, None, Shown(told["shown"]["data"], told["shown"]["next"]))
    if "reply" in told:
        shown = Shown(told["shown"]["data"], told["shown"]["next"])
        return Outcome(None, told["reply"], shown)
    if "error" in told:
        raise OpError(told["error"]["what"], told["error"]["next"])
    if told.get("cancelled"):
        raise Cancelled(request.operation.name)
    raise Bug(str(told.get("bug")))


def _ending(done: process_run.Result) -> str:
    if done.timed_out:
        return "after its longest time"
    if done.signal is not None:
        return f"by signal {done.signal}"
    return f"with status {done.returncode}"


# --- the side of the child ---------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the request in the folder that is the one argument; the exit status is always 0 or 1."""
    folder = Path((sys.argv[1:] if argv is None else argv)[0])
    log_to_stderr(logging.INFO)
    cancel = threading.Event()

    def asked_to_stop(signum: int, frame: FrameType | None) -> None:
        """Only note it: a signal must not cut a record that is being written."""
        cancel.set()

    signal.signal(signal.SIGINT, asked_to_stop)
    signal.signal(signal.SIGTERM, asked_to_stop)
    result = _result(folder, cancel)
    _write(folder / RESULT, result)
    return 0


def _result(folder: Path, cancel: threading.Event) -> dict[str, Any]:
    """Run the request; what goes into the result file."""
    asked = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    key = asked["signing_key"]
    settings = Settings(Path(asked["home"]), Path(key) if key else None, asked["plugins"])
    runner = Runner(load(settings.plugins), settings, Effects(asked["effects"]))
    control = Control(
        _Reporter(folder / PROGRESS), cancel, asked["job_id"], frozenset(asked["devices"])
    )
    try:
        outcome = runner.here(runner.check(asked["operation"], asked["args"]), control)
    except OpError as error:
        what, advice = secrets.redact(error.what), secrets.redact(error.next_step)
        return {"error": {"what": what, "next": advice}}
    except Cancelled:
        return {"cancelled": True}
    except MemoryError:
        what = f"{asked['operation']} needs more than {MEMORY_LIMIT >> 30} GiB of memory"
        return {"error": {"what": what, "next": "give it a smaller input"}}
    except Exception as error:  # noqa: BLE001 -- a bug: the id to the caller, the rest to stderr
        return {"bug": report_bug(error).id}
    shown = asdict(outcome.shown)
    if outcome.record is not None:
        return {"record": outcome.record.evidence_id, "shown": shown}
    return {"reply": outcome.reply, "shown": shown}


class _Reporter:
    """Writes progress where the server looks, but not more often than it looks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        """Replace the progress file, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_SECONDS:
            self._last = now
            _write(self._path, asdict(progress) | {"what": one_line(progress.what)})


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replace a JSON file as a whole: a reader sees the old one or the new one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value), encoding="utf-8")
    fresh.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


if __name__ == "__main__":
    sys.exit(main())
