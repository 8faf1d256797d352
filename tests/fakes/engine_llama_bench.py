"""An installed ``llama-bench``: prints what the real one printed, for the lengths asked."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data" / "engines" / "llama_bench_b11434.json"
SWITCHES = ("-v", "--progress")


def main() -> None:
    """Answer ``--version``, or a test of prompt (-p N -n 0) or generation (-p 0 -n N -d D)."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print("version: 11434 (abcdef0)")
        return
    words = [word for word in words if word not in SWITCHES]
    options = dict(zip(words[::2], words[1::2], strict=True))
    prompt, generated = json.loads(RECORDED.read_text(encoding="utf-8"))
    what, row = ("generation", generated) if options["-p"] == "0" else ("prompt", prompt)
    row |= {"n_prompt": int(options["-p"]), "n_gen": int(options["-n"])}
    row |= {"n_depth": int(options.get("-d", 0)), "n_threads": int(options.get("--threads", 1))}
    count = int(options["-r"])
    row["samples_ns"] = list(itertools.islice(itertools.cycle(row["samples_ns"]), count))
    print("warning: a line of log on stderr", file=sys.stderr)
    for number in range(count):
        print(f"llama-bench: benchmark 1/1: {what} run {number + 1}/{count}", file=sys.stderr)
    print(json.dumps([row]))


if __name__ == "__main__":
    main()
