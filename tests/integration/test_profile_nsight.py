"""NVIDIA's real profilers, on a machine without a GPU: ``make profilers`` fetches and runs them.

Nsight Systems profiles a program on the CPU, which is enough to see what it stores and how it
ends; Nsight Compute reads the real reports that its package ships.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes.process_trees import (
    CALLER,
    SLEEPERS,
    age,
    caller_environment,
    new_tag,
    sleepers,
    tagged,
    tree_command,
    until,
)
from fakes.profiler_program import DEAF
from helpers import real_profilers
from helpers.bench import run_here
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.process.procfs import stat_of
from ikit_mcp.process.run import Result, run
from ikit_mcp.registry import OpError
from ikit_ops.profilers import formats
from ikit_ops.profilers.limits import Reading
from ikit_ops.profilers.ncu import READER

DATA = Path(__file__).parents[1] / "data" / "profiles"
EXPORTS = ("nsys_2026.1_gpu_kernels.sqlite", "nsys_2026.2_h100_kernels.sqlite")
PLANTED, FOREIGN = "made-up-value-4711-abcdef", "made-up-foreign-0815-fedcba"


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real programs, first on PATH."""
    if "IKIT_TEST_PROFILERS" not in os.environ:
        pytest.skip("519 MB to fetch: make profilers runs it")
    folder = real_profilers.programs()
    if folder is None:
        pytest.skip("NVIDIA's profilers cannot be had here (make profilers says why)")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ACME_API_TOKEN", PLANTED)
    return folder


