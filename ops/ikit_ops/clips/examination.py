"""One call of ``clip_steps``: from the manifest, through checks and replay, to the draft.

The checks that need no model run here; the replay runs in the engine's own Python
(``torchside``), on steps that are drawn after the clips were made.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.evidence.record import (
    Device,
    Draft,
    Gates,
    Identity,
    Metric,
    Model,
    metric,
)
from ikit_mcp.registry import OpError
from ikit_ops.clips import checker, manifest, sampling, torchside
from ikit_ops.clips.checker import Examined
from ikit_ops.clips.verdicts import (
    FAILURES,
    FROM_BF16,
    MEANING,
    NOT_TOLD_APART,
    detection,
    worst,
)

NO_TORCH = "needs torch"


class Examination:
    """One call's way from the manifest to the draft."""

    def __init__(
        self, call: Call, clips: list[manifest.Clip], paths: Mapping[str, Path],
        recipe: manifest.Recipe, seed: int, device: str, decode: bool,
    ) -> None:  # fmt: skip
        self.call, self.clips, self.paths, self.recipe = call, clips, paths, recipe
        self.seed, self.device_asked, self.decode = seed, device, decode
        self.rng = random.Random(f"clip_steps:{seed}")  # noqa: S311 -- a draw that can be repeated
        self.examined: list[Examined] = []
        self.picked: list[Examined] = []
        self.missing: list[str] = []
        self.found: dict[str, Any] = {}
        self.odds: dict[int, tuple[int, int]] = {}
        self.device: Device | None = None

    def examine(self) -> None:
        """The model-free checks of every clip."""
        count = len(self.clips)

        told = 0.0

        def tell(done: float, what: str) -> None:
            """Progress twice a second; a cancelled call is noticed each time."""
            nonlocal told
            self.call.check_cancelled()
            if time.monotonic() - told > 0.5:
                told = time.monotonic()
                self.call.progress(done, 2 * count, what)

        def hashing(share: float) -> None:
            tell(share * count, "hashing the mp4 files")

        found = checker.digests(self.clips, hashing)
        claimed = {each.sha256 for each in found if each.sha256}
        folder = checker.DumpFolder(self.paths["dumps"], claimed)
        for index, (clip, digest) in enumerate(zip(self.clips, found, strict=True)):

            def reading(share: float, index: int = index) -> None:
                tell(count + index + share, f"clip {index + 1} of {count}")

            reading(0.0)
            self.examined.append(checker.examine(index, clip, digest, folder, self.recipe, reading))

    def replay(self, steps: int, clips: int) -> None:
        """The noise of every readable clip, and the replay of those that are drawn."""
        readable = [each for each in self.examined if each.readable]
        reference = self.paths.get("reference")
        needed = ("torch", "diffusers", "transformers") if reference else ("torch",)
        python = torchside.find_python(self.call, needed) if readable else None
        if reference and readable and python is None:
            raise OpError(
                f"no Python with {', '.join(needed)} is here to run the reference",
                "install ikit-mcp[clips], or name a Python that has them in IKIT_PYTHONS",
            )
        if reference:
            self.picked = checker.pick_clips(self.examined, clips, self.rng)
            for each in self.picked:
                each.picked = sampling.pick_steps(each.steps, steps, each.ranked, self.rng)
                self.odds[each.index] = sampling.odds_of(each.steps, steps, each.ranked)
        else:
            self.missing.append("reference: without it only the model-free checks ran")
        if python is None:
            if readable:
                self.missing.append("noise: no Python with torch is here to draw it")
                for each in readable:
                    each.result.add("noise", None, NO_TORCH)
            return
        self.found = torchside.run_worker(self.call, python, self._task(readable, reference))
        if self.found.get("recipe_problem"):
            raise OpError(
                one_line(str(self.found["recipe_problem"])),
                "correct the recipe's call; the engine uses the same file",
            )
        if self.found.get("problem"):
            raise OpError(
                f"the reference cannot be used: {one_line(str(self.found['problem']))}",
                "give a model directory with safetensors weights in the diffusers layout",
            )
        for each in readable:
            told = self.found["clips"].get(str(each.index)) or {}
            checker.absorb(each, told, bool(each.picked))
            seen = len(each.picked)
            if each.picked and seen < min(sampling.ENOUGH, each.steps):
                each.result.add(
                    "sample", None, f"{seen} of {each.steps} steps tells nothing of the others;"
                    f" replay {sampling.ENOUGH} at least", "inconclusive",
                )  # fmt: skip

    def _task(self, readable: Sequence[Examined], reference: Path | None) -> dict[str, Any]:
        chosen = torchside.choose(self.call.devices(), self.device_asked) if reference else None
        if chosen is not None:
            self.device = Device(name=one_line(chosen.name), uuid=chosen.uuid, driver=chosen.driver)
        others = [dict(each.clip.request) for each in self.examined[:32]]
        return {
            "reference": str(reference) if reference else None,
            "recipe": self.recipe.fields,
            "device": chosen.id.replace("rocm", "cuda") if chosen is not None else "cpu",
            "threads": self.call.cpu().usable_threads or self.call.cpu().threads,
            "decode": self.decode,
            "others": others,
            "clips": [
                {
                    "index": each.index,
                    "dump": str(each.dump),
                    "video": str(each.clip.video),
                    "request": each.clip.request,
                    "steps": each.picked,
                }
                for each in readable
            ],
        }

    # --- what it comes to ------------------------------------------------------------

    @property
    def judged(self) -> list[Examined]:
        """The clips whose word counts: all, but clean ones that were not drawn."""
        if not self.picked:
            return self.examined
        return [each for each in self.examined if each.picked or each.result.failed]

    @property
    def verdict(self) -> str:
        """The record's word."""
        return worst(each.result.verdict for each in self.judged)

    def draft(self) -> Draft:
        """The record's content."""
        verdict = self.verdict
        results = [each.result for each in self.examined]
        counts = {word: sum(r.verdict == word for r in results) for word in MEANING}
        names = list(dict.fromkeys(check.name for r in results for check in r.checks))
        replayed = [each for each in self.picked if each.result.replayed]
        return Draft(
            kind="clip-steps",
            claim_class="checked",
            valid=True if verdict == "pass" else False if verdict in FAILURES else None,
            summary=self._summary(verdict),
            identity=self._identity(),
            metrics=self._metrics(),
            gates=Gates(checked=names, violations=self._violations()),
            missing=self._missing(),
            limitations=self._limitations(replayed),
            data={
                "verdict": verdict,
                "meaning": MEANING[verdict],
                "counts": {word: count for word, count in counts.items() if count},
                "detection": self._detection(replayed),
                "recipe_sha256": self.recipe.sha256,
                "seed": self.seed,
                "reference_passes": self.found.get("passes"),
                "clips": [result.to_json() for result in results],
            },
        )

    def _identity(self) -> Identity:
        first = self.clips[0].request
        sizes = ("width", "height", "num_frames", "fps", "steps", "guidance_scale")
        model = self.recipe.fields.get("model") or self.paths.get("reference")
        revision = self.recipe.fields.get("revision")
        return Identity(
            model=Model(id=one_line(str(model)), revision=revision) if model else None,
            device=self.device,
            workload={"clips": len(self.clips), **{name: first.get(name) for name in sizes}},
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [row for each in self.examined for row in each.result.steps]

    def _metrics(self) -> list[Metric]:
        values = [row["r"] for row in self._rows()]
        unit = "x bf16 floor"
        passed = sum(each.result.verdict == "pass" for each in self.examined)
        return [
            metric("max_r", max(values, default=None), unit, "max"),
            metric("median_r", statistics.median(values) if values else None, unit, "median"),
            metric("clips_passed", passed, "clips", "count"),
            metric("clips_checked", len(self.examined), "clips", "count"),
            metric("steps_replayed", len({(id(r), row["step"]) for r in self.picked
                                          for row in r.result.steps}), "steps", "count"),
        ]  # fmt: skip

    def _violations(self) -> list[str]:
        lines = []
        for each in self.examined:
            failed = each.result.failed
            if failed is not None:
                lines.append(f"clip {each.index}: {failed.verdict}: {one_line(failed.detail)}")
        return lines[:20]

    def _missing(self) -> list[str]:
        missing = list(self.missing)
        for each in self.examined:
            missing += [
                f"clip {each.index}: {check.name}: {check.detail}"
                for check in each.result.checks
                if check.ok is None and check.detail != NO_TORCH
            ]
        return missing[:20]

    def _limitations(self, replayed: Sequence[Examined]) -> list[str]:
        lines = []
        if replayed:
            lines += [self._sampled(replayed), NOT_TOLD_APART]
        if (self.found.get("model") or {}).get("dtype") == "bfloat16":
            lines.append(FROM_BF16)
        unseen = sorted({name for row in self._rows() for name in row.get("unseen") or ()})
        if unseen:
            lines.append(
                f"without effect on some outputs here, and so not proven: {', '.join(unseen)}"
            )
        if self.recipe.sha256 is None:
            lines.append("no recipe: negative prompt and other scales are the pipeline's defaults")
        if not self.decode:
            lines.append("the mp4 was not compared with the final latent (decode)")
        elif any("audio" in each.levels for each in self.picked):
            lines.append("of the audio only the mp4's track and its length were looked at")
        lines.append("the dumps are the engine's own account; a hash ties each to its mp4 by name")
        return lines

    def _sampled(self, replayed: Sequence[Examined]) -> str:
        """What was replayed, and how likely a step cache would have been hit."""
        steps, seen = replayed[0].steps, len(replayed[0].picked)
        bad = max(1, round(steps / 10))
        odds = detection([self.odds[each.index] for each in replayed], bad)
        drawn = self.odds[replayed[0].index][1]
        cache = f"a cache of {bad} step{'s' if bad > 1 else ''}"
        return (
            f"{seen} of {steps} steps of {len(replayed)} of {len(self.examined)} clips were"
            f" replayed, {drawn} of them drawn (seed {self.seed}); {cache} in {steps}, wherever"
            f" they lie, would have been hit with probability {odds:.2f}"
        )

    def _detection(self, replayed: Sequence[Examined]) -> list[dict[str, Any]]:
        if not replayed:
            return []
        steps = replayed[0].steps
        sampled = [self.odds[each.index] for each in replayed]
        cheated = sorted({1, max(1, steps // 10), max(1, steps // 3), max(1, steps // 2)})
        return [
            {"cheated_steps": n, "of": steps, "probability": round(detection(sampled, n), 4)}
            for n in cheated
        ]

    def _why(self, verdict: str, clip: Examined) -> str:
        """What was not seen, in the words of the first clip of a verdict that is no failure."""
        unseen = [f"{c.name}: {c.detail}" for c in clip.result.checks if c.ok is None]
        whole = [] if verdict == "not_checkable" else self.missing
        return one_line(next(iter([*whole, *unseen]), ""), 300)

    def _summary(self, verdict: str) -> str:
        judged = self.judged
        same = [each for each in judged if each.result.verdict == verdict]
        count = f"{len(same)} of {len(judged)} clips"
        if verdict == "pass":
            high = max((row["r"] for row in self._rows()), default=0.0)
            return f"pass: {count} compute the reference within its bf16 noise (r up to {high:.2f})"
        if verdict not in FAILURES:
            why = self._why(verdict, same[0])
            return f"{verdict}: {MEANING[verdict]}; {count}" + (f": {why}" if why else "")
        failed = same[0].result.failed
        detail = failed.detail if failed is not None else ""
        shown = verdict.replace("_", " ")
        return f"NOT the same computation: {shown}. {count}: {one_line(detail, 300)}"
