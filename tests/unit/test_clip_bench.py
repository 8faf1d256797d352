"""bench_clips against a server without a model: what is sent, timed, refused and said."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import clips_jobs, clips_server, rough_server
from helpers.bench import run_here
from ikit_mcp.call import Cancelled, Settings
from ikit_mcp.evidence.record import EvidenceRecord, shape_problem
from ikit_mcp.registry import MEASURES, OpError, Registry, operations_in
from ikit_mcp.runner import Control, Runner
from ikit_ops import clip_bench as module
from ikit_ops import clip_server
from ikit_ops.clips import resultcache, torchside

Bench = Callable[..., EvidenceRecord]
SMALL = {"prompt": "kite", "width": 96, "height": 64, "num_frames": 9, "steps": 2}


@pytest.fixture
def server() -> Iterator[tuple[str, clips_server.Clips]]:
    with clips_server.serving() as running:
        yield running


def runner(home: Path, *modules: Any) -> Runner:
    registry = Registry()
    for each in modules or (module,):
        for op in operations_in(each):
            registry.add(op)
    return Runner(registry, Settings(home))


@pytest.fixture
def bench(tmp_path: Path, server: tuple[str, clips_server.Clips]) -> Bench:
    """Benchmark the server; it works for a moment a clip, so that times are no noise."""
    server[1].seconds = 0.02

    def benched(cancel: threading.Event | None = None, **more: Any) -> EvidenceRecord:
        arguments = {"url": server[0], "out": str(tmp_path / "out"), "count": 3, **more}
        record = run_here(tmp_path / "home", "bench_clips", cancel=cancel, **arguments)
        assert shape_problem(record.raw) is None
        return record

    return benched


def requests_file(folder: Path, *lines: Any) -> str:
    path = folder / "requests.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


def set_after(first: threading.Event, then: threading.Event) -> None:
    """Set an event when another one is."""

    def wait() -> None:
        first.wait(20)
        then.set()

    threading.Thread(target=wait, daemon=True).start()


def test_every_clip_has_a_prompt_and_seed_of_its_own_and_a_line_in_the_manifest(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    record = bench(count=4, warmup=2, seed=5)
    sent = [json.loads(body) for body in server[1].bodies]
    pairs = sent[6:]  # fresh requests, each sent twice, that look for a result cache
    assert 2 * 2 <= len(pairs) <= 2 * 5 and pairs[::2] == pairs[1::2]
    different = sent[:6] + pairs[::2]
    assert len({each["prompt"] for each in different}) == len(different)
    assert len({each["noise_seed"] for each in different}) == len(different)
    lines = (tmp_path / "out" / "clips.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["request"] for line in lines] == sent[2:6]
    for line in lines:
        assert Path(json.loads(line)["video"]).read_bytes()[4:8] == b"ftyp"
    assert record.valid is True
    assert record.metric("latency_s") is not None
    assert record.metric("peak_memory_bytes") == 12_500_000
    assert record.metric("stage_share") == pytest.approx(1.0, abs=0.01)
    assert record.get("data", "repeat", 0, "same_mp4") is True
    assert record.get("identity", "engine", "name") == "ikit-clips"
    assert len(record.get("data", "warmup")) == 2


def test_the_videos_dialect_is_a_form_that_others_understand(
    bench: Bench, server: tuple[str, clips_server.Clips], tmp_path: Path
) -> None:
    bench(api="videos", count=1, requests=requests_file(tmp_path, SMALL))
    assert set(server[1].paths) == {"/v1/videos/sync"}
    assert server[1].kinds[0].startswith("multipart/form-data; boundary=")
    body = server[1].bodies[0].decode()
    assert 'name="size"\r\n\r\n96x64' in body
    assert 'name="num_inference_steps"\r\n\r\n2' in body


def test_nobody_there_is_told_with_the_next_step(bench: Bench) -> None:
    with pytest.raises(OpError, match="no clip server answers") as caught:
        bench(url="http://127.0.0.1:1")
    assert "ikit clips serve" in caught.value.next_step


def test_a_folder_that_holds_something_is_not_written_into(tmp_path: Path, bench: Bench) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(OpError, match="not empty"):
        bench()
    with pytest.raises(OpError, match="cannot be made"):
        bench(out=str(tmp_path / "out" / "mine" / "x"))


def test_a_server_that_makes_no_clip_is_told_in_its_own_words(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].status = lambda number: 507
    with pytest.raises(OpError, match="HTTP 507: no clip 0"):
        bench()
    with pytest.raises(OpError, match="no clip was made"):
        bench(count=2, warmup=0)
    server[1].status = lambda number: 200
    assert bench(count=1).valid is True  # the failures left nothing in the folder
    assert sorted(p.name for p in (tmp_path / "out").glob("[wc]*")) == [
        "clip-0000.mp4", "clips.jsonl", "warm-0000.mp4",
    ]  # fmt: skip


def test_some_failed_requests_make_it_invalid_and_the_others_are_kept(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].status = lambda number: 429 if number == 2 else 200
    record = bench()
    assert record.valid is False
    assert "1 requests failed (1): HTTP 429" in record.get("gates", "violations", 0)
    lines = (tmp_path / "out" / "clips.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert not (tmp_path / "out" / "clip-0001.mp4").exists()
    failed = record.get("data", "requests", 1)
    assert (failed["bytes"], failed["sha256"], failed["server_time_s"]) == (None, None, None)


def test_an_engine_that_caches_results_is_found_by_the_repeated_request(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].cache = True
    server[1].seconds = 0.1
    record = bench()
    assert record.valid is False
    assert any(text.startswith("result_cache") for text in record.get("gates", "violations"))


def test_an_engine_that_queues_is_not_taken_for_one_that_caches(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].seconds, server[1].one_at_a_time = 0.05, True
    record = bench(count=8, concurrency=4)
    assert record.valid is True, record.get("gates")
    latency = record.metric("latency_s")
    assert latency is not None and latency > 0.12  # each waits for three others


def test_made_up_requests_are_new_to_a_cache_that_outlives_the_run(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    first, second = bench(seed=5), bench(seed=5, out=str(tmp_path / "two"))
    assert first.get("data", "nonce") != second.get("data", "nonce")
    prompts, seeds = set(), set()
    for record in (first, second):
        for part in ("requests", "warmup"):
            for row in record.get("data", part):
                prompts.add(row["request"]["prompt"])
                seeds.add(row["request"]["noise_seed"])
    assert len(prompts) == len(seeds) == 2 * 4


def test_given_requests_that_come_from_the_cache_of_an_earlier_run_are_found(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    asked = requests_file(tmp_path, *({**SMALL, "seed": n} for n in range(3)))
    server[1].cache, server[1].seconds = True, 0.1
    bench(requests=asked)
    # Repeats that take as long as fresh ones: only the timed requests show the cache.
    monkeypatch.setattr(resultcache.Pair, "ratio", 1.0)
    monkeypatch.setattr(resultcache.Pair, "cached", False)
    monkeypatch.setattr(resultcache.Pair, "skipped", False)
    record = bench(requests=asked, out=str(tmp_path / "two"))
    assert record.valid is False
    assert "3 of 3 timed requests took" in record.get("gates", "violations", 0)


def test_a_cache_that_could_not_be_looked_for_leaves_the_record_unestablished(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].status = lambda number: 503 if number >= 4 else 200
    record = bench()
    assert record.valid is None
    assert record.summary.startswith("NOT ESTABLISHED (whether results are cached")
    assert "whether results are cached (HTTP 503" in record.get("coverage", "missing", 0)


def test_one_mp4_for_different_requests_is_a_violation(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].same = True
    assert "answered with the same mp4" in " ".join(bench().get("gates", "violations"))


def test_a_server_that_tells_no_stages_leaves_them_unknown(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].stages, server[1].told = False, b"not JSON"
    record = bench()
    assert record.metric("s_per_step") is None
    assert record.metric("server_time_s") is None
    assert {"stages (the server does not tell them)", "peak memory (the server does not tell it)",
            "server time (the server does not tell it)"} <= set(
        record.get("coverage", "missing"))  # fmt: skip
    assert record.get("identity", "engine") is None


def test_the_headers_of_another_server_are_read_in_its_units(
    bench: Bench, server: tuple[str, clips_server.Clips], tmp_path: Path
) -> None:
    server[1].stages, server[1].told, server[1].seconds = False, {}, 0.05
    server[1].headers = {
        "X-Inference-Time-S": "0.050", "X-Peak-Memory-MB": "4096.0",
        "X-Stage-Durations": '{"WanPipeline.forward": 0.049, "WanPipeline.diffuse": 0.04,'
        ' "WanPipeline.vae.decode": 0.005}',
    }  # fmt: skip
    record = bench(api="videos", requests=requests_file(tmp_path, SMALL))
    assert record.metric("stage_denoise_ms") == pytest.approx(40.0)
    assert record.metric("stage_forward_ms") == pytest.approx(49.0)
    assert record.metric("s_per_step") == pytest.approx(0.02)
    assert record.metric("peak_memory_bytes") == 4 << 30
    assert record.metric("stage_share") is None  # one stage lies inside of another
    assert any(text.startswith("the stages' share") for text in record.get("coverage", "missing"))
    assert any("MB for MiB" in text for text in record.get("limitations"))
    assert record.valid is True


def test_a_server_of_jobs_is_driven_and_said_to_be_one(bench: Bench, tmp_path: Path) -> None:
    with clips_jobs.serving() as (url, jobs):
        record = bench(url=url, api="videos", requests=requests_file(tmp_path, SMALL))
    assert record.get("data", "asked_as_jobs") is True
    assert jobs.seen.count("POST /v1/videos/sync") == 1
    assert len(jobs.asked) == 1 + 3 + 2 * len(record.get("data", "repeat"))
    assert record.metric("server_time_s") == 0.015
    assert record.metric("peak_memory_bytes") == 2 << 30
    assert any("asked for as jobs" in text for text in record.get("limitations"))
    assert "the model (the server does not name it)" in record.get("coverage", "missing")
    assert record.get("identity", "model") is None


def test_what_some_clips_do_not_tell_is_missing_for_them(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].stages = False
    server[1].headers = {"X-Peak-Memory-MB": "3"}

    def forget(number: int) -> int:
        if number == 2:
            server[1].headers.clear()
        return 200

    server[1].status = forget
    record = bench()
    assert record.metric("peak_memory_bytes") == 3_000_000
    assert "peak memory of 2 of 3 clips" in record.get("coverage", "missing")


def test_times_that_cannot_be_are_unknown_and_said_to_be(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].headers = {"X-Server-Time-S": "500", "X-Peak-Memory-MB": "1e308",
                         "X-Stage-Durations": '{"denoise": 600000}'}  # fmt: skip
    record = bench()
    for name in ("server_time_s", "s_per_step", "stage_share", "peak_memory_bytes"):
        assert record.metric(name) is None
    assert "the server tells 500 s" in " ".join(record.get("gates", "warnings"))
    assert "stages (what the server tells cannot be)" in record.get("coverage", "missing")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"denoise": "x"}', '{"denoise": NaN}', '{"denoise": -1}', "[" * 9000]
)
def test_stages_that_are_no_numbers_are_not_believed(
    bench: Bench, server: tuple[str, clips_server.Clips], text: str
) -> None:
    server[1].headers = {"X-Stage-Durations": text, "X-Step-Durations": text,
                         "X-Server-Time-S": "nan", "X-Peak-Memory-MB": "inf"}  # fmt: skip
    record = bench(count=1)
    assert record.get("data", "stages_ms") == {}
    assert record.metric("peak_memory_bytes") is None


def test_stages_that_leave_time_unexplained_are_a_warning(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].headers = {"X-Stage-Durations": '{"denoise": 9, "other": 1}',
                         "X-Server-Time-S": "0.01"}  # fmt: skip
    record = bench()
    assert record.metric("stage_share") == pytest.approx(0.9)
    assert "stages explain only 90.0 %" in " ".join(record.get("gates", "warnings"))


def test_an_answer_that_is_not_what_its_hash_says_is_a_failure(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].headers = {"X-Video-Sha256": "0" * 64}
    with pytest.raises(OpError, match="sha256 is not the one"):
        bench()
    assert not (tmp_path / "out").exists()


def test_dumps_are_looked_for_and_projected_and_the_check_is_proposed(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    server[1].dumps = dumps
    asked = requests_file(tmp_path, {**SMALL, "num_frames": 9})
    record = bench(dumps=str(dumps), requests=asked)
    size = max(each.stat().st_size for each in dumps.glob("*.safetensors"))
    assert record.get("data", "dump_bytes") == size
    made = 3 + 2 * len(record.get("data", "repeat"))
    assert record.get("data", "dump_bytes_projected") == made * size
    assert record.valid is True
    server[1].dumps = None
    second = bench(dumps=str(dumps), requests=asked, out=str(tmp_path / "two"))
    assert "3 of 3 clips left no step dump" in second.get("gates", "violations", 0)


def test_dumps_that_would_fill_the_disk_are_refused_before_the_clock_runs(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    server[1].dumps = dumps
    usage = shutil.disk_usage(dumps)._replace(free=(256 << 20) + 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    asked = requests_file(tmp_path, {**SMALL, "width": 32, "height": 32, "audio": False})
    with pytest.raises(OpError, match=r"7 clips to come need .*kB.*268 MB are free"):
        bench(dumps=str(dumps), requests=asked)
    assert len(server[1].bodies) == 1
    with pytest.raises(OpError, match=r"13 clips to come need 3.8 GB \(292 MB a dump"):
        bench(dumps=str(dumps), warmup=0, count=9)
    assert len(server[1].bodies) == 1  # nothing was sent: the contract says how large they are
    with pytest.raises(OpError, match="no directory"):
        bench(dumps=str(tmp_path / "none"))


def test_as_many_requests_are_under_way_as_were_asked_for(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].seconds = 0.2
    bench(count=6, concurrency=3)
    assert server[1].most == 3


def test_no_warm_up_is_a_warning(bench: Bench) -> None:
    assert "no warm-up" in " ".join(bench(warmup=0, count=1).get("gates", "warnings"))


def test_a_cancelled_benchmark_ends_though_the_server_does_not_answer(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].hold.clear()
    cancel = threading.Event()
    asked = threading.Timer(0.1, cancel.set)
    asked.start()
    with pytest.raises(Cancelled):
        bench(cancel=cancel)
    asked.join()
    assert not (tmp_path / "out").exists()


def test_clips_of_several_sizes_are_not_told_as_those_of_the_first(
    tmp_path: Path, bench: Bench
) -> None:
    asked = requests_file(tmp_path, SMALL, {**SMALL, "steps": 4}, {**SMALL, "fps": 12})
    record = bench(requests=asked, count=6)
    assert "6 clips of 3 sizes" in record.summary
    workload = record.get("identity", "workload")
    assert (workload["width"], workload["steps"], workload["fps"]) == (96, "mixed", "mixed")
    assert sum(workload["sizes"].values()) == 6 and len(workload["sizes"]) == 3
    assert record.metric("s_per_step") is None
    rows = record.get("data", "by_size")
    assert [(row["steps"], row["fps"], row["clips"]) for row in rows] == [
        (2, 24, 2), (4, 24, 2), (2, 12, 2),
    ]  # fmt: skip
    assert all(row["latency_s"] > 0 and row["s_per_step"] > 0 for row in rows)
    assert "2 of 3 sizes had no warm-up" in " ".join(record.get("gates", "warnings"))


def test_requests_of_one_prompt_or_noise_are_said_to_be(tmp_path: Path, bench: Bench) -> None:
    asked = requests_file(tmp_path, {**SMALL, "seed": 1}, {**SMALL, "prompt": "sea", "seed": 1},
                          {**SMALL, "seed": 2})  # fmt: skip
    record = bench(requests=asked)
    assert "2 requests share their prompt or noise" in " ".join(record.get("gates", "warnings"))
    assert record.valid is True


def test_lines_that_are_the_same_are_no_reason_to_blame_the_engine(
    tmp_path: Path, bench: Bench
) -> None:
    same = {**SMALL, "seed": 1}
    record = bench(requests=requests_file(tmp_path, same, same, same))
    assert record.valid is True, record.get("gates")
    asked = [row["request"] for row in record.get("data", "requests")]
    assert asked[0]["prompt"] == "kite" and len({each["seed"] for each in asked}) == 3


def test_a_disk_that_fills_while_the_manifest_is_written_is_told(
    tmp_path: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(self: Path, *args: Any, **more: Any) -> int:
        if self.name == "clips.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write(self, *args, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OpError, match=r"clips\.jsonl cannot be written: No space left"):
        bench(count=1)
    assert not (tmp_path / "out").exists()


def test_a_clip_that_cannot_be_written_ends_the_run_and_is_not_the_servers_fault(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    (tmp_path / "out").mkdir()
    taken = threading.Event()

    def take(number: int) -> int:
        if not taken.is_set():
            (tmp_path / "out" / "warm-0000.mp4").mkdir()
            taken.set()
        return 200

    server[1].status = take
    with pytest.raises(OpError, match=r"warm-0000\.mp4 cannot be written"):
        bench()


def test_a_noise_seed_that_the_other_server_has_no_word_for_is_refused_before_anything_is_sent(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    asked = requests_file(tmp_path, {**SMALL, "seed": 1, "noise_seed": 2})
    assert bench(api="videos", requests=asked).valid is True  # ours has: both are said
    assert b'name="noise_seed"\r\n\r\n2\r\n' in server[1].bodies[1]
    server[1].told, before = {"status": "ready"}, len(server[1].bodies)
    with pytest.raises(OpError, match="another noise_seed than seed"):
        bench(api="videos", requests=asked, out=str(tmp_path / "two"))
    with pytest.raises(OpError, match="names its task"):
        bench(api="videos", requests=requests_file(tmp_path, {**SMALL, "task": "t2v"}),
              out=str(tmp_path / "two"))  # fmt: skip
    assert len(server[1].bodies) == before


def test_a_server_that_is_still_loading_is_waited_for_by_the_user(
    bench: Bench, tmp_path: Path
) -> None:
    answer = rough_server.reply(b'{"status": "loading"}', status="503 Busy")
    nothing = rough_server.sending(b"")
    with (
        rough_server.answering(nothing, rough_server.sending(answer)) as url,
        pytest.raises(OpError, match=r"is not ready: .*loading"),
    ):
        bench(url=url)


@pytest.mark.parametrize(
    "first",
    [rough_server.reply(rough_server.FTYP, "Content-Type: video/mp4", length=10**6),
     b"HTTP/1.1 200 OK\r\nContent-Type: video/mp4\r\nTransfer-Encoding: chunked\r\n\r\n",
     b"HTTP/1.1 100 Continue\r\n\r\n", b""],
    ids=["body", "chunks", "continue", "nothing"],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["timeout", "cancel"])
def test_a_server_that_never_ends_its_answer_is_left_when_the_time_is_up_or_at_once_when_cancelled(
    tmp_path: Path, bench: Bench, first: bytes, ending: str
) -> None:
    again = first if first.startswith(b"HTTP/1.1 100") else b"" if not first else b"0"
    drip, cancel = rough_server.Drip(first, again), threading.Event()
    with rough_server.answering(drip) as url:
        if ending == "timeout":
            with pytest.raises(OpError, match="no whole answer when the time was up"):
                bench(url=url, timeout=1)
        else:
            set_after(drip.begun, cancel)
            with pytest.raises(Cancelled):
                bench(url=url, cancel=cancel)
        if again:
            assert drip.gone.wait(20)  # the client hung up
        drip.gone.set()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", ["timeout", "cancel"])
def test_a_health_that_never_ends_is_no_server(tmp_path: Path, bench: Bench, ending: str) -> None:
    drip, cancel = rough_server.Drip(b"HTTP/1.1 200 OK\r\n\r\n{"), threading.Event()
    with rough_server.answering(rough_server.sending(b""), drip) as url:
        if ending == "timeout":
            with pytest.raises(OpError, match=r"no clip server answers at .* does not end"):
                bench(url=url, timeout=1)
        else:
            set_after(drip.begun, cancel)
            with pytest.raises(Cancelled):
                bench(url=url, cancel=cancel)
        assert drip.gone.wait(20)


def test_clips_that_were_made_before_the_time_was_up_are_kept_and_the_others_named(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    def hold(number: int) -> int:
        if number == 2:
            server[1].hold.clear()
        return 200

    server[1].status = hold
    record = bench(timeout=2, count=4)
    assert record.valid is False
    assert "2 requests failed (2, 3): no " in record.get("gates", "violations", 0)
    assert [row["error"] is None for row in record.get("data", "requests")] == [
        True, True, False, False,
    ]  # fmt: skip
    late = record.get("data", "requests", 3)
    assert late["error"] == "no answer within the timeout of 2 s"
    assert (late["latency_s"], late["started_s"]) == (None, None)
    assert any("whether results are cached" in each for each in record.get("coverage", "missing"))


def test_it_is_a_measurement_and_the_server_is_a_command_without_a_tool() -> None:
    (op,) = operations_in(module)
    assert op.effects == MEASURES
    (serve,) = operations_in(clip_server)
    assert (serve.tool, serve.cli) == (False, ("clips", "serve"))


def test_the_server_is_refused_without_a_model_a_folder_or_a_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: None)
    made = runner(tmp_path / "home", clip_server)

    def serve(**more: Any) -> None:
        given = {"model": str(tmp_path), "dumps": str(tmp_path), **more}
        made.here(made.check("serve_clips", given), Control())

    with pytest.raises(OpError, match=r"model_index\.json"):
        serve()
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OpError, match="no directory"):
        serve(dumps=str(tmp_path / "none"))
    with pytest.raises(OpError, match="no Python with torch"):
        serve()
