"""An installed ``llama-bench``: prints what the real one printed, for the lengths asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data" / "engines" / "llama_bench_b11434.json"


def main() -> None:
    """Answer ``--version``, or a test of prompt (-p N -n 0) or generation (-p 0 -n N -d D)."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print("version: 11434 (abcdef0)")
        return
    options = dict(zip(words[::2], words[1::2], strict=False))
    prompt, generated = json.loads(RECORDED.read_text(encoding="utf-8"))
    row = generated if options["-p"] == "0" else prompt
    row |= {"n_prompt": int(options["-p"]), "n_gen": int(options["-n"])}
    row |= {"n_depth": int(options.get("-d", 0)), "n_threads": int(options.get("--threads", 1))}
    print("warning: a line of log on stderr", file=sys.stderr)
    print(json.dumps([row]))


if __name__ == "__main__":
    main()
