"""The clip server: an engine whose every clip has its steps on disk before it is answered.

Pipelines are not made for calls side by side (a scheduler holds the state of the clip that it is
in), so requests wait in one queue, first come first served, and one thread makes them with a
scheduler of their own.  A full queue answers 429, a dump that cannot be written 5xx: a clip
without a dump never leaves.

It is run by path in a Python with torch and diffusers, reads its configuration from the file
named by IKIT_CONFIG, and writes its address to the file named there when it listens.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "1"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
SOCKET_SECONDS = 60.0
LOG = logging.getLogger("clips")


def _make_importable() -> None:
    """Load the package this file is in from its folder, without touching sys.path."""
    root = Path(__file__).resolve().parents[2]
    if "ikit_ops" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "ikit_ops", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"no package at {root}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["ikit_ops"] = module
        spec.loader.exec_module(module)


@dataclass
class Job:
    """One request in the queue, and what became of it."""

    request: dict[str, Any]
    arrived: float = field(default_factory=time.perf_counter)
    done: threading.Event = field(default_factory=threading.Event)
    made: Any = None
    queued_ms: float = 0.0
    status: int = 500
    error: str = ""


class Engine:
    """The pipeline, its queue, and the thread that works it off."""

    def __init__(self, config: Mapping[str, Any], load: Any, make: Any) -> None:
        self.config = config
        self.state, self.problem = "loading", ""
        self.failed = threading.Event()
        self.pipe: Any = None
        self._load, self._make = load, make
        self.jobs: queue.Queue[Job] = queue.Queue(maxsize=int(config.get("queue", 8)))
        threading.Thread(target=self._work, name="clips", daemon=True).start()

    def submit(self, request: dict[str, Any]) -> Job:
        """Queue a request; ``queue.Full`` when there is no place."""
        job = Job(request)
        self.jobs.put_nowait(job)
        return job

    def _work(self) -> None:
        try:
            self.pipe = self._load()
            self.state = "ready"
        except Exception as error:
            self.state, self.problem = "failed", f"{type(error).__name__}: {error}"[:400]
            LOG.exception("the model cannot be loaded")
            self.failed.set()
            return
        while True:
            job = self.jobs.get()
            job.queued_ms = (time.perf_counter() - job.arrived) * 1e3
            try:
                job.made = self._make(self.pipe, job.request)
                job.status = 200
            except Exception as error:
                job.status, job.error = status_of(error), f"{type(error).__name__}: {error}"[:400]
                LOG.exception("a clip failed")
            job.done.set()


def status_of(error: BaseException) -> int:
    """507 for a full disk, 500 for anything else that fails."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return 507
        seen = seen.__cause__ or seen.__context__
    return 500


