"""The recipe that a server follows, and the name that its dumps give to it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_mcp.evidence.canonical import canonical_bytes
from ikit_ops.clips.engine import recipes


def served(fields: dict[str, Any]) -> recipes.Served:
    return recipes.Served(fields, {n: canonical_bytes(v).decode() for n, v in fields.items()})


def digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_bytes(fields)).hexdigest()


@pytest.mark.parametrize(
    ("sigmas", "whole"),
    [([1, 0.5], [1, 0.5, 0]), ([1.0, 0.5, 0.0], [1, 0.5, 0]), ([0.9], [0.9, 0])],
)
def test_listed_levels_are_those_of_the_steps_and_the_last(
    sigmas: list[float], whole: list[float]
) -> None:
    assert recipes.levels({"sigmas": sigmas}) == whole


def test_a_recipe_without_levels_leaves_the_schedule_to_the_model() -> None:
    assert recipes.levels({}) is None
    recipes.check({"sampler": "euler", "negative_prompt": "x", "max_sequence_length": 24})
    recipes.check({"sampler": None})


@pytest.mark.parametrize(
    "recipe",
    [
        {"sampler": "unipc"}, {"sampler": 3}, {"sigmas": []}, {"sigmas": [0.0]}, {"sigmas": "1"},
        {"sigmas": [0.5, 0.7]}, {"sigmas": [1, 1]}, {"sigmas": [1.2, 0.5]}, {"sigmas": [True]},
        {"sigmas": [1, 0, 0]}, {"sigmas": [1, -0.5]}, {"sigmas": [float("nan")]},
        {"sigmas": ["1"]}, {"max_sequence_length": 0}, {"max_sequence_length": "24"},
        {"max_sequence_length": 2.5},
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_followed_to_the_letter_is_refused(recipe: dict[str, Any]) -> None:
    with pytest.raises(recipes.RecipeError):
        recipes.check(recipe)


def test_a_dump_names_the_servers_recipe_by_the_hash_that_a_checker_makes() -> None:
    fields = {"negative_prompt": "ü", "call": {"stg_scale": 1.0, "x": 1e-7}, "sigmas": [1.0, 0.5]}
    recipe, metadata = served(fields).followed()
    assert recipe == fields
    assert json.loads(metadata["recipe"]) == fields
    assert metadata["recipe_sha256"] == digest(fields)


def test_a_server_without_a_recipe_names_none() -> None:
    assert recipes.Served().followed() == ({}, {})
    assert recipes.Served().followed("") == ({}, {})


def test_the_recipes_own_negative_prompt_changes_nothing() -> None:
    fields = {"negative_prompt": "blurry"}
    assert served(fields).followed("blurry") == served(fields).followed()


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_another_negative_prompt_is_followed_and_named_as_another_recipe(text: str) -> None:
    for fields in ({}, {"call": {"stg_scale": 1.0}}, {"negative_prompt": "blurry", "name": "a"}):
        here = served(fields) if fields else recipes.Served()
        recipe, metadata = here.followed(text)
        wanted = {**fields, "negative_prompt": text}
        assert recipe == wanted == json.loads(metadata["recipe"])
        assert metadata["recipe_sha256"] == digest(wanted)


def test_an_empty_negative_prompt_replaces_the_recipes() -> None:
    recipe, metadata = served({"negative_prompt": "blurry"}).followed("")
    assert recipe == {"negative_prompt": ""}
    assert metadata["recipe_sha256"] == digest({"negative_prompt": ""})
