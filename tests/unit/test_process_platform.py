"""What the machine tells of processes and of itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.process_trees import new_tag
from ikit_mcp.process import platform, procfs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_process_is_known_by_pid_and_start_time() -> None:
    child = subprocess.Popen(["sleep", "60"])
    start = platform.start_time(child.pid)
    assert start == platform.start_time(child.pid) is not None
    stat = procfs.stat_of(child.pid)
    assert stat is not None
    assert (stat.ppid, stat.identity) == (os.getpid(), (child.pid, start))
    assert [found.pid for found in procfs.children_of(os.getpid())].count(child.pid) == 1
    for whole_table in (False, True):
        assert child.pid in [p.pid for p in procfs.descendants(os.getpid(), whole_table)]
    stranger = procfs.Stat(child.pid, b"x", b"S", 1, stat.start + 1)
    assert not procfs.send_signal(stranger, signal.SIGKILL)
    assert child.poll() is None
    assert procfs.send_signal(stat, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert platform.start_time(child.pid) is None  # a zombie runs no more
    assert child.pid not in [p.pid for p in procfs.descendants(os.getpid())]
    child.wait()
    assert procfs.stat_of(child.pid) is None
    assert not procfs.send_signal(stat, signal.SIGKILL)
    assert procfs.child_pids(child.pid) == [] and procfs.read_file("/no/such/file") == b""


def test_a_name_with_brackets_and_blanks_does_not_confuse(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "60"])
    stat = procfs.stat_of(child.pid)
    child.kill()
    child.wait()
    assert stat is not None and stat.ppid == os.getpid() and stat.name.startswith(b"a) R 1 (b")


def test_signals_reach_a_process_without_pidfds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unknown)
    child = subprocess.Popen(["sleep", "60"])
    stat = procfs.stat_of(child.pid)
    assert stat is not None and procfs.send_signal(stat, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_an_unknown_prctl_is_an_error() -> None:
    with pytest.raises(OSError, match="prctl"):
        procfs.prctl(99999, 1)


def test_orphans_are_found_by_list_by_mark_and_by_descent() -> None:
    code = "import subprocess, sys; subprocess.run(['sleep', '60'], env={}); print(1)"
    mark = new_tag()
    marked = subprocess.Popen([sys.executable, "-S", "-c", code], env={"IKIT_RUNS": f"a:{mark}"})
    listed = subprocess.Popen(["sleep", "60"], env={})
    other = subprocess.Popen(["sleep", "60"], env={"IKIT_RUNS": new_tag()})
    while not procfs.children_of(marked.pid):
        assert marked.poll() is None
    start = platform.start_time(listed.pid)
    assert start is not None
    known = [(listed.pid, start), (other.pid, 1), (999_999_999, 1)]
    killed, survivors = platform.end_orphans(known, mark)
    assert marked.wait(10) == listed.wait(10) == -signal.SIGKILL
    assert len(killed) == 3 and survivors == []
    assert other.poll() is None
    other.kill()
    other.wait()


def test_an_orphan_whose_parent_dies_between_two_looks_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import subprocess; subprocess.run(['sleep', '60'], env={})"
    root = subprocess.Popen([sys.executable, "-S", "-c", code])
    while not (children := procfs.children_of(root.pid)):
        assert root.poll() is None
    start = platform.start_time(root.pid)
    assert start is not None
    signals = []

    def killing(process: procfs.Stat, number: int) -> bool:
        """Send it, but the parent dies where it should stop."""
        if process.pid == root.pid:
            number = signal.SIGKILL
        signals.append((process.pid, number))
        sent = procfs.send_signal(process, number)
        if process.pid == root.pid:
            root.wait(10)
        return sent

    monkeypatch.setattr(platform, "send_signal", killing)
    platform.end_orphans([(root.pid, start)], new_tag())
    assert (children[0].pid, signal.SIGSTOP) in signals
    assert platform.start_time(children[0].pid) is None


def test_orphans_that_do_not_die_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = new_tag()
    child = subprocess.Popen(["sleep", "60"], env={"IKIT_RUNS": mark})
    monkeypatch.setattr(platform, "send_signal", lambda *_: False)
    killed, survivors = platform.end_orphans([], mark, patience=0.05)
    assert (killed, survivors) == ([], [f"sleep[{child.pid}]"])
    child.kill()
    child.wait()


def test_the_machine_describes_itself() -> None:
    cpu = platform.cpu_info()
    assert cpu.memory_bytes > 1 << 28
    assert cpu.usable_threads and cpu.threads and cpu.usable_threads <= cpu.threads
    assert cpu.model is None or (cpu.model and "\n" not in cpu.model)
    assert platform.cpu_info() is cpu


def test_the_cpus_name_does_not_give_the_machine_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine_id", lambda: "0123456789abcdef0123456789abcdef")
    first = platform.cpu_uuid()
    # echo -n ikit | openssl dgst -sha256 -hmac 0123456789abcdef0123456789abcdef
    assert first == "86185395b888eecb"
    monkeypatch.setattr(platform, "machine_id", lambda: None)
    assert platform.cpu_uuid() is None


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"0123456789abcdef0123456789abcdef\n", "0123456789abcdef0123456789abcdef"),
        (b"uninitialized\n", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_the_machine_id_is_a_real_one_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, found: str | None
) -> None:
    (tmp_path / "id").write_bytes(data)
    files = (str(tmp_path / "missing"), str(tmp_path / "id"))
    monkeypatch.setattr(platform, "MACHINE_ID_FILES", files)
    assert platform.machine_id() == found


def test_the_cpus_model_is_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "CPU_FILE", tmp_path / "cpuinfo")
    platform.cpu_info.cache_clear()
    monkeypatch.setattr("platform.processor", lambda: "")
    assert platform.cpu_info().model is None
    platform.cpu_info.cache_clear()
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Made Up 9000 \n", "utf-8")
    assert platform.cpu_info().model == "Made Up 9000"
    platform.cpu_info.cache_clear()


def _cache(folder: Path, cpu: int, index: int, *facts: str) -> None:
    """One cache of one processor, as /sys shows it."""
    place = folder / f"cpu/cpu{cpu}/cache/index{index}"
    place.mkdir(parents=True)
    for name, fact in zip(("type", "level", "size", "shared_cpu_list"), facts, strict=True):
        (place / name).write_text(fact + "\n", encoding="ascii")


def test_the_last_level_caches_are_added_up_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "SYSTEM", tmp_path)
    assert platform.last_level_cache_bytes() is None
    for cpu in range(4):
        _cache(tmp_path, cpu, 0, "Data", "1", "32K", str(cpu))
        _cache(tmp_path, cpu, 1, "Instruction", "4", "32K", str(cpu))
        _cache(tmp_path, cpu, 3, "Unified", "3", "16M", "0-1" if cpu < 2 else "2-3")
    _cache(tmp_path, 4, 0, "Unified", "3", "unknown", "4")
    (tmp_path / "cpu/cpu5/cache/index0").mkdir(parents=True)
    assert platform.last_level_cache_bytes() == 32 << 20
    assert platform.last_level_cache_bytes() is not None


def test_an_old_kernel_says_no_newest_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert procfs.newest_pid() > 0
    monkeypatch.setattr(procfs, "read_file", lambda *_: b"")
    assert procfs.newest_pid() == 0
