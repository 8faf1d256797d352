"""Benchmark a video engine by the clips that it serves, and leave them ready to be checked.

The unit is a clip: a request goes out, an mp4 comes back.  The first ones are warm-up (compilers
and autotuners work there) and are told apart.  Every timed request has a prompt and a seed of its
own, since an engine that caches results would otherwise be timed at its cache; one of them is
sent again at the end, to see whether it does.  Nothing is checked while the clock runs: the mp4
files and a manifest are left for ``clip_steps``, which draws what it looks at afterwards.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.evidence.record import (
    Device,
    Draft,
    Engine,
    EvidenceRecord,
    Gates,
    Identity,
    Metric,
    Model,
    metric,
)
from ikit_mcp.registry import MEASURES, Arg, OpError, operation
from ikit_ops.clips import client, manifest
from ikit_ops.clips.client import Answer, Server
from ikit_ops.clips.recorder import dump_path, request_of

DEFAULT = {"task": None, "width": 768, "height": 512, "num_frames": 121, "fps": 24, "steps": 30,
           "guidance_scale": 3.0, "audio": None}  # fmt: skip
SUBJECTS = (
    "a red kite over the sea", "a train in the snow", "rain on a window", "a market at dawn",
    "two dogs on a beach", "a candle in the dark", "clouds over a field", "a clock tower",
)  # fmt: skip
STAGE_SHARE = 0.97
CACHED, HINT = 0.5, 0.9
RESERVE_BYTES = 256 << 20


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
        Arg("api", "string", "/clips, or /v1/videos/sync", default="clips",
            choices=("clips", "videos")),
        Arg("dumps", "string", "The engine's CLIP_STEP_DUMP_DIR"),
        Arg("out", "string", "New folder for the clips and clips.jsonl", required=True),
        Arg("seed", "integer", "Of prompts and noise", default=0, minimum=0, maximum=2**31),
        Arg("timeout", "number", "Longest time in all", default=3600, minimum=1, unit="s"),
    ],
    effects=MEASURES,
    long=True,
    open_world=True,
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
        OpError: nobody answers, no clip was made, or the dumps would fill the disk.
    """
    server = Server.of(url)
    folder = Path(out).expanduser().absolute()
    dump_folder = None if dumps is None else Path(dumps).expanduser().absolute()
    if dump_folder is not None and not dump_folder.is_dir():
        raise OpError(f"dumps {one_line(str(dumps))} is no directory", "name the engine's")
    given = _read_requests(requests)
    told = client.health(server)
    _make_folder(folder)
    run = _Run(call, server, api, folder, dump_folder, timeout)
    run.told = told
    whole = make_requests(given, warmup + count, seed)
    run.warm_up(whole[:warmup])
    run.check_disk(len(whole) - warmup + 1)
    run.time(whole[warmup:], concurrency)
    run.probe()
    run.write_manifest()
    resolved: dict[str, Any] = {"out": str(folder)}
    resolved |= {"dumps": str(dump_folder)} if dump_folder is not None else {}
    if requests is not None:
        resolved["requests"] = str(Path(requests).expanduser().absolute())
    record = call.save(run.draft(concurrency), resolved=resolved,
                       reply=("stages_ms", "manifest", "repeat"))  # fmt: skip
    if dump_folder is not None and one_line(str(folder)) == str(folder):
        call.propose(
            "clip_steps",
            {"manifest": str(folder / "clips.jsonl"), "dumps": str(dump_folder)},
            "check the steps of clips drawn at random; give reference to replay them",
        )
    return record


def _read_requests(path: str | None) -> list[dict[str, Any]]:
    """The requests of a JSON-lines file; OpError names the line that is none."""
    if path is None:
        return []
    data = manifest.read_small(Path(path).expanduser(), manifest.MAX_MANIFEST_BYTES, "requests")
    found = []
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
            raise OpError(
                f"line {number} of requests is no request: {one_line(line, 80)}",
                'each line is {"prompt": …, "width": …, "height": …, "num_frames": …, …}',
            )
        found.append(fields)
    if not found:
        raise OpError("requests holds no request", "one JSON object a line")
    return found