@pytest.fixture
def bystander() -> Any:
    """A process of the same user that has nothing to do with us, and a token of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "OTHER_API_TOKEN": FOREIGN},
    )
    yield process
    process.communicate(b"\n")


def profile(home: Path, script: Path, **arguments: Any) -> EvidenceRecord:
    return run_here(
        home, "profile", command=[sys.executable, str(script)], profiler="nsys", **arguments
    )


def everything(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file())


def nsys_processes() -> list[str]:
    names = [p.info["name"] or "" for p in psutil.process_iter(["name"])]
    return [name for name in names if name.startswith(("nsys", "QdstrmImporter"))]


def test_the_real_report_holds_no_secret_of_the_server_the_target_or_a_bystander(
    tmp_path: Path, bystander: Any
) -> None:
    script = tmp_path / "leak.py"
    script.write_text(f"print('{PLANTED}')\nsum(range(10**6))\n", encoding="utf-8")
    record = profile(tmp_path / "home", script)
    assert record.folder is not None
    assert (record.folder / "report.nsys-rep").stat().st_size > 50_000
    stored = everything(tmp_path / "home")
    assert b"[redacted: ACME_API_TOKEN]" in stored
    for value in (PLANTED, FOREIGN):
        assert value.encode() not in stored
    assert record.valid is None and "the capture holds no GPU kernel" in record.summary
    names = {row["name"] for row in record.get("data", "host_api")}
    assert "os:read" in names
    assert record.get("data", "capture", "version").startswith("20")
    assert not any("other processes" in line for line in record.get("limitations"))


def test_without_a_room_of_its_own_it_stores_our_environment_and_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process's own variables are set after its start, and not in its block of them.
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ}
    ) as other:
        monkeypatch.setattr("ikit_ops.profilers.nsys.namespace", lambda call: ())
        script = tmp_path / "harmless.py"
        script.write_text("print(1)", encoding="utf-8")
        with pytest.raises(OpError, match="holds the value of ACME_API_TOKEN"):
            profile(tmp_path / "home", script)
        other.communicate(b"\n")
    assert [p for p in (tmp_path / "home").rglob("*") if p.is_file()] == []


def test_the_real_one_writes_its_report_when_time_runs_out_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    script = tmp_path / "endless.py"
    script.write_text("while True: sum(range(999))", encoding="utf-8")
    record = profile(tmp_path / "home", script, timeout=4, grace=30)
    assert record.valid is None and record.get("data", "capture", "timed_out") is True
    assert "report.nsys-rep" in {a["name"] for a in record.get("artifacts")}
    assert nsys_processes() == []
    alive = [
        p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())
    ]
    assert alive == []


def test_the_real_one_writes_its_report_although_its_target_ignores_the_interrupt(
    tmp_path: Path,
) -> None:
    script = tmp_path / "deaf.py"
    script.write_text(DEAF, encoding="utf-8")
    record = profile(tmp_path / "home", script, timeout=6, grace=20)
    assert record.valid is None and "report.nsys-rep" in {
        a["name"] for a in record.get("artifacts")
    }
    problems = record.get("data", "capture", "problems")
    assert "processes of the target ignored the interrupt, and were killed" in problems
    alive = [
        p for p in psutil.process_iter(["cmdline"]) if str(script) in (p.info["cmdline"] or ())
    ]
    assert nsys_processes() == [] and alive == []


def test_a_stored_report_can_be_imported_again(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text("sum(range(10**5))", encoding="utf-8")
    record = profile(tmp_path / "home", script)
    assert record.folder is not None
    again = run_here(
        tmp_path / "home", "import_profile", path=str(record.folder / "report.nsys-rep")
    )
    assert again.get("data", "host_api") == record.get("data", "host_api")


@pytest.mark.parametrize("name", EXPORTS)
def test_nsys_stats_and_the_sqlite_of_the_same_capture_have_identical_totals(
    tmp_path: Path, programs: Path, name: str
) -> None:
    export = tmp_path / name  # the tool writes beside its input
    export.write_bytes((DATA / name).read_bytes())
    report = "gpukernsum" if "bookworm" in str(programs) else "cuda_gpu_kern_gb_sum"
    done = subprocess.run(
        [programs / "nsys", "stats", "--report", report, "--format", "csv", export],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    (tmp_path / "stats.csv").write_bytes(done.stdout)
    by_tool = formats.read(Reading(tmp_path / "stats.csv"), "nsys-stats")
    ours = formats.read(Reading(DATA / name), "nsys-sqlite")
    told = {
        (k.key.name, k.key.grid, k.key.block): (
            k.tally.calls, k.tally.total_ns, k.tally.min_ns, k.tally.max_ns,
        )
        for k in by_tool.kernels or []
    }  # fmt: skip
    found = {
        (k.key.name, k.key.grid, k.key.block): (
            k.tally.calls, k.tally.total_ns, k.tally.min_ns, k.tally.max_ns,
        )
        for k in ours.kernels or []
    }  # fmt: skip
    assert sum(total for _, total, _, _ in told.values()) == ours.kernel_ns
    # The tool prints names that one of ours may hold more of: compare what does not depend on it.
    assert sorted(told.values()) == sorted(found.values())


def test_every_shipped_report_is_read_the_same_by_the_program_and_by_the_package(
    tmp_path: Path,
) -> None:
    reports = real_profilers.shipped_reports()
    assert len(reports) >= 2
    package = real_profilers.ncu_report()
    for report in reports:
        record = run_here(tmp_path / "home", "import_profile", path=str(report))
        [row, *_] = record.get("data", "kernels")
        assert row["calls"] >= 1 and row["total_ns"] > 0 and row["grid"] is not None
        assert 0 < row["metrics"]["memory_pct"] <= 100
        assert record.valid is True
        if package is None:
            continue
        done = subprocess.run(
            [sys.executable, str(READER), str(report)], capture_output=True, timeout=120,
            check=True, env={**os.environ, "PYTHONPATH": str(package)},
        )  # fmt: skip
        (tmp_path / "package.csv").write_bytes(done.stdout)
        other = formats.read(Reading(tmp_path / "package.csv"), "ncu-csv").kernel_rows()
        for key in ("calls", "total_ns", "grid", "block"):
            assert other[0][key] == row[key]
        for name, value in row["metrics"].items():
            assert other[0]["metrics"][name] == pytest.approx(value, rel=0.01)


ENDINGS = ("timeout", "cancel", "leader", "supervisor", "caller TERM", "caller KILL")


def nsys_over_a_tree(folder: Path, tag: str) -> list[str]:
    """The real nsys around the tree that hides its processes in every way."""
    options = ["--trace=none", "--sample=none", "--cpuctxsw=none", "--output", str(folder / "r")]
    return ["nsys", "profile", *options, *tree_command(tag, "all")]


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_of_the_real_one_or_of_its_target_is_left_however_a_run_ends(
    tmp_path: Path, ending: str
) -> None:
    """Its agent sometimes never starts the target; then it is ended, and tried once more."""
    before = len(nsys_processes())
    stood = False
    for attempt in range(4):
        tag = new_tag()
        command = nsys_over_a_tree(tmp_path / str(attempt), tag)
        (tmp_path / str(attempt)).mkdir()
        if ending.startswith("caller"):
            stood = end_the_caller(command, tag, signal.Signals[f"SIG{ending[7:]}"])
        else:
            stood = end_the_run(command, tag, ending)
        assert until(lambda tag=tag: not tagged(tag))  # type: ignore[misc]
        assert until(lambda: len(nsys_processes()) <= before)
        if stood:
            break
    assert stood


def stands(tag: str) -> bool:
    """Whether the whole tree comes up."""
    return until(lambda: len(sleepers(tag)) >= SLEEPERS["all"], 25)


def end_the_caller(command: list[str], tag: str, number: signal.Signals) -> bool:
    """Let a process run the command, and end that process; whether the tree had stood."""
    with subprocess.Popen(
        [sys.executable, "-c", CALLER, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=caller_environment(),
    ) as caller:  # fmt: skip
        stood = stands(tag)
        caller.send_signal(number)
        assert caller.wait(20) == -number
    return stood


def end_the_run(command: list[str], tag: str, ending: str) -> bool:
    """Run the command here and end it; whether the tree had stood."""
    cancel, leaders, done = threading.Event(), list[int](), list[Result]()
    options: dict[str, Any] = {"env": dict(os.environ), "cancel": cancel, "grace": 5}
    options |= {"on_start": leaders.append, "timeout": 20 if ending == "timeout" else 120}
    thread = threading.Thread(target=lambda: done.append(run(command, **options)))
    thread.start()
    stood = stands(tag)
    if not stood or ending == "cancel":
        cancel.set()
    elif ending == "leader":
        os.kill(leaders[0], signal.SIGKILL)
    elif ending == "supervisor":
        assert until(lambda: all(age(pid) >= 1 for pid in sleepers(tag)))
        leader = stat_of(leaders[0])
        assert leader is not None
        os.kill(leader.ppid, signal.SIGKILL)
    thread.join(60)
    assert done and done[0].survivors == ()
    return stood and done[0].timed_out == (ending == "timeout")
