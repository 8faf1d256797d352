"""The devices of this machine: what there is, who is on it, and the name a lock uses.

A GPU is known by the UUID that its driver gives, which stays the same whatever order or
visibility the processes see.  A CPU has none, and the machine id must not leave the
machine: its uuid is a keyed hash of it.

GPUs are asked for through the driver's own tool (``nvidia-smi``, ``rocm-smi``): no
library needs to be installed, and a broken driver is one failed command.  What a tool
does not say is None.
"""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass, field
from typing import Any

from ikit_mcp.process import platform
from ikit_mcp.process.environment import clean_environment
from ikit_mcp.process.run import run
from ikit_mcp.registry import OpError, excerpt

SECONDS = 15.0
_NVIDIA = "uuid,name,memory.total,driver_version"
_NVIDIA_APPS = "gpu_uuid,pid,process_name,used_memory"


@dataclass(frozen=True)
class Device:
    """One device that can be measured."""

    id: str
    name: str
    uuid: str | None
    memory_bytes: int | None
    driver: str | None
    busy: tuple[dict[str, Any], ...] = field(default=())


def gpus() -> list[Device]:
    """The GPUs that the installed drivers report, NVIDIA's first."""
    return [*_nvidia(), *_amd()]


def cpu() -> Device:
    """The CPU as a device."""
    info = platform.cpu_info()
    return Device("cpu", info.model or "CPU", platform.cpu_uuid(), info.memory_bytes, None)


def devices() -> list[Device]:
    """All devices; the CPU is the last."""
    return [*gpus(), cpu()]


def uuids_of(device: str) -> list[str]:
    """The uuids to lock for a ``device`` argument.

    ``auto`` is the first GPU, or the CPU where there is none; ``cuda`` and ``rocm`` mean
    the first of theirs; several may be listed with commas.  OpError names what there is.
    """
    there = devices()
    found = []
    for part in device.split(","):
        wanted = part.strip()
        matching = [d for d in there if wanted in ("auto", d.id, d.uuid, d.id.split(":")[0])]
        if not matching:
            known = ", ".join(d.id for d in there)
            raise OpError(
                f"device {excerpt(wanted, 60)!r} is not here", f"use one of: auto, {known}"
            )
        found.append(matching[0].uuid or matching[0].id)
    return sorted(set(found))


def _ask(argv: list[str]) -> str | None:
    """What a driver's tool prints; None when it is not here or fails."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = run(argv, timeout=SECONDS, grace=1.0, env=clean_environment())
    except OpError:
        return None
    return done.stdout if done.ok else None


def _nvidia() -> list[Device]:
    listed = _ask(["nvidia-smi", f"--query-gpu={_NVIDIA}", "--format=csv,noheader,nounits"])
    if listed is None:
        return []
    busy = nvidia_processes(_ask(
        ["nvidia-smi", f"--query-compute-apps={_NVIDIA_APPS}", "--format=csv,noheader,nounits"]
    ) or "")  # fmt: skip
    return nvidia_devices(listed, busy)


def nvidia_devices(listed: str, busy: dict[str, list[dict[str, Any]]]) -> list[Device]:
    """The devices in ``nvidia-smi --query-gpu`` CSV (uuid, name, MiB, driver)."""
    found = []
    for number, row in enumerate(csv.reader(listed.splitlines(), skipinitialspace=True)):
        if len(row) == 4 and row[0].startswith("GPU-"):
            uuid, name, memory, driver = row
            processes = tuple(busy.get(uuid, ()))
            found.append(Device(f"cuda:{number}", name, uuid, _mib(memory), driver, processes))
    return found


def nvidia_processes(listed: str) -> dict[str, list[dict[str, Any]]]:
    """The compute processes in ``--query-compute-apps`` CSV, by device uuid."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in csv.reader(listed.splitlines(), skipinitialspace=True):
        if len(row) == 4 and row[1].isdigit():
            entry = {"pid": int(row[1]), "name": excerpt(row[2], 200), "memory_bytes": _mib(row[3])}
            found.setdefault(row[0], []).append(entry)
    return found


def _mib(text: str) -> int | None:
    return int(text) * 2**20 if text.strip().isdigit() else None


def _amd() -> list[Device]:
    listed = _ask(
        ["rocm-smi", "--showuniqueid", "--showproductname", "--showmeminfo", "vram",
         "--showdriverversion", "--json"]
    )  # fmt: skip
    return amd_devices(listed) if listed else []


def amd_devices(listed: str) -> list[Device]:
    """The devices in ``rocm-smi --json`` output; key names differ between versions."""
    try:
        cards = json.loads(listed[listed.index("{") :])
    except ValueError:
        return []
    driver = cards.get("system", {}).get("Driver version") if isinstance(cards, dict) else None
    found: list[Device] = []
    for key in sorted(k for k in cards if k.startswith("card") and isinstance(cards[k], dict)):
        card = {name.lower(): str(value) for name, value in cards[key].items()}
        uuid = card.get("unique id")
        if uuid:
            name = card.get("card series") or card.get("card model") or "AMD GPU"
            memory = card.get("vram total memory (b)", "")
            size = int(memory) if memory.isdigit() else None
            found.append(
                Device(f"rocm:{len(found)}", excerpt(name, 200), f"GPU-{uuid}", size, driver)
            )
    return found
