"""Read and copy a GPU's memory with torch, and stamp on the device when how much was done.

Run by path as ``gpu_bandwidth_worker.py PLAN RESULT`` (two JSON files) in a Python that has
torch (CUDA, or ROCm under the same names), with that and the standard library alone.  The first
visible device is measured.

Reading is a reduction of a tensor that is many times the L2 cache: every element comes from
memory once and next to nothing is written.  Which reduction streams best depends on the chip and
on torch's version, so several are tried and the fastest is kept and named: a sum, and a
matrix-vector product, which is what decoding a token does.  Copying is one tensor onto another.

Time is the device's own: CUDA events between batches of kernels, which the host enqueues ahead so
that the device never waits.  That the data was read is proven by a change at the tensor's very
end, which the result must show.

It has not run on a GPU yet: it is written to torch's documented interface, and the tests that
hold it against torch's own copy (tests/gpu) wait for a machine that has one.

PLAN: ``size_bytes`` (null: 32 times the L2, at least 2 GiB, at most a third of what is free),
``phases`` ([{kind, seconds}]), ``stamp_seconds``.
RESULT: ``phases`` [{kind, threads: [{times, bytes}]}] (CLOCK_MONOTONIC seconds), ``verified``,
``read_kernel``, ``kernels`` {name: GB/s}, ``l2_bytes``, ``size_bytes``, ``device``, ``torch``;
or ``error``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

COLUMNS = 16384
AHEAD = 4  # batches that are enqueued before the oldest is waited for


class Memory:
    """Two float32 matrices that together are the working set, and what is done to them."""

    def __init__(self, size_bytes: int | None) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.l2_bytes = getattr(properties, "L2_cache_size", None)  # torch before 2.1 hides it
        free, _ = torch.cuda.mem_get_info()
        wanted = size_bytes or min(max(32 * (self.l2_bytes or 0), 2 << 30), free // 3)
        rows = max(1, wanted // (2 * 4 * COLUMNS))
        self.first = torch.empty(rows, COLUMNS, device="cuda").uniform_(-1, 1)
        self.second = self.first.clone()
        self.vector = torch.ones(COLUMNS, device="cuda")
        self.half_bytes = int(self.first.numel()) * 4
        self.kernels = {"sum": torch.sum, "matrix_vector": self._matrix_vector}
        self.read_kernel = "sum"

    def _matrix_vector(self, matrix: Any) -> Any:
        return torch.mv(matrix, self.vector)

    def read(self) -> int:
        """Reduce both matrices; the bytes read."""
        kernel = self.kernels[self.read_kernel]
        kernel(self.first)
        kernel(self.second)
        return 2 * self.half_bytes

    def copy(self) -> int:
        """Copy one onto the other; the bytes read and written."""
        self.second.copy_(self.first)
        return 2 * self.half_bytes

    def verified(self) -> bool:
        """Whether each reduction shows a change of the last element, and a copy carries it."""
        before = {name: kernel(self.second).sum().item() for name, kernel in self.kernels.items()}
        self.first[-1, -1] += 1e6
        self.copy()
        after = {name: kernel(self.second).sum().item() for name, kernel in self.kernels.items()}
        self.first[-1, -1] -= 1e6
        return all(abs(after[name] - before[name] - 1e6) < 1e4 for name in self.kernels)


def run(step: Any, seconds: float, stamp_seconds: float) -> dict[str, list[float]]:
    """Repeat the step for so long; device times and bytes moved by then, from (start, 0)."""
    torch.cuda.synchronize()
    begun = time.monotonic()
    first = torch.cuda.Event(enable_timing=True)
    first.record()
    moved = step()
    torch.cuda.synchronize()
    once = max(time.monotonic() - begun, 1e-6)
    batch = max(1, int(stamp_seconds / once))
    begun = time.monotonic()
    first.record()
    marks: list[tuple[Any, int]] = []
    while time.monotonic() - begun < seconds:
        for _ in range(batch):
            step()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append((event, moved * batch * (len(marks) + 1)))
        if len(marks) > AHEAD:
            marks[-AHEAD - 1][0].synchronize()
    torch.cuda.synchronize()
    times = [begun] + [begun + first.elapsed_time(event) / 1000 for event, _ in marks]
    return {"times": times, "bytes": [0.0] + [float(total) for _, total in marks]}


def fastest_kernel(memory: Memory) -> dict[str, float]:
    """GB/s of each way to read in a short run; the memory keeps the fastest."""
    rates = {}
    for name in memory.kernels:
        memory.read_kernel = name
        told = run(memory.read, 0.2, 0.01)
        rates[name] = told["bytes"][-1] / (told["times"][-1] - told["times"][0]) / 1e9
    memory.read_kernel = max(rates, key=lambda name: rates[name])
    return rates


def measure(plan: dict[str, Any]) -> dict[str, Any]:
    """Run the plan; the result, as in the module's docstring."""
    if not torch.cuda.is_available():
        return {"error": f"torch {torch.__version__} sees no GPU"}
    memory = Memory(plan["size_bytes"])
    verified = memory.verified()
    rates = fastest_kernel(memory)
    phases = []
    for phase in plan["phases"]:
        step = memory.read if phase["kind"] == "read" else memory.copy
        stamps = run(step, phase["seconds"], plan["stamp_seconds"])
        phases.append({"kind": phase["kind"], "threads": [stamps]})
    return {
        "phases": phases,
        "verified": verified and memory.verified(),
        "read_kernel": memory.read_kernel,
        "kernels": {name: round(rate, 1) for name, rate in rates.items()},
        "l2_bytes": memory.l2_bytes,
        "size_bytes": 2 * memory.half_bytes,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
    }


def main(argv: list[str]) -> int:
    """Run the plan of the first file; 0 when the second holds a measurement, 1 an error."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        result = measure(plan)
    except RuntimeError as error:  # torch's own, out of memory among them
        result = {"error": str(error)[:16_384]}  # redacted, and cut shorter, where it is shown
    Path(argv[1]).write_text(json.dumps(result), encoding="utf-8")
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
