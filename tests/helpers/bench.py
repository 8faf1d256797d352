"""Benchmarks in tests: run one here, or make what the gates look at."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ikit_mcp.call import Device, Progress, Settings
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.process import devices
from ikit_mcp.registry import load
from ikit_mcp.runner import Control, Runner
from ikit_ops.engines import adapter_named
from ikit_ops.engines.adapter import Plan
from ikit_ops.engines.gates import Beside, Check, Seen, common_checks
from ikit_ops.engines.result import Round, WorkerResult

DATA = Path(__file__).parents[1] / "data" / "engines"
CPU = Device("cpu", "A CPU", "0" * 16, 2**34, None)
GPU = Device("cuda:0", "A GPU", "GPU-1", 2**36, "1.0")
AMD = Device("rocm:0", "Another GPU", "GPU-2", 2**36, "1.0")


def run_here(
    home: Path,
    operation: str = "bench",
    *,
    cancel: threading.Event | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    **arguments: Any,
) -> EvidenceRecord:
    """Run an operation in this process; its record.

    The device's lock is taken for held: tests do not measure speed, and must not wait for
    a neighbour who does.
    """
    runner = Runner(load(None), Settings(home))
    request = runner.check(operation, arguments)
    held = frozenset(devices.uuids_of("auto"))
    outcome = runner.here(request, Control(report=report, cancel=cancel, devices=held))
    assert outcome.record is not None
    return outcome.record


def plan(device: Device | None = CPU, **changes: Any) -> Plan:
    """A plan of a benchmark that nobody runs."""
    made = Plan(
        model="model", path=Path("/models/model"), revision=None, engine_args=(), prompt_len=512,
        gen_len=128, rounds=3, warmup=2, seed=0, round_offset=0, nonce="nonce", device=device,
        threads=4 if device is CPU else None, keep_going=False, timeout=60.0,
    )  # fmt: skip
    return replace(made, **changes)


def rounds(rate: float = 100.0, count: int = 3, tokens: int = 128) -> list[Round]:
    """Rounds of that decode rate, TTFT 20 ms."""
    decode = (tokens - 1) / rate * 1e3
    return [
        Round(
            index=n, ttft_ms=20.0, total_ms=20.0 + decode, decode_ms=decode, gen_tokens=tokens,
            prompt_tokens=512, cached_tokens=0, finish_reason="length", speculative_tokens=0,
        )
        for n in range(count)
    ]  # fmt: skip


def healthy(engine: str, device: Device, **flags: Any) -> Seen:
    """A run of the engine that nothing is wrong with, with those flags beside its usual ones."""
    platform = device.id.split(":")[0]
    usual, backend = _USUAL[engine, platform == "cpu"]
    result = WorkerResult(
        rounds=rounds(), version="1", platform=platform, flags={**usual, **flags},
        flags_source="worker", attention_backend=backend,
        devices=[{"name": "x", "type": "cpu" if platform == "cpu" else "gpu"}],
    )  # fmt: skip
    gpu = Beside(foreign=(), throttling=(), clock_drift=0.01, memory_clock_drift=0.0)
    cpu = Beside(other_load=0.0, steal=0.0)
    return Seen(
        plan=plan(device), result=result, platform=platform, requested={},
        beside=cpu if platform == "cpu" else gpu, usable_threads=8,
    )  # fmt: skip


_SIZES = {"count": 51, "min": 1, "max": 512, "includes_1": True}
_VLLM = {"enforce_eager": False, "dtype": "bfloat16", "speculative_decoding": False,
         "max_num_batched_tokens": 8192}  # fmt: skip
_SGLANG = {"speculative_decoding": False, "chunked_prefill_size": 8192, "debug_cuda_graph": False,
           "disable_cuda_graph": False}  # fmt: skip
_LLAMA = {"n_gpu_layers": -1, "flash_attn": True, "speculative": False, "no_kv_offload": False}
_HF = {"dtype": "bfloat16", "compile": True, "speculative_decoding": False}
_USUAL: dict[tuple[str, bool], tuple[dict[str, Any], str]] = {
    ("vllm", False): (
        {**_VLLM, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_decode_mode": "FULL",
         "cudagraph_capture_sizes": _SIZES}, "FLASH_ATTN"),
    ("vllm", True): (
        {**_VLLM, "cudagraph_mode": "NONE", "cudagraph_decode_mode": "NONE",
         "compilation_mode": "VLLM_COMPILE", "cudagraph_capture_sizes": {"count": 0}}, "CPU_ATTN"),
    ("sglang", False): (
        {**_SGLANG, "decode_graph_used": True, "cuda_graph_config": {
            "decode": {"backend": "full", "bs": [1, 2, 4], "max_bs": 4}}}, "fa3"),
    ("sglang", True): ({**_SGLANG, "decode_graph_used": False}, "intel_amx"),
    ("llamacpp", False): ({**_LLAMA, "offloaded_layers": 33, "layers": 33}, "flash_attn"),
    ("llamacpp", True): ({**_LLAMA, "n_threads": 4}, "flash_attn"),
    ("transformers", False): ({**_HF, "parameter_devices": ["cuda:0"]}, "sdpa"),
    ("transformers", True): ({**_HF, "parameter_devices": ["cpu"], "n_threads": 4}, "sdpa"),
}  # fmt: skip


def judged(engine: str, seen: Seen) -> list[Check]:
    """All checks of a run."""
    return [*common_checks(seen), *adapter_named(engine).checks(seen)]
