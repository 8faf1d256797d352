"""A request's body becomes fields: the three content types, and everything that is none."""

from __future__ import annotations

import urllib.parse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_ops.clips.engine import bodies

MULTIPART = "multipart/form-data; boundary=m"
URLENCODED = "application/x-www-form-urlencoded"
PROMPTS = ["日本語 é 🎬", "\nkite\r\n", "\r\n\r\n", " a ", "--m", "a&b=c+d%41", "", "x\r\n--n\r\n"]


def multipart(*parts: tuple[str, bytes], mark: str = "m") -> bytes:
    """A form; each part is its header lines and its value's bytes."""
    made = b"".join(
        b"--" + mark.encode() + b"\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"
        for head, value in parts
    )
    return made + b"--" + mark.encode() + b"--\r\n"


def named(name: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}'


def refusal(body: bytes, kind: str | None, forms: bool = True) -> bodies.Refused:
    with pytest.raises(bodies.Refused) as caught:
        bodies.fields_of(body, kind, forms)
    return caught.value


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_comes_through_every_form_unchanged(prompt: str) -> None:
    body = multipart((named("prompt"), prompt.encode()), (named("seed"), b"5"), mark="longer")
    found = bodies.fields_of(body, "Multipart/Form-Data; boundary=longer", True)
    assert found == {"prompt": prompt, "seed": "5"}
    encoded = urllib.parse.urlencode({"prompt": prompt, "seed": 5}).encode()
    assert bodies.fields_of(encoded, URLENCODED + ";charset=UTF-8", True) == found


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_through_the_forms_unchanged(text: str) -> None:
    mark = "a-mark-that-no-text-holds-7f3a"
    kind = f'multipart/form-data; boundary="{mark}"'
    body = multipart((named("prompt"), text.encode()), mark=mark)
    if mark not in text:
        assert bodies.fields_of(body, kind, True) == {"prompt": text}
    encoded = urllib.parse.urlencode({"prompt": text}).encode()
    assert bodies.fields_of(encoded, URLENCODED, True) == {"prompt": text}


@pytest.mark.parametrize(
    "more",
    ["\r\nContent-Type: text/plain", "\r\nContent-Type: text/plain; charset=UTF-8",
     "\r\ncontent-type: application/json", "\r\nContent-Type: application/octet-stream",
     "\r\nContent-Transfer-Encoding: 8bit", "\r\nX-Other: 1"],
)  # fmt: skip
def test_what_a_part_says_of_itself_does_not_change_its_value(more: str) -> None:
    body = multipart((named("prompt", more), "é".encode()))
    assert bodies.fields_of(body, MULTIPART, True) == {"prompt": "é"}


@pytest.mark.parametrize(
    "more",
    ["; filename=f", '; filename="/etc/passwd"', "; filename*=UTF-8''f",
     "\r\nContent-Type: text/plain; charset=latin-1", "\r\nContent-Type: text/plain; charset=nope",
     "\r\nContent-Type: multipart/mixed; boundary=C", "\r\nContent-Type: message/rfc822",
     "\r\nContent-Transfer-Encoding: base64"],
)  # fmt: skip
def test_a_part_that_is_no_plain_text_is_refused_by_its_name(more: str) -> None:
    refused = refusal(multipart((named("prompt", more), b"x")), MULTIPART)
    assert (refused.status, refused.told["field"]) == (422, "prompt")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (multipart((named("prompt"), b"\xff\xfe")), MULTIPART), (b"prompt=%ff", URLENCODED),
        (b"prompt=\xff", URLENCODED),
    ],
)  # fmt: skip
def test_bytes_that_are_no_utf8_are_refused(body: bytes, kind: str) -> None:
    refused = refusal(body, kind)
    assert refused.status == 422
    assert "UTF-8" in refused.told["error"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (multipart((named("a"), b"1"), (named("a"), b"2")), MULTIPART), (b"a=1&a=2", URLENCODED),
        (b'{"a": 1, "b": 2, "a": 1}', "application/json"),
    ],
)  # fmt: skip
def test_a_field_that_is_given_twice_is_refused(body: bytes, kind: str) -> None:
    refused = refusal(body, kind)
    assert (refused.status, refused.told["field"]) == (422, "a")


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"", MULTIPART, 400), (b"--m", MULTIPART, 400), (b"no form", MULTIPART, 400),
        (multipart((named("a"), b"1"))[:-8], MULTIPART, 400),  # its end was cut off
        (multipart((named("a"), b"1\r\n--mx")), MULTIPART, 400),
        (multipart((named("a"), b"1")), "multipart/form-data", 400),
        (multipart((named("a"), b"1")), "multipart/form-data; boundary=", 400),
        (multipart(*[(named(f"a{n}"), b"1") for n in range(101)]), MULTIPART, 400),
        (multipart(("Content-Type: text/plain", b"1")), MULTIPART, 422),
        (multipart(("Content-Disposition: form-data", b"1")), MULTIPART, 422),
        (multipart(("Content-Disposition: form-data; name*=UTF-8''a", b"1")), MULTIPART, 422),
        (b"--m\r\n\r\nx\r\n--m--", MULTIPART, 422), (b"--m\r\nx\r\n--m--", MULTIPART, 422),
        (b"--m\r\n\xff\r\n\r\nx\r\n--m--", MULTIPART, 422),
        (b"a", URLENCODED, 400), (b"&".join([b"a=1"] * 101), URLENCODED, 400),
        (b"", "application/json", 400), (b"[1]", "application/json", 400),
        (b"{", "application/json", 400), (b'{"a": NaN}', "application/json", 400),
        (b'{"a": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b"[" * 100_000, "application/json", 400), (b"\xff", "application/json", 400),
    ],
)  # fmt: skip
def test_a_body_that_is_not_what_it_says_is_refused(body: bytes, kind: str, status: int) -> None:
    assert refusal(body, kind).status == status


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/jsonx", "text/json;"])
def test_a_body_that_any_web_page_may_send_is_refused(kind: str | None) -> None:
    refused = refusal(b"{}", kind)
    assert refused.status == 415
    assert refused.told["accepted"] == ["application/json", *bodies.FORM_TYPES]


def test_forms_are_taken_only_where_they_belong() -> None:
    assert refusal(b"a=1", URLENCODED, forms=False).told["accepted"] == ["application/json"]
    found: dict[str, Any] = bodies.fields_of(b'{"a": 1}', "Application/JSON; charset=utf-8", False)
    assert found == {"a": 1}
