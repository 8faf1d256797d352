"""Engines that hang, die or flood in each phase: a sentence with phase, reason, last lines."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.bench import run_here
from helpers.tiny_models import shared_gguf
from ikit_mcp.call import Cancelled, Progress
from ikit_mcp.registry import OpError

FAKES = Path(__file__).parents[1] / "fakes"
PHASES = ["import", "load", "warm-up", "round", "flags"]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the fake module where the worker finds it first; gives the call."""
    folder = tmp_path / "modules"
    folder.mkdir()
    shutil.copy(FAKES / "engine_xllamacpp.py", folder / "xllamacpp.py")
    shutil.copy(FAKES / "engine_server.py", folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def run(how: str, **arguments: Any) -> Any:
        monkeypatch.setenv("HOW", how)
        usual: dict[str, Any] = {
            "model": str(shared_gguf()), "engine": "llamacpp", "rounds": 2, "warmup": 2,
            "prompt_len": 8, "gen_len": 8, "threads": 1,
        }  # fmt: skip
        return run_here(tmp_path / "home", **usual | arguments)

    return run


def no_worker_left() -> bool:
    """Whether nothing of a worker is below this process."""
    children = psutil.Process().children(recursive=True)
    return not [c for c in children if "llamacpp_worker.py" in " ".join(c.cmdline())]


def test_the_fake_engine_is_a_working_one(engine: Any) -> None:
    record = engine("never:hang")
    assert record.metric("decode_tok_s") is not None
    assert len(record.get("data", "rounds")) == 2


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("way", "reason"),
    [("SIGKILL", "ended by SIGKILL"), ("SIGQUIT", "ended by SIGQUIT"),
     ("exit", "ended with status 7 and left no result")],
)  # fmt: skip
def test_a_worker_that_dies_is_told_with_its_phase(
    engine: Any, phase: str, way: str, reason: str
) -> None:
    with pytest.raises(OpError) as caught:
        engine(f"{phase}:{way}")
    text = caught.value.what
    assert f"failed in phase {phase}: " in text and reason in text
    assert f"  the engine is in {phase}" in text and caught.value.next_step
    assert no_worker_left()


@pytest.mark.parametrize("phase", ["import", "load", "flags"])
def test_an_exception_of_the_engine_is_told_with_its_phase(engine: Any, phase: str) -> None:
    with pytest.raises(OpError) as caught:
        engine(f"{phase}:raise")
    assert f"failed in phase {phase}: RuntimeError: made up" in caught.value.what


@pytest.mark.parametrize("phase", ["import", "load", "round"])
def test_a_worker_that_hangs_is_cancelled_with_all_its_children(engine: Any, phase: str) -> None:
    cancel = threading.Event()

    def report(progress: Progress) -> None:
        if f"{phase} " in progress.what:
            cancel.set()

    with pytest.raises(Cancelled):
        engine(f"{phase}:hang", cancel=cancel, report=report)
    assert no_worker_left()


def test_a_worker_that_hangs_is_ended_at_the_timeout_with_its_phase(engine: Any) -> None:
    with pytest.raises(OpError) as caught:
        engine("load:stuck", timeout=2)
    text = caught.value.what
    assert "failed in phase load: was ended after 2 s, the timeout" in text
    assert "  the engine is in load" in text
    assert no_worker_left()


def test_a_flood_of_log_ends_the_run(engine: Any) -> None:
    with pytest.raises(OpError) as caught:
        engine("load:flood")
    assert "failed in phase load: was ended: it had written more than 64 MiB" in caught.value.what


def test_keep_going_passes_over_a_failed_round_and_says_so(engine: Any) -> None:
    with pytest.raises(OpError):
        engine("round:raise", rounds=3)
    record = engine("round:raise", rounds=3, keep_going=True)
    assert [row["index"] for row in record.get("data", "rounds")] == [1, 2]
    assert record.get("data", "failed_rounds")[0]["index"] == 0
    assert "1 of 3 rounds failed" in record.get("gates", "warnings")
