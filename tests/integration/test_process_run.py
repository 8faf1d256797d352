"""What a child gets, what comes back of it, and how it is asked to end."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import anyio
import psutil
import pytest

from fakes.process_trees import (
    CALLER,
    age,
    caller_environment,
    handles,
    measured_supervisors,
    new_tag,
    sleepers,
    tagged,
    tree_command,
    until,
)
from ikit_mcp.process import supervised
from ikit_mcp.process.platform import start_time
from ikit_mcp.process.procfs import stat_of
from ikit_mcp.process.run import run, run_async
from ikit_mcp.registry import OpError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a supervisor")
measured = pytest.fixture(autouse=True)(measured_supervisors)
MIB = 1 << 20


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs the code."""
    return [sys.executable, "-S", "-c", textwrap.dedent(code), *arguments]


# --- what a child gets ---------------------------------------------------------------------


def test_a_child_reads_nothing_from_the_callers_standard_input() -> None:
    assert run(python("import sys; print(repr(sys.stdin.read()))"), timeout=30).stdout == "''\n"


def test_a_child_starts_with_default_signals_even_below_nohup() -> None:
    code = "import signal; print([signal.getsignal(s) for s in (1, 2)])"
    caller = "from ikit_mcp.process.run import run; import sys; "
    caller += "print(run(sys.argv[1:], timeout=30).stdout, end='')"
    shell = ["sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"]
    done = subprocess.run(
        [*shell, sys.executable, "-c", caller, *python(code)],
        env=caller_environment(),
        capture_output=True,
        check=True,
    )
    # An interpreter that is told to ignore SIGINT does not catch it.
    assert b"SIG_DFL" in done.stdout.split(b",")[0]
    assert b"default_int_handler" in done.stdout


def test_a_child_leads_its_own_session_and_dumps_no_core() -> None:
    code = "import os, resource; print(os.getsid(0) == os.getpid(), resource.getrlimit(4))"
    assert resource.RLIMIT_CORE == 4
    assert run(python(code), timeout=30).stdout == "True (0, 0)\n"


def test_the_environment_defaults_to_ours_less_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MADE_UP_TOKEN", "made-up-value-0001")
    monkeypatch.setenv("MADE_UP_SETTING", "7")
    code = "import os; print([n for n in sorted(os.environ) if n.startswith('MADE_UP')])"
    assert run(python(code), timeout=30).stdout == "['MADE_UP_SETTING']\n"
    given = {"MADE_UP_TOKEN": "made-up-value-0002"}
    assert run(python(code), timeout=30, env=given).stdout == "['MADE_UP_TOKEN']\n"


