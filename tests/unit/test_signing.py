"""Signatures: who vouched for a record, and what is said when that cannot be told."""

from __future__ import annotations

import base64
import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from helpers.records import plant, plant_bytes, save_record
from ikit_mcp.evidence import canonical, signing
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import OpError

Key = ed25519.Ed25519PrivateKey


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def keyed(home: Path) -> tuple[dict[str, str], Key]:
    """A new key of this home, and the private key itself."""
    made = signing.generate_key(home)
    return made, signing.load_signing_key(Path(made["private"]))


def state(home: Path, record: EvidenceRecord) -> dict[str, Any]:
    found = signing.signature_state(record.raw, record.evidence_id, home)
    assert found is not None
    return found


def changed(record: EvidenceRecord, **fields: Any) -> EvidenceRecord:
    """The record with other fields in its envelope."""
    raw = copy.deepcopy(record.raw)
    raw["signature"] |= fields
    return EvidenceRecord(raw, record.evidence_id)


def resigned(record: EvidenceRecord, **fields: Any) -> EvidenceRecord:
    """The record with other fields in its one signature."""
    [signed] = record.raw["signature"]["signatures"]
    return changed(record, signatures=[signed | fields])


def test_a_record_signed_with_a_key_of_this_home_is_trusted(home: Path) -> None:
    made, key = keyed(home)
    record = save_record(home, key=key)
    assert state(home, record) == {
        "key_id": made["key_id"], "ok": True, "trusted": True, "problem": None,
    }  # fmt: skip
    assert Store(home).problems(record.evidence_id) == []
    assert Store(home).require(record.evidence_id).raw == record.raw


def test_a_record_without_signature_has_no_state(home: Path) -> None:
    assert Store(home).signature_state(save_record(home)) is None
    assert signing.signature_state({"signature": None}, "0" * 64, home) is None


def test_the_signature_is_not_part_of_the_id(home: Path) -> None:
    _, key = keyed(home)
    record = save_record(home, key=key)
    body = {k: v for k, v in record.raw.items() if k != "signature"}
    assert canonical.evidence_id(body) == record.evidence_id


def test_any_verifier_of_dsse_and_in_toto_can_check_it(home: Path) -> None:
    made, key = keyed(home)
    record = save_record(home, key=key)
    envelope = record.raw["signature"]
    payload = base64.b64decode(envelope["payload"])
    statement = json.loads(payload)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["digest"] == {"sha256": record.evidence_id}
    kind = envelope["payloadType"].encode()
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    public = serialization.load_pem_public_key(Path(made["public"]).read_bytes())
    assert isinstance(public, ed25519.Ed25519PublicKey)
    public.verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)
    assert signing.pre_authentication_encoding("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"  # the vector of the DSSE document
    )


