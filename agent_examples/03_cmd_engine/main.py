"""Measure an engine of your own through ``engine=cmd``; see README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("engine.py")


def ikit(home: str, *words: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "ikit_mcp.cli", *words, "--json"],
        env={**os.environ, "IKIT_HOME": home},
        stdout=subprocess.PIPE,
        check=True,
    )
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def bench(home: str, *words: str) -> dict[str, Any]:
    """The record of a benchmark of the engine beside this file."""
    command = ("--command", sys.executable, "--command", str(ENGINE))
    sizes = ("--prompt-len", "64", "--gen-len", "32", "--rounds", "3")
    record = ikit(home, "bench", "acme/hash-decoder", "--engine", "cmd", *command, *sizes, *words)
    print(record["summary"])
    return record


def main() -> None:
    """Two benchmarks with the same seed: the same answer to the reference prompt."""
    with tempfile.TemporaryDirectory() as home:
        first = bench(home)
        assert first["valid"] is True, first["gates"]
        assert [row["gen_tokens"] for row in first["data"]["rounds"]] == [32, 32, 32]
        again = bench(home, "--reference", first["evidence_id"])
        assert again["data"]["reference"]["same"] is True
        other = bench(home, "--seed", "7", "--reference", first["evidence_id"])
        assert other["data"]["reference"]["same"] is None, "another prompt proves nothing"
    print("all steps held")


if __name__ == "__main__":
    main()
