"""Hugging Face transformers: the reference implementation, rarely the fastest.

Its attention implementations are named in the model's configuration.  ``eager`` computes
and stores all scores; ``sdpa`` and the flash attention packages do not.  There are no CUDA
graphs unless the forward pass is compiled, so that a decode rate on a GPU is mostly launch
overhead: that is what users of ``generate`` get, and it is said as a warning.

Names as of transformers 5.19.0 (November 2026).
"""

from __future__ import annotations

from ikit_ops.engines.adapter import Adapter, AttentionNames
from ikit_ops.engines.gates import Check, Seen
from ikit_ops.engines.kernels import attention_check

ATTENTION = AttentionNames(
    source="the names of transformers 5.19.0 (2026-11)",
    fast=frozenset({"flash_attention_2", "flash_attention_3", "sdpa"}),
    legitimate=frozenset({"flex_attention", "paged|sdpa", "paged|flash_attention_2"}),
    fallback=frozenset({"eager", "paged|eager"}),
)


class Transformers(Adapter):
    """The adapter."""

    name = "transformers"
    title = "transformers"
    rank = 60
    distributions = ("transformers",)
    worker = "transformers_worker.py"
    formats = frozenset({"safetensors"})

    def checks(self, seen: Seen) -> list[Check]:
        """Attention, parts left on the CPU, and launches without graphs on a GPU."""
        used = seen.result.attention_backend or seen.flag("attn_implementation")
        asked = seen.requested.get("attn_implementation")
        found = attention_check(
            [used] if isinstance(used, str) else [], ATTENTION,
            requested=asked if isinstance(asked, str) else None,
        )  # fmt: skip
        return [*found, *_offload(seen), *_compiled(seen)]


ADAPTER = Transformers()


def _offload(seen: Seen) -> list[Check]:
    """On a GPU, all parameters should be there."""
    if seen.platform not in ("cuda", "rocm"):
        if seen.plan.platform in ("cuda", "rocm"):
            text = "torch found no GPU: everything ran on the CPU"
            return [Check("gpu_found", "violation", text)]
        return []
    places = seen.flag("parameter_devices")
    if not isinstance(places, list):
        return [Check("offload", "unknown", "where the parameters are was not seen", required=True)]
    if any(str(place) in ("cpu", "meta", "disk") for place in places):
        text = "some weights stayed on the CPU or the disk: each token waits for their transfer"
        return [Check("offload", "violation", text, argument="device_map")]
    return [Check("offload", "ok")]


def _compiled(seen: Seen) -> list[Check]:
    if seen.platform not in ("cuda", "rocm"):
        return []
    if seen.flag("compile") is None:
        return [Check("cuda_graphs", "unknown", "whether decoding used CUDA graphs was not seen")]
    if seen.flag("compile") is False:
        text = (
            "no CUDA graphs (generate without compile): batch-1 decode pays a launch for every "
            "kernel; this is the speed of generate, not of the model"
        )
        return [Check("cuda_graphs", "warning", text)]
    return [Check("cuda_graphs", "ok")]
