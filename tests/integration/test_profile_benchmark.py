"""Profiles of benchmarks: the configuration that was measured, and what differs from it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.profiler_program import DEAF
from helpers.bench import run_here
from helpers.real_engines import engine_python
from helpers.tiny_models import TINY, shared_gguf, write_folder
from ikit_mcp.call import Settings
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.evidence.signing import generate_key
from ikit_mcp.evidence.store import Store
from ikit_mcp.process import devices
from ikit_mcp.registry import EXECUTES, MEASURES, OpError, load
from ikit_mcp.runner import Control, Runner
from ikit_ops.profilers.target import local_model

DATA = Path(__file__).parents[1] / "data" / "profiles"
SMALL: dict[str, Any] = {"prompt_len": 48, "gen_len": 64, "rounds": 2, "threads": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one benchmark of the embedded llama.cpp."""
    made = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_MADE_UP", "1")
        run_here(made, "bench", model=str(shared_gguf()), **SMALL)
    return made


@pytest.fixture(autouse=True)
def in_that_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names the home: effects of a call are worked out before it runs."""
    monkeypatch.setenv("IKIT_HOME", str(home))


def bench_id(home: Path) -> str:
    """The id of the one benchmark."""
    store = Store(home)
    [found] = [i for i in store.ids() if store.load(i).kind == "bench"]
    return found


def test_a_benchmark_of_a_listed_engine_only_measures_and_everything_else_executes(
    home: Path,
) -> None:
    effects_of = load(None).get("profile").effects_of
    assert effects_of({"bench_id": bench_id(home)}) == MEASURES
    assert effects_of({"bench_id": "abcdef"}) == EXECUTES
    assert effects_of({"bench_id": bench_id(home), "command": ["true"]}) == EXECUTES
    assert effects_of({"command": ["true"]}) == EXECUTES


def test_the_worker_of_a_benchmark_is_profiled_and_what_it_was_not_given_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("perf") is None:
        pytest.skip("perf is not here")
    monkeypatch.setenv("GGML_MADE_UP", "1")
    record = run_here(home, "profile", bench_id=bench_id(home), profiler="perf", steps=32)
    assert record.valid is True
    # perf sees the process from its start: the load is in the capture, and the summary says so.
    assert record.summary.startswith("perf, loading, warm-up and 32 decode steps: most CPU time:")
    assert record.get("provenance", "parents") == [bench_id(home)]
    assert record.get("identity", "engine", "name") == "llamacpp"
    assert record.get("identity", "workload", "gen_len") == 32
    limits = record.get("limitations")
    assert any(
        "1 engine variable of the benchmark was not passed on: GGML_MADE_UP" in x for x in limits
    )
    assert any("perf has no capture window" in line for line in limits)
    [differing] = record.get("data", "config_differences")  # the same flags, as far as they go
    assert differing["field"] == "environment GGML_MADE_UP"
    assert "flags of the profiled run" not in " ".join(record.get("coverage", "missing"))
    assert "GGML_MADE_UP" in record.get("data", "env_dropped")
    seen = [(f["object"] or "") + f["name"] for f in record.get("data", "functions")]
    assert any("ggml" in text or "llama" in text for text in seen)


def test_a_variable_that_is_kept_is_no_difference(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("perf") is None:
        pytest.skip("perf is not here")
    monkeypatch.setenv("GGML_MADE_UP", "another value")
    record = run_here(
        home, "profile", bench_id=bench_id(home)[:10], profiler="perf", steps=16,
        keep_env=["GGML_MADE_UP"], capture="all",
    )  # fmt: skip
    assert record.get("data", "config_differences") == []
    assert "GGML_MADE_UP" in record.get("data", "env_kept")
    said = "values of variables are not compared, since records hold their names alone"
    assert any(said in line and "GGML_MADE_UP" in line for line in record.get("limitations"))
    # The beginning of an id names another record one day: the record has all of it.
    request = record.get("provenance", "request")
    assert request["args"]["bench_id"] == bench_id(home)
    assert request["requested"]["bench_id"] == bench_id(home)[:10]
    assert bench_id(home) in record.get("provenance", "reproduce")


def test_what_the_profiled_run_has_and_the_benchmark_had_not_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("perf") is None:
        pytest.skip("perf is not here")
    for name in ("GGML_MADE_UP", "GGML_NEW"):
        monkeypatch.setenv(name, "1")
    record = run_here(
        home, "profile", bench_id=bench_id(home), profiler="perf", steps=700,
        keep_env=["GGML_MADE_UP", "GGML_NEW"],
    )  # fmt: skip
    rows = {
        row["field"]: (row["benchmark"], row["profile"])
        for row in record.get("data", "config_differences")
    }
    # 700 steps do not fit into the benchmark's context: that one is another.
    assert rows == {"environment GGML_NEW": ("not set", "set"), "flag n_ctx": (256, 768)}
    limits = record.get("limitations")
    assert "1 engine variable was set that the benchmark did not have: GGML_NEW" in limits
    assert any("than the benchmark's: 1 flag differs" in line for line in limits)


def test_a_device_that_the_caller_chose_is_chosen_again(tmp_path: Path) -> None:
    """llama.cpp is then told to offload nothing: with the device left to it, it is not."""
    if shutil.which("perf") is None:
        pytest.skip("perf is not here")
    home = tmp_path / "home"
    bench = run_here(home, "bench", model=str(shared_gguf()), device="cpu", **SMALL)
    record = run_here(home, "profile", bench_id=bench.evidence_id, profiler="perf", steps=64)
    assert bench.get("data", "flags", "n_gpu_layers") == 0
    assert not [r for r in record.get("data", "config_differences") if "flag" in r["field"]]


def test_flags_that_only_a_log_tells_are_missing_when_the_log_is_not_whole(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("perf") is None:
        pytest.skip("perf is not here")
    monkeypatch.setattr("ikit_ops.profilers.launch.LOG_CAP", 2_000)  # perf itself says 200
    monkeypatch.setattr("ikit_ops.profilers.launch.LOOK_SECONDS", 0.05)
    record = run_here(home, "profile", bench_id=bench_id(home), profiler="perf", steps=8)
    assert any("flags of the profiled run" in line for line in record.get("coverage", "missing"))
    assert not [r for r in record.get("data", "config_differences") if "flag" in r["field"]]


def test_with_a_signing_key_only_trusted_benchmarks_are_run_again(
    home: Path, tmp_path: Path
) -> None:
    """Unsigned, or signed by a key that nobody here trusts, is the same."""
    for folder in ("ours", "theirs"):
        (tmp_path / folder).mkdir(mode=0o700)
    ours = Path(generate_key(tmp_path / "ours")["private"])
    theirs = Path(generate_key(tmp_path / "theirs")["private"])
    asked = {"model": str(shared_gguf()), **SMALL}

    def done(folder: str, key: Path | None, operation: str, **arguments: Any) -> EvidenceRecord:
        runner = Runner(load(None), Settings(tmp_path / folder, signing_key=key))
        request = runner.check(operation, arguments)
        held = Control(devices=frozenset(devices.uuids_of("auto")))
        record = runner.here(request, held).record
        assert record is not None
        return record

    trusted = done("ours", ours, "bench", **asked)
    store = Store(tmp_path / "ours")
    assert (store.signature_state(trusted) or {})["trusted"] is True
    trace = DATA / "torch_cuda_trace.json"
    for signed in (theirs, None):
        other = done("ours", signed, "bench", **asked)
        state = store.signature_state(other)
        assert state is None if signed is None else state is not None and not state["trusted"]
        for operation, more in (("profile", {"profiler": "perf"}),
                                ("import_profile", {"path": str(trace)})):  # fmt: skip
            with pytest.raises(OpError, match="not signed by a trusted key"):
                done("ours", ours, operation, bench_id=other.evidence_id, **more)
    explained = done("ours", ours, "import_profile", path=str(trace), bench_id=trusted.evidence_id)
    assert explained.get("provenance", "parents") == [trusted.evidence_id]


def bench_record(model: str) -> EvidenceRecord:
    raw = {"provenance": {"request": {"args": {"model": model, "revision": "v1"}}}}
    return EvidenceRecord(raw, "0" * 64)


def test_a_model_of_the_hub_is_run_from_the_cache_by_its_path_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OpError, match="is not in the Hub's cache here"):
        local_model(bench_record("acme/model"))
    repository = tmp_path / "models--acme--model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("a" * 40, encoding="ascii")
    before = bench_record("acme/model")
    args = local_model(before).get("provenance", "request", "args")
    assert args == {"model": str(snapshot), "revision": None}
    assert before.get("provenance", "request", "args", "model") == "acme/model"
    here = bench_record(str(tmp_path))
    assert local_model(here) is here
    with pytest.raises(OpError, match="is not in the Hub's cache here"):
        local_model(bench_record("~nobody-of-that-name/model"))


def test_the_torch_profiler_sees_the_operators_of_a_real_script(home: Path, tmp_path: Path) -> None:
    python = engine_python("transformers", always=True)
    script = tmp_path / "work.py"
    script.write_text(
        "import sys, torch\n"
        "assert sys.argv[1:] == ['--size', '300'], sys.argv\n"
        "a = torch.ones(300, 300)\n"
        "for _ in range(20): a = torch.nn.functional.softmax(a @ a, -1)\n"
        "print('done', float(a.sum()))\n",
        encoding="utf-8",
    )
    record = run_here(
        home, "profile", command=[python, "-u", str(script), "--size", "300"], profiler="torch"
    )
    assert record.valid is True, record.summary
    operators = {row["name"]: row for row in record.get("data", "cpu_ops")}
    assert operators["aten::mm"]["calls"] == 20 and operators["aten::_softmax"]["calls"] == 20
    assert record.get("data", "kernels") == []
    assert record.folder is not None
    assert b"done" in (record.folder / "target.log").read_bytes()
    assert (record.folder / "report.json").stat().st_size > 1_000


def test_a_script_in_which_torch_does_nothing_is_not_a_whole_capture(
    home: Path, tmp_path: Path
) -> None:
    python = engine_python("transformers", always=True)
    script = tmp_path / "idle.py"
    script.write_text("print(sum(range(10**6)))\n", encoding="utf-8")
    record = run_here(home, "profile", command=[python, str(script)], profiler="torch")
    assert record.valid is None
    assert "the capture holds no sample and no operator" in record.get("coverage", "missing")
    assert record.summary.startswith("INCOMPLETE (the capture holds no sample and no operator)")


def test_a_python_without_torch_is_told_apart_from_a_script_that_fails(
    home: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "python3"  # this interpreter, without its packages
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    (tmp_path / "x.py").write_text("print(1)", encoding="utf-8")
    with pytest.raises(OpError, match="has no torch"):
        run_here(home, "profile", command=[str(bare), str(tmp_path / "x.py")], profiler="torch")


STUB = """
import json, os
class _Activity:
    CPU, CUDA = "cpu", "cuda"
