"""What Linux perf prints: samples of ``perf script``, counters of ``perf stat -j``.

perf interrupts the CPU and notes where it was.  A function's share of the samples estimates its
share of the CPU time, with a spread of about 1/sqrt(samples); it is no count of calls, and a
program that waits is not sampled at all.  Weighted by its period, each sample stands for the
same number of events; without one, every sample counts the same.

``perf stat`` writes "<not supported>" and "<not counted>" where the machine has no counter or
forbids it: that is null, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import MAX_STRING, Reading, lines_of, shown_name
from ikit_ops.profilers.tables import number

SCRIPT = "perf-script"
STAT = "perf-stat"
MAX_FUNCTIONS = 2_000
_HEAD = re.compile(
    r"^\s{0,64}(?P<comm>\S.{0,64}?)\s+(?P<pid>\d+)(?:/(?P<tid>\d+))?\s+(?:\[\d+\]\s+)?"
    r"(?:[A-Za-z.]{5}\s+)?(?:(?P<time>\d+\.\d+):\s+)?(?:(?P<period>\d+)\s+)?"
    r"(?P<event>[A-Za-z][^\s]{0,120}?):(?:[ \t]|$)(?P<rest>.*)$"
)
_FRAME = re.compile(r"^\s+(?P<ip>[0-9a-f]{1,16})\s+(?P<what>\S.*)$")
_DSO = re.compile(r"\s\((?P<dso>(?:[^()]|\([^()]*\)){0,4096})\)\s*$")
_LOST = re.compile(r"\bLOST\b|\blost \d+ (?:chunks|events|samples)", re.IGNORECASE)


def is_head(line: str) -> bool:
    """Whether a line begins a sample."""
    return len(line) < 4_096 and _HEAD.match(line) is not None


@dataclass
class _Function:
    samples: int = 0
    weight: int = 0
    inclusive: int = 0


class _Samples:
    """Functions by (symbol, object), and the totals."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], _Function] = {}
        self.samples = self.weight = 0
        self.events: dict[str, int] = {}
        self.first: float | None = None
        self.last: float | None = None

    def take(self, head: re.Match[str], frames: list[tuple[str, str]]) -> None:
        """One sample; its first frame is where the CPU was."""
        weight = int(head["period"]) if head["period"] and len(head["period"]) < 19 else 1
        self.samples += 1
        self.weight += weight
        event = head["event"]
        self.events[event] = self.events.get(event, 0) + 1
        if head["time"]:
            moment = float(head["time"])
            self.first = moment if self.first is None else min(self.first, moment)
            self.last = moment if self.last is None else max(self.last, moment)
        if not frames:
            frames = [("[unknown]", "")]
        leaf = self.functions.setdefault(frames[0], _Function())
        leaf.samples += 1
        leaf.weight += weight
        for frame in set(frames):
            self.functions.setdefault(frame, _Function()).inclusive += weight


def read_script(reading: Reading) -> Capture:
    """The functions of a ``perf script`` output."""
    samples, lost = _Samples(), 0
    for head, frames in _blocks(reading):
        if head is None:
            lost += 1
            continue
        samples.take(head, frames)
        reading.count_names(len(samples.functions))
    if not samples.samples:
        raise reading.damaged("it holds no sample of perf script", "use: perf script -i perf.data")
    capture = Capture(SCRIPT, tool="perf")
    capture.cpu_only = True
    rows = sorted(
        samples.functions.items(), key=lambda item: (-item[1].weight, -item[1].inclusive, item[0])
    )
    capture.functions = [
        {
            "name": shown_name(symbol),
            "object": shown_name(place) or None,
            "samples": found.samples,
            "share": found.weight / samples.weight if samples.weight else None,
            "inclusive_share": found.inclusive / samples.weight if samples.weight else None,
        }
        for (symbol, place), found in rows[:MAX_FUNCTIONS]
    ]
    span = None if samples.first is None or samples.last is None else samples.last - samples.first
    capture.facts |= {
        "samples": samples.samples,
        "events": {shown_name(k): v for k, v in list(samples.events.items())[:50]},
        "span_s": span,
        "functions": len(samples.functions),
    }
    if lost:
        capture.incomplete.append(f"perf lost samples ({lost} notes of it)")
    if len(samples.events) > 1:
        capture.limitations.append("samples of several events are added up in the shares")
    _say_cpu_only(capture)
    return capture


def _say_cpu_only(capture: Capture) -> None:
    capture.missing.append("GPU kernels, memory operations and gaps (perf sees the CPU alone)")
    capture.limitations.append(
        "samples estimate shares of CPU time, to about 1/sqrt(samples); waiting is not sampled"
    )


def _blocks(
    reading: Reading,
) -> Iterator[tuple[re.Match[str] | None, list[tuple[str, str]]]]:
    """Each sample's head with its frames; (None, []) for a note of lost samples."""
    head: re.Match[str] | None = None
    frames: list[tuple[str, str]] = []
    for line in lines_of(reading):
        if not line.strip() or line.startswith("#"):
            continue
        frame = _FRAME.match(line[:MAX_STRING])
        # A frame begins with an address; a head's command may look like one, but has an event.
        if frame is not None and head is not None and not is_head(line):
            frames.append(_frame_of(frame["what"]))
            continue
        found = _HEAD.match(line) if len(line) < 4_096 else None
        if found is None:
            if _LOST.search(line[:400]):
                yield None, []
            continue
        if head is not None:
            yield head, frames
        head, frames = found, []
        inline = _FRAME.match(" " + found["rest"].strip())
        if inline is not None:
            frames.append(_frame_of(inline["what"]))
    if head is not None:
        yield head, frames


def _frame_of(text: str) -> tuple[str, str]:
    """``(symbol, object)`` of a frame: ``main+0x12 (/usr/bin/python3.11)``."""
    place = _DSO.search(text)
    symbol = text[: place.start()] if place else text
    symbol = re.sub(r"\+0x[0-9a-f]+$", "", symbol.strip())
    return symbol or "[unknown]", place["dso"] if place else ""


# --- counters ---------------------------------------------------------------------------


def read_stat(reading: Reading) -> Capture:
    """The counters of ``perf stat -j``: one JSON object a line."""
    capture = Capture(STAT, tool="perf")
    capture.cpu_only = True
    capture.counters = []
    for line in lines_of(reading):
        row = _counter(line)
        if row is None:
            continue
        capture.counters.append(row)
        reading.count_names(len(capture.counters))
        if row["value"] is None:
            capture.missing.append(f"{row['event']}: {row['why']}")
    if not capture.counters:
        raise reading.damaged("it holds no counter of perf stat -j")
    if unseen := sum(1 for row in capture.counters if row["value"] is None):
        capture.incomplete.append(f"{unseen} of {len(capture.counters)} counters were not counted")
    if any(row["running_percent"] not in (None, 100) for row in capture.counters):
        capture.limitations.append(
            "counters took turns on the hardware: their values are scaled up from a part of the run"
        )
    capture.missing.append("GPU kernels (perf sees the CPU alone)")
    return capture


def _counter(line: str) -> dict[str, Any] | None:
    """One counter, or None for a line that is none."""
    try:
        told = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(told, dict) or "counter-value" not in told or "event" not in told:
        return None
    text = str(told["counter-value"])
    value = number(text)
    running = told.get("pcnt-running")
    return {
        "event": shown_name(str(told["event"])),
        "value": value,
        "unit": shown_name(str(told.get("unit") or "")) or None,
        "running_percent": running if isinstance(running, (int, float)) else None,
        "why": None if value is not None else shown_name(text.strip("<>")),
    }
