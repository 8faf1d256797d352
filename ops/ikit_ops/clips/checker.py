"""The checks of one clip, in the order in which one fault hides the next.

The mp4 leads to its dump by its hash; the dump must be readable and laid out as agreed before
its numbers mean anything; only then are request, schedule and arithmetic looked at.  A failed
check names the verdict, and later checks that can still run are made and told all the same.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import OpError
from ikit_ops.clips import judge, modelfree, sampling
from ikit_ops.clips.manifest import COMPARED, Clip, Recipe, request_differences, sha256_of
from ikit_ops.clips.reader import DumpReader, NotReadableHere
from ikit_ops.clips.recorder import StepDumpError, dump_path
from ikit_ops.clips.verdicts import ClipResult

MAX_DUMPS_LOOKED_AT = 2_000
Tick = Callable[[float], None]


@dataclass(frozen=True)
class Digest:
    """An mp4's sha256; None with the reason when it cannot be read."""

    sha256: str | None
    problem: str = ""


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
    levels: dict[str, modelfree.Levels] = field(default_factory=dict)

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
        """The dump of an mp4, or None; NotReadableHere when the folder is closed to us."""
        path = dump_path(self.path, sha256)
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise NotReadableHere(f"it cannot be looked for: {error.strerror}") from error
        return path

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
    index: int, clip: Clip, digest: Digest, folder: DumpFolder, recipe: Recipe, tick: Tick
) -> Examined:
    """Make every check of a clip that needs no model."""
    done = Examined(index, clip, ClipResult(digest.sha256))
    result = done.result
    if digest.sha256 is None:
        detail = f"{one_line(clip.video.name, 80)} {digest.problem}"
        result.add("mp4", None, detail, "not_checkable")
        return done
    name = f"{digest.sha256[:12]}….safetensors"
    try:
        path = folder.find(digest.sha256)
        if path is None:
            _missing_dump(done, folder, name)
            return done
        result.add("dump", True, name)
        result.add("mp4", True, "the dump is named by the mp4's sha256", "mp4_mismatch")
        done.dump = path
        with DumpReader(path) as reader:
            _read_dump(done, reader, recipe, tick)
    except NotReadableHere as error:
        done.readable = False
        detail = f"{name}: {error}; a dump is private to the user that wrote it"
        result.add("readable", None, one_line(detail), "not_checkable")
    except StepDumpError as error:
        done.readable = False
        result.add("readable", False, one_line(f"the dump: {error}"), "unreadable")
    return done


def _missing_dump(done: Examined, folder: DumpFolder, name: str) -> None:
    if folder.has_unclaimed(done.clip.request):
        detail = "a dump of this request is there, under the hash of another mp4"
        done.result.add("mp4", False, detail, "mp4_mismatch")
    else:
        done.result.add("dump", False, f"no {name}", "no_dump")


def _read_dump(done: Examined, reader: DumpReader, recipe: Recipe, tick: Tick) -> None:
    result = done.result
    result.add("readable", True, f"{reader.size} bytes", "unreadable")
    problems = modelfree.layout_of(reader, reader.request or {}, None)
    if reader.request is not None:
        same = _request(done, reader, recipe)
        shapes = recipe.fields.get("latents")
        if same and shapes and not problems:  # the recipe's shapes are for what was asked for
            problems = modelfree.layout_of(reader, reader.request, shapes)
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


def _request(done: Examined, reader: DumpReader, recipe: Recipe) -> bool:
    """Field by field, and the recipe's hash where both sides have one; whether all is the same."""
    asked = done.clip.request
    problems = request_differences(asked, reader.request or {})
    if reader.streams and (reader.request or {}).get("audio") is not True:
        problems += modelfree.audio_problems(reader, asked)
    theirs = reader.meta.get("recipe_sha256")
    if recipe.sha256 is not None and theirs is not None and theirs != recipe.sha256:
        problems.append(
            f"recipe: asked {recipe.sha256[:12]}, the engine followed {one_line(theirs, 12)}"
        )
    unasked = [name for name in COMPARED if asked.get(name) is None]
    told = f"not named by the manifest, so not compared: {', '.join(unasked)}" if unasked else ""
    compared = len(unasked) < len(COMPARED)
    done.result.add(
        "request", (not problems) if problems or compared else None,
        "; ".join(problems[:6]) or told, "request_mismatch",
    )  # fmt: skip
    return not problems


