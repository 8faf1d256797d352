"""What the harness costs: beside a round, and from a call to its record.

    python tests/bench/bench_harness.py

A round's cost is told in two ways: how far the rate by our stamps lies from the rate by the
engine's own clock of the same requests, and how much time passes between two rounds.  From
call to record, the CPU time of ``ikit bench`` with everything below it is compared with that
of the engine's worker alone, run on the same configuration; pairs are interleaved.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.tiny_models import SLOW, shared_gguf
from ikit_ops.engines.adapter import WORKERS

PAIRS = 5
SMALL = ["--prompt-len", "64", "--gen-len", "32", "--rounds", "3", "--threads", "1"]


def children_cpu() -> float:
    """User and system time of all children that were waited for, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of(argv: list[str], env: dict[str, str]) -> float:
    """The CPU seconds of a command and everything below it."""
    before = children_cpu()
    subprocess.run(argv, check=True, capture_output=True, env=env)
    return children_cpu() - before


def bench(model: Path, *words: str) -> list[str]:
    """The command line of a benchmark."""
    return [sys.executable, "-m", "ikit_mcp.cli", "bench", str(model), *words, "--json"]


def call_to_record(home: Path, env: dict[str, str]) -> None:
    """CPU of whole calls against that of their workers."""
    config = {
        "model": str(shared_gguf()), "revision": None, "prompt_len": 64, "gen_len": 32, "rounds": 3,
        "warmup": 2, "seed": 0, "round_offset": 0, "nonce": "x", "threads": 1, "device": "cpu",
        "keep_going": False, "vocabulary": 2048, "program": None, "version": "0",
        "options": ["--threads", "1", "--threads-batch", "1", "--ctx-size", "128", "-np", "1"],
        "result_path": str(home / "result.json"), "progress_path": str(home / "progress.json"),
    }  # fmt: skip
    path = home / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    worker = [sys.executable, "-u", str(WORKERS / "llamacpp_worker.py"), str(path)]
    print("| call, CPU s | worker alone, CPU s | beyond the engine's own |\n|---|---|---|")
    beyond = []
    for _ in range(PAIRS):
        whole, alone = cpu_of(bench(shared_gguf(), *SMALL), env), cpu_of(worker, env)
        beyond.append(whole - alone)
        print(f"| {whole:.2f} | {alone:.2f} | {whole - alone:.2f} |")
    print(f"\nmedian beyond the engine's own: {statistics.median(beyond):.2f} s (limit 3)\n")


def cost_of_a_round(home: Path, env: dict[str, str]) -> None:
    """Our clock against the engine's, and the time between rounds."""
    words = ["--prompt-len", "16", "--gen-len", "300", "--rounds", "5", "--threads", "1"]
    done = subprocess.run(
        bench(shared_gguf(SLOW), *words), check=True, capture_output=True, env=env
    )
    rounds: list[dict[str, Any]] = json.loads(done.stdout)["data"]["rounds"]
    print("| round, ms | tok/s, stamps | tok/s, engine | difference | to the next, ms |")
    print("|---|---|---|---|---|")
    differences, gaps = [], []
    for row, following in zip(rounds, [*rounds[1:], None], strict=True):
        difference = row["decode_tok_s"] / row["engine_decode_tok_s"] - 1
        differences.append(abs(difference))
        gap = None if following is None else (following["t_start"] - row["t_end"]) * 1e3
        if gap is not None:
            gaps.append(gap / row["total_ms"])
        shown = "" if gap is None else f"{gap:.2f}"
        print(
            f"| {row['total_ms']:.1f} | {row['decode_tok_s']:.1f} | "
            f"{row['engine_decode_tok_s']:.1f} | {difference:+.3%} | {shown} |"
        )
    print(
        f"\nmedian difference {statistics.median(differences):.3%}, "
        f"between rounds {statistics.median(gaps):.3%} of a round (limit 0.5 %)"
    )


def main() -> None:
    """Both tables."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        env = {**os.environ, "IKIT_HOME": folder, "IKIT_LOCK_DIR": str(home / "locks")}
        call_to_record(home, env)
        cost_of_a_round(home, env)


if __name__ == "__main__":
    main()
