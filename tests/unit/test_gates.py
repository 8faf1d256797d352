"""Gates: each fires on its case, and on no other."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from helpers.bench import AMD, CPU, GPU, healthy, judged, plan, rounds
from ikit_mcp.call import Device
from ikit_ops.engines.gates import Beside, Check, Seen, evaluate
from ikit_ops.engines.result import Round, TwoCall

ENGINES = [("vllm", GPU), ("vllm", AMD), ("vllm", CPU), ("sglang", GPU), ("sglang", CPU),
           ("llamacpp", GPU), ("llamacpp", CPU), ("transformers", GPU),
           ("transformers", CPU)]  # fmt: skip


def flags(seen: Seen, **changes: Any) -> Seen:
    """The run with other effective flags; ``...`` takes one away."""
    told = {**(seen.result.flags or {}), **changes}
    kept = {key: value for key, value in told.items() if value is not ...}
    return replace(seen, result=msgspec.structs.replace(seen.result, flags=kept))


def result(seen: Seen, **changes: Any) -> Seen:
    """The run with another result."""
    return replace(seen, result=msgspec.structs.replace(seen.result, **changes))


def row(seen: Seen, **changes: Any) -> Seen:
    """The run with another first round."""
    first = msgspec.structs.replace(seen.result.rounds[0], **changes)
    return result(seen, rounds=[first, *seen.result.rounds[1:]])


def found(engine: str, seen: Seen) -> set[tuple[str, str]]:
    """``(check, state)`` of everything that is not ok."""
    return {(c.name, c.state) for c in judged(engine, seen) if c.state != "ok"}


@pytest.mark.parametrize(("engine", "device"), ENGINES)
def test_a_healthy_run_is_valid_and_nothing_is_said_of_it(engine: str, device: Device) -> None:
    seen = healthy(engine, device)
    verdict = evaluate(judged(engine, seen))
    assert found(engine, seen) == set()
    assert verdict.valid is True
    assert verdict.gates.violations == [] == verdict.gates.warnings
    expected = {"token_count", "prefix_cache", "speculative_decoding", "attention_backend"}
    assert expected <= set(verdict.gates.checked)


COMMON: list[tuple[str, Any, tuple[str, str], str]] = [
    ("stopped early", lambda s: row(s, gen_tokens=40, decode_ms=390.0),
     ("token_count", "violation"), "40 tokens"),
    ("too many", lambda s: row(s, gen_tokens=130), ("token_count", "violation"), "130 tokens"),
    ("uncounted", lambda s: row(s, gen_tokens=None), ("token_count", "unknown"), "not counted"),
    ("ended", lambda s: row(s, finish_reason="stop"), ("token_count", "warning"), "stop"),
    ("cache hit", lambda s: row(s, cached_tokens=384), ("prefix_cache", "violation"), "384 of 512"),
    ("cache untold", lambda s: row(s, cached_tokens=None), ("prefix_cache", "unknown"), "cache"),
    ("drafts", lambda s: row(s, speculative_tokens=9), ("speculative_decoding", "violation"),
     "several tokens a step"),
    ("two calls", lambda s: result(s, two_call=TwoCall(decode_tok_s=110.0)),
     ("timing", "warning"), "by two calls"),
    ("own clock", lambda s: result(s, rounds=[
        msgspec.structs.replace(r, engine_decode_ms=1200.0) for r in s.result.rounds]),
     ("timing", "warning"), "the engine's own clock"),
    ("wrong clock", lambda s: result(s, rounds=[
        msgspec.structs.replace(r, engine_decode_ms=5000.0) for r in s.result.rounds]),
     ("timing", "violation"), "the engine's own clock"),
    ("failed", lambda s: result(s, rounds=s.result.rounds[:2],
                                failed_rounds=[{"index": 1, "why": "x"}]),
     ("rounds", "warning"), "1 of 3"),
    ("left out", lambda s: result(s, rounds=s.result.rounds[:1]),
     ("rounds", "violation"), "1 rounds instead of 3"),
    ("made up", lambda s: result(s, rounds=s.result.rounds * 2),
     ("rounds", "violation"), "6 rounds instead of 3"),
    ("a short prompt", lambda s: row(s, prompt_tokens=1),
     ("prompt_tokens", "violation"), "1 prompt tokens instead of 512"),
    ("a server's words", lambda s: replace(row(s, prompt_tokens=700), plan=replace(
        s.plan, url="http://127.0.0.1:9/v1")), ("prompt_tokens", "warning"), "700 prompt tokens"),
    ("ceiling", lambda s: replace(s, ceiling_tok_s=50.0), ("ceiling", "violation"), "above the"),
    ("no flags", lambda s: replace(s, configuration_seen=False), ("configuration", "unknown"),
     "did not say"),
]  # fmt: skip


@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize(("change", "expected", "words"), [c[1:] for c in COMMON],
                         ids=[c[0] for c in COMMON])  # fmt: skip
def test_each_common_gate_fires_on_its_case_alone(
    device: Device, change: Any, expected: tuple[str, str], words: str
) -> None:
    seen = change(healthy("vllm", device))
    checks = [c for c in judged("vllm", seen) if c.state != "ok"]
    assert {(c.name, c.state) for c in checks} == {expected}
    assert words in checks[0].text


def test_one_shared_token_is_no_fault_where_the_cache_cannot_be_switched_off() -> None:
    seen = row(healthy("vllm", CPU), cached_tokens=1)
    assert found("vllm", seen) == {("prefix_cache", "violation")}
    assert found("vllm", replace(seen, reports_cache=False)) == {("prefix_cache", "warning")}


ON_GPU: list[tuple[str, Any, tuple[str, str]]] = [
    ("foreign", replace(Beside(foreign=["python (pid 7)"]), throttling=()),
     ("foreign_processes", "violation")),
    ("unseen", Beside(throttling=()), ("foreign_processes", "unknown")),
    ("hot", Beside(foreign=(), throttling=["sw_thermal_slowdown"]), ("throttling", "violation")),
    ("capped", Beside(foreign=(), throttling=["sw_power_cap"]), ("throttling", "warning")),
    ("clock", Beside(foreign=(), throttling=(), clock_drift=0.2), ("clock", "warning")),
    ("memory clock", Beside(foreign=(), throttling=(), memory_clock_drift=0.2),
     ("memory_clock", "violation")),
]  # fmt: skip


@pytest.mark.parametrize(("beside", "expected"), [c[1:] for c in ON_GPU],
                         ids=[c[0] for c in ON_GPU])  # fmt: skip
def test_each_gate_of_a_gpu_fires_on_its_case_alone(
    beside: Beside, expected: tuple[str, str]
) -> None:
    assert found("vllm", replace(healthy("vllm", GPU), beside=beside)) == {expected}


ON_CPU: list[tuple[str, Any, tuple[str, str]]] = [
    ("neighbour", lambda s: replace(s, beside=Beside(other_load=1.0)),
     ("foreign_processes", "warning")),
    ("steal", lambda s: replace(s, beside=Beside(steal=0.1)), ("steal", "warning")),
    ("hot", lambda s: replace(s, beside=Beside(throttling=["cpu_thermal"])),
     ("throttling", "warning")),
    ("threads", lambda s: flags(s, n_threads=9), ("threads", "violation")),
    ("cores unknown", lambda s: replace(s, usable_threads=None), ("threads", "unknown")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), [c[1:] for c in ON_CPU],
                         ids=[c[0] for c in ON_CPU])  # fmt: skip
def test_each_gate_of_a_cpu_fires_on_its_case_alone(change: Any, expected: tuple[str, str]) -> None:
    assert found("llamacpp", change(healthy("llamacpp", CPU))) == {expected}


def logged(seen: Seen, line: str) -> Seen:
    """The run with one more line in its log."""
    return replace(seen, log=[*seen.log, line])


def parent(seen: Seen) -> Seen:
    """The run whose flags come from before vLLM's worker decided."""
    return result(seen, flags_source="parent_config (TypeError)")


