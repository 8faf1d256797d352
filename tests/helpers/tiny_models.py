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
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 256
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


def write_folder(folder: Path, shape: Shape = TINY, *, seed: int = 0) -> Path:
    """Write the Hugging Face form of a Llama (BF16 safetensors, tokenizer); the folder."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, shape)
    random = np.random.default_rng(seed)
    tensors: dict[str, tuple[tuple[int, ...], bytes]] = {}

    def weight(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) * (columns**-0.5)
        tensors[name] = (values.shape, _bf16(values))

    def norm(name: str) -> None:
        tensors[name] = ((shape.hidden,), _bf16(np.ones(shape.hidden, dtype=np.float32)))

    kv = shape.hidden // shape.heads * shape.kv_heads
    weight("model.embed_tokens.weight", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        block = f"model.layers.{layer}"
        norm(f"{block}.input_layernorm.weight")
        weight(f"{block}.self_attn.q_proj.weight", shape.hidden, shape.hidden)
        weight(f"{block}.self_attn.k_proj.weight", kv, shape.hidden)
        weight(f"{block}.self_attn.v_proj.weight", kv, shape.hidden)
        weight(f"{block}.self_attn.o_proj.weight", shape.hidden, shape.hidden)
        norm(f"{block}.post_attention_layernorm.weight")
        weight(f"{block}.mlp.gate_proj.weight", shape.feed_forward, shape.hidden)
        weight(f"{block}.mlp.up_proj.weight", shape.feed_forward, shape.hidden)
        weight(f"{block}.mlp.down_proj.weight", shape.hidden, shape.feed_forward)
    norm("model.norm.weight")
    weight("lm_head.weight", shape.vocab, shape.hidden)
    _write_safetensors(folder / "model.safetensors", tensors)
    _write_tokenizer(folder, shape.vocab)
    return folder


def _bf16(values: Any) -> bytes:
    """Float32 as BF16: the upper half of each number."""
    import numpy as np

    return bytes((values.astype("<f4").view("<u4") >> 16).astype(np.dtype("<u2")).tobytes())


def _write_safetensors(path: Path, tensors: dict[str, tuple[tuple[int, ...], bytes]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dimensions, data) in tensors.items():
        end = offset + len(data)
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            file.write(data)


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of whole words, in the files that ``transformers`` reads."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, vocab)}
    special = [
        {"id": number, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for word, number in list(words.items())[:3]
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "model_max_length": 2048,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
