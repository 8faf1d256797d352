"""What a record is: its shape, what may be in it, and what other versions mean."""

from __future__ import annotations

import enum
import json
from collections import OrderedDict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import json_schema
from helpers.records import (
    foreign_record,
    make_draft,
    make_provenance,
    make_record,
    plant,
    save_record,
)
from ikit_mcp.evidence import canonical, record
from ikit_mcp.evidence.record import EvidenceRecord, assemble, metric, storable
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import OpError

PUBLISHED = json.loads(
    resources.files("ikit_mcp.evidence")
    .joinpath("ikit.evidence.1.schema.json")
    .read_text(encoding="utf-8")
)


def problems(raw: dict[str, Any]) -> list[str]:
    return json_schema.errors(PUBLISHED, raw)


# --- the shape -----------------------------------------------------------------


def test_the_published_schema_is_current_and_is_a_schema() -> None:
    assert json.loads(json.dumps(record.json_schema())) == PUBLISHED
    json_schema.check(PUBLISHED)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"valid": None, "metrics": [], "missing": [], "gates": record.Gates()},
        {"identity": record.Identity()},
        {"kind": "comparison", "claim_class": "derived", "valid": False},
        {"data": {"large": 2**60, "deep": [[{"a": None}]]}, "parents": ["0" * 64]},
        {"metrics": [metric("bytes", 2**60, "B", "sum", [2**60, 1])]},
    ],
)
def test_every_record_that_is_saved_validates_against_the_published_schema(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    saved = save_record(tmp_path, files={"log.txt": b"x"}, **changed)
    assert problems(saved.raw) == []
    assert record.shape_problem(saved.raw) is None
    stored = json.loads((Store(tmp_path).folder(saved.evidence_id) / "evidence.json").read_bytes())
    assert problems(stored) == [] and stored == saved.raw


@pytest.mark.parametrize(
    "change",
    [
        {"claim_class": "guessed"}, {"valid": "true"}, {"valid": 1}, {"summary": None},
        {"metrics": {}}, {"metrics": [{"name": "x"}]}, {"data": []}, {"kind": 5},
        {"metrics": [{"name": "x", "value": 1, "unit": "s", "stat": "p99"}]},
        {"metrics": [{"name": "x", "value": [1], "unit": "s", "stat": "mean"}]},
        {"evidence_id": "ABC"}, {"schema": "ikit.evidence/2"}, {"coverage": {"missing": []}},
        {"artifacts": [{"name": "../x", "bytes": 1, "sha256": "0" * 64, "media_type": "a/b"}]},
        {"artifacts": [{"name": "x", "bytes": -1, "sha256": "0" * 64, "media_type": "a/b"}]},
        {"artifacts": [{"name": "x", "bytes": 1, "sha256": "0", "media_type": "a/b"}]},
        {"signature": {"payload": "x"}}, {"limitations": "none"},
        {"identity": {"model": {}}},
    ],
)  # fmt: skip
def test_both_the_schema_and_the_models_refuse_a_wrong_shape(change: dict[str, Any]) -> None:
    whole = {"evidence_id": "0" * 64, **make_record()}
    assert problems(whole) == [] and record.shape_problem(whole) is None
    assert problems({**whole, **change}) != []
    assert record.shape_problem({**whole, **change}) is not None


@pytest.mark.parametrize("gone", sorted(set(make_record()) | {"evidence_id"}))
def test_no_field_of_a_record_may_be_absent(gone: str) -> None:
    whole = {"evidence_id": "0" * 64, **make_record()}
    del whole[gone]
    assert problems(whole) != [] and record.shape_problem(whole) is not None


def test_two_artifacts_of_one_name_are_refused() -> None:
    one = {"name": "x", "bytes": 1, "sha256": "0" * 64, "media_type": "a/b"}
    whole = {"evidence_id": "0" * 64, **make_record(), "artifacts": [one, one]}
    assert "two artifacts of one name" in (record.shape_problem(whole) or "")


def test_a_record_that_is_no_object_has_a_wrong_shape() -> None:
    odd: list[Any] = [None, [], "text", 5]
    for raw in odd:
        assert record.shape_problem(raw) is not None


# --- what may be in it -----------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_nobody_saw_is_refused_where_it_is_made(bad: float) -> None:
    with pytest.raises(ValueError, match=r"metric rate: .* is not a number that was seen"):
        metric("rate", bad, "1/s", "mean")
    with pytest.raises(ValueError, match="metric rate"):
        metric("rate", 1.0, "1/s", "mean", [1.0, None, bad])


def test_a_metric_without_samples_has_no_samples_field() -> None:
    raw = make_record(metrics=[metric("a", None, "s", "mean"), metric("b", 1, "s", "mean", [])])
    assert "samples" not in raw["metrics"][0] and raw["metrics"][1]["samples"] == []
    assert raw["metrics"][0]["value"] is None


def test_not_a_number_anywhere_in_a_record_is_refused_with_its_path() -> None:
    with pytest.raises(ValueError, match=r"\.data\.rounds\[1\]\.rate is nan"):
        make_record(data={"rounds": [{"rate": 1.0}, {"rate": float("nan")}]})
    wrong = record.Metric(name="x", value=float("inf"), unit="s", stat="mean")
    with pytest.raises(ValueError, match=r"\.metrics\[0\]\.value is inf"):
        make_record(metrics=[wrong])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (2**53 - 1, 2**53 - 1), (2**53, str(2**53)), (-(2**53), str(-(2**53))), (2**70, str(2**70)),
        (5.0, 5), (-0.0, 0), (5.5, 5.5), (2.0**53, 2.0**53), (1e300, 1e300), (True, True),
        ((1, 2), [1, 2]), ({"a": (None,)}, {"a": [None]}), ("größe", "größe"),
        ("caf\udce9", "caf\\udce9"), ({"\ud800": 1}, {"\\ud800": 1}),
        (numpy.float64(1.5), 1.5), (OrderedDict(a=1), {"a": 1}),
    ],
    ids=repr,
)  # fmt: skip
def test_values_become_what_every_reader_reads_back_the_same(value: Any, kept: Any) -> None:
    made = storable(value)
    assert made == kept and type(made) is type(kept)
    data = canonical.canonical_bytes({"value": made})
    assert canonical.canonical_bytes(canonical.parse(data)) == data


