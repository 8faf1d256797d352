"""One holder of a device at a time, whatever happens to the holder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fakes.process_trees import caller_environment, new_tag, sleepers, tagged, until
from ikit_mcp.process import lock_files
from ikit_mcp.process.lock import acquire, describe
from ikit_mcp.process.platform import start_time
from ikit_mcp.process.procfs import stat_of
from ikit_mcp.registry import OpError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs flock")
DEVICE = "GPU-made-up-0001"


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A Python process that runs the code with the package at hand."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=caller_environment(),
    )


def is_free(folder: Path, uuid: str = DEVICE) -> bool:
    """Whether the device can be had at once."""
    try:
        acquire([uuid], timeout=0, folder=folder).release()
    except OpError:
        return False
    return True


def test_two_processes_never_hold_one_device_together(tmp_path: Path) -> None:
    code = """
        import os, sys
        from ikit_mcp.process.lock import acquire
        folder, mark = sys.argv[1:]
        for _ in range(40):
            with acquire(["GPU-made-up-0001"], timeout=60, folder=folder):
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))  # fails if anyone else is here
                os.unlink(mark)
    """
    processes = [start(code, str(tmp_path / "locks"), str(tmp_path / "mark")) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=100)
    assert [process.returncode for process in processes] == [0, 0, 0]


def test_another_device_does_not_wait(tmp_path: Path) -> None:
    with acquire([DEVICE], timeout=0, folder=tmp_path):
        assert is_free(tmp_path, "GPU-made-up-0002")
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_several_devices_in_any_order_cannot_block_each_other(tmp_path: Path) -> None:
    def take(uuids: list[str]) -> None:
        for _ in range(30):
            acquire(uuids, timeout=60, folder=tmp_path).release()

    orders = [["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c", "a"]]
    threads = [threading.Thread(target=take, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_failed_call_gives_back_what_it_had(tmp_path: Path) -> None:
    with acquire(["b"], timeout=0, folder=tmp_path):
        with pytest.raises(OpError):
            acquire(["a", "b"], timeout=0, folder=tmp_path)
        assert is_free(tmp_path, "a")


def test_releasing_twice_is_harmless(tmp_path: Path) -> None:
    held = acquire([DEVICE], timeout=0, folder=tmp_path)
    held.release()
    held.release()
    assert is_free(tmp_path)


def test_who_waits_is_told_who_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikit_mcp.process.lock.TELL", 0.2)
    told: list[tuple[str, dict[str, Any], float]] = []
    facts = {"operation": "bench", "job_id": "job-0001"}
    with (
        acquire([DEVICE], timeout=0, folder=tmp_path, holder=facts),
        pytest.raises(OpError) as caught,
    ):
        acquire(
            [DEVICE],
            timeout=1,
            folder=tmp_path,
            on_wait=lambda uuid, holder, waited: told.append((uuid, holder, waited)),
        )
    assert len(told) >= 2
    uuid, holder, waited = told[0]
    assert (uuid, holder["operation"], holder["job_id"]) == (DEVICE, "bench", "job-0001")
    assert holder["pid"] == os.getpid() and holder["alive"] and waited < 1
    assert f"bench (pid {os.getpid()}, job-0001, since 20" in str(caught.value)
    assert caught.value.next_step


def test_a_cancelled_wait_ends(tmp_path: Path) -> None:
    cancel = threading.Event()
    with (
        acquire([DEVICE], timeout=0, folder=tmp_path),
        pytest.raises(OpError, match="cancelled"),
    ):
        acquire(
            [DEVICE],
            timeout=60,
            folder=tmp_path,
            cancel=cancel,
            on_wait=lambda *_: cancel.set(),
        )


def test_a_wait_ends_with_the_lock_when_it_comes_free(tmp_path: Path) -> None:
    held = acquire([DEVICE], timeout=0, folder=tmp_path)
    later = acquire(
        [DEVICE], timeout=60, folder=tmp_path, on_wait=lambda *_: held.release()
    )  # fmt: skip
    later.release()


HOLDER = """
    import os, sys
    from ikit_mcp.process.lock import acquire
    from ikit_mcp.process.run import run
    folder, tag = sys.argv[1:]
    held = acquire(["GPU-made-up-0001"], timeout=0, folder=folder, holder={"operation": "bench"})
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60) #{tag}"
    run([sys.executable, "-S", "-c", code], timeout=60, hold_fds=held.fds,
        on_start=lambda pid: print(pid, flush=True))