def test_keys_are_private_files_in_private_folders(home: Path) -> None:
    made, _ = keyed(home)
    for path in (made["private"], made["public"]):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    for folder in (home, home / "keys", home / "keys" / "trusted"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert made["key_id"] in made["private"] and len(made["key_id"]) == 16


def test_an_unknown_key_says_nothing_about_the_record(home: Path, tmp_path: Path) -> None:
    _, stranger = keyed(tmp_path / "other")
    record = save_record(home, key=stranger)
    found = state(home, record)
    assert (found["ok"], found["trusted"]) == (None, False)
    assert "is not one of the trusted ones" in found["problem"]
    assert Store(home).problems(record.evidence_id) == []
    assert Store(home).require(record.evidence_id).evidence_id == record.evidence_id
    keyed(home)  # a key of our own changes nothing about the stranger's
    assert state(home, record)["ok"] is None


def test_a_key_that_is_copied_among_the_trusted_ones_is_trusted(home: Path, tmp_path: Path) -> None:
    made, stranger = keyed(tmp_path / "other")
    record = save_record(home, key=stranger)
    keyed(home)
    public = Path(made["public"])
    (home / "keys" / "trusted" / "colleague.pub").write_bytes(public.read_bytes())
    assert state(home, record)["trusted"] is True


def test_a_signature_of_another_record_is_wrong(home: Path) -> None:
    _, key = keyed(home)
    one, other = save_record(home, 1, key=key), save_record(home, 2, key=key)
    moved = EvidenceRecord({**one.raw, "signature": other.raw["signature"]}, one.evidence_id)
    assert state(home, moved)["problem"] == "the signature is of another record"
    evidence_id = plant(home, moved.raw)
    assert Store(home).problems(evidence_id) == ["the signature is of another record"]
    with pytest.raises(OpError, match="the signature is of another record"):
        Store(home).require(evidence_id)


def test_a_wrong_key_an_altered_payload_or_signature_is_wrong(home: Path) -> None:
    made, key = keyed(home)
    other_made, other = keyed(home)
    record = save_record(home, key=key)
    # Signed by one trusted key, but naming another.
    misnamed = resigned(record, keyid=other_made["key_id"])
    assert state(home, misnamed)["ok"] is False
    assert f"is by key {made['key_id']}" in state(home, misnamed)["problem"]
    # Naming a trusted key, signed by a stranger.
    envelope = signing.sign(record.evidence_id, Key.generate())
    forged = changed(record, **envelope)
    forged = resigned(forged, keyid=made["key_id"])
    assert state(home, forged)["problem"] == f"the signature is not by key {made['key_id']}"
    # Signed by the right key over another payload, or another type.
    payload = json.dumps(
        json.loads(signing.statement(record.evidence_id)) | {"predicate": {"x": 1}}
    )
    raw = key.sign(signing.pre_authentication_encoding(signing.PAYLOAD_TYPE, payload.encode()))
    altered = resigned(
        changed(record, payload=base64.b64encode(payload.encode()).decode()),
        sig=base64.b64encode(raw).decode(),
    )
    assert state(home, altered)["problem"] == "the signature is of another record"
    assert state(home, changed(record, payloadType="text/plain"))["ok"] is False
    assert other is not key


def test_any_changed_character_of_a_trusted_signature_is_found(home: Path) -> None:
    _, key = keyed(home)
    record = save_record(home, key=key)
    path = Store(home).folder(record.evidence_id) / "evidence.json"
    whole = path.read_bytes()
    start = whole.index(b'"signature":')
    for position in range(start, whole.index(b"]}", start) + 2):
        for flip in (0x01, 0x20):
            content = bytearray(whole)
            content[position] ^= flip
            path.write_bytes(content)
            assert Store(home).problems(record.evidence_id) != [], (position, flip)
    path.write_bytes(whole)
    assert Store(home).problems(record.evidence_id) == []


def test_a_signature_that_is_written_another_way_is_wrong(home: Path) -> None:
    _, key = keyed(home)
    record = save_record(home, key=key)
    [signed] = record.raw["signature"]["signatures"]
    sig = signed["sig"]
    other = sig[:-3] + {"A": "B", "Q": "R", "g": "h", "w": "x"}[sig[-3]] + "=="
    assert base64.b64decode(other) == base64.b64decode(sig)
    assert state(home, resigned(record, sig=other))["ok"] is False


GOOD = {"keyid": "0123456789abcdef", "sig": "AAAA"}


@pytest.mark.parametrize(
    "envelope",
    [
        5, "text", [], {}, {"payloadType": "x"}, {"payloadType": 5, "payload": 5, "signatures": 5},
        {"payloadType": "x", "payload": "AAAA", "signatures": []},
        {"payloadType": "x", "payload": "AAAA", "signatures": [GOOD, GOOD]},
        {"payloadType": "x", "payload": "AAAA", "signatures": ["text"]},
        {"payloadType": "x", "payload": "AAAA", "signatures": [{"keyid": "a"}]},
        {"payloadType": "x", "payload": "A", "signatures": [GOOD]},
        {"payloadType": "x", "payload": "AAB=", "signatures": [GOOD]},
        {"payloadType": "x", "payload": "größe", "signatures": [GOOD]},
        {"payloadType": "x", "payload": None, "signatures": [GOOD]},
        {"payloadType": "x", "payload": "AAAA", "signatures": [GOOD | {"keyid": 5}]},
        {"payloadType": "x", "payload": "AAAA", "signatures": [GOOD | {"keyid": "a\nb"}]},
        {"payloadType": "x", "payload": "AAAA", "signatures": [GOOD | {"keyid": "x" * 99}]},
        {"payloadType": "x", "payload": "AAAA", "signatures": {"0": GOOD}},
        {"payloadType": ["x"], "payload": "AAAA", "signatures": [GOOD]},
        {"payloadType": "x", "payload": base64.b64encode(b"[" * 5000).decode(),
         "signatures": [GOOD]},
    ],
)  # fmt: skip
def test_a_hostile_envelope_is_a_wrong_signature_and_nothing_worse(
    home: Path, envelope: Any
) -> None:
    keyed(home)
    found = signing.signature_state({"signature": envelope}, "0" * 64, home)
    assert found is not None and found["ok"] is False and found["trusted"] is False
    assert found["problem"].startswith("the signature is ")


def test_signing_is_refused_with_a_key_that_others_can_read(home: Path) -> None:
    made, _ = keyed(home)
    path = Path(made["private"])
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(OpError, match="can be read by others") as caught:
            signing.load_signing_key(path)
        assert "chmod 600" in caught.value.next_step
    path.chmod(0o400)
    assert signing.load_signing_key(path)


def private_pem(key: Any, password: bytes | None = None) -> bytes:
    hiding: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password is not None:
        hiding = serialization.BestAvailableEncryption(password)
    data: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hiding
    )
    return data


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (private_pem(ec.generate_private_key(ec.SECP256R1())), "is not an Ed25519 key"),
        (private_pem(rsa.generate_private_key(65537, 1024)), "is not an Ed25519 key"),
        (private_pem(Key.generate(), b"password"), "is not an unencrypted PEM private key"),
        (b"", "is not an unencrypted PEM private key"),
        (b"\xff" * 100_000, "is not an unencrypted PEM private key"),
        (private_pem(Key.generate())[:-40], "is not an unencrypted PEM private key"),
    ],
    ids=["ec", "rsa", "encrypted", "empty", "rubbish", "truncated"],
)
def test_a_file_that_is_no_ed25519_key_is_refused(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OpError, match=told) as caught:
        signing.load_signing_key(path)
    assert "keygen" in caught.value.next_step


