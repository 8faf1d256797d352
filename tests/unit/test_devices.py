"""Devices as the drivers' tools tell of them, and the names that locks use."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fakes import nvidia_smi
from ikit_mcp.process import devices
from ikit_mcp.registry import OpError


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi on PATH."""
    folder = nvidia_smi.install(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))


@pytest.mark.usefixtures("two_gpus")
def test_nvidia_devices_have_index_uuid_memory_driver_and_who_is_on_them() -> None:
    first, second, cpu = devices.devices()
    assert (first.id, first.uuid, first.driver) == ("cuda:0", "GPU-aaaaaaaa-0000", "580.159")
    assert first.memory_bytes == 81_559 * 2**20 and first.busy == ()
    assert second.busy[0] == {"pid": 4242, "name": "/usr/bin/other", "memory_bytes": 2**30}
    assert cpu.id == "cpu" and cpu.memory_bytes


@pytest.mark.usefixtures("two_gpus")
def test_auto_locks_the_first_gpu_and_a_list_locks_each_once() -> None:
    assert devices.uuids_of("auto") == ["GPU-aaaaaaaa-0000"]
    assert devices.uuids_of("cuda") == ["GPU-aaaaaaaa-0000"]
    both = devices.uuids_of("cuda:1, GPU-aaaaaaaa-0000,cuda:1")
    assert both == ["GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-1111"]
    with pytest.raises(OpError, match=r"cuda:7.* is not here"):
        devices.uuids_of("cuda:7")


def test_a_tool_that_fails_hangs_or_prints_rubbish_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script in (
        "exit 9",
        "printf 'No devices\\n'",
        "printf '\\377\\376,a,b,c\\n'",
        "kill -9 $$",
    ):
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        assert [d.id for d in devices.devices()] == ["cpu"]


def test_memory_that_the_driver_does_not_say_is_unknown_not_zero() -> None:
    [device] = devices.nvidia_devices("GPU-1, Name, [N/A], 1.0\n", {})
    assert device.memory_bytes is None


def test_amd_devices_are_read_whatever_the_case_of_the_keys() -> None:
    card = {"Unique ID": "0xabc", "Card Series": "AMD Test", "VRAM Total Memory (B)": "1024"}
    listed = json.dumps(
        {"card0": card, "card1": {"Unique ID": ""}, "system": {"Driver version": "6.1"}}
    )
    [device] = devices.amd_devices(f"WARNING: text before\n{listed}")
    assert (device.id, device.uuid, device.memory_bytes, device.driver) == (
        "rocm:0", "GPU-0xabc", 1024, "6.1",
    )  # fmt: skip
    assert devices.amd_devices("no json") == []


def test_the_uuid_of_a_cpu_is_stable_and_does_not_hold_the_machine_id() -> None:
    uuid = devices.cpu().uuid
    assert uuid is not None and uuid == devices.cpu().uuid and len(uuid) == 16
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        if Path(path).exists():
            assert uuid not in Path(path).read_text(encoding="ascii")
