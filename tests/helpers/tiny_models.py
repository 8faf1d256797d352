"""Tiny models, written here: real engines load them, and nobody has to download one.

Their weights are seeded noise.  What such a model says is nonsense, but an engine computes
it as it would compute sense, so that plumbing, gates and the agreement of clocks can be
tested.  It is far too small for its speed to mean anything.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Llama; the defaults make 2 MB of F16."""

    vocab: int = 2048
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 128
    context: int = 2048


TINY = Shape()
SLOW = Shape(vocab=4096, hidden=512, layers=8, heads=8, kv_heads=4, feed_forward=1536)
"""Large enough that 64 tokens take a good part of a second on one core."""


def write_gguf(path: Path, shape: Shape = TINY, *, seed: int = 0, architecture: str = "llama",
               eos: int | None = None) -> Path:  # fmt: skip
    """Write a Llama with seeded weights and a byte tokenizer as GGUF (F16); the path comes back.

    ``eos`` is the id of the token that ends a text (None: the tokenizer's own).
    """
    import gguf
    import numpy as np

    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, shape.vocab, eos)

    def weight(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) * (columns**-0.5)
        writer.add_tensor(name, values.astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, dtype=np.float32))

    kv = shape.hidden // shape.heads * shape.kv_heads
    weight("token_embd.weight", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm.weight")
        weight(f"{block}.attn_q.weight", shape.hidden, shape.hidden)
        weight(f"{block}.attn_k.weight", kv, shape.hidden)
        weight(f"{block}.attn_v.weight", kv, shape.hidden)
        weight(f"{block}.attn_output.weight", shape.hidden, shape.hidden)
        norm(f"{block}.ffn_norm.weight")
        weight(f"{block}.ffn_gate.weight", shape.feed_forward, shape.hidden)
        weight(f"{block}.ffn_up.weight", shape.feed_forward, shape.hidden)
        weight(f"{block}.ffn_down.weight", shape.hidden, shape.feed_forward)
    norm("output_norm.weight")
    weight("output.weight", shape.vocab, shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, vocab: int, eos: int | None) -> None:
    """A sentencepiece-like tokenizer: three specials, the 256 bytes, and made-up words."""
    import gguf

    kind = gguf.TokenType
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256
    tokens += [b"\xe2\x96\x81w%d" % number for number in range(vocab - len(tokens))]
    kinds += [kind.NORMAL] * (vocab - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2 if eos is None else eos)
    writer.add_unk_token_id(0)


@functools.cache
def shared_gguf(shape: Shape = TINY) -> Path:
    """A tiny GGUF, written once for all tests of this process; removed with it."""
    folder = _shared_folder()
    return write_gguf(Path(folder.name) / f"tiny-{abs(hash(shape)):x}.gguf", shape)


@functools.cache
def _shared_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")


def write_config(folder: Path, shape: Shape = TINY) -> Path:
    """Write the ``config.json`` of the Hugging Face form of the same Llama; its path."""
    path = folder / "config.json"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