def test_arguments_and_variables_may_be_any_bytes(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe\n'\"$x")
    code = "import os, sys; print(os.fsencode(sys.argv[1]) == os.environb[b'ODD'])"
    assert run(python(code, odd), timeout=30, env={"ODD": odd}, cwd=tmp_path).stdout == "True\n"


def test_descriptors_go_to_the_program_or_to_the_supervisor_never_to_both() -> None:
    ours, theirs = socket.socketpair()
    held, holder = os.pipe()
    code = """
        import os, sys
        given, kept = map(int, sys.argv[1:])
        os.write(given, b"hello")
        try:
            os.fstat(kept)
        except OSError:
            print("not here")
    """
    command = python(code, str(theirs.fileno()), str(holder))
    result = run(command, timeout=30, pass_fds=[theirs.fileno()], hold_fds=[holder])
    assert result.stdout == "not here\n"
    theirs.close()
    os.close(holder)
    assert ours.recv(16) == b"hello"
    assert ours.recv(16) == b""  # nobody else has it
    assert os.read(held, 1) == b""
    ours.close()
    os.close(held)


def test_memory_is_limited_where_asked_and_not_in_a_run_below() -> None:
    code = "import sys; data = bytearray(400 << 20); print(len(data) >> 20)"
    below = f"""
        import sys
        from ikit_mcp.process.run import run
        print(run([sys.executable, "-S", "-c", {code!r}], timeout=30).stdout, end="")
        bytearray(400 << 20)
    """
    limited = run(python(code), timeout=30, memory_limit=200 << 20)
    assert limited.returncode == 1 and "MemoryError" in limited.stderr
    command = [sys.executable, "-c", textwrap.dedent(below)]
    nested = run(command, timeout=30, env=caller_environment(), memory_limit=200 << 20)
    assert nested.stdout == "400\n"
    assert nested.returncode == 1 and "MemoryError" in nested.stderr


def test_closed_standard_streams_of_the_caller_do_no_harm() -> None:
    code = """
        import os, sys
        os.closerange(0, 3)
        from ikit_mcp.process.run import run
        result = run([sys.executable, "-S", "-c", "print('out', flush=True); 1 / 0"], timeout=30)
        good = result.stdout == "out\\n" and "ZeroDivisionError" in result.stderr
        os._exit(0 if good else 1)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, env=caller_environment(), check=False).returncode == 0


# --- what comes back -----------------------------------------------------------------------


def test_a_failing_program_is_a_result() -> None:
    result = run(
        python("import sys; print('a'); print('b', file=sys.stderr); sys.exit(3)"), timeout=30
    )
    assert (result.returncode, result.signal, result.ok) == (3, None, False)
    assert (result.stdout, result.stderr) == ("a\n", "b\n")
    assert result.supervised and not result.lost and 0 < result.seconds < 30
    assert result.leftovers == () and not result.killed


def test_a_program_ended_by_a_signal_says_which() -> None:
    result = run(python("import os; os.kill(os.getpid(), 15)"), timeout=30)
    assert (result.returncode, result.signal) == (-15, 15)


def test_the_peak_memory_is_that_of_the_largest_process() -> None:
    code = """
        import subprocess, sys
        subprocess.run([sys.executable, "-S", "-c", "len(b'x' * (200 << 20))"], check=True)
    """
    peak = run(python(code), timeout=30).max_rss_bytes
    assert peak is not None and 200 * MIB < peak < 300 * MIB


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (["/no/such/program"], {}, "/no/such/program"),
        (["no-such-program-here"], {}, "no-such-program-here"),
        ([os.devnull], {}, "Permission denied"),
        ([], {}, "no program"),
        (["true"], {"cwd": "/no/such/folder"}, "/no/such/folder"),
        (["true"], {"stdout_path": "/no/such/folder/out"}, "/no/such/folder/out"),
        (["true", "a\0b"], {}, "NUL"),
        (["true"], {"env": {"A=B": "c"}}, "'A'.*variable"),
        (["true"], {"timeout": 0}, "timeout"),
        (["true"], {"timeout": math.nan}, "timeout"),
        (["true"], {"grace": -1}, "grace"),
        (["true"], {"hold_fds": [999999]}, "descriptor"),
        (["true"], {"memory_limit": 1 << 70}, "memory_limit"),
    ],
)
def test_what_cannot_be_started_is_told_by_name(
    command: list[str], options: dict[str, object], words: str
) -> None:
    with pytest.raises(OpError, match=words) as caught:
        run(command, **{"timeout": 30, **options})  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.next_step


def test_a_script_without_its_interpreter_is_told(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n", encoding="utf-8")
    script.chmod(0o755)
    with pytest.raises(OpError, match="script") as caught:
        run([script], timeout=30)
    assert "interpreter" in caught.value.next_step


def test_a_relative_program_is_found_from_its_working_directory(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\npwd\n", encoding="utf-8")
    script.chmod(0o755)
    assert run(["./script"], timeout=30, cwd=tmp_path).stdout == f"{tmp_path}\n"


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    code = "import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb')"
    assert run(python(code), timeout=30, stdout_path=path).stdout == "a\ufffd\ufffdb"
    assert path.read_bytes() == b"a\xff\xfeb"
    assert path.stat().st_mode & 0o777 == 0o600


def test_both_streams_may_go_to_one_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "log"
    code = "import os; [os.write(1 + i % 2, b'%d ' % i) for i in range(6)]"
    result = run(python(code), timeout=30, stdout_path=path, stderr_path=path)
    assert result.stdout == path.read_text(encoding="utf-8") == "0 1 2 3 4 5 "
    assert (result.stderr, result.stderr_bytes) == ("", 0)


def test_an_output_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept", encoding="utf-8")
    (tmp_path / "out").symlink_to(tmp_path / "precious")
    with pytest.raises(OpError, match="out"):
        run(["true"], timeout=30, stdout_path=tmp_path / "out")
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "kept"


def test_a_long_output_keeps_both_ends_and_whole_characters() -> None:
    code = "import sys; sys.stdout.buffer.write(b'x' + 'é'.encode() * 1000)"
    result = run(python(code), timeout=30, keep=100)
    head, tail = result.stdout.split("\n[... 1801 bytes left out ...]\n")
    assert head == "x" + "é" * 49
    assert tail == "é" * 50
    assert result.stdout_bytes == 2001


def test_a_gigabyte_of_output_stays_out_of_this_processs_memory(tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    command = ["head", "-c", "1000000000", "/dev/zero"]
    result = run(command, timeout=120, stdout_path=tmp_path / "out")
    assert result.ok and result.stdout_bytes == 10**9
    assert "[... 999868928 bytes left out ...]" in result.stdout
    assert psutil.Process().memory_info().rss - before < 32 * MIB


def test_a_capped_output_ends_the_run_and_is_cut_to_the_cap(tmp_path: Path) -> None:
    path = tmp_path / "out"
    result = run(["cat", "/dev/zero"], timeout=60, stdout_path=path, byte_cap=10 * MIB)
    assert result.capped and result.killed and not result.timed_out and not result.ok
    assert path.stat().st_size == result.stdout_bytes == 10 * MIB


def test_a_result_does_not_wait_for_a_daemon_that_holds_the_output() -> None:
    tag = new_tag()
    result = run(tree_command(tag, "exit"), timeout=50)
    assert result.returncode == 0 and result.stdout == "ready\n" and result.seconds < 40
    assert len(result.leftovers) == 2 and tagged(tag) == []


def test_helpers_that_end_with_their_program_are_no_leftovers() -> None:
    code = """
        import os, sys
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent is gone
            os._exit(0)
    """
    assert run(python(code), timeout=30).leftovers == ()


# --- how it is asked to end ----------------------------------------------------------------


def test_a_timeout_interrupts_first_and_waits_for_a_report() -> None:
    code = """
        import signal, sys, time
        def report(*_):
            print("report written", flush=True)
            sys.exit(5)
        signal.signal(signal.SIGINT, report)
        print("ready", flush=True)
        time.sleep(60)
    """
    result = run(python(code), timeout=2, grace=20)
    assert result.timed_out and not result.killed
    assert (result.returncode, result.stdout) == (5, "ready\nreport written\n")


def test_the_grace_is_for_the_whole_group_of_a_leader_that_ends_at_once() -> None:
    child = """
        import signal, sys, time
        def report(*_):
            time.sleep(0.7)
            print("written", flush=True)
            sys.exit()
        signal.signal(signal.SIGINT, report)
        print("ready", flush=True)
        time.sleep(60)
    """
    leader = f"import subprocess as s; s.Popen({python(child)!r}); import time; time.sleep(60)"
    result = run(python(leader), timeout=2, grace=20)
    assert result.signal == signal.SIGINT and result.leftovers == ()
    assert result.stdout == "ready\nwritten\n"


def test_who_ignores_every_signal_is_killed_after_the_grace() -> None:
    code = """
        import signal, time
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
    """
    result = run(python(code), timeout=1, grace=0.5)
    assert result.timed_out and result.killed and result.signal == signal.SIGKILL
    assert 1.5 <= result.seconds < 30


def test_without_interrupting_the_kill_comes_at_once() -> None:
    code = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('interrupted')"
    result = run(python(code), timeout=1, grace=30, interrupt=False)
    assert result.signal == signal.SIGKILL and result.stdout == "" and result.seconds < 30


def test_a_stopped_program_is_woken_to_hear_the_interrupt() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP); print('awake')"
    result = run(python(code), timeout=1, grace=30)
    assert not result.killed and result.signal == signal.SIGINT


def test_a_fork_bomb_is_over_when_the_run_is() -> None:
    tag = new_tag()
    code = """
        import os, sys, time
        for depth in range(7):  # doubles until there are 128, half of them in new sessions
            if os.fork() == 0 and depth % 2:
                os.setsid()
        while True:  # and each of them is replaced by its child, for ever
            if os.fork():
                os._exit(0)
            time.sleep(0.001)
    """
    leader = f"import subprocess, time; subprocess.Popen({python(code, tag)!r}); time.sleep(60)"
    before = psutil.Process().memory_info().rss
    result = run(python(leader), timeout=2, grace=0)
    assert result.survivors == () and tagged(tag) == []
    assert psutil.Process().memory_info().rss - before < 32 * MIB


def test_a_cancel_that_comes_before_the_start_ends_it_all_the_same() -> None:
    cancel = threading.Event()
    cancel.set()
    result = run(["sleep", "60"], timeout=60, cancel=cancel, grace=30)
    assert result.cancelled and result.seconds < 30


def test_an_infinite_timeout_is_none() -> None:
    assert run(["true"], timeout=math.inf).ok


def test_an_exception_of_the_callers_own_ends_the_run_before_it_goes_on() -> None:
    pids: list[int] = []

    def fail(pid: int) -> None:
        pids.append(pid)
        raise ValueError("made up")

    with pytest.raises(ValueError, match="made up"):
        run(["sleep", "60"], timeout=60, grace=5, on_start=fail)
    assert start_time(pids[0]) is None


def test_an_argument_that_the_kernel_refuses_is_told() -> None:
    with pytest.raises(OpError, match="Argument list too long"):
        run(["true", "x" * (1 << 20)], timeout=30)


def test_a_waiting_supervisor_hardly_costs_anything() -> None:
    """It must not disturb what is measured: a look every quarter second, and few walks."""
    costs: list[float] = []
    cancel = threading.Event()

    def watch(leader: int) -> None:
        stat = stat_of(leader)
        assert stat is not None
        supervisor = psutil.Process(stat.ppid)
        before = sum(supervisor.cpu_times()[:2])
        assert until(lambda: age(leader) >= 2)
        costs.append(sum(supervisor.cpu_times()[:2]) - before)
        cancel.set()

    assert run(["sleep", "60"], timeout=60, cancel=cancel, on_start=watch).cancelled
    assert costs[0] <= 0.05 * 2


def test_an_interrupted_caller_ends_the_run_gently_first(tmp_path: Path) -> None:
    code = """
        import pathlib, sys, time
        ready, report = map(pathlib.Path, sys.argv[1:])
        try:
            ready.touch()
            time.sleep(60)
        except KeyboardInterrupt:
            report.write_text("told")
    """
    ready, report = tmp_path / "ready", tmp_path / "report"
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, *python(code, str(ready), str(report))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=caller_environment(),
    )
    with caller:
        assert caller.stdout is not None and caller.stderr is not None
        leader = int(caller.stdout.readline())
        assert until(ready.exists)
        caller.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in caller.stderr.read()
    assert start_time(leader) is None
    assert report.read_text(encoding="utf-8") == "told"


# --- runs below runs -----------------------------------------------------------------------

WORKER = """
    import os, signal, sys, threading
    from ikit_mcp.process.run import run
    cancel = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: cancel.set())
    signal.signal(signal.SIGINT, lambda *_: print("worker interrupted", flush=True))
    def started(pid):
        print(os.getppid(), pid, flush=True)
    result = run(sys.argv[1:], timeout=60, grace=20, cancel=cancel, env=dict(os.environ),
                 on_start=started)
    print(result.stdout, result.cancelled, result.returncode, flush=True)
