"""The next call: the same benchmark without what spoiled it.

A proposal is followed as it stands, so it has to be the very call that was made, every
argument of it, less what is to blame.  Where nothing of the call is to blame (the engine
decided it, or the machine), the same call would end the same, and nothing is proposed.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import Arg
from ikit_ops.engines.adapter import Adapter
from ikit_ops.engines.llamacpp import option_names, split_options

_ALIASES = {
    "n_gpu_layers": ("ngl", "gpu_layers"),
    "no_kv_offload": ("nkvo",),
    "n_cpu_moe": ("ncmoe", "cpu_moe", "cmoe"),
    "flash_attn": ("fa",),
    "threads": ("t", "n_threads"),
}
"""Other names of an argument that is blamed; llama.cpp has two or three for each."""


def is_ours(adapter: Adapter) -> bool:
    """Whether the engine is one that we start, so that arguments can be mended from here."""
    return adapter.name not in ("openai", "cmd")


def given(args: Sequence[Arg], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that are not at their defaults."""
    found = {}
    for arg in args:
        value, default = arguments.get(arg.name), arg.default
        if isinstance(value, (list, tuple)):
            value, default = list(value), list(default or ())
        if value is not None and value != default:
            found[arg.name] = value
    return found


def is_plain(value: Any) -> bool:
    """Whether a value can be shown as it is: ``next`` never repeats text that was changed."""
    if isinstance(value, dict):
        return all(is_plain(part) for part in value.values())
    if isinstance(value, list):
        return all(is_plain(part) for part in value)
    return not isinstance(value, str) or one_line(value) == value


def option_keys(adapter: Adapter, engine_args: Sequence[str]) -> set[str]:
    """The names of the engine's own arguments, those inside of their values left out."""
    if adapter.name == "llamacpp":
        return option_names(split_options(engine_args))
    return {_name(item) for item in engine_args}


def names_threads(adapter: Adapter, engine_args: Sequence[str]) -> bool:
    """Whether ``engine_args`` decide the number of threads."""
    names = option_keys(adapter, engine_args)
    return "threads" in names or (adapter.name == "llamacpp" and "t" in names)


def without(
    adapter: Adapter, same: Mapping[str, Any], blamed: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """``(arguments, left out)``: a call without the arguments to blame, wherever they stand."""
    out: list[str] = []
    names = {alias: name for name in blamed for alias in (name, *_ALIASES.get(name, ()))}
    kept = {}
    for name, value in same.items():
        if name in names:
            out.append(names[name])
        else:
            kept[name] = value
    words = list(same.get("engine_args", ()))
    if words:
        rest = _options(words, names, out) if adapter.name == "llamacpp" else []
        if adapter.name != "llamacpp":
            for item in words:
                key = _name(item)
                if key in names:
                    out.append(names[key])
                else:
                    rest.append(item)
        kept.pop("engine_args", None)
        if rest:
            kept["engine_args"] = rest
    return kept, list(dict.fromkeys(out))


def _options(items: Sequence[str], names: Mapping[str, str], out: list[str]) -> list[str]:
    """The words of a command line less the options to blame and their values."""
    rest, dropping = [], False
    for word in split_options(items):
        if word.startswith("-") and not _is_number(word):
            key = _name(word)
            dropping = key in names
            if dropping:
                out.append(names[key])
        if not dropping:
            rest.append(word)
    if not out:
        return list(items)
    # A word with a space would be split where it is read again.

    return [shlex.quote(word) for word in rest]


def _name(item: str) -> str:
    """The name in ``key=value``, ``--key`` or ``key.part=value``."""
    return item.partition("=")[0].strip().lstrip("-").replace("-", "_").partition(".")[0]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
