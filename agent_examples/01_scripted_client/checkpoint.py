"""A model directory with the tensors of Llama-3.1-8B and no weights: a header and a hole."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, list[int]]:
    """Every tensor of the checkpoint with its shape."""
    hidden, inner, vocab = 4096, 14336, 128256
    layer = {
        "self_attn.q_proj": [hidden, hidden],
        "self_attn.k_proj": [1024, hidden],
        "self_attn.v_proj": [1024, hidden],
        "self_attn.o_proj": [hidden, hidden],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    found = {"model.embed_tokens.weight": [vocab, hidden]}
    for number in range(32):
        found |= {f"model.layers.{number}.{name}.weight": s for name, s in layer.items()}
    return found | {"model.norm.weight": [hidden], "lm_head.weight": [vocab, hidden]}


def write(folder: Path) -> Path:
    """Write the model directory; a sparse file takes no disk."""
    header, end = {}, 0
    for name, shape in shapes().items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode("utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder
