"""Files of the store: opened one folder at a time, never through a link, made private.

A store may hold records that others wrote and copied there, so a name inside it is an
outsider's.  Each step of a path is opened relative to the folder before it and without
following links; what is opened must be a regular file.  Where the platform has no such
calls the same is checked by looking first.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from ikit_mcp.registry import OpError

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_NON_BLOCKING: int = getattr(os, "O_NONBLOCK", 0)
_FOLDER: int = getattr(os, "O_DIRECTORY", 0)
_CLOSE: int = getattr(os, "O_CLOEXEC", 0)
_BINARY: int = getattr(os, "O_BINARY", 0)
_BY_FOLDER = os.open in os.supports_dir_fd


def open_inside(root: Path, parts: Sequence[str]) -> int:
    """A read-only descriptor of the regular file at ``root/parts...``; OSError when it is none."""
    if not _BY_FOLDER:
        return _open_checked(root, parts)
    folder = os.open(root, os.O_RDONLY | _FOLDER | _CLOSE)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | _FOLDER | _NO_FOLLOW | _CLOSE, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Non-blocking: a named pipe must not hold the reader.
        flags = os.O_RDONLY | _NO_FOLLOW | _NON_BLOCKING | _CLOSE
        return _regular(os.open(parts[-1], flags, dir_fd=folder))
    finally:
        os.close(folder)


def _open_checked(root: Path, parts: Sequence[str]) -> int:
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink():
            raise OSError(f"{path} is a link")
    return _regular(os.open(path, os.O_RDONLY | _BINARY))


def _regular(descriptor: int) -> int:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("not a regular file")


def read_inside(root: Path, parts: Sequence[str], limit: int) -> bytes:
    """The bytes of the file at ``root/parts...``; OSError when it is none or over ``limit``."""
    with os.fdopen(open_inside(root, parts), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(f"{size} bytes, over the limit of {limit}")
        return file.read(size)  # asked for more, Python would set that much memory aside


def read_alone(path: Path, limit: int) -> bytes:
    """The bytes of one regular file, named by a caller; a link or a pipe is an OSError."""
    return read_inside(path.parent, [path.name], limit)


def write_private(path: Path, data: bytes) -> None:
    """Write a new 0600 file and sync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _CLOSE | _BINARY
    with os.fdopen(os.open(path, flags, PRIVATE_FILE), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable, where the platform can."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY | _FOLDER | _CLOSE)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(path: Path) -> Path:
    """Make a folder (and those above it) for this user alone, durably, if it is not there yet.

    OSError when something else is there: a file, or a link in the place of a folder that
    is ours to make.
    """
    missing = []
    above = path
    while not above.exists() and not above.is_symlink():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        sync_folder(folder.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
    return path


def refuse_link(path: Path) -> None:
    """OSError when a link stands where the store has a folder of its own."""
    if path.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "a link, not a folder", str(path))


def printable(name: str) -> str:
    """A file's name that any writer can pass on: bytes that are no UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def refuse_shared(folder: Path, name: str = "home") -> None:
    """OpError when a folder belongs to somebody else, can be written by others, or is none.

    A folder that is not there yet is fine.
    """
    advice = "set IKIT_HOME to a folder of your own"
    try:
        info = folder.stat()
    except FileNotFoundError:
        if folder.is_symlink():
            raise OpError(f"the {name} {folder} is a link to nothing", advice) from None
        return
    except OSError as error:
        raise OpError(f"cannot use the {name} {folder}: {error.strerror}", advice) from None
    if not stat.S_ISDIR(info.st_mode):
        raise OpError(f"the {name} {folder} is not a folder", advice)
    if sys.platform == "win32":  # owners and modes mean something else there
        return
    if info.st_uid != os.geteuid():
        raise OpError(f"the {name} {folder} belongs to user {info.st_uid}, not to you", advice)
    if info.st_mode & 0o022:
        raise OpError(
            f"the {name} {folder} can be written by others (mode {stat.S_IMODE(info.st_mode):o})",
            f"chmod go-w {folder}, or {advice}",
        )
