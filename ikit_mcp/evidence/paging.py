"""Pieces of a record that fit into a reply, whatever the record holds.

An agent pays for every character it reads, and clients cut or refuse replies that are
too large.  So a value is shown whole when it fits, in outline when it does not -- each
part that is left out names its size and the path that shows it -- and lists, long texts
and large objects are read in pages.  A page is cut to the budget whatever ``limit``
says, always holds at least one item, and tells where the next one starts.

Paths are dotted.  Keys may hold dots themselves (tensor names do), so at each step the
longest key that fits is taken; indexes may be negative; an object in a list is also
found by its ``name``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ikit_mcp.registry import OpError

PAGE_CHARACTERS = 9_000
_STUB_CHARACTERS = 160
_TEXT_PAGE = 6_000


def size(value: Any) -> int:
    """Characters of the value as compact JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


# --- paths -------------------------------------------------------------------


def find(value: Any, path: str) -> Any:
    """The value at a dotted path; OpError names the step that is not there, and what is."""
    steps = [part for part in path.split(".") if part] if path.strip() else []
    done = 0
    while done < len(steps):
        if isinstance(value, dict):
            value, taken = _in_object(value, steps, done, path)
        elif isinstance(value, list):
            value, taken = _in_list(value, steps, done, path)
        else:
            here = ".".join(steps[:done]) or "the record"
            kind = _kind(value)
            raise OpError(f"path {path[:200]!r}: {here} is {kind} and has no parts", "shorten it")
        done += taken
    return value


def _in_object(value: dict[str, Any], steps: list[str], done: int, path: str) -> tuple[Any, int]:
    """The member under the longest key that the coming steps spell, and how many they are."""
    for taken in range(len(steps) - done, 0, -1):
        key = ".".join(steps[done : done + taken])
        if key in value:
            return value[key], taken
    raise _no_such(steps[done], path, list(value))


def _in_list(value: list[Any], steps: list[str], done: int, path: str) -> tuple[Any, int]:
    """The item of that index, or of that ``name``."""
    step = steps[done]
    if step.lstrip("-").isdigit() and step.count("-") <= 1 and len(step) < 12:
        index = int(step)
        if -len(value) <= index < len(value):
            return value[index], 1
        raise OpError(
            f"path {path[:200]!r}: index {index} is outside a list of {len(value)}",
            f"use 0 to {len(value) - 1}" if value else "the list is empty",
        )
    named = {i["name"]: i for i in value if isinstance(i, dict) and isinstance(i.get("name"), str)}
    return _in_object(named, steps, done, path)


def _no_such(step: str, path: str, known: list[str]) -> OpError:
    shown = ", ".join(key[:60] for key in known[:20]) + (" …" if len(known) > 20 else "")
    return OpError(
        f"path {path[:200]!r}: there is no {step[:60]!r}",
        f"use one of: {shown}" if known else "there is nothing under it",
    )


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "a text"
    return "null" if value is None else f"a {type(value).__name__}"


# --- outlines and pages ------------------------------------------------------


def outline(value: Any, path: str = "", budget: int = PAGE_CHARACTERS) -> Any:
    """The value when it fits; else the same with its largest parts replaced by notes.

    A note is ``{"left_out": "list of 61 items, 41,230 characters", "path": "data.kernels"}``.
    """
    if size(value) <= budget:
        return value
    if isinstance(value, dict):
        return _outline_object(value, path, budget)
    if isinstance(value, list):
        return _note(value, path)
    return value[: max(0, budget - 40)] + "…" if isinstance(value, str) else value


def _outline_object(value: dict[str, Any], path: str, budget: int) -> Any:
    sizes = {key: size(item) + len(key) + 4 for key, item in value.items()}
    if len(value) * _STUB_CHARACTERS > budget:
        return _note(value, path)
    shown = dict(value)
    for key in sorted(sizes, key=lambda k: -sizes[k]):
        total = sum(sizes.values())
        if total <= budget:
            break
        inner = f"{path}.{key}" if path else key
        room = max(_STUB_CHARACTERS, budget - (total - sizes[key]))
        item = value[key]
        fits = isinstance(item, dict) and len(item) * _STUB_CHARACTERS <= room
        shown[key] = outline(item, inner, room) if fits else _note(item, inner)
        sizes[key] = size(shown[key]) + len(key) + 4
    return shown


def _note(value: Any, path: str) -> Any:
    """What stands in for a part that is left out; small values stand for themselves."""
    characters = size(value)
    if characters <= _STUB_CHARACTERS:
        return value
    parts = {"list": "items", "dict": "members", "str": "characters"}[type(value).__name__]
    what = f"{type(value).__name__} of {len(value):,} {parts}"
    return {"left_out": f"{what}, {characters:,} characters", "path": path[:400]}


def page(value: Any, path: str, offset: int, limit: int) -> dict[str, Any]:
    """What a reply shows of the value at ``path``.

    ``{"value"}`` for what fits whole; ``{"total", "offset", "items", "next_offset"}`` for
    a list (its items), a large object (``{"name", "value"}`` a member) and a long text
    (``value`` is then the piece, in characters).
    """
    if isinstance(value, list):
        return _pages(len(value), offset, limit, lambda n: _item(value[n], f"{path}.{n}"))
    if isinstance(value, dict) and size(value) > PAGE_CHARACTERS:
        keys = list(value)
        return _pages(
            len(keys), offset, limit,
            lambda n: {"name": keys[n], "value": _item(value[keys[n]], f"{path}.{keys[n]}")},
        )  # fmt: skip
    if isinstance(value, str) and size(value) > _TEXT_PAGE:
        return _text_page(value, offset)
    return {"value": value}


def _item(value: Any, path: str) -> Any:
    return outline(value, path.lstrip("."), PAGE_CHARACTERS // 3)


def _pages(total: int, offset: int, limit: int, item: Callable[[int], Any]) -> dict[str, Any]:
    """As many items from ``offset`` as the limit and the budget allow, but at least one."""
    items: list[Any] = []
    used = 0
    for number in range(offset, min(total, offset + limit)):
        made = item(number)
        used += size(made) + 1
        if items and used > PAGE_CHARACTERS:
            break
        items.append(made)
    end = offset + len(items)
    more = end if end < total else None
    return {"total": total, "offset": offset, "items": items, "next_offset": more}


def _text_page(value: str, offset: int) -> dict[str, Any]:
    piece = value[offset : offset + _TEXT_PAGE]
    while size(piece) > PAGE_CHARACTERS:  # escapes can make a piece several times longer
        piece = piece[: len(piece) // 2]
    end = offset + len(piece)
    more = end if end < len(value) else None
    return {"total": len(value), "offset": offset, "value": piece, "next_offset": more}
