"""Start the server over stdio and ask it what an agent would ask first; see README.md."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
import checkpoint
from mcp import Client, StdioServerParameters

WEIGHTS = 15_009_857_536
KV_AT_1024 = 134_217_728


async def ask(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool that must succeed; its structured content."""
    print(f"\n> {tool} {arguments}")
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    reply: dict[str, Any] = result.structured_content
    shown = {k: v for k, v in reply.items() if isinstance(v, (str, int)) and k != "root"}
    print(f"  {reply.get('summary') or shown}")
    return reply


async def walk(client: Client, model: Path) -> None:
    """The steps, each asserted."""
    tools = [tool.name for tool in (await client.list_tools()).tools]
    print(f"tools: {', '.join(tools)}")
    assert {"roofline", "list_evidence", "inspect_evidence", "verify_evidence"} <= set(tools)

    here = await ask(client, "inspect_environment")
    assert here["devices"], "there is always a CPU"

    first = await ask(client, "roofline", model=str(model), gpu_bw="3350")
    numbers = {metric["name"]: metric["value"] for metric in first["metrics"]}
    assert first["valid"] is True
    assert numbers["weight_bytes"] == WEIGHTS and numbers["kv_bytes"] == KV_AT_1024
    for line in first["limitations"]:
        print(f"  limitation: {line}")

    longer = await ask(client, "roofline", model=str(model), gpu_bw="3350", context=32768)
    assert longer["metrics"][0]["value"] > numbers["bytes_per_token"]

    page = await ask(client, "list_evidence", kind="roofline", limit=1)
    assert page["total"] == 2 and page["items"][0]["evidence_id"] == longer["evidence_id"]
    step = page["next"][0]
    rest = await ask(client, step["tool"], **step["arguments"])
    assert [item["evidence_id"] for item in rest["items"]] == [first["evidence_id"]]

    part = await ask(
        client, "inspect_evidence", id=first["evidence_id"][:12], path="data.counts.groups"
    )
    assert part["integrity"]["ok"] is True
    for group, size in part["value"].items():
        print(f"  {group:>24} {size:>16,} B")

    resource = await client.read_resource(first["uri"])
    assert first["evidence_id"] in resource.contents[0].model_dump_json()

    checked = await ask(client, "verify_evidence")
    assert checked["ok"] is True and checked["checked"] == 2

    wrong = await client.call_tool("roofline", {"model": str(model), "contxt": 8, "batch": 0})
    assert wrong.is_error
    print(f"\nwhat a mistake gets: {wrong.content[0].text}")  # type: ignore[union-attr]


async def main() -> None:
    """Run the walk against a server with a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint.write(Path(folder) / "Llama-3.1-8B")
        home = Path(folder) / "home"
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ikit_mcp.cli", "serve"],
            env={**os.environ, "IKIT_HOME": str(home)},
        )
        async with Client(server) as client:
            await walk(client, model)
        print(f"\nall steps held; evidence was in {home / 'evidence'}")


if __name__ == "__main__":
    anyio.run(main)
