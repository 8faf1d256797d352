"""Ask a clip server for clips, over plain HTTP, and keep what it said beside how long it took.

Two dialects: the contract's request as JSON (``/clips``), and the form that vLLM-omni and SGLang
take (``/v1/videos/sync``).  The mp4 goes to its file as it comes and is hashed on the way.  What
servers say about themselves (stages, memory) is kept as what it is: their own account.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import ssl
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import OpError

MAX_CLIP_BYTES = 4 << 30
MAX_TOLD = 64 << 10
PATHS = {"clips": "/clips", "videos": "/v1/videos/sync"}


@dataclass
class Answer:
    """One request's answer: ``error`` is None when an mp4 came.  Times in seconds."""

    index: int
    latency_s: float = 0.0
    started_s: float = 0.0
    error: str | None = None
    sha256: str | None = None
    bytes: int = 0
    server_time_s: float | None = None
    stages_ms: dict[str, float] = field(default_factory=dict)
    steps_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    model: str | None = None


@dataclass(frozen=True)
class Server:
    """Where the server is."""

    scheme: str
    host: str
    port: int
    base: str

    @classmethod
    def of(cls, url: str) -> Server:
        """The server of a URL; OpError when it is none, or carries a user's name or a query."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        except ValueError:
            parts, port = urllib.parse.SplitResult("", "", "", "", ""), 0
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise OpError(
                f"url {one_line(url, 80)!r} is no address of a clip server",
                "give http://HOST:PORT, as `ikit clips serve` prints it",
            )
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that was not opened yet."""
        if self.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout,
                                               context=context)  # fmt: skip
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)


def health(server: Server) -> dict[str, Any]:
    """What ``/health`` says; empty where it says nothing that is JSON.  OpError: nobody there."""
    connection = server.connect(10.0)
    try:
        connection.request("GET", server.base + "/health")
        response = connection.getresponse()
        told = json.loads(response.read(MAX_TOLD) or b"null")
    except ValueError:
        return {}
    except (OSError, http.client.HTTPException) as error:
        raise OpError(
            f"no clip server answers at {server.host}:{server.port}: {one_line(str(error), 120)}",
            "start one (`ikit clips serve`), and give its url",
        ) from None
    finally:
        connection.close()
    return told if isinstance(told, dict) else {}


def body_of(request: Mapping[str, Any], api: str) -> tuple[bytes, str]:
    """The body of a request and its content type, in the dialect."""
    if api == "clips":
        return json.dumps(request).encode("utf-8"), "application/json"
    fields = {
        "prompt": request["prompt"],
        "size": f"{request['width']}x{request['height']}",
        "num_frames": request["num_frames"],
        "fps": request["fps"],
        "num_inference_steps": request["steps"],
        "guidance_scale": request["guidance_scale"],
        "seed": request["noise_seed"],
    }
    mark = f"ikit{uuid.uuid4().hex}"
    lines = []
    for name, value in fields.items():
        lines += [f"--{mark}", f'Content-Disposition: form-data; name="{name}"', "", str(value)]
    text = "\r\n".join([*lines, f"--{mark}--", ""])
    return text.encode("utf-8"), f"multipart/form-data; boundary={mark}"


def ask(
    server: Server, connection: http.client.HTTPConnection, index: int,
    request: Mapping[str, Any], api: str, target: Path,
) -> Answer:  # fmt: skip
    """Send one request and write its mp4; what went wrong is in ``error``."""
    answer = Answer(index)
    body, kind = body_of(request, api)
    answer.started_s = time.monotonic()
    try:
        connection.request("POST", server.base + PATHS[api], body, {"Content-Type": kind})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {_said(response.read(MAX_TOLD))}"
        else:
            _receive(response, target, answer)
        answer.latency_s = time.monotonic() - answer.started_s
        if answer.error is None:
            _headers(response, answer)
    except (OSError, http.client.HTTPException) as error:
        answer.latency_s = time.monotonic() - answer.started_s
        answer.error = one_line(f"{type(error).__name__}: {error}", 160)
    return answer


def _said(data: bytes) -> str:
    try:
        told = json.loads(data)
        text = told.get("error") or told.get("detail") or told
    except (ValueError, AttributeError):
        text = data.decode("utf-8", "replace")
    return one_line(str(text), 160)


def _receive(response: http.client.HTTPResponse, target: Path, answer: Answer) -> None:
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while block := response.read(1 << 20):
            answer.bytes += len(block)
            if answer.bytes > MAX_CLIP_BYTES:
                answer.error = "the answer is larger than any clip"
                return
            digest.update(block)
            file.write(block)
    if not answer.bytes:
        answer.error = "an empty answer"
        return
    answer.sha256 = digest.hexdigest()


def _headers(response: http.client.HTTPResponse, answer: Answer) -> None:
    """What the server says about the clip, where it is numbers."""
    stages = _json(response.getheader("X-Stage-Durations"))
    if isinstance(stages, dict):
        for name, told in list(stages.items())[:20]:
            if (value := _positive(told)) is not None:
                answer.stages_ms[one_line(name, 40)] = value
    steps = _json(response.getheader("X-Step-Durations"))
    if isinstance(steps, list):
        answer.steps_ms = [v for each in steps[:1000] if (v := _positive(each)) is not None]
    server = response.getheader("X-Server-Time-S") or response.getheader("X-Inference-Time-S")
    answer.server_time_s = _positive(server)
    peak = _positive(response.getheader("X-Peak-Memory-MB"))
    answer.peak_bytes = None if peak is None else round(peak * 1e6)
    model = response.getheader("X-Model")
    answer.model = None if model is None else one_line(model, 120)
    named = response.getheader("X-Video-Sha256")
    if named is not None and named != answer.sha256:
        answer.error = "the answer's sha256 is not the one that the server names"


def _json(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except (ValueError, RecursionError):
        return None


def _positive(value: Any) -> float | None:
    """A finite number from 0 on, perhaps as text; else None."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number >= 0 else None
