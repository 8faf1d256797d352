"""Statistics of rocprofv3: sums by name, in a file for each kind of work.

All these files have the same columns.  What they sum is told by the file's name
(``..._kernel_stats.csv``), and, of API calls, copies and whole domains, by the names in them: a
table of nothing but ``hipMemcpy`` and ``hipFree`` is none of kernels.  A range may have any
name, so that in a file of another name ranges cannot be told from kernels; that is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ikit_ops.profilers.capture import Capture, KernelKey
from ikit_ops.profilers.limits import MAX_STRING, Reading
from ikit_ops.profilers.sums import API, KERNELS, MEMORY, RANGES, Sums
from ikit_ops.profilers.tables import Header

DOMAINS, OTHER = "domains", "other"
_BY_NAME = (
    (DOMAINS, re.compile(r"domain_stats")),
    (OTHER, re.compile(r"(allocation|scratch_memory)_stats")),
    (MEMORY, re.compile(r"copy_stats")),
    (RANGES, re.compile(r"(marker|roctx)\w*_stats")),
    (API, re.compile(r"(hip_|hsa_|rccl_|rocdecode_|rocjpeg_|ompt_)\w*stats")),
    (KERNELS, re.compile(r"kernel_stats|^results\.stats")),
)
_BY_CONTENT = (
    (DOMAINS, re.compile(r"KERNEL_DISPATCH|MEMORY_COPY|MEMORY_ALLOCATION|SCRATCH_MEMORY|OMPT"
                         r"|[A-Z]+(_[A-Z]+)*_API")),
    (OTHER, re.compile(r"(MEMORY_ALLOCATION|SCRATCH_MEMORY)_\w+")),
    (MEMORY, re.compile(r"(MEMORY_COPY_)?(HOST|DEVICE)_TO_(HOST|DEVICE)|MEMORY_COPY_\w+"
                        r"|Copy(Host|Device)To(Host|Device)")),
    (API, re.compile(r"(__)?hip[A-Z][A-Za-z0-9]*(_spt)?|hsa_\w+|roctx[A-Z]\w*"
                     r"|nccl(?!Dev|Kernel)[A-Z][A-Za-z0-9]*")),
)  # fmt: skip
UNSURE = (
    "the file's name does not say what its statistics are of: names that are neither API calls "
    "nor copies were taken for kernels"
)
_Row = tuple[str, int, tuple[int | None, ...]]


def is_stats(header: Header) -> bool:
    """Whether it is a table of statistics."""
    return header.has("name", "calls", "totaldurationns")


def is_api(name: str) -> bool:
    """Whether it is the name of a HIP, ROCr or RCCL call."""
    return part_of(name) == API


def part_of(name: str) -> str | None:
    """What a name in a table stands for; None for one that may be a kernel or a range."""
    return next((part for part, pattern in _BY_CONTENT if pattern.fullmatch(name)), None)


class Statistics:
    """The tables of a file, by their parts."""

    def __init__(self, reading: Reading) -> None:
        self.tables: list[Sums] = []
        self.unread = 0
        self.unsure = False
        self.unused: dict[str, int] = {}
        self._reading = reading
        self._names = 0
        self._seen: dict[str, list[Sums]] = {}
        file = PurePath(reading.path).name.lower()
        self._by_name = next((p for p, pattern in _BY_NAME if pattern.search(file)), None)

    def take(self, header: Header, rows: Iterator[list[str]]) -> None:
        """One table."""
        sound = []
        for row in rows:
            name = header.cell(row, "name")
            calls, total = header.whole(row, "calls"), header.whole(row, "totaldurationns")
            if name is None or calls is None or calls < 0 or total is None or total < 0:
                self.unread += 1
                continue
            low, high = header.whole(row, "minns"), header.whole(row, "maxns")
            sound.append((name[:MAX_STRING], calls, (total, low, high)))
            self._reading.count_names(self._names + len(sound))
        self._names += len(sound)
        self._sort(sound)

    def _sort(self, rows: Sequence[_Row]) -> None:
        """Rows into their parts: what all names say, then the file's name, then each name."""
        parts = [part_of(row[0]) for row in rows]
        whole = parts[0] if len(set(parts)) == 1 and parts[0] else self._by_name
        made: dict[str, Sums] = {}
        for (name, calls, times), own in zip(rows, parts, strict=True):
            part = whole or own or KERNELS
            if part in (DOMAINS, OTHER):
                self.unused[part] = self.unused.get(part, 0) + 1
                continue
            self.unsure = self.unsure or not (whole or own)
            made.setdefault(part, Sums(part)).add(KernelKey(name), calls, times)
        for part, table in made.items():
            if part == MEMORY:
                for tally in table.rows.values():
                    tally.unsized = tally.calls
            self._keep(table)

    def _keep(self, table: Sums) -> None:
        """Several processes leave several tables; the same one twice is one."""
        known = self._seen.setdefault(table.part, [])
        number = next((n for n, other in enumerate(known) if other.rows == table.rows), len(known))
        if number == len(known):
            if number >= MAX_TABLES:
                raise self._reading.damaged(f"it holds more than {MAX_TABLES} tables")
            known.append(table)
        table.source = str(number)
        self.tables.append(table)

    def say(self, capture: Capture) -> None:
        """What could not be read, and what was not used, into the capture."""
        if self.unread:
            capture.incomplete.append(f"{self.unread} rows of statistics could not be read")
        if self.unsure:
            capture.incomplete.append(UNSURE)
        for part, count in self.unused.items():
            what = "sums of whole domains" if part == DOMAINS else "memory allocations"
            capture.missing.append(f"{count} rows of {what} (not used)")


MAX_TABLES = 1_000
