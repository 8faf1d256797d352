"""What is generated from the registry is current, and says what it must."""

from __future__ import annotations

import json
import tomllib

import generated
from ikit_mcp import snippets


def test_readme_table_snippets_snapshots_and_schema_are_current() -> None:
    assert generated.stale() == []


def test_a_tool_that_is_missing_from_the_readme_is_noticed() -> None:
    text = generated.README.read_text(encoding="utf-8").replace("`list_evidence`", "`gone`")
    assert generated.readme(text) != text


def test_readme_is_at_most_200_lines() -> None:
    assert len(generated.README.read_text(encoding="utf-8").splitlines()) <= 200


def test_every_client_snippet_parses_as_what_the_client_reads() -> None:
    for name in ("standard", "claude-desktop", "cursor"):
        made = json.loads(snippets.for_client(name))
        assert made["mcpServers"]["ikit"]["args"] == ["ikit-mcp"]
    assert json.loads(snippets.for_client("vscode"))["servers"]["ikit"]["type"] == "stdio"
    codex = tomllib.loads(snippets.for_client("codex"))["mcp_servers"]["ikit"]
    assert codex["tool_timeout_sec"] > 600 and codex["startup_timeout_sec"] > 10
    assert snippets.for_client("claude-code").startswith("claude mcp add ikit -- ")
