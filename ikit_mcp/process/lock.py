"""One measurement on a device at a time, across all processes of all users.

Two benchmarks on one device measure each other.  So each device has a file, named after its
UUID (an index depends on who looks), in one folder of the machine that everybody may write.
Who holds ``flock`` on the file has the device.  The kernel lets go of it when the last
descriptor closes, so no crash can leave a device locked; and as a run's supervisor keeps a
copy (``hold_fds``), a crash cannot free it either while something still runs there.

For that reason nothing here ever unlocks: ``LOCK_UN`` would free it for all copies at once.
Several devices are taken in sorted order, so that two calls cannot wait for each other.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ikit_mcp.registry import OpError

if sys.platform != "win32":
    from ikit_mcp.process import lock_files

POLL = 0.1  # seconds between two tries
TELL = 5.0  # seconds between two words to a waiting caller

OnWait = Callable[[str, dict[str, Any], float], None]


@dataclass
class DeviceLock:
    """The devices' locks, held until ``release`` and until no copy of ``fds`` is open."""

    uuids: tuple[str, ...]
    fds: tuple[int, ...]
    _open: list[int] = field(repr=False)

    def release(self) -> None:
        """Close our copies; who got them as ``hold_fds`` keeps the devices. Twice is harmless."""
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> DeviceLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def acquire(
    uuids: Iterable[str],
    *,
    timeout: float,
    cancel: threading.Event | None = None,
    holder: Mapping[str, Any] | None = None,
    on_wait: OnWait | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> DeviceLock:
    """Take the devices of these UUIDs, waiting up to ``timeout`` seconds for all of them.

    ``holder`` (operation, job id; no secrets: everybody can read it) is written beside pid and
    time, and is what others who wait get to see.  ``on_wait(uuid, holder, seconds waited)`` is
    called when a device is taken, and every few seconds from then on.  OpError names the
    holder when time is up, or says that the wait was cancelled.
    """
    wanted = tuple(sorted(set(uuids)))
    if sys.platform != "win32":
        started = time.monotonic()
        held: list[int] = []
        directory = lock_files.open_folder(folder)
        try:
            for uuid in wanted:
                held.append(_take(directory, uuid, started, timeout, cancel, on_wait))
                lock_files.write_holder(held[-1], holder or {})
        except BaseException:
            for fd in held:
                os.close(fd)
            raise
        finally:
            os.close(directory)
        return DeviceLock(wanted, tuple(held), held)
    raise OpError("devices cannot be locked on Windows", "measure on Linux")


if sys.platform != "win32":

    def _take(
        directory: int,
        uuid: str,
        started: float,
        timeout: float,
        cancel: threading.Event | None,
        on_wait: OnWait | None,
    ) -> int:
        """A descriptor that holds the lock of one device; waits for it."""
        pause = cancel if cancel is not None else threading.Event()
        told, told_of = -TELL, None
        while True:
            fd = lock_files.try_lock(directory, uuid)
            if fd is not None:
                return fd
            waited = time.monotonic() - started
            if cancel is not None and cancel.is_set():
                raise OpError(f"cancelled while waiting for device {uuid}", "call again")
            holder = lock_files.read_holder(uuid, directory)
            if waited >= timeout:
                raise OpError(
                    f"device {uuid} is still held by {describe(holder)} after {waited:.0f} s",
                    "wait for that call or cancel it, or allow a longer timeout",
                )
            # A holder that took the lock this instant has not written its name yet.
            if on_wait is not None and (waited - told >= TELL or holder != told_of):
                told, told_of = waited, holder
                on_wait(uuid, holder, waited)
            pause.wait(min(POLL, max(0.0, timeout - waited)))


def describe(holder: Mapping[str, Any]) -> str:
    """The holder in words."""
    if not holder:
        return "a process that does not say who it is"
    what = holder.get("operation") or "a call"
    job = f", {holder['job_id']}" if holder.get("job_id") else ""
    ended = "" if holder.get("alive") else ", which has ended; something that it started has not"
    return f"{what} (pid {holder['pid']}{job}, since {holder.get('since')}{ended})"
