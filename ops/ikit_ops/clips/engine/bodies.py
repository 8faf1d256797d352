"""A request's body to its fields: JSON, a multipart form, a URL-encoded form.

The forms are read here and not by the standard library's mail parser, which decodes a part as
ASCII unless told otherwise, trims what it takes for line ends, and understands much that mail has
and forms have not (parts in parts, messages, transfer encodings).  RFC 7578 leaves little: a
delimiter line, headers, an empty line, and then the value's bytes up to the CRLF that belongs to
the next delimiter.  Values are UTF-8; anything else is refused, because a prompt that was decoded
wrongly makes a clip that nobody asked for.

A body must say what it is.  Web pages may send plain text, or no type at all, to any address
without asking; a server that takes such a body for JSON works for every page that is open.
"""

from __future__ import annotations

import json
import urllib.parse
from email.message import Message
from typing import Any, NoReturn

MAX_FIELDS = 100
JSON_TYPE = "application/json"
FORM_TYPES = ("multipart/form-data", "application/x-www-form-urlencoded")


class Refused(Exception):
    """A request that is not served: the HTTP status, and what to tell."""

    def __init__(self, status: int, **told: Any) -> None:
        super().__init__(told.get("error", ""))
        self.status, self.told = status, told


def fields_of(body: bytes, content_type: str | None, forms: bool) -> dict[str, Any]:
    """The fields of a body by its content type; Refused (400, 415, 422) when it has none."""
    kind = "" if content_type is None else content_type.partition(";")[0].strip().lower()
    accepted = (JSON_TYPE, *FORM_TYPES) if forms else (JSON_TYPE,)
    if kind not in accepted:
        raise Refused(415, error=f"the Content-Type must be {' or '.join(accepted)}",
                      accepted=list(accepted))  # fmt: skip
    if kind == JSON_TYPE:
        return parse_json(body)
    return parse_form(body, content_type or "")


def parse_json(body: bytes) -> dict[str, Any]:
    """The object of a JSON body, each name once."""
    try:
        found = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        raise Refused(400, error="the body is no JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, error="the body is no JSON object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        _twice(next(name for name in names if names.count(name) > 1))
    return found


def _twice(name: str) -> NoReturn:
    raise Refused(422, error="a field is given twice", field=name[:60])


def parse_form(body: bytes, content_type: str) -> dict[str, Any]:
    """The fields of a form, as texts; files are refused."""
    header = _header("content-type", content_type)
    if header.get_content_type() == FORM_TYPES[1]:
        return _urlencoded(body)
    boundary = header.get_boundary()
    if header.get_content_type() != FORM_TYPES[0] or not boundary:
        raise Refused(400, error="the body is no multipart form with a boundary")
    found: dict[str, Any] = {}
    for part in _parts(body, boundary.encode("latin-1", "replace")):
        name, value = _field(part)
        if name in found:
            _twice(name)
        found[name] = value
    return found


def _urlencoded(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
        pairs = urllib.parse.parse_qsl(text, keep_blank_values=True, strict_parsing=True,
                                       errors="strict", max_num_fields=MAX_FIELDS)  # fmt: skip
    except UnicodeDecodeError:
        raise Refused(422, error="the form is not UTF-8") from None
    except ValueError:
        raise Refused(400, error="the body is no URL-encoded form") from None
    return _once(list(pairs))


def _header(name: str, value: str) -> Message:
    """One header, for its value and parameters."""
    message = Message()
    message[name] = value
    return message


def _parts(body: bytes, boundary: bytes) -> list[bytes]:
    """What is between the delimiters; the CRLF before a delimiter is the delimiter's."""
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, MAX_FIELDS + 2)
    parts: list[bytes] = []
    for piece in pieces:
        if piece.startswith(b"--"):
            return parts
        padding, end, part = piece.partition(b"\r\n")
        if padding.strip(b" \t") or not end or len(parts) == MAX_FIELDS:
            break
        parts.append(part)
    raise Refused(400, error="the multipart form is malformed, cut short, or of too many parts")


def _field(part: bytes) -> tuple[str, str]:
    """A part's name and its value."""
    head, end, value = (b"\r\n" + part).partition(b"\r\n\r\n")
    try:
        headers = _headers(head.decode("utf-8"))
    except UnicodeDecodeError:
        headers = {}
    disposition = headers.get("content-disposition", Message())
    name = disposition.get_param("name", header="content-disposition")
    if not end or not isinstance(name, str):
        raise Refused(422, error="a part of the form has no name")
    _plain(name, headers)
    try:
        return name, value.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused(422, error="the field is not UTF-8", field=name[:60]) from None


def _headers(head: str) -> dict[str, Message]:
    found = {}
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        found[name.strip().lower()] = _header(name.strip().lower(), value.strip())
    return found


def _plain(name: str, headers: dict[str, Message]) -> None:
    """Refuse what is no plain UTF-8 text: files, parts in parts, other encodings."""
    disposition = headers["content-disposition"]
    kind = headers.get("content-type", Message())
    encoding = headers.get("content-transfer-encoding", Message()).get("content-transfer-encoding")
    charset = str(kind.get_param("charset", "utf-8")).lower()
    if (
        disposition.get_param("filename", header="content-disposition") is not None
        or kind.get_content_maintype() in ("multipart", "message")
        or str(encoding or "8bit").lower() not in ("7bit", "8bit", "binary")
        or charset not in ("utf-8", "utf8", "us-ascii", "ascii")
    ):
        raise Refused(422, error="only plain fields in UTF-8 are taken", field=name[:60])
