"""An engine that ikit-mcp does not know, taking part by two files; the standard library alone.

``IKIT_CONFIG`` names a JSON file with the workload (prompt_len, gen_len, rounds, warmup, seed,
round_offset, nonce, ...), ``IKIT_RESULT_PATH`` the file to write.  The engine here "decodes" by
hashing: slow enough to time, and honest about what it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

VOCABULARY = 30_000
STEPS = 400


def prompt(config: dict[str, Any], label: str) -> list[int]:
    """Token ids by the rule that every record names; a new nonce makes a new prompt."""
    source = random.Random(f"{config['seed']}:{label}")
    return [1000 + int(source.random() * (VOCABULARY - 1000)) for _ in range(config["prompt_len"])]


def generate(ids: list[int], count: int) -> tuple[list[int], dict[str, float]]:
    """``count`` tokens after the prompt, with the times from the start to first and last."""
    begun = time.monotonic()
    state = hashlib.sha256(json.dumps(ids).encode()).digest()
    tokens, stamps = [], []
    for _ in range(count):
        for _ in range(STEPS):
            state = hashlib.sha256(state).digest()
        tokens.append(1000 + int.from_bytes(state[:4], "big") % (VOCABULARY - 1000))
        stamps.append(time.monotonic() - begun)
    total = time.monotonic() - begun
    return tokens, {"first": stamps[0], "last": stamps[-1], "total": total}


def main() -> None:
    """Warm up, run the rounds, answer the reference prompt, write the result."""
    config = json.loads(Path(os.environ["IKIT_CONFIG"]).read_text(encoding="utf-8"))
    count, nonce = config["gen_len"], config["nonce"]
    for number in range(config["warmup"]):
        generate(prompt(config, f"{nonce}:warmup:{number}"), count)
    rounds = []
    for number in range(config["rounds"]):
        index = number + config["round_offset"]
        ids = prompt(config, f"{nonce}:round:{index}")
        begun = time.time()
        tokens, times = generate(ids, count)
        rounds.append(
            {
                "index": index,
                "t_start": begun,
                "t_end": time.time(),
                "ttft_ms": times["first"] * 1e3,
                "total_ms": times["total"] * 1e3,
                "decode_ms": (times["last"] - times["first"]) * 1e3,
                "gen_tokens": len(tokens),
                "prompt_tokens": len(ids),
                "cached_tokens": 0,
                "finish_reason": "length",
                "speculative_tokens": 0,
            }
        )
    result = {
        "format": "ikit.bench-result/1",
        "engine": {"name": "hash-decoder", "version": "1.0"},
        "platform": "cpu",
        "flags": {"steps": STEPS, "threads": 1},
        "flags_source": "the engine itself",
        "rounds": rounds,
        "tokens": generate(prompt(config, "reference"), count)[0],
        "prompt": {"vocab_bound": VOCABULARY},
    }
    target = Path(os.environ["IKIT_RESULT_PATH"])
    fresh = target.with_suffix(".new")
    fresh.write_text(json.dumps(result), encoding="utf-8")
    fresh.replace(target)


if __name__ == "__main__":
    main()
