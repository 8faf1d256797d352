"""Launches in SQL tables: any rows in any order give what counting them one by one gives."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.profilers import Launch, nsys_export
from ikit_ops.profilers import formats, launches, sweep
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import Damaged, Reading
from ikit_ops.profilers.packing import ABSENT, Packing
from ikit_ops.profilers.picture import svg
from ikit_ops.profilers.slices import MOST, SLICES, Slices, timeline_of
from ikit_ops.profilers.sqlite_input import opened

ONE = (1, 1, 1)
COLUMNS = (
    "start, end, deviceId, streamId, correlationId, demangledName, shortName, "
    "gridX, gridY, gridZ, blockX, blockY, blockZ"
)
COPIES = "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, copyKind, bytes)"


def read(path: Path) -> Capture:
    return formats.read(Reading(path), "nsys-sqlite")


def export(path: Path, rows: Sequence[Sequence[Any]], copies: Sequence[Sequence[Any]] = ()) -> Path:
    """``rows`` are start, end, device, name id, and the six numbers of grid and block."""
    nsys_export(path, kernels=False)
    database = sqlite3.connect(path)
    database.executemany(
        "INSERT INTO StringIds VALUES (?, ?)", [(n, f"kernel{n}") for n in (*range(1, 9), 1 << 21)]
    )
    database.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({COLUMNS})")
    for start, end, device, name, *shape in rows:
        row = (start, end, device, 7, 1, name, name, *shape)
        database.execute(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 13)})", row
        )
    database.execute(COPIES)
    database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,?,?)", copies)
    database.commit()
    database.close()
    return path


def union(spans: list[tuple[int, int]]) -> int:
    return len({time for start, end in spans for time in range(start, end)})


_sizes = st.one_of(
    st.sampled_from([1, 1, 1, 0, 2, 63, 64, 2_047, 2_048, 2**20 - 1, 2**20, 2**31 - 1]),
    st.sampled_from([None, "x", "1,1", b"1", -1]),
)
_devices = st.sampled_from([0, 0, 0, 1, 5, 63, 64, None, "gpu", -3])
_rows = st.lists(
    st.tuples(
        st.integers(0, 400), st.integers(-2, 90), _devices,
        st.sampled_from([1, 1, 2, 3, 1 << 21, 404, None]), *[_sizes] * 6,
    ),
    max_size=25,
)  # fmt: skip
_copies = st.lists(
    st.tuples(
        st.integers(0, 400), st.integers(0, 30), st.sampled_from([0, 0, 1, None]),
        st.sampled_from([1, 2, 8, None]), st.sampled_from([0, 64, 4096]),
    ),
    max_size=12,
)  # fmt: skip


def whole(value: Any) -> int | None:
    return value if type(value) is int else None


@settings(max_examples=100, deadline=None)
@given(rows=_rows, copies=_copies, ordered=st.booleans(), block=st.sampled_from([1, 3, 512]))
def test_any_rows_in_any_order_give_what_counting_them_gives(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[Any, ...]],
    copies: list[tuple[Any, ...]],
    ordered: bool,
    block: int,
) -> None:
    rows = [(row[0], row[0] + row[1], *row[2:]) for row in rows]
    copies = [(row[0], row[0] + row[1], *row[2:]) for row in copies]
    if ordered:
        rows.sort(key=lambda row: row[0])
    path = export(tmp_path_factory.mktemp("x") / "x.sqlite", rows, copies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "BLOCK", block)
        patch.setattr(launches, "SEVERAL_BLOCKS", block)
        patch.setattr(sweep, "RUN_ROWS", 4)
        capture = read(path)
    sums: defaultdict[Any, list[int]] = defaultdict(list)
    work: defaultdict[int | None, list[tuple[int, int]]] = defaultdict(list)
    for start, end, device, name, *shape in rows:
        if end < start:
            continue
        sizes = [v if type(v) is int and 0 <= v < 1 << 40 else None for v in shape]
        grid, size = (None if None in part else tuple(part) for part in (sizes[:3], sizes[3:]))
        known = f"kernel{name}" if name in (1, 2, 3, 1 << 21) else f"[no name, id {name}]"
        sums[known if name is not None else "[no name]", grid, size].append(end - start)
        work[whole(device)].append((start, end))
    found = {
        (k.key.name, k.key.grid, k.key.block): (
            k.tally.calls, k.tally.total_ns, k.tally.min_ns, k.tally.max_ns,
        )
        for k in capture.kernels or []
    }  # fmt: skip
    assert found == {key: (len(t), sum(t), min(t), max(t)) for key, t in sums.items()}
    sizes_of: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    names = {1: "Host-to-Device", 2: "Device-to-Host", 8: "Device-to-Device"}
    for start, end, device, kind, size in copies:
        entry = sizes_of[f"[CUDA memcpy {names.get(kind, 'of an unknown kind')}]"]
        entry[:] = entry[0] + 1, entry[1] + end - start, entry[2] + size
        work[device].append((start, end))
    assert {
        name: [t.calls, t.total_ns, t.bytes] for name, t in (capture.memory_ops or {}).items()
    } == dict(sizes_of)
    used = {d.id: (d.busy_ns, d.first_ns, d.last_ns) for d in capture.devices or [] if d.span_ns}
    assert used == {
        device: (union(spans), min(s for s, _ in spans), max(e for _, e in spans))
        for device, spans in work.items()
        if max(e for _, e in spans) > min(s for s, _ in spans)
    }
    backwards = sum(1 for row in rows if row[1] < row[0])
    assert any("end before they start" in line for line in capture.incomplete) == bool(backwards)
    if capture.timeline is not None:
        drawn = sum(sum(times) for times in capture.timeline.categories.values())
        assert drawn == sum(end - start for spans in work.values() for start, end in spans)
        assert all(t >= 0 for times in capture.timeline.categories.values() for t in times)


# --- several devices ---------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tails of the queries over all kernels that the reader makes."""
    seen: list[str] = []
    real = launches._Reader._blocks

    def blocks(self: Any, tail: str) -> Any:
        seen.append(tail)
        return real(self, tail)

    monkeypatch.setattr(launches._Reader, "_blocks", blocks)
    return seen


