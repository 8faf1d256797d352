"""An array of JSON objects, decoded piece by piece: a trace of gigabytes in a few megabytes.

``json.load`` makes a dict of every event, five times the size of the file.  Here the file is
read by the megabyte, each block is cut after a whole event, and what lies before the cut is
decoded by itself, into objects that hold only the fields that are wanted.

Where to cut is a guess, ``},`` may as well stand inside a text or inside a nested list.  But
the guess proves itself: decoding begins where an event begins, so a piece that is cut inside a
text ends in an open text, one cut inside a list ends in an open list, and neither decodes.
When guesses fail, one linear scan over quotes and brackets finds the true end.

What stands beside the array is small and is read as a whole, before it and behind it: writers
put the facts about the devices on either side.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ikit_ops.profilers.limits import MAX_DEPTH, Reading, open_bytes

if TYPE_CHECKING:
    import msgspec

BLOCK = 1 << 17  # what is decoded at once stays in the cache
MAX_HEAD = 8 << 20
MAX_EVENT = 16 << 20
GUESSES = 10  # a scan costs as much as thirty of them
BAD_TAIL = "what follows the events is no JSON: the file may break off there"
SECOND_LIST = "a second list of events was not read"
CUT_OFF = "the list of events breaks off: later events are missing"
# A quote alone opens a text that the data does not close: what follows is inside of it.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|["{}\[\]]', re.DOTALL)
_HEAD_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|["{}\[\]:]', re.DOTALL)
_OPEN = frozenset(b"{[")
_CLOSE, _COMMA = b"],"


class EventReader:
    """What stands beside the events of a trace, and the events in lists of decoded objects.

    ``decoder`` decodes a list of events; ``loose`` makes an event of any object, for pieces
    that the decoder refuses (None leaves the object out).  ``head`` is whole when the events
    have been read; ``long_tail`` says that more followed them than is read.
    """

    def __init__(
        self,
        reading: Reading,
        decoder: msgspec.json.Decoder[list[Any]],
        loose: Any,
        key: bytes = b"traceEvents",
    ) -> None:
        self.reading = reading
        self.head: dict[str, Any] = {}
        self.skipped = 0
        self.long_tail = False
        self._in_object = False
        self._decoder = decoder
        self._loose = loose
        self._key = b'"' + key + b'"'

    def events(self) -> Iterator[list[Any]]:
        """Lists of events, in the order of the file."""
        with open_bytes(self.reading) as stream:
            rest = self._find_array(stream)
            while True:
                # A long event is looked at again with twice as much, not block by block.
                data = stream.read(max(BLOCK, min(len(rest), MAX_EVENT + 1 - len(rest))))
                if len(rest) + len(data) > MAX_EVENT:
                    raise self.reading.damaged(f"an event is longer than {MAX_EVENT >> 20} MiB")
                events, rest, ended = self._cut(rest, data) if data else self._last(rest)
                if events:
                    yield events
                if ended:
                    self._read_tail(rest, stream)
                if ended or not data:
                    return

    # --- the head ------------------------------------------------------------------

    def _find_array(self, stream: io.BufferedIOBase) -> bytes:
        """Read up to the array; what was read beyond its bracket."""
        data = stream.read(BLOCK).removeprefix(b"\xef\xbb\xbf").lstrip()
        while not data and (more := stream.read(BLOCK)):
            data = more.lstrip()
        if data[:1] == b"[":
            return data[1:]
        if data[:1] != b"{":
            raise self.reading.damaged("it is no JSON object or list")
        while True:
            found = self._array_in(data)
            if found is not None:
                return data[found:]
            more = stream.read(BLOCK)
            if not more:
                raise self.reading.damaged(f"it holds no list {self._key.decode('ascii')}")
            data += more
            if len(data) > MAX_HEAD:
                raise self.reading.damaged("its list of events does not begin")

    def _array_in(self, data: bytes) -> int | None:
        """Where the array's content begins, or None when the data does not reach so far."""
        depth, state = 0, 0  # 1: the key was seen, 2: and its colon
        for token in _HEAD_TOKEN.finditer(data):
            text = token[0]
            if text == b'"':
                return None
            if depth == 1 and state == 1 and text == b":":
                state = 2
            elif depth == 1 and state == 2 and text == b"[":
                self._read_head(data[: token.start()])
                return token.end()
            else:
                state = 1 if depth == 1 and text == self._key else 0
                depth += (text[0] in _OPEN) - (text in b"}]")
                if depth > MAX_DEPTH:
                    raise self.reading.damaged(f"it is nested more than {MAX_DEPTH} deep")
        return None

    def _read_head(self, data: bytes) -> None:
        import msgspec

        try:
            head = msgspec.json.decode(data + b"[]}")
        except (msgspec.DecodeError, RecursionError):
            raise self.reading.damaged("its beginning is no JSON") from None
        self.head = head if isinstance(head, dict) else {}
        self._in_object = True

    def _read_tail(self, data: bytes, stream: io.BufferedIOBase) -> None:
        """Add what follows the array to the head."""
        import msgspec

        while len(data) <= MAX_HEAD and (more := stream.read(BLOCK)):
            data += more
        if not self._in_object:
            return
        if len(data) > MAX_HEAD:
            self.long_tail = True
            return
        try:
            tail = msgspec.json.decode(b"{" + data.lstrip(b", \t\r\n"))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            self.reading.note(BAD_TAIL)
            return
        if self._key.decode("ascii").strip('"') in tail:
            self.reading.note(SECOND_LIST)
        self.head |= tail

    # --- the events ----------------------------------------------------------------

    def _cut(self, rest: bytes, block: bytes) -> tuple[list[Any], bytes, bool]:
        """``(events, what follows, whether the array ended)`` of what is left and a block."""
        data = bytearray(b"[")
        data += rest
        data += block
        end = len(data)
        for _ in range(GUESSES):
            end = data.rfind(b"},", 0, end)
            if end < 0:
                break
            # Written over in place: each copy of the block would cost as much as reading it.
            data[end + 1] = _CLOSE
            events = self._decoded(memoryview(data)[: end + 2])
            if events is not None:
                return events, bytes(memoryview(data)[end + 2 :]), False
            data[end + 1] = _COMMA
        return self._scanned(bytes(memoryview(data)[1:]))

    def _scanned(self, data: bytes) -> tuple[list[Any], bytes, bool]:
        """The same by a scan over all of it."""
        bounds, finish = self._scan(data)
        events: list[Any] = []
        if bounds:
            decoded = self._decoded(b"[" + data[bounds[0][0] : bounds[-1][1]] + b"]")
            events = self._one_by_one(data, bounds) if decoded is None else decoded
        if finish is not None:
            return events, data[finish + 1 :], True
        return events, data[bounds[-1][1] :].lstrip(b", \t\r\n") if bounds else data, False

    def _last(self, data: bytes) -> tuple[list[Any], bytes, bool]:
        """What is left at the end of the file."""
        found = self._scanned(data)
        if not found[2]:
            self.reading.note(CUT_OFF)
        return found

    def _decoded(self, piece: bytes | memoryview) -> list[Any] | None:
        """The events of a list; None when it is no list of whole events."""
        import msgspec

        try:
            return self._decoder.decode(piece)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            return None

    def _one_by_one(self, data: bytes, bounds: list[tuple[int, int]]) -> list[Any]:
        """Events decoded alone; those that are no JSON, or no event, are counted and left out."""
        import msgspec

        found = []
        for start, end in bounds:
            text = data[start:end]
            try:
                value = msgspec.json.decode(text.decode("utf-8", "replace"))
                event = self._loose(value) if isinstance(value, dict) else None
            except (msgspec.DecodeError, RecursionError, ValueError, TypeError):
                event = None
            if event is None:
                self.skipped += 1
            else:
                found.append(event)
        return found

    def _scan(self, data: bytes) -> tuple[list[tuple[int, int]], int | None]:
        """The bounds of all whole objects, and where the array ends (None: not here)."""
        bounds: list[tuple[int, int]] = []
        depth = start = 0
        for token in _TOKEN.finditer(data):
            text = token[0]
            if text == b'"':
                break
            if text in (b"{", b"["):
                if depth == 0:
                    start = token.start()
                depth += 1
                if depth > MAX_DEPTH:
                    raise self.reading.damaged(f"it is nested more than {MAX_DEPTH} deep")
            elif text in (b"}", b"]"):
                depth -= 1
                if depth < 0:
                    return bounds, token.start()
                if depth == 0:
                    bounds.append((start, token.end()))
        return bounds, None
