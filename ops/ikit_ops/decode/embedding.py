"""The two ends of the model: the embedding's row, and the head.

A token's embedding is one row of its table, in the table's own format (of an MLX 4-bit
table: its words, scales and biases).  Gemma-3n's per-layer table is gathered the same
way; reading it whole would overstate that model by half.

The head multiplies with the whole vocabulary.  Stored, it is read as stored.  Not stored,
it *is* the embedding table, whatever ``tie_word_embeddings`` says, and the table is read
in full.  Stored and tied (Qwen3-0.6B), engines load one copy and ignore the other (vLLM
skips ``lm_head.`` when tied): the matrix counts once, the copy is dead.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.weights import Slot

if TYPE_CHECKING:
    from ikit_ops.decode.count import Counts, Options


def count(
    slots: list[Slot], config: ModelConfig, counts: Counts, reads: dict[int, int], options: Options
) -> None:
    """Fill embedding_row, per_layer_embedding_row, lm_head and what of them is not read."""
    table = [slot for slot in slots if slot.place.role == "embedding"]
    per_layer = [slot for slot in slots if slot.place.role == "per_layer_embedding"]
    head = [slot for slot in slots if slot.place.role == "lm_head"]
    devices, batch = options.tensor_parallel, options.batch
    row = _rows(table, batch)
    rest = sum(slot.stored for slot in table) - row
    tied = not head or (config.tied is True and bool(table))
    if tied and not head and not table:
        counts.doubt("lm_head", "the files hold no embedding table and no head")
    if tied and head:
        dead = sum(slot.stored for slot in head)
        counts.not_read["dead_duplicates"] = counts.not_read.get("dead_duplicates", 0) + dead
        if {slot.shape for slot in head} != {slot.shape for slot in table}:
            counts.doubt(
                "lm_head", "config.json ties the head to the embedding, but they differ in shape"
            )
    if tied:
        # a position table beside the token table is gathered, never multiplied with
        read = [slot for slot in table if not _positions(slot)]
        counts.read_twice = _rows(read, batch)
        rest = sum(slot.stored for slot in table if _positions(slot)) - (row - counts.read_twice)
    else:
        read = head
    counts.groups["embedding_row"] = row
    for slot in table:
        reads[id(slot)] = _rows([slot], batch)
    if read:
        counts.groups["lm_head"] = round(Fraction(sum(s.stored for s in read), devices))
        for slot in read:
            reads[id(slot)] = reads.get(id(slot), 0) + round(Fraction(slot.stored, devices))
    if per_layer:
        extra = _rows(per_layer, batch)
        counts.groups["per_layer_embedding_row"] = extra
        rest += sum(slot.stored for slot in per_layer) - extra
        for slot in per_layer:
            reads[id(slot)] = _rows([slot], batch)
    if rest:
        counts.not_read["embedding_rest"] = rest


def _positions(slot: Slot) -> bool:
    """Whether a table is one of positions (GPT-2, OPT) and not of tokens."""
    return not {"wpe", "embed_positions", "position_embeddings"}.isdisjoint(
        slot.place.module.split(".")
    )


def _rows(table: list[Slot], batch: int) -> int:
    """Bytes of ``batch`` rows of a table, over the tensors that make it up.

    A tensor without a row for each entry (a scale for the whole table) is read whole.
    """
    rows = max((slot.shape[0] for slot in table if len(slot.shape) >= 2), default=0)
    total = 0
    for slot in table:
        # tables of tokens and of positions have rows of their own
        own = slot.shape[0] if len(slot.shape) >= 2 else rows
        split = own and slot.shape and slot.shape[0] == own and slot.stored % own == 0
        total += min(slot.stored // own * batch, slot.stored) if split else slot.stored
    return total
