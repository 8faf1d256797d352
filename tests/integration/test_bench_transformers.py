"""Benchmarks of the real transformers, in a Python of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.bench import run_here
from helpers.real_engines import engine_python, nothing_left
from helpers.tiny_models import TINY, write_folder
from ikit_mcp.registry import OpError

SMALL: dict[str, Any] = {"prompt_len": 40, "gen_len": 20, "rounds": 3, "warmup": 1, "threads": 1}


@pytest.fixture(scope="module")
def python() -> str:
    return engine_python("transformers", always=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_transformers_is_measured_and_its_model_object_is_asked(
    python: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IKIT_PYTHONS", python)
    record = run_here(tmp_path, model=str(model), engine="auto", **SMALL)
    assert record.get("identity", "engine", "name") == "transformers"
    assert record.valid is True
    for row in record.get("data", "rounds"):
        assert (row["gen_tokens"], row["prompt_tokens"], row["cached_tokens"]) == (20, 40, 0)
    assert len(record.get("data", "tokens", "ids")) == 20
    flags = record.get("data", "flags")
    assert (flags["dtype"], flags["n_threads"], flags["device"]) == ("bfloat16", 1, "cpu")
    assert record.get("data", "attention_backend") == "sdpa"
    assert record.get("data", "prompt", "vocab_bound") == TINY.vocab
    assert nothing_left("transformers_worker.py")


def test_eager_attention_is_seen_and_is_a_fallback_as_requested(
    python: str, model: Path, tmp_path: Path
) -> None:
    record = run_here(
        tmp_path, model=str(model), engine="transformers", python=python,
        engine_args=["attn_implementation=eager"], **SMALL,
    )  # fmt: skip
    assert record.get("data", "attention_backend") == "eager"
    assert "attention ran on eager, a fallback, as requested" in record.get("gates", "warnings")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine_args": ["nonsense=1"]}, "unknown nonsense"),
        ({"prompt_len": 2040, "gen_len": 20}, "the model was made for 2048 tokens"),
    ],
)
def test_what_the_engine_cannot_do_fails_before_a_round(
    changes: dict[str, Any], words: str, python: str, model: Path, tmp_path: Path
) -> None:
    arguments = SMALL | {"model": str(model), "engine": "transformers", "python": python} | changes
    with pytest.raises(OpError) as caught:
        run_here(tmp_path, **arguments)
    assert words in caught.value.what and "failed in phase" in caught.value.what
