"""The server over a real pipe: the protocol alone on standard output, and an end when it is due."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client, StdioServerParameters

from helpers import plugin
from helpers.stdio import Wire

BUILT_IN = {"inspect_environment", "list_evidence", "inspect_evidence", "verify_evidence"}


def test_a_client_lists_tools_and_calls_one_in_both_protocol_eras(tmp_path: Path) -> None:
    async def walk(mode: str) -> None:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ikit_mcp.cli", "serve"],
            env={**os.environ, "IKIT_HOME": str(tmp_path)},
        )
        async with Client(server, mode=mode) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert names >= BUILT_IN | {"job_status", "cancel_job", "roofline"}
            listed = await client.call_tool("list_evidence", {"limit": "5"})
            assert listed.structured_content["total"] == 0
            wrong = await client.call_tool("list_evidence", {"limit": 0})
            assert wrong.is_error

    for mode in ("legacy", "auto"):
        anyio.run(walk, mode)


def test_the_whole_tool_list_stays_within_its_budget_and_instructions_within_theirs(
    tmp_path: Path,
) -> None:
    with Wire(tmp_path) as wire:
        hello = wire.initialize()
        assert hello["serverInfo"]["name"] == "ikit" and hello["serverInfo"]["version"]
        assert 200 < len(hello["instructions"]) <= 1_500
        listed = wire.ask("tools/list")()["result"]
        assert len(json.dumps(listed, separators=(",", ":"))) <= 22_000


def test_nothing_but_the_protocol_reaches_standard_output_whatever_a_plugin_prints(
    tmp_path: Path,
) -> None:
    env = plugin.environment("acme,acme_broken,acme_twice")
    with Wire(tmp_path, env=env) as wire:
        wire.initialize()
        assert wire.structured("acme_echo", text="hello") == {"text": "hello"}
        told = wire.structured("inspect_environment")
        errors = {p["name"]: p["error"] for p in told["plugins"]}
        assert errors["acme"] is None and "cannot load" in errors["acme_broken"]
        assert "acme-ikit" in errors["acme_twice"] and "ikit-mcp" in errors["acme_twice"]
        assert wire.close() == 0  # fails on any line that is no JSON-RPC message
        assert "a plug-in prints at import" in wire.stderr()
        assert "a child prints" in wire.stderr()


def test_tools_are_listed_while_an_operation_blocks_its_thread(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with Wire(tmp_path / "home", env=plugin.environment()) as wire:
        wire.initialize()
        blocked = wire.ask("tools/call", {"name": "acme_block", "arguments": {"path": str(gate)}})
        for _ in range(3):
            assert wire.ask("tools/list")()["result"]["tools"]
        gate.touch()
        assert blocked()["result"]["structuredContent"] == {"came": True}


def test_a_bug_gives_the_caller_an_id_and_standard_error_the_traceback_without_the_secret(
    tmp_path: Path,
) -> None:
    secret = "made-up-secret-4711-4711"
    with Wire(tmp_path, env=plugin.environment(ACME_API_KEY=secret)) as wire:
        wire.initialize()
        result = wire.call("acme_bug")
        assert result["isError"]
        text = result["content"][0]["text"]
        bug_id = text.split("Internal error ")[1].split()[0]
        assert "unexpected" not in text and secret not in json.dumps(wire.frames)
        wire.close()
        assert bug_id in wire.stderr() and "RuntimeError: unexpected" in wire.stderr()
        assert secret not in wire.stderr()


def test_an_unknown_tool_and_an_unknown_resource_are_protocol_errors(tmp_path: Path) -> None:
    with Wire(tmp_path) as wire:
        wire.initialize()
        assert wire.ask("tools/call", {"name": "no", "arguments": {}})()["error"]["code"] == -32602
        for uri in ("evidence://abcdef", "file:///etc/passwd", "evidence://../../etc/passwd"):
            error = wire.ask("resources/read", {"uri": uri})()["error"]
            assert error["code"] == -32602 and "root:" not in json.dumps(error)


def test_a_read_only_server_offers_only_what_reads(tmp_path: Path) -> None:
    with Wire(tmp_path, "--read-only") as wire:
        wire.initialize()
        tools = wire.ask("tools/list")()["result"]["tools"]
        assert {t["name"] for t in tools} == BUILT_IN | {"job_status"}
        assert all(t["annotations"]["readOnlyHint"] for t in tools)
        call = {"name": "roofline", "arguments": {"model": "x"}}
        assert wire.ask("tools/call", call)()["error"]["code"] == -32602


def test_an_operation_that_exits_is_a_bug_and_the_server_goes_on(tmp_path: Path) -> None:
    with Wire(tmp_path, env=plugin.environment()) as wire:
        wire.initialize()
        assert "Internal error" in wire.call("acme_exit")["content"][0]["text"]
        assert wire.structured("list_evidence")["total"] == 0


def test_a_file_name_that_is_no_unicode_is_named_by_its_escape(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    Path(os.fsdecode(os.fsencode(model) + b"/model\xff.safetensors")).write_bytes(b"rubbish")
    home = os.fsdecode(os.fsencode(tmp_path) + b"/home\xff")
    with Wire(Path(home)) as wire:
        wire.initialize()
        result = wire.call("roofline", model=str(model))
        assert result["isError"] and "\\udcff" in result["content"][0]["text"]
        assert wire.structured("list_evidence")["root"].endswith("home\\udcff/evidence")


def test_half_an_emoji_is_answered_wherever_it_stands(tmp_path: Path) -> None:
    with Wire(tmp_path) as wire:
        wire.initialize()
        half = "half an emoji \ud83d"
        result = wire.call("roofline", model=half)
        assert result["isError"] and "lone surrogates" in result["content"][0]["text"]
        assert wire.call("roofline", model="m", **{half: 1})["isError"]
        for method, params in (
            ("tools/call", {"name": half, "arguments": {}}),
            ("resources/read", {"uri": f"evidence://{half}"}),
            ("resources/list", {"cursor": half}),
        ):
            assert wire.ask(method, params)()["error"]["code"] == -32602
        listed = wire.structured("list_evidence", model="a whole \U0001f600, a \\ud83d of text")
        assert listed["total"] == 0


def test_odd_resource_addresses_and_cursors_are_refused_by_us(tmp_path: Path) -> None:
    with Wire(tmp_path) as wire:
        wire.initialize()
        for uri in ("evidence://[", "evidence://", "evidence://abcdef/a?offset=9" + "9" * 40):
            assert wire.ask("resources/read", {"uri": uri})()["error"]["code"] == -32602
        for cursor in ("[null,1e99]", "[" * 5_000, "x~1", "2026~" + "9" * 30):
            assert wire.ask("resources/list", {"cursor": cursor})()["error"]["code"] == -32602
        wire.close()
        assert "Traceback" not in wire.stderr()


def test_a_home_that_cannot_be_written_is_told_with_what_to_do(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "evidence").write_text("a file in the way", encoding="utf-8")
    with Wire(home) as wire:
        wire.initialize()
        text = wire.call("roofline", model="m")["content"][0]["text"]
        assert "evidence" in text and "Next:" in text and "Internal" not in text


def test_rubbish_on_the_wire_does_not_end_the_server(tmp_path: Path) -> None:
    with Wire(tmp_path) as wire:
        wire.initialize()
        assert wire.process.stdin is not None
        wire.process.stdin.write(b"not json\n\xff\xfe\n{}\n[1,2]\n")
        wire.process.stdin.flush()
        assert wire.structured("list_evidence")["total"] == 0
        wire._bad = [b for b in wire._bad if b'"error"' not in b]  # replies without an id


@pytest.mark.parametrize("how", ["end of input", "SIGTERM", "SIGINT", "SIGHUP"])
def test_the_server_ends_when_it_should(tmp_path: Path, how: str) -> None:
    with Wire(tmp_path) as wire:
        wire.initialize()
        if how == "end of input":
            assert wire.close() == 0
            return
        number = signal.Signals[how]
        wire.process.send_signal(number)
        assert wire.process.wait(20) == 128 + number


def test_the_server_ends_when_its_parent_was_killed_though_the_pipe_stays_open(
    tmp_path: Path,
) -> None:
    read, write = os.pipe()
    start = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'ikit_mcp.cli', 'serve'], stdin=0,"
        " stdout=subprocess.PIPE)\n"
        "p.stdout.readline()\n"  # the reply to initialize: it is serving
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", start],
        stdin=read,
        stdout=subprocess.PIPE,
        env={**os.environ, "IKIT_HOME": str(tmp_path)},
    ) as parent:
        hello = {"protocolVersion": "2025-11-25", "capabilities": {},
                 "clientInfo": {"name": "x", "version": "0"}}  # fmt: skip
        frame = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        os.write(write, json.dumps(frame).encode() + b"\n")
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        descriptor = os.pidfd_open(server)
        parent.kill()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(20_000), "the server still runs"
    os.close(read)
    os.close(write)
    os.close(descriptor)
