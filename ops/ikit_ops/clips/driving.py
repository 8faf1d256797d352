"""Send requests side by side, and come back when the time is up or somebody cancels.

Each lane is a thread that takes one piece of work after the other, with a ``Line`` for each.
The thread that waits is the only one that decides: when the deadline passes, the call is
cancelled, or a lane fails in a way that is not the server's, it cuts every line and leaves.  A
lane that hangs where nothing can be cut (the resolver, a connection under way) is left behind:
it is a daemon, finds its line cut, and touches nothing any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from ikit_mcp.call import Call
from ikit_ops.clips.client import Line, Server

TICK_S, TELL_S, GRACE_S = 0.1, 1.0, 1.0
Made = TypeVar("Made")


class Lanes:
    """The lanes to one server, all with one deadline: ``timeout`` seconds from now."""

    def __init__(self, call: Call, server: Server, timeout: float) -> None:
        self.call, self.server, self.timeout = call, server, timeout
        self.ends = time.monotonic() + timeout

    def left(self) -> float:
        """The seconds that are left; never below 0."""
        return max(0.0, self.ends - time.monotonic())

    def run(
        self,
        works: Sequence[Callable[[Line], Made]],
        side_by_side: int = 1,
        tell: Callable[[int], None] = lambda done: None,
        seconds: float | None = None,
    ) -> list[Made | None]:
        """Do the works in order, some at a time; None for those that did not end in time.

        ``tell`` is called with how many are done, here and now and then.  Raises ``Cancelled``,
        what ``tell`` raised, or what a work raised: the works under way are cut off then.
        """
        ends = self.ends if seconds is None else min(self.ends, time.monotonic() + seconds)
        batch = _Batch(self.server, works, ends)
        threads = [
            threading.Thread(target=batch.lane, daemon=True)
            for _ in range(min(side_by_side, len(works)))
        ]
        for thread in threads:
            thread.start()
        try:
            self._wait(batch, threads, ends, tell)
        finally:
            batch.stop()
            given_up = time.monotonic() + GRACE_S
            for thread in threads:
                thread.join(max(0.0, given_up - time.monotonic()))
        if batch.troubles:
            raise batch.troubles[0]
        self.call.check_cancelled()
        return list(batch.made)

    def _wait(
        self, batch: _Batch[Made], threads: Sequence[threading.Thread], ends: float,
        tell: Callable[[int], None],
    ) -> None:  # fmt: skip
        told, last = -1, 0.0
        while any(thread.is_alive() for thread in threads) and not batch.troubles:
            self.call.check_cancelled()
            now = time.monotonic()
            if now >= ends:
                return
            if batch.done != told or now - last >= TELL_S:
                told, last = batch.done, now
                tell(told)
            batch.changed.wait(min(TICK_S, ends - now))
            batch.changed.clear()
        tell(batch.done)


class _Batch(Generic[Made]):
    """Works, and what became of them."""

    def __init__(
        self, server: Server, works: Sequence[Callable[[Line], Made]], ends: float
    ) -> None:
        self.server, self.works, self.ends = server, works, ends
        self.made: list[Made | None] = [None] * len(works)
        self.troubles: list[BaseException] = []
        self.changed = threading.Event()
        self._todo: SimpleQueue[int] = SimpleQueue()
        for index in range(len(works)):
            self._todo.put(index)
        self._lines: list[Line] = []
        self._stopped = threading.Event()

    @property
    def done(self) -> int:
        """How many works have ended."""
        return sum(each is not None for each in self.made)

    def stop(self) -> None:
        """Cut what is under way; nothing new is begun."""
        self._stopped.set()
        for line in list(self._lines):
            line.cut()

    def lane(self) -> None:
        """Take works until there are none."""
        while not self._stopped.is_set():
            try:
                index = self._todo.get_nowait()
            except Empty:
                break
            line = Line(self.server, self.ends)
            self._lines.append(line)
            if self._stopped.is_set():
                line.cut()
            try:
                self.made[index] = self.works[index](line)
            except BaseException as error:  # noqa: BLE001 -- handed to the thread that waits
                self.troubles.append(error)
                self._stopped.set()
            finally:
                self._lines.remove(line)
                self.changed.set()
        self.changed.set()
