"""The word that a recorded clip gets, as the checker finds it, without its parent process.

Only Pythons with torch and diffusers import this.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fakes import clips_models
from ikit_ops.clips import judge, modelfree, sampling
from ikit_ops.clips.engine import noise
from ikit_ops.clips.engine.replay import Reference, Replay, Replayed
from ikit_ops.clips.reader import DumpReader

OTHERS = [{"prompt": "gold kite falls"}]


def replayed(
    path: Path, reference: Reference, asked: Mapping[str, Any], seed: int, steps: int = 6
) -> Replayed:
    """The replay of steps that are picked as the checker picks them."""
    with DumpReader(path) as reader:
        ranked = sampling.ranking(modelfree.scan(reader).suspicion["video"])
        picked = sampling.pick_steps(reader.n_steps, steps, ranked, random.Random(seed))
        done = Replay(reader, reference, asked, picked, lambda what: None).run(OTHERS)
        assert modelfree.schedule_problems(*reader.sigmas(), done.schedule) == []
    return done


def word_of(
    path: Path, reference: Reference, asked: Mapping[str, Any], seed: int
) -> tuple[str, Any]:
    """The clip's word, and why."""
    with DumpReader(path) as reader:
        assert modelfree.layout_of(reader, asked, None) == []
        assert modelfree.schedule_problems(*reader.sigmas()) == []
        found = modelfree.scan(reader)
        assert not (found.arithmetic or found.chain or found.final or found.non_finite)
        first = {name: reader.get(f"step.0.{name}.x") for name in reader.streams}
        drawn, why = noise.check(first, asked)
    done = replayed(path, reference, asked, seed)
    if not drawn:
        return "noise", why
    if found.reused:
        return "step_reuse", found.reused
    judged = judge.judge(done.steps, done.candidates)
    return judged.verdict, (judged.detail, [round(step.r, 2) for step in done.steps])


def prompt_of(seed: int) -> str:
    """A prompt that is neither the negative one nor the stale one, nor what a cut one becomes."""
    used = ("blue kite waits", "gold kite falls", "red kite rises")
    usable = [prompt for prompt in clips_models.prompts() if prompt not in used]
    return usable[seed % len(usable)]