@pytest.mark.parametrize("first", [0, 1, 700, 2_999])
def test_several_devices_are_read_in_one_pass_wherever_the_second_turns_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    queries = counted(monkeypatch)
    rows: list[Launch] = [
        (10 * n, 10 * n + 4, 0 if n < first else n % 8, f"kernel{n % 7}", ONE, (32, 1, 1))
        for n in range(3_000)
    ]
    capture = read(nsys_export(tmp_path / "x.sqlite", rows))
    assert queries == [""]
    calls: defaultdict[int, int] = defaultdict(int)
    for row in rows:
        calls[row[2]] += 4
    assert {d.id: d.busy_ns for d in capture.devices or []} == dict(calls)
    assert capture.kernel_ns == 12_000


def test_devices_that_lie_one_after_the_other_need_no_sorting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = counted(monkeypatch)
    rows: list[Launch] = [(n, n + 1, d, "a", ONE, ONE) for d in (3, 0) for n in range(0, 4_000, 2)]
    capture = read(nsys_export(tmp_path / "x.sqlite", rows))
    assert queries == [""]
    assert [(d.id, d.busy_ns, d.gap_count) for d in capture.devices or []] == [
        (0, 2_000, 1_999), (3, 2_000, 1_999),
    ]  # fmt: skip


def test_rows_out_of_order_are_sorted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = counted(monkeypatch)
    rows: list[Launch] = [(n, n + 1, n % 2, "a", ONE, ONE) for n in reversed(range(2_000))]
    capture = read(nsys_export(tmp_path / "x.sqlite", rows))
    assert queries == ["", " ORDER BY 1"]
    assert [d.busy_ns for d in capture.devices or []] == [1_000, 1_000]


