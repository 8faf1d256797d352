"""From the arguments of a benchmark to a plan: which engine, model, device, threads.

What is left to "auto" is decided here, once, and pinned in the record, so that the same
call can be made again.  Threads are decided too: on a CPU an engine's own default differs
from release to release, and more threads than cores make spinning threads wait for those
that are not running.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Device, Settings, expanded, one_line
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import EXECUTES, MEASURES, Effects, OpError, excerpt
from ikit_ops.engines import adapter_named, adapters
from ikit_ops.engines.adapter import Adapter, Plan, json_or_text
from ikit_ops.engines.again import names_threads
from ikit_ops.engines.find import is_gguf, is_listed

_SUFFIXES = (".gguf", ".safetensors", ".json")
_THREADLESS = frozenset({"openai", "cmd"})


def effects_of(arguments: Mapping[str, Any]) -> Effects:
    """EXECUTES when the call runs a command, an unlisted interpreter, or a model's own code."""
    if arguments.get("engine") == "cmd" or arguments.get("command"):
        return EXECUTES
    python = arguments.get("python")
    if python and not is_listed(str(python)):
        return EXECUTES
    try:
        named = any(_names_code(item) for item in arguments.get("engine_args") or ())
    except RecursionError:  # too deep to be looked through: nobody knows what it names
        named = True
    return EXECUTES if named else MEASURES


_CODE_ENDINGS = (
    "_cls", "_class", "_plugin", "_plugins", "_module", "_module_path", "module_path",
    "class_name", "_hook", "_hooks", "_handler", "_passes", "_qualname", "auto_map",
    "custom_weight_loader", "trust_remote_code",
)  # fmt: skip
"""How names end, in the settings of all engines, whose values name code."""
_LOADS_BY_NAME = ("implementation", "attn_impl")
"""Settings that take a repository of the Hub for a kernel to load: ``owner/kernel``."""


def _names_code(item: str) -> bool:
    """Whether an item of ``engine_args`` makes an engine load code that the caller names."""
    loading = frozenset[str]().union(*(a.executing_args for a in adapters().values()))
    names = argument_names([item])
    if names & loading or any(name.endswith(_CODE_ENDINGS) for name in names):
        return True
    return any(
        name.endswith(_LOADS_BY_NAME) and "/" in text
        for key, value in _readings(item)
        for name, text in _leaves(key, value)
    )


def argument_names(engine_args: Sequence[str]) -> set[str]:
    """The names in ``key=value`` and ``--key value`` items, with underscores, at any depth.

    Dots nest (``compilation_config.mode``), and so do the objects of a JSON value: every
    part counts as a name.  An item is read as every engine would, as an assignment and as
    words of a command line, so that no quoting hides a name.
    """
    names: set[str] = set()
    for item in engine_args:
        for key, value in _readings(item):
            for name, _ in _leaves(key, value):
                names.update((name, *name.split(".")))
    return names - {""}


def _readings(item: str) -> list[tuple[str, Any]]:
    """``(name, value)`` of an item as an assignment, and of the words that it is to a shell."""
    key, _, text = item.partition("=")
    found: list[tuple[str, Any]] = [(key, json_or_text(text))]
    for split in (shlex.split, str.split):
        try:
            words = split(item)
        except ValueError:  # an open quote; the engine refuses it
            continue
        last = ""
        for word in words:
            name, _, value = word.partition("=")
            found += [(name, json_or_text(value)), (last, json_or_text(word))]
            last = name
    return found


def _leaves(name: str, value: Any, inside: str = "") -> Iterator[tuple[str, str]]:
    """``(name, text)`` of a value and of all that it holds; what holds a name comes before it.

    A text that is JSON itself is gone through too: engines parse such texts again.  One that
    only looks like it is given word by word.
    """
    own = _plain(name) or inside
    if isinstance(value, dict):
        yield own, ""
        for key, part in value.items():
            yield _plain(str(key)), ""
            yield from _leaves(str(key), part, own)
            if not isinstance(part, (dict, list)):
                yield own, str(part)
    elif isinstance(value, list):
        yield own, ""
        for part in value:
            yield from _leaves("", part, own)
    else:
        text = str(value)
        yield own, text
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            try:
                again = json.loads(value)
            except (ValueError, RecursionError):
                yield from ((word, text) for word in re.findall(r"\w+", _plain(value)))
            else:
                yield from _leaves(name, again, inside)


def _plain(name: str) -> str:
    """A name with underscores and without dashes before it."""
    return name.strip().lstrip("-").replace("-", "_")


def refuse_early(arguments: Mapping[str, Any], settings: Settings) -> None:
    """OpError for what is wrong whatever the device: ids of no record, a path of no model.

    ``make_plan`` refuses the same and more; but it runs when the device is ours, which may be an
    hour after a name was mistyped.
    """
    store = Store(settings.home)
    for name, kind in (("roofline", "roofline"), ("reference", "bench")):
        if arguments[name] is not None:
            store.require(arguments[name], kind)
    absolute(arguments["python"])
    served = arguments["engine"] in _THREADLESS or arguments["command"] or arguments["url"]
    if arguments["engine"] != "auto":
        _refuse_idle(adapter_named(arguments["engine"]), arguments)
    if not served and existing(arguments["model"]) is None:
        _refuse_lost_path(arguments["model"])


