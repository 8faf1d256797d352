"""Tables of rocprofv3: which of them keep a device busy, and what statistics are of."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.profilers import ROCPROF_TRACES
from ikit_ops.profilers import formats, report, rocprof_counters, rocprof_csv, rocprof_stats
from ikit_ops.profilers.capture import Capture, Tally
from ikit_ops.profilers.limits import Damaged, Reading

STATS = '"Name","Calls","TotalDurationNs","AverageNs","Percentage","MinNs","MaxNs","StdDev"\n'
COUNTERS = (
    '"Correlation_Id","Dispatch_Id","Agent_Id","Queue_Id","Process_Id","Thread_Id","Grid_Size",'
    '"Kernel_Id","Kernel_Name","Workgroup_Size","Counter_Name","Counter_Value",'
    '"Start_Timestamp","End_Timestamp"\n'
)
CALLS = (
    '"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp",'
    '"End_Timestamp"\n'
)
COPIES = (
    '"Kind","Direction","Source_Agent_Id","Destination_Agent_Id","Start_Timestamp",'
    '"End_Timestamp"\n'
)


def row(name: str, calls: int | str = 2, total: int | str = 30) -> str:
    return f'"{name}",{calls},{total},15,10,5,25,1\n'


def counted(dispatch: int, name: str, value: int, start: int = 100, process: int = 7) -> str:
    times = f"{start},{start + 50}"
    return f'1,{dispatch},"Agent 2",1,{process},9,1024,1,"k",64,"{name}",{value},{times}\n'


def read_text(path: Path, text: str) -> Capture:
    path.write_text(text, encoding="utf-8")
    reading = Reading(path)
    assert formats.detect(reading) == "rocprofv3-csv"
    return formats.read(reading, "rocprofv3-csv")


def sums(part: dict[str, Tally] | None) -> dict[str, int | None] | None:
    return None if part is None else {name: tally.known_ns for name, tally in part.items()}


def kernels(capture: Capture) -> list[tuple[str, int, int | None]] | None:
    if capture.kernels is None:
        return None
    return [(row["name"], row["calls"], row["total_ns"]) for row in capture.kernel_rows()]


def valid(capture: Capture) -> bool | None:
    return report.draft(capture, report.Context("derived", "x")).valid


# --- statistics ---------------------------------------------------------------------------


def test_the_name_of_the_file_says_what_its_statistics_are_of(tmp_path: Path) -> None:
    text = STATS + row("hip_rope_kernel", total=40) + row("hipLaunchByPtr_kernel") + row("fwd")
    capture = read_text(tmp_path / "x_kernel_stats.csv", text)
    assert kernels(capture) == [
        ("hip_rope_kernel", 2, 40), ("fwd", 2, 30), ("hipLaunchByPtr_kernel", 2, 30),
    ]  # fmt: skip
    assert capture.host_api is None and valid(capture) is True
    capture = read_text(tmp_path / "x_marker_api_stats.csv", text)
    assert capture.kernels is None and len(capture.ranges or {}) == 3
    capture = read_text(tmp_path / "x_hip_api_stats.csv", text)
    assert capture.kernels is None and len(capture.host_api or {}) == 3
    capture = read_text(tmp_path / "x_memory_allocation_stats.csv", text)
    assert "3 rows of memory allocations (not used)" in capture.missing
    assert valid(capture) is None


@pytest.mark.parametrize("file", ["x_kernel_stats.csv", "stats.csv"])
def test_what_all_names_say_outweighs_the_name_of_the_file(tmp_path: Path, file: str) -> None:
    capture = read_text(tmp_path / file, STATS + row("KERNEL_DISPATCH") + row("HIP_RUNTIME_API"))
    assert capture.kernels is None
    assert "2 rows of sums of whole domains (not used)" in capture.missing
    text = STATS + row("DEVICE_TO_DEVICE") + row("MEMORY_COPY_HOST_TO_DEVICE")
    capture = read_text(tmp_path / file, text)
    assert capture.kernels is None
    assert sums(capture.memory_ops) == {"DEVICE_TO_DEVICE": 30, "MEMORY_COPY_HOST_TO_DEVICE": 30}
    assert "bytes of 4 memory operations (their size is not said)" in capture.missing
    text = STATS + row("hipMemcpyAsync_spt") + row("ncclAllReduce") + row("hsa_signal_create")
    capture = read_text(tmp_path / file, text)
    assert capture.kernels is None and len(capture.host_api or {}) == 3


def test_kernels_of_a_file_whose_name_says_nothing_are_doubtful(tmp_path: Path) -> None:
    text = STATS + row("hipMalloc") + row("ncclDevKernel_Generic") + row("hip_rope_kernel")
    capture = read_text(tmp_path / "all.csv", text)
    assert [k[0] for k in kernels(capture) or []] == ["hip_rope_kernel", "ncclDevKernel_Generic"]
    assert sums(capture.host_api) == {"hipMalloc": 30}
    assert capture.incomplete == [rocprof_stats.UNSURE] and valid(capture) is None


def test_rows_of_statistics_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    text = STATS + row("a") + row("b", "x") + row("c", 5, "1.5e3") + row("d", 5, -1) + '"e",1\n'
    capture = read_text(tmp_path / "x_kernel_stats.csv", text)
    assert kernels(capture) == [("a", 2, 30)]
    assert capture.incomplete == ["4 rows of statistics could not be read"]
    assert valid(capture) is None


def test_the_same_statistics_twice_count_once_and_those_of_two_processes_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x_kernel_stats.csv"
    capture = read_text(path, (STATS + row("a")) * 2)
    assert kernels(capture) == [("a", 2, 30)]
    assert any("was left out: its GPU kernels" in line for line in capture.limitations)
    capture = read_text(path, STATS + row("a") + STATS + row("a", 3, 60))
    assert kernels(capture) == [("a", 5, 90)]
    assert "the tables are of several captures: they are added up" in capture.limitations
    monkeypatch.setattr(rocprof_stats, "MAX_TABLES", 1)
    with pytest.raises(Damaged, match="more than 1 tables"):
        read_text(path, STATS + row("a") + STATS + row("a", 3, 60))


def test_statistics_of_what_is_traced_in_the_same_file_are_left_out(tmp_path: Path) -> None:
    text = ROCPROF_TRACES["third"] + STATS + row("gemm(int, float)", 2, 600) + row("hipFree")
    capture = read_text(tmp_path / "x_stats.csv", text)
    assert kernels(capture) == [("gemm(int, float)", 2, 600)]
    assert sums(capture.host_api) == {"hipFree": 30}
    assert (
        "statistics of GPU kernels were left out: a trace of them is in the file"
        in capture.limitations
    )


# --- traces -------------------------------------------------------------------------------


def test_times_of_allocations_and_scratch_are_no_work_of_a_device(tmp_path: Path) -> None:
    text = (
        '"Kind","Operation","Agent_Id","Start_Timestamp","End_Timestamp"\n'
        '"MEMORY_ALLOCATION","MEMORY_ALLOCATION_ALLOCATE","Agent 1",100,5000\n'
        '"SCRATCH_MEMORY","SCRATCH_MEMORY_ALLOC","Agent 1",100,5000\n'
    )
    capture = read_text(tmp_path / "x.csv", text)
    assert (capture.devices, capture.memory_ops, capture.busy_share) == (None, None, None)
    for kind in ("MEMORY_ALLOCATION", "SCRATCH_MEMORY"):
        line = f"1 rows of {kind} (they keep no device busy: not used)"
        assert line in capture.missing


def test_ranges_are_told_from_api_calls_by_their_domain(tmp_path: Path) -> None:
    text = CALLS + (
        '"MARKER_CORE_API","decode step",1,1,1,100,500\n"HIP_RUNTIME_API","hipFree",1,1,2,1,3\n'
    )
    capture = read_text(tmp_path / "x.csv", text)
    assert sums(capture.ranges) == {"decode step": 400} and sums(capture.host_api) == {"hipFree": 2}


def test_a_copy_keeps_the_device_busy_and_not_the_host(tmp_path: Path) -> None:
    text = COPIES + (
        '"MEMORY_COPY","MEMORY_COPY_DEVICE_TO_HOST","Agent 4","Agent 0",10,30\n'
        '"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE","Agent 0","Agent 4",20,50\n'
        '"MEMORY_COPY","MEMORY_COPY_HOST_TO_HOST","Agent 0","Agent 0",500,700\n'
    )
    capture = read_text(tmp_path / "x.csv", text)
    assert [(d.id, d.busy_ns, d.span_ns) for d in capture.devices or []] == [(4, 40, 40)]
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_HOST"].calls == 1


def test_times_since_the_epoch_have_nineteen_digits(tmp_path: Path) -> None:
    epoch = 1_764_550_000_000_000_000
    text = ROCPROF_TRACES["third"]
    for time in (1000, 1400, 1500, 1700):
        text = text.replace(f",{time},", f",{epoch + time},")
    capture = read_text(tmp_path / "x.csv", text)
    assert kernels(capture) == [("gemm(int, float)", 2, 600)]
    assert [(d.busy_ns, d.span_ns) for d in capture.devices or []] == [(600, 700)]
    assert capture.incomplete == []


@pytest.mark.parametrize(
    ("label", "number"),
    [("Agent 2", 2), ("GPU 1", 1), ("gfx942 3", 3), ("7", 7), ("gfx942", None), ("", None)],
)
def test_agents_are_numbered_however_they_are_called(label: str, number: int | None) -> None:
    assert rocprof_csv.agent_number(label) == number


def test_a_trace_that_is_in_the_file_twice_is_doubtful(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x.csv", ROCPROF_TRACES["third"] * 2)
    assert valid(capture) is None
    assert "a table of dispatches is in the file twice: counted twice" in capture.incomplete


def test_parts_that_a_trace_does_not_have_are_named(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x.csv", ROCPROF_TRACES["first"])
    assert capture.missing == [
        "memory operations (the file has no table of them)",
        "host API calls (the file has no table of them)",
        "ranges (the file has no table of them)",
    ]


# --- counters -----------------------------------------------------------------------------


def test_a_dispatch_with_several_counters_is_one_dispatch(tmp_path: Path) -> None:
    text = COUNTERS + counted(1, "SQ_WAVES", 4) + counted(1, "GRBM_COUNT", 7)
    text += counted(2, "SQ_WAVES", 8, start=200) + counted(2, "GRBM_COUNT", 9, start=200)
    text += counted(1, "SQ_WAVES", 6, start=400, process=8)
    capture = read_text(tmp_path / "x_counter_collection.csv", text)
    [kernel] = capture.kernel_rows()
    assert (kernel["calls"], kernel["total_ns"]) == (3, 150)
    assert kernel["metrics"] == {"SQ_WAVES": 6.0, "GRBM_COUNT": 8.0}
    assert [(d.id, d.busy_ns) for d in capture.devices or []] == [(2, 150)]
    assert rocprof_counters.SERIALISED in capture.limitations and valid(capture) is True


def test_counters_without_times_say_how_often_and_not_how_long(tmp_path: Path) -> None:
    head = '"Correlation_Id","Agent_Id","Kernel_Name","Counter_Name","Counter_Value"\n'
    text = head + '1,"Agent 2","k","A",1\n1,"Agent 2","k","B",2\n2,"Agent 2","k","A",n/a\n'
    capture = read_text(tmp_path / "x.csv", text)
    [kernel] = capture.kernel_rows()
    assert (kernel["calls"], kernel["total_ns"], kernel["mean_ns"]) == (2, None, None)
    assert kernel["metrics"] == {"A": 1.0, "B": 2.0}
    assert "2 dispatches have no sound times" in capture.incomplete
    assert "gaps and busy share (no times of single dispatches)" in capture.missing


def test_counters_beside_a_trace_and_copies_beside_counters(tmp_path: Path) -> None:
    counters = COUNTERS + counted(1, "SQ_WAVES", 4)
    capture = read_text(tmp_path / "x.csv", counters + ROCPROF_TRACES["third"])
    assert kernels(capture) == [("gemm(int, float)", 2, 600)]
    assert "counters of 1 dispatches (the trace in the same file was taken)" in capture.missing
    copy = '"MEMORY_COPY","MEMORY_COPY_HOST_TO_DEVICE","Agent 0","Agent 2",120,250\n'
    capture = read_text(tmp_path / "x.csv", counters + COPIES + copy)
    assert [(d.id, d.busy_ns) for d in capture.devices or []] == [(2, 150)]
    assert kernels(capture) == [("k", 1, 50)]


def test_counters_that_belong_to_nothing_and_too_many_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocprof_counters, "MAX_COUNTERS", 1)
    text = (
        COUNTERS
        + counted(1, "A", 4)
        + counted(1, "B", 4)
        + counted(1, "A", 4).replace("1,1,", "x,x,")
    )
    capture = read_text(tmp_path / "x.csv", text)
    assert capture.kernel_rows()[0]["metrics"] == {"A": 4.0}
    assert "counters beyond the first 1" in capture.missing
    lost = "1 rows of counters have no dispatch or no kernel: left out"
    assert lost in capture.incomplete
    monkeypatch.setattr(rocprof_counters, "MAX_DISPATCHES", 1)
    with pytest.raises(Damaged, match="more than 1 dispatches"):
        read_text(tmp_path / "x.csv", COUNTERS + counted(1, "A", 4) + counted(2, "A", 4))
