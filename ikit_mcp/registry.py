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

import difflib
import enum
import importlib
import inspect
import logging
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from types import FunctionType, ModuleType
from typing import Any, Literal, get_args

ArgType = Literal["string", "integer", "number", "boolean", "array"]
ItemType = Literal["string", "integer", "number"]

ENTRY_POINT_GROUP = "ikit_mcp.operations"
BUILTIN_DISTRIBUTION = "ikit-mcp"
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,31}")
WORD_PATTERN = re.compile(r"[a-z][a-z0-9-]{0,31}")
# Names that the server and the command line need for themselves.
SERVER_OPERATIONS = frozenset({"job_status", "cancel_job"})
OWN_COMMANDS = frozenset({"serve", "install-snippet", "completion"})
MAX_PLUGIN_ERROR = 400
OWN_ARGUMENTS = frozenset(
    {"call", "check", "help", "json", "operation", "run", "svg", "wait_seconds"}
)


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


def _cut(text: str, limit: int) -> str:
    return text[:limit]


_head: Callable[[str, int], str] = _cut


def use_redactor(head: Callable[[str, int], str]) -> None:
    """Let ``excerpt`` use this: the redactor lies in a layer above, and puts itself in."""
    global _head
    _head = head


def excerpt(text: str, limit: int) -> str:
    """The first ``limit`` characters of a text from outside, for an error or a record.

    Half a secret is recognised by nobody, so the text is redacted before it is cut.
    """
    return _head(text, limit)


class ArgumentError(OpError):
    """A call whose arguments do not fit: what was wrong with each of them."""


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
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(self.choices))
        if problem := self._type_problem() or self._value_problem():
            raise ValueError(f"argument {self.name}: {problem}")

    def _type_problem(self) -> str | None:
        """What is wrong with the type, or with what goes with it."""
        if self.type not in get_args(ArgType):
            return f"type {self.type!r} is not one of {', '.join(get_args(ArgType))}"
        if (self.type == "array") != (self.items is not None):
            return "arrays, and only arrays, have items"
        if self.items is not None and self.items not in get_args(ItemType):
            return f"items {self.items!r} is not one of {', '.join(get_args(ItemType))}"
        if self.choices is not None and self.type != "string":
            return "choices are for strings"
        if self.choices is not None and not (self.choices and _all_text(self.choices)):
            return "choices are texts, one at least"
        bounds = [bound for bound in (self.minimum, self.maximum) if bound is not None]
        if bounds and self.type not in ("integer", "number"):
            return "minimum and maximum are for numbers"
        if not all(map(math.isfinite, bounds)) or bounds != sorted(bounds):
            return "minimum and maximum are finite, and in this order"
        return None

    def _value_problem(self) -> str | None:
        """What is wrong with the default."""
        if self.default is None:
            return None
        if self.required:
            return "a required argument has no default"
        values = self.default if self.type == "array" else [self.default]
        if not isinstance(values, (list, tuple)):
            return "the default of an array is a list"
        for value in values:
            if not _is_of(self.items or self.type, value):
                return f"the default {value!r} is not of type {self.items or self.type}"
            if self.choices is not None and value not in self.choices:
                return f"the default {value!r} is not one of the choices"
            low, high = self.minimum, self.maximum
            if (low is not None and value < low) or (high is not None and value > high):
                return f"the default {value!r} is outside the limits"
        return None


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_of(kind: str, value: object) -> bool:
    """Whether a default's value has the type that its schema will name."""
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    if kind == "number":
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, int if kind == "integer" else str)


@dataclass(frozen=True)
class Plugin:
    """Where operations came from: entry point, distribution, version, and what went wrong."""

    name: str
    distribution: str
    version: str
    error: str | None = None