"""
ENGINE = """
    import os, signal, sys, time
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
    def report(*_):
        time.sleep(0.5)
        print("engine reports", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGINT, report)
    print("engine ready", flush=True)
    time.sleep(60)
"""


def start_worker(
    tmp_path: Path, tag: str, cancel: threading.Event
) -> tuple[threading.Thread, list[object]]:
    """A run of a worker that runs an engine, both under way; thread and (later) result."""
    results: list[object] = []
    command = [sys.executable, "-c", textwrap.dedent(WORKER), *python(ENGINE, tag)]

    def body() -> None:
        results.append(
            run(
                command,
                timeout=60,
                inner_grace=20,
                cancel=cancel,
                env=caller_environment(),
                stdout_path=tmp_path / "worker",
            )
        )

    thread = threading.Thread(target=body)
    thread.start()
    return thread, results


def engine_of(tmp_path: Path) -> tuple[int, int]:
    """The pids of the outer supervisor and of the engine's leader, once they are told."""
    path = tmp_path / "worker"
    assert until(lambda: path.exists() and path.read_text(encoding="utf-8").count("\n"))
    supervisor, engine = path.read_text(encoding="utf-8").split()[:2]
    assert until(lambda: handles(int(engine), signal.SIGINT, "SigCgt"))
    return int(supervisor), int(engine)


