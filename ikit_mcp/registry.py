"""The registry of operations: each is declared once and read by everybody.

An operation is a *value*: its name, its command-line path, its help, its list of
``Arg`` and its effects.  The MCP server, the command line, the worker, the
README table and the tests all read that one value, so that the tool an agent
sees and the command a person types cannot drift apart.

Effects are ordered by how much of the world a call may touch: it reads, it
derives a record from data, it measures a device (and so must be alone on it), it
executes a program that the caller named.  Everything that depends on trust --
MCP hints, the device lock, the worker process, ``--read-only`` -- follows from
them, and nothing states it a second time.

Operations are found through entry points (group ``ikit_mcp.operations``).  The
value of an entry point is a module, or a package whose public submodules are
imported.  A plug-in that fails to import is reported, never fatal.
"""

from __future__ import annotations

import enum
import importlib
import logging
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType, ModuleType
from typing import Any, Literal

ArgType = Literal["string", "integer", "number", "boolean", "array"]
ItemType = Literal["string", "integer", "number"]

ENTRY_POINT_GROUP = "ikit_mcp.operations"
BUILTIN_DISTRIBUTION = "ikit-mcp"
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")


class OpError(Exception):
    """A failure that the caller can act on: what went wrong, and what to do next.

    Raise it for anything that is not a bug of ours: bad arguments, a missing file,
    an engine that died.  Any other exception that escapes an operation is treated
    as a bug: the caller gets an id, and the traceback goes to standard error.
    """

    def __init__(self, what: str, next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what}\nNext: {self.next_step}" if self.next_step else self.what


class Effects(enum.IntEnum):
    """How much of the world a call may touch; a larger value includes the smaller ones."""

    READS = 0
    DERIVES = 1
    MEASURES = 2
    EXECUTES = 3


READS, DERIVES, MEASURES, EXECUTES = Effects


@dataclass(frozen=True)
class Varying:
    """Effects that depend on the arguments: the strongest is listed, the actual decides."""

    strongest: Effects
    of: Callable[[Mapping[str, Any]], Effects]


@dataclass(frozen=True)
class Arg:
    """One argument of an operation, from which schema, option and parser are made.

    ``items`` is the type of an array's members; ``unit`` is shown with the help
    (``GB/s``); ``positional`` makes it a positional argument of the command line.
    ``default`` None means that the operation receives None when it is not given.
    """

    name: str
    type: ArgType
    help: str
    required: bool = False
    default: Any = None
    choices: tuple[str, ...] | None = None
    positional: bool = False
    minimum: float | None = None
    maximum: float | None = None
    items: ItemType | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        """Refuse a declaration that no schema or parser could keep."""
        if not NAME_PATTERN.fullmatch(self.name):
            raise ValueError(f"argument name {self.name!r} is not {NAME_PATTERN.pattern}")
        if (self.type == "array") != (self.items is not None):
            raise ValueError(f"argument {self.name}: arrays, and only arrays, have items")
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(self.choices))
            if self.type != "string":
                raise ValueError(f"argument {self.name}: choices are for strings")
        if self.required and self.default is not None:
            raise ValueError(f"argument {self.name}: a required argument has no default")


@dataclass(frozen=True)
class Plugin:
    """Where operations came from: entry point, distribution, version, and what went wrong."""

    name: str
    distribution: str
    version: str
    error: str | None = None


@dataclass(frozen=True)
class Operation:
    """One declared operation; ``function(call, **arguments)`` runs it."""

    name: str
    cli: tuple[str, ...] | None
    help: str
    args: tuple[Arg, ...]
    effects: Effects
    function: Callable[..., Any]
    effects_of: Callable[[Mapping[str, Any]], Effects]
    long: bool = False
    open_world: bool = False
    tool: bool = True
    plugin: Plugin | None = None

    @property
    def needs_lock(self) -> bool:
        """Whether any call of it could need a device: server-only operations never do."""
        return self.effects >= MEASURES and self.cli is not None


_declared: dict[Callable[..., Any], Operation] = {}


