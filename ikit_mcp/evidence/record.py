"""The evidence record, ``ikit.evidence/1``: the models, and how a record is built.

A number without its unit, its statistic, the workload it was taken on and the limits
of the claim is a rumour.  A record therefore carries all of them, together with what
was *not* seen (``coverage.missing``), how to get the same number again
(``provenance.reproduce``), and an id that is the hash of everything else, so that a
record that was changed no longer answers to its name.

The models here are used to *make* records and to check their shape.  What is hashed
and what readers see is the parsed JSON as stored: fields of later versions survive.
Integers beyond 2^53 are stored as strings, since JSON readers in other languages
would round them; NaN and infinity are refused where a metric is made, because they
are not numbers that anybody saw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ikit_mcp.evidence.canonical import MAX_DEPTH
from ikit_mcp.registry import excerpt

SCHEMA = "ikit.evidence/1"
MAX_SAFE_INTEGER = 2**53
MAX_SUMMARY = 600
ARTIFACT_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_WHOLE = re.compile(r"-?[0-9]{16,400}")

Stat = Literal[
    "median", "min", "max", "mean", "best_sustained", "derived", "ceiling", "input",
    "count", "sum", "single",
]  # fmt: skip
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
ClaimClass = Literal["measured", "derived", "checked"]
KINDS = (
    "roofline", "ceiling", "bench", "comparison", "profile", "clip-bench", "clip-steps",
)  # fmt: skip


class Model(msgspec.Struct, kw_only=True):
    """Which weights: hub id or path, commit, weight formats, quantisation."""

    id: str
    revision: str | None = None
    dtype: str | None = None
    quant: str | None = None


class Engine(msgspec.Struct, kw_only=True):
    """Which inference engine."""

    name: str
    version: str | None = None


class Device(msgspec.Struct, kw_only=True):
    """Which device; a CPU's uuid is a keyed hash of the machine id."""

    name: str | None = None
    uuid: str | None = None
    driver: str | None = None


class Identity(msgspec.Struct, kw_only=True):
    """What the claim is about; absent parts are null."""

    model: Model | None = None
    engine: Engine | None = None
    device: Device | None = None
    workload: dict[str, Any] | None = None


class Metric(msgspec.Struct, kw_only=True):
    """One number: null where it was not seen."""

    name: str
    value: int | float | str | None
    unit: str
    stat: Stat
    samples: list[int | float | str | None] | msgspec.UnsetType = msgspec.UNSET


class Gates(msgspec.Struct, kw_only=True):
    """Which checks were made, which failed, and what deserves a warning."""

    checked: list[str] = []
    violations: list[str] = []
    warnings: list[str] = []


class Coverage(msgspec.Struct, kw_only=True):
    """Whether everything the claim needs was seen, and what was not."""

    complete: bool
    missing: list[str] = []


class Artifact(msgspec.Struct, kw_only=True):
    """A file beside the record."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{ARTIFACT_NAME}$")]
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Digest
    media_type: str


class Provenance(msgspec.Struct, kw_only=True):
    """How the record came about, and how to get it again."""

    started: str
    finished: str
    tool: dict[str, Any]
    request: dict[str, Any]
    reproduce: str
    plugin: dict[str, Any] | None = None
    env_kept: list[str] = []
    env_dropped: list[str] = []
    parents: list[Digest] = []
    job_id: str | None = None


class Signature(msgspec.Struct, kw_only=True):
    """A DSSE envelope over an in-toto statement whose subject is the evidence id."""

    payloadType: str
    payload: str
    signatures: list[dict[str, str]]


class Record(msgspec.Struct, kw_only=True):
    """A whole record as stored in ``evidence.json``."""

    schema: Literal["ikit.evidence/1"]
    evidence_id: Digest
    kind: str
    claim_class: ClaimClass
    valid: bool | None
    summary: str
    identity: Identity
    metrics: list[Metric]
    gates: Gates
    coverage: Coverage
    limitations: list[str]
    provenance: Provenance
    artifacts: list[Artifact]
    data: dict[str, Any]
    signature: Signature | msgspec.UnsetType | None = msgspec.UNSET


class Draft(msgspec.Struct, kw_only=True):
    """What an operation says; the call adds provenance, artifacts, id and signature.

    ``missing`` becomes ``coverage`` (complete when it is empty).
    """

    kind: str
    claim_class: ClaimClass
    valid: bool | None
    summary: str
    identity: Identity = msgspec.field(default_factory=Identity)
    metrics: list[Metric] = msgspec.field(default_factory=list)
    gates: Gates = msgspec.field(default_factory=Gates)
    missing: list[str] = msgspec.field(default_factory=list)
    limitations: list[str] = msgspec.field(default_factory=list)
    data: dict[str, Any] = msgspec.field(default_factory=dict)
    parents: list[str] = msgspec.field(default_factory=list)
    env_kept: list[str] = msgspec.field(default_factory=list)
    env_dropped: list[str] = msgspec.field(default_factory=list)


def metric(
    name: str,
    value: float | None,
    unit: str,
    stat: Stat,
    samples: Sequence[float | None] | None = None,
) -> Metric:
    """A metric; ValueError when the value or a sample is NaN or infinite."""
    kept: list[int | float | str | None] = [] if samples is None else list(samples)
    for number in (value, *kept):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"metric {name}: {number} is not a number that was seen; use None")
    return Metric(
        name=name, value=value, unit=unit, stat=stat,
        samples=msgspec.UNSET if samples is None else kept,
    )  # fmt: skip


def storable(value: Any, path: str = "", depth: int = 0) -> Any:
    """A copy of a JSON-like value that every JSON reader reads back the same.

    Integers from 2^53 on become strings, tuples lists, and a lone surrogate (a byte of
    a file name that is no UTF-8) its escape.  ValueError names the path of a NaN, an
    infinity, a key that is no string, or a value that JSON does not have.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return int(value) if abs(value) < MAX_SAFE_INTEGER else str(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path or 'the value'} is {value}, which JSON cannot hold")
        whole = value.is_integer() and abs(value) < MAX_SAFE_INTEGER
        return int(value) if whole else float(value)
    if depth >= MAX_DEPTH:
        raise ValueError(f"{excerpt(path, 200)}… is nested more than {MAX_DEPTH} deep")
    if isinstance(value, (list, tuple)):
        return [storable(item, f"{path}[{n}]", depth + 1) for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path or 'the value'} has the key {key!r}, which is no string")
        return {
            _text(key): storable(item, f"{path}.{key}", depth + 1) for key, item in value.items()
        }
    if isinstance(value, msgspec.Struct):
        fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
        given = {name: item for name, item in fields if item is not msgspec.UNSET}
        return storable(given, path, depth)
    raise ValueError(f"{path or 'the value'} is a {type(value).__name__}, which JSON cannot hold")


