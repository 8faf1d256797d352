"""Benchmarks of the real vLLM on a CPU; ``make engines-vllm`` runs them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from helpers import engine_pythons
from helpers.bench import run_here
from helpers.real_engines import engine_python, nothing_left, work
from helpers.tiny_models import write_folder
from ikit_mcp.call import Cancelled, Progress
from ikit_mcp.registry import OpError
from ikit_ops.engines.gates import common_checks

pytestmark = pytest.mark.timeout(900)
ARGS = ["dtype=bfloat16", "max_model_len=512", "max_num_seqs=4"]
EAGER = [*ARGS, "enforce_eager=true"]
SMALL: dict[str, Any] = {"prompt_len": 256, "gen_len": 32, "rounds": 3, "threads": 1}
PROCESSES = ("vllm_worker.py", "VLLM::", "EngineCore")


@pytest.fixture(scope="module")
def python() -> str:
    return engine_python("vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory, and what it compiled before."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(engine_pythons.cache() / "vllm-cache"))


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine core in the worker's own process: quicker, and not what users run."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def bench(home: Path, python: str, model: Path, **arguments: Any) -> Any:
    usual = SMALL | {"model": str(model), "engine": "vllm", "python": python, "engine_args": EAGER}
    return run_here(home, **usual | arguments)


@pytest.mark.usefixtures("one_process")
def test_eager_mode_is_the_one_violation_of_an_eager_run(
    python: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    record = bench(tmp_path, python, model)
    assert record.valid is False
    (violation,) = record.get("gates", "violations")
    assert violation.startswith("torch.compile off (enforce_eager=True)")
    assert any("VLLM_ATTENTION_BACKEND is set" in w for w in record.get("gates", "warnings"))
    for row in record.get("data", "rounds"):
        assert (row["gen_tokens"], row["prompt_tokens"], row["cached_tokens"]) == (32, 256, 0)
    assert record.get("data", "flags_source") == "worker"
    assert record.get("data", "attention_backend") == "CPU_ATTN"
    assert record.get("data", "flags", "n_threads") == 1
    assert len(record.get("data", "tokens", "ids")) == 32


def test_a_compiled_run_in_the_layout_that_users_run_is_valid(
    python: str, model: Path, tmp_path: Path
) -> None:
    record = bench(tmp_path, python, model, engine_args=ARGS)
    assert record.valid is True, record.get("gates")
    assert record.get("data", "flags_source") == "worker", "asked in another process"
    mode = record.get("data", "flags", "compilation_mode")
    assert mode in ("VLLM_COMPILE", "DYNAMO_TRACE_ONCE"), "by its name"
    assert nothing_left(*PROCESSES)


@pytest.mark.usefixtures("one_process")
def test_a_backend_that_was_asked_for_and_not_used_is_a_violation(
    python: str, model: Path, tmp_path: Path
) -> None:
    engine_args = [*EAGER, "attention_backend=FLASH_ATTN"]
    record = bench(tmp_path, python, model, engine_args=engine_args)
    assert "attention backend FLASH_ATTN was requested, CPU_ATTN ran" in record.get(
        "gates", "violations"
    )


@pytest.mark.usefixtures("one_process")
def test_speculative_decoding_is_a_violation(python: str, model: Path, tmp_path: Path) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}'
    engine_args = [*EAGER, f"speculative_config={drafts}"]
    record = bench(tmp_path, python, model, engine_args=engine_args)
    assert any("speculative decoding" in line for line in record.get("gates", "violations"))


@pytest.mark.usefixtures("one_process")
def test_a_repeated_prompt_with_the_cache_on_is_a_violation(
    python: str, model: Path, tmp_path: Path
) -> None:
    arguments = SMALL | {"model": str(model), "python": python, "engine_args": EAGER}
    seen = work(tmp_path, "vllm", arguments, repeat_prompt=True, read_cache=True)
    assert {c.name: c.state for c in common_checks(seen)}["prefix_cache"] == "violation"
    assert seen.result.rounds[0].cached_tokens == 128, "one of the two blocks of the prompt"


@pytest.mark.usefixtures("one_process")
def test_a_context_that_is_too_small_fails_before_a_round(
    python: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(OpError, match="max_model_len is 512"):
        bench(tmp_path, python, model, prompt_len=500)


@pytest.mark.parametrize("phase", ["load", "round"])
def test_a_cancelled_run_of_many_processes_leaves_none(
    phase: str, python: str, model: Path, tmp_path: Path
) -> None:
    cancel = threading.Event()

    def report(progress: Progress) -> None:
        if f"{phase} " in progress.what:
            cancel.set()

    with pytest.raises(Cancelled):
        bench(tmp_path, python, model, rounds=200, warmup=0, cancel=cancel, report=report)
    assert nothing_left(*PROCESSES)
