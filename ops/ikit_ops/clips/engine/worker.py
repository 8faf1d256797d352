"""The script that ``clip_steps`` starts in a Python with torch: noise, and replay.

It is run by path.  The packages of ikit-mcp that it needs (the standard library is all that they
need) are made importable by their folders alone, so that nothing else of the installation it
comes from -- a Python of another version, perhaps -- gets on the path.

It reads its task from the file named by IKIT_CONFIG, writes what it is doing to
``progress.json`` beside it, and its findings to the file named there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any


def _make_importable() -> None:
    """Load the package this file is in from its folder, without touching sys.path."""
    root = Path(__file__).resolve().parents[2]
    if "ikit_ops" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "ikit_ops", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"no package at {root}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["ikit_ops"] = module
        spec.loader.exec_module(module)


class Progress:
    """Writes what is being done, atomically, for the caller to pass on."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total, self.done = path, total, 0

    def tell(self, what: str) -> None:
        """Say what is being done now."""
        partial = self.path.with_suffix(".partial")
        text = json.dumps({"done": self.done, "total": self.total, "what": what})
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)


def main() -> None:
    """Check the noise of every clip, and replay the picked steps of some."""
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    _make_importable()
    config = json.loads(Path(os.environ["IKIT_CONFIG"]).read_text(encoding="utf-8"))
    import torch

    torch.set_num_threads(max(1, int(config.get("threads") or 1)))
    from ikit_ops.clips.engine import task

    clips = config["clips"]
    progress = Progress(Path(config["progress"]), len(clips))
    found = task.run(config, progress)
    found["torch"] = torch.__version__
    result = Path(config["result"])
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(found), encoding="utf-8")
    partial.replace(result)


if __name__ == "__main__":
    main()

__all__: list[Any] = []
