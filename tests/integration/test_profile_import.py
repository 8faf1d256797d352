"""Importing captures through the server and the command line, and reports by their tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.profiler_program import install, seen
from fakes.profilers import NCU_RAW, rocpd_file
from helpers import json_schema
from helpers.bench import run_here
from helpers.evidence import save
from helpers.stdio import Wire
from ikit_mcp.call import Call, Device, Settings
from ikit_mcp.evidence import record as records
from ikit_mcp.registry import DERIVES, EXECUTES, OpError, load
from ikit_ops.profilers import find, profilers
from ikit_ops.profilers.adapter import Job

DATA = Path(__file__).parents[1] / "data" / "profiles"
SAMPLES = sorted(p for p in DATA.iterdir() if p.suffix != ".md")
GPU = Device("cuda:0", "A GPU", "GPU-1", 2**36, "1.0")
AMD = Device("rocm:0", "Another GPU", "GPU-2", 2**36, "1.0")
CPU = Device("cpu", "A CPU", "0" * 16, 2**34, None)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.name)
def test_every_sample_becomes_a_record_of_the_published_shape(path: Path, tmp_path: Path) -> None:
    record = run_here(tmp_path, "import_profile", path=str(path))
    assert json_schema.errors(records.json_schema(), record.raw) == []
    assert (record.kind, record.get("claim_class")) == ("profile", "derived")
    data = record.get("data")
    source = data["capture"]["source"]
    assert (source["name"], source["bytes"]) == (path.name, path.stat().st_size)
    rows = data["kernels"] or []
    for row in rows:
        assert set(row) >= {
            "name", "short_name", "category", "calls", "total_ns", "mean_ns", "min_ns", "max_ns",
            "share", "grid", "block",
        }  # fmt: skip
        assert row["mean_ns"] == pytest.approx(row["total_ns"] / row["calls"])
    if rows:
        whole = sum(row["total_ns"] for row in rows)
        assert {m["name"]: m["value"] for m in record.get("metrics")}["kernel_time_ns"] == whole
        assert sum(c["total_ns"] for c in data["categories"]) == whole
    assert record.get("provenance", "request", "requested", "format") == "auto"
    again = run_here(
        tmp_path, "import_profile", path=str(path),
        format=record.get("provenance", "request", "args", "format"),
    )  # fmt: skip
    assert again.get("data", "kernels") == data["kernels"]


def test_over_the_server_the_reply_is_the_top_of_the_table_and_the_next_page(
    tmp_path: Path,
) -> None:
    with Wire(tmp_path / "home") as wire:
        wire.initialize()
        reply = wire.structured(
            "import_profile", path=str(DATA / "nsys_2026.2_h100_kernels.sqlite")
        )
        assert reply["status"] == "done" and reply["kind"] == "profile" and reply["valid"] is True
        assert len(json.dumps(reply)) < 8_000
        top = reply["data"]["top_kernels"]
        assert len(top) == 10 and "kernels" not in reply["data"]
        assert top[0]["category"] == "gemm" and top[0]["total_ns"] == 2_422_441
        assert any("no speed claim" in line for line in reply["warnings"])
        [following] = [n for n in reply["next"] if n["tool"] == "inspect_evidence"]
        page = wire.structured("inspect_evidence", **following["arguments"])
        assert page["total"] == 44 and page["items"][0]["total_ns"] <= top[-1]["total_ns"]
        bad = wire.call("import_profile", path=str(tmp_path))
        assert bad["isError"] and "is a folder" in bad["content"][0]["text"]


def test_on_the_command_line_the_record_is_printed_and_the_verdict_is_the_status(
    tmp_path: Path,
) -> None:
    def run(name: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "ikit_mcp.cli", "profile-import", "--json", "--check",
             str(DATA / name)],
            env={**os.environ, "IKIT_HOME": str(tmp_path)}, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout)

    status, record = run("rocprofv3_kernel_stats.csv")
    assert status == 0 and record["data"]["kernels"][0]["calls"] == 1024
    status, record = run("perf_stat_paranoid.json")
    assert status == 3 and record["valid"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a command or a bench_id"),
        (["--bench-id", "../../etc/passwd"], "no evidence id"),
        (["--bench-id", "abcdef", "--", "true"], "give either a command or a bench_id"),
        (["--", "prog", "--api-key", "made-up"], "the command was refused"),
    ],
)
def test_on_the_command_line_profile_takes_words_or_an_id(
    tmp_path: Path, words: list[str], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ikit_mcp.cli", "profile", *words],
        env={**os.environ, "IKIT_HOME": str(tmp_path), "IKIT_LOCK_DIR": str(tmp_path / "locks")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and message in done.stderr


def test_a_capture_of_a_benchmark_takes_its_identity_and_says_what_is_not_shown(
    tmp_path: Path,
) -> None:
    bench = save(tmp_path, kind="bench")
    record = run_here(
        tmp_path, "import_profile", path=str(DATA / "torch_cuda_trace.json"),
        bench_id=bench.evidence_id,
    )  # fmt: skip
    assert record.get("provenance", "parents") == [bench.evidence_id]
    assert record.get("identity", "model", "id") == "acme/model-0"
    assert record.get("identity", "device", "name") == "NVIDIA GeForce RTX 4060 Laptop GPU"
    assert any("nothing shows that it was" in line for line in record.get("coverage", "missing"))
    assert record.get("data", "config_differences") is None


def test_importing_derives_and_measures_nothing() -> None:
    assert load(None).get("import_profile").effects == DERIVES


# --- reports that only their tool reads --------------------------------------------------------


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_reports_are_converted_by_their_tool_into_a_fresh_file(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", capture=DATA / "nsys_2026.1_gpu_kernels.sqlite")
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"NVIDIA Tegra Profiler Report 1.\n" + b"\0" * 64)
    (tmp_path / "run.sqlite").write_bytes(b"a stale export")
    record = run_here(tmp_path / "home", "import_profile", path=str(report))
    assert record.get("data", "capture", "converted_by") == "nsys"
    assert record.get("data", "top_kernels", 0, "calls") == 200
    [started] = seen(programs, "nsys")
    argv = started["argv"]
    assert isinstance(argv, list) and argv[-1] == str(report)
    assert Path(argv[argv.index("--output") + 1]).parent != tmp_path
    assert (tmp_path / "run.sqlite").read_bytes() == b"a stale export"


def test_nsight_compute_reports_are_read_through_ncu(tmp_path: Path, programs: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(NCU_RAW.replace("{unit}", "ns"), encoding="utf-8")
    install(programs, "ncu", capture=table)
    report = tmp_path / "run.ncu-rep"
    report.write_bytes(b"NVR\0\2\0")
    record = run_here(tmp_path / "home", "import_profile", path=str(report))
    assert record.get("data", "kernels", 0, "metrics", "memory_pct") == 80.0
    argv = seen(programs, "ncu")[0]["argv"]
    assert isinstance(argv, list) and argv[argv.index("--print-units") + 1] == "base"


@pytest.mark.parametrize(
    ("magic", "hint"),
    [(b"NVIDIA Tegra Profiler Report 1.", "nsys export --type sqlite"), (b"NVR\0", "ncu --import")],
)
def test_without_the_tool_the_error_says_how_to_convert_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: bytes, hint: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(find, "FOLDERS", ())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = tmp_path / "x"
    report.write_bytes(magic)
    with pytest.raises(OpError) as error:
        run_here(tmp_path / "home", "import_profile", path=str(report))
    assert hint in error.value.next_step


def test_a_converter_that_fails_is_quoted(tmp_path: Path, programs: Path) -> None:
    (programs / "nsys").write_text("#!/bin/sh\necho 'Importation failed' >&2; exit 1\n")
    (programs / "nsys").chmod(0o755)
    report = tmp_path / "x.nsys-rep"
    report.write_bytes(b"NVIDIA Tegra Profiler Report 1.")
    with pytest.raises(OpError, match="could not be converted: Importation failed"):
        run_here(tmp_path / "home", "import_profile", path=str(report))


# --- command lines of profilers that need a device ------------------------------------------------


def call(folder: Path) -> Call:
    operation = load(None).get("profile")
    return Call(operation=operation, args={}, settings=Settings(folder), scope=EXECUTES)


def test_command_lines_have_fixed_names_and_windows_where_the_profiler_has_them(
    tmp_path: Path,
) -> None:
    job = Job(("prog", "x"), tmp_path, None, "1", (GPU,), window=True, launches=7)
    nsys, ncu = (profilers()[name].command(job) for name in ("nsys", "ncu"))
    assert nsys[nsys.index("--capture-range") + 1] == "cudaProfilerApi"
    assert nsys[nsys.index("--capture-range-end") + 1] == "stop"
    assert ncu[ncu.index("--profile-from-start") + 1] == "off"
    assert ncu[ncu.index("--launch-count") + 1] == "7"
    assert ncu[ncu.index("--graph-profiling") + 1] == "node"
    rocprof = profilers()["rocprofv3"].command(job)
    assert rocprof[rocprof.index("--output-file") + 1] == "report"
    assert rocprof[rocprof.index("--") + 1] == "/bin/sh" and rocprof[-2:] == ["prog", "x"]
    plain = profilers()["nsys"].command(Job(("prog",), tmp_path, "/opt/nsys", "1"))
    assert plain[0] == "/opt/nsys" and "--capture-range" not in plain
    named = [words[words.index(o) + 1] for words, o in ((nsys, "--output"), (ncu, "--export"))]
    assert named == [str(tmp_path / "report")] * 2  # no %q{ENV}, no %argv%


def test_what_rocprofv3_leaves_is_found_in_either_generation(tmp_path: Path) -> None:
    rocprof, here = profilers()["rocprofv3"], call(tmp_path / "home")
    job = Job(("prog",), tmp_path, None, "1", (AMD,), window=True)
    assert rocprof.collect(here, job) is None
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "report_kernel_trace.csv").write_text("x", encoding="utf-8")
    left = rocprof.collect(here, job)
    assert left is not None and left.format == "rocprofv3-csv"
    assert any("no capture window" in note for note in left.notes)
    for number in (1, 2):
        rocpd_file(tmp_path / f"report_{number}_results.db")
    left = rocprof.collect(here, job)
    assert left is not None and left.format == "rocpd" and len(left.searched) == 1


def test_what_ncu_leaves_is_bounded_and_read_through_itself(tmp_path: Path, programs: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(NCU_RAW.replace("{unit}", "ns"), encoding="utf-8")
    install(programs, "ncu", capture=table)
    job = Job(("prog",), tmp_path, None, "1", (GPU,), launches=7)
    ncu, here = profilers()["ncu"], call(tmp_path / "home")
    assert ncu.collect(here, job) is None
    (tmp_path / "report.ncu-rep").write_bytes(b"NVR\0")
    left = ncu.collect(here, job)
    assert left is not None and left.format == "ncu-csv" and left.searched == (left.path,)
    assert left.notes == ["at most 7 kernel launches were profiled"]
    assert find.look(here, ncu, [GPU, CPU]) == {
        "name": "ncu", "version": "9.8.7", "usable": True, "why": None,
    }  # fmt: skip


def test_hindrances_name_what_is_missing() -> None:
    known = profilers()
    assert known["ncu"].hindrance("1", [CPU]) == (
        "no NVIDIA GPU is visible; it can still read reports"
    )
    assert known["ncu"].hindrance("1", [GPU, CPU]) is None
    assert known["rocprofv3"].hindrance("1", [CPU]) == "no AMD GPU is visible"
    assert known["rocprofv3"].hindrance("1", [AMD, CPU]) is None
    assert known["nsys"].hindrance(None, [GPU]) == "it does not run here"
    assert known["torch"].hindrance(None, [GPU]) is not None


def test_auto_prefers_the_profiler_of_the_device() -> None:
    def first(*devices: Device) -> str:
        return next(p.name for p in profilers().values() if p.suits(devices))

    assert [first(GPU, CPU), first(AMD, CPU), first(CPU)] == ["nsys", "rocprofv3", "perf"]


def test_a_kernel_that_forbids_perf_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikit_ops.profilers.perf.perf_paranoia", lambda: 4)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert profilers()["perf"].hindrance("6.1", [CPU]) == (
        "kernel.perf_event_paranoid is 4; it must be 2 or less"
    )
