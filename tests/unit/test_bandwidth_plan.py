"""Where threads run and how much they read: from what the machine says of itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_ops.measure import cpu_bandwidth, datasheet, host
from ikit_ops.measure.host import Node

GIB, MIB = 1 << 30, 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    """Files as the kernel would show them below a root; the root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("cache", "available", "expected"),
    [
        (32 * MIB, 24 * GIB, 512 * MIB),  # 16 times
        (1 * MIB, 24 * GIB, 512 * MIB),  # the floor
        (None, 24 * GIB, 512 * MIB),
        (384 * MIB, 500 * GIB, 6 * GIB),
        (1152 * MIB, 500 * GIB, 8 * GIB),  # the roof, still 7 times
        (32 * MIB, 1 * GIB, 256 * MIB),  # a quarter of the memory, 8 times
        (260 * MIB, 3 * GIB, 1536 * MIB),  # a host's cache in a small machine: half of the memory
        (None, 1 * GIB, 256 * MIB),
    ],
)
def test_the_working_set_is_many_times_the_cache_within_the_free_memory(
    cache: int | None, available: int, expected: int
) -> None:
    assert cpu_bandwidth.default_size(cache, available) == expected


@given(st.none() | st.integers(1, 4 * GIB), st.integers(0, 1 << 42))
def test_the_working_set_never_takes_more_than_half_of_the_memory(
    cache: int | None, available: int
) -> None:
    assert cpu_bandwidth.default_size(cache, available) <= available // 2


def test_threads_may_run_anywhere_when_there_is_one_node() -> None:
    assert cpu_bandwidth.spread(3, [Node(0, (0, 1, 2, 3), True)]) == ((), (), ())
    assert cpu_bandwidth.spread(2, []) == ((), ())
    assert cpu_bandwidth.spread(1, [Node(0, (0,), True), Node(1, (), False)]) == ((),)


def test_threads_are_dealt_out_evenly_and_stay_on_their_node() -> None:
    two = [Node(0, (0, 1, 2, 3), True), Node(1, (4, 5, 6, 7), True)]
    assert cpu_bandwidth.spread(4, two) == ((0, 1, 2, 3),) * 2 + ((4, 5, 6, 7),) * 2
    assert cpu_bandwidth.spread(16, two).count((4, 5, 6, 7)) == 8


def test_threads_follow_the_cpus_that_may_be_used() -> None:
    uneven = [Node(0, (0, 1, 2), True), Node(1, (4,), True)]
    assert cpu_bandwidth.spread(4, uneven) == ((0, 1, 2),) * 3 + ((4,),)


@given(st.integers(1, 300), st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_every_thread_has_a_node_and_no_node_has_more_than_its_share(
    count: int, sizes: list[int]
) -> None:
    nodes, first = [], 0
    for number, size in enumerate(sizes):
        nodes.append(Node(number, tuple(range(first, first + size)), True))
        first += size
    found = cpu_bandwidth.spread(count, nodes)
    assert len(found) == count
    if len(nodes) > 1:
        for node in nodes:
            share = count * len(node.cpus) / first
            assert share - 1 < found.count(node.cpus) < share + 1


@pytest.mark.parametrize("rounds", [3, 6, 7, 60])
def test_the_rounds_are_dealt_out_to_draws_of_pages_whole_and_in_order(rounds: int) -> None:
    listed = [
        {"kind": kind, "seconds": index} for index in range(rounds) for kind in ("read", "copy")
    ]
    draws = cpu_bandwidth.draws(listed)
    kinds = ["huge", "default"] * 3
    assert [draw["pages"] for draw in draws] == kinds[: min(rounds, 6)]
    assert [phase for draw in draws for phase in draw["phases"]] == listed
    assert all(len(draw["phases"]) >= 2 and len(draw["phases"]) % 2 == 0 for draw in draws)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("", ()), ("7", (7,)), ("\n", ())],
)
def test_the_kernels_lists_of_cpus_are_read(text: str, expected: tuple[int, ...]) -> None:
    assert host.parse_cpu_list(text) == expected


def test_nodes_tell_their_usable_cpus_and_those_without_any(tmp_path: Path) -> None:
    nodes = "sys/devices/system/node"
    root = write(
        tmp_path,
        {f"{nodes}/node{n}/cpulist": text for n, text in ((10, ""), (0, "0-3"), (1, "4-7"))},
    )
    assert host.memory_nodes([0, 1, 4], root) == [
        Node(0, (0, 1), True), Node(1, (4,), True), Node(10, (), False),
    ]  # fmt: skip
    assert host.memory_nodes([0], tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "1 0"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_the_control_groups_quota_is_read_in_both_versions(
    files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert host.cpu_quota(root) == expected


def test_the_control_groups_memory_bounds_what_is_available(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    limited = write(
        tmp_path / "v2", {f"{group}/memory.max": "1000000", f"{group}/memory.current": "400000"}
    )
    assert host.available_memory_bytes(limited) == 600_000
    old = {"limit_in_bytes": "500000", "usage_in_bytes": "600000"}
    spent = write(tmp_path / "v1", {f"{group}/memory/memory.{n}": t for n, t in old.items()})
    assert host.available_memory_bytes(spent) == 0
    free = host.available_memory_bytes(tmp_path / "none")
    unlimited = write(
        tmp_path / "max", {f"{group}/memory.max": "max", f"{group}/memory.current": "4"}
    )
    assert free > 1_000_000 and host.available_memory_bytes(unlimited) > 1_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [("flags\t\t: fpu hypervisor avx\n", True), ("flags\t\t: fpu avx\n", False),
     ("Features\t: fp asimd\n", None)],
)  # fmt: skip
def test_a_virtual_machine_is_known_by_the_processors_flag(
    text: str, expected: bool | None, tmp_path: Path
) -> None:
    assert host.is_virtual(write(tmp_path, {"proc/cpuinfo": text})) is expected
    assert host.is_virtual(tmp_path / "nothing") is None


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_only_the_cpus_of_the_affinity_mask_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda who: {3, 1})
    assert host.usable_cpus() == (1, 3)


@pytest.mark.parametrize(
    ("name", "gbs"),
    [
        ("NVIDIA H200", 4800), ("H200", 4800), ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H100 PCIe", 2000), ("NVIDIA A100-SXM4-80GB", 2039), ("Tesla T4", 320),
        ("NVIDIA GeForce RTX 4090", 1008), ("AMD Instinct MI300X", 5300),
        ("NVIDIA H100", None), ("NVIDIA H200 MIG 1g.18gb", None), ("AMD EPYC", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_only_a_device_of_the_very_name_has_a_datasheet(name: str | None, gbs: int | None) -> None:
    found = datasheet.figure(name)
    assert (found.gbs if found else None) == gbs
    if found:
        assert found.source and found.device == name
