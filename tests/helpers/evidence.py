"""Records for tests, saved through the store as an operation's are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ikit_mcp.evidence import times
from ikit_mcp.evidence.record import (
    Draft,
    EvidenceRecord,
    Identity,
    Model,
    Provenance,
    assemble,
    metric,
)
from ikit_mcp.evidence.store import Store


def save(
    home: Path,
    number: int = 0,
    *,
    kind: str = "roofline",
    started: str | None = None,
    data: dict[str, Any] | None = None,
    artifacts: dict[str, tuple[bytes, str]] | None = None,
    gbs: float = 100.0,
) -> EvidenceRecord:
    """Save one record; ``number`` makes it differ from others."""
    draft = Draft(
        kind=kind,
        claim_class="measured",
        valid=True,
        summary=f"record {number}",
        identity=Identity(model=Model(id=f"acme/model-{number}")),
        metrics=[metric("dram_read_gbs", gbs, "GB/s", "best_sustained", [gbs, gbs])],
        data={"number": number, **(data or {})},
    )
    begun = started or times.now()
    provenance = Provenance(
        started=begun,
        finished=times.now(),
        tool={"name": "test", "version": "0"},
        request={"operation": "test", "args": {}},
        reproduce="true",
    )
    with Store(home).stage() as stage:
        for name, (content, media_type) in (artifacts or {}).items():
            stage.add(name, content, media_type)
        return stage.commit(assemble(draft, provenance, stage.artifacts))


def flip_a_byte(home: Path, evidence_id: str, needle: bytes) -> None:
    """Change one byte of a stored record: the first one of ``needle``."""
    path = Store(home).folder(evidence_id) / "evidence.json"
    content = bytearray(path.read_bytes())
    content[content.index(needle)] ^= 1
    path.write_bytes(content)