def test_texts_and_numbers_of_other_classes_become_plain_ones() -> None:
    class Colour(enum.StrEnum):
        """A text with a class."""

        RED = "red"

    class Size(enum.IntEnum):
        """A number with a class."""

        BIG = 7

    made = storable({"colour": Colour.RED, "size": Size.BIG, "rate": numpy.float64(0.25)})
    assert {key: type(value) for key, value in made.items()} == {
        "colour": str, "size": int, "rate": float,
    }  # fmt: skip
    assert made == {"colour": "red", "size": 7, "rate": 0.25}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": {1: 2}}, r"\.a has the key 1, which is no string"),
        ({"a": b"x"}, r"\.a is a bytes"),
        ({"a": {1, 2}}, r"\.a is a set"),
        (object(), "the value is a object"),
        (numpy.float32(1.5), "the value is a float32"),
        (numpy.int64(1), "the value is a int64"),
    ],
)
def test_what_json_does_not_have_is_refused_with_its_path(value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        storable(value)


def test_what_could_not_be_read_back_is_refused_before_it_is_saved() -> None:
    deep: Any = {}
    for _ in range(canonical.MAX_DEPTH):
        deep = {"inner": deep}
    with pytest.raises(ValueError, match="nested more than"):
        storable(deep)
    assert canonical.canonical_bytes(storable(deep["inner"]))
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="nested more than"):
        storable(circle)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_whatever_is_storable_is_read_back_as_it_was_stored(value: Any) -> None:
    made = {"value": storable(value)}
    assert canonical.parse(canonical.canonical_bytes(made)) == made
    assert storable(made) == made


def test_a_summary_is_one_line_of_bounded_length() -> None:
    raw = make_record(summary="two\nlines\t and  more " + "x" * 5_000)
    assert raw["summary"].startswith("two lines and more x") and len(raw["summary"]) == 600


def test_coverage_is_complete_when_nothing_is_missing() -> None:
    assert make_record(missing=[])["coverage"] == {"complete": True, "missing": []}
    assert make_record()["coverage"] == {"complete": False, "missing": ["power"]}
    assert assemble(make_draft(), make_provenance(), [])["schema"] == "ikit.evidence/1"


# --- reading -------------------------------------------------------------------


def test_values_are_reached_by_keys_and_indexes_or_are_none() -> None:
    made = EvidenceRecord({"a": [{"b": 1}, {"b": 2}], "kind": "bench"}, "0" * 64)
    assert made.get("a", 1, "b") == 2 and made.get("a", -2, "b") == 1
    for path in (("a", 2), ("a", -3), ("x",), ("a", "b"), ("kind", 0), ("a", 0, "b", "c")):
        assert made.get(*path) is None


def test_a_record_without_the_usual_fields_reads_as_unknown() -> None:
    odd: list[dict[str, Any]] = [{}, {"kind": 5, "valid": "yes", "summary": [], "metrics": 7}]
    for raw in odd:
        made = EvidenceRecord(raw, "0" * 64)
        assert (made.kind, made.valid, made.summary, made.metric("x")) == ("", None, "", None)


def test_the_value_of_a_metric_is_a_number_or_none() -> None:
    entries = [("a", 1.5), ("b", None), ("c", True), ("d", str(2**60)), ("e", "text"), ("f", [1])]
    raw = {"metrics": ["odd", *({"name": name, "value": value} for name, value in entries)]}
    made = EvidenceRecord(raw, "0" * 64)
    values = {name: made.metric(name) for name, _ in entries}
    assert values == {"a": 1.5, "b": None, "c": None, "d": 2**60, "e": None, "f": None}


def test_fields_of_later_versions_are_kept(tmp_path: Path) -> None:
    evidence_id = plant(tmp_path, foreign_record())
    loaded = Store(tmp_path).require(evidence_id)
    assert loaded.raw["later"] == {"field": 1} and Store(tmp_path).problems(evidence_id) == []


def test_a_record_of_another_major_version_is_hash_checked_and_never_used(tmp_path: Path) -> None:
    raw = {"schema": "ikit.evidence/2", "kind": "bench", "other": ["shape"]}
    evidence_id = plant(tmp_path, raw)
    store = Store(tmp_path)
    assert store.load(evidence_id).problem is None and store.problems(evidence_id) == []
    with pytest.raises(OpError, match=r"of another version \(ikit.evidence/2\)"):
        store.require(evidence_id)
    path = store.folder(evidence_id) / "evidence.json"
    path.write_bytes(path.read_bytes().replace(b"shape", b"shade"))
    assert "altered" in (store.load(evidence_id).problem or "")
    path.write_bytes(json.dumps(json.loads(path.read_bytes()), indent=3).encode())
    assert "altered" in store.problems(evidence_id)[0]


def test_another_version_may_keep_its_bytes_in_another_form(tmp_path: Path) -> None:
    raw = {"schema": "ikit.evidence/2", "kind": "bench"}
    evidence_id = plant(tmp_path, raw)
    path = Store(tmp_path).folder(evidence_id) / "evidence.json"
    path.write_bytes(json.dumps(json.loads(path.read_bytes()), indent=3).encode())
    assert Store(tmp_path).problems(evidence_id) == []
