"""Tools: the registry's operations as MCP tools.

The low-level server neither validates arguments nor catches exceptions; both happen
here.  An operation that the caller can mend raises OpError and becomes a tool error
with a next step; anything else is a bug, which gets an id.  Long operations become
jobs; a cancelled call ends its job, unless the client only stopped waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import re
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import mcp.types as t
from mcp.server import ServerRequestContext

from ikit_mcp import jobs as job_table
from ikit_mcp.arguments import parse, schema
from ikit_mcp.call import Cancelled, Progress, one_line
from ikit_mcp.jobs import Job, Jobs, Notify
from ikit_mcp.registry import EXECUTES, READS, Operation, OpError, excerpt
from ikit_mcp.runner import Control, Outcome, Request, Runner
from ikit_mcp.server import replies
from ikit_mcp.worker import Bug, report_bug

_GAVE_UP_WAITING = re.compile(r"tim(?:ed|e)[\s_-]{0,2}out|-32001", re.IGNORECASE)
CANCEL_SECONDS = 20.0
Context = ServerRequestContext[Any, Any]


def listed_operation(operation: Operation) -> Operation:
    """The operation as a client sees it: a long one can be waited for."""
    if not operation.long:
        return operation
    return replace(operation, args=(*operation.args, job_table.WAIT))


def tool(operation: Operation) -> t.Tool:
    """The MCP tool of an operation; its hints follow from its effects."""
    title = operation.name.replace("_", " ").capitalize()
    return t.Tool(
        name=operation.name,
        title=title,
        description=operation.help,
        input_schema=schema(listed_operation(operation).args),
        annotations=t.ToolAnnotations(
            read_only_hint=operation.effects == READS,
            destructive_hint=operation.effects >= EXECUTES,
            idempotent_hint=operation.effects == READS,
            open_world_hint=operation.open_world or operation.effects >= EXECUTES,
        ),
    )


class Tools:
    """Lists and calls the tools of one runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.jobs = Jobs(runner)
        self._started: dict[str, Job] = {}  # by request id: a pipe has one client
        listed = [*runner.registry.tools(), *job_table.operations()]
        self.operations = {
            op.name: op for op in listed if op.effects <= runner.scope or op.effects == READS
        }

    async def list_tools(
        self, ctx: Context, params: t.PaginatedRequestParams | None
    ) -> t.ListToolsResult:
        """All tools, in one page: some clients read only the first."""
        return t.ListToolsResult(tools=[tool(op) for op in self.operations.values()])

    async def call(self, ctx: Context, params: t.CallToolRequestParams) -> t.CallToolResult:
        """Answer one tools/call; every failure that the caller can mend is a tool error."""
        operation = self.operations.get(params.name)
        if operation is None:
            raise replies.refusal(f"Unknown tool: {excerpt(params.name, 80)}")
        try:
            return await self._answer(ctx, operation, params.arguments or {})
        except OpError as problem:
            return replies.error(problem)
        except Cancelled:
            return replies.result({"status": "cancelled", "summary": f"{params.name}: cancelled"})
        except Bug as bug:
            return replies.bug(params.name, bug.id)
        except Exception as error:  # noqa: BLE001 -- the SDK would send its text to the client
            return replies.bug(params.name, report_bug(error).id)

    async def _answer(
        self, ctx: Context, operation: Operation, raw: dict[str, Any]
    ) -> t.CallToolResult:
        values = parse(listed_operation(operation).args, raw, operation.name)
        if operation.name == "job_status":
            return await self._job_status(ctx, **values)
        if operation.name == "cancel_job":
            return await self._cancel_job(ctx, **values)
        wait = values.pop("wait_seconds", None) if operation.long else None
        request = self.runner.check(operation.name, values)
        if wait is None:
            return shown_outcome(await self._in_thread(ctx, request))
        return await self._as_job(ctx, request, wait)

    async def _in_thread(self, ctx: Context, request: Request) -> Outcome:
        """Run a short operation beside the event loop; a cancelled call leaves the thread."""
        cancel = threading.Event()
        latest = [Progress(0, None, request.operation.name)]

        def note(progress: Progress) -> None:
            """Keep what the operation says, for the heartbeat."""
            latest[0] = progress

        run = functools.partial(self.runner.here, request, Control(note, cancel))
        try:
            async with _heartbeat(ctx, lambda: latest[0]):
                return await anyio.to_thread.run_sync(run, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            cancel.set()
            raise

    async def _as_job(self, ctx: Context, request: Request, wait: float) -> t.CallToolResult:
        job = self.jobs.start(request)
        key = str(ctx.request_id)
        self._started[key] = job  # left there by a cancelled call, for ``on_cancelled``
        answer = await self._wait(ctx, job, wait)
        self._started.pop(key, None)
        return answer

    async def _wait(self, ctx: Context, job: Job, seconds: float) -> t.CallToolResult:
        """The job's result when it ends in time, else how it stands."""
        if not await self.jobs.wait(job, seconds, _notifier(ctx)) or job.state == "cancelled":
            return replies.result(replies.job_reply(job))
        return shown_outcome(job.future.result(), job.id)

    async def _job_status(
        self, ctx: Context, job_id: str | None, wait_seconds: int
    ) -> t.CallToolResult:
        if job_id is not None:
            return await self._wait(ctx, self.jobs.get(job_id), wait_seconds)
        table = [
            {
                "job_id": j.id,
                "operation": j.operation,
                "status": j.state,
                "seconds": round(j.seconds),
            }
            for j in self.jobs.all()
        ]
        return replies.result({"jobs": table[:100], "total": len(table)})

    async def _cancel_job(self, ctx: Context, job_id: str) -> t.CallToolResult:
        job = self.jobs.cancel(job_id)
        await self.jobs.wait(job, CANCEL_SECONDS, _notifier(ctx))
        if job.state == "done":
            return shown_outcome(job.future.result(), job.id)
        if job.state == "failed":
            job.future.result()  # raises what it failed with
        return replies.result(replies.job_reply(job))

    def on_cancelled(self, params: dict[str, Any]) -> None:
        """A client gave a call up: end its job, unless it only stopped waiting for the reply."""
        job = self._started.pop(str(params.get("requestId")), None)
        if job is not None and not _GAVE_UP_WAITING.search(str(params.get("reason") or "")):
            job.cancel.set()


def shown_outcome(outcome: Outcome, job_id: str | None = None) -> t.CallToolResult:
    """The tool result of what came of a call."""
    if outcome.record is not None:
        reply = replies.record_reply(outcome.record, outcome.shown, job_id)
        return replies.result(reply, outcome.record)
    reply = dict(outcome.reply or {})
    if outcome.shown.next:
        reply["next"] = outcome.shown.next
    return replies.result(reply)


@contextlib.asynccontextmanager
async def _heartbeat(ctx: Context, latest: Callable[[], Progress]) -> AsyncIterator[None]:
    """While the block runs, say every few seconds what is being done."""
    notify = _notifier(ctx)

    async def beat() -> None:
        """Tell it, counting the seconds: an operation may say nothing for long."""
        for number in itertools.count(1):
            await anyio.sleep(job_table.HEARTBEAT_SECONDS)
            what = latest().what or "running"
            await notify(number * job_table.HEARTBEAT_SECONDS, None, f"{what} (still running)")

    task = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        task.cancel()


def _notifier(ctx: Context) -> Notify:
    async def notify(done: float, total: float | None, what: str) -> None:
        """Send one progress notification; nothing when the client gave no token."""
        await ctx.session.report_progress(done, total, one_line(what))

    return notify