def test_an_outer_cancel_reaches_the_engine_through_its_worker(tmp_path: Path) -> None:
    tag, cancel = new_tag(), threading.Event()
    thread, results = start_worker(tmp_path, tag, cancel)
    engine_of(tmp_path)
    cancel.set()
    thread.join(50)
    (result,) = results
    told = (tmp_path / "worker").read_text(encoding="utf-8")
    assert "engine ready\nengine reports\n True 7" in told
    assert "worker interrupted" not in told  # only the innermost run interrupts
    assert result.cancelled and not result.killed  # type: ignore[attr-defined]
    assert tagged(tag) == []


@pytest.mark.parametrize("which", ["inner", "outer"])
def test_a_killed_supervisor_loses_nobody_at_either_level(tmp_path: Path, which: str) -> None:
    tag = new_tag()
    thread, results = start_worker(tmp_path, tag, threading.Event())
    outer, engine = engine_of(tmp_path)
    leader = stat_of(engine)
    assert leader is not None
    inner = leader.ppid
    os.kill(inner if which == "inner" else outer, signal.SIGKILL)
    thread.join(50)
    (result,) = results
    assert result.lost == (which == "outer")  # type: ignore[attr-defined]
    assert tagged(tag) == [] and start_time(inner) is None


# --- coroutines ----------------------------------------------------------------------------


