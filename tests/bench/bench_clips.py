"""What recording a clip costs, and what checking it costs: the 768x512, 121-frame, 30-step clip.

Recording is held against plain sequential writes of as many bytes to the same disk, turn by turn
in one run.  Wall time is what an engine waits; on a busy machine the ratio of CPU time tells
more, since it is not others' work.  Checking is CPU time and anonymous memory.

    python tests/bench/bench_clips.py [FOLDER]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "ops"), str(ROOT)]

import numpy as np

from ikit_ops.clips import modelfree
from ikit_ops.clips.stepdump import DumpReader, StepRecorder, request_of

TURNS, STEPS = 15, 30
SHAPES = {"video": (1, 128, 16, 16, 24), "audio": (1, 8, 126, 16)}
BLOCK = 4 << 20
SHA = "ab" * 32
ASKED = request_of(
    {"prompt": "p" * 200, "width": 768, "height": 512, "num_frames": 121, "fps": 24,
     "steps": STEPS, "guidance_scale": 3.0, "seed": 0}
)  # fmt: skip


def memory(field: str) -> float:
    """A field of this process's status, in MB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def plain(path: Path, size: int, block: memoryview) -> None:
    """Write as many bytes, one block after the other."""
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    while size > 0:
        size -= os.write(fd, block[: min(size, len(block))])
    os.close(fd)


def steps() -> list[dict[str, tuple[Any, Any, Any]]]:
    """Honest steps of seeded numbers, made before the clock runs; two alternate to save memory."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(2):
        row = {}
        for name, shape in SHAPES.items():
            x = random.standard_normal(shape, dtype=np.float32)
            row[name] = (x, 0.5 * x, x)
        found.append(row)
    return found


def record(folder: Path, rows: list[dict[str, Any]]) -> float:
    """Record a clip; the seconds from the last step on."""
    streams = {name: (shape, "F32") for name, shape in SHAPES.items()}
    with StepRecorder(ASKED, folder, streams=streams) as recorder:
        for step in range(STEPS):
            for name, (x, out, after) in rows[step % 2].items():
                recorder.step(step, name, x, out, after, 1 - step / STEPS, 1 - (step + 1) / STEPS)
        for name in SHAPES:
            recorder.final(name, rows[1][name][2])
        last = time.perf_counter()
        recorder.save(SHA)
        return time.perf_counter() - last


def honest(folder: Path) -> Path:
    """A dump whose steps are right, as the checker mostly sees them."""
    random = np.random.default_rng(0)
    levels = np.linspace(1, 0, STEPS + 1).astype(np.float32)
    asked = {**ASKED, "audio": True}
    streams = {name: (shape, "F32") for name, shape in SHAPES.items()}
    with StepRecorder(asked, folder, streams=streams) as recorder:
        for name, shape in SHAPES.items():
            x = random.standard_normal(shape, dtype=np.float32)
            for step in range(STEPS):
                out = random.standard_normal(shape, dtype=np.float32) + np.float32(0.5) * x
                after = x + (levels[step + 1] - levels[step]) * out
                recorder.step(step, name, x, out, after, levels[step], levels[step + 1])
                x = after
            recorder.final(name, x)
        return recorder.save("cd" * 32)


def check(path: Path) -> None:
    """Layout, schedule, arithmetic, chain, final, reuse."""
    with DumpReader(path) as reader:
        asked = reader.request or {}
        assert modelfree.layout_of(reader, asked, None) == []
        assert modelfree.schedule_problems(*reader.sigmas()) == []
        found = modelfree.scan(reader)
        assert not (found.arithmetic or found.chain or found.final or found.reused)


def main(folder: Path) -> None:
    """Print both tables."""
    rows, block = steps(), memoryview(bytearray(os.urandom(BLOCK)))
    before = memory("VmRSS")
    record(folder, rows)
    target = folder / f"{SHA}.safetensors"
    size = target.stat().st_size
    walls: dict[str, list[float]] = {"plain": [], "record": []}
    cpus: dict[str, list[float]] = {"plain": [], "record": []}
    after = []
    for _ in range(TURNS):
        for name in ("plain", "record"):
            target.unlink(missing_ok=True)
            (folder / "plain").unlink(missing_ok=True)
            if name == "plain":
                wall, cpu = timed(lambda: plain(folder / "plain", size, block))
            else:
                wall, cpu = timed(lambda: after.append(record(folder, rows)))
            walls[name].append(wall)
            cpus[name].append(cpu)
    ratios = [p / r for p, r in zip(walls["plain"], walls["record"], strict=True)]
    print(f"recording {size:,} bytes, {TURNS} turns, medians (least)")
    for name in walls:
        print(f"  {name:<8}{statistics.median(walls[name]):8.3f} s ({min(walls[name]):.3f})"
              f"   CPU {statistics.median(cpus[name]):.3f} s ({min(cpus[name]):.3f})")  # fmt: skip
    best = min(walls["plain"]) / min(walls["record"])
    by_cpu = statistics.median(cpus["plain"]) / statistics.median(cpus["record"])
    print(f"  rate against plain: {statistics.median(ratios):.2f} median, {best:.2f} of the best")
    print(f"  turns; by CPU {by_cpu:.2f}")
    print(f"  after the last step: {1e3 * statistics.median(after):.1f} ms;"
          f" memory on top of the steps: {memory('VmHWM') - before:.1f} MB")  # fmt: skip
    target.unlink()
    path = honest(folder)
    check(path)
    anonymous, spent = memory("RssAnon"), []
    for _ in range(5):
        spent.append(timed(lambda: check(path)))
    print("checking it without a model")
    print(f"  CPU {statistics.median(c for _, c in spent):.3f} s, wall"
          f" {statistics.median(w for w, _ in spent):.3f} s,"
          f" anonymous memory +{memory('RssAnon') - anonymous:.1f} MB")  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        main(Path(made))
