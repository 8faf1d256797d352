"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.example import write_checkpoint


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model directory with the header of Llama-3.1-8B and holes for weights."""
    return write_checkpoint(tmp_path / "llama")
