"""Evidence read back by a real client: pages, altered records, resources, completion."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.evidence import flip_a_byte, save
from helpers.stdio import Wire
from ikit_mcp.evidence.store import Store

BUDGET = 24_000
SAVER = """
import sys, time
from pathlib import Path
from helpers.evidence import save
for number in range(1000, 1400):
    save(Path(sys.argv[1]), number, started=sys.argv[2] if len(sys.argv) > 2 else None)
    print(number, flush=True)
"""


def size(result: dict[str, Any]) -> int:
    """Characters of a reply as a client receives it: text and structured content."""
    text = sum(len(part.get("text", "")) for part in result["content"])
    return text + len(json.dumps(result.get("structuredContent", {}), ensure_ascii=False))


def test_an_altered_record_is_shown_as_failing(tmp_path: Path) -> None:
    record = save(tmp_path, 1)
    with Wire(tmp_path) as wire:
        wire.initialize()
        before = wire.structured("inspect_evidence", id=record.evidence_id)
        assert before["integrity"] == {"ok": True, "problem": None, "signature": None}
        flip_a_byte(tmp_path, record.evidence_id, b"record 1")
        after = wire.structured("inspect_evidence", id=record.evidence_id)
        assert after["integrity"]["ok"] is False and "altered" in after["integrity"]["problem"]
        [item] = wire.structured("list_evidence")["items"]
        assert "altered" in item["problem"] and item["valid"] is None
        checked = wire.structured("verify_evidence")
        assert checked["ok"] is False
        assert checked["problems"][0]["evidence_id"] == record.evidence_id


def test_an_altered_ceiling_is_refused_as_bandwidth(tmp_path: Path, llama: Path) -> None:
    home = tmp_path / "home"
    record = save(home, 1, kind="ceiling", gbs=1234.5)
    with Wire(home) as wire:
        wire.initialize()
        sound = wire.structured("roofline", model=str(llama), gpu_bw=record.evidence_id[:12])
        numbers = {m["name"]: m["value"] for m in sound["metrics"]}
        assert numbers["bandwidth_gbs"] == 1234.5
        assert (numbers["weight_bytes"], numbers["kv_bytes"]) == (15_009_857_536, 134_217_728)
        flip_a_byte(home, record.evidence_id, b"1234.5")
        result = wire.call("roofline", model=str(llama), gpu_bw=record.evidence_id)
        assert result["isError"] and "fails its check" in result["content"][0]["text"]
        assert wire.structured("list_evidence", kind="roofline")["total"] == 1


@pytest.mark.parametrize("started", [None, "2026-01-01T00:00:00Z"])
def test_following_next_while_another_process_saves_skips_and_repeats_nothing(
    tmp_path: Path, started: str | None
) -> None:
    there = {save(tmp_path, n, started=started).evidence_id for n in range(45)}
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    argv = [sys.executable, "-c", SAVER, str(tmp_path), *([started] if started else [])]
    with Wire(tmp_path) as wire, subprocess.Popen(argv, stdout=subprocess.PIPE, env=env) as saver:
        wire.initialize()
        assert saver.stdout is not None
        seen: list[str] = []
        arguments: dict[str, Any] = {"limit": 4}
        while True:
            saver.stdout.readline()  # at least one more record between two pages
            page = wire.structured("list_evidence", **arguments)
            seen += [item["evidence_id"] for item in page["items"]]
            if not page.get("next") or there <= set(seen):
                break
            arguments = page["next"][0]["arguments"]
        saver.kill()
    assert there <= set(seen)
    assert len(seen) == len(set(seen))


def test_no_reply_is_over_its_budget_however_large_the_record(tmp_path: Path) -> None:
    data = {
        "rows": [{"name": f"kernel {n}", "text": "é" * 300} for n in range(500)],
        "log": "line\n" * 40_000,
        "wide": {f"tensor.{n}.weight": "x" * 50 for n in range(3_000)},
        "deep": {"a": {"b": {"c": ["y" * 5_000] * 40}}},
    }
    record = save(tmp_path, 1, data=data)
    with Wire(tmp_path) as wire:
        wire.initialize()
        for path in (None, "data", "data.rows", "data.log", "data.wide", "data.deep", "data.rows.3",
                     "data.deep.a.b.c"):  # fmt: skip
            arguments = {"id": record.evidence_id, "limit": 1000}
            result = wire.call("inspect_evidence", **arguments, **({"path": path} if path else {}))
            assert not result["isError"] and size(result) <= BUDGET, path
        named = wire.structured(
            "inspect_evidence", id=record.evidence_id, path="data.rows.kernel 7"
        )
        assert named["value"] == data["rows"][7]  # type: ignore[index]
        contents = wire.ask("resources/read", {"uri": f"evidence://{record.evidence_id}"})()
        assert len(contents["result"]["contents"][0]["text"]) <= BUDGET


def test_pages_of_a_record_joined_are_the_whole(tmp_path: Path) -> None:
    data = {"rows": [f"row {n} " + "z" * (n % 700) for n in range(300)], "log": "äöü\n" * 9_000}
    record = save(tmp_path, 1, data=data)
    with Wire(tmp_path) as wire:
        wire.initialize()
        for path, key in (("data.rows", "items"), ("data.log", "value")):
            parts: Any = data[path.split(".")[1]][:0]
            arguments: dict[str, Any] | None = {"id": record.evidence_id[:8], "path": path}
            while arguments is not None:
                page = wire.structured("inspect_evidence", **arguments)
                parts = parts + page[key]
                arguments = page["next"][0]["arguments"] if page.get("next") else None
            assert parts == data[path.split(".")[1]]


def test_resources_are_listed_in_pages_read_and_completed(tmp_path: Path) -> None:
    ids = {save(tmp_path, n).evidence_id for n in range(95)}
    with Wire(tmp_path) as wire:
        wire.initialize()
        uris: list[str] = []
        cursor: dict[str, Any] = {}
        while True:
            page = wire.ask("resources/list", cursor)()["result"]
            uris += [resource["uri"] for resource in page["resources"]]
            if "nextCursor" not in page:
                break
            cursor = {"cursor": page["nextCursor"]}
        assert sorted(uris) == sorted(f"evidence://{i}" for i in ids)
        assert wire.ask("resources/list", {"cursor": "rubbish"})()["error"]["code"] == -32602
        text = wire.ask("resources/read", {"uri": uris[0]})()["result"]["contents"][0]["text"]
        assert json.loads(text)["evidence_id"] == uris[0].removeprefix("evidence://")
        typed = uris[0].removeprefix("evidence://")[:7]
        ref = {"type": "ref/resource", "uri": "evidence://{id}"}
        asked = {"ref": ref, "argument": {"name": "id", "value": typed}}
        values = wire.ask("completion/complete", asked)()["result"]["completion"]["values"]
        assert uris[0].removeprefix("evidence://") in values


def test_an_artifact_is_read_as_a_resource_in_pieces_that_join_to_the_whole(tmp_path: Path) -> None:
    text = "".join(f"größe {n}\n" for n in range(6_000))
    blob = bytes(range(256)) * 150
    record = save(
        tmp_path,
        artifacts={
            "log.txt": (text.encode(), "text/plain"),
            "blob.bin": (blob, "application/octet-stream"),
        },
    )
    with Wire(tmp_path) as wire:
        wire.initialize()
        for name, whole in (("log.txt", text), ("blob.bin", blob)):
            uri: str | None = f"evidence://{record.evidence_id}/{name}"
            parts: list[Any] = []
            while uri is not None:
                [piece] = wire.ask("resources/read", {"uri": uri})()["result"]["contents"]
                assert len(json.dumps(piece, ensure_ascii=False)) <= BUDGET
                parts.append(piece["text"] if "text" in piece else base64.b64decode(piece["blob"]))
                uri = piece["_meta"].get("next")
            assert len(parts) > 1
            assert (b"" if isinstance(whole, bytes) else "").join(parts) == whole
        stored = Store(tmp_path).folder(record.evidence_id) / "log.txt"
        stored.write_bytes(stored.read_bytes().replace(b"1\n", b"2\n", 1))
        uri = f"evidence://{record.evidence_id}/log.txt"
        [piece] = wire.ask("resources/read", {"uri": uri})()["result"]["contents"]
        assert "altered" in piece["_meta"]["problem"]
        for name in ("nothing.txt", "../evidence.json", ".hidden", "evidence.json"):
            uri = f"evidence://{record.evidence_id}/{name}"
            assert wire.ask("resources/read", {"uri": uri})()["error"]["code"] == -32602
