"""Benchmarks with the real llama-bench and llama-server; ``make engines-llamacpp`` runs them."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import llama_cpp_binaries
from helpers.bench import run_here
from helpers.real_engines import nothing_left, work
from helpers.tiny_models import Shape, shared_gguf
from ikit_mcp.call import Cancelled, Progress
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import WORKERS
from ikit_ops.engines.gates import common_checks

pytestmark = pytest.mark.timeout(900)
PROCESSES = ("llama-server", "llama-bench", "llamacpp_worker.py")
SMALL: dict[str, Any] = {"prompt_len": 48, "gen_len": 64, "rounds": 3, "threads": 1}
LARGE = Shape(vocab=2048, hidden=2048, layers=6, heads=16, kv_heads=8, feed_forward=5632)
"""583 MB, so that a token takes 20 ms of one core, and what is not the model is lost in it."""
TESTS = Path(__file__).parents[1]


def program(name: str) -> str:
    """The path of a program; skips where it was not built, or not asked for."""
    if "llamacpp" not in os.environ.get("IKIT_TEST_ENGINES", "").split(","):
        pytest.skip("needs a build of minutes: make engines-llamacpp runs it")
    folder = llama_cpp_binaries.programs()
    if folder is None:
        pytest.skip("llama.cpp was not built: make engines-llamacpp builds it")
    return str(folder / name)


@pytest.fixture
def server() -> str:
    return program("llama-server")


@pytest.fixture
def bench_tool() -> str:
    return program("llama-bench")


@pytest.fixture(params=["llama-bench", "llama-server"])
def either(request: pytest.FixtureRequest) -> str:
    return program(request.param)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Whatever a test does, no engine is left running."""
    yield
    assert nothing_left(*PROCESSES)


def bench(home: Path, python: str | None, **arguments: Any) -> EvidenceRecord:
    usual = {"model": str(shared_gguf()), "engine": "llamacpp", **SMALL}
    if python is not None:
        usual["python"] = python
    return run_here(home, **usual | arguments)


# --- what they say ------------------------------------------------------------------------------


def test_both_make_a_valid_record_with_exact_counts(either: str, tmp_path: Path) -> None:
    record = bench(tmp_path, either)
    assert record.valid is True, record.get("gates")
    for number, row in enumerate(record.get("data", "rounds")):
        assert (row["index"], row["finish_reason"]) == (number, "length")
        assert (row["gen_tokens"], row["prompt_tokens"], row["cached_tokens"]) == (64, 48, 0)
        assert 0 < row["ttft_ms"] < row["total_ms"]
        assert row["t_start"] < row["t_end"]
    assert number == 2
    assert record.get("data", "platform") == "cpu"
    assert record.get("data", "devices") == [{"name": "CPU", "type": "cpu"}]
    assert record.get("identity", "model", "dtype") == "F16"
    (missing,) = record.get("coverage", "missing")[-1:]
    assert "flash attention" not in missing


def test_what_a_build_from_a_tarball_does_not_know_is_not_told(either: str, tmp_path: Path) -> None:
    done = subprocess.run([either, "--version"], capture_output=True, text=True, check=True)
    assert "(build 0, commit unknown)" in done.stdout + done.stderr
    record = bench(tmp_path, either, rounds=1, warmup=0)
    version = record.get("identity", "engine", "version")
    assert version == (done.stdout + done.stderr).split()[1]
    assert version[0].isdigit() and version != "0"
    assert "build_number" not in record.get("data", "flags")
    assert "unknown" not in json.dumps(record.get("data", "flags"))


def test_flags_are_what_ran_and_say_where_they_come_from(either: str, tmp_path: Path) -> None:
    record = bench(tmp_path, either, engine_args=["--cache-type-k q8_0", "-ctv q8_0"])
    flags = record.get("data", "flags")
    assert (flags["n_threads"], flags["flash_attn"]) == (1, True), "it was left on auto"
    assert flags["cache_type_k"] == flags["cache_type_v"] == "q8_0"
    assert flags["kv_cache_in"] == ["CPU"] and flags["n_batch"] > 0
    assert record.get("data", "attention_backend") == "flash_attn"
    assert (
        record.get("data", "flags_source")
        == {
            "llama-bench": "llama-bench JSON (what was asked for) and log (what it did)",
            "llama-server": "server /props and log",
        }[Path(either).name]
    )
    assert "requested_flags" in record.get("gates", "checked") and record.valid is True


