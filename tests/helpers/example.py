"""The checkpoint of the first example: Llama-3.1-8B's tensors, and holes for weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "agent_examples" / "01_scripted_client"


def write_checkpoint(folder: Path) -> Path:
    """Write the model directory; the folder."""
    spec = importlib.util.spec_from_file_location("example_checkpoint", SOURCE / "checkpoint.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written: Path = module.write(folder)
    return written
