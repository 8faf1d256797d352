"""Made-up records: drafts, whole records, and ones that no operation would make."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.evidence import canonical, times
from ikit_mcp.evidence.record import (
    SCHEMA,
    Device,
    Draft,
    Engine,
    EvidenceRecord,
    Gates,
    Identity,
    Model,
    Provenance,
    assemble,
    metric,
)
from ikit_mcp.evidence.store import Store

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from ikit_mcp.evidence.record import Artifact


def make_draft(number: int = 0, **changed: Any) -> Draft:
    """A draft as an operation makes it; ``number`` tells it from others."""
    given: dict[str, Any] = {
        "kind": "bench",
        "claim_class": "measured",
        "valid": True,
        "summary": f"record {number}: 123.5 tok/s",
        "identity": Identity(
            model=Model(id=f"acme/model-{number}", revision="c0ffee", dtype="bf16"),
            engine=Engine(name="vllm", version="0.33"),
            device=Device(name="H200", uuid="GPU-1", driver="1.2"),
            workload={"prompt_len": 512, "gen_len": 128, "batch": 1},
        ),
        "metrics": [
            metric("decode_tok_s", 123.5, "tok/s", "median", [123.0, 123.5, None]),
            metric("ttft_ms", None, "ms", "median"),
        ],
        "gates": Gates(checked=["clock"], violations=[], warnings=["warm"]),
        "missing": ["power"],
        "limitations": ["one batch size"],
        "data": {"number": number, "rounds": [{"index": 0, "decode_tok_s": 123.5}]},
    }
    return Draft(**{**given, **changed})


def make_provenance(started: str | None = None, **changed: Any) -> Provenance:
    """How a made-up record came about."""
    given: dict[str, Any] = {
        "started": started or times.now(),
        "finished": times.now(),
        "tool": {"name": "test", "version": "0"},
        "request": {"operation": "test", "args": {}},
        "reproduce": "ikit test",
    }
    return Provenance(**{**given, **changed})


def make_record(
    number: int = 0,
    *,
    started: str | None = None,
    artifacts: Sequence[Artifact] = (),
    **changed: Any,
) -> dict[str, Any]:
    """A record as a JSON object, without id."""
    return assemble(make_draft(number, **changed), make_provenance(started), artifacts)


def save_record(
    home: Path,
    number: int = 0,
    *,
    started: str | None = None,
    files: Mapping[str, bytes] | None = None,
    key: Ed25519PrivateKey | None = None,
    **changed: Any,
) -> EvidenceRecord:
    """Save a made-up record through the store."""
    with Store(home).stage() as stage:
        for name, content in (files or {}).items():
            stage.add(name, content, "application/octet-stream")
        made = make_record(number, started=started, artifacts=stage.artifacts, **changed)
        return stage.commit(made, key)


def plant(home: Path, raw: dict[str, Any], *, evidence_id: str | None = None) -> str:
    """Put any JSON object where the store keeps a record, as somebody else's copy would be."""
    body = {k: v for k, v in raw.items() if k not in canonical.UNHASHED}
    computed = canonical.evidence_id(body)
    name = evidence_id or computed
    whole = {"evidence_id": computed, **raw}
    plant_bytes(home, name, canonical.canonical_bytes(whole))
    return name


def plant_bytes(home: Path, evidence_id: str, data: bytes) -> Path:
    """Put any bytes where the store keeps a record; the path of the file."""
    folder = Store(home).folder(evidence_id)
    for path in (home, home / "evidence", folder.parent, folder):
        path.mkdir(mode=0o700, exist_ok=True)
    (folder / "evidence.json").write_bytes(data)
    return folder / "evidence.json"


def foreign_record(**changed: Any) -> dict[str, Any]:
    """A record with fields of a later version, and whatever else is asked for."""
    return {**make_record(), "schema": SCHEMA, "later": {"field": 1}, **changed}


def tree(root: Path) -> dict[str, tuple[int, int, int, bytes | str]]:
    """Everything below a folder: mode, owner, modification time, content or target."""
    found: dict[str, tuple[int, int, int, bytes | str]] = {}
    for folder, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(folder) / name
            info = path.lstat()
            content: bytes | str = ""
            if path.is_symlink():
                content = str(path.readlink())
            elif path.is_file():
                content = path.read_bytes()
            entry = (info.st_mode, info.st_uid, info.st_mtime_ns, content)
            found[str(path.relative_to(root))] = entry
    return found
