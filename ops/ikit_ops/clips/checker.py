"""The checks of one clip, in the order in which one fault hides the next.

The mp4 leads to its dump by its hash; the dump must be readable and laid out as agreed before
its numbers mean anything; only then are request, schedule and arithmetic looked at.  A failed
check names the verdict, and later checks that can still run are made and told all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import OpError
from ikit_ops.clips import judge, modelfree, sampling
from ikit_ops.clips.manifest import Clip, Recipe, request_differences, sha256_of
from ikit_ops.clips.reader import DumpReader
from ikit_ops.clips.recorder import StepDumpError, dump_path
from ikit_ops.clips.verdicts import ClipResult

MAX_DUMPS_LOOKED_AT = 2_000
CALL_FIELDS = ("negative_prompt", "sampler", "sigmas", "call", "max_sequence_length")
Tick = Callable[[float], None]


@dataclass
class Examined:
    """One clip after the model-free checks."""

    index: int
    clip: Clip
    result: ClipResult
    dump: Path | None = None
    readable: bool = False
    steps: int = 0
    ranked: list[int] = field(default_factory=list)
    picked: list[int] = field(default_factory=list)
    sigmas: list[float] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing has failed so far."""
        return self.readable and self.result.failed is None


class DumpFolder:
    """The directory of the dumps; what other requests are in it is read when it is asked for."""

    def __init__(self, path: Path, claimed: set[str]) -> None:
        self.path, self._claimed = path, claimed
        self._requests: list[Mapping[str, Any]] | None = None

    def find(self, sha256: str) -> Path | None:
        """The dump of an mp4, or None."""
        path = dump_path(self.path, sha256)
        return path if path.is_symlink() or path.exists() else None

    def has_unclaimed(self, request: Mapping[str, Any]) -> bool:
        """Whether a dump of the same request is there that belongs to no listed mp4."""
        if self._requests is None:
            self._requests = list(self._read())
        return any(not request_differences(request, each) for each in self._requests)

    def _read(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        paths = sorted(self.path.glob("*.safetensors"))[:MAX_DUMPS_LOOKED_AT]
        for path in paths:
            if path.stem in self._claimed:
                continue
            try:
                with DumpReader(path) as reader:
                    if reader.request is not None:
                        found.append(reader.request)
            except StepDumpError:
                continue
        return found


def examine(
    index: int, clip: Clip, digest: str | None, folder: DumpFolder, recipe: Recipe, tick: Tick
) -> Examined:
    """Make every check of a clip that needs no model."""
    done = Examined(index, clip, ClipResult(digest))
    result = done.result
    if digest is None:
        result.add("mp4", False, f"{one_line(clip.video.name, 80)} cannot be read", "mp4_mismatch")
        return done
    path = folder.find(digest)
    if path is None:
        if folder.has_unclaimed(clip.request):
            detail = "a dump of this request is there, under the hash of another mp4"
            result.add("mp4", False, detail, "mp4_mismatch")
        else:
            result.add("dump", False, f"no {digest[:12]}….safetensors", "no_dump")
        return done
    result.add("dump", True, f"{digest[:12]}….safetensors")
    result.add("mp4", True, "the dump is named by the mp4's sha256", "mp4_mismatch")
    done.dump = path
    try:
        with DumpReader(path) as reader:
            _read_dump(done, reader, recipe, tick)
    except StepDumpError as error:
        done.readable = False
        result.add("readable", False, one_line(f"the dump {error}"), "unreadable")
    return done


def _read_dump(done: Examined, reader: DumpReader, recipe: Recipe, tick: Tick) -> None:
    result, request = done.result, done.clip.request
    result.add("readable", True, f"{reader.size} bytes", "unreadable")
    shapes = recipe.fields.get("latents")
    problems = modelfree.layout_of(reader, request, shapes)
    if reader.request is not None:
        _request(done, reader, recipe)
    if problems:
        result.add("layout", False, _several(problems))
        return
    done.readable, done.steps = True, reader.n_steps
    found = modelfree.scan(reader, tick=tick)
    streams = ", ".join(f"{name} {list(reader.shape(f'final.{name}'))}" for name in reader.streams)
    result.add("layout", not found.zero, _several(found.zero) or f"{done.steps} steps, {streams}")
    result.add("finite", not found.non_finite, _several(found.non_finite), "non_finite")
    _schedule(done, reader, recipe)
    sampler = _sampler(reader, recipe)
    if sampler is not None:
        detail = f"sampler {sampler}: only flow-match Euler is held against its arithmetic"
        result.add("arithmetic", None, detail, "not_checkable")
    else:
        worst = f"; worst {found.worst:.1f} x what rounding explains" if found.arithmetic else ""
        said = _several(found.arithmetic) or "x_next = x + (sigma_next - sigma) out"
        result.add("arithmetic", not found.arithmetic, said + worst)
    result.add("chain", not found.chain, _several(found.chain))
    result.add("final", not found.final, _several(found.final))
    result.add("reuse", not found.reused, _several(found.reused), "step_reuse")
    moves = found.suspicion.get("video") or next(iter(found.suspicion.values()))
    done.ranked = sampling.ranking(moves)


def _several(texts: Sequence[str]) -> str:
    """The first few of several findings, and how many there are."""
    shown = "; ".join(one_line(text, 160) for text in texts[:3])
    return shown if len(texts) <= 3 else f"{shown}; and {len(texts) - 3} more"


def _request(done: Examined, reader: DumpReader, recipe: Recipe) -> None:
    """Field by field, and the recipe's hash where both sides have one."""
    problems = request_differences(done.clip.request, reader.request or {})
    theirs = reader.meta.get("recipe_sha256")
    if recipe.sha256 is not None and theirs is not None and theirs != recipe.sha256:
        problems.append(
            f"recipe: asked {recipe.sha256[:12]}, the engine followed {one_line(theirs, 12)}"
        )
    done.result.add("request", not problems, "; ".join(problems[:6]), "request_mismatch")


def _schedule(done: Examined, reader: DumpReader, recipe: Recipe) -> None:
    sigma, after = reader.sigmas()
    done.sigmas = [*sigma, after[-1]]
    problems = modelfree.schedule_problems(sigma, after, recipe.sigmas)
    for stream in reader.streams:
        own = modelfree.stream_sigmas(reader, stream)
        if own is not None:
            problems += [f"{stream}: {text}" for text in modelfree.schedule_problems(*own)]
    against = "the recipe's" if recipe.sigmas else "falling to 0; not held against a scheduler"
    done.result.add("schedule", not problems, _several(problems) or against)


def _sampler(reader: DumpReader, recipe: Recipe) -> str | None:
    """The sampler when it is not flow-match Euler, by the recipe or by what the dump says."""
    if recipe.sampler != "euler":
        return one_line(recipe.sampler, 40)
    declared = modelfree.declared_sampler(reader)
    return one_line(declared, 40) if declared not in (None, "euler") else None


def pick_clips(examined: Sequence[Examined], wanted: int, rng: random.Random) -> list[Examined]:
    """The clips to replay: drawn among the clean ones, then among the readable."""
    clean = [each for each in examined if each.clean]
    rest = [each for each in examined if each.readable and not each.clean]
    picked = rng.sample(clean, min(wanted, len(clean)))
    picked += rng.sample(rest, min(wanted - len(picked), len(rest)))
    return sorted(picked, key=lambda each: each.index)


def digests(clips: Sequence[Clip], tick: Tick) -> list[str | None]:
    """The sha256 of every mp4; None for one that cannot be read."""
    found: list[str | None] = []
    for number, clip in enumerate(clips):
        tick(number / len(clips))
        try:
            found.append(sha256_of(clip.video))
        except OpError:
            found.append(None)
    return found


def absorb(done: Examined, told: Mapping[str, Any], replayed: bool) -> None:
    """Put what the worker found about a clip into its checks."""
    result = done.result
    noise = told.get("noise")
    if isinstance(noise, dict):
        result.add("noise", noise.get("ok"), one_line(str(noise.get("detail", ""))))
    if told.get("problem"):
        result.add("replay", None, one_line(str(told["problem"])), "inconclusive")
        return
    if not replayed:
        return
    expected = told.get("shapes") or {}
    if not told.get("steps"):
        shapes = ", ".join(f"{name} {shape}" for name, shape in expected.items())
        result.add("reference layout", False, f"the reference makes {one_line(shapes)}", "layout")
        return
    schedule = told.get("schedule") or []
    problems = modelfree.schedule_problems(done.sigmas[:-1], done.sigmas[1:], schedule)
    result.add("reference schedule", not problems, _several(problems), "schedule")
    steps = [judge.Step(**row) for row in told["steps"]]
    candidates = [judge.Candidate(**row) for row in told.get("candidates") or ()]
    found = judge.judge(steps, candidates)
    result.steps = [step.to_json() for step in steps]
    result.replayed = True
    if found.verdict in ("pass", "inconclusive"):
        result.open_verdict = found.verdict if found.verdict == "inconclusive" else None
        result.add("replay", found.verdict == "pass" or None, found.detail, "inconclusive")
    else:
        result.add("replay", False, one_line(found.detail, 400), found.verdict)
    pixels = told.get("clip")
    if isinstance(pixels, dict):
        result.add("clip", pixels.get("ok"), one_line(str(pixels.get("detail"))), "clip_mismatch")
