"""Benchmarks of the real llama.cpp: embedded, and as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import json_schema
from helpers.bench import run_here
from helpers.evidence import save
from helpers.tiny_models import SLOW, shared_gguf
from ikit_mcp.call import Call, Cancelled, Progress, Settings
from ikit_mcp.evidence import record as records
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import EXECUTES, OpError, load
from ikit_ops.engines import adapter_named
from ikit_ops.engines.adapter import WORKERS, Found
from ikit_ops.engines.gates import Seen, common_checks
from ikit_ops.engines.planning import make_plan
from ikit_ops.engines.replay import replay
from ikit_ops.engines.result import parse

FAKES = Path(__file__).parents[1] / "fakes"
SMALL: dict[str, Any] = {"prompt_len": 48, "gen_len": 64, "rounds": 3, "threads": 1}


def bench(home: Path, **arguments: Any) -> EvidenceRecord:
    return run_here(home, **{"model": str(shared_gguf()), **SMALL, **arguments})


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> EvidenceRecord:
    """One benchmark of the embedded engine with everything at its default."""
    return bench(tmp_path_factory.mktemp("home"))


def test_the_embedded_engine_leaves_a_valid_record_of_the_published_schema(
    record: EvidenceRecord,
) -> None:
    assert record.valid is True and record.problem is None
    assert json_schema.errors(records.json_schema(), record.raw) == []
    assert record.kind == "bench" and record.get("claim_class") == "measured"


def test_every_round_has_exact_counts_stamps_and_no_cached_token(record: EvidenceRecord) -> None:
    rounds = record.get("data", "rounds")
    assert [row["index"] for row in rounds] == [0, 1, 2]
    for row in rounds:
        assert (row["gen_tokens"], row["prompt_tokens"], row["cached_tokens"]) == (64, 48, 0)
        assert row["finish_reason"] == "length"
        assert 0 < row["ttft_ms"] < row["total_ms"]
        assert row["t_start"] < row["t_end"]
        assert row["decode_tok_s"] == pytest.approx(1e3 / row["tpot_ms"])
    starts = [row["t_start"] for row in rounds]
    assert starts == sorted(starts)


def test_metrics_are_medians_of_their_samples(record: EvidenceRecord) -> None:
    metrics = {entry["name"]: entry for entry in record.get("metrics")}
    for name in ("decode_tok_s", "tpot_ms", "ttft_ms", "total_ms", "prefill_tok_s"):
        assert metrics[name]["stat"] == "median"
        assert metrics[name]["value"] == sorted(metrics[name]["samples"])[1]
    assert metrics["peak_device_memory_bytes"]["value"] > 2**20
    assert metrics["load_s"]["value"] > 0


def test_flags_are_those_that_the_server_says_it_runs(record: EvidenceRecord) -> None:
    flags = record.get("data", "flags")
    assert flags["n_threads"] == 1 and flags["flash_attn"] is True
    assert flags["cache_type_k"] == flags["cache_type_v"] == "f16"
    assert flags["n_ctx"] >= 112 and flags["model_ftype"] == "F16"
    assert record.get("identity", "workload", "threads") == 1
    assert record.get("identity", "model", "id") == str(shared_gguf())


def test_the_request_is_pinned_and_can_be_made_again(record: EvidenceRecord) -> None:
    args = record.get("provenance", "request", "args")
    assert (args["engine"], args["device"], args["threads"]) == ("llamacpp", "cpu", 1)
    assert record.get("provenance", "request", "requested") == {"device": "auto", "engine": "auto"}
    assert "--engine llamacpp" in record.get("provenance", "reproduce")


def test_the_reference_tokens_of_two_runs_are_compared(
    record: EvidenceRecord, tmp_path: Path
) -> None:
    home = record.folder.parents[2] if record.folder else tmp_path
    again = bench(home, reference=record.evidence_id)
    assert again.get("data", "reference", "same") is True
    assert "reference" in again.get("gates", "checked")
    assert record.evidence_id in again.get("provenance", "parents")
    other = bench(home, reference=record.evidence_id, seed=5)
    assert other.get("data", "reference", "same") is None
    assert any("seed differs" in line for line in other.get("coverage", "missing"))


def test_two_runs_one_after_the_other_are_never_called_faster(
    record: EvidenceRecord, tmp_path: Path
) -> None:
    home = record.folder.parents[2] if record.folder else tmp_path
    other = bench(home, engine_args=["--flash-attn off"])
    compared = run_here(
        home, "compare_evidence", baseline=record.evidence_id, candidate=other.evidence_id
    )
    assert compared.valid is None and compared.get("data", "verdict") == "not_established"
    fields = {d["field"] for d in compared.get("data", "differences")}
    assert "data.flags.flash_attn" in fields
    assert "faster" not in json.dumps(compared.raw) and "slower" not in json.dumps(compared.raw)


def test_a_round_offset_numbers_the_rounds_on(tmp_path: Path) -> None:
    record = bench(tmp_path, round_offset=7, rounds=2)
    assert [row["index"] for row in record.get("data", "rounds")] == [7, 8]


def test_decode_agrees_with_the_servers_own_clock(tmp_path: Path) -> None:
    record = bench(
        tmp_path, model=str(shared_gguf(SLOW)), prompt_len=16, gen_len=400, rounds=3, warmup=1
    )
    rows = record.get("data", "rounds")
    # The best of three: on a busy machine our process may be put aside when a token comes.
    apart = min(abs(row["decode_tok_s"] / row["engine_decode_tok_s"] - 1) for row in rows)
    assert apart <= 0.02


# --- misconfigurations, really set up -----------------------------------------------------------


def test_more_threads_than_cores_are_a_violation(tmp_path: Path) -> None:
    many = (os.cpu_count() or 1) + 1
    record = bench(tmp_path, threads=many, gen_len=4, prompt_len=4, rounds=1, warmup=0)
    assert record.valid is False
    assert any(f"{many} threads on" in line for line in record.get("gates", "violations"))


def test_a_backend_that_was_switched_off_is_seen(tmp_path: Path) -> None:
    record = bench(tmp_path, engine_args=["--flash-attn off"])
    assert record.get("data", "attention_backend") == "no flash_attn"
    assert record.get("gates", "warnings")[-1].startswith("flash attention was off")


def test_speculative_decoding_is_a_violation(tmp_path: Path) -> None:
    record = bench(tmp_path, engine_args=["--spec-type ngram-simple"])
    assert record.valid is False
    assert any("speculative" in line for line in record.get("gates", "violations"))


def test_a_context_too_small_is_a_violation_or_told_in_warm_up(tmp_path: Path) -> None:
    with pytest.raises(OpError) as caught:
        bench(tmp_path, prompt_len=300, gen_len=100, engine_args=["--ctx-size 256"])
    assert "failed in phase warm-up" in caught.value.what
    assert "exceed" in caught.value.what


def caller(home: Path) -> Call:
    operation = load(None).get("bench")
    return Call(operation=operation, args={}, settings=Settings(home), scope=EXECUTES)


def work(tmp_path: Path, **config: Any) -> Any:
    """Run the worker itself, with a configuration that no operation would write."""
    call = caller(tmp_path)
    args = {arg.name: arg.default for arg in call.operation.args}
    args |= {"model": str(shared_gguf()), "engine": "llamacpp", **SMALL}
    adapter, plan = make_plan(call, args)
    made = adapter.config(plan, Found()) | {"result_path": str(tmp_path / "result.json")} | config
    (tmp_path / "config.json").write_text(json.dumps(made), encoding="utf-8")
    argv = [sys.executable, str(WORKERS / adapter.worker), str(tmp_path / "config.json")]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    result = parse((tmp_path / "result.json").read_bytes())
    return Seen(plan=plan, result=result, platform="cpu", requested={}, usable_threads=8)


def test_a_repeated_prompt_with_the_cache_on_is_a_violation(tmp_path: Path) -> None:
    seen = work(tmp_path, repeat_prompt=True, read_cache=True)
    states = {c.name: c.state for c in common_checks(seen)}
    assert states["prefix_cache"] == "violation"
    assert seen.result.rounds[0].cached_tokens == 47


def test_a_repeated_prompt_with_the_cache_off_hits_nothing(tmp_path: Path) -> None:
    seen = work(tmp_path, repeat_prompt=True)
    assert {c.name: c.state for c in common_checks(seen)}["prefix_cache"] == "ok"


# --- the ceiling ------------------------------------------------------------------------------


def roofline(home: Path, **arguments: Any) -> EvidenceRecord:
    return run_here(home, "roofline", **{"model": str(shared_gguf()), **arguments})


def test_the_ceiling_is_asked_again_at_the_context_that_was_decoded(tmp_path: Path) -> None:
    given = roofline(tmp_path, gpu_bw="1000", context=1)
    record = bench(tmp_path, roofline=given.evidence_id)
    parents = record.get("provenance", "parents")
    assert parents[0] == given.evidence_id and len(parents) == 2
    ceiling = record.get("data", "ceiling")
    assert ceiling["context"] == 48 + 32 and ceiling["mismatches"] == []
    share = record.metric("pct_of_ceiling")
    rate = record.metric("decode_tok_s")
    assert share is not None and rate is not None
    assert share == pytest.approx(rate / ceiling["ceiling_tok_s"] * 100)
    assert "of the ceiling" in record.summary
    assert any("bandwidth is the user's" in line for line in record.get("limitations"))


def test_a_rate_above_the_ceiling_is_a_violation(tmp_path: Path) -> None:
    given = roofline(tmp_path, gpu_bw="0.01", context=80)
    record = bench(tmp_path, roofline=given.evidence_id)
    assert record.valid is False
    assert any("is above the ceiling of" in line for line in record.get("gates", "violations"))
    assert record.get("provenance", "parents") == [given.evidence_id]


def test_a_model_in_the_cache_may_beat_the_bandwidth_that_was_measured(tmp_path: Path) -> None:
    measured = save(tmp_path, kind="ceiling", gbs=0.01)
    given = roofline(tmp_path, gpu_bw=measured.evidence_id, context=80)
    record = bench(tmp_path, roofline=given.evidence_id)
    (warning,) = (w for w in record.get("gates", "warnings") if "above the ceiling" in w)
    assert "last-level cache can hold" in warning and record.valid is True


def test_a_ceiling_of_other_threads_or_of_another_model_gives_no_share(tmp_path: Path) -> None:
    measured = save(tmp_path, kind="ceiling", gbs=1000.0)
    other = roofline(tmp_path, model=str(shared_gguf(SLOW)), gpu_bw=measured.evidence_id)
    record = bench(tmp_path, roofline=other.evidence_id)
    assert record.metric("pct_of_ceiling") is None
    missing = record.get("coverage", "missing")
    assert any("of another model" in line for line in missing)
    assert not any("above the ceiling" in line for line in record.get("gates", "violations"))


def test_only_a_sound_record_of_the_kind_is_taken(tmp_path: Path) -> None:
    with pytest.raises(OpError, match="not a roofline record"):
        bench(tmp_path, roofline=save_ceiling(tmp_path))
    with pytest.raises(OpError, match="not a bench record"):
        bench(tmp_path, reference=save_ceiling(tmp_path))


def save_ceiling(home: Path) -> str:
    return save(home, 7, kind="ceiling").evidence_id


# --- a profiler's replay ------------------------------------------------------------------------


def test_a_benchmark_can_be_prepared_to_run_again_under_a_profiler(
    record: EvidenceRecord, tmp_path: Path
) -> None:
    prepared = replay(caller(tmp_path / "home"), record, tmp_path, steps=10)
    assert prepared.plan.gen_len == 10 and prepared.plan.rounds == 1
    assert prepared.plan.nonce != record.get("data", "prompt", "nonce")
    environment = {**os.environ, **prepared.environment}
    subprocess.run(prepared.argv, check=True, env=environment, capture_output=True, timeout=60)
    result = parse(prepared.result.read_bytes())
    assert [row.gen_tokens for row in result.rounds] == [10]
    assert result.captured is False, "there is no range to open on a CPU"
    assert result.tokens is None and result.two_call is None


def test_what_is_not_ours_to_start_is_not_prepared(tmp_path: Path) -> None:
    call = caller(tmp_path)
    with pytest.raises(OpError, match="is no benchmark"):
        replay(call, save(tmp_path), tmp_path)


# --- ways that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        (["--nonsense 5"], "no option --nonsense"),
        (["--batch-size many"], "--batch-size cannot be 'many'"),
        (["--cache-type-k q99"], "--cache-type-k cannot be 'q99'"),
        (["--ctx-size"], "--ctx-size needs a value"),
    ],
)
def test_an_option_that_the_engine_does_not_have_fails_in_loading(
    engine_args: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(OpError) as caught:
        bench(tmp_path, engine_args=engine_args)
    assert "failed in phase load" in caught.value.what and words in caught.value.what


def test_a_model_that_cannot_be_loaded_is_told_with_the_engines_words(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    data = shared_gguf().read_bytes()
    broken.write_bytes(data.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(OpError) as caught:
        bench(tmp_path / "home", model=str(broken))
    assert "failed in phase load" in caught.value.what and "last lines" in caught.value.what


def test_a_benchmark_that_is_cancelled_in_its_rounds_leaves_nothing(tmp_path: Path) -> None:
    cancel = threading.Event()

    def report(progress: Progress) -> None:
        if "round" in progress.what:
            cancel.set()

    with pytest.raises(Cancelled):
        bench(
            tmp_path, model=str(shared_gguf(SLOW)), gen_len=100, rounds=200, warmup=0,
            cancel=cancel, report=report,
        )  # fmt: skip
    assert not list(tmp_path.glob("evidence/*/*"))
    assert [p for p in psutil.Process().children(recursive=True) if "worker" in str(p)] == []


# --- programs -----------------------------------------------------------------------------------


def program(folder: Path, name: str) -> Path:
    """The fake of that name as an executable."""
    source = FAKES / f"engine_{name.replace('-', '_')}.py"
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{source}" "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def test_an_installed_llama_server_is_measured_over_the_same_http(tmp_path: Path) -> None:
    server = program(tmp_path, "llama-server")
    record = bench(tmp_path / "home", python=str(server), engine="llamacpp")
    assert record.valid is True
    assert record.get("identity", "engine", "version") == "11549 (abcdef0)"
    assert record.get("data", "flags", "n_threads") == 1
    assert record.get("data", "devices") == [{"name": "CPU", "type": "cpu"}]
    left = [p for p in psutil.process_iter(["cmdline"]) if "engine_llama_server.py" in str(p.info)]
    assert left == []


def test_an_installed_llama_bench_brings_its_own_rounds(tmp_path: Path) -> None:
    tool = program(tmp_path, "llama-bench")
    record = bench(tmp_path / "home", python=str(tool), engine="llamacpp")
    assert record.valid is True
    assert len(record.get("data", "rounds")) == 3
    rate = 1e9 / 15880695 * 64  # n / t of the recorded sample
    assert record.metric("decode_tok_s") == pytest.approx(rate, rel=1e-6)
    assert "llama-bench" in record.get("data", "timing", "definition")
    assert record.get("data", "flags", "n_depth") == 48
    assert record.get("data", "tokens") is None


def test_llama_server_on_path_is_found_where_the_wheel_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "llama-server")
    adapter = adapter_named("llamacpp")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(type(adapter), "distributions", ("not-a-distribution",))
    record = bench(tmp_path / "home", engine="auto")
    assert record.get("identity", "engine", "version") == "11549 (abcdef0)"
