"""The KV cache that one token reads: bytes by layer, over the tokens it attends to.

- Grouped-query attention reads ``(K width + V width) x kv_heads`` elements a cached token
  and layer; K and V may differ (MiMo 192 and 128), and so may layers (Gemma-4).  Where
  the key and value projections keep their shape in the headers, their rows are the
  cached width; packed ones lose it and the configuration decides.
- Multi-head latent attention caches one latent of ``kv_lora_rank + qk_rope_head_dim``
  elements, for all heads and for K and V together, so without a factor of 2
  (vLLM's MLAAttentionSpec; SGLang's calculate_mla_kv_cache_dim).  ``expanded`` is the
  per-head cache of transformers before 5.19, which keeps the latent too; ``fp8_ds_mla`` is
  512 + 4*4 + 64*2 = 656 bytes.
- A window W holds the current token too: ``min(C, W)`` cached tokens are the convention
  here, ``min(C, W - 1)`` the strict count (vLLM keeps W - 1).  A chunk is read up to its
  boundary: ``min(C, chunk)`` at most, ``C mod chunk`` at position C.
- A layer that shares another's cache stores no keys but reads the donor's: it counts,
  since a cache of that size does not stay in L2 between two layers.
- Sparse attention with an indexer (DeepSeek-V3.2) reads ``min(C, index_topk)`` latents,
  and for every cached token the indexer's key: its width in fp8 and one 4-byte scale.

Sources: vLLM deepseek_v2.py, flashmla_sparse.py, gemma3n.py, kv_cache_interface.py;
transformers 5 modelling files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ikit_mcp.registry import excerpt
from ikit_ops.decode.formats import UNPACKED
from ikit_ops.decode.mixers import FUSED_QKV, Mixer
from ikit_ops.decode.model_config import ModelConfig, whole
from ikit_ops.decode.pattern import LayerKind
from ikit_ops.decode.vocabulary import words

KV_BYTES: dict[str, Fraction] = {
    "bf16": Fraction(2),
    "fp16": Fraction(2),
    "fp8": Fraction(1),
    "q8_0": Fraction(34, 32),
}
FP8_DS_MLA_BYTES = 656


@dataclass(frozen=True)
class KvLayer:
    """What one attention layer reads of its cache.

    Attributes:
        layer: the decoder layer.
        kind: gqa, mla or dsa.
        elements: cached elements a token, K and V together.
        window, chunk: tokens that it attends to, None when all.
        heads: kv heads, which tensor parallelism splits; None for a latent.
        donor: the layer whose cache it reads, None when its own.
        topk, index_bytes: sparse attention's limit, and its indexer's bytes a token.
    """

    layer: int
    kind: str
    elements: int
    window: int | None = None
    chunk: int | None = None
    heads: int | None = None
    donor: int | None = None
    topk: int | None = None
    index_bytes: int = 0

    def tokens(self, context: int, *, strict: bool = False) -> int:
        """Cached tokens that are read at ``context``."""
        if self.window is not None:
            return min(context, max(self.window - 1, 0) if strict else self.window)
        if self.chunk is not None:
            return context % self.chunk if strict else min(context, self.chunk)
        return min(context, self.topk) if self.topk is not None else context

    def bytes(self, context: int, element: Fraction, *, strict: bool = False) -> int:
        """Bytes read at ``context`` with ``element`` bytes an element."""
        latents = self.tokens(context, strict=strict) * self.elements * element
        return -(-latents // 1) + context * self.index_bytes

    def bytes_a_token(self, element: Fraction) -> int:
        """Bytes that one cached token takes in this layer."""
        return int(-(-self.elements * element // 1)) + self.index_bytes


@dataclass
class KvPlan:
    """The attention layers of a model, and what could not be established about them."""

    layers: list[KvLayer] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan_kv(
    config: ModelConfig,
    kinds: list[LayerKind],
    mixers: dict[int, list[Mixer]],
    mla_cache: str,
    shared: int | None = None,
) -> KvPlan:
    """What every decoder layer reads of the KV cache.

    Args:
        config: the model's configuration.
        kinds: what each layer attends to, by the configuration.
        mixers: what each layer is, by its tensors.
        mla_cache: latent, expanded or fp8_ds_mla.
        shared: layers at the end that read another's cache; None asks the configuration.
    """
    plan = KvPlan()
    doubts: dict[str, list[int]] = {}
    if shared is None:
        shared = config.integer("num_kv_shared_layers") or 0
    shared_from = max(len(kinds) - shared, 0)
    last: dict[str, KvLayer] = {}
    for index, kind in enumerate(kinds):
        softmax = [m for m in mixers.get(index, []) if m.family in _SOFTMAX_FAMILIES]
        found, why = _one_layer(config, index, kind, softmax, mla_cache)
        if index >= shared_from and softmax:
            donor = last.get(kind.kind)
            why = None if donor else "shares the cache of a layer that is not there"
            found = _reader(donor, index) if donor else None
        elif found is not None:
            last[kind.kind] = found
        if why is not None:
            doubts.setdefault(why, []).append(index)
        if found is not None:
            plan.layers.append(found)
    plan.doubts = [f"KV cache of {spans(at)}: {why}" for why, at in doubts.items()]
    return plan


_INDEX_KEYS = words(
    "index_topk index_head_dim index_n_heads index_topk_freq index_topk_pattern "
    "index_skip_topk_offset indexer_types indexer_rope_interleave"
)
_SOFTMAX_FAMILIES = frozenset({"gqa", "mla", "dsa", "query_only"})


def _reader(donor: KvLayer, layer: int) -> KvLayer:
    """A layer that reads the donor's cache."""
    return KvLayer(
        layer, donor.kind, donor.elements, donor.window, donor.chunk, donor.heads, donor.layer
    )


