"""Which files of a model folder hold its weights.

A repository often holds a model twice or more: Mistral's ``consolidated.safetensors``
beside the shards, Llama's ``original/``, gpt-oss' ``metal/``, ONNX exports, an adapter.
Engines read one copy, and so must a count.  The order is that of vLLM and transformers:
the files that ``model.safetensors.index.json`` names; else ``model.safetensors``; else
every other ``*.safetensors`` at the top (vLLM globs; ``filter_duplicate_safetensors_files``
in its default_loader.py).  Sub-folders are never entered.

The index is a claim.  It decides which *files* count, but which tensors they hold is
read from the headers.  A file that it names and that is not there is an error (vLLM
stops; a silent skip would undercount), and a name that is a path is refused: following
``../`` out of the model folder is how an index reads a stranger's file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ikit_mcp.registry import OpError, excerpt

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<total>\d{5})\.(?:safetensors|gguf)")
_NEVER: tuple[tuple[str, str], ...] = (
    ("consolidated", "a second copy of the weights in Mistral's own names"),
    ("adapter_", "an adapter, not the model"),
    ("adapters", "an adapter, not the model"),
    ("optimizer", "training state"),
    ("scheduler", "training state"),
    ("rng_state", "training state"),
    ("training_args", "training state"),
)


@dataclass
class Selection:
    """The weight files to read, what was left out and why, and what was noticed."""

    files: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusal: str | None = None


def select_weight_files(names: set[str], weight_map: dict[str, str] | None) -> Selection:
    """The safetensors files that count, of the plain names at the top of a model folder.

    Args:
        names: file names at the top of the folder.
        weight_map: tensor -> file of the index; None when there is no index.

    Returns:
        The files in order; with none, ``refusal`` says why the folder has no weights
        that can be counted.

    Raises:
        OpError: a file that the index, or the numbering of the shards, asks for is
            missing, or the index names a path.
    """
    selection = Selection()
    candidates = sorted(n for n in names if n.endswith(".safetensors"))
    if weight_map is not None:
        selection.files = _files_of_index(names, weight_map)
        if SINGLE_NAME in names and SINGLE_NAME not in selection.files:
            selection.notes.append(
                f"both {SINGLE_NAME} and an index are there: counted the files of the index, as "
                "vLLM does (transformers would read the single file)"
            )
    elif SINGLE_NAME in names:
        selection.files = [SINGLE_NAME]
    else:
        selection.files = [n for n in candidates if _never(n) is None]
        _check_numbering(selection.files)
    chosen = set(selection.files)
    for name in candidates:
        if name not in chosen:
            selection.skipped.append((name, _never(name) or "not one of the files that count"))
    if not selection.files:
        selection.refusal = _refusal(names)
    return selection


def check_split(files: list[str]) -> None:
    """Refuse a numbered set (``-00001-of-0000N``) that has a gap."""
    _check_numbering(files)


def split_of(name: str) -> tuple[str, int, int] | None:
    """(stem, part, total) of a numbered file name, or None."""
    found = _SHARD.fullmatch(name)
    return (found["stem"], int(found["part"]), int(found["total"])) if found else None


def _files_of_index(names: set[str], weight_map: dict[str, str]) -> list[str]:
    """The files that the index names; OpError for a path or a file that is not there."""
    files = sorted(set(weight_map.values()))
    for name in files:
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            raise OpError(
                f"{INDEX_NAME}: names {excerpt(name, 120)!r}, which is a path and not a file of "
                "the model",
                "use the index that the model's author published",
            )
        if not name.endswith(".safetensors"):
            raise OpError(
                f"{INDEX_NAME}: names {excerpt(name, 120)!r}, which is not a safetensors file",
                "use the index that the model's author published",
            )
    missing = [name for name in files if name not in names]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise OpError(
            f"{INDEX_NAME}: names {excerpt(missing[0], 120)}{more}, which is absent",
            "finish the download of the model",
        )
    if not files:
        raise OpError(f"{INDEX_NAME}: weight_map is empty", "download the model again")
    return files


def _check_numbering(files: list[str]) -> None:
    """Refuse shards whose own numbering says that one is missing."""
    parts: dict[tuple[str, int], set[int]] = {}
    for name in files:
        found = split_of(name)
        if found is not None:
            parts.setdefault((found[0], found[2]), set()).add(found[1])
    for (stem, total), present in sorted(parts.items()):
        # by the parts that are there: the total comes from a name and may be 99,999
        if len(present) != total or min(present) != 1 or max(present) != total:
            first = next((p for p in range(1, total + 1) if p not in present), total)
            raise OpError(
                f"{excerpt(stem, 120)}-{first:05d}-of-{total:05d} is absent: {len(present)} of "
                f"{total} shards are there",
                "finish the download of the model",
            )


def _never(name: str) -> str | None:
    """Why a safetensors file never holds the weights that an engine loads, or None."""
    for prefix, why in _NEVER:
        if name.startswith(prefix):
            return why
    return None


def _refusal(names: set[str]) -> str:
    """Why a folder without countable safetensors has none, by what it holds instead."""
    if any(n.startswith("consolidated") and n.endswith(".safetensors") for n in names):
        return (
            "only consolidated*.safetensors (Mistral's own tensor names), which vLLM reads in its "
            "mistral format alone"
        )
    if any(n.startswith("adapter_") for n in names):
        return "an adapter (LoRA), not a model"
    pickles = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth")))
    if pickles:
        return f"no safetensors: only {pickles[0]} (pickle, never opened)"
    if any(n.endswith(".gguf") for n in names):
        return "no safetensors: only GGUF files"
    return "no safetensors files"
