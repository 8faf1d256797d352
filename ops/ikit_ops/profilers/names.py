"""Names that the operations declare, apart from what they stand for.

The server reads declarations when it starts; parsers and adapters are imported only by the
call that needs them.  A test holds these lists to what there is.
"""

from __future__ import annotations

PROFILERS = ("nsys", "ncu", "rocprofv3", "torch", "perf")
NSYS_REPORT, NCU_REPORT, PERF_DATA = "nsys-rep", "ncu-rep", "perf-data"
CONVERTED = (NSYS_REPORT, NCU_REPORT, PERF_DATA)
"""Formats that only their own tool reads."""
NSYS_JSON = "nsys-stats-json"
FORMATS = (
    NSYS_REPORT, "nsys-sqlite", "nsys-stats", NSYS_JSON, NCU_REPORT, "ncu-csv", "rocpd",
    "rocprofv3-csv", "torch-trace", PERF_DATA, "perf-script", "perf-stat", "speedscope",
)  # fmt: skip
"""What ``import_profile`` takes as ``format``, beside auto."""
