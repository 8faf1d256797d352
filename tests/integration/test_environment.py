"""What is here: engines in this Python and in others, and what does not answer."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from helpers.stdio import Wire


def looked(tmp_path: Path, *pythons: Path) -> dict[str, Any]:
    """The reply of ``inspect_environment`` where IKIT_PYTHONS names these."""
    env = {"IKIT_PYTHONS": ",".join(map(str, pythons))}
    with Wire(tmp_path / "home", env=env) as wire:
        wire.initialize()
        told: dict[str, Any] = wire.structured("inspect_environment")
        return told


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another interpreter by its path, with the packages of this one."""
    path = tmp_path / "other-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def test_an_engine_is_told_once_for_each_python_that_has_it(tmp_path: Path, other: Path) -> None:
    version = metadata.version("xllamacpp")
    told = looked(tmp_path, other)
    rows = [e for e in told["engines"] if e["engine"] == "llamacpp" and e["python"]]
    assert rows == [
        {"engine": "llamacpp", "version": version, "python": python}
        for python in (sys.executable, str(other))
    ]
    assert f"llamacpp {version}" in told["summary"] and told["warnings"] == []


def test_an_interpreter_that_is_none_is_named_and_hides_no_other(
    tmp_path: Path, other: Path
) -> None:
    told = looked(tmp_path, tmp_path / "gone", Path("/bin/false"), other)
    gone, false = told["warnings"]
    assert str(tmp_path / "gone") in gone and "cannot start" in gone
    assert false.startswith("IKIT_PYTHONS: /bin/false did not answer")
    assert str(other) in {e["python"] for e in told["engines"]}
