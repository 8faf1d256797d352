"""Which decoder layers attend to everything, to a window, to a chunk, or not at all.

The KV cache of a layer is read over the tokens that the layer attends to, so the
pattern decides the cached bytes: taking every layer of gpt-oss or Gemma-3 as full
overstates them 2 to 5 times.  Families write the pattern in a dozen ways; they are
tried in a fixed order, the most explicit first:

``layer_types`` (and ``layers_block_type``; GPT-Neo's ``attention_layers``) >
``sliding_window_pattern`` (every p-th layer is full) > ``hybrid_layer_pattern`` (MiMo:
1 = window) > ``full_attention_interval`` (Qwen3-Next) > ``attn_layer_indices`` (Bamba) /
``full_attn_idxs`` (LFM2) > ``attn_layer_period`` and ``_offset`` (Jamba) >
``hybrid_override_pattern`` (Nemotron-H) > ``linear_attn_config.full_attn_layers``
(Kimi-Linear, counted from 1) > ``attn_type_list`` (MiniMax-01: 1 = softmax) >
``no_rope_layers`` (Llama-4: 0 = full) > one window for all.

A type that is not in the table is UNPROVEN and named; it is never taken as full.

Sources: transformers 5's configuration classes, vLLM's models of the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ikit_mcp.registry import excerpt
from ikit_ops.decode.model_config import ModelConfig, whole
from ikit_ops.decode.vocabulary import words

Kind = Literal["full", "sliding", "chunked", "recurrent", "hybrid", "none", "unknown"]

_TYPES: dict[str, Kind] = {
    "full_attention": "full",
    "full": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "sliding": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "swa": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "kda_attention": "recurrent",
    "lightning_attention": "recurrent",
    "gated_deltanet": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "conv": "recurrent",
    "short_conv": "recurrent",
    "hybrid": "hybrid",
    "mlp": "none",
    "moe": "none",
    "dense": "none",
}
_NEMOTRON: dict[str, Kind] = {"M": "recurrent", "*": "full", "-": "none", "E": "none"}
_WINDOW_EVERYWHERE = words("mistral mixtral phi3 phimoe starcoder2 ministral ministral3")
_OPT_IN_WINDOW = ("qwen2", "qwen3")
# Attention that reads a part of the cache by rules that are not defined here, or a cache
# that layers share by rules of their own: never taken for plain attention.
_NOT_DEFINED = (
    "compress_ratios",
    "sparse_config",
    "sparse_attention_config",
    "moba_config",
    "nsa_config",
    "use_cla",
    "use_mixed_mlp_cla",
    "dual_chunk_attention_config",
    "layer_group_size",  # Ring-linear: one softmax layer in each group
    "dense_attention_every_n_layers",  # Phi-3-small: block-sparse in between
)
_READ_BY_LAYER = words(
    "head_dim v_head_dim num_key_value_heads num_attention_heads intermediate_size "
    "moe_intermediate_size hidden_act hidden_activation"
)
_OF_MIXERS = words("attn attention swa linear mixer full global local recurrent mamba ssm window")
_OF_LAYERS = words("layers layer idx idxs ids indices list types type pattern")
_NOT_OF_MIXERS = words("mlp moe ffn expert experts rope dense heads mtp token model tokens")
# Keys with "window" in their name that say nothing by themselves about what is cached.
_WINDOW_KEYS = words("sliding_window max_window_layers use_sliding_window sliding_window_pattern")


@dataclass(frozen=True)
class LayerKind:
    """What one layer attends to.

    ``span`` is the window or chunk in tokens; ``stated`` is whether the configuration
    describes this layer, or merely has no pattern at all.
    """

    kind: Kind
    span: int | None = None
    why: str = ""
    stated: bool = True


def layer_kinds(config: ModelConfig, layers: int) -> list[LayerKind]:
    """The kind of each of the first ``layers`` decoder layers, by the configuration alone.

    A layer that the configuration does not describe is ``unknown`` with the reason; what
    the headers show about it decides then (``attention.py``).
    """
    strange = next((key for key in _NOT_DEFINED if config.get(key)), None)
    if strange is not None:
        return [
            LayerKind("unknown", None, f"{strange} in config.json is not defined here")
        ] * layers
    for rule in _RULES:
        kinds = rule(config, layers)
        if kinds is not None:
            found = [_with_span(kind, config) for kind in kinds]
            break
    else:
        strange_kind = _undefined(config)
        found = [strange_kind or _without_pattern(config, index) for index in range(layers)]
    return [_apart(config, index) or kind for index, kind in enumerate(found)]


def _apart(config: ModelConfig, layer: int) -> LayerKind | None:
    """A layer that is described apart from the others, in keys that are not read here."""
    for key in config.at_layer(layer):
        if key not in _READ_BY_LAYER:
            why = f"per_layer_config in config.json gives it {excerpt(str(key), 60)} of its own"
            return LayerKind("unknown", None, why)
    blocks = config.listed("block_configs") or []
    block = blocks[layer] if layer < len(blocks) else None
    attention = block.get("attention") if isinstance(block, dict) else None
    if isinstance(attention, dict):
        window = next((k for k in attention if "window" in k and attention[k]), None)
        if window is not None:
            return LayerKind("unknown", None, f"block_configs in config.json gives it a {window}")
    return None


def _with_span(kind: Kind | str, config: ModelConfig) -> LayerKind:
    """Add the window or chunk to a kind; unknown when there should be one and is not."""
    if kind == "sliding":
        window = config.integer("sliding_window", "sliding_window_size", "window_size")
        if not window:
            return LayerKind(
                "unknown", None, "a sliding layer, but config.json has no sliding_window"
            )
        return LayerKind("sliding", window)
    if kind == "chunked":
        chunk = config.integer("attention_chunk_size")
        # a null chunk is how Llama-4's long-context configs turn chunking off
        return LayerKind("chunked", chunk) if chunk else LayerKind("full")
    if kind in ("full", "recurrent", "hybrid", "none"):
        return LayerKind(kind)  # type: ignore[arg-type]  # narrowed by the test above
    return LayerKind("unknown", None, f"layer type {excerpt(str(kind), 60)!r} is not known")


def _without_pattern(config: ModelConfig, layer: int) -> LayerKind:
    """A layer of a model whose configuration has no pattern: the window is all there is."""
    window = config.integer("sliding_window")
    family = config.family
    everything = LayerKind("full", stated=False)
    if not window:
        return everything
    if family.startswith(_OPT_IN_WINDOW):
        first = config.integer("max_window_layers") or 0
        used = config.get("use_sliding_window") is True
        if used and "_moe" in family:  # Qwen2-MoE and Qwen3-MoE choose them by other rules
            why = f"{excerpt(family, 60)} uses its sliding_window, but in which layers is not said"
            return LayerKind("unknown", window, why, stated=False)
        sliding = used and layer >= first
        return LayerKind("sliding", window, stated=False) if sliding else everything
    if config.get("use_sliding_window") is False:
        return everything
    if family in _WINDOW_EVERYWHERE:
        return LayerKind("sliding", window, stated=False)
    why = f"sliding_window is {window}, but which layers use it is not said"
    return LayerKind("unknown", window, why, stated=False)


def _undefined(config: ModelConfig) -> LayerKind | None:
    """A window, or a list of what the layers are, under a name that no rule knows.

    A model that says so much about its attention does not attend to everything everywhere.
    """
    inner = config.text.get("attn_config")
    for part in (config.text, inner if isinstance(inner, dict) else {}):
        for key, value in part.items():
            if _sets_windows(str(key), value) or _lists_layers(str(key), value):
                why = f"{excerpt(str(key), 60)} in config.json is not defined here"
                return LayerKind("unknown", None, why, stated=False)
    return None


def _sets_windows(key: str, value: Any) -> bool:
    """Whether a key names a window and its value turns it on."""
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    listed = isinstance(value, list) and any(value)  # PLaMo-3 lists a window for each layer
    names_one = "window" in key or "swa" in key.split("_")
    return (number or listed) and key not in _WINDOW_KEYS and names_one


def _lists_layers(key: str, value: Any) -> bool:
    """Whether a key lists what mixes the tokens of each layer (``mixer_types``, ``swa_layers``)."""
    parts = set(key.split("_"))
    if not isinstance(value, list) or not value or parts & _NOT_OF_MIXERS:
        return False
    named = all(isinstance(item, str) for item in value) and parts & {"types", "type", "pattern"}
    numbers = all(isinstance(item, int) for item in value)
    return bool(named or (numbers and parts & _OF_MIXERS and parts & _OF_LAYERS))


def _by_types(config: ModelConfig, layers: int) -> list[str] | None:
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        types = config.listed(key)
        if types is not None:
            kinds = [
                _TYPES.get(item, str(item)) if isinstance(item, str) else "?" for item in types
            ]
            return (kinds + ["beyond layer_types"] * layers)[:layers]
    return None


def _by_period(config: ModelConfig, layers: int) -> list[str] | None:
    period = config.get("sliding_window_pattern")
    if period is None or config.get("sliding_window") is None:
        return None
    if isinstance(period, str):  # EXAONE-4 spells it: LLLG
        letters = {"L": "sliding", "G": "full"}
        return (
            [letters.get(period[i % len(period)], period) for i in range(layers)]
            if period
            else None
        )
    every = whole(period, "sliding_window_pattern")
    if every == 0:
        return None
    kinds = ["full" if i % every == every - 1 else "sliding" for i in range(layers)]
    if config.family == "gemma4" and kinds:
        kinds[-1] = "full"  # the class forces its last layer to attend to everything
    return kinds


def _by_flags(config: ModelConfig, layers: int) -> list[str] | None:
    flags = config.listed("hybrid_layer_pattern")
    return None if flags is None else _choose(flags, layers, {1: "sliding", 0: "full"})


def _by_interval(config: ModelConfig, layers: int) -> list[str] | None:
    every = config.integer("full_attention_interval")
    if not every:
        return None
    return ["full" if i % every == every - 1 else "recurrent" for i in range(layers)]


def _by_indices(config: ModelConfig, layers: int) -> list[str] | None:
    for key in ("attn_layer_indices", "full_attn_idxs"):
        indices = config.listed(key)
        if indices is not None:
            full = {whole(index, key) for index in indices}
            return ["full" if i in full else "recurrent" for i in range(layers)]
    return None


def _by_hybrid_ids(config: ModelConfig, layers: int) -> list[str] | None:
    indices = config.listed("hybrid_layer_ids")
    if indices is None:
        return None
    both = {whole(index, "hybrid_layer_ids") for index in indices}
    return ["hybrid" if i in both else "recurrent" for i in range(layers)]


def _by_offset(config: ModelConfig, layers: int) -> list[str] | None:
    period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset")
    if not period or offset is None:
        return None
    return ["full" if i % period == offset else "recurrent" for i in range(layers)]


def _by_letters(config: ModelConfig, layers: int) -> list[str] | None:
    letters = config.get("hybrid_override_pattern")
    if not isinstance(letters, str):
        return None
    kinds = [_NEMOTRON.get(letter, letter) for letter in letters]
    return (kinds + ["beyond hybrid_override_pattern"] * layers)[:layers]


def _by_kimi(config: ModelConfig, layers: int) -> list[str] | None:
    section = config.get("linear_attn_config")
    full = section.get("full_attn_layers") if isinstance(section, dict) else None
    if not isinstance(full, list):
        return None
    numbers = {whole(item, "full_attn_layers") for item in full}  # counted from 1
    return ["full" if i + 1 in numbers else "recurrent" for i in range(layers)]


def _by_attention_list(config: ModelConfig, layers: int) -> list[str] | None:
    flags = config.listed("attn_type_list")
    return None if flags is None else _choose(flags, layers, {1: "full", 0: "recurrent"})


def _by_rope(config: ModelConfig, layers: int) -> list[str] | None:
    if config.family != "llama4":
        return None
    flags = config.listed("no_rope_layers")
    if flags:  # 1: rope and chunks; 0: neither
        return _choose(flags, layers, {1: "chunked", 0: "full"})
    every = config.integer("no_rope_layer_interval") or 4
    return ["full" if i % every == every - 1 else "chunked" for i in range(layers)]


def _choose(flags: list[Any], layers: int, names: dict[int, str]) -> list[str]:
    """Names by flag; a flag or a layer that is not there names itself."""
    kinds = [names.get(f, f"flag {f}") if isinstance(f, int) else "?" for f in flags]
    return (kinds + ["beyond the list"] * layers)[:layers]


_RULES = (
    _by_types,
    _by_period,
    _by_flags,
    _by_interval,
    _by_indices,
    _by_hybrid_ids,
    _by_offset,
    _by_letters,
    _by_kimi,
    _by_attention_list,
    _by_rope,
)
