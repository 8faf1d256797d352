"""Jobs: long calls that may outlive the reply to them.

Clients give up on a call after 5 to 60 seconds, whatever its progress says; a benchmark
takes minutes.  So a long call becomes a job: the reply comes when the job ends or when
``wait_seconds`` are over, whichever is first, and then names the job.  Whoever lost a
reply finds the job by ``job_status`` and, in any case, the record in the store.

A job ends by itself, by ``cancel_job``, by the client's own cancellation of the call that
started it (but not when the client merely stopped waiting), or with the server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ikit_mcp.call import Cancelled, Progress, one_line
from ikit_mcp.registry import MEASURES, READS, Arg, Operation, OpError
from ikit_mcp.runner import Control, Outcome, Request, Runner
from ikit_mcp.worker import Bug, report_bug, run_in_worker

MAX_LIVE = 16
MAX_KEPT = 256
HEARTBEAT_SECONDS = 5.0
POLL_SECONDS = 0.5
WAIT = Arg(
    "wait_seconds", "integer", "Wait this long for the result, else get a job", default=45,
    minimum=0, maximum=3600, unit="s",
)  # fmt: skip
JOB_ID = Arg("job_id", "string", "Job id, as the call that started it replied", required=True)

Notify = Callable[[float, float | None, str], Awaitable[None]]


@dataclass
class Job:
    """One long call: running, done, failed or cancelled."""

    id: str
    request: Request
    future: concurrent.futures.Future[Outcome]
    cancel: threading.Event = field(default_factory=threading.Event)
    progress: Progress = field(default_factory=lambda: Progress(0, None, "starting"))
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def operation(self) -> str:
        """The name of the operation that runs."""
        return self.request.operation.name

    @property
    def seconds(self) -> float:
        """How long it has been running, or ran."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def state(self) -> str:
        """``running``, ``done``, ``failed`` or ``cancelled``."""
        if not self.future.done():
            return "running"
        error = self.future.exception()
        if error is None:
            return "done"
        return "cancelled" if isinstance(error, Cancelled) else "failed"

    def note(self, progress: Progress) -> None:
        """Take in the job's own report."""
        self.progress = progress

    def doing(self) -> str:
        """One line: what it does, how far it is, for how long."""
        now = self.progress
        doing = f"{now.what or 'running'} {now.part}".rstrip()
        return one_line(f"{self.operation}: {doing} ({self.seconds:.0f} s)")


class Jobs:
    """The table of this server's jobs."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._jobs: dict[str, Job] = {}
        self._guard = threading.Lock()

    def start(self, request: Request) -> Job:
        """Start a job; OpError when too many are running."""
        with self._guard:
            live = [job for job in self._jobs.values() if not job.future.done()]
            if len(live) >= MAX_LIVE:
                raise OpError(
                    f"{MAX_LIVE} jobs are running already",
                    "wait for one (job_status) or end one (cancel_job)",
                )
            self._forget()
            job = Job(f"job-{secrets.token_hex(6)}", request, concurrent.futures.Future())
            self._jobs[job.id] = job
        thread = threading.Thread(target=self._work, args=(job,), name=job.id, daemon=True)
        thread.start()
        return job

    def _forget(self) -> None:
        """Drop the oldest ended jobs; their records stay in the store."""
        ended = [job for job in self._jobs.values() if job.future.done()]
        for job in ended[: max(0, len(self._jobs) - MAX_KEPT + 1)]:
            del self._jobs[job.id]

    def _work(self, job: Job) -> None:
        """The job's thread: run the worker, keep what came of it."""
        control = Control(job.note, job.cancel, job.id)
        try:
            outcome = run_in_worker(job.request, control, self._runner)
        except (OpError, Cancelled, Bug) as error:
            failure: BaseException = error
        except Exception as error:  # noqa: BLE001 -- a bug reaches the caller, by its id
            failure = report_bug(error)
        else:
            job.ended = time.monotonic()
            job.future.set_result(outcome)
            return
        job.ended = time.monotonic()
        job.future.set_exception(failure)

    def get(self, job_id: str) -> Job:
        """The job of that id; OpError points to the store when it is not known here."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise OpError(
                f"no job {one_line(job_id, 40)!r} in this server",
                "list_evidence shows the records of jobs that ended, newest first",
            ) from None

    def all(self) -> list[Job]:
        """The jobs of this server, newest first."""
        return list(reversed(self._jobs.values()))

    def cancel(self, job_id: str) -> Job:
        """Ask a job to end; it does so within its grace."""
        job = self.get(job_id)
        job.cancel.set()
        return job

    async def wait(self, job: Job, seconds: float, notify: Notify | None = None) -> bool:
        """Wait until the job has ended or the time is up: whether it has ended.

        ``notify`` is told what is being done, at the start, at every change, and at
        least every few seconds, so that no client takes the silence for death.
        """
        deadline = time.monotonic() + seconds
        told, told_at, number = "", float("-inf"), 0.0
        # Never cancelled, and so never cancels the job: asyncio.wait leaves it alone.
        waiter = asyncio.wrap_future(job.future)
        waiter.add_done_callback(_retrieved)
        while not job.future.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            now, step = time.monotonic(), job.progress
            state = f"{step.what}{step.done}{step.total}"
            if notify is not None and (state != told or now - told_at >= HEARTBEAT_SECONDS):
                told, told_at = state, now
                number = max(number + 0.001, step.done)
                await notify(number, step.total, job.doing())
            await asyncio.wait([waiter], timeout=min(left, POLL_SECONDS))
        return True

    def close(self) -> None:
        """End all jobs: the server is going."""
        for job in self._jobs.values():
            job.cancel.set()


def _retrieved(future: asyncio.Future[Outcome]) -> None:
    """Mark a failure as seen; it is reported from the job's own future."""
    if not future.cancelled():
        future.exception()


def _by_server(*_: Any, **__: Any) -> Any:
    raise OpError("this operation lives in the server", "call it through the MCP server")


def operations() -> list[Operation]:
    """The two operations on jobs, which only a server offers."""
    made = [
        Operation(
            "job_status", None,
            "Wait for a long call and get its result; without job_id list this server's jobs.",
            (replace(JOB_ID, required=False), WAIT), READS, _by_server, lambda args: READS,
        ),
        Operation(
            "cancel_job", None,
            "End a running job and everything it started, after the grace of its engine.",
            (JOB_ID,), MEASURES, _by_server, lambda args: MEASURES,
        ),
    ]  # fmt: skip
    return made
