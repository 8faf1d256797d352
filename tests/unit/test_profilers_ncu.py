"""Tables that something was printed into, and what Nsight Compute leaves unsaid or rounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ikit_ops.profilers import formats, ncu, report, tables
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import Damaged, Reading

HEAD = (
    '"ID","Process ID","Kernel Name","Block Size","Grid Size","gpu__time_duration.sum",'
    '"sm__throughput.avg.pct_of_peak_sustained_elapsed"\n'
)
UNITS = '"","","","","","nsecond","%"\n'
FIRST = '"0","7","foo(int)","(256, 1, 1)","(8, 1, 1)","1,000","50"\n'
SECOND = '"1","7","bar","(256, 1, 1)","(8, 1, 1)","2,000","40"\n'
BOTH = [("bar", 1, 2_000), ("foo(int)", 1, 1_000)]
LONG = (
    '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value","Rule Name",'
    '"Rule Description"\n'
)


def read_text(path: Path, text: str) -> Capture:
    path.write_text(text, encoding="utf-8")
    reading = Reading(path)
    return formats.read(reading, formats.detect(reading))


def rows_of(capture: Capture) -> list[tuple[str, int, int | None]]:
    return [(row["name"], row["calls"], row["total_ns"]) for row in capture.kernel_rows()]


# --- what is in a table that is no row ------------------------------------------------------


@pytest.mark.parametrize(
    "between",
    [
        "\n",
        "\r\n   \n",
        "==WARNING== Launching, the workload, takes long.\n",
        '==PROF== Profiling "bar" - 1: 0%....50%....100% - 8 passes\n\n==PROF== x\n',
    ],
)
def test_remarks_and_empty_lines_do_not_end_a_table(tmp_path: Path, between: str) -> None:
    capture = read_text(tmp_path / "x", HEAD + UNITS + FIRST + between + SECOND)
    assert rows_of(capture) == BOTH
    assert capture.incomplete == []


def test_what_is_neither_row_nor_remark_is_counted_and_spoils_the_capture(tmp_path: Path) -> None:
    text = HEAD + UNITS + FIRST + "loading\nstep 1, loss 2.5\n" + SECOND + "done\n"
    capture = read_text(tmp_path / "x", text)
    assert rows_of(capture) == BOTH
    assert capture.incomplete == [
        "1 rows could not be read: they were left out",
        "2 lines among the rows of a table are no rows: left out",
    ]


@pytest.mark.parametrize("before", ["", HEAD + UNITS + FIRST])
def test_an_error_that_the_tool_printed_is_said(tmp_path: Path, before: str) -> None:
    text = f"==ERROR== The driver, it said, was busy\n{before or HEAD}==ERROR== again\n"
    capture = read_text(tmp_path / "x", text)
    assert "the tool said: ==ERROR== The driver, it said, was busy" in capture.incomplete
    assert "the tool said: ==ERROR== again" in capture.incomplete
    path = tmp_path / "y"
    path.write_text("==ERROR== The driver was busy\n", encoding="utf-8")
    with pytest.raises(Damaged, match=r"no table of Nsight Compute: .*The driver was busy"):
        formats.read(Reading(path), "ncu-csv")


def test_a_quoted_cell_may_go_over_several_lines(tmp_path: Path) -> None:
    text = HEAD + UNITS + FIRST.replace("foo(int)", 'foo<"\n,"\n>(int)'.replace('"', '""')) + SECOND
    capture = read_text(tmp_path / "x", text)
    assert rows_of(capture) == [("bar", 1, 2_000), ('foo<" ," >(int)', 1, 1_000)]
    assert capture.incomplete == []
    rule = '"0","7","foo","","","","Rule","one\ntwo, with a comma\n\nshort"\n'
    time = '"0","7","foo","Duration","ns","9","",""\n"1","7","foo","Duration","ns","5","",""\n'
    capture = read_text(tmp_path / "y", LONG + rule + time)
    assert rows_of(capture) == [("foo", 2, 14)] and capture.incomplete == []


def test_a_quote_that_stays_open_swallows_no_other_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for lines, size in ((50, 64 << 10), (1, 64 << 10), (50, 60)):
        monkeypatch.setattr(tables, "MAX_CELL_LINES", lines)
        monkeypatch.setattr(tables, "MAX_STRING", size)
        cut = '"0","7","foo(int)","(256, 1, 1)","(8, 1\n'
        capture = read_text(tmp_path / "x", HEAD + UNITS + cut + SECOND + SECOND.replace("1", "2"))
        assert len(capture.kernels or []) == 3
        assert "a quoted cell has no end: its row may be wrong" in capture.incomplete
        assert "1 launches have no duration (gpu__time_duration.sum)" in capture.incomplete


def test_a_cell_that_is_too_long_for_the_parser_is_counted(tmp_path: Path) -> None:
    text = HEAD + UNITS + FIRST + "9," + "y" * 140_000 + "\n" + SECOND
    capture = read_text(tmp_path / "x", text)
    assert rows_of(capture) == BOTH
    assert capture.incomplete == ["1 lines among the rows of a table are no rows: left out"]


def test_rows_without_number_or_name_are_counted_in_both_tables(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x", HEAD + UNITS + FIRST + '"one","7","x"\n"5","7"\n')
    assert capture.incomplete == ["2 rows could not be read: they were left out"]
    capture = read_text(tmp_path / "y", LONG + '"0","7","foo","Duration","ns","9"\n"?","7","a"\n')
    assert capture.incomplete == ["1 rows could not be read: they were left out"]


# --- unknown is not zero --------------------------------------------------------------------


def test_durations_that_are_not_there_make_totals_null_and_means_of_the_others(
    tmp_path: Path,
) -> None:
    capture = read_text(tmp_path / "x", HEAD + UNITS + FIRST.replace("1,000", "n/a") + SECOND)
    bar, foo = capture.kernel_rows()
    assert (foo["calls"], foo["total_ns"], foo["mean_ns"], foo["share"]) == (1, None, None, None)
    assert foo["timed_calls"] == 0 and (bar["total_ns"], bar["share"]) == (2_000, 1.0)
    twice = FIRST + FIRST.replace('"0"', '"1"').replace("1,000", "n/a")
    [row] = read_text(tmp_path / "y", HEAD + UNITS + twice).kernel_rows()
    assert (row["calls"], row["timed_calls"], row["mean_ns"]) == (2, 1, 1_000.0)
    none = read_text(tmp_path / "z", HEAD + UNITS + FIRST.replace("1,000", ""))
    draft = report.draft(none, report.Context("derived", "x"))
    values = {metric.name: metric.value for metric in draft.metrics}
    assert values["kernel_time_ns"] is None and draft.valid is None


def test_a_duration_that_was_rounded_to_nothing_is_not_known(tmp_path: Path) -> None:
    text = HEAD + UNITS.replace("nsecond", "msecond") + FIRST.replace("1,000", "0.00")
    [row] = read_text(tmp_path / "x", text).kernel_rows()
    assert row["total_ns"] is None


def test_durations_that_were_rounded_are_said_to_be(tmp_path: Path) -> None:
    text = LONG + '"0","7","foo","Duration","us","239.01","",""\n'
    capture = read_text(tmp_path / "x", text)
    assert rows_of(capture) == [("foo", 1, 239_010)]
    assert "durations were printed rounded, to 10 ns" in capture.limitations
    text = HEAD + UNITS.replace("nsecond", "usecond") + FIRST.replace("1,000", "239.008000")
    capture = read_text(tmp_path / "y", text)
    assert rows_of(capture) == [("foo(int)", 1, 239_008)]
    assert not any("rounded" in line for line in capture.limitations)


def test_sizes_of_scaled_tables_are_whole_numbers_or_not_known(tmp_path: Path) -> None:
    names = ",".join(f'"launch__{w}_dim_{a}"' for w in ("block", "grid") for a in "xyz")
    head = f'"ID","Kernel Name","gpu__time_duration.sum",{names}\n'
    units = '"","","ns","block","block","block","Kblock","",""\n'
    row = '"0","a","5","256.000000","1.000000","1.000000","12.288000","1","1"\n'
    [made] = read_text(tmp_path / "x", head + units + row).kernel_rows()
    assert (made["block"], made["grid"]) == ([256, 1, 1], None)
    [made] = read_text(tmp_path / "x", head + units + row.replace("256.0", "256.5")).kernel_rows()
    assert made["block"] is None


# --- counted once -------------------------------------------------------------------------


def test_launches_that_are_printed_on_two_pages_or_twice_are_counted_once(tmp_path: Path) -> None:
    page = LONG + '"0","7","foo(int)","Duration","us","1.00","",""\n'
    capture = read_text(tmp_path / "x", HEAD + UNITS + FIRST + SECOND + page)
    assert rows_of(capture) == BOTH
    assert "1 launches are in the file twice: counted once" in capture.limitations
    capture = read_text(tmp_path / "y", (HEAD + UNITS + FIRST + SECOND) * 2)
    assert rows_of(capture) == BOTH
    assert "2 launches are in the file twice: counted once" in capture.limitations


def test_launches_of_the_same_number_in_two_processes_are_two(tmp_path: Path) -> None:
    other = '"0","8","bar","Duration","ns","7","",""\n'
    capture = read_text(tmp_path / "x", LONG + '"0","7","foo","Duration","ns","9","",""\n' + other)
    assert rows_of(capture) == [("foo", 1, 9), ("bar", 1, 7)]


# --- numbers --------------------------------------------------------------------------------


def test_whole_numbers_are_exact_up_to_what_64_bits_hold() -> None:
    assert tables.whole_number("1764550000000000123") == 1_764_550_000_000_000_123
    assert tables.whole_number(str(2**63 - 1)) == 2**63 - 1
    assert tables.whole_number(str(1 - 2**63)) == 1 - 2**63
    assert tables.whole_number(str(2**63)) is None and tables.whole_number("1" * 20) is None
    assert tables.integral("1,024.000") == 1024 and tables.integral("1.5") is None
    assert tables.integral("") is None and tables.integral("1e300") is None


# --- the package ncu-report -----------------------------------------------------------------

LIBRARY = """
class Metric:
    def unit(self): return "ns"
    def as_double(self): return 1500.0

