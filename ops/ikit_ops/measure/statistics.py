"""Rates from stamps, and what a few numbers say together.

A bandwidth is bytes over time, and the question is which time.  The best single pass flatters:
the clock is read a moment late, one thread runs while another waits for its core, and out of
enough passes one is lucky.  The mean of everything punishes: on a machine that others use too,
it tells what they were doing.  *Best sustained* stands between: the highest rate that **all
threads together** kept up through one unbroken window of a given length, much longer than a
pass over a chunk and than a time slice of the scheduler.  A window in which a thread was put
aside counts with what that thread did not do.

The stamps of a thread say how many bytes it had moved at which time; in between, it is taken to
have moved evenly.  The window may begin anywhere; it slides in tenths of its length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

STEPS = 10  # starts of a window per length of it


@dataclass(frozen=True)
class Stamps:
    """What one thread had moved when: ``moved[i]`` bytes at ``times[i]`` seconds, both rising."""

    times: Sequence[float]
    moved: Sequence[float]

    def until(self, when: float) -> float:
        """The bytes moved until then, by linear interpolation; constant outside the stamps."""
        after = bisect_right(self.times, when)
        if after == 0:
            return self.moved[0]
        if after == len(self.times):
            return self.moved[-1]
        begun, ended = self.times[after - 1], self.times[after]
        part = (when - begun) / (ended - begun)
        return self.moved[after - 1] + part * (self.moved[after] - self.moved[after - 1])


@dataclass(frozen=True)
class Window:
    """A stretch of time, in seconds, and the bytes per second that all moved in it together."""

    start: float
    end: float
    rate: float


def common_span(stamps: Sequence[Stamps]) -> tuple[float, float]:
    """From when the last thread had started until the first one ended; may be empty or reversed."""
    return max(s.times[0] for s in stamps), min(s.times[-1] for s in stamps)


def best_window(stamps: Sequence[Stamps], seconds: float) -> Window | None:
    """The window of that length with the highest rate; None when they never ran so long together.

    Only time in which every thread was between its first and its last stamp is looked at, so
    that no thread has the memory to itself because another has not started or is done.
    """
    if not stamps:
        return None
    begin, end = common_span(stamps)
    step = seconds / STEPS
    points = int((end - begin) / step + 1e-9) + 1
    if points <= STEPS:
        return None
    totals = [sum(s.until(begin + n * step) for s in stamps) for n in range(points)]
    moved, first = max((totals[n + STEPS] - totals[n], -n) for n in range(points - STEPS))
    start = begin - first * step
    return Window(start, start + seconds, moved / seconds)


def mean_rate(stamps: Sequence[Stamps]) -> float | None:
    """Bytes per second of all threads over the time in which all ran; None when they never did."""
    if not stamps:
        return None
    begin, end = common_span(stamps)
    if end <= begin:
        return None
    return sum(s.until(end) - s.until(begin) for s in stamps) / (end - begin)


def shortfall(samples: Sequence[float | None]) -> float | None:
    """How far the median of the samples lies below the best, 0 to 1; None for fewer than two."""
    known = [s for s in samples if s is not None]
    if len(known) < 2 or max(known) <= 0:
        return None
    return 1 - median(known) / max(known)
