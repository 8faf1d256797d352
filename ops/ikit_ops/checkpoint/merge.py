"""From the headers of many files to one model, and what they disagree on.

The index says which tensor is in which file; the headers say what is there.  Where they
differ the headers are the truth and the difference is told.  A tensor that two files
store is counted once, as the copy that the index names (or the first file's), and the
other copy's bytes are dead: on disk, never read.  ``metadata.total_size`` is not even
compared: published ones are file sizes, floats, or count a tied head twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ikit_mcp.registry import excerpt

if TYPE_CHECKING:
    from ikit_ops.checkpoint.model import Checkpoint
    from ikit_ops.checkpoint.safetensors_header import Header

_NAMED = 3


def add_file(
    checkpoint: Checkpoint, file: str, header: Header, weight_map: dict[str, str] | None
) -> None:
    """Add one file's tensors; a name that is already there becomes a duplicate.

    With an index, tensors that it puts in another file are noted in ``misplaced``.
    """
    entries, tensors = header.tensors, checkpoint.tensors
    checkpoint.files[file] = header.data_bytes
    if not tensors.keys().isdisjoint(entries):
        for name in [n for n in entries if n in tensors]:
            if (weight_map or {}).get(name) == file:
                entries[name], tensors[name] = tensors[name], entries[name]
            checkpoint.duplicates.append((name, entries.pop(name).nbytes))
    if weight_map is not None:
        said = weight_map.get
        checkpoint.misplaced += [n for n in entries if said(n, file) != file]
    tensors.update(entries)


def compare_with_index(checkpoint: Checkpoint, weight_map: dict[str, str]) -> None:
    """Tell how the index and the headers differ.

    Tensors that the index promises and no header has are in doubt: an engine would miss
    them.
    """
    same = weight_map.keys() == checkpoint.tensors.keys()  # no sets are built for this
    promised = set() if same else weight_map.keys() - checkpoint.tensors.keys()
    if promised:
        checkpoint.unproven.append(
            f"the index names {len(promised)} tensors that no file holds ({some(promised)})"
        )
    unlisted = set() if same else checkpoint.tensors.keys() - weight_map.keys()
    if unlisted:
        checkpoint.notes.append(
            f"{len(unlisted)} tensors are in the files but not in the index ({some(unlisted)}); "
            "they are counted"
        )
    moved = set(checkpoint.misplaced) - {name for name, _ in checkpoint.duplicates}
    if moved:
        checkpoint.notes.append(
            f"the index puts {len(moved)} tensors in the wrong file ({some(moved)}); the headers "
            "were believed"
        )


def note_duplicates(checkpoint: Checkpoint) -> None:
    """Tell which tensors are stored twice, and how many bytes that wastes."""
    if checkpoint.duplicates:
        dead = sum(size for _, size in checkpoint.duplicates)
        names = {name for name, _ in checkpoint.duplicates}
        checkpoint.notes.append(
            f"{len(names)} tensors are stored in two files ({some(names)}): counted once, "
            f"{dead} bytes are dead copies"
        )


def some(names: set[str]) -> str:
    """The first few of a set of names, for a sentence."""
    shown = [excerpt(name, 120) for name in sorted(names)[:_NAMED]]
    return ", ".join(shown) + (", ..." if len(names) > _NAMED else "")
