"""The sentences between the tables of ``nsys stats``: which report of which capture comes next.

They are the only place where the output says what a table is of, and that a report failed: the
tool's exit status does not.  Each version words them in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ikit_mcp.call import one_line
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import Reading
from ikit_ops.profilers.tables import Line

_PROCESSING = re.compile(
    r"^Processing \[(?P<source>.{0,4096}?)\] with \[(?P<report>[^\[\]]{0,4096})\]"
)
_TITLE = re.compile(r"^ \*\* .{0,200}\((?P<report>\w{1,100})(?::[\w:=]*)?\):$")
_EXECUTING = re.compile(r"^\[\d+/\d+\] Executing '(?P<report>\w{1,100})(?::[\w:=]*)?' stats report")
_OLD_TITLE = re.compile(
    r"^(?P<title>[A-Z][\w /-]{0,100} Statistics)(?: \((?P<unit>[^()]{1,40})\))?:?$"
)
_WORK = re.compile(r"^(Generating|Exporting|Importing|Collecting|Using|\[\d+/\d+\]) ?")
_FAILED = re.compile(r"^(ERROR|SKIPPED)\b")
MAX_REPORTS, MAX_SAID = 200, 20
_UNITS = {"nanoseconds": "ns", "microseconds": "us", "milliseconds": "ms"}


@dataclass
class _Report:
    """One report that the output says it holds."""

    name: str | None
    tables: int = 0
    unused: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


class Reports:
    """What the lines so far said: the report and the capture that a table here would be of."""

    def __init__(self) -> None:
        self.source: str | None = None
        self.unit: str | None = None
        self._reports: list[_Report] = [_Report(None)]

    @property
    def report(self) -> str | None:
        """The report that the next table is of; None where that was not said."""
        last = self._reports[-1]
        return None if last.tables else last.name

    @property
    def named(self) -> bool:
        """Whether a report was named."""
        return any(report.name is not None for report in self._reports)

    def line(self, line: str) -> Line:
        """Take in one line; what it is."""
        if not line or line[0].isdigit() or line[0] == '"' or len(line) > 16_384:
            return Line.ROW
        text = line.rstrip()
        if found := _PROCESSING.match(text):
            name = re.split(r"[/\\]", found["report"])[-1].removesuffix(".py")
            self.source, self.unit = found["source"], None
            self._begin(name or None)
        elif found := _TITLE.match(text) or _EXECUTING.match(text):
            self._begin(found["report"])
        elif found := _OLD_TITLE.match(text):
            unit = (found["unit"] or "").split()[-1:]  # "nanoseconds", "by size in KiB"
            self.unit = _UNITS.get(unit[0], unit[0]) if unit else None
            self._begin(None)
        elif _FAILED.match(text):
            return self._failed(text)
        elif not _WORK.match(text):
            return Line.ROW
        return Line.END

    def _begin(self, name: str | None) -> None:
        """A report begins; a title below the line that named it is no other one."""
        last = self._reports[-1]
        empty = not last.tables and not last.said
        if empty and (last.name is None or name in (None, last.name)):
            last.name = name or last.name
        elif len(self._reports) < MAX_REPORTS:
            self._reports.append(_Report(name))

    def _failed(self, text: str) -> Line:
        if len(self._reports[-1].said) < MAX_SAID:
            self._reports[-1].said.append(one_line(text, 200))
        return Line.REMARK

    def found_table(self, columns: Iterable[str] = (), *, used: bool) -> None:
        """Note that the report brought a table, and whether it is of use."""
        report, name = self._reports[-1], self.report
        report.tables += 1
        if not used and len(report.unused) < MAX_SAID:
            report.unused.append(name or f"a table of {', '.join(columns)}")

    def no_table(self, reading: Reading) -> Exception:
        """The error for an output without a table: the tool's own sentence, where there is one."""
        for report in self._reports:
            for said in report.said:
                return reading.damaged(f"the tool failed and said: {said}")
        return reading.damaged(
            "it holds no table of nsys stats", "export the report to SQLite instead"
        )

    def say(self, capture: Capture) -> None:
        """What failed, was skipped, or is not used, into the capture."""
        for report in self._reports:
            name = one_line(report.name or "a table", 80)
            for said in report.said:
                if said.startswith("ERROR"):
                    capture.incomplete.append(f"a report failed: {said}")
                else:
                    capture.missing.append(f"{name}: {said}")
            for title in report.unused:
                capture.missing.append(
                    f"{one_line(title, 160)} (what it counts has no part here: not used)"
                )
            if report.name is not None and not report.tables and not report.said:
                capture.missing.append(f"{name} (it brought no table that is read here)")
