"""Chrome traces as torch.profiler (Kineto) writes them: GPU work, its launches, host operators.

Every event has a category; times are microseconds with three decimals, as numbers.  GPU work
is in ``kernel``, ``gpu_memcpy`` and ``gpu_memset``; launches are in ``cuda_runtime`` and
``cuda_driver``.  ``python_function``, ``Trace`` and the annotations contain the others, so
their times must never be added to theirs.

A trace of a CPU run has operators only.  They nest, so their own time is what counts: the time
of an operator less that of the operators that it calls.  Their order needs a second reading,
which is made only when no GPU work was found.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ikit_ops.profilers.capture import Capture, KernelKey, Shape, Tally, shape
from ikit_ops.profilers.gather import Label, Work
from ikit_ops.profilers.json_events import CUT_OFF, EventReader
from ikit_ops.profilers.limits import CUT, MAX_STRING, Reading
from ikit_ops.profilers.sweep import Runs, no_collecting

FORMAT = "torch-trace"
KERNELS = frozenset({"kernel", "Kernel"})
MEMORY = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
API = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "Runtime"})
RANGES = frozenset({"user_annotation", "nvtx"})
OPERATORS = frozenset({"cpu_op", "Operator"})
WANTED = KERNELS | MEMORY | API | RANGES
PAIRED = frozenset({"B", "E"})
COARSE_US = 4e12  # from here on a double cannot hold a ns beside the us
FAR_US = 4e15
GRAPH_LAUNCH = frozenset({
    "cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch", "cudaGraphLaunch_ptsz",
    "cuGraphLaunch_ptsz",
})  # fmt: skip
MAX_CORRELATION = 1 << 26


class Event(msgspec.Struct, gc=False):
    """What is read of an event."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = math.nan
    dur: float = math.nan
    pid: int | str | None = None
    tid: int | str | None = None
    args: msgspec.Raw = msgspec.Raw()


class Arguments(msgspec.Struct, gc=False):
    """What is read of the arguments of GPU work and of launches."""

    correlation: int | None = None
    device: int | None = None
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    bytes: int | None = None


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def loose_event(value: dict[str, Any]) -> Event | None:
    """An event of an object whose fields have other types than usual; None when it is none."""
    texts = [value.get(key) for key in ("ph", "cat", "name")]
    if not isinstance(texts[0], str):
        return None
    ph, cat, name = (str(text)[:MAX_STRING] if text is not None else "" for text in texts)
    pid, tid = (v if isinstance(v, (int, str)) else None for v in map(value.get, ("pid", "tid")))
    args = value.get("args")
    raw = msgspec.Raw(msgspec.json.encode(args)) if isinstance(args, dict) else msgspec.Raw()
    return Event(ph, cat, name, _number(value.get("ts")), _number(value.get("dur")), pid, tid, raw)


class _Correlations:
    """Which launches the GPU work belongs to: one byte for each number that was seen.

    Numbers count up from the start of the process, a set of them would take fifty times that.
    """

    def __init__(self) -> None:
        self._seen = bytearray()
        self.known = False

    def add(self, number: int | None) -> None:
        """Note the launch of one piece of work."""
        if number is None or not 0 < number < MAX_CORRELATION:
            return
        self.known = True
        if number >= len(self._seen):
            self._seen.extend(bytes(number + (1 << 16) - len(self._seen)))
        self._seen[number] = 1

    def __contains__(self, number: int) -> bool:
        return 0 < number < len(self._seen) and self._seen[number] == 1


