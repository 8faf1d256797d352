"""What happens on the device while an engine's rounds run, as far as anybody can see it.

Telemetry is read from outside the engine, by this process, so that it is the same for every
engine and cannot slow it.  What counts is the stretch of the rounds: loading draws other
clocks, and a neighbour who left before the first round spoiled nothing.  Rounds carry wall
time, telemetry the monotonic clock; one offset, taken at the start, joins them.

Whose a process on a GPU is, is told by its pid.  In a container the driver lists pids of
another namespace, or none: then nobody can say whose they are, and it is not guessed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ikit_mcp.call import one_line
from ikit_ops.engines.adapter import Plan
from ikit_ops.engines.drive import Outcome
from ikit_ops.engines.gates import Beside
from ikit_ops.engines.result import Round, WorkerResult
from ikit_ops.measure.telemetry import Telemetry, sources_for

HARMLESS = frozenset(
    {"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"}
)
"""Reasons for a clock that are not a slowdown."""
MARK_SECONDS = 1.0
"""The least time between two marks of one phase: reading everything costs milliseconds."""
LATE = 0.2
"""How long after its beginning a round may be noticed, in seconds."""


class Watch:
    """Looks at the device from before the engine starts until it has ended."""

    def __init__(self, plan: Plan, telemetry: Telemetry | None = None) -> None:
        self.plan = plan
        self._offset = time.time() - time.monotonic()
        if telemetry is None and plan.device is not None:
            telemetry = Telemetry(sources_for(plan.device))
        self._telemetry = telemetry
        self._marks: list[float] = []
        self._phase = ""
        self._ours: set[int] = {os.getpid()}

    def __enter__(self) -> Watch:
        if self._telemetry is not None:
            self._telemetry.__enter__()
            self._marks.append(time.monotonic())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._telemetry is not None:
            self._telemetry.__exit__(kind, error, trace)
            self._marks.append(time.monotonic())

    def entered(self, phase: str) -> None:
        """The engine began a phase or a round: note the counters, and which processes are ours."""
        if phase == self._phase and time.monotonic() - self._marks[-1] < MARK_SECONDS:
            return
        self._phase = phase
        self._marks.append(time.monotonic() if self._telemetry is None else self._telemetry.mark())
        self._ours |= _our_processes()

    def beside(self, result: WorkerResult, platform: str | None) -> Beside:
        """What was seen during the rounds."""
        if self._telemetry is None or platform is None:
            return Beside()
        whole = self._telemetry.summary(*self._stretch(result.rounds))
        gpu, cpu = whole.get("gpu") or {}, whole.get("cpu") or {}
        if platform == "cpu":
            share, cpus = cpu.get("others_share"), os.cpu_count() or 1
            return Beside(
                other_load=None if share is None else share * cpus,
                steal=cpu.get("steal_share"),
                throttling=["cpu_thermal"] if cpu.get("throttle_events") else None,
            )
        reasons = gpu.get("throttle_reasons")
        rows = [row.get("gpu") or {} for row in self._by_round(result.rounds)]
        return Beside(
            foreign=self._foreign(gpu.get("pids")),
            throttling=None if reasons is None else [r for r in reasons if r not in HARMLESS],
            clock_drift=drift([row.get("sm_mhz") for row in rows]),
            memory_clock_drift=drift([row.get("memory_mhz") for row in rows]),
        )

    def _stretch(self, rounds: Sequence[Round]) -> tuple[float | None, float | None]:
        """From the last mark before the rounds to the first one after them."""
        starts = [row.t_start - self._offset for row in rounds if row.t_start is not None]
        ends = [row.t_end - self._offset for row in rounds if row.t_end is not None]
        if not starts or not ends:
            return None, None
        before = [mark for mark in self._marks if mark <= min(starts)]
        after = [mark for mark in self._marks if mark >= max(ends)]
        # A mark is the time at which its samples had been taken: they are a little earlier.
        return (max(before) - 0.1 if before else None), (min(after) if after else None)

    def _by_round(self, rounds: Sequence[Round]) -> list[dict[str, Any]]:
        """Telemetry of each round that has times: what was seen while it ran.

        Counters are compared between marks, so that a CPU's share is known for rounds that
        are long enough to have two.
        """
        if self._telemetry is None:
            return []
        return [
            {"index": row.index}
            | self._telemetry.summary(row.t_start - self._offset, row.t_end - self._offset + LATE)
            for row in rounds
            if row.t_start is not None and row.t_end is not None
        ]

    def _foreign(self, pids: Sequence[int] | None) -> list[str] | None:
        """Compute processes that are not ours; None when whose they are cannot be told."""
        before = [
            f"{one_line(str(p.get('name')), 40)} (pid {p.get('pid')}, before the run)"
            for p in (self.plan.device.busy if self.plan.device else ())
        ]
        if before:
            return before
        if not pids or not self._ours & set(pids):
            return None
        return [f"pid {pid}" for pid in pids if pid not in self._ours]

    def telemetry(self, result: WorkerResult) -> dict[str, Any] | None:
        """Telemetry of the rounds, for the record; None: there is no device to look at."""
        if self._telemetry is None:
            return None
        found = self._telemetry.summary(*self._stretch(result.rounds))
        rows = [row for row in self._by_round(result.rounds) if row.get("gpu") or row.get("cpu")]
        return {**found, "rounds": rows, "missing": self._telemetry.missing}

    def peak_bytes(self, outcome: Outcome, platform: str | None) -> int | None:
        """The most memory of the device that the engine held, in bytes.

        On a CPU the resident memory of the largest process; on a GPU what was in use at
        most, less what was in use before the engine started.
        """
        if platform == "cpu":
            return outcome.max_rss_bytes
        if self._telemetry is None or platform is None:
            return None
        before = self._telemetry.summary(None, self._marks[0]).get("gpu") or {}
        whole = self._telemetry.summary().get("gpu") or {}
        used, first = whole.get("memory_used_bytes"), before.get("memory_used_bytes")
        if not used or not first:
            return None
        return max(0, int(used["max"] - first["min"]))


def drift(spreads: Sequence[dict[str, float] | None]) -> float | None:
    """How far the rounds' median clocks lie apart, as a part of the largest; None if unseen."""
    medians = [spread["median"] for spread in spreads if spread]
    if len(medians) < 2 or max(medians) <= 0:
        return None
    return (max(medians) - min(medians)) / max(medians)


def _our_processes() -> set[int]:
    """The pids of all our descendants."""
    import psutil  # costs 20 ms: not at the top

    try:
        return {child.pid for child in psutil.Process().children(recursive=True)}
    except psutil.Error:
        return set()
