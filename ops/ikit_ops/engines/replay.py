"""The very run that a benchmark made, prepared to be made again, for a profiler.

A profile explains a benchmark only if it is of the same configuration.  So the stored
request, which pins engine, model, device and threads, becomes a plan once more, with a new
nonce (a prompt that was seen before could hit a cache), one round of ``steps`` tokens, and
the order to the worker to open a profiler's capture range when it has warmed up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Adapter, Found, Plan
from ikit_ops.engines.planning import make_plan

RESULT, CONFIG, PROGRESS = "result.json", "config.json", "progress.json"


@dataclass(frozen=True)
class Replay:
    """A worker that is ready to be started: its command, and what it needs beside its own.

    ``environment`` holds what the engine is given beside the caller's own choice of variables.
    ``result`` is where it writes (``engines.result.read``), ``progress`` where it tells its
    phase.  Worker results of a profiled run carry ``captured``: whether the range was opened.
    """

    adapter: Adapter
    plan: Plan
    argv: list[str]
    environment: dict[str, str]
    result: Path
    progress: Path


def replay(
    call: Call, record: EvidenceRecord, folder: Path, *, steps: int = 64, capture: bool = True
) -> Replay:
    """Prepare the run of a benchmark's record in a private folder.

    ``capture`` False runs the rounds without a range: everything is profiled, loading too.
    OpError for a benchmark of a server or a command, which is not ours to start.
    """
    args = record.get("provenance", "request", "args")
    if record.kind != "bench" or not isinstance(args, Mapping):
        raise OpError(f"evidence {record.evidence_id[:12]} is no benchmark", "give a bench record")
    adapter, plan = make_plan(call, _as_asked(call, record, args))
    if not adapter.worker or plan.url is not None:
        raise OpError(
            f"a benchmark with engine={adapter.name} cannot be run again under a profiler",
            "profile the server's or the engine's own command instead",
        )
    plan = replace(plan, gen_len=steps, rounds=1, warmup=max(1, plan.warmup), keep_going=False)
    found = adapter.find(call, plan)
    argv, environment = prepare(adapter, plan, found, folder, capture=capture)
    return Replay(adapter, plan, argv, environment, folder / RESULT, folder / PROGRESS)


def _as_asked(call: Call, record: EvidenceRecord, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """The pinned arguments, with the device left to the engine again where the caller left it.

    An engine that is told its device gets other arguments, and is another configuration.
    """
    requested = record.get("provenance", "request", "requested")
    left = isinstance(requested, Mapping) and requested.get("device", "") in (None, "auto")
    if left and args.get("device") == call.devices()[0].id:
        return {**args, "device": "auto"}
    return args


def prepare(
    adapter: Adapter, plan: Plan, found: Found, folder: Path, *, capture: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Write the worker's configuration; its command line, and the variables it is given."""
    config = adapter.config(plan, found) | {
        "result_path": str(folder / RESULT),
        "progress_path": str(folder / PROGRESS),
        "capture": capture,
    }
    path = folder / CONFIG
    path.touch(mode=0o600)
    path.write_text(json.dumps(config), encoding="utf-8")
    environment = adapter.environment(plan) | {
        "IKIT_CONFIG": str(path),
        "IKIT_RESULT_PATH": str(folder / RESULT),
    }
    return adapter.command(plan, found, path), environment
