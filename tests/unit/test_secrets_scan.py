"""Finished files are searched for secrets; what holds one, or was not seen, is removed."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from ikit_mcp.process import scan
from ikit_mcp.process.secrets import scan_file, scan_or_remove
from ikit_mcp.registry import OpError

SECRETS = {"MADE_UP_TOKEN": "made/up+value:0001", "OTHER_KEY": "another made-up one"}


def written(path: Path, data: bytes) -> Path:
    """The path, with the data in it."""
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("position", [0, 1, 2, 3, 500])
@pytest.mark.parametrize("dress", ["plain", "url", "url lower", "base64", "base64 url"])
def test_a_secret_is_found_in_any_dress_and_place(
    tmp_path: Path, dress: str, position: int
) -> None:
    value = SECRETS["MADE_UP_TOKEN"]
    raw = b"\xf0" * position + value.encode() + b"\xf1"
    data = {
        "plain": raw,
        "url": b"x" * position + quote(value, safe="").encode(),
        "url lower": b"x" * position + b"made%2fup%2bvalue%3a0001",
        "base64": base64.b64encode(raw),
        "base64 url": base64.urlsafe_b64encode(raw),
    }[dress]
    assert scan_file(written(tmp_path / "report", data), SECRETS) == ["MADE_UP_TOKEN"]


def test_a_secret_on_the_seam_of_two_chunks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "CHUNK_BYTES", 32)
    value = SECRETS["MADE_UP_TOKEN"].encode()
    for offset in range(100):
        path = written(tmp_path / "report", b"." * offset + value + b"." * 40)
        assert scan_file(path, SECRETS) == ["MADE_UP_TOKEN"]


def test_all_secrets_of_a_file_are_named_once(tmp_path: Path) -> None:
    data = b" ".join(value.encode() for value in SECRETS.values()) * 3
    assert scan_file(written(tmp_path / "report", data), SECRETS) == ["MADE_UP_TOKEN", "OTHER_KEY"]


def test_a_clean_file_stays(tmp_path: Path) -> None:
    files = [written(tmp_path / "a", b"made/up+value:0002" * 1000), written(tmp_path / "b", b"")]
    scan_or_remove(files, SECRETS)
    scan_or_remove(files, {})
    assert all(path.exists() for path in files)


def test_a_file_with_a_secret_is_removed_and_the_variable_named(tmp_path: Path) -> None:
    value = SECRETS["MADE_UP_TOKEN"]
    bad = written(tmp_path / "bad", b"\0" * 5000 + value.encode())
    good = written(tmp_path / "good", b"fine")
    with pytest.raises(OpError) as caught:
        scan_or_remove([good, bad], SECRETS)
    assert not bad.exists() and good.exists()
    assert "bad holds the value of MADE_UP_TOKEN" in str(caught.value)
    assert value not in str(caught.value)


def test_what_cannot_be_searched_fails_too(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with pytest.raises(OpError, match=r"missing.*; pipe.*; folder.*COULD NOT BE REMOVED"):
        scan_or_remove([tmp_path / "missing", fifo, _folder(tmp_path / "folder")], SECRETS)
    assert not fifo.exists()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(200 << 20)
        file.seek(0, os.SEEK_END)
        file.write(SECRETS["OTHER_KEY"].encode())
    scan_file(written(tmp_path / "small", b"."), SECRETS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert scan_file(path, SECRETS) == ["OTHER_KEY"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
