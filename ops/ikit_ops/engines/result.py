"""What a worker leaves, read as an outsider's file: bounded, typed, numbers finite.

A result comes from an engine's own Python, or from any command at all (``cmd``).  So it
is parsed strictly, texts are cut to a line, and every rate is computed here from times and
counts: a rate that a command claims is compared, not believed.
"""

from __future__ import annotations

import json
import os
import stat
import statistics
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ikit_mcp.call import one_line

MAX_RESULT = 16 << 20
MARKER = "IKIT_RESULT "
FORMAT = "ikit.bench-result/1"
MAX_FLAGS = 100
MAX_TOKENS = 4096
MAX_ROUNDS = 10_000
MAX_FAILED = 1000


class Engine(msgspec.Struct, kw_only=True):
    """Name and version, where a command tells them."""

    name: str | None = None
    version: str | None = None


class Round(msgspec.Struct, kw_only=True):
    """One timed request.

    ``decode_ms`` is the time from the first to the last token; where it is absent, it is
    what remains of ``total_ms`` after ``ttft_ms``.  ``t_start`` and ``t_end`` are seconds
    since 1970; ``engine_decode_ms`` is the engine's own first-to-last time.  ``timed_tokens`` is
    how many tokens surely came in the time of decoding, where that is fewer than n - 1.
    """

    index: int | None = None
    t_start: float | None = None
    t_end: float | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None
    decode_ms: float | None = None
    engine_decode_ms: float | None = None
    gen_tokens: int | None = None
    timed_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    speculative_tokens: int | None = None
    decode_tok_s: float | None = None

    def time_of_decoding(self) -> float | None:
        """Milliseconds from the first to the last token; None where they were not seen."""
        if self.decode_ms is not None:
            return self.decode_ms
        if self.ttft_ms is not None and self.total_ms is not None:
            return self.total_ms - self.ttft_ms
        return None

    def rate(self) -> float | None:
        """Tokens a second while decoding, ``(n - 1) / (last - first)``; None if not seen.

        Where fewer tokens are known to have come in that time, it is the least rate.
        """
        count = self.gen_tokens
        if count is not None and self.timed_tokens is not None:
            count = min(count, self.timed_tokens + 1)
        return _rate(count, self.time_of_decoding())

    def engine_rate(self) -> float | None:
        """The same by the engine's own clock."""
        return _rate(self.gen_tokens, self.engine_decode_ms)


def _rate(tokens: int | None, milliseconds: float | None) -> float | None:
    if tokens is None or milliseconds is None or tokens < 2 or milliseconds <= 0:
        return None
    return (tokens - 1) / milliseconds * 1e3


class TwoCall(msgspec.Struct, kw_only=True):
    """The cross-check by two requests."""

    ttft_ms: float | None = None
    total_ms: float | None = None
    decode_tok_s: float | None = None


class Failure(msgspec.Struct, kw_only=True):
    """Why the worker could not finish."""

    phase: str
    what: str


class WorkerResult(msgspec.Struct, kw_only=True):
    """The whole result file; every field but ``rounds`` may be absent."""

    format: str | None = None
    rounds: list[Round] = []
    failed_rounds: list[dict[str, Any]] = []
    engine: Engine | None = None
    version: str | None = None
    platform: str | None = None
    flags: dict[str, Any] | None = None
    flags_source: str | None = None
    requested_flags: dict[str, Any] | None = None
    attention_backend: str | None = None
    attention_layers: list[str] | None = None
    attention_candidates: list[str] | None = None
    devices: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    two_call: TwoCall | None = None
    load_s: float | None = None
    import_s: float | None = None
    peak_memory_bytes: int | None = None
    timing: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    captured: bool | None = None
    notes: list[str] = []
    error: Failure | None = None


class Unreadable(Exception):
    """The result is not one; the text says why."""


