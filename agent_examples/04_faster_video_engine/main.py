"""An agent makes a video engine faster, is caught when it skips steps, and accepted when it does
not; see README.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "tests" / "data" / "clips"


async def ask(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """Call a tool that must succeed, wait for its job; its structured content."""
    shown = {name: Path(v).name if "/" in str(v) else v for name, v in arguments.items()}
    print(f"\n> {tool} {shown}", flush=True)
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    reply: dict[str, Any] = result.structured_content
    while reply.get("status") == "running":
        step = reply["next"][0]
        result = await client.call_tool(step["tool"], step["arguments"])
        assert not result.is_error, result.content
        reply = result.structured_content
    print(f"  {reply.get('summary') or ''}", flush=True)
    return reply


async def without_a_model(client: Client) -> None:
    """Two clips that this repository ships: what their dumps alone give away."""
    for name, verdict in (("honest", "inconclusive"), ("reusing", "step_reuse")):
        folder = SHIPPED / name
        reply = await ask(
            client, "clip_steps", manifest=str(folder / "clips.jsonl"), dumps=str(folder / "dumps")
        )
        assert reply["data"]["verdict"] == verdict, reply
        assert reply["valid"] is (None if name == "honest" else False)
        clip = await ask(
            client, "inspect_evidence", id=reply["evidence_id"], path="data.clips.0.checks"
        )
        for check in clip["items"]:
            mark = {True: "ok", False: "FAILED", None: "not seen"}[check["ok"]]
            print(f"    {check['name']:<12}{mark:<10}{check['detail'][:80]}")


def make(python: str, state: str, folder: Path) -> Path:
    """Let the engine make its clips in one of its states; the folder."""
    print(f"\n(the engine, {state}, makes two clips)", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, str(HERE / "engine.py"), state, str(folder / state)]
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=600)
    return folder / state


async def with_the_model(client: Client, python: str, folder: Path) -> None:
    """The loop of an agent that has a reference: cache, be caught, compile, be accepted."""
    for state, verdict in (("cached", "step_reuse"), ("compiled", "pass")):
        made = make(python, state, folder)
        reply = await ask(
            client, "clip_steps", manifest=str(made / "clips.jsonl"), dumps=str(made / "dumps"),
            reference=str(made / "model"), recipe=str(made / "recipe.json"), seed=81,
        )  # fmt: skip
        assert reply["data"]["verdict"] == verdict, reply
        print(f"  -> {'the agent keeps it' if reply['valid'] else 'the agent takes it back'}")


def python_with_torch() -> str | None:
    """The first Python of IKIT_PYTHONS that has torch, diffusers and PyAV."""
    for python in os.environ.get("IKIT_PYTHONS", "").replace(",", os.pathsep).split(os.pathsep):
        look = [python, "-c", "import av, diffusers, torch"]
        if python and subprocess.run(look, capture_output=True, check=False).returncode == 0:
            return python
    return None


async def demo() -> None:
    """Both parts against a server with a home of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ikit_mcp.cli", "serve"],
            env={**os.environ, "IKIT_HOME": str(Path(folder) / "home")},
        )
        async with Client(server) as client:
            await without_a_model(client)
            python = python_with_torch()
            if python is None:
                print("\n(no Python with torch in IKIT_PYTHONS: the replay is not shown)")
            else:
                await with_the_model(client, python, Path(folder))
    print("\nall steps held")


if __name__ == "__main__":
    anyio.run(demo)
