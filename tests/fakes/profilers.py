"""Captures made up for tests, in the shapes that the tools write."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

KERNEL_COLUMNS = (
    "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, "
    "demangledName INTEGER, shortName INTEGER, gridX INTEGER, gridY INTEGER, gridZ INTEGER, "
    "blockX INTEGER, blockY INTEGER, blockZ INTEGER"
)
Launch = tuple[int, int, int, str, tuple[int, int, int], tuple[int, int, int]]
"""Start, end, device, name, grid, block."""


def nsys_export(
    path: Path,
    launches: Iterable[Launch] = (),
    *,
    extra: Sequence[str] = (),
    kernels: bool = True,
) -> Path:
    """An export of Nsight Systems with these launches; ``extra`` are further statements."""
    names: dict[str, int] = {}
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT)")
    database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    database.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2026.9')")
    if kernels:
        database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({KERNEL_COLUMNS})")
    for number, (start, end, device, name, grid, block) in enumerate(launches):
        key = names.setdefault(name, len(names) + 1)
        row = (start, end, device, 7, number, key, key, *grid, *block)
        database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", row
        )
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(k, n) for n, k in names.items()])
    for statement in extra:
        database.execute(statement)
    database.commit()
    database.close()
    return path


def rocpd_file(path: Path, suffixes: Sequence[str] = ("_0a",), *, version: int = 3) -> Path:
    """A rocpd file with two kernels, three dispatches, one copy and regions for each run."""
    database = sqlite3.connect(path)
    for number, suffix in enumerate(suffixes):
        _rocpd_run(database, suffix, 10_000 * number, version)
    views = "rocpd_kernel_dispatch"
    if suffixes != ("",):  # as the tool writes it: views over the tables of the runs
        database.execute(f'CREATE VIEW {views} AS SELECT * FROM "{views}{suffixes[0]}"')
    database.commit()
    database.close()
    return path


def _rocpd_run(database: sqlite3.Connection, s: str, shift: int, version: int) -> None:
    times = "start INTEGER, end INTEGER" if version == 3 else "start_id INTEGER, end_id INTEGER"
    agent = "agent_id INTEGER" if version == 3 else "track_id INTEGER"
    shape = ", ".join(
        f"{what}_size_{axis} INTEGER" for what in ("grid", "workgroup") for axis in "xyz"
    )
    for statement in (
        f'CREATE TABLE "rocpd_string{s}" (id INTEGER PRIMARY KEY, guid TEXT, string TEXT)',
        f'CREATE TABLE "rocpd_info_agent{s}" (id INTEGER PRIMARY KEY, type TEXT, name TEXT, '
        "product_name TEXT)",
        f'CREATE TABLE "rocpd_info_process{s}" (id INTEGER PRIMARY KEY, environment TEXT)',
        f'CREATE TABLE "rocpd_info_kernel_symbol{s}" (id INTEGER PRIMARY KEY, kernel_name TEXT, '
        "display_name TEXT)",
        f'CREATE TABLE "rocpd_kernel_dispatch{s}" (id INTEGER PRIMARY KEY, {agent}, '
        f"kernel_id INTEGER, {times}, {shape})",
        f'CREATE TABLE "rocpd_memory_copy{s}" (id INTEGER PRIMARY KEY, {times}, name_id INTEGER, '
        f"size INTEGER, {'dst_agent_id' if version == 3 else 'track_id'} INTEGER)",
        f'CREATE TABLE "rocpd_region{s}" (id INTEGER PRIMARY KEY, {times}, name_id INTEGER)',
        f"INSERT INTO \"rocpd_info_agent{s}\" VALUES (4, 'GPU', 'gfx942', 'AMD Instinct MI300X')",
        f"INSERT INTO \"rocpd_info_process{s}\" VALUES (1, 'MADE_UP_TOKEN=never-read')",
        f"INSERT INTO \"rocpd_info_kernel_symbol{s}\" VALUES (1, 'mangled', 'Cijk_gemm(int)'), "
        "(2, 'attn_fwd', NULL)",
        f"INSERT INTO \"rocpd_string{s}\" VALUES (1, 'g', 'hipLaunchKernel'), (2, 'g', 'decode'), "
        "(3, 'g', 'MEMORY_COPY_HOST_TO_DEVICE')",
    ):
        database.execute(statement)
    dispatches = [(1, 100, 300), (1, 400, 500), (2, 600, 900)]
    copies, regions = [(3, 50, 90)], [(1, 10, 20), (2, 0, 900)]
    stamp = _Stamps(database, s, shift, version)
    row: tuple[int, ...]
    for kernel, start, end in dispatches:
        row = (4 if version == 3 else 9, kernel, stamp(start), stamp(end), 512, 2, 1, 256, 1, 1)
        marks = ",".join("?" * len(row))
        database.execute(f'INSERT INTO "rocpd_kernel_dispatch{s}" VALUES (NULL,{marks})', row)
    for name, start, end in copies:
        row = (stamp(start), stamp(end), name, 4096, 4 if version == 3 else 9)
        database.execute(f'INSERT INTO "rocpd_memory_copy{s}" VALUES (NULL,?,?,?,?,?)', row)
    for name, start, end in regions:
        row = (stamp(start), stamp(end), name)
        database.execute(f'INSERT INTO "rocpd_region{s}" VALUES (NULL,?,?,?)', row)


class _Stamps:
    """Times inline (schema 3), or as ids into a table of times (schema 4)."""

    def __init__(self, database: sqlite3.Connection, s: str, shift: int, version: int) -> None:
        self.database, self.suffix, self.shift, self.version = database, s, shift, version
        if version == 4:
            database.execute(
                f'CREATE TABLE "rocpd_timestamp{s}" (id INTEGER PRIMARY KEY, value INTEGER)'
            )
            database.execute(
                f'CREATE TABLE "rocpd_track{s}" (id INTEGER PRIMARY KEY, agent_id INTEGER)'
            )
            database.execute(f'INSERT INTO "rocpd_track{s}" VALUES (9, 4)')

    def __call__(self, time: int) -> int:
        time += self.shift
        if self.version == 3:
            return time
        table = f'"rocpd_timestamp{self.suffix}"'
        made = self.database.execute(f"INSERT INTO {table} VALUES (NULL, ?)", (time,)).lastrowid
        assert made is not None
        return made


def trace_event(cat: str, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    """One event of a chrome trace."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 2, **more}


