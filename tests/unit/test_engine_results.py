"""Result files and configurations are outsiders': bounded, typed, and never believed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ikit_ops.engines import drive
from ikit_ops.engines import result as results
from ikit_ops.engines.adapter import WORKERS

sys.path.insert(0, str(WORKERS))
import ikit_harness as harness


def parsed(value: Any) -> results.WorkerResult:
    return results.parse(json.dumps(value).encode("utf-8"))


ROUND = {"ttft_ms": 20.0, "total_ms": 1290.0, "gen_tokens": 128}


def test_a_round_without_its_decode_time_takes_what_remains_after_the_first_token() -> None:
    row = parsed({"rounds": [ROUND]}).rounds[0]
    assert row.rate() == pytest.approx(127 / 1.27)
    assert row.index == 0


def test_the_result_of_an_older_worker_is_read() -> None:
    row = {"index": 0, "t_start": 1796070630.7, "t_end": 1796070631.2, "ttft_ms": 27.6,
           "total_ms": 484.0, "gen_tokens": 32, "decode_tok_s": 67.9, "tpot_ms": 14.7}  # fmt: skip
    told = {"engine": {"name": "vllm", "version": "0.32.0"}, "flags": {"enforce_eager": True},
            "rounds": [row], "tokens": [1, 2], "prompt": {"vocab_bound": 2048}}  # fmt: skip
    found = parsed(told)
    assert found.rounds[0].rate() == pytest.approx(67.9, rel=1e-3)
    assert found.engine is not None and found.engine.name == "vllm"


@pytest.mark.parametrize(
    "row",
    [
        {"ttft_ms": 20.0, "total_ms": 20.0, "gen_tokens": 128},
        {"ttft_ms": 20.0, "total_ms": 30.0, "gen_tokens": 1},
        {"ttft_ms": 20.0, "total_ms": 30.0},
        {"gen_tokens": 128},
        {"decode_tok_s": 5000.0},
    ],
)
def test_a_rate_that_the_times_do_not_carry_is_not_seen(row: dict[str, Any]) -> None:
    assert parsed({"rounds": [row]}).rounds[0].rate() is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "schema"),
        (b"{", "schema"),
        (b"[]", "schema"),
        (b'{"rounds": 5}', "schema"),
        (b'{"rounds": [{"ttft_ms": NaN}]}', "schema"),
        (b'{"rounds": [{"ttft_ms": 1e999}]}', "schema"),
        (b'{"rounds": [{"ttft_ms": "20"}]}', "schema"),
        (b'{"rounds": [{"gen_tokens": 1.5}]}', "schema"),
        (b'{"rounds": [{"gen_tokens": -3}]}', "gen_tokens is -3"),
        (b'{"rounds": [{"total_ms": -0.5}]}', "total_ms is -0.5"),
        (b"[" * 100_000, "schema"),
        (b'{"a": "' + b"x" * (16 << 20) + b'"}', "larger than"),
        (b'{"rounds": [' + b"{}," * 10_001 + b"{}]}", "10002 rounds"),
        (b'{"flags": {"a": "\xff"}}', "schema"),
    ],
)
def test_what_is_no_result_is_refused_with_a_reason(text: bytes, words: str) -> None:
    with pytest.raises(results.Unreadable) as caught:
        results.parse(text)
    assert words in str(caught.value)


def test_texts_of_a_result_become_one_short_line() -> None:
    evil = "a\nb\x1b[31m‮" + "c" * 1000
    found = parsed({
        "rounds": [{**ROUND, "finish_reason": evil}], "version": evil, "attention_backend": evil,
        "flags": {evil: evil, "list": [evil] * 500, "deep": {"a": {"b": {"c": {"d": 1}}}}},
        "notes": [evil] * 100, "attention_layers": [evil] * 100,
    })  # fmt: skip
    text = json.dumps(results.bounded(found.flags)) + str(found)
    assert "\x1b" not in text and "‮" not in text and len(text) < 40_000
    assert found.version is not None and len(found.version) <= 120
    assert len(found.notes) == 20


def test_the_file_comes_before_the_marker_and_the_last_marker_counts(tmp_path: Path) -> None:
    file, output = tmp_path / "result.json", tmp_path / "out"
    assert results.read(file, output) is None
    noise = b"IKIT_RESULT not at all\nprogress 5%\rIKIT_RESULT "
    output.write_bytes(
        noise + json.dumps({"rounds": [ROUND], "version": "first"}).encode() + b"\n"
        b"  IKIT_RESULT {indented}\nIKIT_RESULT "
        + json.dumps({"rounds": [ROUND], "version": "second"}).encode()
        + b"\r\nbye\xff\n"
    )  # fmt: skip
    found = results.read(file, output)
    assert found is not None and found.version == "second"
    file.write_text(json.dumps({"rounds": [ROUND], "version": "file"}), encoding="utf-8")
    found = results.read(file, output)
    assert found is not None and found.version == "file"


@pytest.mark.parametrize("kind", ["fifo", "symlink", "folder", "/dev/zero", "below a file"])
def test_a_result_that_is_no_plain_file_is_refused_without_waiting_for_it(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        real = tmp_path / "real.json"
        real.write_text("{}", encoding="utf-8")
        path.symlink_to(real)
    elif kind == "folder":
        path.mkdir()
    elif kind == "/dev/zero":
        path = Path(kind)
    else:
        path.touch()
        path /= "x"
    with pytest.raises(results.Unreadable, match="cannot be read"):
        results.read(path)


def test_logs_and_progress_that_became_pipes_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert results.last_marked_line(path) is None
    assert drive.read_log(path) == [] and drive.progress_of(path) == {}


def test_a_result_that_grows_without_end_is_read_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no space
    with pytest.raises(results.Unreadable, match="larger than 16 MiB"):
        results.read(path)


def test_the_format_of_a_result_is_ours_or_not_told() -> None:
    assert parsed({"rounds": [ROUND], "format": "ikit.bench-result/1"}).rounds
    with pytest.raises(results.Unreadable, match=r"format ikit\.bench-result/2"):
        parsed({"rounds": [ROUND], "format": "ikit.bench-result/2"})


def test_a_marker_in_the_middle_of_a_line_is_no_result(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text('the log says IKIT_RESULT {"rounds": []}\n', encoding="utf-8")
    assert results.read(tmp_path / "none", output) is None


def test_a_broken_last_marker_is_told_and_not_passed_over(tmp_path: Path) -> None:
    output = tmp_path / "out"
    good = json.dumps({"rounds": [ROUND]})
    output.write_text(f"IKIT_RESULT {good}\nIKIT_RESULT {good[:20]}\n", encoding="utf-8")
    with pytest.raises(results.Unreadable):
        results.read(tmp_path / "none", output)


def test_the_digest_of_tokens_is_of_their_json_list() -> None:
    assert results.tokens_digest([1, 22]) == hashlib.sha256(b"[1,22]").hexdigest()


def test_the_median_is_of_what_was_seen() -> None:
    assert results.median([None, 3.0, 1.0, None, 2.0]) == 2.0
    assert results.median([None]) is None


# --- the prompts -----------------------------------------------------------------------------


@given(st.integers(0, 2**63), st.text(max_size=20), st.integers(11, 300_000))
def test_prompts_follow_the_rule_that_every_record_names(
    seed: int, label: str, vocabulary: int
) -> None:
    low = 10 if vocabulary <= 2000 else 1000
    high = min(vocabulary, 30000)
    source = random.Random(f"{seed}:{label}")
    expected = [low + int(source.random() * (high - low)) for _ in range(20)]
    found = harness.prompt_ids(seed, label, 20, vocabulary)
    assert found == expected
    assert all(low <= token < high for token in found)


def test_a_vocabulary_without_room_for_prompts_is_refused() -> None:
    with pytest.raises(harness.Stopped):
        harness.prompt_ids(0, "x", 5, 10)


def session(**config: Any) -> harness.Session:
    class Silent(harness.Engine):
        """An engine that knows its vocabulary and nothing else."""

        def vocabulary(self) -> int:
            return 2048

    usual = {"seed": 3, "prompt_len": 8, "nonce": "n1"}
    return harness.Session(Silent(usual | config), usual | config)


def test_rounds_are_fresh_in_every_run_and_the_reference_is_the_same_in_all() -> None:
    one, other = session(nonce="a"), session(nonce="b")
    assert one.ids("round:0") != other.ids("round:0") != one.ids("round:1")
    assert one.ids("reference", fresh=False) == other.ids("reference", fresh=False)
    assert one.ids("reference", fresh=False) == harness.prompt_ids(3, "reference", 8, 2048)
    assert one.ids("round:0") == harness.prompt_ids(3, "a:round:0", 8, 2048)


def test_a_round_is_told_in_wall_time_and_milliseconds() -> None:
    made = harness.Generation(10.0, 10.5, 12.5, 13.0, 5, tokens=[1] * 5, cached=0)
    row = made.row(7, 1000.0)
    assert (row["t_start"], row["t_end"], row["ttft_ms"]) == (1010.0, 1013.0, 500.0)
    assert (row["total_ms"], row["decode_ms"], row["index"]) == (3000.0, 2000.0, 7)
    blind = harness.Generation(10.0, None, None, 13.0, None).row(0, 0.0)
    assert blind["ttft_ms"] is None and blind["decode_ms"] is None


def test_streamed_lines_that_are_no_json_or_tell_an_error_stop_the_run() -> None:
    assert harness.parsed([(1.0, b'{"a": 1}'), (2.0, b"[DONE]"), (3.0, b"5")]) == [(1.0, {"a": 1})]
    with pytest.raises(harness.Stopped, match="not JSON"):
        harness.parsed([(1.0, b"<html>")])
    with pytest.raises(harness.Stopped, match="out of memory"):
        harness.parsed([(1.0, b'{"error": "out of memory"}')])


def test_an_engine_that_hangs_while_it_shuts_down_is_left_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "import ikit_harness as h\n"
        "h.SHUTDOWN_SECONDS = 0.2\n"
        "class Hangs(h.Engine):\n"
        "    def vocabulary(self): return 2048\n"
        "    def generate(self, ids, n):\n"
        "        return h.Generation(0.0, 1.0, 2.0, 3.0, n, tokens=[1] * n, cached=0)\n"
        "    def describe(self): return {'flags': {}}\n"
        "    def close(self): time.sleep(600)\n"
        "h.main(Hangs)\n"
    )
    config = {"seed": 0, "prompt_len": 4, "gen_len": 4, "rounds": 2, "warmup": 1, "nonce": "n",
              "round_offset": 0, "result_path": str(tmp_path / "result.json")}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    argv = [sys.executable, "-c", code, str(tmp_path / "config.json"), str(WORKERS)]
    done = subprocess.run(argv, timeout=60, check=False)
    assert done.returncode == 0
    found = results.parse((tmp_path / "result.json").read_bytes())
    assert len(found.rounds) == 2 and found.tokens == [1] * 4
