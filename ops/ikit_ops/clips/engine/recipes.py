"""The recipe that a server follows, and what its dumps may say about it.

A dump that carries a recipe claims that it was followed.  So a recipe that this engine cannot
follow to the letter is refused before anything is made: another sampler than flow-match Euler,
noise levels that no schedule has.  Levels that the recipe lists are the steps' own, after any
shift: they are set, not handed to a pipeline that would shift them once more.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EULER = "euler"


class RecipeError(ValueError):
    """A recipe that cannot be followed; the text says why."""


def levels(recipe: Mapping[str, Any]) -> list[float] | None:
    """The recipe's noise levels, one for each step and the 0 that the last ends at, or None.

    RecipeError when they are no levels that fall to 0 from 1 at most.
    """
    listed = recipe.get("sigmas")
    if listed is None:
        return None
    if not isinstance(listed, list) or not all(map(_is_number, listed)):
        raise RecipeError("the recipe's sigmas are no list of numbers")
    whole = [float(level) for level in listed]
    if whole and whole[-1] != 0:
        whole.append(0.0)
    falls = all(a > b for a, b in itertools.pairwise(whole))
    if len(whole) < 2 or not falls or not 0 < whole[0] <= 1:
        raise RecipeError("the recipe's sigmas do not fall from 1 at most to 0")
    return whole


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def check(recipe: Mapping[str, Any]) -> None:
    """RecipeError when a flow-match Euler engine cannot follow the recipe."""
    sampler = recipe.get("sampler")
    if sampler not in (None, "", EULER):
        raise RecipeError(f"the recipe's sampler is {str(sampler)[:40]!r}: only {EULER} is served")
    levels(recipe)
    length = recipe.get("max_sequence_length")
    if length is not None and (type(length) is not int or length < 1):
        raise RecipeError("the recipe's max_sequence_length is no whole number from 1 on")


@dataclass(frozen=True)
class Served:
    """The recipe of a server: its fields, and the canonical JSON of each of them.

    The hash of a recipe is that of its canonical JSON (RFC 8785), which is its members' in the
    order of their names; so one member can be replaced here without a canonical encoder.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    members: Mapping[str, str] | None = None

    def followed(self, negative_prompt: str | None = None) -> tuple[dict[str, Any], dict[str, str]]:
        """The recipe of one clip, and the metadata that says so in its dump.

        A request's own negative prompt takes the place of the recipe's, and the dump then names
        the recipe with that: whoever checks it against the server's sees that it is another.
        """
        recipe, members = dict(self.fields), dict(self.members or {})
        own = recipe.get("negative_prompt") or ""
        if negative_prompt is not None and negative_prompt != own:
            recipe["negative_prompt"] = negative_prompt
            members["negative_prompt"] = json.dumps(negative_prompt, ensure_ascii=False)
        elif self.members is None:
            return recipe, {}
        text = ",".join(f"{json.dumps(name)}:{members[name]}" for name in sorted(members))
        digest = hashlib.sha256(("{" + text + "}").encode("utf-8")).hexdigest()
        return recipe, {"recipe": json.dumps(recipe), "recipe_sha256": digest}
