"""bench_clips against a server without a model: what is sent, timed, refused and said."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import clips_server
from helpers.bench import run_here
from ikit_mcp.call import Cancelled, Settings
from ikit_mcp.evidence.record import EvidenceRecord, shape_problem
from ikit_mcp.registry import MEASURES, OpError, Registry, operations_in
from ikit_mcp.runner import Control, Runner
from ikit_ops import clip_bench as module
from ikit_ops import clip_server
from ikit_ops.clips import torchside
from ikit_ops.clips.client import Server

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


def test_every_clip_has_a_prompt_and_seed_of_its_own_and_a_line_in_the_manifest(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    record = bench(count=4, warmup=2, seed=5)
    sent = [json.loads(body) for body in server[1].bodies]
    assert len(sent) == 2 + 4 + 1
    assert len({(each["prompt"], each["noise_seed"]) for each in sent[:-1]}) == 6
    assert sent[-1] == sent[-2]  # the probe for a result cache
    lines = (tmp_path / "out" / "clips.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["request"] for line in lines] == sent[2:6]
    for line in lines:
        assert Path(json.loads(line)["video"]).read_bytes().startswith(b"mp4 of ")
    assert record.valid is True
    assert record.metric("latency_s") is not None
    assert record.metric("peak_memory_bytes") == 12_500_000
    assert record.get("data", "repeat", "same_mp4") is True
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


def test_given_requests_are_varied_when_they_do_not_suffice(tmp_path: Path) -> None:
    made = module.make_requests([{**SMALL, "seed": 3}, SMALL], 5, 1)
    assert [each["prompt"] for each in made] == [
        "kite", "kite", "kite, take 2", "kite, take 2", "kite, take 3",
    ]  # fmt: skip
    assert len({(each["prompt"], each["noise_seed"]) for each in made}) == 5
    assert made[0]["fps"] == 24


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 3}', "[" * 100_000])
def test_a_line_that_is_no_request_is_refused_by_its_number(
    tmp_path: Path, bench: Bench, line: str
) -> None:
    with pytest.raises(OpError, match="line 2 of requests"):
        bench(requests=requests_file(tmp_path, SMALL, line))
    with pytest.raises(OpError, match="no request"):
        bench(requests=requests_file(tmp_path, ""))


@pytest.mark.parametrize(
    "url",
    ["", "localhost:80", "ftp://a", "http://", "http://u:p@h", "http://h?q=1", "http://h:99999"],
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(OpError, match="no address of a clip server"):
        Server.of(url)
    assert Server.of("https://h").connect(1.0).port == 443


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
        bench(count=2, warmup=0, out=str(tmp_path / "two"))


def test_some_failed_requests_make_it_invalid_and_the_others_are_kept(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].status = lambda number: 429 if number == 2 else 200
    record = bench()
    assert record.valid is False
    assert "1 requests failed: HTTP 429" in record.get("gates", "violations", 0)
    lines = (tmp_path / "out" / "clips.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2


def test_an_engine_that_caches_results_is_found_by_the_repeated_request(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].cache = True
    server[1].seconds = 0.1
    record = bench()
    assert record.valid is False
    assert any(text.startswith("result_cache") for text in record.get("gates", "violations"))


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
    assert "stages (the server does not tell them)" in record.get("coverage", "missing")
    assert record.get("identity", "engine") is None


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
    server[1].headers = {"X-Stage-Durations": '{"denoise": 900, "other": 100}',
                         "X-Server-Time-S": "1.0"}  # fmt: skip
    record = bench()
    assert record.metric("stage_share") == pytest.approx(0.9)
    assert "stages explain only 90.0 %" in " ".join(record.get("gates", "warnings"))


def test_an_answer_that_is_not_what_its_hash_says_is_a_failure(
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].headers = {"X-Video-Sha256": "0" * 64}
    with pytest.raises(OpError, match="sha256 is not the one"):
        bench()


def test_dumps_are_looked_for_and_projected_and_the_check_is_proposed(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    server[1].dumps = dumps
    asked = requests_file(tmp_path, {**SMALL, "num_frames": 9})
    record = bench(dumps=str(dumps), requests=asked)
    size = next(dumps.glob("*.safetensors")).stat().st_size
    assert record.get("data", "dump_bytes") == size
    assert record.get("data", "dump_bytes_projected") == 4 * size
    assert record.valid is True
    server[1].dumps = None
    second = bench(dumps=str(dumps), requests=asked, out=str(tmp_path / "two"), seed=9)
    assert second.valid is True  # the very same clips have their dumps already
    third = bench(dumps=str(dumps), out=str(tmp_path / "three"))
    assert "3 of 3 clips left no step dump" in third.get("gates", "violations", 0)


def test_dumps_that_would_fill_the_disk_are_refused_before_the_clock_runs(
    tmp_path: Path, bench: Bench, server: tuple[str, clips_server.Clips],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    server[1].dumps = dumps
    usage = shutil.disk_usage(dumps)._replace(free=(256 << 20) + 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OpError, match=r"4 dumps of .* GB are free"):
        bench(dumps=str(dumps), requests=requests_file(tmp_path, SMALL))
    assert len(server[1].bodies) == 1
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
    bench: Bench, server: tuple[str, clips_server.Clips]
) -> None:
    server[1].hold.clear()
    cancel = threading.Event()
    asked = threading.Timer(0.1, cancel.set)
    asked.start()
    with pytest.raises(Cancelled):
        bench(cancel=cancel)
    asked.join()


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
