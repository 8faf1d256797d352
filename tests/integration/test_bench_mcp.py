"""A benchmark as an agent sees it: the reply, its budget, the call it proposes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.stdio import Wire
from helpers.tiny_models import shared_gguf

SMALL: dict[str, Any] = {"prompt_len": 16, "gen_len": 8, "rounds": 2, "warmup": 1}


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    """A server with locks of its own: a neighbour who measures need not be waited for."""
    with Wire(tmp_path / "home", env={"IKIT_LOCK_DIR": str(tmp_path / "locks")}) as running:
        running.initialize()
        yield running


def test_a_violation_proposes_the_same_call_without_what_is_to_blame(wire: Wire) -> None:
    many = (os.cpu_count() or 1) + 1
    reply = wire.structured("bench", model=str(shared_gguf()), threads=many, **SMALL)
    assert reply["status"] == "done" and reply["valid"] is False
    assert reply["summary"].startswith(f"INVALID as llama.cpp's speed: {many} threads on")
    assert "warnings" in reply or reply["gates"]["violations"]
    (proposed,) = (step for step in reply["next"] if step["tool"] == "bench")
    assert "threads" not in proposed["arguments"] and proposed["arguments"]["prompt_len"] == 16
    assert proposed["arguments"] == {"model": str(shared_gguf()), "engine": "llamacpp", **SMALL}
    again = wire.structured("bench", **proposed["arguments"])
    assert not any("threads" in line for line in again["gates"]["violations"])


def test_the_reply_is_short_and_the_record_has_the_rest(wire: Wire) -> None:
    reply = wire.structured("bench", model=str(shared_gguf()), threads=1, **SMALL)
    assert len(json.dumps(reply)) < 8_000
    assert reply["data"].keys() == {"attention_backend", "flags", "timing", "ceiling"}
    assert any(step["tool"] == "roofline" for step in reply["next"])
    shown = wire.structured("inspect_evidence", id=reply["evidence_id"], path="data.rounds")
    assert shown["total"] == 2 and shown["items"][0]["gen_tokens"] == 8


def test_a_rate_above_its_ceiling_proposes_to_measure_the_ceiling_again(wire: Wire) -> None:
    model = str(shared_gguf())
    low = wire.structured("roofline", model=model, gpu_bw="0.01", context=20)
    reply = wire.structured("bench", model=model, threads=1, roofline=low["evidence_id"], **SMALL)
    assert reply["valid"] is False
    (proposed,) = reply["next"]
    assert proposed["tool"] == "roofline" and "again" in proposed["why"]
    assert proposed["arguments"] == {"model": model, "gpu_bw": "measure", "context": 20}


def test_an_engine_that_is_not_here_is_an_error_with_a_next_step(
    wire: Wire, tmp_path: Path
) -> None:
    result = wire.call("bench", model=str(tmp_path), engine="vllm", python="/no/such/python")
    text = result["content"][0]["text"]
    assert result["isError"] and "/no/such/python" in text and "Next:" in text