class Handler(BaseHTTPRequestHandler):
    """POST /clips, POST /v1/videos/sync, GET /health, GET /v1/models."""

    engine: Engine
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: prompts are nobody's business."""

    def do_GET(self) -> None:
        """Health, and the model's name."""
        engine = self.engine
        if self.path == "/health":
            dumps = engine.config["dumps"]
            told = {
                "status": engine.state,
                "model": Path(engine.config["model"]).name,
                "dtype": engine.config["dtype"],
                "device": engine.config["device"],
                "dump_dir": dumps,
                "dump_dir_writable": os.access(dumps, os.W_OK),
                "queued": engine.jobs.qsize(),
                "version": VERSION,
                "problem": engine.problem or None,
            }
            self._answer(200 if engine.state == "ready" else 503, told)
        elif self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [
                {"id": Path(engine.config["model"]).name, "object": "model"}]})  # fmt: skip
        else:
            self._answer(404, {"error": "there is /health, /clips and /v1/videos/sync"})

    def do_POST(self) -> None:
        """Make a clip; the answer is its mp4."""
        from ikit_ops.clips.engine import asked, pipelines

        try:
            fields = self._fields()
            if self.path == "/clips":
                request = asked.from_clips(fields)
            elif self.path == "/v1/videos/sync":
                request = asked.from_videos(fields)
            else:
                raise asked.Refused(404, error="there is /clips and /v1/videos/sync")
            if self.engine.state != "ready":
                raise asked.Refused(503, error=self.engine.problem or "the model is loading")
            kind = pipelines.family(self.engine.pipe)
            limits = asked.Limits(**self.engine.config.get("limits", {}))
            request = asked.check(
                request, kind.audio, lambda r: pipelines.size_problems(kind, r), limits
            )
            job = self.engine.submit(request)
        except asked.Refused as refused:
            self._answer(refused.status, refused.told)
            return
        except queue.Full:
            self._answer(429, {"error": "the queue is full"}, {"Retry-After": "5"})
            return
        job.done.wait()
        self._clip(job)

    def _fields(self) -> dict[str, Any]:
        from ikit_ops.clips.engine import asked

        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in LOOPBACK:
            raise asked.Refused(403, error="only loopback names are served")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise asked.Refused(411, error="Content-Length is needed")
        if int(length) > asked.MAX_BODY:
            self.close_connection = True
            raise asked.Refused(413, error=f"the body is larger than {asked.MAX_BODY} bytes")
        body = self.rfile.read(int(length))
        kind = self.headers.get("Content-Type", "application/json")
        if kind.startswith("multipart/form-data"):
            return asked.parse_form(body, kind)
        return asked.parse_json(body)

    def _clip(self, job: Job) -> None:
        if job.made is None:
            self._answer(job.status, {"error": job.error})
            return
        made, total = job.made, (time.perf_counter() - job.arrived) * 1e3
        stages = {"queue": job.queued_ms, **made.stages}
        stages["other"] = max(0.0, total - sum(stages.values()))
        rounded = {name: round(value, 3) for name, value in stages.items()}
        headers = {
            "X-Request-Id": uuid.uuid4().hex,
            "X-Model": Path(self.engine.config["model"]).name,
            "X-Video-Sha256": made.sha256,
            "X-Inference-Time-S": f"{(total - job.queued_ms) / 1e3:.6f}",
            "X-Server-Time-S": f"{total / 1e3:.6f}",
            "X-Stage-Durations": json.dumps(rounded),
            "X-Step-Durations": json.dumps([round(value, 3) for value in made.steps_ms[:500]]),
        }
        if made.peak_bytes is not None:  # not every platform says it
            headers["X-Peak-Memory-MB"] = f"{made.peak_bytes / 1e6:.1f}"
        self._send(200, "video/mp4", made.mp4, headers)

    def _answer(
        self, status: int, told: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(status, "application/json", json.dumps(told).encode("utf-8"), headers or {})

    def _send(self, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True  # the client went away; its clip's dump stays


class Server(ThreadingHTTPServer):
    """Threads wait for their clip; they end with the process."""

    daemon_threads = True
    engine: Engine


def serve(config: Mapping[str, Any]) -> Server:
    """A listening server and its engine, which loads in the background."""
    import torch

    from ikit_ops.clips.engine import clipmaker, pipelines

    torch.set_num_threads(max(1, int(config.get("threads") or 1)))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config["dtype"]]
    recipe = config.get("recipe") or {}
    metadata = {}
    if config.get("recipe_sha256"):
        metadata = {"recipe": json.dumps(recipe), "recipe_sha256": config["recipe_sha256"]}
    dumps = Path(config["dumps"])

    def load() -> Any:
        return pipelines.load(Path(config["model"]), dtype, config["device"])

    def make(pipe: Any, request: dict[str, Any]) -> Any:
        return clipmaker.make(pipe, request, dumps, recipe, metadata)

    handler = type("ClipHandler", (Handler,), {})
    server = Server(("127.0.0.1", int(config.get("port", 0))), handler)
    handler.engine = server.engine = Engine(config, load, make)  # type: ignore[attr-defined]
    return server


def main() -> None:
    """Serve until the process is ended."""
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    _make_importable()
    logging.basicConfig(level=logging.WARNING)
    config = json.loads(Path(os.environ["IKIT_CONFIG"]).read_text(encoding="utf-8"))
    server = serve(config)
    address = Path(config["address"])
    partial = address.with_suffix(".partial")
    partial.write_text(f"http://127.0.0.1:{server.server_address[1]}", encoding="utf-8")
    partial.replace(address)
    threading.Thread(target=_end_when_failed, args=(server,), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
        return
    raise SystemExit(f"the model cannot be loaded: {server.engine.problem}")


def _end_when_failed(server: Server) -> None:
    """A server without a model is of no use to anybody who waits for it."""
    server.engine.failed.wait()
    server.shutdown()


if __name__ == "__main__":
    main()
