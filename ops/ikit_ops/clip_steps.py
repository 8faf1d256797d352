"""Whether a fast video engine still computes the steps that its model asks for.

Step caches, wrong guidance and low precision make video engines fast and wrong, and pixels
cannot tell: an honest change of kernels moves them as much.  What can tell is *teacher forcing*.
The engine writes down each step that it took (``clips.stepdump``); the reference is run on a few
of these steps, each from the very latent that the engine had, so that nothing accumulates and
one step's output is compared with one step's output.  Which steps are replayed is drawn after
the clips were made.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ikit_mcp.call import Call, expanded, one_line
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import DERIVES, MEASURES, Arg, Effects, OpError, Varying, operation

if TYPE_CHECKING:
    from pathlib import Path

    from ikit_ops.clips.examination import Examination
    from ikit_ops.clips.manifest import Clip, Recipe


def _effects(arguments: Mapping[str, Any]) -> Effects:
    """Running the reference takes the device; everything else only reads the dumps."""
    return MEASURES if arguments.get("reference") else DERIVES


@operation(
    "clip_steps",
    ("quality", "clip-steps"),
    "Check clips against the recorded steps of the engine and a reference model's own steps.",
    [
        Arg("manifest", "string", 'JSON lines: {"video": mp4, "request": {…}}', required=True),
        Arg("dumps", "string", "Directory of the step dumps", required=True),
        Arg("reference", "string", "Model directory (without it: model-free)"),
        Arg("recipe", "string", "JSON file: how the model is to be run"),
        Arg("steps", "integer", "Steps replayed of a clip", default=6, minimum=1, maximum=10_000),
        Arg("clips", "integer", "Clips replayed", default=4, minimum=1, maximum=10_000),
        Arg("seed", "integer", "Of the draw (default: a fresh one)", minimum=0),
        Arg("device", "string", "auto, cpu, cuda:0 or a uuid", default="auto"),
        Arg("decode", "boolean", "Compare the mp4 with the decoded latent", default=False),
    ],
    effects=Varying(MEASURES, _effects),
    long=True,
    early=lambda arguments, settings: _refuse_early(arguments),
)  # fmt: skip
def clip_steps(
    call: Call,
    manifest: str,
    dumps: str,
    reference: str | None,
    recipe: str | None,
    steps: int,
    clips: int,
    seed: int | None,
    device: str,
    decode: bool,
) -> EvidenceRecord:
    """A record of kind clip-steps: ``data.verdict`` and, for every clip, its checks and steps.

    Raises:
        OpError: no such manifest, directory, reference or recipe, or a replay that died.
    """
    # The rooms of clips are many, and no other command needs them: they come with the call.
    from ikit_ops.clips.examination import Examination

    given = _read(call.args)
    paths = given.paths
    drawn = random.SystemRandom().randrange(2**31) if seed is None else seed
    run = Examination(call, given.clips, paths, given.recipe, drawn, device, decode)
    run.examine()
    run.replay(steps, clips)
    resolved: dict[str, Any] = {name: str(path) for name, path in paths.items()}
    record = call.save(
        run.draft(), resolved={**resolved, "seed": drawn}, reply=("verdict", "counts", "detection")
    )
    _propose(call, record, run)
    return record


@dataclass(frozen=True)
class _Given:
    """The arguments, read."""

    paths: dict[str, Path]
    clips: list[Clip]
    recipe: Recipe


def _refuse_early(arguments: Mapping[str, Any]) -> None:
    _read(arguments)


def _read(arguments: Mapping[str, Any]) -> _Given:
    """The paths, the manifest and the recipe; OpError for what of them cannot be used."""
    from ikit_ops.clips.manifest import Recipe, check_together, read_manifest, read_recipe

    names = ("manifest", "dumps", "reference", "recipe")
    paths = {name: expanded(arguments[name]) for name in names if arguments[name]}
    reference = arguments["reference"]
    if not paths["dumps"].is_dir():
        shown = one_line(arguments["dumps"])
        raise OpError(f"dumps {shown} is no directory", "name CLIP_STEP_DUMP_DIR's")
    if reference and not (paths["reference"] / "model_index.json").is_file():
        raise OpError(
            f"reference {one_line(reference)} has no model_index.json",
            "give a model directory in the diffusers layout, or leave it out",
        )
    if arguments["decode"] and not reference:
        raise OpError("decode needs a reference", "give reference, whose decoder is used")
    if arguments["device"] != "auto" and not reference:
        raise OpError(
            "device needs a reference: nothing else runs on it",
            "leave device out, or give reference",
        )
    clips = read_manifest(paths["manifest"])
    recipe = read_recipe(paths["recipe"]) if "recipe" in paths else Recipe()
    check_together(clips, recipe, replayed=bool(reference))
    return _Given(paths, clips, recipe)


def _propose(call: Call, record: EvidenceRecord, run: Examination) -> None:
    """The next call: where to look."""
    verdict = run.verdict
    named = (each for each in run.judged if each.result.verdict == verdict)
    worst_clip = next(named, run.examined[0])
    call.propose(
        "inspect_evidence",
        {"id": record.evidence_id, "path": f"data.clips.{worst_clip.index}"},
        "the checks and the replayed steps of the clip that names the verdict",
    )
