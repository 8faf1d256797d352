"""What the device did while it was measured: samples beside the rounds.

A rate without the clock it was taken at, and without a look at who else was there, cannot be
told from the rate of a hot or a busy machine.  So each measurement runs inside a ``Telemetry``:
a thread reads the state of the sources (the host, a GPU) about twice a second, and *marks* at
the ends of each stretch read everything, also what is too dear for in between.

``summary(start, end)`` puts the samples of any stretch together, the whole or a round.  It never
makes up a value: a source that cannot be read gives None, and ``missing`` says what and why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from ikit_mcp.call import Device
from ikit_ops.measure.gpu import NvidiaGpu, UnreadGpu
from ikit_ops.measure.host import Host

INTERVAL = 0.5  # seconds between two samples
MAX_SAMPLES = 100_000  # of a day-long run; after that only marks are kept


class Source(Protocol):
    """Something whose state can be read: ``missing`` names what it does not offer, and why."""

    name: str
    missing: list[str]

    def read(self, full: bool) -> dict[str, Any]:
        """The state now; ``full`` also what is too dear to read often; {} for nothing."""
        ...

    def summarise(self, samples: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
        """What the (CLOCK_MONOTONIC seconds, state) samples of a stretch say; {} for nothing."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...


class Telemetry:
    """Samples of the sources, taken from ``with`` to its end."""

    def __init__(self, sources: Sequence[Source], interval: float = INTERVAL) -> None:
        self.sources = list(sources)
        self.missing = [line for source in sources for line in source.missing]
        self._interval = interval
        self._samples: dict[str, list[tuple[float, dict[str, Any]]]] = {
            source.name: [] for source in sources
        }
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self.mark()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.mark()
        for source in self.sources:
            source.close()

    def mark(self) -> float:
        """Read everything now; the time of it, in CLOCK_MONOTONIC seconds."""
        return self._take(full=True)

    def _take(self, full: bool) -> float:
        with self._lock:  # the libraries below are not asked by two threads at once
            now = time.monotonic()
            for source in self.sources:
                samples = self._samples[source.name]
                if full or len(samples) < MAX_SAMPLES:
                    samples.append((now, source.read(full)))
        return now

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._take(full=False)

    def summary(self, start: float | None = None, end: float | None = None) -> dict[str, Any]:
        """What each source says of the samples from ``start`` to ``end``, None for nothing.

        A source's counters are compared between the first and the last full sample in the
        stretch, so ``mark`` at both ends of a stretch that is to have its own summary.
        """
        found: dict[str, Any] = {}
        with self._lock:
            for source in self.sources:
                inside = [
                    sample
                    for sample in self._samples[source.name]
                    if (start is None or sample[0] >= start) and (end is None or sample[0] <= end)
                ]
                found[source.name] = source.summarise(inside) or None
                found[f"{source.name}_samples"] = len(inside)
        return found


def sources_for(device: Device) -> list[Source]:
    """The sources that tell of a measurement on the device: always the host, and the GPU."""
    if device.id == "cpu":
        return [Host()]
    if device.id.startswith("cuda") and device.uuid is not None:
        return [Host(), NvidiaGpu(device.uuid)]
    return [Host(), UnreadGpu("they are read from NVIDIA GPUs only")]
