"""Memory bandwidth of the CPU: how much, by whom, from where.

The working set has to be several times the last-level cache, or the cache answers: of a set
read again and again, a cache can hold no more than its size, so at 16 times at most a sixteenth
comes from it.  What a machine says of its cache need not be true -- virtual machines tell that
of a whole host, or none at all -- so there is a floor, and the free memory is the other bound.

One thread cannot fill the memory's pipes, and more threads than cores do not help: each core
waits for a limited number of cache lines at a time.  So the default is a thread per core.  With
several memory nodes the threads are spread over them evenly by their CPUs, and each reads what
lies on its own node: the sum is what the machine can do for an engine that places its data well.

With few cores the copy rate can lie above the read rate: a core waits for what it loads, and a
store that goes past the cache it does not wait for.  Decoding reads, so reading is its ceiling.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call
from ikit_mcp.registry import OpError
from ikit_ops.measure import host
from ikit_ops.measure.rounds import Outcome, Progressing, answer_of, phases, rounds_of

WORKER = Path(__file__).parent / "workers" / "cpu_bandwidth_worker.py"
# Seconds of a sustained rate: what a decoding step takes, many chunks, and longer than the time
# slice of a scheduler.  Much longer ones tell what else the machine was doing instead.
WINDOW = 0.025
ROUND = 0.5
READ_PART = 0.6
CHUNK = 32 << 20
PAGES = ("huge", "default")  # of the draws, by turns: each has physical pages of its own
MOST_DRAWS = 6
PAGE = 1 << 16  # the largest base page in use; slices are multiples of it
TIMES_CACHE, LEAST_TIMES_CACHE = 16, 4
LEAST_SET, LARGEST_SET = 512 << 20, 8 << 30
SETUP_SECONDS = 120.0
KEEP = ("LD_LIBRARY_PATH",)  # this Python may find its own library by it
# x86: memmove then writes past the cache, so that no line is read only to be overwritten.  The C
# library does it by itself above a size that some virtual machines put beyond any working set.
TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x100000"
METHOD = {
    "read": "memcmp of two equal buffers per thread",
    "pages": "up to 6 allocations, each for some of the rounds: huge and the system's by turns",
    "copy": "memmove between two buffers per thread; bytes read plus bytes written, as STREAM "
    "counts; lines that a store reads first (write-allocate) are not counted",
    "window_seconds": WINDOW,
    "best_sustained": "highest rate of all threads together over one window",
}


@dataclass(frozen=True)
class Plan:
    """What will be run: CPUs of each thread, bytes of each buffer, and why that many."""

    threads: tuple[tuple[int, ...], ...]
    slice_bytes: int
    seconds: float
    usable: int
    cores: int
    quota: float | None
    cache_bytes: int | None
    nodes: tuple[host.Node, ...] = field(default=())

    @property
    def size_bytes(self) -> int:
        """The working set: both buffers of all threads."""
        return 2 * self.slice_bytes * len(self.threads)

    @property
    def times_cache(self) -> float | None:
        """The working set over the last-level caches; None where their size is not known."""
        return self.size_bytes / self.cache_bytes if self.cache_bytes else None


def plan(call: Call, seconds: float, threads: int | None, size_bytes: int | None) -> Plan:
    """The plan for these arguments on this machine; OpError when it has not the memory."""
    usable = host.usable_cpus()
    info = call.cpu()
    runnable = len(usable) or info.usable_threads or info.threads or 1
    quota = host.cpu_quota()
    cores = max(1, min(info.cores or runnable, runnable, int(quota or runnable) or 1))
    nodes = tuple(host.memory_nodes(usable))
    count = threads or cores
    cache = call.last_level_cache_bytes()
    available = host.available_memory_bytes()
    size = size_bytes or default_size(cache, available)
    if size > available * 0.8:
        raise OpError(
            f"a working set of {size >> 20} MiB does not fit: {available >> 20} MiB are available",
            "give a smaller size_bytes, or free memory",
        )
    part = max(PAGE, size // (2 * count) // PAGE * PAGE)
    return Plan(spread(count, nodes), part, seconds, runnable, cores, quota, cache, nodes)


def default_size(cache: int | None, available: int) -> int:
    """16 times the cache, within a floor and a roof, and a quarter of the available memory.

    Where a quarter is not even 4 times the cache, half of the memory is taken.
    """
    wanted = min(max(TIMES_CACHE * (cache or 0), LEAST_SET), LARGEST_SET)
    size = min(wanted, available // 4)
    if cache is not None and size < LEAST_TIMES_CACHE * cache:
        size = min(wanted, available // 2)
    return size


def spread(count: int, nodes: Sequence[host.Node]) -> tuple[tuple[int, ...], ...]:
    """For each thread the CPUs it may use: those of its node; () is anywhere.

    Threads are dealt out evenly over the usable CPUs, then bound to the whole node of theirs,
    so that the scheduler can still move them away from a busy core, but not from their memory.
    """
    owners = sorted((cpu, node.cpus) for node in nodes for cpu in node.cpus)
    if len({cpus for _, cpus in owners}) < 2:
        return ((),) * count
    return tuple(owners[n * len(owners) // count][1] for n in range(count))


def measure(call: Call, chosen: Plan) -> Outcome:
    """Run the plan in a process of its own; OpError when that comes to nothing."""
    folder = call.folder
    listed = phases(chosen.seconds, ROUND, READ_PART)
    asked = {
        "threads": [list(cpus) for cpus in chosen.threads],
        "slice_bytes": chosen.slice_bytes,
        "chunk_bytes": CHUNK,
        "draws": draws(listed),
        "stamp_seconds": max(WINDOW / 10, max(p["seconds"] for p in listed) / 100),
    }
    (folder / "plan.json").write_text(json.dumps(asked), encoding="utf-8")
    answer = folder / "result.json"
    # A short environment: what the shell preloads or tunes must not change the number.
    environment = {**call.clean_environment(KEEP), "GLIBC_TUNABLES": TUNABLES}
    with Progressing(call, chosen.seconds, "reading and copying memory"):
        done = call.run(
            [sys.executable, "-I", str(WORKER), str(folder / "plan.json"), str(answer)],
            timeout=chosen.seconds * 2 + SETUP_SECONDS,
            grace=1.0,
            env=environment,
        )
    told = answer_of(answer, done.stderr, done.signal)
    found = rounds_of(told["phases"], WINDOW)
    return Outcome(found, bool(told["verified"]), int(told["differences"]))


def draws(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The phases of all rounds, two a round, dealt out to the draws in order."""
    count = len(listed) // 2
    most = min(count, MOST_DRAWS)
    edges = [2 * (count * n // most) for n in range(most + 1)]
    return [
        {"pages": PAGES[n % len(PAGES)], "phases": listed[begin:end]}
        for n, (begin, end) in enumerate(pairwise(edges))
    ]


def vectorised_compare() -> bool | None:
    """Whether the C library's memcmp is known to be vectorised; None where that is not known."""
    if sys.platform in ("darwin", "win32"):
        return True
    return True if platform.libc_ver()[0] == "glibc" else None


def memory_layout(chosen: Plan) -> list[Mapping[str, Any]]:
    """The memory nodes with their usable CPUs and the threads that were bound to them."""
    return [
        {
            "node": node.number,
            "usable_cpus": len(node.cpus),
            "threads": sum(cpus == node.cpus for cpus in chosen.threads)
            if any(chosen.threads)
            else (len(chosen.threads) if node.cpus else 0),
        }
        for node in chosen.nodes
    ]
