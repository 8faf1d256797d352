"""Servers that speak the OpenAI API: how they are asked, what is counted, where keys go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.engine_server import FakeServer
from helpers.bench import run_here
from helpers.stdio import Wire
from helpers.tiny_models import shared_gguf
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import OpError

KEY = "made-up-loopback-key-4711"
SMALL: dict[str, Any] = {"prompt_len": 32, "gen_len": 16, "rounds": 3}


def bench(home: Path, server: FakeServer, **arguments: Any) -> EvidenceRecord:
    return run_here(home, **{"model": "tiny", "url": server.url, **SMALL, **arguments})


def test_a_server_that_takes_ids_gets_ids_and_its_usage_is_the_count(tmp_path: Path) -> None:
    with FakeServer() as server:
        record = bench(tmp_path, server)
    path, headers, body = server.requests[-1]
    assert path == "/v1/completions" and "Authorization" not in headers
    assert len(body["prompt"]) == 32 and body["max_tokens"] == 16 and body["stream"] is True
    assert body["ignore_eos"] is True and body["temperature"] == 0
    rounds = record.get("data", "rounds")
    assert [row["gen_tokens"] for row in rounds] == [16] * 3
    assert record.get("identity", "engine") == {"name": "openai", "version": "9.9"}
    assert record.get("identity", "device") is None and record.metric("load_s") is None
    assert record.metric("decode_tok_s") is not None


def test_no_two_prompts_of_a_run_are_the_same_but_for_the_reference(tmp_path: Path) -> None:
    with FakeServer() as server:
        bench(tmp_path, server)
        bench(tmp_path, server)
    prompts = [json.dumps(body["prompt"]) for _, _, body in server.requests]
    again = {prompt for prompt in prompts if prompts.count(prompt) > 1}
    assert len(again) == 1, "the reference prompt of both runs"


def test_the_servers_configuration_is_unseen_so_validity_is_not_established(
    tmp_path: Path,
) -> None:
    with FakeServer() as server:
        record = bench(tmp_path, server)
    assert record.valid is None
    missing = record.get("coverage", "missing")
    assert any("configur" in line for line in missing)
    assert any(line.startswith("device") for line in missing)


@pytest.mark.parametrize(
    ("mode", "path", "kind"),
    [("words", "/v1/completions", str), ("chat", "/v1/chat/completions", list)],
)
def test_a_server_that_takes_no_ids_gets_words(
    mode: str, path: str, kind: type, tmp_path: Path
) -> None:
    with FakeServer(mode) as server:
        record = bench(tmp_path, server)
    asked, _, body = server.requests[-1]
    assert asked == path and isinstance(body.get("messages", body.get("prompt")), kind)
    assert any("words" in note for note in record.get("data", "notes"))
    assert record.get("data", "rounds")[0]["prompt_tokens"] == 17, "usage says it, nobody guesses"


def test_a_server_that_refuses_unknown_parameters_is_asked_without(tmp_path: Path) -> None:
    with FakeServer("strict") as server:
        bench(tmp_path, server)
    assert "ignore_eos" not in server.requests[-1][2]


def test_without_usage_nobody_counted_and_there_is_no_rate(tmp_path: Path) -> None:
    with FakeServer("no-usage") as server:
        record = bench(tmp_path, server)
    assert record.metric("decode_tok_s") is None and record.valid is None
    assert record.metric("ttft_ms") is not None
    assert "decode rate not seen" in record.summary


def test_an_early_stop_is_a_violation(tmp_path: Path) -> None:
    with FakeServer("early") as server:
        record = bench(tmp_path, server)
    assert record.valid is False
    assert record.get("gates", "violations")[0].startswith("stopped early: 8 tokens instead of 16")


def test_cached_tokens_that_usage_tells_are_a_violation(tmp_path: Path) -> None:
    with FakeServer("cached") as server:
        record = bench(tmp_path, server)
    assert any("prefix cache hit: up to 5" in v for v in record.get("gates", "violations"))


@pytest.mark.parametrize("mode", ["merged", "merged-8"])
def test_chunks_of_several_tokens_leave_rate_and_ttft_unseen_never_too_fast(
    mode: str, tmp_path: Path
) -> None:
    with FakeServer(mode) as server:
        record = bench(tmp_path, server)
    assert record.get("data", "rounds")[0]["gen_tokens"] == 16
    assert record.metric("decode_tok_s") is None and record.metric("ttft_ms") is None
    missing = record.get("coverage", "missing")
    assert any("chunks hold several tokens" in line for line in missing)
    assert any(line.startswith("decode_tok_s") for line in missing)
    assert record.metric("total_ms") is not None and record.valid is None
    if mode == "merged-8":  # made at 100 tok/s, by a server that waits that long at least
        assert record.get("data", "timing", "two_call_check", "decode_tok_s") < 120


def test_one_chunk_too_few_is_counted_by_its_chunks_and_told(tmp_path: Path) -> None:
    with FakeServer("merged-once") as server:
        record = bench(tmp_path, server)
    assert any("a little too slow" in line for line in record.get("gates", "warnings"))
    for row in record.get("data", "rounds"):
        assert row["gen_tokens"] == 16
    assert record.metric("decode_tok_s") is not None


def test_tokens_that_a_proxy_kept_back_are_a_violation(tmp_path: Path) -> None:
    with FakeServer("bunched") as server:
        record = bench(tmp_path, server)
    assert record.valid is False
    assert record.get("gates", "violations")[0].startswith("tokens came in bunches")


@pytest.mark.parametrize(
    "odd",
    [
        {"usage": {"completion_tokens": -5}},
        {"usage": {"completion_tokens": "16"}},
        {"usage": {"completion_tokens": [16]}},
        {"usage": {"completion_tokens": True}},
        {"usage": {"completion_tokens": 10**30}},
        {"usage": {"prompt_tokens": 1.5}},
        {"usage": {"prompt_tokens_details": [1]}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": "x"}}},
        {"choices": "text"},
        {"choices": [5]},
        {"choices": [{"delta": [1]}]},
        {"choices": [{"text": "", "finish_reason": {"a": 1}}]},
    ],
    ids=json.dumps,
)
def test_odd_types_in_an_answer_are_told_with_the_phase_and_no_traceback(
    odd: dict[str, Any], tmp_path: Path
) -> None:
    with FakeServer(odd=odd) as server, pytest.raises(OpError) as caught:
        bench(tmp_path, server, warmup=0)
    assert "failed in phase round: the server's " in caught.value.what
    assert "Traceback" not in caught.value.what and "File " not in caught.value.what


@pytest.mark.parametrize(
    ("mode", "phase", "words"),
    [
        ("401", "load", "answered 401 Invalid API Key"),
        ("redirect", "load", "redirect (307), which is not followed"),
        ("html", "load", "without a token"),
        ("bad-line", "warm-up", "not JSON"),
        ("error-line", "warm-up", "out of memory"),
    ],
)
def test_a_server_that_misbehaves_is_told_with_the_phase(
    mode: str, phase: str, words: str, tmp_path: Path
) -> None:
    with FakeServer(mode, target="http://127.0.0.1:1/") as server, pytest.raises(OpError) as caught:
        bench(tmp_path, server)
    assert f"failed in phase {phase}" in caught.value.what and words in caught.value.what
    assert "api_key_env" in caught.value.next_step


def test_a_server_that_hangs_in_a_round_is_left_at_the_timeout(tmp_path: Path) -> None:
    with FakeServer("hang") as server, pytest.raises(OpError) as caught:
        bench(tmp_path, server, timeout=2)
    assert "after 2 s, the timeout" in caught.value.what


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    with FakeServer() as server:
        url = server.url
    with pytest.raises(OpError, match=r"failed in phase load.*refused") as caught:
        run_here(tmp_path, model="tiny", url=url, **SMALL)
    assert "Traceback" not in caught.value.what


# --- keys -----------------------------------------------------------------------------------------


def test_a_redirect_gets_neither_the_request_nor_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_VARIABLE", KEY)
    with FakeServer() as other, FakeServer("redirect", target=other.url) as server:
        with pytest.raises(OpError, match="not followed"):
            bench(tmp_path, server, api_key_env="SOME_VARIABLE")
        assert server.requests and other.requests == []


def test_a_key_for_another_host_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_VARIABLE", KEY)
    with pytest.raises(OpError, match="IKIT_KEY_HOSTS"):
        run_here(
            tmp_path, model="tiny", url="https://api.example.invalid/v1",
            api_key_env="SOME_VARIABLE", **SMALL,
        )  # fmt: skip


def test_a_key_reaches_its_server_and_no_record_log_reply_or_command_line(tmp_path: Path) -> None:
    home = tmp_path / "home"
    env = {"SOME_VARIABLE": KEY, "IKIT_LOCK_DIR": str(tmp_path / "locks")}
    lines: list[str] = []
    stop = threading.Event()

    def look() -> None:
        """Collect every command line of this machine while the benchmark runs."""
        while not stop.wait(0.02):
            done = subprocess.run(["ps", "-eo", "args"], capture_output=True, check=False)
            lines.append(done.stdout.decode("utf-8", "replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with FakeServer() as server, Wire(home, env=env) as wire:
            wire.initialize()
            good = wire.structured(
                "bench", model="tiny", url=server.url, api_key_env="SOME_VARIABLE", **SMALL
            )
            assert {r[1]["Authorization"] for r in server.requests} == {f"Bearer {KEY}"}
            server.mode = "401"
            bad = wire.call(
                "bench", model="tiny", url=server.url, api_key_env="SOME_VARIABLE", **SMALL
            )
            assert bad["isError"]
            frames = json.dumps(wire.frames) + wire.stderr()
    finally:
        stop.set()
        watcher.join()
    assert good["status"] == "done" and good["kind"] == "bench"
    kept = [p for p in home.rglob("*") if p.is_file()]
    assert kept
    for place in (frames, *lines, *(p.read_bytes().decode("latin-1") for p in kept)):
        assert KEY not in place


def test_a_key_that_an_engine_prints_is_redacted_on_the_command_line(tmp_path: Path) -> None:
    fake = Path(__file__).parents[1] / "fakes" / "engine_command.py"
    words = [sys.executable, str(fake), "tells-key", KEY[::-1]]
    env = {**os.environ, "ACME_API_KEY": KEY, "IKIT_HOME": str(tmp_path / "home"),
           "IKIT_LOCK_DIR": str(tmp_path / "locks")}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ikit_mcp.cli", "bench", "m", "--engine", "cmd",
         *(word for item in words for word in ("--command", item))],
        env=env, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == 1 and "its value is" in text
    assert KEY not in text and "redacted" in text


# --- a real server --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_server() -> Iterator[str]:
    """The real llama.cpp server with an API key of its own; its base URL."""
    code = (
        "import sys, xllamacpp as x\n"
        "p = x.CommonParams(); p.model.path, p.n_ctx, p.n_parallel = sys.argv[1], 512, 1\n"
        "p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1\n"
        "p.port, p.api_keys, p.verbosity = 0, [sys.argv[2]], 0\n"
        "s = x.Server(p); print(s.listening_address, flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(shared_gguf()), KEY],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip() + "/v1"
    finally:
        process.kill()
        process.communicate()


def test_a_real_server_takes_ids_counts_them_and_wants_its_key(
    llama_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_VARIABLE", KEY)
    record = run_here(
        tmp_path, model="tiny", url=llama_server, api_key_env="SOME_VARIABLE", **SMALL
    )
    for row in record.get("data", "rounds"):
        assert (row["gen_tokens"], row["prompt_tokens"]) == (16, 32)
    assert record.get("data", "notes")[0] == "prompts were sent as token ids"
    assert record.metric("decode_tok_s") is not None
    assert record.get("gates", "violations") == [] and record.valid is None
    with pytest.raises(OpError, match="401"):
        run_here(tmp_path, model="tiny", url=llama_server, **SMALL)
