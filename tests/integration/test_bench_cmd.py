"""``engine=cmd``: any program may take part; what it does becomes a record or a sentence."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.bench import run_here
from ikit_mcp.call import Cancelled
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_mcp.registry import OpError

COMMAND = str(Path(__file__).parents[1] / "fakes" / "engine_command.py")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process that runs our fake engine is left when a test is over."""
    yield
    left = [p for p in psutil.process_iter(["cmdline"]) if COMMAND in (p.info["cmdline"] or [])]
    mine = [p for p in left if os.getpid() in {q.pid for q in p.parents()} or p.ppid() == 1]
    assert mine == []


def bench(home: Path, *words: str, **arguments: Any) -> EvidenceRecord:
    """A benchmark of the fake engine."""
    command = [sys.executable, COMMAND, *words]
    usual: dict[str, Any] = {"rounds": 3, "timeout": 60}
    return run_here(home, model="acme/model", engine="cmd", command=command, **usual | arguments)


def failure(home: Path, *words: str, **arguments: Any) -> str:
    """What a failed benchmark says."""
    with pytest.raises(OpError) as caught:
        bench(home, *words, **arguments)
    assert caught.value.next_step
    return caught.value.what


@pytest.mark.parametrize("way", ["file", "marker", "twice", "polluted"])
def test_a_result_is_taken_from_the_file_or_the_last_marked_line(way: str, tmp_path: Path) -> None:
    record = bench(tmp_path, way)
    assert record.valid is True
    assert record.metric("decode_tok_s") == pytest.approx(127 / 1.271)
    assert record.metric("tpot_ms") == pytest.approx(1271 / 127)
    assert record.metric("ttft_ms") == 20.0
    assert record.metric("load_s") == 1.5
    assert record.get("identity", "engine") == {"name": "acme", "version": "1.0"}
    assert record.get("data", "tokens", "ids") == [5, 6, 7]
    assert "acme 1.0: decode 99.92 tok/s" in record.summary


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ttft_ms": 10.0, "total_ms": 110.0, "decode_ms": 0.001}, "are no decoding"),
        ({"ttft_ms": 10.0, "total_ms": 110.0, "decode_ms": 101.0 + 3.5}, "more than the whole"),
        ({"ttft_ms": 10.0, "total_ms": 5.0, "decode_ms": None}, "more than the whole"),
        ({"ttft_ms": 0.0, "total_ms": 1290.0, "decode_ms": 1100.0}, "are no decoding"),
        ({"decode_tok_s": 7e6}, "claims 7e+06 tok/s"),
        ({"prompt_tokens": 1}, "1 prompt tokens instead of 512"),
        ({"prompt_tokens": 1000}, "1000 prompt tokens instead of 512"),
    ],
)
def test_times_and_counts_that_cannot_be_are_violations(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    record = bench(tmp_path, "rounds", json.dumps(changed), "3")
    assert record.valid is False
    assert any(words in line for line in record.get("gates", "violations"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"decode_tok_s": 20.0}, "far below"),
        ({"ttft_ms": None, "total_ms": None, "decode_ms": 0.001}, "were not told"),
    ],
)
def test_times_that_nothing_bears_out_establish_nothing(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    record = bench(tmp_path, "rounds", json.dumps(changed), "3")
    assert record.valid is None
    assert any(words in line for line in record.get("coverage", "missing"))


@pytest.mark.parametrize(
    "changed",
    [
        {"decode_ms": None},
        {"decode_ms": 1260.0, "decode_tok_s": 128 / 1.26},  # divides by n
        {"ttft_ms": 20.0, "total_ms": 1310.0, "decode_ms": 1200.0},
        {"prompt_tokens": 513},
    ],
)
def test_times_that_hold_together_are_believed(changed: dict[str, Any], tmp_path: Path) -> None:
    assert bench(tmp_path, "rounds", json.dumps(changed), "3").valid is True


@pytest.mark.parametrize("count", ["1", "2"])
def test_rounds_that_were_left_out_are_a_violation(count: str, tmp_path: Path) -> None:
    record = bench(tmp_path, "rounds", "{}", count)
    assert record.valid is False
    violations = record.get("gates", "violations")
    assert violations[0].startswith(f"{count} rounds instead of 3")


def test_a_command_that_reports_no_flags_is_not_established(tmp_path: Path) -> None:
    record = bench(tmp_path, "no-flags")
    assert record.valid is None
    assert record.summary.startswith("NOT ESTABLISHED (configuration")
    assert any("the command's own word" in line for line in record.get("limitations"))


def test_flags_of_an_engine_known_by_name_are_judged_by_its_rules(tmp_path: Path) -> None:
    record = bench(tmp_path, "vllm-eager")
    assert record.valid is False
    violations = record.get("gates", "violations")
    assert violations == record.get("limitations")[:1]
    assert violations[0].startswith("CUDA graphs off (enforce_eager=True)")
    assert record.summary.startswith("INVALID as vllm's speed: CUDA graphs off")


def test_flags_that_look_like_keys_are_left_out(tmp_path: Path) -> None:
    record = bench(tmp_path, "secret-flags")
    flags = record.get("data", "flags")
    assert flags == {"kernels": "own", "max_num_batched_tokens": 8192, "tokenizer": "x"}


def test_a_command_runs_where_its_caller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(COMMAND).parent)
    command = [sys.executable, Path(COMMAND).name, "file"]
    assert run_here(tmp_path, model="m", engine="cmd", command=command).valid is True