class _Gathering:
    """What one reading of the events collects."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.work = Work(reading)
        self.memory: dict[str, Tally] = {}
        self.unsized: set[str] = set()
        self.api: dict[str, Tally] = {}
        self.ranges: dict[str, Tally] = {}
        self.unsound = self.unpaired = self.kernels = 0
        self.operators = self.coarse = False
        self.graphs: list[int] = []
        self.of_launches = _Correlations()
        self._arguments = msgspec.json.Decoder(Arguments)

    def take(self, events: Sequence[Event]) -> None:
        """Sort events by what they are."""
        if not self.operators:
            self.operators = any(event.cat in OPERATORS for event in events)
        # Most events are operators and arrows: one look at each must do.
        for event in [e for e in events if e.cat in WANTED or e.ph in PAIRED]:
            cat = event.cat
            if event.ph != "X":
                if event.ph in PAIRED and (cat in WANTED or cat in OPERATORS):
                    self.unpaired += 1
                continue
            start, duration = event.ts, event.dur
            if not (-FAR_US < start < FAR_US and 0 <= duration < FAR_US):
                self.unsound += 1
                continue
            nanoseconds = round(duration * 1000)
            if cat in API:
                self._tally(self.api, event.name, nanoseconds)
                if event.name in GRAPH_LAUNCH:
                    self.graphs.append(self._of(event.args).correlation or 0)
            elif cat in RANGES:
                self._tally(self.ranges, event.name, nanoseconds)
            else:
                self._work(event, round(start * 1000), nanoseconds)

    def _tally(self, tallies: dict[str, Tally], name: str, duration: int) -> Tally:
        tally = tallies.get(name)
        if tally is None:
            self.reading.count_names(len(tallies) + 1)
            tally = tallies[name[:MAX_STRING]] = Tally()
        tally.add(duration)
        return tally

    def _work(self, event: Event, start: int, duration: int) -> None:
        """A kernel, a copy or a set."""
        arguments = self._of(event.args)
        device = arguments.device
        if device is None and isinstance(event.pid, int):
            device = event.pid
        self.of_launches.add(arguments.correlation)
        identity: tuple[Any, ...] | str = event.name
        if event.cat in KERNELS:
            self.kernels += 1
            identity = (event.name, arguments.grid, arguments.block)
        else:
            tally = self._tally(self.memory, event.name, duration)
            if arguments.bytes is None:
                self.unsized.add(event.name[:MAX_STRING])
            else:
                tally.bytes = (tally.bytes or 0) + arguments.bytes
        if event.ts > COARSE_US:
            self.coarse = True
        self.work.add(device, start, start + duration, identity, _label)

    def _of(self, raw: msgspec.Raw) -> Arguments:
        try:
            return self._arguments.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            return _loose_arguments(raw)


def _label(key: Any) -> Label:
    if isinstance(key, str):
        return key[:MAX_STRING]
    return KernelKey(key[0][:MAX_STRING], shape(key[1]), shape(key[2]))


def _loose_arguments(raw: msgspec.Raw) -> Arguments:
    """Arguments of other types than usual: what is sound of them."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return Arguments()
    if not isinstance(value, dict):
        return Arguments()

    def number(name: str) -> int | None:
        """A whole number, also one that was written as text."""
        found = value.get(name)
        if isinstance(found, str) and found.isdecimal() and len(found) < 18:
            return int(found)
        return found if type(found) is int and abs(found) < 1 << 60 else None

    def three(name: str) -> Shape | None:
        """Grid or block."""
        found = value.get(name)
        return shape(found) if isinstance(found, list) else None

    return Arguments(
        number("correlation"), number("device"), three("grid"), three("block"), number("bytes")
    )


def read(reading: Reading) -> Capture:
    """The capture of a trace; Damaged when it is none."""
    events = EventReader(reading, msgspec.json.Decoder(list[Event]), loose_event)
    gathered = _Gathering(reading)
    with no_collecting():
        for block in events.events():
            gathered.take(block)
    capture = Capture(FORMAT, tool="torch", grid_unit="blocks")
    capture.facts |= _facts(events.head)
    capture.cpu_only = events.head.get("deviceProperties") == []
    capture.memory_ops, capture.ranges = gathered.memory, gathered.ranges
    capture.host_api = gathered.api
    gathered.work.finish(capture, _gpu_names(events.head), kernels=True)
    if gathered.operators and not gathered.work.labels:
        capture.host_ops = _own_times(reading)
    _shortfalls(capture, gathered, events.skipped)
    _unseen_graphs(capture, gathered)
    for name in sorted(gathered.unsized):
        # Only some of its bytes are known: their sum says nothing.
        gathered.memory[name].bytes = None
        capture.missing.append(f"bytes of {name}: some events do not say theirs")
    if events.long_tail and "deviceProperties" not in events.head:
        capture.missing.append("names of devices: too much follows the events to be read")
    return capture