def asked(seen: Seen, **arguments: Any) -> Seen:
    """The run with arguments that were requested."""
    return replace(seen, requested=arguments)


OWN: list[tuple[str, Device, str, Any, set[tuple[str, str]]]] = [
    ("vllm", GPU, "eager", lambda s: flags(s, enforce_eager=True), {("cuda_graphs", "violation")}),
    ("vllm", GPU, "mode none", lambda s: flags(s, cudagraph_decode_mode="NONE"),
     {("cuda_graphs", "violation")}),
    ("vllm", GPU, "piecewise", lambda s: flags(s, cudagraph_decode_mode="PIECEWISE"),
     {("cuda_graphs", "warning")}),
    ("vllm", GPU, "downgraded, seen by the parent alone", lambda s: logged(
        parent(s), "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with X backend (support: "
        "AttentionCGSupport.NEVER); setting cudagraph_mode=PIECEWISE because attention is compiled "
        "piecewise"), {("cuda_graphs", "warning")}),
    ("vllm", GPU, "downgraded to none", lambda s: logged(
        parent(s), "... setting cudagraph_mode=NONE because attention is not compiled piecewise"),
     {("cuda_graphs", "violation")}),
    ("vllm", GPU, "capture skipped", lambda s: logged(
        parent(s), "Skipping CUDA graph capture. To turn on CUDA graph capture, ensure "
        "`cudagraph_mode` was not manually set to `NONE`"), {("cuda_graphs", "violation")}),
    ("vllm", GPU, "graphs untold", lambda s: flags(
        s, cudagraph_mode=..., cudagraph_decode_mode=...), {("cuda_graphs", "unknown")}),
    ("vllm", GPU, "sizes untold", lambda s: flags(s, cudagraph_capture_sizes=...),
     {("cuda_graphs", "unknown")}),
    ("vllm", GPU, "batch 1 padded", lambda s: flags(s, cudagraph_capture_sizes={
        "count": 3, "min": 8, "max": 32, "includes_1": False}), {("cuda_graphs", "warning")}),
    ("vllm", GPU, "flex", lambda s: result(s, attention_layers=["FLEX_ATTENTION"]),
     {("attention_backend", "violation")}),
    ("vllm", GPU, "flex as asked", lambda s: asked(
        result(s, attention_layers=["FLEX_ATTENTION"]), attention_backend="FLEX_ATTENTION"),
     {("attention_backend", "warning")}),
    ("vllm", GPU, "another than asked", lambda s: asked(s, attention_backend="FLASHINFER"),
     {("attention_backend", "violation")}),
    ("vllm", GPU, "one of two layers falls back", lambda s: result(
        s, attention_layers=["FLASH_ATTN", "XFORMERS"]), {("attention_backend", "violation")}),
    ("vllm", GPU, "unknown name", lambda s: result(s, attention_layers=["NEW_ATTN"]),
     {("attention_backend", "warning")}),
    ("vllm", GPU, "not the first choice", lambda s: result(
        s, attention_layers=["TRITON_ATTN"], attention_candidates=["FLASH_ATTN", "TRITON_ATTN"]),
     {("attention_backend", "warning")}),
    ("vllm", GPU, "attention untold", lambda s: result(s, attention_backend=None),
     {("attention_backend", "unknown")}),
    ("vllm", GPU, "offload", lambda s: flags(s, cpu_offload_gb=4), {("offload", "violation")}),
    ("vllm", GPU, "quantised at load", lambda s: asked(flags(s, quantization="fp8"),
     quantization="fp8"), {("quantization", "warning")}),
    ("vllm", GPU, "chunked", lambda s: flags(s, max_num_batched_tokens=128),
     {("chunked_prefill", "warning")}),
    ("vllm", GPU, "speculative", lambda s: flags(s, speculative_decoding="ngram"),
     {("speculative_decoding", "violation")}),
    ("vllm", GPU, "dead variable", lambda s: replace(s, environment=["VLLM_ATTENTION_BACKEND"]),
     {("environment", "warning")}),
    ("vllm", GPU, "asked and not done", lambda s: asked(
        flags(s, async_scheduling=False), async_scheduling=True),
     {("requested_flags", "violation")}),
    ("vllm", GPU, "another number format than asked", lambda s: asked(
        flags(s, dtype="bfloat16"), dtype="half"), {("requested_flags", "violation")}),
    ("vllm", GPU, "the number format by another name", lambda s: asked(
        flags(s, dtype="torch.bfloat16", kv_cache_dtype="fp8_e4m3"), dtype="bf16",
        kv_cache_dtype="fp8"), set()),
    ("vllm", GPU, "fewer devices than asked", lambda s: asked(
        flags(s, tensor_parallel_size=1), tensor_parallel_size=2),
     {("requested_flags", "violation")}),
    ("vllm", GPU, "a size that was rounded", lambda s: asked(
        flags(s, max_model_len=1024), max_model_len=1000), {("requested_flags", "warning")}),
    ("vllm", CPU, "eager", lambda s: flags(s, enforce_eager=True), {("compilation", "violation")}),
    ("vllm", CPU, "compilation untold", lambda s: flags(
        s, enforce_eager=..., compilation_mode=...), {("compilation", "unknown")}),
    ("sglang", GPU, "log says no graph", lambda s: flags(s, decode_graph_used=False),
     {("cuda_graphs", "violation")}),
    ("sglang", GPU, "disabled, though the raw flag says not", lambda s: flags(
        s, decode_graph_used=..., cuda_graph_config={"decode": {"backend": "disabled"}}),
     {("cuda_graphs", "violation")}),
    ("sglang", GPU, "debug", lambda s: flags(s, debug_cuda_graph=True),
     {("cuda_graphs", "violation")}),
    ("sglang", GPU, "fields missing", lambda s: flags(
        s, decode_graph_used=..., cuda_graph_config=...), {("cuda_graphs", "unknown")}),
    ("sglang", GPU, "old version, off", lambda s: flags(
        s, decode_graph_used=..., cuda_graph_config=..., disable_cuda_graph=True),
     {("cuda_graphs", "violation")}),
    ("sglang", GPU, "old version, too small", lambda s: flags(
        s, decode_graph_used=True, cuda_graph_config=..., cuda_graph_bs=[], cuda_graph_max_bs=0),
     {("cuda_graphs", "violation")}),
    ("sglang", GPU, "padded", lambda s: flags(s, cuda_graph_config={
        "decode": {"backend": "full", "bs": [4, 8], "max_bs": 8}}), {("cuda_graphs", "warning")}),
    ("sglang", GPU, "no log", lambda s: flags(s, decode_graph_used=...),
     {("cuda_graphs", "warning")}),
    ("sglang", GPU, "switched off by attention", lambda s: flags(
        s, decode_graph_used=..., graph_disabled_by="torch native"),
     {("cuda_graphs", "violation")}),
    ("sglang", GPU, "torch native", lambda s: result(s, attention_backend="torch_native"),
     {("attention_backend", "violation")}),
    ("sglang", CPU, "torch native without AMX", lambda s: result(
        s, attention_backend="torch_native"), {("attention_backend", "warning")}),
    ("sglang", CPU, "another than asked", lambda s: asked(
        s, attention_backend="torch_native"), {("attention_backend", "violation")}),
    ("sglang", GPU, "offload", lambda s: flags(s, cpu_offload_gb=2), {("offload", "violation")}),
    ("sglang", GPU, "chunked", lambda s: flags(s, chunked_prefill_size=64),
     {("chunked_prefill", "warning")}),
    ("sglang", GPU, "quantised", lambda s: asked(flags(s, quantization="fp8"), quantization="fp8"),
     {("quantization", "warning")}),
    ("llamacpp", GPU, "layers on the CPU", lambda s: flags(s, offloaded_layers=20),
     {("offload", "violation")}),
    ("llamacpp", GPU, "cache on the CPU", lambda s: flags(s, no_kv_offload=True),
     {("offload", "violation")}),
    ("llamacpp", GPU, "experts on the CPU", lambda s: flags(s, n_cpu_moe=4),
     {("offload", "violation")}),
    ("llamacpp", GPU, "tensors moved", lambda s: flags(s, tensor_buft_overrides="exps=CPU"),
     {("offload", "warning")}),
    ("llamacpp", GPU, "no flash attention", lambda s: flags(s, flash_attn=False),
     {("attention_backend", "warning")}),
    ("llamacpp", GPU, "flash attention untold", lambda s: flags(s, flash_attn=-1),
     {("attention_backend", "unknown")}),
    ("llamacpp", GPU, "devices untold", lambda s: result(s, devices=None),
     {("gpu_found", "unknown")}),
    ("llamacpp", CPU, "a GPU build without a GPU", lambda s: logged(
        s, "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"),
     {("gpu_found", "violation")}),
    ("llamacpp", CPU, "a GPU bench without a GPU", lambda s: flags(
        s, backends="CUDA", gpu_info=""), {("gpu_found", "violation")}),
    ("llamacpp", CPU, "a slow build", lambda s: logged(
        s, "warning: asserts enabled, performance may be affected"), {("build", "warning")}),
    ("transformers", GPU, "eager attention", lambda s: result(s, attention_backend="eager"),
     {("attention_backend", "violation")}),
    ("transformers", GPU, "weights on the CPU", lambda s: flags(
        s, parameter_devices=["cpu", "cuda:0"]), {("offload", "violation")}),
    ("transformers", GPU, "weights somewhere", lambda s: flags(s, parameter_devices=...),
     {("offload", "unknown")}),
    ("transformers", GPU, "not compiled", lambda s: flags(s, compile=False),
     {("cuda_graphs", "warning")}),
    ("transformers", GPU, "compiled untold", lambda s: flags(s, compile=...),
     {("cuda_graphs", "unknown")}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "device", "change", "expected"),
    [(c[0], c[1], c[3], c[4]) for c in OWN],
    ids=[f"{c[0]}-{c[1].id}-{c[2]}" for c in OWN],
)
def test_each_gate_of_an_engine_fires_on_its_case_alone(
    engine: str, device: Device, change: Any, expected: set[tuple[str, str]]
) -> None:
    assert found(engine, change(healthy(engine, device))) == expected


