"""What is to be checked: the manifest's clips, and the recipe that they were asked to follow.

The request names the clip; it does not name the mathematics.  The same ``guidance_scale`` means
different numbers with another negative prompt, another shift of the schedule or another second
guidance, and defaults move between releases.  A *recipe* says all of it once, is hashed, and is
given to the engine and to the checker alike.  Both files are outsiders' and are read as such.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.evidence.canonical import canonical_bytes
from ikit_mcp.registry import OpError
from ikit_ops.clips import rules
from ikit_ops.clips.recorder import request_of

MAX_MANIFEST_BYTES = 16 << 20
MAX_CLIPS = 2_000
MAX_RECIPE_BYTES = 1 << 20
MAX_CLIP_BYTES = 8 << 30
COMPARED = (
    "prompt", "width", "height", "num_frames", "fps", "steps", "guidance_scale", "seed",
    "noise_seed",
)  # fmt: skip
RECIPE_FIELDS = frozenset(
    {"name", "model", "revision", "negative_prompt", "sampler", "sigmas", "call", "latents",
     "max_sequence_length"}
)  # fmt: skip
EULER = "euler"


@dataclass(frozen=True)
class Clip:
    """One line of the manifest."""

    video: Path
    request: dict[str, Any]
    line: int = 0


@dataclass(frozen=True)
class Recipe:
    """How the reference is run: see ``RECIPE_FIELDS``; ``sha256`` is of its canonical JSON."""

    fields: dict[str, Any] = field(default_factory=dict)
    sha256: str | None = None

    @property
    def sampler(self) -> str:
        """The sampler that every step is held against."""
        return str(self.fields.get("sampler") or EULER)

    @property
    def sigmas(self) -> list[float] | None:
        """The noise levels, where the recipe lists them: N, or N + 1 with the last."""
        return self.fields.get("sigmas")


def read_small(path: Path, limit: int, what: str) -> bytes:
    """The bytes of a regular file; OpError when it is none, or larger than ``limit``."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise OpError(f"{what} {one_line(str(path))} is no regular file", "give a file")
            data = file.read(limit + 1)
    except OSError as error:
        raise OpError(
            f"{what} {one_line(str(path))} cannot be read: {error.strerror}", "give its path"
        ) from None
    if len(data) > limit:
        raise OpError(f"{what} is larger than {limit} bytes", "split it")
    return data


def read_manifest(path: Path) -> list[Clip]:
    """The clips of a manifest, in order; OpError names the first line that is none.

    Relative video paths are relative to the manifest's folder.
    """
    text = read_small(path, MAX_MANIFEST_BYTES, "manifest").decode("utf-8", "replace")
    text = text.removeprefix("\ufeff")  # as some editors begin a file
    clips: list[Clip] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            if len(clips) == MAX_CLIPS:
                raise OpError(f"the manifest has more than {MAX_CLIPS} clips", "split it")
            clips.append(_clip(line, number, path.parent))
    if not clips:
        raise OpError("the manifest has no clip", 'one line a clip: {"video": …, "request": {…}}')
    return clips


def _clip(line: str, number: int, folder: Path) -> Clip:
    try:
        entry = json.loads(line)  # a NaN too: its field is named below
    except (ValueError, RecursionError):
        entry = None
    video = entry.get("video") if isinstance(entry, dict) else None
    request = entry.get("request") if isinstance(entry, dict) else None
    if not isinstance(video, str) or not is_path(video) or not isinstance(request, dict):
        raise OpError(
            f"line {number} of the manifest is no clip: {one_line(line, 80)}",
            'each line is {"video": path of the mp4, "request": {…}}; bench_clips writes it',
        )
    asked = request_of(request)
    if (slip := rules.request_slip(asked)) is not None:
        raise OpError(f"line {number} of the manifest: the request's {slip[0]}", slip[1])
    return Clip(folder / video, rules.whole_numbers(asked), number)


def is_path(text: str) -> bool:
    """Whether a text of a JSON file can be a path."""
    return bool(text) and "\0" not in text and rules.is_unicode(text)


def check_together(clips: Sequence[Clip], recipe: Recipe, replayed: bool) -> None:
    """OpError where the two files do not fit, or a request lacks what the reference needs."""
    for clip in clips:
        if (slip := rules.level_count_slip(recipe.sigmas, clip.request["steps"])) is not None:
            raise OpError(f"line {clip.line} of the manifest: the recipe's {slip[0]}", slip[1])
        lacking = [name for name in rules.REPLAYED if clip.request[name] is None]
        if replayed and lacking:
            raise OpError(
                f"line {clip.line} of the manifest: the request names no {', '.join(lacking)}",
                "the reference cannot be run without: name it, or leave reference out",
            )


def read_recipe(path: Path) -> Recipe:
    """The recipe of a JSON file; OpError names what in it is not one."""
    data = read_small(path, MAX_RECIPE_BYTES, "recipe")
    try:
        fields = json.loads(data, parse_constant=_no_constant)
        digest = hashlib.sha256(canonical_bytes(fields)).hexdigest()
    except (ValueError, RecursionError):
        fields, digest = None, ""
    if not isinstance(fields, dict):
        raise OpError(
            "the recipe is no JSON object", f"its fields are {', '.join(sorted(RECIPE_FIELDS))}"
        )
    if unknown := sorted(set(fields) - RECIPE_FIELDS):
        raise OpError(
            f"the recipe has unknown fields: {one_line(', '.join(unknown))}",
            f"its fields are {', '.join(sorted(RECIPE_FIELDS))}",
        )
    if (slip := rules.recipe_slip(fields)) is not None:
        raise OpError(f"the recipe's {slip[0]}", f"{slip[1]}; the engine uses the same file")
    return Recipe(fields, digest)


def _no_constant(word: str) -> Any:
    raise ValueError(word)


def request_differences(asked: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
    """The fields that differ, as ``field: asked …, got …``; absent in ``asked`` is not compared."""
    got = request_of(got)
    return [
        f"{name}: asked {one_line(repr(asked[name]), 60)}, got {one_line(repr(got[name]), 60)}"
        for name in COMPARED
        if asked.get(name) is not None and not _same(asked[name], got[name])
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes; OpError when it is no regular file that can be read."""
    digest = hashlib.sha256()
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise OpError("is no regular file")
            if info.st_size > MAX_CLIP_BYTES:
                raise OpError("is larger than any clip")
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise OpError(f"cannot be read: {error.strerror}") from None
    return digest.hexdigest()
