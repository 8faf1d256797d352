"""What an engine leaves that was killed while it wrote, and who removes it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import clips
from ikit_ops.clips import recorder as recording
from ikit_ops.clips.recorder import StepRecorder, clear_leftovers

UNIQUE = "0" * 32
WRITES = """
import sys
from pathlib import Path
from fakes import clips
from ikit_ops.clips.recorder import StepRecorder
recorder = StepRecorder(clips.request(), Path(sys.argv[1]), {"video": (clips.VIDEO, "F32")})
print("writing", flush=True)
sys.stdin.read()
"""
STREAMS = {"video": (clips.VIDEO, "F32")}


@pytest.fixture(autouse=True)
def nothing_was_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_CLEARED", set())


def writing(folder: Path) -> subprocess.Popen[str]:
    """Another process that has begun a dump and holds it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(folder)], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def gone() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_next_engine_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    process = writing(tmp_path)
    (left,) = tmp_path.iterdir()
    ended(process)
    assert left.exists() and left.stat().st_size > 1000
    StepRecorder(clips.request(), tmp_path).abort()
    assert list(tmp_path.iterdir()) == []


def test_a_dump_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    process = writing(tmp_path)
    try:
        assert clear_leftovers(tmp_path) == 0
        (theirs,) = tmp_path.iterdir()
        # as it looks from a container that does not see the process: only the lock tells
        foreign = theirs.rename(tmp_path / f".{gone()}-7-{UNIQUE}.partial")
        assert clear_leftovers(tmp_path) == 0
        assert foreign.exists()
    finally:
        ended(process)
    assert clear_leftovers(tmp_path) == 1


def test_a_process_that_has_the_number_now_does_not_keep_a_leftover(tmp_path: Path) -> None:
    mine, started = os.getpid(), int(recording._started(os.getpid()))
    left = tmp_path / f".{mine}-{started - 1}-{UNIQUE}.partial"
    kept = [tmp_path / f".{mine}-{started}-{UNIQUE}.partial",
            tmp_path / f".{mine}-0-{UNIQUE}.partial", tmp_path / f".{mine}-{UNIQUE}.partial",
            tmp_path / f".1-0-{UNIQUE}.partial"]  # fmt: skip
    for path in (left, *kept):
        path.touch()
    assert clear_leftovers(tmp_path) == 1
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_nothing_else_is_removed(tmp_path: Path) -> None:
    pid = gone()
    old, target = tmp_path / f".{pid}-{UNIQUE}.partial", tmp_path / "target"
    names = [f"{pid}-5-{UNIQUE}.partial", f".{pid}-5-{UNIQUE}.partial2", f".{pid}-5-x.partial",
             f".x-5-{UNIQUE}.partial", "ab" * 32 + ".safetensors", "target"]  # fmt: skip
    for name in (old.name, *names):
        (tmp_path / name).touch()
    link, folder = f".{pid}-6-{UNIQUE}.partial", f".{pid}-7-{UNIQUE}.partial"
    pipe = f".{pid}-8-{UNIQUE}.partial"
    (tmp_path / link).symlink_to(target)
    (tmp_path / folder).mkdir()
    os.mkfifo(tmp_path / pipe)
    assert clear_leftovers(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {*names, link, folder, pipe}


def test_another_users_files_and_files_that_cannot_be_locked_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / f".{gone()}-5-{UNIQUE}.partial"
    left.touch()
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert clear_leftovers(tmp_path) == 0

    def no_locks(fd: int, how: int) -> None:
        raise OSError("this file system has no locks")

    with monkeypatch.context() as other:
        other.setattr(fcntl, "flock", no_locks)
        assert clear_leftovers(tmp_path) == 0
    assert clear_leftovers(tmp_path) == 1
    assert clear_leftovers(tmp_path / "nowhere") == 0


def test_a_process_that_may_not_be_asked_and_one_of_no_number_count_rightly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yours(pid: int, number: int) -> None:
        raise PermissionError

    (tmp_path / f".5-0-{UNIQUE}.partial").touch()
    (tmp_path / f".9999999999-5-{UNIQUE}.partial").touch()
    with monkeypatch.context() as other:
        other.setattr(os, "kill", not_yours)
        assert clear_leftovers(tmp_path) == 0
        other.setattr(sys, "platform", "win32")  # there, asking would end it: nothing is asked
        other.setattr(os, "kill", None)
        assert clear_leftovers(tmp_path) == 0
    assert recording._started(2**31) == "0"
    assert not recording._lives(9999999999, "5")


def test_a_process_looks_once_into_each_folder(tmp_path: Path) -> None:
    StepRecorder(clips.request(), tmp_path).abort()
    left = tmp_path / f".{gone()}-5-{UNIQUE}.partial"
    left.touch()
    StepRecorder(clips.request(), tmp_path).abort()
    assert left.exists()


def test_a_dump_is_locked_until_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = Path.replace

    def watched(self: Path, target: Path) -> Path:
        with self.open("rb") as file:
            seen.append(recording._lock(file.fileno()))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    clips.write_dump(tmp_path)
    assert seen == [False]
    (done,) = tmp_path.iterdir()
    with done.open("rb") as file:
        assert recording._lock(file.fileno())