Early = Callable[[Mapping[str, Any], Any], None]
"""``(arguments, settings)``: raises OpError for what can be refused without the device."""


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
    early: Early | None = None

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
    early: Early | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the decorated function as an operation; the function comes back unchanged.

    ``cli`` is the command path (``("evidence", "list")``), or None for an operation
    that only the server offers; ``tool=False`` makes it a command without a tool.
    ``long`` operations run in a worker process and may outlive one call.  ``early`` gets the
    arguments and the settings before the call waits for its device, and raises OpError for
    what is wrong with them already: nobody should wait an hour to hear of a mistyped path.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"operation name {name!r} is not {NAME_PATTERN.pattern}")
    arguments = tuple(args)
    names = [a.name for a in arguments]
    if len(set(names)) != len(names):
        raise ValueError(f"operation {name}: an argument is declared twice")
    path = tuple(cli) if cli is not None else None
    if path is not None and not (path and all(map(WORD_PATTERN.fullmatch, path))):
        raise ValueError(f"operation {name}: command {path!r} is not words {WORD_PATTERN.pattern}")

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep the declaration beside the function; loading a plug-in collects it."""
        strongest = effects.strongest if isinstance(effects, Varying) else effects
        of = effects.of if isinstance(effects, Varying) else lambda _arguments: strongest
        taken = list(inspect.signature(function).parameters)[1:]
        if sorted(taken) != sorted(names):
            raise ValueError(
                f"operation {name}: the function takes {', '.join(taken) or 'none'},"
                f" declared are {', '.join(names) or 'none'}"
            )
        _declared[function] = Operation(
            name, path, help, arguments, strongest, function, of, long, open_world, tool,
            early=early,
        )  # fmt: skip
        return function

    return register


@dataclass
class Registry:
    """The operations that were found, by name, and the plug-ins that they came from."""

    operations: dict[str, Operation] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)

    def add(self, op: Operation) -> None:
        """Add one operation; ValueError when it collides, naming both distributions."""
        if problem := _own_name_problem(op):
            raise ValueError(f"operation {op.name} of {_origin(op)}: {problem}")
        for other in self.operations.values():
            if other.name == op.name or _commands_collide(op.cli, other.cli):
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
            known = sorted(self.operations)
            close = difflib.get_close_matches(name[:64], known, n=3, cutoff=0.5)
            shown = name if len(name) <= 64 else f"{excerpt(name, 64)}…"
            raise OpError(
                f"unknown operation {shown!r}",
                f"use one of: {', '.join(close or known[:40])}" if known else "none is loaded",
            ) from None

    def tools(self) -> list[Operation]:
        """The operations that become MCP tools, in the order of declaration."""
        return [op for op in self.operations.values() if op.tool]

    def commands(self) -> list[Operation]:
        """The operations that become commands, in the order of declaration."""
        return [op for op in self.operations.values() if op.cli is not None]


def _commands_collide(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> bool:
    """Whether two command paths are one, or one is the group that the other is in."""
    if one is None or other is None:
        return False
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _own_name_problem(op: Operation) -> str | None:
    """What an operation takes away from the server or the command line, if anything."""
    if op.name in SERVER_OPERATIONS:
        return "the name is the server's own"
    if op.cli is not None and op.cli[0] in OWN_COMMANDS:
        return f"the command {op.cli[0]} is the command line's own"
    options: set[str] = set()
    for arg in op.args:
        taken = {arg.name} | ({f"no_{arg.name}"} if arg.type == "boolean" else set())
        if taken & OWN_ARGUMENTS:
            return f"the argument name {arg.name} is reserved"
        if taken & options:
            return f"the options of the argument {arg.name} are another argument's too"
        options |= taken
    return None


def _origin(op: Operation) -> str:
    return f"{op.plugin.distribution} {op.plugin.version}" if op.plugin else "this process"


def operations_in(module: ModuleType) -> list[Operation]:
    """The operations that the module and its public submodules declare, in order."""
    modules = [module]
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        if not info.name.startswith("_") and not info.ispkg:
            modules.append(importlib.import_module(f"{module.__name__}.{info.name}"))
    found: dict[Callable[..., Any], Operation] = {}  # a function may have two names in its module
    for each in modules:
        for value in vars(each).values():
            own = isinstance(value, FunctionType) and value.__module__ == each.__name__
            if own and value in _declared:
                found[value] = _declared[value]
    return list(found.values())


def selected(setting: str | None) -> tuple[bool, frozenset[str]]:
    """What ``IKIT_PLUGINS`` asks for: whether the built-ins are loaded, and which plug-ins.

    Unset (or empty) loads the built-ins alone; ``none`` loads nothing; a
    comma-separated list of entry-point names loads those beside the built-ins.
    """
    wanted = frozenset(part.strip() for part in (setting or "").split(",")) - {""}
    if "none" in {name.lower() for name in wanted}:  # whatever stands beside it: load nothing
        return False, frozenset()
    return True, wanted


def _is_builtin(name: str, distribution: str) -> bool:
    normal = re.sub(r"[-_.]+", "-", distribution.lower())
    return name == "builtin" and normal == BUILTIN_DISTRIBUTION


def load(setting: str | None = None) -> Registry:
    """All operations of the plug-ins that ``setting`` (``IKIT_PLUGINS``) selects.

    A plug-in that is not installed, fails to import, or collides with what is loaded
    already stays in ``plugins`` with its error, and nothing of it is loaded; the rest is
    loaded all the same.  Built-ins come first, so that a third party can never take a
    built-in's name.
    """
    registry = Registry()
    builtins, wanted = selected(setting)
    found: list[tuple[bool, Plugin, EntryPoint]] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        plugin = _plugin_of(entry)
        builtin = _is_builtin(plugin.name, plugin.distribution)
        if builtins if builtin else plugin.name in wanted:
            found.append((not builtin, plugin, entry))
    found.sort(key=lambda f: (f[0], f[1].distribution, f[1].name))
    registry.plugins = [_load_one(registry, entry, plugin) for _, plugin, entry in found]
    for name in sorted(wanted - {plugin.name for plugin in registry.plugins}):
        problem = "no installed distribution offers a plug-in of this name"
        registry.plugins.append(Plugin(name, "unknown", "unknown", problem))
    return registry


def _plugin_of(entry: EntryPoint) -> Plugin:
    """The plug-in of an entry point; a distribution without readable metadata is unknown."""
    try:
        distribution, version = entry.dist.name, entry.dist.version  # type: ignore[union-attr]
    except (AttributeError, KeyError):  # by version of Python: no distribution, or no such field
        distribution = version = None
    return Plugin(entry.name, distribution or "unknown", version or "unknown")


def _load_one(registry: Registry, entry: EntryPoint, plugin: Plugin) -> Plugin:
    """Load one entry point into the registry; the plug-in comes back with its error, if any."""
    try:
        if not _is_builtin(plugin.name, plugin.distribution):  # one that hangs is named in the log
            logging.getLogger(__name__).info("loading plug-in %s", plugin.name)
        module = entry.load()
        if not isinstance(module, ModuleType):
            raise TypeError(f"the entry point {entry.value} is not a module")
        declared = operations_in(module)
        if not declared:
            raise ValueError(f"{entry.value} declares no operation")
        trial = Registry(dict(registry.operations))
        for op in declared:
            trial.add(replace(op, plugin=plugin))
    except (Exception, SystemExit) as error:  # an import can fail in any way; it is reported
        logging.getLogger(__name__).warning("plug-in %s: %s", plugin.name, error, exc_info=True)
        return replace(plugin, error=excerpt(f"{type(error).__name__}: {error}", MAX_PLUGIN_ERROR))
    registry.operations = trial.operations
    return plugin
