"""The processes beside the checker: which Python, what is passed on, how they end."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fakes import clips
from helpers.bench import run_here
from ikit_mcp.call import Call, Cancelled, Progress, Settings
from ikit_mcp.registry import MEASURES, OpError, load
from ikit_mcp.runner import Control, Runner
from ikit_ops import clip_server
from ikit_ops.clips import torchside

WORKER = """
import json, os, pathlib
config = json.loads(pathlib.Path(os.environ["IKIT_CONFIG"]).read_text())
def tell(text):
    pathlib.Path(config["progress"]).write_text(text)
tell("not JSON"); tell(json.dumps({"done": 1, "total": 2, "what": "a step"}))
%s
"""


def call_of(folder: Path, **more: Any) -> Call:
    operation = load(None).get("clip_steps")
    return Call(operation=operation, args={}, settings=Settings(folder), scope=MEASURES, **more)


def worker(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    path = folder / "worker.py"
    path.write_text(WORKER % body, encoding="utf-8")
    monkeypatch.setattr(torchside, "WORKER", path)


def test_a_python_is_found_by_all_its_distributions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = call_of(tmp_path)
    assert torchside.find_python(call, ("msgspec", "psutil")) == sys.executable
    assert torchside.find_python(call, ("msgspec", "no-such-thing")) is None
    monkeypatch.setenv("IKIT_PYTHONS", "/bin/false")
    assert torchside.find_python(call, ("no-such-thing",)) is None


def test_what_the_worker_says_is_passed_on_and_its_result_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Progress] = []
    seen = threading.Event()

    def report(progress: Progress) -> None:
        heard.append(progress)
        if "a step" in progress.what:
            seen.set()
            (tmp_path / "go").touch()

    body = (
        f"import time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        'pathlib.Path(config["result"]).write_text(json.dumps({"clips": {}, "n": config["n"]}))'
    )
    worker(tmp_path, monkeypatch, body)
    found = torchside.run_worker(
        call_of(tmp_path / "home", report=report), sys.executable, {"n": 7}
    )
    assert found == {"clips": {}, "n": 7}
    assert seen.is_set()


@pytest.mark.parametrize(
    ("body", "word"),
    [("raise SystemExit('out of memory')", "ended with 1: out of memory"),
     ('pathlib.Path(config["result"]).write_text("{")', "ended with 0"),
     ('pathlib.Path(config["result"]).write_text("[]")', "left no result")],
)  # fmt: skip
def test_a_worker_that_leaves_nothing_is_told_by_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, word: str
) -> None:
    worker(tmp_path, monkeypatch, body)
    with pytest.raises(OpError, match=word):
        torchside.run_worker(call_of(tmp_path / "home"), sys.executable, {})


def test_a_cancelled_call_ends_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(tmp_path, monkeypatch, "import time; time.sleep(600)")
    cancel = threading.Event()

    def report(progress: Progress) -> None:
        if "a step" in progress.what:
            cancel.set()

    with pytest.raises(Cancelled):
        torchside.run_worker(
            call_of(tmp_path / "home", report=report, cancel=cancel), sys.executable, {}
        )


def test_a_python_with_torch_alone_checks_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        'told = {str(c["index"]): {"noise": {"ok": False, "detail": "seed 3"}}'
        ' for c in config["clips"]}\n'
        'pathlib.Path(config["result"]).write_text(json.dumps({"clips": told}))'
    )
    worker(tmp_path, monkeypatch, body)
    monkeypatch.setattr(
        torchside, "find_python", lambda call, needed: sys.executable if needed == ("torch",) else 0
    )
    _, line = clips.write_clip(tmp_path)
    manifest = clips.write_manifest(tmp_path, [line])
    record = run_here(
        tmp_path / "home", "clip_steps", manifest=str(manifest), dumps=str(tmp_path / "dumps")
    )
    assert record.get("data", "verdict") == "noise"


def test_devices_are_chosen_by_name_or_uuid() -> None:
    there = Call.devices()
    assert torchside.choose(there, "cpu").id == "cpu"
    assert torchside.choose(there, str(there[-1].uuid)).id == "cpu"
    with pytest.raises(OpError, match="use one of") as caught:
        torchside.choose(there, "tpu")
    assert "cpu" in caught.value.next_step or "cpu" in str(caught.value)


SERVER = """
import json, os, pathlib, time
config = json.loads(pathlib.Path(os.environ["IKIT_CONFIG"]).read_text())
assert os.environ["CLIP_STEP_DUMP_DIR"] == config["dumps"]
pathlib.Path(config["address"]).write_text("http://127.0.0.1:1")
%s
"""


def serve(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, **control: Any) -> Any:
    script = folder / "server.py"
    script.write_text(SERVER % body, encoding="utf-8")
    monkeypatch.setattr(clip_server, "SERVER", script)
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: sys.executable)
    (folder / "model_index.json").write_text("{}", encoding="utf-8")
    runner = Runner(load(None), Settings(folder / "home"))
    request = runner.check("serve_clips", {"model": str(folder), "dumps": str(folder)})
    return runner.here(request, Control(**control)).reply


def test_the_servers_address_is_told_and_cancelling_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = threading.Event()
    heard: list[str] = []

    def report(progress: Progress) -> None:
        heard.append(progress.what)
        cancel.set()

    with pytest.raises(Cancelled):
        serve(tmp_path, monkeypatch, "time.sleep(600)", cancel=cancel, report=report)
    assert "clips at http://127.0.0.1:1" in heard[0]


def test_a_server_that_dies_is_told_by_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OpError, match="ended with 1: the port is taken"):
        serve(tmp_path, monkeypatch, "raise SystemExit('the port is taken')")
    assert serve(tmp_path, monkeypatch, "")["returncode"] == 0
