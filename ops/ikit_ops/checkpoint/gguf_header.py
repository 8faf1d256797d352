"""The header of a GGUF file: metadata, tensors, and where the data begin.

GGUF puts everything in one file: a magic, a version, counts, typed key-value metadata
(architecture, layer count, heads, the whole tokenizer), then for each tensor its name,
dimensions (innermost first), GGML type and offset, and aligned data.  The tokenizer's
arrays hold hundreds of thousands of strings that a byte count never needs, so long arrays
are stepped over and only their length is kept.

A header is input from outside: every length is checked against what the format's own
reader allows and against the file, before anything is read, so a hostile count costs
nothing.  The reader walks a memory map, which makes skipping free.

Source: the GGUF specification (ggml/docs/gguf.md), versions 2 and 3; type sizes from the
gguf package 0.19.0.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.checkpoint import files
from ikit_ops.checkpoint.dtypes import GGML_TYPES
from ikit_ops.checkpoint.safetensors_header import TensorEntry

MAGIC = b"GGUF"
MAX_METADATA = 65_536
MAX_TENSORS = 1_000_000
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 1_024
MAX_STRING_BYTES = 64_000_000
MAX_ARRAY = 50_000_000
KEPT_ARRAY = 4_096
KEPT_STRING = 4_096
MAX_DIMENSIONS = 8
_MAX_NESTING = 4
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_NEXT = "download the file again, or convert the model again"


@dataclass
class GgufHeader:
    """What a GGUF file says before its data.

    Attributes:
        metadata: key -> value; an array that is too long to keep is its length, as
            ``SkippedArray``.
        tensors: name -> entry; the shape outermost first, the dtype a GGML type's name.
        unknown_types: names of tensors whose GGML type is not known, with the type.
        data_start: where the data begin in the file.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    data_start: int = 0


@dataclass(frozen=True)
class SkippedArray:
    """An array that was stepped over, and how many items it has."""

    length: int


class _Cursor:
    """A position in the file that never reads past its end."""

    def __init__(self, data: mmap.mmap, name: str, endian: str) -> None:
        self.data, self.name, self.endian, self.at = data, name, endian, 0

    def fail(self, what: str) -> OpError:
        return OpError(f"{self.name}: {what}", _NEXT)

    def skip(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise self.fail(f"ends inside its header (byte {self.at} of {len(self.data)})")
        self.at += size

    def take(self, size: int) -> bytes:
        start = self.at
        self.skip(size)
        return self.data[start : self.at]

    def number(self, code: str) -> Any:
        kind = struct.Struct(self.endian + code)
        return kind.unpack(self.take(kind.size))[0]

    def length(self, limit: int, what: str) -> int:
        value = int(self.number("Q"))
        if value > limit:
            raise self.fail(f"{what} is {value}, more than the {limit} allowed")
        return value

    def text(self, limit: int, what: str, kept: int | None = None) -> str:
        size = self.length(limit, f"the length of {what}")
        if kept is not None and size > kept:
            start = self.at
            self.skip(size)
            return self.data[start : start + kept].decode("utf-8", "replace")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None


def read_gguf_header(path: Path, roots: tuple[Path, ...]) -> GgufHeader:
    """The header of one GGUF file.

    Args:
        path: the file.
        roots: folders in which it may end (``files.allowed_roots``).

    Raises:
        OpError: not a GGUF file of version 2 or 3, a length out of bounds, an unknown
            type, tensors that overlap or end behind the file; it names the fault.
    """
    with files.open_regular(path, roots) as (file, size):
        if size < 24:
            raise OpError(f"{path.name}: {size} bytes, too short for a GGUF header", _NEXT)
        return _read(file, path.name, size)


def _read(file: IO[bytes], name: str, size: int) -> GgufHeader:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, name, "<")
        if cursor.take(4) != MAGIC:
            raise cursor.fail("not a GGUF file (its first bytes are not GGUF)")
        version = int(cursor.number("I"))
        if version & 0xFFFF == 0:  # written on a big-endian machine
            cursor.endian = ">"
            version = struct.unpack(">I", struct.pack("<I", version))[0]
        if version not in (2, 3):
            raise cursor.fail(f"GGUF version {version}, only 2 and 3 are known")
        tensors = cursor.length(MAX_TENSORS, "the number of tensors")
        pairs = cursor.length(MAX_METADATA, "the number of metadata keys")
        header = GgufHeader()
        for _ in range(pairs):
            key = cursor.text(MAX_KEY_BYTES, "a metadata key")
            if key in header.metadata:
                raise cursor.fail(f"the metadata key {excerpt(key, 80)!r} stands twice")
            header.metadata[key] = _value(cursor, int(cursor.number("I")), 0)
        _tensors(cursor, header, tensors, size)
        return header


