"""A request to run something, checked once, and what the machinery saw of its end.

The supervised way (``supervised.py``) and the one for other systems (``portable.py``) take
the same request and give the same ending, so that ``run`` does not know which one it was.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ikit_mcp.process.environment import benchmark_environment
from ikit_mcp.registry import OpError

PathLike = str | os.PathLike[str]

MARKER_VARIABLE = "IKIT_RUNS"
"""The environment variable that holds the ids of the runs a process belongs to, outermost first."""


@dataclass(frozen=True)
class Request:
    """A checked request; ``path`` is the program's file, ``env`` complete and marked.

    ``gentle`` says how the run is asked to end before it is killed: ``group`` (SIGINT to the
    leader's process group), ``leader`` (SIGTERM to it alone), or None, not at all.
    """

    argv: tuple[str, ...]
    path: str
    env: dict[str, str]
    cwd: str | None
    timeout: float
    grace: float
    gentle: str | None
    byte_cap: int | None
    memory_limit: int | None
    hold_fds: tuple[int, ...]
    pass_fds: tuple[int, ...]
    cancel: threading.Event | None
    on_start: Callable[[int], None] | None
    marker: str
    nested: bool


@dataclass
class Ending:
    """What the machinery saw of the end of a run; ``Result`` adds the outputs."""

    returncode: int | None = None
    reason: str = ""
    killed: bool = False
    lost: bool = False
    seconds: float = 0.0
    max_rss_bytes: int | None = None
    leftovers: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()


def checked_request(
    *,
    argv: Sequence[PathLike],
    env: Mapping[str, str] | None,
    cwd: PathLike | None,
    timeout: float,
    grace: float,
    **rest: Any,
) -> Request:
    """The request, its program found, its environment marked; OpError says what is wrong."""
    words = tuple(os.fspath(word) for word in argv)
    if not words or not words[0]:
        raise OpError("there is no program to run", "give a command")
    environment = dict(benchmark_environment() if env is None else env)
    marker = uuid.uuid4().hex
    outer = os.environ.get(MARKER_VARIABLE)
    environment[MARKER_VARIABLE] = f"{outer}:{marker}" if outer else marker
    for text in (*words, *environment, *environment.values()):
        if "\0" in text:
            raise OpError("an argument or a variable holds a NUL character", "leave it out")
    if not timeout > 0 or not (grace >= 0 and math.isfinite(grace)):
        raise OpError(f"timeout {timeout} or grace {grace} is not a time", "give positive seconds")
    return Request(
        argv=words,
        path=_find_program(words[0], environment),
        env=environment,
        cwd=None if cwd is None else os.fspath(cwd),
        timeout=timeout,
        grace=grace,
        marker=marker,
        nested=outer is not None,
        **rest,
    )


def _find_program(name: str, env: Mapping[str, str]) -> str:
    """Where the program is, by the PATH that it will see itself."""
    if os.path.dirname(name):  # noqa: PTH120 - "./x" must stay "./x": Path would drop the dot
        return name
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        raise OpError(f"there is no program {name!r} on PATH", "install it, or give its full path")
    return found


def start_failure(request: Request, stage: str, errno: int) -> OpError:
    """What to tell when the program could not be started."""
    reason = os.strerror(errno)
    if stage == "cwd":
        return OpError(
            f"cannot run in the folder {request.cwd}: {reason}", "give a folder that exists"
        )
    return OpError(
        f"cannot start {request.argv[0]!r}: {reason}",
        "check that the file, and the interpreter its first line names, exist and may be executed",
    )
