"""Reading evidence back: list, inspect, verify.

An agent that asks later, or another agent, must be able to find a number, see how it
was made and know that nobody changed it.  Listing shows one line a record, newest
first; inspecting shows a record, or one part of it in pages, with what its hash says;
verifying goes through everything and changes nothing.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.evidence import index, paging, signing, times
from ikit_mcp.evidence.record import KINDS, SCHEMA, EvidenceRecord, shape_problem
from ikit_mcp.evidence.store import MAX_RECORD_BYTES, RECORD_FILE, check
from ikit_mcp.registry import READS, Arg, OpError, operation

LIST_CHARACTERS = 9_000
MAX_PROBLEMS = 40


@operation(
    "list_evidence",
    ("evidence", "list"),
    "List stored evidence records, newest first, one line each.",
    [
        Arg("kind", "string", "Only this kind", choices=KINDS),
        Arg("model", "string", "Only models whose id contains this"),
        Arg("engine", "string", "Only engines whose name contains this"),
        Arg("device", "string", "Only devices whose name contains this"),
        Arg("valid", "string", "Only this verdict", choices=("true", "false", "unknown")),
        Arg("since", "string", "From: date, RFC 3339, or 36h / 7d ago"),
        Arg("until", "string", "Up to: date, RFC 3339, or 36h / 7d ago"),
        Arg("offset", "integer", "Skip this many", default=0, minimum=0),
        Arg("limit", "integer", "Page size", default=20, minimum=1, maximum=100),
    ],
    effects=READS,
)
def list_evidence(
    call: Call,
    kind: str | None,
    model: str | None,
    engine: str | None,
    device: str | None,
    valid: str | None,
    since: str | None,
    until: str | None,
    offset: int,
    limit: int,
) -> dict[str, Any]:
    """``{root, total, offset, items, next_offset}``, newest first.

    ``next_offset`` counts from the top; ``next`` is the call that neither skips nor
    repeats a record while others are saved.  A record that fails its hash is listed
    with its ``problem``.
    """
    wanted = index.Filter(
        kind, model, engine, device, valid,
        times.bound(since, "since") if since is not None else None,
        times.bound(until, "until", last=True) if until is not None else None,
    )  # fmt: skip
    with index.opened(call.store) as connection:
        total = index.count(connection, wanted)
        rows, after = index.page(connection, wanted, offset, limit)
        items = [_item(call.store.load(row.evidence_id), row) for row in rows]
        kept = _within(items)
        if kept < len(rows):  # the budget cut the page: it ends earlier than ``limit`` says
            rows, after = index.page(connection, wanted, offset, kept)
    end = offset + len(rows)
    if after is not None:
        asked = {k: v for k, v in call.args.items() if v is not None}
        following = {**asked, "until": after[0], "offset": after[1]}
        call.propose("list_evidence", following, "the next page")
    return {
        "root": str(call.store.root),
        "total": total,
        "offset": offset,
        "items": items[:kept],
        "next_offset": end if after is not None else None,
    }


def _item(record: EvidenceRecord, row: index.Row) -> dict[str, Any]:
    """One line of the listing, from the index; what fails its check says so."""
    item: dict[str, Any] = {
        "evidence_id": row.evidence_id,
        "kind": one_line(row.kind, 40),
        "claim_class": row.claim_class,
        "started": row.started,
        "summary": one_line(row.summary),
        "valid": None if row.valid is None else bool(row.valid),
        "complete": None if row.complete is None else bool(row.complete),
        "model": None if row.model is None else one_line(row.model),
        "engine": None if row.engine is None else one_line(row.engine, 60),
    }
    if record.problem is not None:
        item |= {"valid": None, "problem": record.problem}
    return item


def _within(items: list[dict[str, Any]]) -> int:
    """How many items fit into a reply; at least one."""
    used = 0
    for number, item in enumerate(items):
        used += paging.size(item) + 1
        if used > LIST_CHARACTERS and number:
            return number
    return len(items)


@operation(
    "inspect_evidence",
    ("evidence", "show"),
    "Show an evidence record, or one part of it in pages, and whether it was altered.",
    [
        Arg("id", "string", "Id, 6+ digits of it, or an evidence.json", True, positional=True),
        Arg("path", "string", "Part to show, e.g. metrics.decode_tok_s or data.kernels"),
        Arg("offset", "integer", "First item of the page", default=0, minimum=0),
        Arg("limit", "integer", "Items a page", default=50, minimum=1, maximum=1000),
    ],
    effects=READS,
)
def inspect_evidence(
    call: Call, id: str, path: str | None, offset: int, limit: int
) -> dict[str, Any]:
    """``{evidence_id, path, integrity}`` and the ``record``, a ``value``, or a page of it."""
    record = _from_file(Path(id)) if _is_path(id) else call.store.load(call.store.resolve(id))
    reply: dict[str, Any] = {
        "evidence_id": record.evidence_id,
        "path": path or "",
        "integrity": integrity(call, record),
    }
    if not path:
        return reply | {"record": paging.outline(record.raw)}
    shown = paging.page(paging.find(record.raw, path), path, offset, limit)
    if shown.get("next_offset") is not None:
        following = {"id": id, "path": path, "offset": shown["next_offset"], "limit": limit}
        call.propose("inspect_evidence", following, "the next page")
    return reply | shown


def integrity(call: Call, record: EvidenceRecord) -> dict[str, Any]:
    """``{ok, problem, signature}``: whether the record is what was saved, and who signed it."""
    if record.problem is not None:
        return {"ok": False, "problem": record.problem, "signature": None}
    signature = call.store.signature_state(record)
    problem = None
    if signature is not None and signature["ok"] is False:
        problem = str(signature["problem"])
    elif record.raw.get("schema") == SCHEMA:
        problem = shape_problem(record.raw)
    return {"ok": problem is None, "problem": problem, "signature": signature}


def _is_path(text: str) -> bool:
    return text.endswith(RECORD_FILE) and not text.startswith("evidence://")


def _from_file(path: Path) -> EvidenceRecord:
    """A record in a file of the right name; anything else is refused without its contents."""
    refusal = OpError(
        f"{one_line(str(path))} is not an evidence record",
        "give the path of an evidence.json, or an id from list_evidence",
    )
    try:
        info = path.lstat()
        if path.name != RECORD_FILE or not stat.S_ISREG(info.st_mode):
            raise refusal
        if info.st_size > MAX_RECORD_BYTES:
            raise refusal
        raw, problem = check(path.read_bytes())
    except OSError as error:
        raise OpError(
            f"cannot read {one_line(str(path))}: {error.strerror}", refusal.next_step
        ) from None
    if not isinstance(raw.get("schema"), str) or not raw["schema"].startswith("ikit.evidence/"):
        raise refusal
    name = raw.get("evidence_id")
    return EvidenceRecord(raw, name if isinstance(name, str) else "", path.parent, problem)


@operation(
    "verify_evidence",
    ("evidence", "verify"),
    "Check the hash, signature and artifacts of one stored record, or of all; changes nothing.",
    [Arg("id", "string", "Only this record (6 or more digits); all without it", positional=True)],
    effects=READS,
)
def verify_evidence(call: Call, id: str | None) -> dict[str, Any]:
    """``{checked, ok, problems: [{evidence_id, problem}], leftovers}``."""
    ids = [call.store.resolve(id)] if id is not None else list(call.store.ids())
    problems = []
    for number, evidence_id in enumerate(ids):
        if number % 256 == 0:
            call.progress(number, len(ids), "checking records")
        for problem in call.store.problems(evidence_id):
            problems.append({"evidence_id": evidence_id, "problem": one_line(problem, 300)})
    leftovers = call.store.leftovers() if id is None else []
    reply: dict[str, Any] = {
        "checked": len(ids),
        "ok": not problems,
        "problems": problems[:MAX_PROBLEMS],
        "leftovers": [one_line(name) for name in leftovers[:MAX_PROBLEMS]],
    }
    for key, found in (("more_problems", problems), ("more_leftovers", leftovers)):
        if len(found) > MAX_PROBLEMS:
            reply[key] = len(found) - MAX_PROBLEMS
    return reply


@operation(
    "keygen",
    ("evidence", "keygen"),
    "Make an Ed25519 key pair that signs records; the new key is trusted here.",
    [],
    effects=READS,
    tool=False,
)
def keygen(call: Call) -> dict[str, Any]:
    """``{key_id, private, public, use}``: the key's id, its two files, and how to use it."""
    home = call.store.home
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = signing.generate_key(home)
    return made | {"use": f"export IKIT_SIGNING_KEY={made['private']}"}
