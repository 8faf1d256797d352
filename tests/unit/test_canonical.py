"""One value has one sequence of bytes, in any language."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pytest
import rfc8785
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ikit_mcp.evidence import canonical

SAFE = 2**53 - 1
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
EDGES = st.sampled_from(
    [0.0, -0.0, 1.0, 1e-4, 9.999e-5, 1e-7, 5e-324, 1e16, 1e15 + 0.5, 1e21, 1e300]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-SAFE, SAFE) | FLOATS | EDGES | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(JSON)
@example({"\U0001f600": 1, "\ufb33": 2, "€": 3, "\r": 4, "1": 5, "\u0080": 6, "ö": 7})
@example([1e16, 1e-7, -0.0, 1.5, 123456789.25])
def test_the_bytes_are_those_of_the_reference_implementation(value: Any) -> None:
    assert canonical.canonical_bytes(value) == rfc8785.dumps(value)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=6))
def test_a_record_hashes_the_same_after_any_writer_and_our_reader(value: dict[str, Any]) -> None:
    there = canonical.evidence_id(value)
    for text in (
        json.dumps(value),
        json.dumps(value, indent=2, ensure_ascii=False),
        json.dumps(value, sort_keys=True),
        canonical.canonical_bytes(value).decode(),
    ):
        assert canonical.evidence_id(canonical.parse(text.encode("utf-8"))) == there  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(TEXT, JSON, max_size=6), st.data())
def test_what_reads_as_plain_is_what_the_long_way_reads(
    value: dict[str, Any], data: st.DataObject
) -> None:
    value["evidence_id"] = data.draw(st.sampled_from([canonical.evidence_id(value), 5, "é", None]))
    whole = canonical.canonical_bytes(value)
    texts = [whole, json.dumps(value, sort_keys=True, separators=(",", ":")).encode()]
    texts.append(
        json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    )
    for text in texts:
        if (plain := canonical.read_plain(text)) is not None:
            assert text == whole
            assert plain == (canonical.parse(text), canonical.evidence_id(value))


@pytest.mark.parametrize(
    "data",
    [b'{"a":1.0}', b'{"a":1e-07}', b'{"a":[1e+16]}', b'{"a":-0.0}', b'{"a":[1,1e-05]}',
     b'{"a":NaN}',
     b'{"a":12345678901234567890}', b'{"b":1,"a":2}', b'{"a":1,"a":1}', b'{"a": 1}', b'{"a":"\\/"}',
     b'{"a":"\\u0041"}', b"[1]", b"5", b"", b'{"a":1', b'{"a":' + b"[" * 101 + b"]" * 101 + b"}",
     b"[" * 100_000, '{"a":"é"}'.encode()],
)  # fmt: skip
def test_what_is_not_plainly_canonical_goes_the_long_way(data: bytes) -> None:
    assert canonical.read_plain(data) is None


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, {"evidence_id": "x"}, {"evidence_id": "x", "z": {"evidence_id": "x", "y": 1}},
     {"evidence_id": "x", "signature": 5, "z": 1}, {"a": 0.5, "evidence_id": None, "z": [-7]}],
)  # fmt: skip
def test_the_id_of_a_plain_record_leaves_out_id_and_signature(value: dict[str, Any]) -> None:
    data = canonical.canonical_bytes(value)
    assert canonical.read_plain(data) == (value, canonical.evidence_id(value))


@pytest.mark.parametrize(
    ("bits", "text"),
    [
        # Appendix B of RFC 8785.
        ("0000000000000000", "0"), ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"), ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"), ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"), ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"), ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"), ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"), ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"), ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)  # fmt: skip
def test_numbers_are_printed_as_the_rfc_lists_them(bits: str, text: str) -> None:
    [number] = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical.canonical_bytes(number) == text.encode()


def test_the_examples_of_the_rfc_come_out_byte_for_byte() -> None:
    value = json.loads(
        r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
        "literals": [null, true, false]}"""
    )
    assert (
        canonical.canonical_bytes(value)
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )
    keys = {"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter",
            "1": "One", "\U0001f600": "Emoji", "\u0080": "Control", "\u00f6": "O"}  # fmt: skip
    made = json.loads(canonical.canonical_bytes(keys))
    assert list(made) == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


def test_an_id_is_the_hash_of_all_but_id_and_signature() -> None:
    body = {"b": [1, 2.5], "a": "x"}
    wanted = hashlib.sha256(b'{"a":"x","b":[1,2.5]}').hexdigest()
    assert canonical.evidence_id(body) == wanted
    assert canonical.evidence_id({**body, "evidence_id": "?", "signature": {"x": 1}}) == wanted
    assert canonical.evidence_id({**body, "more": None}) != wanted


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), SAFE + 1, -SAFE - 1, 10**400, "\ud800",
     {"\udc00": 1}, {"a": [float("nan")]}, {1: 2}, b"x", {"a"}],
)  # fmt: skip
def test_what_has_no_canonical_bytes_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        canonical.canonical_bytes(value)


def nested(depth: int) -> bytes:
    """An object with lists in it, ``depth`` containers in all."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_deep_nesting_is_refused_where_it_is_read_and_where_it_is_hashed() -> None:
    sound = canonical.parse(nested(canonical.MAX_DEPTH))
    assert canonical.canonical_bytes(sound) == nested(canonical.MAX_DEPTH)
    for depth in (canonical.MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            canonical.parse(nested(depth))
    value: Any = {}
    for _ in range(5_000):
        value = {"a": value}
    with pytest.raises(ValueError, match="nested too deeply"):
        canonical.canonical_bytes(value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "Expecting value"), (b"[]", "not a JSON object"), (b"5", "not a JSON object"),
        (b'{"a":1', "Expecting"), (b'{"a":1}{"b":2}', "Extra data"), (b"\xff\xfe{}", "not UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "not UTF-8"), (b'\xef\xbb\xbf{"a":1}', "BOM"),
        (b'{"a":1,"a":1}', "given twice"), (b'{"x":[{"a":1,"b":2,"a":3}]}', "given twice"),
        (b'{"a":1,"\\u0061":2}', "given twice"),
        (b'{"a":NaN}', "NaN is not JSON"), (b'{"a":-Infinity}', "-Infinity is not JSON"),
        (b'{"a":"\\ud800"}', "lone surrogate"), (b'{"\\udfff":1}', "lone surrogate"),
        (b'{"a":"\x00"}', "Invalid control character"), (b'{"a":' + b"9" * 5000 + b"}", "digits"),
        (b"\0" * 100, "Expecting value"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_record_are_refused_with_the_reason(data: bytes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        canonical.parse(data)


def test_a_large_double_is_read_back_as_one_and_a_large_integer_is_refused() -> None:
    for number in (2.0**53, 1e17, -1e20, 123456789012345680000.0):
        data = canonical.canonical_bytes({"a": number})
        made = canonical.parse(data)
        assert made == {"a": number} and type(made["a"]) is float
        assert canonical.canonical_bytes(made) == data
    for digits in (b"9007199254740993", b"1" * 20, b"9" * 400):
        with pytest.raises(ValueError, match="exceeds safe integer"):
            canonical.evidence_id(canonical.parse(b'{"a":' + digits + b"}"))


def test_a_pair_of_surrogate_escapes_is_one_character() -> None:
    assert canonical.parse(b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_an_overflowing_number_cannot_be_hashed() -> None:
    with pytest.raises(ValueError, match="inf"):
        canonical.evidence_id(canonical.parse(b'{"a":1e999}'))
