"""What engines print and answer, as recorded: backends, graphs, layers; and what is not one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import CPU, DATA, GPU, healthy, judged, plan, rounds
from helpers.tiny_models import TINY, shared_gguf
from ikit_ops.engines import adapter_named, sglang, vllm
from ikit_ops.engines.drive import MAX_LOG_LINE, first_error, is_configuration, last_lines, read_log
from ikit_ops.engines.result import WorkerResult

PREFIX = "(EngineCore pid=7) INFO 11-30 20:29:59 [cuda.py:507] "

DECODE_BACKENDS = [
    ("Using FLASH_ATTN attention backend out of potential backends: "
     "['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION'].", "FLASH_ATTN"),
    ("Using FLASH_ATTN attention backend out of potential backends: "
     "('FLASH_ATTN', 'FLASHINFER').", "FLASH_ATTN"),
    ("Using AttentionBackendEnum.TRITON_ATTN backend.", "TRITON_ATTN"),
    ("Using TURBOQUANT backend.", "TURBOQUANT"),
    ("Using ROCM_ATTN backend (selected via --attention-backend).", "ROCM_ATTN"),
    ("Using ROCM_AITER_FA backend out of potential backends: ['ROCM_AITER_FA'].", "ROCM_AITER_FA"),
    ("Using Flash Attention backend.", "FLASH_ATTN"),
    ("Using Triton backend.", "TRITON_ATTN"),
    ("Using Triton MLA backend on V1 engine.", "TRITON_MLA"),
    ("Using CPU_MLA backend.", "CPU_MLA"),
    ("Using Flash Attention backend on V1 engine.", "FLASH_ATTN"),
    ("Using Triton backend on V1 engine.", "TRITON_ATTN"),
    ("Using FlashInfer backend on V1 engine.", "FLASHINFER"),
    ("Using FlexAttention backend on V1 engine.", "FLEX_ATTENTION"),
    ("Using Cutlass MLA backend on V1 engine.", "CUTLASS_MLA"),
    ("Using FlashMLA backend on V1 engine.", "FLASHMLA"),
    ("Using Tree Attention backend on V1 engine.", "TREE_ATTN"),
    ("selector.py:135] Using XFormers backend.", "XFORMERS"),
    ("selector.py:135] Using Torch SDPA backend.", "TORCH_SDPA"),
]  # fmt: skip

OTHERS = [
    "Using FLASH_ATTN MLA prefill backend.",
    "Using AttentionBackendEnum.TORCH_SDPA for MMEncoderAttention.",
    "Using backend AttentionBackendEnum.FLASH_ATTN for vit attention",
    "Using 'MARLIN' WNA16 MoE backend.",
    "Using 'X' NvFp4 MoE backend out of potential backends: ['X', 'Y'].",
    "Using FlashAttention version 3",
    "Using max model len 1024",
    "Cannot use FlashAttention-2 backend for Volta and Turing GPUs.",
    "Using LBHNC KV cache layout.",
]


@pytest.mark.parametrize(("line", "name"), DECODE_BACKENDS)
def test_every_historic_line_of_vllm_tells_its_backend(line: str, name: str) -> None:
    names, _ = vllm.attention_in([PREFIX + line])
    assert names == [name]
    known = vllm.ATTENTION.fast | vllm.ATTENTION.legitimate | vllm.ATTENTION.fallback
    assert name in known


@pytest.mark.parametrize("line", OTHERS)
def test_lines_about_encoders_prefill_and_experts_are_not_the_decode_backend(line: str) -> None:
    assert vllm.attention_in([PREFIX + line]) == ([], [])


def test_all_backends_of_a_model_with_two_kinds_of_layers_are_kept() -> None:
    lines = [
        "Using TRITON_MLA attention backend out of potential backends: ['TRITON_MLA'].",
        "Using FLASH_ATTN MLA prefill backend.",
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
    ]
    assert vllm.attention_in(lines)[0] == ["TRITON_MLA", "FLASH_ATTN"]


def test_vllms_candidates_are_read_in_its_own_order() -> None:
    result = WorkerResult(rounds=rounds(), flags={}, platform="cuda")
    log = [PREFIX + DECODE_BACKENDS[0][0].replace("Using FLASH_ATTN", "Using TRITON_ATTN")]
    adapter_named("vllm").read(result, log, plan(GPU))
    assert result.attention_candidates is not None
    assert result.attention_candidates[:2] == ["FLASH_ATTN", "FLASHINFER"]
    assert result.attention_backend == "TRITON_ATTN"


def test_the_recorded_log_of_vllm_in_eager_mode_is_eager() -> None:
    log = read_log(DATA / "vllm_0.32_cpu_eager_stdout.txt")
    told = json.loads(next(x for x in log if x.startswith("INFERKIT_RESULT")).partition(" ")[2])
    seen = healthy("vllm", CPU)
    assert vllm.attention_in(log) == ([], []), "on a CPU ordinary models log no backend"
    eager = {c.name for c in judged("vllm", _with(seen, told["flags"])) if c.state == "violation"}
    assert eager == {"compilation"}


def _with(seen: Any, flags: dict[str, Any]) -> Any:
    seen.result.flags = flags
    return seen


def sglang_log() -> list[str]:
    return read_log(DATA / "sglang_0.5.23_cpu_stderr.txt")


def test_the_recorded_log_of_sglang_tells_backend_and_graphs() -> None:
    result = WorkerResult(rounds=rounds(), flags={"disable_cuda_graph": False}, platform="cuda")
    adapter_named("sglang").read(result, sglang_log(), plan(GPU))
    assert result.flags is not None
    assert result.attention_backend == "torch_native"
    assert result.flags["decode_graph_used"] is False
    assert result.flags["graph_disabled_by"] == "torch native"
    seen = healthy("sglang", GPU)
    seen.result.flags, seen.result.attention_backend = result.flags, result.attention_backend
    states = {(c.name, c.state) for c in judged("sglang", seen) if c.state == "violation"}
    assert states == {("cuda_graphs", "violation"), ("attention_backend", "violation")}


def test_lines_that_print_a_whole_configuration_are_never_shown() -> None:
    log = sglang_log()
    printed = [line for line in log if "server_args=" in line]
    key = re.search(r"api_key': '([^']+)'", (DATA / "sglang_0.5.23_cpu_stderr.txt").read_text())
    assert len(printed) == 1 and key is not None
    assert is_configuration(printed[0])
    shown = "\n".join(last_lines(log, 1000))
    assert key[1] not in shown and "server_args" not in shown
    assert "Decode batch" in shown


def test_the_cause_far_above_the_last_lines_is_told_once() -> None:
    cause = "(EngineCore pid=7) ERROR [core.py:99] ValueError: No available memory for the cache"
    log = ["INFO loading", cause, *["  frame"] * 40, "RuntimeError: initialization failed."]
    told = first_error(log, ["RuntimeError: initialization failed.", *last_lines(log)])
    assert told == "ValueError: No available memory for the cache"
    assert first_error(log, [cause]) is None
    assert first_error(["INFO all is well: no Error here"], []) is None
    assert first_error(["server_args={'api_key': 'x'} ValueError: shown"], []) is None


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Using hybrid attention backend for decode and prefill: decode_backend=fa3, "
         "prefill_backend=triton.", "fa3"),
        ("Using trtllm_mha as attention backend for LlamaForCausalLM.", "trtllm_mha"),
        ("Use fa3 as attention backend on Hopper", "fa3"),
        ("Attention backend not explicitly specified. Use fa3 backend by default.", "fa3"),
        ("server_args={'attention_backend': 'flashinfer', 'x': 1}", "flashinfer"),
        ("Using fa3 as multimodal attention backend.", None),
        ("Using hybrid linear attention backend for hybrid GDN models.", None),
    ],
)  # fmt: skip
def test_every_line_of_sglang_tells_the_backend_of_decoding(line: str, name: str | None) -> None:
    assert sglang.attention_in([line]) == name


def test_a_decode_batch_with_a_graph_is_the_proof() -> None:
    result = WorkerResult(rounds=rounds(), flags={}, platform="cuda")
    line = (
        "Decode batch, #running-req: 1, #token: 597, token usage: 0.04, cuda graph: True, "
        "gen throughput (token/s): 127.68, #queue-req: 0"
    )
    adapter_named("sglang").read(result, [line], plan(GPU))
    assert result.flags is not None and result.flags["decode_graph_used"] is True


def bench_row(name: str = "llama_bench_b11434.json") -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return rows[1]


def judged_bench(row: dict[str, Any], device: Any = CPU, **changes: Any) -> set[tuple[str, str]]:
    """The findings about a run of llama-bench."""
    seen = healthy("llamacpp", device)
    seen.result.flags = row
    seen.result.devices = None
    planned = plan(device, path=shared_gguf())
    adapter_named("llamacpp").read(seen.result, [], planned)
    object.__setattr__(seen, "plan", planned)
    object.__setattr__(seen, "platform", seen.result.platform)
    return {(c.name, c.state) for c in judged("llamacpp", seen) if c.state != "ok"}


def test_the_recorded_json_of_llama_bench_is_a_healthy_cpu_run() -> None:
    # flash_attn -1 is a request, not an answer.
    assert judged_bench(bench_row()) == {("attention_backend", "unknown")}


def test_the_defaults_of_llama_bench_on_a_gpu_are_no_fault() -> None:
    row = bench_row() | {"backends": "CUDA", "gpu_info": "NVIDIA X", "n_gpu_layers": -1}
    assert judged_bench(row, GPU) == {("attention_backend", "unknown")}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_gpu_layers": 0}, ("offload", "violation")),
        ({"n_gpu_layers": 1}, ("offload", "violation")),
        ({"n_gpu_layers": TINY.layers + 1}, None),
        ({"n_gpu_layers": 99}, None),
        ({"no_kv_offload": True}, ("offload", "violation")),
        ({"n_cpu_moe": 2}, ("offload", "violation")),
        ({"tensor_buft_overrides": "exps=CPU"}, ("offload", "warning")),
        ({"flash_attn": 0}, ("attention_backend", "warning")),
        ({"gpu_info": ""}, ("gpu_found", "violation")),
    ],
)
def test_each_fault_of_llama_bench_on_a_gpu_is_found(
    changes: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    usual = {"backends": "CUDA", "gpu_info": "NVIDIA X", "n_gpu_layers": -1, "flash_attn": 1}
    findings = judged_bench(bench_row() | usual | changes, GPU)
    assert findings == (set() if expected is None else {expected})


def test_the_log_of_llama_server_tells_what_props_does_not() -> None:
    lines = [
        "0.00.005.813 I cmn  common_param:   - CUDA0   : NVIDIA X (24105 MiB, 24105 MiB free)",
        "0.00.005.882 I cmn  common_param: system_info: n_threads = 4 (n_threads_batch = 8) / 16",
        "0.00.084.384 I load_tensors: offloaded 20/33 layers to GPU",
        "0.00.085.741 I llama_kv_cache: size = 0.25 MiB (1024 cells), K (q8_0): 0.12 MiB, "
        "V (f16):    0.12 MiB",
        "0.00.086.395 I resolve_fused_ops: Flash Attention disabled",
    ]
    result = WorkerResult(rounds=rounds(), flags={})
    adapter_named("llamacpp").read(result, lines, plan(GPU))
    assert result.flags == {
        "n_threads": 4, "n_threads_batch": 8, "offloaded_layers": 20, "layers": 33,
        "cache_type_k": "q8_0", "cache_type_v": "f16", "flash_attn": False,
    }  # fmt: skip
    assert result.devices == [{"name": "CUDA0", "type": "gpu"}]
    assert result.platform == "cuda"
    assert result.attention_backend == "no flash_attn"


def test_a_log_is_read_from_both_ends_and_its_lines_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"first\r\n\x1b[32mgreen\x1b[0m \xff\n" + b"x" * 100_000 + b"\n")
        for _ in range(120):
            file.write(b"y" * 99_999 + b"\n")
        file.write(b"last\n")
    lines = read_log(path)
    assert lines[0] == "first" and lines[1] == "green �" and lines[-1] == "last"
    assert max(map(len, lines)) == MAX_LOG_LINE
    assert read_log(tmp_path / "absent") == []
