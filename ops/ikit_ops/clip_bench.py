"""Benchmark a video engine by the clips that it serves, and leave them ready to be checked.

The unit is a clip: a request goes out, an mp4 comes back.  The first ones are warm-up (compilers
and autotuners work there) and are told apart.  Every timed request has a prompt and a seed of its
own, since an engine that caches results would otherwise be timed at its cache; afterwards a few
fresh ones are sent twice, to see whether it does.  Nothing is checked while the clock runs: the
mp4 files and a manifest are left for ``clip_steps``, which draws what it looks at afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, expanded, one_line
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import MEASURES, Arg, OpError, operation


@operation(
    "bench_clips",
    ("clips", "bench"),
    "Benchmark a video engine's clip server: latency by stage, s/step, and clips to be checked.",
    [
        Arg("url", "string", "Server, such as http://127.0.0.1:8000", required=True),
        Arg("requests", "string", "JSON lines of requests (default: made up)"),
        Arg("count", "integer", "Timed clips", default=8, minimum=1, maximum=10_000),
        Arg("warmup", "integer", "Clips before the clock runs", default=1, minimum=0, maximum=100),
        Arg("concurrency", "integer", "Requests at a time", default=1, minimum=1, maximum=64),
        Arg("api", "string", "/clips, or /v1/videos (sync, or jobs)", default="clips",
            choices=("clips", "videos")),
        Arg("dumps", "string", "The engine's CLIP_STEP_DUMP_DIR"),
        Arg("out", "string", "New folder for the clips and clips.jsonl", required=True),
        Arg("seed", "integer", "Of prompts and noise", default=0, minimum=0, maximum=2**31),
        Arg("timeout", "number", "Longest time in all", default=3600, minimum=1, unit="s"),
    ],
    effects=MEASURES,
    long=True,
    open_world=True,
    early=lambda arguments, settings: _refuse_early(arguments),
)  # fmt: skip
def bench_clips(
    call: Call,
    url: str,
    requests: str | None,
    count: int,
    warmup: int,
    concurrency: int,
    api: str,
    dumps: str | None,
    out: str,
    seed: int,
    timeout: float,
) -> EvidenceRecord:
    """A record of kind clip-bench; latencies in s, stages in ms, as the server tells them.

    Raises:
        OpError: nobody answers, no clip was made, a request is none, or a disk would be filled.
    """
    # The rooms of clips are many, and no other command needs them: they come with the call.
    from ikit_ops.clips import benchmark, benchreport
    from ikit_ops.clips.asking import read_requests
    from ikit_ops.clips.client import Server

    server, given = Server.of(url), read_requests(requests)
    folder, dump_folder = expanded(out), _dump_folder(dumps)
    with benchmark.Folder(folder) as made:
        run = benchmark.begin(
            call, server, made, given, dump_folder,
            warmup=warmup, count=count, seed=seed, api=api, timeout=timeout,
        )  # fmt: skip
        run.warm_up()
        run.time(concurrency)
        run.probe()
        listed = run.write_manifest()
        resolved: dict[str, Any] = {"out": str(folder)}
        resolved |= {"dumps": str(dump_folder)} if dump_folder is not None else {}
        if requests is not None:
            resolved["requests"] = str(expanded(requests))
        record = call.save(benchreport.draft_of(run, concurrency), resolved=resolved,
                           reply=("stages_ms", "manifest", "repeat"))  # fmt: skip
        made.keep()
    if dump_folder is not None and one_line(str(folder)) == str(folder):
        call.propose(
            "clip_steps",
            {"manifest": str(listed), "dumps": str(dump_folder)},
            "check the steps of clips drawn at random; give reference to replay them",
        )
    return record


def _refuse_early(arguments: Mapping[str, Any]) -> None:
    """OpError for what is wrong whether or not the device is free."""
    from ikit_ops.clips import benchmark
    from ikit_ops.clips.asking import read_requests
    from ikit_ops.clips.client import Server

    Server.of(arguments["url"])
    read_requests(arguments["requests"])
    _dump_folder(arguments["dumps"])
    benchmark.refuse_taken(expanded(arguments["out"]))


def _dump_folder(dumps: str | None) -> Path | None:
    """The engine's folder of dumps, when it was named; OpError when it is none."""
    folder = None if dumps is None else expanded(dumps)
    if folder is not None and not folder.is_dir():
        raise OpError(f"dumps {one_line(str(dumps))} is no directory", "name the engine's")
    return folder
