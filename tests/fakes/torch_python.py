"""A stand-in for a Python that has torch, on machines without a GPU.

It answers the question whether torch is there, and leaves a result as the GPU's worker does,
with made-up rates.  What it was started with is kept beside it, as ``seen.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = """#!{python} -IB
import json, os, sys
from pathlib import Path

here = Path(__file__).resolve().parent
if "-c" in sys.argv:
    sys.exit({has_torch})
plan = json.loads(Path(sys.argv[-2]).read_text())
names = {{n: v for n, v in os.environ.items() if n.endswith("VISIBLE_DEVICES")}}
(here / "seen.json").write_text(json.dumps({{"plan": plan, "env": names, "argv": sys.argv[1:3]}}))
result = json.loads((here / "result.json").read_text())
if "phases" not in result and "error" not in result:
    now, phases = 100.0, []
    for phase in plan["phases"]:
        rate = result["read"] if phase["kind"] == "read" else result["copy"]
        times = [now + phase["seconds"] * n / 50 for n in range(51)]
        threads = [{{"times": times, "bytes": [rate * 1e9 * (t - now) for t in times]}}]
        phases.append({{"kind": phase["kind"], "threads": threads}})
        now = times[-1]
    result["phases"] = phases
Path(sys.argv[-1]).write_text(json.dumps(result))
"""

GOOD: dict[str, Any] = {
    "read": 4300.0, "copy": 4100.0, "verified": True, "read_kernel": "sum",
    "kernels": {"sum": 4290.1, "matrix_vector": 4100.2}, "l2_bytes": 50 << 20,
    "size_bytes": 2 << 30, "device": "NVIDIA H200", "torch": "2.13.0",
}  # fmt: skip


def install(folder: Path, *, has_torch: bool = True, **result: Any) -> Path:
    """Put the stand-in into a folder; the path of the interpreter that it claims to be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps({**GOOD, **result}), encoding="utf-8")
    program = folder / "python"
    text = SCRIPT.format(python=sys.executable, has_torch=0 if has_torch else 1)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    return program