def make_requests(given: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` requests, no two with the same prompt and seed: the given ones, or made-up ones.

    When there are fewer than ``count``, they are taken again with another prompt and seed.
    """
    made = []
    for number in range(count):
        if given:
            fields, again = dict(given[number % len(given)]), number // len(given)
            if again:
                fields["prompt"] = f"{fields['prompt']}, take {again + 1}"
                fields["seed"] = int(fields.get("seed") or 0) + again * len(given)
                fields.pop("noise_seed", None)
        else:
            subject = SUBJECTS[number % len(SUBJECTS)]
            fields = {"prompt": f"{subject}, take {number // len(SUBJECTS) + 1} of run {seed}"}
        fields.setdefault("seed", seed * 100_003 + number)
        made.append(request_of({**DEFAULT, **fields}))
    return made


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise OpError(
            f"out {one_line(str(folder))} cannot be made: {error.strerror}", "name a new folder"
        ) from None
    if taken:
        raise OpError(f"out {one_line(str(folder))} is not empty", "name a new folder")


@dataclass
class _Run:
    """One benchmark under way."""

    call: Call
    server: Server
    api: str
    folder: Path
    dumps: Path | None
    timeout: float
    told: dict[str, Any] = field(default_factory=dict)
    warm: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    repeat: Answer | None = None
    repeated: int = 0
    wall_s: float = 0.0
    dump_bytes: int | None = None
    free_bytes: int | None = None
    started: float = field(default_factory=time.monotonic)

    # --- what is done, in order --------------------------------------------------------

    def warm_up(self, requests: Sequence[dict[str, Any]]) -> None:
        """The first clips; their latencies are told apart."""
        self.warm = self._many(requests, 1, "warm", "warm-up")
        failed = next((answer for answer in self.warm if answer.error), None)
        if failed is not None:
            raise OpError(
                f"the warm-up clip failed: {failed.error}", "see what the server says, and its log"
            )

    def check_disk(self, remaining: int) -> None:
        """Refuse before the clock runs when the dumps to come would fill the disk."""
        if self.dumps is None:
            return
        self.free_bytes = shutil.disk_usage(self.dumps).free
        sizes = [size for answer in self.warm if (size := self._dump_size(answer)) is not None]
        if not sizes:
            return
        self.dump_bytes = max(sizes)
        needed = self.dump_bytes * remaining
        self.call.progress(
            0, None, f"{needed / 1e9:.2f} GB of dumps to come, {self.free_bytes / 1e9:.1f} GB free"
        )
        if needed + RESERVE_BYTES > self.free_bytes:
            raise OpError(
                f"{remaining} dumps of {self.dump_bytes / 1e9:.3f} GB need {needed / 1e9:.1f} GB,"
                f" {self.free_bytes / 1e9:.1f} GB are free in {one_line(str(self.dumps))}",
                "make room, or ask for a smaller count",
            )

    def time(self, requests: Sequence[dict[str, Any]], concurrency: int) -> None:
        """The timed clips."""
        self.requests = list(requests)
        started = time.monotonic()
        self.answers = self._many(requests, concurrency, "clip", "clip")
        self.wall_s = time.monotonic() - started
        if all(answer.error for answer in self.answers):
            raise OpError(f"no clip was made: {self.answers[0].error}", "see what the server says")

    def probe(self) -> None:
        """The last good request once more: an engine that caches results answers at once."""
        last = max(n for n, answer in enumerate(self.answers) if answer.error is None)
        (self.repeat,) = self._many([self.requests[last]], 1, "repeat", "repeated request")
        self.repeated = last

    def write_manifest(self) -> None:
        """``clips.jsonl``: one made clip a line."""
        lines = [
            json.dumps({"video": str(self._path("clip", answer.index)), "request": request})
            for answer, request in zip(self.answers, self.requests, strict=True)
            if answer.error is None
        ]
        text = "".join(line + "\n" for line in lines)
        (self.folder / "clips.jsonl").write_text(text, encoding="utf-8")

    def _path(self, kind: str, index: int) -> Path:
        return self.folder / f"{kind}-{index:04d}.mp4"

    def _dump_size(self, answer: Answer) -> int | None:
        if self.dumps is None or answer.sha256 is None:
            return None
        try:
            return dump_path(self.dumps, answer.sha256).stat().st_size
        except OSError:
            return None

    def _many(
        self, requests: Sequence[dict[str, Any]], concurrency: int, kind: str, what: str
    ) -> list[Answer]:
        """Send requests, some at a time; the answers in the requests' order."""
        todo: SimpleQueue[int] = SimpleQueue()
        for index in range(len(requests)):
            todo.put(index)
        answers: list[Answer | None] = [None] * len(requests)
        open_now: dict[int, http.client.HTTPConnection] = {}
        ready = threading.Event()

        def work(lane: int) -> None:
            while True:
                try:
                    index = todo.get_nowait()
                except Empty:
                    break
                connection = self.server.connect(self._left())
                open_now[lane] = connection
                target = self._path(kind, index)
                answers[index] = client.ask(
                    self.server, connection, index, requests[index], self.api, target
                )
                connection.close()
                ready.set()

        lanes = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(concurrency)]
        for lane in lanes:
            lane.start()
        try:
            while any(lane.is_alive() for lane in lanes):
                ready.wait(1.0)
                ready.clear()
                done = sum(answer is not None for answer in answers)
                self.call.progress(done, len(requests), f"{what} {done} of {len(requests)}")
        finally:
            while not todo.empty():  # cancelled: no lane may start another
                with contextlib.suppress(Empty):
                    todo.get_nowait()
            for connection in list(open_now.values()):
                connection.close()
        return [answer for answer in answers if answer is not None]

    def _left(self) -> float:
        """Seconds that are left of the timeout; at least one, so that the socket says it."""
        return max(1.0, self.timeout - (time.monotonic() - self.started))

    # --- what it comes to --------------------------------------------------------------

    def draft(self, concurrency: int) -> Draft:
        """The record's content."""
        good = [answer for answer in self.answers if answer.error is None]
        violations, warnings, missing = self._gates(good)
        latency = statistics.median(answer.latency_s for answer in good)
        request = self.requests[0]
        sizes = ("width", "height", "num_frames", "fps", "steps")
        workload = {name: request[name] for name in sizes}
        workload |= {"concurrency": concurrency, "clips": len(good)}
        prefix = f"INVALID: {one_line(violations[0], 160)}. " if violations else ""
        steps = _per_step(good, self.requests)
        return Draft(
            kind="clip-bench",
            claim_class="measured",
            valid=not violations,
            summary=(
                f"{prefix}{len(good)} clips of {request['width']}x{request['height']},"
                f" {request['num_frames']} frames, {request['steps']} steps: {latency:.3f} s each"
                f" (median){'' if steps is None else f', {steps:.4f} s/step'}"
            ),
            identity=self._identity(good, workload),
            metrics=self._metrics(good),
            gates=Gates(
                checked=["requests", "stages", "result_cache", "dumps"],
                violations=violations, warnings=warnings,
            ),
            missing=missing,
            limitations=[
                "stages and memory are the server's own account; latency is the client's",
                "the clips were not checked: clip_steps tells whether their steps are right",
            ],
            data={
                "api": self.api,
                "manifest": str(self.folder / "clips.jsonl"),
                "requests": [_row(a, r) for a, r in zip(self.answers, self.requests, strict=True)],
                "warmup": [asdict(answer) for answer in self.warm],
                "stages_ms": _stages(good),
                "repeat": None if self.repeat is None else self._repeat_told(),
                "dump_bytes": self.dump_bytes,
                "free_bytes_before": self.free_bytes,
                "dump_bytes_projected": None if self.dump_bytes is None
                else self.dump_bytes * (len(self.requests) + 1),
                "server": {name: _plain(self.told.get(name)) for name in
                           ("model", "dtype", "device", "version", "dump_dir_writable")},
            },
        )  # fmt: skip

    def _identity(self, good: Sequence[Answer], workload: dict[str, Any]) -> Identity:
        model = good[0].model or self.told.get("model")
        local = self.told.get("device") == "cpu" and self.server.host in ("127.0.0.1", "localhost")
        device = self.call.devices()[-1] if local else None
        ours = "dump_dir_writable" in self.told
        return Identity(
            model=Model(id=one_line(str(model), 120), dtype=_text(self.told.get("dtype")))
            if model else None,
            engine=Engine(name="ikit-clips", version=_text(self.told.get("version")))
            if ours else None,
            device=Device(name=one_line(device.name), uuid=device.uuid) if device else None,
            workload=workload,
        )  # fmt: skip

    def _gates(self, good: Sequence[Answer]) -> tuple[list[str], list[str], list[str]]:
        violations: list[str] = []
        warnings: list[str] = []
        missing: list[str] = []
        failed = [answer for answer in self.answers if answer.error]
        if failed:
            violations.append(f"{len(failed)} requests failed: {failed[0].error}")
        shares = [share for answer in good if (share := _share(answer)) is not None]
        if not shares:
            missing.append("stages (the server does not tell them)")
        elif min(shares) < STAGE_SHARE:
            warnings.append(f"stages explain only {100 * min(shares):.1f} % of the server's time")
        self._cache_gate(good, violations, warnings)
        if self.dumps is None:
            missing.append("step dumps (dumps was not given)")
        else:
            without = [a.index for a in good if self._dump_size(a) is None]
            if without:
                violations.append(f"{len(without)} of {len(good)} clips left no step dump")
        if len({a.sha256 for a in good}) < len(good):
            violations.append("different requests were answered with the same mp4")
        if not self.warm:
            warnings.append("no warm-up: the first clip pays for compiling and tuning")
        return violations, warnings, missing

    def _cache_gate(
        self, good: Sequence[Answer], violations: list[str], warnings: list[str]
    ) -> None:
        """Whether the repeated request came back faster than it was made."""
        if self.repeat is None or self.repeat.error:
            warnings.append("the repeated request failed: result caches were not looked for")
            return
        usual = statistics.median(answer.latency_s for answer in good)
        ratio = self.repeat.latency_s / usual if usual else 1.0
        told = f"a repeated request took {100 * ratio:.0f} % of the time"
        before, after = good[-1].stages_ms.get("denoise"), self.repeat.stages_ms.get("denoise")
        skipped = before is not None and (after or 0.0) < 0.1 * before
        if ratio < CACHED or skipped:
            violations.append(f"result_cache: {told}")
        elif ratio < HINT:
            warnings.append(told)

    def _repeat_told(self) -> dict[str, Any]:
        told = self.repeat or Answer(0)
        same = told.sha256 is not None and told.sha256 == self.answers[self.repeated].sha256
        return {"latency_s": told.latency_s, "same_mp4": same, "error": told.error}

    def _metrics(self, good: Sequence[Answer]) -> list[Metric]:
        latencies = [answer.latency_s for answer in good]
        rates = [
            float(self.requests[a.index]["num_frames"]) / float(self.requests[a.index]["fps"])
            / a.latency_s for a in good
        ]  # fmt: skip
        server = [answer.server_time_s for answer in good]
        peaks = [answer.peak_bytes for answer in good if answer.peak_bytes is not None]
        known = [value for value in server if value is not None]
        typical = statistics.median(known) if known else None
        metrics = [
            metric("latency_s", statistics.median(latencies), "s", "median", latencies),
            metric("latency_max_s", max(latencies), "s", "max"),
            metric("server_time_s", typical, "s", "median", server),
            metric("s_per_step", _per_step(good, self.requests), "s", "median"),
            metric("times_real_time", statistics.median(rates), "x", "median", rates),
            metric("clips_per_s", len(good) / self.wall_s if self.wall_s else None, "1/s", "mean"),
            metric("peak_memory_bytes", max(peaks, default=None), "B", "max"),
            metric("stage_share", min((s for a in good if (s := _share(a)) is not None),
                                      default=None), "1", "min"),
        ]  # fmt: skip
        for name, value in _stages(good).items():
            metrics.append(metric(f"stage_{name}_ms", value, "ms", "median"))
        return metrics


def _share(answer: Answer) -> float | None:
    """The part of the server's time that named stages explain; None where it tells none."""
    if not answer.stages_ms or not answer.server_time_s:
        return None
    named = sum(value for name, value in answer.stages_ms.items() if name != "other")
    return min(1.0, named / (answer.server_time_s * 1e3))


def _stages(good: Sequence[Answer]) -> dict[str, float]:
    """The median of each stage in ms, of those that every clip tells."""
    names = [n for n in good[0].stages_ms if all(n in answer.stages_ms for answer in good)]
    return {n: statistics.median(answer.stages_ms[n] for answer in good) for n in names}


def _per_step(good: Sequence[Answer], requests: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of denoising for a step; None where the server does not tell its stages."""
    values = [
        answer.stages_ms["denoise"] / 1e3 / requests[answer.index]["steps"]
        for answer in good
        if "denoise" in answer.stages_ms
    ]
    return statistics.median(values) if values else None


def _row(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    told = asdict(answer)
    told["request"] = {**request, "prompt": one_line(str(request["prompt"]))}
    return told


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, type(None))) else one_line(str(value), 120)


def _text(value: Any) -> str | None:
    return None if value is None else one_line(str(value), 60)
