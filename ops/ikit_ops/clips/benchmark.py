"""One benchmark of a clip server under way: warm-up, timed clips, the search for a cache.

What fails is told as what it is.  A request that brought no clip is a failed request, by name;
a disk that is full is ours, and ends the benchmark; a server that does not answer ends it when
the time is up.  A benchmark that ends without a record leaves none of its files, so that it can
be tried again with the same words.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ikit_mcp.call import Call, one_line
from ikit_mcp.registry import OpError
from ikit_ops.clips import client, making, resultcache
from ikit_ops.clips.account import Answer
from ikit_ops.clips.asking import Requests, size_of
from ikit_ops.clips.client import Line, Server
from ikit_ops.clips.driving import Lanes
from ikit_ops.clips.making import Dialect
from ikit_ops.clips.recorder import dump_path
from ikit_ops.clips.resultcache import Pair
from ikit_ops.clips.room import Room

HEALTH_S = 10.0
MANIFEST = "clips.jsonl"


class Folder:
    """The new folder of a benchmark; what it wrote there goes, unless it is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[Path] = []
        self._made = False
        self._kept = False

    def __enter__(self) -> Folder:
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OpError(
                f"out {one_line(str(self.path))} cannot be made: {error.strerror}",
                "name a new folder",
            ) from None
        refuse_taken(self.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if not self._kept:
            with contextlib.suppress(OSError):
                for file in self._files:
                    file.unlink(missing_ok=True)
                if self._made:
                    self.path.rmdir()

    def clip(self, kind: str, index: int) -> Path:
        """The path of a clip."""
        path = self.path / f"{kind}-{index:04d}.mp4"
        self._files.append(path)
        return path

    def write_manifest(self, text: str) -> Path:
        """Write ``clips.jsonl`` as a whole; OpError when there is no room."""
        path = self.path / MANIFEST
        self._files.append(path)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OpError(
                f"{one_line(str(path))} cannot be written: {error.strerror}",
                "make room, or name another out",
            ) from None
        return path

    def keep(self) -> None:
        """The record is there: so are its files."""
        self._kept = True


def refuse_taken(path: Path) -> None:
    """OpError when there is something in the folder, or it is none; a new one may be made."""
    try:
        taken = any(path.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise OpError(
            f"out {one_line(str(path))} cannot be made: {error.strerror}", "name a new folder"
        ) from None
    if taken:
        raise OpError(f"out {one_line(str(path))} is not empty", "name a new folder")


@dataclass
class Benchmark:
    """What is asked, of whom, and what came of it so far."""

    call: Call
    lanes: Lanes
    folder: Folder
    dialect: Dialect
    requests: Requests
    room: Room
    told: dict[str, Any]
    warm: list[Answer] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    probed: tuple[Any, ...] = ()
    wall_s: float = 0.0

    @property
    def good(self) -> list[Answer]:
        """The timed answers that are clips."""
        return [answer for answer in self.answers if answer.error is None]

    def warm_up(self) -> None:
        """The first clips; their latencies are told apart."""
        self.room.check(len(self.requests.timed) + self._probes())
        self.warm = self._many(self.requests.warmup, 1, "warm", "warm-up")
        failed = next((answer for answer in self.warm if answer.error), None)
        if failed is not None:
            raise OpError(
                f"the warm-up clip failed: {failed.error}", "see what the server says, and its log"
            )

    def time(self, side_by_side: int) -> None:
        """The timed clips."""
        self.answers = self._many(self.requests.timed, side_by_side, "clip", "clip")
        if not self.good:
            raise OpError(f"no clip was made: {self.answers[0].error}", "see what the server says")
        begun = min(answer.started_s for answer in self.answers if answer.latency_s)
        self.wall_s = max(answer.ended_s for answer in self.answers) - begun

    def probe(self) -> None:
        """Fresh requests of one size, each sent twice, until it is plain what a repeat costs."""
        likes = [self.requests.timed[answer.index] for answer in self.good]
        self.probed = size_of(likes[0])
        likes = [each for each in likes if size_of(each) == self.probed]
        while not resultcache.plain(self.pairs) and self.lanes.left():
            number = len(self.pairs)
            request = self.requests.fresh(likes[number % len(likes)])
            what = f"looking for a result cache, {number + 1}"
            (fresh,) = self._many([request], 1, "fresh", what, number)
            (repeat,) = self._many([request], 1, "repeat", what, number)
            self.pairs.append(Pair(fresh, repeat))

    def write_manifest(self) -> Path:
        """``clips.jsonl``: one made clip a line."""
        lines = [
            json.dumps(
                {"video": str(self.folder.path / f"clip-{answer.index:04d}.mp4"),
                 "request": self.requests.timed[answer.index]}
            ) + "\n"
            for answer in self.good
        ]  # fmt: skip
        return self.folder.write_manifest("".join(lines))

    def dump_size(self, answer: Answer) -> int | None:
        """The size of a clip's dump; None without one."""
        if self.room.dumps is None or answer.sha256 is None:
            return None
        try:
            return dump_path(self.room.dumps, answer.sha256).stat().st_size
        except OSError:
            return None

    def _probes(self) -> int:
        return 2 * resultcache.LEAST

    def _many(
        self, asked: Sequence[dict[str, Any]], side_by_side: int, kind: str, what: str,
        first: int = 0,
    ) -> list[Answer]:  # fmt: skip
        """Have clips made, some at a time; their answers in order, of late ones too."""
        seen: set[int] = set()
        answers: list[Answer | None] = [None] * len(asked)
        to_come = {"warm": len(self.requests.timed) + self._probes(), "clip": self._probes()}

        def work(line: Line, index: int) -> Answer:
            target = self.folder.clip(kind, first + index)
            made = making.make(line, index, asked[index], self.dialect, target)
            answers[index] = made
            return made

        def tell(done: int) -> None:
            new = [a for a in answers if a is not None and not a.error and a.index not in seen]
            for answer in new:
                seen.add(answer.index)
                self.room.saw(answer.bytes, self.dump_size(answer))
            room = self.room.check(len(asked) - done + to_come.get(kind, 0)) if new else ""
            text = f"{what} {done} of {len(asked)}" if len(asked) > 1 else what
            self.call.progress(done, len(asked), f"{text}; {room} to come" if room else text)

        works = [functools.partial(work, index=index) for index in range(len(asked))]
        made = self.lanes.run(works, side_by_side, tell)
        late = f"no answer within the timeout of {self.lanes.timeout:g} s"
        return [
            Answer(index, error=late) if answer is None else answer
            for index, answer in enumerate(made)
        ]


def ask_health(lanes: Lanes) -> dict[str, Any]:
    """What the server says of itself; OpError when it says nothing in time."""
    (told,) = lanes.run([client.health], seconds=HEALTH_S)
    if told is None:
        raise client.nobody(lanes.server, "/health does not end")
    return told


def new_nonce() -> str:
    """Of one run: what makes its made-up requests new to every cache."""
    return secrets.token_hex(4)


def begin(
    call: Call, server: Server, folder: Folder, given: Sequence[dict[str, Any]], dumps: Path | None,
    *, warmup: int, count: int, seed: int, api: str, timeout: float,
) -> Benchmark:  # fmt: skip
    """A benchmark that may begin; nothing but ``/health`` was asked for yet.

    Raises:
        OpError: nobody answers, or a request cannot be said in the server's dialect.
    """
    lanes = Lanes(call, server, timeout)
    told = ask_health(lanes)
    requests = Requests(given, warmup, count, seed, new_nonce())
    dialect = Dialect(api, ours="dump_dir_writable" in told)
    for request in requests.timed:
        dialect.check(request)
    room = Room(folder.path, dumps)
    room.expect(() if warmup else requests.timed)  # a warm-up tells it better
    return Benchmark(call, lanes, folder, dialect, requests, room, told)
