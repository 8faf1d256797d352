"""Fixtures that several rooms share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model directory with the header of Llama-3.1-8B and holes for weights."""
    source = ROOT / "agent_examples" / "01_scripted_client" / "checkpoint.py"
    spec = importlib.util.spec_from_file_location("example_checkpoint", source)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written: Path = module.write(tmp_path / "llama")
    return written
