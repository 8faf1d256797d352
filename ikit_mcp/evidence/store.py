"""The store: one folder a record, written whole or not at all, never changed after.

``evidence/<id[:2]>/<id>/evidence.json`` and the artifacts beside it.  A record is built
in ``evidence/.staging``, synced, and renamed into place, which the file system does in
one step: whoever is killed at any point leaves either the whole record or none.  The
folders are the truth; the index beside them is a cache.

Because a folder's name is the hash of its record, and a record is kept as its canonical
bytes, every read can tell whether the record is still what was saved, to the byte.
Reading never fails for a damaged record: it comes back with its ``problem``.  Using one
does: ``require`` refuses it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.evidence import canonical, claims, files, signing
from ikit_mcp.evidence.record import (
    ARTIFACT_NAME,
    SCHEMA,
    Artifact,
    EvidenceRecord,
    shape_problem,
    storable,
)
from ikit_mcp.registry import OpError, excerpt

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

RECORD_FILE = "evidence.json"
MAX_RECORD_BYTES = 64 * 1024 * 1024
ID_PATTERN = re.compile(r"[0-9a-f]{64}")
PREFIX_PATTERN = re.compile(r"[0-9a-f]{6,64}")
ARTIFACT_PATTERN = re.compile(ARTIFACT_NAME)
INDEX_FILES = frozenset({"index.sqlite", "index.sqlite-journal"})
STAGING = ".staging"
_CHUNK = 1 << 20


class Store:
    """The evidence under one home; nothing is created before the first save."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.root = home / "evidence"
        files.refuse_shared(home)
        files.refuse_shared(self.root, "evidence folder")

    # --- writing ---------------------------------------------------------------

    @contextmanager
    def stage(self) -> Iterator[Stage]:
        """A place to build one record; what is not committed is gone when the block ends."""
        with ExitStack() as stack:
            with _storing(self.root):
                staging = self._staging()
                claims.sweep(staging)
                folder = stack.enter_context(claims.claimed_folder(staging))
            yield Stage(self, folder)

    def ready(self) -> None:
        """OpError when nothing could be saved here: a read-only, full or foreign home."""
        with _storing(self.root), claims.claimed_folder(self._staging()) as folder:
            files.write_private(folder / RECORD_FILE, bytes(4_096))

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """A private folder for what is in the making, on the disk of the records."""
        work = self.home / "work"
        with ExitStack() as stack:
            with _storing(work):
                files.private_folder(self.home)
                files.refuse_link(work)
                claims.sweep(files.private_folder(work))
                folder = stack.enter_context(claims.claimed_folder(work))
            yield folder

    def _staging(self) -> Path:
        """The folder that records are built in, made when it is not there; OSError, OpError."""
        files.private_folder(self.root)
        files.refuse_shared(self.home)
        files.refuse_shared(self.root, "evidence folder")
        staging = self.root / STAGING
        files.refuse_link(staging)
        return files.private_folder(staging)

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
        except OSError as error:
            raise OpError(
                f"cannot read the evidence folder {self.root / prefix}: {_reason(error)}",
                "give yourself the right to read it",
            ) from None
        return sorted(n for n in names if ID_PATTERN.fullmatch(n) and n.startswith(prefix))

    def resolve(self, prefix: str) -> str:
        """The one id that begins with ``prefix``; OpError when there is none, or several."""
        wanted = prefix.removeprefix("evidence://").strip().lower()
        if not PREFIX_PATTERN.fullmatch(wanted):
            raise OpError(
                f"{excerpt(prefix, 80)!r} is no evidence id",
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
        if not ID_PATTERN.fullmatch(evidence_id):
            return EvidenceRecord({}, evidence_id, None, "unreadable: not an evidence id")
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
                f"evidence {shown} is of another version "
                f"({excerpt(str(record.raw.get('schema')), 40)})",
                f"use a record of {SCHEMA}",
            )
        if shape := shape_problem(record.raw):
            why = f"is not of the shape of {SCHEMA}: {excerpt(shape, 200)}"
            raise OpError(f"evidence {shown} {why}", "measure again")
        state = self.signature_state(record)
        if state is not None and state["ok"] is False:
            raise OpError(f"evidence {shown}: {state['problem']}", "measure again")
        if kind is not None and record.kind != kind:
            raise OpError(
                f"evidence {shown} is a {excerpt(record.kind, 40)} record, not a {kind} record",
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
            raise OpError(
                f"no artifact {excerpt(name, 100)!r}", "inspect_evidence shows the artifacts"
            )
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
        artifacts = {
            a["name"]: a
            for a in (listed if isinstance(listed, list) else [])
            if isinstance(a, dict) and isinstance(a.get("name"), str)
        }
        for name, artifact in artifacts.items():
            found.extend(self.artifact_problems(evidence_id, name, artifact))
        there = set(os.listdir(self.folder(evidence_id)))
        orphans = sorted(map(files.printable, there - set(artifacts) - {RECORD_FILE}))
        found.extend(
            f"a file that the record does not list: {excerpt(name, 100)}" for name in orphans
        )
        return found

    def artifact_problems(
        self, evidence_id: str, name: str, artifact: dict[str, Any]
    ) -> Iterator[str]:
        """What is wrong with the file of an artifact that a record lists: size, content."""
        try:
            descriptor = self.open_artifact(evidence_id, name)
        except OpError as error:
            yield error.what
            return
        digest, size = hashlib.sha256(), 0
        try:
            with os.fdopen(descriptor, "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
        except OSError as error:
            yield f"artifact {name}: {_reason(error)}"
            return
        if size != artifact.get("bytes"):
            yield f"artifact {name}: {size} bytes, the record says {artifact.get('bytes')}"
        elif digest.hexdigest() != artifact.get("sha256"):
            yield f"artifact {name}: its content was altered"

    def leftovers(self) -> list[str]:
        """What is under the root and is no record: half-written saves, strangers' files."""
        found = [f"{STAGING}/{name}" for name in claims.leftovers(self.root / STAGING)]
        entries = sorted(os.listdir(self.root)) if self.root.is_dir() else []
        for entry in entries:
            folder = self.root / entry
            if entry == STAGING or entry in INDEX_FILES:
                known: set[str] | None = None if folder.is_symlink() else set()
            elif re.fullmatch("[0-9a-f]{2}", entry) and folder.is_dir():
                known = None if folder.is_symlink() else set(self.ids_under(entry))
                if known is not None:
                    names = sorted(set(os.listdir(folder)) - known)
                    found += [f"{entry}/{files.printable(name)}" for name in names]
            else:
                known = None
            if known is None:
                found.append(files.printable(entry))
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
        if name in (artifact.name for artifact in self.artifacts):
            raise ValueError(f"artifact {name} was added before")
        if isinstance(source, Path) and not stat.S_ISREG(source.lstat().st_mode):
            raise ValueError(f"artifact {name}: {source} is not a regular file")
        target = self.folder / name
        with _storing(self._store.root):
            if isinstance(source, bytes):
                files.write_private(target, source)
                digest, size = hashlib.sha256(source).hexdigest(), len(source)
            else:
                shutil.move(source, target)
                target.chmod(files.PRIVATE_FILE)
                digest, size = _digest_and_sync(target)
        artifact = Artifact(name=name, bytes=size, sha256=digest, media_type=media_type)
        self.artifacts.append(artifact)
        return artifact

    def commit(
        self, record: dict[str, Any], key: Ed25519PrivateKey | None = None
    ) -> EvidenceRecord:
        """Store the record for good: it is on disk, under its id, when this returns."""
        whole = {k: v for k, v in storable(record).items() if k not in canonical.UNHASHED}
        evidence_id = canonical.evidence_id(whole)
        whole["evidence_id"] = evidence_id
        if key is not None:
            whole["signature"] = signing.sign(evidence_id, key)
        if problem := shape_problem(whole):
            raise ValueError(f"not the shape of {SCHEMA}: {problem}")
        data = canonical.canonical_bytes(whole)
        if len(data) > MAX_RECORD_BYTES:
            raise ValueError(f"a record of {len(data)} bytes: large data belongs into artifacts")
        with _storing(self._store.root):
            files.write_private(self.folder / RECORD_FILE, data)
            files.sync_folder(self.folder)
            final = self._store.folder(evidence_id)
            files.refuse_link(final.parent)
            files.private_folder(final.parent)
            if not self._moved_to(final, evidence_id):
                return self._store.load(evidence_id)
            files.sync_folder(final.parent)
        return EvidenceRecord(canonical.parse(data), evidence_id, final)

    def _moved_to(self, final: Path, evidence_id: str) -> bool:
        """Rename the folder into place; False when the very same record is there already."""
        try:
            self.folder.rename(final)
            return True
        except OSError:
            if not (final.exists() or final.is_symlink()):
                raise
            if problems := self._store.problems(evidence_id):
                raise OpError(
                    f"the folder {final} is in the way: {problems[0]}",
                    "move it away; a stored record is never written over",
                ) from None
            return False


@contextmanager
def _storing(root: Path) -> Iterator[None]:
    """Tell a full disk, a missing right and the like as what the user can mend."""
    try:
        yield
    except OSError as error:
        raise OpError(
            f"cannot store evidence under {root}: {_reason(error)}",
            "make room there, or set IKIT_HOME to a folder that you can write",
        ) from error


def check(data: bytes, evidence_id: str | None = None) -> tuple[dict[str, Any], str | None]:
    """The JSON object in a record's bytes, and what is wrong with it (None: nothing).

    Without ``evidence_id`` the id inside the record is the one it must answer to.  Of
    bytes that are no record, nothing comes back.
    """
    if (plain := canonical.read_plain(data)) is not None:
        raw, computed = plain
        return raw, _id_problem(raw, computed, evidence_id)
    was = "altered: not a record any more" if evidence_id is not None else "not a record"
    try:
        raw = canonical.parse(data)
        computed = canonical.evidence_id(raw)
        exact = canonical.canonical_bytes(raw)
    except ValueError as error:
        return {}, f"{was}: {excerpt(str(error), 160)}"
    if (problem := _id_problem(raw, computed, evidence_id)) is not None:
        return raw, problem
    if exact != data and raw.get("schema") == SCHEMA:
        return raw, "altered: the content is the same, but not the bytes that were saved"
    return raw, None


def _id_problem(raw: dict[str, Any], computed: str, wanted: str | None) -> str | None:
    claimed = raw.get("evidence_id")
    if computed == claimed and computed == (wanted or claimed):
        return None
    return f"altered: its content hashes to {computed[:12]}…"


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
