"""Whatever a record holds, each reply fits, and all of it can be reached."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ikit_mcp.evidence import paging
from ikit_mcp.registry import OpError

REPLY = 11_800
# What inspect_evidence says beside the piece: id, integrity with a problem and a signature.
REST = 760


def compact(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def reply_size(value: Any, path: str, offset: int, limit: int) -> int:
    """Characters of what inspect_evidence replies for a part of a record."""
    shown = paging.page(paging.find(value, path), path, offset, limit)
    return compact({"path": path, **shown}) + REST


def whole(value: Any, path: str = "", limit: int = 1000) -> Any:
    """The value at a path put together again from pages, as a patient client would."""
    parts: Any = None
    offset: int | None = 0
    while offset is not None:
        assert reply_size(value, path, offset, limit) <= REPLY
        shown = paging.page(paging.find(value, path), path, offset, limit)
        if "items" not in shown and "total" not in shown:
            return shown["value"]
        if "items" in shown:
            assert shown["items"] or shown["total"] == 0
            pieces = [followed(value, item, f"{path}.{offset + n}" if path else str(offset + n))
                      for n, item in enumerate(shown["items"])]  # fmt: skip
        else:
            pieces = shown["value"]
        parts = pieces if parts is None else parts + pieces
        offset = shown["next_offset"]
    target = paging.find(value, path)
    if isinstance(target, dict):
        keys = list(target)
        for n, part in enumerate(parts):
            if "name_characters" in part:
                assert keys[n].startswith(part["name"])
                assert part["name_characters"] == len(keys[n])
            else:
                assert part["name"] == keys[n]
        return {keys[n]: part["value"] for n, part in enumerate(parts)}
    return parts


def followed(value: Any, shown: Any, path: str) -> Any:
    """What was shown, with every note replaced by what its path leads to."""
    if isinstance(shown, dict) and "left_out" in shown and "path" in shown:
        assert shown["path"] is not None
        return whole(value, shown["path"])
    if isinstance(shown, dict) and set(shown) >= {"name", "value"}:
        return {**shown, "value": followed(value, shown["value"], path)}
    if isinstance(shown, dict):
        return {key: followed(value, item, "") for key, item in shown.items()}
    if isinstance(shown, list):
        return [followed(value, item, "") for item in shown]
    return shown


LONG = st.integers(1_000, 12_000).map(lambda n: "z" * n)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
KEYS = TEXT | st.sampled_from(
    ["", ".", "a.b", "a", "a..b", " ", "0", "-1", "#0", "#1", "name", "layers.0.weight", "k" * 300,
     "\0" * 150, "q" * 9_000, "left.out"]
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT | LONG
    | st.sampled_from(["\0" * 4_000, '"' * 5_000, "\U0001f600" * 7_000, "é" * 9_500, "a\u2028b"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(KEYS, inner, max_size=6)
        | st.builds(lambda item, n: [item] * n, inner, st.integers(0, 9))
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.integers(0, 12_000), st.integers(1, 1000))
@example([["z" * 5_000] * 60] * 9, 0, 1000)
@example({"q" * 9_000: {"k" * 9_000: ["z" * 9_000] * 5}}, 0, 1000)
@example(["z" * 50_000] * 20, 0, 1000)
@example({f"tensor.{n}.weight": "x" * 50 for n in range(3_000)}, 17, 1000)
@example({"a": {"b": {"c": ["y" * 5_000] * 40}}}, 0, 1)
def test_no_page_is_over_the_budget(value: Any, offset: int, limit: int) -> None:
    record = {"data": value, "kind": "x"}
    for path in ("", "data", "data.0", "data.#0", "data.#0.#0", "kind"):
        try:
            assert reply_size(record, path, offset, limit) <= REPLY
        except OpError as error:
            assert compact(str(error)) <= 2_000
        assert compact(paging.outline(record)) <= paging.PAGE_CHARACTERS


@settings(max_examples=200, deadline=None)
@given(VALUES, st.text(max_size=30) | st.lists(KEYS, max_size=4).map(".".join))
def test_any_path_is_answered_or_refused_within_the_budget(value: Any, path: str) -> None:
    try:
        assert reply_size({"data": value}, path, 0, 50) <= REPLY
    except OpError as error:
        text = str(error)
        assert compact(text) <= 2_000
        assert text.replace("\n", "").isprintable()


@settings(max_examples=120, deadline=None)
@given(VALUES)
@example({"k" * 300: {"deep": ["z" * 4_000] * 3}, "a.b": "z" * 9_500, "a": {"b": "y" * 9_500}})
@example({"": "z" * 9_500, " ": ["z" * 9_500], "\0" * 150: "y" * 9_500})
@example([[[["z" * 9_500, "\0" * 4_000]]]])
def test_the_union_of_all_pages_is_the_value(value: Any) -> None:
    # Keys that look like the positions #0 and #1 can hide a member; so can notes as values.
    text = json.dumps(value)
    assume('"#' not in text and '"left_out"' not in text and '"name"' not in text)
    record = {"data": value}
    assert whole(record, "data", limit=7) == value


def test_an_outline_names_the_path_of_every_part_that_it_leaves_out() -> None:
    record = {"summary": "short", "data": {"kernels": [{"name": "k", "ns": 5}] * 800, "small": [1]},
              "log": "line\n" * 4_000}  # fmt: skip
    shown = paging.outline(record)
    assert shown["summary"] == "short" and shown["data"]["small"] == [1]
    assert shown["data"]["kernels"] == {
        "left_out": f"list of 800 items, {compact(record['data']['kernels']):,} characters",  # type: ignore[index]
        "path": "data.kernels",
    }
    assert shown["log"]["path"] == "log" and shown["log"]["start"].startswith("line\nline")
    assert followed(record, shown, "") == record


def test_what_fits_is_shown_whole() -> None:
    small = {"a": [1, 2, {"b": None}]}
    assert paging.outline(small) is small
    assert paging.page(small, "", 0, 50) == {"value": small}
    assert paging.page("text", "a", 5, 50) == {"value": "text"}
    assert paging.page(None, "a", 0, 50) == {"value": None}


def test_a_list_is_cut_at_the_limit_and_at_the_budget() -> None:
    rows = list(range(100))
    assert paging.page(rows, "r", 10, 5) == {
        "total": 100, "offset": 10, "items": [10, 11, 12, 13, 14], "next_offset": 15,
    }  # fmt: skip
    assert paging.page(rows, "r", 95, 50)["next_offset"] is None
    assert paging.page(rows, "r", 500, 50) == {
        "total": 100, "offset": 500, "items": [], "next_offset": None,
    }  # fmt: skip
    large = ["x" * 2_000] * 10
    assert len(paging.page(large, "r", 0, 1000)["items"]) == 4


def test_a_long_text_comes_in_pieces_counted_in_characters() -> None:
    text = "äöü\n" * 9_000
    first = paging.page(text, "log", 0, 50)
    assert first["total"] == 36_000 and text.startswith(first["value"])
    second = paging.page(text, "log", first["next_offset"], 50)
    assert text.startswith(first["value"] + second["value"])
    assert paging.page(text, "log", 99_999, 50)["value"] == ""


# --- paths ---------------------------------------------------------------------

RECORD: dict[str, Any] = {
    "metrics": [
        {"name": "decode_tok_s", "value": 5},
        {"name": "weird.name", "value": 6},
        {"name": "twice", "value": 7},
        {"name": "twice", "value": 8},
        "text",
    ],
    "data": {
        "model.layers.0.weight": 1,
        "model.layers": {"0": {"bias": 2}},
        "model": {"layers": {"1": 3}},
        "": 4,
        "x.": {"y": 5},
        "#0": 6,
    },
    "empty": [],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("", RECORD), ("  ", RECORD), ("metrics.0.value", 5), ("metrics.-1", "text"),
        ("metrics.-5.value", 5), ("metrics.decode_tok_s.value", 5), ("metrics.weird.name.value", 6),
        ("metrics.twice.value", 7), ("metrics.3.value", 8),
        ("data.model.layers.0.weight", 1), ("data.model.layers.0.bias", 2),
        ("data.model.layers", {"0": {"bias": 2}}), ("data.model", {"layers": {"1": 3}}),
        ("data.", 4), ("data.x..y", 5), ("data.#0", 6), ("data.#1", {"0": {"bias": 2}}),
        ("#2", []), ("empty", []), ("metrics.", RECORD["metrics"]), (".metrics..0.value", 5),
    ],
)  # fmt: skip
def test_a_path_leads_to_its_value(path: str, value: Any) -> None:
    assert paging.find(RECORD, path) == value


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nothing", "there is no nothing"), ("data.nothing", "use one of: model.layers.0.weight"),
        ("metrics.9", "index 9 is outside a list of 5"), ("metrics.-6", "index -6 is outside"),
        ("empty.0", "the list is empty"), ("empty.x", "there is nothing under it"),
        ("metrics.0.value.x", "is a int and has no parts"), ("metrics.-1.x", "is a text and has"),
        ("metrics.--1", "there is no --1"), ("metrics.²", "there is no ²"),
        ("metrics.99999999999999999999", "there is no 999"), ("data.#99", "there is no #99"),
        ("data.#", "there is no #"), ("a\nb", r'there is no "a\nb"'),
        ("x" * 1_801, "over the limit"),
        ("\0" * 400, "over the limit"), ("a." * 850, "there is no a"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_says_where_it_ends_and_what_is_there(
    path: str, told: str
) -> None:
    with pytest.raises(OpError) as caught:
        paging.find(RECORD, path)
    text = str(caught.value)
    assert told in text and compact(text) <= 2_000 and text.replace("\n", "").isprintable()


def test_keys_from_outside_are_escaped_in_errors() -> None:
    hostile = {"a\x1b[31m\u202e": 1, "b" * 5_000: 2, **{f"key{n}": n for n in range(50)}}
    with pytest.raises(OpError) as caught:
        paging.find(hostile, "nothing")
    text = str(caught.value)
    assert "\x1b" not in text and "\u202e" not in text and "b" * 61 not in text
    assert "…" in text and compact(text) <= 2_000


def test_a_member_that_no_path_reaches_says_so() -> None:
    hidden = {"#0": 1, "k" * 900: "z" * 9_500, "#1": 2}
    shown = paging.page(hidden, "", 0, 50)["items"][1]
    assert shown["path"] is None and shown["value"]["path"] is None
    assert shown["name_characters"] == 900
