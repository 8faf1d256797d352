"""Tables of sums: what each report of nsys stats counts, and what is counted but once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ikit_ops.profilers import formats, nsys_reports, report
from ikit_ops.profilers.capture import Capture, Kernel, KernelKey, Tally, tally_rows
from ikit_ops.profilers.categories import short_name_of
from ikit_ops.profilers.limits import Damaged, Reading

TIMES = "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns)"
KERN = (
    f"{TIMES},Name\n60.0,600,3,200.0,200.0,100,300,1.0,foo(int)\n40.0,400,2,200,200,150,250,1,bar\n"
)
GRID = (
    f"{TIMES},GridXYZ,BlockXYZ,Name\n"
    "60.0,600,3,200.0,200.0,100,300,10.0,   1    1    1, 128    1    1,foo(int)\n"
    "40.0,400,2,200.0,200.0,150,250,10.0,   2    1    1, 128    1    1,bar\n"
)
MIXED = (
    f"{TIMES},Category,Operation\n"
    "90.0,9000,2,4500.0,4500.0,4000,5000,1.0,MEMORY_OPER,[CUDA memcpy HtoD]\n"
    "6.0,600,3,200.0,200.0,100,300,10.0,CUDA_KERNEL,foo(int)\n"
    "3.0,300,3,100.0,100.0,100,100,0.0,CUDA_API,cudaLaunchKernelExC_v11060\n"
    "1.0,100,1,100.0,100.0,100,100,0.0,CUDA_WISH,later\n"
)
API = (
    "Time (%),Total Time (ns),Num Calls,Avg (ns),Min (ns),Max (ns),Name\n"
    "90,900,3,300,100,500,cudaLaunchKernelExC_v11060\n10,100,1,100,100,100,cudaMalloc\n"
)
OS = "Time (%),Total Time (ns),Num Calls,Avg (ns),Min (ns),Max (ns),Name\n100,50,1,50,50,50,poll\n"
NVTX = f"{TIMES},Style,Range\n100.0,7,1,7.0,7.0,7,7,0.0,PushPop,decode\n"
PUSHPOP = f"{TIMES},Range\n100.0,7,1,7.0,7.0,7,7,0.0,decode\n"
COPIES = (
    "Time (%),Total Time (ns),Count,Avg (ns),Min (ns),Max (ns),Operation\n"
    "99.0,9000,2,4500.0,4000,5000,[CUDA memcpy HtoD]\n1.0,90,9,10.0,10,10,[CUDA memset]\n"
)
SIZES = (
    "Total (MB),Count,Avg (MB),Min (MB),Max (MB),Operation\n"
    "1.500,2,0.750,0.750,0.750,[CUDA memcpy HtoD]\n0.000,9,0.000,0.000,0.000,[CUDA memset]\n"
    "2.000,1,2.000,2.000,2.000,[CUDA memcpy DtoP]\n"
)
MPI = f"{TIMES},Source,Name\n100.0,1000,5,200.0,200.0,100,300,10.0,MPI,MPI_Allreduce\n"
OPENMP = "Time (%),Total Time (ns),Count,Avg (ns),Name\n100.0,1000,5,200.0,Parallel\n"


def of(name: str, source: str = "a,b.sqlite") -> str:
    """The line before a report's table."""
    return f"Processing [{source}] with [/opt/host-linux-x64/reports/{name}.py]... \n"


def read_text(path: Path, text: str, name: str | None = None) -> Capture:
    path.write_text(text, encoding="utf-8")
    reading = Reading(path)
    return formats.read(reading, name or formats.detect(reading))


def as_json(text: str) -> str:
    """A table as the tool writes it in JSON: numbers as numbers."""
    first, *rows = text.splitlines()
    names = first.split(",")
    objects = [dict(zip(names, map(_value, row.split(",")), strict=True)) for row in rows]
    return json.dumps(objects, indent=2) + "\n"


def _value(cell: str) -> Any:
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return float(cell)
    except ValueError:
        return cell


def sums(part: dict[str, Tally] | None) -> dict[str, int | None] | None:
    return None if part is None else {name: tally.known_ns for name, tally in part.items()}


