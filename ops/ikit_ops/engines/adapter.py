"""The interface of an engine: find it, start its worker, read what it says, judge it.

An engine lives in a Python of its own (two of them cannot even share one) or is a program
or a server.  So its adapter runs here and knows no more than names and words, while its
*worker*, a script below ``workers/``, runs there.  Between them go two JSON files, the
configuration and the result, whose form is the same for all; the form is public, because
the engine ``cmd`` lets any program take part.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ikit_mcp.call import Call, Device
from ikit_mcp.registry import OpError, excerpt

if TYPE_CHECKING:
    from ikit_ops.engines.gates import Check, Seen
    from ikit_ops.engines.result import WorkerResult

CONFIG_FORMAT = "ikit.bench-config/1"
WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Plan:
    """A benchmark that was asked for, with everything resolved.

    ``path`` is the model on this machine, None for a Hub id; ``device`` None means that
    nobody knows on which device the engine runs (a server elsewhere).
    """

    model: str
    path: Path | None
    revision: str | None
    engine_args: tuple[str, ...]
    prompt_len: int
    gen_len: int
    rounds: int
    warmup: int
    seed: int
    round_offset: int
    nonce: str
    device: Device | None
    threads: int | None
    keep_going: bool
    timeout: float
    command: tuple[str, ...] = ()
    url: str | None = None
    api_key_env: str | None = None
    python: str | None = None
    device_asked: str = "auto"
    devices: tuple[Device, ...] = ()

    @property
    def platform(self) -> str | None:
        """``cuda``, ``rocm`` or ``cpu``: what the device is; None where it is unknown."""
        return None if self.device is None else self.device.id.split(":")[0]

    def config(self) -> dict[str, Any]:
        """What every worker is told."""
        return {
            "format": CONFIG_FORMAT,
            "model": self.model if self.path is None else str(self.path),
            "revision": self.revision,
            "prompt_len": self.prompt_len,
            "gen_len": self.gen_len,
            "rounds": self.rounds,
            "warmup": self.warmup,
            "seed": self.seed,
            "round_offset": self.round_offset,
            "nonce": self.nonce,
            "threads": self.threads,
            "device": None if self.device is None else self.device.id,
            "keep_going": self.keep_going,
        }


@dataclass(frozen=True)
class Found:
    """Where an engine is: an interpreter that has it, or a program; and its version."""

    python: str | None = None
    program: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class AttentionNames:
    """An engine's attention backends, as of a version and a date.

    ``fallback`` spoils the number unless the user asked for it by name; ``known`` are
    legitimate, some of them only on some hardware; any other name is unknown.
    """

    source: str
    fast: frozenset[str]
    legitimate: frozenset[str]
    fallback: frozenset[str]


class Adapter:
    """An engine.  Subclasses fill in what differs; one instance a module, ``ADAPTER``."""

    name = ""
    title = ""
    rank = 50
    distributions: tuple[str, ...] = ()
    worker = ""
    formats: frozenset[str] = frozenset()
    reports_cache = True
    """Whether the engine says how many prompt tokens came from a cache."""
    hints: ClassVar[Mapping[str, str]] = {}
    """What to do when a phase failed, where it is not what helps with most engines."""
    executing_args: frozenset[str] = frozenset({"trust_remote_code"})
    """Arguments through which an engine loads code that the caller names."""
    refused_args: ClassVar[Mapping[str, str]] = {}
    """Arguments that the worker sets itself, and why."""

    def options(self, plan: Plan) -> dict[str, Any]:
        """The engine's arguments from ``engine_args``; OpError for one that is refused."""
        found = key_values(plan.engine_args)
        self.refuse(found)
        return found

    def refuse(self, names: Iterable[str]) -> None:
        """OpError when one of the arguments is the worker's own."""
        for name in names:
            if why := self.refused_args.get(name):
                raise OpError(f"engine_args: {name} cannot be given: {why}", "leave it out")

    def find(self, call: Call, plan: Plan) -> Found:
        """Where the engine is; OpError with how to install it when it is not here."""
        from ikit_ops.engines.find import find_distribution  # imports this module's Found

        return find_distribution(call, self, plan.python)

    def config(self, plan: Plan, found: Found) -> dict[str, Any]:
        """The worker's configuration."""
        return {**plan.config(), "engine_args": self.options(plan), "version": found.version}

    def command(self, plan: Plan, found: Found, config_path: Path) -> list[str]:
        """The command line of the worker."""
        # -u: what an engine prints before it is killed must be in the log.
        return [found.python or sys.executable, "-u", str(WORKERS / self.worker), str(config_path)]

    def environment(self, plan: Plan) -> dict[str, str]:
        """Variables that the worker gets beside a benchmark's own."""
        return device_variables(plan)

    def requested(self, plan: Plan) -> dict[str, Any]:
        """What was asked of the engine, for the comparison with what it did."""
        return self.options(plan)

    def read(self, result: WorkerResult, log: Sequence[str], plan: Plan) -> None:
        """Complete the result with what only the engine's log says."""

    def checks(self, seen: Seen) -> list[Check]:
        """The engine's own checks; the common ones are made for all."""
        return []


def key_values(arguments: Sequence[str]) -> dict[str, Any]:
    """``key=value`` items as a dict; a value is JSON where it parses, else the text."""
    found: dict[str, Any] = {}
    for item in arguments:
        key, equals, text = item.partition("=")
        key = key.strip().lstrip("-").replace("-", "_")
        if not equals or not key.isidentifier():
            raise OpError(
                f"engine_args: {excerpt(item, 80)!r} is not key=value",
                'for example ["max_model_len=4096"]',
            )
        if key in found:
            raise OpError(f"engine_args: {key} is given twice", "give it once")
        found[key] = json_or_text(text)
    return found


def json_or_text(text: str) -> Any:
    """The value of an item: what the text is as JSON or as a constant of Python, else itself."""
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def strict_json(text: str) -> Any:
    """What a text is as JSON; ValueError for one that no record and no other reader can hold.

    Python's reader takes NaN and Infinity, which are no JSON, and makes an infinity of 1e999.
    """
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(text: str) -> Any:
    raise ValueError(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def device_variables(plan: Plan) -> dict[str, str]:
    """The variables that show an engine its one device, and the threads of a CPU run."""
    found: dict[str, str] = {}
    if plan.device is not None and plan.device_asked != "auto":
        names = [d.uuid or d.id.split(":")[-1] for d in plan.devices or (plan.device,)]
        shown = "" if plan.platform == "cpu" else ",".join(names)
        if plan.platform != "rocm":
            found["CUDA_VISIBLE_DEVICES"] = shown
        if plan.platform != "cuda":
            found["ROCR_VISIBLE_DEVICES"] = shown
    if plan.threads is not None:
        found["OMP_NUM_THREADS"] = str(plan.threads)
    return found
