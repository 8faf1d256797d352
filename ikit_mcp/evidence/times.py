"""Times in records: RFC 3339, UTC, microseconds, so that their texts sort as they do.

Records may come from other tools, with other precision or another offset.  What is
compared is therefore always the normalised form, ``2026-11-30T09:12:00.250000Z``.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from ikit_mcp.registry import OpError, excerpt

_AGO = re.compile(r"([0-9]{1,6})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
BEGINNING = "0001-01-01T00:00:00.000000Z"
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def text(moment: datetime) -> str:
    """The normalised text of a moment."""
    # Not strftime: some platforms write the year 1 as "1", which sorts after 2026.
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def now() -> str:
    """The normalised text of this moment."""
    return text(datetime.now(UTC))


def normalised(value: object) -> str | None:
    """The normalised text of an RFC 3339 time, or None when it is not one."""
    if not isinstance(value, str) or not 10 < len(value) < 64:
        return None
    try:
        moment = datetime.fromisoformat(value.upper())  # RFC 3339 allows t and z
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
            end = day + timedelta(hours=23, minutes=59, seconds=59, microseconds=999_999)
            return text(end if last else day)
    except (ValueError, OverflowError):
        pass
    else:
        if made := normalised(given):
            return made
    raise OpError(
        f"{name}: got {excerpt(given, 40)!r}; allowed: a date (2026-11-30), a time with its offset"
        " (2026-11-30T09:12:00Z), or how long ago (36h, 7d)",
        f"call again with {name} corrected",
    )
