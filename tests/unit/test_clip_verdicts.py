"""The words, their order, the odds, and the bands of the replay."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from ikit_ops.clips import sampling
from ikit_ops.clips.judge import Candidate, Step, judge, needs_candidates
from ikit_ops.clips.verdicts import MEANING, VERDICTS, ClipResult, detection, worst


def test_every_word_has_a_meaning_and_a_place() -> None:
    assert set(MEANING) == set(VERDICTS)
    assert len(set(VERDICTS)) == len(VERDICTS) == 22


def test_the_worst_is_a_failure_in_order_then_inconclusive_then_not_checkable() -> None:
    assert worst(["pass", "not_checkable", "inconclusive", "wrong_model", "layout"]) == "layout"
    assert worst(["pass", "not_checkable", "inconclusive"]) == "inconclusive"
    assert worst(["pass", "not_checkable"]) == "not_checkable"
    assert worst(["pass", "pass"]) == "pass"
    assert worst([]) == "inconclusive"


def test_a_clip_takes_the_word_of_its_first_failure_in_the_order_of_causes() -> None:
    result = ClipResult("00")
    result.add("chain", False)
    result.add("schedule", False)
    result.add("noise", None)
    assert result.verdict == "schedule"
    assert result.failed is not None and result.failed.name == "schedule"


def test_a_clip_passes_only_when_it_was_replayed_and_everything_was_seen() -> None:
    result = ClipResult("00")
    result.add("chain", True)
    assert result.verdict == "inconclusive"
    result.replayed = True
    assert result.verdict == "pass"
    result.add("clip", None)
    assert result.verdict == "inconclusive"
    result.add("arithmetic", None, "unipc", "not_checkable")
    assert result.verdict == "not_checkable"


def test_the_odds_of_detection_are_those_of_drawing() -> None:
    assert detection([(30, 4)], 1) == pytest.approx(0.1333, abs=1e-4)
    assert detection([(30, 6)], 3) == pytest.approx(0.5015, abs=1e-3)
    assert detection([(30, 6)] * 4, 3) == pytest.approx(0.94, abs=5e-3)
    assert detection([(30, 4)], 15) == pytest.approx(0.95, abs=1e-2)
    assert detection([(6, 6)], 1) == 1.0
    assert detection([(6, 1)], 99) == 1.0
    assert detection([], 3) == 0.0


def test_the_odds_agree_with_counting_every_draw() -> None:
    draws = list(itertools.combinations(range(7), 3))
    hit = sum(bool(set(draw) & {1, 4}) for draw in draws)
    assert detection([(7, 3)], 2) == pytest.approx(hit / len(draws))


def test_first_last_and_the_most_suspicious_are_replayed_and_the_rest_is_drawn() -> None:
    picks = [sampling.pick_steps(30, 6, [7, 3, 9], random.Random(n)) for n in range(50)]
    assert all({0, 29, 7, 3} <= set(each) and len(set(each)) == 6 for each in picks)
    assert len({tuple(each) for each in picks}) > 20
    assert sampling.pick_steps(4, 6, [1], random.Random(0)) == [0, 1, 2, 3]
    assert len(sampling.pick_steps(30, 1, [1], random.Random(0))) == 1


def test_a_step_that_moves_less_than_its_neighbours_is_ranked_first() -> None:
    assert sampling.ranking([0.0, 0.2, 0.21, 0.05, 0.22, 0.2])[0] == 3
    assert sampling.ranking([0.0]) == []
    assert sampling.ranking([0.0, 0.0, 0.0]) == [1, 2]


def step(r: float, number: int = 0, **more: Any) -> Step:
    return Step("video", number, r, 0.01 * r, 1.0, 0.01, **more)


def steps(*values: float, **more: Any) -> list[Step]:
    return [step(r, n, **more) for n, r in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0, 0, 0, 0), "pass"),
        ((1.0, 1.02, 1.1, 0.98), "pass"),
        ((0.75, 0.8, 1.3, 1.9), "pass"),
        ((1.6, 1.7, 1.8, 1.9), "inconclusive"),
        ((0.9, 1.0, 1.1, 2.4), "inconclusive"),
        ((3.7, 3.9, 4.0, 3.5), "low_precision"),
        ((1.6, 1.9, 2.3, 1.95), "inconclusive"),
        ((2.1, 2.2, 2.3, 2.6), "low_precision"),
        ((1.95, 2.4, 2.9, 3.2), "low_precision"),
        ((5.4, 7.3, 8.0, 9.1), "low_precision"),
        ((0, 13.2, 0, 6.4), "step_caching"),
        ((0, 0, 0, 0, 0, 6.6), "step_caching"),
        ((1.0, 1.0, 20.7, 22.0), "step_caching"),
        ((3.0, 3.2, 3.4, 25.0), "step_caching"),
        ((24, 31, 35, 28), "wrong_model"),
        ((12, 17, 21, 90), "wrong_model"),
        ((2.5, 4.0, 7.0, 9.0), "low_precision"),
    ],
)
def test_the_pattern_of_r_names_the_verdict(values: tuple[float, ...], verdict: str) -> None:
    found = judge(steps(*values))
    assert found.verdict == verdict
    assert "median" in found.detail


def test_no_step_is_no_pass() -> None:
    assert judge([]).verdict == "inconclusive"


def fitted(r: float, ratio: float, residual: float, number: int, noise: float = 0.003) -> Step:
    return step(
        r, number, guidance_fit=3 * ratio, guidance_ratio=ratio, guidance_noise=noise,
        guidance_residual=residual,
    )  # fmt: skip


def test_guidance_that_is_off_below_the_floor_is_found() -> None:
    found = judge([fitted(0.57, 1.02, 0.1, n) for n in range(6)])
    assert found.verdict == "guidance"
    assert "3.060" in found.detail and "1.020 x what was asked" in found.detail


def test_guidance_that_scatters_as_bf16_does_passes() -> None:
    ratios = (0.996, 0.996, 1.001, 1.003, 1.001, 1.012)
    assert judge([fitted(1.0, ratio, 1.0, n) for n, ratio in enumerate(ratios)]).verdict == "pass"


def test_guidance_between_the_bands_is_inconclusive() -> None:
    rows = [fitted(1.0, 1.0, 1.0, n, noise=0.0) for n in range(5)]
    assert judge([*rows, fitted(1.0, 1.015, 1.0, 5, noise=0.0)]).verdict == "inconclusive"


def test_guidance_that_changes_in_the_middle_is_told() -> None:
    rows = [fitted(0.0, 1.0, 0.0, n) for n in range(3)]
    rows += [fitted(29.0, 1 / 3, 0.0, n) for n in range(3, 6)]
    found = judge(rows)
    assert found.verdict == "guidance"
    assert "in some steps only" in found.detail


def test_a_guidance_fit_that_leaves_the_error_explains_nothing() -> None:
    rows = [fitted(28.0, 0.7, 25.0, n) for n in range(6)]
    assert judge(rows).verdict == "wrong_model"
    mixed = [fitted(8.0, 1.1, 0.5, 0), fitted(8.0, 1.0, 8.0, 1), fitted(8.0, 1.1, 0.5, 2)]
    assert judge(mixed).verdict == "low_precision"


def timed(r: float, dsigma: float, residual: float, number: int) -> Step:
    return step(r, number, dsigma_fit=dsigma, dsigma_noise=1e-4, dsigma_residual=residual)


def test_a_time_that_is_off_is_found_where_it_explains_the_error() -> None:
    rows = [step(1.1, 0), timed(2.9, -0.0018, 1.0, 1), timed(2.3, 0.0020, 1.1, 2), step(1.0, 3)]
    found = judge(rows)
    assert found.verdict == "timestep"
    assert "-0.0018 at step 1" in found.detail


def test_a_time_fit_that_explains_little_is_no_verdict() -> None:
    rows = [timed(1.16, 0.0008, 1.13, 0), timed(1.1, -0.0006, 1.08, 1)]
    assert judge(rows).verdict == "pass"
    far = [timed(20.0, 0.01, 1.0, 0), *steps(20.0, 20.0, 20.0)[1:]]
    assert judge(far).verdict == "wrong_model"
    unexplained = [timed(2.9, 0.002, 1.0, 0), timed(2.9, 0.0, 2.9, 1)]
    assert judge(unexplained).verdict == "low_precision"


def test_a_candidate_that_fits_names_the_cause() -> None:
    far = steps(24, 31, 35)
    assert needs_candidates(far)
    assert not needs_candidates(steps(1.0, 1.0))
    assert needs_candidates(steps(9.0, 10.5, 11.0, 10.2))
    tried = [Candidate("conditioning", "an empty prompt", 30.0),
             Candidate("timestep", "the model's time being sigma_next", 0.1)]  # fmt: skip
    found = judge(far, tried)
    assert found.verdict == "timestep"
    assert "sigma_next fits" in found.detail
    assert judge(far, tried[:1]).verdict == "wrong_model"