def _schedule(done: Examined, reader: DumpReader, recipe: Recipe) -> None:
    """Every stream's noise levels, each held against the recipe's."""
    problems = modelfree.own_schedule_problems(reader)
    done.levels = {stream: modelfree.levels_of(reader, stream) for stream in reader.streams}
    problems += _schedule_problems(done.levels, recipe.sigmas)
    against = "the recipe's" if recipe.sigmas else "falling to 0; not held against a scheduler"
    done.result.add("schedule", not problems, _several(problems) or against)


def _schedule_problems(
    levels: Mapping[str, modelfree.Levels], expected: Sequence[float] | None
) -> list[str]:
    """What is wrong with the streams' levels, each told once where they are the same."""
    told: dict[str, str] = {}
    for stream, (sigma, after) in levels.items():
        for text in modelfree.schedule_problems(sigma, after, expected):
            told.setdefault(text, text if stream == "video" else f"{stream}: {text}")
    return list(told.values())


def _sampler(reader: DumpReader, recipe: Recipe) -> str | None:
    """The sampler when it is not flow-match Euler, by the recipe or by what the dump says."""
    for named in (recipe.sampler, modelfree.declared_sampler(reader)):
        if named and not modelfree.is_euler(named):
            return one_line(named, 40)
    return None


def _reference_schedule(done: Examined, expected: Sequence[float]) -> None:
    """The streams' levels against the reference's; its own may be none for very few steps."""
    if not all(map(math.isfinite, expected)):
        told = "the reference has no schedule of so few steps"
        done.result.add("reference schedule", None, told, "schedule")
        return
    problems = _schedule_problems(done.levels, expected)
    done.result.add("reference schedule", not problems, _several(problems), "schedule")


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """A replayed step, None where a fit of hostile latents is no number."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _absorb_no_steps(result: ClipResult, expected: Mapping[str, Any]) -> None:
    """The reference makes latents of other shapes, so that there was nothing to replay."""
    if not expected:
        result.add("replay", None, "the replay says nothing about this clip", "inconclusive")
        return
    shapes = ", ".join(f"{name} {shape}" for name, shape in expected.items())
    asked = all(check.ok is not False for check in result.checks if check.name == "request")
    detail = f"the reference makes {one_line(shapes)}"
    if asked:
        result.add("reference layout", False, detail, "layout")
    else:
        result.add("reference layout", None, f"{detail} of the request that was asked for")


def pick_clips(examined: Sequence[Examined], wanted: int, rng: random.Random) -> list[Examined]:
    """The clips to replay: drawn among the clean ones, then among the readable."""
    clean = [each for each in examined if each.clean]
    rest = [each for each in examined if each.readable and not each.clean]
    picked = rng.sample(clean, min(wanted, len(clean)))
    picked += rng.sample(rest, min(wanted - len(picked), len(rest)))
    return sorted(picked, key=lambda each: each.index)


def digests(clips: Sequence[Clip], tick: Tick) -> list[Digest]:
    """The sha256 of every mp4, or why there is none."""
    found: list[Digest] = []
    for number, clip in enumerate(clips):
        tick(number / len(clips))
        try:
            found.append(Digest(sha256_of(clip.video)))
        except OpError as error:
            found.append(Digest(None, error.what))
    return found


def absorb(done: Examined, told: Mapping[str, Any], replayed: bool) -> None:
    """Put what the worker found about a clip into its checks."""
    _absorb_finding(done.result, told, "noise", "noise")
    if told.get("problem"):
        done.result.add("replay", None, one_line(str(told["problem"])), "inconclusive")
    elif replayed:
        _absorb_replay(done, told)
    for name in ("clip", "audio"):
        _absorb_finding(done.result, told, name, "clip_mismatch")


def _absorb_finding(result: ClipResult, told: Mapping[str, Any], name: str, verdict: str) -> None:
    found = told.get(name)
    if isinstance(found, dict):
        result.add(name, found.get("ok"), one_line(str(found.get("detail", "")), 400), verdict)


def _absorb_replay(done: Examined, told: Mapping[str, Any]) -> None:
    result = done.result
    if not told.get("steps"):
        _absorb_no_steps(result, told.get("shapes") or {})
        return
    _reference_schedule(done, told.get("schedule") or [])
    steps = [judge.Step(**_finite(row)) for row in told["steps"]]
    candidates = [judge.Candidate(**row) for row in told.get("candidates") or ()]
    found = judge.judge(steps, candidates)
    result.steps = [step.to_json() for step in steps]
    result.replayed = True
    if found.verdict in ("pass", "inconclusive"):
        result.open_verdict = found.verdict if found.verdict == "inconclusive" else None
        result.add("replay", found.verdict == "pass" or None, found.detail, "inconclusive")
    else:
        result.add("replay", False, one_line(found.detail, 400), found.verdict)
