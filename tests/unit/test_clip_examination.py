"""What a record says of its own sample: the odds, what was not proven, and when it says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import clips
from helpers.bench import run_here
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_ops.clips import torchside

Check = Callable[..., EvidenceRecord]


def row(step: int, **more: Any) -> dict[str, Any]:
    """A replayed step that is the reference's in its noise."""
    return {
        "stream": "video", "step": step, "r": 1.0, "rel_l2": 0.01, "cosine": 1.0, "floor": 0.01,
        **more,
    }  # fmt: skip


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check clips of six steps against a worker that finds every picked step in the noise."""
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: "python")

    def checked(
        clip_count: int = 1, model: dict[str, Any] | None = None, changed: Any = None, **more: Any
    ) -> EvidenceRecord:
        lines = [clips.write_clip(tmp_path, n)[1] for n in range(clip_count)]
        sigmas, _ = clips.schedule(6)

        def work(call: Any, python: str, task: dict[str, Any]) -> dict[str, Any]:
            found = {
                str(clip["index"]): {
                    "noise": {"ok": True, "detail": "drawn"},
                    "steps": [row(step, **(changed or {})) for step in clip["steps"]],
                    "schedule": [*sigmas, 0.0], "shapes": {"video": list(clips.VIDEO)},
                }
                for clip in task["clips"]
            }  # fmt: skip
            return {"clips": found, "passes": 2, "model": model}

        monkeypatch.setattr(torchside, "run_worker", work)
        manifest = clips.write_manifest(tmp_path, lines)
        return run_here(
            tmp_path / "home", "clip_steps", manifest=str(manifest),
            dumps=str(tmp_path / "dumps"), reference=str(tmp_path), **more,
        )  # fmt: skip

    return checked


def limitation(record: EvidenceRecord, word: str) -> str:
    return next((line for line in record.get("limitations") if word in line), "")


def test_one_step_of_six_is_no_pass_and_says_so(check: Check) -> None:
    record = check(steps=1)
    assert record.get("data", "verdict") == "inconclusive"
    assert record.valid is None
    assert any("1 of 6 steps tells nothing" in line for line in record.get("coverage", "missing"))
    assert check(steps=2).get("data", "verdict") == "pass"


def test_the_odds_count_drawn_steps_alone(check: Check) -> None:
    record = check(steps=4)  # two of four are foreseen: one of four others is hit with 1/2
    assert record.get("data", "detection", 0) == {
        "cheated_steps": 1, "of": 6, "probability": 0.5,
    }  # fmt: skip
    told = limitation(record, "were replayed")
    assert "4 of 6 steps of 1 of 1 clips were replayed, 2 of them drawn" in told
    assert "a cache of 1 step in 6, wherever they lie" in told
    assert "0.50" in told


def test_several_clips_multiply_the_odds(check: Check) -> None:
    record = check(clip_count=3, clips=3, steps=4)
    assert record.get("data", "detection", 0, "probability") == pytest.approx(1 - 0.5**3)


def test_all_steps_replayed_leave_nothing_to_odds(check: Check) -> None:
    assert check(steps=6).get("data", "detection", 0, "probability") == 1.0


def test_what_cannot_be_told_apart_is_named(check: Check) -> None:
    told = limitation(check(), "cannot tell")
    for word in ("int8 weight-only", "1.5 x the floor", "W8A8", "token by token"):
        assert word in told


def test_a_reference_in_bf16_says_that_its_bands_are_wider(check: Check) -> None:
    record = check(model={"dtype": "bfloat16"}, changed={"exact": "bfloat16", "r": 1.9})
    assert record.get("data", "verdict") == "pass"
    assert "r of 2.0 in the median" in limitation(record, "does not hold the reference in float32")
    plain = check(model={"dtype": "float32"}, changed={"r": 1.9})
    assert plain.get("data", "verdict") == "inconclusive"
    assert not limitation(plain, "does not hold the reference in float32")


def test_guidance_without_effect_is_named_as_not_proven(check: Check) -> None:
    record = check(changed={"unseen": ["stg"]})
    assert limitation(record, "not proven").endswith("stg")
