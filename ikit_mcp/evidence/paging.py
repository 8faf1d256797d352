"""Pieces of a record that fit into a reply, whatever the record holds.

An agent pays for every character it reads, and clients cut or refuse replies that are
too large.  So a value is shown whole when it fits, in outline when it does not -- each
part that is left out names its size and the path that shows it -- and lists, long texts
and large objects are read in pages.  A page is cut to the budget whatever ``limit``
says, always holds at least one item, and tells where the next one starts.

Paths are dotted.  Keys may hold dots themselves (tensor names do), so at each step the
longest key that fits is taken; indexes may be negative; an object in a list is also
found by its ``name``; and ``#3`` is the fourth member of an object, for keys that are
too long for a path or that a path would read as something else.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from ikit_mcp.registry import OpError, excerpt

PAGE_CHARACTERS = 9_000
PATH_CHARACTERS = 1_800
_ITEM_CHARACTERS = PAGE_CHARACTERS // 3
_TEXT_PAGE = 6_000
_START_OF_TEXT = 400
_SPELLED = 400
_NAME = 200
_SMALLEST_ROOM = 160
_INDEX = re.compile(r"-?[0-9]{1,9}")
_POSITION = re.compile(r"#[0-9]{1,9}")
_KINDS = {"dict": ("object", "members"), "list": ("list", "items"), "str": ("text", "characters")}


def size(value: Any) -> int:
    """Characters of the value as compact JSON."""
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


# --- paths -------------------------------------------------------------------


def find(value: Any, path: str) -> Any:
    """The value at a dotted path; OpError names the step that is not there, and what is."""
    if size(path) > PATH_CHARACTERS:
        raise OpError(
            f"the path has {size(path):,} characters, over the limit of {PATH_CHARACTERS:,}",
            "use #N for the member number N (from 0) of an object with long keys",
        )
    if not path.strip():
        return value
    try:
        return _walk(value, path.split("."), path)
    except OpError:
        steps = [step for step in path.split(".") if step]  # "data." is meant as "data"
        if len(steps) == path.count(".") + 1:
            raise
        return _walk(value, steps, path)


def _walk(value: Any, steps: list[str], path: str) -> Any:
    done = 0
    while done < len(steps):
        if isinstance(value, dict):
            value, taken = _in_object(value, steps, done, path)
        elif isinstance(value, list):
            value, taken = _in_list(value, steps, done, path)
        else:
            here = ".".join(steps[:done])
            what = f"path {_quoted(path, 200)}: {_quoted(here, 200)} is {_kind(value)}"
            raise OpError(f"{what} and has no parts", "shorten it")
        done += taken
    return value


def _in_object(value: dict[str, Any], steps: list[str], done: int, path: str) -> tuple[Any, int]:
    """The member under the longest key that the coming steps spell, and how many they are."""
    for taken in range(len(steps) - done, 0, -1):
        key = ".".join(steps[done : done + taken])
        if key in value:
            return value[key], taken
    if _POSITION.fullmatch(steps[done]) and int(steps[done][1:]) < len(value):
        return list(value.values())[int(steps[done][1:])], 1
    raise _no_such(steps[done], path, list(value))


def _in_list(value: list[Any], steps: list[str], done: int, path: str) -> tuple[Any, int]:
    """The item of that index, or the first of that ``name``."""
    if _INDEX.fullmatch(steps[done]):
        index = int(steps[done])
        if -len(value) <= index < len(value):
            return value[index], 1
        raise OpError(
            f"path {_quoted(path, 200)}: index {index} is outside a list of {len(value)}",
            f"use 0 to {len(value) - 1}" if value else "the list is empty",
        )
    named: dict[str, Any] = {}
    for item in value:
        if isinstance(item, dict) and isinstance(item.get("name"), str):
            named.setdefault(item["name"], item)
    return _in_object(named, steps, done, path)


def _no_such(step: str, path: str, known: list[str]) -> OpError:
    shown = ", ".join(_quoted(key, 60) for key in known[:12]) + (" …" if len(known) > 12 else "")
    return OpError(
        f"path {_quoted(path, 200)}: there is no {_quoted(step, 60)}",
        f"use one of: {excerpt(shown, 1_000)}" if known else "there is nothing under it",
    )


def _quoted(text: str, limit: int) -> str:
    """A key or a path in an error, on one line: whatever is not plain is escaped."""
    short = excerpt(text, limit) + ("…" if len(text) > limit else "")
    return short if text and text.isprintable() and '"' not in text else json.dumps(short)[:limit]


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "a text"
    return "null" if value is None else f"a {type(value).__name__}"


def _child(path: str, parent: dict[str, Any], key: str) -> str | None:
    """A path that leads to one member of an object; None when none can."""
    spelled = f"{path}.{key}" if path else key
    plain = key.strip() == key != "" and len(spelled) <= _SPELLED
    if plain and not any(other.startswith(f"{key}.") for other in parent):
        return spelled
    step = f"#{list(parent).index(key)}"
    if any(other == step or other.startswith(f"{step}.") for other in parent):
        return None
    return f"{path}.{step}" if path else step


# --- outlines and pages ------------------------------------------------------


def outline(value: Any, path: str | None = "", budget: int = PAGE_CHARACTERS) -> Any:
    """The value when it fits; else the same with its largest parts replaced by notes.

    A note is ``{"left_out": "list of 61 items, 41,230 characters", "path": "data.kernels"}``,
    for a text with its ``start`` too.
    """
    if size(value) <= budget:
        return value
    if isinstance(value, dict):
        shown = _outline_object(value, path, budget)
        if shown is not None:
            return shown
    return _note(value, path, budget)


def _outline_object(value: dict[str, Any], path: str | None, budget: int) -> Any:
    """The object with its largest members cut until it fits; None when that is not enough."""
    sizes = {key: size(item) + size(key) + 2 for key, item in value.items()}
    total = sum(sizes.values()) + 2
    shown = dict(value)
    for key in sorted(sizes, key=lambda k: -sizes[k]):
        if total <= budget:
            return shown
        room = max(_SMALLEST_ROOM, budget - (total - sizes[key]))
        if size(value[key]) <= _SMALLEST_ROOM:
            continue
        inner = None if path is None else _child(path, value, key)
        made = outline(value[key], inner, room)
        smaller = size(made) + size(key) + 2
        if smaller < sizes[key]:
            shown[key] = made
            total -= sizes[key] - smaller
    return shown if total <= budget else None


def _note(value: Any, path: str | None, budget: int) -> Any:
    """What stands in for a part that is left out; small values stand for themselves."""
    if type(value).__name__ not in _KINDS:
        return value
    kind, parts = _KINDS[type(value).__name__]
    what = f"{kind} of {len(value):,} {parts}, {size(value):,} characters"
    note: dict[str, Any] = {"left_out": what, "path": path}
    if isinstance(value, str):
        note["start"] = _cut(excerpt(value, _START_OF_TEXT), max(0, budget - size(note) - 12))
    return note


def page(value: Any, path: str, offset: int, limit: int) -> dict[str, Any]:
    """What a reply shows of the value at ``path``.

    ``{"value"}`` for what fits whole; ``{"total", "offset", "items", "next_offset"}`` for
    a list (its items), a large object (``{"name", "value"}`` a member) and a long text
    (``value`` is then the piece, in characters).
    """
    if isinstance(value, list):

        def item(number: int) -> Any:
            return outline(value[number], f"{path}.{number}" if path else str(number),
                           _ITEM_CHARACTERS)  # fmt: skip

        return _pages(len(value), offset, limit, item)
    if isinstance(value, dict) and size(value) > PAGE_CHARACTERS:
        keys = list(value)
        return _pages(
            len(keys), offset, limit, lambda number: _member(value, keys[number], number, path)
        )
    if isinstance(value, str) and size(value) > _TEXT_PAGE:
        # Redacted as a whole: two pages would each show half of what lies across their seam.
        return _text_page(excerpt(value, sys.maxsize), offset)
    return {"value": value}


def _member(value: dict[str, Any], key: str, number: int, path: str) -> dict[str, Any]:
    """One member of a large object, its name cut when it is long (then with its path)."""
    item = value[key]
    large = size(item) > _ITEM_CHARACTERS
    where = _child(path, value, key) if large or size(key) > _NAME else None
    shown = outline(item, where, _ITEM_CHARACTERS) if large else item
    if size(key) <= _NAME:
        return {"name": key, "value": shown}
    name = _cut(excerpt(key, _NAME), _NAME)
    return {"name": name, "name_characters": len(key), "path": where, "value": shown}


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
    piece = _cut(value[offset : offset + _TEXT_PAGE], PAGE_CHARACTERS)
    end = offset + len(piece)
    more = end if end < len(value) else None
    return {"total": len(value), "offset": offset, "value": piece, "next_offset": more}


def _cut(text: str, budget: int) -> str:
    """The start of a text that takes at most ``budget`` characters as JSON."""
    while text and size(text) > budget:  # escapes make a character up to six
        text = text[: len(text) * budget // (size(text) + 1)]
    return text
