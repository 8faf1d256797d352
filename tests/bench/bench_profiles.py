"""Kernel tables and traces: CPU time and memory beside a floor and beside ``json.load``.

Exports of 5 million kernel rows (in order; of eight GPUs; with 3 million copies; out of order), and
a trace of 500 MB, are made in a temporary folder; each reader runs in a process of its own, whose
CPU time and peak memory are measured.  SQL's own GROUP BY (by name id; by name, grid and block) is
the floor of a table, ``json.load`` of a trace.  The whole operation is ``ikit profile-import``:
beside the reading it starts, hashes the file, and writes the record.

    python tests/bench/bench_profiles.py [ROWS [MEGABYTES]]
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DATA = Path(__file__).parents[1] / "data" / "profiles"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
SHAPE = "gridX, gridY, gridZ, blockX, blockY, blockZ"
_HEAD = "import sys, time, resource\nfrom pathlib import Path\npath = Path(sys.argv[1])\n"
_TAIL = (
    "\nused = resource.getrusage(resource.{whose})\n"
    "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)\n"
)
_SUMS = "count(*), sum(end - start), min(end - start), max(end - start)"
_READ = (
    "from ikit_ops.profilers import formats\n"
    "from ikit_ops.profilers.limits import Reading\n"
    "capture = formats.read(Reading(path), formats.detect(Reading(path)))\n"
    "assert capture.kernel_rows()"
)
_OPERATION = (
    "import os, subprocess, tempfile\n"
    "with tempfile.TemporaryDirectory() as home:\n"
    "    ikit = Path(sys.executable).with_name('ikit')\n"
    "    command = [ikit, 'profile-import', '--json', path]\n"
    "    subprocess.run(command, env={**os.environ, 'IKIT_HOME': home}, check=True,\n"
    "                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
)
_SQL = (
    "import sqlite3\n"
    "database = sqlite3.connect(f'file:{{path}}?mode=ro&immutable=1', uri=True)\n"
    "database.execute('SELECT {columns}, {sums} FROM {table} GROUP BY {columns}').fetchall()"
)
TABLES = {
    "SQL, GROUP BY name id": _SQL.format(columns="demangledName", sums=_SUMS, table=KERNELS),
    "SQL, GROUP BY name, grid, block": _SQL.format(
        columns=f"demangledName, {SHAPE}", sums=_SUMS, table=KERNELS
    ),
    "ikit: table, gaps, busy share, timeline": _READ,
    "ikit: the whole operation": _OPERATION,
}
TRACES = {
    "json.load": "import json\njson.load(path.open(encoding='utf-8'))",
    "ikit: table, gaps, busy share, timeline": _READ,
    "ikit: the whole operation": _OPERATION,
}
COPIES = (
    "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, "
    "contextId INTEGER, streamId INTEGER, correlationId INTEGER, bytes INTEGER, copyKind INTEGER)",
    "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY SELECT end + 10, end + 400, deviceId, contextId, "
    f"streamId, correlationId, 4096, 1 + rowid % 2 FROM {KERNELS} WHERE rowid % 5 < 3",
)
CHANGES = {
    "of one GPU, in order": (),
    "of eight GPUs": (f"UPDATE {KERNELS} SET deviceId = rowid % 8",),
    "and three copies for five kernels": COPIES,
    "out of order": (f"UPDATE {KERNELS} SET start = start - 40000 WHERE rowid % 1000 = 0",),
}
"""What is done to an export before it is read."""


def write_export(path: Path, rows: int) -> None:
    """An export like the real sample's, with 200 names on 40 shapes."""
    source = sqlite3.connect(DATA / "nsys_2026.2_h100_kernels.sqlite")
    query = "SELECT sql FROM sqlite_master WHERE name IN (?, 'StringIds')"
    statements = [sql for (sql,) in source.execute(query, (KERNELS,))]
    columns = [row[1] for row in source.execute(f"PRAGMA table_info({KERNELS})")]
    sample = dict(zip(columns, source.execute(f"SELECT * FROM {KERNELS}").fetchone(), strict=True))
    database = sqlite3.connect(path)
    database.execute("PRAGMA synchronous = OFF")
    for statement in statements:
        database.execute(statement)
    names = [(n, f"void cutlass::Kernel{n}<float, {n}>(int)") for n in range(200)]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", names)
    chance = random.Random(1)
    shapes = [
        (chance.choice((1, 32, 128, 4096)), chance.choice((1, 2, 8)), 1,
         chance.choice((64, 128, 256)), 1, 1)
        for _ in range(40)
    ]  # fmt: skip
    kernels = [(chance.randrange(200), shapes[chance.randrange(40)]) for _ in range(600)]
    place = {name: columns.index(name) for name in columns}
    row = [sample[name] for name in columns]

    def made() -> object:
        """The rows, one list used again and again."""
        now = 155_360_295_935
        for number in range(rows):
            name, shape = kernels[(number * 7) % 600 if number % 5 else chance.randrange(600)]
            now += chance.randrange(500, 3_000)
            row[place["start"]] = now
            now += chance.randrange(1_500, 90_000)
            row[place["end"]], row[place["deviceId"]] = now, 0
            for key in ("demangledName", "shortName", "mangledName"):
                row[place[key]] = name
            for key, value in zip(SHAPE.split(", "), shape, strict=True):
                row[place[key]] = value
            yield row

    marks = ",".join("?" * len(columns))
    database.executemany(f"INSERT INTO {KERNELS} VALUES ({marks})", made())  # type: ignore[arg-type]
    database.commit()
    database.close()
    source.close()