def parse(text: bytes) -> WorkerResult:
    """The result in a file or line; Unreadable says what is wrong with it."""
    if len(text) > MAX_RESULT:
        raise Unreadable(f"its result is larger than {MAX_RESULT >> 20} MiB")
    try:
        found = msgspec.json.decode(text, type=WorkerResult)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Unreadable(f"its result is not what the schema says: {error}") from None
    if found.format not in (None, FORMAT):
        raise Unreadable(f"its result has the format {one_line(found.format, 60)}, not {FORMAT}")
    if len(found.rounds) > MAX_ROUNDS:
        raise Unreadable(f"its result holds {len(found.rounds)} rounds")
    _check_numbers(found)
    return cleaned(found)


def _check_numbers(result: WorkerResult) -> None:
    """Refuse times and counts below zero: nobody saw those."""
    for number, row in enumerate(result.rounds):
        if row.index is None:
            row.index = number
        for name in row.__struct_fields__:
            value = getattr(row, name)
            if isinstance(value, (int, float)) and value < 0:
                raise Unreadable(f"round {row.index}: {name} is {value}")


def cleaned(result: WorkerResult) -> WorkerResult:
    """The result with every text as one short line, and its lists bounded."""
    for name in ("version", "platform", "flags_source", "attention_backend"):
        value = getattr(result, name)
        if value is not None:
            setattr(result, name, one_line(value, 120))
    if result.engine is not None:
        result.engine = Engine(
            name=result.engine.name and one_line(result.engine.name, 60),
            version=result.engine.version and one_line(result.engine.version, 60),
        )
    for name in ("flags", "requested_flags", "timing", "prompt"):
        value = getattr(result, name)
        if value is not None:
            setattr(result, name, bounded(value))
    for name in ("attention_layers", "attention_candidates"):
        value = getattr(result, name)
        if value is not None:
            setattr(result, name, [one_line(v, 80) for v in value[:32]])
    result.notes = [one_line(note) for note in result.notes[:20]]
    result.failed_rounds = [bounded(row) for row in result.failed_rounds[:MAX_FAILED]]
    if result.devices is not None:
        result.devices = [bounded(row) for row in result.devices[:64]]
    for row in result.rounds:
        if row.finish_reason is not None:
            row.finish_reason = one_line(row.finish_reason, 40)
    return result


def bounded(value: Any, depth: int = 4) -> Any:
    """A JSON value with short texts, short lists and little depth."""
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, dict):
        if depth == 0:
            return "…"
        items = list(value.items())[:MAX_FLAGS]
        return {one_line(str(key), 80): bounded(item, depth - 1) for key, item in items}
    if isinstance(value, list):
        return "…" if depth == 0 else [bounded(item, depth - 1) for item in value[:64]]
    return value


def read(path: Path, stdout: Path | None = None) -> WorkerResult | None:
    """The result in the file, else behind the marker in the output; None: there is none.

    Unreadable when there is one that cannot be used.
    """
    try:
        with open_regular(path) as file:
            return parse(file.read(MAX_RESULT + 1))  # one more tells that it is too large
    except FileNotFoundError:
        pass
    except OSError as error:
        raise Unreadable(f"its result cannot be read: {error.strerror or error}") from None
    line = None if stdout is None else last_marked_line(stdout)
    return None if line is None else parse(line)


def open_regular(path: Path) -> BinaryIO:
    """Open a file that another program was free to replace, and never wait for it.

    A pipe would block whoever opens it, a device never ends, a link leads anywhere: OSError
    for all of them.
    """
    # Windows has none of these flags, nor what they are against.
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is no regular file")
    return os.fdopen(handle, "rb")


def last_marked_line(path: Path) -> bytes | None:
    """What follows the marker on the last line of the file that begins with it, or None."""
    marker, found = MARKER.encode("ascii"), None
    try:
        with open_regular(path) as file:
            while line := file.readline(MAX_RESULT + len(marker) + 2):
                start = line.rfind(b"\r", 0, line.rfind(marker) + 1) + 1
                if line.startswith(marker, start):
                    found = line[start + len(marker) :].strip()
    except OSError:
        return None
    return found


def median(values: list[float | None]) -> float | None:
    """The median of what was seen; None when nothing was."""
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if seen else None


def tokens_digest(tokens: list[int]) -> str:
    """SHA-256 of the ids as a JSON list without spaces."""
    import hashlib  # rarely needed, and not cheap

    text = json.dumps(tokens, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
