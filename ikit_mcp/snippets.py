"""Set-up texts: how each MCP client is told to start the server, and shell completion.

They are made by one function each, so that the README, the command and the tests show
the same text.  Time-outs are part of the set-up: a benchmark takes minutes, and some
clients give a tool call one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

COMMAND = ["uvx", "ikit-mcp"]
TOOL_SECONDS = 1_800
START_SECONDS = 30


def _standard() -> str:
    return _json({"mcpServers": {"ikit": {"command": COMMAND[0], "args": COMMAND[1:]}}})


def _vscode() -> str:
    server = {"type": "stdio", "command": COMMAND[0], "args": COMMAND[1:]}
    return _json({"servers": {"ikit": server}})


def _codex() -> str:
    return "\n".join(
        [
            "[mcp_servers.ikit]",
            f"command = {json.dumps(COMMAND[0])}",
            f"args = {json.dumps(COMMAND[1:])}",
            f"startup_timeout_sec = {START_SECONDS}",
            f"tool_timeout_sec = {TOOL_SECONDS}",
        ]
    )


def _claude_code() -> str:
    return f"claude mcp add ikit -- {' '.join(COMMAND)}"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2)


CLIENTS: dict[str, tuple[str, Callable[[], str]]] = {
    "standard": ("most clients: their `mcpServers` JSON", _standard),
    "claude-code": ("a command", _claude_code),
    "claude-desktop": ("claude_desktop_config.json", _standard),
    "cursor": ("~/.cursor/mcp.json", _standard),
    "vscode": (".vscode/mcp.json", _vscode),
    "codex": ("~/.codex/config.toml", _codex),
}


def for_client(client: str) -> str:
    """The set-up text of one of ``CLIENTS``."""
    return CLIENTS[client][1]()


# --- shell completion ------------------------------------------------------------


def commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every command path with the words that may follow it: sub-commands and options."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            words += list(action.choices)
            for name, inner in action.choices.items():
                yield from commands(inner, (*path, name))
        elif action.choices is not None and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    yield path, sorted(set(words))


def _bash(tree: dict[str, list[str]]) -> str:
    cases = "\n".join(
        f"    {json.dumps(path)}) words={json.dumps(' '.join(words))} ;;"
        for path, words in sorted(tree.items())
    )
    return f"""_ikit() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" path="" word words=""
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$word" in -*) ;; *) path="${{path:+$path }}$word" ;; esac
  done
  while :; do
    case "$path" in
{cases}
    esac
    [ -n "$words" ] && break
    case "$path" in *" "*) path="${{path% *}}" ;; "") break ;; *) path="" ;; esac
  done
  COMPREPLY=( $(compgen -W "$words" -- "$cur") )
  [ ${{#COMPREPLY[@]}} -eq 0 ] && COMPREPLY=( $(compgen -f -- "$cur") )
}}
complete -F _ikit ikit
"""


def _zsh(tree: dict[str, list[str]]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(tree)


def _fish(tree: dict[str, list[str]]) -> str:
    lines = []
    for path, words in sorted(tree.items()):
        seen = " and ".join(f"__fish_seen_subcommand_from {word}" for word in path.split())
        condition = seen.replace(" and ", "; and ") or "__fish_use_subcommand"
        lines += [
            f"complete -c ikit -n '{condition}' "
            + (f"-l {word[2:]}" if word.startswith("--") else f"-a {word}")
            for word in words
        ]
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[dict[str, list[str]]], str]] = {
    "bash": _bash,
    "fish": _fish,
    "zsh": _zsh,
}


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script of one of ``SHELLS``."""
    return SHELLS[shell]({" ".join(path): words for path, words in commands(parser)})
