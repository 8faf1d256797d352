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
from urllib.parse import parse_qs, urlsplit

import anyio.to_thread
import mcp.types as t
from mcp.server import ServerRequestContext

from ikit_mcp.call import Settings, one_line
from ikit_mcp.evidence import index, paging
from ikit_mcp.evidence.store import Store
from ikit_mcp.process import secrets
from ikit_mcp.registry import OpError
from ikit_mcp.server import replies

PAGE = 40
COMPLETIONS = 50
PIECE_CHARACTERS = 20_000
_URI = re.compile(r"evidence://([0-9a-fA-F]{6,64})(?:/([A-Za-z0-9][A-Za-z0-9._-]{0,99}))?")
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
        parts = urlsplit(uri)
        match = _URI.fullmatch(uri.split("?")[0])
        if match is None:
            raise OpError(f"{one_line(uri, 100)} is not evidence://ID or evidence://ID/NAME")
        evidence_id = self._store.resolve(match[1])
        if match[2] is not None:
            return self._artifact(uri, evidence_id, match[2], _offset(parts.query))
        record = self._store.load(evidence_id)
        shown = paging.outline(record.raw, "", PIECE_CHARACTERS)
        if record.problem is not None:
            shown = {"problem": record.problem, "record": shown}
        text = json.dumps(secrets.redact_json(shown, secrets.known_secrets(os.environ)), indent=1)
        if len(text) > PIECE_CHARACTERS + 3_000:
            text = json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
        return t.TextResourceContents(uri=uri, mime_type="application/json", text=text)

    def _artifact(
        self, uri: str, evidence_id: str, name: str, offset: int
    ) -> t.TextResourceContents | t.BlobResourceContents:
        """A piece of an artifact, as text where its type says so and it is UTF-8."""
        record = self._store.load(evidence_id)
        listed = {a.get("name"): a for a in record.get("artifacts") or [] if isinstance(a, dict)}
        if name not in listed:
            raise OpError(f"record {evidence_id[:12]} lists no artifact {name!r}")
        media_type = str(listed[name].get("media_type") or "application/octet-stream")
        with os.fdopen(self._store.open_artifact(evidence_id, name), "rb") as file:
            total = os.fstat(file.fileno()).st_size
            file.seek(offset)
            piece = file.read(PIECE_CHARACTERS)
        whole = t.TextResourceContents if _is_text(media_type) else t.BlobResourceContents
        if whole is t.TextResourceContents:
            try:
                text, used = _decoded_piece(piece, last=offset + len(piece) >= total)
            except UnicodeDecodeError:
                whole = t.BlobResourceContents
            else:
                meta = _piece_meta(evidence_id, name, offset, used, total)
                return t.TextResourceContents(
                    uri=uri, mime_type=media_type, text=self._clean(text), _meta=meta
                )
        piece = piece[: PIECE_CHARACTERS * 3 // 4]
        meta = _piece_meta(evidence_id, name, offset, len(piece), total)
        blob = base64.b64encode(piece).decode("ascii")
        return t.BlobResourceContents(uri=uri, mime_type=media_type, blob=blob, _meta=meta)

    @staticmethod
    def _clean(text: str) -> str:
        clean: str = secrets.redact(text, secrets.known_secrets(os.environ))
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


def _decoded_piece(piece: bytes, *, last: bool) -> tuple[str, int]:
    """The text of a piece and how many bytes it took: a split character is left for the next."""
    for cut in range(4):
        try:
            return piece[: len(piece) - cut].decode("utf-8"), len(piece) - cut
        except UnicodeDecodeError as error:
            if last or error.start < len(piece) - 4:
                raise
    return piece.decode("utf-8"), len(piece)


def _piece_meta(evidence_id: str, name: str, offset: int, used: int, total: int) -> dict[str, Any]:
    meta: dict[str, Any] = {"total_bytes": total, "offset": offset}
    if offset + used < total:
        meta["next"] = f"evidence://{evidence_id}/{name}?offset={offset + used}"
    return meta


def _offset(query: str) -> int:
    given = parse_qs(query).get("offset", ["0"])[0]
    if not given.isdigit() or len(given) > 15:
        raise OpError(f"offset {one_line(given, 40)!r} is not a whole number")
    return int(given)


def _encoded(until: str | None, offset: int) -> str:
    raw = json.dumps([until, offset]).encode("utf-8")
    return base64.urlsafe_b64encode(raw).decode("ascii")


def _decoded(cursor: str | None) -> tuple[str | None, int]:
    if cursor is None:
        return None, 0
    try:
        until, offset = json.loads(base64.urlsafe_b64decode(cursor.encode("ascii")))
        if (until is None or isinstance(until, str)) and type(offset) is int and offset >= 0:
            return until, offset
    except (ValueError, TypeError):
        pass
    raise replies.refusal("The cursor is not one of this server's")
