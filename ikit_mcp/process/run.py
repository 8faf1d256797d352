"""The one way to start a child process, used for everything that this program runs.

``run`` starts a program below a supervisor of its own (``supervisor.py`` explains why) and
comes back only when *nothing* of it is left: not its children, not its daemons, whether it
ended by itself, was cancelled, or ran out of time.  ``run_async`` is the same for coroutines.

Runs nest: the server runs a worker, the worker an engine, the engine below a profiler.  Then
only the innermost interrupts, because only it knows what is worth waiting for.  An outer run
names the grace of the runs inside (``inner_grace``): it asks its leader alone (SIGTERM), which
cancels its own run, and waits two seconds longer than that grace before it kills the tree.

The environment names each run that a process belongs to (``IKIT_RUNS``): when a supervisor is
killed, its caller finds by that mark what the parent-death signal did not end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.process import platform
from ikit_mcp.process.output import KEEP_BYTES, Output
from ikit_mcp.process.request import Ending, PathLike, Request, checked_request

if TYPE_CHECKING:
    import asyncio

INNER_MARGIN = 2.0  # seconds that an outer run waits longer than the runs inside it


@dataclass(frozen=True)
class Result:
    """How a run ended.

    ``returncode`` is the leader's exit status, ``-signal`` when a signal ended it, None when
    nobody saw it (its supervisor was killed: ``lost``).  ``timed_out``, ``cancelled`` and
    ``capped`` (an output passed ``byte_cap``) say why it was ended; ``killed``, that it did not
    go within its grace.  ``leftovers`` are the other processes that had to be killed, as
    ``name[pid]``; ``survivors`` could not be (a driver holds them).  ``seconds`` is the leader's
    life, ``max_rss_bytes`` the peak of the largest single process (None where it was not seen).
    ``stdout`` and ``stderr`` are head and tail as text; ``*_bytes`` is what the files hold.
    ``supervised`` False: no supervisor exists here, processes that hid may be left.
    """

    argv: tuple[str, ...]
    returncode: int | None
    signal: int | None
    timed_out: bool
    cancelled: bool
    capped: bool
    killed: bool
    lost: bool
    seconds: float
    max_rss_bytes: int | None
    leftovers: tuple[str, ...]
    survivors: tuple[str, ...]
    stdout: str
    stderr: str
    stdout_bytes: int
    stderr_bytes: int
    supervised: bool

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself, with status 0."""
        return self.returncode == 0 and not (self.timed_out or self.cancelled or self.capped)


