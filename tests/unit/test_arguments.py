"""What models and people send becomes typed values, or one error that says all that is wrong."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import json_schema, schema_lint
from ikit_mcp import registry
from ikit_mcp.arguments import MAX_ITEMS, MAX_STRING, add_options, parse, schema
from ikit_mcp.registry import Arg, ArgType, Operation, OpError

OPERATIONS = list(registry.load(None).operations.values())
ALL = [
    Arg("text", "string", "A text"),
    Arg("choice", "string", "One of these", choices=("auto", "bf16", "fp8")),
    Arg("count", "integer", "How many", minimum=1, maximum=1_234_567),
    Arg("rate", "number", "How fast", minimum=0, unit="GB/s"),
    Arg("flag", "boolean", "Whether"),
    Arg("words", "array", "Some texts", items="string"),
    Arg("sizes", "array", "Some sizes", items="integer"),
    Arg("rates", "array", "Some rates", items="number"),
]


def told(args: list[Arg], raw: Any) -> str:
    """The error that the parser raises."""
    with pytest.raises(OpError) as caught:
        parse(args, raw, "acme")
    text = str(caught.value)
    assert len(text) <= 2_000
    text.encode("utf-8")
    return text


def parsed(name: str, value: Any) -> Any:
    return parse(ALL, {name: value}, "acme")[name]


# --- the schema ----------------------------------------------------------------


@pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: op.name)
def test_the_schema_of_every_operation_is_in_the_safe_core(op: Operation) -> None:
    made = json.loads(json.dumps(schema(op.args)))
    assert schema_lint.lint(made) == []
    json_schema.check(made)
    for node in made["properties"].values():
        if "default" in node:
            assert json_schema.errors(node, node["default"]) == []


def test_the_lint_finds_what_clients_cannot_read() -> None:
    node = {"type": ["string", "null"], "anyOf": [], "$ref": "#", "enum": [1], "minimum": 1}
    bad = {"type": "object", "properties": {"x": node, "y": {"type": "array", "description": "y"}},
           "required": ["z"], "allOf": []}  # fmt: skip
    found = "\n".join(schema_lint.lint(bad))
    for part in (
        "closed object",
        "root has allOf",
        "required z",
        "x: has anyOf",
        "x: has $ref",
        "['string', 'null']",
        "no description",
        "enum is not",
        "y: arrays",
        "limits",
    ):
        assert part in found  # fmt: skip
    assert schema_lint.lint({"type": "object", "additionalProperties": False}) == [
        "there are no properties"
    ]


def test_the_schema_says_what_the_declaration_says() -> None:
    args = [
        Arg("size", "integer", "Size", default=3, minimum=1, maximum=9, unit="bytes"),
        Arg("model", "string", "Model", required=True, choices=("a", "b")),
        Arg("many", "array", "Many", default=("a",), items="string"),
    ]
    assert schema(args) == {
        "type": "object",
        "properties": {
            "size": {"type": "integer", "description": "Size (bytes)", "default": 3,
                     "minimum": 1, "maximum": 9},
            "model": {"type": "string", "description": "Model", "enum": ["a", "b"]},
            "many": {"type": "array", "description": "Many", "default": ["a"],
                     "items": {"type": "string"}},
        },
        "additionalProperties": False,
        "required": ["model"],
    }  # fmt: skip
    assert "required" not in schema([])


# --- what is taken -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "made"),
    [
        ("count", "5", 5), ("count", " 5 ", 5), ("count", 5.0, 5), ("count", "5.0", 5),
        ("count", "1e3", 1000), ("count", "+7", 7), ("rate", "3.5", 3.5), ("rate", "7", 7),
        ("rate", 0, 0), ("rate", "1E3", 1000.0), ("text", 5, "5"), ("text", 1.5, "1.5"),
        ("text", "", ""), ("text", "größe", "größe"), ("choice", "fp8", "fp8"),
        ("flag", True, True), ("flag", "true", True), ("flag", " FALSE ", False),
        ("flag", 1, True), ("flag", 0.0, False), ("flag", "0", False),
        ("words", '["a", "b"]', ["a", "b"]), ("words", ["a", 5], ["a", "5"]),
        ("words", [], []), ("words", "[]", []), ("words", ("a",), ["a"]),
        ("sizes", '["1", 2.0]', [1, 2]), ("sizes", [1], [1]), ("rates", "[0.5]", [0.5]),
        ("text", None, None), ("words", None, None),
    ],
)  # fmt: skip
def test_what_converts_without_loss_is_taken(name: str, value: Any, made: Any) -> None:
    got = parsed(name, value)
    assert got == made and type(got) is type(made)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", "five"), ("count", ""), ("count", 5.5), ("count", "5.5"), ("count", True),
        ("count", "0x10"), ("count", "1_000"), ("count", "\u0665"), ("count", [5]), ("count", {}),
        ("count", float("nan")), ("count", float("inf")), ("count", "NaN"), ("count", "1e999"),
        ("count", 10**400), ("count", 10**5000), ("count", "9" * 29), ("count", "9" * 5000),
        ("count", 2**53), ("count", "9007199254740990.5"), ("count", "5.00000000000000000000001"),
        ("count", 0), ("count", 1_234_568), ("count", b"5"), ("count", "5\0"),
        ("rate", "fast"), ("rate", -0.5), ("rate", float("nan")), ("rate", "-inf"),
        ("rate", "1e999"), ("rate", 10**400), ("rate", False), ("rate", "1__0"), ("rate", 1e301),
        ("text", True), ("text", ["a"]), ("text", {"a": 1}), ("text", "a\0b"), ("text", "\ud800"),
        ("text", "x" * (MAX_STRING + 1)), ("text", float("nan")), ("text", 10**5000),
        ("choice", "bf61"), ("choice", ""), ("choice", 5), ("choice", "x" * 100_000),
        ("flag", "yes"), ("flag", 2), ("flag", 10**5000), ("flag", "true" + " " * 90 + "x"),
        ("flag", []), ("flag", float("nan")), ("flag", 0.5),
        ("words", "a"), ("words", "[a"), ("words", '{"a": 1}'), ("words", "5"), ("words", 5),
        ("words", {"a": 1}), ("words", [None]), ("words", [["a"]]), ("words", [True]),
        ("words", ["x"] * (MAX_ITEMS + 1)), ("words", "[" * 100_000), ("words", "[" + "9" * 5000),
        ("words", "x" * 2_000_000), ("words", ["\ud800"]), ("words", ["a\0"]),
        ("words", ["x" * (MAX_STRING + 1)]), ("sizes", ["x"]), ("sizes", [1.5]),
        ("sizes", "[NaN]"), ("sizes", [2**60]), ("rates", "[1e999]"), ("rates", ["nan"]),
    ],
    ids=lambda value: repr(value)[:24] if not isinstance(value, int) else "int",
)  # fmt: skip
def test_everything_else_is_refused_by_name_with_what_is_allowed(name: str, value: Any) -> None:
    text = told(ALL, {name: value})
    assert f"{name}: got " in text and "allowed: " in text


def test_limits_are_told_with_all_their_digits_and_the_unit() -> None:
    assert "a whole number from 1 to 1234567" in told(ALL, {"count": 0})
    assert "a number of at least 0, in GB/s" in told(ALL, {"rate": -1})
    top = [Arg("share", "number", "Share", maximum=0.25)]
    assert "a number of at most 0.25" in told(top, {"share": 1})


def test_what_came_and_what_is_allowed_are_both_told() -> None:
    text = told(ALL, {"choice": "bf61"})
    assert 'choice: got "bf61"; allowed: auto, bf16, fp8 (did you mean bf16?)' in text


def test_an_unknown_name_suggests_the_nearest() -> None:
    assert '"txet": unknown argument; did you mean text?' in told(ALL, {"txet": "a"})
    assert "known: choice, count" in told(ALL, {"zzzzzzzz": 1})
    assert "it takes none" in told([], {"a": 1})
    assert "unknown" in told(ALL, {"\ud800\0": 1})
    assert "unknown" in told(ALL, {5: 1})


def test_a_required_argument_may_not_be_missing_or_null() -> None:
    needed = [Arg("model", "string", "Model", required=True)]
    for raw in ({}, None, {"model": None}):
        assert "model: required and missing; allowed: a text" in told(needed, raw)


def test_null_means_absent_and_defaults_are_filled_in() -> None:
    args = [Arg("size", "integer", "x", default=3), Arg("many", "array", "x", default=("a",),
            items="string"), Arg("other", "string", "x")]  # fmt: skip
    made = parse(args, {"size": None, "many": None}, "acme")
    assert made == {"size": 3, "many": ["a"], "other": None}
    made["many"].append("changed")
    assert parse(args, {}, "acme")["many"] == ["a"]


def test_arguments_that_are_no_object_are_refused() -> None:
    for raw in ([1], "text", 5):
        assert "not an object" in told(ALL, raw)


def test_evidence_id_is_taken_for_id() -> None:
    args = [Arg("id", "string", "Id", required=True)]
    assert parse(args, {"evidence_id": "abc"}, "acme") == {"id": "abc"}
    assert parse(args, {"evidence_id": "abc", "id": None}, "acme") == {"id": "abc"}
    assert "given twice (also as evidence_id)" in told(args, {"id": "a", "evidence_id": "b"})
    own = [Arg("id", "string", "Id"), Arg("evidence_id", "string", "Id")]
    assert parse(own, {"evidence_id": "abc"}, "acme") == {"id": None, "evidence_id": "abc"}
    assert "unknown" in told(ALL, {"evidence_id": "abc"})


def test_all_errors_are_told_at_once() -> None:
    raw = {"count": "x", "rate": "y", "colour": "red", "flag": "maybe", "words": 5}
    text = told([*ALL, Arg("model", "string", "Model", required=True)], raw)
    assert "acme: 6 errors" in text
    for name in ("count", "rate", "colour", "flag", "words", "model"):
        assert f"\n- {name}: " in text or f'\n- "{name}": ' in text
    assert "call acme again" in text


def test_a_hundred_thousand_errors_are_one_short_text_with_their_number() -> None:
    text = told(ALL, {f"wrong_{n}": n for n in range(100_000)})
    assert "100000 errors" in text and '"wrong_0"' in text and "more" in text


def test_one_enormous_error_leaves_room_for_the_others() -> None:
    many = Arg("kind", "string", "Kind", choices=tuple(f"choice_number_{n}" for n in range(500)))
    text = told([many, *ALL], {"kind": "x", "count": "y"})
    assert "kind: got" in text and "count: got" in text
    assert "kind: got" in told([many], {"kind": "x"})


# --- any input, any declaration --------------------------------------------------

HOSTILE = st.sampled_from(
    ["5", "5.0", "1e999", "NaN", "-1", "true", "[1]", '["a"]', "[" * 3000, "\ud800", "a\0b", "",
     "9" * 400, 2**53, -(2**53), 10**400, 1e308, -0.0, "null", "{}", "auto", 1e16]
)  # fmt: skip
VALUES = st.recursive(
    HOSTILE | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


KINDS: list[ArgType] = ["string", "integer", "number", "boolean", "array"]


@st.composite
def declarations(draw: st.DrawFn) -> list[Arg]:
    """Any list of arguments."""
    found = []
    for name in draw(st.sets(st.sampled_from("abcdefgh"), max_size=5)):
        kind = draw(st.sampled_from(KINDS))
        more: dict[str, Any] = {"required": draw(st.booleans())}
        if kind == "array":
            more["items"] = draw(st.sampled_from(["string", "integer", "number"]))
        if kind in ("integer", "number"):
            more["minimum"] = draw(st.none() | st.integers(-10, 0))
            more["maximum"] = draw(st.none() | st.integers(1, 10**6))
        if kind == "string" and draw(st.booleans()):
            more["choices"] = ("auto", "5", "true")
        found.append(Arg(name, kind, "Help", **more))
    return found


@settings(max_examples=250, deadline=None)
@given(declarations(), st.data())
def test_any_input_gives_values_of_the_schema_or_an_error_that_names_an_argument(
    args: list[Arg], data: st.DataObject
) -> None:
    names = st.sampled_from([arg.name for arg in args] or ["a"]) | st.text(max_size=3)
    raw = data.draw(st.dictionaries(names, VALUES, max_size=5))
    try:
        made = parse(args, raw, "acme")
    except OpError as error:
        text = str(error)
        assert len(text) <= 2_000
        text.encode("utf-8")
        known = [arg.name for arg in args] + [json.dumps(name)[:40] for name in raw]
        assert any(name in text for name in known)
    else:
        assert set(made) == {arg.name for arg in args}
        present = {name: value for name, value in made.items() if value is not None}
        assert json_schema.errors(schema(args), present) == []
        assert parse(args, present, "acme") == made


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_operation_answers_any_input_with_values_or_one_error(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(OPERATIONS))
    names = st.sampled_from([arg.name for arg in op.args] or ["a"])
    raw = data.draw(st.dictionaries(names, VALUES, max_size=4))
    try:
        made = parse(op.args, raw, op.name)
    except OpError as error:
        assert len(str(error)) <= 2_000 and op.name in str(error)
    else:
        present = {name: value for name, value in made.items() if value is not None}
        assert json_schema.errors(schema(op.args), present) == []


# --- the command line ----------------------------------------------------------


def from_words(args: list[Arg], words: list[str]) -> dict[str, Any]:
    """What the command line hands to the parser."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_options(parser, args)
    raw = vars(parser.parse_args(words))
    return parse(args, {k: v for k, v in raw.items() if v is not None and v != []}, "acme")


