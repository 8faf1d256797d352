"""What is profiled: a command as it is, or the worker of a benchmark that was measured.

A command is captured whole, since nobody knows when it has warmed up.  A benchmark's worker
opens the capture itself, after warm-up: loading an engine would fill gigabytes before the
first token.  Its record pins what was measured; here it is made again, and whatever is not the
same (a variable that a profiled run does not get, a flag that the engine then chose otherwise)
is named in the record.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Device, expanded, one_line
from ikit_mcp.evidence import record as evidence
from ikit_mcp.evidence.record import EvidenceRecord, Identity
from ikit_mcp.registry import OpError
from ikit_ops.profilers import formats, launch, report
from ikit_ops.profilers.adapter import PROFILER_LOG, TARGET_LOG, Job, Profiler, has_device
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.find import find_program
from ikit_ops.profilers.limits import Reading


@dataclass
class Target:
    """A target that is ready: its command, what it needs, and what it is known by."""

    command: tuple[str, ...]
    cwd: Path
    environment: dict[str, str] = field(default_factory=dict)
    identity: Identity = field(default_factory=Identity)
    window: bool = False
    steps: int | None = None
    bench: EvidenceRecord | None = None
    replay: Any = None
    limitations: list[str] = field(default_factory=list)


def of_command(
    call: Call, command: Sequence[str], cwd: str | None, devices: Sequence[Device], *, chosen: bool
) -> Target:
    """A command, in its folder, on the devices that were chosen."""
    folder = expanded(cwd) if cwd else Path.cwd()
    try:
        there = folder.is_dir()
    except (OSError, ValueError):  # too long, a NUL byte
        there = False
    if not there:
        raise OpError(f"cwd {one_line(str(cwd), 120)} is no folder", "give an existing folder")
    # Below a profiler and a shell a wrong name would look like a run that failed.
    name = command[0]
    if shutil.which(str(folder / name) if os.sep in name else name) is None:
        raise OpError(f"{one_line(name, 120)}: no such program", "give its full path")
    device = devices[0]
    found = Target(
        tuple(command),
        folder.absolute(),
        identity=Identity(
            device=evidence.Device(
                name=one_line(device.name), uuid=device.uuid, driver=device.driver
            )
        ),
    )
    if chosen:
        names = [d.uuid or d.id.split(":")[-1] for d in devices]
        shown = "" if device.id == "cpu" else ",".join(names)
        if not device.id.startswith("rocm"):
            found.environment["CUDA_VISIBLE_DEVICES"] = shown
        if not device.id.startswith("cuda"):
            found.environment["ROCR_VISIBLE_DEVICES"] = shown
    found.limitations.append("the command was captured whole, start and loading too")
    return found


def of_benchmark(call: Call, bench_id: str, *, steps: int, window: bool) -> Target:
    """The worker of a benchmark's record; OpError when the record may not be used."""
    from ikit_ops.engines import planning
    from ikit_ops.engines.replay import replay

    bench = call.store.require(bench_id, "bench")
    require_trust(call, bench)
    args = bench.get("provenance", "request", "args")
    if isinstance(args, Mapping) and planning.effects_of(args) > call.scope:
        raise OpError(
            "the benchmark ran a program that is not listed here",
            "add its interpreter to IKIT_PYTHONS, or profile the command itself",
        )
    folder = call.folder / "worker"
    folder.mkdir(mode=0o700)
    made = replay(call, local_model(bench), folder, steps=steps, capture=window)
    device = bench.get("identity", "device", "uuid")
    if isinstance(device, str) and call.locked and device not in call.locked:
        where = made.plan.device.id if made.plan.device is not None else device
        raise OpError("the benchmark ran on another device", f"call profile with device={where}")
    target = Target(
        tuple(made.argv),
        folder,
        dict(made.environment),
        identity_of(bench.get("identity"), steps),
        window,
        steps,
        bench,
        made,
    )
    target.limitations.append(
        f"one round of {steps} tokens was run; its prefill ({made.plan.prompt_len} tokens) is in "
        "the capture"
    )
    return target


def require_trust(call: Call, bench: EvidenceRecord) -> None:
    """With a signing key set, only records that a trusted key signed become a profile's parent."""
    if call.settings.signing_key is None:
        return
    state = call.store.signature_state(bench)
    if state is None or not state.get("trusted"):
        raise OpError(
            f"evidence {bench.evidence_id[:12]} is not signed by a trusted key",
            "with IKIT_SIGNING_KEY set only trusted benchmarks are profiled: measure it again",
        )


