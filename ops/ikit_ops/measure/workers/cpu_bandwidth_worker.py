"""Read and copy memory with all cores, and stamp when how much was done.

Run by path as ``cpu_bandwidth_worker.py PLAN RESULT`` (two JSON files), with the standard
library alone.  Nothing here is compiled, yet the rates are those of vectorised kernels: the
C library's ``memcmp`` of two equal buffers reads both to the end, its ``memmove`` copies, and
ctypes releases the interpreter's lock for as long as they run, so that Python only hands out
chunks and looks at the clock.

Each thread owns two buffers.  It moves to the CPUs of its memory node first and touches the
pages after that, because the kernel places a page where it is first touched.  Threads start a
phase together and then run freely: a thread that loses its core must not stop the others, and
what that costs is seen in the stamps.

Which physical pages a buffer gets decides what collides in the memory's banks, and moves a rate
by 10 % and more from one allocation to the next.  So the rounds are split over several *draws*,
with new buffers for each, in huge pages and in the system's default by turns.  The second buffer
begins half a page later than the first: else both streams would come to the end of a page, where
prefetching stops, at once.

That the data was really read is proven, not assumed: every comparison must find the buffers
equal, a byte changed at the end must be found, and each copy is given a changed
byte to carry that later comparisons would miss.

PLAN: ``threads`` (a list of CPUs each, empty: anywhere), ``slice_bytes`` (of one buffer),
``chunk_bytes``, ``draws`` ([{pages: huge or default, phases: [{kind, seconds}]}]),
``stamp_seconds``.
RESULT: ``phases`` [{kind, threads: [{times, bytes}]}] with CLOCK_MONOTONIC seconds
and the bytes moved by then, ``verified``, ``differences``; or ``error``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = (1 << 20) + 4096 + 64  # no multiple of a page: no two pages of a buffer are equal
STAGGER = 2048  # bytes by which the second buffer begins later in its page


def c_library() -> tuple[Callable[..., int], Callable[..., int]]:
    """The C library's (memcmp, memmove), with their types declared."""
    library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    compare, move = library.memcmp, library.memmove
    for function in (compare, move):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    compare.restype, move.restype = ctypes.c_int, ctypes.c_void_p
    return compare, move


class Slice:
    """One thread's two equal buffers, of ``size`` bytes each, touched by the calling thread."""

    def __init__(self, size: int, chunk: int, pages: str = "default") -> None:
        self.size, self.chunk = size, chunk
        self.offset = self.differences = 0
        self._compare, self._move = c_library()
        self.first, self.second = mmap.mmap(-1, size), mmap.mmap(-1, size + STAGGER)
        if pages == "huge" and sys.platform == "linux":
            for part in (self.first, self.second):
                with contextlib.suppress(OSError):  # a kernel without them
                    part.madvise(mmap.MADV_HUGEPAGE)
        self._a = ctypes.addressof(ctypes.c_char.from_buffer(self.first))
        self._b = ctypes.addressof(ctypes.c_char.from_buffer(self.second, STAGGER))
        block = os.urandom(BLOCK)
        for start in range(0, size, BLOCK):
            self._move(self._a + start, block, min(BLOCK, size - start))
        self._move(self._b, self._a, size)

    def equal(self) -> bool:
        """Whether the buffers are equal, all of them."""
        return self._compare(self._a, self._b, self.size) == 0

    def notices_a_change(self) -> bool:
        """Whether a comparison that found them equal finds a change of the last byte."""
        if not self.equal():
            return False
        self.second[-1] ^= 1
        seen = not self.equal()
        self.second[-1] ^= 1
        return seen

    def read_step(self) -> int:
        """Compare the next chunk; the number of bytes read."""
        start, length = self._next()
        if self._compare(self._a + start, self._b + start, length) != 0:
            self.differences += 1  # it ended early: the bytes counted were not all read
        return 2 * length

    def copy_step(self) -> int:
        """Copy the next chunk; the number of bytes read and written."""
        start, length = self._next()
        self._move(self._b + start, self._a + start, length)
        return 2 * length

    def run(self, kind: str, seconds: float, stamp_seconds: float) -> tuple[list[float], list[int]]:
        """Read or copy for so long; (times, bytes moved until then), first entry (start, 0)."""
        if kind == "copy":
            self.first[self.offset] ^= 1
        step = self.read_step if kind == "read" else self.copy_step
        begun = last = now = time.monotonic()
        times, moved, total = [begun], [0], 0
        while now - begun < seconds:
            total += step()
            now = time.monotonic()
            if now - last >= stamp_seconds or now - begun >= seconds:
                times.append(now)
                moved.append(total)
                last = now
        return times, moved

    def _next(self) -> tuple[int, int]:
        start = self.offset
        length = min(self.chunk, self.size - start)
        self.offset = (start + length) % self.size
        return start, length


class Crew:
    """The threads of a plan and what they bring home."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.count = len(plan["threads"])
        self.barrier = threading.Barrier(self.count)
        self.phases = [phase for draw in plan["draws"] for phase in draw["phases"]]
        self.stamps: list[list[Any]] = [[None] * self.count for _ in self.phases]
        self.verified = [False] * self.count
        self.differences = [0] * self.count
        self.errors: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run the plan to its end; the result, as in the module's docstring."""
        threads = [
            threading.Thread(target=self._guarded, args=(number,), daemon=True)
            for number in range(self.count)
        ]
        for thread in threads:
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more threads to give
                self.errors.append(str(error))
                self.barrier.abort()
                break
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self.errors:
            return {"error": self.errors[0]}
        return {
            "phases": [
                {
                    "kind": phase["kind"],
                    "threads": [{"times": times, "bytes": moved} for times, moved in stamps],
                }
                for phase, stamps in zip(self.phases, self.stamps, strict=True)
            ],
            "verified": all(self.verified),
            "differences": sum(self.differences),
        }

    def _guarded(self, number: int) -> None:
        """A thread that fails must not leave the others waiting at the barrier."""
        try:
            self._work(number)
        except threading.BrokenBarrierError:
            pass
        except (OSError, MemoryError, ValueError) as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            self.barrier.abort()

    def _work(self, number: int) -> None:
        cpus = self.plan["threads"][number]
        if cpus and sys.platform == "linux":
            os.sched_setaffinity(0, cpus)  # 0 is the calling thread, not the process
        stamps = iter(self.stamps)
        verified = True
        for draw in self.plan["draws"]:
            part = Slice(self.plan["slice_bytes"], self.plan["chunk_bytes"], draw["pages"])
            for phase in draw["phases"]:
                self.barrier.wait()
                told = part.run(phase["kind"], phase["seconds"], self.plan["stamp_seconds"])
                next(stamps)[number] = told
            self.barrier.wait()  # the proof would disturb those that still run
            verified = part.notices_a_change() and verified
            self.differences[number] += part.differences
            del part  # its memory goes before the next is taken
        self.verified[number] = verified


def main(argv: list[str]) -> int:
    """Run the plan of the first file; 0 when the second holds a measurement, 1 an error."""
    plan = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    result = Crew(plan).run()
    Path(argv[1]).write_text(json.dumps(result), encoding="utf-8")
    return 1 if "error" in result else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to tidy up: end at once
    sys.exit(main(sys.argv[1:]))
