"""The installed wheel, not the checkout: ``python wheel_check.py VENV/bin``.

``ikit --version`` runs, ``ikit-mcp`` answers tools/list over stdio, and what the package
publishes is in it.  Exits non-zero when one of them does not hold.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.stdio import Wire

WANTED = {"inspect_environment", "roofline", "list_evidence", "inspect_evidence", "verify_evidence"}


def main() -> int:
    """Check the programs of one virtual environment."""
    programs = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        version = subprocess.run(
            [programs / "ikit", "--version"],
            check=True, capture_output=True, text=True, cwd=folder, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
        assert version.startswith("ikit-mcp "), version
        home = Path(folder) / "home"
        with Wire(home, command=[str(programs / "ikit-mcp")], cwd=Path(folder)) as wire:
            wire.initialize()
            names = {tool["name"] for tool in wire.ask("tools/list")()["result"]["tools"]}
            assert names >= WANTED, WANTED - names
        listing = subprocess.run(
            [programs / "python", "-c", "import importlib.resources as r; import sys;"
             "sys.stdout.write(r.files('ikit_mcp.evidence')"
             ".joinpath('ikit.evidence.1.schema.json').read_text()[:1])"],
            check=True, capture_output=True, text=True, cwd=folder, stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip
        assert listing == "{"
    sys.stdout.write(f"wheel: {version.strip()}, {len(names)} tools over stdio\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