def change(path: Path, statements: Sequence[str]) -> None:
    """Carry out statements on an export."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA synchronous = OFF")
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()


def write_trace(path: Path, megabytes: int) -> None:
    """A trace of the real sample's events, again and again at later times."""
    whole = json.loads((DATA / "torch_cuda_trace.json").read_text(encoding="utf-8"))
    groups = {
        cat: [e for e in whole["traceEvents"] if e.get("cat") == cat]
        for cat in ("cpu_op", "cuda_runtime", "kernel", "ac2g")
    }
    chance, now, size = random.Random(3), 799_833_083_027.0, 0
    order = ("cpu_op", "cpu_op", "cpu_op", "cuda_runtime", "ac2g", "kernel", "ac2g")
    head = {key: value for key, value in whole.items() if key != "traceEvents"}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        while size < megabytes * 1_000_000:
            texts = []
            for cat in order:
                now += chance.random() * 5
                event = dict(chance.choice(groups[cat]), ts=round(now, 3))
                if "dur" in event:
                    event["dur"] = round(chance.random() * 9, 3)
                texts.append(json.dumps(event))
            text = ",\n".join(texts)
            file.write(text if size == 0 else ",\n" + text)
            size += len(text) + 2
        file.write("]}")


def measured(code: str, path: Path) -> tuple[float, float]:
    """CPU seconds and peak MB of the code in a process of its own."""
    tail = _TAIL.format(whose="RUSAGE_CHILDREN" if code is _OPERATION else "RUSAGE_SELF")
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + code + tail, str(path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    seconds, megabytes = done.stdout.split()
    return float(seconds), float(megabytes)


def table(title: str, path: Path, readers: dict[str, str]) -> None:
    """Print one table; ratios are to the first row."""
    print(f"\n{title} ({path.stat().st_size / 1e6:.0f} MB)\n")
    print("| reader | CPU s | ratio | peak MB |\n|---|---|---|---|")
    first = 0.0
    for name, code in readers.items():
        seconds, megabytes = measured(code, path)
        first = first or seconds
        print(f"| {name} | {seconds:.2f} | {seconds / first:.2f} | {megabytes:.0f} |", flush=True)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000_000
    megabytes = int(sys.argv[2]) if len(sys.argv) > 2 else 500
    with tempfile.TemporaryDirectory() as folder:
        export, trace = Path(folder) / "export.sqlite", Path(folder) / "trace.json"
        for title, statements in CHANGES.items():
            write_export(export, rows)
            change(export, statements)
            table(f"{rows:,} kernel rows of an Nsight Systems export, {title}", export, TABLES)
            export.unlink()
        write_trace(trace, megabytes)
        table("A torch trace", trace, TRACES)


if __name__ == "__main__":
    main()
