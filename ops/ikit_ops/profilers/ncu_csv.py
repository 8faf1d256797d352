"""What Nsight Compute prints as CSV: one row a kernel (``raw``), or one row a metric (``details``).

Nsight Compute runs a kernel many times, alone, at locked clocks and with cold caches, to read
all counters; its durations are therefore not those of the program.  What it adds is how near a
kernel comes to what the device can do: the speed-of-light shares.

In ``raw`` the first row below the header holds units; names of metrics are columns.  Values
carry thousands commas, and their unit changes with their size unless base units were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Shape, Tally, shape
from ikit_ops.profilers.limits import MAX_STRING, Reading
from ikit_ops.profilers.tables import (
    TIME_UNITS,
    Header,
    integral,
    number,
    tables_of,
    whole_number,
)

FORMAT = "ncu-csv"
DURATION = "gpu__time_duration.sum"
SPEED_OF_LIGHT = {
    "sm_pct": (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "compute (sm) throughput",
        "compute (sm) [%]",
        "sm [%]",
    ),
    "memory_pct": (
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "memory throughput",
        "memory [%]",
    ),
    "dram_pct": (
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "dram throughput",
    ),
    "l2_pct": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
               "lts__throughput.avg.pct_of_peak_sustained_elapsed", "l2 cache throughput"),
    "achieved_occupancy_pct": (
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "achieved occupancy",
    ),
}  # fmt: skip
"""Our name, and the names that versions give the metric; in percent."""
_PREFIXES = ("K", "M", "G", "T")
REPLAYED = (
    "Nsight Compute replays each kernel alone, at its base clock and with flushed caches: "
    "durations are not those of the program, and there are no gaps"
)


@dataclass
class Launch:
    """One profiled launch; ``number`` is its process and its number there."""

    name: str
    grid: Shape | None = None
    block: Shape | None = None
    duration_ns: int | None = None
    printed: tuple[float, int] = (1.0, 0)
    """How the duration was printed: the unit in ns, and the decimals."""
    number: tuple[str, str] = ("", "")
    shares: dict[str, float] = field(default_factory=dict)


def is_raw(header: Header) -> bool:
    """Whether it is the wide table."""
    return header.has("id", "kernel name") and not header.has("metric name")


def is_details(header: Header) -> bool:
    """Whether it is the long table."""
    return header.has("id", "kernel name", "metric name", "metric value")


def read(reading: Reading) -> Capture:
    """The capture of either table."""
    launches: list[Launch] = []
    seen = unread = twice = 0
    known: dict[tuple[object, ...], bool] = {}
    tables = tables_of(reading, lambda header: is_raw(header) or is_details(header))
    for header, rows in tables:
        seen += 1
        long = is_details(header)
        some, left = _details(header, rows) if long else _raw(header, rows)
        unread += left
        for launch in some:
            # The same report printed as another page, or twice: durations may be rounded there.
            told = (*launch.number, launch.name)
            again = known.get(told, long) != long or (*told, launch.duration_ns) in known
            if again:
                twice += 1
            else:
                known[told] = known[(*told, launch.duration_ns)] = long
                launches.append(launch)
        reading.count_names(len(launches))
    if not seen:
        said = next((f": {note}" for note in reading.notes if "the tool said" in note), "")
        raise reading.damaged(
            f"it holds no table of Nsight Compute{said}",
            "use: ncu --import REPORT --csv --page raw --print-units base",
        )
    capture = capture_of(launches)
    if twice:
        capture.limitations.append(f"{twice} launches are in the file twice: counted once")
    if unread:
        capture.incomplete.append(f"{unread} rows could not be read: they were left out")
    return capture


def capture_of(launches: list[Launch], version: str | None = None) -> Capture:
    """The capture of single launches; their metrics are means by row of the table."""
    capture = Capture(FORMAT, tool="ncu", version=version, grid_unit="blocks")
    groups: dict[KernelKey, list[Launch]] = {}
    for launch in launches:
        key = KernelKey(launch.name, launch.grid, launch.block)
        groups.setdefault(key, []).append(launch)
    capture.kernels = []
    untimed = 0
    for key, members in groups.items():
        tally = Tally()
        for launch in members:
            tally.add(launch.duration_ns)
        untimed += tally.untimed
        means = {name: _mean(members, name) for name in SPEED_OF_LIGHT}
        capture.kernels.append(Kernel(key, tally, means))
    if untimed:
        capture.incomplete.append(f"{untimed} launches have no duration ({DURATION})")
    if not launches:
        capture.incomplete.append("no kernel was profiled")
    capture.limitations.append(REPLAYED)
    if (step := _step([launch.printed for launch in launches])) > 1:
        capture.limitations.append(f"durations were printed rounded, to {step:g} ns")
    capture.missing.append("gaps and busy share (kernels are replayed one by one)")
    return capture


def _step(printed: list[tuple[float, int]]) -> float:
    """The last printed digit of the durations in ns; 1 where they are exact.

    What has fewer decimals than others of its unit ends in zeros that were not written.
    """
    decimals: dict[float, int] = {}
    for unit, count in printed:
        decimals[unit] = max(decimals.get(unit, 0), count)
    return max((unit / 10.0**count for unit, count in decimals.items()), default=1.0)


def _mean(launches: list[Launch], name: str) -> float | None:
    values = [launch.shares[name] for launch in launches if name in launch.shares]
    return sum(values) / len(values) if values else None


def _raw(header: Header, rows: Iterator[list[str]]) -> tuple[list[Launch], int]:
    """The wide table: metrics are columns, the first row holds their units."""
    units: dict[str, str] | None = None
    found = []
    unread = 0
    for row in rows:
        identifier = header.cell(row, "id")
        if units is None and not (identifier or "").strip():
            units = {name: header.cell(row, name) or "" for name in header.columns}
            continue
        if whole_number(identifier) is None or header.cell(row, "kernel name") is None:
            unread += 1
            continue
        known = units or {}
        values = {
            name: (header.cell(row, name) or "", known.get(name, "")) for name in header.columns
        }
        found.append(launch_of(header, row, values))
    return found, unread


def _details(header: Header, rows: Iterator[list[str]]) -> tuple[list[Launch], int]:
    """The long table: one row a metric, many rows a launch.

    Launches are numbered by process, so that two of them may have the same number.
    """
    found: dict[tuple[str, str], Launch] = {}
    unread = 0
    for row in rows:
        identifier = header.cell(row, "id") or ""
        if whole_number(identifier) is None or header.cell(row, "kernel name") is None:
            unread += 1
            continue
        key = (header.cell(row, "process id") or "", identifier)
        launch = found.get(key)
        if launch is None:
            launch = found[key] = launch_of(header, row, {})
        name = (header.cell(row, "metric name") or "").strip().lower()
        told = (header.cell(row, "metric value") or "", header.cell(row, "metric unit") or "")
        if name:
            _take(launch, {name: told})
    return list(found.values()), unread


def launch_of(header: Header, row: list[str], values: dict[str, tuple[str, str]]) -> Launch:
    """A launch of a row; ``values`` are ``{metric: (value, unit)}``."""
    name = (header.cell(row, "kernel name") or "")[:MAX_STRING]
    grid, block = (
        _three(header.cell(row, f"{what} size")) or _dimensions(values, what)
        for what in ("grid", "block")
    )
    launch = Launch(name, grid, block)
    launch.number = (header.cell(row, "process id") or "", header.cell(row, "id") or "")
    _take(launch, values)
    return launch


def _dimensions(values: dict[str, tuple[str, str]], what: str) -> Shape | None:
    """Grid or block of versions that list them among the metrics, as 256.000000 if scaled."""
    told = [values.get(f"launch__{what}_dim_{axis}", ("", "")) for axis in "xyz"]
    # "Kblock" are thousands, rounded: no number of blocks.
    return shape([None if unit[:1] in _PREFIXES else integral(text) for text, unit in told])


def _take(launch: Launch, values: dict[str, tuple[str, str]]) -> None:
    """The duration and the speed-of-light shares among some metrics."""
    for name in (DURATION, "duration"):
        if name in values and launch.duration_ns is None:
            value, scale = number(values[name][0]), TIME_UNITS.get(values[name][1].strip())
            if value is None or scale is None or value < 0 or (value == 0 and scale > 1):
                continue  # none, or so short that it was rounded to nothing
            launch.duration_ns = round(value * scale)
            launch.printed = (scale, len(values[name][0].strip().partition(".")[2]))
    for ours, theirs in SPEED_OF_LIGHT.items():
        for name in theirs:
            if name in values and ours not in launch.shares:
                value = number(values[name][0])
                # "Memory Throughput" is also a rate in bytes, in another row of the same name.
                if value is not None and values[name][1].strip() in ("%", "pct"):
                    launch.shares[ours] = value


def _three(text: str | None) -> Shape | None:
    """``(8, 1, 1)`` as three numbers."""
    words: list[Any] = (text or "").strip("() ").split(",")
    numbers = [whole_number(word) for word in words]
    return shape(numbers)
