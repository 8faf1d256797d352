"""Made-up and rehydrated checkpoints: true headers, holes for weights."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikit_ops.checkpoint.dtypes import SAFETENSORS_BITS
from ikit_ops.checkpoint.model import Checkpoint
from ikit_ops.checkpoint.safetensors_header import TensorEntry

CORPUS = Path(__file__).resolve().parents[1] / "data" / "corpus"
MODELS = sorted(path.name for path in (CORPUS / "roofline").iterdir())
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def size_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * SAFETENSORS_BITS[dtype] // 8


def header_of(tensors: Tensors, metadata: dict[str, str] | None = None) -> tuple[bytes, int]:
    """The JSON header of a file with these tensors one after the other, and its data's size."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8), offset


def write_file(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> int:
    """Write one sparse safetensors file; the bytes of its tensors."""
    raw, size = header_of(tensors, metadata)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + size)
    return size


def write_model(folder: Path, config: dict[str, Any], shards: Mapping[str, Tensors]) -> Path:
    """Write a model folder: config.json, the shards, and an index when there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(write_file(folder / name, tensors) for name, tensors in shards.items())
    if len(shards) > 1:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rehydrate(name: str, folder: Path) -> Path:
    """Write the model folder of a corpus entry: its true headers, its true sizes, no weights."""
    source = CORPUS / "roofline" / name
    entry = json.loads(gzip.decompress((source / "header.json.gz").read_bytes()))
    shards = {
        shard: {tensor: (dtype, tuple(shape)) for tensor, (dtype, shape) in tensors.items()}
        for shard, tensors in entry["shards"].items()
    }
    write_model(folder, {}, shards)
    for extra in ("config.json", "hf_quant_config.json"):
        if (source / extra).is_file():
            shutil.copy(source / extra, folder / extra)
    return folder


def expected(name: str) -> dict[str, Any]:
    """The right answers of a corpus entry."""
    path = CORPUS / "roofline" / name / "expected.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def in_memory(config: dict[str, Any] | None, tensors: Tensors, **extra: Any) -> Checkpoint:
    """A checkpoint as the reader would give it, without a file."""
    checkpoint = Checkpoint("directory", "made-up", "/made-up", config=config, **extra)
    checkpoint.format = checkpoint.format or "safetensors"
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + size_of(dtype, shape)
        checkpoint.tensors[name] = TensorEntry(dtype, shape, (offset, end))
        offset = end
    checkpoint.files["model.safetensors"] = offset
    return checkpoint


def dense_layer(
    prefix: str, *, hidden: int = 64, kv: int = 32, inner: int = 128, dtype: str = "BF16"
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of one Llama-like layer."""
    return {
        f"{prefix}.self_attn.q_proj.weight": (dtype, (hidden, hidden)),
        f"{prefix}.self_attn.k_proj.weight": (dtype, (kv, hidden)),
        f"{prefix}.self_attn.v_proj.weight": (dtype, (kv, hidden)),
        f"{prefix}.self_attn.o_proj.weight": (dtype, (hidden, hidden)),
        f"{prefix}.mlp.gate_proj.weight": (dtype, (inner, hidden)),
        f"{prefix}.mlp.up_proj.weight": (dtype, (inner, hidden)),
        f"{prefix}.mlp.down_proj.weight": (dtype, (hidden, inner)),
        f"{prefix}.input_layernorm.weight": (dtype, (hidden,)),
        f"{prefix}.post_attention_layernorm.weight": (dtype, (hidden,)),
    }


def ends(
    prefix: str = "model", *, hidden: int = 64, vocab: int = 256, head: bool = True
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Embedding, final norm and (unless tied) head."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"{prefix}.embed_tokens.weight": ("BF16", (vocab, hidden)),
        f"{prefix}.norm.weight": ("BF16", (hidden,)),
    }
    if head:
        tensors["lm_head.weight"] = ("BF16", (vocab, hidden))
    return tensors


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def llama_tensors(layers: int = 2, **shape: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All tensors of a small Llama."""
    tensors = ends()
    for layer in range(layers):
        tensors |= dense_layer(f"model.layers.{layer}", **shape)
    return tensors
