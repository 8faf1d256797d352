"""Safetensors headers are accepted and refused as safetensors itself does, and named."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from fakes.checkpoints import CORPUS, header_of, llama_tensors, size_of, write_file
from ikit_mcp.registry import OpError
from ikit_ops.checkpoint.dtypes import SAFETENSORS_BITS
from ikit_ops.checkpoint.local import read_file_header, read_single_file
from ikit_ops.checkpoint.safetensors_header import TensorEntry, header_length, parse_header

HOSTILE = CORPUS / "hostile"
CASES = json.loads((HOSTILE / "expected.json").read_text(encoding="utf-8"))


def ours(path: Path) -> dict[str, TensorEntry] | str:
    """Our tensors, or our words of refusal."""
    try:
        return read_file_header(path, (path.parent.resolve(),))[0]
    except OpError as error:
        return str(error)


def theirs(path: Path) -> set[str] | None:
    """The names that safetensors itself reads, or None when it refuses the file."""
    try:
        with safe_open(path, "np") as file:
            return set(file.keys())
    except (SafetensorError, OSError):
        return None


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_hostile_header_gets_the_verdict_of_safetensors(name: str) -> None:
    found, case = ours(HOSTILE / name), CASES[name]
    if case["accept"]:
        assert isinstance(found, dict), found
        assert len(found) == case["tensors"]
    else:
        assert isinstance(found, str) and name in found and "\nNext: " in found


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_BITS))
def test_every_dtype_is_measured_by_its_offsets(dtype: str, tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"x": (dtype, (4, 8)), "y": (dtype, ())})
    found = ours(tmp_path / "a.safetensors")
    if SAFETENSORS_BITS[dtype] % 8:  # a lone sub-byte scalar cannot end on a byte
        assert isinstance(found, str) and "byte boundary" in found
        write_file(tmp_path / "a.safetensors", {"x": (dtype, (4, 8))})
        found = ours(tmp_path / "a.safetensors")
    assert isinstance(found, dict) and found["x"].nbytes == size_of(dtype, (4, 8))
    assert theirs(tmp_path / "a.safetensors") == set(found)


def _written(tmp_path: Path, raw: bytes, data: int = 0) -> Path:
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * data)
    return path


A = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
B = '{"dtype":"I8","shape":[2],"data_offsets":[0,2]}'
ODD = {
    "conflicting duplicate": (f'{{"a":{A},"a":{B}}}', "declared twice"),
    "conflicting duplicate, escaped": (
        f'{{"a":{A},"\\u0061":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}',
        "declared twice",
    ),
    "metadata twice": (f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{A}}}', "declared twice"),
    "metadata a list": (f'{{"__metadata__":[],"a":{A}}}', "not a map of strings"),
    "no dtype": ('{"a":{"shape":[2],"data_offsets":[0,2]}}', "no dtype"),
    "no shape": ('{"a":{"dtype":"U8","data_offsets":[0,2]}}', "no shape"),
    "no offsets": ('{"a":{"dtype":"U8","shape":[2]}}', "no data_offsets"),
    "dtype twice": ('{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "twice"),
    "dtype a number": ('{"a":{"dtype":1,"shape":[2],"data_offsets":[0,2]}}', "not a string"),
    "three offsets": ('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,2]}}', "data_offsets"),
    "negative dimension": ('{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}', "a"),
    "two negatives": ('{"a":{"dtype":"U8","shape":[-2,-1],"data_offsets":[0,2]}}', "a"),
    "boolean dimension": ('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', "shape"),
    "entry a list": ('{"a":[]}', "not an object"),
    "entry a string": ('{"a":"b"}', "not an object"),
    "deep extra field": (
        f'{{"a":{A[:-1]},"x":{"[" * 200}{"]" * 200}}}}}',
        "nested",
    ),
    "very deep extra field": (f'{{"a":{A[:-1]},"x":{"[" * 50000}{"]" * 50000}}}}}', "recursion"),
    "trailing text": (f'{{"a":{A}}}x', "invalid"),
    "huge integer": (
        '{"a":{"dtype":"U8","shape":[9999999999999999999999],"data_offsets":[0,2]}}',
        "overflow",
    ),
    "zero after an overflow": (
        '{"a":{"dtype":"U8","shape":[9223372036854775808,4,0],"data_offsets":[0,0]}}',
        "overflow",
    ),
}


@pytest.mark.parametrize("case", sorted(ODD))
def test_odd_headers_are_refused_by_both_and_the_fault_is_named(case: str, tmp_path: Path) -> None:
    text, word = ODD[case]
    path = _written(tmp_path, text.encode(), 2)
    found = ours(path)
    assert isinstance(found, str) and word in found, found
    assert theirs(path) is None or "conflicting" in case


def test_identical_duplicates_extra_fields_and_brackets_in_names_are_accepted(
    tmp_path: Path,
) -> None:
    for text in (
        f'{{"a":{A},"a":{A}}}',
        f'{{"a[0]{{":{A}}}',
        f'{{"__metadata__":{{"shape":"{{[","dtype":"x"}},"a":{A}}}',
        f'{{"a":{A[:-1]},"extra":{{"deep":[1,[2]]}}}}}}',
        f'{{"__metadata__":null,"a":{A}}}',
    ):
        path = _written(tmp_path, text.encode(), 2)
        assert isinstance(ours(path), dict), text
        assert theirs(path) is not None, text


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.self_attn.q_proj.weight": ("U8", (1,)) for n in range(3000)}
    write_file(tmp_path / "long.safetensors", tensors)
    found = ours(tmp_path / "long.safetensors")
    assert isinstance(found, dict) and len(found) == 3000


def test_a_length_over_the_cap_is_refused_before_anything_is_read() -> None:
    with pytest.raises(OpError, match="header too large"):
        header_length(struct.pack("<Q", 100_000_001), None, "x")
    assert header_length(struct.pack("<Q", 100_000_000), None, "x") == 100_000_000


def test_text_from_a_header_stays_on_one_line_of_the_error(tmp_path: Path) -> None:
    name = "evil\n\u202eerror" + "x" * 500
    raw = json.dumps({name: {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}})
    found = ours(_written(tmp_path, raw.encode(), 2))
    assert isinstance(found, str)
    first = found.splitlines()[0]
    assert "needs 3" in first and "\u202e" not in first and len(first) < 300


def _mutant(raw: bytes, randomness: random.Random) -> bytes:
    """The header with a few bytes or numbers changed, removed or doubled."""
    text = bytearray(raw)
    for _ in range(randomness.randint(1, 4)):
        at = randomness.randrange(len(text))
        kind = randomness.randrange(5)
        if kind == 0:
            text[at] = randomness.randrange(256)
        elif kind == 1:
            del text[at : at + randomness.randint(1, 40)]
        elif kind == 2:
            text[at:at] = text[at : at + randomness.randint(1, 120)]
        elif kind == 3:
            text[at:at] = randomness.choice(
                [b"9" * 30, b"-", b"[" * 90, b'"', b"{}", b"null", b","]
            )
        else:
            text[at : at + 1] = b"%d" % randomness.randrange(10)
        if not text:
            text = bytearray(b"{}")
    return bytes(text)


def test_a_thousand_mutated_headers_never_crash_and_agree_with_safetensors(tmp_path: Path) -> None:
    randomness = random.Random(4)
    raw, size = header_of(llama_tensors(1), {"format": "pt"})
    path = tmp_path / "mutant.safetensors"
    accepted = 0
    tracemalloc.start()
    for _ in range(1000):
        mutant = _mutant(raw, randomness)
        path.write_bytes(struct.pack("<Q", len(mutant)) + mutant)
        with path.open("r+b") as file:
            file.truncate(8 + len(mutant) + size)
        found = ours(path)
        reference = theirs(path)
        if isinstance(found, dict):
            accepted += 1
            assert reference == set(found), mutant
        elif reference is not None:  # where we are stricter, it is for an ambiguous name
            assert "declared twice" in found or "not an object" in found, (found, mutant)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < accepted < 1000
    assert peak < 64_000_000


NAMES = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
DTYPES = st.sampled_from([d for d, bits in SAFETENSORS_BITS.items() if bits >= 8])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=8))
def test_any_tensors_come_back_with_their_bytes(
    tensors: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    raw, size = header_of(tensors, {"format": "pt"})
    entries, metadata, data = parse_header(raw, 8 + len(raw) + size, "any")
    assert metadata == {"format": "pt"} and data == size
    assert {n: (e.dtype, e.dims, e.nbytes) for n, e in entries.items()} == {
        n: (dtype, shape, size_of(dtype, shape)) for n, (dtype, shape) in tensors.items()
    }
    with pytest.raises(OpError, match="truncated"):
        parse_header(raw, 8 + len(raw) + size - 1, "any")
    with pytest.raises(OpError, match="extra bytes"):
        parse_header(raw, 8 + len(raw) + size + 1, "any")


def test_one_safetensors_file_takes_the_configuration_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", llama_tensors())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    checkpoint = read_single_file(tmp_path / "model.safetensors")
    assert checkpoint.source == "file" and checkpoint.config == {"model_type": "llama"}
    write_file(tmp_path / "model-00001-of-00002.safetensors", llama_tensors())
    shard = read_single_file(tmp_path / "model-00001-of-00002.safetensors")
    assert shard.unproven == ["model-00001-of-00002.safetensors is one shard of a model"]
    with pytest.raises(OpError, match=r"not a \.safetensors"):
        read_single_file(tmp_path / "model.bin")
