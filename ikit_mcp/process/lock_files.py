"""The files behind the device locks: found, opened and read without trusting them.

A folder that everybody may write is one where everybody may lay traps.  So no link is
followed, only regular files are opened, and what a file says of its holder is bounded and
cleaned, because anyone may have written it: it is good for a message and nothing else.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikit_mcp.process import platform
from ikit_mcp.registry import OpError, excerpt

if sys.platform == "win32":
    raise ImportError("device locks need flock")

import fcntl

FOLDER_VARIABLE = "IKIT_LOCK_DIR"
"""The variable that names another folder (tests, or users who share a machine by choice)."""

PLACES = ("/run/lock", "/tmp")  # noqa: S108 - shared by all users: that is the point
NAME = "ikit-locks"
SHARED_MODE = 0o1777
HOLDER_BYTES = 4096


def lock_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where the lock files are: the argument, IKIT_LOCK_DIR, or the machine's shared folder.

    The choice depends on the machine alone, so that all users come to the same one.
    """
    named = folder if folder is not None else os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    for place in map(Path, PLACES):
        try:
            found = place.stat()
        except OSError:
            continue
        if found.st_uid == 0 and stat.S_IMODE(found.st_mode) & SHARED_MODE == SHARED_MODE:
            return place / NAME
    raise OpError(
        f"no folder for device locks: none of {', '.join(PLACES)} is shared by all users",
        f"set {FOLDER_VARIABLE} to one that is",
    )


def file_name(uuid: str) -> str:
    """The name of a device's file: readable, plain, and different for different UUIDs."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", uuid)[:48]
    return f"{plain}-{hashlib.sha256(uuid.encode()).hexdigest()[:16]}.lock"


def open_folder(folder: str | os.PathLike[str] | None) -> int:
    """A descriptor of the lock folder, made if need be; OpError if it cannot be trusted."""
    path = lock_folder(folder)
    advice = f"remove it, or set {FOLDER_VARIABLE} to another folder"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=bool(folder))
            path.chmod(SHARED_MODE)  # whatever the umask
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise OpError(f"the lock folder {path} cannot be used: {error.strerror}", advice) from None
    found = os.fstat(fd)
    mode = stat.S_IMODE(found.st_mode)
    ours = found.st_uid in (0, os.getuid())
    # Another user's folder will do if it is open to all and sticky: who owns it could take our
    # file away, which ends a lock, not more.  One that only its owner can write would not do.
    if not ours and mode & SHARED_MODE != SHARED_MODE:
        os.close(fd)
        raise OpError(f"the lock folder {path} is closed to others (mode {mode:o})", advice)
    if mode & 0o002 and not mode & stat.S_ISVTX:
        os.close(fd)
        raise OpError(f"in the lock folder {path} anyone may remove any file", advice)
    return fd


def _open_file(directory: int, name: str) -> int:
    """The lock file, opened for writing if possible; never through a link, only a regular file."""
    base = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        # Never O_CREAT on a file that is there: in a sticky folder Linux refuses to open
        # another user's file that way (fs.protected_regular).
        for flags in (os.O_RDWR, os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_EXCL):
            try:
                fd = os.open(name, base | flags, 0o666, dir_fd=directory)
            except (FileNotFoundError, FileExistsError, PermissionError) as error:
                last = error
                continue
            except OSError as error:
                raise _unusable(name, error) from None
            if flags & os.O_CREAT:
                os.fchmod(fd, 0o666)  # who holds it next says so in it, whoever that is
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
            raise _unusable(name, OSError(errno.EINVAL, "not a regular file"))
        if not isinstance(last, FileExistsError):  # that one: somebody made it between two tries
            raise _unusable(name, last) from None


def _unusable(name: str, error: OSError) -> OpError:
    return OpError(
        f"the lock file {name} cannot be used: {error.strerror}",
        f"remove it from the lock folder, or set {FOLDER_VARIABLE} to another one",
    )


def try_lock(directory: int, uuid: str) -> int | None:
    """A descriptor with the device's lock, or None while somebody else has it."""
    name = file_name(uuid)
    fd = _open_file(directory, name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (BlockingIOError, FileNotFoundError):
        os.close(fd)
        return None
    if os.path.samestat(there, os.fstat(fd)):
        return fd
    os.close(fd)  # the file was replaced meanwhile: this lock is on one that nobody sees
    return None


def write_holder(fd: int, holder: Mapping[str, Any]) -> None:
    """Say in the file who holds it; a file that we may not write keeps its old words."""
    pid = os.getpid()
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    facts = {**holder, "pid": pid, "start": platform.start_time(pid), "since": now}
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(facts).encode()[:HOLDER_BYTES], 0)


def read_holder(uuid: str, directory: int) -> dict[str, Any]:
    """What the device's file says of its holder, with ``alive``; {} when that is nothing usable.

    Anyone may have written it: at most 16 short one-line texts and numbers come back.
    """
    try:
        fd = os.open(
            file_name(uuid),
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            dir_fd=directory,
        )
        try:
            facts = json.loads(os.pread(fd, HOLDER_BYTES, 0))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(facts, dict):
        return {}
    clean = {excerpt(str(key), 32): _clean(value) for key, value in list(facts.items())[:16]}
    pid, start = clean.get("pid"), clean.get("start")
    if not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return {}
    clean["alive"] = start is not None and platform.start_time(pid) == start
    return clean


def _clean(value: Any) -> Any:
    """A number as it is, anything else as one short printable line."""
    if value is None or isinstance(value, (int, float)):
        return value
    return "".join(char if char.isprintable() else " " for char in excerpt(str(value), 80))
