"""Have one clip made: in the dialect that the server speaks, and say what became of it.

Three dialects are spoken.  The contract's request as JSON (``/clips``); the form that vLLM-omni
answers with the mp4 itself (``/v1/videos/sync``); and jobs (``/v1/videos``), the only way of
SGLang: create one, ask whether it is done, fetch the content.  A server that does not know
``/v1/videos/sync`` is taken for one of the last kind.  With jobs, the end of a clip is seen when
it is asked for: its latency may be longer than it was, by one pause between two questions.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import OpError
from ikit_ops.clips import client
from ikit_ops.clips.account import Answer, take_headers, take_job
from ikit_ops.clips.client import Line, NoClip

JOBS = "/v1/videos"
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
ENDED = ("failed", "cancelled", "canceled", "deleted", "expired", "error")
UNKNOWN_PATH = (404, 405)
LEAST_PAUSE_S, MOST_PAUSE_S, PAUSE_SHARE = 0.02, 0.5, 0.01


@dataclass
class Dialect:
    """What the server understands: found out as it answers."""

    api: str
    ours: bool = False
    at_once: bool = False
    jobs: bool = False

    def check(self, request: Mapping[str, Any]) -> None:
        """OpError when the dialect has no words for the request."""
        if self.api != "videos":
            return
        if request["noise_seed"] != request["seed"] and not self.ours:
            raise OpError(
                "a request has another noise_seed than seed, and /v1/videos has one seed",
                "leave noise_seed out, or use a server of the clip contract with api clips",
            )
        if request["task"] is not None:
            raise OpError(
                "a request names its task, and /v1/videos has no such field",
                "leave task out, or use a server of the clip contract with api clips",
            )


def make(line: Line, index: int, request: Mapping[str, Any], dialect: Dialect, target: Path
         ) -> Answer:  # fmt: skip
    """Have one clip made and write its mp4; what went wrong is in ``error``.

    Raises:
        OpError: the file cannot be written.
    """
    answer = Answer(index, started_s=time.monotonic())
    try:
        if dialect.jobs or not _at_once(line, request, dialect, target, answer):
            answer.started_s = time.monotonic()
            _as_job(line, request, dialect, target, answer)
    except NoClip as problem:
        answer.error = one_line(str(problem), 200)
    except http.client.IncompleteRead:
        answer.error = "the answer broke off inside of a chunk"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = one_line(f"{type(error).__name__}: {error}", 160)
    if answer.error is not None:
        answer.latency_s = time.monotonic() - answer.started_s
        if line.is_cut:
            answer.error = "no whole answer when the time was up"
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
    return answer


def _at_once(
    line: Line, request: Mapping[str, Any], dialect: Dialect, target: Path, answer: Answer
) -> bool:
    """The answer is the mp4; False when the server does not know that path."""
    body, kind = client.body_of(request, dialect.api)
    with line.request("POST", client.PATHS[dialect.api], body, kind) as response:
        if response.status in UNKNOWN_PATH and dialect.api == "videos" and not dialect.at_once:
            dialect.jobs = True
            return False
        _receive(response, request, target, answer)
        take_headers(answer, response.headers, dialect.ours)
        dialect.at_once = True
    return True


def _receive(
    response: http.client.HTTPResponse, request: Mapping[str, Any], target: Path, answer: Answer
) -> None:
    if response.status != 200:
        raise NoClip(f"HTTP {response.status}: {client.said(client.read_told(response))}")
    answer.sha256, answer.bytes = client.receive(response, target, client.most_bytes(request))
    answer.latency_s = time.monotonic() - answer.started_s


def _as_job(
    line: Line, request: Mapping[str, Any], dialect: Dialect, target: Path, answer: Answer
) -> None:
    """Create a job, ask until it is done, fetch its content."""
    body = json.dumps(client.fields_of(request)).encode("utf-8")
    with line.request("POST", JOBS, body, "application/json") as response:
        if response.status in UNKNOWN_PATH:
            dialect.jobs = False
            told = client.said(client.read_told(response))
            raise NoClip(f"neither {client.PATHS['videos']} nor {JOBS} is served: {told}")
        job = _job(response)
    named = job.get("id")
    if not isinstance(named, str) or not JOB_ID.fullmatch(named):
        raise NoClip("the job that was made has no id")
    path = f"{JOBS}/{urllib.parse.quote(named, safe='')}"
    while (status := job.get("status")) != "completed":
        if status in ENDED or not isinstance(status, str):
            raise NoClip(f"the job ended as {one_line(str(status), 40)}: {_reason(job)}")
        spent = time.monotonic() - answer.started_s
        line.wait(min(MOST_PAUSE_S, max(LEAST_PAUSE_S, PAUSE_SHARE * spent)))
        with line.request("GET", path) as response:
            job = _job(response)
    with line.request("GET", f"{path}/content") as response:
        _receive(response, request, target, answer)
    take_job(answer, job)


def _job(response: http.client.HTTPResponse) -> dict[str, Any]:
    """The record of a job."""
    told = client.read_told(response)
    if response.status not in (200, 201, 202):
        raise NoClip(f"HTTP {response.status}: {client.said(told)}")
    try:
        job = json.loads(told)
    except (ValueError, RecursionError):
        job = None
    if not isinstance(job, dict):
        raise NoClip(f"an answer that is no job: {client.said(told)}")
    return job


def _reason(job: Mapping[str, Any]) -> str:
    error = job.get("error")
    told = error.get("message") if isinstance(error, dict) else error
    return one_line(str(told), 120)
