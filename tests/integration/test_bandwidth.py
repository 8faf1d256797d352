"""measure_bandwidth for real: from the shell and from an agent, to its end and cut short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from helpers import json_schema
from helpers.stdio import Wire
from ikit_mcp.evidence.record import json_schema as record_schema
from ikit_mcp.process import platform

SMALL = 32 << 20
WORKER = "cpu_bandwidth_worker.py"


def environment(tmp_path: Path) -> dict[str, str]:
    """This environment with a home and locks of its own."""
    own = {"IKIT_HOME": str(tmp_path / "home"), "IKIT_LOCK_DIR": str(tmp_path / "locks")}
    return {**os.environ, **own}


def ikit(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ikit_mcp.cli", *words], capture_output=True, text=True,
        env=environment(tmp_path), check=False,
    )  # fmt: skip


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    """The record of a short measurement of the CPU."""
    done = ikit(tmp_path, "bandwidth", "--device", "cpu", "--seconds", "1", "--json", *words)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def workers_below(pid: int) -> list[psutil.Process]:
    """The measuring processes that descend from a process."""
    try:
        below = psutil.Process(pid).children(recursive=True)
        return [p for p in below if any(WORKER in word for word in p.cmdline())]
    except psutil.Error:
        return []


def until(what: Any, seconds: float = 60.0) -> Any:
    """Wait for something to become true, with a deadline."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
    return found


def test_the_default_reads_many_times_the_cache_and_the_record_fits_its_schema(
    tmp_path: Path,
) -> None:
    record = measured(tmp_path)
    assert json_schema.errors(record_schema(), record) == []
    cache = record["data"]["last_level_cache_bytes"]
    if cache is not None:
        size = record["identity"]["workload"]["size_bytes"]
        assert size >= 4 * cache or any(
            line.startswith("working_set") for line in record["gates"]["violations"]
        )
    values = {m["name"]: m["value"] for m in record["metrics"]}
    assert values["dram_read_gbs"] > 0.1 and values["dram_copy_gbs"] > 0.1
    verified = ikit(tmp_path, "evidence", "verify", record["evidence_id"])
    assert verified.returncode == 0, verified.stderr


def test_the_line_to_reproduce_measures_the_same_workload_again(tmp_path: Path) -> None:
    first = measured(tmp_path, "--size-bytes", str(SMALL), "--threads", "2")
    words = first["provenance"]["reproduce"].split()
    assert words[:2] == ["ikit", "bandwidth"]
    again = ikit(tmp_path, *words[1:], "--json")
    assert json.loads(again.stdout)["identity"]["workload"] == first["identity"]["workload"]


def test_a_ceiling_that_cannot_be_trusted_fails_the_check(tmp_path: Path) -> None:
    done = ikit(tmp_path, "bandwidth", "--device", "cpu", "--seconds", "1", "--check",
                "--size-bytes", str(1 << 20))  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "working_set" in done.stdout


@pytest.mark.parametrize(
    "words",
    [["--device", "cuda:0,cpu"], ["--threads", "0"], ["--size-bytes", str(1 << 39)],
     ["--seconds", "0.1"], ["--device", "cpu", "--seconds", "nan"]],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_and_leaves_no_record(
    words: list[str], tmp_path: Path
) -> None:
    done = ikit(tmp_path, "bandwidth", "--json", *words)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("evidence.json"))


def test_far_more_threads_than_cores_measure_too_and_say_so(tmp_path: Path) -> None:
    record = measured(tmp_path, "--size-bytes", str(SMALL), "--threads", "64")
    assert any(line.startswith("threads: 64") for line in record["gates"]["warnings"])
    assert record["data"]["differences"] == 0
    for metric in record["metrics"]:
        assert metric["value"] is None or metric["value"] > 0


def test_an_agent_gets_the_numbers_and_progress_on_the_way(tmp_path: Path) -> None:
    with Wire(tmp_path / "home", env=environment(tmp_path)) as wire:
        wire.initialize()
        arguments = {"device": "cpu", "seconds": "2", "size_bytes": SMALL, "wait_seconds": 300}
        asked = {"name": "measure_bandwidth", "arguments": arguments, "_meta": {"progressToken": 7}}
        reply = wire.ask("tools/call", asked)()["result"]["structuredContent"]
        told = [n["params"] for n in wire.notifications if n["method"] == "notifications/progress"]
        assert any(n["progressToken"] == 7 and n.get("total") == 2 for n in told)
        assert reply["status"] == "done" and reply["kind"] == "ceiling"
        assert {m["name"] for m in reply["metrics"]} == {"dram_read_gbs", "dram_copy_gbs"}
        assert reply["data"]["datasheet_gbs"] is None
        assert len(json.dumps(reply)) < 8_000


@pytest.mark.skipif(not platform.SUPERVISED, reason="needs a supervisor")
def test_a_cancelled_measurement_ends_and_leaves_nothing_running(tmp_path: Path) -> None:
    with Wire(tmp_path / "home", env=environment(tmp_path)) as wire:
        wire.initialize()
        job = wire.structured(
            "measure_bandwidth", device="cpu", seconds=60, size_bytes=SMALL, wait_seconds=0
        )["job_id"]
        running = until(lambda: workers_below(wire.process.pid))
        wire.structured("cancel_job", job_id=job)
        until(lambda: not workers_below(wire.process.pid))
        assert not any(process.is_running() for process in running)
    assert not list(tmp_path.rglob("evidence.json"))
    assert not list((tmp_path / "home").glob("work/*/*"))


@pytest.mark.skipif(not platform.SUPERVISED, reason="needs a supervisor")
def test_a_killed_command_leaves_nothing_running(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "ikit_mcp.cli", "bandwidth", "--device", "cpu", "--seconds", "60",
         "--size-bytes", str(SMALL)],
        env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    running = until(lambda: workers_below(command.pid))
    command.kill()
    command.wait()
    until(lambda: not any(process.is_running() for process in running))


def test_a_roofline_measures_its_bandwidth_and_names_the_record_as_parent(
    tmp_path: Path, llama: Path
) -> None:
    done = ikit(tmp_path, "roofline", str(llama), "--gpu-bw", "measure", "--json")
    assert done.returncode == 0, done.stderr
    roofline = json.loads(done.stdout)
    (parent,) = roofline["provenance"]["parents"]
    shown = ikit(tmp_path, "evidence", "show", parent, "--json")
    ceiling = msgspec.json.decode(shown.stdout)["record"]
    assert ceiling["kind"] == "ceiling"
    values = {m["name"]: m["value"] for m in [*roofline["metrics"], *ceiling["metrics"]]}
    assert values["bandwidth_gbs"] == values["dram_read_gbs"]
    assert values["ceiling_tok_s"] == pytest.approx(
        values["dram_read_gbs"] * 1e9 / values["bytes_per_token"]
    )
