"""Which part of the work a kernel does, told by its name; the rules are data.

Kernel names follow no standard: libraries put tile sizes, architectures and data types into
them, compilers put whole functions.  But each family keeps a few tell-tale words.  The rules
are tried in order and the first that fits decides, so the order carries knowledge: a grouped
GEMM of experts is MoE before it is GEMM, a fused all-reduce with a norm is communication, and
``rope_norm`` is no norm.  A name that no rule knows is ``other``, which is an answer too.

Attention includes what only attention needs: softmax of the scores, rotary embedding, and
writes to the KV cache.  Softmax over a vocabulary is sampling; where a name cannot tell the
two apart, attention is the guess.  So are the recurrences that stand in for attention.

A compiler names a fused kernel by all operators in it, so a word says less there: nearly every
one converts types (``_to_copy``), which makes it a copy only when it does nothing else.
"""

from __future__ import annotations

import functools
import re

RULES: tuple[tuple[str, str], ...] = (
    (
        "communication",
        r"nccl|rccl|msccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|all2all"
        r"|cross_device_(reduce|store)|one_?shot_|two_?shot_|multimem|nvshmem|rocshmem|deep_?ep"
        r"|pplx|quick_?reduce|internode|intranode|custom_ar|sendrecv|p2p_?copy",
    ),
    ("memcpy", r"^\[?cuda mem(cpy|set)|^mem(cpy|set)\b|__amd_rocclr_(copy|fill)|(copy|fill)buffer"),
    (
        "moe",
        r"moe|topk_?gating|topk_?softmax|expert|grouped_?topk|group(ed)?_?(\w{0,24}_)?(gemm|mm)\b"
        r"|group(ed)?_?gemm|gemm_?grouped|groupproblemshape|[mk]_grouped|mul_mat_id|mmq?_ids"
        r"|permute_?tokens|routing(main|indices|custom|deepseek|_compute)|matmul_ogs|bitmatrix"
        r"|_topk_forward|reduce_grouped|finalize_(matmul|scatter)|_ep_(scatter|gather)"
        r"|expandinputrows|doactivationkernel|k_argsort",
    ),
    (
        "sampling",
        r"(?<!up)(?<!down)(?<!grid_)sampl|arg_?max|top_?p(?![a-z])|topptopk|radix_?topk"
        r"|top_?k_?(mask|renorm|top)|gathertopk|[sm]btopk|radixfindkth|multinomial|penalt"
        r"|cunn_softmax|log_?soft_?max|distribution_|philox|(?<!mqa_)logits_|min_p(?![a-z])"
        r"|gumbel|bitonicsort|radixsort|rejection|sort_?postprocess|bitmask",
    ),
    (
        "attention",
        r"attn|attention|flash(?!_?infer)|fmha|(?<![a-z])m[hlq]a(?![a-z])|paged|sdpa|(?<![a-z])pa_"
        r"|(batch|single)_?(prefill|decode)|soft_?max|kv_?(cache|indices|indptr|buffer)|set_rows"
        r"|reshape_and_cache|concat_and_cache|gather\w{0,40}_cache|indexer|topk_?per_?row"
        r"|(?<![a-z])rope|rope_?kernel|qk_?norm_?rope|rotary|merge_?states?|split_?kv"
        r"|_fwd_(grouped_)?kernel_stage\d|^_fwd_kernel\d*$|reduce_segments"
        r"|causal_?conv|(?<![a-z])ssm|mamba|rwkv|selective_scan|_chunk_(scan|state)|state_passing"
        r"|bmm_chunk|gated_delta|recurrent|chunk_fwd_kernel|chunk_local_cumsum|chunk_scaled_dot"
        r"|recompute_w_u|solve_tril",
    ),
    ("norm", r"(?<![a-z])norm(?![a-z])|(rms|layer|group|batch|instance|l2)_?norm|normkernel"),
    (
        "gemm",
        r"gemm(?!a)|gemv|mat_?mul|mul_mat|(?<![a-z])(b|add|scaled_)mm(?![a-z])|cutlass|cublas"
        r"|nvjet|xmma|wgmma|cijk_|tensile|split_?k|dot_kernel|marlin|wvsplit|machete|hipblas|mfma"
        r"|linear_kernel|conv(olution)?[123]?d?_|implicit_?con|cudnn|winograd|fprop|bitblas"
        r"|exllama|awq|gptq|addmm",
    ),
    (
        "memcpy",
        r"direct_copy|copy_?kernel|catarraybatched|(?<![a-z])cpy_|copy(?![a-z])|concat_|memcpy"
        r"|memset|fillfunctor",
    ),
)
"""(category, pattern over the lower-case name), tried in this order."""

FUSED_RULES: tuple[tuple[str, str], ...] = (
    ("sampling", r"argmax|topk|sort|multinomial|log_softmax|exponential"),
    ("attention", r"attention|softmax|sdpa|cos_\w{0,80}sin|sin_\w{0,80}cos"),
    ("norm", r"rsqrt|norm|var_mean"),
    ("gemm", r"(?<![a-z])(b|add|baddb)?mm(?![a-z])|conv(olution|[123]d)"),
    (
        "memcpy",
        r"(_?(to_copy|clone|copy|cat|split|stack|slice|view|t|transpose|permute|expand))+_?",
    ),
)
"""The same for what a compiler fused, over the operators in the name; the last must be all."""

CATEGORIES = ("attention", "gemm", "moe", "norm", "sampling", "memcpy", "communication", "other")
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in RULES)
_COMPILED_FUSED = tuple((name, re.compile(pattern)) for name, pattern in FUSED_RULES)
_FUSED = re.compile(r"triton_[a-z0-9]+_fused_(\w*?)(_\d+)?(_kernel)?$")
_JUDGED = 4_096
_WRAPPERS = frozenset({"Kernel", "Kernel2", "device_kernel", "kernel_entry", "global_kernel"})
_WORD = re.compile(r"[A-Za-z_]\w*")


@functools.lru_cache(maxsize=65_536)
def category_of(name: str) -> str:
    """The category of a kernel's full name; long names are judged by their first part."""
    lower = name[:_JUDGED].lower()
    if fused := _FUSED.match(lower):
        return _of_fused(fused[1])
    for category, pattern in _COMPILED:
        if pattern.search(lower):
            return category
    return "other"


def _of_fused(operators: str) -> str:
    """The category of operators that a compiler fused: a conversion among them is no copy."""
    for category, pattern in _COMPILED_FUSED:
        if pattern.fullmatch(operators) if category == "memcpy" else pattern.search(operators):
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
