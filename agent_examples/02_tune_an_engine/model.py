"""A model to measure with: a Llama of a few hundred MB as GGUF, from a configuration and a seed.

It answers nonsense, at the speed of a real model of its size: decoding reads every weight
once for each token, whatever the weights are.  It is larger than the caches of nearly every
machine, so that the memory is measured and not them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

CONFIG = {
    "layers": 24,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 4,
    "feed_forward": 2816,
    "vocabulary": 4096,
    "context": 2048,
}
"""About 560 MB in F16."""


def write(path: Path, seed: int = 0) -> Path:
    """Write the model (no byte of it is downloaded); its path."""
    import gguf  # with numpy a second of import: only where a model is written
    import numpy as np

    random = np.random.default_rng(seed)
    c = CONFIG
    kv = c["hidden"] // c["heads"] * c["kv_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("seeded-llama")
    writer.add_context_length(c["context"])
    writer.add_embedding_length(c["hidden"])
    writer.add_block_count(c["layers"])
    writer.add_feed_forward_length(c["feed_forward"])
    writer.add_head_count(c["heads"])
    writer.add_head_count_kv(c["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(c["hidden"] // c["heads"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, c["vocabulary"])

    def weight(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), dtype=np.float32) * columns**-0.5
        writer.add_tensor(name, values.astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(c["hidden"], dtype=np.float32))

    weight("token_embd.weight", c["vocabulary"], c["hidden"])
    for layer in range(c["layers"]):
        norm(f"blk.{layer}.attn_norm.weight")
        weight(f"blk.{layer}.attn_q.weight", c["hidden"], c["hidden"])
        weight(f"blk.{layer}.attn_k.weight", kv, c["hidden"])
        weight(f"blk.{layer}.attn_v.weight", kv, c["hidden"])
        weight(f"blk.{layer}.attn_output.weight", c["hidden"], c["hidden"])
        norm(f"blk.{layer}.ffn_norm.weight")
        weight(f"blk.{layer}.ffn_gate.weight", c["feed_forward"], c["hidden"])
        weight(f"blk.{layer}.ffn_up.weight", c["feed_forward"], c["hidden"])
        weight(f"blk.{layer}.ffn_down.weight", c["hidden"], c["feed_forward"])
    norm("output_norm.weight")
    weight("output.weight", c["vocabulary"], c["hidden"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, vocabulary: int) -> None:
    """Three special tokens, the 256 bytes, and made-up words."""
    import gguf

    kind = gguf.TokenType
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256
    tokens += [b"\xe2\x96\x81w%d" % number for number in range(vocabulary - len(tokens))]
    kinds += [kind.NORMAL] * (vocabulary - len(kinds))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocabulary)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
