"""Measure an engine against its ceiling, spoil it, and see the tool say so; see README.md."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
import model
from mcp import Client, StdioServerParameters

THREADS = 1
WORKLOAD = {"prompt_len": 64, "gen_len": 64, "rounds": 3, "threads": THREADS}


async def ask(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool that must succeed, wait for its job; its structured content."""
    print(f"\n> {tool} {arguments}", flush=True)
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    reply: dict[str, Any] = result.structured_content
    while reply.get("status") == "running":
        print(f"  {reply['summary']}", flush=True)
        step = reply["next"][0]
        result = await client.call_tool(step["tool"], step["arguments"])
        assert not result.is_error, result.content
        reply = result.structured_content
    print(f"  {reply.get('summary') or ''}", flush=True)
    for kind in ("warnings", "missing"):
        for line in reply.get(kind) or []:
            print(f"  {kind}: {line}")
    return reply


def numbers(reply: dict[str, Any]) -> dict[str, float | None]:
    """The metrics of a reply by name."""
    return {metric["name"]: metric["value"] for metric in reply["metrics"]}


async def walk(client: Client, path: Path) -> None:
    """Bandwidth, ceiling, benchmark, a spoiled benchmark, comparison, evidence."""
    bandwidth = await ask(client, "measure_bandwidth", device="cpu", threads=THREADS, seconds=3)
    limit = await ask(
        client, "roofline", model=str(path), gpu_bw=bandwidth["evidence_id"], context=96
    )
    assert (numbers(limit)["ceiling_tok_s"] or 0) > 0

    good = await ask(
        client, "bench", model=str(path), roofline=limit["evidence_id"], device="cpu", **WORKLOAD
    )
    # On a shared machine the ceiling moves; a rate above it leaves the validity open (null).
    assert good["valid"] is not False, good["gates"]
    share = numbers(good)["pct_of_ceiling"]
    assert share is not None and share > 0, share
    print(f"  the engine reaches {share:.0f} % of what one thread draws from memory")

    many = (os.cpu_count() or 1) + 1
    bad = await ask(
        client, "bench", model=str(path), device="cpu",
        **WORKLOAD | {"threads": many, "rounds": 1, "gen_len": 8},
    )  # fmt: skip
    assert bad["valid"] is False and "threads" in bad["gates"]["violations"][0]
    print(f"  violation: {bad['gates']['violations'][0]}")

    compared = await ask(
        client, "compare_evidence", baseline=good["evidence_id"], candidate=bad["evidence_id"]
    )
    assert compared["data"]["verdict"] == "not_established"

    listed = await ask(client, "list_evidence")
    for item in listed["items"]:
        print(f"  {item['evidence_id'][:12]} {item['kind']:<10} {item['summary']}")
    checked = await ask(client, "verify_evidence")
    assert checked["ok"] is True and checked["checked"] == listed["total"]


async def demo() -> None:
    """The whole walk against a server with a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = model.write(Path(folder) / "seeded-llama.gguf")
        print(f"wrote {path.name}, {path.stat().st_size / 1e6:.0f} MB")
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ikit_mcp.cli", "serve"],
            env={**os.environ, "IKIT_HOME": str(Path(folder) / "home")},
        )
        async with Client(server) as client:
            await walk(client, path)
    print("\nall steps held")


if __name__ == "__main__":
    anyio.run(demo)
