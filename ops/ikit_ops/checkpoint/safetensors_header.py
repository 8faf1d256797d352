"""The header of a safetensors file, checked as strictly as safetensors 0.8.0 checks it.

A safetensors file is eight bytes (the header's length, little endian), a JSON
object and the tensors' bytes.  The object maps each tensor to its element type,
its shape and its ``[begin, end)`` in the data; ``__metadata__`` is a map of strings.
Everything about the weights that a byte count needs stands in those few kilobytes.

What makes a header *true* is its geometry: sorted by offset, the tensors must tile
the data from byte 0 to the end of the file, without a hole or an overlap, and each
must take exactly the bytes that its shape and type need.  A file that is shorter
(an interrupted download) or longer than its header says is refused: an engine that
maps it reads zeros.  The size of a tensor is always ``end - begin``.

The fast path decodes straight into typed structs.  A header that does not look as
writers make it (a repeated name, unknown fields, brackets in names) is read a second
time with the pairs in view, because a plain decoder keeps the last of two equal names
in silence.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from ikit_mcp.registry import OpError, excerpt
from ikit_ops.checkpoint.dtypes import SAFETENSORS_BITS

MAX_HEADER_BYTES = 100_000_000
"""safetensors 0.8.0 refuses longer headers; the longest real one known is 2.8 MB."""

LENGTH_BYTES = 8
_MAX_USIZE = 2**64 - 1
_MAX_DEPTH = 128
_CAREFUL_BYTES = 8_000_000
"""Up to this size an odd-looking header is read again with its pairs in view."""

REDOWNLOAD = "download the file again, or compare its size with the one that the repository lists"


class TensorEntry(msgspec.Struct, gc=False):
    """One tensor as its header states it: element type, shape, ``[begin, end)`` in the data."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None
    data_offsets: tuple[int, int] | None = None

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape; empty for a scalar."""
        return self.shape or ()

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        begin, end = self.data_offsets or (0, 0)
        return end - begin


class Header(NamedTuple):
    """A checked header: its tensors by name, its metadata, and the bytes of its data."""

    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_bytes: int


class _MetadataOnly(msgspec.Struct, gc=False):
    """Reads ``__metadata__`` and skips everything else."""

    metadata: dict[str, str] | None = msgspec.field(default=None, name="__metadata__")


_entries_decoder = msgspec.json.Decoder(dict[str, TensorEntry])
_metadata_decoder = msgspec.json.Decoder(_MetadataOnly)


def header_length(prefix: bytes, file_size: int | None, name: str) -> int:
    """Length of the JSON header, from the first eight bytes of the file.

    Args:
        prefix: at least the first eight bytes, fewer when the file is shorter.
        file_size: bytes of the whole file; None when nobody told.
        name: how errors call the file.

    Raises:
        OpError: the file is too short, or the length is over 100 MB or over the file.
    """
    if len(prefix) < LENGTH_BYTES:
        raise OpError(
            f"{name}: {len(prefix)} bytes, too short for a safetensors header", REDOWNLOAD
        )
    length = int(struct.unpack("<Q", prefix[:LENGTH_BYTES])[0])
    if length > MAX_HEADER_BYTES:
        raise OpError(
            f"{name}: header too large ({length} bytes; safetensors allows {MAX_HEADER_BYTES})",
            "check that this is a safetensors file",
        )
    if file_size is not None and length > file_size - LENGTH_BYTES:
        raise OpError(
            f"{name}: the header ({length} bytes) is longer than the file ({file_size} bytes)",
            REDOWNLOAD,
        )
    return length


def parse_header(raw: bytes, file_size: int | None, name: str) -> Header:
    """A header after every check.

    Args:
        raw: the JSON header alone, without the length.
        file_size: bytes of the whole file; None skips the check of the file's end.
        name: how errors call the file.

    Raises:
        OpError: the header is not what safetensors 0.8.0 would accept; the message
            names the file, the tensor and the fault.
    """
    if not raw.isascii():
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise OpError(f"{name}: the header is not UTF-8 ({error.reason})", REDOWNLOAD) from None
    try:
        entries = _entries_decoder.decode(raw)
        metadata: dict[str, str] | None = None
        if entries.pop("__metadata__", None) is not None or b"__metadata__" in raw:
            metadata = _metadata_decoder.decode(raw).metadata
        odd = _looks_odd(raw, len(entries), metadata)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if len(raw) > _CAREFUL_BYTES:
            raise OpError(
                f"{name}: invalid header: {excerpt(str(error), 200)}", REDOWNLOAD
            ) from None
        odd = True  # the careful reader names the fault, or knows better
    if odd and len(raw) <= _CAREFUL_BYTES:
        entries, metadata = _read_carefully(raw, name)
    data_bytes = _check_geometry(entries, name)
    expected = LENGTH_BYTES + len(raw) + data_bytes
    if file_size is not None and file_size != expected:
        raise OpError(
            f"{name}: the file has {file_size} bytes, its header says {expected} "
            f"({'truncated' if file_size < expected else 'extra bytes at the end'})",
            REDOWNLOAD,
        )
    return Header(entries, metadata or {}, data_bytes)


def _looks_odd(raw: bytes, tensors: int, metadata: dict[str, str] | None) -> bool:
    """Whether the text holds more than the decoded entries account for."""
    return (
        any(raw.count(key) != tensors for key in (b'"data_offsets"', b'"dtype"', b'"shape"'))
        or raw.count(b"[") != 2 * tensors
        or raw.count(b"{") != tensors + 1 + (metadata is not None)
    )


def _check_geometry(entries: dict[str, TensorEntry], name: str) -> int:
    """Bytes of the data; OpError unless the tensors tile them and take what they need."""
    try:
        return _tiled(entries.items(), name)
    except _OutOfOrder:  # writers put tensors in the order of their bytes, but need not
        return _tiled(
            sorted(entries.items(), key=lambda item: item[1].data_offsets or (0, 0)), name
        )


class _OutOfOrder(Exception):
    """The tensors are not listed in the order of their bytes; they may be fine when sorted."""


def _tiled(items: Iterable[tuple[str, TensorEntry]], name: str) -> int:
    """The end of tensors that follow each other without hole or overlap, each of its size."""
    sizes: dict[tuple[str, tuple[int, ...] | None], int] = {}
    position = 0
    for tensor, entry in items:
        if entry.data_offsets is None or entry.shape is None or not entry.dtype:
            absent = "dtype" if not entry.dtype else "shape" if entry.shape is None else "offsets"
            raise OpError(f"{name}: tensor {_short(tensor)}: no {absent}", REDOWNLOAD)
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            if not isinstance(items, list):
                raise _OutOfOrder
            kind = "overlap" if begin < position else "hole"
            raise OpError(
                f"{name}: invalid offset for tensor {_short(tensor)}: [{begin}, {end}) after byte "
                f"{position} ({'begin after end' if end < begin else kind})",
                REDOWNLOAD,
            )
        key = (entry.dtype, entry.shape)
        size = sizes.get(key)
        if size is None:
            size = sizes[key] = tensor_bytes(entry.dtype, entry.shape, tensor, name)
        if end - begin != size:
            raise OpError(
                f"{name}: tensor {_short(tensor)}: {end - begin} bytes stored, but "
                f"{entry.dtype} {list(entry.shape)} needs {size}",
                REDOWNLOAD,
            )
        position = end
    return position


def tensor_bytes(dtype: str, shape: tuple[int, ...], tensor: str, name: str) -> int:
    """Bytes of a tensor of that type and shape, as safetensors computes them.

    Raises:
        OpError: unknown type, a negative dimension, an overflow of 64 bits, or a size
            that does not end on a byte boundary.
    """
    bits = SAFETENSORS_BITS.get(dtype)
    if bits is None:
        raise OpError(
            f"{name}: tensor {_short(tensor)}: unknown dtype {_short(dtype)}",
            "use a checkpoint in a dtype that safetensors 0.8.0 knows",
        )
    if any(dim < 0 for dim in shape):
        raise OpError(f"{name}: tensor {_short(tensor)}: negative dimension", REDOWNLOAD)
    total = math.prod(shape) * bits
    partial = 1  # safetensors multiplies in order, so a zero does not undo an earlier overflow
    for dim in shape if total > _MAX_USIZE or total == 0 else ():
        partial *= dim
        if partial > _MAX_USIZE or dim > _MAX_USIZE:
            break
    if total > _MAX_USIZE or partial > _MAX_USIZE:
        raise OpError(f"{name}: tensor {_short(tensor)}: the shape overflows 64 bits", REDOWNLOAD)
    if total % 8:
        raise OpError(
            f"{name}: tensor {_short(tensor)}: {total} bits do not end on a byte boundary",
            REDOWNLOAD,
        )
    return total // 8


def _read_carefully(raw: bytes, name: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Read a header with its pairs in view; OpError names what is wrong with it."""
    try:
        top = json.loads(raw, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise OpError(
            f"{name}: invalid JSON in header: {excerpt(str(error), 120)}", REDOWNLOAD
        ) from None
    if not isinstance(top, _Pairs):
        raise OpError(f"{name}: the header is not a JSON object", REDOWNLOAD)
    seen: dict[str, Any] = {}
    entries: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    for key, value in top.pairs:
        if key == "__metadata__":
            metadata = _checked_metadata(value, key in seen, name)
        elif key in seen and seen[key] != value:
            raise OpError(
                f"{name}: tensor {_short(key)} is declared twice, differently", REDOWNLOAD
            )
        else:
            entries[key] = _checked_entry(key, value, name)
        seen[key] = value
    return entries, metadata


def _checked_metadata(value: Any, repeated: bool, name: str) -> dict[str, str]:
    """The metadata; OpError when it is not one map of strings."""
    if value is None and not repeated:
        return {}
    strings = isinstance(value, _Pairs) and all(isinstance(v, str) for _, v in value.pairs)
    if repeated or not strings:
        fault = "declared twice" if repeated else "not a map of strings"
        raise OpError(f"{name}: __metadata__ is {fault}", REDOWNLOAD)
    return dict(value.pairs)


def _checked_entry(tensor: str, value: Any, name: str) -> TensorEntry:
    """The entry; OpError when it is not an object with one dtype, shape and data_offsets."""
    if not isinstance(value, _Pairs):
        raise OpError(f"{name}: tensor {_short(tensor)}: not an object", REDOWNLOAD)
    if _depth(value) > _MAX_DEPTH:
        raise OpError(f"{name}: tensor {_short(tensor)}: nested too deeply", REDOWNLOAD)
    keys = [key for key, _ in value.pairs]
    for key in ("dtype", "shape", "data_offsets"):
        if keys.count(key) != 1:
            fault = f"no {key}" if key not in keys else f"{key} is given twice"
            raise OpError(f"{name}: tensor {_short(tensor)}: {fault}", REDOWNLOAD)
    fields = dict(value.pairs)
    if not isinstance(fields["dtype"], str):
        raise OpError(f"{name}: tensor {_short(tensor)}: dtype is not a string", REDOWNLOAD)
    for key in ("shape", "data_offsets"):
        numbers = fields[key]
        whole = isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)
        if not whole or (key == "data_offsets" and len(numbers) != 2):
            raise OpError(
                f"{name}: tensor {_short(tensor)}: {key} is not a list of non-negative integers",
                REDOWNLOAD,
            )
    begin, end = fields["data_offsets"]
    return TensorEntry(fields["dtype"], tuple(fields["shape"]), (begin, end))


class _Pairs:
    """A JSON object with its pairs as written, repeated names included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pairs) and self.pairs == other.pairs

    __hash__ = None  # type: ignore[assignment]  # compared by value, never a key


def _depth(value: Any) -> int:
    """Nesting depth of a decoded value, without recursion."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        inner = [v for _, v in item.pairs] if isinstance(item, _Pairs) else item
        if isinstance(inner, list):
            stack.extend((v, level + 1) for v in inner if isinstance(v, (list, _Pairs)))
    return deepest


def _short(text: str) -> str:
    """A name from a file, made safe for one line of an error."""
    return repr(text if len(text) <= 120 else excerpt(text, 117) + "...")