def test_an_engine_that_ran_on_the_cpu_beside_a_gpu_is_told() -> None:
    for engine in ("vllm", "transformers"):
        seen = replace(healthy(engine, CPU), plan=plan(GPU))
        assert ("gpu_found", "violation") in found(engine, seen)
    seen = replace(healthy("llamacpp", CPU), plan=plan(GPU))
    assert found("llamacpp", seen) == {("gpu_found", "warning")}, "nobody asked for the GPU"
    seen = replace(seen, plan=plan(GPU, device_asked="cuda:0"))
    assert found("llamacpp", seen) == {("gpu_found", "violation")}


def test_a_required_unknown_takes_the_validity_and_others_do_not() -> None:
    ok = Check("a", "ok")
    assert evaluate([ok]).valid is True
    assert evaluate([ok, Check("b", "unknown", "not seen")]).valid is True
    assert evaluate([ok, Check("b", "unknown", "not seen", required=True)]).valid is None
    verdict = evaluate(
        [ok, Check("b", "unknown", "not seen", required=True), Check("c", "violation", "bad")]
    )
    assert verdict.valid is False
    assert verdict.gates.checked == ["a", "c"]
    assert verdict.unknown == ["gate b: not seen"]


def test_the_argument_to_blame_is_named_for_the_next_call() -> None:
    seen = flags(healthy("vllm", GPU), enforce_eager=True)
    assert evaluate(judged("vllm", seen)).blamed == ["enforce_eager"]