"""


def test_the_lock_outlives_a_killed_caller_until_the_last_descendant_is_gone(
    tmp_path: Path,
) -> None:
    """The supervisor is stopped, so that the end of the tree comes when the test wants it."""
    tag = new_tag()
    caller = start(HOLDER, str(tmp_path), tag)
    assert caller.stdout is not None
    leader = stat_of(int(caller.stdout.readline()))
    assert leader is not None and until(lambda: sleepers(tag))
    os.kill(leader.ppid, signal.SIGSTOP)
    with caller:
        caller.kill()
    assert not is_free(tmp_path)
    with pytest.raises(OpError, match="has ended; something that it started has not"):
        acquire([DEVICE], timeout=0, folder=tmp_path)
    os.kill(leader.ppid, signal.SIGCONT)
    assert until(lambda: is_free(tmp_path))
    assert [pid for pid in tagged(tag) if start_time(pid)] == []


def test_another_users_file_can_be_locked_without_being_written(tmp_path: Path) -> None:
    """As root nothing is unwritable, so the other user is played by a file flag's effect."""
    acquire([DEVICE], timeout=0, folder=tmp_path, holder={"operation": "theirs"}).release()
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_RDWR and str(path).endswith(".lock"):
            raise PermissionError(13, "Permission denied")
        return real(path, flags, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refusing)
        held = acquire([DEVICE], timeout=0, folder=tmp_path, holder={"operation": "ours"})
    assert not is_free(tmp_path)
    held.release()
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_bytes())["operation"] == "theirs"
    assert file.stat().st_mode & 0o777 == 0o666


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="needs root")
def test_two_users_share_the_folder_and_the_device(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    folder = Path(f"/tmp/{new_tag()}")
    code = """
        import os, sys
        from ikit_mcp.process.lock import acquire
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
        acquire(["GPU-made-up-0001"], timeout=float(sys.argv[3]), folder=sys.argv[1],
                holder={"operation": sys.argv[2]})
        print("held", flush=True)
        sys.stdin.read()
    """
    first = start(code, str(folder), "12345", "0")
    assert first.stdout is not None and first.stdout.readline() == b"held\n"
    second = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder), "12346", "0"],
        env=caller_environment(),
        capture_output=True,
        check=False,
    )
    assert b"still held by 12345" in second.stderr
    with first:
        first.kill()
    third = start(code, str(folder), "12346", "20")
    assert third.stdout is not None and third.stdout.readline() == b"held\n"
    with pytest.raises(OpError, match="still held by 12346"):
        acquire([DEVICE], timeout=0, folder=folder)
    with third:
        third.kill()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


# --- a folder that cannot be trusted ---------------------------------------------------------


def test_the_folder_comes_from_the_argument_the_variable_or_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lock_files.FOLDER_VARIABLE, str(tmp_path / "named"))
    assert lock_files.lock_folder() == tmp_path / "named"
    assert lock_files.lock_folder(tmp_path) == tmp_path
    with acquire([DEVICE], timeout=0):
        assert (tmp_path / "named").stat().st_mode & 0o7777 == 0o1777
    monkeypatch.delenv(lock_files.FOLDER_VARIABLE)
    assert lock_files.lock_folder().name == lock_files.NAME
    monkeypatch.setattr(lock_files, "PLACES", ("/no/such/place", str(tmp_path)))
    with pytest.raises(OpError, match="no folder"):
        lock_files.lock_folder()


