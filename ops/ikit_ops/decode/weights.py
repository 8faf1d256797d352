"""Gathering a checkpoint's tensors into slots: what is stored, for what, how often alike.

A mixture-of-experts checkpoint has a hundred thousand tensors and a few hundred kinds of
them, because the experts of a layer are alike.  So tensors that differ in nothing but the
expert's number share a slot, and everything after this module works on slots.  The name
is split at ``.experts.`` first: that one cut makes the common case two dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ikit_ops.checkpoint.safetensors_header import TensorEntry
from ikit_ops.decode.names import Place, place_of


@dataclass
class Slot:
    """Tensors of one kind: the same place, parameter and element type.

    Attributes:
        place: role, layer, module (without the expert's number), parameter.
        dtype: element type of all of them.
        shape: shape of the first.
        name: name of the first.
        sizes: bytes of a tensor -> how many have that size.
        experts: the numbers of the experts that the layer stores, shared by its slots;
            None when the name carries none.
    """

    place: Place
    dtype: str
    shape: tuple[int, ...]
    name: str
    experts: set[str] | None = None
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Tensors in the slot."""
        return sum(self.sizes.values())

    @property
    def stored(self) -> int:
        """Bytes of all its tensors."""
        return sum(size * count for size, count in self.sizes.items())


def gather(tensors: Mapping[str, TensorEntry], layers: int | None) -> list[Slot]:
    """All tensors in slots, in the order of their first tensor.

    Args:
        tensors: the checkpoint's tensors by name.
        layers: decoder layers of the main model, None when unknown.
    """
    slots: dict[tuple[str, str, str], Slot] = {}
    numbers: dict[str, set[str]] = {}
    for name, entry in tensors.items():
        head, found, tail = name.partition(".experts.")
        index, _, rest = tail.partition(".")
        indexed = bool(found) and index.isdigit()
        key = (head, rest, entry.dtype) if indexed else (name, "", entry.dtype)
        slot = slots.get(key)
        if slot is None:
            place = place_of(f"{head}.experts.{rest}" if indexed else name, layers)
            found_here = numbers.setdefault(head, set()) if indexed else None
            slot = slots[key] = Slot(place, entry.dtype, entry.dims, name, found_here)
        if slot.experts is not None:
            slot.experts.add(index)
        begin, end = entry.data_offsets or (0, 0)  # not .nbytes: this runs for every expert
        size = end - begin
        sizes = slot.sizes
        sizes[size] = sizes.get(size, 0) + 1
    return list(slots.values())


def modules_of(slots: Iterable[Slot]) -> list[dict[str, list[Slot]]]:
    """The slots by module: parameter -> its slots, one for each element type that it has."""
    modules: dict[tuple[str, int | None, str], dict[str, list[Slot]]] = {}
    for slot in slots:
        place = slot.place
        module, parameter = place.module, place.parameter
        for suffix in FUSED_SUFFIXES if not parameter else ():
            if module.endswith(suffix):
                module, parameter = module[: -len(suffix)], FUSED_SUFFIXES[suffix]
                break
        parameters = modules.setdefault((place.stack, place.layer, module), {})
        parameters.setdefault(parameter, []).append(slot)
    return list(modules.values())


# gpt-oss and llama4 stack experts in bare parameters: the suffix is the parameter
FUSED_SUFFIXES = {
    "_blocks": "weight",
    "_scales": "weight_scale",
    "_bias": "bias",
    "_weight_scale_2": "weight_scale_2",
    "_weight_scale": "weight_scale",
    "_weight_packed": "weight_packed",
    "_input_scale": "input_scale",
    "_scale_inv": "weight_scale_inv",
}
