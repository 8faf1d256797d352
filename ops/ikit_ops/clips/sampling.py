"""Which steps are replayed: some for what they are, the rest by a draw after the clip was made.

The first step and the last are looked at (caches warm up and cool down there), and the two that
look most like skipped work.  Those choices can be foreseen, by whoever knows this page; the rest
cannot.  So at least two steps are always drawn, and only those count in the odds (``detection``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

DRAWN = 2
ENOUGH = 2  # of fewer, one step tells nothing of the others


def foreseen(count: int, wanted: int, ranked: Sequence[int]) -> list[int]:
    """The steps that are replayed for what they are: first, last, the two most suspicious."""
    there = [step for step in ranked if 0 <= step < count][:2]
    return list(dict.fromkeys([0, count - 1, *there]))[: max(0, wanted - DRAWN)]


def pick_steps(count: int, wanted: int, ranked: Sequence[int], rng: random.Random) -> list[int]:
    """The steps to replay, in order: the foreseen ones, and the rest at random."""
    if count <= wanted:
        return list(range(count))
    forced = foreseen(count, wanted, ranked)
    others = [step for step in range(count) if step not in forced]
    return sorted(forced + rng.sample(others, wanted - len(forced)))


def odds_of(count: int, wanted: int, ranked: Sequence[int]) -> tuple[int, int]:
    """Of what ``pick_steps`` replays: how many steps are open to the draw, how many are drawn."""
    if count <= wanted:
        return count, count
    forced = len(foreseen(count, wanted, ranked))
    return count - forced, wanted - forced


def ranking(moves: Sequence[float]) -> list[int]:
    """The steps by suspicion: those that move least against their neighbours, then jumps.

    A cached step moves less than its neighbours, and the step after it makes up for it.  Only a
    ranking: honest outputs differ by 7 to 21 % from step to step.
    """

    def score(step: int) -> float:
        near = [moves[n] for n in (step - 1, step + 1) if 1 <= n < len(moves)]
        usual = sum(near) / len(near) if near else 0.0
        return moves[step] / usual if usual else math.inf

    return sorted(range(1, len(moves)), key=score)
