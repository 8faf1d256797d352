"""The store: one folder a record, written whole or not at all, never changed after.

``evidence/<id[:2]>/<id>/evidence.json`` and the artifacts beside it.  A record is built
in ``evidence/.staging``, synced, and renamed into place, which the file system does in
one step: whoever is killed at any point leaves either the whole record or none.  The
folders are the truth; the index beside them is a cache.

Because a folder's name is the hash of its record, every read can tell whether the
record is still what was saved.  Reading never fails for a damaged record: it comes
back with its ``problem``.  Using one does: ``require`` refuses it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ikit_mcp.evidence import canonical, claims, files, signing
from ikit_mcp.evidence.record import SCHEMA, Artifact, EvidenceRecord, shape_problem
from ikit_mcp.registry import OpError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

RECORD_FILE = "evidence.json"
MAX_RECORD_BYTES = 64 * 1024 * 1024
ID_PATTERN = re.compile(r"[0-9a-f]{64}")
PREFIX_PATTERN = re.compile(r"[0-9a-f]{6,64}")
ARTIFACT_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_CHUNK = 1 << 20


class Store:
    """The evidence under one home; nothing is created before the first save."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "evidence"
        if home.exists():
            files.refuse_shared(home)

    # --- writing ---------------------------------------------------------------

    @contextmanager
    def stage(self) -> Iterator[Stage]:
        """A place to build one record; what is not committed is gone when the block ends."""
        files.private_folder(self.home)
        files.refuse_shared(self.home)
        staging = files.private_folder(self.root / ".staging")
        claims.sweep(staging)
        with claims.claimed_folder(staging) as folder:
            yield Stage(self, folder)

    # --- reading ---------------------------------------------------------------

    def ids(self) -> Iterator[str]:
        """The ids of all records, in order."""
        for number in range(256):
            yield from self.ids_under(f"{number:02x}")

    def ids_under(self, prefix: str) -> list[str]:
        """The ids whose first two digits are ``prefix``, in order."""
        try:
            names = os.listdir(self.root / prefix)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(n for n in names if ID_PATTERN.fullmatch(n) and n.startswith(prefix))

    def resolve(self, prefix: str) -> str:
        """The one id that begins with ``prefix``; OpError when there is none, or several."""
        wanted = prefix.removeprefix("evidence://").strip().lower()
        if not PREFIX_PATTERN.fullmatch(wanted):
            raise OpError(
                f"{prefix[:80]!r} is no evidence id",
                "give 6 or more of its hex digits; list_evidence shows the ids",
            )
        found = [i for i in self.ids_under(wanted[:2]) if i.startswith(wanted)]
        if len(found) == 1:
            return found[0]
        if not found:
            raise OpError(f"no evidence record {wanted}", "list_evidence shows what is stored")
        shown = ", ".join(i[:12] for i in found[:5])
        raise OpError(
            f"{len(found)} evidence records begin with {wanted}: {shown}",
            "give more digits of the id",
        )

    def load(self, evidence_id: str) -> EvidenceRecord:
        """The record of that full id, with its ``problem`` when it is not what was saved."""
        try:
            data = files.read_inside(
                self.root, [evidence_id[:2], evidence_id, RECORD_FILE], MAX_RECORD_BYTES
            )
        except OSError as error:
            return EvidenceRecord({}, evidence_id, None, f"unreadable: {_reason(error)}")
        raw, problem = check(data, evidence_id)
        return EvidenceRecord(raw, evidence_id, self.folder(evidence_id), problem)

    def require(self, prefix: str, kind: str | None = None) -> EvidenceRecord:
        """A record that may be used as input; OpError when it fails any check."""
        record = self.load(self.resolve(prefix))
        shown = record.evidence_id[:12]
        if record.problem is not None:
            raise OpError(
                f"evidence {shown} fails its check: {record.problem}",
                "measure again; a record that was changed is never used",
            )
        if record.raw.get("schema") != SCHEMA:
            raise OpError(
                f"evidence {shown} is of another version ({str(record.raw.get('schema'))[:40]})",
                f"use a record of {SCHEMA}",
            )
        state = self.signature_state(record)
        if state is not None and state["ok"] is False:
            raise OpError(f"evidence {shown}: {state['problem']}", "measure again")
        if kind is not None and record.kind != kind:
            raise OpError(
                f"evidence {shown} is a {record.kind[:40]} record, not a {kind} record",
                f'list_evidence with kind "{kind}" shows those',
            )
        return record

    def signature_state(self, record: EvidenceRecord) -> dict[str, Any] | None:
        """What the record's signature says (``signing.signature_state``)."""
        return signing.signature_state(record.raw, record.evidence_id, self.home)

    def folder(self, evidence_id: str) -> Path:
        """The folder of a record."""
        return self.root / evidence_id[:2] / evidence_id

    def open_artifact(self, evidence_id: str, name: str) -> int:
        """A descriptor of an artifact's file; OpError when the record has none of that name."""
        if not ID_PATTERN.fullmatch(evidence_id) or not ARTIFACT_PATTERN.fullmatch(name):
            raise OpError(f"no artifact {name[:100]!r}", "inspect_evidence shows the artifacts")
        try:
            return files.open_inside(self.root, [evidence_id[:2], evidence_id, name])
        except OSError as error:
            raise OpError(
                f"artifact {name} of {evidence_id[:12]}: {_reason(error)}",
                "inspect_evidence shows the artifacts",
            ) from None

    # --- verifying -------------------------------------------------------------

    def problems(self, evidence_id: str) -> list[str]:
        """All that is wrong with one stored record: hash, shape, signature, artifacts, orphans."""
        record = self.load(evidence_id)
        if record.problem is not None:
            return [record.problem]
        found = []
        if record.raw.get("schema") == SCHEMA and (shape := shape_problem(record.raw)):
            found.append(f"not the shape of {SCHEMA}: {shape}")
        state = self.signature_state(record)
        if state is not None and state["ok"] is False:
            found.append(str(state["problem"]))
        listed = record.get("artifacts")
        artifacts = {a["name"]: a for a in listed or [] if isinstance(a, dict) and "name" in a}
        for name, artifact in artifacts.items():
            found.extend(self._artifact_problems(evidence_id, str(name), artifact))
        there = set(os.listdir(self.folder(evidence_id)))
        orphans = sorted(there - set(artifacts) - {RECORD_FILE})
        found.extend(f"a file that the record does not list: {name[:100]}" for name in orphans)
        return found

    def _artifact_problems(
        self, evidence_id: str, name: str, artifact: dict[str, Any]
    ) -> Iterator[str]:
        try:
            descriptor = self.open_artifact(evidence_id, name)
        except OpError as error:
            yield error.what
            return
        digest, size = hashlib.sha256(), 0
        with os.fdopen(descriptor, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        if size != artifact.get("bytes"):
            yield f"artifact {name}: {size} bytes, the record says {artifact.get('bytes')}"
        elif digest.hexdigest() != artifact.get("sha256"):
            yield f"artifact {name}: its content was altered"

    def leftovers(self) -> list[str]:
        """What is under the root and is no record: half-written saves, strangers' files."""
        staging = claims.leftovers(self.root / ".staging")
        found = [f".staging/{name}" for name in staging]
        if not self.root.is_dir():
            return found
        for entry in sorted(os.listdir(self.root)):
            if re.fullmatch("[0-9a-f]{2}", entry) and (self.root / entry).is_dir():
                known = set(self.ids_under(entry))
                found += [f"{entry}/{n}" for n in os.listdir(self.root / entry) if n not in known]
            elif entry != ".staging" and not entry.startswith("index.sqlite"):
                found.append(entry)
        return found


class Stage:
    """One record in the making."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self.folder = folder
        self.artifacts: list[Artifact] = []

    def add(self, name: str, source: bytes | Path, media_type: str) -> Artifact:
        """Put an artifact beside the record: bytes, or a file that is moved here."""
        if not ARTIFACT_PATTERN.fullmatch(name) or name == RECORD_FILE:
            raise ValueError(f"artifact name {name!r} is not {ARTIFACT_PATTERN.pattern}")
        target = self.folder / name
        if isinstance(source, bytes):
            files.write_private(target, source)
        elif stat.S_ISREG(source.lstat().st_mode):
            shutil.move(source, target)
            target.chmod(files.PRIVATE_FILE)
        else:
            raise ValueError(f"artifact {name}: {source} is not a regular file")
        digest, size = _digest_and_sync(target)
        artifact = Artifact(name=name, bytes=size, sha256=digest, media_type=media_type)
        self.artifacts.append(artifact)
        return artifact

    def commit(
        self, record: dict[str, Any], key: Ed25519PrivateKey | None = None
    ) -> EvidenceRecord:
        """Store the record for good: it is on disk, under its id, when this returns."""
        body = {k: v for k, v in record.items() if k not in canonical.UNHASHED}
        evidence_id = canonical.evidence_id(body)
        whole = {"schema": body.pop("schema"), "evidence_id": evidence_id, **body}
        if key is not None:
            whole["signature"] = signing.sign(evidence_id, key)
        if problem := shape_problem(whole):
            raise ValueError(f"not the shape of {SCHEMA}: {problem}")
        data = msgspec.json.format(msgspec.json.encode(whole), indent=1)
        files.write_private(self.folder / RECORD_FILE, data)
        files.sync_folder(self.folder)
        final = self._store.folder(evidence_id)
        if not final.parent.is_dir():
            files.private_folder(final.parent)
            files.sync_folder(self._store.root)
        try:
            self.folder.rename(final)
        except OSError:
            if not (final / RECORD_FILE).is_file():  # else the very same record is there already
                raise
        files.sync_folder(final.parent)
        return EvidenceRecord(canonical.parse(data), evidence_id, final)


def check(data: bytes, evidence_id: str | None = None) -> tuple[dict[str, Any], str | None]:
    """The JSON object in a record's bytes, and what is wrong with it (None: nothing).

    Without ``evidence_id`` the id inside the record is the one it must answer to.
    """
    try:
        raw = canonical.parse(data)
    except ValueError as error:
        return {}, f"not a record: {error}"
    try:
        computed = canonical.evidence_id(raw)
    except ValueError as error:
        return raw, f"cannot be hashed: {error}"
    claimed = raw.get("evidence_id")
    if computed != claimed or computed != (evidence_id or claimed):
        return raw, f"altered: its content hashes to {computed[:12]}…"
    return raw, None


def _digest_and_sync(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb+") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return digest.hexdigest(), size


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
