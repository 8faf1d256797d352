"""Nsight Systems exports: sums, devices, gaps, and files that were made to deceive."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fakes.profilers import Launch, nsys_export
from ikit_ops.profilers import formats, nsys_sqlite
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import Damaged, Reading
from ikit_ops.profilers.sqlite_input import opened

DATA = Path(__file__).parents[1] / "data" / "profiles"
ONE = (1, 1, 1)
H100 = DATA / "nsys_2026.2_h100_kernels.sqlite"


def read(path: Path, name: str | None = None) -> Capture:
    reading = Reading(path)
    return formats.read(reading, name or formats.detect(reading))


def rows_of(capture: Capture) -> dict[str, Any]:
    return {row["name"]: row for row in capture.kernel_rows()}


@pytest.mark.parametrize("name", ["nsys_2026.1_gpu_kernels.sqlite", H100.name])
def test_rows_of_a_real_export_are_what_sql_sums_row_by_row(name: str) -> None:
    capture = read(DATA / name)
    database = sqlite3.connect(f"file:{DATA / name}?mode=ro&immutable=1", uri=True)
    wanted = {
        (row[0], tuple(row[1:4]), tuple(row[4:7])): tuple(row[7:])
        for row in database.execute(
            "SELECT s.value, gridX, gridY, gridZ, blockX, blockY, blockZ, count(*), "
            "sum(k.end - k.start), min(k.end - k.start), max(k.end - k.start) "
            "FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName "
            "GROUP BY 1, 2, 3, 4, 5, 6, 7"
        )
    }
    database.close()
    found = {
        (k.key.name, k.key.grid, k.key.block): (
            k.tally.calls, k.tally.total_ns, k.tally.min_ns, k.tally.max_ns,
        )
        for k in capture.kernels or []
    }  # fmt: skip
    assert found == wanted
    assert capture.incomplete == []
    assert sum(row["share"] for row in capture.kernel_rows()) == pytest.approx(1)


def test_nsys_stats_as_csv_and_as_json_give_the_same_table() -> None:
    as_csv = read(DATA / "nsys_stats_2022.4_gpukernsum.csv")
    as_json = read(DATA / "nsys_stats_2022.4_gpukernsum.json")
    assert as_csv.kernel_rows() == as_json.kernel_rows()
    with (DATA / "nsys_stats_2022.4_gpukernsum.csv").open(encoding="utf-8") as file:
        next(file)
        told = list(csv.DictReader(file))
    assert as_csv.kernel_ns == sum(int(row["Total Time (ns)"]) for row in told)
    first = as_csv.kernel_rows()[0]
    assert first["calls"] == 96 and first["total_ns"] == 12_902_673
    assert (first["grid"], first["block"]) == ([1, 40, 3], [128, 1, 1])
    assert as_csv.busy_share is None and as_csv.devices is None


def test_busy_time_is_the_union_of_overlapping_work_and_gaps_are_what_is_left() -> None:
    capture = read(DATA / "nsys_2026.1_gpu_kernels.sqlite")
    [device] = capture.devices or []
    assert device.name == "NVIDIA H100 80GB HBM3"
    assert (device.busy_ns, device.span_ns, device.gap_count) == (400_000_000, 403_990_000, 399)
    assert device.gap_histogram["10-100us"] == 399
    assert device.busy_ns + device.gap_total_ns == device.span_ns


def test_streams_that_overlap_are_not_counted_twice(tmp_path: Path) -> None:
    launches: list[Launch] = [
        (0, 100, 0, "a", ONE, ONE),
        (50, 80, 0, "b", ONE, ONE),
        (90, 150, 0, "b", ONE, ONE),
        (200, 210, 0, "a", ONE, ONE),
    ]
    [device] = read(nsys_export(tmp_path / "x.sqlite", launches)).devices or []
    assert (device.busy_ns, device.gap_total_ns, device.gap_count) == (160, 50, 1)
    [gap] = device.largest_gaps
    assert gap == {"ns": 50, "at_ns": 150, "before": "b", "after": "a"}


@pytest.mark.parametrize("shuffled", [False, True])
def test_devices_are_told_apart_and_rows_out_of_order_change_nothing(
    tmp_path: Path, shuffled: bool
) -> None:
    launches: list[Launch] = [
        (10 * n, 10 * n + 4, n % 3, f"kernel{n % 7}", (n % 5 + 1, 2, n % 2 + 1), (32, 1, 1))
        for n in range(3_000)
    ]
    plain = read(nsys_export(tmp_path / "a.sqlite", launches))
    if shuffled:
        launches = launches[1::2] + launches[::2]
    mixed = read(nsys_export(tmp_path / "b.sqlite", launches))
    assert mixed.kernel_rows() == plain.kernel_rows()
    assert [d.row() for d in mixed.devices or []] == [d.row() for d in plain.devices or []]
    assert [d.id for d in mixed.devices or []] == [0, 1, 2]
    assert all(d.busy_ns == 4_000 for d in mixed.devices or [])
    assert {row["grid"][2] for row in mixed.kernel_rows()} == {1, 2}


def test_shapes_that_are_not_flat_keep_all_their_numbers(tmp_path: Path) -> None:
    launches: list[Launch] = [
        (0, 5, 0, "a", (2**31 - 1, 65_535, 65_535), (8, 8, 16)),
        (5, 9, 0, "a", (2**31 - 1, 65_535, 65_535), (8, 16, 8)),
    ]
    rows = read(nsys_export(tmp_path / "x.sqlite", launches)).kernel_rows()
    assert [row["block"] for row in rows] == [[8, 8, 16], [8, 16, 8]]
    assert rows[0]["grid"] == [2**31 - 1, 65_535, 65_535]


def test_copies_count_as_work_of_the_device_and_not_as_kernels(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(100, 200, 0, "a", ONE, ONE), (300, 400, 0, "a", ONE, ONE)],
        extra=[
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, "
            "deviceId INTEGER, copyKind INTEGER, bytes INTEGER)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (200, 290, 0, 1, 4096)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (500, 600, 0, 2, 8)",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, "
            "deviceId INTEGER, bytes INTEGER)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (0, 10, 1, 64)",
        ],
    )
    capture = read(path)
    assert capture.kernel_ns == 200
    memory = capture.memory_ops or {}
    assert {name: (t.calls, t.total_ns, t.bytes) for name, t in memory.items()} == {
        "[CUDA memcpy Host-to-Device]": (1, 90, 4096),
        "[CUDA memcpy Device-to-Host]": (1, 100, 8),
        "[CUDA memset]": (1, 10, 64),
    }
    first, second = capture.devices or []
    assert (first.busy_ns, first.gap_total_ns) == (390, 110)
    assert (second.id, second.busy_ns) == (1, 10)
    assert first.largest_gaps[0]["after"] == "[CUDA memcpy Device-to-Host]"


def test_whole_graphs_are_said_to_hide_their_kernels(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        kernels=False,
        extra=[
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, "
            "deviceId INTEGER, graphId INTEGER)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (0, 900, 0, 1), (1000, 2000, 0, 1)",
        ],
    )
    capture = read(path)
    assert capture.kernels == [] and capture.graphs is not None
    assert (capture.graphs.whole, capture.graphs.whole_ns) == (2, 1900)
    assert any("2 graph launches" in line for line in capture.incomplete)
    assert [d.busy_ns for d in capture.devices or []] == [1900]


def test_api_calls_ranges_and_losses_are_read(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "INSERT INTO StringIds VALUES (90, 'cudaLaunchKernel_v7000'), (91, 'prefill'), "
            "(92, 'poll')",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, nameId INTEGER)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 7, 90), (10, 12, 90)",
            "CREATE TABLE OSRT_API (start INTEGER, end INTEGER, nameId INTEGER)",
            "INSERT INTO OSRT_API VALUES (0, 100, 92)",
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, text TEXT, textId INTEGER)",
            "INSERT INTO NVTX_EVENTS VALUES (0, 30, NULL, 91), (40, 50, 'decode', NULL), "
            "(60, NULL, 'a mark', NULL)",
            "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, text TEXT)",
            "INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 'started'), (2, '12 CUDA events were lost')",
        ],
    )
    capture = read(path)
    api = {name: (t.calls, t.total_ns) for name, t in (capture.host_api or {}).items()}
    assert api == {"cudaLaunchKernel": (2, 9), "os:poll": (1, 100)}
    assert {n: t.total_ns for n, t in (capture.ranges or {}).items()} == {
        "prefill": 30,
        "decode": 10,
    }
    assert capture.incomplete == ["the profiler says: 12 CUDA events were lost"]
    assert capture.version == "2026.9"


# --- what an export does not say -----------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Not all CUDA events might have been collected.",
        "CUDA profiling might have not been started correctly.",
        "CUDA profiling might not have been started correctly.",
        "12 CUDA events were lost",
        "Buffer overflow: some events were dropped",
        "Event records could not be collected",
        "The event buffers were full.",
    ],
)
def test_what_the_profiler_says_it_lost_leaves_the_capture_doubtful(
    tmp_path: Path, text: str
) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, text TEXT)",
            f"INSERT INTO DIAGNOSTIC_EVENT VALUES (1, '{text}'), (2, '{text}')",
        ],
    )
    assert read(path).incomplete == [f"the profiler says (2 times): {text}"]


@pytest.mark.parametrize(
    "text",
    [
        "Not all NVTX events might have been collected.",
        "Not all OS runtime libraries events might have been collected.",
    ],
)
def test_lost_ranges_leave_the_kernels_whole_and_are_named(tmp_path: Path, text: str) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, text TEXT)",
            f"INSERT INTO DIAGNOSTIC_EVENT VALUES (1, '{text}')",
        ],
    )
    capture = read(path)
    assert capture.incomplete == [] and capture.missing == [f"the profiler says: {text}"]


def test_what_the_profiler_says_of_its_work_is_no_loss(tmp_path: Path) -> None:
    texts = (
        "Number of CUPTI events produced: 3,224, CUPTI buffers: 5.",
        "Profiling has started.",
        "Common injection library initialized successfully.",
        "Number of OS runtime libraries events collected: 127.",
        "No NVTX events collected. Does the process use NVTX?",
    )
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, text TEXT)",
            *(f"INSERT INTO DIAGNOSTIC_EVENT VALUES (1, '{text}')" for text in texts),
        ],
    )
    capture = read(path)
    assert capture.incomplete == [] and capture.missing == []


def test_bytes_that_some_rows_do_not_say_are_null_and_named(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, copyKind, bytes)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2, 0, 1, NULL), (3, 4, 0, 1, 64), "
            "(5, 6, 0, 2, 8), (7, 8, 0, 2, 0), (9, 9, 0, 8, 'much'), (9, 9, 0, 8, -1)",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (10, 12, 0)",
        ],
    )
    capture = read(path)
    assert {name: (t.calls, t.bytes) for name, t in (capture.memory_ops or {}).items()} == {
        "[CUDA memcpy Host-to-Device]": (2, None),
        "[CUDA memcpy Device-to-Host]": (2, 8),
        "[CUDA memcpy Device-to-Device]": (2, None),
        "[CUDA memset]": (1, None),
    }
    assert sorted(capture.missing) == [
        "bytes of [CUDA memcpy Device-to-Device]: 2 rows do not say theirs",
        "bytes of [CUDA memcpy Host-to-Device]: 1 rows do not say theirs",
        "bytes: table CUPTI_ACTIVITY_KIND_MEMSET has no column bytes",
    ]


@pytest.mark.parametrize(
    ("table", "part", "line"),
    [
        ("CUPTI_ACTIVITY_KIND_RUNTIME (start, end)", "host_api", "host API calls: {} nameId"),
        ("OSRT_API (start, nameId)", "host_api", "host API calls: {} end"),
        ("NVTX_EVENTS (start, text)", "ranges", "ranges: {} end"),
        ("CUPTI_ACTIVITY_KIND_MEMCPY (deviceId)", "memory_ops", "busy time: {} start, end"),
        ("CUPTI_ACTIVITY_KIND_MEMSET (start)", "memory_ops", "busy time: {} end"),
    ],
)
def test_a_part_that_cannot_be_read_is_null_and_named(
    tmp_path: Path, table: str, part: str, line: str
) -> None:
    name = table.split()[0]
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[f"CREATE TABLE {table}", f"INSERT INTO {name} DEFAULT VALUES"],
    )
    capture = read(path)
    assert capture.kernel_ns == 5 and getattr(capture, part) is None
    assert capture.missing == [line.format(f"table {name} has no column")]
    doubtful = [f"{name} has no times: GPU time that it holds was not counted"]
    assert capture.incomplete == (doubtful if part == "memory_ops" else [])


def test_kernels_without_a_device_are_those_of_one_unknown_device(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        kernels=False,
        extra=[
            "INSERT INTO StringIds VALUES (1, 'gemm')",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, demangledName)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 5, 1), (3, 9, 1)",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, graphId)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (20, 30, 1)",
        ],
    )
    capture = read(path)
    assert [(d.id, d.busy_ns) for d in capture.devices or []] == [(None, 19)]
    assert capture.missing == [
        f"devices: table CUPTI_ACTIVITY_KIND_{table} has no column deviceId"
        for table in ("KERNEL", "GRAPH_TRACE")
    ]
    assert capture.graphs is not None and capture.graphs.whole == 1


def test_whole_graphs_without_times_are_counted(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (graphId)",
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1), (1)",
        ],
    )
    capture = read(path)
    assert capture.graphs is not None and capture.graphs.whole == 2
    assert any("2 graph launches" in line for line in capture.incomplete)


@pytest.mark.parametrize("shadowed", ["", ", rowid", ", rowid, _rowid_, oid"])
def test_tables_without_row_ids_are_read_like_others(tmp_path: Path, shadowed: str) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        kernels=False,
        extra=[
            "INSERT INTO StringIds VALUES (1, 'gemm')",
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, shortName, "
            f"correlationId PRIMARY KEY{shadowed}) {'' if shadowed else 'WITHOUT ROWID'}",
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, shortName, "
            "correlationId) VALUES (10, 20, 0, 1, 2), (0, 7, 0, 1, 9)",
        ],
    )
    capture = read(path)
    assert capture.kernel_ns == 17
    assert [(d.first_ns, d.last_ns) for d in capture.devices or []] == [(0, 20)]


LAUNCHES = (
    "INSERT INTO StringIds VALUES (90, '{name}')",
    "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, nameId)",
    "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (0, 7, 90), (10, 12, 90), (13, 14, 90)",
)


@pytest.mark.parametrize("name", ["cudaGraphLaunch_v10000", "cuGraphLaunch_ptsz", "cuGraphLaunch"])
@pytest.mark.parametrize("nodes", [0, 2, 3])
def test_graph_launches_whose_kernels_were_not_seen_leave_the_capture_doubtful(
    tmp_path: Path, name: str, nodes: int
) -> None:
    launches: list[Launch] = [(n, n + 1, 0, "a", ONE, ONE) for n in range(9)]
    path = nsys_export(
        tmp_path / "x.sqlite",
        launches,
        extra=[
            *(line.format(name=name) for line in LAUNCHES),
            "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN graphNodeId INTEGER",
            f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 4 << 40 WHERE start < {nodes}",
        ],
    )
    lines = [f"3 CUDA graph launches, and {nodes} kernels of graphs: kernels of graphs were not "
             "seen"]  # fmt: skip
    assert read(path).incomplete == (lines if nodes < 3 else [])


def test_graph_launches_are_doubtful_where_kernels_do_not_say_their_graph(tmp_path: Path) -> None:
    extra = [line.format(name="cudaGraphLaunch") for line in LAUNCHES]
    plain: list[Launch] = [(0, 5, 0, "a", ONE, ONE)]
    assert read(nsys_export(tmp_path / "a.sqlite", plain, extra=extra)).incomplete == [
        "3 CUDA graph launches: the export does not say which kernels are theirs"
    ]
    none = read(nsys_export(tmp_path / "b.sqlite", kernels=False, extra=extra))
    assert none.incomplete[0].startswith("3 CUDA graph launches, and 0 kernels of graphs")


def test_calls_and_ranges_without_an_end_are_counted(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[
            "INSERT INTO StringIds VALUES (92, 'poll')",
            "CREATE TABLE OSRT_API (start, end, nameId)",
            "INSERT INTO OSRT_API VALUES (0, 100, 92), (5, NULL, 92), (7, 3, 92)",
            "CREATE TABLE NVTX_EVENTS (start, end, eventType, text)",
            "INSERT INTO NVTX_EVENTS VALUES (0, 9, 59, 'step'), (4, NULL, 59, 'step'), "
            "(5, NULL, 34, 'a mark'), (6, NULL, 60, 'open')",
        ],
    )
    capture = read(path)
    assert {n: t.calls for n, t in (capture.host_api or {}).items()} == {"os:poll": 1}
    assert {n: t.calls for n, t in (capture.ranges or {}).items()} == {"step": 1}
    assert capture.missing == [
        "host API calls: 2 of OSRT_API have no end, or one before their start",
        "ranges: 2 of them have no end",
    ]


def test_short_names_are_the_tools_own(tmp_path: Path) -> None:
    path = nsys_export(tmp_path / "x.sqlite", [(0, 5, 0, "a<lambda(int)#1>::run(int)", ONE, ONE)])
    database = sqlite3.connect(path)
    database.execute("INSERT INTO StringIds VALUES (90, 'run_of_the_tool')")
    database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET shortName = 90")
    database.commit()
    database.close()
    [row] = read(path).kernel_rows()
    assert row["short_name"] == "run_of_the_tool"
    assert row["name"] == "a<lambda(int)#1>::run(int)"


def test_columns_are_read_of_the_tables_that_are_asked_for(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        [(0, 5, 0, "a", ONE, ONE)],
        extra=[f"CREATE TABLE other{n} (a)" for n in range(300)],
    )
    with opened(Reading(path)) as database:
        nsys_sqlite.read(database)
        known = [name for name, columns in database.tables._found.items() if columns is not None]
        assert len(database.tables) == 303 and not [n for n in known if n.startswith("other")]
        assert list(database.tables)[-1] == "other299"


# --- files that deceive -----------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        "('soon', 9, 0, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "(NULL, 9, 0, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "(1.5, 9, 0, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "(1, x'00', 0, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
        "(-9223372036854775807, 9223372036854775807, 0, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
    ],
)
def test_times_that_are_no_whole_numbers_are_refused(tmp_path: Path, row: str) -> None:
    for before in ([], [(0, 5, 0, "a", ONE, ONE)]):
        path = nsys_export(
            tmp_path / f"{len(before)}.sqlite",
            before,
            extra=[f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES {row}"],
        )
        with pytest.raises(Damaged, match=r"times in CUPTI_ACTIVITY_KIND_KERNEL are not"):
            read(path)


def test_rows_that_end_before_they_start_are_left_out_and_counted(tmp_path: Path) -> None:
    launches: list[Launch] = [
        (10, 5, 0, "a", ONE, ONE),
        (20, 30, 0, "a", ONE, ONE),
        (40, 39, 0, "a", ONE, ONE),
    ]
    capture = read(nsys_export(tmp_path / "x.sqlite", launches))
    assert capture.kernel_ns == 10
    assert capture.incomplete == ["2 rows end before they start: they were left out"]


def test_shapes_and_names_of_the_wrong_type_are_null_and_not_guessed(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        extra=[
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
            "(0, 9, 0, 7, 1, 404, 1, 'x', 1, 1, 1, 1, 1), "
            "(9, 12, 0, 7, 1, 404, 1, 1, 1, '1,1', 1, 1, 1)",
        ],
    )
    capture = read(path)
    assert {row["name"] for row in capture.kernel_rows()} == {"[no name, id 404]"}
    assert all(row["grid"] is None for row in capture.kernel_rows())
    assert any("names are not in the export" in line for line in capture.incomplete)


def test_a_table_that_is_a_view_or_has_computed_columns_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "view.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    database.execute(
        "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE c(start) AS "
        "(SELECT 1 UNION ALL SELECT start + 1 FROM c) SELECT start, start AS end FROM c"
    )
    database.execute(
        "CREATE TABLE OSRT_API (start INTEGER, end INTEGER AS (start + length(zeroblob(9))), "
        "nameId INTEGER)"
    )
    database.commit()
    database.close()
    capture = read(path)
    assert capture.kernels == [] and capture.host_api is None
    assert capture.missing == ["host API calls: table OSRT_API has no column end"]


def test_a_virtual_table_is_not_read(tmp_path: Path) -> None:
    path = nsys_export(tmp_path / "x.sqlite", kernels=False)
    database = sqlite3.connect(path)
    database.execute("CREATE VIRTUAL TABLE NVTX_EVENTS USING fts5(start, end, text)")
    database.commit()
    database.close()
    assert read(path).ranges == {}


def test_a_missing_table_or_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    nsys_export(path, kernels=False, extra=["CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end)"])
    with pytest.raises(Damaged, match="no column with a kernel's name"):
        read(path)
    nsys_export(
        tmp_path / "y.sqlite",
        kernels=False,
        extra=["CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, deviceId, shortName)"],
    )
    with pytest.raises(Damaged, match="CUPTI_ACTIVITY_KIND_KERNEL has no column end"):
        read(tmp_path / "y.sqlite")


def test_columns_are_matched_in_any_case(tmp_path: Path) -> None:
    path = nsys_export(
        tmp_path / "x.sqlite",
        kernels=False,
        extra=[
            'CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ("START", "End", DEVICEID, shortname)',
            "INSERT INTO StringIds VALUES (1, 'rms_norm')",
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 9, 0, 1)",
        ],
    )
    [row] = read(path).kernel_rows()
    assert (row["name"], row["grid"], row["total_ns"]) == ("rms_norm", None, 9)


def test_a_file_that_breaks_off_is_refused(tmp_path: Path) -> None:
    whole = H100.read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Damaged, match="SQLite cannot read it"):
        read(path)


def test_a_schema_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = nsys_export(tmp_path / "x.sqlite", kernels=False)
    path.write_bytes(
        path.read_bytes().replace(b"CREATE TABLE StringIds", b"CREATE T\xc3\x28\xff StringIds")
    )
    with pytest.raises(Damaged, match="SQLite cannot read it"):
        read(path)


def test_a_write_ahead_log_beside_it_is_said_to_be_unread(tmp_path: Path) -> None:
    path = nsys_export(tmp_path / "x.sqlite", [(0, 5, 0, "a", ONE, ONE)])
    path.with_name("x.sqlite-wal").write_bytes(b"later rows")
    assert any("write-ahead log" in line for line in read(path).incomplete)


def test_a_name_of_a_file_with_special_characters_is_opened_and_not_interpreted(
    tmp_path: Path,
) -> None:
    path = nsys_export(tmp_path / "a?mode=rwc&x=%20#.sqlite", [(0, 5, 0, "a", ONE, ONE)])
    assert read(path).kernel_ns == 5


def test_another_database_is_refused_with_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE moz_places (url TEXT)")
    database.close()
    with pytest.raises(Damaged, match="moz_places"):
        read(path)
    assert nsys_sqlite.is_export(["moz_places"]) is False


def test_reading_stops_when_its_time_is_over(tmp_path: Path) -> None:
    launches: list[Launch] = [(n, n, 0, "a", ONE, ONE) for n in range(50_000)]
    path = nsys_export(tmp_path / "x.sqlite", launches)
    with pytest.raises(Damaged, match="not read within"):
        formats.read(Reading(path, seconds=-1.0), "nsys-sqlite")


def test_cancelling_ends_a_query(tmp_path: Path) -> None:
    launches: list[Launch] = [(n, n, 0, "a", ONE, ONE) for n in range(50_000)]
    path = nsys_export(tmp_path / "x.sqlite", launches)

    class Stop(Exception):
        """Raised by whoever watches."""

    def beat(done: float, total: float | None) -> None:
        raise Stop

    with pytest.raises(Stop):
        formats.read(Reading(path, beat), "nsys-sqlite")
