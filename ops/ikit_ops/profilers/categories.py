"""Which part of the work a kernel does, told by its name; the rules are data.

Kernel names follow no standard: libraries put tile sizes, architectures and data types into
them, compilers put whole functions.  But each family keeps a few tell-tale words.  The rules
are tried in order and the first that fits decides, so the order carries knowledge: a grouped
GEMM of experts is MoE before it is GEMM, a fused all-reduce with a norm is communication, and
``rope_norm`` is no norm.  A name that no rule knows is ``other``, which is an answer too.

Attention includes what only attention needs: softmax of the scores, rotary embedding, and
writes to the KV cache.  Softmax over a vocabulary is sampling; where a name cannot tell the
two apart, attention is the guess.
"""

from __future__ import annotations

import functools
import re

RULES: tuple[tuple[str, str], ...] = (
    (
        "communication",
        r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|all2all"
        r"|cross_device_reduce|one_?shot_|two_?shot_|multimem|nvshmem|rocshmem|deep_?ep"
        r"|quick_?reduce|internode|intranode|custom_ar|sendrecv|p2p_?copy",
    ),
    ("memcpy", r"^\[?cuda mem(cpy|set)|^mem(cpy|set)\b|__amd_rocclr_(copy|fill)|(copy|fill)buffer"),
    (
        "moe",
        r"moe|topk_?gating|topk_?softmax|expert|grouped_?topk|group(ed)?_?gemm|mul_mat_id"
        r"|permute_?tokens|routing(main|indices|custom|deepseek)",
    ),
    (
        "sampling",
        r"(?<!up)(?<!down)(?<!grid_)sampl|arg_?max|top_?p(?![a-z])|topptopk|radix_?topk"
        r"|top_?k_?(mask|renorm|top)|gathertopk|multinomial|penalt|cunn_softmax|distribution_"
        r"|philox|logits_|min_p(?![a-z])|gumbel|bitonicsort|radixsort|rejection|sort_?postprocess",
    ),
    (
        "attention",
        r"attn|attention|flash|fmha|(?<![a-z])m[hl]a(?![a-z])|paged|decode_?with_?paged|sdpa"
        r"|soft_?max|kv_?cache|reshape_and_cache|concat_and_cache|(?<![a-z])rope|rotary"
        r"|merge_states|split_?kv|causal_?conv|(?<![a-z])ssm|gated_delta|mamba|selective_scan",
    ),
    ("norm", r"(?<![a-z])norm(?![a-z])|(rms|layer|group|batch|instance|l2)_?norm|normkernel"),
    (
        "gemm",
        r"gemm|gemv|mat_?mul|mul_mat|cutlass|cublas|nvjet|xmma|wgmma|cijk_|tensile|split_?k"
        r"|dot_kernel|marlin|wvsplit|machete|hipblas|mfma|linear_kernel|conv(olution)?[123]?d?_"
        r"|implicit_?con|cudnn|winograd|fprop|bitblas|exllama|awq|gptq|addmm",
    ),
    (
        "memcpy",
        r"direct_copy|copy_?kernel|catarraybatched|(?<![a-z])cpy_|copy(?![a-z])|concat_|memcpy"
        r"|memset|fillfunctor",
    ),
)
"""(category, pattern over the lower-case name), tried in this order."""

CATEGORIES = ("attention", "gemm", "moe", "norm", "sampling", "memcpy", "communication", "other")
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in RULES)
_JUDGED = 4_096
_WRAPPERS = frozenset({"Kernel", "Kernel2", "device_kernel", "kernel_entry", "global_kernel"})
_WORD = re.compile(r"[A-Za-z_]\w*")


@functools.lru_cache(maxsize=65_536)
def category_of(name: str) -> str:
    """The category of a kernel's full name; long names are judged by their first part."""
    lower = name[:_JUDGED].lower()
    for category, pattern in _COMPILED:
        if pattern.search(lower):
            return category
    return "other"


def short_name_of(name: str, given: str | None = None) -> str:
    """The function's own name: no return type, no namespaces, template or call arguments.

    Of a library's generic wrapper (``cutlass::Kernel<...>``) the first template argument says
    more than the wrapper, so that is used.  ``given`` is the profiler's short name.
    """
    base, argument = _base(name[:_JUDGED])
    if base in _WRAPPERS and argument:
        inner, _ = _base(argument)
        return inner or base
    return given or base or name


def _base(text: str) -> tuple[str, str]:
    """``(function name, first template argument)`` of a demangled name."""
    text = text.replace("(anonymous namespace)", "_anonymous_").replace("<unnamed>", "_unnamed_")
    cut = next((n for n, c in enumerate(text) if c in "<("), len(text))
    head = text[:cut].partition(" [clone ")[0].strip()
    if text.startswith("[") or (cut == len(text) and " " in head):
        return text.strip(), ""  # no function: a copy, or a range that somebody named in words
    words = head.split("::")[-1].split()
    base = words[-1] if words else ""
    found = _WORD.search(text, cut + 1) if text[cut : cut + 1] == "<" else None
    if found is None:
        return base, ""
    end = next((n for n in range(found.start(), len(text)) if text[n] in ",<>("), len(text))
    return base, text[found.start() : end].strip()
