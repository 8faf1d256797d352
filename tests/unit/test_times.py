"""Times sort as their texts do, and bounds are understood as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_mcp.evidence import times
from ikit_mcp.registry import OpError

HOURS = st.integers(-14, 14).map(lambda hours: timezone(timedelta(hours=hours)))
MOMENTS = st.datetimes(
    min_value=datetime(2, 1, 1), max_value=datetime(9998, 12, 31), timezones=HOURS
)


@given(MOMENTS, MOMENTS)
def test_texts_sort_as_the_moments_do(one: datetime, other: datetime) -> None:
    assert (times.text(one) < times.text(other)) == (one < other)
    assert len(times.text(one)) == 27 and times.normalised(times.text(one)) == times.text(one)


@pytest.mark.parametrize(
    ("given_text", "made"),
    [
        ("2026-11-30T09:12:00Z", "2026-11-30T09:12:00.000000Z"),
        ("2026-11-30t09:12:00z", "2026-11-30T09:12:00.000000Z"),
        ("2026-11-30T09:12:00.25+02:00", "2026-11-30T07:12:00.250000Z"),
        ("2026-11-30 09:12:00-05:30", "2026-11-30T14:42:00.000000Z"),
        ("0001-01-01T00:00:00Z", times.BEGINNING),
        ("2026-11-30T09:12:00", None),
        ("2026-11-30", None),
        ("2026-13-30T09:12:00Z", None),
        ("0001-01-01T00:00:00+01:00", None),
        ("yesterday at noon", None),
        ("2026-11-30T09:12:00Z" + " " * 50, None),
        ("\ud800" * 20, None),
        ("", None),
        (5, None),
        (None, None),
        (["2026-11-30T09:12:00Z"], None),
    ],
)
def test_a_time_is_normalised_or_is_none(given_text: object, made: str | None) -> None:
    assert times.normalised(given_text) == made


def test_now_is_normalised() -> None:
    before = times.text(datetime.now(UTC))
    assert before <= times.now() <= times.text(datetime.now(UTC))


def test_a_date_is_its_first_moment_or_its_last() -> None:
    assert times.bound("2026-11-30", "since") == "2026-11-30T00:00:00.000000Z"
    assert times.bound(" 2026-11-30 ", "until", last=True) == "2026-11-30T23:59:59.999999Z"
    assert times.bound("9999-12-31", "until", last=True) == "9999-12-31T23:59:59.999999Z"


def test_a_time_is_itself_whether_first_or_last() -> None:
    for last in (False, True):
        made = times.bound("2026-11-30T09:12:00+01:00", "until", last=last)
        assert made == "2026-11-30T08:12:00.000000Z"


@pytest.mark.parametrize(
    ("ago", "length"),
    [("90m", timedelta(minutes=90)), ("36h", timedelta(hours=36)), ("7d", timedelta(days=7)),
     ("2w", timedelta(weeks=2)), ("0h", timedelta(0))],
)  # fmt: skip
def test_how_long_ago_counts_from_now(ago: str, length: timedelta) -> None:
    before = datetime.now(UTC)
    made = times.bound(ago, "since")
    assert times.text(before - length) <= made <= times.text(datetime.now(UTC) - length)


@pytest.mark.parametrize(
    "text",
    ["", "7", "7y", "-7d", "1.5h", "999999w", "2026-02-30", "2026-11", "2026-11-30T09:12:00", "now",
     "\u0667d", "\uff12\uff10\uff12\uff16-11-30", "\ud800", "x" * 100_000, "7d\0"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_name_and_what_is_allowed(text: str) -> None:
    with pytest.raises(OpError) as caught:
        times.bound(text, "since")
    told = str(caught.value)
    assert told.startswith("since: got ") and "36h" in told and len(told) < 400
    told.encode("utf-8")
