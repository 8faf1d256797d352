"""Memory bandwidth of a GPU, through torch in a Python that has it.

torch is heavy, tied to its driver, and often already installed for an engine, so it is not a
dependency: the measuring runs by path in this Python where torch is importable, else in one of
those that ``IKIT_PYTHONS`` names.  The device is handed over by its UUID, because the order in
which libraries number devices is theirs to choose.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError, excerpt
from ikit_ops.measure.rounds import Outcome, Progressing, answer_of, phases, rounds_of

WORKER = Path(__file__).parent / "workers" / "gpu_bandwidth_worker.py"
WINDOW = 0.1  # seconds of a sustained rate: a hundred passes; the shortest phase is longer
ROUND = 1.0
READ_PART = 0.6
SETUP_SECONDS = 300.0  # importing torch from a cold disk, making the device's context
PROBE_SECONDS = 30.0
LEAST_TIMES_CACHE = 16
# What libraries of the device are found by; everything else of the shell stays outside.
KEEP = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_PATH", "HSA_OVERRIDE_GFX_VERSION")
_HAS_TORCH = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"


@dataclass(frozen=True)
class GpuOutcome(Outcome):
    """An outcome with what only a GPU's worker knows."""

    size_bytes: int = 0
    l2_bytes: int | None = None
    torch: str = ""
    read_kernel: str = ""
    kernels: dict[str, float] | None = None


def python_with_torch(call: Call) -> str:
    """The interpreter to measure in; OpError when none has torch."""
    # What is importable here may come from a user's folder, which the isolated child does not see.
    if importlib.util.find_spec("torch") is not None and _has_torch(call, sys.executable):
        return sys.executable
    listed = os.environ.get("IKIT_PYTHONS", "").replace(",", os.pathsep).split(os.pathsep)
    for python in (part.strip() for part in listed):
        if python and _has_torch(call, python):
            return python
    raise OpError(
        "no Python here has torch, which measures a GPU's bandwidth",
        "install the extra torch, or name an engine's Python in IKIT_PYTHONS",
    )


def _has_torch(call: Call, python: str) -> bool:
    try:
        done = call.run(
            [python, "-I", "-c", _HAS_TORCH], timeout=PROBE_SECONDS, grace=1.0,
            env=call.clean_environment(),
        )  # fmt: skip
    except OpError:  # not a program: inspect_environment says so
        return False
    return done.returncode == 0


def measure(call: Call, device: Device, seconds: float, size_bytes: int | None) -> GpuOutcome:
    """Measure the device; OpError when that comes to nothing."""
    python = python_with_torch(call)
    folder = call.folder
    asked = {
        "size_bytes": size_bytes,
        "phases": phases(seconds, ROUND, READ_PART),
        "stamp_seconds": WINDOW / 10,
    }
    (folder / "plan.json").write_text(json.dumps(asked), encoding="utf-8")
    answer = folder / "result.json"
    with Progressing(call, seconds, f"reading and copying memory of {device.id}"):
        done = call.run(
            [python, "-I", str(WORKER), str(folder / "plan.json"), str(answer)],
            timeout=seconds * 2 + SETUP_SECONDS,
            grace=5.0,
            env={**call.clean_environment(KEEP), **visible(device)},
        )
    return outcome(answer_of(answer, done.stderr, done.signal))


def visible(device: Device) -> dict[str, str]:
    """The variables that leave one device for a child to see."""
    name = device.uuid or device.id.rpartition(":")[2]
    if device.id.startswith("cuda"):
        return {"CUDA_VISIBLE_DEVICES": name}
    # HIP wants a number, and numbers what ROCr left: one device, so 0.
    return {"ROCR_VISIBLE_DEVICES": name, "HIP_VISIBLE_DEVICES": "0"}


def outcome(told: dict[str, Any]) -> GpuOutcome:
    """The outcome in what the worker left."""
    return GpuOutcome(
        rounds=rounds_of(told["phases"], WINDOW),
        verified=bool(told["verified"]),
        size_bytes=int(told["size_bytes"]),
        l2_bytes=told["l2_bytes"],
        torch=excerpt(str(told["torch"]), 60),
        read_kernel=excerpt(str(told["read_kernel"]), 60),
        kernels=told["kernels"],
    )
