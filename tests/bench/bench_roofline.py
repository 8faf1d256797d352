"""How fast a roofline is, and what it takes: run it, it is not a test.

Each model is counted and drawn in a process of its own, cold.  The CPU time of the call is printed
beside that of a bare ``json.loads`` over the same headers, because absolute times differ
from machine to machine and ratios do not; and the peak of the process's memory.  With
``--fuzz N`` it mutates headers N times instead, and with ``--peer`` it asks the functions
of hf-mem, where that is installed, for the same totals.

    python tests/bench/bench_roofline.py [MODEL ...] [--fuzz 100000] [--peer]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "ops"), str(ROOT / "tests")]

from fakes.checkpoints import expected, header_of, llama_tensors, rehydrate
from ikit_mcp.registry import OpError
from ikit_ops.checkpoint.safetensors_header import parse_header

MODELS = ["llama-3.1-8b", "qwen3-30b-a3b-nvfp4", "deepseek-v3", "kimi-k2"]
COUNT = """
import json, resource, sys, time
from ikit_ops.checkpoint.resolve import read_checkpoint
from ikit_ops.decode import curve, picture
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.tally import Options
started = time.process_time()
checkpoint, options = read_checkpoint(sys.argv[1]), Options()
counts = count_checkpoint(checkpoint, options)
line = curve.trace(counts, options, checkpoint.config)
picture.draw(picture.Subject("", counts, options, line, 1.0, "", lambda n: 1e9 / n, "tok/s"))
cpu = time.process_time() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([cpu, peak, counts.stored_bytes, counts.weight_bytes]))
"""


def json_seconds(folder: Path) -> float:
    """CPU seconds of a bare ``json.loads`` over all headers of a model."""
    started = time.process_time()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return time.process_time() - started


def count(folder: Path) -> tuple[float, int, int, int]:
    """(CPU seconds, peak bytes, stored bytes, weight bytes) of one cold count and picture."""
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'ops'}"}
    argv = [sys.executable, "-c", COUNT, str(folder)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    cpu, peak, stored, weights = json.loads(done.stdout)
    return cpu, peak, stored, weights


def peer_total(folder: Path) -> tuple[int, float] | None:
    """Stored bytes by hf-mem's own parser, and its CPU s; None where it is not installed."""
    if importlib.util.find_spec("hf_mem") is None:
        return None
    from hf_mem.safetensors.metadata import parse_safetensors_metadata

    begun = time.process_time()
    raw: dict[str, object] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            raw |= json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    found = parse_safetensors_metadata({"Transformer": raw})
    return int(found.bytes_count), time.process_time() - begun


def models(names: list[str], peer: bool) -> None:
    """Print a line for each model."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            model = rehydrate(name, Path(folder) / name)
            runs = [count(model) for _ in range(3)]
            cpu, peak, stored, weights = min(runs)
            right = expected(name)
            exact = (stored, weights) == (
                right["stored_bytes"],
                right["active_weight_bytes_per_token"],
            )
            floor = min(json_seconds(model) for _ in range(3))
            line = (
                f"{name:24} {cpu:6.3f} s CPU, {cpu / floor:4.2f} x json.loads, {peak / 1e6:4.0f} MB"
            )
            print(line, "exact" if exact else "WRONG", end="")
            other = peer_total(model) if peer else None
            print(f", hf-mem: {other[0]} B stored, {other[1]:.3f} s CPU" if other else "")


def fuzz(times: int) -> None:
    """Mutate headers: no crash but OpError, bounded memory, and the slowest one's time."""
    randomness = random.Random(0)
    raw, size = header_of(llama_tensors(1), {"format": "pt"})
    slowest, refused = 0.0, 0
    tracemalloc.start()
    for _ in range(times):
        mutant = bytearray(raw)
        for _ in range(randomness.randint(1, 6)):
            at = randomness.randrange(len(mutant))
            choice = randomness.random()
            if choice < 0.4:
                mutant[at] = randomness.randrange(256)
            elif choice < 0.7:
                del mutant[at : at + randomness.randint(1, 60)]
            else:
                mutant[at:at] = mutant[at : at + randomness.randint(1, 200)]
        started = time.perf_counter()
        try:
            parse_header(bytes(mutant), 8 + len(mutant) + size, "mutant")
        except OpError:
            refused += 1
        slowest = max(slowest, time.perf_counter() - started)
    peak = tracemalloc.get_traced_memory()[1]
    print(f"{times} mutants, {refused} refused", end=", ")
    print(f"slowest {slowest * 1e3:.1f} ms, peak {peak / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--fuzz", type=int, default=0)
    parser.add_argument("--peer", action="store_true")
    arguments = parser.parse_args()
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    if arguments.fuzz:
        fuzz(arguments.fuzz)
    else:
        models(arguments.models, arguments.peer)
