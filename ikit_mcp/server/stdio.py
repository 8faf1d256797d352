"""Serving over standard input and output, and ending at once when it should.

The wire is a private copy of standard output; descriptor 1 leads to standard error
before any operation is imported (``cli._claim_wire``), so that nothing else is ever
written there.  Everything ends the server: end of input, SIGTERM, SIGINT, SIGHUP, and the
death of the parent (a parent that was killed may leave the pipe open in a sibling).
What jobs had started dies with the server, by the supervisors' lifelines.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.abc
import mcp.types as t
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from ikit_mcp import __version__
from ikit_mcp.registry import OpError
from ikit_mcp.runner import Runner
from ikit_mcp.server import replies
from ikit_mcp.server.resources import Resources
from ikit_mcp.server.tools import Tools
from ikit_mcp.worker import report_bug

NAME = "ikit"
Handler = Callable[[Any, Any], Awaitable[Any]]
PARENT_SECONDS = 1.0
ENDING = [signal.SIGTERM, signal.SIGINT]
if sys.platform != "win32":
    ENDING.append(signal.SIGHUP)
_log = logging.getLogger(__name__)

INSTRUCTIONS = """\
ikit measures inference engines honestly. Every result is an evidence record with an id: numbers \
with units, what was not seen (missing), what the claim does not cover (limitations), and a hash.
Order of work: inspect_environment (devices, engines, profilers) -> roofline (the speed limit of a \
model on this device) -> bench (measure an engine against it; gates catch misconfigured runs) -> \
profile (what costs time) -> compare_evidence. clip_steps proves that a faster video engine still \
computes the same steps.
Use roofline for a model id, a model directory, a config.json or a .gguf; no weights are read.
valid: true = the checks passed; false = do not use the number (see gates.violations); null = not \
enough was seen to say. Never quote a number without its limitations; never call B faster than A \
unless compare_evidence says so.
Long calls return status "running" and a job_id after wait_seconds: call job_status with it; the \
record is stored even if you lose the reply (list_evidence). Read large records in pages: \
inspect_evidence with a path (data.kernels) and offset. Follow next when it fits.
Secrets: pass names of environment variables, never values."""


def build(runner: Runner) -> tuple[Server[Any], Tools]:
    """The MCP server of a runner, and its tools (which hold the jobs)."""
    tools, resources = Tools(runner), Resources(runner.settings)
    server: Server[Any] = Server(
        NAME,
        version=__version__,
        title="ikit-mcp",
        instructions=INSTRUCTIONS,
        on_list_tools=tools.list_tools,
        on_call_tool=tools.call,
        on_list_resources=guarded(resources.list_resources),
        on_list_resource_templates=resources.templates,
        on_read_resource=guarded(resources.read),
        on_completion=guarded(resources.complete),
    )

    async def watch_cancelled(ctx: ServerRequestContext[Any, Any], call_next: Any) -> Any:
        """Tell the tools which call the client gave up, and why."""
        if ctx.method == "notifications/cancelled":
            tools.on_cancelled(dict(ctx.params or {}))
        return await call_next(ctx)

    server.middleware.clear()  # no tracing: the SDK's default middleware exports nowhere here
    server.middleware.append(watch_cancelled)
    return server, tools


def guarded(handler: Handler) -> Handler:
    """The handler with its failures told by us: the SDK would send an exception's own text."""

    async def answer(ctx: Any, params: Any) -> Any:
        """Answer, or refuse with what can be done, or name a bug by its id."""
        try:
            return await handler(ctx, params)
        except OpError as problem:
            raise replies.refusal(str(problem)) from None
        except MCPError:
            raise
        except Exception as error:  # noqa: BLE001 -- a bug: an id to the client, the rest to stderr
            text = f"Internal error {report_bug(error).id}; see the server's standard error"
            raise MCPError(t.INTERNAL_ERROR, text) from None

    return answer


class Requests(io.TextIOWrapper):
    """Standard input, whose lines every JSON parser takes.

    A lone surrogate (half of an emoji) is valid in a JSON escape and no Unicode text: the
    SDK's parser drops the whole line, and the client waits for ever.  It becomes U+FFFF, which
    is no character, and which the parser of arguments refuses by name.
    """

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        """The next line, mended."""
        line = super().readline(size)
        return _ESCAPE.sub(_mended, line) if "\\ud" in line.lower() else line


_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?|u[dD][c-fC-F][0-9a-fA-F]{2}|.)"
)


def _mended(escape: re.Match[str]) -> str:
    lone = len(escape[0]) == 6 and escape[0][2] in "dD" and escape[0][3] in "89abcdefABCDEF"
    return "\\uffff" if lone else escape[0]


def serve(wire: io.TextIOWrapper, make_runner: Callable[[], Runner]) -> int:
    """Serve until something ends it; the process's exit status."""
    parent = os.getppid()
    requests = Requests(os.fdopen(os.dup(0), "rb"), encoding="utf-8", errors="replace")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # nobody but the protocol reads what the client sends
    os.close(null)
    server, tools = build(make_runner())

    def end(status: int) -> None:
        """Leave at once: the SDK's reader thread blocks on standard input and cannot be woken.

        What jobs started is killed by the supervisors, whose lifelines close with us.
        """
        tools.jobs.close()
        sys.stderr.flush()
        os._exit(status)

    anyio.run(_serve, server, requests, wire, parent, end)
    end(0)
    return 0


async def _serve(
    server: Server[Any],
    requests: io.TextIOWrapper,
    wire: io.TextIOWrapper,
    parent: int,
    end: Callable[[int], None],
) -> None:
    async with anyio.create_task_group() as group:
        if sys.platform != "win32":
            await group.start(_until_signal, end)
            group.start_soon(_until_orphaned, parent, end)
        streams = stdio_server(anyio.wrap_file(requests), anyio.wrap_file(wire))
        async with streams as (read, write):
            await server.run(read, write, server.create_initialization_options())
        end(0)


async def _until_signal(
    end: Callable[[int], None],
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    with anyio.open_signal_receiver(*ENDING) as signals:
        task_status.started()
        async for number in signals:
            end(128 + number)


async def _until_orphaned(parent: int, end: Callable[[int], None]) -> None:
    """End when the parent is no longer the one that started us."""
    while os.getppid() == parent:
        await anyio.sleep(PARENT_SECONDS)
    _log.warning("the client is gone; ending")
    end(0)
