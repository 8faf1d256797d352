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

from ikit_mcp.registry import excerpt
from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.tally import Counts, Options, add_read
from ikit_ops.decode.weights import Slot


def count(
    slots: list[Slot], config: ModelConfig, counts: Counts, reads: dict[int, int], options: Options
) -> None:
    """Fill embedding_row, per_layer_embedding_row, lm_head and what of them is not read."""
    table = [slot for slot in slots if slot.place.role == "embedding"]
    per_layer = [slot for slot in slots if slot.place.role == "per_layer_embedding"]
    head = [slot for slot in slots if slot.place.role == "lm_head"]
    rest = 0
    for group, members in (("embedding_row", table), ("per_layer_embedding_row", per_layer)):
        for slot in members:
            row = rows(slot, options.batch)
            rest += slot.stored - row
            add_read(counts, reads, slot, group, row, options)
    _check_height(table, config, counts)
    counts.head_is_embedding = not head or (config.tied is True and bool(table))
    if counts.head_is_embedding and head:
        dead = sum(slot.stored for slot in head)
        counts.not_read["dead_duplicates"] = counts.not_read.get("dead_duplicates", 0) + dead
        if {slot.shape for slot in head} != {slot.shape for slot in table}:
            counts.doubt(
                "lm_head", "config.json ties the head to the embedding, but they differ in shape"
            )
    read = head_of(slots, counts)
    if not read:
        counts.doubt("lm_head", "the files hold no embedding table and no head")
    for slot in read:
        add_read(counts, reads, slot, "lm_head", slot.stored, options)
        if counts.head_is_embedding:
            row = rows(slot, options.batch)
            counts.read_twice += row
            rest -= slot.stored - row
    if rest:
        counts.not_read["embedding_rest"] = rest


def _check_height(table: list[Slot], config: ModelConfig, counts: Counts) -> None:
    """A table of fewer rows than tokens, or of several times as many, is packed along them.

    bitsandbytes flattens one to [V * H / 2, 1].  A row of such a table is no token's.
    """
    vocabulary = config.integer("vocab_size")
    for slot in table:
        height = slot.shape[0] if len(slot.shape) > 1 else vocabulary
        packed = vocabulary and height and not vocabulary <= height < 2 * vocabulary
        if packed and not _positions(slot):
            counts.doubt(
                "embedding_row",
                f"{excerpt(slot.name, 120)} has {slot.shape[0]} rows for {vocabulary} tokens",
                rows(slot, 1),
            )


def head_of(slots: list[Slot], counts: Counts) -> list[Slot]:
    """The slots that are read as the head: its own, or the embedding's.

    A position table beside the token table is gathered, never multiplied with.
    """
    role = "embedding" if counts.head_is_embedding else "lm_head"
    return [slot for slot in slots if slot.place.role == role and not _positions(slot)]


def _positions(slot: Slot) -> bool:
    """Whether a table is one of positions (GPT-2, OPT) and not of tokens."""
    return not {"wpe", "embed_positions", "position_embeddings"}.isdisjoint(
        slot.place.module.split(".")
    )


def rows(slot: Slot, batch: int) -> int:
    """Bytes of ``batch`` rows of one tensor of a table; a scalar is read whole."""
    height = slot.shape[0] if slot.shape else 0
    if not height or slot.stored % height:
        return slot.stored
    return min(slot.stored // height * batch, slot.stored)
