"""Telemetry: what is seen beside a round, and that what is not seen is not made up."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fakes import nvml
from ikit_mcp.call import Device
from ikit_ops.measure import host
from ikit_ops.measure.gpu import REASONS, NvidiaGpu, UnreadGpu, reason_names
from ikit_ops.measure.host import Host
from ikit_ops.measure.telemetry import Telemetry, sources_for

BURNT = 0.25  # the kernel counts in hundredths, and two counts are compared
BURN = "import time\nwhile time.process_time() < 0.3: pass"


def state(**changed: Any) -> dict[str, Any]:
    """A full reading of a host with two CPUs."""
    given = {"cpus": 2, "busy_s": 100.0, "steal_s": 1.0, "frequency_mhz": 2600.0,
             "throttle_events": 5, "load_1m": 0.5, "own_s": 10.0}  # fmt: skip
    return {**given, **changed}


def test_the_shares_are_of_all_the_cpu_time_between_the_readings() -> None:
    after = state(busy_s=116.0, own_s=20.0, steal_s=1.4, frequency_mhz=1300.0, load_1m=2.5)
    told = Host.summarise([(0.0, state()), (10.0, after)])
    assert told == {
        "seconds": 10.0, "own_share": 0.5, "others_share": 0.3, "steal_share": 0.02,
        "load_1m_before": 0.5, "load_1m_after": 2.5,
        "frequency_mhz": {"min": 1300.0, "max": 2600.0}, "throttle_events": 0,
    }  # fmt: skip


def test_what_was_not_offered_has_no_share() -> None:
    dark = {"steal_s": None, "frequency_mhz": None, "throttle_events": None}
    told = Host.summarise([(0.0, state(**dark)), (1.0, state(**dark, busy_s=101.0))])
    assert told["steal_share"] is None and told["frequency_mhz"] is None
    assert told["throttle_events"] is None and told["others_share"] == 0.5


def test_shares_stay_between_nothing_and_all() -> None:
    told = Host.summarise([(0.0, state()), (1.0, state(own_s=50.0))])
    assert told["own_share"] == 1.0 and told["others_share"] == 0.0
    assert Host.summarise([(0.0, state()), (0.0, state())])["own_share"] is None


def test_one_reading_says_nothing_about_a_stretch() -> None:
    light = {key: value for key, value in state().items() if key != "own_s"}
    assert Host.summarise([]) == {} == Host.summarise([(0.0, state()), (1.0, light)])


def test_the_time_of_our_children_is_our_own_and_not_that_of_others() -> None:
    source = Host()
    before = source.read(full=True)
    subprocess.run([sys.executable, "-c", BURN], check=True)
    assert source.read(full=True)["own_s"] - before["own_s"] >= BURNT


def test_the_time_of_a_child_that_still_runs_is_our_own() -> None:
    source = Host()
    before = source.read(full=True)["own_s"]
    child = subprocess.Popen(
        [sys.executable, "-c", BURN + "\nimport sys; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        assert source.read(full=True)["own_s"] - before >= BURNT
        child.stdin.close()


def test_a_light_reading_does_not_walk_over_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Host()
    monkeypatch.setattr("psutil.Process", lambda: pytest.fail("it walked"))
    assert "own_s" not in source.read(full=False)


def test_a_process_that_ends_during_the_walk_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    us = SimpleNamespace(
        cpu_times=lambda: (1.0, 0.5, 0.25, 0.25, 99.0),
        children=lambda recursive: [SimpleNamespace(cpu_times=gone)],
    )
    monkeypatch.setattr("psutil.Process", lambda: us)
    assert Host().read(full=True)["own_s"] == 2.0


def test_throttle_counters_are_summed_and_told_missing_where_there_are_none(
    tmp_path: Path,
) -> None:
    for cpu, count in ((0, "3"), (1, "4"), (2, "broken")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/thermal_throttle"
        folder.mkdir(parents=True)
        (folder / "core_throttle_count").write_text(count, encoding="utf-8")
    assert Host(tmp_path).read(full=False)["throttle_events"] == 7
    bare = Host(tmp_path / "none")
    assert "CPU thermal throttling (not offered here)" in bare.missing


@pytest.mark.parametrize("answer", [None, SimpleNamespace(current=0.0)])
def test_a_clock_that_is_not_told_is_missing_and_not_zero(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_freq", lambda: answer)
    source = Host()
    assert source.read(full=False)["frequency_mhz"] is None
    assert "CPU frequency (not offered here)" in source.missing


def test_a_clock_that_cannot_be_read_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("made up")

    monkeypatch.setattr("psutil.cpu_freq", fails)
    assert Host().read(full=False)["frequency_mhz"] is None


# --- GPUs ------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a made-up pynvml with the answers given; the module."""

    def install(**answers: Any) -> Any:
        made = nvml.module(**answers)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return install


