"""Bounds for reading what strangers wrote: bytes, names, text, depth, time.

A profile is data from outside.  It may be cut off, may lie about its own size, may unpack to
a thousand times its size, or hold a million names.  So every reader works under the same
limits: it streams, it counts what it keeps, it looks at the clock, and it refuses with a
sentence instead of running out of memory.  What the limits cut is said, never hidden.

Text that goes into a record is one short line.  Templates make kernel names of thousands of
characters, and two of them may differ in the last one alone: a name that is cut therefore
ends with a digest of the whole, so that different kernels stay different.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ikit_mcp.call import MAX_TEXT, one_line
from ikit_mcp.registry import OpError

MAX_UNPACKED = 16 << 30
MAX_NAMES = 1_000_000
MAX_STRING = 64 << 10
MAX_DEPTH = 64
MAX_LINE = 1 << 20
MAX_SECONDS = 1800.0
CHUNK = 1 << 20
BEAT_SECONDS = 0.1
PACKED = 64 << 10
GZIP_MAGIC = b"\x1f\x8b"


class Damaged(OpError):
    """The file is not what it claims to be, or more than may be read of it."""


@dataclass
class Reading:
    """One file being read: its path, what was noticed, and the clock that it runs against.

    ``beat(done, total)`` reports progress and raises when the call was cancelled; it is called
    a few times a second.  ``label`` is how the file is named to the caller.
    """

    path: Path
    beat: Callable[[float, float | None], None] = lambda done, total: None
    seconds: float = MAX_SECONDS
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    _next_beat: float = 0.0
    digest: tuple[str, int] | None = None
    """``(sha256, bytes)`` of the file, once it has been read from its first to its last byte."""

    @property
    def label(self) -> str:
        """The file's name, fit to be shown."""
        return one_line(self.path.name, 80)

    def tick(self, done: float = 0, total: float | None = None) -> None:
        """Note that the reader lives; Damaged when it has read for too long."""
        now = time.monotonic()
        if now - self.started > self.seconds:
            raise Damaged(
                f"{self.label} was not read within {self.seconds:.0f} s",
                "import a shorter capture",
            )
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self.beat(done, total)

    def damaged(self, what: str, next_step: str = "") -> Damaged:
        """The error for this file."""
        return Damaged(f"{self.label}: {what}", next_step or "make the capture again")

    def note(self, text: str) -> None:
        """Keep a line about the capture, once."""
        if text not in self.notes:
            self.notes.append(text)

    def count_names(self, count: int) -> None:
        """Damaged when there are more names than may be kept."""
        if count > MAX_NAMES:
            raise self.damaged(f"more than {MAX_NAMES} different names", "import a shorter capture")


def regular_file(path: str) -> Path:
    """The path of an existing regular file, links followed; OpError says what else it is."""
    shown = one_line(path, 120)
    try:
        found = Path(path).expanduser()
        mode = found.stat().st_mode
    except (OSError, ValueError, RuntimeError):  # absent, a NUL byte, an unknown ~user
        raise OpError(f"{shown}: no such file", "give the path of a profiler's output") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise OpError(f"{shown} is {kind}", "give one file")
    if not os.access(found, os.R_OK):
        raise OpError(f"{shown} cannot be read", "give yourself the right to read it")
    return found.absolute()


def open_bytes(reading: Reading) -> io.BufferedIOBase:
    """The file's bytes, unpacked where it is gzip; reading past the bound is Damaged."""
    raw = _Hashed(_regular(reading.path), reading)
    packed = raw.file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    raw.file.seek(0)
    return _Bounded(_Unpacking(raw) if packed else raw, reading, raw)


def open_regular(path: Path) -> io.BufferedReader:
    """An open regular file: a pipe put in its place between two looks would block for ever."""
    return io.BufferedReader(_regular(path), CHUNK)


def _regular(path: Path) -> io.FileIO:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OpError(f"{one_line(path.name, 80)} is not a regular file", "give one file")
    return io.FileIO(descriptor, "rb")


class _Hashed:
    """A file that is hashed as it is read: a second reading of it would cost as much again."""

    def __init__(self, file: io.FileIO, reading: Reading) -> None:
        self.file = file
        self.given = 0
        self._reading = reading
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, none at the end: the reading then has the file's digest."""
        data = self.file.read(size) or b""
        self.given += len(data)
        self._hash.update(data)
        if not data:
            self._reading.digest = self._hash.hexdigest(), self.given
        return data


