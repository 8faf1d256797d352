"""The one redactor: what goes out, to a record, a reply or a log, passes through here.

Two questions are asked of every text.  Does it hold one of *our own* secrets, the values of
this process's secret-named variables, as they are, or in the dress that a URL (percent
signs), a JSON string (backslashes) or a header (base64) puts on them?  And does it hold
anything that *looks* like a secret, by the marks of ``secret_rules``?  Of both only the secret
itself is replaced, by ``[redacted: VARIABLE or RULE]``: of a URL the user information, of a
query the value.

Base64 takes three bytes at a time, so a value inside a longer text has three images, by the
position it begins at; their first and last characters also depend on the neighbours and are
left off.

Half a secret is recognised by nobody, and still tells most of it.  So whoever shows a part of a
text redacts first and cuts then (``head``, ``tail``): what is cut away has to be longer than any
secret, so that none lies across both cuts.  A text that somebody else has cut (a program that
was killed while it wrote) may begin or end in the middle of a known one: ``loose_ends``.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr
from urllib.parse import quote, quote_plus, unquote

from ikit_mcp.process.secret_rules import (
    ASSIGNMENT,
    PARTS,
    VALUE_RULES,
    ValueRule,
    is_plain,
    name_finding,
    words_of,
)
from ikit_mcp.registry import use_redactor

SHORTEST = 8
"""Characters of the shortest value that is searched for: shorter ones occur by chance."""

SIGNING_KEY = "IKIT_SIGNING_KEY"

LONGEST = 4_096
"""Characters of what is recognised by its looks that no cut may go through: longer than tokens are.
A known secret that is longer is kept whole, too."""

DEEPEST = 100
"""Levels of a JSON value that are followed; what lies deeper is left out."""

_REGION = re.compile(r"[a-z]{2}(?:-[a-z]+){1,3}-\d{1,2}|[a-z]+-[a-z]+\d{1,2}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:(?P<user>[^\s/?#]*)@)?")
_POINTERS = ("_ENV", "_FILE", "_PATH", "_NAME")  # of a key: its value says where the secret is


def known_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The secret values that these variables hold, by the variable's name.

    A variable counts if its name says so (words, parts, exact names), if its value looks like
    a secret, or both for the names of identities (``AWS_``, ``GITHUB_``).  Of a URL the user
    information counts alone; existing paths, numbers, region names and values of fewer than 8
    characters do not count.
    """
    found = {}
    for name, value in environ.items():
        finding = name_finding(name, value)
        if name == SIGNING_KEY and finding is not None and finding.number != 7:
            continue  # the path of a key; an error about it must name it
        if finding is not None:
            secret = _secret_part(value.strip(), by_value=finding.number in (6, 7))
            if secret is not None and len(secret) >= SHORTEST and not _is_harmless(secret):
                found[name] = secret
    return found


