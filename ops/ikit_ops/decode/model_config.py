"""A model's configuration, whatever its author called things.

Families name the same quantity differently (``num_local_experts``, ``n_routed_experts``),
nest the language model's part in ``text_config`` (or ``llm_config``, ``language_config``,
``thinker_config.text_config``), and leave out what their transformers class defaults to:
Gemma-3-27B publishes neither its vocabulary nor its attention pattern.  This module is
the one place that knows the names and the defaults.  A value of the wrong type is an
error that names its key; an absent one is None, never a guess.

Sources of the defaults: the configuration classes of transformers 5 (file
``models/<type>/configuration_<type>.py``), for the keys that decide cached bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.decode.vocabulary import words

MAX_LAYERS = 10_000
_MAX_VALUE = 2**48
_LAYER_LISTS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_SECTIONS = ("ffn_config", "attn_config")  # DBRX and MPT keep their experts and heads apart
_NESTS = ("text_config", "llm_config", "language_config", "text_model_config", "thinker_config")

_GEMMA4 = {"sliding_window": 512, "sliding_window_pattern": 6, "global_head_dim": 512}
_SWA_4096_4 = {"sliding_window": 4096, "sliding_window_pattern": 4}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma3n": {
        "num_hidden_layers": 35,
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
    },
    "gemma4": {"num_key_value_heads": 4, "head_dim": 256, **_GEMMA4},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "cohere2": _SWA_4096_4,
    "olmo3": _SWA_4096_4,
    "exaone4": _SWA_4096_4,
    "mistral": {"sliding_window": 4096},
    "starcoder2": {"sliding_window": 4096},
    "llama4": {"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "mimo_v2_flash": {"head_dim": 192, "v_head_dim": 128, "sliding_window": 128},
    "qwen3_next": {"full_attention_interval": 4},
    "qwen3_5": {"full_attention_interval": 4},
    "mamba2": {"expand": 2, "conv_kernel": 4, "head_dim": 64, "n_groups": 8, "state_size": 128},
}
TIED_BY_DEFAULT = words(
    "gemma gemma2 gemma3 gemma3n gemma4 cohere cohere2 mamba falcon_mamba gpt2 bloom gpt_bigcode "
    "opt lfm2 lfm2_moe t5gemma smollm3"
)
"""Model types whose class ties the head to the embedding when the key is absent."""

EXPERT_COUNT_KEYS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "num_selected_experts",
)


class ModelConfig:
    """The language model's part of a configuration, with typed and named access.

    Attributes:
        raw: the configuration as read.
        text: the part that describes the language model (``raw`` itself when flat).
        family: the language model's ``model_type`` without ``_text``; "" when absent.
    """

    def __init__(self, raw: Mapping[str, Any] | None) -> None:
        self.raw: Mapping[str, Any] = raw or {}
        self.text = _text_part(self.raw)
        kind = self.text.get("model_type") or self.raw.get("model_type") or ""
        self.family = kind.removesuffix("_text") if isinstance(kind, str) else ""
        base = self.family.removesuffix("_moe")
        self._defaults = CLASS_DEFAULTS.get(self.family) or CLASS_DEFAULTS.get(base) or {}

    def get(self, *keys: str) -> Any:
        """The first of these keys that is there and not null, else the class default."""
        for key in keys:
            value = self.text.get(key)
            if value is not None:
                return value
        for section in _SECTIONS:
            inner = self.text.get(section)
            found = inner if isinstance(inner, dict) else {}
            for key in keys:
                if found.get(key) is not None:
                    return found[key]
        for key in keys:
            if key not in self.text and key in self._defaults:
                return self._defaults[key]
        return None

    def at_layer(self, layer: int) -> Mapping[str, Any]:
        """What ``per_layer_config`` says of one layer: values that replace the model's own."""
        values = self.get("per_layer_config")
        own = values.get(str(layer)) if isinstance(values, dict) else None
        return own if isinstance(own, dict) else {}

    def integer(self, *keys: str) -> int | None:
        """A whole number >= 0 under the first of these keys, or None.

        Raises:
            OpError: the value is no such number; it names the key.
        """
        for key in keys:
            value = self.get(key)
            if value is not None:
                return whole(value, key)
        return None

    def _once(self, *keys: str) -> int | None:
        """A whole number that may also be a list by layer; None for a list."""
        return None if isinstance(self.get(*keys), list) else self.integer(*keys)

    def listed(self, key: str) -> list[Any] | None:
        """The list under a key, or None when there is no list."""
        value = self.get(key)
        return value if isinstance(value, list) else None

    def outer(self, *keys: str) -> Any:
        """The first of these keys in the text part, then in the whole configuration."""
        for part in (self.text, self.raw):
            for key in keys:
                if part.get(key) is not None:
                    return part[key]
        return None

    @property
    def layers(self) -> int | None:
        """Decoder layers of the main model, without prediction layers that follow them."""
        count = self.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers")
        if count is None:  # Nemotron-H of transformers 5 says it by the list of its layers alone
            described = (self.get(key) for key in _LAYER_LISTS)
            count = next((len(x) for x in described if isinstance(x, list | str) and x), None)
        if count is not None and count > MAX_LAYERS:
            raise OpError(
                f"config.json: num_hidden_layers is {count}, more than {MAX_LAYERS}",
                "check config.json",
            )
        return count

    @property
    def hidden(self) -> int | None:
        """The width of the residual stream."""
        return self.integer("hidden_size", "n_embd", "d_model", "dim")

    @property
    def heads(self) -> int | None:
        """Query heads of an attention layer; None when they differ by layer."""
        return self._once("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int | None:
        """Key and value heads of an attention layer; the query heads when not said apart."""
        if self.get("multi_query") is True and self.get("new_decoder_architecture") is not True:
            return 1  # Falcon-7B and StarCoder say so in words, whatever num_kv_heads says
        if self.get("multi_query") is False and self.get("new_decoder_architecture") is not True:
            return self.heads
        keys = (
            "num_key_value_heads",
            "n_head_kv",
            "num_kv_heads",
            "multi_query_group_num",
            "kv_n_heads",
        )
        return self._once(*keys) if self.get(*keys) is not None else self.heads

    @property
    def head_dim(self) -> int | None:
        """Width of one attention head: stated, else hidden size over heads."""
        stated = self.integer("head_dim", "attention_head_dim", "kv_channels")
        if stated:
            return stated
        hidden, heads = self.hidden, self.heads
        return hidden // heads if hidden and heads else None

    @property
    def dtype(self) -> str | None:
        """The dtype the model computes in, as ``bf16``, ``fp16`` or ``fp32``."""
        value = self.outer("dtype", "torch_dtype")
        names = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
        return names.get(value.removeprefix("torch.")) if isinstance(value, str) else None

    @property
    def tied(self) -> bool | None:
        """Whether the head is the embedding: stated, else the class default, else None."""
        value = self.outer("tie_word_embeddings")
        if isinstance(value, bool):
            return value
        return self.family in TIED_BY_DEFAULT if self.family else None

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The quantisation section, anywhere; MLX calls it ``quantization``.

        One that is there and is no object is an empty section: a quantisation not known.
        """
        value = self.outer("quantization_config", "quantization")
        return value if isinstance(value, dict) or value is None else {}


def whole(value: Any, key: str) -> int:
    """A number that must be whole, >= 0 and sane; OpError names the key."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_VALUE:
        raise OpError(
            f"config.json: {key} is {excerpt(str(value), 60)!r}, not a whole number",
            "check config.json",
        )
    return value


def _text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model."""
    for key in _NESTS:
        inner = raw.get(key)
        if isinstance(inner, dict):
            return _text_part(inner) if key == "thinker_config" else inner
    return raw