def _facts(head: dict[str, Any]) -> dict[str, Any]:
    wanted = ("schemaVersion", "cuda_driver_version", "cuda_runtime_version", "cupti_version",
              "baseTimeNanoseconds")  # fmt: skip
    return {key: head[key] for key in wanted if isinstance(head.get(key), (int, str))}


def _gpu_names(head: dict[str, Any]) -> dict[int, str]:
    listed = head.get("deviceProperties")
    found = {}
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            number = entry.get("id")
            if type(number) is int:
                found[number] = entry["name"]
    return found


def _shortfalls(capture: Capture, gathered: _Gathering, skipped: int) -> None:
    """What keeps the capture from being whole, and what limits it."""
    capture.incomplete += [n for n in gathered.reading.notes if n in (CUT, CUT_OFF)]
    if skipped:
        capture.incomplete.append(f"{skipped} events are no sound JSON: they were left out")
    if gathered.unsound:
        capture.incomplete.append(f"{gathered.unsound} events have no sound times: left out")
    if gathered.unpaired:
        capture.incomplete.append(f"{gathered.unpaired} begin and end events were not paired")
    if gathered.coarse:
        capture.limitations.append(
            "the trace's times are so large that starts are exact to 0.25 us or worse: so are gaps"
        )


def _unseen_graphs(capture: Capture, gathered: _Gathering) -> None:
    """Say where the host launched graphs whose kernels are not in the trace.

    All work of a graph bears the number of the call that launched the graph.
    """
    launches = len(gathered.graphs)
    unseen = sum(1 for number in gathered.graphs if number not in gathered.of_launches)
    if launches and not gathered.kernels:
        capture.incomplete.append(
            f"{launches} CUDA graph launches, and no kernel of them: the graphs were not traced"
        )
    elif launches and not gathered.of_launches.known:
        capture.incomplete.append(
            f"{launches} CUDA graph launches: the trace does not say which kernels are theirs"
        )
    elif unseen:
        capture.incomplete.append(
            f"{unseen} of {launches} CUDA graph launches have no kernel in the trace: "
            "kernels of graphs were not seen"
        )


def _own_times(reading: Reading) -> dict[str, Tally]:
    """Operators by name with their own time, from a second reading."""
    threads: defaultdict[tuple[Any, Any], Runs] = defaultdict(lambda: Runs(nested=True))
    names: dict[str, int] = {}
    events = EventReader(reading, msgspec.json.Decoder(list[Event]), loose_event)
    for block in events.events():
        for event in block:
            if event.cat in OPERATORS and event.ph == "X":
                start, duration = event.ts, event.dur
                if -FAR_US < start < FAR_US and 0 <= duration < FAR_US:
                    number = names.setdefault(event.name[:MAX_STRING], len(names))
                    begin = round(start * 1000)
                    threads[event.pid, event.tid].add(begin, begin + round(duration * 1000), number)
        reading.count_names(len(names))
        reading.count_names(len(threads))
    found: dict[int, Tally] = defaultdict(Tally)
    for runs in threads.values():
        own_times(runs, lambda key, own: found[key].add(own))
    by_number = list(names)
    return {by_number[number]: tally for number, tally in found.items()}


def own_times(runs: Runs, tell: Callable[[int, int], None]) -> None:
    """Tell each row's key and own time; rows nest, outer ones first where starts are equal."""
    stack: list[list[int]] = []  # end, key, own time so far
    for block in runs.blocks():
        for start, end, key in block:
            while stack and stack[-1][0] <= start:
                _, done, own = stack.pop()
                tell(done, max(own, 0))
            if stack:
                stack[-1][2] -= min(end, stack[-1][0]) - start
            stack.append([end, key, end - start])
    for _, key, own in stack:
        tell(key, max(own, 0))
