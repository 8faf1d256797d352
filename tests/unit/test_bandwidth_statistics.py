"""Rates from stamps: what counts as sustained, and what does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_ops.measure import rounds
from ikit_ops.measure.statistics import Stamps, best_window, mean_rate, shortfall


def steady(rate: float, start: float = 0.0, seconds: float = 1.0, step: float = 0.01) -> Stamps:
    """A thread that moves evenly."""
    count = round(seconds / step)
    times = [start + n * step for n in range(count + 1)]
    return Stamps(times, [rate * (t - start) for t in times])


def test_an_even_rate_is_the_same_through_every_window() -> None:
    for window in (0.05, 0.1, 0.5):
        best = best_window([steady(10.0)], window)
        assert best is not None and best.rate == pytest.approx(10.0)
        assert best.end - best.start == pytest.approx(window)


def test_the_rates_of_all_threads_in_the_same_window_add_up() -> None:
    best = best_window([steady(10.0), steady(5.0, start=0.003, step=0.007)], 0.1)
    assert best is not None and best.rate == pytest.approx(15.0, rel=1e-6)


def test_the_time_before_the_last_thread_starts_and_after_the_first_ends_does_not_count() -> None:
    alone_is_faster = Stamps([0.0, 0.5, 1.0, 1.5], [0.0, 50.0, 55.0, 105.0])
    best = best_window([alone_is_faster, steady(10.0, start=0.5, seconds=0.5)], 0.2)
    assert best is not None and best.rate == pytest.approx(20.0)


def test_a_burst_shorter_than_the_window_is_not_what_was_sustained() -> None:
    burst = Stamps([0.0, 0.5, 0.51, 1.0], [0.0, 5.0, 6.0, 10.9])
    best = best_window([burst], 0.1)
    assert best is not None and best.rate == pytest.approx((1.0 + 0.9) / 0.1)


def test_the_window_finds_the_quiet_stretch_between_two_disturbed_ones() -> None:
    disturbed = Stamps([0.0, 0.4, 0.6, 1.0], [0.0, 0.4, 2.4, 2.8])
    best = best_window([disturbed], 0.2)
    assert best is not None
    assert best.rate == pytest.approx(10.0) and best.start == pytest.approx(0.4)


@pytest.mark.parametrize(
    "stamps",
    [[], [steady(1.0, seconds=0.05)], [steady(1.0), steady(1.0, start=0.95)],
     [steady(1.0), steady(1.0, start=2.0)]],
)  # fmt: skip
def test_threads_that_never_ran_together_for_long_enough_sustained_nothing(
    stamps: list[Stamps],
) -> None:
    assert best_window(stamps, 0.1) is None


def test_the_mean_is_over_the_time_in_which_all_ran() -> None:
    assert mean_rate([steady(4.0), steady(6.0, start=0.5)]) == pytest.approx(10.0)
    assert mean_rate([steady(4.0), steady(6.0, start=3.0)]) is None
    assert mean_rate([]) is None


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 1e9)), min_size=3, max_size=30),
        min_size=1, max_size=4,
    )
)  # fmt: skip
def test_no_window_beats_the_fastest_steps_of_the_threads(
    threads: list[list[tuple[float, float]]],
) -> None:
    stamps, ceiling = [], 0.0
    for steps in threads:
        times, moved = [0.0], [0.0]
        for seconds, amount in steps:
            times.append(times[-1] + seconds)
            moved.append(moved[-1] + amount)
        stamps.append(Stamps(times, moved))
        ceiling += max(amount / seconds for seconds, amount in steps)
    best = best_window(stamps, 0.05)
    if best is not None:
        assert 0 <= best.rate <= ceiling * (1 + 1e-6) + 1e-3
        assert best.end <= min(s.times[-1] for s in stamps) + 1e-9


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([10.0, 8.0, 9.0], 0.1), ([10.0, None, 5.0], 0.25), ([10.0], None), ([None, None], None),
     ([0.0, 0.0], None), ([], None)],
)  # fmt: skip
def test_the_shortfall_is_of_the_median_below_the_best(
    samples: list[float | None], expected: float | None
) -> None:
    assert shortfall(samples) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("seconds", "count"), [(1.0, 3), (3.0, 6), (7.0, 14), (30.0, 60), (60.0, 60)]
)
def test_phases_read_and_copy_in_turns_for_the_time_that_was_asked(
    seconds: float, count: int
) -> None:
    listed = rounds.phases(seconds, 0.5, 0.6)
    assert [p["kind"] for p in listed] == ["read", "copy"] * count
    assert sum(p["seconds"] for p in listed) == pytest.approx(seconds)
    assert sum(p["seconds"] for p in listed if p["kind"] == "read") == pytest.approx(0.6 * seconds)


def told(kind: str, rate: float, start: float) -> dict[str, object]:
    """A phase as a worker tells it."""
    stamps = steady(rate, start, seconds=0.3)
    return {"kind": kind, "threads": [{"times": stamps.times, "bytes": stamps.moved}]}


def test_a_round_holds_what_was_read_and_copied_in_it() -> None:
    listed = [told("read", 5e9, 10.0), told("copy", 4e9, 10.3), told("read", 6e9, 11.0),
              told("copy", 3e9, 11.3)]  # fmt: skip
    found = rounds.rounds_of(listed, 0.1)
    assert [(r.index, r.read_gbs, r.copy_gbs) for r in found] == [(0, 5.0, 4.0), (1, 6.0, 3.0)]
    assert found[0].t_start == 10.0 and found[0].t_end == pytest.approx(10.6)
    outcome = rounds.Outcome(found, True)
    assert outcome.best("read_gbs") == 6.0 and outcome.best("copy_gbs") == 4.0


def test_a_round_too_short_for_a_window_has_no_rate_rather_than_a_low_one() -> None:
    found = rounds.rounds_of([told("read", 5e9, 0.0), told("copy", 4e9, 0.3)], 0.5)
    assert found[0].read_gbs is None and found[0].read_mean_gbs == 5.0
    assert rounds.Outcome(found, True).best("read_gbs") is None
