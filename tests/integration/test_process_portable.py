"""Runs as on systems without a supervisor: the same calls, and fewer promises."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from fakes.process_trees import new_tag, sleepers, tagged, tree_command, until
from ikit_mcp.process import platform
from ikit_mcp.process.run import Result, run
from ikit_mcp.registry import OpError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="uses signals")


@pytest.fixture(autouse=True)
def _no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "SUPERVISED", False)


def python(code: str) -> list[str]:
    """A command that runs the code."""
    return [sys.executable, "-S", "-c", code]


def test_a_program_runs_to_its_end() -> None:
    pids: list[int] = []
    code = "import sys; print(repr(sys.stdin.read())); print('e', file=sys.stderr); sys.exit(3)"
    result = run(python(code), timeout=30, on_start=pids.append)
    assert (result.returncode, result.stdout, result.stderr) == (3, "''\n", "e\n")
    assert not result.supervised and result.max_rss_bytes is None and len(pids) == 1


def test_a_timeout_interrupts_then_kills_what_is_seen() -> None:
    tag = new_tag()
    result = run(tree_command(tag, "plain"), timeout=2, grace=20, env=dict(os.environ))
    assert result.timed_out and result.signal == signal.SIGINT and not result.killed
    assert until(lambda: tagged(tag) == [])
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    result = run(python(code), timeout=0.5, grace=0.2)
    assert result.killed and result.signal == signal.SIGKILL


def test_a_cancel_ends_children_in_sessions_of_their_own() -> None:
    tag = new_tag()
    child = [sys.executable, "-S", "-c", f"import time; time.sleep(60) #{tag}"]
    code = f"import subprocess as s, time; s.Popen({child!r}, start_new_session=True); "
    cancel = threading.Event()
    results: list[Result] = []

    def body() -> None:
        command = python(code + "time.sleep(60)")
        results.append(run(command, timeout=60, interrupt=False, cancel=cancel))

    thread = threading.Thread(target=body)
    thread.start()
    assert until(lambda: len(sleepers(tag)) == 2)  # the leader's line names the child's
    cancel.set()
    thread.join(30)
    assert results[0].cancelled and len(results[0].leftovers) == 1
    assert until(lambda: tagged(tag) == [])


def test_a_leader_with_runs_of_its_own_is_asked_by_sigterm() -> None:
    assert run(python("import time; time.sleep(60)"), timeout=1, inner_grace=5).signal == 15


def test_a_capped_output_ends_the_run() -> None:
    result = run(["cat", "/dev/zero"], timeout=60, byte_cap=1 << 20)
    assert result.capped and result.stdout_bytes == 1 << 20


def test_what_cannot_be_started_is_told() -> None:
    with pytest.raises(OpError, match="/no/such/program"):
        run(["/no/such/program"], timeout=30)
    with pytest.raises(OpError, match="/no/such/folder"):
        run(["true"], timeout=30, cwd="/no/such/folder")


def test_an_exception_in_between_leaves_nothing() -> None:
    pids: list[int] = []

    def fail(pid: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(["sleep", "60"], timeout=60, on_start=fail)
    assert platform.start_time(pids[0]) is None