def kernels(capture: Capture) -> list[tuple[str, int, int | None]] | None:
    if capture.kernels is None:
        return None
    return [(row["name"], row["calls"], row["total_ns"]) for row in capture.kernel_rows()]


def valid(capture: Capture) -> bool | None:
    return report.draft(capture, report.Context("derived", "x")).valid


# --- which table counts what --------------------------------------------------------------


@pytest.mark.parametrize("shape", [str, as_json])
def test_a_table_of_all_work_is_told_apart_row_by_row(tmp_path: Path, shape: Any) -> None:
    capture = read_text(tmp_path / "x", of("apigpusum") + shape(MIXED))
    assert kernels(capture) == [("foo(int)", 3, 600)]
    assert sums(capture.memory_ops) == {"[CUDA memcpy Host-to-Device]": 9_000}
    assert sums(capture.host_api) == {"cudaLaunchKernelExC": 300}
    assert "1 rows of the category CUDA_WISH (not read)" in capture.missing
    assert capture.ranges is None
    assert "ranges (the output has no table of them)" in capture.missing


@pytest.mark.parametrize(("text", "name"), [(MPI, "mpi_event_sum"), (OPENMP, "openmp_sum")])
def test_tables_of_other_things_are_named_and_not_used(
    tmp_path: Path, text: str, name: str
) -> None:
    capture = read_text(tmp_path / "x", of("cuda_gpu_kern_sum") + KERN + "\n" + of(name) + text)
    assert kernels(capture) == [("foo(int)", 3, 600), ("bar", 2, 400)]
    assert capture.host_api is None and valid(capture) is True
    assert f"{name} (what it counts has no part here: not used)" in capture.missing
    alone = read_text(tmp_path / "y", text)
    assert (alone.kernels, alone.host_api, valid(alone)) == (None, None, None)
    assert any("has no part here: not used" in line for line in alone.missing)


