"""measure_bandwidth on a real GPU: it stands up to what torch's own copy reaches there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU is visible", allow_module_level=True)


def torch_copy_gbs() -> float:
    """The best of ten copies of 1 GiB, read plus written, in GB/s."""
    source = torch.empty(1 << 28, device="cuda").uniform_()
    target = torch.empty_like(source)
    rates = []
    for _ in range(10):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        target.copy_(source)
        ended.record()
        torch.cuda.synchronize()
        rates.append(2 * source.numel() * 4 / begun.elapsed_time(ended) / 1e6)
    return float(max(rates))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of one measurement of the first GPU."""
    home = tmp_path_factory.mktemp("home") / "ikit"
    done = subprocess.run(
        [sys.executable, "-m", "ikit_mcp.cli", "bandwidth", "--json"], capture_output=True,
        text=True, env={**os.environ, "IKIT_HOME": str(home)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(home).is_dir()
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def value(record: dict[str, Any], name: str) -> float:
    """A metric of the record."""
    (found,) = [m["value"] for m in record["metrics"] if m["name"] == name]
    return float(found)


def test_reading_sustains_nine_tenths_of_what_torch_copies(record: dict[str, Any]) -> None:
    assert value(record, "dram_read_gbs") >= 0.9 * torch_copy_gbs()


def test_copying_sustains_nine_tenths_of_what_torch_copies(record: dict[str, Any]) -> None:
    assert value(record, "dram_copy_gbs") >= 0.9 * torch_copy_gbs()


def test_the_data_was_read_from_memory_and_not_from_the_cache(record: dict[str, Any]) -> None:
    lines = [line.split(":")[0] for line in record["gates"]["violations"]]
    assert not {"data_read", "working_set", "datasheet"} & set(lines)
    assert record["identity"]["device"]["uuid"].startswith("GPU-")
