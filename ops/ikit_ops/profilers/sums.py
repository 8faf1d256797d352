"""Tables of sums, and which of them to believe when several count the same.

Profilers print the same launches more than once: by name, by name and grid, among all work of
the GPU, among all work.  Added up, every kernel would have run twice.  So of one capture one
table of kernels is taken, the one that says most; of the other parts, further tables are taken
as long as they name nothing that was counted already.  What was left out is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Tally

KERNELS, MEMORY, API, RANGES = "kernels", "memory_ops", "host_api", "ranges"
WORDS = {
    KERNELS: "GPU kernels", MEMORY: "memory operations", API: "host API calls",
    RANGES: "ranges",
}  # fmt: skip
AGREE = 0.01


@dataclass
class Sums:
    """One table: its part of the capture, its rows, and where it comes from.

    ``source`` names the capture that it sums, ``report`` the table (None: not said); ``mixed``
    is a table of several parts.
    """

    part: str
    report: str | None = None
    source: str | None = None
    mixed: bool = False
    rows: dict[KernelKey, Tally] = field(default_factory=dict)

    @property
    def detailed(self) -> bool:
        """Whether kernels are told apart by grid and block."""
        return any(key.grid is not None for key in self.rows)

    @property
    def total_ns(self) -> int:
        """The time of all rows."""
        return sum(tally.total_ns for tally in self.rows.values())

    @property
    def title(self) -> str:
        """What the table is called."""
        return self.report or f"a further table of {WORDS[self.part]}"

    def add(self, key: KernelKey, calls: int, times: Sequence[int | None]) -> None:
        """Count a row; ``times`` are total, shortest and longest in ns."""
        total, low, high = times
        self.rows.setdefault(key, Tally()).merge(calls, total, low, high)


def choose(tables: Sequence[Sums], part: str) -> tuple[list[Sums], list[Sums]]:
    """``(used, left out)`` of the tables of one part."""
    used: list[Sums] = []
    left: list[Sums] = []
    counted: dict[str | None, set[str]] = {}
    mine = [table for table in tables if table.part == part]
    for table in sorted(mine, key=lambda t: (not t.rows, t.mixed, not t.detailed)):
        names = {key.name for key in table.rows}
        before = counted.get(table.source)
        if before is not None and (part == KERNELS or before & names):
            left.append(table)
        else:
            used.append(table)
            counted.setdefault(table.source, set()).update(names)
    return used, left


def conclude(capture: Capture, tables: Sequence[Sums]) -> None:
    """The capture's parts from the tables, and a line for each that was left out."""
    for part in WORDS:
        used, left = choose(tables, part)
        if used:
            _fill(capture, part, used)
        for table in left:
            if table.rows:
                capture.limitations.append(
                    f"{table.title} was left out: its {WORDS[part]} are counted in another table"
                )
        if part == KERNELS:
            _compare(capture, used, left)
    if len({table.source for table in tables}) > 1:
        capture.limitations.append("the tables are of several captures: they are added up")


def say_absent(capture: Capture, why: str) -> None:
    """A line in missing for each part that the capture does not have."""
    for part, words in WORDS.items():
        if getattr(capture, part) is None:
            capture.missing.append(f"{words} ({why})")
    unsized = [t for t in (capture.memory_ops or {}).values() if t.unsized]
    if unsized:
        calls = sum(t.unsized for t in unsized)
        capture.missing.append(f"bytes of {calls} memory operations (their size is not said)")


def _fill(capture: Capture, part: str, used: Sequence[Sums]) -> None:
    rows: dict[KernelKey, Tally] = {}
    for table in used:
        for key, tally in table.rows.items():
            rows.setdefault(key, Tally()).join(tally)
    if part == KERNELS:
        capture.kernels = [Kernel(key, tally) for key, tally in rows.items()]
    else:
        setattr(capture, part, {key.name: tally for key, tally in rows.items()})


def _compare(capture: Capture, used: Sequence[Sums], left: Sequence[Sums]) -> None:
    """Two tables of the same kernels should have the same time."""
    by_source = {table.source: table for table in used}
    for table in left:
        taken = by_source[table.source]
        if not table.rows or table.mixed:
            continue
        if abs(table.total_ns - taken.total_ns) > AGREE * max(table.total_ns, taken.total_ns):
            capture.incomplete.append(
                f"two tables of the same kernels disagree: {taken.total_ns} ns in the one that "
                f"was taken, {table.total_ns} ns in {table.title}"
            )
