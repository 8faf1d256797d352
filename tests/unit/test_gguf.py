"""GGUF files written with the gguf package, whose own reader is the oracle."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ikit_mcp.registry import OpError
from ikit_ops.checkpoint import gguf_header
from ikit_ops.checkpoint.dtypes import GGML_TYPES
from ikit_ops.checkpoint.files import allowed_roots
from ikit_ops.checkpoint.local import read_folder, read_single_file
from ikit_ops.decode.count import count_checkpoint
from ikit_ops.decode.formats import UNPACKED
from ikit_ops.decode.tally import Counts, Options

TYPES = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4",
]  # fmt: skip
HIDDEN, INNER, VOCAB = 256, 512, 320


def kind(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name]


def add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], dtype: str = "Q4_K") -> None:
    """Add a tensor of zeros in a GGML type; ``shape`` is outermost first."""
    if len(shape) == 1 or shape[-1] % 256:
        dtype = "F32"
    block, size = gguf.GGML_QUANT_SIZES[kind(dtype)]
    stored = (*shape[:-1], shape[-1] // block * size)
    if dtype == "F32":
        writer.add_tensor(name, np.zeros(shape, np.float32))
    elif dtype == "F16":
        writer.add_tensor(name, np.zeros(shape, np.float16))
    else:
        writer.add_tensor(name, np.zeros(stored, np.uint8), raw_dtype=kind(dtype))


def write(
    path: Path,
    fill: Callable[[gguf.GGUFWriter], None],
    *,
    arch: str = "llama",
    layers: int = 2,
    **keywords: Any,
) -> Path:
    writer = gguf.GGUFWriter(path, arch, **keywords)
    writer.add_block_count(layers)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_vocab_size(VOCAB)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def attention(writer: gguf.GGUFWriter, layer: int, dtype: str = "Q4_K", kv: int = 128) -> None:
    for name, shape in {
        "attn_q": (256, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, 256),
    }.items():
        add(writer, f"blk.{layer}.{name}.weight", shape, dtype)
    add(writer, f"blk.{layer}.attn_norm.weight", (HIDDEN,))
    add(writer, f"blk.{layer}.ffn_norm.weight", (HIDDEN,))


def feed_forward(writer: gguf.GGUFWriter, layer: int, dtype: str = "Q4_K") -> None:
    add(writer, f"blk.{layer}.ffn_gate.weight", (INNER, HIDDEN), dtype)
    add(writer, f"blk.{layer}.ffn_up.weight", (INNER, HIDDEN), dtype)
    add(writer, f"blk.{layer}.ffn_down.weight", (HIDDEN, INNER), dtype)


def ends(writer: gguf.GGUFWriter, dtype: str = "Q6_K", *, head: bool = True) -> None:
    add(writer, "token_embd.weight", (VOCAB, HIDDEN), dtype)
    add(writer, "output_norm.weight", (HIDDEN,))
    if head:
        add(writer, "output.weight", (VOCAB, HIDDEN), dtype)


def dense(dtype: str) -> Callable[[gguf.GGUFWriter], None]:
    def fill(writer: gguf.GGUFWriter) -> None:
        ends(writer, dtype)
        for layer in range(2):
            attention(writer, layer, dtype)
            feed_forward(writer, layer, dtype)

    return fill


def count(path: Path, **options: Any) -> Counts:
    counts = count_checkpoint(read_single_file(path), Options(**options))
    entered = sum(counts.groups.values()) + sum(counts.not_read.values()) - counts.read_twice
    assert entered == counts.stored_bytes
    return counts


def test_every_ggml_type_of_the_package_is_known_with_its_block() -> None:
    known = {
        number: (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        for kind in gguf.GGML_QUANT_SIZES
        for number in [int(kind)]
    }
    assert known == GGML_TYPES


@pytest.mark.parametrize("dtype", TYPES)
def test_sizes_names_and_shapes_are_those_of_the_packages_reader(
    dtype: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", dense(dtype))
    header = gguf_header.read_gguf_header(path, allowed_roots(tmp_path))
    oracle = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(int(n) for n in tensor.shape[::-1]),
            int(tensor.n_bytes),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    assert {n: (e.dtype, e.dims, e.nbytes) for n, e in header.tensors.items()} == oracle
    counts = count(path, context=10)
    assert counts.unproven == []
    assert counts.stored_bytes == sum(size for _, _, size in oracle.values())
    block, size = gguf.GGML_QUANT_SIZES[kind(dtype)]
    assert counts.groups["embedding_row"] == HIDDEN // block * size
    assert counts.groups["mlp"] == 2 * 3 * INNER * HIDDEN // block * size
    assert counts.kv_bytes == 10 * 2 * 256 * 2
    names = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
    assert counts.dtype is not None
    assert names.get(dtype, dtype.lower()) in counts.dtype.split("+")


def test_integer_types_do_not_pass_for_unpacked_matrices() -> None:
    assert {"I32", "U32", "U8", "I64"}.isdisjoint(UNPACKED)
    assert {"Q4_K", "BF16", "F8_E4M3"} <= UNPACKED


def test_a_tied_head_reads_the_table_once_more(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        ends(writer, head=False)
        attention(writer, 0)
        feed_forward(writer, 0)

    counts = count(write(tmp_path / "m.gguf", fill, layers=1))
    assert counts.groups["lm_head"] == VOCAB * 210 and counts.groups["embedding_row"] == 210


def test_fused_experts_are_read_by_their_share_and_prediction_layers_not(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_uint32("glm4moe.nextn_predict_layers", 1)
        ends(writer)
        for layer in range(2):
            attention(writer, layer)
            for name in ("gate", "up"):
                add(writer, f"blk.{layer}.ffn_{name}_exps.weight", (8, INNER, HIDDEN))
                add(writer, f"blk.{layer}.ffn_{name}_shexp.weight", (INNER, HIDDEN))
            add(writer, f"blk.{layer}.ffn_down_exps.weight", (8, HIDDEN, INNER))
            add(writer, f"blk.{layer}.ffn_gate_inp.weight", (8, HIDDEN), "F32")
            add(writer, f"blk.{layer}.exp_probs_b.bias", (8,))
        add(writer, "blk.1.nextn.eh_proj.weight", (HIDDEN, 2 * HIDDEN))
        add(writer, "blk.1.nextn.enorm.weight", (HIDDEN,))

    path = write(tmp_path / "m.gguf", fill, arch="glm4moe")
    counts = count(path)
    one = 3 * INNER * HIDDEN // 256 * 144
    assert counts.unproven == [] and counts.groups["routed_experts"] == 2 * one
    assert counts.groups["router"] == 8 * HIDDEN * 4 + 8 * 4
    assert counts.groups["shared_experts"] == 2 * INNER * HIDDEN // 256 * 144
    assert counts.not_read["mtp"] > 8 * one and counts.kv is not None and counts.kv["layers"] == 1
    drafted = count(path, include_mtp=True)
    assert drafted.groups["routed_experts"] == 4 * one


def test_mamba_state_is_float32_and_layers_without_kv_heads_hold_no_cache(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(512)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(8)
        writer.add_ssm_group_count(1)
        ends(writer)
        attention(writer, 1)
        feed_forward(writer, 0)
        width = 512 + 2 * 16
        add(writer, "blk.0.ssm_in.weight", (512 + width + 8, HIDDEN))
        add(writer, "blk.0.ssm_conv1d.weight", (width, 4))
        add(writer, "blk.0.ssm_a", (8, 1))
        add(writer, "blk.0.ssm_d", (8, 1))
        add(writer, "blk.0.ssm_dt.bias", (8,))
        add(writer, "blk.0.ssm_out.weight", (HIDDEN, 512))

    path = tmp_path / "m.gguf"

    def with_list(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["granitehybrid.attention.head_count_kv"]
        writer.add_head_count_kv([0, 2])
        fill(writer)

    counts = count(write(path, with_list, arch="granitehybrid"), context=10)
    assert counts.unproven == []
    assert counts.state_bytes == 2 * 4 * (3 * 544 + 512 * 16)
    assert counts.kv_bytes == 10 * 256 * 2
    assert counts.kv is not None and counts.kv["layers"] == 1


def test_gated_deltanet_and_short_convolutions_keep_their_meaning(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(256)
        writer.add_ssm_state_size(64)
        writer.add_ssm_time_step_rank(4)
        writer.add_ssm_group_count(2)
        ends(writer)
        add(writer, "blk.0.attn_qkv.weight", (2 * 128 + 256, HIDDEN))
        add(writer, "blk.0.attn_gate.weight", (256, HIDDEN))
        add(writer, "blk.0.ssm_conv1d.weight", (512, 4))
        add(writer, "blk.0.ssm_a", (4,))
        add(writer, "blk.0.ssm_ba.weight", (8, HIDDEN))
        add(writer, "blk.0.ssm_out.weight", (HIDDEN, 256))
        add(writer, "blk.1.shortconv.conv.weight", (HIDDEN, 3))
        add(writer, "blk.1.shortconv.in_proj.weight", (3 * HIDDEN, HIDDEN))

    counts = count(write(tmp_path / "m.gguf", fill, arch="acme"))
    assert counts.unproven == []
    assert counts.state_bytes == 2 * 4 * (3 * 512 + 4 * 64 * 64 + 2 * HIDDEN)
    assert counts.state is not None and counts.state["kinds"] == {"gdn": 1, "shortconv": 1}


def test_kimi_delta_attention_is_known_by_its_forget_gate(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32("kimi-linear.kda.head_dim", 64)
        ends(writer)
        attention(writer, 0, kv=256)
        for name in ("q", "k", "v"):
            add(writer, f"blk.0.ssm_conv1d_{name}.weight", (256, 4))
        add(writer, "blk.0.ssm_a", (4,))
        add(writer, "blk.0.ssm_f_a.weight", (64, HIDDEN))
        add(writer, "blk.0.ssm_f_b.weight", (256, 64))

    counts = count(write(tmp_path / "m.gguf", fill, arch="kimi-linear", layers=1))
    assert counts.unproven == [] and counts.kv is None
    assert counts.state_bytes == 2 * 4 * (3 * 3 * 256 + 4 * 64 * 64)


def latent(writer: gguf.GGUFWriter) -> None:
    writer.add_kv_lora_rank(256)
    writer.add_rope_dimension_count(64)
    ends(writer)
    add(writer, "blk.0.attn_q.weight", (512, HIDDEN))
    add(writer, "blk.0.attn_kv_a_mqa.weight", (320, HIDDEN))
    add(writer, "blk.0.attn_kv_a_norm.weight", (256,))
    add(writer, "blk.0.attn_k_b.weight", (4, 256, 256))
    add(writer, "blk.0.attn_v_b.weight", (4, 64, 256))
    add(writer, "blk.0.attn_output.weight", (HIDDEN, 256))


def test_latent_attention_caches_one_latent_and_old_files_say_that_they_do_not(
    tmp_path: Path,
) -> None:
    def modern(writer: gguf.GGUFWriter) -> None:
        writer.add_key_length_mla(128)
        writer.add_value_length_mla(64)
        latent(writer)

    counts = count(write(tmp_path / "m.gguf", modern, arch="deepseek2", layers=1), context=10)
    assert counts.unproven == [] and counts.kv_bytes == 10 * 320 * 2
    wide = count(tmp_path / "m.gguf", context=10, mla_cache="expanded")
    assert wide.kv_bytes == 10 * 4 * (128 + 64) * 2
    old = read_single_file(write(tmp_path / "o.gguf", latent, arch="deepseek2", layers=1))
    assert any("mla_cache=expanded" in note for note in old.notes)


@pytest.mark.parametrize(
    ("arch", "window", "pattern", "windowed"),
    [
        ("gemma3", 8, None, 5),
        ("gemma3", 8, 2, 3),
        ("gpt-oss", 8, None, 3),
        ("acme", 8, [True, False, False, False, False, True], 2),
        ("olmo2", 8, None, 5),
        ("olmo2", None, None, 0),
        ("llama", 8, None, 0),
    ],
)
def test_windows_are_those_that_llama_cpp_applies(
    arch: str, window: int | None, pattern: Any, windowed: int, tmp_path: Path
) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        if window:
            writer.add_sliding_window(window)
        if isinstance(pattern, list):
            writer.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
        elif pattern:
            writer.add_uint32(f"{arch}.attention.sliding_window_pattern", pattern)
        ends(writer)
        for layer in range(6):
            attention(writer, layer)

    counts = count(write(tmp_path / "m.gguf", fill, arch=arch, layers=6), context=100)
    assert counts.unproven == []
    assert counts.kv_bytes == 512 * (8 * windowed + 100 * (6 - windowed))


def test_unknown_tensors_keep_the_name_that_the_file_gives_them(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        dense("Q4_K")(writer)
        add(writer, "blk.0.time_mix_key.weight", (HIDDEN, HIDDEN))
        add(writer, "v.blk.0.attn_q.weight", (HIDDEN, HIDDEN))

    counts = count(write(tmp_path / "m.gguf", fill))
    assert "blk.0.time_mix_key.weight" in counts.unproven[0]["why"]
    assert counts.not_read["towers"] == HIDDEN * 144


def test_a_split_model_is_one_model_and_a_missing_part_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", dense("Q4_K"), split_max_tensors=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    whole = count(write(tmp_path / "whole.gguf", dense("Q4_K")))
    for part in (parts[0], parts[2]):
        counts = count(part)
        assert counts.stored_bytes == whole.stored_bytes and counts.groups == whole.groups
    (tmp_path / "whole.gguf").unlink()
    (tmp_path / "m.gguf").unlink(missing_ok=True)
    assert read_folder(tmp_path).format == "gguf"
    parts[1].unlink()
    with pytest.raises(OpError, match="00002-of-00003 is absent"):
        read_single_file(parts[0])


def test_a_folder_with_several_gguf_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name, dense("Q4_K"))
    with pytest.raises(OpError, match="holds 2 GGUF models"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("general.type", "adapter"), ("general.type", "mmproj")]
)
def test_files_that_are_no_models_are_refused(key: str, value: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_string(key, value)
        dense("Q4_K")(writer)

    with pytest.raises(OpError, match=f"is {value}, not a model"):
        read_single_file(write(tmp_path / "m.gguf", fill))


def test_a_large_tokenizer_is_stepped_over(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token {n}" for n in range(100_000)])
        writer.add_token_scores([0.5] * 100_000)
        writer.add_name("Tiny Llama")
        dense("Q4_K")(writer)

    path = write(tmp_path / "m.gguf", fill)
    tracemalloc.start()
    header = gguf_header.read_gguf_header(path, allowed_roots(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert header.metadata["tokenizer.ggml.tokens"] == gguf_header.SkippedArray(100_000)
    assert header.metadata["tokenizer.ggml.scores"] == gguf_header.SkippedArray(100_000)
    assert peak < 1_000_000
    assert read_single_file(path).name == "Tiny Llama"


def test_big_endian_files_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", dense("F32"), endianess=gguf.GGUFEndian.BIG)
    assert count(path).groups["embedding_row"] == HIDDEN * 4


def _patched(path: Path, tmp_path: Path, old: bytes, new: bytes) -> Path:
    raw = path.read_bytes()
    assert old in raw
    other = tmp_path / "patched.gguf"
    other.write_bytes(raw.replace(old, new, 1))
    return other


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_broken_headers_are_refused_by_their_fault(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", dense("Q4_K"))
    raw = path.read_bytes()
    q = _text("blk.0.attn_q.weight")
    at = raw.index(q)
    table = raw[at : at + len(q) + 4 + 16 + 4 + 8]
    cases = {
        b"GGUX": (b"GGUF", "not a GGUF file"),
        b"GGUF" + struct.pack("<I", 9): (raw[:8], "GGUF version 9"),
        raw[:8] + struct.pack("<Q", 2**40): (raw[:16], "number of tensors"),
        raw[:16] + struct.pack("<Q", 2**40): (raw[:24], "number of metadata keys"),
        q + struct.pack("<I", 99): (q + struct.pack("<I", 2), "99 dimensions"),
        table[:-12] + struct.pack("<I", 77) + table[-8:]: (table, "GGML type 77"),
        table[:-8] + struct.pack("<Q", 31): (table, "not aligned"),
        table[:-8] + struct.pack("<Q", 2**40): (table, "truncated"),
        table[: len(q) + 4] + struct.pack("<QQ", 100, 256) + table[-12:]: (table, "whole Q4_K"),
        table[: len(q) + 4] + struct.pack("<QQ", 256, 2**50) + table[-12:]: (table, "too large"),
        _text("blk.1.attn_q.weight"): (q, "declared twice"),
        struct.pack("<Q", 2**40) + q[8:]: (q, "more than the 1024"),
    }
    for new, (old, why) in cases.items():
        with pytest.raises(OpError, match=why) as caught:
            read_single_file(_patched(path, tmp_path, old, new))
        assert caught.value.next_step
    for size in (0, 23, 30, 200, at + 3, len(raw) - 1):
        (tmp_path / "cut.gguf").write_bytes(raw[:size])
        with pytest.raises(OpError, match=r"cut\.gguf: "):
            read_single_file(tmp_path / "cut.gguf")


def _metadata_file(path: Path, *pairs: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    return path


def test_metadata_that_would_cost_more_than_it_is_refused(tmp_path: Path) -> None:
    key, array = _text("k"), struct.pack("<I", 9)
    nested = b"".join(array + struct.pack("<Q", 1) for _ in range(10))
    cases = {
        "value type 77": [key + struct.pack("<I", 77)],
        "array type 77": [key + array + struct.pack("<IQ", 77, 1)],
        "nested too deeply": [key + array + nested],
        "longer than the file": [key + array + struct.pack("<IQ", 8, 10**6)],
        "length of a metadata array": [key + array + struct.pack("<IQ", 0, 10**9)],
        "a nested metadata array": [key + array + struct.pack("<IQ", 9, 5000) + b"\0" * 70_000],
        "inside a metadata array": [
            key + array + struct.pack("<IQ", 8, 5000) + struct.pack("<Q", 2**60) + b"\0" * 40_000
        ],
        "ends inside its header": [key + array + struct.pack("<IQ", 0, 10**6)],
        "is not UTF-8": [struct.pack("<Q", 1) + b"\xff" + struct.pack("<IQ", 10, 1)],
        "stands twice": [key + struct.pack("<IB", 0, 1)] * 2,
        "not a power of two": [_text("general.alignment") + struct.pack("<II", 4, 3)],
    }
    for why, pairs in cases.items():
        path = _metadata_file(tmp_path / "m.gguf", *pairs)
        with pytest.raises(OpError, match=why):
            gguf_header.read_gguf_header(path, allowed_roots(tmp_path))
    path = _metadata_file(tmp_path / "m.gguf", key + struct.pack("<I", 8) + _text("x" * 9000))
    assert len(gguf_header.read_gguf_header(path, allowed_roots(tmp_path)).metadata["k"]) == 4096


def test_a_thousand_mutated_files_never_crash(tmp_path: Path) -> None:
    randomness = random.Random(4)
    raw = write(tmp_path / "m.gguf", dense("Q4_K")).read_bytes()
    header = raw[: raw.index(_text("output.weight")) + 200]
    path, accepted = tmp_path / "mutant.gguf", 0
    tracemalloc.start()
    for _ in range(1000):
        mutant = bytearray(header)
        for _ in range(randomness.randint(1, 6)):
            at = randomness.randrange(len(mutant))
            if randomness.random() < 0.5:
                mutant[at] = randomness.randrange(256)
            else:
                mutant[at : at + 8] = struct.pack("<Q", randomness.choice([0, 1, 2**32, 2**63]))
        path.write_bytes(bytes(mutant) + raw[len(header) :])
        try:
            count_checkpoint(read_single_file(path), Options())
            accepted += 1
        except OpError as error:
            assert error.next_step
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < accepted < 1000 and peak < 64_000_000
