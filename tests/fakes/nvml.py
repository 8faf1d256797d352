"""A stand-in for the module ``pynvml`` of nvidia-ml-py, with its names and kinds of answers."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

UUID = "GPU-aaaaaaaa-0000"


class NVMLError(Exception):
    """As NVML's: the base of what it raises."""


def module(**answers: Any) -> ModuleType:
    """A module that knows one device; an answer that is an exception is raised.

    ``calls`` lists the functions of the library's life that were called.
    """
    found: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7 << 30),
        "nvmlDeviceGetPowerUsage": 412_500,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetClockInfo": {1: 1980, 2: 3201},
        "nvmlDeviceGetMaxClockInfo": {2: 3201},
        "nvmlDeviceGetTemperature": 55,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=98),
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=4242, usedGpuMemory=None)],
        **answers,
    }
    made = ModuleType("pynvml")
    calls: list[str] = []

    def answering(name: str, answer: Any) -> Any:
        """A function of the library that gives the answer."""

        def function(*args: Any) -> Any:
            if name in ("nvmlInit", "nvmlShutdown"):
                calls.append(name)
            if isinstance(answer, Exception):
                raise answer
            return answer[args[1]] if isinstance(answer, dict) else answer

        return function

    for name, answer in found.items():
        if answer is not NotImplemented:
            setattr(made, name, answering(name, answer))
    parts = {"NVMLError": NVMLError, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2}
    for name, value in {**parts, "NVML_TEMPERATURE_GPU": 0, "calls": calls}.items():
        setattr(made, name, value)
    return made