def test_a_coroutine_gets_the_result_and_the_errors() -> None:
    async def body() -> None:
        assert (await run_async(["echo", "hi"], timeout=30)).stdout == "hi\n"
        with pytest.raises(OpError):
            await run_async(["/no/such/program"], timeout=30)

    asyncio.run(body())


def test_a_cancelled_task_ends_the_tree_before_it_goes_on() -> None:
    tag = new_tag()

    async def body() -> None:
        task = asyncio.create_task(run_async(tree_command(tag, "all"), timeout=60, grace=5))
        while len(sleepers(tag)) < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # an impatient caller
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tagged(tag) == []

    asyncio.run(asyncio.wait_for(body(), 50))


def test_an_anyio_scope_that_is_left_ends_the_tree_without_spinning() -> None:
    tag = new_tag()
    wakes = 0

    async def count_wakes() -> None:
        nonlocal wakes
        while True:
            await anyio.sleep(0)
            wakes += 1

    async def body() -> None:
        with anyio.move_on_after(50):
            async with anyio.create_task_group() as group:
                group.start_soon(run_it)
                while len(sleepers(tag)) < 4:
                    await anyio.sleep(0.01)
                group.cancel_scope.cancel()
        assert tagged(tag) == []

    async def run_it() -> None:
        await run_async(tree_command(tag, "all"), timeout=60, grace=5)

    before = psutil.Process().cpu_times()
    anyio.run(body)
    after = psutil.Process().cpu_times()
    assert after.user - before.user < 5
    assert wakes == 0