class Action:
    def name(self, *base): return "gemm(int)"
    def metric_by_name(self, name): return Metric() if name == "gpu__time_duration.sum" else None

class Range:
    def num_actions(self): return 1
    def action_by_idx(self, number): return Action()

class Report:
    def num_ranges(self): return 1
    def range_by_idx(self, number): return Range()

def load_report(path): return Report()
"""


@pytest.mark.parametrize("file", ["ncu_report/__init__.py", "ncu_report.py"])
def test_a_package_that_only_this_process_finds_is_found_by_the_isolated_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    made = tmp_path / "packages" / file
    made.parent.mkdir(parents=True)
    made.write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    folder = ncu.reader_folder()
    assert folder == tmp_path / "packages"
    argv = [sys.executable, "-I", str(ncu.READER), "x.ncu-rep", str(folder)]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=True)
    capture = read_text(tmp_path / "x.csv", done.stdout.decode("ascii"))
    assert rows_of(capture) == [("gemm(int)", 1, 1_500)]
    monkeypatch.chdir(folder)
    assert ncu.reader_folder() is None  # whoever owns that folder is not asked to read reports


def test_a_package_that_is_not_there_or_is_no_module_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ncu_report").mkdir()  # a folder without any code is a namespace, and no library
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ncu.reader_folder() is None
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    assert ncu.reader_folder() is None
