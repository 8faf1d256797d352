"""What the evidence store costs, beside the disk's own sync and plain SQLite.

``python tests/bench/bench_store.py [RECORDS ...]`` (default 100 10000 100000).  CPU seconds
are this process's own, user and system; on a loaded machine they hold better than wall time.
Records for the listings are written as folders directly and without syncing: making them
through the store is what the first table measures.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (1, 2)]

from helpers.records import make_record
from ikit_mcp import registry
from ikit_mcp.call import Settings
from ikit_mcp.evidence import canonical, files, index
from ikit_mcp.evidence.store import Store
from ikit_mcp.runner import Control, Runner

SAVES = 60
LISTINGS = 15
PAST_NS = 10**18


@contextmanager
def timed(kept: list[tuple[float, float]]) -> Iterator[None]:
    """Append the wall and the CPU seconds of the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    kept.append((time.perf_counter() - wall, time.process_time() - cpu))


def median(kept: list[tuple[float, float]], of: int) -> float:
    """The median in milliseconds: ``of`` 0 is wall time, 1 is CPU."""
    return 1e3 * statistics.median(pair[of] for pair in kept)


def plain_write(folder: Path, number: int, data: bytes) -> None:
    """The disk's own share: the same files and folders, written, synced and renamed."""
    work, final = folder / f"work{number}", folder / f"{number % 256:02x}" / str(number)
    work.mkdir()
    for name, content in (("a.txt", b"x" * 1_000), ("evidence.json", data)):
        with (work / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    files.sync_folder(work)
    if not final.parent.is_dir():
        final.parent.mkdir()
        files.sync_folder(folder)
    work.rename(final)
    files.sync_folder(final.parent)


def save(store: Store, number: int) -> bytes:
    """One record with an artifact; its bytes."""
    with store.stage() as stage:
        stage.add("a.txt", b"x" * 1_000, "text/plain")
        saved = stage.commit(make_record(number, artifacts=stage.artifacts))
    return canonical.canonical_bytes(saved.raw)


def bench_saves(base: Path) -> None:
    """Saves and plain writes, interleaved."""
    store, plain = Store(base / "home"), base / "plain"
    plain.mkdir()
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    data = save(store, -1)
    for number in range(SAVES):
        with timed(ours):
            save(store, number)
        with timed(theirs):
            plain_write(plain, number, data)
    print(f"save one record ({len(data):,} B and an artifact), {SAVES} interleaved rounds, medians")
    print(f"{'':34} {'wall ms':>8} {'CPU ms':>8}")
    print(f"{'ikit store':34} {median(ours, 0):8.2f} {median(ours, 1):8.2f}")
    print(
        f"{'the same files, written and synced':34}"
        f" {median(theirs, 0):8.2f} {median(theirs, 1):8.2f}"
    )
    beside = statistics.median(o[0] - t[0] for o, t in zip(ours, theirs, strict=True)) * 1e3
    print(f"{'beside the sync':34} {beside:8.2f}   (reach: < 5)\n")


def fill(home: Path, count: int) -> None:
    """A store of so many records, as folders, with times long past."""
    root = home / "evidence"
    for number in range(256):
        (root / f"{number:02x}").mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    root.chmod(0o700)
    for number in range(count):
        day, second = divmod(number, 86_400)
        started = (
            f"2026-01-{day + 1:02}T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}Z"
        )
        raw = make_record(number, started=started)
        raw["evidence_id"] = name = canonical.evidence_id(raw)
        folder = root / name[:2] / name
        folder.mkdir(mode=0o700)
        (folder / "evidence.json").write_bytes(canonical.canonical_bytes(raw))
    for folder in root.glob("??"):
        os.utime(folder, ns=(PAST_NS, PAST_NS))


def floor(home: Path, count: int) -> float:
    """Milliseconds of CPU of plain SQLite for the newest 20 of the same rows."""
    path = home / "plain.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE r (id TEXT PRIMARY KEY, started TEXT, summary TEXT)")
    connection.execute("CREATE INDEX newest ON r (started DESC)")
    rows = ((f"{n:064x}", f"{n:020d}", f"record {n}") for n in range(count))
    connection.executemany("INSERT INTO r VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    kept: list[tuple[float, float]] = []
    for _ in range(LISTINGS):
        with timed(kept):
            connection = sqlite3.connect(path)
            connection.execute("SELECT * FROM r ORDER BY started DESC LIMIT 20").fetchall()
            connection.close()
    path.unlink()
    return median(kept, 1)


def listing(home: Path, **arguments: object) -> Callable[[], None]:
    """A call of list_evidence as the command line makes it."""
    runner = Runner(registry.load(None), Settings(home))

    def run() -> None:
        outcome = runner.here(runner.check("list_evidence", arguments), Control())
        assert outcome.reply is not None and outcome.reply["items"]

    return run


def bench_listings(base: Path, counts: list[int]) -> None:
    """Rebuilds and pages for stores of several sizes."""
    print("list_evidence, 20 a page; CPU ms beyond start and imports (reach: < 50, flat)")
    cells = ["newest", "kind=", "model=", "deep", "fresh", "sqlite"]
    head = " ".join(f"{cell:>8}" for cell in cells)
    print(f"{'records':>8} {'rebuild s':>10} {'records/s':>10} {head}")
    for count in counts:
        home = base / f"home{count}"
        fill(home, count)
        built: list[tuple[float, float]] = []
        with timed(built):
            listing(home)()
        taken = []
        for arguments in ({}, {"kind": "bench"}, {"model": "model-1"}, {"offset": count - 20}):
            run, kept = listing(home, **arguments), []  # type: ignore[var-annotated]
            for _ in range(LISTINGS):
                with timed(kept):
                    run()
            taken.append(median(kept, 1))
        for folder in (home / "evidence").glob("??"):  # as just after saves all over the store
            os.utime(folder)
        run, kept = listing(home), []
        run()
        for _ in range(LISTINGS // 3):
            with timed(kept):
                run()
        taken += [median(kept, 1), floor(home, count)]
        rate = count / built[0][1]
        shown = " ".join(f"{cell:8.1f}" for cell in taken)
        print(f"{count:8,} {built[0][1]:10.2f} {rate:10,.0f} {shown}")
    print("deep: the last page by offset; fresh: all 256 folders changed just now\n")


def bench_imports() -> None:
    """CPU of a fresh interpreter that imports the command line, beside one that imports nothing."""

    def cost(code: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        return 1e3 * (after.children_user - before.children_user
                      + after.children_system - before.children_system)  # fmt: skip

    rounds = [(cost("pass"), cost("import ikit_mcp.cli")) for _ in range(7)]
    print("start and imports, CPU ms, medians of 7")
    print(f"{'python alone':34} {statistics.median(r[0] for r in rounds):8.0f}")
    print(
        f"{'import ikit_mcp.cli':34} {statistics.median(r[1] for r in rounds):8.0f}"
        "   (reach: < 250)"
    )


def main() -> None:
    """Print the tables."""
    counts = [int(word) for word in sys.argv[1:]] or [100, 10_000, 100_000]
    with tempfile.TemporaryDirectory(dir=os.environ.get("IKIT_BENCH_DIR")) as folder:
        bench_saves(Path(folder))
        bench_listings(Path(folder), counts)
    bench_imports()


if __name__ == "__main__":
    assert index.VERSION
    main()
