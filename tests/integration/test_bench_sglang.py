"""Benchmarks of the real SGLang on a CPU; ``make engines-sglang`` runs them.

A CPU without AMX is not a platform that SGLang supports: stubs stand for what it imports and
does not use.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import run_here
from helpers.real_engines import engine_python, nothing_left, work
from helpers.tiny_models import write_folder
from ikit_mcp.call import Cancelled, Progress
from ikit_mcp.registry import OpError
from ikit_ops.engines.gates import common_checks

pytestmark = pytest.mark.timeout(900)
ARGS = ["device=cpu", "context_length=1024", "mem_fraction_static=0.1", "max_total_tokens=8192"]
SMALL: dict[str, Any] = {"prompt_len": 128, "gen_len": 64, "rounds": 3, "threads": 1}
PROCESSES = ("sglang_worker.py", "sglang::")


@pytest.fixture(scope="module")
def python() -> str:
    return engine_python("sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets it import torchvision where there is none."""
    monkeypatch.setenv("IKIT_TEST_STUBS", "torchvision")


def bench(home: Path, python: str, model: Path, **arguments: Any) -> Any:
    usual = SMALL | {"model": str(model), "engine": "sglang", "python": python, "engine_args": ARGS}
    return run_here(home, **usual | arguments)


def test_sglang_is_measured_and_says_what_it_runs(python: str, model: Path, tmp_path: Path) -> None:
    record = bench(tmp_path, python, model)
    assert record.valid is True, record.get("gates")
    for row in record.get("data", "rounds"):
        assert (row["gen_tokens"], row["prompt_tokens"], row["cached_tokens"]) == (64, 128, 0)
    flags = record.get("data", "flags")
    assert record.get("data", "attention_backend") == "torch_native"
    assert flags["decode_graph_used"] is False and flags["decode_batches_without_graph"] > 0
    assert any("torch_native" in line for line in record.get("gates", "warnings"))
    assert len(record.get("data", "tokens", "ids")) == 64
    assert "server_args" not in str(record.raw)
    assert nothing_left(*PROCESSES)


def test_a_repeated_prompt_with_the_cache_on_is_a_violation(
    python: str, model: Path, tmp_path: Path
) -> None:
    arguments = SMALL | {"model": str(model), "python": python, "engine_args": ARGS}
    seen = work(tmp_path, "sglang", arguments, repeat_prompt=True, read_cache=True)
    assert {c.name: c.state for c in common_checks(seen)}["prefix_cache"] == "violation"
    assert seen.result.rounds[0].cached_tokens == 127


def test_a_model_that_cannot_be_loaded_is_told(python: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OpError) as caught:
        bench(tmp_path, python, model, engine_args=[*ARGS, "attention_backend=nonsense"])
    assert "failed in phase load" in caught.value.what


def test_a_cancelled_run_leaves_nothing(python: str, model: Path, tmp_path: Path) -> None:
    cancel = threading.Event()

    def report(progress: Progress) -> None:
        if "round " in progress.what:
            cancel.set()

    with pytest.raises(Cancelled):
        bench(tmp_path, python, model, rounds=200, warmup=0, cancel=cancel, report=report)
    assert nothing_left(*PROCESSES)