def test_llama_bench_decodes_behind_the_prompt_after_the_warm_up_that_was_asked(
    bench_tool: str, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    record = bench(tmp_path, bench_tool, warmup=3, round_offset=4, report=seen.append)
    assert record.get("data", "flags", "n_depth") == SMALL["prompt_len"]
    rows = record.get("data", "rounds")
    assert [row["index"] for row in rows] == [4, 5, 6], "of six repetitions the last three"
    # A start is when its line was read: on a busy machine that is late, but never out of order.
    assert rows[0]["t_start"] <= rows[1]["t_start"] <= rows[2]["t_start"]
    assert all(row["t_start"] < row["t_end"] for row in rows)
    assert "samples nothing" in record.get("data", "notes")[0]
    assert record.get("data", "tokens") is None
    done = [progress.done for progress in seen]
    assert done == sorted(done)


def test_two_runs_of_one_server_answer_the_reference_alike(server: str, tmp_path: Path) -> None:
    first = bench(tmp_path, server, rounds=1)
    again = bench(tmp_path, server, rounds=1, reference=first.evidence_id)
    assert again.get("data", "reference", "same") is True


# --- gates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{"engine_args": ["-ngl 0"]}, {"device": "cpu"}, {"engine_args": ["-fa on"]},
     {"engine_args": ["-fa auto"]}, {"engine_args": ["-fa 1"]}, {"engine_args": ["--device none"]},
     {"engine_args": ["-t 1"], "threads": None}],
)  # fmt: skip
def test_healthy_settings_are_not_blamed(
    either: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    record = bench(tmp_path, either, **arguments)
    assert record.valid is True, record.get("gates", "violations")
    warnings = record.get("gates", "warnings")
    assert not any("requested" in line or "flash" in line for line in warnings)


def test_a_cache_that_is_kept_off_a_gpu_is_no_fault_without_one(
    either: str, tmp_path: Path
) -> None:
    option = "-nkvo 1" if either.endswith("bench") else "--no-kv-offload"
    assert bench(tmp_path, either, engine_args=[option]).valid is True


def test_flash_attention_that_is_off_is_seen(either: str, tmp_path: Path) -> None:
    record = bench(tmp_path, either, engine_args=["--flash-attn off"])
    assert record.get("data", "flags", "flash_attn") is False
    assert record.get("data", "attention_backend") == "no flash_attn"
    assert any("flash attention was off" in line for line in record.get("gates", "warnings"))


def test_layers_that_were_to_be_on_a_gpu_and_are_not_are_a_violation(
    either: str, tmp_path: Path
) -> None:
    record = bench(tmp_path, either, engine_args=["-ngl 99"])
    (violation,) = record.get("gates", "violations")
    assert violation == "n_gpu_layers 99 was requested, and everything ran on the CPU"


def test_more_threads_than_cores_are_a_violation(either: str, tmp_path: Path) -> None:
    many = (os.cpu_count() or 1) + 1
    record = bench(tmp_path, either, threads=many, gen_len=4, prompt_len=4, rounds=1, warmup=0)
    assert record.get("data", "flags", "n_threads") == many
    assert any(f"{many} threads on" in line for line in record.get("gates", "violations"))


def test_speculative_decoding_of_the_server_is_a_violation(server: str, tmp_path: Path) -> None:
    record = bench(tmp_path, server, engine_args=["--spec-type ngram-simple"])
    assert any("speculative" in line for line in record.get("gates", "violations"))


def test_a_repeated_prompt_with_the_cache_on_is_a_violation(server: str, tmp_path: Path) -> None:
    arguments = {"model": str(shared_gguf()), **SMALL}
    seen = work(tmp_path, "llamacpp", arguments, program=server, repeat_prompt=True,
                read_cache=True)  # fmt: skip
    assert {c.name: c.state for c in common_checks(seen)}["prefix_cache"] == "violation"
    assert seen.result.rounds[0].cached_tokens == 47


def test_a_cache_of_another_format_than_the_ceilings_is_told(either: str, tmp_path: Path) -> None:
    ceiling = run_here(tmp_path, "roofline", model=str(shared_gguf()), gpu_bw="1000")
    record = bench(tmp_path, either, engine_args=["-ctk q8_0"], roofline=ceiling.evidence_id)
    assert record.metric("pct_of_ceiling") is not None
    assert any("the engine's is q8_0" in line for line in record.get("gates", "warnings"))


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nonsense 5", "--nonsense"),
        ("--cache-type-k q99", "--cache-type-k"),
        ("--device CUDA0", "invalid device: CUDA0"),
        ("-ctv q8_0 -fa off", "quantized V cache requires flash_attn"),
        ("--version", "version: "),
        ("--list-devices", "llama-"),
    ],
)
def test_what_the_program_does_not_do_is_told_in_its_own_words(
    either: str, option: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(OpError) as caught:
        bench(tmp_path, either, engine_args=[option])
    assert "failed in phase load: llama-" in caught.value.what and words in caught.value.what


def test_a_model_that_cannot_be_loaded_is_told(either: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    data = shared_gguf().read_bytes()
    broken.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(OpError) as caught:
        bench(tmp_path / "home", either, model=str(broken))
    assert "failed in phase load" in caught.value.what
    assert "blk.0.attn_q.weight" in caught.value.what


def test_several_tests_of_llama_bench_are_not_one_benchmark(
    bench_tool: str, tmp_path: Path
) -> None:
    for option in ("-t 1,2", "-t 1-2", "--ubatch-size 32,64"):
        with pytest.raises(OpError, match="has several values"):
            bench(tmp_path, bench_tool, engine_args=[option], threads=None)
    with pytest.raises(OpError, match="results of 2 tests, not of one"):
        bench(tmp_path, bench_tool, engine_args=["-b 32", "-b 64"])


def test_a_context_too_small_is_told_in_warm_up(server: str, tmp_path: Path) -> None:
    with pytest.raises(OpError) as caught:
        bench(tmp_path, server, prompt_len=300, gen_len=100, engine_args=["--ctx-size 256"])
    assert "failed in phase warm-up" in caught.value.what and "exceed" in caught.value.what


def test_another_server_at_the_port_is_not_measured(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(WORKERS))
    import ikit_harness as harness
    import llamacpp_worker as worker

    config = {"program": server, "options": ["--threads", "1"], "vocabulary": 2048}
    other = worker.LlamaServer(config | {"model": str(shared_gguf())})
    other.load()
    try:
        port = other.connection.port
        monkeypatch.setattr(worker, "free_port", lambda: port)
        model = tmp_path / "mine.gguf"
        model.write_bytes(shared_gguf().read_bytes())
        mine = worker.LlamaServer(config | {"model": str(model)})
        with pytest.raises(harness.Stopped, match=r"another server|ended with status 1"):
            mine.load()
        mine.close()
    finally:
        other.close()


# --- ends -----------------------------------------------------------------------------------------

PHASES = [("llama-server", phase) for phase in
          ("load", "warm-up", "round", "two-call check", "reference")]  # fmt: skip
PHASES += [("llama-bench", "load"), ("llama-bench", "round")]


def in_phase(phase: str, act: Callable[[], object]) -> Callable[[Progress], None]:
    """A reporter that acts, once, when the phase is reported."""
    acted: list[bool] = []

    def report(progress: Progress) -> None:
        if f": {phase} " in progress.what and not acted:
            acted.append(True)
            act()

    return report


@pytest.mark.parametrize(("name", "phase"), PHASES)
def test_a_cancelled_benchmark_leaves_no_process_and_no_record(
    name: str, phase: str, tmp_path: Path
) -> None:
    tool = program(name)
    cancel = threading.Event()
    many = {"rounds": 200} if phase in ("load", "round") else {"rounds": 1}
    with pytest.raises(Cancelled):
        bench(
            tmp_path, tool, model=str(shared_gguf(LARGE)), gen_len=80, prompt_len=64, warmup=1,
            cancel=cancel, report=in_phase(phase, cancel.set), **many,
        )  # fmt: skip
    assert nothing_left(*PROCESSES)
    assert not list(tmp_path.glob("evidence/*/*"))


def kill_below_us(name: str) -> None:
    """End the program, and it alone, as the kernel does when memory runs out."""
    for child in psutil.Process().children(recursive=True):
        if child.name() == name:
            child.send_signal(signal.SIGKILL)


def test_a_program_that_is_killed_in_its_rounds_is_told(either: str, tmp_path: Path) -> None:
    name = Path(either).name
    with pytest.raises(OpError) as caught:
        bench(
            tmp_path, either, model=str(shared_gguf(LARGE)), rounds=200, warmup=0,
            report=in_phase("round", lambda: kill_below_us(name)),
        )  # fmt: skip
    assert "failed in phase round" in caught.value.what
    assert f"{name} was ended by SIGKILL" in caught.value.what
    assert not list(tmp_path.glob("evidence/*/*"))


# --- agreement ------------------------------------------------------------------------------------

LONG: dict[str, Any] = {"prompt_len": 64, "gen_len": 80, "rounds": 2, "warmup": 1}
FEWEST, MOST = 5, 9
SURE = 0.01
"""The standard error of a median that can carry a statement about 2 %."""


def standard_error(values: list[float]) -> float:
    """Of their median, by the median deviation, which a few disturbed values do not move."""
    middle = statistics.median(values)
    deviation = statistics.median(abs(value - middle) for value in values)
    return float(1.2533 * 1.4826 * deviation / len(values) ** 0.5)


def test_the_server_is_as_fast_by_our_stamps_as_by_its_own_and_by_llama_bench(
    server: str, bench_tool: str, tmp_path: Path
) -> None:
    model = str(shared_gguf(LARGE))
    apart: list[float] = []
    ratios: list[float] = []
    while len(ratios) < FEWEST or (standard_error(ratios) > SURE and len(ratios) < MOST):
        rates = {}
        # The other order each time: what drifts on a shared machine falls out.
        for tool in (server, bench_tool)[:: -1 if len(ratios) % 2 else 1]:
            record = bench(tmp_path, tool, model=model, **LONG)
            assert record.valid is True, record.get("gates")
            rates[tool] = record.metric("decode_tok_s") or 0.0
            if tool == server:
                rows = record.get("data", "rounds")
                apart += [row["decode_tok_s"] / row["engine_decode_tok_s"] for row in rows]
        ratios.append(rates[server] / rates[bench_tool])
    by_itself, by_bench = statistics.median(apart) - 1, statistics.median(ratios) - 1
    told = (
        f"our rate against the server's own {by_itself:+.3%}, against llama-bench's "
        f"{by_bench:+.2%} (standard error {standard_error(ratios):.2%}, {len(ratios)} pairs)"
    )
    print("\n" + told)
    assert abs(by_itself) <= 0.02, told
    if standard_error(ratios) > SURE:
        pytest.skip(f"too much noise to compare two programs: {told}")
    assert abs(by_bench) <= 0.02, told


def test_the_embedded_server_agrees_with_its_own_clock(server: str, tmp_path: Path) -> None:
    record = bench(tmp_path, None, model=str(shared_gguf(LARGE)), **LONG)
    rows = record.get("data", "rounds")
    apart = statistics.median(row["decode_tok_s"] / row["engine_decode_tok_s"] for row in rows)
    assert apart == pytest.approx(1.0, abs=0.02)


# --- how they are had -----------------------------------------------------------------------------


def test_without_a_compiler_the_reason_is_printed_and_nothing_is_fetched(tmp_path: Path) -> None:
    environment = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path),
                   "PYTHONPATH": str(TESTS)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "helpers.engine_pythons", "llamacpp"],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == "llamacpp: SKIPPED: no C++ compiler is here\n"
    assert list(tmp_path.iterdir()) == []