def test_what_a_cache_can_hold_or_a_doubtful_bandwidth_explains_a_rate_above_the_ceiling() -> None:
    seen = replace(healthy("llamacpp", CPU), ceiling_tok_s=95.0)
    assert found("llamacpp", seen) == {("ceiling", "violation")}
    assert found("llamacpp", replace(seen, cached_part=0.1)) == {("ceiling", "warning")}
    assert found("llamacpp", replace(seen, cached_part=0.01)) == {("ceiling", "violation")}
    assert found("llamacpp", replace(seen, ceiling_doubtful=True)) == {("ceiling", "unknown")}
    assert found("llamacpp", replace(seen, shared_memory=True)) == {("ceiling", "unknown")}
    far = replace(seen, shared_memory=True, ceiling_tok_s=50.0)
    assert found("llamacpp", far) == {("ceiling", "violation")}
    assert found("llamacpp", replace(seen, ceiling_tok_s=99.0)) == set(), "inside the tolerance"


def test_the_first_round_and_the_spread_are_looked_at() -> None:
    def of(*rates: float) -> Seen:
        made: list[Round] = [rounds(rate, 1)[0] for rate in rates]
        seen = result(healthy("vllm", CPU), rounds=made)
        return replace(seen, plan=replace(seen.plan, rounds=len(made)))

    assert found("vllm", of(100, 101, 100)) == set()
    assert ("warm_up", "warning") in found("vllm", of(80, 100, 100, 101))
    assert found("vllm", of(100, 120, 100)) == {("steadiness", "warning")}
    assert found("vllm", of(100, 200)) == set(), "two rounds have no spread to speak of"


