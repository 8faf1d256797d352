"""Inference engines: an adapter each, and what all of them are judged by.

An adapter knows how to find its engine, how to start its worker, what the engine says of
itself, and which of that spoils a number (``adapter``).  ``drive`` runs a worker and turns
whatever goes wrong into a sentence; ``result`` reads what it leaves; ``gates`` judges.
Every module here that defines ``ADAPTER`` is an engine: adding one is adding a file.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Adapter


@functools.cache
def adapters() -> dict[str, Adapter]:
    """All engines by name, those first that ``auto`` prefers."""
    found = []
    for info in pkgutil.iter_modules(__path__):
        if not info.ispkg:
            module = importlib.import_module(f"{__name__}.{info.name}")
            adapter = getattr(module, "ADAPTER", None)
            if isinstance(adapter, Adapter):
                found.append(adapter)
    return {a.name: a for a in sorted(found, key=lambda a: (a.rank, a.name))}


def adapter_named(name: str) -> Adapter:
    """The engine of that name; OpError lists the names there are."""
    try:
        return adapters()[name]
    except KeyError:
        raise OpError(f"there is no engine {name!r}", f"use {', '.join(adapters())}") from None
