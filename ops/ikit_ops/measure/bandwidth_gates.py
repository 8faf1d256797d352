"""What makes a measured bandwidth a ceiling, and what spoils it.

Everything that goes wrong here makes the number either too high (a cache answered, the data was
not read) or too low (others used the device, it was throttled, too few threads).  Too high is
always a violation: a ceiling that nothing reaches makes every engine look slow.  Too low is a
violation when it was gross, else a warning: then the true ceiling is at or above the number.
A required check that could not be made leaves ``valid`` null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ikit_mcp.call import Device
from ikit_mcp.evidence.record import Gates
from ikit_ops.measure.gpu import SLOWED
from ikit_ops.measure.rounds import Outcome
from ikit_ops.measure.statistics import shortfall

OTHERS_WARN, OTHERS_VIOLATE = 0.10, 0.40  # of all CPU time
STEAL_WARN, STEAL_VIOLATE = 0.02, 0.25
SPREAD_WARN = 0.15
CLOCK_DROP = 0.03


@dataclass
class Verdict:
    """The checks so far; ``unknown`` are required ones that could not be made."""

    checked: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def valid(self) -> bool | None:
        """False with a violation, None with an unknown, else True."""
        return False if self.violations else None if self.unknown else True

    def gates(self) -> Gates:
        """The part of the record."""
        return Gates(
            checked=self.checked, violations=self.violations, warnings=self.warnings
        )  # fmt: skip

    def share(self, name: str, what: str, seen: float | None, warn: float, violate: float) -> None:
        """Check a share of the CPUs' time that was not ours."""
        self.checked.append(name)
        if seen is None:
            return  # telemetry has told that it is missing
        line = f"{name}: {what} took {seen:.0%} of the CPU time, so the true rate is higher"
        if seen >= violate:
            self.violations.append(line)
        elif seen >= warn:
            self.warnings.append(line)


def check_working_set(verdict: Verdict, size: int, cache: int | None, least: int) -> None:
    """The working set must be ``least`` times the cache; an unknown cache leaves it open."""
    verdict.checked.append("working_set")
    if cache is None:
        verdict.unknown.append("working_set: the size of the last-level cache is not known")
    elif size < least * cache:
        verdict.violations.append(
            f"working_set: {size / 2**20:.0f} MiB is less than {least} times the last-level cache"
            f" ({cache / 2**20:.0f} MiB), which may have answered"
        )


def check_rounds(verdict: Verdict, found: Outcome) -> None:
    """The data was read, rates were seen, and the rounds agree."""
    verdict.checked += ["data_read", "sustained", "spread"]
    if not found.verified or found.differences:
        verdict.violations.append(
            "data_read: what was written was not what was read back, or reading ended early"
        )
    for name in ("read", "copy"):
        samples = found.samples(f"{name}_gbs")
        if found.best(f"{name}_gbs") is None:
            verdict.unknown.append(f"sustained: all threads never ran together to {name}")
        lag = shortfall(samples)
        if lag is not None and lag > SPREAD_WARN:
            verdict.warnings.append(
                f"spread: the median round's {name} rate is {lag:.0%} below the best one's"
            )


def check_threads(verdict: Verdict, threads: int, cores: int, usable: int) -> None:
    """As many threads as cores, or the reader is told."""
    verdict.checked.append("threads")
    if threads > usable:
        verdict.warnings.append(f"threads: {threads} threads share {usable} CPUs")
    elif threads < cores:
        verdict.warnings.append(
            f"threads: {threads} of {cores} cores read, so this is no ceiling of the whole machine"
        )


def check_host(verdict: Verdict, cpu: Mapping[str, Any] | None) -> None:
    """Other processes, other virtual machines, and heat."""
    seen = cpu or {}
    verdict.share(
        "other_load", "other processes", seen.get("others_share"), OTHERS_WARN, OTHERS_VIOLATE
    )
    verdict.share("steal", "the hypervisor", seen.get("steal_share"), STEAL_WARN, STEAL_VIOLATE)
    if seen.get("others_share") is None:
        verdict.unknown.append("other_load: the CPU time of other processes is not known")
    verdict.checked.append("throttling")
    if seen.get("throttle_events"):
        verdict.warnings.append(
            f"throttling: the CPU slowed down to cool {seen['throttle_events']} times"
        )


def check_gpu(verdict: Verdict, gpu: Mapping[str, Any] | None, around: Sequence[Device]) -> None:
    """Nobody else on the device before or after, and no throttling while it was measured."""
    verdict.checked += ["other_processes", "throttling", "memory_clock"]
    others = sorted({p["pid"] for device in around for p in device.busy})
    if others:
        verdict.violations.append(
            f"other_processes: {len(others)} on the device, pid {', '.join(map(str, others[:5]))}"
        )
    reasons = (gpu or {}).get("throttle_reasons")
    if gpu is None or reasons is None:
        verdict.unknown.append("throttling: the reasons for throttling could not be read")
    else:
        slowed = [name for name in reasons if name in SLOWED]
        if slowed:
            verdict.violations.append(f"throttling: {', '.join(slowed)}")
        if "sw_power_cap" in reasons:
            verdict.warnings.append("throttling: sw_power_cap, the board's limit of power")
    clock = (gpu or {}).get("memory_mhz")
    most = (gpu or {}).get("max_memory_mhz")
    if clock and most and clock["median"] < most * (1 - CLOCK_DROP):
        verdict.warnings.append(
            f"memory_clock: {clock['median']:.0f} MHz, of {most:.0f} MHz at most"
        )


def check_datasheet(verdict: Verdict, share: float | None) -> None:
    """More than the bus can carry was not carried by it."""
    if share is not None:
        verdict.checked.append("datasheet")
        if share > 1:
            verdict.violations.append(f"datasheet: {share:.0%} of the datasheet's figure")
