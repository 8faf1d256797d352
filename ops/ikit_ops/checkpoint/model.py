"""What a checkpoint is to everything that counts bytes: names, types, shapes, sizes.

Where it came from (a folder, one file, the Hub, the Hub's cache, a GGUF file) is kept
beside it, because a number without its source proves nothing, and so is everything
that the reader noticed on the way: files that it left out and why, and the ways in
which the index and the headers disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ikit_ops.checkpoint.safetensors_header import TensorEntry

Source = Literal["file", "directory", "hub", "hub-cache"]


@dataclass
class Checkpoint:
    """The headers of one model, and its configuration.

    Attributes:
        source: where the headers were read.
        name: how people call the model: its Hub id, or the folder's or file's name.
        location: the Hub id, or the path that was read.
        revision: the commit of the Hub that was read; None for local files without one.
        format: the container of the weights; None when only a configuration was found.
        config: config.json, or what the GGUF metadata says in the same terms.
        quant_config: hf_quant_config.json, where the checkpoint has one.
        tensors: every tensor by name, once.
        duplicates: tensors stored a second time in another file: (name, bytes).
        misplaced: tensors that are in another file than the index says.
        files: the weight files that were read, with the tensor bytes of each.
        skipped: files that were left out: (name, why).
        notes: disagreements worth telling, none of which changes a number.
        unproven: findings that leave the count in doubt.
        no_weights: why there are no headers, when there are none.
    """

    source: Source
    name: str
    location: str
    revision: str | None = None
    format: Literal["safetensors", "gguf"] | None = None
    config: dict[str, Any] | None = None
    quant_config: dict[str, Any] | None = None
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    duplicates: list[tuple[str, int]] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    no_weights: str | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files that count, copies included."""
        return sum(self.files.values())
