"""Print an Nsight Compute report as the CSV that ``ncu --page raw`` prints, by ``ncu-report``.

A script for a process of its own: the library is native code, and reads what strangers wrote.
Only the columns that the kernel table uses are printed; the second row holds their units.
"""

from __future__ import annotations

import csv
import sys
from typing import Any

METRICS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    *(f"launch__{what}_dim_{axis}" for what in ("grid", "block") for axis in "xyz"),
)


def main() -> int:
    """Print the table of a report, the first argument; the second is the library's folder."""
    # Last, so that nothing that lies beside the library stands in for a module of Python's.
    sys.path += sys.argv[2:3]
    import ncu_report  # type: ignore[import-not-found, unused-ignore]  # only where it is installed

    context = ncu_report.load_report(sys.argv[1])
    actions = [
        action
        for number in range(context.num_ranges())
        for action in _actions(context.range_by_idx(number))
    ]
    table = csv.writer(sys.stdout)
    table.writerow(["ID", "Kernel Name", *METRICS])
    for number, action in enumerate(actions):
        found = [action.metric_by_name(name) for name in METRICS]
        if number == 0:
            table.writerow(["", "", *(m.unit() if m is not None else "" for m in found)])
        values = [_value(metric) for metric in found]
        table.writerow([number, _name(ncu_report, action), *values])
    return 0


def _actions(profiled: Any) -> list[Any]:
    return [profiled.action_by_idx(number) for number in range(profiled.num_actions())]


def _name(library: Any, action: Any) -> str:
    """The kernel's name with its arguments, where the library tells it so."""
    base = getattr(getattr(library, "IAction", None), "NameBase_DEMANGLED", None)
    return str(action.name(base) if base is not None else action.name())


def _value(metric: Any) -> str:
    """The value as text; empty where the report has none."""
    if metric is None:
        return ""
    value = metric.as_double()
    return repr(int(value)) if value == int(value) else repr(value)


if __name__ == "__main__":
    sys.exit(main())
