"""measure_bandwidth against C, in interleaved pairs: ``python tests/bench/bench_bandwidth.py``.

The reference is the best of three C read kernels (one, two and four streams) and STREAM's copy,
built with ``gcc -O3 -march=native -ffast-math -fopenmp``, over a working set of the same size
and for the same time.  C is given its best *single pass* while the tool reports what it sustained
through a window, so the comparison leans to C.  Pairs alternate in who goes first.  A single pair
decides nothing on a machine with others on it: the median ratio does, and has to be 0.95 at least.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

PAIRS = 20
SECONDS = 2
LEAST = 0.95
FLAGS = ["-O3", "-march=native", "-ffast-math", "-fopenmp"]
SOURCE = Path(__file__).with_name("bandwidth_kernels.c")


def tool(home: Path, size: int | None) -> tuple[float, float, int, bool | None]:
    """One measurement by the tool: read and copy GB/s, the working set, and its verdict."""
    size_option = [] if size is None else ["--size-bytes", str(size)]
    done = subprocess.run(
        [sys.executable, "-m", "ikit_mcp.cli", "bandwidth", "--device", "cpu", "--json",
         "--seconds", str(SECONDS), *size_option],
        check=False, capture_output=True, text=True, env={**os.environ, "IKIT_HOME": str(home)},
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    record = json.loads(done.stdout)
    values = {found["name"]: found["value"] for found in record["metrics"]}
    size_used = record["identity"]["workload"]["size_bytes"]
    return values["dram_read_gbs"], values["dram_copy_gbs"], size_used, record["valid"]


def reference(program: Path, size: int) -> list[float]:
    """The best pass of each C kernel: sum, dot, four streams, copy, in GB/s."""
    done = subprocess.run(
        [program, str(SECONDS), str(size)], check=True, capture_output=True, text=True
    )
    return [float(word) for word in done.stdout.split()]


def main() -> int:
    """Print the table; 1 when a median ratio is too low."""
    compiler = shutil.which("gcc")
    if compiler is None:
        print("not run: there is no gcc here to build the reference with")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        program, home = Path(folder) / "kernels", Path(folder) / "home"
        subprocess.run([compiler, *FLAGS, SOURCE, "-o", program], check=True)
        size = tool(home, None)[2]
        print(f"working set {size >> 20} MiB, {SECONDS} s each, GB/s")
        print("pair  read   C sum  C dot  C four  ratio   copy   C copy  ratio  valid")
        ratios: list[tuple[float, float]] = []
        for pair in range(PAIRS):
            if pair % 2:
                kernels = reference(program, size)
                read, copy, _, valid = tool(home, size)
            else:
                read, copy, _, valid = tool(home, size)
                kernels = reference(program, size)
            one, two, four, copied = kernels
            ratios.append((read / max(one, two, four), copy / copied))
            print(
                f"{pair:4}  {read:5.1f}  {one:5.1f}  {two:5.1f}  {four:6.1f}  {ratios[-1][0]:5.3f}"
                f"  {copy:5.1f}  {copied:7.1f}  {ratios[-1][1]:5.3f}  {valid}",
                flush=True,
            )
    middle = [median(column) for column in zip(*ratios, strict=True)]
    print(f"median ratio: read {middle[0]:.3f}, copy {middle[1]:.3f} (at least {LEAST})")
    return 0 if min(middle) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
