"""Roles that a tensor's own name does not tell: by its shape, its layer, its stack.

``names`` looks at one name at a time.  A causal mask is called ``bias``; a layer that
attends to an image alone has the MLP and the norms of any other; a second decoder has the
names of the first.  What is settled here is taken out of the bytes read, or named as
UNPROVEN, before anything is counted.

Sources: vLLM's gpt2.py (which skips stored masks), transformers' mllama; the
configurations of Ouro, Huginn, HRM and ALBERT (layers that run in a loop), of LLaDA and
Dream (diffusion over masked tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ikit_mcp.registry import excerpt
from ikit_ops.decode.model_config import ModelConfig
from ikit_ops.decode.names import CROSS_ATTENTION, MIXER
from ikit_ops.decode.weights import Slot

NEVER_RUN = ("towers", "mtp", "dead_duplicates")
"""Roles that decoding one token of text does not read at all."""

_TWICE = "layers run more than once for a token, which is not counted"
_FILLED_IN = "masked tokens are filled in, so that a step's bytes are not those of one token"
# Keys that say that a step is not one pass through the layers for one token.
_ANOTHER_STEP = {
    "total_ut_steps": _TWICE,  # Ouro
    "mean_recurrence": _TWICE,  # Huginn
    "num_recurrent_steps": _TWICE,
    "H_cycles": _TWICE,  # HRM
    "num_hidden_groups": _TWICE,  # ALBERT's shared layers
    "mask_token_id": _FILLED_IN,  # LLaDA, Dream
    "canvas_length": _FILLED_IN,  # Gemma's diffusion
}


def causal_masks(slots: list[Slot]) -> None:
    """Tell a mask from a bias: GPT-2 and Pythia store one of [1, 1, T, T] as ``attn.bias``."""
    for slot in slots:
        place = slot.place
        if place.role == "attention" and place.parameter == "bias" and len(slot.shape) > 2:
            slot.place = place._replace(role="dead_duplicates")


def conditional_layers(slots: list[Slot]) -> None:
    """Give up on layers that attend to an encoder alone: without its output they do not run.

    Llama-3.2-Vision skips a layer whose only attention is to the image, with its MLP and its
    norms, when there is no image.  A layer that also attends to the text does run.
    """
    containers: dict[tuple[str, int | None], set[str]] = defaultdict(set)
    for slot in slots:
        parts = set(slot.place.module.split("."))
        found = containers[slot.place.stack, slot.place.layer]
        found |= parts & CROSS_ATTENTION or parts & MIXER
    for slot in slots:
        found = containers[slot.place.stack, slot.place.layer]
        decoder = slot.place.layer is not None and slot.place.role not in NEVER_RUN
        if decoder and found and found <= CROSS_ATTENTION:
            slot.place = slot.place._replace(role="unknown")


def other_stacks(slots: list[Slot], main: str) -> None:
    """Give up on layers beside the model's own: a draft's or a second decoder's, as it may be."""
    for slot in slots:
        place = slot.place
        if place.layer is not None and place.stack != main and place.role not in NEVER_RUN:
            slot.place = place._replace(role="unknown")


def another_step(config: ModelConfig) -> Iterator[str]:
    """Why a step of this model is not one pass through its layers for one token."""
    for key, value in config.text.items():
        why = _ANOTHER_STEP.get(key)
        if {"loop", "loops"}.intersection(str(key).split("_")) and type(value) is int:
            why = _TWICE  # iQuest's loop_num
        if why is not None and value not in (None, False, 0, 1):
            yield f"{excerpt(str(key), 60)} in config.json: {why}"
