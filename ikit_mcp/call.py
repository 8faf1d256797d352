"""A call: all that a running operation may touch.

An operation gets one object.  Through it, it reports progress, notices that it was
cancelled, starts programs, gets a private folder, asks another operation, and saves
what it found.  Nothing else of the machinery is reachable from an operation, so every
rule that must always hold -- the record is complete and free of secrets, it is on disk
before anybody hears of it, an inner operation is checked like an outer one -- is kept
in one place.
"""

from __future__ import annotations

import os
import platform as python_platform
import re
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp import __version__
from ikit_mcp.arguments import option
from ikit_mcp.evidence import signing, times
from ikit_mcp.evidence.record import Draft, EvidenceRecord, Provenance, assemble, storable
from ikit_mcp.evidence.store import Store
from ikit_mcp.process import devices, environment, output, platform, secrets
from ikit_mcp.process import run as process_run
from ikit_mcp.registry import READS, Effects, Operation, OpError, Plugin, excerpt

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_TEXT = 200
Device = devices.Device
Cpu = platform.Cpu
log_end, log_ends = output.log_end, output.log_ends


class Cancelled(Exception):
    """The call was cancelled; raised out of the operation, never shown as an error."""


MANY = 10_000
"""More steps than anybody counts: bytes, rows."""


@dataclass(frozen=True)
class Progress:
    """How far a call is: ``done`` of ``total`` steps (None: unknown), and what is being done."""

    done: float
    total: float | None
    what: str

    @property
    def part(self) -> str:
        """How far, in words: ``3 of 7`` of a few steps, per cent of many; empty when unknown."""
        if not self.total:
            return ""
        if self.total <= MANY:
            return f"{self.done:g} of {self.total:g}"
        return f"{self.done / self.total:.0%}".replace("%", " %")