def operation(
    name: str,
    cli: Iterable[str] | None,
    help: str,
    args: Iterable[Arg],
    *,
    effects: Effects | Varying,
    long: bool = False,
    open_world: bool = False,
    tool: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as an operation; the function comes back unchanged.

    ``cli`` is the command path (``("evidence", "list")``), or None for an operation
    that only the server offers; ``tool=False`` makes it a command without a tool.
    ``long`` operations run in a worker process and may outlive one call.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"operation name {name!r} is not {NAME_PATTERN.pattern}")
    arguments = tuple(args)
    names = [a.name for a in arguments]
    if len(set(names)) != len(names):
        raise ValueError(f"operation {name}: an argument is declared twice")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the declaration beside the function; loading a plug-in collects it."""
        strongest = effects.strongest if isinstance(effects, Varying) else effects
        of = effects.of if isinstance(effects, Varying) else lambda _arguments: strongest
        path = tuple(cli) if cli is not None else None
        _declared[function] = Operation(
            name, path, help, arguments, strongest, function, of, long, open_world, tool
        )
        return function

    return register


@dataclass
class Registry:
    """The operations that were found, by name, and the plug-ins that they came from."""

    operations: dict[str, Operation] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)

    def add(self, op: Operation) -> None:
        """Add one operation; ValueError names both distributions when it is there already."""
        for other in self.operations.values():
            if other.name == op.name or (op.cli is not None and other.cli == op.cli):
                mine, theirs = _origin(op), _origin(other)
                raise ValueError(
                    f"operation {op.name} of {mine} is declared by {theirs} too (as {other.name})"
                )
        self.operations[op.name] = op

    def get(self, name: str) -> Operation:
        """The operation of that name; OpError with the nearest names when there is none."""
        try:
            return self.operations[name]
        except KeyError:
            known = ", ".join(sorted(self.operations))
            raise OpError(f"unknown operation {name!r}", f"use one of: {known}") from None

    def tools(self) -> list[Operation]:
        """The operations that become MCP tools, in the order of declaration."""
        return [op for op in self.operations.values() if op.tool]

    def commands(self) -> list[Operation]:
        """The operations that become commands, in the order of declaration."""
        return [op for op in self.operations.values() if op.cli is not None]


def _origin(op: Operation) -> str:
    return f"{op.plugin.distribution} {op.plugin.version}" if op.plugin else "this process"


def operations_in(module: ModuleType) -> list[Operation]:
    """The operations that the module and its public submodules declare, in order."""
    modules = [module]
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not info.name.startswith("_") and not info.ispkg:
            modules.append(importlib.import_module(f"{module.__name__}.{info.name}"))
    return [
        _declared[value]
        for found in modules
        for value in vars(found).values()
        if isinstance(value, FunctionType)
        and value.__module__ == found.__name__
        and value in _declared
    ]


def select_plugins(setting: str | None) -> Callable[[str, str], bool]:
    """Which entry points to load, by ``IKIT_PLUGINS``: ``(entry name, distribution) -> bool``.

    Unset loads the built-ins alone; ``none`` loads nothing; a comma-separated list
    of entry-point names loads those beside the built-ins.
    """
    if setting is None or not setting.strip():
        return lambda name, distribution: _is_builtin(name, distribution)
    wanted = {part.strip() for part in setting.split(",") if part.strip()}
    if wanted == {"none"}:
        return lambda name, distribution: False
    return lambda name, distribution: name in wanted or _is_builtin(name, distribution)


def _is_builtin(name: str, distribution: str) -> bool:
    return name == "builtin" and distribution.lower().replace("_", "-") == BUILTIN_DISTRIBUTION


def load(setting: str | None = None) -> Registry:
    """All operations of the plug-ins that ``setting`` (``IKIT_PLUGINS``) selects.

    A plug-in that fails to import, or whose operations collide with those already
    loaded, stays in ``plugins`` with its error; the rest is loaded all the same.
    Built-ins come first, so that a third party can never take a built-in's name.
    """
    registry = Registry()
    wanted = select_plugins(setting)
    found = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        distribution = entry.dist.name if entry.dist is not None else "unknown"
        if wanted(entry.name, distribution):
            version = entry.dist.version if entry.dist is not None else "unknown"
            found.append((not _is_builtin(entry.name, distribution), distribution, entry, version))
    for _, distribution, entry, version in sorted(found, key=lambda f: (f[0], f[1], f[2].name)):
        registry.plugins.append(
            _load_one(registry, entry, Plugin(entry.name, distribution, version))
        )
    return registry


def _load_one(registry: Registry, entry: EntryPoint, plugin: Plugin) -> Plugin:
    """Load one entry point into the registry; the plug-in comes back with its error, if any."""
    try:
        for op in operations_in(entry.load()):
            registry.add(replace(op, plugin=plugin))
    except Exception as error:  # a third party's import can fail in any way; it is reported
        logging.getLogger(__name__).warning("plug-in %s: %s", plugin.name, error, exc_info=True)
        return replace(plugin, error=f"{type(error).__name__}: {error}")
    return plugin
