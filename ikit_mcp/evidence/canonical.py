"""The bytes of a record: RFC 8785, the JSON Canonicalization Scheme.

A hash needs one byte sequence for one value.  RFC 8785 fixes it: keys sorted by their
UTF-16 code units, no white space, the shortest escapes, and numbers as ECMAScript
prints them.  So a verifier in any language computes the same id, and a stored record is
kept as exactly these bytes: whatever byte of it is changed, white space too, shows.

Python's own encoder produces exactly those bytes as long as no number and no key is
among the few where the two differ (1.0, 1e16, 1e-7, -0.0, keys outside the basic
plane), at a tenth of the time.  ``canonical_bytes`` takes that road when every value
allows it and the ``rfc8785`` package otherwise; a property test holds the two equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import rfc8785

UNHASHED = ("evidence_id", "signature")
# Deeper than any record needs, and shallow enough for every recursive reader.
MAX_DEPTH = 100
# Between these, repr() and ECMAScript print a float with a fraction alike.
_SMALLEST, _LARGEST = 1e-4, 1e16
_SAFE = 2**53 - 1
_LARGE = re.compile("[0-9]{16}")
# A number that Python and RFC 8785 may print differently: 1.0, 1e-7, 1e+16, large integers.
_UNPLAIN = re.compile(rb"[:,\[]-?(?:[0-9]{16}|[0-9]+(?:\.0[,\]}]|(?:\.[0-9]+)?e))")
_NESTS = (dict, list, tuple)

_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


def canonical_bytes(value: Any) -> bytes:
    """The RFC 8785 bytes of a JSON value.

    ValueError for what has none: NaN, integers beyond 2^53, lone surrogates, values
    nested more than ``MAX_DEPTH`` deep.
    """
    if too_deep(value):
        raise ValueError("nested too deeply")
    if _plain(value):
        return _encode(value).encode("utf-8")
    return rfc8785.dumps(value)


def _plain(value: Any) -> bool:
    """Whether Python's own encoder prints this value as RFC 8785 does."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(-_SAFE <= value <= _SAFE)
    if kind is float:
        number: float = value
        return _SMALLEST <= abs(number) < _LARGEST and not number.is_integer()
    if kind is list:
        return all(map(_plain, value))
    if kind is dict:
        return all(type(key) is str and key.isascii() for key in value) and all(
            map(_plain, value.values())
        )
    return False


def too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than ``MAX_DEPTH`` deep (without recursion)."""
    level = [value] if isinstance(value, _NESTS) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTS)
        ]
        if not level:
            return False
    return True


def evidence_id(record: dict[str, Any]) -> str:
    """The id of a record: lowercase hex sha256 of its canonical bytes less id and signature."""
    body = {key: value for key, value in record.items() if key not in UNHASHED}
    return hashlib.sha256(canonical_bytes(body)).hexdigest()


def read_plain(data: bytes) -> tuple[dict[str, Any], str] | None:
    """A record and its id from bytes that are canonical and plainly so; None otherwise.

    Nearly every stored record is ASCII with plain numbers.  Python's fast decoder and
    encoder then bring the very bytes back, which proves at once that they are canonical
    (no key twice, no white space, no other spelling); whoever gets None goes the long way.
    """
    if not data.isascii() or _UNPLAIN.search(data) is not None:
        return None
    try:
        raw = json.loads(data)
        if not isinstance(raw, dict) or _encode(raw).encode("ascii") != data:
            return None
    except (ValueError, RecursionError):
        return None
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and too_deep(raw):
        return None
    member = b'"evidence_id":%s,' % json.dumps(raw.get("evidence_id")).encode("ascii")
    if "signature" in raw or data.count(member) != 1:
        return raw, evidence_id(raw)
    return raw, hashlib.sha256(data.replace(member, b"")).hexdigest()


def parse(data: bytes) -> dict[str, Any]:
    """A record's JSON object from bytes; ValueError says why they are not one.

    Duplicate keys are refused: two readers could then see two different records.  So
    are lone surrogates, which no UTF-8 writer could pass on.
    """
    try:
        text = data.decode("utf-8")
        large = _LARGE.search(text) is not None  # a hook for each number costs
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_whole if large else None,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if too_deep(value):
        raise ValueError("nested too deeply")
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("holds a lone surrogate") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is given twice")
    return made


def _whole(text: str) -> int | float:
    """The number of some digits: a large double, whose canonical form has no point, is one."""
    number = int(text)
    if abs(number) > _SAFE and len(text) < 24 and rfc8785.dumps(float(number)).decode() == text:
        return float(number)
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
