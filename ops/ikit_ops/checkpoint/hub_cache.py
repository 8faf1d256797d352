"""The Hub's cache on this machine, read without the Hub's client.

``models--OWNER--NAME/refs/REVISION`` holds a commit, ``snapshots/COMMIT`` the files of that
commit as links into ``blobs``.  Looking there needs no request and no half second of
imports, and it is all that there is when the Hub may not be asked.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ikit_mcp.call import expanded

COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = ("1", "on", "yes", "true")
_MAX_REF_BYTES = 100


def cache_folder() -> Path:
    """The cache's folder: HF_HUB_CACHE, else ``hub`` in HF_HOME, else the XDG cache.

    OpError when it is in the home of nobody who is known here.
    """
    env = os.environ
    given = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return expanded(os.path.expandvars(given))
    home = env.get("HF_HOME")
    if home:
        return expanded(os.path.expandvars(home)) / "hub"
    base = env.get("XDG_CACHE_HOME")
    return expanded(base or "~/.cache") / "huggingface" / "hub"


def offline() -> bool:
    """Whether the user forbade requests: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.lower() in _TRUE


def snapshot(model: str, revision: str | None) -> tuple[Path, str] | None:
    """(folder, commit) of a cached snapshot, or None.

    Args:
        model: a Hub id.
        revision: a branch, tag or commit; None for ``main``.
    """
    repository = cache_folder() / f"models--{model.replace('/', '--')}"
    wanted = revision or "main"
    commit = wanted if COMMIT.fullmatch(wanted) else _commit_of_ref(repository, wanted)
    if commit is None:
        return None
    folder = repository / "snapshots" / commit
    return (folder, commit) if folder.is_dir() else None


def _commit_of_ref(repository: Path, revision: str) -> str | None:
    """The commit that a cached ref names; None when there is none, or the name is a path out."""
    if ".." in revision.split("/") or revision.startswith("/"):
        return None
    try:
        with (repository / "refs" / revision).open(encoding="ascii") as file:
            commit = file.read(_MAX_REF_BYTES).strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None