@functools.lru_cache(maxsize=4)
def _known(environ: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """``known_secrets`` of a whole environment, worked out once."""
    return known_secrets(dict(environ))


def own_secrets() -> dict[str, str]:
    """The secret values in this process's environment, by the variable's name."""
    return _known(tuple(os.environ.items()))


def _secret_part(value: str, by_value: bool) -> str | None:
    """What of the value is secret; ``by_value``: only what looks like it."""
    url = _URL.match(value)
    if url:
        user = url["user"] or ""
        password = user.partition(":")[2]
        return password if len(password) >= SHORTEST else user
    for rule in VALUE_RULES:
        found = rule.pattern.search(value)
        if found and (by_value or rule.rule == "storage account key"):
            return _span(found)[2]
    return None if by_value else value


def _is_harmless(value: str) -> bool:
    """Whether the value is a number, a region's name or an existing path."""
    if is_plain(value) or _REGION.fullmatch(value):
        return True
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False


def _span(found: re.Match[str]) -> tuple[int, int, str]:
    """Where in the text the secret of a match lies, and the secret."""
    groups = found.groupdict()
    group = next((name for name in ("secret", "token") if groups.get(name)), 0)
    return found.start(group), found.end(group), found[group]


def variants(value: str) -> set[bytes]:
    """The bytes that a value can appear as: plain, in URLs, in JSON, in base64."""
    forms = {os.fsencode(value), os.fsencode(unquote(value))}
    for text in (quote(value, errors="replace"), quote(value, "", errors="replace")):
        lower = re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), text)
        forms |= {text.encode(), lower.encode()}
    forms.add(quote_plus(value, errors="replace").encode())
    forms.add(json.dumps(value)[1:-1].encode())
    for shift in range(3):
        data = bytes(shift) + os.fsencode(value)
        image = base64.b64encode(data)[(0, 2, 3)[shift] : len(data) * 8 // 6]
        forms |= {image, image.translate(bytes.maketrans(b"+/", b"-_"))}
    return {form for form in forms if len(form) >= SHORTEST}


class Redactor:
    """Replaces known secrets and whatever looks like one; made once per set of secrets."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        known = [(form, name) for name, value in secrets.items() for form in variants(value)]
        known.sort(key=lambda pair: -len(pair[0]))  # a secret may be a part of another one
        self.byte_forms = [(form, f"[redacted: {name}]".encode()) for form, name in known]
        self.text_forms = [
            (os.fsdecode(form), shown.decode(errors="replace")) for form, shown in self.byte_forms
        ]
        self.names = [(os.fsdecode(form), name) for form, name in known]
        self.reach = max([LONGEST, *(len(form) for form, _ in self.byte_forms)])

    def text(self, text: str) -> str:
        """The text without secrets; itself when it holds none.

        A byte that was no UTF-8 (a lone surrogate, in a file's name) becomes its escape:
        no writer could send it.
        """
        return self._without(text if text.isascii() else _sendable(text))

    def _without(self, text: str) -> str:
        for form, shown in self.text_forms:
            if form in text:
                text = text.replace(form, shown)
        lower = text.lower()
        for rule in (*VALUE_RULES, ASSIGNMENT):
            if any(mark in lower for mark in rule.marks):
                text = _replace(rule, text)
        return text

    def data(self, data: bytes) -> bytes:
        """The bytes without known secrets and, where they are text, without what looks like one."""
        if b"\0" not in data:
            return self._bytes(data)
        for form, shown in self.byte_forms:
            data = data.replace(form, shown)
        return data

    def _bytes(self, data: bytes) -> bytes:
        for form, shown in self.byte_forms:
            data = data.replace(form, shown)
        # One byte that is no UTF-8, as in many a log, hides nothing: it comes back as it was.
        text = data.decode("utf-8", "surrogateescape")
        clean = self._without(text)
        return data if clean is text else clean.encode("utf-8", "surrogateescape")

    def head(self, text: AnyStr, limit: int, *, more: bool = False) -> AnyStr:
        """The first ``limit`` characters (or bytes) of what the text is without secrets.

        ``more``: the text goes on where it was given no further, so that a secret may lie
        across its end.
        """
        return self._part(text, limit, more, lambda kept, size: kept[:size])

    def tail(self, text: AnyStr, limit: int, *, more: bool = False) -> AnyStr:
        """The last ``limit``, of a text that (``more``) begins before what was given of it."""
        return self._part(text, limit, more, lambda kept, size: kept[len(kept) - size :])

    def _part(
        self, text: AnyStr, limit: int, more: bool, part: Callable[[AnyStr, int], AnyStr]
    ) -> AnyStr:
        """One end of the clean text: what is looked at grows until the reach beyond it is clean.

        Redacting makes a text shorter, so that what was beyond the cut may come before it.
        """
        window = limit + self.reach
        while True:
            seen = part(text, min(window, len(text)))
            clean: AnyStr = self.text(seen) if isinstance(seen, str) else self._bytes(seen)
            if window >= len(text) and not more:
                return part(clean, min(limit, len(clean)))
            if window >= len(text) or len(clean) >= limit + self.reach:
                return part(clean, min(limit, max(0, len(clean) - self.reach)))
            window *= 2

    def between(self, data: bytes, start: int, stop: int) -> bytes:
        """These bytes of the data, without any part of a secret that begins or ends beyond them.

        Nothing else moves, so that pieces of a file can be read by their offsets.  The data
        should reach beyond both ends (``reach``); a secret on a seam is replaced in both pieces.
        """
        pieces, at = [], start
        for first, last, shown in sorted(self._spans(data)):
            if first < stop and last > at:
                pieces += [data[at : max(at, first)], shown]
                at = last
        return b"".join([*pieces, data[at:stop]])

    def _spans(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Where secrets lie in the bytes, and what is shown instead."""
        for form, shown in self.byte_forms:
            at = data.find(form)
            while at >= 0:
                yield at, at + len(form), shown
                at = data.find(form, at + 1)
        text = data.decode("latin-1")  # a character a byte: positions stay
        lower = text.lower()
        for rule in (*VALUE_RULES, ASSIGNMENT):
            if any(mark in lower for mark in rule.marks):
                for found in rule.pattern.finditer(text):
                    first, last, _ = _span(found)
                    yield first, last, f"[redacted: {rule.rule}]".encode()

    def loose_ends(self, text: str) -> str:
        """The text without the rest of a known secret at its beginning and its end."""
        for form, shown in self.text_forms:
            for size in range(min(len(form) - 1, len(text)), SHORTEST - 1, -1):
                if text.endswith(form[:size]):
                    text = text[: len(text) - size] + shown
                if text.startswith(form[len(form) - size :]):
                    text = shown + text[size:]
        return text

    def json(self, value: Any, depth: int = 0) -> Any:
        """The JSON-like value without secrets, in its strings and its keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, (dict, list, tuple)) and depth >= DEEPEST:
            return "[left out: nested too deeply]"
        if isinstance(value, dict):
            clean: dict[Any, Any] = {}
            for key, item in value.items():
                shown = self.text(key) if isinstance(key, str) else key
                while shown in clean:
                    shown = f"{shown}'"  # two secret keys must not hide each other's values
                clean[shown] = self._item(key, item, depth)
            return clean
        if isinstance(value, (list, tuple)):
            return [self.json(item, depth + 1) for item in value]
        return value

    def _item(self, key: Any, item: Any, depth: int) -> Any:
        """One member: a text under a name such as ``api_key`` is a secret whatever it is."""
        if isinstance(key, str) and isinstance(item, str) and item:
            name = words_of(key)
            found = PARTS.search(name)
            if found and not name.endswith(_POINTERS) and not item.startswith("[redacted: "):
                return f"[redacted: contains {found[0]}]"
        return self.json(item, depth + 1)


def _sendable(text: str) -> str:
    """The text with lone surrogates as escapes; itself when it has none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def _replace(rule: ValueRule, text: str) -> str:
    """The text with the secret of each match of the rule replaced."""
    pieces, end = [], 0
    for found in rule.pattern.finditer(text):
        start, stop, _ = _span(found)
        pieces += [text[end:start], f"[redacted: {rule.rule}]"]
        end = stop
    return "".join([*pieces, text[end:]]) if pieces else text


@functools.lru_cache(maxsize=8)
def _redactor(secrets: frozenset[tuple[str, str]]) -> Redactor:
    return Redactor(dict(secrets))


def redactor(secrets: Mapping[str, str] | None = None) -> Redactor:
    """The Redactor for these secrets; None means those of this process's environment."""
    known = own_secrets() if secrets is None else secrets
    return _redactor(frozenset(known.items()))


def redact(text: str, secrets: Mapping[str, str] | None = None) -> str:
    """The text with each secret in it replaced by ``[redacted: VARIABLE or RULE]``."""
    return redactor(secrets).text(text)


def redact_bytes(data: bytes, secrets: Mapping[str, str] | None = None) -> bytes:
    """The bytes without known secrets; where they are text, without what looks like one too."""
    return redactor(secrets).data(data)


def known_in(words: Sequence[str], secrets: Mapping[str, str] | None = None) -> str | None:
    """``argument N: the value of NAME`` for the first word that holds a known secret, or None."""
    one = redactor(secrets)
    for index, word in enumerate(words):
        for form, name in one.names:
            if form in word:
                return f"argument {index}: the value of {name}"
    return None


def head(text: str, limit: int) -> str:
    """The first ``limit`` characters of what the text is without secrets: never half of one."""
    return redactor().head(text, limit)


use_redactor(head)


def redact_json(value: Any, secrets: Mapping[str, str] | None = None) -> Any:
    """A copy of a JSON-like value without secrets in its strings, its keys, or under such keys."""
    return redactor(secrets).json(value)