class _Profile:
    def __init__(self, activities): self.activities = activities
    def start(self): print("opened", self.activities, flush=True)
    def stop(self): print("closed", flush=True)
    def export_chrome_trace(self, path):
        event = {"ph": "X", "cat": "kernel", "name": "stub", "ts": 1, "dur": 2}
        open(path, "w").write(json.dumps({"traceEvents": [event]}))
class profiler:
    ProfilerActivity, profile = _Activity, _Profile
    supported_activities = staticmethod(lambda: {"cpu", "cuda"})
class cuda:
    class profiler:
        start = stop = staticmethod(lambda: None)
"""


def test_a_target_that_ignores_the_interrupt_takes_a_profiler_inside_of_it_along(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "deaf.py").write_text(DEAF, encoding="utf-8")
    with pytest.raises(OpError, match="lives inside of it") as error:
        run_here(
            home, "profile", command=[sys.executable, str(tmp_path / "deaf.py")],
            profiler="torch", keep_env=["PYTHONPATH"], timeout=4, grace=1,
        )  # fmt: skip
    assert (
        "started" in error.value.what and "a profiler that lives beside it" in error.value.next_step
    )


@pytest.mark.parametrize("ending", ["return", "sys.exit(4)", "raise ValueError", "os._exit(5)"])
def test_a_trace_is_written_however_the_script_ends(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    # A stand-in for torch: the real one takes seconds to import, four times over.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "work.py").write_text(
        f"import os, sys\ndef main():\n    print('works')\n    {ending}\nmain()\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "work"] if ending == "return" else [
        sys.executable, str(tmp_path / "work.py")
    ]  # fmt: skip
    record = run_here(
        home, "profile", command=command, profiler="torch", keep_env=["PYTHONPATH"],
        cwd=str(tmp_path),
    )  # fmt: skip
    assert record.get("data", "kernels", 0, "name") == "stub"
    status = {"return": 0, "sys.exit(4)": 4, "raise ValueError": 1, "os._exit(5)": 5}[ending]
    assert record.get("data", "capture", "exit_status") == status
    assert record.valid is (True if status == 0 else None)
    assert os.environ["PYTHONPATH"] == str(tmp_path)
    assert json.dumps(record.raw).count("opened") == 0


def test_the_capture_of_the_transformers_engine_opens_after_warm_up(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = engine_python("transformers")
    monkeypatch.setenv("IKIT_PYTHONS", python)
    model = write_folder(tmp_path / "model")
    made = run_here(
        tmp_path / "home", "bench", model=str(model), engine="transformers", python=python,
        prompt_len=16, gen_len=16, rounds=2, threads=1, engine_args=["compile=false"],
    )  # fmt: skip
    monkeypatch.setenv("IKIT_HOME", str(tmp_path / "home"))
    record = run_here(
        tmp_path / "home", "profile", bench_id=made.evidence_id, profiler="torch", steps=8
    )
    assert record.valid is True, record.summary
    assert record.get("data", "capture", "window") is True
    operators = {row["name"]: row["calls"] for row in record.get("data", "cpu_ops")}
    # 8 steps of one round, and neither the warm-up nor a reference: 7 products a layer, lm_head.
    products = sum(
        calls for name, calls in operators.items() if name in ("aten::mm", "aten::addmm")
    )
    assert products == 8 * (7 * TINY.layers + 1)
    assert record.get("identity", "engine", "name") == "transformers"
