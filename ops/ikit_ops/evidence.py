"""Reading evidence back: list, inspect, verify.

An agent that asks later, or another agent, must be able to find a number, see how it
was made and know that nobody changed it.  Listing shows one line a record, newest
first; inspecting shows a record, or one part of it in pages, with what its hash says;
verifying goes through everything and changes nothing.
"""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.evidence import files, index, paging, signing, times
from ikit_mcp.evidence.record import KINDS, SCHEMA, EvidenceRecord, shape_problem
from ikit_mcp.evidence.store import ID_PATTERN, MAX_RECORD_BYTES, RECORD_FILE, check
from ikit_mcp.registry import READS, Arg, OpError, operation

LIST_CHARACTERS = 9_000


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

    def listed(connection: sqlite3.Connection) -> tuple[int, list[Any], tuple[str, int] | None]:
        """How many there are, the items that fit, and where the next page starts."""
        connection.execute("BEGIN")  # the count and the page are of one moment
        rows, after = index.page(connection, wanted, offset, limit)
        items = [_item(call.store.load(row.evidence_id)) for row in rows]
        kept = _fitting(items, LIST_CHARACTERS)
        if kept < len(rows):  # the budget cut the page: it ends earlier than ``limit`` says
            _, after = index.page(connection, wanted, offset, kept)
        return index.count(connection, wanted), items[:kept], after

    total, items, after = index.ask(call.store, listed)
    if after is not None:
        # The bounds of this page: "7d ago" is another moment when the next one is asked for.
        bounds = {"since": wanted.since, "until": after[0], "offset": after[1]}
        following = {k: v for k, v in (call.args | bounds).items() if v is not None}
        call.propose("list_evidence", following, "the next page")
    return {
        "root": str(call.store.root),
        "total": total,
        "offset": offset,
        "items": items,
        "next_offset": offset + len(items) if after is not None else None,
    }


def _item(record: EvidenceRecord) -> dict[str, Any]:
    """One line of the listing, from the record itself; what fails its check says so."""
    row = index.row_of(record)
    item: dict[str, Any] = {
        "evidence_id": row.evidence_id,
        "kind": one_line(row.kind, 40),
        "claim_class": None if row.claim_class is None else one_line(row.claim_class, 40),
        "started": None if row.started == times.BEGINNING else row.started,
        "summary": one_line(row.summary),
        "valid": None if row.valid is None else bool(row.valid),
        "complete": None if row.complete is None else bool(row.complete),
        "model": None if row.model is None else one_line(row.model),
        "engine": None if row.engine is None else one_line(row.engine, 60),
    }
    if record.problem is not None:
        item["problem"] = one_line(record.problem)
    return item


def _fitting(items: Sequence[Any], characters: int) -> int:
    """How many items fit into so many characters; at least one."""
    used = 0
    for number, item in enumerate(items):
        used += paging.size(item) + 1
        if used > characters and number:
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
    whole = paging.outline(record.raw) if not path else None
    if whole is not None and set(whole) != {"left_out", "path"}:
        return reply | {"record": whole}
    # An object with too many members for an outline is read in pages, as any part is.
    shown = paging.page(paging.find(record.raw, path or ""), path or "", offset, limit)
    if shown.get("next_offset") is not None:
        following = {"id": id, "offset": shown["next_offset"], "limit": limit}
        following |= {"path": path} if path else {}
        call.propose("inspect_evidence", following, "the next page")
    return reply | shown


def integrity(call: Call, record: EvidenceRecord) -> dict[str, Any]:
    """``{ok, problem, signature}``: whether the record is what was saved, and who signed it."""
    if record.problem is not None:
        return {"ok": False, "problem": one_line(record.problem), "signature": None}
    signature = call.store.signature_state(record)
    problem = None
    if signature is not None and signature["ok"] is False:
        problem = str(signature["problem"])
    elif record.raw.get("schema") == SCHEMA:
        problem = shape_problem(record.raw)
    shown = None if problem is None else one_line(problem)
    return {"ok": problem is None, "problem": shown, "signature": signature}


def _is_path(text: str) -> bool:
    return text.endswith(RECORD_FILE) and not text.startswith("evidence://")


def _from_file(path: Path) -> EvidenceRecord:
    """A record in a file of the right name; anything else is refused without its contents."""
    refusal = OpError(
        f"{one_line(str(path))} is not an evidence record",
        "give the path of an evidence.json, or an id from list_evidence",
    )
    if path.name != RECORD_FILE:
        raise refusal
    try:
        raw, problem = check(files.read_alone(path, MAX_RECORD_BYTES))
    except OSError as error:  # no file, a link, a pipe, too large
        reason = one_line(error.strerror or str(error))
        what = f"cannot read {one_line(str(path))}: {reason}"
        raise OpError(what, refusal.next_step) from None
    schema = raw.get("schema")
    if not isinstance(schema, str) or not re.fullmatch(r"ikit\.evidence/\d{1,4}", schema):
        raise refusal
    name = raw.get("evidence_id")
    known = name if isinstance(name, str) and ID_PATTERN.fullmatch(name) else ""
    return EvidenceRecord(raw, known, path.parent, problem)


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
    leftovers = [one_line(n) for n in (call.store.leftovers() if id is None else [])]
    shown = _fitting(problems, LIST_CHARACTERS), _fitting(leftovers, LIST_CHARACTERS // 3)
    reply: dict[str, Any] = {
        "checked": len(ids),
        "ok": not problems,
        "problems": problems[: shown[0]],
        "leftovers": leftovers[: shown[1]],
    }
    if len(problems) > shown[0]:
        reply["more_problems"] = len(problems) - shown[0]
    if len(leftovers) > shown[1]:
        reply["more_leftovers"] = len(leftovers) - shown[1]
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
    made = signing.generate_key(call.store.home)
    return made | {"use": f"export IKIT_SIGNING_KEY={shlex.quote(made['private'])}"}
