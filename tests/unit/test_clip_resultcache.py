"""Whether a server answers from a cache, told from pairs of fresh and repeated requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ikit_ops.clips.account import Answer
from ikit_ops.clips.resultcache import Finding, Pair, judge, plain


def answer(seconds: float, denoise: float | None = None, error: str | None = None) -> Answer:
    stages = {} if denoise is None else {"denoise": denoise}
    return Answer(0, latency_s=seconds, error=error, sha256="ab", stages_ms=stages)


def pairs(*times: tuple[float, float]) -> list[Pair]:
    return [Pair(answer(fresh), answer(repeat)) for fresh, repeat in times]


def judged(*times: tuple[float, float], timed: Sequence[float] = ()) -> Finding:
    return judge(pairs(*times), [answer(each) for each in timed])


def said(finding: Finding) -> str:
    names = ("violation", "doubt", "warning", "unknown")
    return " ".join(name for name in names if getattr(finding, name))


def test_repeats_that_take_as_long_are_nothing_to_tell_after_two_pairs() -> None:
    assert not plain(pairs((1.0, 1.0)))
    assert plain(pairs((1.0, 1.0), (1.0, 0.98)))
    assert said(judged((1.0, 1.0), (1.0, 0.98))) == ""


def test_repeats_that_come_at_once_are_a_cache_after_two_pairs() -> None:
    assert plain(pairs((1.0, 0.01), (1.0, 0.02)))
    finding = judged((1.0, 0.01), (1.0, 0.03))
    assert finding.violation == (
        "result_cache: a repeated request took 2 % of a fresh one's time (the median of 2)"
    )
    assert said(finding) == "violation"


def test_a_moment_of_a_busy_machine_is_no_cache() -> None:
    assert not plain(pairs((0.035, 0.015), (0.035, 0.015)))
    assert said(judged((0.035, 0.015), (0.035, 0.015), (0.02, 0.021), (0.02, 0.02))) != "violation"


def test_repeats_without_denoising_are_a_cache_however_long_they_take() -> None:
    made = [Pair(answer(1.0, 800.0), answer(1.0, 0.0)) for _ in range(2)]
    assert plain(made)
    assert said(judge(made, [])) == "violation"
    told = [Pair(answer(1.0, 800.0), answer(1.0, 790.0)) for _ in range(2)]
    assert said(judge(told, [])) == ""
    silent = [Pair(answer(1.0, 800.0), answer(1.0)) for _ in range(2)]  # it tells no stages at all
    assert said(judge(silent, [])) == ""


def test_repeats_that_are_a_fifth_faster_every_time_leave_it_unestablished() -> None:
    times = [(1.0, 0.8), (1.1, 0.85), (0.9, 0.75), (1.0, 0.81), (1.0, 0.79)]
    assert not plain(pairs(*times[:2])) and not plain(pairs(*times[:4])) and plain(pairs(*times))
    finding = judged(*times)
    assert said(finding) == "doubt"
    assert "80 % of a fresh one's time (the median of 5)" in str(finding.doubt)


def test_repeats_that_are_faster_only_now_and_then_are_a_warning() -> None:
    assert said(judged((1.0, 0.8), (1.0, 0.7), (1.0, 0.8), (1.0, 1.3), (1.0, 0.8))) == "warning"


def test_one_slow_fresh_request_is_no_cache() -> None:
    assert said(judged((3.0, 1.0), (1.0, 1.0), (1.0, 1.01), (1.0, 0.99), (1.0, 1.0))) == ""


def test_timed_requests_that_no_fresh_one_is_as_quick_as_came_from_a_cache() -> None:
    finding = judged((1.0, 1.0), (1.0, 1.0), timed=[0.01, 1.0, 0.01])
    assert "2 of 3 timed requests took 0.010 s or more" in str(finding.violation)
    assert said(judged((1.0, 1.0), (1.0, 1.0), timed=[0.9, 4.0])) == ""  # queues only add


@pytest.mark.parametrize(
    ("times", "why"),
    [([], "there was no time for it"), ([(1.0, 1.0)], "there was no time for it"),
     ([(0.001, 0.001), (0.001, 0.001)], "too quick to tell")],
)  # fmt: skip
def test_too_few_or_too_quick_pairs_leave_it_unknown(
    times: list[tuple[float, float]], why: str
) -> None:
    finding = judged(*times)
    assert said(finding) == "unknown" and why in str(finding.unknown)


def test_a_failed_request_ends_the_search_and_is_named() -> None:
    made = [*pairs((1.0, 1.0)), Pair(answer(1.0), answer(1.0, error="HTTP 503"))]
    assert plain(made)
    finding = judge(made, [])
    assert finding.unknown == "whether results are cached (HTTP 503)"
    assert [each["same_mp4"] for each in finding.told] == [True, None]


def test_a_latency_of_nothing_divides_nothing() -> None:
    assert Pair(answer(0.0), answer(1.0)).ratio == 1.0
