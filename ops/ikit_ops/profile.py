"""Profiles: where the time of a run went, kernel by kernel.

A benchmark says how fast, a profile says why.  It is taken in a run of its own, because a
profiler slows what it looks at; of a benchmark, it is the very configuration that was measured,
with whatever differs named.  Captures from elsewhere become the same record.

Reports are where secrets leak, so a profiled run has no secret to tell: ``profilers.launch``
starts it with a clean environment, and everything that is kept is searched first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ikit_mcp.call import Call, Settings, one_line
from ikit_mcp.evidence.record import Device, EvidenceRecord, Identity
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import DERIVES, EXECUTES, Arg, Effects, OpError, Varying, operation
from ikit_ops.profilers.names import CONVERTED, FORMATS, NCU_REPORT, NSYS_REPORT, PROFILERS

if TYPE_CHECKING:
    from ikit_ops.profilers.capture import Capture
    from ikit_ops.profilers.report import Context

_TOOL_OF = {NSYS_REPORT: "nsys", NCU_REPORT: "ncu"}


def _effects_of(arguments: Mapping[str, Any]) -> Effects:
    """MEASURES for a benchmark of an engine that is listed, EXECUTES for everything else.

    What cannot be read here counts as the stronger: the call then needs the wider scope.
    """
    bench_id = arguments.get("bench_id")
    if arguments.get("command") or not bench_id:
        return EXECUTES
    from ikit_ops.engines import planning  # the engines' room, only for benchmarks

    try:
        record = Store(Settings.from_environment().home).require(str(bench_id), "bench")
    except OpError:
        return EXECUTES
    args = record.get("provenance", "request", "args")
    return planning.effects_of(args) if isinstance(args, Mapping) else EXECUTES


@operation(
    "profile",
    ("profile",),
    "Profile a command, or a benchmark's very configuration: a table of kernels and gaps.",
    [
        Arg("command", "array", "The command's words", default=(), items="string",
            positional=True),
        Arg("bench_id", "string", "Id of a benchmark to run again"),
        Arg("profiler", "string", "Profiler", default="auto", choices=("auto", *PROFILERS)),
        Arg("keep_env", "array", "Names of variables to pass on", default=(), items="string"),
        Arg("steps", "integer", "Decode steps of a benchmark", default=64, minimum=2,
            maximum=10_000),
        Arg("capture", "string", "A benchmark's rounds, or all of it", default="decode",
            choices=("decode", "all")),
        Arg("timeout", "number", "The longest it may run", default=600, minimum=1,
            maximum=86_400, unit="s"),
        Arg("grace", "number", "Time to write the report", default=30, minimum=1,
            maximum=3_600, unit="s"),
        Arg("cwd", "string", "Working folder of the command"),
        Arg("device", "string", "auto, cpu, cuda:0, or a uuid"),
    ],
    effects=Varying(EXECUTES, _effects_of),
    long=True,
    early=lambda arguments, settings: _refuse_early(arguments, settings),
)  # fmt: skip
def profile(
    call: Call,
    command: list[str],
    bench_id: str | None,
    profiler: str,
    keep_env: list[str],
    steps: int,
    capture: str,
    timeout: float,
    grace: float,
    cwd: str | None,
    device: str | None,
) -> EvidenceRecord:
    """A record of kind profile; ``data.kernels`` is the table, artifacts are report and logs.

    Raises:
        OpError: refused, not here, or it left no report.
    """
    from ikit_ops.engines.planning import chosen_devices
    from ikit_ops.profilers import launch, target

    launch.refuse_secrets(call, command)
    devices = chosen_devices(call, device or "auto")
    here = call.devices() if device is None else devices
    if bench_id:
        wanted = target.of_benchmark(call, bench_id, steps=steps, window=capture == "decode")
    else:
        wanted = target.of_command(call, command, cwd, devices, chosen=device is not None)
    return target.carry_out(
        call, wanted, profiler, here, keep_env=keep_env, timeout=timeout, grace=grace
    )


def _refuse_early(arguments: Mapping[str, Any], settings: Settings) -> None:
    """OpError for what is wrong whatever the device."""
    if bool(arguments["command"]) == bool(arguments["bench_id"]):
        raise OpError(
            "give either a command or a bench_id", 'for example command ["python", "run.py"]'
        )
    if arguments["bench_id"]:
        Store(settings.home).require(arguments["bench_id"], "bench")


# --- captures from elsewhere -----------------------------------------------------------


@operation(
    "import_profile",
    ("profile-import",),
    "Read a profiler's output from elsewhere into a record: its table of kernels and gaps.",
    [
        Arg("path", "string", "The profiler's output", required=True, positional=True),
        Arg("format", "string", "Its format", default="auto", choices=("auto", *FORMATS)),
        Arg("bench_id", "string", "Id of the benchmark that it explains"),
    ],
    effects=DERIVES,
    long=True,
)
def import_profile(call: Call, path: str, format: str, bench_id: str | None) -> EvidenceRecord:
    """A record of kind profile; ``valid`` is null when the capture is not whole.

    Raises:
        OpError: the file is no capture, is damaged, or needs a tool that is not here.
    """
    from ikit_ops.profilers import formats, limits, report
    from ikit_ops.profilers.target import propose_rest, require_trust

    source = limits.regular_file(path)
    bench = call.store.require(bench_id, "bench") if bench_id else None
    if bench is not None:
        require_trust(call, bench)
    reading = limits.Reading(
        source, lambda done, total: call.progress(done, total, "reading the capture")
    )
    name = formats.detect(reading) if format == "auto" else format
    capture = _converted(call, reading, name) if name in CONVERTED else formats.read(reading, name)
    digest, size = limits.file_digest(reading)
    context = _context(capture, bench, name)
    context.facts["source"] = {"name": reading.label, "bytes": size, "sha256": digest}
    resolved = {"path": str(source), "format": name if name in FORMATS else capture.format}
    if bench is not None:
        resolved["bench_id"] = bench.evidence_id
    record = call.save(
        report.draft(capture, context),
        artifacts=report.artifacts_of(capture),
        resolved=resolved,
        reply=report.REPLY,
    )
    propose_rest(call, record)
    return record


def _converted(call: Call, reading: Any, name: str) -> Capture:
    """The capture of a report that only its own tool reads."""
    from ikit_ops.profilers import formats, limits, profiler_named

    tool = profiler_named(_TOOL_OF.get(name, "perf"))
    call.progress(0, None, f"converting with {tool.name}")
    made, made_format = tool.convert(call, reading.path, call.folder)
    capture = formats.read(limits.Reading(made, reading.beat), made_format)
    capture.facts["converted_by"] = tool.name
    return capture


def _context(capture: Capture, bench: EvidenceRecord | None, name: str) -> Context:
    """What an imported capture is known by."""
    from ikit_ops.profilers.report import Context
    from ikit_ops.profilers.target import identity_of

    devices = [d for d in capture.devices or () if d.name]
    device = Device(name=one_line(devices[0].name or "")) if devices else None
    context = Context("derived", f"imported {capture.tool or name}", Identity(device=device))
    context.limitations.append("imported: what was profiled, and how, is as the file says")
    if bench is not None:
        known = identity_of(bench.get("identity"))
        context.identity = Identity(
            model=known.model, engine=known.engine, device=device, workload=known.workload
        )
        context.parents.append(bench.evidence_id)
        context.missing.append(
            "configuration: the file does not say what it ran, nothing shows that it was the "
            "benchmark's"
        )
    return context
