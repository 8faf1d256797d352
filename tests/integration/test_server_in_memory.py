"""The server without a pipe, in both protocol eras: every tool, rubbish, jobs, resources."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError

from helpers.evidence import save
from helpers.records import make_provenance
from helpers.schema_lint import lint
from ikit_mcp import jobs, registry
from ikit_mcp.call import Call, Settings, Shown
from ikit_mcp.evidence.record import Draft, EvidenceRecord, assemble, metric
from ikit_mcp.registry import EXECUTES, READS, Arg, Effects, operation
from ikit_mcp.runner import Runner
from ikit_mcp.server import replies
from ikit_mcp.server.stdio import build

RUBBISH: list[Any] = [None, "", "x" * 9_000, -1, 1e300, True, [], ["a"], {"a": 1}, "\u202e", "\0"]


def with_client(
    home: Path,
    walk: Callable[[Client], Awaitable[None]],
    mode: str = "legacy",
    scope: Effects = EXECUTES,
    extra: list[registry.Operation] | None = None,
) -> None:
    """Run ``walk`` with a client of a server that is in this process."""
    loaded = registry.load(None)
    for op in extra or []:
        loaded.add(op)
    server, tools = build(Runner(loaded, Settings(home), scope))

    async def main() -> None:
        """Connect, walk, end the jobs."""
        async with Client(server, mode=mode) as client:
            await walk(client)
        tools.jobs.close()

    anyio.run(main)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_every_tool_has_a_clear_shape_and_the_list_its_budget(tmp_path: Path, mode: str) -> None:
    async def walk(client: Client) -> None:
        listed = (await client.list_tools()).tools
        assert sum(len(tool.model_dump_json(exclude_none=True)) for tool in listed) < 22_000
        for tool in listed:
            assert 40 <= len(tool.description or "") <= 200, tool.name
            assert lint(tool.input_schema) == [], tool.name
            for name, node in tool.input_schema["properties"].items():
                assert len(node["description"]) <= 70, (tool.name, name)
            assert tool.title and tool.annotations is not None
            hints = tool.annotations
            assert None not in (
                hints.read_only_hint, hints.destructive_hint,
                hints.idempotent_hint, hints.open_world_hint,
            )  # fmt: skip

    with_client(tmp_path, walk, mode)


def test_every_argument_of_every_tool_answers_rubbish_with_one_error(tmp_path: Path) -> None:
    async def walk(client: Client) -> None:
        for tool in (await client.list_tools()).tools:
            for name, node in tool.input_schema["properties"].items():
                value = {"string": [1, 2], "boolean": "perhaps", "array": 3}.get(
                    node["type"], "no number"
                )
                result = await client.call_tool(tool.name, {name: value, "no_such": 1})
                assert result.is_error, (tool.name, name)
                text = result.content[0].text  # type: ignore[union-attr]
                assert len(text) <= 2_000 and "no_such" in text and "Internal" not in text
                if not (node["type"] == "array" and value == 3):
                    assert name in text, (tool.name, name)

    with_client(tmp_path, walk)


def test_no_tool_breaks_on_any_value_of_the_wrong_kind(tmp_path: Path) -> None:
    async def walk(client: Client) -> None:
        for tool in (await client.list_tools()).tools:
            if tool.name in ("inspect_environment", "measure_bandwidth"):
                continue  # they need no argument, and would run
            for value in RUBBISH:
                given = dict.fromkeys(tool.input_schema["properties"], value)
                result = await client.call_tool(tool.name, given)
                text = json.dumps([part.model_dump(mode="json") for part in result.content])
                assert "Internal error" not in text, (tool.name, value)

    with_client(tmp_path, walk)


@operation(
    "memory_job",
    ("memory-job",),
    "Saves a record after telling its progress, for tests in memory.",
    [Arg("steps", "integer", "How many", default=2)],
    effects=READS,
)
def memory_job(call: Call, steps: int) -> dict[str, Any]:
    """Tells each step."""
    for step in range(steps):
        call.progress(step, steps, f"step {step}")
    return {"steps": steps, "text": "é\x1b[31m" * 3}


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_long_call_becomes_a_job_that_is_waited_for_listed_and_cancelled(
    tmp_path: Path, mode: str, llama: Path
) -> None:
    async def walk(client: Client) -> None:
        told: list[str] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            """Keep what is told."""
            told.append(message or "")

        arguments = {"model": str(llama), "gpu_bw": "3350", "wait_seconds": 0}
        first = await client.call_tool("roofline", arguments)
        reply = first.structured_content
        assert reply["status"] == "running" and reply["next"][0]["tool"] == "job_status"
        job = {"job_id": reply["job_id"]}
        done = await client.call_tool("job_status", job, progress_callback=note)
        assert done.structured_content["status"] == "done"
        links = [part for part in done.content if part.type == "resource_link"]
        assert [link.name for link in links] == ["roofline.svg"]
        listed = await client.call_tool("job_status", {})
        assert listed.structured_content["total"] == 1
        again = await client.call_tool("cancel_job", job)
        assert again.structured_content["status"] == "done"
        picture = await client.read_resource(links[0].uri)
        assert picture.contents[0].model_dump()["text"].startswith("<svg")
        record = await client.read_resource(done.structured_content["uri"])
        assert "15009857536" in record.contents[0].model_dump()["text"]

    with_client(tmp_path / "home", walk, mode)


def test_a_short_call_sends_what_a_terminal_would_obey_as_its_escape(tmp_path: Path) -> None:
    extra = [registry._declared[memory_job]]

    async def walk(client: Client) -> None:
        result = await client.call_tool("memory_job", {"steps": 3})
        assert result.structured_content["text"] == "é\\u001b[31m" * 3
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool("no_such_tool", {})

    with_client(tmp_path, walk, extra=extra)


@operation("memory_quiet", ("memory-quiet",), "Says nothing until it is let go, for a test.", [],
           effects=READS)  # fmt: skip
def memory_quiet(call: Call) -> dict[str, Any]:
    """Whether it was let go."""
    return {"let_go": LET_GO.wait(30)}


LET_GO = threading.Event()


def test_a_short_call_that_says_nothing_is_kept_alive_by_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "HEARTBEAT_SECONDS", 0.05)
    LET_GO.clear()

    async def walk(client: Client) -> None:
        told: list[str] = []

        async def note(progress: float, total: float | None, message: str | None) -> None:
            """Let the operation go once it was told of twice."""
            told.append(message or "")
            if len(told) == 2:
                LET_GO.set()

        result = await client.call_tool("memory_quiet", {}, progress_callback=note)
        assert result.structured_content == {"let_go": True}
        assert told[:2] == ["memory_quiet (still running)"] * 2

    with_client(tmp_path, walk, extra=[registry._declared[memory_quiet]])


def test_resources_are_paged_read_completed_and_refused(tmp_path: Path) -> None:
    ids = {save(tmp_path, n).evidence_id for n in range(45)}

    async def walk(client: Client) -> None:
        first = await client.list_resources()
        second = await client.list_resources(cursor=first.next_cursor)
        seen = {str(r.uri).removeprefix("evidence://") for r in first.resources + second.resources}
        assert seen == ids and second.next_cursor is None
        templates = await client.list_resource_templates()
        assert [t.uri_template for t in templates.resource_templates] == [
            "evidence://{id}", "evidence://{id}/{name}",
        ]  # fmt: skip
        for uri in ("evidence://[", "evidence://abcdef", f"evidence://{min(ids)}/none.txt"):
            with pytest.raises(MCPError, match="Resource not found"):
                await client.read_resource(uri)

    with_client(tmp_path, walk)


def test_a_reply_that_is_too_large_keeps_its_verdict_and_names_what_it_left_out() -> None:
    lines = [f"limitation {n} " + "x" * 300 for n in range(200)]
    draft = Draft(
        kind="acme", claim_class="measured", valid=False, summary="large",
        metrics=[metric(f"metric_{n}", n, "B", "derived", [n]) for n in range(400)],
        limitations=lines, missing=lines, data={"a": {"b": "y" * 50_000}},
    )  # fmt: skip
    raw = json.loads(
        json.dumps({"evidence_id": "ab" * 32, **assemble(draft, make_provenance(), [])})
    )
    record = EvidenceRecord(raw, "ab" * 32)
    reply = replies.record_reply(record, Shown(["a.b", "no.such"], []))
    result = replies.result(reply, record)
    size = len(json.dumps(result.structured_content)) + len(result.content[0].text)  # type: ignore[union-attr]
    assert size <= replies.REPLY_CHARACTERS and reply["valid"] is False
    assert "inspect_evidence" in json.dumps(reply["limitations"])
    text = replies.text_of(reply)
    assert text.startswith("done: large") and "INVALID" in text
