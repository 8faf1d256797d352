"""What a child wrote: a file that keeps everything, and a text that keeps both ends.

A pipe ends only when its last writer does, so a daemon that a program leaves behind can hold
its reader for ever; and what is read from a pipe has to be held somewhere.  A file has
neither trouble.  Of a long output the beginning (versions, configuration) and the end (the
error) are worth reading: those are kept as text, with a line between that says how much is
missing.  Programs write any bytes they like, so decoding replaces what is not UTF-8.

They also write secrets.  The text is free of those, and of halves of them: it is redacted
before it is cut, and where the program itself was cut off (it was killed amid a write, or
reached its cap), what is left of a known secret at the end goes too.
"""

from __future__ import annotations

import codecs
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ikit_mcp.process.redaction import redactor
from ikit_mcp.registry import OpError

KEEP_BYTES = 64 << 10
"""How much of each end of an output is kept as text, unless the caller says otherwise."""

HEADLESS = "[... what was before is left out ...]\n"


class Output:
    """One output file of a child, open for reading and appending in this process.

    ``path`` None makes a file without a name in the temporary folder: it is gone when closed.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.fd = _unnamed() if self.path is None else _open(self.path)

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self.fd).st_size

    def cut(self, limit: int) -> None:
        """Drop what lies beyond ``limit`` bytes."""
        if self.size() > limit:
            os.ftruncate(self.fd, limit)

    def text(self, keep: int = KEEP_BYTES) -> str:
        """The whole output if it has at most ``2 * keep`` bytes, else its first and last ``keep``.

        Invalid bytes become U+FFFD; a character that the cut splits is left out.
        """
        size = self.size()
        head, tail = _ends(self._read, size, keep)
        if tail is None:
            return head
        return f"{head}\n[... {size - 2 * keep} bytes left out ...]\n{tail}"

    def _read(self, offset: int, count: int) -> bytes:
        """Exactly these bytes, or fewer where the file has meanwhile become shorter."""
        data = bytearray()
        os.lseek(self.fd, offset, os.SEEK_SET)  # harmless to a writer: all of them append
        while len(data) < count:
            chunk = os.read(self.fd, count - len(data))
            if not chunk:
                break
            data += chunk
        return bytes(data)

    def close(self) -> None:
        """Give the file up; one without a name is gone then."""
        os.close(self.fd)


def log_ends(file: BinaryIO, keep: int) -> str:
    """An open log as text without secrets; of a long one its first and last ``keep`` bytes."""
    head, tail = _ends(_reader(file), os.fstat(file.fileno()).st_size, keep)
    return head if tail is None else f"{head}\n{tail}"


def log_end(file: BinaryIO, keep: int, *, headless: bool = False) -> str:
    """The whole lines in the last ``keep`` bytes of an open log, as text without secrets.

    ``headless``: the log was emptied while it was written, so that its first line is the rest
    of one.  What the rest of a secret looks like nobody knows, so that line is left out, and
    another one says so.
    """
    safe, size = redactor(), os.fstat(file.fileno()).st_size
    wide = min(size, keep + 2 * safe.reach)
    data = _reader(file)(size - wide, wide)
    tail = safe.tail(data.decode("utf-8", "replace"), keep, more=wide < size)
    whole = wide == size and len(data) <= keep
    if headless and whole:
        tail = _KEY_END.sub("", tail)
        line = _LINE.match(tail) or _WORD.match(tail)
        return HEADLESS + safe.loose_ends(tail[line.end() :] if line else "")
    if not whole and (line := _LINE.match(tail)):
        tail = tail[line.end() :] or tail
    return safe.loose_ends(tail)


_LINE, _WORD = re.compile(r"[^\n]*\n"), re.compile(r"\S*\s")
# A private key has many lines, and what lies before its end without a beginning is one.
_KEY_END = re.compile(r"\A(?:(?!-----BEGIN ).){0,20000}?-----END [A-Z0-9 ]{0,60}-----", re.DOTALL)


def _reader(file: BinaryIO) -> Callable[[int, int], bytes]:
    """Reads so many bytes from an offset."""

    def read(offset: int, count: int) -> bytes:
        """Exactly these bytes, or fewer where the file ends."""
        file.seek(offset)
        return file.read(count)

    return read


def _ends(read: Callable[[int, int], bytes], size: int, keep: int) -> tuple[str, str | None]:
    """``(head, tail)`` of an output without secrets, or all of one that is short and None."""
    safe = redactor()
    if size <= 2 * keep:
        return safe.loose_ends(safe.text(read(0, size).decode("utf-8", "replace"))), None
    wide = min(size, keep + 2 * safe.reach)
    more = wide < size
    first = safe.head(read(0, wide), keep, more=more)
    tail = safe.tail(read(size - wide, wide), keep, more=more)
    head = codecs.getincrementaldecoder("utf-8")("replace").decode(first)
    inside = next((i for i, byte in enumerate(tail[:4]) if byte & 0xC0 != 0x80), 0)
    return head, safe.loose_ends(tail[inside:].decode("utf-8", "replace"))


def _open(path: Path) -> int:
    """An empty file of ours at the path, opened for appending: two writers never overwrite."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise OpError(
            f"cannot write the output file {path}: {error.strerror}",
            "give a path in a folder that exists and can be written",
        ) from None


def _unnamed() -> int:
    """A file that has already been removed: nobody finds it, nobody has to clean up."""
    try:
        fd, name = tempfile.mkstemp(prefix="ikit-output-")
    except OSError as error:
        raise OpError(
            f"cannot make a temporary file: {error.strerror}", "free space, or set TMPDIR"
        ) from None
    os.close(fd)
    opened = _open(Path(name))
    if os.name == "posix":
        Path(name).unlink()
    return opened
