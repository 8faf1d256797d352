"""Replies: what an agent reads of a record, inside a budget and without secrets.

Some clients show a model only the structured content of a reply, others only its text.
So each holds the same facts: the text is the structured content in a few lines.  Both
together stay under the budget; what does not fit is left out by name, with the call
that reads it.

This is the second of the two ways out (the record writer is the first): everything
that leaves is redacted here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mcp.types as t
from mcp.shared.exceptions import MCPError

from ikit_mcp.call import Shown, one_line, visible
from ikit_mcp.evidence import paging
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.jobs import Job
from ikit_mcp.process import secrets
from ikit_mcp.registry import OpError

REPLY_CHARACTERS = 24_000
STRUCTURED_CHARACTERS = 11_800
ERROR_CHARACTERS = 2_000
DATA_CHARACTERS = 5_000


def record_reply(record: EvidenceRecord, shown: Shown, job_id: str | None = None) -> dict[str, Any]:
    """The structured reply for a stored record; absent parts are left out."""
    gates = record.get("gates") or {}
    reply: dict[str, Any] = {
        "status": "done",
        "summary": record.summary,
        "kind": record.kind,
        "valid": record.valid,
        "evidence_id": record.evidence_id,
        "uri": f"evidence://{record.evidence_id}",
        "metrics": [
            {key: value for key, value in metric.items() if key != "samples"}
            for metric in record.get("metrics") or []
        ],
        "gates": {key: gates.get(key) or [] for key in ("checked", "violations")},
        "warnings": gates.get("warnings") or [],
        "missing": record.get("coverage", "missing") or [],
        "limitations": record.get("limitations") or [],
        "data": _data(record, shown),
        "next": shown.next,
    }
    if not any(reply["gates"].values()):
        del reply["gates"]
    if not reply["data"]:
        del reply["data"]
    if job_id is not None:
        reply["job_id"] = job_id
    return _fitted(reply, record.evidence_id)


def _data(record: EvidenceRecord, shown: Shown) -> dict[str, Any]:
    """The parts of ``data`` that the operation names, at the paths that they have there."""
    data: dict[str, Any] = {}
    for path in shown.data:
        try:
            value = paging.find(record.get("data"), path)
        except OpError:
            continue
        value = paging.outline(value, f"data.{path}", DATA_CHARACTERS)
        keys = path.split(".")
        inner = data
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return data


def _fitted(reply: dict[str, Any], evidence_id: str) -> dict[str, Any]:
    """The reply with its least needed parts cut until it fits."""
    for part in ("data", "limitations", "metrics", "missing", "warnings"):
        if paging.size(reply) <= STRUCTURED_CHARACTERS:
            break
        value = reply.get(part)
        if isinstance(value, list):
            reply[part] = _first(value, evidence_id, part)
        elif value is not None:
            path = f'inspect_evidence with id "{evidence_id[:12]}" and path "{part}"'
            reply[part] = {"left_out": f"{paging.size(value):,} characters: {path}"}
    return reply


def _first(items: list[Any], evidence_id: str, part: str) -> list[Any]:
    kept: list[Any] = []
    used = 0
    for item in items:
        used += paging.size(item)
        if used > STRUCTURED_CHARACTERS // 8:
            where = {"missing": "coverage.missing", "warnings": "gates.warnings"}.get(part, part)
            note = f"{len(items) - len(kept)} more: inspect_evidence {evidence_id[:12]} {where}"
            return [*kept, {"name": note} if isinstance(item, dict) else note]
        kept.append(item)
    return kept


def job_reply(job: Job) -> dict[str, Any]:
    """The structured reply for a job that is still running, or was cancelled."""
    if job.state == "cancelled":
        summary = f"{job.operation}: cancelled after {job.seconds:.0f} s"
        return {"status": "cancelled", "job_id": job.id, "summary": summary}
    return {
        "status": "running",
        "job_id": job.id,
        "summary": f"{job.doing()}; ask job_status for the result",
        "progress": {
            "done": job.progress.done,
            "total": job.progress.total,
            "what": job.progress.what,
        },
        "next": [
            {
                "tool": "job_status",
                "arguments": {"job_id": job.id, "wait_seconds": 45},
                "why": "wait for the result",
            }
        ],
    }


# --- the wire ------------------------------------------------------------------


def result(structured: Mapping[str, Any], record: EvidenceRecord | None = None) -> t.CallToolResult:
    """A successful tool result; what it holds is redacted here, once.

    The artifacts of ``record`` are named by resource links.
    """
    sent = clean(dict(structured))
    size = paging.size(sent)
    if size > REPLY_CHARACTERS - 2_000:
        return error(
            OpError(
                f"the reply would have {size:,} characters, over the budget for one",
                "ask for less: a path, or a smaller limit",
            )
        )
    text = text_of(sent)
    room = REPLY_CHARACTERS - size
    content: list[t.ContentBlock] = [t.TextContent(type="text", text=_cut(text, room))]
    content += _links(record) if record is not None else []
    return t.CallToolResult(content=content, structured_content=sent)


def clean(value: Any) -> Any:
    """What may leave: without secrets, and without what a terminal would obey."""
    return _shown(secrets.redact_json(value))


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    return [_shown(item) for item in value] if isinstance(value, list) else value


def _links(record: EvidenceRecord) -> list[t.ContentBlock]:
    return [
        t.ResourceLink(
            type="resource_link",
            uri=f"evidence://{record.evidence_id}/{artifact['name']}",
            name=artifact["name"],
            mime_type=artifact["media_type"],
            size=artifact["bytes"],
        )
        for artifact in (record.get("artifacts") or [])[:8]
    ]


def _cut(text: str, room: int) -> str:
    """The text cut to so many characters on the wire, where quotes and lines are escaped."""
    escaped = len(json.dumps(text, ensure_ascii=False))
    if escaped <= room:
        return text
    kept = text[: max(0, (room - 60) * len(text) // escaped)]
    while kept and len(json.dumps(kept, ensure_ascii=False)) > room - 40:
        kept = kept[: len(kept) * 9 // 10]
    return kept + "\n… (cut: ask for less)"


def error(problem: OpError) -> t.CallToolResult:
    """A tool error with its next step, inside the budget for an error."""
    text = visible(secrets.redact(problem.what))
    advice = visible(secrets.redact(problem.next_step))[:600]
    room = ERROR_CHARACTERS - len(advice) - 8
    said = _cut(text, room) + (f"\nNext: {advice}" if advice else "")
    return t.CallToolResult(content=[t.TextContent(type="text", text=said)], is_error=True)


def refusal(message: str, uri: str | None = None) -> MCPError:
    """The protocol error for what the caller named and is not there; redacted like a reply."""
    data = None if uri is None else {"uri": one_line(uri)}
    return MCPError(t.INVALID_PARAMS, one_line(message, 600), data)


def bug(tool: str, bug_id: str) -> t.CallToolResult:
    """The tool error for a bug of ours: an id, and where to look."""
    return error(
        OpError(
            f"Internal error {bug_id} in {tool}; the traceback is on the server's standard error",
            "report it with that id; other calls still work",
        )
    )


def text_of(reply: Mapping[str, Any]) -> str:
    """The same facts in a few lines: a record's reply as text, any other as compact JSON."""
    if "status" not in reply:
        return json.dumps(reply, ensure_ascii=False, separators=(",", ":"))
    lines = [f"{reply['status']}: {reply.get('summary', '')}"]
    if "evidence_id" in reply:
        verdict = {True: "valid", False: "INVALID", None: "validity not known"}[reply["valid"]]
        lines.append(f"{reply['kind']} {reply['evidence_id']} ({verdict}) {reply['uri']}")
    if "job_id" in reply:
        lines.append(f"job {reply['job_id']}")
    lines += [_metric_line(m) for m in reply.get("metrics", [])]
    gates = reply.get("gates", {})
    if gates.get("checked"):
        lines.append("checked: " + ", ".join(gates["checked"]))
    for title, items in (
        ("violation", gates.get("violations", [])),
        ("warning", reply.get("warnings", [])),
        ("missing", reply.get("missing", [])),
        ("limitation", reply.get("limitations", [])),
    ):
        lines += [f"{title}: {item}" for item in items]
    if "data" in reply:
        lines.append(
            "data: " + json.dumps(reply["data"], ensure_ascii=False, separators=(",", ":"))
        )
    lines += [
        f"next: {step['tool']} {json.dumps(step['arguments'], ensure_ascii=False)} ({step['why']})"
        for step in reply.get("next", [])
    ]
    return "\n".join(lines)


def _metric_line(metric: Mapping[str, Any]) -> str:
    if "unit" not in metric:
        return one_line(str(metric.get("name")))
    value = metric.get("value")
    shown = "not seen" if value is None else f"{value} {metric['unit']}"
    return one_line(f"{metric['name']}: {shown} ({metric.get('stat')})")
