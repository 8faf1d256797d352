"""Profilers: an adapter each, readers for what they write, and one kernel table for all.

An adapter (``adapter``) knows a profiler's command line, what it leaves, and what keeps it from
being used; every module here that defines ``PROFILER`` is one, so adding one is adding a file.
Readers (``nsys_sqlite``, ``chrome_trace``, ...) turn a file into a ``Capture``, under the
bounds of ``limits``.  ``formats`` tells which reader a file needs, ``report`` makes a record.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from ikit_mcp.registry import OpError
from ikit_ops.profilers.adapter import Profiler


@functools.cache
def profilers() -> dict[str, Profiler]:
    """All profilers by name, those first that ``auto`` prefers."""
    found = []
    for info in pkgutil.iter_modules(__path__):
        if not info.ispkg:
            module = importlib.import_module(f"{__name__}.{info.name}")
            profiler = getattr(module, "PROFILER", None)
            if isinstance(profiler, Profiler):
                found.append(profiler)
    return {p.name: p for p in sorted(found, key=lambda p: (p.rank, p.name))}


def profiler_named(name: str) -> Profiler:
    """The profiler of that name; OpError lists the names there are."""
    try:
        return profilers()[name]
    except KeyError:
        raise OpError(f"there is no profiler {name!r}", f"use {', '.join(profilers())}") from None