def run(
    argv: Sequence[PathLike],
    *,
    timeout: float,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    cwd: PathLike | None = None,
    stdout_path: PathLike | None = None,
    stderr_path: PathLike | None = None,
    byte_cap: int | None = None,
    cancel: threading.Event | None = None,
    hold_fds: Iterable[int] = (),
    pass_fds: Iterable[int] = (),
    memory_limit: int | None = None,
    interrupt: bool = True,
    inner_grace: float | None = None,
    keep: int = KEEP_BYTES,
    on_start: Callable[[int], None] | None = None,
) -> Result:
    """Run a program to its end, or end it; nothing of it is left when this returns.

    After ``timeout`` seconds (inf: never), or when ``cancel`` is set, the leader's process
    group gets SIGINT and has ``grace`` seconds, then the tree is killed; ``interrupt=False``
    kills at once.  With ``inner_grace`` the program is one that has runs of its own: it alone
    gets SIGTERM, and ``inner_grace`` + 2 seconds.  If this process dies, the tree is killed.

    ``env`` None is this process's environment less secret-named variables.  Standard input is
    /dev/null.  Outputs go to the paths (made 0600; the same path for both merges them, as
    ``stdout``) or to files that are removed; one that grows past ``byte_cap`` bytes ends the
    run.  ``keep`` bytes of each end come back as text.  ``hold_fds`` stay open in the
    supervisor until the last descendant is gone, ``pass_fds`` go to the program under their
    numbers.  ``memory_limit`` (bytes) bounds the private memory of each process that does not
    start a run of its own.  ``on_start`` gets the leader's pid.

    OpError when the program cannot be started; a program that fails is a Result.
    """
    gentle = ("group" if interrupt else None) if inner_grace is None else "leader"
    request = checked_request(
        argv=argv,
        env=env,
        cwd=cwd,
        timeout=timeout,
        grace=grace if inner_grace is None else inner_grace + INNER_MARGIN,
        gentle=gentle,
        byte_cap=byte_cap,
        memory_limit=memory_limit,
        hold_fds=tuple(hold_fds),
        pass_fds=tuple(pass_fds),
        cancel=cancel,
        on_start=on_start,
    )
    _fill_standard_descriptors()
    with contextlib.ExitStack() as files:
        stdout = Output(stdout_path)
        files.callback(stdout.close)
        merged = stdout_path is not None and stderr_path is not None and _same(stdout, stderr_path)
        stderr = stdout if merged else Output(stderr_path)
        if not merged:
            files.callback(stderr.close)
        ending = _carry_out(request, stdout, stderr)
        if ending.reason == "cap" and byte_cap is not None:
            stdout.cut(byte_cap)
            stderr.cut(byte_cap)
        code = ending.returncode
        return Result(
            argv=request.argv,
            returncode=code,
            signal=-code if code is not None and code < 0 else None,
            timed_out=ending.reason == "timeout",
            cancelled=ending.reason in ("cancel", "signal"),
            capped=ending.reason == "cap",
            killed=ending.killed,
            lost=ending.lost,
            seconds=ending.seconds,
            max_rss_bytes=ending.max_rss_bytes,
            leftovers=ending.leftovers,
            survivors=ending.survivors,
            stdout=stdout.text(keep),
            stderr="" if merged else stderr.text(keep),
            stdout_bytes=stdout.size(),
            stderr_bytes=0 if merged else stderr.size(),
            supervised=platform.SUPERVISED,
        )


async def run_async(
    argv: Sequence[PathLike], *, cancel: threading.Event | None = None, **options: Any
) -> Result:
    """``run`` for a coroutine (asyncio, also below anyio): same arguments, same Result.

    When the awaiting task is cancelled, the run is cancelled as by ``cancel``, and the
    cancellation goes on only when everything has ended.  A run has its own thread: a pool of
    few would let long runs keep short ones from starting.
    """
    import asyncio  # 50 ms that the command line, which never awaits, need not pay

    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()
    stop = cancel if cancel is not None else threading.Event()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if error is not None:
            done.set_exception(error)
        elif result is not None:
            done.set_result(result)

    def work() -> None:
        result, error = None, None
        try:
            result = run(argv, cancel=stop, **options)
        except BaseException as caught:  # noqa: BLE001 - handed over whole, to be raised by the waiter
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    # A daemon: when the interpreter ends all the same, the lifeline closes and the tree dies.
    threading.Thread(target=work, name="ikit-run", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        stop.set()
        await _outlast_cancellation(done)
        raise


async def _outlast_cancellation(done: asyncio.Future[Result]) -> None:
    """Wait until the run has ended, however often the waiting task is cancelled."""
    import asyncio  # as above

    # anyio cancels a task again and again until its scope is left; only a shielded scope
    # makes it wait.  Where anyio was never imported, nobody does that.
    anyio = sys.modules.get("anyio")
    with anyio.CancelScope(shield=True) if anyio else contextlib.nullcontext():
        while not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([done])
    done.exception()  # taken note of: the cancellation is what the task hears


def _fill_standard_descriptors() -> None:
    """Open /dev/null in each of 0, 1, 2 that is closed, or a child's file would land there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _same(output: Output, path: PathLike) -> bool:
    """Whether the path leads to the file that is already open."""
    try:
        return os.path.samestat(os.fstat(output.fd), Path(path).stat())
    except OSError:
        return False


def _carry_out(request: Request, stdout: Output, stderr: Output) -> Ending:
    """Run it below a supervisor, or without one where there is none."""
    if platform.SUPERVISED:
        from ikit_mcp.process.supervised import run_supervised  # Linux alone

        return run_supervised(request, stdout.fd, stderr.fd)
    from ikit_mcp.process.portable import run_unsupervised  # needs psutil: not where it isn't used

    return run_unsupervised(request, stdout.fd, stderr.fd)
