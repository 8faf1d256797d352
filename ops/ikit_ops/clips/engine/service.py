"""The engine's queue, and the one thread that works it off.

Pipelines are not made for calls side by side (a scheduler holds the state of the clip that it is
in), so requests wait in one queue, first come first served, and one thread makes their clips.
Whoever went away in the meantime is passed over, and a clip is given up at its next step when its
client is gone: nobody would get it, and the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ikit_ops.clips.engine.asked import Able, Asked
from ikit_ops.clips.engine.recipes import RecipeError
from ikit_ops.clips.engine.timeline import Timeline
from ikit_ops.clips.recorder import StepDumpError

LOG = logging.getLogger("clips")
GIVEN_UP = 499
STOP_SECONDS = 3.0


class Abandoned(Exception):
    """A clip that nobody waits for any more."""


class Maker(Protocol):
    """A loaded model."""

    able: Able

    def make(self, asked: Asked, timeline: Timeline, wanted: Callable[[], bool]) -> Any:
        """The clip, its dump in place; Abandoned when ``wanted`` says no between two steps."""


@dataclass
class Job:
    """One request in the queue, and what became of it."""

    asked: Asked
    timeline: Timeline
    waits: Callable[[], bool] = lambda: True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    done: threading.Event = field(default_factory=threading.Event)
    made: Any = None
    status: int = 500
    error: str = ""


class Engine:
    """The model, the queue, and the thread.  ``state`` is loading, ready or failed."""

    def __init__(self, config: Mapping[str, Any], load: Callable[[], Maker]) -> None:
        self.config = config
        self.state, self.problem = "loading", ""
        self.failed, self.stopping = threading.Event(), threading.Event()
        self.maker: Maker | None = None
        self._load = load
        self.jobs: queue.Queue[Job | None] = queue.Queue(maxsize=int(config.get("queue", 8)))
        self._thread = threading.Thread(target=self._work, name="clips", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request; ``queue.Full`` when there is no place."""
        job.timeline.enter("queue")
        self.jobs.put_nowait(job)

    def stop(self) -> None:
        """Give the current clip up at its next step, and leave no unfinished dump behind."""
        self.stopping.set()
        with contextlib.suppress(queue.Full):
            self.jobs.put_nowait(None)  # a worker that waits for one wakes up
        self._thread.join(STOP_SECONDS)
        for left in Path(self.config["dumps"]).glob(f".{os.getpid()}-*.partial"):
            with contextlib.suppress(OSError):
                left.unlink()

    def _work(self) -> None:
        try:
            self.maker = self._load()
            self.state = "ready"
        except Exception as error:
            self.state, self.problem = "failed", (str(error).strip() or "no reason is given")[:400]
            LOG.exception("the model cannot be loaded")
            self.failed.set()
            return
        while not self.stopping.is_set():
            job = self.jobs.get()
            if job is not None:
                self._serve(job, self.maker)
        with contextlib.suppress(queue.Empty):
            while True:  # whoever still waits is told
                if (job := self.jobs.get_nowait()) is not None:
                    job.status, job.error = 503, "the server is stopping"
                    job.done.set()

    def _serve(self, job: Job, maker: Maker) -> None:
        job.timeline.enter("prepare")
        try:
            if not job.waits():
                raise Abandoned
            job.made = maker.make(
                job.asked, job.timeline, lambda: not self.stopping.is_set() and job.waits()
            )
            job.status = 200
        except Abandoned:
            job.status, job.error = GIVEN_UP, "the client went away, or the server is stopping"
        except Exception as error:
            job.status, job.error = status_of(error), said(error)
            LOG.exception("clip %s failed", job.id)
        job.timeline.settle = None
        job.timeline.enter("answer")
        job.done.set()


def status_of(error: BaseException) -> int:
    """507 for a full disk, 500 for anything else that fails."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return 507
        seen = seen.__cause__ or seen.__context__
    return 500


def said(error: BaseException) -> str:
    """What a client is told: our own words in full, of a pipeline's failure its kind alone."""
    if isinstance(error, (StepDumpError, RecipeError)):
        return str(error)[:400]
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "there is not enough memory for this clip"
    return "the clip could not be made; the server's log says why, under the request's id"
