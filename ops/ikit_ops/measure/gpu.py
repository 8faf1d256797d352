"""The state of a GPU beside a measurement: clocks, power, heat, and who else is on it.

A GPU slows down without telling anybody: when it draws too much power, gets too hot, or its
power supply complains.  The driver keeps the reasons as bits, and a number that was taken while
one of them was set is a number of the cooling, not of the chip.  What matters for memory-bound
work is the memory clock; the other common spoiler is another process on the device.

NVML, the driver's own library, is asked through ``nvidia-ml-py`` where that is installed (the
extra ``nvidia``).  On AMD GPUs nothing is read.  Whatever a device does not offer is None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from ikit_mcp.registry import excerpt

MAX_PROCESSES = 20
REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""NVML's ``nvmlClocksEventReason`` bits."""
SLOWED = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""The reasons under which a device does less than it is sold for; a power cap may be normal."""
_NUMBERS = (
    "sm_mhz", "memory_mhz", "power_w", "temperature_c", "memory_used_bytes", "utilization_percent",
)  # fmt: skip


class NvidiaGpu:
    """The GPU side of telemetry (see ``telemetry.Source``) through NVML."""

    name = "gpu"

    def __init__(self, uuid: str) -> None:
        """Open the device; ``missing`` says why nothing can be read where nothing can."""
        self.missing: list[str] = []
        self._nvml: Any = None
        try:
            # Not a dependency: it is of use only where its driver is.
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self._lose("nvidia-ml-py is not installed: the extra nvidia brings it")
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self._lose(str(error))
            return
        try:
            self._device = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self.close()
            self._lose(str(error))
            return
        first = self.read(full=True)
        self.missing = [
            f"GPU {key} (not offered by the device)"
            for key, value in first.items()
            if value is None
        ]

    def _lose(self, why: str) -> None:
        self._nvml = None
        why = excerpt(why, 120)
        self.missing = [f"GPU clocks, power, temperature and throttle reasons ({why})"]

    def close(self) -> None:
        """Let go of the library."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def read(self, full: bool) -> dict[str, Any]:
        """The state now, every part None that is not offered; {} when nothing can be read."""
        nvml = self._nvml
        if nvml is None:
            return {}
        device = self._device
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(device).used)
        watts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000)
        return {
            "sm_mhz": self._ask(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
            "memory_mhz": self._ask(
                lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM)
            ),
            "max_memory_mhz": self._ask(
                lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_MEM)
            ),
            "power_w": watts,
            "power_limit_w": self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000),
            "temperature_c": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
            ),
            "memory_used_bytes": memory,
            "utilization_percent": self._ask(
                lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu
            ),
            "throttle_reasons": self._ask(self._reasons),
            "processes": self._ask(self._processes),
        }

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer, or None where the device does not offer it."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None

    def _reasons(self) -> list[str]:
        # Drivers before 535 know the question by its older name.
        newest = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        ask = newest or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return reason_names(int(ask(self._device)))

    def _processes(self) -> list[dict[str, Any]]:
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        return [
            {"pid": process.pid, "memory_bytes": process.usedGpuMemory}
            for process in running[:MAX_PROCESSES]
        ]

    @staticmethod
    def summarise(samples: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
        """Least, median and largest of each number, all throttle reasons, all pids seen."""
        states = [state for _, state in samples if state]
        if not states:
            return {}
        found: dict[str, Any] = {key: _spread([state[key] for state in states]) for key in _NUMBERS}
        found["max_memory_mhz"] = states[-1]["max_memory_mhz"]
        found["power_limit_w"] = states[-1]["power_limit_w"]
        reasons = [state["throttle_reasons"] for state in states]
        known = [names for names in reasons if names is not None]
        found["throttle_reasons"] = (
            sorted({name for names in known for name in names}) if known else None
        )
        listed = [state["processes"] for state in states if state["processes"] is not None]
        found["pids"] = (
            sorted({p["pid"] for processes in listed for p in processes})[:MAX_PROCESSES]
            if listed
            else None
        )
        return found


def reason_names(bits: int) -> list[str]:
    """The names of the throttle reasons in NVML's bit mask; bits it does not know as numbers."""
    names = [name for bit, name in REASONS.items() if bits & bit]
    unknown = bits & ~sum(REASONS)
    return [*names, f"unknown_0x{unknown:x}"] if unknown else names


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"min": min(known), "median": median(known), "max": max(known)}


class UnreadGpu:
    """A GPU whose state nobody here can read; ``missing`` says so."""

    name = "gpu"

    def __init__(self, why: str) -> None:
        why = excerpt(why, 120)
        self.missing = [f"GPU clocks, power, temperature and throttle reasons ({why})"]

    def close(self) -> None:
        """Nothing is held."""

    def read(self, full: bool) -> dict[str, Any]:
        """Nothing."""
        return {}

    @staticmethod
    def summarise(samples: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
        """Nothing."""
        return {}