# --- supervisors in trouble ----------------------------------------------------------------


def test_a_supervisor_that_is_told_to_end_ends_its_tree_first() -> None:
    tag = new_tag()
    leaders: list[int] = []
    results: list[object] = []

    def body() -> None:
        command = tree_command(tag, "all")
        results.append(run(command, timeout=60, grace=5, on_start=leaders.append))

    thread = threading.Thread(target=body)
    thread.start()
    assert until(lambda: len(sleepers(tag)) == 4)
    leader = stat_of(leaders[0])
    assert leader is not None
    os.kill(leader.ppid, signal.SIGTERM)
    os.kill(leader.ppid, signal.SIGHUP)
    thread.join(50)
    assert results[0].cancelled and not results[0].lost  # type: ignore[attr-defined]
    assert tagged(tag) == []


def test_a_supervisor_that_is_stopped_is_given_up_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervised, "LOST_PATIENCE", 0.5)
    tag = new_tag()
    stopped: list[int] = []

    def stop(leader: int) -> None:
        stat = stat_of(leader)
        assert stat is not None and until(lambda: len(sleepers(tag)) == 4)
        assert until(lambda: all(age(pid) >= 1 for pid in sleepers(tag)))
        os.kill(stat.ppid, signal.SIGSTOP)
        stopped.append(stat.ppid)

    result = run(tree_command(tag, "all"), timeout=3, grace=0.5, on_start=stop)
    assert result.lost and tagged(tag) == []
    assert start_time(stopped[0]) is None


def test_a_supervisor_runs_from_its_source_where_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(supervised.__file__).parent
    for name in ("supervisor.py", "procfs.py"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "platform.py").write_text("raise SystemExit('never imported')", "utf-8")
    monkeypatch.undo()
    monkeypatch.setattr(supervised, "__file__", str(tmp_path / "supervised.py"))
    assert supervised.supervisor_command()[-1] == str(tmp_path / "supervisor.py")
    assert run(["echo", "hi"], timeout=30).stdout == "hi\n"


def test_starting_a_run_imports_nothing_dear() -> None:
    code = """
        import sys
        from ikit_mcp.process import lock, run, secrets
        run.run(["true"], timeout=30)
        dear = {"asyncio", "anyio", "psutil", "ahocorasick_rs", "mcp", "numpy"}
        sys.exit(str(dear & set(sys.modules)) if dear & set(sys.modules) else 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = caller_environment()
    environment.pop("COVERAGE_PROCESS_CONFIG", None)
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_a_supervisor_that_dies_before_the_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "supervisor_command", lambda: ["true"])
    with pytest.raises(OpError, match="before the program ran"):
        run(["echo"], timeout=30)
    monkeypatch.setattr(supervised, "supervisor_command", lambda: ["/no/such/python"])
    with pytest.raises(OpError, match="cannot start a supervisor"):
        run(["echo"], timeout=30)


def test_who_cannot_be_killed_is_told_and_keeps_the_lock_until_he_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Signals that have no effect stand for a process in an uninterruptible driver call."""
    tag = new_tag()
    allowed = tmp_path / "allowed"
    wrapper = f"""
        import sys, os
        sys.path.insert(0, {str(Path(supervised.__file__).parent)!r})
        import supervisor
        kill = supervisor.send_signal
        supervisor.KILL_PATIENCE = 0.2
        supervisor.send_signal = lambda p, n: os.path.exists({str(allowed)!r}) and kill(p, n)
        sys.exit(supervisor.main())
    """
    monkeypatch.setattr(supervised, "supervisor_command", lambda: python(wrapper))
    reader, writer = os.pipe()
    result = run(tree_command(tag, "daemon"), timeout=1, grace=1, hold_fds=[writer])
    os.close(writer)
    os.set_blocking(reader, False)
    assert len(result.survivors) == len(tagged(tag)) == 1
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    allowed.touch()
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    assert tagged(tag) == []
    monkeypatch.undo()
    run(["true"], timeout=30)  # collects the supervisor that stayed
