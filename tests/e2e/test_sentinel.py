"""Made-up secrets, planted wherever one can be, are in no byte that leaves or stays.

The server's environment holds them; an operation puts one into a summary, into data, into a
key, into a file, into a program's output, into an exception; a caller puts one into an
argument.  Then every byte under the home, every frame and all of standard error is searched,
for the value and for what encodings make of it.
"""

from __future__ import annotations

import base64
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import plugin
from helpers.stdio import Wire

SECRET = "Zx9/made+up=secret-4711-4711"
TOKEN = "hf_" + "MadeUpMadeUpMadeUp00"
PASSWORD = "made-up-pa55w0rd-0815"


def traces() -> list[bytes]:
    """What must not be found: each secret plain, URL-encoded, as JSON, in base64."""
    found = []
    for secret in (SECRET, TOKEN, PASSWORD):
        raw = secret.encode()
        found += [
            raw,
            urllib.parse.quote(secret, safe="").encode(),
            json.dumps(secret)[1:-1].encode(),
        ]
        for lead in range(3):  # base64 of a text that holds it, at each alignment
            whole = base64.b64encode(b"x" * lead + raw)
            found.append(whole[4 if lead else 0 : -8])
    return found


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A server whose environment holds the secrets; searched for them when the test is over."""
    folder = tmp_path / "home"
    env = plugin.environment(
        ACME_API_KEY=SECRET,
        HF_TOKEN=TOKEN,
        HTTPS_PROXY=f"http://user:{PASSWORD}@proxy.example:3128",
        AWS_DEFAULT_REGION="us-east-1",
        GITHUB_WORKSPACE=str(Path.cwd()),
    )
    with Wire(folder, env=env) as running:
        running.initialize()
        yield running
        running.close()
        places = {
            "stderr": running.stderr().encode(),
            "frames": json.dumps(running.frames).encode(),
        }
        files = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for name, content in (places | files).items():
            for trace in traces():
                assert trace not in content, f"a secret is in {name}"


@pytest.mark.parametrize("where", ["summary", "data", "key", "artifact_text", "log"])
def test_a_secret_in_what_an_operation_says_is_redacted(wire: Wire, where: str) -> None:
    reply = wire.structured("acme_leak", where=where)
    assert reply["status"] == "done"
    if where in ("data", "log"):
        assert "redacted" in json.dumps(reply["data"])


def test_a_secret_in_a_file_that_an_operation_made_fails_the_call_and_leaves_no_file(
    wire: Wire,
) -> None:
    result = wire.call("acme_leak", where="artifact_file")
    assert result["isError"] and "ACME_API_KEY" in result["content"][0]["text"]
    assert not list(wire.home.rglob("report.bin"))
    assert wire.structured("list_evidence")["total"] == 0


@pytest.mark.parametrize("how", ["bug", "secret_error"])
def test_a_secret_in_an_exception_is_redacted_in_the_reply_and_on_standard_error(
    wire: Wire, how: str
) -> None:
    assert wire.call("acme_fail", how=how)["isError"]


def test_a_secret_in_a_progress_message_is_redacted(wire: Wire) -> None:
    asked = {"name": "acme_tell", "arguments": {}, "_meta": {"progressToken": "t"}}
    assert wire.ask("tools/call", asked)()["result"]["structuredContent"]["status"] == "done"
    told = [n["params"].get("message", "") for n in wire.notifications]
    assert any("redacted" in message for message in told)


def test_a_secret_in_an_argument_is_refused_and_not_repeated(wire: Wire) -> None:
    for value in (TOKEN, f"https://user:{PASSWORD}@host/model", f"Authorization: Bearer {SECRET}"):
        for tool, name in (
            ("roofline", "model"),
            ("acme_echo", "text"),
            ("list_evidence", "model"),
        ):
            result = wire.call(tool, **{name: value})
            assert result["isError"] and "looks like a secret" in result["content"][0]["text"]


def test_a_secret_in_an_unknown_or_misplaced_argument_is_not_echoed(wire: Wire) -> None:
    assert wire.call("list_evidence", limit=TOKEN)["isError"]
    assert wire.call("list_evidence", **{SECRET: 1})["isError"]
    assert wire.call("inspect_evidence", id=f"{SECRET}/evidence.json")["isError"]
    assert wire.call("job_status", job_id=SECRET)["isError"]
    wire.ask("tools/call", {"name": SECRET, "arguments": {}})()
    wire.ask("resources/read", {"uri": f"evidence://{SECRET}"})()


def test_a_region_and_a_working_folder_are_no_secrets(wire: Wire) -> None:
    reply = wire.structured("acme_echo", text=f"us-east-1 in {Path.cwd()}")
    assert reply["text"] == f"us-east-1 in {Path.cwd()}"
