"""What is generated, and the check that it is current: ``python tests/generated.py [--write]``.

The README's tool table and client snippets, one snapshot a tool (a tool's description is an
interface that models read, so a change of it should be seen in review), and the record schema.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ikit_mcp import registry, snippets
from ikit_mcp.evidence import record
from ikit_mcp.jobs import operations as job_operations
from ikit_mcp.registry import Effects, Operation

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SNAPSHOTS = ROOT / "tests" / "data" / "tools"
SCHEMA = ROOT / "ikit_mcp" / "evidence" / "ikit.evidence.1.schema.json"
_TOUCHES = {
    Effects.READS: "reads",
    Effects.DERIVES: "writes a record",
    Effects.MEASURES: "measures a device",
    Effects.EXECUTES: "runs your command",
}


def tools() -> list[Operation]:
    """The operations that a client sees, in the order that it sees them."""
    return [*registry.load(None).tools(), *job_operations()]


def tool_table() -> str:
    """The README's table of tools."""
    lines = ["| tool | command | what it touches | what it does |", "|---|---|---|---|"]
    for op in tools():
        command = f"`ikit {' '.join(op.cli)}`" if op.cli else "server only"
        lines.append(f"| `{op.name}` | {command} | {_TOUCHES[op.effects]} | {op.help} |")
    return "\n".join(lines)


def client_snippets() -> str:
    """The README's set-up texts: one standard JSON, then a fold for each client."""
    parts = [f"```json\n{snippets.for_client('standard')}\n```"]
    for name, (place, _) in snippets.CLIENTS.items():
        if name == "standard":
            continue
        text = snippets.for_client(name)
        kind = {"codex": "toml", "claude-code": "sh"}.get(name, "json")
        parts.append(
            f"<details><summary>{name} ({place})</summary>\n\n```{kind}\n{text}\n```\n\n</details>"
        )
    return "\n\n".join(parts)


def readme(text: str) -> str:
    """The README with its generated parts made anew."""
    for name, made in (("tools", tool_table()), ("clients", client_snippets())):
        pattern = re.compile(f"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, found = pattern.subn(lambda m, made=made: f"{m[1]}{made}\n{m[2]}", text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"README.md has {found} parts named {name}")
    return text


def snapshot(op: Operation) -> str:
    """What a client is told of one tool."""
    from ikit_mcp.server.tools import tool  # the server imports mcp, which costs a second

    shown = tool(op).model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(shown, indent=1) + "\n"


def wanted() -> dict[Path, str]:
    """Every generated file with the content that it should have."""
    files = {README: readme(README.read_text(encoding="utf-8"))}
    files[SCHEMA] = json.dumps(record.json_schema(), indent=1) + "\n"
    files |= {SNAPSHOTS / f"{op.name}.json": snapshot(op) for op in tools()}
    return files


def stale() -> list[str]:
    """The generated files that are not current, or should not be there."""
    files = wanted()
    extra = [p for p in SNAPSHOTS.glob("*.json") if p not in files]
    return [
        str(path.relative_to(ROOT))
        for path in [*files, *extra]
        if not path.is_file() or path.read_text(encoding="utf-8") != files.get(path)
    ]


def main() -> int:
    """Write what is not current, or say what it is."""
    if "--write" in sys.argv[1:]:
        SNAPSHOTS.mkdir(parents=True, exist_ok=True)
        for path, text in wanted().items():
            path.write_text(text, encoding="utf-8")
        for path in set(SNAPSHOTS.glob("*.json")) - set(wanted()):
            path.unlink()
        return 0
    old = stale()
    sys.stdout.write("".join(f"not current: {name} (make generated)\n" for name in old))
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