def local_model(bench: EvidenceRecord) -> EvidenceRecord:
    """The record with its model as a local path: a private home has no cache of the Hub."""
    from ikit_ops.checkpoint.hub_cache import snapshot
    from ikit_ops.engines.planning import existing

    args = bench.get("provenance", "request", "args")
    model = args.get("model") if isinstance(args, dict) else None
    if not isinstance(model, str) or existing(model) is not None:
        return bench
    found = snapshot(model, args.get("revision"))
    if found is None:
        raise OpError(
            f"{one_line(model)} is not in the Hub's cache here, and a profiled run is offline",
            "download it first (hf download), then call profile again",
        )
    raw = copy.deepcopy(bench.raw)
    raw["provenance"]["request"]["args"] |= {"model": str(found[0]), "revision": None}
    return EvidenceRecord(raw, bench.evidence_id, bench.folder)


def identity_of(told: Any, steps: int | None = None) -> Identity:
    """A benchmark's identity for the profile that explains it; ``steps``: one profiled round."""
    import msgspec

    try:
        found = msgspec.convert(told, Identity)
    except msgspec.ValidationError:
        return Identity()
    if steps is None:
        return found
    workload = {**(found.workload or {}), "gen_len": steps, "rounds": 1}
    return Identity(model=found.model, engine=found.engine, device=found.device, workload=workload)


# --- carrying it out ---------------------------------------------------------------------


def carry_out(
    call: Call,
    target: Target,
    name: str,
    devices: Sequence[Device],
    *,
    keep_env: Sequence[str],
    timeout: float,
    grace: float,
) -> EvidenceRecord:
    """Profile the target; the stored record."""
    folder = call.folder / "profile"
    for new in (folder, folder / "tmp"):
        new.mkdir(mode=0o700)
    # What is refused is refused before anything is looked for, let alone started.
    env = launch.environment_for(call, keep_env, call.folder / "home") | target.environment
    env.setdefault("TMPDIR", str(folder / "tmp"))  # half-made reports are of nobody's business
    profiler, found = launch.choose(call, name, devices)
    window = _window(target, profiler, devices)
    program = find_program(profiler.program) if profiler.program else None
    room = profiler.room(call)
    job = Job(target.command, folder, program, found["version"], devices, window, room=room)
    call.progress(0, None, f"{profiler.title}: starting")
    ran = launch.run(call, profiler, job, env=env, cwd=target.cwd, timeout=timeout, grace=grace)
    told = _worker_result(call, target, None if ran.log_cut else folder / TARGET_LOG)
    reading = Reading(ran.left.path, lambda d, t: call.progress(d, t, "reading the report"))
    capture = formats.read(reading, ran.left.format)
    capture.version = capture.version or found["version"]
    capture.incomplete += ran.incomplete
    capture.limitations += [*ran.left.notes, *ran.warnings]
    context = _context(call, target, profiler, env, keep_env, told, window)
    context.facts |= {
        "seconds": ran.seconds,
        "exit_status": ran.returncode,
        "timed_out": ran.timed_out,
        "window": window,
        "command": [one_line(word) for word in target.command[:64]],
    }
    _check_window(capture, told, window)
    artifacts: dict[str, tuple[bytes | Path, str]] = dict(report.artifacts_of(capture))
    artifacts[ran.left.report.name] = (ran.left.report, ran.left.media_type)
    for log in (TARGET_LOG, PROFILER_LOG):
        headless = ran.log_cut and log == TARGET_LOG
        if text := launch.log_text(folder / log, headless=headless):
            artifacts[log] = (text.encode("utf-8"), "text/plain; charset=utf-8")
    resolved = {"profiler": profiler.name}
    if target.bench is not None:
        resolved["bench_id"] = target.bench.evidence_id
    record = call.save(
        report.draft(capture, context),
        artifacts=artifacts,
        resolved=resolved,
        reply=report.REPLY,
    )
    propose_rest(call, record)
    return record


def _window(target: Target, profiler: Profiler, devices: Sequence[Device]) -> bool:
    """Whether the target can open the capture itself."""
    if not target.window:
        return False
    able = profiler.name == "torch" or (
        profiler.name in ("nsys", "ncu") and has_device(devices, "cuda")
    )
    if not able:
        target.limitations.append(
            f"{profiler.title} has no capture window here: loading and warm-up are in the capture"
        )
    return able