def make_plan(call: Call, arguments: Mapping[str, Any]) -> tuple[Adapter, Plan]:
    """The engine and the plan of a call; OpError for what cannot be."""
    args = dict(arguments)
    engine_args = tuple(args["engine_args"] or ())
    _refuse_secrets(call, engine_args)
    args["python"] = absolute(args["python"])
    path = existing(args["model"])
    adapter = choose(call, args, path)
    _refuse_idle(adapter, args)
    if adapter.name == "openai":
        path = None  # the name is the server's, whatever lies here under the same
    if path is not None and args["revision"] is not None:
        raise OpError(
            "revision was given, but the model is a local path",
            "leave revision out, or give the Hub id",
        )
    if path is None and adapter.name not in _THREADLESS:
        _refuse_lost_path(args["model"])
    asked = args["device"] or "auto"
    devices = chosen_devices(call, asked)
    unknown = adapter.name == "openai" and asked == "auto"
    threads = args["threads"]
    if threads is None and devices[0].id == "cpu" and adapter.name not in _THREADLESS:
        threads = default_threads(call)
    return adapter, Plan(
        model=args["model"],
        path=path,
        revision=args["revision"],
        engine_args=engine_args,
        prompt_len=args["prompt_len"],
        gen_len=args["gen_len"],
        rounds=args["rounds"],
        warmup=args["warmup"],
        seed=args["seed"],
        round_offset=args["round_offset"],
        nonce=secrets.token_hex(8),
        device=None if unknown else devices[0],
        devices=() if unknown else tuple(devices),
        threads=threads,
        keep_going=args["keep_going"],
        timeout=args["timeout"],
        command=tuple(args["command"] or ()),
        url=args["url"],
        api_key_env=args["api_key_env"],
        python=args["python"],
        device_asked=asked,
    )


def _refuse_secrets(call: Call, engine_args: Sequence[str]) -> None:
    """OpError for an argument that holds a key: command lines and logs show it to everybody."""
    words = [word for item in engine_args for word in item.split()]
    if rule := call.secret_rule(words):
        raise OpError(
            f"engine_args was refused: {rule} looks like a secret",
            "give keys by the name of a variable (api_key_env)",
        )


def absolute(python: str | None) -> str | None:
    """The interpreter by its full path: the engine runs in another folder."""
    if python is None:
        return None
    if "/" in python or "\\" in python:
        return str(expanded(python))
    found = shutil.which(python)
    if found is None:
        raise OpError(f"there is no {one_line(python, 80)} on PATH", "give its full path")
    return found


def without_secrets(call: Call, flags: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An engine's flags less those whose name or value looks like a secret."""
    if flags is None:
        return None
    return {
        name: value
        for name, value in flags.items()
        if call.secret_rule([f"{name}={json.dumps(value)}"]) is None
    }


def existing(model: str) -> Path | None:
    """The model as an absolute path, when something is there."""
    try:
        path = Path(model).expanduser()
        return path.absolute() if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        return None


def _refuse_lost_path(model: str) -> None:
    if model.startswith((".", "/", "~")) or Path(model).suffix in _SUFFIXES:
        raise OpError(
            f"{one_line(model)}: no such file or folder", "give an existing path, or a Hub id"
        )


def choose(call: Call, args: Mapping[str, Any], path: Path | None) -> Adapter:
    """The engine that was named, or that ``auto`` finds for this model."""
    engine = args["engine"]
    if engine != "auto":
        return adapter_named(engine)
    if args["command"]:
        return adapter_named("cmd")
    if args["url"]:
        return adapter_named("openai")
    wanted = "gguf" if path is not None and is_gguf(path) else "safetensors"
    tried = []
    for adapter in adapters().values():
        if wanted not in adapter.formats:
            continue
        try:
            adapter.find(call, _probe(args))
        except OpError as error:
            tried.append(error.what)
        else:
            return adapter
    raise OpError(
        f"no engine for {wanted} weights is here: {'; '.join(tried)}",
        "install one in a Python of its own, and name it by python=PATH or IKIT_PYTHONS",
    )


def _refuse_idle(adapter: Adapter, args: Mapping[str, Any]) -> None:
    """OpError for an argument that this engine would leave unused without a word."""
    for name, owner in (("command", "cmd"), ("url", "openai"), ("api_key_env", "openai")):
        if args[name] and adapter.name != owner:
            raise OpError(
                f"{name} is for engine={owner}, not for {adapter.name}", f"leave {name} out"
            )
    if args["python"] and adapter.name in _THREADLESS:
        raise OpError(f"engine={adapter.name} runs no Python of its own", "leave python out")
    if args["threads"] is None:
        return
    if adapter.name == "openai":
        raise OpError("threads does not reach a server that runs", "leave threads out")
    if names_threads(adapter, args["engine_args"] or ()):
        raise OpError("threads is given twice: also in engine_args", "give it once")


def _probe(args: Mapping[str, Any]) -> Plan:
    """A plan that is good for looking for an engine, and for nothing else."""
    return Plan(
        model=args["model"], path=None, revision=None, engine_args=(), prompt_len=1, gen_len=1,
        rounds=1, warmup=0, seed=0, round_offset=0, nonce="", device=None, threads=None,
        keep_going=False, timeout=1.0, python=args["python"],
    )  # fmt: skip


def chosen_devices(call: Call, asked: str) -> list[Device]:
    """The devices of a ``device`` argument (``auto``, ``cpu``, ``cuda:0,cuda:1``)."""
    there = call.devices()
    found = []
    for part in asked.split(","):
        wanted = part.strip()
        matching = [d for d in there if wanted in ("auto", d.id, d.uuid, d.id.split(":")[0])]
        if not matching:
            known = ", ".join(d.id for d in there)
            raise OpError(
                f"device {excerpt(wanted, 60)!r} is not here", f"use one of: auto, {known}"
            )
        found.append(matching[0])
    return found


def default_threads(call: Call) -> int:
    """The physical cores that this process may use; at least one."""
    cpu = call.cpu()
    usable = cpu.usable_threads or cpu.threads or 1
    return max(1, min(cpu.cores or usable, usable))
