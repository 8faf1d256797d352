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
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ikit_mcp.evidence import canonical, files
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
KEY_ID_PATTERN = re.compile(r"[A-Za-z0-9:+/=._-]{1,64}")


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
    return canonical.canonical_bytes(made)


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
    from cryptography.exceptions import UnsupportedAlgorithm  # 50 ms: only when signing
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    advice = "run `ikit evidence keygen` and set IKIT_SIGNING_KEY to the file it names"
    try:
        data, mode = _read_key(path)
        if os.name == "posix" and mode & 0o077:
            raise OpError(f"the signing key {path} can be read by others", f"chmod 600 {path}")
        key = serialization.load_pem_private_key(data, password=None)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OpError(f"cannot read the signing key {path}: {reason}", advice) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        what = f"the signing key {path} is not an unencrypted PEM private key"
        raise OpError(what, advice) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise OpError(f"the signing key {path} is not an Ed25519 key", advice)
    return key


def generate_key(home: Path) -> dict[str, str]:
    """Make a key pair under ``home``; its id and the two paths. The new key is trusted here."""
    from cryptography.hazmat.primitives import serialization  # 50 ms: only when a key is made
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    name = key_id(key.public_key())
    private, public = home / "keys" / f"{name}.pem", _trusted(home) / f"{name}.pub"
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    shown = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    try:
        files.private_folder(public.parent)
        files.write_private(private, pem)
        files.write_private(public, shown)
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "set IKIT_HOME to a folder that you can write"
        raise OpError(f"cannot write the key {private}: {reason}", advice) from None
    return {"key_id": name, "private": str(private), "public": str(public)}


def _trusted(home: Path) -> Path:
    return home / "keys" / "trusted"


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
        [signed] = envelope["signatures"]
        name, payload_type = signed["keyid"], envelope["payloadType"]
        raw, payload = _decoded(signed["sig"]), _decoded(envelope["payload"])
        if not KEY_ID_PATTERN.fullmatch(name):
            raise ValueError("not a key id")
    except (KeyError, TypeError, ValueError):
        return {**state, "problem": "the signature is not a DSSE envelope with one signature"}
    state["key_id"] = name
    if payload_type != PAYLOAD_TYPE or payload != statement(evidence_id):
        return {**state, "problem": "the signature is of another record"}
    signed_bytes = pre_authentication_encoding(payload_type, payload)
    trusted = _trusted_keys(home)
    # The envelope's key id is a hint that nobody signed: what counts is whose key fits.
    signer = next((i for i, key in trusted.items() if _verified(key, raw, signed_bytes)), None)
    if signer == name:
        return {**state, "ok": True, "trusted": True}
    if signer is not None:
        return {**state, "problem": f"the signature names key {name} but is by key {signer}"}
    if name in trusted:
        return {**state, "problem": f"the signature is not by key {name}"}
    return {**state, "ok": None, "problem": f"key {name} is not one of the trusted ones"}


def _decoded(text: str) -> bytes:
    """The bytes of base64 text; ValueError when it is not the one way to write them."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode("ascii") != text:
        raise ValueError("not canonical base64")
    return data


def _trusted_keys(home: Path) -> dict[str, Ed25519PublicKey]:
    """The trusted public keys by id; OpError when others could put keys among them."""
    from cryptography.exceptions import UnsupportedAlgorithm  # 50 ms: only when verifying
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    files.refuse_shared(_trusted(home), "folder of trusted keys")
    keys = {}
    for path in sorted(_trusted(home).glob("*.pub")):
        try:
            key = serialization.load_pem_public_key(_read_key(path)[0])
        except (OSError, ValueError, UnsupportedAlgorithm):
            continue
        if isinstance(key, Ed25519PublicKey):
            keys[key_id(key)] = key
    return keys


def _verified(key: Ed25519PublicKey, signature: bytes, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # 50 ms: only when verifying

    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True


def _read_key(path: Path) -> tuple[bytes, int]:
    """The bytes and the mode of a key file, which may be a link but must lead to a file."""
    real = path.resolve(strict=True)
    with os.fdopen(files.open_inside(real.parent, [real.name]), "rb") as file:
        return file.read(MAX_KEY_FILE), os.fstat(file.fileno()).st_mode
