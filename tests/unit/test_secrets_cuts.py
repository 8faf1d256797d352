"""No cut leaves half of a secret: whatever is cut is redacted before, wherever the cut falls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.evidence import save
from ikit_mcp import arguments
from ikit_mcp.call import Settings, log_end, log_ends, one_line
from ikit_mcp.evidence import paging
from ikit_mcp.evidence.record import Draft, Provenance, assemble
from ikit_mcp.evidence.store import Store
from ikit_mcp.process.output import HEADLESS, Output
from ikit_mcp.process.redaction import LONGEST, SHORTEST, Redactor, redact_bytes
from ikit_mcp.registry import Arg, OpError, Registry, excerpt
from ikit_mcp.server import replies
from ikit_mcp.server.resources import PIECE_CHARACTERS, Resources
from ikit_ops.engines import drive
from ikit_ops.profilers import launch

VALUE = "made-up-value-4711-abcdef"
NAMED = ["known", "by its looks"]  # names of tests are in the environment: not by the value
LOOKS = "hf_" + "AbCdEfGh12345678IjKl"  # known to nobody, and recognised by its looks


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_API_TOKEN", VALUE)


def shows_a_part(text: str | bytes, secret: str = VALUE) -> bool:
    """Whether 8 characters in a row of the secret are in the text."""
    shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return any(secret[n : n + SHORTEST] in shown for n in range(len(secret) - SHORTEST + 1))


def log_of(folder: Path, data: bytes) -> Path:
    path = folder / "a.log"
    path.write_bytes(data)
    return path


# --- texts -----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=60), st.integers(0, 90), st.integers(1, 60), st.sampled_from([VALUE, LOOKS])
)
def test_a_secret_slid_over_the_end_of_an_excerpt_never_shows(
    before: str, gap: int, limit: int, secret: str
) -> None:
    for text in (f"{before}{' ' * gap}{secret} and more", f"{secret} {before} {secret}"):
        assert not shows_a_part(excerpt(text, limit), secret)
        assert not shows_a_part(one_line(text, limit), secret)
        assert len(excerpt(text, limit)) <= limit


@pytest.mark.parametrize("secret", [VALUE, LOOKS], ids=NAMED)
def test_a_secret_before_the_cut_does_not_draw_half_of_another_one_in_front_of_it(
    secret: str,
) -> None:
    """What is redacted becomes shorter, so that what was beyond the cut may come before it."""
    limit = 200
    long = "https://" + "u" * 52 + ":" + "p" * 2_030 + "@host/x "
    for shift in range(limit + LONGEST - 2 * len(long)):  # over the end of what is looked at first
        text = long * 2 + "-" * shift + f" {secret} " + "." * 9_000
        assert not shows_a_part(excerpt(text, limit), secret)


def test_a_known_secret_that_is_longer_than_any_token_is_not_cut_either() -> None:
    long = "".join(chr(65 + n * 7 % 26) + str(n) for n in range(3_000))
    one = Redactor({"LONG_KEY": long})
    assert len(long) > 2 * LONGEST
    for shift in (0, 10, 60, 99):
        assert not shows_a_part(one.head("x" * shift + long + "y" * 100, 100), long)
        assert not shows_a_part(one.tail("x" * 100 + long + "y" * shift, 100), long)


def test_errors_about_arguments_operations_and_paths_show_no_half() -> None:
    listed = [Arg("choice", "string", "x", choices=("a", "b")), Arg("n", "integer", "x")]
    for shift in range(0, 500, 3):
        text = "z" * shift + " " + VALUE + " " + "z" * 900
        for given_ in ({"choice": text}, {"n": text}, {text: 1}, {text: 1, "choice": text}):
            with pytest.raises(OpError) as error:
                arguments.parse(listed, given_, "profile")
            assert not shows_a_part(error.value.what)
        for ask in (
            lambda name: Registry().get(name),
            lambda name: paging.find({"a": 1}, name),
            lambda name: paging.find({name: 1}, "b"),
        ):
            with pytest.raises(OpError) as error:
                ask(text)
            assert not shows_a_part(str(error.value))


@pytest.mark.parametrize("kind", ["page", "outline", "key"])
def test_pages_and_outlines_of_a_text_show_no_half_of_a_secret(kind: str) -> None:
    for shift in range(380, 420) if kind == "outline" else range(170, 215):
        if kind == "page":
            shift += 5_800
        text = "z" * shift + VALUE + "y" * 12_000
        if kind == "page":
            first = paging.page(text, "x", 0, 10)
            second = paging.page(text, "x", first["next_offset"], 10)
            shown = [first["value"], second["value"]]
        elif kind == "outline":
            shown = [paging.outline({"x": text}, "", 2_000)["x"]["start"]]
        else:
            many = {text: 1} | {str(n): "." * 500 for n in range(40)}
            shown = [item["name"] for item in paging.page(many, "", 0, 2)["items"]]
        assert not any(shows_a_part(replies.clean(part)) for part in shown)


def test_a_summary_that_is_too_long_is_cut_beside_the_secret() -> None:
    for shift in range(450, 620, 3):
        text = "s" * shift + VALUE + " " + "s" * 700
        draft = Draft(kind="bench", claim_class="measured", valid=None, summary=text)
        provenance = Provenance(started="", finished="", tool={}, request={}, reproduce="")
        assert not shows_a_part(assemble(draft, provenance, [])["summary"])


# --- what programs write -----------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 130), st.integers(0, 130), st.sampled_from([VALUE, LOOKS]), st.booleans())
def test_a_secret_slid_over_both_cuts_of_an_output_never_shows(
    before: int, after: int, secret: str, binary: bool
) -> None:
    output = Output(None)
    with open(output.fd, "wb", closefd=False) as file:
        noise = b"\xff\0" if binary else b"--"
        file.write(noise + b"a" * before + b" " + secret.encode() + b" " + b"m" * 20_000)
        file.write(b" " + secret.encode() + b" " + b"z" * after)
    text = output.text(60)
    whole = output.text(1 << 20)
    output.close()
    assert not shows_a_part(text, secret) and not shows_a_part(whole, secret)
    assert "bytes left out" in text and "[redacted: " in whole


@pytest.mark.parametrize("kept", [SHORTEST, 12, len(VALUE) - 1])
def test_the_half_at_which_a_program_was_cut_off_does_not_show(tmp_path: Path, kept: int) -> None:
    """Buffers are written in blocks: what is killed, or reaches its cap, ends anywhere."""
    output = Output(None)
    with open(output.fd, "wb", closefd=False) as file:
        file.write(b"key: " + VALUE.encode())
    output.cut(5 + kept)
    assert output.text() == "key: [redacted: ACME_API_TOKEN]"
    output.close()
    path = log_of(tmp_path, b"key: " + VALUE.encode()[:kept])
    assert launch.log_text(path) == "key: [redacted: ACME_API_TOKEN]"
    assert drive.read_log(path) == ["key: [redacted: ACME_API_TOKEN]"]


def test_a_secret_slid_over_the_beginning_of_a_long_log_never_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "KEPT_LOG", 300)
    for secret in (VALUE, LOOKS):
        for after in range(300 - len(secret) - 5, 305):
            data = b"a" * 9_000 + b"\n" + secret.encode() + b"\n" + b"b" * (after - 2) + b"\n"
            text = launch.log_text(log_of(tmp_path, data))
            assert not shows_a_part(text, secret)
            assert text.endswith("b\n") and len(text) <= 300
            assert not any(
                shows_a_part(line, secret) for line in launch.last_lines(tmp_path / "a.log")
            )


def test_a_long_log_begins_with_a_whole_line_and_a_short_one_is_whole(tmp_path: Path) -> None:
    path = log_of(tmp_path, b"".join(b"line %d\n" % n for n in range(100)))
    with path.open("rb") as file:
        assert log_end(file, 30) == "line 97\nline 98\nline 99\n"
        assert log_end(file, 10_000).startswith("line 0\n")
        assert log_ends(file, 12) == "line 0\nline \n 98\nline 99\n"
    with log_of(tmp_path, b"x" * 100).open("rb") as file:
        assert log_end(file, 30) == "x" * 30


PEM = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvgIBADANBgkq\n" * 20 + "-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("secret", [VALUE + "\n", LOOKS + " x\n", PEM], ids=[*NAMED, "key"])
def test_what_is_left_of_a_line_when_a_log_was_emptied_is_left_out(
    tmp_path: Path, secret: str
) -> None:
    for at in range(0, len(secret) - 1, 3):
        path = log_of(tmp_path, secret.encode()[at:] + b"the rest\n")
        text = launch.log_text(path, headless=True)
        assert not shows_a_part(text, secret.strip()) and text.endswith("the rest\n")
    only = log_of(tmp_path, secret.split("\n")[0].encode()[9:])
    assert launch.log_text(only, headless=True).removeprefix(HEADLESS) in (
        "", "x", "PRIVATE KEY-----",
    )  # fmt: skip


def test_lines_of_an_engines_log_show_no_line_of_a_key_of_many_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drive, "KEEP", 500)
    monkeypatch.setenv("ACME_TLS_KEY", "first line 11\nsecond line 22\nthird line 33")
    data = b"a\n" * 400 + os.environ["ACME_TLS_KEY"].encode() + b"\n" + PEM.encode() + b"b\n" * 200
    for end in range(len(data) - 900, len(data), 29):
        lines = drive.read_log(log_of(tmp_path, data[:end]))
        shown = "\n".join(drive.last_lines(lines, 500))
        assert not shows_a_part(shown, os.environ["ACME_TLS_KEY"]) and "MIIEvgIB" not in shown


def test_the_first_error_of_a_log_is_cut_beside_the_secret() -> None:
    for shift in range(240, 420, 3):
        line = "ValueError: " + "x" * shift + f" {VALUE} " + "y" * 500
        [found] = [drive.first_error([one_line(line, 2_000)], [])]
        assert found is not None and not shows_a_part(found)


def test_one_byte_that_is_no_text_hides_nothing_that_looks_like_a_secret() -> None:
    data = b"caf\xe9 " + LOOKS.encode() + b"\n"
    assert redact_bytes(data) == b"caf\xe9 [redacted: Hugging Face token]\n"


# --- artifacts in pieces -----------------------------------------------------------------------


def pieces_of(home: Path, uri: str) -> list[Any]:
    found, resources = [], Resources(Settings(home))
    while uri:
        found.append(resources._read(uri))
        uri = (found[-1].meta or {}).get("next", "")
    return found


@pytest.mark.parametrize("secret", [VALUE, LOOKS], ids=NAMED)
def test_a_secret_on_the_seam_of_two_pieces_shows_in_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    """The record is older than the secret, or somebody else's: nobody redacted its files."""
    monkeypatch.delenv("ACME_API_TOKEN")
    record = save(tmp_path, artifacts={"a.log": (b"z" * 60_000, "text/plain")})
    path = Store(tmp_path).folder(record.evidence_id) / "a.log"
    monkeypatch.setenv("ACME_API_TOKEN", VALUE)
    for shift in range(0, len(secret) + 3, 2):
        data = b"a" * (PIECE_CHARACTERS - shift - 1) + b" " + secret.encode() + b" " + b"b" * 30_000
        path.chmod(0o600)
        path.write_bytes(data)
        uri = f"evidence://{record.evidence_id}/a.log"
        pieces = pieces_of(tmp_path, uri)
        assert len(pieces) == 3 and not any(shows_a_part(p.text, secret) for p in pieces)
        joined = "".join(piece.text for piece in pieces)
        assert joined.count("a") >= PIECE_CHARACTERS - shift - 1 and joined.count("b") >= 30_000
        inside = Resources(Settings(tmp_path))._read(f"{uri}?offset={PIECE_CHARACTERS + 5}")
        assert not shows_a_part(inside.text, secret)  # type: ignore[union-attr]
