"""The MCP Inspector's command line against our server: ``python inspector_check.py``.

The Inspector needs Node 22; both come from npm into the user's cache folder and are kept
there by version.  Where npm or the packages cannot be had, it says so and ends with 0.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.example import write_checkpoint

PACKAGES = ("node@22", "@modelcontextprotocol/inspector@2.12.0")
SECONDS = 600


def installed() -> Path | None:
    """The folder with the programs; None, with the reason printed, where it cannot be made."""
    npm = shutil.which("npm")
    if npm is None:
        sys.stdout.write("inspector: SKIPPED: npm is not on PATH\n")
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "ikit-mcp-tests" / "inspector-2.12.0"
    programs = folder / "node_modules" / ".bin"
    if not (programs / "mcp-inspector").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for package in PACKAGES:
            done = subprocess.run(
                [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", package],
                check=False, capture_output=True, text=True, timeout=SECONDS,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if done.returncode != 0:
                reason = done.stderr.strip().splitlines()[-1:] or ["npm failed"]
                sys.stdout.write(f"inspector: SKIPPED: {package} cannot be had: {reason[0]}\n")
                return None
    return programs


def inspect(programs: Path, home: Path, *words: str) -> Any:
    """What one call of the Inspector prints, as JSON."""
    env = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "IKIT_HOME": str(home),
    }
    command = [str(programs / "mcp-inspector"), "--cli", sys.executable, "-m", "ikit_mcp.cli",
               "serve", *words, "--format", "json"]  # fmt: skip
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (words, done.returncode, done.stdout[-2000:], done.stderr[-2000:])
    return json.loads(done.stdout)


def main() -> int:
    """List the tools strictly, call roofline, read the record."""
    programs = installed()
    if programs is None:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        model = write_checkpoint(Path(folder) / "Llama-3.1-8B")
        listed = inspect(programs, home, "--method", "tools/list", "--strict")
        listed = listed.get("result", listed)
        names = [tool["name"] for tool in listed["tools"]]
        assert "roofline" in names, names
        called = inspect(
            programs, home, "--method", "tools/call", "--tool-name", "roofline",
            "--tool-arg", f"model={model}", "--tool-arg", "gpu_bw=3350",
        )  # fmt: skip
        called = called.get("result", called)
        numbers = {m["name"]: m["value"] for m in called["structuredContent"]["metrics"]}
        assert numbers["weight_bytes"] == 15_009_857_536, numbers
        assert numbers["kv_bytes"] == 134_217_728, numbers
        uri = called["structuredContent"]["uri"]
        read = inspect(programs, home, "--method", "resources/read", "--uri", uri)
        assert "15009857536" in json.dumps(read)
    sys.stdout.write(f"inspector: {len(names)} tools listed, roofline called, its record read\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