def test_a_folder_behind_a_link_or_open_to_removal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OpError, match="cannot be used"):
        acquire([DEVICE], timeout=0, folder=tmp_path / "link")
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(OpError, match="anyone may remove"):
        acquire([DEVICE], timeout=0, folder=tmp_path / "real")


@pytest.mark.skipif(sys.platform == "win32" or os.getuid() != 0, reason="needs root")
def test_a_folder_that_another_user_keeps_to_himself_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chown(folder, 12345, 12345)
    with pytest.raises(OpError, match="closed to others"):
        acquire([DEVICE], timeout=0, folder=folder)
    folder.chmod(0o1777)
    assert is_free(folder)


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_a_trap_in_place_of_the_file_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / lock_files.file_name(DEVICE)
    precious = tmp_path / "precious"
    precious.write_text("kept", encoding="utf-8")
    if kind == "link":
        target.symlink_to(precious)
    elif kind == "dangling":
        target.symlink_to(tmp_path / "nowhere")
    elif kind == "folder":
        target.mkdir()
    else:
        os.mkfifo(target)
    with pytest.raises(OpError, match="cannot be used"):
        acquire([DEVICE], timeout=0, folder=tmp_path)
    assert precious.read_text(encoding="utf-8") == "kept"
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_on_a_file_that_was_replaced_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real = fcntl.flock
    path = tmp_path / lock_files.file_name(DEVICE)
    swaps = iter([True])

    def swapping(fd: int, how: int) -> None:
        real(fd, how)
        if next(swaps, False):
            path.unlink()
            path.touch()

    monkeypatch.setattr(fcntl, "flock", swapping)
    with acquire([DEVICE], timeout=20, folder=tmp_path) as held:
        assert os.path.samestat(os.fstat(held.fds[0]), path.stat())


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b"[" * 4000,
        b'{"pid": "x"}',
        b'{"pid": -1}',
        b'{"pid": 99999999999}',
        b'{"operation": "no pid"}',
    ],
)
def test_what_a_stranger_wrote_about_the_holder_does_no_harm(tmp_path: Path, words: bytes) -> None:
    with acquire([DEVICE], timeout=0, folder=tmp_path) as held:
        os.ftruncate(held.fds[0], 0)
        os.pwrite(held.fds[0], words, 0)
        with pytest.raises(OpError, match="does not say who it is"):
            acquire([DEVICE], timeout=0, folder=tmp_path)


def test_what_the_holder_says_is_bounded_and_one_line(tmp_path: Path) -> None:
    facts = {
        "operation": "a\nb\u202e" + "x" * 500,
        "more": ["y"],
        **{f"k{i}": i for i in range(50)},
    }
    with acquire([DEVICE], timeout=0, folder=tmp_path) as held:
        words = json.dumps({"pid": os.getpid(), "start": None, **facts}).encode()
        os.ftruncate(held.fds[0], 0)
        os.pwrite(held.fds[0], words, 0)
        directory = os.open(tmp_path, os.O_RDONLY)
        holder = lock_files.read_holder(DEVICE, directory)
        os.close(directory)
    assert len(holder) == 17 and holder["operation"] == "a b " + "x" * 76
    assert not holder["alive"] and "\n" not in describe(holder)


def test_file_names_are_plain_and_tell_devices_apart() -> None:
    names = {lock_files.file_name(uuid) for uuid in ("../x", "__/x", "GPU-" + "0" * 99, "", "é")}
    assert len(names) == 5
    assert all(name.isascii() and "/" not in name and len(name) < 80 for name in names)


def test_time_spent_waiting_for_one_device_counts_for_the_next(tmp_path: Path) -> None:
    started = time.monotonic()
    with acquire(["b"], timeout=0, folder=tmp_path), pytest.raises(OpError, match="device b"):
        acquire(["a", "b"], timeout=0.3, folder=tmp_path)
    assert time.monotonic() - started >= 0.3
