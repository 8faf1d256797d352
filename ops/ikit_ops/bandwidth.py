"""The bandwidth that memory sustains: the one number that a decoding engine cannot pass.

A datasheet tells the peak of the bus.  What kernels get is 5 to 15 % less, and less again where
memory is half populated, shared with other machines, or throttled; only measuring tells.  So the
ceiling of a roofline should come from the machine it is held against: read everything that the
memory has to give, with all cores or the whole GPU, for a few seconds, and keep the best rate
that was *sustained* (``measure.statistics``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.call import Device as Found
from ikit_mcp.evidence.record import Device, Draft, EvidenceRecord, Identity, metric
from ikit_mcp.registry import MEASURES, Arg, OpError, operation
from ikit_ops.measure import bandwidth_gates as gates
from ikit_ops.measure import cpu_bandwidth, datasheet, gpu_bandwidth, host
from ikit_ops.measure.rounds import Outcome
from ikit_ops.measure.telemetry import Telemetry, sources_for

LONGEST = 60
RESTLESS = ("other_load", "steal", "spread")
REPLY = ("method", "memory_nodes", "datasheet_gbs", "share_of_datasheet")


@operation(
    "measure_bandwidth",
    ("bandwidth",),
    "Measure the memory bandwidth that a GPU or the CPU sustains, for reading and for copying.",
    [
        Arg("device", "string", "auto, cpu, cuda:0, rocm:0 or a uuid", default="auto"),
        Arg("seconds", "number", "Time to measure", default=3, minimum=1, maximum=LONGEST,
            unit="s"),
        Arg("threads", "integer", "CPU threads (default: one per core)", minimum=1, maximum=1024),
        Arg("size_bytes", "integer", "Working set (default: several times the cache)",
            minimum=1 << 20, maximum=1 << 40, unit="B"),
    ],
    effects=MEASURES,
    long=True,
    early=lambda arguments, settings: _refuse_early(arguments),
)  # fmt: skip
def measure_bandwidth(
    call: Call, device: str, seconds: float, threads: int | None, size_bytes: int | None
) -> EvidenceRecord:
    """A record of kind ceiling: ``dram_read_gbs`` and ``dram_copy_gbs`` in GB/s (1e9 bytes/s).

    Both are the best sustained rate of any round, with each round's as samples; null when all
    threads never ran together.  Copying counts the bytes read and the bytes written.

    Raises:
        OpError: no such device, not enough memory, or no torch to measure a GPU with.
    """
    found = host.choose_device(call.devices(), device)
    if found.id == "cpu":
        draft, resolved = _cpu(call, found, seconds, threads, size_bytes)
    else:
        _refuse_threads(threads)
        draft, resolved = _gpu(call, found, seconds, size_bytes)
    if any(line.startswith(RESTLESS) for line in draft.gates.warnings):
        again = {**resolved, "seconds": min(LONGEST, 4 * seconds)}
        call.propose("measure_bandwidth", again, "a longer look finds a quieter stretch")
    return call.save(draft, resolved=resolved, reply=REPLY)


def _refuse_early(arguments: Mapping[str, Any]) -> None:
    if arguments["device"].split(":")[0] in ("cuda", "rocm"):
        _refuse_threads(arguments["threads"])


def _refuse_threads(threads: int | None) -> None:
    if threads is not None:
        raise OpError("threads are for the CPU", "leave out threads, or use device=cpu")


def _cpu(
    call: Call, device: Found, seconds: float, threads: int | None, size_bytes: int | None
) -> tuple[Draft, dict[str, Any]]:
    """The draft of a measurement of the CPU, and the arguments that were worked out."""
    plan = cpu_bandwidth.plan(call, seconds, threads, size_bytes)
    with Telemetry(sources_for(device)) as telemetry:
        outcome = cpu_bandwidth.measure(call, plan)
    told = telemetry.summary()
    verdict = gates.Verdict()
    gates.check_working_set(
        verdict, plan.size_bytes, plan.cache_bytes, cpu_bandwidth.LEAST_TIMES_CACHE
    )
    gates.check_rounds(verdict, outcome)
    gates.check_threads(verdict, len(plan.threads), plan.cores, plan.usable)
    gates.check_host(verdict, told["cpu"])
    limitations = _common_limitations()
    if cpu_bandwidth.vectorised_compare() is None:
        verdict.unknown.append("read_kernel: this C library's memcmp may not be vectorised")
    if host.is_virtual():
        limitations.append(
            "a virtual machine: other machines on the same memory are not seen, and what is said"
            " of the cache may be another's"
        )
    if plan.quota is not None:
        limitations.append(f"a control group allows {plan.quota:g} CPUs")
    bare = [node.number for node in plan.nodes if not node.has_cpus]
    if bare:
        limitations.append(f"memory nodes without CPUs were not read: {', '.join(map(str, bare))}")
    workload = {
        "threads": len(plan.threads),
        "size_bytes": plan.size_bytes,
        "seconds": seconds,
        "method": cpu_bandwidth.METHOD["read"],
    }
    data = {
        "method": cpu_bandwidth.METHOD,
        "last_level_cache_bytes": plan.cache_bytes,
        "usable_cpus": plan.usable,
        "cores": plan.cores,
        "memory_nodes": cpu_bandwidth.memory_layout(plan),
        "differences": outcome.differences,
    }
    draft = _draft(device, outcome, verdict, workload, data, limitations, told, telemetry.missing)
    draft.env_kept = _kept(cpu_bandwidth.KEEP)
    resolved = {
        "device": "cpu", "threads": len(plan.threads), "size_bytes": plan.size_bytes,
    }  # fmt: skip
    return draft, resolved


def _gpu(
    call: Call, device: Found, seconds: float, size_bytes: int | None
) -> tuple[Draft, dict[str, Any]]:
    """The draft of a measurement of a GPU, and the arguments that were worked out."""
    with Telemetry(sources_for(device)) as telemetry:
        outcome = gpu_bandwidth.measure(call, device, seconds, size_bytes)
    after = [found for found in call.devices() if found.uuid == device.uuid]
    told = telemetry.summary()
    verdict = gates.Verdict()
    gates.check_working_set(
        verdict, outcome.size_bytes, outcome.l2_bytes, gpu_bandwidth.LEAST_TIMES_CACHE
    )
    gates.check_rounds(verdict, outcome)
    gates.check_gpu(verdict, told["gpu"], [device, *after])
    method = {
        "read": f"torch {outcome.read_kernel} of float32 matrices",
        "copy": "torch copy_ of one matrix onto another; bytes read plus bytes written",
        "window_seconds": gpu_bandwidth.WINDOW,
        "best_sustained": "highest rate over one window, timed by the device's events",
    }
    workload = {
        "threads": None, "size_bytes": outcome.size_bytes, "seconds": seconds,
        "method": method["read"],
    }  # fmt: skip
    data = {
        "method": method,
        "l2_bytes": outcome.l2_bytes,
        "read_kernels_gbs": outcome.kernels,
        "torch": outcome.torch,
    }
    draft = _draft(
        device, outcome, verdict, workload, data, _common_limitations(), told, telemetry.missing
    )
    draft.env_kept = _kept(gpu_bandwidth.KEEP)
    return draft, {"device": device.uuid or device.id, "size_bytes": outcome.size_bytes}


def _kept(names: tuple[str, ...]) -> list[str]:
    """The names of the variables that the measuring process was given beyond the usual few."""
    return [name for name in names if name in os.environ]


def _common_limitations() -> list[str]:
    return [
        "best sustained over a window: engines that read with gaps, or with other patterns, get "
        "less",
        "copying counts bytes read and written; lines read only to be overwritten are not counted",
    ]


def _draft(
    device: Found,
    outcome: Outcome,
    verdict: gates.Verdict,
    workload: dict[str, Any],
    data: dict[str, Any],
    limitations: list[str],
    told: dict[str, Any],
    missing: list[str],
) -> Draft:
    """The record's content, the same for all devices."""
    read, copy = outcome.best("read_gbs"), outcome.best("copy_gbs")
    figure = datasheet.figure(device.name) if device.id != "cpu" else None
    share = read / figure.gbs if figure is not None and read is not None else None
    gates.check_datasheet(verdict, share)
    lines = [*verdict.unknown, *missing]
    if figure is None:
        lines.append("the datasheet's figure (not known for this device)")
    elif share is None:
        lines.append("share of the datasheet's figure (no rate was sustained)")
    name = one_line(device.name or "unknown", 120)
    return Draft(
        kind="ceiling",
        claim_class="measured",
        valid=verdict.valid,
        summary=_summary(name, workload, read, copy, share),
        identity=Identity(
            device=Device(name=name, uuid=device.uuid, driver=device.driver), workload=workload
        ),
        metrics=[
            metric("dram_read_gbs", read, "GB/s", "best_sustained", outcome.samples("read_gbs")),
            metric("dram_copy_gbs", copy, "GB/s", "best_sustained", outcome.samples("copy_gbs")),
        ],
        gates=verdict.gates(),
        missing=lines,
        limitations=[*limitations, *verdict.violations],
        data={
            **data,
            "rounds": [asdict(found) for found in outcome.rounds],
            "datasheet_gbs": figure.gbs if figure else None,
            "datasheet": {"source": figure.source, "as_of": datasheet.AS_OF} if figure else None,
            "share_of_datasheet": share,
            "telemetry": told,
        },
    )


def _summary(
    name: str,
    workload: dict[str, Any],
    read: float | None,
    copy: float | None,
    share: float | None,
) -> str:
    """One line: the device, the rates, and how they were taken."""
    rates = [
        f"{what} {rate:.1f} GB/s" if rate is not None else f"{what} not sustained"
        for what, rate in (("read", read), ("copy", copy))
    ]
    count = workload["threads"]
    threads = f"{count} thread{'s' if count > 1 else ''}, " if count else ""
    text = f"{name}: {', '.join(rates)} ({threads}{workload['size_bytes'] / 2**20:.0f} MiB"
    text += f", {workload['seconds']:g} s)"
    return text + (f"; {share:.0%} of the datasheet" if share is not None else "")
