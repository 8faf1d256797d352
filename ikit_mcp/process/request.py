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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ikit_mcp.process.environment import benchmark_environment
from ikit_mcp.registry import OpError

PathLike = str | os.PathLike[str]

MARKER_VARIABLE = "IKIT_RUNS"
"""The environment variable that holds the ids of the runs a process belongs to, outermost first."""

LARGEST = 1 << 62  # bytes: beyond any size, and safe to pass to the kernel


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
    _check_texts(words, environment)
    _check_numbers(timeout=timeout, grace=grace, **rest)
    _check_descriptors((*rest["hold_fds"], *rest["pass_fds"]))
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


def _check_texts(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """OpError for what no system call could carry; values are never repeated."""
    for text in (*words, *environment, *environment.values()):
        if "\0" in text:
            raise OpError("an argument or a variable holds a NUL character", "leave it out")
    for name in environment:
        if not name or "=" in name:
            shown = name.partition("=")[0]
            raise OpError(f"{shown!r} is given as a variable with a = in its name", "give a name")


def _check_numbers(
    *, timeout: float, grace: float, byte_cap: int | None, memory_limit: int | None, **_: Any
) -> None:
    """OpError for times and sizes that are none."""
    if not timeout > 0:
        raise OpError(f"the timeout {timeout} is not a time", "give positive seconds")
    if not (grace >= 0 and math.isfinite(grace)):
        raise OpError(f"the grace {grace} is not a time", "give seconds, 0 or more")
    for name, size in (("byte_cap", byte_cap), ("memory_limit", memory_limit)):
        if size is not None and not 0 < size < LARGEST:
            raise OpError(f"{name} {size} is not a size", "give a positive number of bytes")


def _check_descriptors(fds: Iterable[int]) -> None:
    """OpError for descriptors that are not open, or are the standard ones."""
    for fd in fds:
        try:
            os.fstat(fd)
        except OSError:
            fd = -1
        if fd <= 2:
            raise OpError("a descriptor to hand on is not open", "open it, above 2, before the run")


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
