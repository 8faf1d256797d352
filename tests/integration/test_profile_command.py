"""Profiling commands: what is started, what is kept, what is refused, and what is left."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from fakes.process_trees import until
from fakes.profiler_program import DEAF, install, seen
from helpers import json_schema
from helpers.bench import run_here
from helpers.evidence import save
from helpers.stdio import Wire
from ikit_mcp.evidence import record as records
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import OpError
from ikit_ops.profilers.holders import kill_holders

DATA = Path(__file__).parents[1] / "data" / "profiles"
EXPORT = DATA / "nsys_2026.1_gpu_kernels.sqlite"
PLANTED = "made-up-value-4711-abcdef"
CLEAN = {
    "PATH", "HOME", "LANG", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TMPDIR", "PWD", "SHLVL", "_", "OLDPWD",
    "LC_CTYPE",
}  # fmt: skip


def b64(text: str) -> str:
    return base64.b64encode(b"user:" + text.encode()).decode()


BUSY = "import sys, time; print('hello'); t = time.process_time()\n" + (
    "while time.process_time() - t < 0.4: sum(range(999))"
)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of fake programs, first on PATH; and a secret that the server knows."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ACME_API_TOKEN", PLANTED)
    return folder


def profile(home: Path, *command: str, **arguments: Any) -> EvidenceRecord:
    return run_here(home, "profile", command=list(command), **arguments)


def everything(home: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file())


def left_running(word: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if word in " ".join(process.info["cmdline"] or ()):
            found.append(process.pid)
    return found


def test_the_profiler_gets_fixed_names_a_clean_environment_and_a_target_that_redirects(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", capture=EXPORT)
    record = profile(tmp_path / "home", "echo", "made-up words", profiler="nsys", cwd=str(tmp_path))
    started, exported = seen(programs, "nsys")
    argv = started["argv"]
    assert isinstance(argv, list)
    assert argv[:2] == ["profile", "--output"] and Path(argv[2]).name == "report"
    assert argv[argv.index("--cuda-graph-trace") + 1] == "node"
    assert argv[argv.index("--show-output") + 1] == "false"
    assert argv[-2:] == ["echo", "made-up words"] and argv[-7] == "/bin/sh"
    assert started["cwd"] == str(tmp_path)
    for one in (started, exported):
        environment = one["env"]
        assert isinstance(environment, dict)
        assert set(environment) <= CLEAN
        assert PLANTED not in json.dumps(one)
    home = started["env"]["HOME"]  # type: ignore[index]
    assert home != os.environ["HOME"] and not Path(home).exists()
    assert record.valid is True and record.get("data", "top_kernels", 0, "calls") == 200
    assert record.get("data", "capture", "window") is False


def test_a_record_has_the_report_the_logs_the_picture_and_the_published_shape(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", capture=EXPORT)
    record = profile(tmp_path / "home", "echo", "from the target", profiler="nsys")
    assert json_schema.errors(records.json_schema(), record.raw) == []
    names = {artifact["name"] for artifact in record.get("artifacts")}
    assert names == {"report.nsys-rep", "target.log", "timeline.svg"}
    assert record.folder is not None
    assert (record.folder / "target.log").read_text(encoding="utf-8") == "from the target\n"
    assert record.get("kind") == "profile" and record.get("claim_class") == "measured"
    assert "profiled run: no speed claim may rest on it" in record.get("gates", "warnings")
    assert record.get("data", "gpu_busy_share") == pytest.approx(0.99, abs=0.01)
    assert record.get("data", "gaps", "count") == 399
    assert list((tmp_path / "home" / "work").iterdir()) == []


def test_no_byte_of_what_is_stored_holds_a_secret_that_the_target_prints(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", capture=EXPORT)
    script = tmp_path / "leak.py"
    script.write_text(f"print('{PLANTED}', 'hf_' + 'Abcdefgh12345678ijkl')", encoding="utf-8")
    record = profile(tmp_path / "home", sys.executable, str(script), profiler="nsys")
    stored = everything(tmp_path / "home")
    assert b"[redacted: ACME_API_TOKEN]" in stored
    assert PLANTED.encode() not in stored and b"Abcdefgh12345678ijkl" not in stored
    assert PLANTED not in json.dumps(record.raw)


def test_a_report_that_holds_a_secret_fails_by_name_and_leaves_no_file(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", "leaky", EXPORT)
    (programs / "others").write_bytes(b"ACME_API_TOKEN=" + PLANTED.encode())
    with pytest.raises(
        OpError, match=r"report\.nsys-rep holds the value of ACME_API_TOKEN"
    ) as error:
        profile(tmp_path / "home", "true", profiler="nsys")
    assert PLANTED not in str(error.value)
    assert [p for p in (tmp_path / "home").rglob("*") if p.is_file()] == []


def test_an_export_that_holds_a_secret_fails_although_it_is_not_kept(
    tmp_path: Path, programs: Path
) -> None:
    poisoned = tmp_path / "poisoned.sqlite"
    poisoned.write_bytes(EXPORT.read_bytes() + PLANTED.encode())
    install(programs, "nsys", capture=poisoned)
    with pytest.raises(OpError, match=r"export\.sqlite holds the value of ACME_API_TOKEN"):
        profile(tmp_path / "home", "true", profiler="nsys")
    assert [p for p in (tmp_path / "home").rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("name", "rule"), [("HF_TOKEN", "word TOKEN"), ("ACME_API_TOKEN", "word TOKEN")]
)
def test_keeping_a_secret_is_refused_before_anything_starts(
    tmp_path: Path, programs: Path, name: str, rule: str
) -> None:
    install(programs, "nsys", capture=EXPORT)
    with pytest.raises(OpError) as error:
        profile(tmp_path / "home", "true", profiler="nsys", keep_env=[name])
    assert f"keep_env {name} looks like a secret (rule: {rule})" in error.value.what
    assert "offline" in error.value.next_step
    assert seen(programs, "nsys") == []


def test_kept_variables_are_passed_on_and_named_and_never_their_values(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "nsys", capture=EXPORT)
    monkeypatch.setenv("VLLM_USE_V1", "made-up-7")
    monkeypatch.setenv("OMP_NUM_THREADS", "31")
    record = profile(tmp_path / "home", "true", profiler="nsys", keep_env=["VLLM_USE_V1", "HOME"])
    environment = seen(programs, "nsys")[0]["env"]
    assert isinstance(environment, dict)
    assert environment["VLLM_USE_V1"] == "made-up-7" and environment["HOME"] == os.environ["HOME"]
    assert "OMP_NUM_THREADS" not in environment
    assert "VLLM_USE_V1" in record.get("provenance", "env_kept")
    assert "OMP_NUM_THREADS" in record.get("data", "env_dropped")
    assert "made-up-7" not in json.dumps(record.raw)


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--api-key", "made-up-4711"),
        ("env", "ACME_SECRET=made-up-4711", "serve"),
        ("curl", "https://me:made-up@example.org/x"),
    ],
)
def test_a_command_line_with_a_secret_is_refused_and_not_repeated(
    tmp_path: Path, programs: Path, words: tuple[str, ...]
) -> None:
    install(programs, "nsys", capture=EXPORT)
    with pytest.raises(OpError) as error:
        profile(tmp_path / "home", *words, profiler="nsys")
    assert "made-up" not in str(error.value) and seen(programs, "nsys") == []


@pytest.mark.parametrize(
    "dressed", [PLANTED, f"--key-for-it={PLANTED}", quote("a/" + PLANTED, ""), b64(PLANTED)]
)
def test_a_command_line_with_the_value_of_a_secret_is_refused_by_its_variables_name(
    tmp_path: Path, programs: Path, dressed: str
) -> None:
    install(programs, "nsys", capture=EXPORT)
    with pytest.raises(OpError, match=r"argument 1: the value of ACME_API_TOKEN") as error:
        profile(tmp_path / "home", "echo", dressed, profiler="nsys")
    assert PLANTED not in str(error.value) and seen(programs, "nsys") == []


@pytest.mark.parametrize("name", ["engine_args", "command"])
def test_a_benchmark_whose_words_hold_the_value_of_a_secret_is_refused(
    tmp_path: Path, programs: Path, name: str
) -> None:
    arguments: dict[str, Any] = {name: ["x", f"some_name={PLANTED}"], "model": "acme/model"}
    with pytest.raises(OpError, match=rf"{name} was refused \(argument 1: the value of ACME_"):
        run_here(tmp_path / "home", "bench", **arguments)


def test_time_that_runs_out_gives_a_report_of_what_was_before(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", "slow", EXPORT)
    record = profile(tmp_path / "home", "sleep", "98765.4", profiler="nsys", timeout=1.5, grace=20)
    assert record.valid is None
    assert record.summary.startswith("INCOMPLETE (the run was ended after 1.5 s, the timeout")
    assert record.get("data", "capture", "timed_out") is True
    assert left_running("98765.4") == []


def test_a_profiler_that_does_not_end_is_killed_with_all_of_its_tree(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", "deaf", EXPORT)
    with pytest.raises(OpError, match="left no report: it was ended after 1 s"):
        profile(tmp_path / "home", "sleep", "98765.3", profiler="nsys", timeout=1, grace=1)
    assert left_running("98765.3") == []


def test_a_target_that_ignores_the_interrupt_is_killed_and_its_profiler_is_not(
    tmp_path: Path, programs: Path
) -> None:
    """A fake that waits for its target, whatever comes: as perf and Nsight Systems do."""
    install(programs, "nsys", "ok", EXPORT)
    script = tmp_path / "deaf.py"
    script.write_text(DEAF, encoding="utf-8")
    record = profile(
        tmp_path / "home", sys.executable, str(script), profiler="nsys", timeout=3, grace=8
    )
    assert record.valid is None and record.get("data", "top_kernels")
    problems = record.get("data", "capture", "problems")
    assert problems == [
        "the run was ended after 3 s, the timeout: the report covers what was before",
        "processes of the target ignored the interrupt, and were killed",
    ]
    assert left_running(str(script)) == []


def test_only_who_writes_to_the_log_and_what_is_below_it_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "target.log"
    sleep = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    below = f"import os, subprocess; p = subprocess.Popen({sleep!r}, stdout=subprocess.DEVNULL)\n"
    below += "print(p.pid, flush=True); p.wait()"
    with log.open("wb") as file, (tmp_path / "other").open("wb") as other:
        holder = subprocess.Popen([sys.executable, "-c", below], stdout=file)
        beside = subprocess.Popen(sleep, stdout=other)
        try:
            assert until(lambda: log.read_bytes().endswith(b"\n"))
            child = psutil.Process(int(log.read_bytes()))
            assert kill_holders(log) == 2
            assert holder.wait(10) == -9
            assert until(lambda: not child.is_running() or child.status() == "zombie")
            assert beside.poll() is None and kill_holders(log) == 0
        finally:
            beside.kill()
            beside.wait()
    assert kill_holders(tmp_path / "no such log") == 0


def test_a_run_without_a_report_says_what_was_said_last(tmp_path: Path, programs: Path) -> None:
    install(programs, "nsys", "silent", EXPORT)
    with pytest.raises(OpError) as error:
        profile(tmp_path / "home", "echo", "last words of the target", profiler="nsys")
    assert "left no report: it ended with status 1" in error.value.what
    assert "last words of the target" in error.value.what
    assert "made-up complaint of a profiler" in error.value.what


def test_a_profiler_that_never_started_its_target_is_tried_once_more(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", "late", EXPORT)
    record = profile(tmp_path / "home", "echo", "once", profiler="nsys")
    assert record.valid is True and len(seen(programs, "nsys")) == 3
    assert record.folder is not None
    assert (record.folder / "target.log").read_text(encoding="utf-8") == "once\n"


def test_a_target_that_fails_makes_the_capture_incomplete(tmp_path: Path, programs: Path) -> None:
    install(programs, "nsys", capture=EXPORT)
    record = profile(tmp_path / "home", "sh", "-c", "exit 3", profiler="nsys")
    assert record.valid is None and "the run ended with status 3" in record.summary


def test_a_log_that_floods_the_disk_is_cut_while_it_grows(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ikit_ops.profilers.launch.LOG_CAP", 100_000)
    monkeypatch.setattr("ikit_ops.profilers.launch.LOOK_SECONDS", 0.05)
    install(programs, "nsys", capture=EXPORT)
    flood = "yes | head -c 3000000; sleep 0.5; echo; echo the end"
    record = profile(tmp_path / "home", "sh", "-c", flood, profiler="nsys")
    assert any("log grew too long" in line for line in record.get("limitations"))
    assert record.folder is not None
    log = (record.folder / "target.log").read_bytes()
    assert log.endswith(b"the end\n") and len(log) < 600_000
    assert log.startswith(b"[... what was before is left out ...]\n")


def test_a_secret_that_the_cut_of_a_long_log_goes_through_is_left_out_whole(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs, "nsys", capture=EXPORT)
    monkeypatch.setattr("ikit_ops.profilers.launch.KEPT_LOG", 400)
    (tmp_path / "the key").write_text(PLANTED, encoding="utf-8")
    for after in range(400 - len(PLANTED), 402, 4):
        script = (
            f"head -c 9000 /dev/zero | tr '\\0' a; cat 'the key'; echo; yes|head -c {after - 1}"
        )
        record = profile(tmp_path / "home", "sh", "-c", script, profiler="nsys", cwd=str(tmp_path))
        assert record.folder is not None
        log = (record.folder / "target.log").read_text(encoding="utf-8")
        assert not any(PLANTED[n : n + 8] in log for n in range(len(PLANTED) - 7))
        assert log.count("y\n") >= (after - 2) // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a command or a bench_id"),
        ({"command": ["true"], "bench_id": "abcdef"}, "either a command or a bench_id"),
        ({"command": ["true"], "cwd": "/no/such/folder"}, "is no folder"),
        ({"command": ["true"], "cwd": "~nobody-of-that-name"}, "there is no such user"),
        ({"command": ["/no/such/program"]}, "no such program"),
        ({"command": ["no-such-program", "x"]}, "no such program"),
        ({"command": ["true"], "profiler": "nsys"}, "nsys cannot be used here: not on PATH"),
        ({"command": ["true"], "device": "cuda:77"}, "is not here"),
        ({"command": ["true"], "profiler": "torch"}, "is not a Python script"),
        ({"command": ["python", "-c", "1"], "profiler": "torch"}, "needs a script"),
        ({"bench_id": "../../etc/passwd"}, "no evidence id"),
        ({"bench_id": "abcdef123456"}, "no evidence record"),
    ],
)
def test_what_cannot_be_profiled_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("IKIT_HOME", str(tmp_path / "home"))
    with pytest.raises(OpError, match=message):
        run_here(tmp_path / "home", "profile", **arguments)


def test_a_chosen_device_is_the_only_one_that_the_target_sees(
    tmp_path: Path, programs: Path
) -> None:
    install(programs, "nsys", capture=EXPORT)
    record = profile(tmp_path / "home", "true", profiler="nsys", device="cpu")
    environment = seen(programs, "nsys")[0]["env"]
    assert isinstance(environment, dict)
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["ROCR_VISIBLE_DEVICES"] == ""
    assert record.get("identity", "device", "uuid") is not None


def test_only_benchmarks_are_run_again(tmp_path: Path) -> None:
    other = save(tmp_path / "home", kind="roofline")
    with pytest.raises(OpError, match="not a bench record"):
        run_here(tmp_path / "home", "profile", bench_id=other.evidence_id)


# --- the real thing ---------------------------------------------------------------------------


def perf_or_skip() -> None:
    try:
        done = subprocess.run(
            ["perf", "record", "-o", "/dev/null", "true"], capture_output=True, timeout=30
        )
    except FileNotFoundError:
        pytest.skip("perf is not here")
    if done.returncode:
        pytest.skip("perf may not profile here")


def test_the_real_perf_finds_the_function_that_burns_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    perf_or_skip()
    monkeypatch.setenv("ACME_API_TOKEN", PLANTED)
    script = tmp_path / "busy.py"
    script.write_text(BUSY + f"\nprint('{PLANTED}')\n", encoding="utf-8")
    record = profile(tmp_path / "home", sys.executable, str(script))
    assert record.get("provenance", "request", "args", "profiler") == "perf"
    assert record.get("provenance", "request", "requested") == {"profiler": "auto"}
    assert record.valid is True and record.summary.startswith("perf: most CPU time: ")
    functions = record.get("data", "functions")
    assert sum(f["share"] for f in functions) == pytest.approx(1, abs=0.02)
    assert record.get("data", "capture", "samples") > 50
    assert record.get("data", "kernels") is None
    stored = everything(tmp_path / "home")
    assert PLANTED.encode() not in stored and b"hello" in stored


def test_over_the_server_no_byte_that_leaves_holds_a_secret(tmp_path: Path) -> None:
    perf_or_skip()
    script = tmp_path / "leak.py"
    script.write_text(BUSY + f"\nprint('{PLANTED}')\n", encoding="utf-8")
    extra = {"ACME_API_TOKEN": PLANTED, "IKIT_LOCK_DIR": str(tmp_path / "locks")}
    with Wire(tmp_path / "home", env=extra) as wire:
        wire.initialize()
        done = wire.structured(
            "profile", command=[sys.executable, str(script)], profiler="perf", wait_seconds=60
        )
        assert done["status"] == "done" and done["data"]["top_functions"]
        log = wire.ask("resources/read", {"uri": f"{done['uri']}/target.log"})()
        assert "[redacted: ACME_API_TOKEN]" in json.dumps(log)
        refused = wire.call("profile", command=["true"], keep_env=["ACME_API_TOKEN"])
        assert refused["isError"]
    assert PLANTED not in json.dumps(wire.frames) and PLANTED not in wire.stderr()
    assert PLANTED.encode() not in everything(tmp_path / "home")


def test_the_real_perf_writes_its_report_when_time_runs_out(tmp_path: Path) -> None:
    perf_or_skip()
    script = tmp_path / "endless.py"
    script.write_text("while True: sum(range(999))", encoding="utf-8")
    record = profile(
        tmp_path / "home", sys.executable, str(script), profiler="perf", timeout=3, grace=20
    )
    assert record.valid is None and record.get("data", "capture", "timed_out") is True
    assert record.get("data", "capture", "samples") > 50
    assert left_running(str(script)) == []
