"""What the programs of llama.cpp say, on machines that are not this one: GPUs, other releases."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import CPU, GPU, healthy, judged, plan, rounds
from helpers.tiny_models import shared_gguf
from ikit_mcp.call import Device
from ikit_mcp.registry import OpError
from ikit_ops.engines import adapter_named
from ikit_ops.engines.adapter import WORKERS, Found
from ikit_ops.engines.gates import Seen
from ikit_ops.engines.llamacpp import option_values, version_in
from ikit_ops.engines.result import WorkerResult

sys.path.insert(0, str(WORKERS))
import ikit_harness as harness
import llamacpp_worker as worker

ADAPTER = adapter_named("llamacpp")
SERVER, TOOL = Found(program="/opt/llama-server"), Found(program="/opt/llama-bench")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version: 11549 (abcdef0)\nbuilt with cc (Debian 12.2.0-14) 12.2.0", "11549 (abcdef0)"),
        ("version: 0 (unknown)\nbuilt with cc", None),
        ("version: 11549 (unknown)", "11549"),
        ("version: 1 (abc-dirty)", "1 (abc-dirty)"),
        ("version: 0.6.0-dev (build 0, commit unknown)\nbuilt with GNU 12.2.0", "0.6.0-dev"),
        ("version: 0.6.0 (build 11600, commit abcdef0)", "0.6.0 (build 11600, commit abcdef0)"),
        ("version: 0.6.0 (build 11600, commit unknown)", "0.6.0 (build 11600)"),
        ("ggml_cuda_init: found 1 CUDA device\nversion: 5 (abc1234)", "5 (abc1234)"),
        ("version unknown", None),
        ("", None),
    ],
)
def test_a_version_is_what_the_build_knows_of_it(text: str, version: str | None) -> None:
    assert version_in(text) == version


def read(lines: list[str], flags: dict[str, Any], device: Device = GPU, *args: str) -> WorkerResult:
    """A result completed from a log."""
    result = WorkerResult(rounds=rounds(), flags=flags)
    ADAPTER.read(result, lines, plan(device, engine_args=args))
    return result


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ("resolve_fused_ops: Flash Attention enabled", True),
        ("resolve_fused_ops: Flash Attention not supported, set to disabled", False),
        ("llama_context: Flash Attention was auto, set to enabled", True),
        ("llama_context: flash_attn            = disabled", False),
        ("llama_context: flash_attn            = auto", None),
    ],
)
def test_every_line_about_flash_attention_is_understood(line: str, used: bool | None) -> None:
    assert (read([line], {}).flags or {}).get("flash_attn") is used


def test_the_log_of_llama_bench_answers_what_its_json_only_asks() -> None:
    flags = {
        "gpu_info": "NVIDIA X", "backends": "CUDA", "n_gpu_layers": -1, "flash_attn": -1,
        "type_k": "f16", "type_v": "q8_0", "model_type": "qwen2 1.5B Q4_K - Medium",
        "build_number": 0, "build_commit": "unknown", "n_batch": 2048,
    }  # fmt: skip
    lines = [
        "load_tensors: offloaded 20/33 layers to GPU",
        "llama_context: n_batch               = 80",
        "resolve_fused_ops: Flash Attention enabled",
    ]
    result = read(lines, flags)
    assert result.flags == {
        "gpu_info": "NVIDIA X", "backends": "CUDA", "n_gpu_layers": -1, "flash_attn": True,
        "cache_type_k": "f16", "cache_type_v": "q8_0", "model_type": "qwen2 1.5B Q4_K - Medium",
        "model_ftype": "Q4_K - Medium", "n_batch": 2048, "offloaded_layers": 20, "layers": 33,
    }  # fmt: skip
    seen = replace(healthy("llamacpp", GPU), result=result)
    found = {(c.name, c.state) for c in judged("llamacpp", seen) if c.state != "ok"}
    assert ("offload", "violation") in found


def seen_with(device: Device, lines: list[str], *args: str, **changes: Any) -> Seen:
    """A run of a llama-server with that log and those arguments."""
    seen = healthy("llamacpp", device)
    planned = plan(device, engine_args=args, **changes)
    ADAPTER.read(seen.result, lines, planned)
    return replace(seen, plan=planned, log=lines)


def findings(seen: Seen) -> set[tuple[str, str]]:
    return {(c.name, c.state) for c in judged("llamacpp", seen) if c.state != "ok"}


CUDA_CACHE = "0.00.1 I llama_kv_cache:      CUDA0 KV buffer size =    64.00 MiB"
CPU_CACHE = "0.00.1 I llama_kv_cache:        CPU KV buffer size =    64.00 MiB"


def test_a_cache_in_the_cpus_memory_beside_layers_on_a_gpu_is_a_violation() -> None:
    assert findings(seen_with(GPU, [CUDA_CACHE])) == set()
    for lines in ([CPU_CACHE], [CUDA_CACHE, CPU_CACHE]):
        assert findings(seen_with(GPU, lines)) == {("offload", "violation")}
    assert findings(seen_with(CPU, [CPU_CACHE])) == set()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--cpu-moe", {("offload", "violation")}),
        ("-ncmoe 4", {("offload", "violation")}),
        ("--n-cpu-moe 0", set()),
        ("-ot exps=CPU", {("offload", "warning")}),
    ],
)
def test_what_a_server_was_told_to_keep_on_the_cpu_counts_as_kept(
    option: str, expected: set[tuple[str, str]]
) -> None:
    assert findings(seen_with(GPU, [CUDA_CACHE], option)) == expected


IGNORED = "warning: no usable GPU found, --gpu-layers option will be ignored"
NO_DEVICE = "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"


def test_layers_are_missed_on_a_gpu_only_where_they_were_asked_for() -> None:
    assert findings(seen_with(CPU, [IGNORED], "-ngl 0")) == set()
    assert findings(seen_with(CPU, [IGNORED], "-ngl auto")) == set()
    for asked in ("-ngl 99", "--gpu-layers all", "-ngl -2"):
        assert findings(seen_with(CPU, [IGNORED], asked)) == {("gpu_found", "violation")}


def test_a_gpu_that_is_not_used_is_no_fault_where_the_cpu_was_asked_for() -> None:
    assert findings(seen_with(CPU, [NO_DEVICE])) == {("gpu_found", "violation")}
    assert findings(seen_with(CPU, [NO_DEVICE], device_asked="cpu")) == set()
    seen = seen_with(CPU, [], device_asked="cpu")
    seen.result.devices = [{"name": "Vulkan0", "type": "gpu"}]
    assert seen.result.flags is not None
    seen.result.flags["n_gpu_layers"] = 0
    assert findings(seen) == set()


def options(found: Found, *args: str, **changes: Any) -> dict[str, Any]:
    config = ADAPTER.config(plan(path=shared_gguf(), engine_args=args, **changes), found)
    return option_values(config["options"])


def test_a_run_on_the_cpu_shows_a_program_no_device() -> None:
    for found in (SERVER, TOOL):
        made = options(found, device_asked="cpu")
        assert (made["n_gpu_layers"], made["device"]) == ("0", "none")
        assert "device" not in options(found), "auto takes what is there"
    assert options(SERVER, "-dev Vulkan0", device_asked="cpu")["dev"] == "Vulkan0"
    assert "device" not in options(Found(), device_asked="cpu"), "the wheel's server has none"


@pytest.mark.parametrize("option", ["-t 1,2", "-b 32-64", "--flash-attn on,off", "-b 8-64*2"])
def test_several_values_are_refused_for_llama_bench_alone(option: str) -> None:
    with pytest.raises(OpError, match="has several values"):
        options(TOOL, option)
    options(SERVER, option)


def test_the_words_of_flash_attention_are_one() -> None:
    for words, wish in (("-fa enabled", "on"), ("-fa disabled", "off"), ("-fa 1", "1")):
        assert ADAPTER.requested(plan(engine_args=(words,))) == {"flash_attn": wish}


def test_a_path_that_is_no_program_is_told_before_anything_runs(tmp_path: Path) -> None:
    from ikit_mcp.call import Call, Settings
    from ikit_mcp.registry import EXECUTES, load

    call = Call(load(None).get("bench"), {}, Settings(tmp_path), scope=EXECUTES)
    plain = tmp_path / "llama-bench"
    plain.write_text("no program\n", encoding="utf-8")
    for path in (tmp_path / "llama-server", plain):
        with pytest.raises(OpError, match="is no program"):
            ADAPTER.find(call, plan(python=str(path)))


OVERFLOW = (
    "llama_context: n_ctx_seq (2304) > n_ctx_train (2048) -- possible training context overflow"
)


def test_a_context_that_the_model_was_not_trained_with_is_told() -> None:
    long = seen_with(CPU, [OVERFLOW], prompt_len=2000, gen_len=128)
    assert ("context", "warning") in findings(long)
    fitting = seen_with(CPU, [OVERFLOW], prompt_len=1920, gen_len=128)
    assert ("context", "warning") not in findings(fitting), "the room is rounded up"


def test_a_comma_in_a_path_would_be_two_models_to_llama_bench(tmp_path: Path) -> None:
    path = tmp_path / "a,b.gguf"
    path.write_bytes(shared_gguf().read_bytes())
    with pytest.raises(OpError, match="of the comma"):
        ADAPTER.config(plan(path=path), TOOL)
    assert ADAPTER.config(plan(path=path), SERVER)["model"] == str(path)


# --- the worker's programs ----------------------------------------------------------------------


def shell(folder: Path, text: str) -> str:
    """A program of a few lines."""
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def session(folder: Path, text: str, **changes: Any) -> worker.BenchSession:
    """A session with such a program in the place of llama-bench."""
    config = {
        "program": shell(folder, text), "model": "model.gguf", "prompt_len": 8, "gen_len": 4,
        "rounds": 2, "warmup": 1, "round_offset": 0, "options": [], "version": None,
        "result_path": str(folder / "result.json"), "progress_path": str(folder / "progress.json"),
    }  # fmt: skip
    return worker.BenchSession(worker.LlamaServer(config), config | changes)


ROW = '{"samples_ns": [9, 2000000, 4000000], "n_threads": 1}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("exit 3", "llama-bench ended with status 3"),
        ("kill -9 $$", "llama-bench was ended by SIGKILL"),
        ("echo nonsense", "results of 0 tests"),
        ("echo '[5]'", "results of 0 tests"),
        (f"echo '[{ROW}, {ROW}]'", "results of 2 tests"),
    ],
)
def test_what_llama_bench_does_instead_of_a_test_is_told(
    text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(harness.Stopped, match=words):
        session(tmp_path, text).run()


def test_rounds_of_llama_bench_that_were_not_heard_of_have_no_times(tmp_path: Path) -> None:
    session(tmp_path, f"echo '[{ROW}]'").run()
    told = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [row["ttft_ms"] for row in told["rounds"]] == [2.0, 4.0], "the first warmed up"
    assert {row["t_start"] for row in told["rounds"]} == {None}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("exit 7", OSError("reset"), "llama-server ended with status 7"),
        ("kill -9 $$", harness.Stopped("cut"), "llama-server was ended by SIGKILL"),
        ("exit 7", harness.Refused(400, "too long"), "too long"),
    ],
)
def test_an_answer_that_fails_because_the_server_died_says_so(
    text: str, error: Exception, words: str
) -> None:
    engine = worker.LlamaServer({})
    engine.child = subprocess.Popen(["/bin/sh", "-c", text])
    with pytest.raises(harness.Stopped, match=words), engine._alive():
        raise error
    engine.close()


def test_an_answer_that_fails_of_a_server_that_lives_says_what_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "DYING_SECONDS", 0.01)
    engine = worker.LlamaServer({})
    with pytest.raises(OSError, match="reset"), engine._alive():
        raise OSError("reset")
    engine.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with engine.child:
        with pytest.raises(OSError, match="reset"), engine._alive():
            raise OSError("reset")
        engine.close()
