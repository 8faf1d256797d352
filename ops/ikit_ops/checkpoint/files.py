"""Opening a stranger's files: bounded, regular, and nowhere but in the model's folder.

A model folder is input from outside.  A name in it can be a FIFO (reading it hangs), a
device, or a link to a file that the caller may read and the author may not.  So every
file is resolved first, its end must lie in the model's own folder or in the Hub cache
that the folder belongs to, it is opened without following a last link and without
blocking, and what is opened must be a regular file.  JSON files are read up to a bound
and a depth.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from ikit_mcp.registry import OpError, excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CONFIG_BYTES = 16_000_000
MAX_INDEX_BYTES = 64_000_000
_NEXT = "give a folder that holds the model's own files"


def allowed_roots(folder: Path) -> tuple[Path, ...]:
    """Folders in which the files of ``folder`` may end.

    Its own; and for a snapshot of a Hub cache (``models--*/snapshots/COMMIT``) the
    repository's folder in that cache, whose ``blobs`` the snapshot links to.
    """
    real = folder.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return (real, real.parent.parent)
    return (real,)


@contextmanager
def open_regular(path: Path, roots: tuple[Path, ...]) -> Iterator[tuple[IO[bytes], int]]:
    """The file opened for reading, and its size in bytes.

    Raises:
        OpError: it is missing, not a regular file, unreadable, or a link that ends
            outside ``roots``.
    """
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, on Python 3.11
        raise OpError(f"{path.name}: {_reason(error)}", _NEXT) from None
    if not any(real.is_relative_to(root) for root in roots):
        raise OpError(
            f"{path.name}: is a link that ends outside the model's folder and the Hub cache",
            "replace the link by the file, or give the folder that holds the file",
        )
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(real, flags)
    except OSError as error:
        raise OpError(f"{path.name}: {_reason(error)}", _NEXT) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OpError(f"{path.name}: not a regular file", _NEXT)
    with os.fdopen(descriptor, "rb") as file:
        yield file, status.st_size


def read_bytes(path: Path, roots: tuple[Path, ...], limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes; OpError when it is larger."""
    with open_regular(path, roots) as (file, size):
        if size > limit:
            raise OpError(f"{path.name}: {size} bytes, more than the {limit} allowed", _NEXT)
        return file.read(limit + 1)


def read_json(path: Path, roots: tuple[Path, ...], limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes.

    Raises:
        OpError: as ``open_regular``, or it is too large, not JSON, or not an object.
    """
    return parse_json(read_bytes(path, roots, limit), path.name, limit)


def parse_json(raw: bytes, name: str, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in ``raw``; OpError, naming the file, for anything else.

    The standard library's reader is used on purpose: published configurations hold
    ``Infinity``, which strict readers refuse.
    """
    if len(raw) > limit:
        raise OpError(f"{name}: more than the {limit} bytes allowed", _NEXT)
    try:
        value = json.loads(raw)
    except RecursionError:
        raise OpError(f"{name}: nested too deeply", _NEXT) from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of too many digits
        raise OpError(f"{name}: is not JSON ({excerpt(str(error), 120)})", _NEXT) from None
    if not isinstance(value, dict):
        raise OpError(f"{name}: is not a JSON object", _NEXT)
    return value


class _Index(msgspec.Struct, gc=False):
    """The part of an index that is used; its sizes are not (published ones are wrong)."""

    weight_map: dict[str, str] | None = None


_index_decoder = msgspec.json.Decoder(_Index)


def weight_map_of(raw: bytes, name: str) -> dict[str, str]:
    """The ``weight_map`` of an index: tensor -> file; OpError when it has none."""
    try:
        weight_map = _index_decoder.decode(raw).weight_map
    except msgspec.ValidationError:
        weight_map = None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OpError(f"{name}: is not JSON ({excerpt(str(error), 120)})", _NEXT) from None
    if weight_map is None:
        raise OpError(f"{name}: no weight_map of tensor names to files", "download the index again")
    return weight_map


def _reason(error: OSError | RuntimeError) -> str:
    """Why a path cannot be opened, without the path."""
    return (error.strerror or "cannot be read") if isinstance(error, OSError) else "a loop of links"
