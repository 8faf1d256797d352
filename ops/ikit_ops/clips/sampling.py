"""Which steps are replayed: some for what they are, the rest by a draw after the clip was made.

The first step and the last are always among them (caches warm up and cool down there), and the
two that look most like skipped work.  Those choices could be foreseen, the rest cannot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence


def pick_steps(count: int, wanted: int, ranked: Sequence[int], rng: random.Random) -> list[int]:
    """The steps to replay: first, last, the two most suspicious, the rest at random."""
    if count <= wanted:
        return list(range(count))
    forced = list(dict.fromkeys([0, count - 1, *ranked[:2]]))[:wanted]
    others = [step for step in range(count) if step not in forced]
    return sorted(forced + rng.sample(others, wanted - len(forced)))


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
