"""What spoils a measured bandwidth, each thing by itself."""

from __future__ import annotations

from typing import Any

import pytest

from ikit_mcp.call import Device
from ikit_ops.measure import bandwidth_gates as gates
from ikit_ops.measure.rounds import Outcome, Round

QUIET = {"others_share": 0.01, "steal_share": 0.0, "throttle_events": 0}
GOOD_GPU: dict[str, Any] = {
    "throttle_reasons": [], "memory_mhz": {"median": 3201}, "max_memory_mhz": 3201,
}  # fmt: skip
MIB = 1 << 20


def rounds(*reads: float | None) -> list[Round]:
    """Rounds with these read rates, copies of 10 GB/s."""
    return [Round(n, n, n + 1, read, 10.0, read, 10.0) for n, read in enumerate(reads)]


def verdict_of(check: Any, *args: Any) -> gates.Verdict:
    """What one check says."""
    verdict = gates.Verdict()
    check(verdict, *args)
    return verdict


def test_a_working_set_that_a_cache_could_hold_is_a_violation() -> None:
    small = verdict_of(gates.check_working_set, 127 * MIB, 32 * MIB, 4)
    assert small.valid is False and "127 MiB is less than 4 times" in small.violations[0]
    assert verdict_of(gates.check_working_set, 128 * MIB, 32 * MIB, 4).valid is True
    assert verdict_of(gates.check_working_set, 512 * MIB, None, 4).valid is None


@pytest.mark.parametrize("found", [Outcome(rounds(5.0), False), Outcome(rounds(5.0), True, 1)])
def test_data_that_was_not_read_is_a_violation(found: Outcome) -> None:
    verdict = verdict_of(gates.check_rounds, found)
    assert verdict.valid is False and verdict.violations[0].startswith("data_read")


def test_rounds_that_agree_say_nothing_and_rounds_that_do_not_warn() -> None:
    assert verdict_of(gates.check_rounds, Outcome(rounds(10.0, 9.5, 9.0), True)).warnings == []
    apart = verdict_of(gates.check_rounds, Outcome(rounds(10.0, 8.0, 8.0), True))
    assert apart.valid is True
    assert apart.warnings == ["spread: the median round's read rate is 20% below the best one's"]


def test_a_rate_that_was_never_sustained_leaves_the_verdict_open() -> None:
    verdict = verdict_of(gates.check_rounds, Outcome(rounds(None, None), True))
    assert verdict.valid is None and "read" in verdict.unknown[0]


@pytest.mark.parametrize(
    ("threads", "part"), [(1, "1 of 4 cores"), (9, "9 threads share 8 CPUs"), (4, None), (8, None)]
)
def test_threads_that_do_not_fit_the_cores_warn(threads: int, part: str | None) -> None:
    verdict = verdict_of(gates.check_threads, threads, 4, 8)
    assert verdict.valid is True
    assert [part in line for line in verdict.warnings if part] == ([True] if part else [])
    assert bool(verdict.warnings) is bool(part)


@pytest.mark.parametrize(
    ("changed", "violations", "warnings"),
    [
        ({}, 0, 0),
        ({"others_share": 0.2}, 0, 1),
        ({"others_share": 0.4}, 1, 0),
        ({"steal_share": 0.05}, 0, 1),
        ({"steal_share": 0.5}, 1, 0),
        ({"steal_share": None}, 0, 0),
        ({"throttle_events": 3}, 0, 1),
        ({"throttle_events": None}, 0, 0),
    ],
)
def test_others_on_the_cpus_and_heat_warn_or_violate(
    changed: dict[str, Any], violations: int, warnings: int
) -> None:
    verdict = verdict_of(gates.check_host, {**QUIET, **changed})
    assert (len(verdict.violations), len(verdict.warnings)) == (violations, warnings)
    assert verdict.valid is (violations == 0)


@pytest.mark.parametrize("seen", [None, {}, {**QUIET, "others_share": None}])
def test_a_load_that_could_not_be_seen_leaves_the_verdict_open(seen: Any) -> None:
    assert verdict_of(gates.check_host, seen).valid is None


def gpu(*busy: int) -> Device:
    """A GPU with these processes on it."""
    return Device("cuda:0", "G", "GPU-1", 1, "1", tuple({"pid": pid, "name": "x"} for pid in busy))


def test_a_gpu_alone_at_its_full_clock_is_fine() -> None:
    verdict = verdict_of(gates.check_gpu, GOOD_GPU, [gpu(), gpu()])
    assert verdict.valid is True and verdict.warnings == []


@pytest.mark.parametrize("around", [[gpu(7), gpu()], [gpu(), gpu(7)]])
def test_another_process_on_the_gpu_before_or_after_is_a_violation(around: list[Device]) -> None:
    verdict = verdict_of(gates.check_gpu, GOOD_GPU, around)
    assert verdict.violations == ["other_processes: 1 on the device, pid 7"]


@pytest.mark.parametrize(
    ("changed", "valid", "part"),
    [
        ({"throttle_reasons": ["hw_thermal_slowdown"]}, False, "hw_thermal_slowdown"),
        ({"throttle_reasons": ["sw_power_cap"]}, True, "sw_power_cap"),
        ({"throttle_reasons": ["gpu_idle"]}, True, None),
        ({"throttle_reasons": None}, None, "could not be read"),
        ({"memory_mhz": {"median": 2600}}, True, "2600 MHz, of 3201 MHz"),
        ({"memory_mhz": None}, True, None),
    ],
)
def test_throttling_and_a_low_memory_clock_are_told(
    changed: dict[str, Any], valid: bool | None, part: str | None
) -> None:
    verdict = verdict_of(gates.check_gpu, {**GOOD_GPU, **changed}, [gpu()])
    lines = [*verdict.violations, *verdict.warnings, *verdict.unknown]
    assert verdict.valid is valid
    assert (len(lines) == 1 and part in lines[0]) if part else lines == []


def test_a_gpu_whose_state_was_not_read_leaves_the_verdict_open() -> None:
    assert verdict_of(gates.check_gpu, None, [gpu()]).valid is None


def test_more_than_the_bus_can_carry_is_a_violation_not_good_news() -> None:
    assert verdict_of(gates.check_datasheet, 1.01).valid is False
    assert verdict_of(gates.check_datasheet, 0.93).valid is True
    assert verdict_of(gates.check_datasheet, None).checked == []


def test_a_violation_outweighs_what_is_unknown() -> None:
    verdict = gates.Verdict(violations=["a"], unknown=["b"])
    assert verdict.valid is False and verdict.gates().violations == ["a"]