def _one_layer(
    config: ModelConfig, index: int, kind: LayerKind, softmax: list[Mixer], mla_cache: str
) -> tuple[KvLayer | None, str | None]:
    """The cache of one layer, and a doubt about it."""
    if not softmax:
        if kind.stated and kind.kind in ("full", "sliding", "chunked", "hybrid"):
            return None, "config.json says attention, but its tensors are not those of attention"
        return None, None
    mixer = softmax[0]
    if kind.kind in ("recurrent", "none"):
        return None, f"config.json says {kind.kind}, but it stores attention weights"
    if kind.kind == "unknown":
        return None, kind.why
    window = kind.span if kind.kind == "sliding" else None
    chunk = kind.span if kind.kind == "chunked" else None
    if len(softmax) > 1:
        return None, "more than one attention in a layer"
    if mixer.strange:
        names = ", ".join(excerpt(name, 60) for name in mixer.strange[:3])
        return None, f"attention tensors of an unknown kind ({names})"
    if mixer.family == "query_only":
        return None, "stores queries but no keys, and config.json shares no cache"
    if mixer.family in ("mla", "dsa"):
        return _latent(config, index, mixer, window, mla_cache)
    return _grouped(config, index, mixer, kind, window, chunk)


def _latent(
    config: ModelConfig, index: int, mixer: Mixer, window: int | None, mla_cache: str
) -> tuple[KvLayer | None, str | None]:
    """The latent cache of DeepSeek's attention, with or without an indexer."""
    rank = config.integer("kv_lora_rank")
    rope = config.integer("qk_rope_head_dim")
    if not rank or rope is None:
        return None, "latent attention, but config.json has no kv_lora_rank and qk_rope_head_dim"
    projection = mixer.slot("kv_a_proj_with_mqa") or mixer.slot("kv_a_proj")
    plain = projection is not None and projection.dtype in UNPACKED
    rows = projection.shape[0] if projection is not None and projection.shape and plain else None
    if rows is not None and rows != rank + rope:
        return None, f"config.json says a latent of {rank + rope}, its projection makes {rows}"
    elements = rank + rope
    heads = None
    if mla_cache == "expanded":
        nope, value = config.integer("qk_nope_head_dim"), config.integer("v_head_dim")
        heads = config.heads
        if not heads or nope is None or value is None:
            return None, "expanded MLA cache needs qk_nope_head_dim, v_head_dim and the heads"
        elements = heads * (nope + rope + value)
    if mixer.family == "mla":
        if config.integer("index_topk"):
            return None, "config.json has index_topk, but the layer stores no indexer"
        return KvLayer(index, "mla", elements, window, heads=heads), None
    topk, width = config.integer("index_topk"), config.integer("index_head_dim")
    if not topk or not width:
        return None, "an indexer, but config.json has no index_topk and index_head_dim"
    other = next((key for key in config.text if _strange_index(str(key), config)), None)
    if other is not None:
        other = excerpt(other, 60)
        return None, f"{other} in config.json: an indexer of a kind that is not defined here"
    keys = mixer.slot("indexer.wk") or mixer.slot("indexer.attn_k")
    if keys is not None and keys.dtype in UNPACKED and keys.shape[:1] != (width,):
        return None, f"config.json says indexer keys of {width}, their weights {list(keys.shape)}"
    index_bytes = width + 4 * -(-width // 128)  # fp8 keys, one fp32 scale per 128
    return KvLayer(
        index, "dsa", elements, window, heads=heads, topk=topk, index_bytes=index_bytes
    ), None


def _strange_index(key: str, config: ModelConfig) -> bool:
    """Whether a key describes an indexer otherwise than DeepSeek-V3.2 does (pooled keys)."""
    return (
        key.startswith(("index_", "indexer_")) and key not in _INDEX_KEYS and bool(config.get(key))
    )


def _grouped(
    config: ModelConfig,
    index: int,
    mixer: Mixer,
    kind: LayerKind,
    window: int | None,
    chunk: int | None,
) -> tuple[KvLayer | None, str | None]:
    """The cache of a grouped-query layer, from the headers and the configuration."""
    heads, key, value = _widths(config, index, kind)
    declared = heads * (key + value) if heads and key and value else None
    rows = _rows(mixer)
    fused = not any(leaf in mixer.modules for leaf in ("k_proj", "wk", "k_linear"))
    same = config.get("attention_k_eq_v") is True
    if not fused and "v_proj" not in mixer.modules and "wv" not in mixer.modules and not same:
        return None, "stores keys but no values"
    stored = rows
    if fused or stored is None:
        if declared is None:
            return None, "config.json does not say the kv heads and their width"
        if fused and not _fused_agrees(config, mixer, declared, heads, key):
            return None, "the fused projection is not as wide as config.json says"
        stored = declared
    doubt = None
    if declared is not None and declared != stored:
        doubt = f"config.json says {declared} cached elements a token, the headers {stored}"
    return KvLayer(index, "gqa", stored, window, chunk, heads), doubt


def _rows(mixer: Mixer) -> int | None:
    """Rows of the key and value projections, when their shapes are the matrices'."""
    key = mixer.slot("k_proj") or mixer.slot("wk")
    value = mixer.slot("v_proj") or mixer.slot("wv") or key
    if key is None or value is None:
        return None
    plain = all(s.dtype in UNPACKED and len(s.shape) == 2 for s in (key, value))
    return key.shape[0] + value.shape[0] if plain else None


def _fused_agrees(
    config: ModelConfig, mixer: Mixer, declared: int, kv_heads: int | None, key: int | None
) -> bool:
    """Whether a fused projection's rows are the queries' plus the declared K and V widths."""
    slot = next((mixer.slot(leaf) for leaf in FUSED_QKV if leaf in mixer.modules), None)
    heads = config.heads
    if slot is None or slot.dtype not in UNPACKED or len(slot.shape) != 2 or not heads or not key:
        return True
    return heads * key + declared in slot.shape  # GPT-2 stores the transpose


def _widths(
    config: ModelConfig, index: int, kind: LayerKind
) -> tuple[int | None, int | None, int | None]:
    """(kv heads, key width, value width) that the configuration says for a layer."""
    if config.get("block_configs"):
        return None, None, None  # DeciLM describes each block apart; the headers show it
    if kind.kind == "sliding":
        heads = config.integer("swa_num_key_value_heads")
        if heads is None and config.family == "mimo_v2_flash" and config.kv_heads:
            heads = 2 * config.kv_heads  # transformers' class doubles them in windowed layers
        key = config.integer("swa_head_dim")
        value = config.integer("swa_v_head_dim")
    else:
        same = config.get("attention_k_eq_v") is not False
        heads = config.integer("num_global_key_value_heads") if same else None
        key = value = config.integer("global_head_dim")
    heads = heads or _listed(config, index) or config.kv_heads
    key = key or config.head_dim
    if kind.kind != "sliding" or value is None:
        value = value or config.integer("v_head_dim")
    own = config.at_layer(index)  # transformers 5 writes what differs by layer, each apart
    if own.get("num_key_value_heads") is not None:
        heads = whole(own["num_key_value_heads"], "num_key_value_heads")
    if own.get("head_dim") is not None:
        key = whole(own["head_dim"], "head_dim")
        value = whole(own["v_head_dim"], "v_head_dim") if own.get("v_head_dim") else key
    return heads or None, key or None, value or key or None


def _listed(config: ModelConfig, index: int) -> int | None:
    """The kv heads of a layer where the configuration lists them by layer (OpenELM, GGUF)."""
    for name in ("num_key_value_heads", "num_kv_heads"):
        value: Any = config.get(name)
        if isinstance(value, list) and index < len(value):
            return whole(value[index], name)
    return None


def spans(numbers: list[int]) -> str:
    """Layer numbers as ranges: ``layers 0-2, 5``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:8]]
    more = ", ..." if len(ranges) > 8 else ""
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join(texts)}{more}"
