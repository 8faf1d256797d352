"""Folders that belong to a living process, and the clearing of those whose owner died.

A process may be killed at any point of its work.  Whatever it was building must then
be told apart from what another process is building right now.  So each such folder has
a lock file beside it, held with ``flock`` while the owner lives: the kernel lets go of
it at death, however that came, and whoever can take the lock may clear the folder.
Process ids would not do: they are reused, and mean nothing on another host.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ikit_mcp.evidence.files import PRIVATE_FILE, PRIVATE_FOLDER, private_folder

if sys.platform != "win32":
    import fcntl

LOCK = ".lock"
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
ABANDONED_SECONDS = 86_400.0


@contextmanager
def claimed_folder(parent: Path) -> Iterator[Path]:
    """A new private folder in ``parent``; it is gone, with its lock, when the block ends.

    What the owner wants to keep it moves out before that.
    """
    private_folder(parent)
    folder, lock = _claim(parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock_path(folder).unlink(missing_ok=True)
        os.close(lock)


def lock_path(folder: Path) -> Path:
    """The lock file of a claimed folder."""
    return folder.with_name(folder.name + LOCK)


def _claim(parent: Path) -> tuple[Path, int]:
    while True:
        folder = parent / secrets.token_hex(8)
        descriptor = os.open(lock_path(folder), os.O_RDWR | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
        # Somebody who sweeps may have taken the lock, or the file, just before we did.
        if _take(descriptor) and _still_there(descriptor, lock_path(folder)):
            folder.mkdir(mode=PRIVATE_FOLDER)
            return folder, descriptor
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Take the lock without waiting; whether it was free. Elsewhere age decides (``sweep``)."""
    if sys.platform == "win32":
        return _new_or_old(os.fstat(descriptor))
    else:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: age decides there, too
            return _new_or_old(os.fstat(descriptor))
        return True


def _new_or_old(info: os.stat_result) -> bool:
    """Without locks: a file that this process just made, or one that was left long ago."""
    age = time.time() - info.st_mtime
    return age < 1 or age > ABANDONED_SECONDS


def _still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def leftovers(parent: Path) -> list[str]:
    """The names of abandoned folders and locks in ``parent``; nothing is changed."""
    found = []
    for name in _names(parent):
        try:
            descriptor = os.open(lock_path(parent / name), os.O_RDWR | _NO_FOLLOW)
        except OSError:  # the owner makes the lock first and removes it last
            found.append(name)
            continue
        if _take(descriptor):
            found.append(name)
        os.close(descriptor)
    return found


def sweep(parent: Path) -> list[str]:
    """Remove what dead processes left in ``parent``; the names that were removed.

    What cannot be removed stays, and is no reason for the caller to fail.
    """
    removed = []
    for name in _names(parent):
        lock = lock_path(parent / name)
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, PRIVATE_FILE)
        except OSError:  # nothing of ours has a link or a folder for its lock
            continue
        try:
            if _take(descriptor) and _still_there(descriptor, lock):
                _remove(parent / name)
                lock.unlink(missing_ok=True)
                removed.append(name)
        finally:
            os.close(descriptor)
    return removed


def _remove(path: Path) -> None:
    """Remove a folder, or the file or link that stands in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _names(parent: Path) -> list[str]:
    """The claimed folders in ``parent``, by folder or by lock file."""
    try:
        entries = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({name.removesuffix(LOCK) for name in entries})
