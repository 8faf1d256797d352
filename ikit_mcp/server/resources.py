"""Resources: stored records as ``evidence://ID``, their artifacts as ``evidence://ID/NAME``.

The listing is paged with an opaque cursor that holds the start time of the last item,
so that records which arrive meanwhile shift nothing.  A record that is larger than the
budget comes in outline; an artifact in pieces, ``?offset=N`` the next one: a resource is
read into the same context as a reply.  Paths into the file system are never resources.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sqlite3
from typing import Any

import anyio.to_thread
import mcp.types as t
from mcp.server import ServerRequestContext

from ikit_mcp.call import Settings, one_line
from ikit_mcp.evidence import index, paging
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.evidence.store import Store
from ikit_mcp.process import secrets
from ikit_mcp.registry import OpError
from ikit_mcp.server import replies

PAGE = 40
COMPLETIONS = 50
PIECE_CHARACTERS = 20_000
_URI = re.compile(
    r"evidence://(?P<id>[0-9a-fA-F]{6,64})"
    r"(?:/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})(?:\?offset=(?P<offset>[0-9]{1,15}))?)?",
    re.ASCII,
)
_CURSOR = re.compile(r"(?P<until>[0-9TZ:.+-]{1,40})~(?P<offset>[0-9]{1,9})", re.ASCII)
Context = ServerRequestContext[Any, Any]


class Resources:
    """Lists, reads and completes the evidence of one home."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @property
    def _store(self) -> Store:
        return Store(self._settings.home)

    async def list_resources(
        self, ctx: Context, params: t.PaginatedRequestParams | None
    ) -> t.ListResourcesResult:
        """One page of the stored records, newest first."""
        cursor = params.cursor if params is not None else None
        rows, following = await anyio.to_thread.run_sync(self._page, cursor)
        resources = [
            t.Resource(
                uri=f"evidence://{row.evidence_id}",
                name=f"{one_line(row.kind, 40)} {row.evidence_id[:12]}",
                description=self._clean(one_line(row.summary)),
                mime_type="application/json",
            )
            for row in rows
        ]
        return t.ListResourcesResult(resources=resources, next_cursor=following)

    def _page(self, cursor: str | None) -> tuple[list[index.Row], str | None]:
        """Lines from the records themselves: what is damaged says so, not what it once said."""
        until, offset = _decoded(cursor)
        store = self._store
        rows, more = index.ask(
            store, lambda found: index.page(found, index.Filter(until=until), offset, PAGE)
        )
        rows = [index.row_of(store.load(row.evidence_id)) for row in rows]
        return rows, None if more is None else _encoded(*more)

    async def templates(
        self, ctx: Context, params: t.PaginatedRequestParams | None
    ) -> t.ListResourceTemplatesResult:
        """The two templates: a record, and an artifact of it."""
        return t.ListResourceTemplatesResult(
            resource_templates=[
                t.ResourceTemplate(
                    uri_template="evidence://{id}",
                    name="evidence",
                    description="An evidence record, in outline when it is large",
                    mime_type="application/json",
                ),
                t.ResourceTemplate(
                    uri_template="evidence://{id}/{name}",
                    name="artifact",
                    description="A file beside a record; ?offset=N for the next piece",
                ),
            ]
        )

    async def read(self, ctx: Context, params: t.ReadResourceRequestParams) -> t.ReadResourceResult:
        """A record or a piece of an artifact; -32602 when there is none."""
        uri = str(params.uri)
        try:
            contents = await anyio.to_thread.run_sync(self._read, uri)
        except OpError as problem:
            raise replies.refusal(f"Resource not found: {problem}", uri) from None
        return t.ReadResourceResult(contents=[contents])

    def _read(self, uri: str) -> t.TextResourceContents | t.BlobResourceContents:
        match = _URI.fullmatch(uri)
        if match is None:
            raise OpError(f"{one_line(uri, 100)} is not evidence://ID or evidence://ID/NAME")
        record = self._store.load(self._store.resolve(match["id"]))
        if match["name"] is not None:
            return self._artifact(uri, record, match["name"], int(match["offset"] or 0))
        shown = paging.outline(record.raw, "", PIECE_CHARACTERS)
        if record.problem is not None:
            shown = {"problem": record.problem, "record": shown}
        text = json.dumps(replies.clean(shown), separators=(",", ":"), ensure_ascii=False)
        return t.TextResourceContents(uri=uri, mime_type="application/json", text=text)

    def _artifact(
        self, uri: str, record: EvidenceRecord, name: str, offset: int
    ) -> t.TextResourceContents | t.BlobResourceContents:
        """A piece of an artifact, as text where its type says so and it is UTF-8."""
        listed = _listed(record, name)
        problem = record.problem or self._altered(record, name, listed, offset)
        safe = secrets.redactor()
        with os.fdopen(self._store.open_artifact(record.evidence_id, name), "rb") as file:
            total = os.fstat(file.fileno()).st_size
            before = min(offset, safe.reach)
            file.seek(offset - before)
            around = file.read(before + PIECE_CHARACTERS + safe.reach)
        piece = around[before : before + PIECE_CHARACTERS]
        meta: dict[str, Any] = {"total_bytes": total, "offset": offset}
        if problem is not None:
            meta["problem"] = problem
        media_type = str(listed.get("media_type") or "application/octet-stream")
        base = f"evidence://{record.evidence_id}/{name}"
        text = _text_of(piece, last=offset + len(piece) >= total) if _is_text(media_type) else None
        used = len(text.encode("utf-8")) if text is not None else PIECE_CHARACTERS * 3 // 4
        if offset + used < total:
            meta["next"] = f"{base}?offset={offset + used}"
        # What lies across a seam is half in this piece and half in the next.
        clean = safe.between(around, before, before + used)
        if text is not None:
            said = self._clean(clean.decode("utf-8", "replace"))
            return t.TextResourceContents(uri=uri, mime_type=media_type, text=said, _meta=meta)
        blob = base64.b64encode(clean).decode("ascii")
        return t.BlobResourceContents(uri=uri, mime_type=media_type, blob=blob, _meta=meta)

    def _altered(
        self, record: EvidenceRecord, name: str, listed: dict[str, Any], offset: int
    ) -> str | None:
        """What is wrong with the file: looked at before its first piece is shown."""
        if offset:
            return None
        found = self._store.artifact_problems(record.evidence_id, name, listed)
        return next(iter(found), None)

    @staticmethod
    def _clean(text: str) -> str:
        clean: str = secrets.redact(text)
        return clean

    async def complete(self, ctx: Context, params: t.CompleteRequestParams) -> t.CompleteResult:
        """Ids that begin with what was typed, newest first."""
        ids: list[str] = []
        if params.argument.name == "id":
            ids = await anyio.to_thread.run_sync(self._ids, params.argument.value.strip().lower())
        return t.CompleteResult(
            completion=t.Completion(values=ids[:COMPLETIONS], has_more=len(ids) > COMPLETIONS)
        )

    def _ids(self, prefix: str) -> list[str]:
        def question(found: sqlite3.Connection) -> list[str]:
            """The ids of one prefix."""
            return list(index.ids_with_prefix(found, prefix, COMPLETIONS + 1))

        return index.ask(self._store, question)


def _is_text(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in (
        "application/json", "application/jsonl", "image/svg+xml",
    )  # fmt: skip


def _text_of(piece: bytes, *, last: bool) -> str | None:
    """The text of a piece, None when it is none; a split character is left for the next."""
    for cut in range(1 if last else 4):
        try:
            return piece[: len(piece) - cut].decode("utf-8")
        except UnicodeDecodeError:
            continue
    return None


def _listed(record: EvidenceRecord, name: str) -> dict[str, Any]:
    """The record's own entry for an artifact; OpError when it lists none of that name."""
    entries = record.get("artifacts")
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and entry.get("name") == name:
            return entry
    raise OpError(f"record {record.evidence_id[:12]} lists no artifact {name!r}")


def _encoded(until: str, offset: int) -> str:
    return f"{until}~{offset}"


def _decoded(cursor: str | None) -> tuple[str | None, int]:
    if cursor is None:
        return None, 0
    if match := _CURSOR.fullmatch(cursor):
        return match["until"], int(match["offset"])
    raise replies.refusal("The cursor is not one of this server's")
