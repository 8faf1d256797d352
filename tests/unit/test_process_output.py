"""Both ends of an output, as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_mcp.process.output import Output
from ikit_mcp.registry import OpError


def output_of(data: bytes) -> Output:
    """An Output that holds the data."""
    output = Output(None)
    with open(output.fd, "wb", closefd=False) as file:
        file.write(data)
    return output


@given(st.binary(max_size=300), st.integers(1, 40))
def test_both_ends_are_those_of_the_data(data: bytes, keep: int) -> None:
    output = output_of(data)
    text = output.text(keep)
    assert output.size() == len(data)
    output.close()
    if len(data) <= 2 * keep:
        assert text == data.decode(errors="replace")
    else:
        line = f"\n[... {len(data) - 2 * keep} bytes left out ...]\n"
        head, _, tail = text.partition(line)
        # What the cut left of a character is dropped: at most 3 bytes on each side.
        whole = data[:keep].decode(errors="replace")
        assert whole.startswith(head) and len(whole) - len(head) <= 1
        end = data[len(data) - keep :]
        assert tail in {end[i:].decode(errors="replace") for i in range(4)}


def test_a_split_character_is_left_out() -> None:
    output = output_of("é".encode() * 100)
    assert output.text(5) == "éé\n[... 190 bytes left out ...]\néé"
    assert output.text(0) == "\n[... 200 bytes left out ...]\n"
    output.close()


def test_continuation_bytes_that_never_begin_are_shown_as_such() -> None:
    output = output_of(b"\x80" * 100)
    assert output.text(10).endswith("]\n" + "\ufffd" * 10)
    output.close()


def test_an_output_can_be_cut_and_never_grows_by_it() -> None:
    output = output_of(b"0123456789")
    output.cut(20)
    assert output.size() == 10
    output.cut(4)
    assert output.text() == "0123"
    output.close()


def test_a_file_that_shrinks_meanwhile_gives_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    output = output_of(b"short")
    monkeypatch.setattr(Output, "size", lambda _self: 100)
    assert output.text() == "short"
    output.close()


def test_a_folder_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(OpError, match="temporary file"):
        Output(None)
    with pytest.raises(OpError, match="missing"):
        Output(tmp_path / "missing" / "out")
