"""A GGUF model, in one file or split, as a checkpoint like any other.

``gguf-split`` writes ``NAME-00001-of-0000N.gguf``: each part has a header with its own
tensors, the first has the metadata of the whole.  A missing part is an error, as a
missing shard is.
"""

from __future__ import annotations

from pathlib import Path

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.checkpoint import gguf_names, select
from ikit_ops.checkpoint.gguf_header import GgufHeader, read_gguf_header
from ikit_ops.checkpoint.model import Checkpoint


def read_gguf(checkpoint: Checkpoint, path: Path, roots: tuple[Path, ...]) -> None:
    """Fill a checkpoint from a GGUF file and, when it is split, from its other parts.

    Raises:
        OpError: a part is missing, a header is broken, or the file is no language model.
    """
    parts = _parts(path)
    checkpoint.format = "gguf"
    headers = [read_gguf_header(part, roots) for part in parts]
    first = headers[0]
    for part, header in zip(parts, headers, strict=True):
        repeated = checkpoint.tensors.keys() & header.tensors.keys()
        if repeated:
            raise OpError(
                f"{part.name}: tensor {excerpt(min(repeated), 80)!r} is in another part too",
                "download the model again",
            )
        checkpoint.files[part.name] = sum(e.nbytes for e in header.tensors.values())
        checkpoint.tensors.update(header.tensors)
    _check_kind(first, path.name)
    declared = first.metadata.get("split.tensors.count")
    if type(declared) is int and declared not in (0, len(checkpoint.tensors)):
        raise OpError(
            f"{path.name}: declares {declared} tensors, its parts hold {len(checkpoint.tensors)}",
            "download the model again",
        )
    checkpoint.tensors = gguf_names.translated(checkpoint.tensors)
    checkpoint.config = gguf_names.configuration(first.metadata)
    name = first.metadata.get("general.name")
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= 80:
        checkpoint.name = name
    if checkpoint.config.get("kv_lora_rank") and not any(
        key.endswith(".attention.key_length_mla") for key in first.metadata
    ):
        checkpoint.notes.append(
            "the file predates llama.cpp's latent cache: with it, llama.cpp caches expanded heads "
            "(mla_cache=expanded)"
        )


def _parts(path: Path) -> list[Path]:
    """All parts of the model that the file belongs to, in order."""
    split = select.split_of(path.name)
    if split is None:
        return [path]
    stem, _, total = split
    names = sorted(
        entry.name
        for entry in path.parent.iterdir()
        if (found := select.split_of(entry.name)) is not None
        and (found[0], found[2]) == (stem, total)
        and entry.name.endswith(".gguf")
    )
    select.check_split(names)
    return [path.parent / name for name in names]


def _check_kind(header: GgufHeader, name: str) -> None:
    """Refuse GGUF files that are not models: adapters, importance matrices, projectors."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model" or header.metadata.get("general.architecture") == "clip":
        what = "a projector" if kind == "model" else str(kind)[:40]
        raise OpError(f"{name}: is {what}, not a model", "give the model's own .gguf")
