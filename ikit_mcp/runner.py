"""The runner: from a name and raw arguments to what came of them.

Whatever way a call came in, it passes here: its arguments are parsed, texts that look
like secrets are refused, its actual effects are worked out and held against what the
caller may do, the lock of its device is taken, and only then does the operation run.
An operation that asks another passes here again, with the outer call's effects as the
limit, so that nothing can be reached through an inner call that the outer one could
not do itself.

``Runner.here`` runs an operation in this process (a thread of the server, or the
command line); ``worker.run_in_worker`` runs it in a child.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ikit_mcp.arguments import parse
from ikit_mcp.call import Call, Cancelled, Progress, Settings, Shown, one_line
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.process import devices, lock, secrets
from ikit_mcp.registry import EXECUTES, MEASURES, READS, Arg, Effects, Operation, OpError, Registry

LOCK_WAIT_SECONDS = 3_600.0


def ignore_progress(progress: Progress) -> None:
    """A report of progress that nobody hears."""


@dataclass(frozen=True)
class Request:
    """A call that was checked and may run."""

    operation: Operation
    args: dict[str, Any]
    effects: Effects

    @property
    def needs_lock(self) -> bool:
        """Whether this very call must be alone on its device."""
        return self.operation.needs_lock and self.effects >= MEASURES


@dataclass(frozen=True)
class Outcome:
    """What came of a call: a stored record, or the dict of an operation that only reads."""

    record: EvidenceRecord | None
    reply: dict[str, Any] | None
    shown: Shown


@dataclass(frozen=True)
class Control:
    """How a running call is watched and ended from outside."""

    report: Callable[[Progress], None] = ignore_progress
    cancel: threading.Event | None = None
    job_id: str | None = None
    devices: frozenset[str] = frozenset()
    hold_fds: tuple[int, ...] = ()


class Runner:
    """Runs the operations of a registry for one user's home.

    ``scope`` is the most that any call may do here: READS for ``--read-only``.
    """

    def __init__(self, registry: Registry, settings: Settings, scope: Effects = EXECUTES) -> None:
        self.registry = registry
        self.settings = settings
        self.scope = scope

    def check(
        self, name: str, raw: Mapping[str, Any] | None, scope: Effects | None = None
    ) -> Request:
        """The request of a call; OpError when its arguments or its effects are refused."""
        operation = self.registry.get(name)
        args = parse(operation.args, raw, name)
        refuse_secrets(operation.args, args)
        request = Request(operation, args, operation.effects_of(args))
        allowed = self.scope if scope is None else min(scope, self.scope)
        if request.effects > allowed:
            raise OpError(
                f"{name} {_VERBS[request.effects]}, and this may only do what {_VERBS[allowed]}",
                "start the server without --read-only"
                if self.scope == READS
                else f"call {name} by itself",
            )
        if request.effects != READS:
            self.settings.ready_to_save()
        return request

    def here(self, request: Request, control: Control) -> Outcome:
        """Run the call in this thread; whatever the operation raises comes through."""
        self._refuse_early(request)
        with device_lock(request, control) as held:
            return self._run(request, held, parent=None)

    def _refuse_early(self, request: Request) -> None:
        """OpError for what the operation can refuse before it waits for a device."""
        if request.operation.early is not None:
            request.operation.early(request.args, self.settings)

    def _run(self, request: Request, control: Control, parent: Call | None) -> Outcome:
        call = Call(
            operation=request.operation,
            args=request.args,
            settings=self.settings,
            scope=request.effects,
            plugins=self.registry.plugins,
            job_id=control.job_id,
            cancel=control.cancel or threading.Event(),
            report=control.report,
            invoker=self._invoke,
            known=self.registry.operations.__contains__,
            locked=control.devices,
            hold_fds=control.hold_fds,
            parent=parent,
        )
        try:
            result = request.operation.function(call, **request.args)
        except SystemExit as error:  # an operation may end itself, not the server
            raise RuntimeError(f"{request.operation.name} called exit({error.code})") from error
        finally:
            call.close()
        if request.operation.effects == READS:
            if not isinstance(result, dict):
                raise TypeError(f"{request.operation.name} is READS and must return a dict")
            return Outcome(None, result, call.shown)
        if not isinstance(result, EvidenceRecord):
            raise TypeError(f"{request.operation.name} must return the record that it saved")
        return Outcome(result, None, call.shown)

    def _invoke(self, outer: Call, name: str, arguments: Mapping[str, Any]) -> Any:
        """An operation asked by another: checked again, under the outer call's effects."""
        request = self.check(name, arguments, scope=outer.scope)
        self._refuse_early(request)
        control = Control(outer.report, outer.cancel, outer.job_id, outer.locked, outer.hold_fds)
        with device_lock(request, control) as held:
            outcome = self._run(request, held, parent=outer)
        return outcome.record if outcome.record is not None else outcome.reply


_VERBS = {
    Effects.READS: "only reads",
    Effects.DERIVES: "writes a record",
    Effects.MEASURES: "measures a device",
    Effects.EXECUTES: "executes a program that the caller names",
}


def refuse_secrets(listed: tuple[Arg, ...], args: Mapping[str, Any]) -> None:
    """OpError when a text argument looks like a secret; the value is never repeated."""
    for arg in listed:
        value = args.get(arg.name)
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            rule = secrets.secret_value(text) if isinstance(text, str) else None
            if rule is not None:
                raise OpError(
                    f"{arg.name} was refused: it looks like a secret (rule: {rule})",
                    "put the secret into an environment variable of the server and give"
                    " the variable's name where an argument asks for one",
                )
        # Lists are command lines and options: whoever is started with them shows them to all.
        words = [text for text in texts if isinstance(text, str)] if texts is value else []
        if (known := secrets.known_in(words)) is not None:
            raise OpError(
                f"{arg.name} was refused ({known})",
                "give the program its key by a file, or by a variable that it reads by itself",
            )


@contextmanager
def device_lock(request: Request, control: Control) -> Iterator[Control]:
    """Hold the locks that the call needs and the caller does not hold yet."""
    if not request.needs_lock:
        yield control
        return
    wanted = frozenset(devices.uuids_of(str(request.args.get("device") or "auto")))
    missing = wanted - control.devices
    if not missing:
        yield control
        return
    held = _acquire(request, control, sorted(missing))
    try:
        yield Control(
            control.report,
            control.cancel,
            control.job_id,
            control.devices | wanted,
            (*control.hold_fds, *held.fds),
        )
    finally:
        held.release()


def _acquire(request: Request, control: Control, uuids: list[str]) -> lock.DeviceLock:
    """Wait for the devices, within the call's own time, telling who holds them."""

    def tell(uuid: str, holder: Mapping[str, Any], waited: float) -> None:
        """Report who holds the device, and since when."""
        told = f"waiting for device {uuid[:16]}, held by {lock.describe(holder)}"
        control.report(Progress(0, None, one_line(told)))

    given = request.args.get("timeout")
    try:
        return lock.acquire(
            uuids,
            timeout=float(given) if given else LOCK_WAIT_SECONDS,
            cancel=control.cancel,
            holder={"operation": request.operation.name, "job_id": control.job_id},
            on_wait=tell,
        )
    except OpError:
        if control.cancel is not None and control.cancel.is_set():
            raise Cancelled(request.operation.name) from None
        raise
