"""Whether a server answers from a cache: each fresh request once more, at once, and alone.

A fresh request is timed by itself and sent again right after, so that queues, temperature and
what else drifts are the same for both, and even a cache of one result is met.  One pair tells
little: pairs are added until it is plain, at most five.  What is told then depends on the spread:

* half the time or less, in every pair, or no denoising: the result came from a cache;
* more than a tenth faster in the middle, and faster in every pair: something is kept (five pairs
  of equals look so once in 32 times), and the record is not established;
* anything between is noise, and is told as that; clips of a few milliseconds are no clips.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ikit_ops.clips.account import Answer

LEAST, MOST = 2, 5
CACHED, HINT, PLAIN = 0.5, 0.9, 0.95
SKIPPED = 0.1
QUICK_S = 0.01


@dataclass(frozen=True)
class Pair:
    """A fresh request's answer, and that of the very same request after it."""

    fresh: Answer
    repeat: Answer

    @property
    def failed(self) -> bool:
        """Whether either was no clip."""
        return bool(self.fresh.error or self.repeat.error)

    @property
    def ratio(self) -> float:
        """The repeat's latency as a part of the fresh one's."""
        return self.repeat.latency_s / self.fresh.latency_s if self.fresh.latency_s else 1.0

    @property
    def cached(self) -> bool:
        """Whether the repeat came in less than half the time, by more than a moment."""
        return self.repeat.latency_s + QUICK_S < CACHED * self.fresh.latency_s

    @property
    def skipped(self) -> bool:
        """Whether the repeat was answered with next to no denoising."""
        before, after = (a.stages_ms.get("denoise") for a in (self.fresh, self.repeat))
        if not before or not self.repeat.stages_ms:
            return False
        return (after or 0.0) < SKIPPED * before


@dataclass
class Finding:
    """What the pairs show: at most one of the three texts."""

    violation: str | None = None
    doubt: str | None = None
    warning: str | None = None
    unknown: str | None = None
    told: list[dict[str, Any]] = field(default_factory=list)


def plain(pairs: Sequence[Pair]) -> bool:
    """Whether no more pairs are needed."""
    if any(pair.failed for pair in pairs) or len(pairs) >= MOST:
        return True
    if len(pairs) < LEAST:
        return False
    if all(pair.cached for pair in pairs) or all(pair.skipped for pair in pairs):
        return True
    return statistics.median(pair.ratio for pair in pairs) >= PLAIN


def judge(pairs: Sequence[Pair], timed: Sequence[Answer]) -> Finding:
    """What is to be said; ``timed`` are the timed answers of the pairs' size."""
    told = [
        {"fresh_s": pair.fresh.latency_s, "repeat_s": pair.repeat.latency_s,
         "same_mp4": None if pair.failed else pair.fresh.sha256 == pair.repeat.sha256,
         "error": pair.fresh.error or pair.repeat.error}
        for pair in pairs
    ]  # fmt: skip
    good = [pair for pair in pairs if not pair.failed]
    if len(good) < LEAST:
        why = next((each["error"] for each in told if each["error"]), "there was no time for it")
        return Finding(unknown=f"whether results are cached ({why})", told=told)
    least = min(pair.fresh.latency_s for pair in good)
    if least < QUICK_S:
        return Finding(
            unknown=f"whether results are cached (fresh ones take {least * 1e3:.1f} ms: too quick"
            " to tell)",
            told=told,
        )
    ratio = statistics.median(pair.ratio for pair in good)
    seen = f"{100 * ratio:.0f} % of a fresh one's time (the median of {len(good)})"
    if all(pair.cached for pair in good) or all(pair.skipped for pair in good):
        return Finding(violation=f"result_cache: a repeated request took {seen}", told=told)
    if early := [a.latency_s for a in timed if a.latency_s < CACHED * least - QUICK_S]:
        return Finding(
            violation=f"result_cache: {len(early)} of {len(timed)} timed requests took"
            f" {min(early):.3f} s or more, and fresh ones of their size at least {least:.3f} s",
            told=told,
        )
    if ratio < HINT and all(pair.ratio < 1 for pair in good):
        return Finding(
            doubt=f"result_cache: a repeated request took {seen}, and was faster every time",
            told=told,
        )
    if ratio < HINT:
        return Finding(
            warning=f"a repeated request took {seen}, but not every time: noise, or a cache",
            told=told,
        )
    return Finding(told=told)