def _value(cursor: _Cursor, kind: int, nesting: int) -> Any:
    """One metadata value of the given type."""
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text(MAX_STRING_BYTES, "a metadata string", KEPT_STRING)
    if kind != _ARRAY:
        raise cursor.fail(f"metadata value type {kind} is not known")
    if nesting >= _MAX_NESTING:
        raise cursor.fail("metadata arrays are nested too deeply")
    inner = int(cursor.number("I"))
    length = cursor.length(MAX_ARRAY, "the length of a metadata array")
    if inner in _SCALARS:
        code = struct.Struct(f"{cursor.endian}{_SCALARS[inner]}")
        if length > KEPT_ARRAY:
            cursor.skip(length * code.size)
            return SkippedArray(length)
        return [v[0] for v in code.iter_unpack(cursor.take(length * code.size))]
    if inner not in (_STRING, _ARRAY):
        raise cursor.fail(f"metadata array type {inner} is not known")
    least = 8 if inner == _STRING else 12
    if length * least > len(cursor.data) - cursor.at:
        raise cursor.fail(f"a metadata array of {length} items is longer than the file")
    if inner == _STRING and length > KEPT_ARRAY:
        _skip_strings(cursor, length)
        return SkippedArray(length)
    if length > KEPT_ARRAY:
        raise cursor.fail(f"a nested metadata array of {length} items")
    return [_value(cursor, inner, nesting + 1) for _ in range(length)]


def _skip_strings(cursor: _Cursor, count: int) -> None:
    """Step over strings: a tokenizer's vocabulary has hundreds of thousands."""
    unpack = struct.Struct(cursor.endian + "Q").unpack_from
    data, at, end = cursor.data, cursor.at, len(cursor.data)
    for _ in range(count):
        if end - at < 8:
            break
        at += 8 + unpack(data, at)[0]
        if at > end:
            break
    else:
        cursor.at = at
        return
    raise cursor.fail("ends inside a metadata array")


def _tensors(cursor: _Cursor, header: GgufHeader, count: int, size: int) -> None:
    """Read the tensor table and check that the tensors fit the file without overlap."""
    alignment = header.metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {excerpt(str(alignment), 40)}, not a power of two")
    spans: list[tuple[int, int, str]] = []
    for _ in range(count):
        name = cursor.text(MAX_NAME_BYTES, "a tensor's name")
        dimensions = int(cursor.number("I"))
        if dimensions > MAX_DIMENSIONS:
            raise cursor.fail(f"tensor {excerpt(name, 80)!r} has {dimensions} dimensions")
        shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))
        kind, offset = int(cursor.number("I")), int(cursor.number("Q"))
        if name in header.tensors:
            raise cursor.fail(f"tensor {excerpt(name, 80)!r} is declared twice")
        dtype, stored = _size(cursor, name, shape, kind)
        if offset % alignment:
            raise cursor.fail(f"tensor {excerpt(name, 80)!r} is not aligned to {alignment} bytes")
        spans.append((offset, stored, name))
        header.tensors[name] = TensorEntry(dtype, shape[::-1], (offset, offset + stored))
    header.data_start = -(-cursor.at // alignment) * alignment
    position = 0
    for offset, stored, name in sorted(spans):
        if offset < position:
            raise cursor.fail(f"tensor {excerpt(name, 80)!r} overlaps another")
        position = offset + stored
        if header.data_start + position > size:
            raise cursor.fail(
                f"the file has {size} bytes, tensor {excerpt(name, 80)!r} ends at "
                f"{header.data_start + position} (truncated)"
            )


def _size(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """(GGML type, bytes) of a tensor: whole blocks along its innermost dimension."""
    known = GGML_TYPES.get(kind)
    if known is None:
        raise OpError(
            f"{cursor.name}: tensor {excerpt(name, 80)!r} has GGML type {kind}, which is not known",
            "use a file in a type that gguf 0.19.0 knows",
        )
    dtype, block, size = known
    elements = math.prod(shape)
    if any(dim > 2**48 for dim in shape) or elements > 2**56:
        raise cursor.fail(f"tensor {excerpt(name, 80)!r}: the shape is too large")
    if (shape[0] if shape else 1) % block:
        raise cursor.fail(
            f"tensor {excerpt(name, 80)!r}: rows of {shape[0] if shape else 1} are not whole "
            f"{dtype} blocks of {block}"
        )
    return dtype, elements // block * size