def test_everything_that_nvml_offers_is_read(library: Any) -> None:
    made = library()
    source = NvidiaGpu(nvml.UUID)
    assert source.missing == []
    assert source.read(full=False) == {
        "sm_mhz": 1980, "memory_mhz": 3201, "max_memory_mhz": 3201, "power_w": 412.5,
        "power_limit_w": 700.0, "temperature_c": 55, "memory_used_bytes": 7 << 30,
        "utilization_percent": 98, "throttle_reasons": ["sw_power_cap"],
        "processes": [{"pid": 4242, "memory_bytes": None}],
    }  # fmt: skip
    source.close()
    source.close()
    assert made.calls == ["nvmlInit", "nvmlShutdown"] and source.read(full=True) == {}


def test_what_a_device_does_not_offer_is_none_and_missing(library: Any) -> None:
    library(
        nvmlDeviceGetPowerUsage=nvml.NVMLError("Not Supported"),
        nvmlDeviceGetComputeRunningProcesses=nvml.NVMLError("Insufficient Permissions"),
    )
    source = NvidiaGpu(nvml.UUID)
    found = source.read(full=False)
    assert found["power_w"] is None and found["processes"] is None and found["sm_mhz"] == 1980
    assert source.missing == [
        "GPU power_w (not offered by the device)", "GPU processes (not offered by the device)",
    ]  # fmt: skip
    told = source.summarise([(0.0, found)])
    assert told["power_w"] is None and told["pids"] is None


def test_an_older_driver_tells_the_reasons_under_their_older_name(library: Any) -> None:
    library(
        nvmlDeviceGetCurrentClocksEventReasons=NotImplemented,
        nvmlDeviceGetCurrentClocksThrottleReasons=0x8 | 0x40,
    )
    found = NvidiaGpu(nvml.UUID).read(full=False)
    assert found["throttle_reasons"] == ["hw_slowdown", "hw_thermal_slowdown"]


@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ({"nvmlInit": nvml.NVMLError("NVML Shared Library Not Found")}, ["nvmlInit"]),
        ({"nvmlDeviceGetHandleByUUID": nvml.NVMLError("Not Found")}, ["nvmlInit", "nvmlShutdown"]),
    ],
)
def test_a_library_that_does_not_know_the_device_is_told_and_let_go(
    answers: dict[str, Any], calls: list[str], library: Any
) -> None:
    made = library(**answers)
    source = NvidiaGpu(nvml.UUID)
    assert "Not Found" in source.missing[0] and source.read(full=True) == {}
    assert source.summarise([(0.0, {})]) == {} and made.calls == calls


def test_without_the_library_the_reason_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    source = NvidiaGpu(nvml.UUID)
    assert "the extra nvidia brings it" in source.missing[0]
    source.close()


