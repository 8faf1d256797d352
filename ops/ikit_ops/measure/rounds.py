"""A round is the unit of measuring: started together, timed, and kept whether it was good or not.

Reading and copying take turns inside a round, so that whatever the machine does meanwhile --
another process starts, the chip gets warm -- falls on both.  All rounds are in the record: the
metric is their best, and how far the others lie below it says what to think of it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ikit_mcp.call import Call, Cancelled, one_line
from ikit_mcp.registry import OpError
from ikit_ops.measure.statistics import Stamps, best_window, mean_rate

GB = 1e9
LEAST_ROUNDS, MOST_ROUNDS = 3, 60
PROGRESS_SECONDS = 1.0
SIGKILL = 9  # Windows' signal module has no such name


@dataclass(frozen=True)
class Round:
    """One round: its times (CLOCK_MONOTONIC seconds) and its rates in GB/s, None if not seen.

    ``read_gbs`` and ``copy_gbs`` are the best windows of the round, the means those of all of it.
    """

    index: int
    t_start: float
    t_end: float
    read_gbs: float | None
    copy_gbs: float | None
    read_mean_gbs: float | None
    copy_mean_gbs: float | None


@dataclass(frozen=True)
class Outcome:
    """The rounds, whether the proofs that data was read held, and how many reads differed."""

    rounds: list[Round]
    verified: bool
    differences: int = 0

    def samples(self, name: str) -> list[float | None]:
        """A rate of every round, in their order."""
        return [getattr(found, name) for found in self.rounds]

    def best(self, name: str) -> float | None:
        """The highest of a rate over the rounds, None when no round has it."""
        return max((s for s in self.samples(name) if s is not None), default=None)


def phases(seconds: float, round_seconds: float, read_part: float) -> list[dict[str, Any]]:
    """What a worker does, in order: read and copy in turns, ``seconds`` in all."""
    count = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / round_seconds + 0.5)))
    each = seconds / count
    return [
        {"kind": kind, "seconds": each * part}
        for _ in range(count)
        for kind, part in (("read", read_part), ("copy", 1 - read_part))
    ]


def rounds_of(told: Sequence[dict[str, Any]], window: float) -> list[Round]:
    """The rounds in a worker's phases (``kind``, ``threads`` of ``times`` and ``bytes``)."""
    found = []
    for index, (read, copy) in enumerate(zip(told[::2], told[1::2], strict=True)):
        reads, copies = _stamps(read), _stamps(copy)
        found.append(
            Round(
                index=index,
                t_start=round(min(s.times[0] for s in reads), 6),
                t_end=round(max(s.times[-1] for s in copies), 6),
                read_gbs=_best(reads, window),
                copy_gbs=_best(copies, window),
                read_mean_gbs=_gbs(mean_rate(reads)),
                copy_mean_gbs=_gbs(mean_rate(copies)),
            )
        )
    return found


def _stamps(phase: dict[str, Any]) -> list[Stamps]:
    return [Stamps(thread["times"], thread["bytes"]) for thread in phase["threads"]]


def _best(stamps: Sequence[Stamps], window: float) -> float | None:
    best = best_window(stamps, window)
    return _gbs(best.rate) if best is not None else None


def _gbs(rate: float | None) -> float | None:
    return None if rate is None else round(rate / GB, 3)


def answer_of(path: Path, stderr: str, signal: int | None) -> dict[str, Any]:
    """What a worker left in its result file; OpError says why it left none, or no measurement."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        told = {}
    if isinstance(told, dict) and "phases" in told:
        return told
    why = told.get("error") if isinstance(told, dict) else None
    if why is None and signal is not None:
        why = f"the worker was ended by signal {signal}"
        if signal == SIGKILL:
            why += ", as when the system runs out of memory"
    why = one_line(str(why or stderr[-300:] or "its worker left no result"))
    raise OpError(
        f"the bandwidth could not be measured: {why}",
        "try with a smaller size_bytes or fewer threads",
    )


class Progressing:
    """Tells of the time that passes while a child measures; cancelling is left to the run."""

    def __init__(self, call: Call, seconds: float, what: str) -> None:
        self._call, self._seconds, self._what = call, seconds, what
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._call.progress(0, self._seconds, self._what)
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _tell(self) -> None:
        begun = time.monotonic()
        with contextlib.suppress(Cancelled):
            while not self._stop.wait(PROGRESS_SECONDS):
                passed = min(time.monotonic() - begun, self._seconds)
                self._call.progress(round(passed, 1), self._seconds, self._what)
