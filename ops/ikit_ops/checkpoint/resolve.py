"""From what a user calls a model to its headers.

A model is a path when it exists on this machine: a folder, a ``.safetensors`` or ``.gguf``
file, a ``config.json``.  Else, when it has the form of a Hub id (``owner/name``), it is
looked for on the Hub, or in the Hub's cache when the Hub may not be asked.  Anything that
looks like a path and is not there is an error, never a Hub id by accident.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.checkpoint import files, local
from ikit_ops.checkpoint.model import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

HUB_ID = re.compile(
    r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?(?:/[A-Za-z0-9_](?:[\w.-]{0,94}[\w])?)?", re.ASCII
)


def read_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """The checkpoint of a model that a user named.

    Args:
        model: a path, or a Hub id.
        revision: branch, tag or commit of a Hub id.
        weights: False reads the configuration alone.
        progress: called with (files read, files to read).

    Raises:
        OpError: there is no such model, or it cannot be counted; with the next step.
    """
    path = _existing(model)
    if path is not None:
        if revision is not None:
            raise OpError(
                f"revision {excerpt(revision, 60)!r} was given, but {excerpt(model, 120)!r} is a "
                "local path",
                "leave revision out, or give the Hub id",
            )
        return _read_path(path, weights, progress)
    if (
        model.startswith((".", "/", "~", "\\"))
        or model.count("/") > 1
        or Path(model).suffix
        in (
            ".gguf",
            ".safetensors",
            ".json",
        )
    ):
        raise OpError(
            f"{excerpt(model, 200)!r}: no such file or folder", "give an existing path, or a Hub id"
        )
    if not HUB_ID.fullmatch(model) or ".." in model or "--" in model:
        raise OpError(
            f"{excerpt(model, 200)!r} is neither an existing path nor a Hub id (owner/name)",
            "give a model folder, a .gguf file, a config.json or a Hub id",
        )
    from ikit_ops.checkpoint import hub  # only Hub ids need the client, half a second of import

    return hub.read_hub(model, revision=revision, weights=weights, progress=progress)


def _existing(model: str) -> Path | None:
    """The path, when something is there."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        return None


def _read_path(
    path: Path, weights: bool, progress: Callable[[int, int], None] | None
) -> Checkpoint:
    """A checkpoint on this machine; a snapshot of a Hub cache keeps its commit."""
    if not path.is_dir():
        return local.read_single_file(path)
    real = path.resolve()
    if not weights:
        roots = files.allowed_roots(path)
        checkpoint = Checkpoint("directory", real.name, str(path))
        local.read_configs(checkpoint, path, {p.name for p in path.iterdir()}, roots)
        checkpoint.no_weights = "the configuration was asked for"
        return checkpoint
    return local.read_folder(path, progress=progress)
