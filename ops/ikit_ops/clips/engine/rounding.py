"""The reference made to round as engines do: int8 weights, int8 activations, float32 in bf16.

What an honest engine may do is not guessed but run.  The rounding is put on for one run by hooks
on the layers and leaves no trace; of changed weights one layer's are held at a time, so that a
model that only just fits can be run so too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

LEVELS = 127  # of int8, symmetric: every scheme in use leaves out -128
LEAST = 1e-8

Change = Callable[[torch.Tensor], torch.Tensor]


def int8(values: torch.Tensor, rows: bool, levels: int = LEVELS) -> torch.Tensor:
    """Rounded to int8 and back, with one scale for each row (or token), or one for all.

    ``levels``: the whole number that the largest value becomes.
    """
    largest = values.abs().amax(-1, keepdim=True) if rows else values.abs().amax()
    scale = largest.float().clamp_min(LEAST) / levels
    return ((values.float() / scale).round() * scale).to(values.dtype)


@contextmanager
def int8_weights(models: Sequence[Any], rows: bool, levels: int = LEVELS) -> Iterator[None]:
    """Run the body with every linear layer's weight rounded to int8."""
    with _weights(models, lambda weight: int8(weight, rows, levels), (torch.nn.Linear,)):
        yield


@contextmanager
def int8_activations(models: Sequence[Any], rows: bool = True) -> Iterator[None]:
    """Run the body with what goes into every linear layer rounded to int8."""

    def change(_module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (int8(given[0], rows), *given[1:])

    layers = [m for model in models for m in model.modules() if isinstance(m, torch.nn.Linear)]
    handles = [layer.register_forward_pre_hook(change) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_float32(models: Sequence[Any]) -> Iterator[None]:
    """Run the body with layers that hold bf16 computing in float32, one layer at a time.

    bf16 to float32 loses nothing, so this is the float32 model as far as its weights are bf16
    anyway, at half of the memory.
    """

    def widen(_module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        return tuple(map(_wide, args)), {name: _wide(value) for name, value in given.items()}

    handles = [
        layer.register_forward_pre_hook(widen, with_kwargs=True)
        for model in models
        for layer in (model, *_leaves(model))
    ]
    try:
        with _weights(models, lambda weight: weight.float(), (torch.nn.Module,)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _wide(value: Any) -> Any:
    return value.float() if torch.is_tensor(value) and value.is_floating_point() else value


def _leaves(model: Any) -> list[Any]:
    """The layers that hold numbers and no other layer."""
    return [
        m
        for m in model.modules()
        if next(m.children(), None) is None and next(m.parameters(recurse=False), None) is not None
    ]


@contextmanager
def _weights(models: Sequence[Any], change: Change, kinds: tuple[type, ...]) -> Iterator[None]:
    """Run the body with the parameters of leaf layers changed while each of them runs."""
    whole = torch.nn.Module in kinds
    layers = [
        layer for model in models for layer in _leaves(model) if whole or isinstance(layer, kinds)
    ]
    kept: dict[int, list[torch.Tensor]] = {}

    def before(layer: Any, _args: Any) -> None:
        own = list(layer.parameters(recurse=False)) if whole else [layer.weight]
        kept[id(layer)] = [each.data for each in own]
        for each in own:
            each.data = change(each.data)

    def after(layer: Any, _args: Any, _output: Any) -> None:
        own = list(layer.parameters(recurse=False)) if whole else [layer.weight]
        for each, data in zip(own, kept.pop(id(layer), ()), strict=False):
            each.data = data

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    # What was put on last comes off first: changes of several kinds may lie on one layer.
    handles += [
        layer.register_forward_hook(after, prepend=True, always_call=True) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
