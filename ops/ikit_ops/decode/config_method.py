"""Bytes per token from a configuration alone, for the few families where that is exact.

A dense decoder's weights follow from its configuration: per layer the q, k, v, o, gate,
up and down projections, two norms, biases where the class has them; once, a final norm
and the head.  For Llama, Mistral, Qwen2, Qwen3 and Phi-3 this reproduces the stored
checkpoints to the byte.  For everything else a configuration is not enough (experts,
latent attention, recurrent state, unusual blocks, class defaults that nobody published),
and a formula that almost fits is wrong by a factor in silence.  So this is an allow-list,
and a refusal names the key that decided it.

Number formats: bf16 and fp16, 2 bytes; fp8, 1 byte and one fp32 scale per block of
128 x 128, with norms, biases, embedding and head in bf16 (DeepSeek's layout); q8_0, 34
bytes per 32 weights with norms and biases in fp32 (llama.cpp).

Sources: transformers 5 modelling files of the five families.
"""

from __future__ import annotations

from typing import Any

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.decode.count import count_caches, layer_rows
from ikit_ops.decode.formats import quantization_name
from ikit_ops.decode.kv import KvLayer, KvPlan
from ikit_ops.decode.model_config import EXPERT_COUNT_KEYS, ModelConfig
from ikit_ops.decode.pattern import layer_kinds
from ikit_ops.decode.state import StatePlan
from ikit_ops.decode.tally import Counts, Options

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
_SIDE_DTYPE = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "q8_0": "fp32"}
_TABLE_DTYPE = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16", "q8_0": "q8_0"}
_DECIDES_OTHERWISE = (
    "kv_lora_rank",
    "num_kv_shared_layers",
    "linear_attn_config",
    "attention_chunk_size",
    "index_topk",
    "mamba_d_state",
    "ssm_state_size",
    "block_configs",
    "per_layer_config",
    "vision_config",
    "audio_config",
)


def count_config(
    raw: dict[str, Any], options: Options, dtype: str | None, lm_head_dtype: str | None
) -> tuple[Counts, str]:
    """The bytes of one decode step by formula, and the dtype that was counted.

    Args:
        raw: config.json.
        options: what is asked for.
        dtype: bf16, fp16, fp8 or q8_0; None takes what the configuration declares.
        lm_head_dtype: the head's format; None follows ``dtype``.

    Raises:
        OpError: the family is not on the allow-list, or a value is missing; it names
            the key.
    """
    config = ModelConfig(raw)
    _check_family(config)
    counts = Counts("config", None)
    counts.quant = quantization_name(config.quantization, None)
    chosen = dtype or _declared_dtype(config, counts)
    shape = _Shape(config)
    table, side = _TABLE_DTYPE[chosen], _SIDE_DTYPE[chosen]
    head_dtype = lm_head_dtype or table
    layers = [shape.layer(chosen, side) for _ in range(shape.layers)]
    for layer in layers:
        for group, size in layer.items():
            counts.groups[group] = counts.groups.get(group, 0) + size
    counts.groups["norms"] += vector(side, shape.hidden)
    row = matrix(table, 1, shape.hidden, "hidden_size") if table != "fp8" else shape.hidden
    counts.groups["embedding_row"] = row * options.batch
    counts.groups["lm_head"] = matrix(head_dtype, shape.vocab, shape.hidden, "hidden_size")
    if config.tied:
        counts.read_twice = row * options.batch
    else:
        counts.not_read["embedding_rest"] = (shape.vocab - options.batch) * row
    _split(counts, options)
    _formats(counts, chosen, side, table, head_dtype)
    kv = _kv(config, shape)
    if options.include_mtp:
        counts.limitations.append("include_mtp needs headers: no prediction layers were counted")
    count_caches(counts, kv, StatePlan(), options)
    counts.per_layer = layer_rows(layers, kv, StatePlan(), options)
    if dtype is None and counts.quant and chosen != "fp8":
        counts.doubt(
            "weights",
            f"config.json declares {counts.quant}, counted as {chosen}: the headers are needed",
            counts.groups["attention"] + counts.groups["mlp"],
        )
    return counts, chosen


def _check_family(config: ModelConfig) -> None:
    """Refuse what the formula is not exact for, naming the key that decided it."""
    covers = f"the config method covers {', '.join(FAMILIES)}"
    for key in EXPERT_COUNT_KEYS:
        value = config.get(key)
        if value:
            raise OpError(
                f"config.json has {key}={excerpt(str(value), 40)}: a mixture of experts cannot be "
                "counted from a configuration",
                "give the model folder or its Hub id, so that the headers can be read",
            )
    if config.family not in FAMILIES:
        raise OpError(
            f"config.json has model_type={excerpt(config.family, 60) or None!r}: {covers}",
            "give the model folder or its Hub id, so that the headers can be read",
        )
    for key in _DECIDES_OTHERWISE:
        if config.outer(key):
            raise OpError(
                f"config.json has {key}, which a {config.family} of the usual shape has not",
                "give the model folder or its Hub id, so that the headers can be read",
            )