# ruff: noqa: E501 -- tables are as wide as they are
NCU_RAW = """==PROF== Connected to process 77
==WARNING== made up for a test
"ID","Process ID","Kernel Name","Block Size","Grid Size","Device","CC","gpu__time_duration.sum",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","","","","","{unit}","%","%","%"
"0","77","void gemm<float>(int, int)","(128, 1, 1)","(8, 2, 1)","0","9.0","1,536","40.5","80.25","50"
"1","77","void gemm<float>(int, int)","(128, 1, 1)","(8, 2, 1)","0","9.0","1,464","41.5","79.75",""
"2","77","rms_norm","(32, 1, 1)","(1, 1, 1)","0","9.0","500","n/a","20","10"
"""

NCU_DETAILS = """==PROF== Disconnected
"ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit",\
"Metric Value","Rule Name","Rule Type"
"0","gemm","(128, 1, 1)","(8, 1, 1)","GPU Speed Of Light Throughput","Duration","us","2.50","",""
"0","gemm","(128, 1, 1)","(8, 1, 1)","GPU Speed Of Light Throughput","Memory Throughput","%","91.75",\
"",""
"0","gemm","(128, 1, 1)","(8, 1, 1)","Memory Workload","Memory Throughput","Gbyte/s","1,234.5","",""
"0","gemm","(128, 1, 1)","(8, 1, 1)","GPU Speed Of Light Throughput","Compute (SM) Throughput","%",\
"46.54","",""
"0","gemm","(128, 1, 1)","(8, 1, 1)","","","","","SOLBottleneck","WRN"
"""

ROCPROF_TRACES = {
    "first": '"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id",'
    '"Start_Timestamp","End_Timestamp","Private_Segment_Size","Group_Segment_Size",'
    '"Workgroup_Size_X","Workgroup_Size_Y","Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y",'
    '"Grid_Size_Z"\n'
    '"KERNEL_DISPATCH",4,1,12,"gemm(int, float)",1,1000,1400,0,0,256,1,1,512,2,1\n'
    '"KERNEL_DISPATCH",4,1,12,"gemm(int, float)",2,1500,1700,0,0,256,1,1,512,2,1\n',
    "third": '"Kind","Agent_Id","Queue_Id","Stream_Id","Thread_Id","Dispatch_Id","Kernel_Id",'
    '"Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp","LDS_Block_Size",'
    '"Scratch_Size","VGPR_Count","Accum_VGPR_Count","SGPR_Count","Workgroup_Size_X",'
    '"Workgroup_Size_Y","Workgroup_Size_Z","Grid_Size_X","Grid_Size_Y","Grid_Size_Z"\n'
    '"KERNEL_DISPATCH","Agent 4",1,1,9,1,12,"gemm(int, float)",1,1000,1400,0,0,32,0,48,256,1,1,'
    "512,2,1\n"
    '"KERNEL_DISPATCH","Agent 4",1,1,9,2,12,"gemm(int, float)",2,1500,1700,0,0,32,0,48,256,1,1,'
    "512,2,1\n",
    "converted": '"Guid","Kind","Agent_Id","Kernel_Name","Start_Timestamp","End_Timestamp",'
    '"Lds_Block_Size","Vgpr_Count","WORKGROUP_SIZE_X","Workgroup_Size_Y","Workgroup_Size_Z",'
    '"Grid_Size_X","Grid_Size_Y","Grid_Size_Z"\n'
    '"0a","KERNEL_DISPATCH","Agent 4","gemm(int, float)",1000,1400,0,32,256,1,1,512,2,1\n'
    '"0a","KERNEL_DISPATCH","Agent 4","gemm(int, float)",1500,1700,0,32,256,1,1,512,2,1\n',
}