def test_a_result_counts_although_the_command_died_after_it(tmp_path: Path) -> None:
    record = bench(tmp_path, "result-then-death")
    assert record.valid is True
    assert any("SIGKILL" in line for line in record.get("gates", "warnings"))


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("no-result", "ended with status 0 and left no result"),
        ("broken-marker", "its result is not what the schema says"),
        ("fifo", "its result cannot be read: it is no regular file"),
        ("link", "its result cannot be read"),
        ("SIGKILL", "ended by SIGKILL (most often the kernel's out-of-memory killer"),
        ("SIGQUIT", "ended by SIGQUIT (an engine's child failed"),
        ("SIGSEGV", "ended by SIGSEGV (a crash in native code)"),
    ],
)
def test_every_bad_end_is_told_with_phase_reason_and_last_lines(
    word: str, reason: str, tmp_path: Path
) -> None:
    text = failure(tmp_path, word)
    assert "failed in phase command" in text
    assert reason in text
    if word.startswith("SIG"):
        assert "last lines:\n  about to die" in text


def test_a_hundred_megabytes_of_log_end_the_run_with_a_sentence(tmp_path: Path) -> None:
    text = failure(tmp_path, "flood")
    assert "more than 64 MiB of output" in text and len(text) < 2000


def test_a_command_that_hangs_is_ended_at_its_timeout_with_all_its_children(
    tmp_path: Path,
) -> None:
    text = failure(tmp_path, "hang", str(tmp_path / "ready"), timeout=3)
    assert "after 3 s, the timeout" in text and "waiting for a lock" in text


def test_a_cancelled_benchmark_leaves_nothing(tmp_path: Path) -> None:
    cancel, ready = threading.Event(), tmp_path / "ready"

    def cancel_when_ready() -> None:
        end = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < end:
            time.sleep(0.02)
        cancel.set()

    thread = threading.Thread(target=cancel_when_ready)
    thread.start()
    with pytest.raises(Cancelled):
        bench(tmp_path / "home", "hang", str(ready), cancel=cancel)
    thread.join()
    assert list((tmp_path / "home").glob("evidence/*/*")) == []


def test_a_command_gets_no_key_and_an_error_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_API_KEY", "made-up-key-4711-4711")
    text = failure(tmp_path, "tells-key", "1174-1174-yek-pu-edam")
    assert "connecting with no key" in text


def test_texts_of_an_engine_are_single_lines_in_an_error(tmp_path: Path) -> None:
    text = failure(tmp_path, "says", "evil\x1b[31m‮text " + "z" * 500)
    last = text.splitlines()[-1]
    assert "\x1b" not in text and "‮" not in text and len(last) < 170
    assert "ended with status 4" in text


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(OpError, match="no-such-program"):
        run_here(tmp_path, model="m", engine="cmd", command=["/no-such-program"])
