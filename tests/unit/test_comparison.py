"""compare_evidence: what differs between two records, and that nothing follows from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import run_here
from helpers.evidence import flip_a_byte
from ikit_mcp.evidence.record import (
    Draft,
    Engine,
    EvidenceRecord,
    Identity,
    Metric,
    Model,
    Provenance,
    assemble,
    metric,
)
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import OpError
from ikit_ops import comparison


def save(home: Path, samples: list[float | None], *, started: str = "2026-11-30T20:00:00Z",
         metrics: list[Metric] | None = None, kind: str = "bench", valid: bool | None = True,
         **data: Any) -> EvidenceRecord:  # fmt: skip
    """Store a benchmark with those decode rates."""
    known = sorted(s for s in samples if s is not None)
    value = known[len(known) // 2] if known else None
    draft = Draft(
        kind=kind, claim_class="measured", valid=valid, summary="a benchmark",
        identity=Identity(
            model=Model(id="acme/model"), engine=Engine(name="vllm", version=data.pop("v", "1"))
        ),
        metrics=metrics or [metric("decode_tok_s", value, "tok/s", "median", samples)],
        data=data,
    )  # fmt: skip
    provenance = Provenance(
        started=started, finished=started, tool={"name": "t", "version": "0"},
        request={"operation": "bench", "args": {}}, reproduce="true",
    )  # fmt: skip
    with Store(home).stage() as stage:
        return stage.commit(assemble(draft, provenance, stage.artifacts))


def compare(home: Path, one: EvidenceRecord, other: EvidenceRecord, **more: Any) -> EvidenceRecord:
    return run_here(
        home, "compare_evidence", baseline=one.evidence_id, candidate=other.evidence_id, **more
    )


def test_the_ratio_is_told_and_establishes_nothing(tmp_path: Path) -> None:
    one = save(tmp_path, [100.0, 101.0, 99.0])
    other = save(tmp_path, [96.0, 96.5, 95.5], started="2026-12-01T05:00:00Z")
    record = compare(tmp_path, one, other)
    assert record.valid is None and record.kind == "comparison"
    assert record.get("data", "verdict") == "not_established"
    assert record.get("data", "ratio") == pytest.approx(0.96)
    assert record.summary.startswith(
        "B/A = 0.960 on decode_tok_s, but the two runs are 9 h apart and not interleaved: "
        "drift alone explains such a ratio"
    )
    assert "interleaved pairs (bench_pair, to come; 7 pairs" in record.get("coverage", "missing")[0]
    assert record.get("provenance", "parents") == [one.evidence_id, other.evidence_id]


def test_a_large_ratio_is_not_called_drift_but_not_established_either(tmp_path: Path) -> None:
    record = compare(tmp_path, save(tmp_path, [100.0]), save(tmp_path, [300.0]))
    assert "nobody measured" in record.summary and "explains" not in record.summary
    assert record.get("data", "verdict") == "not_established"


def test_every_difference_is_listed_by_its_field(tmp_path: Path) -> None:
    one = save(tmp_path, [1.0], flags={"eager": False, "deep": {"x": 1}}, attention_backend="A")
    other = save(tmp_path, [1.0], v="2", flags={"eager": True, "deep": {"x": 2}, "new": [1]},
                 attention_backend="A")  # fmt: skip
    found = {
        d["field"]: (d["baseline"], d["candidate"])
        for d in compare(tmp_path, one, other).get("data", "differences")
    }
    assert found == {
        "identity.engine.version": ("1", "2"),
        "data.flags.eager": (False, True),
        "data.flags.deep.x": (1, 2),
        "data.flags.new": (None, "[1]"),
    }


def test_identity_that_both_share_is_kept_and_the_rest_is_null(tmp_path: Path) -> None:
    record = compare(tmp_path, save(tmp_path, [1.0]), save(tmp_path, [2.0], v="2"))
    assert record.get("identity", "model", "id") == "acme/model"
    assert record.get("identity", "engine") is None


def test_records_that_do_not_claim_validity_are_a_warning(tmp_path: Path) -> None:
    record = compare(
        tmp_path, save(tmp_path, [1.0], valid=False), save(tmp_path, [2.0], valid=None)
    )
    assert len(record.get("gates", "warnings")) == 2


def test_an_unseen_number_has_no_ratio(tmp_path: Path) -> None:
    record = compare(tmp_path, save(tmp_path, [None]), save(tmp_path, [2.0]))
    assert record.get("data", "ratio") is None and record.valid is None
    assert "decode_tok_s is null" in record.summary
    assert any("of the baseline" in line for line in record.get("coverage", "missing"))


def test_shares_of_the_ceiling_stand_beside_each_other(tmp_path: Path) -> None:
    rows = [metric("decode_tok_s", 5.0, "tok/s", "median")]
    one = save(tmp_path, [5.0], metrics=[*rows, metric("pct_of_ceiling", 40.0, "%", "derived")])
    other = save(tmp_path, [6.0], metrics=rows)
    record = compare(tmp_path, one, other)
    assert record.get("data", "percent_of_ceiling") == {"baseline": 40, "candidate": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "nonsense"}, "neither record has a metric 'nonsense'"),
        ({"candidate": "ffffffff"}, "ffffffff"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    one, other = save(tmp_path, [1.0]), save(tmp_path, [2.0])
    arguments = {"baseline": one.evidence_id, "candidate": other.evidence_id} | changes
    with pytest.raises(OpError, match=words):
        run_here(tmp_path, "compare_evidence", **arguments)


def test_one_record_two_kinds_and_two_units_are_refused(tmp_path: Path) -> None:
    one = save(tmp_path, [1.0])
    with pytest.raises(OpError, match="the same record"):
        compare(tmp_path, one, one)
    with pytest.raises(OpError, match="a profile record"):
        compare(tmp_path, one, save(tmp_path, [1.0], kind="profile"))
    other = save(tmp_path, [1.0], metrics=[metric("decode_tok_s", 1.0, "tok/min", "median")])
    with pytest.raises(OpError, match="tok/s there and in tok/min"):
        compare(tmp_path, one, other)


def test_a_record_that_was_changed_is_refused(tmp_path: Path) -> None:
    one, other = save(tmp_path, [1.0]), save(tmp_path, [2.0])
    flip_a_byte(tmp_path, other.evidence_id, b"benchmark")
    with pytest.raises(OpError, match="fails its check"):
        compare(tmp_path, one, other)


def test_the_word_faster_is_never_said_whatever_the_numbers(tmp_path: Path) -> None:
    source = random.Random(0)
    for _ in range(20):
        rates = [[source.uniform(1, 1000) for _ in range(5)] for _ in range(2)]
        summary = comparison.summary(
            save(tmp_path, [*rates[0]]), save(tmp_path, [*rates[1]]), "decode_tok_s",
            rates[1][0] / rates[0][0], [],
        )  # fmt: skip
        assert "faster" not in summary and "slower" not in summary
