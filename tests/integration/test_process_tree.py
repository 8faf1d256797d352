"""However a run ends, and however its processes hide, nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakes.process_trees import (
    CALLER,
    SLEEPERS,
    age,
    caller_environment,
    measured_supervisors,
    new_tag,
    sleepers,
    tagged,
    tree_command,
    until,
)
from ikit_mcp.process.procfs import stat_of
from ikit_mcp.process.run import Result, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a supervisor")
measured = pytest.fixture(autouse=True)(measured_supervisors)

TABLE: dict[tuple[str, str], int] = {}
ENDINGS = ("timeout", "cancel", "leader", "supervisor", "caller TERM", "caller KILL")


@pytest.fixture(scope="module", autouse=True)
def _table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print who survived what, at the end."""
    yield
    lines = [f"{'survivors':10}" + "".join(f"{end:>13}" for end in ENDINGS)]
    for mode in SLEEPERS:
        counts = (TABLE.get((mode, end), "-") for end in ENDINGS)
        lines.append(f"{mode:10}" + "".join(f"{count:>13}" for count in counts))
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        print("", *lines, sep="\n")


def for_each_case(ending: str, check: Callable[[str, str], None]) -> None:
    """Run the check for every case at once, and count what each leaves."""

    def one(mode: str) -> None:
        tag = new_tag()
        check(mode, tag)
        TABLE[mode, ending] = len(tagged(tag))

    with ThreadPoolExecutor(len(SLEEPERS)) as pool:
        for done in [pool.submit(one, mode) for mode in SLEEPERS]:
            done.result()
    assert {mode: TABLE[mode, ending] for mode in SLEEPERS} == dict.fromkeys(SLEEPERS, 0)


class Background:
    """A tree that runs in a thread of this process."""

    def __init__(self, tag: str, mode: str) -> None:
        self.cancel = threading.Event()
        self.leader = 0
        self.result: Result | None = None
        self._thread = threading.Thread(target=self._run, args=(tag, mode))
        self._thread.start()

    def _run(self, tag: str, mode: str) -> None:
        self.result = run(
            tree_command(tag, mode),
            timeout=60,
            grace=5,
            env=dict(os.environ),
            cancel=self.cancel,
            on_start=self._note,
        )

    def _note(self, pid: int) -> None:
        self.leader = pid

    def join(self) -> Result:
        """The result, once the run has ended."""
        self._thread.join(30)
        assert self.result is not None
        return self.result


def test_after_a_timeout_nothing_is_left() -> None:
    """The time begins before the tree stands, so the leader's word says that it stood."""

    def check(mode: str, tag: str) -> None:
        result = run(tree_command(tag, mode), timeout=4, grace=5, env=dict(os.environ))
        assert result.stdout == "ready\n"
        assert result.timed_out == (mode != "exit")

    for_each_case("timeout", check)


def test_after_a_cancel_nothing_is_left() -> None:
    def check(mode: str, tag: str) -> None:
        background = Background(tag, mode)
        assert mode == "exit" or until(lambda: len(sleepers(tag)) == SLEEPERS[mode])
        background.cancel.set()
        result = background.join()
        assert mode == "exit" or (result.cancelled and result.signal == signal.SIGINT)

    for_each_case("cancel", check)


def test_after_the_leaders_death_nothing_is_left() -> None:
    def check(mode: str, tag: str) -> None:
        background = Background(tag, mode)
        if mode != "exit":  # there, it has gone by itself
            assert until(lambda: len(sleepers(tag)) == SLEEPERS[mode])
            os.kill(background.leader, signal.SIGKILL)
        result = background.join()
        assert len(result.leftovers) == SLEEPERS[mode]
        assert not result.timed_out and not result.cancelled

    for_each_case("leader", check)


def test_after_the_supervisors_death_nothing_is_left() -> None:
    def check(mode: str, tag: str) -> None:
        background = Background(tag, mode)
        if mode != "exit":
            assert until(lambda: len(sleepers(tag)) == SLEEPERS[mode])
            assert until(lambda: all(age(pid) >= 1 for pid in sleepers(tag)))
            leader = stat_of(background.leader)
            assert leader is not None
            os.kill(leader.ppid, signal.SIGKILL)
        result = background.join()
        assert result.lost == (mode != "exit")
        assert result.survivors == ()

    for_each_case("supervisor", check)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_after_the_callers_death_nothing_is_left(number: signal.Signals) -> None:
    def check(mode: str, tag: str) -> None:
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER, *tree_command(tag, mode)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=caller_environment(),
        )
        with caller:
            assert caller.stdout is not None
            assert caller.stdout.readline()
            if mode == "exit":
                assert caller.stdout.readline() == b"over 0\n"
            assert mode == "exit" or until(lambda: len(sleepers(tag)) == SLEEPERS[mode])
            caller.send_signal(number)
            assert caller.wait(10) == -number
        assert until(lambda: not [pid for pid in tagged(tag) if pid != caller.pid])

    for_each_case(f"caller {number.name[3:]}", check)