def _worker_result(call: Call, target: Target, log: Path | None) -> Any:
    """What the benchmark's worker left, completed as a benchmark's; OpError when it failed.

    ``log`` None: the engine's log is not whole, so what only it says was not seen.
    """
    if target.replay is None:
        return None
    from ikit_ops.engines import drive, planning
    from ikit_ops.engines import result as results

    try:
        told = results.read(target.replay.result)
    except results.Unreadable as error:
        raise OpError(f"the engine's result cannot be read: {error}", "run bench again") from None
    if told is not None and told.error is not None:
        raise OpError(
            f"the engine failed in phase {one_line(told.error.phase, 40)}: "
            f"{one_line(told.error.what, 400)}",
            "variables that the benchmark had are not passed on: name what it needs in keep_env",
        )
    if told is None or told.flags is None:
        return told
    if log is None:
        told.flags = None
    else:
        target.replay.adapter.read(told, drive.read_log(log), target.replay.plan)
        told.flags = planning.without_secrets(call, told.flags)
    return told


def _check_window(capture: Capture, told: Any, window: bool) -> None:
    if window and told is not None and told.captured is False:
        capture.incomplete.append("the engine could not open the capture range")


def _context(
    call: Call,
    target: Target,
    profiler: Profiler,
    env: Mapping[str, str],
    keep_env: Sequence[str],
    told: Any,
    window: bool,
) -> report.Context:
    """What the profile is known by, and how it differs from its benchmark."""
    from ikit_ops.engines.drive import ENGINE_NAMES, ENGINE_PREFIXES

    variables = call.engine_variables(ENGINE_PREFIXES, ENGINE_NAMES, env)
    kept = sorted({*variables.kept, *(name for name in keep_env if name in env)})
    label = profiler.name
    if target.steps:
        load = "" if window else "loading, warm-up and "
        label = f"{profiler.name}, {load}{target.steps} decode steps"
    context = report.Context(
        "measured",
        label,
        target.identity,
        checked=["exit_status", "timeout", "secret_search"],
        limitations=list(target.limitations),
        env_kept=kept,
        env_dropped=[name for name in variables.dropped if name not in kept],
    )
    if target.bench is not None:
        own = target.environment.keys() | _OFFLINE
        _compare(context, target.bench, env, told, [n for n in variables.kept if n not in own])
    return context


_OFFLINE = {"HF_HUB_OFFLINE"}
"""Variables that every profiled run is given: no choice of the caller's."""
_COUNTS = {"decode_batches_without_graph"}
"""Flags that count what happened: a shorter run has fewer."""


def _compare(
    context: report.Context,
    bench: EvidenceRecord,
    env: Mapping[str, str],
    told: Any,
    given: Sequence[str],
) -> None:
    """Name the variables and flags in which the profiled run differs from the benchmark.

    ``given`` are the engine's variables that the caller passed on.
    """
    context.parents.append(bench.evidence_id)
    had = bench.get("provenance", "env_kept")
    had = [name for name in had if isinstance(name, str)] if isinstance(had, list) else None
    lost = [name for name in had or () if name not in env]
    added = [name for name in given if had is not None and name not in had]
    both = [name for name in had or () if name in env]
    was = _flags(bench.get("data", "flags"))
    now = _flags(None if told is None else evidence.storable(told.flags))
    flags = (was, now) if was is not None and now is not None else ({}, {})
    context.config_differences = report.differences(*flags, lost, added)
    if lost:
        context.limitations.append(
            f"{len(lost)} engine variable{'s' if len(lost) > 1 else ''} of the benchmark "
            f"{'were' if len(lost) > 1 else 'was'} not passed on: {', '.join(lost)}"
        )
    if added:
        context.limitations.append(
            f"{len(added)} engine variable{'s were' if len(added) > 1 else ' was'} set that the "
            f"benchmark did not have: {', '.join(added)}"
        )
    if both:
        context.limitations.append(
            "the values of variables are not compared, since records hold their names alone: "
            + ", ".join(both)
        )
    if was is None or now is None:
        context.missing.append("flags of the profiled run: whether they are the benchmark's")
    if differing := len(context.config_differences) - len(lost) - len(added):
        context.limitations.append(
            f"a different configuration than the benchmark's: {differing} "
            f"{'flags differ' if differing > 1 else 'flag differs'} "
            "(data.config_differences)"
        )


def _flags(told: Any) -> dict[str, Any] | None:
    """An engine's flags, those that configure it."""
    if not isinstance(told, Mapping):
        return None
    return {name: value for name, value in told.items() if name not in _COUNTS}


def propose_rest(call: Call, record: EvidenceRecord) -> None:
    """Propose the rest of the table."""
    rows = record.get("data", "kernels")
    if isinstance(rows, list) and len(rows) > report.TOP:
        call.propose(
            "inspect_evidence",
            {"id": record.evidence_id, "path": "data.kernels", "offset": report.TOP},
            f"the other {len(rows) - report.TOP} kernels",
        )