def test_a_key_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.pem"
    os.mkfifo(pipe, 0o600)
    for path in (tmp_path / "missing.pem", tmp_path, pipe):
        with pytest.raises(OpError, match="cannot read the signing key"):
            signing.load_signing_key(path)


def test_a_key_may_be_named_by_a_link(home: Path, tmp_path: Path) -> None:
    made, _ = keyed(home)
    link = tmp_path / "link.pem"
    link.symlink_to(made["private"])
    assert signing.key_id(signing.load_signing_key(link).public_key()) == made["key_id"]


def test_files_among_the_trusted_keys_that_are_none_are_passed_over(home: Path) -> None:
    _, key = keyed(home)
    record = save_record(home, key=key)
    trusted = home / "keys" / "trusted"
    (trusted / "00.pub").write_bytes(b"rubbish")
    (trusted / "01.pub").mkdir()
    os.mkfifo(trusted / "02.pub")
    (trusted / "03.pub").symlink_to("/nowhere")
    ec_key = ec.generate_private_key(ec.SECP256R1()).public_key()
    (trusted / "04.pub").write_bytes(
        ec_key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    assert state(home, record)["trusted"] is True


def test_trusted_keys_that_others_could_add_to_are_not_trusted(home: Path) -> None:
    _, key = keyed(home)
    record = save_record(home, key=key)
    (home / "keys" / "trusted").chmod(0o777)
    with pytest.raises(OpError, match=r"folder of trusted keys .* can be written by others"):
        state(home, record)


def test_a_key_cannot_be_made_where_nothing_can_be_written(home: Path) -> None:
    plant_bytes(home, "0" * 64, b"{}")
    (home / "keys").write_bytes(b"a file in the way")
    with pytest.raises(OpError, match="cannot write the key"):
        signing.generate_key(home)