@dataclass(frozen=True)
class Settings:
    """What the user configured by environment variables, read once."""

    home: Path
    signing_key: Path | None = None
    plugins: str | None = None

    def signer(self) -> Ed25519PrivateKey | None:
        """The key that signs records; OpError when the one that is set cannot be used."""
        return signing.load_signing_key(self.signing_key) if self.signing_key else None

    def ready_to_save(self) -> None:
        """OpError when a record could not be saved: asked before anything is measured."""
        self.signer()
        Store(self.home).ready()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings in ``IKIT_HOME``, ``IKIT_SIGNING_KEY`` and ``IKIT_PLUGINS``."""
        env = os.environ if environ is None else environ
        key = env.get("IKIT_SIGNING_KEY")
        return cls(_home(env), Path(key) if key else None, env.get("IKIT_PLUGINS"))


def _home(env: Mapping[str, str]) -> Path:
    """``IKIT_HOME``, else the platform's folder for a user's data."""
    if given := env.get("IKIT_HOME"):
        try:
            return expanded(given)
        except OpError:  # ~somebody who is not a user here
            raise OpError(
                f"IKIT_HOME is {excerpt(given, 200)!r}, and there is no such user",
                "set IKIT_HOME to a folder of your own",
            ) from None
    if sys.platform == "win32":
        return Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ikit"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "ikit"
    data = env.get("XDG_DATA_HOME") or ""
    return (Path(data) if data.startswith("/") else Path.home() / ".local" / "share") / "ikit"


@dataclass
class Shown:
    """What an operation wants in its reply: paths under ``data``, and the next calls."""

    data: list[str] = field(default_factory=list)
    next: list[dict[str, Any]] = field(default_factory=list)


Invoke = Callable[["Call", str, Mapping[str, Any]], Any]


@dataclass
class Call:
    """One running operation; made by the runner, handed to the operation's function."""

    operation: Operation
    args: dict[str, Any]
    settings: Settings
    scope: Effects
    plugins: Sequence[Plugin] = ()
    job_id: str | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    report: Callable[[Progress], None] = lambda progress: None
    invoker: Invoke | None = None
    known: Callable[[str], bool] = lambda name: False
    locked: frozenset[str] = frozenset()
    hold_fds: tuple[int, ...] = ()
    parent: Call | None = None
    started: str = field(default_factory=times.now)
    shown: Shown = field(default_factory=Shown)
    _closing: ExitStack = field(default_factory=ExitStack)
    _store: Store | None = None
    _folder: Path | None = None

    # --- while it runs -----------------------------------------------------------

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        """Say how far it is; raises ``Cancelled`` when the call was cancelled."""
        self.check_cancelled()
        self.report(Progress(done, total, one_line(what)))

    def check_cancelled(self) -> None:
        """Raise ``Cancelled`` when the call was cancelled."""
        if self.cancel.is_set():
            raise Cancelled(self.operation.name)

    @property
    def store(self) -> Store:
        """The evidence store of the user's home; OpError when the home is not safe to use."""
        if self._store is None:
            self._store = Store(self.settings.home)
        return self._store

    @property
    def folder(self) -> Path:
        """A private folder on the home's disk, removed when the call ends."""
        if self._folder is None:
            self._folder = self._closing.enter_context(self.store.work_folder())
        return self._folder

    def close(self) -> None:
        """Remove the call's folder; the runner calls it when the operation has ended."""
        self._closing.close()

    def run(self, argv: Sequence[str], *, timeout: float, **options: Any) -> process_run.Result:
        """Run a program to its end under a supervisor (``process.run.run``).

        Cancelling the call ends it and everything it started; so does the death of
        this process.  Raises ``Cancelled`` when that was the reason.
        """
        result = process_run.run(
            argv, timeout=timeout, cancel=self.cancel, hold_fds=self.hold_fds, **options
        )
        self.check_cancelled()
        return result

    @staticmethod
    def devices() -> list[Device]:
        """The devices of this machine, GPUs first, the CPU last."""
        return devices.devices()

    @staticmethod
    def cpu() -> Cpu:
        """What the CPU is: model, cores, threads, memory, NUMA nodes."""
        return platform.cpu_info()

    @staticmethod
    def last_level_cache_bytes() -> int | None:
        """The size of the last-level cache over all sockets, where the platform says it."""
        return platform.last_level_cache_bytes()

    @staticmethod
    def clean_environment(
        keep: Sequence[str] = (), private_home: Path | None = None, *, offline: bool = False
    ) -> dict[str, str]:
        """The short environment for profiled and probed programs; OpError for a secret name.

        ``offline`` tells libraries of the Hub to ask nobody, and to read no token file.
        """
        found = environment.clean_environment(keep, private_home=private_home)
        return environment.OFFLINE | found if offline else found

    @staticmethod
    def benchmark_environment(allow: Sequence[str] = ()) -> dict[str, str]:
        """This process's environment less secrets, except those that the engine needs."""
        return environment.benchmark_environment(allow=allow)

    @staticmethod
    def engine_variables(
        prefixes: Sequence[str], names: Sequence[str], given: Mapping[str, str]
    ) -> environment.EngineVariables:
        """Which engine-configuration variables are set, and given to a child; names only."""
        return environment.engine_variable_names(prefixes, names, given=given)

    @staticmethod
    def secret_rule(words: Sequence[str]) -> str | None:
        """What refuses a command line, or options and assignments; None: harmless.

        That is a rule, or the name of the variable whose value stands there.
        """
        return secrets.secret_argv(words) or secrets.known_in(words)

    @staticmethod
    def search(paths: Sequence[Path]) -> None:
        """Search files for known secrets; OpError names the variables, the files are removed.

        ``save`` does so for artifacts; this is for what comes of them before.
        """
        secrets.scan_or_remove(paths, secrets.own_secrets())

    @staticmethod
    def secret(name: str) -> str:
        """The value of a variable that the caller named; from now on it is redacted.

        OpError when it is not set.
        """
        value = os.environ.get(name)
        if not value:
            raise OpError(
                f"the variable {one_line(name, 80)} is not set here", "set it, and restart"
            )
        # What is redacted is found by its variable's name, and a caller may name any: under
        # this name, every way out of this process finds it.
        os.environ["IKIT_CALLER_KEY"] = value
        return value

    def has(self, name: str) -> bool:
        """Whether an operation of that name is there to be asked or proposed."""
        return self.known(name)

    def invoke(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Ask another operation: its record or dict.  It is checked like an outer call."""
        if self.invoker is None:
            raise OpError(f"{self.operation.name} cannot ask {name} here", "call it by itself")
        return self.invoker(self, name, arguments)

    # --- what it leaves ------------------------------------------------------------

    def propose(self, tool: str, arguments: Mapping[str, Any], why: str) -> None:
        """Propose a next call in the reply, when there is a tool of that name."""
        if self.known(tool):
            self.shown.next.append({"tool": tool, "arguments": dict(arguments), "why": why})

    def save(
        self,
        draft: Draft,
        *,
        artifacts: Mapping[str, tuple[bytes | Path, str]] | None = None,
        resolved: Mapping[str, Any] | None = None,
        reply: Sequence[str] = (),
    ) -> EvidenceRecord:
        """Store a record of what was found; it is on disk when this returns.

        ``artifacts`` maps a name to (bytes or a file to move, media type).
        ``resolved`` holds arguments whose final value differs from what was asked
        (``auto`` became ``headers``); they are pinned in the stored request.
        ``reply`` lists the paths under ``data`` that the reply shows.
        """
        if self.operation.effects == READS:
            raise TypeError(f"{self.operation.name} is declared READS and may not save a record")
        values = secrets.own_secrets()
        files = dict(artifacts or {})
        secrets.scan_or_remove(
            [source for source, _ in files.values() if isinstance(source, Path)], values
        )
        signer = self.settings.signer()
        with self.store.stage() as stage:
            for name, (source, media_type) in files.items():
                if isinstance(source, bytes):
                    source = secrets.redact_bytes(source, values)
                stage.add(name, source, media_type)
            record = assemble(draft, self._provenance(draft, resolved or {}), stage.artifacts)
            saved = stage.commit(secrets.redact_json(record, values), signer)
        self.shown.data.extend(reply)
        return saved

    def _provenance(self, draft: Draft, resolved: Mapping[str, Any]) -> Provenance:
        plugin = self.operation.plugin
        args = storable({**self.args, **resolved})
        request = {"operation": self.operation.name, "args": args}
        changed = {
            name: storable(self.args.get(name))
            for name, value in resolved.items()
            if self.args.get(name) != value
        }
        if changed:
            request["requested"] = changed
        return Provenance(
            started=self.started,
            finished=times.now(),
            tool={
                "name": "ikit-mcp",
                "version": __version__,
                "python": python_platform.python_version(),
                "platform": f"{python_platform.system()} {python_platform.machine()}",
            },
            plugin=None
            if plugin is None
            else {"name": plugin.distribution, "version": plugin.version},
            request=request,
            reproduce=command_line(self.operation, args),
            env_kept=sorted(draft.env_kept),
            env_dropped=sorted(draft.env_dropped),
            parents=list(dict.fromkeys(draft.parents)),
            job_id=self.job_id,
        )


def command_line(operation: Operation, args: Mapping[str, Any]) -> str:
    """The shell line that makes the same call; arguments at their default are left out."""
    options: list[str] = []
    positional: list[str] = []
    for arg in operation.args:
        value = args.get(arg.name)
        if value is None or value == arg.default or (value == [] and not arg.default):
            continue
        if arg.positional:
            positional += map(str, value) if isinstance(value, list) else [str(value)]
        elif isinstance(value, bool):
            options.append(option(arg) if value else "--no-" + option(arg).removeprefix("--"))
        else:
            for item in value if isinstance(value, list) else [value]:
                text = str(item)
                options += (
                    [f"{option(arg)}={text}"] if text.startswith("-") else [option(arg), text]
                )
    path = operation.cli or (operation.name,)
    if any(word.startswith("-") for word in positional):  # a command line of its own goes last
        return shlex.join(["ikit", *path, *options, "--", *positional])
    return shlex.join(["ikit", *path, *positional, *options])


_UNSAFE: dict[int, str | None] = dict.fromkeys([*range(32), *range(127, 160), 0x2028, 0x2029], " ")
_UNSAFE |= dict.fromkeys([0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    """Text from outside as one line without control or bidirectional characters, cut to size."""
    # Redacted before it is cut: half a secret matches nothing any more.
    kept = secrets.head(text, limit * 8)
    line = " ".join(kept.translate(_UNSAFE).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def expanded(path: str) -> Path:
    """The full path of a text from outside, ``~`` and ``~user`` replaced; OpError: nobody's."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise OpError(
            f"{one_line(path, 120)}: there is no such user", "give the path in full"
        ) from None


def visible(text: str) -> str:
    """Text of several lines with what a terminal or a reader would obey as its escape."""
    return text.translate(_VISIBLE) if not text.isascii() or _CONTROLS.search(text) else text


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_VISIBLE = {c: f"\\u{c:04x}" for c in _UNSAFE if c not in (9, 10)}
