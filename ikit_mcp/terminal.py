"""What a person, or a pipe, gets to see of a record or a reply.

At a terminal: aligned columns, one fact a line.  In a pipe: the same rows separated by
tabs, so that ``cut`` and ``awk`` work on them.  Text that came from outside loses its
control characters here; a terminal would obey them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ikit_mcp.call import one_line, visible

LIST_COLUMNS = (
    "evidence_id", "kind", "valid", "started", "model", "engine", "summary", "problem",
)  # fmt: skip
SHORT_ID = 12


def record(raw: Mapping[str, Any], wide: bool) -> str:
    """A stored record: its summary, metrics, gates, what is missing, limits, how to repeat it."""
    valid = {True: "valid", False: "INVALID", None: "validity not known"}[raw.get("valid")]
    lines = [f"{one_line(str(raw.get('summary')), 600)}", ""]
    rows = [(m["name"], _value(m["value"]), m["unit"], m["stat"]) for m in raw.get("metrics", [])]
    lines += table(rows, wide)
    gates = raw.get("gates", {})
    for title, items in (
        ("violation", gates.get("violations", [])),
        ("warning", gates.get("warnings", [])),
        ("missing", raw.get("coverage", {}).get("missing", [])),
        ("limitation", raw.get("limitations", [])),
    ):
        lines += [f"{title}: {one_line(str(item), 600)}" for item in items]
    provenance = raw.get("provenance", {})
    lines += ["", f"again: {one_line(str(provenance.get('reproduce')), 2_000)}"]
    lines.append(f"evidence {raw.get('evidence_id')} ({raw.get('kind')}, {valid})")
    return "\n".join(lines)


def reply(value: Any, wide: bool) -> str:
    """The reply of an operation that only reads: a table for a listing, else key and value."""
    if not isinstance(value, Mapping):
        return _value(value)
    lines: list[str] = []
    for key, item in value.items():
        if key == "next":
            continue
        if key == "items" and _all_objects(item):
            lines += listing(item, wide, LIST_COLUMNS)
        elif _all_objects(item):
            lines += [f"{key}:", *("  " + line for line in listing(item, wide))]
        elif isinstance(item, (dict, list)):
            lines += [f"{key}:", *("  " + line for line in _pretty(item))]
        else:
            lines += table([(f"{key}:", _value(item))], wide)
    return "\n".join(lines)


def listing(
    items: Sequence[Mapping[str, Any]], wide: bool, columns: Sequence[str] = ()
) -> list[str]:
    """Rows of equal objects, with their keys as the head; of records the ``columns`` alone."""
    keys = list(dict.fromkeys(key for item in items for key in item))
    if columns and "evidence_id" in keys:
        keys = [key for key in columns if key in keys]
    short = wide and "evidence_id" in keys
    rows = [tuple(_cell(key, item.get(key), short) for key in keys) for item in items]
    return table([tuple(keys), *rows], wide)


def table(rows: Iterable[Sequence[str]], wide: bool) -> list[str]:
    """Aligned columns at a terminal, tabs in a pipe."""
    listed = [[one_line(cell, 600) for cell in row] for row in rows]
    if not wide or not listed:
        return ["\t".join(row) for row in listed]
    widths = [max(len(row[n]) for row in listed) for n in range(len(listed[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in listed]


def _all_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, dict) for i in value)


def _pretty(value: Any) -> list[str]:
    return visible(json.dumps(value, ensure_ascii=False, indent=2)).split("\n")


def _cell(key: str, value: Any, short: bool) -> str:
    if short and key == "evidence_id":
        return str(value)[:SHORT_ID]
    if short and key == "started":
        return str(value)[:19].replace("T", " ")
    return _value(value)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
