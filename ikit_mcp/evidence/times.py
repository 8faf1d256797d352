"""Times in records: RFC 3339, UTC, microseconds, so that their texts sort as they do.

Records may come from other tools, with other precision or another offset.  What is
compared is therefore always the normalised form, ``2026-11-30T09:12:00.250000Z``.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ikit_mcp.registry import OpError

_AGO = re.compile(r"(\d{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def text(moment: datetime) -> str:
    """The normalised text of a moment."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def now() -> str:
    """The normalised text of this moment."""
    return text(datetime.now(UTC))


def normalised(value: object) -> str | None:
    """The normalised text of an RFC 3339 time, or None when it is not one."""
    if not isinstance(value, str) or not 10 < len(value) < 64:
        return None
    try:
        moment = datetime.fromisoformat(value)
        return text(moment) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def bound(value: str, name: str, *, last: bool = False) -> str:
    """The normalised text of a bound: a date, a time, or how long ago (``36h``, ``7d``).

    A date means its first moment, or its ``last``.  OpError says what is allowed.
    """
    given = value.strip()
    try:
        if ago := _AGO.fullmatch(given):
            return text(datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])}))
        if _DATE.fullmatch(given):
            day = datetime.fromisoformat(given).replace(tzinfo=UTC)
            return text(day + timedelta(days=1, microseconds=-1) if last else day)
    except (ValueError, OverflowError):
        pass
    else:
        if made := normalised(given):
            return made
    raise OpError(
        f"{name}: got {given[:40]!r}; allowed: a date (2026-11-30), a time with its offset"
        " (2026-11-30T09:12:00Z), or how long ago (36h, 7d)",
        f"call again with {name} corrected",
    )
