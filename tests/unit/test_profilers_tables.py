"""CSV and JSON tables of nsys, ncu and rocprofv3, found by header and read by column."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.profilers import NCU_DETAILS, NCU_RAW, ROCPROF_TRACES
from ikit_mcp.registry import OpError
from ikit_ops.profilers import formats, ncu_csv, tables
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import Damaged, Reading

DATA = Path(__file__).parents[1] / "data" / "profiles"
MANY = """Generating SQLite file x.sqlite from x.nsys-rep
Processing [x.sqlite] with [/opt/reports/cuda_api_sum.py]...
Time (%),Total Time (us),Num Calls,Avg (us),Med (us),Min (us),Max (us),StdDev (us),Name
60.0,600.5,3,200.2,200.0,100.0,300.0,1.0,cudaLaunchKernel

Processing [x.sqlite] with [/opt/reports/cuda_gpu_kern_sum.py]...
Time (%),Total Time (us),Instances,Avg (us),Med (us),Min (us),Max (us),StdDev (us),Name
90.0,9.0,2,4.5,4.5,4.0,5.0,0.5,"void gemm<int, 4>(int, int)"
10.0,1.0,1,1.0,1.0,1.0,1.0,0.0,rms_norm

Time (%),Total Time (us),Count,Avg (us),Med (us),Min (us),Max (us),StdDev (us),Operation
100.0,2.5,1,2.5,2.5,2.5,2.5,0.0,[CUDA memcpy Host-to-Device]
Total (MB),Count,Avg (MB),Med (MB),Min (MB),Max (MB),StdDev (MB),Operation
1.5,1,1.5,1.5,1.5,1.5,0.0,[CUDA memcpy Host-to-Device]
Time (%),Total Time (us),Instances,Avg (us),Med (us),Min (us),Max (us),StdDev (us),Style,Range
100.0,7.0,1,7.0,7.0,7.0,7.0,0.0,PushPop,decode
"""


def read_text(path: Path, text: str, name: str | None = None) -> Capture:
    path.write_text(text, encoding="utf-8")
    reading = Reading(path)
    return formats.read(reading, name or formats.detect(reading))


def test_several_tables_in_one_output_go_to_their_own_parts(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "stats.txt", MANY)
    rows = capture.kernel_rows()
    assert [(r["name"], r["calls"], r["total_ns"], r["min_ns"]) for r in rows] == [
        ("void gemm<int, 4>(int, int)", 2, 9_000, 4_000),
        ("rms_norm", 1, 1_000, 1_000),
    ]
    assert (capture.host_api or {})["cudaLaunchKernel"].total_ns == 600_500
    memory = (capture.memory_ops or {})["[CUDA memcpy Host-to-Device]"]
    assert (memory.total_ns, memory.bytes) == (2_500, 1_500_000)
    assert (capture.ranges or {})["decode"].total_ns == 7_000


@pytest.mark.parametrize(
    "said",
    [
        "ERROR: Report 'x' could not be found.",
        "SKIPPED: x.sqlite does not contain CUDA kernel data.",
    ],
)
def test_what_the_tool_says_instead_of_a_table_is_the_error(tmp_path: Path, said: str) -> None:
    with pytest.raises(Damaged, match=said[:20]):
        read_text(tmp_path / "stats.txt", f"Processing [x.sqlite] with [y.py]...\n{said}\n")


def test_an_output_without_any_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OpError, match="not recognised"):
        read_text(tmp_path / "stats.txt", "hello\nworld\n")
    with pytest.raises(Damaged, match="no table of nsys stats"):
        read_text(tmp_path / "stats.txt", "hello\nworld\n", "nsys-stats")


def test_rows_that_are_cut_or_lie_are_left_out(tmp_path: Path) -> None:
    header = "Time (%),Total Time (ns),Instances,Avg (ns),Min (ns),Max (ns),Name\n"
    lines = ["50,many,1,1,1,1,a", "50,10,1", "50,-4,1,1,1,1,b", "50,10,2,5,4,6,c", "0,7,1,7,7,7"]
    capture = read_text(tmp_path / "s.csv", header + "\n".join(lines))
    [row] = capture.kernel_rows()
    assert (row["name"], row["total_ns"]) == ("c", 10)
    assert capture.incomplete == [
        "4 rows could not be read: they were left out",
        "the last line has no end: the file may be cut off",
    ]


def test_a_list_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="no JSON"):
        read_text(tmp_path / "s.json", '[\n  {"Time (%)": 1,\n]\n')


# --- Nsight Compute -----------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "scale"), [("ns", 1), ("nsecond", 1), ("us", 1000)])
def test_the_wide_table_is_read_with_its_units(tmp_path: Path, unit: str, scale: int) -> None:
    capture = read_text(tmp_path / "ncu.csv", NCU_RAW.replace("{unit}", unit))
    first, second = capture.kernel_rows()
    assert (first["calls"], first["total_ns"]) == (2, 3_000 * scale)
    assert (first["grid"], first["block"]) == ([8, 2, 1], [128, 1, 1])
    assert first["metrics"]["sm_pct"] == 41.0 and first["metrics"]["memory_pct"] == 80.0
    assert first["metrics"]["achieved_occupancy_pct"] == 50.0
    assert first["metrics"]["dram_pct"] is None
    assert second["metrics"]["sm_pct"] is None and second["metrics"]["memory_pct"] == 20.0
    rounded = [] if scale == 1 else ["durations were printed rounded, to 1000 ns"]
    assert capture.limitations == [ncu_csv.REPLAYED, *rounded] and capture.busy_share is None


def test_an_unknown_unit_makes_durations_unknown_and_not_zero(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "ncu.csv", NCU_RAW.replace("{unit}", "furlong"))
    assert any("3 launches have no duration" in line for line in capture.incomplete)
    assert all(row["min_ns"] is None for row in capture.kernel_rows())


def test_the_long_table_is_read_and_rates_are_not_taken_for_shares(tmp_path: Path) -> None:
    [row] = read_text(tmp_path / "ncu.csv", NCU_DETAILS).kernel_rows()
    assert (row["total_ns"], row["calls"], row["grid"]) == (2_500, 1, [8, 1, 1])
    assert row["metrics"]["memory_pct"] == 91.75 and row["metrics"]["sm_pct"] == 46.54


def test_shapes_that_are_listed_among_the_metrics_are_found(tmp_path: Path) -> None:
    dimensions = ",".join(f'"launch__{w}_dim_{a}"' for w in ("grid", "block") for a in "xyz")
    text = (
        f'"ID","Kernel Name","gpu__time_duration.sum",{dimensions}\n'
        '"","","nsecond","","","","","",""\n"0","a","5","4","3","2","64","2","1"\n'
    )
    [row] = read_text(tmp_path / "ncu.csv", text).kernel_rows()
    assert (row["grid"], row["block"], row["total_ns"]) == ([4, 3, 2], [64, 2, 1], 5)


def test_a_table_without_launches_is_incomplete(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "ncu.csv", NCU_RAW.split('"0","77"')[0])
    assert capture.kernels == [] and "no kernel was profiled" in capture.incomplete
    with pytest.raises(Damaged, match="no table of Nsight Compute"):
        read_text(tmp_path / "x.csv", "==ERROR== no\n", "ncu-csv")


# --- rocprofv3 ----------------------------------------------------------------------------


def test_the_real_statistics_add_up() -> None:
    reading = Reading(DATA / "rocprofv3_kernel_stats.csv")
    capture = formats.read(reading, formats.detect(reading))
    assert capture.kernel_ns == 1_370_000_000
    rows = capture.kernel_rows()
    assert [row["calls"] for row in rows] == [1024, 1024, 2048, 512, 4096]
    assert rows[0]["share"] == pytest.approx(0.4234, abs=1e-3)
    assert rows[0]["short_name"] == "matmul_kernel" and rows[0]["grid"] is None


@pytest.mark.parametrize("generation", ROCPROF_TRACES)
def test_traces_of_three_generations_are_the_same_table(tmp_path: Path, generation: str) -> None:
    capture = read_text(tmp_path / "kernel_trace.csv", ROCPROF_TRACES[generation])
    [row] = capture.kernel_rows()
    assert (row["name"], row["calls"], row["total_ns"]) == ("gemm(int, float)", 2, 600)
    assert (row["grid"], row["block"]) == ([512, 2, 1], [256, 1, 1])
    [device] = capture.devices or []
    assert (device.id, device.busy_ns, device.gap_total_ns) == (4, 600, 100)
    assert capture.grid_unit == "work-items"


def test_copies_and_api_calls_are_told_from_kernels(tmp_path: Path) -> None:
    api = (
        '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp",'
        '"End_Timestamp"\n"HIP_RUNTIME_API","hipMalloc",1,1,1,100,150\n'
        '"HIP_RUNTIME_API","hipMalloc",1,1,1,soon,150\n'
    )
    capture = read_text(tmp_path / "hip.csv", api)
    assert (capture.host_api or {})["hipMalloc"].total_ns == 50 and capture.kernels is None
    assert "1 rows have no sound times: left out" in capture.incomplete
    copies = (
        '"Kind","Direction","Source_Agent_Id","Destination_Agent_Id","Start_Timestamp",'
        '"End_Timestamp"\n"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE","Agent 0","Agent 4",10,30\n'
    )
    capture = read_text(tmp_path / "copy.csv", copies)
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"].total_ns == 20
    stats = (
        '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\n'
        '"hipLaunchKernel",3,30,10,1,5,15,1\n"MEMORY_COPY_HOST_TO_DEVICE",1,9,9,1,9,9,0\n'
    )
    capture = read_text(tmp_path / "stats.csv", stats)
    assert capture.kernels is None
    assert (capture.host_api or {})["hipLaunchKernel"].calls == 3
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"].total_ns == 9


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", 1234.5), (" 7 ", 7.0), ("-3", -3.0), ("1e3", 1000.0), ("n/a", None), ("", None),
        ("1_000", None), ("0x10", None), ("inf", None), ("1e999", None), ("٣", None),
    ],
)  # fmt: skip
def test_numbers_are_what_profilers_print_and_nothing_else(text: str, value: float | None) -> None:
    assert tables.number(text) == value


def test_whole_numbers_stay_exact() -> None:
    assert tables.whole_number("9,007,199,254,740,993") == 2**53 + 1
    assert tables.whole_number("1.5") is None and tables.whole_number("9" * 19) is None