def _text(value: str) -> str:
    """A plain ``str`` without lone surrogates."""
    if value.isascii():
        return str.__str__(value)
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def assemble(draft: Draft, provenance: Provenance, artifacts: Sequence[Artifact]) -> dict[str, Any]:
    """The record of a draft as a JSON object, still without id and signature."""
    record = {
        "schema": SCHEMA,
        "kind": draft.kind,
        "claim_class": draft.claim_class,
        "valid": draft.valid,
        "summary": excerpt(" ".join(draft.summary.split()), MAX_SUMMARY),
        "identity": draft.identity,
        "metrics": draft.metrics,
        "gates": draft.gates,
        "coverage": Coverage(complete=not draft.missing, missing=draft.missing),
        "limitations": draft.limitations,
        "provenance": provenance,
        "artifacts": list(artifacts),
        "data": draft.data,
    }
    whole: dict[str, Any] = storable(record)
    return whole


def shape_problem(raw: Any) -> str | None:
    """What is wrong with the shape of a stored record, or None; unknown fields are fine."""
    try:
        record = msgspec.convert(raw, Record)
    except msgspec.ValidationError as error:
        return str(error)
    names = [artifact.name for artifact in record.artifacts]
    if len(set(names)) != len(names):
        return "two artifacts of one name - at `$.artifacts`"
    return None


def json_schema() -> dict[str, Any]:
    """The JSON schema of a record, as published beside this module."""
    made = msgspec.json.schema(Record)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:ikit:evidence:1",
        "title": f"Evidence record, {SCHEMA}",
        **made,
    }


class EvidenceRecord:
    """A stored record: the parsed JSON, and whether it is what its id says.

    ``problem`` is None for a record whose bytes are those that were saved, else one
    line that says what is wrong.  A record with a problem may be shown, but must never
    be used: ``Store.require`` refuses it.
    """

    def __init__(self, raw: dict[str, Any], evidence_id: str, folder: Path | None = None,
                 problem: str | None = None) -> None:  # fmt: skip
        self.raw = raw
        self.evidence_id = evidence_id
        self.folder = folder
        self.problem = problem

    def get(self, *path: str | int) -> Any:
        """The value at a path of keys and indexes, or None where there is none."""
        value: Any = self.raw
        for step in path:
            if isinstance(value, dict) and isinstance(step, str):
                value = value.get(step)
            elif isinstance(value, list) and isinstance(step, int) and -len(value) <= step:
                value = value[step] if step < len(value) else None
            else:
                return None
        return value

    @property
    def kind(self) -> str:
        """The record's kind, or the empty text when it has none."""
        kind = self.raw.get("kind")
        return kind if isinstance(kind, str) else ""

    @property
    def valid(self) -> bool | None:
        """The record's verdict on itself."""
        valid = self.raw.get("valid")
        return valid if isinstance(valid, bool) else None

    @property
    def summary(self) -> str:
        """One line, with the numbers."""
        summary = self.raw.get("summary")
        return summary if isinstance(summary, str) else ""

    def metric(self, name: str) -> float | None:
        """The value of the metric of that name; None when absent, null or no number.

        A whole number that was stored as text, being too large for JSON, is one again.
        """
        metrics = self.raw.get("metrics")
        for entry in metrics if isinstance(metrics, list) else []:
            if isinstance(entry, dict) and entry.get("name") == name:
                value = entry.get("value")
                if isinstance(value, str) and _WHOLE.fullmatch(value):
                    return int(value)
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                return value if number else None
        return None
