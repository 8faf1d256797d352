"""The words, their order, the odds, and the bands of the replay."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from ikit_ops.clips import sampling
from ikit_ops.clips.fits import Fit
from ikit_ops.clips.judge import (
    Candidate,
    Step,
    judge,
    needs_calibration,
    needs_candidates,
    suspicious,
)
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


@pytest.mark.parametrize("wanted", range(1, 8))
def test_two_steps_are_drawn_at_least_however_few_are_replayed(wanted: int) -> None:
    picks = [sampling.pick_steps(30, wanted, [7, 3], random.Random(n)) for n in range(400)]
    always = set.intersection(*map(set, picks))
    assert len(always) == max(0, min(4, wanted - 2))
    assert all(len(set(each)) == wanted for each in picks)
    assert set.union(*map(set, picks)) == set(range(30))


@pytest.mark.parametrize(("count", "wanted"), [(30, 6), (30, 4), (30, 2), (30, 1), (12, 6), (5, 6)])
@pytest.mark.parametrize("bad", [1, 3])
def test_the_odds_are_those_of_an_engine_that_cheats_where_it_is_not_expected(
    count: int, wanted: int, bad: int
) -> None:
    ranked = [1, 2]
    cheated = set(range(4, 4 + bad)) & set(range(count))  # neither first, last, nor suspicious
    hits = [
        bool(cheated & set(sampling.pick_steps(count, wanted, ranked, random.Random(n))))
        for n in range(4000)
    ]
    told = detection([sampling.odds_of(count, wanted, ranked)], len(cheated))
    assert told == pytest.approx(sum(hits) / len(hits), abs=0.03)


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
        ((11.4, 12.8, 14.2, 13.4), "low_precision"),
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


def test_an_even_error_that_no_longer_points_where_the_reference_does_is_another_model() -> None:
    rows = [Step("video", n, 14.0, 0.4, 0.7, 0.01) for n in range(4)]
    assert judge(rows).verdict == "wrong_model"
    off = {"guidance": Fit(-0.3, 13.0, 0.001)}
    assert judge(steps(14.0, 14.0, 14.0, fits=off)).verdict == "wrong_model"


def test_no_step_is_no_pass() -> None:
    assert judge([]).verdict == "inconclusive"


def test_a_reference_of_bf16_weights_has_wider_bands() -> None:
    assert judge(steps(1.8, 1.9, 2.5, exact="bfloat16")).verdict == "pass"
    assert judge(steps(1.8, 1.9, 2.5)).verdict == "inconclusive"
    assert judge(steps(1.8, 1.9, 4.0, exact="bfloat16")).verdict == "inconclusive"
    assert judge(steps(5.0, 5.5, 6.0, exact="bfloat16")).verdict == "low_precision"


def test_of_a_few_numbers_nothing_but_an_absurd_error_is_judged() -> None:
    assert judge(steps(2.5, 4.0, 6.0, 1.0, numbers=16)).verdict == "inconclusive"
    assert judge(steps(40.0, 44.0, 50.0, numbers=16)).verdict == "wrong_model"
    alike = {"guidance": Fit(0.2, 0.1, 0.01)}
    assert judge(steps(0.8, 0.9, 1.0, fits=alike, numbers=16)).verdict == "pass"


def test_a_stream_that_is_off_is_not_hidden_by_one_that_is_not() -> None:
    video = steps(*[0.0] * 6)
    audio = [Step("audio", n, 4.0, 0.04, 1.0, 0.01) for n in range(6)]
    found = judge([*video, *audio])
    assert found.verdict == "low_precision"
    assert "audio: " in found.detail


def fitted(
    r: float, ratio: float, residual: float, number: int, noise: float = 0.003,
    bias: float | None = 0.002,
) -> Step:  # fmt: skip
    fit = Fit(ratio - 1, residual, noise, bias)
    return step(r, number, guidance_fit=3 * ratio, fits={"guidance": fit})


def test_guidance_that_is_off_below_the_floor_is_found() -> None:
    found = judge([fitted(0.57, 1.02, 0.1, n) for n in range(6)])
    assert found.verdict == "guidance"
    assert "3.060" in found.detail and "1.020 x what was asked" in found.detail


def test_guidance_that_is_off_in_bf16_is_found_where_all_steps_agree() -> None:
    ratios = (1.017, 1.021, 1.02, 1.022, 1.018, 1.02)
    assert judge([fitted(1.2, r, 1.0, n) for n, r in enumerate(ratios)]).verdict == "guidance"
    for disagreeing in (0.96, 1.06):
        rows = [fitted(1.2, r, 1.0, n) for n, r in enumerate((*ratios[:3], disagreeing))]
        assert judge(rows).verdict in ("guidance", "inconclusive")


def test_what_int8_weights_put_into_the_guidance_accuses_nobody() -> None:
    ratios = (0.972, 0.973, 0.972, 0.956, 0.98, 0.965)
    rows = [fitted(1.1, r, 1.05, n, noise=0.01, bias=0.012) for n, r in enumerate(ratios)]
    found = judge(rows)
    assert found.verdict == "pass"
    assert "guidance as asked to 6.8 %" in found.detail  # and says how little that proves


def test_one_step_of_twelve_that_strays_accuses_nobody() -> None:
    rows = [fitted(1.0, 1.0, 1.0, n) for n in range(11)]
    assert judge([*rows, fitted(1.0, 1.03, 0.97, 11, bias=None)]).verdict == "inconclusive"
    assert judge([*rows, fitted(1.0, 1.03, 0.97, 11, noise=0.01)]).verdict == "pass"


def test_guidance_that_scatters_as_bf16_does_passes() -> None:
    ratios = (0.996, 0.996, 1.001, 1.003, 1.001, 1.012)
    assert judge([fitted(1.0, ratio, 1.0, n) for n, ratio in enumerate(ratios)]).verdict == "pass"


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


def test_a_guidance_without_effect_is_said_to_be_unproven() -> None:
    found = judge(steps(0.1, 0.1, unseen=["stg"]))
    assert found.verdict == "pass"
    assert "stg without effect, and so not proven" in found.detail


def timed(r: float, dsigma: float, residual: float, number: int, bias: float | None = 1e-4) -> Step:
    return step(r, number, dsigma_fit=dsigma, fits={"time": Fit(dsigma, residual, 1e-4, bias)})


def test_a_time_that_is_off_is_found_where_it_explains_the_error() -> None:
    rows = [step(1.1, 0), timed(2.9, -0.0018, 1.0, 1), timed(2.3, 0.0020, 1.1, 2), step(1.0, 3)]
    found = judge(rows)
    assert found.verdict == "timestep"
    assert "-0.0018 at step 1" in found.detail


def test_a_time_below_the_floor_must_be_seen_in_two_steps() -> None:
    one = [timed(1.2, 0.002, 0.9, 0), timed(1.1, 0.0001, 1.1, 1), step(1.0, 2)]
    assert judge(one).verdict == "inconclusive"
    both = [timed(1.2, 0.002, 0.9, 0), timed(1.1, 0.0018, 0.85, 1), step(1.0, 2)]
    assert judge(both).verdict == "timestep"
    opposed = [timed(1.2, 0.002, 0.9, 0), timed(1.1, -0.0018, 0.85, 1), step(1.0, 2)]
    assert judge(opposed).verdict == "inconclusive"


def test_a_time_fit_that_explains_little_is_no_verdict() -> None:
    rows = [timed(1.16, 0.0008, 1.13, 0), timed(1.1, -0.0006, 1.08, 1)]
    assert judge(rows).verdict == "pass"
    far = [timed(20.0, 0.01, 1.0, 0), *steps(20.0, 20.0, 20.0)[1:]]
    assert judge(far).verdict in ("low_precision", "wrong_model")
    unexplained = [timed(2.9, 0.002, 1.0, 0), timed(2.9, 0.0, 2.9, 1)]
    assert judge(unexplained).verdict == "low_precision"


def test_int8_activations_are_told_from_int8_weights_by_their_direction() -> None:
    held = {"int8": Fit(0.95, 0.5, 0.03, 0.03)}
    found = judge([step(1.55, 0), step(1.6, 1, fits=held), step(1.5, 2, fits=held)])
    assert found.verdict == "low_precision"
    assert "0.95 x what int8 activations do at step 1" in found.detail
    assert judge([step(1.2, 0), step(1.3, 1, fits={"int8": Fit(0.05, 1.3, 0.03, 0.03)})]
                 ).verdict == "pass"  # fmt: skip


def test_more_than_bf16_with_int8_weights_shows_here_is_low_precision() -> None:
    assert judge(steps(1.8, 1.9, 1.85, int8_weights=0.4)).verdict == "low_precision"
    assert judge(steps(1.8, 1.9, 1.85, int8_weights=1.2)).verdict == "inconclusive"
    assert judge(steps(1.4, 1.3, 1.4, int8_weights=0.1)).verdict == "pass"


def test_a_share_of_the_step_before_is_a_cache() -> None:
    held = {"previous": Fit(0.1, 0.02, 0.004, 0.004)}
    found = judge(steps(1.4, 1.7, 1.6, fits=held))
    assert found.verdict == "step_caching"
    assert "10 % of the previous output" in found.detail


def test_a_second_look_is_taken_only_where_there_is_reason() -> None:
    assert not suspicious(steps(1.0, 1.05, 0.9))
    assert not suspicious(steps(0.1, 0.12, 0.11, 0.01))
    assert suspicious(steps(1.0, 1.3, 1.0))
    assert suspicious(steps(0.1, 0.1, 0.6))
    assert suspicious([fitted(1.0, 1.1, 0.9, 0)])


def test_int8_weights_are_run_before_a_small_offset_accuses_or_is_doubted() -> None:
    assert not needs_calibration(steps(1.0, 1.05, 0.9))
    assert needs_calibration([fitted(1.2, 1.02, 1.0, n, bias=None) for n in range(6)])
    assert needs_calibration(steps(1.7, 1.8, 1.7))
    assert not needs_calibration(steps(30.0, 31.0))


def test_a_candidate_that_fits_names_the_cause() -> None:
    far = steps(24, 31, 35)
    assert needs_candidates(far)
    assert not needs_candidates(steps(1.0, 1.0))
    assert needs_candidates(steps(3.2, 3.1, 3.3))
    tried = [Candidate("conditioning", "an empty prompt", 30.0),
             Candidate("timestep", "the model's time being sigma_next", 0.1)]  # fmt: skip
    found = judge(far, tried)
    assert found.verdict == "timestep"
    assert "sigma_next fits" in found.detail
    assert judge(far, tried[:1]).verdict == "wrong_model"


def test_a_text_that_fits_better_than_another_guidance_is_the_cause() -> None:
    exact = [fitted(12.0, 0.3, 0.0, n) for n in range(4)]
    assert not needs_candidates(exact)
    shadow = [fitted(12.0, 0.3, 1.2, n) for n in range(4)]
    assert needs_candidates(shadow)
    assert judge(shadow).verdict == "guidance"
    text = Candidate("conditioning", "the prompt of another request", 0.0)
    assert judge(shadow, [text]).verdict == "conditioning"
    worse = Candidate("conditioning", "an empty prompt", 1.19)
    assert judge(shadow, [worse]).verdict == "guidance"


def test_steps_come_back_from_json_as_they_were() -> None:
    row = fitted(1.0, 1.02, 0.9, 3)
    told = json.loads(json.dumps(row.to_json()))
    assert list(told)[:7] == [
        "stream", "step", "r", "rel_l2", "cosine", "floor", "guidance_fit",
    ]  # fmt: skip
    assert Step(**told) == row


def test_an_error_that_lies_where_texts_move_the_output_is_another_text() -> None:
    far = steps(24, 31, 35)
    unknown = Candidate("conditioning", "a text that is not known here", 14.0, share=0.66)
    found = judge(far, [unknown])
    assert found.verdict == "conditioning"
    assert "66 % of what is off is what texts change" in found.detail
    little = Candidate("conditioning", "a text that is not known here", 1.2, share=0.2)
    assert judge(far, [little]).verdict == "wrong_model"


def test_an_output_without_the_prompt_is_no_guidance_but_another_conditioning() -> None:
    rows = [
        step(5.0, n, guidance_fit=0.001, fits={"guidance": Fit(-1.0, 0.1, 0.01, 0.01)})
        for n in range(3)
    ]
    found = judge(rows)
    assert found.verdict == "conditioning"
    assert "the prompt had no part in it" in found.detail


def test_guidance_that_is_known_too_coarsely_does_not_pass() -> None:
    rows = [fitted(1.0, 1.0, 1.0, n, noise=0.2, bias=0.05) for n in range(4)]
    found = judge(rows)
    assert found.verdict == "inconclusive"
    assert "known to" in found.detail and "larger clip" in found.detail


@pytest.mark.parametrize(
    ("name", "shown"),
    [("modality", "modality guidance is 1.100 x"), ("stg", "stg guidance is 1.100 x"),
     ("rescale", "rescale is 1.100 x"), ("scale", "the output is 1.100 x")],
)  # fmt: skip
def test_every_scale_that_is_off_is_named(name: str, shown: str) -> None:
    held = {name: Fit(0.1, 0.02, 0.003, 0.003)}
    found = judge(steps(1.4, 1.7, 1.6, fits=held))
    assert found.verdict == "guidance"
    assert shown in found.detail


def test_a_little_of_a_direction_and_nothing_else_is_enough_in_two_steps() -> None:
    held = {"rescale": Fit(0.003, 0.01, 0.0001)}
    assert judge(steps(0.3, 0.2, 0.25, fits=held)).verdict == "guidance"
    assert judge(steps(0.1, 0.05, 0.08, fits=held)).verdict == "pass"