def test_more_devices_than_there_can_be_are_refused(tmp_path: Path) -> None:
    rows: list[Launch] = [(n, n + 1, n, "a", ONE, ONE) for n in range(launches.MAX_DEVICES + 1)]
    with pytest.raises(Damaged, match="more than 1000 devices"):
        read(nsys_export(tmp_path / "x.sqlite", rows))


def test_too_many_keys_are_refused_on_one_device_and_on_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ikit_ops.profilers.limits.MAX_NAMES", 10)
    for devices in (1, 2):
        rows: list[Launch] = [
            (n, n + 1, n % devices, f"k{n}", ONE, ONE) for n in range(20 * devices)
        ]
        with pytest.raises(Damaged, match="more than 10 different names"):
            read(nsys_export(tmp_path / f"{devices}.sqlite", rows))


@pytest.mark.parametrize("where", ["KERNEL", "MEMCPY"])
@pytest.mark.parametrize("times", ["NULL, 5", "'soon', 5", "1, 9e999", "9e999, 9e999", "1.5, 2"])
def test_the_table_whose_times_are_unsound_is_named(tmp_path: Path, where: str, times: str) -> None:
    path = export(tmp_path / "x.sqlite", [(0, 5, 0, 1, *ONE, *ONE)], [(7, 9, 0, 1, 64)])
    database = sqlite3.connect(path)
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_{where} (start, end, deviceId) VALUES ({times}, 0)"
    )
    database.commit()
    database.close()
    with pytest.raises(Damaged, match=f"times in CUPTI_ACTIVITY_KIND_{where} are not whole"):
        read(path)


def test_memory_operations_in_millions_are_not_kept_as_rows(tmp_path: Path) -> None:
    kernels = [(n * 10, n * 10 + 3, 0, 1, *ONE, *ONE) for n in range(50)]
    early = [(n - 5_000, n - 4_999, 0, 1, 2) for n in range(4_000)]
    between = [(250, 251, 0, 2, 2)] * 3_000
    path = export(tmp_path / "x.sqlite", kernels, [*early, *between])
    with opened(Reading(path)) as database:
        table = launches.Launches("CUPTI_ACTIVITY_KIND_KERNEL", "start", "end", "deviceId", ("1",))
        other = launches.Launches(
            "CUPTI_ACTIVITY_KIND_MEMCPY", "start", "end", "deviceId", ("copyKind",), mark="copy"
        )
        reader = launches._Reader(database, [table, other], {})
        blocks = list(reader._blocks(""))
    assert max(map(len, blocks)) <= 2 * launches.BLOCK
    assert sum(map(len, blocks)) == 7_050
    starts = [row[0] for block in blocks for row in block]
    assert starts == sorted(starts)


# --- keys ----------------------------------------------------------------------------------


def test_keys_of_several_tables_are_told_apart_and_read_back() -> None:
    fields = [("a", 20), ("b", 6), ("c", 0), (ABSENT, 11)]
    packings = [Packing(fields if n == 0 else [("a", 20), (ABSENT, 6)], n, 4) for n in range(4)]
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE t (a, b, c)")
    for a in (0, 1, 2**20 - 1, 2**20, -5, None, "text"):
        for b, c in ((0, 1), (63, 1), (64, 1), (7, 2), (None, 1)):
            database.execute("DELETE FROM t")
            database.execute("INSERT INTO t VALUES (?, ?, ?)", (a, b, c))
            for number, packing in enumerate(packings):
                [(key,)] = database.execute(f"SELECT {packing.sql()} FROM t")
                assert packings[0].number_of(key) == number
                known = a if isinstance(a, int) else None
                wanted = [known, b, c, None] if number == 0 else [known, None]
                assert packing.unpack(key) == wanted
                fits = known is not None and 0 <= known < 2**20
                fits = fits and (number > 0 or (b in (0, 63) and c == 1))
                assert isinstance(key, int) == fits, (a, b, c, number)
    database.close()