def test_columns_alone_do_not_make_kernels_of_what_another_report_counts(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x", of("openacc_sum") + KERN)
    assert capture.kernels is None
    assert "openacc_sum (what it counts has no part here: not used)" in capture.missing
    capture = read_text(tmp_path / "x", of("vulkan_gpu_marker_sum") + PUSHPOP)
    assert capture.ranges is None
    assert "vulkan_gpu_marker_sum (what it counts has no part here: not used)" in capture.missing


def test_calls_of_the_system_and_of_cuda_are_both_used_under_the_names_of_the_database(
    tmp_path: Path,
) -> None:
    text = of("cudaapisum") + API + "\n" + of("osrtsum") + OS
    capture = read_text(tmp_path / "x", text)
    assert sums(capture.host_api) == {"cudaLaunchKernelExC": 900, "cudaMalloc": 100, "os:poll": 50}


# --- counted once -------------------------------------------------------------------------

TITLE = "\n ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):\n\n"
GRID_TITLE = "\n ** CUDA GPU Kernel/Grid/Block Summary (cuda_gpu_kern_gb_sum):\n\n"


@pytest.mark.parametrize(
    "text",
    [
        of("gpukernsum") + GRID + "\n" + of("gpukernsum") + GRID,
        TITLE + KERN + GRID_TITLE + GRID,
        GRID_TITLE + GRID + TITLE + KERN,
        KERN + "\n" + GRID,
        "[3/8] Executing 'cuda_gpu_kern_sum' stats report\n" + KERN
        + "[4/8] Executing 'cuda_gpu_kern_gb_sum' stats report\n" + GRID,
        of("gpusum") + MIXED + of("gpukernsum") + GRID,
    ],
)  # fmt: skip
def test_kernels_that_several_tables_count_are_counted_once(tmp_path: Path, text: str) -> None:
    capture = read_text(tmp_path / "x", text)
    assert kernels(capture) == [("foo(int)", 3, 600), ("bar", 2, 400)]
    assert [row["grid"] for row in capture.kernel_rows()] == [[1, 1, 1], [2, 1, 1]]
    assert any("was left out: its GPU kernels are counted" in x for x in capture.limitations)
    assert valid(capture) is True


def test_two_tables_of_the_same_kernels_that_disagree_are_doubtful(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x", TITLE + KERN.replace("600", "900") + GRID_TITLE + GRID)
    assert valid(capture) is None and any("disagree: 1000 ns" in x for x in capture.incomplete)


def test_ranges_and_copies_and_sizes_that_two_tables_count_are_counted_once(
    tmp_path: Path,
) -> None:
    text = of("nvtxsum") + NVTX + of("nvtxppsum") + PUSHPOP + of("gpumemtimesum") + COPIES
    capture = read_text(tmp_path / "x", text + of("gpusum") + MIXED)
    assert sums(capture.ranges) == {"decode": 7}
    assert sums(capture.memory_ops) == {"[CUDA memcpy Host-to-Device]": 9_000, "[CUDA memset]": 90}
    titles = ("nvtxppsum", "gpusum")
    for title in titles:
        assert any(line.startswith(f"{title} was left out") for line in capture.limitations)
    capture = read_text(tmp_path / "x", of("s") + SIZES + of("s") + SIZES)
    assert (capture.memory_ops or {})["[CUDA memcpy Host-to-Device]"].bytes == 1_500_000
    assert "a further table of sizes was left out" in capture.limitations


def test_tables_of_two_captures_are_added_up_and_said_to_be(tmp_path: Path) -> None:
    text = of("gpukernsum", "a.sqlite") + GRID + "\n" + of("gpukernsum", "b.sqlite") + GRID
    capture = read_text(tmp_path / "x", text)
    assert kernels(capture) == [("foo(int)", 6, 1_200), ("bar", 4, 800)]
    assert "the tables are of several captures: they are added up" in capture.limitations


# --- what the tool says -------------------------------------------------------------------


def test_a_report_that_failed_beside_one_that_did_not_spoils_the_capture(tmp_path: Path) -> None:
    said = "ERROR: Report 'cuda_gpu_mem_time_sum' encountered an internal error: no such column"
    for text in (KERN, as_json(KERN)):
        whole = of("cuda_gpu_kern_sum") + text + "\n" + of("cuda_gpu_mem_time_sum") + said + "\n"
        capture = read_text(tmp_path / "x", whole)
        assert kernels(capture) == [("foo(int)", 3, 600), ("bar", 2, 400)]
        assert capture.incomplete == [f"a report failed: {said}"] and valid(capture) is None


def test_reports_that_were_skipped_or_brought_nothing_and_absent_parts_are_named(
    tmp_path: Path,
) -> None:
    skipped = "SKIPPED: a.sqlite does not contain NV Tools Extension (NVTX) data."
    text = of("gpukernsum") + KERN + of("nvtxsum") + skipped + "\n" + of("kernexecsum")
    capture = read_text(tmp_path / "x", text)
    assert capture.missing == [
        f"nvtxsum: {skipped}",
        "kernexecsum (it brought no table that is read here)",
        "memory operations (the output has no table of them)",
        "host API calls (the output has no table of them)",
        "ranges (the output has no table of them)",
        "gaps and busy share (sums hold no times of single launches)",
    ]
    assert valid(capture) is True


@pytest.mark.parametrize("text", [of("kernexecsum"), of("kernexecsum") + "[\n]\n"])
def test_an_output_whose_only_report_is_empty_is_recognised_and_refused(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(Damaged, match="no table of nsys stats"):
        read_text(tmp_path / "x", text)


def test_what_the_sentences_say_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(nsys_reports, "MAX_REPORTS", 3)
    monkeypatch.setattr(nsys_reports, "MAX_SAID", 2)
    text = "".join(of(f"r{n}") + "ERROR: a\nERROR: b\nERROR: c\n" for n in range(9))
    capture = read_text(tmp_path / "x", KERN + text + MPI + MPI + MPI)
    assert len(capture.incomplete) <= 4 and len(capture.missing) <= 8


# --- what is in a table that is no row ------------------------------------------------------


def test_a_table_goes_on_behind_what_is_printed_into_it(tmp_path: Path) -> None:
    header, first, second = KERN.splitlines()
    text = f"{header}\n{first}\nWARNING: something happened\n\n{second}\n"
    capture = read_text(tmp_path / "x", of("gpukernsum") + text)
    assert kernels(capture) == [("foo(int)", 3, 600), ("bar", 2, 400)]
    assert capture.incomplete == ["1 lines among the rows of a table are no rows: left out"]


def test_a_name_whose_comma_is_not_quoted_is_no_sound_row(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x", KERN + "1,10,1,10,10,10,10,0,void baz<int, 4>(int)\n")
    assert kernels(capture) == [("foo(int)", 3, 600), ("bar", 2, 400)]
    assert capture.incomplete == ["1 rows could not be read: they were left out"]


def test_calls_without_number_and_time_of_no_calls_are_no_sound_rows(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x", KERN + "1,10,0,10,10,10,10,0,a\n1,10,2.5,1,1,1,1,0,b\n")
    assert len(capture.kernels or []) == 2
    assert capture.incomplete == ["2 rows could not be read: they were left out"]


# --- versions before 2022 -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Generating CUDA Kernel Statistics...\n"
        "Time(%),Total Time (ns),Instances,Average,Minimum,Maximum,Name\n"
        '60.0,"1,600",3,200.0,100,300,"void foo<int, 3>(float*, int)"\n',
        "CUDA Kernel Statistics (nanoseconds)\n\n"
        "Time(%),Total Time,Instances,Average,Minimum,Maximum,Name\n"
        '60.0,1600,3,200.0,100,300,"void foo<int, 3>(float*, int)"\n',
        'Processing [a] with [gpukernsum]...\n[\n  {"Time(%)": 60.0, "Total Time (ns)": 1600,'
        ' "Instances": 3, "Average": 200.0, "Minimum": 100, "Maximum": 300,'
        ' "Name": "void foo<int, 3>(float*, int)"}\n]\n',
        '[{"Time (%)": 50.0, "Total Time (ns)": 1600, "Instances": 3, "Min (ns)": 100,'
        ' "Max (ns)": 300, "Name": "void foo<int, 3>(float*, int)"}]',
    ],
)
def test_old_columns_and_compact_lists_are_read_like_the_others(tmp_path: Path, text: str) -> None:
    [row] = read_text(tmp_path / "x", text).kernel_rows()
    assert (row["name"], row["calls"], row["total_ns"], row["min_ns"], row["max_ns"]) == (
        "void foo<int, 3>(float*, int)", 3, 1_600, 100, 300,
    )  # fmt: skip


def test_old_sizes_have_the_unit_of_their_title(tmp_path: Path) -> None:
    text = (
        "CUDA Memory Operation Statistics (by size in KiB)\n\n"
        "Total,Operations,Average,Minimum,Maximum,Operation\n3,2,1.5,1,2,[CUDA memcpy HtoD]\n"
    )
    capture = read_text(tmp_path / "x", text)
    memory = (capture.memory_ops or {})["[CUDA memcpy Host-to-Device]"]
    assert (memory.calls, memory.bytes, memory.known_ns) == (2, 3_072, None)


def test_a_total_of_an_unknown_unit_is_no_number(tmp_path: Path) -> None:
    text = "Time(%),Total Time,Instances,Name\n60.0,1600,3,foo\n"
    capture = read_text(tmp_path / "x", text)
    assert capture.kernels == []
    assert capture.incomplete == ["1 rows could not be read: they were left out"]


# --- rounded ------------------------------------------------------------------------------


def test_rounded_times_are_said_to_be_and_none_is_taken_for_nothing(tmp_path: Path) -> None:
    text = (
        "Time (%),Total Time (ms),Instances,Avg (ms),Min (ms),Max (ms),Name\n"
        "99.0,2.4224,2,1.2112,0.0000,2.4224,foo\n1.0,0.0000,7,0.0000,0.0000,0.0000,bar\n"
    )
    capture = read_text(tmp_path / "x", text)
    foo, bar = capture.kernel_rows()
    assert (foo["total_ns"], foo["min_ns"], foo["max_ns"]) == (2_422_400, None, 2_422_400)
    assert (bar["calls"], bar["total_ns"], bar["mean_ns"], bar["share"]) == (7, None, None, None)
    assert "times were printed in ms: each total is rounded to 100 ns" in capture.limitations
    assert capture.incomplete == ["1 rows have no time: printed in ms, it is rounded to nothing"]


def test_microseconds_with_three_decimals_are_exact(tmp_path: Path) -> None:
    text = "Time (%),Total Time (us),Instances,Name\n99.0,2422.441,2,foo\n1.0,0.000,1,bar\n"
    capture = read_text(tmp_path / "x", text)
    assert [row["total_ns"] for row in capture.kernel_rows()] == [2_422_441, 0]
    assert capture.limitations == [] and capture.incomplete == []


def test_rounded_sizes_are_said_to_be_and_none_is_taken_for_nothing(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x", COPIES + "\n" + SIZES)
    rows = {row["name"]: row for row in tally_rows(capture.memory_ops, 9) or []}
    assert rows["[CUDA memcpy Host-to-Device]"]["bytes"] == 1_500_000
    assert rows["[CUDA memset]"]["bytes"] is None and rows["[CUDA memset]"]["total_ns"] == 90
    peer = rows["[CUDA memcpy Device-to-Peer]"]
    assert (peer["calls"], peer["total_ns"], peer["bytes"]) == (1, None, 2_000_000)
    assert "sizes were printed in MB: each total is rounded to 1000 bytes" in capture.limitations
    assert "bytes of 9 memory operations (their size is not said)" in capture.missing


# --- what is not known ----------------------------------------------------------------------


def test_calls_without_time_are_counted_apart_from_those_that_were_timed() -> None:
    tally = Tally()
    tally.add(None)
    assert tally.row() == {
        "calls": 1, "total_ns": None, "mean_ns": None, "min_ns": None, "max_ns": None,
        "timed_calls": 0,
    }  # fmt: skip
    tally.add(1_000)
    other = Tally()
    other.merge(2, None, None, None)
    tally.join(other)
    assert tally.row() == {
        "calls": 4, "total_ns": 1_000, "mean_ns": 1_000.0, "min_ns": 1_000, "max_ns": 1_000,
        "timed_calls": 1,
    }  # fmt: skip
    assert Tally().row()["total_ns"] == 0


def test_bytes_are_null_until_one_size_is_known() -> None:
    tally = Tally()
    tally.add(5)
    assert "bytes" not in (tally_rows({"x": tally}, 1) or [])[0]
    tally.add_bytes(None)
    assert (tally_rows({"x": tally}, 1) or [])[0]["bytes"] is None
    tally.add_bytes(64)
    other = Tally()
    other.add_bytes(36)
    tally.join(other)
    assert (tally_rows({"x": tally}, 1) or [])[0]["bytes"] == 100 and tally.unsized == 1


def test_a_capture_without_any_time_has_null_totals_and_shares() -> None:
    untimed = Tally()
    untimed.add(None)
    capture = Capture("x", kernels=[Kernel(KernelKey("gemm"), untimed)])
    draft = report.draft(capture, report.Context("derived", "x"))
    values = {metric.name: metric.value for metric in draft.metrics}
    assert values["kernel_time_ns"] is None and values["kernel_calls"] == 1
    assert draft.data["categories"] == [
        {"category": "gemm", "calls": 1, "total_ns": None, "share": None}
    ]
    timed = Tally()
    timed.add(10)
    capture.kernels = [*(capture.kernels or []), Kernel(KernelKey("norm"), timed)]
    rows = report.draft(capture, report.Context("derived", "x")).data["kernels"]
    assert [(row["name"], row["share"]) for row in rows] == [("norm", 1.0), ("gemm", None)]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("[CUDA memcpy Host-to-Device]", "[CUDA memcpy Host-to-Device]"),
        ("my range", "my range"),
        ("void k<int>(int) [clone .kd]", "k"),
        ("gemm [clone .kd]", "gemm"),
        ("unsigned int at::foo(int)", "foo"),
    ],
)
def test_what_is_no_function_is_not_cut_at_its_spaces(name: str, short: str) -> None:
    assert short_name_of(name) == short
