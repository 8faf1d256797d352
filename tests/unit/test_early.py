"""What can be refused at once is refused before a call waits for its device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.bench import run_here
from ikit_mcp.call import Call, Settings
from ikit_mcp.evidence.record import Draft, EvidenceRecord
from ikit_mcp.process import devices, lock
from ikit_mcp.registry import DERIVES, MEASURES, Arg, OpError, Registry, load, operation
from ikit_mcp.registry import operations_in as declared_in
from ikit_mcp.runner import Control, Runner


@pytest.fixture(autouse=True)
def somebody_elses_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The devices of this machine, held: whoever waits for them waits for ever."""
    monkeypatch.setenv("IKIT_LOCK_DIR", str(tmp_path / "locks"))
    held = lock.acquire(devices.uuids_of("auto"), timeout=60, holder={"operation": "another"})
    yield
    held.release()


def refused(home: Path, name: str, arguments: Mapping[str, Any]) -> str:
    """What a call is refused with, without having waited."""
    runner = Runner(load(None), Settings(home))
    request = runner.check(name, arguments)
    assert request.needs_lock
    cancel, waited = threading.Event(), []

    def report(progress: Any) -> None:
        waited.append(progress)
        cancel.set()  # it waits: so it will be ended, and the test fails below

    with pytest.raises(OpError) as told:
        runner.here(request, Control(report=report, cancel=cancel))
    assert waited == []
    return told.value.what


LOST = "/nowhere/model.gguf"


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bench", {"model": LOST}, "no such file"),
        ("bench", {"model": LOST, "engine": "llamacpp"}, "no such file"),
        ("bench", {"model": "org/model", "roofline": "123456"}, "123456"),
        ("bench", {"model": "org/model", "reference": "123456"}, "123456"),
        ("bench", {"model": "org/model", "engine": "vllm", "url": "http://h"}, "url is for"),
        ("bench", {"model": "org/model", "python": "no-such-python"}, "no-such-python"),
        ("profile", {}, "either a command or a bench_id"),
        ("profile", {"bench_id": "123456"}, "123456"),
        ("measure_bandwidth", {"device": "cuda:0", "threads": 4}, "threads are for the CPU"),
        ("bench_clips", {"url": "x", "out": "/nowhere/new"}, "no address"),
        ("bench_clips", {"url": "http://h", "out": "/nowhere/new", "dumps": "/nowhere"},
         "no directory"),
        ("bench_clips", {"url": "http://h", "out": "/nowhere/new", "requests": "/nowhere"},
         "cannot be read"),
        ("bench_clips", {"url": "http://h", "out": "/etc"}, "not empty"),
        ("bench_clips", {"url": "http://h", "out": "/etc/hostname/new"}, "cannot be made"),
        ("clip_steps", {"manifest": "/nowhere", "dumps": "/etc", "reference": "/nowhere"},
         "model_index.json"),
    ],
)  # fmt: skip
def test_a_slip_is_told_while_another_holds_the_device(
    tmp_path: Path, name: str, arguments: dict[str, Any], said: str
) -> None:
    assert said in refused(tmp_path / "home", name, arguments)


class Two:
    """A plug-in of two operations: the outer asks the inner, which refuses early."""

    seen: list[Any] = []  # noqa: RUF012 -- what the test looks at


@operation("inner", ("inner",), "Asked.", [Arg("n", "integer", "Number")], effects=DERIVES,
           early=lambda arguments, settings: _refuse(arguments, settings))  # fmt: skip
def inner(call: Call, n: int | None) -> EvidenceRecord:
    Two.seen.append("ran")
    return call.save(Draft(kind="ceiling", claim_class="derived", valid=None, summary="inner"))


def _refuse(arguments: Mapping[str, Any], settings: Settings) -> None:
    Two.seen.append((dict(arguments), settings.home.name))
    if arguments["n"] == 3:
        raise OpError("n is 3", "give another")


@operation("outer", ("outer",), "Asks.", [Arg("n", "integer", "Number")], effects=MEASURES)
def outer(call: Call, n: int | None) -> EvidenceRecord:
    return call.invoke("inner", {"n": n})  # type: ignore[no-any-return]


def test_an_operation_that_is_asked_by_another_refuses_early_too(tmp_path: Path) -> None:
    import sys

    registry = Registry()
    for op in declared_in(sys.modules[__name__]):
        registry.add(op)
    runner = Runner(registry, Settings(tmp_path / "home"))
    held = Control(devices=frozenset(devices.uuids_of("auto")))
    Two.seen.clear()
    runner.here(runner.check("inner", {"n": 2}), Control())
    assert Two.seen == [({"n": 2}, "home"), "ran"]
    Two.seen.clear()
    with pytest.raises(OpError, match="n is 3"):
        runner.here(runner.check("outer", {"n": 3}), held)
    assert Two.seen == [({"n": 3}, "home")]


def test_what_is_right_runs_as_before(tmp_path: Path) -> None:
    """The early look is a look: it changes nothing that the call itself does."""
    record = run_here(tmp_path / "home", "measure_bandwidth", device="cpu", seconds=1, threads=1,
                      size_bytes=64 << 20)  # fmt: skip
    assert record.kind == "ceiling"
