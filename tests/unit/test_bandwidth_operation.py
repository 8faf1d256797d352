"""measure_bandwidth as the runner runs it: the record, the refusals, and a GPU's by a stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes import nvml, torch_python
from ikit_mcp.call import Call, Device, Settings
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.process.run import Result
from ikit_mcp.registry import EXECUTES, MEASURES, OpError, Registry, operations_in
from ikit_mcp.runner import Control, Outcome, Runner
from ikit_ops import bandwidth
from ikit_ops.measure import cpu_bandwidth, gpu_bandwidth, host, rounds

H200 = Device("cuda:0", "NVIDIA H200", nvml.UUID, 141 << 30, "580.1")
OTHER = Device("cuda:1", "NVIDIA H200", "GPU-other", 141 << 30, "580.1")
CPU = Device("cpu", "Some CPU", "0123456789abcdef", 1 << 34, None)
MIB = 1 << 20
Ask = Callable[..., Outcome]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs the operation with the arguments; on the CPU, for a second, with a small set."""
    monkeypatch.setenv("IKIT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.delenv("IKIT_PYTHONS", raising=False)
    registry = Registry()
    for op in operations_in(bandwidth):
        registry.add(op)
    runner = Runner(registry, Settings(tmp_path / "home"), EXECUTES)

    def run(control: Control | None = None, **arguments: Any) -> Outcome:
        given = {"device": "cpu", "seconds": 1, "size_bytes": 16 * MIB, **arguments}
        request = runner.check(
            "measure_bandwidth", {k: v for k, v in given.items() if v is not None}
        )
        assert request.effects == MEASURES and request.needs_lock
        return runner.here(request, control or Control())

    return run


def record_of(outcome: Outcome) -> EvidenceRecord:
    """The record, which there must be."""
    assert outcome.record is not None
    return outcome.record


def test_the_cpus_bandwidth_is_measured_and_told_with_everything_around_it(ask: Ask) -> None:
    shares: list[Any] = []
    found = record_of(ask(Control(report=shares.append), threads=2))
    assert found.kind == "ceiling" and found.get("claim_class") == "measured"
    for name, key in (("dram_read_gbs", "read_gbs"), ("dram_copy_gbs", "copy_gbs")):
        (metric,) = [m for m in found.get("metrics") if m["name"] == name]
        assert metric["stat"] == "best_sustained" and metric["unit"] == "GB/s"
        assert metric["samples"] == [r[key] for r in found.get("data", "rounds")]
        assert metric["value"] == max(s for s in metric["samples"] if s is not None) > 0
    assert [r["index"] for r in found.get("data", "rounds")] == [0, 1, 2]
    assert all(r["t_start"] < r["t_end"] for r in found.get("data", "rounds"))
    assert found.get("identity", "workload") == {
        "threads": 2, "size_bytes": 16 * MIB, "seconds": 1,
        "method": "memcmp of two equal buffers per thread",
    }  # fmt: skip
    assert found.get("data", "datasheet_gbs") is None
    assert found.get("data", "share_of_datasheet") is None
    assert found.get("data", "telemetry", "cpu", "own_share") > 0
    assert found.get("data", "differences") == 0
    assert "data_read" in found.get("gates", "checked")
    assert not any(line.startswith("data_read") for line in found.get("gates", "violations"))
    assert shares and shares[0].total == 1


def test_what_was_worked_out_is_pinned_and_what_was_asked_is_kept(ask: Ask) -> None:
    request = record_of(ask(device="auto", threads=None)).get("provenance", "request")
    assert request["args"]["device"] == "cpu" and request["args"]["threads"] >= 1
    assert request["requested"]["device"] == "auto" and request["requested"]["threads"] is None


def test_a_set_that_fits_the_cache_is_measured_but_not_valid(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call, "last_level_cache_bytes", staticmethod(lambda: 8 * MIB))
    found = record_of(ask())
    assert found.valid is False
    (line,) = [v for v in found.get("gates", "violations") if v.startswith("working_set")]
    assert line in found.get("limitations")


def test_an_unknown_cache_leaves_the_verdict_open(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Call, "last_level_cache_bytes", staticmethod(lambda: None))
    monkeypatch.setattr(cpu_bandwidth, "vectorised_compare", lambda: None)
    found = record_of(ask())
    missing = found.get("coverage", "missing")
    assert found.valid is not True
    assert any(line.startswith("working_set") for line in missing)
    assert any(line.startswith("read_kernel") for line in missing)


def test_limits_of_the_machine_are_limits_of_the_claim(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = host.usable_cpus()
    nodes = [host.Node(0, usable, True), host.Node(3, (), False)]
    monkeypatch.setattr(host, "memory_nodes", lambda usable: nodes)
    monkeypatch.setattr(host, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(host, "is_virtual", lambda: False)
    found = record_of(ask(threads=None))
    assert "a control group allows 1.5 CPUs" in found.get("limitations")
    assert "memory nodes without CPUs were not read: 3" in found.get("limitations")
    assert not any("virtual" in line for line in found.get("limitations"))
    assert found.get("identity", "workload", "threads") == 1
    assert found.get("data", "memory_nodes") == [
        {"node": 0, "usable_cpus": len(usable), "threads": 1},
        {"node": 3, "usable_cpus": 0, "threads": 0},
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_with_several_nodes_the_threads_are_bound_to_theirs(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *rest = host.usable_cpus()
    if not rest:
        pytest.skip("one CPU")
    nodes = [host.Node(0, (first,), True), host.Node(1, tuple(rest), True)]
    monkeypatch.setattr(host, "memory_nodes", lambda usable: nodes)
    told = record_of(ask(threads=1 + len(rest))).get("data", "memory_nodes")
    assert [node["threads"] for node in told] == [1, len(rest)]


def test_restless_rounds_propose_a_longer_look(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikit_ops.measure.bandwidth_gates.SPREAD_WARN", -1.0)
    (proposed,) = ask(threads=1).shown.next
    assert proposed["tool"] == "measure_bandwidth"
    assert proposed["arguments"] == {
        "device": "cpu", "threads": 1, "size_bytes": 16 * MIB, "seconds": 4,
    }  # fmt: skip


def test_more_memory_than_there_is_is_refused_before_anything_starts(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 19 * MIB)
    with pytest.raises(OpError, match="16 MiB does not fit: 19 MiB are available"):
        ask()


@pytest.mark.parametrize(
    ("given", "device"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("GPU-other", "cuda:1"),
     ("cpu", "cpu"), ("0123456789abcdef", "cpu")],
)  # fmt: skip
def test_a_device_is_found_by_its_names(given: str, device: str) -> None:
    assert host.choose_device([H200, OTHER, CPU], given).id == device


@pytest.mark.parametrize("given", ["cuda:7", "cuda:0,cuda:1", "", "rocm", "gpu\x1b[31m"])
def test_a_device_that_is_not_one_is_refused_with_what_there_is(given: str) -> None:
    with pytest.raises(OpError) as refused:
        host.choose_device([H200, OTHER, CPU], given)
    assert refused.value.next_step == "use one of: cuda:0, cuda:1, cpu"
    assert "\x1b" not in refused.value.what


# --- a worker that fails ------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "stderr", "signal", "part"),
    [
        (None, "", 9, "ended by signal 9, as when the system runs out of memory"),
        (None, "", 15, "ended by signal 15"),
        (None, "Traceback: made up", None, "Traceback: made up"),
        (None, "", None, "its worker left no result"),
        ("[1]", "", None, "its worker left no result"),
        ("{", "", None, "its worker left no result"),
        ('{"error": "no\\u001b memory"}', "", None, "no memory"),
    ],
)
def test_a_worker_that_comes_to_nothing_says_why(
    left: str | None, stderr: str, signal: int | None, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    if left is not None:
        path.write_text(left, encoding="utf-8")
    with pytest.raises(OpError) as failed:
        rounds.answer_of(path, stderr, signal)
    assert part in failed.value.what and "\x1b" not in failed.value.what


def test_a_worker_that_could_not_measure_is_an_error_and_no_record(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_bandwidth, "WORKER", tmp_path / "no_such_worker.py")
    with pytest.raises(OpError, match="no_such_worker"):
        ask()
    assert not list((tmp_path / "home" / "evidence").rglob("evidence.json"))


def test_the_shell_does_not_tune_the_measurement(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    real = Call.run

    def watched(self: Call, argv: Any, **options: Any) -> Result:
        seen.update(options["env"])
        return real(self, argv, **options)

    monkeypatch.setattr(Call, "run", watched)
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/made/up")
    found = record_of(ask())
    assert "LD_PRELOAD" not in seen and seen["GLIBC_TUNABLES"] == cpu_bandwidth.TUNABLES
    assert seen["LD_LIBRARY_PATH"] == "/made/up"
    assert found.get("provenance", "env_kept") == ["LD_LIBRARY_PATH"]


# --- a GPU ---------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two made-up GPUs and a CPU, NVML for the first, and no torch in this Python."""
    monkeypatch.setattr(Call, "devices", staticmethod(lambda: [H200, OTHER, CPU]))
    monkeypatch.setattr("ikit_mcp.process.devices.devices", lambda: [H200, OTHER, CPU])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(
        sys.modules, "pynvml", nvml.module(nvmlDeviceGetCurrentClocksEventReasons=0)
    )


def torch(folder: Path, monkeypatch: pytest.MonkeyPatch, **result: Any) -> Path:
    """A stand-in for a Python with torch, after one that is none and one without torch."""
    python = torch_python.install(folder / "good", **result)
    without = torch_python.install(folder / "bad", has_torch=False)
    listed = f" {folder / 'nothing'} , {without},{python}"
    monkeypatch.setenv("IKIT_PYTHONS", listed)
    return python


@pytest.mark.usefixtures("gpus")
def test_a_gpu_is_measured_in_a_python_that_has_torch(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = torch(tmp_path, monkeypatch)
    found = record_of(ask(device="auto", size_bytes=None, seconds=3))
    seen = json.loads((python.parent / "seen.json").read_text(encoding="utf-8"))
    assert seen["env"] == {"CUDA_VISIBLE_DEVICES": nvml.UUID}
    assert seen["plan"]["size_bytes"] is None and seen["argv"][0] == "-I"
    assert found.metric("dram_read_gbs") == 4300 and found.metric("dram_copy_gbs") == 4100
    assert found.valid is True
    assert found.get("identity", "device") == {
        "name": "NVIDIA H200", "uuid": nvml.UUID, "driver": "580.1",
    }  # fmt: skip
    assert found.get("data", "datasheet_gbs") == 4800
    assert found.get("data", "share_of_datasheet") == pytest.approx(4300 / 4800)
    assert found.get("data", "telemetry", "gpu", "memory_mhz", "median") == 3201
    assert "90% of the datasheet" in found.summary
    assert found.get("provenance", "request", "args", "device") == nvml.UUID


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("changed", "valid", "part"),
    [
        ({"read": 5000.0}, False, "datasheet: 104%"),
        ({"verified": False}, False, "data_read"),
        ({"l2_bytes": 1 << 30}, False, "working_set"),
        ({"l2_bytes": None}, None, "working_set"),
    ],
)
def test_a_gpus_number_that_cannot_be_is_not_valid(
    changed: dict[str, Any],
    valid: bool | None,
    part: str,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch(tmp_path, monkeypatch, **changed)
    found = record_of(ask(device="cuda:0"))
    lines = [*found.get("gates", "violations"), *found.get("coverage", "missing")]
    assert found.valid is valid and any(line.startswith(part) for line in lines)


@pytest.mark.usefixtures("gpus")
def test_a_gpus_worker_that_runs_out_of_memory_says_so(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch(tmp_path, monkeypatch, error="CUDA out of memory")
    with pytest.raises(OpError, match="CUDA out of memory"):
        ask(device="cuda:0")


@pytest.mark.usefixtures("gpus")
def test_a_gpu_without_torch_anywhere_is_refused_with_what_helps(ask: Ask) -> None:
    with pytest.raises(OpError) as refused:
        ask(device="cuda:0")
    assert "torch" in refused.value.what and "IKIT_PYTHONS" in refused.value.next_step


@pytest.mark.usefixtures("gpus")
def test_threads_for_a_gpu_are_refused(ask: Ask) -> None:
    with pytest.raises(OpError, match="threads are for the CPU"):
        ask(device="cuda:0", threads=2)


def test_torch_in_this_python_is_taken_first_if_an_isolated_child_finds_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (op,) = operations_in(bandwidth)
    call = Call(operation=op, args={}, settings=Settings(tmp_path), scope=MEASURES)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    other = torch(tmp_path, monkeypatch)
    ours = torch_python.install(tmp_path / "ours")
    monkeypatch.setattr(gpu_bandwidth, "sys", SimpleNamespace(executable=str(ours)))
    assert gpu_bandwidth.python_with_torch(call) == str(ours)
    torch_python.install(tmp_path / "ours", has_torch=False)
    assert gpu_bandwidth.python_with_torch(call) == str(other)


def test_the_child_sees_the_one_device() -> None:
    assert gpu_bandwidth.visible(H200) == {"CUDA_VISIBLE_DEVICES": nvml.UUID}
    amd = Device("rocm:1", "AMD Instinct MI300X", "GPU-0x12", 1, None)
    assert gpu_bandwidth.visible(amd) == {
        "ROCR_VISIBLE_DEVICES": "GPU-0x12", "HIP_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    unnamed = Device("cuda:3", "G", None, None, None)
    assert gpu_bandwidth.visible(unnamed) == {"CUDA_VISIBLE_DEVICES": "3"}
