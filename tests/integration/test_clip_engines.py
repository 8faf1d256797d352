"""A real engine served, timed and checked, from the request to the verdict.

The server and the replay run in a Python with torch (``make clips`` builds it and runs these);
everything else runs here.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import clips_python
from helpers.bench import run_here
from ikit_mcp.evidence.canonical import canonical_bytes
from ikit_ops.clips.client import Server
from ikit_ops.clips.reader import DumpReader

if os.environ.get("IKIT_TEST_CLIPS") != "1":
    pytest.skip("minutes long: make clips runs these", allow_module_level=True)
PYTHON = clips_python.python_of()
if PYTHON is None:
    pytest.skip("no Python with torch and diffusers: make clips builds it", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
RECIPE = {"negative_prompt": "blue kite waits", "max_sequence_length": 24}
SMALL = {"prompt": "red kite rises", "width": 256, "height": 192, "num_frames": 9, "fps": 24,
         "steps": 12, "guidance_scale": 3.0}  # fmt: skip
_MAKE = "import sys; from pathlib import Path; from fakes import clips_models as m\n" \
    "m.save_ltx(Path(sys.argv[1]))"  # fmt: skip


@pytest.fixture(autouse=True)
def python_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IKIT_PYTHONS", str(PYTHON))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ltx")
    paths = os.pathsep.join(str(ROOT / part) for part in ("ops", "tests", "."))
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([str(PYTHON), "-c", _MAKE, str(folder)], check=True, env=environment)
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.json"
    path.write_text(json.dumps(RECIPE), encoding="utf-8")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(model: Path, dumps: Path, recipe: Path, home: Path, *more: str) -> Iterator[Any]:
    """A running `ikit clips serve`: (url, process)."""
    port = free_port()
    command = [
        sys.executable, "-m", "ikit_mcp.cli", "clips", "serve", "--model", str(model), "--dumps",
        str(dumps), "--recipe", str(recipe), "--port", str(port), "--threads", "1", *more,
    ]  # fmt: skip
    environment = {**os.environ, "IKIT_HOME": str(home)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 100
        while ask(url, "GET", "/health")[0] != 200:
            assert process.poll() is None and time.monotonic() < deadline
            process.poll()
            threading.Event().wait(0.2)
        yield url, process
    finally:
        below = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        process.send_signal(signal.SIGINT)
        process.wait(60)
        _, alive = psutil.wait_procs(below, 20)
        assert not alive


def ask(url: str, method: str, path: str, body: Any = None) -> tuple[int, bytes, Any]:
    connection = Server.of(url).connect(100)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(), response.headers
    except (OSError, http.client.HTTPException):
        return 0, b"", {}
    finally:
        connection.close()


def requests_file(folder: Path) -> Path:
    path = folder / "requests.jsonl"
    path.write_text(json.dumps(SMALL) + "\n", encoding="utf-8")
    return path


def test_an_engine_is_timed_and_then_accepted(tmp_path: Path, model: Path, recipe: Path) -> None:
    dumps, home = tmp_path / "dumps", tmp_path / "home"
    dumps.mkdir()
    with serving(model, dumps, recipe, home, "--dtype", "bf16") as (url, _):
        for api, out in (("clips", "one"), ("videos", "two")):
            bench = run_here(
                home, "bench_clips", url=url, api=api, count=3, dumps=str(dumps),
                requests=str(requests_file(tmp_path)), out=str(tmp_path / out),
                seed=len(out),
            )  # fmt: skip
            assert bench.valid is True, bench.get("gates")
            share = bench.metric("stage_share")
            assert share is not None and share >= 0.97
            per_step = bench.metric("s_per_step")
            assert per_step is not None and per_step > 0
    record = run_here(
        home, "clip_steps", manifest=str(tmp_path / "one" / "clips.jsonl"), dumps=str(dumps),
        reference=str(model), recipe=str(recipe), decode=True, seed=3,
    )  # fmt: skip
    assert record.get("data", "verdict") == "pass", record.summary
    assert record.metric("clips_passed") == 3
    assert record.metric("steps_replayed") == 18
    names = {check["name"] for check in record.get("data", "clips", 0, "checks")}
    assert {"noise", "reference schedule", "replay", "clip"} <= names
    other = run_here(
        home, "clip_steps", manifest=str(tmp_path / "one" / "clips.jsonl"), dumps=str(dumps),
        reference=str(model), clips=1,
    )  # fmt: skip
    assert other.valid is not True  # another negative prompt than the engine was given
    assert other.get("data", "verdict") == "conditioning"


def test_requests_that_cannot_be_served_are_told_and_leave_nothing(
    tmp_path: Path, model: Path, recipe: Path
) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    with serving(model, dumps, recipe, tmp_path / "home", "--dtype", "fp32", "--queue", "1") as (
        url, _,
    ):  # fmt: skip
        asked = {**SMALL, "seed": 1}
        assert ask(url, "POST", "/clips", {**asked, "width": 250})[0] == 422
        told = json.loads(ask(url, "POST", "/clips", {**asked, "num_frames": 10})[1])
        assert told == {
            "error": "num_frames 10 cannot be made",
            "field": "num_frames",
            "nearest": 9,
        }
        assert ask(url, "POST", "/clips", {**asked, "colour": "red"})[0] == 422
        assert ask(url, "POST", "/clips", b"{")[0] == 400
        assert ask(url, "POST", "/clips", {**asked, "steps": 1})[0] == 422  # no schedule of one
        assert ask(url, "POST", "/clips", {**asked, "fps": 10**400})[0] == 422
        assert ask(url, "POST", "/other", asked)[0] == 404
        assert ask(url, "GET", "/other")[0] == 404
        assert json.loads(ask(url, "GET", "/v1/models")[1])["data"][0]["id"] == model.name
        assert list(dumps.iterdir()) == []
        status, mp4, headers = ask(url, "POST", "/clips", asked)
        assert status == 200
        assert (dumps / f"{headers['X-Video-Sha256']}.safetensors").exists()
        again = ask(url, "POST", "/clips", asked)
        assert again[1] == mp4  # the same request gives the same bytes
        answers: list[int] = []
        lanes = [
            threading.Thread(
                target=lambda n=n: answers.append(
                    ask(url, "POST", "/clips", {**asked, "seed": n, "steps": 100})[0]
                )
            )
            for n in range(6)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        assert 429 in answers and 200 in answers
        assert set(answers) <= {200, 429}
        dumps.chmod(0o500)
        moved = dumps.rename(tmp_path / "elsewhere")
        assert ask(url, "POST", "/clips", {**asked, "seed": 9})[0] == 500
        moved.chmod(0o700)


def test_a_server_that_is_asked_to_end_leaves_nothing_unfinished(
    tmp_path: Path, model: Path, recipe: Path
) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    answers: list[int] = []
    with serving(model, dumps, recipe, tmp_path / "home", "--dtype", "fp32") as (url, _):
        asked = {**SMALL, "seed": 1, "steps": 200}
        lane = threading.Thread(target=lambda: answers.append(ask(url, "POST", "/clips", asked)[0]))
        lane.start()
        while not list(dumps.glob(".*.partial")):
            threading.Event().wait(0.01)
    lane.join()
    assert answers[0] != 200
    assert list(dumps.iterdir()) == []


def test_a_server_takes_prompts_of_all_the_world_and_its_own_model_name_in_any_script(
    tmp_path: Path, model: Path, recipe: Path
) -> None:
    dumps, named = tmp_path / "dumps", tmp_path / "模型"
    dumps.mkdir()
    shutil.copytree(model, named)
    prompt = "\n赤い凧 é 🎬\r\n"
    mark = "mark-7f3a"
    fields = {"prompt": prompt, "negative_prompt": "grå", "size": "64x64", "num_frames": "9",
              "num_inference_steps": "2", "seed": "3", "noise_seed": "4"}  # fmt: skip
    parts = "".join(
        f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    with serving(named, dumps, recipe, tmp_path / "home", "--dtype", "fp32") as (url, _):
        connection = Server.of(url).connect(100)
        connection.request(
            "POST", "/v1/videos/sync", f"{parts}--{mark}--\r\n".encode(),
            {"Content-Type": f"Multipart/Form-Data; boundary={mark}"},
        )  # fmt: skip
        response = connection.getresponse()
        assert (response.status, response.read()[4:8]) == (200, b"ftyp")
        headers = response.headers
        connection.close()
    assert headers["X-Model"] == "%E6%A8%A1%E5%9E%8B"
    with DumpReader(dumps / f"{headers['X-Video-Sha256']}.safetensors") as reader:
        request = reader.request or {}
        assert (request["prompt"], request["seed"], request["noise_seed"]) == (prompt, 3, 4)
        followed = json.loads(reader.meta["recipe"])
        assert followed == {**RECIPE, "negative_prompt": "grå"}
        digest = hashlib.sha256(canonical_bytes(followed)).hexdigest()
        assert reader.meta["recipe_sha256"] == headers["X-Recipe-Sha256"] == digest


def test_a_server_that_is_killed_while_it_writes_leaves_no_named_dump(
    tmp_path: Path, model: Path, recipe: Path
) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    with serving(model, dumps, recipe, tmp_path / "home", "--dtype", "fp32") as (url, process):
        asked = {**SMALL, "seed": 1, "steps": 200}
        lane = threading.Thread(target=ask, args=(url, "POST", "/clips", asked))
        lane.start()
        while not list(dumps.glob(".*.partial")):
            threading.Event().wait(0.01)
        for child in psutil.Process(process.pid).children(recursive=True):
            if any("server.py" in word for word in child.cmdline()):
                child.kill()
        lane.join()
        process.wait(60)
    assert [path.suffix for path in dumps.iterdir()] == [".partial"]
    line = {"video": str(tmp_path / "clip.mp4"), "request": asked}
    (tmp_path / "clip.mp4").write_bytes(b"never answered")
    manifest = tmp_path / "clips.jsonl"
    manifest.write_text(json.dumps(line) + "\n", encoding="utf-8")
    record = run_here(tmp_path / "home", "clip_steps", manifest=str(manifest), dumps=str(dumps))
    assert record.get("data", "verdict") == "no_dump"
    with serving(model, dumps, recipe, tmp_path / "home", "--dtype", "fp32"):
        assert list(dumps.iterdir()) == []  # the next server cleared it


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(
    tmp_path: Path, model: Path, recipe: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    next((broken / "transformer").glob("*.safetensors")).write_bytes(b"broken")
    command = [sys.executable, "-m", "ikit_mcp.cli", "clips", "serve", "--model", str(broken),
               "--dumps", str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "IKIT_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "the model cannot be loaded" in done.stderr