def test_no_rate_at_all_is_not_established() -> None:
    blind = Round(index=0, gen_tokens=128, cached_tokens=0, speculative_tokens=0)
    seen = result(healthy("vllm", CPU), rounds=[blind] * 3)
    verdict = evaluate(judged("vllm", seen))
    assert verdict.valid is None
    assert any("no decode rate" in line for line in verdict.unknown)


@pytest.mark.parametrize(
    ("wanted", "got", "same"),
    [
        ("bfloat16", "torch.bfloat16", True),
        ("half", "torch.float16", True),
        (1, 1.0, True),
        ("1024", 1024, True),
        ("on", True, True),
        ({"mode": "FULL"}, {"mode": "full", "other": 1}, True),
        (True, False, False),
        ("FULL", "PIECEWISE", False),
        (4096, 2048, False),
    ],
)
def test_the_same_setting_in_other_words_is_no_difference(
    wanted: Any, got: Any, same: bool
) -> None:
    seen = asked(flags(healthy("vllm", GPU), some_flag=got), some_flag=wanted)
    assert (found("vllm", seen) == set()) is same


def test_every_text_of_a_violation_says_what_it_means_for_the_number() -> None:
    for engine, device, name, change, _ in OWN:
        for check in judged(engine, change(healthy(engine, device))):
            if check.state != "ok":
                assert len(check.text) > 20 and not re.search(r"[\n\r]", check.text), name
