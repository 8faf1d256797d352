"""Signatures of records: Ed25519 over a DSSE envelope around an in-toto statement.

A hash shows that a record was not altered by accident or by somebody who could not
recompute it; a signature shows who vouched for it.  The statement's subject is the
record's id, so that the signature covers every byte the id covers; DSSE's
pre-authentication encoding binds the payload's type, so that a signed payload cannot
be replayed as something else.  Standard tools for both formats can verify it.

Keys are files: ``keys/<keyid>.pem`` (private, 0600) and ``keys/trusted/<keyid>.pub``
under the home.  A verifier says three things apart: no signature, a signature that is
wrong, and a right signature by a key that is (or is not) one of the trusted ones.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.registry import OpError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:ikit:evidence:1"
MAX_KEY_FILE = 16_384


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """The bytes that DSSE signs: type and payload with their lengths."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def statement(evidence_id: str) -> bytes:
    """The in-toto statement of a record, as canonical JSON bytes."""
    made = {
        "_type": STATEMENT_TYPE,
        "predicate": {},
        "predicateType": PREDICATE_TYPE,
        "subject": [{"digest": {"sha256": evidence_id}, "name": "evidence.json"}],
    }
    return json.dumps(made, sort_keys=True, separators=(",", ":")).encode("utf-8")


def key_id(public: Ed25519PublicKey) -> str:
    """The name of a key: the first 16 hex digits of the sha256 of its 32 raw bytes."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:16]


def sign(evidence_id: str, key: Ed25519PrivateKey) -> dict[str, Any]:
    """The DSSE envelope that vouches for this id."""
    payload = statement(evidence_id)
    raw = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode("ascii"),
        "signatures": [
            {"keyid": key_id(key.public_key()), "sig": base64.b64encode(raw).decode("ascii")}
        ],
    }


def load_signing_key(path: Path) -> Ed25519PrivateKey:
    """The private key in a PEM file; OpError when it is unreadable, or open to others."""
    from cryptography.hazmat.primitives import serialization  # 50 ms: only when signing
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    advice = "run `ikit evidence keygen` and set IKIT_SIGNING_KEY to the file it names"
    try:
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise OpError(f"the signing key {path} can be read by others", f"chmod 600 {path}")
        key = serialization.load_pem_private_key(_read_small(path), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise OpError(f"cannot read the signing key {path}: {error}", advice) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise OpError(f"the signing key {path} is not an Ed25519 key", advice)
    return key


def generate_key(home: Path) -> dict[str, str]:
    """Make a key pair under ``home``; its id and the two paths. The new key is trusted here."""
    from cryptography.hazmat.primitives import serialization  # 50 ms: only when a key is made
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    name = key_id(key.public_key())
    private, public = home / "keys" / f"{name}.pem", home / "keys" / "trusted" / f"{name}.pub"
    public.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    for path, data in (
        (private, pem),
        (
            public,
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            ),
        ),
    ):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(data)
    return {"key_id": name, "private": str(private), "public": str(public)}


def signature_state(record: dict[str, Any], evidence_id: str, home: Path) -> dict[str, Any] | None:
    """What a record's signature says: None when it has none.

    Else ``{"key_id", "ok", "trusted", "problem"}``: ``ok`` None where the key is not
    here, so that nothing can be said; ``trusted`` only for a key of ``keys/trusted``.
    """
    envelope = record.get("signature")
    if envelope is None:
        return None
    state: dict[str, Any] = {"key_id": None, "ok": False, "trusted": False, "problem": None}
    try:
        payload_type = envelope["payloadType"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        name = envelope["signatures"][0]["keyid"]
        raw = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        subject = json.loads(payload)["subject"][0]["digest"]["sha256"]
    except (KeyError, IndexError, TypeError, ValueError):
        return {**state, "problem": "the signature is not a DSSE envelope of a statement"}
    shown = name[:64] if isinstance(name, str) else None
    state["key_id"] = shown
    if payload_type != PAYLOAD_TYPE or subject != evidence_id:
        return {**state, "problem": "the signature is of another record"}
    public = _trusted_key(home, shown)
    if public is None:
        return {**state, "ok": None, "problem": f"key {shown} is not one of the trusted ones"}
    if not _verified(public, raw, pre_authentication_encoding(payload_type, payload)):
        return {**state, "problem": f"the signature is not by key {shown}"}
    return {**state, "ok": True, "trusted": True}


def _trusted_key(home: Path, name: str | None) -> Ed25519PublicKey | None:
    """The trusted public key of that id, or None."""
    from cryptography.hazmat.primitives import serialization  # 50 ms: only when verifying
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    folder = home / "keys" / "trusted"
    if name is None or not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.pub")):
        try:
            key = serialization.load_pem_public_key(_read_small(path))
        except (OSError, ValueError):
            continue
        if isinstance(key, Ed25519PublicKey) and key_id(key) == name:
            return key
    return None


def _verified(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # 50 ms: only when verifying

    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _read_small(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_KEY_FILE)