def _declared_dtype(config: ModelConfig, counts: Counts) -> str:
    """The dtype to count when none was asked: fp8 where declared, else the model's own."""
    quantization = config.quantization or {}
    kind = f"{quantization.get('quant_method')} {quantization.get('quant_algo')}".lower()
    if "fp8" in kind.split():
        return "fp8"
    if config.dtype == "fp16":
        return "fp16"
    if config.dtype == "fp32":
        counts.limitations.append("config.json says float32, counted as bf16 (engines downcast)")
    return "bf16"


class _Shape:
    """The sizes that the formula needs, each present or refused by its key."""

    def __init__(self, config: ModelConfig) -> None:
        self.family = config.family
        self.layers = _needed(config.layers, "num_hidden_layers")
        self.hidden = _needed(config.hidden, "hidden_size")
        self.inner = _needed(config.integer("intermediate_size"), "intermediate_size")
        self.vocab = _needed(config.integer("vocab_size"), "vocab_size")
        self.heads = _needed(config.heads, "num_attention_heads")
        self.kv_heads = _needed(config.kv_heads, "num_key_value_heads")
        self.head_dim = _needed(config.head_dim, "head_dim")
        self.attention_bias = config.get("attention_bias") is True
        self.mlp_bias = config.get("mlp_bias") is True

    def layer(self, dtype: str, side: str) -> dict[str, int]:
        """Bytes of one decoder layer by group."""
        query, cached = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (
            matrix(dtype, query, self.hidden, "hidden_size")
            + 2 * matrix(dtype, cached, self.hidden, "hidden_size")
            + matrix(dtype, self.hidden, query, "num_attention_heads x head_dim")
        )
        if self.attention_bias or self.family == "qwen2":
            attention += vector(side, query + 2 * cached)
        if self.attention_bias and self.family != "qwen2":  # Qwen2's o_proj never has one
            attention += vector(side, self.hidden)
        mlp = 2 * matrix(dtype, self.inner, self.hidden, "hidden_size") + matrix(
            dtype, self.hidden, self.inner, "intermediate_size"
        )
        if self.mlp_bias:
            mlp += vector(side, 2 * self.inner + self.hidden)
        norms = vector(side, 2 * self.hidden)
        if self.family == "qwen3":
            norms += vector(side, 2 * self.head_dim)
        return {"attention": attention, "mlp": mlp, "norms": norms}


def matrix(dtype: str, rows: int, columns: int, key: str) -> int:
    """Bytes of a weight matrix; OpError when q8_0 blocks do not fill its rows."""
    if dtype == "fp8":
        return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)
    if dtype == "q8_0":
        if columns % 32:
            raise OpError(
                f"q8_0 needs rows of whole blocks of 32 weights, and {key} is {columns}",
                "choose another dtype",
            )
        return rows * columns // 32 * 34
    return rows * columns * (4 if dtype == "fp32" else 2)


def vector(dtype: str, length: int) -> int:
    """Bytes of a norm or a bias."""
    return length * (4 if dtype == "fp32" else 2)


def _needed(value: int | None, key: str) -> int:
    if not value:
        raise OpError(
            f"config.json has no {key}", "give a complete config.json, or the model folder"
        )
    return value


def _kv(config: ModelConfig, shape: _Shape) -> KvPlan:
    """The cache of every layer; a pattern that says anything but attention is refused."""
    plan = KvPlan()
    for index, kind in enumerate(layer_kinds(config, shape.layers)):
        if kind.kind not in ("full", "sliding"):
            raise OpError(
                f"config.json: layer {index} is {kind.why or kind.kind}",
                "give the model folder or its Hub id, so that the headers can be read",
            )
        elements = 2 * shape.kv_heads * shape.head_dim
        window = kind.span if kind.kind == "sliding" else None
        plan.layers.append(KvLayer(index, "gqa", elements, window, heads=shape.kv_heads))
    return plan


def _formats(counts: Counts, dtype: str, side: str, table: str, head: str) -> None:
    """Bytes read by weight format."""
    for group, name in (
        ("attention", dtype),
        ("mlp", dtype),
        ("norms", side),
        ("embedding_row", table),
        ("lm_head", head),
    ):
        counts.by_format[name] = counts.by_format.get(name, 0) + counts.groups[group]


def _split(counts: Counts, options: Options) -> None:
    """Bytes of one device: all but norms and the embedding's row are split."""
    if options.tensor_parallel > 1:
        for group in ("attention", "mlp", "lm_head"):
            counts.groups[group] = -(-counts.groups[group] // options.tensor_parallel)
