"""The reading half of ``clip-steps.v1``: a dump, opened without trusting a byte of it.

A safetensors file is eight bytes (the header's length), a JSON object, and the tensors.  The
object maps each tensor to its dtype, its shape and its place; the places must tile the file
without a hole or an overlap.  A dump comes from the engine that is being checked, so its header
is bounded, decoded with its pairs in view (a plain decoder keeps the last of two equal names),
and nothing of the file is mapped into memory: a mapped file that is cut short kills its reader.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ikit_ops.clips.recorder import (
    DTYPE_BYTES,
    FINAL_KEY,
    MAX_HEADER_BYTES,
    STEP_KEY,
    StepDumpError,
)

MAX_DUMP_BYTES = 256 << 30
MAX_TOLD = 16_384  # of a name: who shows it redacts it whole, and cuts it shorter


class NotReadableHere(StepDumpError):
    """A dump that this user or this machine cannot open: that says nothing about the engine."""


def _unopened(error: OSError) -> StepDumpError:
    """Whose fault it is: a link or a folder in the dump's place is the engine's, the rest is not.

    A dump is private to the user that wrote it (mode 0600), so that another user's checker meets
    this first of all.
    """
    if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENOENT):
        return StepDumpError(f"it cannot be opened: {error.strerror}")
    return NotReadableHere(f"it cannot be opened here: {error.strerror}")


class DumpReader:
    """One dump, opened and its header held against safetensors' rules.

    ``meta`` is the metadata, ``request`` its request (None when there is none that parses),
    ``streams`` the latent streams, ``n_steps`` one more than the largest step's index.
    StepDumpError says why a file is no dump, NotReadableHere that it cannot be opened here.
    Nothing is mapped: a file that is cut short while it is read gives an error, not a signal.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._file = os.fdopen(os.open(self.path, flags | getattr(os, "O_BINARY", 0)), "rb", 0)
        except OSError as error:
            raise _unopened(error) from error
        try:
            info = os.fstat(self._file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise StepDumpError("it is no regular file")
            self.size = info.st_size
            if self.size > MAX_DUMP_BYTES:
                raise StepDumpError(f"it holds {self.size} bytes: more than any clip's steps")
            self._read_header()
        except StepDumpError:
            self._file.close()
            raise

    def __enter__(self) -> DumpReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._entries)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; StepDumpError when there is none."""
        return self._entry(name)[1]

    def dtype(self, name: str) -> str:
        """The tensor's dtype as safetensors names it (F32, BF16, F16, F64)."""
        return self._entry(name)[0]

    def nbytes(self, name: str) -> int:
        """The tensor's size in bytes."""
        _, _, begin, end = self._entry(name)
        return end - begin

    def read_into(self, name: str, start: int, buffer: memoryview) -> int:
        """Read the tensor's bytes from ``start`` on into the buffer; how many were read."""
        _, _, begin, end = self._entry(name)
        view = buffer[: max(0, end - begin - start)]
        done = 0
        self._file.seek(begin + start)
        while done < len(view):
            try:
                count = self._file.readinto(view[done:])
            except OSError as error:
                raise NotReadableHere(f"it cannot be read here: {error.strerror}") from error
            if not count:
                raise StepDumpError("the file was cut short while it was read")
            done += count
        return done

    def raw(self, name: str) -> bytes:
        """The tensor's bytes, little endian."""
        buffer = bytearray(self.nbytes(name))
        self.read_into(name, 0, memoryview(buffer))
        return bytes(buffer)

    def get(self, name: str) -> Any:
        """The tensor as a torch tensor on the CPU."""
        import torch  # only those who ask for tensors need it

        dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
                 "F64": torch.float64}.get(self.dtype(name))  # fmt: skip
        if dtype is None:
            raise StepDumpError(f"{name} is {self.dtype(name)}, which no step has")
        data = bytearray(self.raw(name))
        if not data:
            return torch.empty(self.shape(name), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(self.shape(name))

    def sigmas(self) -> tuple[list[float], list[float]]:
        """``sigma`` and ``sigma_next`` as doubles."""
        lists = []
        for name in ("sigma", "sigma_next"):
            if self.dtype(name) != "F64":
                raise StepDumpError(f"{name} is {self.dtype(name)}, not F64")
            values = array("d", self.raw(name))
            if sys.byteorder == "big":
                values.byteswap()
            lists.append(values.tolist())
        return lists[0], lists[1]

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        try:
            return self._entries[name]
        except KeyError:
            raise StepDumpError(f"there is no {name[:MAX_TOLD]}") from None

    def _read_header(self) -> None:
        try:
            first = self._file.read(8)
        except OSError as error:
            raise NotReadableHere(f"it cannot be read here: {error.strerror}") from error
        if len(first) < 8:
            raise StepDumpError("it is shorter than a safetensors header")
        (length,) = struct.unpack("<Q", first)
        if length > min(MAX_HEADER_BYTES, self.size - 8):
            raise StepDumpError(f"its header claims {length} bytes of a file of {self.size}")
        described = _parse_header(self._file.read(length))
        self.meta = _metadata_of(described.pop("__metadata__", None))
        self._entries = _entries_of(described, 8 + length, self.size)
        self.request = _request_in(self.meta)
        found = [match for key in self._entries if (match := STEP_KEY.fullmatch(key))]
        finals = [match for key in self._entries if (match := FINAL_KEY.fullmatch(key))]
        names = {match.group(2) for match in found} | {match.group(1) for match in finals}
        self.streams = sorted(names, key=lambda name: (name != "video", name))
        self.n_steps = max((int(match.group(1)) for match in found), default=-1) + 1


def _parse_header(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise StepDumpError("its header names something twice")
        return made

    def refuse(word: str) -> Any:
        raise StepDumpError(f"its header holds {word}")

    if not text.startswith(b"{"):
        raise StepDumpError("its header is no JSON object")
    try:
        described = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse
        )
    except StepDumpError:
        raise
    except (ValueError, RecursionError):
        raise StepDumpError("its header is no JSON") from None
    return dict(described)


def _metadata_of(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise StepDumpError("its metadata is no map of strings")
    return value


def _entries_of(
    described: Mapping[str, Any], start: int, size: int
) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Each tensor's dtype, shape, begin and end in the file: they tile it without a hole."""
    entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in described.items():
        shown = name[:MAX_TOLD]
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise StepDumpError(f"{shown}: its entry is not dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
            raise StepDumpError(f"{shown}: dtype {str(dtype)[:MAX_TOLD]!r} is not known")
        if not _whole_numbers(shape) or len(shape) > 16:
            raise StepDumpError(f"{shown}: its shape is no list of sizes")
        if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise StepDumpError(f"{shown}: its offsets are no range")
        if math.prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
            raise StepDumpError(f"{shown}: shape and bytes do not agree")
        entries[name] = (dtype, tuple(shape), start + offsets[0], start + offsets[1])
    position = start
    for begin, end in sorted(entry[2:] for entry in entries.values()):
        if begin != position:
            raise StepDumpError("its tensors overlap or leave a hole")
        position = end
    if position != size:
        raise StepDumpError(
            f"it holds {size - start} bytes of tensors, its header says {position - start}"
        )
    return entries


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _request_in(meta: Mapping[str, str]) -> dict[str, Any] | None:
    request = json_in(meta, "request")
    return request if isinstance(request, dict) else None


def json_in(meta: Mapping[str, str], name: str) -> Any:
    """An entry of the metadata as JSON; None when there is none, or it is no JSON.

    NaN and infinity are none: Python's reader takes them, no other does.
    """
    try:
        return json.loads(meta.get(name, ""), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(word: str) -> Any:
    raise ValueError(word)
