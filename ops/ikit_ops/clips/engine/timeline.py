"""Where the time of a request went: every moment belongs to exactly one stage.

Timing each stage by itself and adding up leaves what lies between two stages to nobody: waking a
thread, asking a pipeline for its shapes.  On a large model that is nothing; on a small one it is
a tenth, and a benchmark that cannot say what a tenth of the time was is right to distrust the
rest.  So there is one clock and one current stage: entering a stage gives the time since the last
change to the stage that was left.  The stages then add up to the whole by construction, and a
stage inside another (a decoder inside the pipeline's call) is counted once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Timeline:
    """Milliseconds by stage from its making on; used by one thread at a time.

    ``settle`` is called before the clock is read at a change of stage: on a device that works
    behind the host's back, work belongs to the stage that asked for it.
    """

    def __init__(self, stage: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.spent: dict[str, float] = {}
        self.settle: Callable[[], Any] | None = None
        self._stage, self._clock = stage, clock
        self._since = clock()

    def enter(self, stage: str) -> str:
        """End the current stage and begin another; the stage that was left."""
        if self.settle is not None:
            self.settle()
        now = self._clock()
        left, self._stage = self._stage, stage
        self.spent[left] = self.spent.get(left, 0.0) + (now - self._since) * 1e3
        self._since = now
        return left

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count the body to a stage, and what comes after it to the stage that it interrupted."""
        before = self.enter(stage)
        try:
            yield
        finally:
            self.enter(before)

    def wrapped(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time counts to a stage."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.during(stage):
                return function(*args, **kwargs)

        return timed

    def total(self) -> float:
        """Milliseconds from the beginning to the last change of stage: the stages' sum."""
        return sum(self.spent.values())
