"""Checkpoints on this machine: a model folder, one file of it, or a configuration.

Only headers are read: eight bytes, then the JSON, from each file that counts.  A folder
without weights that can be counted still gives its configuration, and the reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ikit_mcp.registry import OpError
from ikit_ops.checkpoint import files, merge, select
from ikit_ops.checkpoint.model import Checkpoint, Source
from ikit_ops.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    REDOWNLOAD,
    Header,
    header_length,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CONFIG_NAME = "config.json"
QUANT_NAME = "hf_quant_config.json"
_MAX_FILES = 100_000
_FIRST_READ = 1 << 17


def read_file_header(path: Path, roots: tuple[Path, ...]) -> Header:
    """The header of one local safetensors file; OpError as ``parse_header``."""
    with files.open_regular(path, roots) as (file, size):
        prefix = file.read(min(size, _FIRST_READ))
        length = header_length(prefix, size, path.name)
        raw = prefix[LENGTH_BYTES : LENGTH_BYTES + length]
        if len(raw) < length:
            raw += file.read(length - len(raw))
    if len(raw) < length:
        raise OpError(f"{path.name}: ended inside its header", REDOWNLOAD)
    return parse_header(raw, size, path.name)


def read_folder(
    folder: Path,
    *,
    source: Source = "directory",
    name: str | None = None,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """The checkpoint in a model folder.

    Args:
        folder: an existing folder.
        source, name, revision: what to record as its origin; a snapshot of the Hub
            cache is a folder too.
        progress: called with (files read, files to read).

    Raises:
        OpError: anything that would make the count wrong: a missing shard, a broken
            header, an index that is not JSON; or a folder without model or configuration.
    """
    roots = files.allowed_roots(folder)
    checkpoint = Checkpoint(source, name or folder.resolve().name, str(folder), revision)
    names = _names(folder)
    weight_map = None
    if select.INDEX_NAME in names:
        raw = files.read_bytes(folder / select.INDEX_NAME, roots, files.MAX_INDEX_BYTES)
        weight_map = files.weight_map_of(raw, select.INDEX_NAME)
    selection = select.select_weight_files(names, weight_map)
    read_configs(checkpoint, folder, names, roots)
    checkpoint.skipped, checkpoint.notes = selection.skipped, selection.notes
    checkpoint.no_weights = selection.refusal
    if selection.files:
        _read_shards(checkpoint, folder, selection.files, weight_map, roots, progress)
    elif any(n.endswith(".gguf") for n in names):
        _read_gguf_of_folder(checkpoint, folder, names, roots)
    elif checkpoint.config is None:
        what = selection.refusal or "no safetensors files"
        raise OpError(
            f"{checkpoint.name}: no config.json, and {what}",
            "give the folder of a model: config.json and its safetensors files",
        )
    return checkpoint


def read_single_file(path: Path) -> Checkpoint:
    """The checkpoint of one file: a .safetensors file, a .gguf file, or a config.json.

    A safetensors file takes the configuration that lies beside it.  A config.json gives
    the configuration alone, whatever lies beside it: who names it asks for that.
    """
    roots = files.allowed_roots(path.parent)
    suffix = path.suffix.lower()
    checkpoint = Checkpoint("file", path.name, str(path))
    if suffix == ".json":
        checkpoint.config = files.read_json(path, roots)
        checkpoint.name = path.resolve().parent.name if path.name == CONFIG_NAME else path.stem
        checkpoint.no_weights = f"{path.name} is a configuration, without weights"
    elif suffix == ".safetensors":
        checkpoint.name = path.stem
        checkpoint.format = "safetensors"
        merge.add_file(checkpoint, path.name, read_file_header(path, roots), None)
        read_configs(checkpoint, path.parent, _names(path.parent), roots)
        if select.split_of(path.name):
            checkpoint.unproven.append(f"{path.name} is one shard of a model")
    elif suffix == ".gguf":
        from ikit_ops.checkpoint.gguf_model import read_gguf  # only GGUF callers need its tables

        checkpoint.name = path.stem
        read_gguf(checkpoint, path, roots)
    else:
        raise OpError(
            f"{path.name}: not a .safetensors, .gguf or config.json file",
            "give a Hub id, a model folder, or one of these files",
        )
    return checkpoint


def read_configs(
    checkpoint: Checkpoint, folder: Path, names: set[str], roots: tuple[Path, ...]
) -> None:
    """Read config.json and hf_quant_config.json where they are there."""
    if CONFIG_NAME in names:
        checkpoint.config = files.read_json(folder / CONFIG_NAME, roots)
    if QUANT_NAME in names:
        checkpoint.quant_config = files.read_json(folder / QUANT_NAME, roots)


def _read_shards(
    checkpoint: Checkpoint,
    folder: Path,
    shards: list[str],
    weight_map: dict[str, str] | None,
    roots: tuple[Path, ...],
    progress: Callable[[int, int], None] | None,
) -> None:
    """Read the header of every shard, one after the other, and merge them."""
    checkpoint.format = "safetensors"
    for done, shard in enumerate(shards):
        header = read_file_header(folder / shard, roots)
        merge.add_file(checkpoint, shard, header, weight_map)
        if progress is not None:
            progress(done + 1, len(shards))
    if weight_map is not None:
        merge.compare_with_index(checkpoint, weight_map)
    merge.note_duplicates(checkpoint)


def _read_gguf_of_folder(
    checkpoint: Checkpoint, folder: Path, names: set[str], roots: tuple[Path, ...]
) -> None:
    """Read the GGUF model of a folder that holds exactly one; else say that one must be named."""
    from ikit_ops.checkpoint.gguf_model import read_gguf  # only GGUF callers need its tables

    ggufs = sorted(n for n in names if n.endswith(".gguf") and not n.startswith("mmproj"))
    first_parts = [n for n in ggufs if (select.split_of(n) or ("", 1, 1))[1] == 1]
    if len(first_parts) != 1:
        raise OpError(
            f"{checkpoint.name}: holds {len(first_parts)} GGUF models", "give the path of one .gguf"
        )
    checkpoint.no_weights = None
    read_gguf(checkpoint, folder / first_parts[0], roots)


def _names(folder: Path) -> set[str]:
    """Names at the top of a folder that are not folders themselves."""
    names: set[str] = set()
    try:
        for entry in folder.iterdir():
            if not entry.is_dir():
                names.add(entry.name)
            if len(names) > _MAX_FILES:
                raise OpError(f"{folder.name}: too many files", "give the folder of one model")
    except OSError as error:
        raise OpError(f"{folder.name}: {error.strerror}", "give a folder you may read") from None
    return names
