"""SGLang: what it says of itself, and what spoils its number.

The arguments are raw input and stay as they were: ``disable_cuda_graph`` says False while
graphs are off, because an attention backend that cannot be captured switches them off
elsewhere.  What was decided is in ``get_server_info()``: ``cuda_graph_config.decode``.  Even
that can be early; the proof is the log's ``Decode batch ... cuda graph: True``.  Versions up
to 0.5.1x have ``disable_cuda_graph``, ``cuda_graph_bs`` and ``cuda_graph_max_bs`` instead.

The log line ``server_args=`` prints the whole configuration, API keys included, and is never
kept.

Names and lines of SGLang 0.5.23 (November 2026).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ikit_ops.engines.adapter import Adapter, AttentionNames, Plan, device_variables
from ikit_ops.engines.gates import Check, Seen
from ikit_ops.engines.kernels import attention_check, graphs_check
from ikit_ops.engines.result import WorkerResult

ATTENTION = AttentionNames(
    source="the names of SGLang 0.5.23 (2026-11)",
    fast=frozenset({
        "fa3", "fa4", "flashinfer", "trtllm_mha", "trtllm_mla", "cutedsl_mla", "flashmla",
        "cutlass_mla", "dsa", "dsv4", "aiter", "intel_xpu", "ascend", "intel_amx",
    }),
    legitimate=frozenset({
        "triton", "wave", "hpc_ops", "nsa", "compressed", "tokenspeed_mla",
        "dual_chunk_flash_attn", "linear", "hybrid_linear_attn",
    }),
    fallback=frozenset({"torch_native", "flex_attention"}),
)  # fmt: skip

_HYBRID = re.compile(
    r"Using hybrid attention backend for decode and prefill: decode_backend=(\w{2,40})"
)
_FOR_ARCH = re.compile(r"Using (\w{2,40}) as attention backend for ")
_DEFAULT = re.compile(r"[Uu]se (\w{2,40}) (?:backend by default|as attention backend)")
_RESOLVED = re.compile(r"'(?:decode_)?attention_backend': '(\w{2,40})'")
_DECODE_BATCH = re.compile(r"Decode batch.{1,200}?(cuda|cpu|npu|musa) graph: (True|False)")
_SWITCHED_OFF = re.compile(
    r"Cuda graph is disabled because of using (.{1,60}?) (?:attention )?backend"
)


class Sglang(Adapter):
    """The adapter."""

    name = "sglang"
    title = "SGLang"
    rank = 20
    distributions = ("sglang",)
    worker = "sglang_worker.py"
    formats = frozenset({"safetensors"})
    executing_args = frozenset({
        "trust_remote_code", "custom_sigquit_handler", "enable_custom_logit_processor",
        "model_loader_extra_config", "forward_hooks",
    })  # fmt: skip

    def environment(self, plan: Plan) -> dict[str, str]:
        """As for all; a local model needs no Hub."""
        offline = {"HF_HUB_OFFLINE": "1"} if plan.path is not None else {}
        return device_variables(plan) | offline

    def read(self, result: WorkerResult, log: Sequence[str], plan: Plan) -> None:
        """Graphs that were used, and the backend of decoding, from the log."""
        flags = result.flags if result.flags is not None else {}
        used = [match for line in log if (match := _DECODE_BATCH.search(line))]
        if used:
            flags["decode_graph_used"] = used[-1][2] == "True"
            flags["decode_batches_without_graph"] = sum(m[2] == "False" for m in used)
        for line in log:
            if match := _SWITCHED_OFF.search(line):
                flags["graph_disabled_by"] = match[1]
        result.flags = flags
        if not result.attention_backend:
            result.attention_backend = attention_in(log)

    def checks(self, seen: Seen) -> list[Check]:
        """Graphs, attention, offloading, quantisation."""
        asked = seen.requested.get("decode_attention_backend") or seen.requested.get(
            "attention_backend"
        )
        used = seen.result.attention_backend
        found = []
        if seen.platform in ("cuda", "rocm"):
            found += attention_check(
                [used] if used else [],
                ATTENTION,
                requested=asked if isinstance(asked, str) else None,
            )
            found += graphs(seen)
        elif seen.platform == "cpu":
            found += _cpu_attention(seen, used, asked if isinstance(asked, str) else None)
        if seen.flag("cpu_offload_gb"):
            text = f"{seen.flag('cpu_offload_gb')} GB of weights stay in the CPU's memory"
            found.append(Check("offload", "violation", text, argument="cpu_offload_gb"))
        if seen.requested.get("quantization") and seen.flag("quantization"):
            text = (
                f"weights were quantised while loading ({seen.flag('quantization')}): other bytes "
            )
            found.append(Check("quantization", "warning", text + "a token than the checkpoint's"))
        limit, length = seen.flag("chunked_prefill_size"), seen.plan.prompt_len
        if isinstance(limit, int) and 0 < limit < length:
            text = f"the prompt of {length} was prefilled in chunks of {limit}: TTFT is longer"
            found.append(Check("chunked_prefill", "warning", text))
        return found


ADAPTER = Sglang()


def attention_in(log: Sequence[str]) -> str | None:
    """The attention backend of decoding that a log names; lines about vision are left out."""
    weak = None
    for line in log:
        if "multimodal attention" in line:
            continue
        if match := _HYBRID.search(line) or _FOR_ARCH.search(line) or _DEFAULT.search(line):
            return match[1]
        if match := _RESOLVED.search(line):
            weak = match[1]
    return weak


def _cpu_attention(seen: Seen, used: str | None, asked: str | None) -> list[Check]:
    """On a CPU ``torch_native`` is what there is without AMX: not a fallback from better."""
    name = "attention_backend"
    if used is None:
        text = "the engine did not say which attention backend it used"
        return [Check(name, "unknown", text)]
    if asked is not None and asked.lower() != used.lower():
        text = f"attention backend {asked} was requested, {used} ran"
        return [Check(name, "violation", text, argument="attention_backend")]
    if used == "torch_native":
        return [Check(name, "warning", "attention ran on torch_native: this CPU has no AMX")]
    return attention_check([used], ATTENTION, required=False)


def graphs(seen: Seen) -> list[Check]:
    """CUDA graphs: the log's own word first, then the resolved configuration."""
    name, flags = "cuda_graphs", seen.flags
    if flags.get("debug_cuda_graph") is True:
        text = "debug_cuda_graph: every operation runs eagerly behind the graph path"
        return [Check(name, "violation", text, argument="debug_cuda_graph")]
    decode = _decode_config(flags)
    used = flags.get("decode_graph_used")
    why = f"{flags['graph_disabled_by']} attention" if flags.get("graph_disabled_by") else ""
    argument = "attention_backend" if why else "disable_cuda_graph"
    if used is False or (used is None and decode.get("backend") == "disabled"):
        why = why or _asked_off(seen)
        return graphs_check(name, mode="NONE", sizes=None, largest=None, why=why, argument=argument)
    if used is None and (decode.get("backend") is None or flags.get("graph_disabled_by")):
        mode = "NONE" if flags.get("graph_disabled_by") else None
        return graphs_check(name, mode=mode, sizes=None, largest=None, why=why, argument=argument)
    sizes = decode.get("bs")
    found = graphs_check(
        name,
        mode="FULL",
        sizes=[s for s in sizes if isinstance(s, int)] if isinstance(sizes, list) else None,
        largest=decode.get("max_bs"),
        argument="cuda_graph_bs_decode",
    )
    if used is None:
        text = "graphs are on in the configuration; no decode batch in the log proves their use"
        found.append(Check(name, "warning", text))
    return found


def _decode_config(flags: Any) -> dict[str, Any]:
    """``{backend, bs, max_bs}`` of decoding, also from the fields of older versions."""
    config = flags.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, dict) else None
    if isinstance(decode, dict):
        return decode
    off = flags.get("disable_decode_cuda_graph", flags.get("disable_cuda_graph"))
    old = "cuda_graph_max_bs" in flags or "cuda_graph_bs" in flags
    if off is True:
        return {"backend": "disabled"}
    if off is False and old:  # newer versions say False while graphs are off
        return {
            "backend": "full",
            "bs": flags.get("cuda_graph_bs"),
            "max_bs": flags.get("cuda_graph_max_bs"),
        }
    return {}


def _asked_off(seen: Seen) -> str:
    for name in ("disable_cuda_graph", "disable_decode_cuda_graph"):
        if seen.requested.get(name) is True:
            return f"{name}=True"
    return ""