def words_of(args: list[Arg], values: dict[str, Any]) -> list[str]:
    words = []
    for arg in args:
        name = "--" + arg.name.replace("_", "-")
        value = values.get(arg.name)
        if isinstance(value, bool):
            words.append(name if value else "--no-" + arg.name)
        elif value is not None:
            words += [f"{name}={item}" for item in (value if isinstance(value, list) else [value])]
    return words


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
            "choice": st.sampled_from(["auto", "bf16", "fp8"]),
            "count": st.integers(1, 1_234_567),
            "rate": st.floats(0, 1e300),
            "flag": st.booleans(),
            "words": st.lists(st.text("ab-= é", max_size=5), min_size=1, max_size=4),
            "sizes": st.lists(st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=4),
        },
    )
)
@example({"text": "--", "words": ["--", "-x", "--", ""], "flag": False})
def test_options_and_mcp_arguments_give_the_same_values(values: dict[str, Any]) -> None:
    assert from_words(ALL, words_of(ALL, values)) == parse(ALL, values, "acme")


def test_positionals_and_options_give_what_mcp_arguments_give() -> None:
    args = [
        Arg("model", "string", "Model", required=True, positional=True),
        Arg("id", "string", "Id", positional=True),
        Arg("gpu_bw", "number", "Bandwidth"),
    ]
    made = from_words(args, ["meta/llama", "--gpu-bw", "3350"])  # fmt: skip
    assert made == parse(args, {"model": "meta/llama", "gpu_bw": "3350"}, "acme")
    many = [Arg("words", "array", "Words", items="string", positional=True)]
    assert from_words(many, ["a", "b"]) == {"words": ["a", "b"]}
    assert from_words(many, []) == {"words": None}


def test_help_shows_percent_signs_defaults_units_and_choices() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, [Arg("pct", "string", "In % of all", default="50%s", unit="%"),
                         Arg("kind", "string", "Kind", choices=("a", "b"))])  # fmt: skip
    text = parser.format_help()
    assert "In % of all (%) [50%s]" in text and "a|b" in text