# --- slices --------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 900), st.integers(0, 2)), max_size=40
    ),
    span=st.integers(1, 1_000),
)
def test_a_slice_holds_what_ran_in_it(rows: list[tuple[int, int, int]], span: int) -> None:
    ordered = sorted((start, start + length, key) for start, length, key in rows)
    swept = sweep.sweep([ordered[n : n + 7] for n in range(0, len(ordered), 7)], (0, span))
    edges = [span * number // SLICES for number in range(MOST)]
    edges.append(10**9)  # the last slice has no end
    found = [dict(times) for times in swept.slices]
    for number, times in enumerate(found):
        for key in range(3):
            low, high = edges[number], edges[number + 1]
            ran = sum(max(0, min(end, high) - max(start, low)) for start, end, k in rows_of(rows)
                      if k == key)  # fmt: skip
            assert times.get((key,), 0) == ran
    assert sum(sum(times.values()) for times in found) == sum(length for _, length, _ in rows)


def rows_of(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(start, start + length, key) for start, length, key in rows]


def test_long_kernels_fill_the_picture_from_end_to_end(tmp_path: Path) -> None:
    rows: list[Launch] = [(n * 1_000, n * 1_000 + 1_000, 0, "gemm", ONE, ONE) for n in range(5)]
    capture = read(nsys_export(tmp_path / "x.sqlite", rows))
    assert capture.timeline is not None
    bars = capture.timeline.categories["gemm"]
    assert len(bars) == SLICES and sum(bars) == 5_000
    assert {round(bar / capture.timeline.slice_ns, 1) for bar in bars} == {1.0}
    drawn = svg(capture.timeline).decode("ascii").count('fill="#4269d0"')
    assert drawn == SLICES + 1  # the legend has one too


def test_a_kernel_that_runs_to_the_end_fills_every_slice_and_costs_one_entry() -> None:
    rows = [(0, 6_000, 1), *((n, n + 1, 2) for n in range(0, 6_000, 2))]
    swept = sweep.sweep([rows], (0, 6_000))
    assert [times[(1,)] for times in swept.slices] == [100] * SLICES


def test_a_capture_longer_than_expected_has_more_slices_put_together() -> None:
    rows = [(n, n + 1, 0) for n in range(1_000)]
    swept = sweep.sweep([rows], (0, 100))
    timeline = timeline_of([(swept.slices, {(0,): "gemm"})], (0, 1_000))
    bars = timeline.categories["gemm"]
    assert len(bars) <= SLICES and sum(bars) == 1_000
    assert timeline.slice_ns * len(bars) == pytest.approx(1_000, rel=0.02)


def test_a_capture_far_longer_than_expected_ends_in_one_last_slice() -> None:
    slices = Slices((0, 60))
    assert slices.index(10**9) == MOST - 1 and slices.end(MOST - 1) == float("inf")
    slices.add(MOST - 1, "a", 50)
    slices.spread(MOST - 1, "a", 10**9)
    slices.settle()
    assert sum(times.get("a", 0) for times in slices) == 50


def test_the_picture_begins_with_the_earliest_device_and_ends_with_the_latest(
    tmp_path: Path,
) -> None:
    rows: list[Launch] = [(50_000 + n, 50_001 + n, 0, "gemm", ONE, ONE) for n in range(0, 900, 3)]
    rows += [(n, n + 1, 1, "gemm", ONE, ONE) for n in range(0, 60_000, 30)]
    capture = read(nsys_export(tmp_path / "x.sqlite", rows))
    assert capture.timeline is not None
    assert capture.timeline.slice_ns == pytest.approx(1_000, rel=0.01)
    bars = capture.timeline.categories["gemm"]
    assert all(bar >= 30 for bar in bars) and max(bars) == bars[50]