def test_samples_of_a_gpu_become_spreads_and_every_reason_is_kept(library: Any) -> None:
    library()
    cool = NvidiaGpu(nvml.UUID).read(full=True)
    hot = {**cool, "sm_mhz": 1500, "throttle_reasons": ["hw_slowdown"],
           "processes": [{"pid": 1, "memory_bytes": 5}]}  # fmt: skip
    told = NvidiaGpu.summarise([(0.0, cool), (1.0, {}), (2.0, hot), (3.0, cool)])
    assert told["sm_mhz"] == {"min": 1500, "median": 1980, "max": 1980}
    assert told["throttle_reasons"] == ["hw_slowdown", "sw_power_cap"]
    assert told["pids"] == [1, 4242] and told["max_memory_mhz"] == 3201
    blind = {**cool, "throttle_reasons": None}
    assert NvidiaGpu.summarise([(0.0, blind)])["throttle_reasons"] is None


def test_reasons_that_are_not_known_keep_their_bits() -> None:
    assert reason_names(0) == []
    assert reason_names(sum(REASONS)) == list(REASONS.values())
    assert reason_names(0x4 | 0x1000) == ["sw_power_cap", "unknown_0x1000"]


# --- the recorder ------------------------------------------------------------------


class Counter:
    """A source that counts its readings."""

    name = "counter"

    def __init__(self) -> None:
        self.missing = ["nothing to see"]
        self.reads: list[bool] = []
        self.closed = False
        self.light = threading.Event()

    def read(self, full: bool) -> dict[str, Any]:
        """The number of this reading."""
        self.reads.append(full)
        if not full:
            self.light.set()
        return {"number": len(self.reads), "full": full}

    def summarise(self, samples: Any) -> dict[str, Any]:
        """The numbers of the full readings."""
        return {"full": [s["number"] for _, s in samples if s["full"]]} if samples else {}

    def close(self) -> None:
        """Note it."""
        self.closed = True


def test_sources_are_read_at_both_ends_at_marks_and_in_between() -> None:
    source = Counter()
    with Telemetry([source], interval=0.001) as telemetry:
        assert source.light.wait(30)
        marked = telemetry.mark()
    assert source.reads[0] and source.reads[-1] and source.closed
    assert source.reads.count(True) == 3 and not all(source.reads)
    assert telemetry.missing == ["nothing to see"]
    whole = telemetry.summary()
    assert whole["counter_samples"] == len(source.reads) and len(whole["counter"]["full"]) == 3
    assert telemetry.summary(marked, marked)["counter"]["full"] == whole["counter"]["full"][1:2]


def test_a_stretch_without_samples_has_no_summary() -> None:
    with Telemetry([Counter()], interval=60) as telemetry:
        pass
    assert telemetry.summary(0.0, 0.0) == {"counter": None, "counter_samples": 0}


def test_a_long_run_keeps_its_marks_when_it_has_no_room_for_more_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ikit_ops.measure.telemetry.MAX_SAMPLES", 2)
    source = Counter()
    telemetry = Telemetry([source], interval=60)
    for _ in range(5):
        telemetry._take(full=False)
    telemetry.mark()
    assert telemetry.summary()["counter_samples"] == 3


def test_each_kind_of_device_has_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def of(name: str, uuid: str | None = "GPU-1") -> list[type]:
        return [type(s) for s in sources_for(Device(name, "x", uuid, None, None))]

    assert of("cpu") == [Host]
    assert of("cuda:0") == [Host, NvidiaGpu]
    assert of("rocm:0") == of("cuda:1", None) == [Host, UnreadGpu]


def test_a_gpu_that_nobody_can_read_says_so_and_nothing_else() -> None:
    source = UnreadGpu("made up")
    assert source.missing == ["GPU clocks, power, temperature and throttle reasons (made up)"]
    assert source.read(full=True) == source.summarise([]) == {}
    source.close()


def test_a_real_host_is_read_without_a_fault() -> None:
    with Telemetry([Host()], interval=60) as telemetry:
        pass
    told = telemetry.summary()["cpu"]
    assert 0 <= told["others_share"] <= 1 and told["load_1m_before"] is not None
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert (host.is_virtual() is True) == ("hypervisor" in flags)