class _Unpacking:
    """Packed data, member after member; whatever can be unpacked is given, and then the fault.

    The standard library's reader throws away what it had unpacked when the data breaks off.
    """

    def __init__(self, raw: _Hashed) -> None:
        self._raw = raw
        self._packed = b""
        self._member = zlib.decompressobj(wbits=31)
        self._members = 0
        self._between = True
        self.fault: str | None = None

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, none at the end; ``fault`` says why it is not a sound one."""
        while self.fault is None:
            if not self._packed:
                self._packed = self._raw.read(PACKED)
                if not self._packed:
                    self.fault = None if self._between else CUT
                    break
            if self._between and not self._next_member():
                continue
            data = self._some(size)
            if data:
                return data
        return b""

    def _next_member(self) -> bool:
        """Begin a member; False when there is none (yet), or what follows is none."""
        if self._members:
            self._packed = self._packed.lstrip(b"\0")  # members may be padded
            if not self._packed:
                return False
            if self._packed[: len(GZIP_MAGIC)] != GZIP_MAGIC[: len(self._packed)]:
                self.fault = TRAILING
                return False
        self._member = zlib.decompressobj(wbits=31)
        self._between = False
        return True

    def _some(self, size: int) -> bytes:
        before = self._member.copy()
        try:
            data = self._member.decompress(self._packed, size)
        except zlib.error:
            self.fault = DAMAGED
            return salvaged(before, self._packed)
        self._packed = self._member.unconsumed_tail
        if self._member.eof:
            self._packed = self._member.unused_data
            self._members += 1
            self._between = True
        return data


def salvaged(unpack: zlib._Decompress, packed: bytes) -> bytes:
    """What comes out before the fault, fed byte by byte."""
    found = bytearray()
    for number in range(len(packed)):
        try:
            found += unpack.decompress(packed[number : number + 1])
        except zlib.error:
            break
    return bytes(found)


class _Bounded(io.BufferedIOBase):
    """A stream that counts what it gives, and tells packed data that breaks off."""

    def __init__(self, inner: _Unpacking | _Hashed, reading: Reading, raw: _Hashed) -> None:
        self._inner, self._reading, self._raw = inner, reading, raw
        self._given = 0
        self._size = os.fstat(raw.file.fileno()).st_size

    def readable(self) -> bool:
        """It can be read."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to ``size`` bytes; a packed file that breaks off ends there, with a note."""
        data = self._inner.read(CHUNK if size is None or size < 0 else size)
        self._given += len(data)
        fault = self._inner.fault if isinstance(self._inner, _Unpacking) else None
        if fault is not None and not data:
            if self._given == 0:
                raise self._reading.damaged("it is no readable gzip file")
            self._reading.note(fault)
        if self._given > MAX_UNPACKED:
            raise self._reading.damaged(
                f"it unpacks to more than {MAX_UNPACKED >> 30} GiB", "import a shorter capture"
            )
        self._reading.tick(self._raw.given, self._size)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        """The same, in one piece."""
        return self.read(size)

    def close(self) -> None:
        """Close the file."""
        self._raw.file.close()
        super().close()


CUT = "the file breaks off: what follows is missing"
DAMAGED = "the packed data is damaged: what follows is missing, what precedes may be wrong"
TRAILING = "what follows the packed data is none: it was not read"


def lines_of(reading: Reading) -> Iterator[str]:
    """The lines of a text file, each cut to its bound; bytes that are no UTF-8 are replaced."""
    rest, skipping = b"", False
    with open_bytes(reading) as stream:
        while data := stream.read(CHUNK):
            pieces = (rest + data).split(b"\n")
            rest = pieces.pop()
            for piece in pieces:
                if not skipping:
                    yield _line(reading, piece)
                skipping = False
            if len(rest) > MAX_LINE:
                if not skipping:
                    yield _line(reading, rest)
                rest, skipping = b"", True
    if rest and not skipping:
        # Tools end their last line; one that is cut may end in the middle of a number.
        reading.note("the last line has no end: the file may be cut off")
        yield _line(reading, rest)


def _line(reading: Reading, data: bytes) -> str:
    if len(data) > MAX_LINE:
        reading.note(f"a line longer than {MAX_LINE >> 20} MiB was cut")
        data = data[:MAX_LINE]
    return data.decode("utf-8", "replace").rstrip("\r").removeprefix("\ufeff")


def head_of(path: Path, size: int = 64 << 10) -> bytes:
    """The first bytes, unpacked where the file is gzip; what cannot be unpacked is left out."""
    with open_regular(path) as file:
        data = file.read(size)
    if data[:2] != GZIP_MAGIC:
        return data
    try:
        return zlib.decompressobj(wbits=31).decompress(data, size)
    except zlib.error:
        return salvaged(zlib.decompressobj(wbits=31), data)[:size]


def shown_name(name: str) -> str:
    """A name as records hold it: one line, and distinct where it had to be cut."""
    line = one_line(name, MAX_STRING)
    if len(line) <= MAX_TEXT:
        return line
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{line[: MAX_TEXT - 11]}… #{digest}"


def file_digest(reading: Reading) -> tuple[str, int]:
    """``(sha256, bytes)`` of the file; of what was read, where all of it was."""
    if reading.digest is not None:
        return reading.digest
    digest, size = hashlib.sha256(), 0
    with open_regular(reading.path) as file:
        while data := file.read(CHUNK):
            digest.update(data)
            size += len(data)
            reading.tick(size)
    return digest.hexdigest(), size
