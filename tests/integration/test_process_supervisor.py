"""A supervisor by itself: what it hears, what it tells, and whom it outlives."""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from fakes.process_trees import (
    CALLER,
    SLEEPERS,
    caller_environment,
    handles,
    new_tag,
    sleepers,
    tagged,
    tree_command,
    until,
)
from ikit_mcp.process.platform import start_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs a supervisor")
SPEC: dict[str, Any] = {
    "hold": [],
    "pass": [],
    "cwd": None,
    "timeout": 60.0,
    "grace": 50.0,
    "gentle": "group",
    "byte_cap": None,
    "memory_limit": None,
    "nested": False,
}


class Direct:
    """A supervisor started by the test itself, which holds the other end of its socket."""

    def __init__(self, argv: list[str], patch: str = "", **changes: Any) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.heard: list[tuple[str, Any]] = []
        null = os.open(os.devnull, os.O_RDWR)
        spec = {
            **SPEC,
            "control": theirs.fileno(),
            "parent": os.getpid(),
            "stdout": null,
            "stderr": null,
            "argv": [word.encode() for word in argv],
            "path": argv[0].encode(),
            "env": {key.encode(): value.encode() for key, value in os.environ.items()},
            **changes,
        }
        first = "import sys\nfrom ikit_mcp.process import supervisor as s\n"
        code = f"{first}{textwrap.dedent(patch)}\nsys.exit(s.main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno(), null],
            env=caller_environment(),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(marshal.dumps(spec))
        self.process.stdin.close()
        theirs.close()
        os.close(null)

    def hear(self, kind: str) -> Any:
        """The first message of this kind that was not given yet; None at the socket's end."""
        while not any(message[0] == kind for message in self.heard):
            assert select.select([self.socket], [], [], 30)[0], f"no message {kind!r}"
            data = self.socket.recv(1 << 18)
            self.heard.append(marshal.loads(data) if data else (kind, None))
        found = next(message for message in self.heard if message[0] == kind)
        self.heard.remove(found)
        return found[1]

    def wait(self) -> int:
        """The exit status, once it has ended."""
        return self.process.wait(30)


def test_it_tells_the_start_the_tree_and_the_end() -> None:
    direct = Direct([sys.executable, "-S", "-c", "import time; time.sleep(0.5)"])
    leader = direct.hear("begun")
    assert (leader, start_time(leader)) in direct.hear("tree")
    end = direct.hear("end")
    assert end["status"] == 0 and end["reason"] == "" and end["leftovers"] == []
    assert end["seconds"] >= 0.5 and end["max_rss_bytes"] > 1 << 20
    assert direct.wait() == 0
    direct.socket.close()


def test_a_closed_lifeline_kills_at_once_without_the_grace() -> None:
    tag = new_tag()
    direct = Direct(tree_command(tag, "all"), gentle="leader")
    assert until(lambda: len(sleepers(tag)) == SLEEPERS["all"])
    direct.socket.close()
    assert direct.wait() == 0
    assert tagged(tag) == []


def test_a_caller_that_is_not_its_parent_any_more_is_dead_to_it() -> None:
    """A fork of the caller may hold the lifeline open after the caller's death."""
    direct = Direct(["/bin/sleep", "60"], parent=1)
    end = direct.hear("end")
    assert end["reason"] == "orphan" and end["status"] == signal.SIGKILL
    assert direct.wait() == 0
    direct.socket.close()


def test_a_fork_of_the_caller_that_holds_the_lifeline_keeps_nothing_alive(tmp_path: Path) -> None:
    tag = new_tag()
    forking = CALLER.replace("print(pid, flush=True)", "print(pid, hold(), flush=True)")
    hold = """
def hold():
    import os, time
    pid = os.fork()
    if pid == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    return pid
"""
    caller = subprocess.Popen(
        [sys.executable, "-c", hold + forking, *tree_command(tag, "daemon")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=caller_environment(),
    )
    with caller:
        assert caller.stdout is not None
        leader, holder = map(int, caller.stdout.readline().split())
        assert until(lambda: sleepers(tag))
        caller.kill()
    assert until(lambda: tagged(tag) == [holder])
    assert start_time(leader) is None
    os.kill(holder, signal.SIGKILL)


def test_it_does_its_work_without_the_lists_of_children() -> None:
    tag = new_tag()
    direct = Direct(tree_command(tag, "all"), patch="s.has_children_files = lambda: False")
    assert until(lambda: len(sleepers(tag)) == SLEEPERS["all"])
    direct.socket.send(b"c")
    end = direct.hear("end")
    assert end["reason"] == "cancel" and not end["killed"]
    assert len(end["leftovers"]) == 3  # the daemons; the leader's group obeyed
    assert direct.wait() == 0 and tagged(tag) == []
    direct.socket.close()


def test_a_caller_that_does_not_listen_stops_nothing(tmp_path: Path) -> None:
    """Messages that do not fit are dropped, and the tree is told again later."""
    mark = tmp_path / "mark"
    code = f"""
import os, time
for _ in range(30):
    if os.fork() == 0:
        time.sleep(60)
while not os.path.exists({str(mark)!r}):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    time.sleep(0.01)
"""
    patch = """
        told = s.Supervisor.tell
        s.Supervisor.tell = lambda me, *message: message[0] != "tree" and told(me, *message)
    """
    direct = Direct([sys.executable, "-S", "-c", code], patch=patch)
    assert direct.hear("begun")
    mark.touch()
    assert len(direct.hear("end")["leftovers"]) == 30
    assert direct.wait() == 0
    direct.socket.close()


def test_a_gone_leader_needs_no_grace() -> None:
    """The first signal cannot be delivered: the rest is killed at once."""
    patch = """
        def killpg(*_):
            raise ProcessLookupError(3, "No such process")
        s.os.killpg = killpg
    """
    direct = Direct(["/bin/sleep", "60"], patch=patch, timeout=0.5)
    end = direct.hear("end")
    assert end["reason"] == "timeout" and end["killed"] and end["seconds"] < 40
    assert direct.wait() == 0
    direct.socket.close()


def test_a_second_signal_ends_the_grace() -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print(1); time.sleep(60)"
    direct = Direct([sys.executable, "-S", "-c", code])
    leader = direct.hear("begun")
    assert until(lambda: handles(leader, signal.SIGINT, "SigIgn"))
    direct.process.send_signal(signal.SIGTERM)
    assert until(lambda: _is_asleep(direct.process.pid))
    direct.process.send_signal(signal.SIGINT)
    end = direct.hear("end")
    assert end["reason"] == "signal" and end["killed"] and end["seconds"] < 40
    assert direct.wait() == 0
    direct.socket.close()


def _is_asleep(pid: int) -> bool:
    """Whether the process has taken its signals and waits again."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return "State:\tS" in text and "ShdPnd:\t0000000000000000" in text


def test_a_tree_that_is_woken_again_and_again_is_killed_all_the_same() -> None:
    """With one look only at a growing tree, what is known is killed, and then looked for again."""
    tag = new_tag()
    direct = Direct(tree_command(tag, "all"), patch="s.FREEZE_PASSES = 1", gentle=None)
    assert until(lambda: len(sleepers(tag)) == SLEEPERS["all"])
    direct.socket.send(b"c")
    assert len(direct.hear("end")["leftovers"]) == SLEEPERS["all"]
    assert direct.wait() == 0 and tagged(tag) == []
    direct.socket.close()
