"""rocpd: agents of several runs, copies by the device they keep busy, regions by category."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from fakes.profilers import rocpd_file
from ikit_ops.profilers import formats, limits, report, rocpd
from ikit_ops.profilers.capture import Capture, Tally, tally_rows
from ikit_ops.profilers.limits import Damaged, Reading

COPY = "rocpd_memory_copy_0a"
TOGETHER = (
    'UPDATE "rocpd_kernel_dispatch_b" SET start = start - 10000, end = end - 10000',
    'UPDATE "rocpd_memory_copy_b" SET start = start - 10000, end = end - 10000',
)


def changed(path: Path, *statements: str) -> Capture:
    database = sqlite3.connect(path)
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.close()
    reading = Reading(path)
    return formats.read(reading, formats.detect(reading))


def devices(capture: Capture) -> list[tuple[int | None, str | None, int, int | None]]:
    return [(d.id, d.name, d.busy_ns, d.span_ns) for d in capture.devices or []]


def sums(part: dict[str, Tally] | None) -> dict[str, int | None] | None:
    return None if part is None else {name: tally.known_ns for name, tally in part.items()}


# --- agents -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 4])
def test_two_processes_on_one_agent_are_one_device_that_is_busy_once(
    tmp_path: Path, version: int
) -> None:
    path = rocpd_file(tmp_path / "x.db", ("_a", "_b"), version=version)
    if version == 4:
        capture = changed(path, 'UPDATE "rocpd_timestamp_b" SET value = value - 10000')
    else:
        capture = changed(path, *TOGETHER)
    assert devices(capture) == [(4, "AMD Instinct MI300X", 640, 850)]
    assert [(r["name"], r["calls"], r["total_ns"]) for r in capture.kernel_rows()] == [
        ("Cijk_gemm(int)", 4, 600), ("attn_fwd", 2, 600),
    ]  # fmt: skip
    assert capture.kernel_rows()[0]["grid"] == [512, 2, 1]
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"].bytes == 8192


def test_kernels_of_two_runs_are_named_each_by_its_own_run(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "x.db", ("_a", "_b"))
    other = "UPDATE \"rocpd_info_kernel_symbol_b\" SET display_name = 'other' WHERE id = 1"
    capture = changed(path, other, 'UPDATE "rocpd_kernel_dispatch_b" SET kernel_id = NULL '
                                   'WHERE kernel_id = 2')  # fmt: skip
    assert {(r["name"], r["calls"]) for r in capture.kernel_rows()} == {
        ("Cijk_gemm(int)", 2), ("attn_fwd", 1), ("other", 2), ("[no name]", 1),
    }  # fmt: skip


@pytest.mark.parametrize("what", ["uuid", "machine"])
def test_the_same_number_of_another_device_is_another_device(tmp_path: Path, what: str) -> None:
    path = rocpd_file(tmp_path / "x.db", ("_a", "_b"))
    statements = list(TOGETHER)
    for run, uuid, node in (("a", "17", "one"), ("b", "18", "two")):
        table = f'"rocpd_info_agent_{run}"'
        if what == "uuid":
            statements += [
                f"ALTER TABLE {table} ADD COLUMN uuid",
                f"UPDATE {table} SET uuid = {uuid}",
            ]
        else:
            statements += [
                f"ALTER TABLE {table} ADD COLUMN nid INTEGER DEFAULT 1",
                f'CREATE TABLE "rocpd_info_node_{run}" (id INTEGER PRIMARY KEY, hostname TEXT)',
                f"INSERT INTO \"rocpd_info_node_{run}\" VALUES (1, '{node}')",
            ]
    statements.append("UPDATE \"rocpd_info_agent_b\" SET product_name = 'the other one'")
    capture = changed(path, *statements)
    assert devices(capture) == [
        (4, "AMD Instinct MI300X", 640, 850), (4, "the other one", 640, 850),
    ]  # fmt: skip
    assert capture.busy_share == pytest.approx(640 / 850)


def test_agents_without_identity_or_of_strange_numbers_change_nothing(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "x.db", ("_a", "_b"))
    strange = "INSERT INTO \"rocpd_info_agent_a\" VALUES (-3, 'GPU', 'x', 'y')"
    capture = changed(path, *TOGETHER, 'DROP TABLE "rocpd_info_agent_b"', strange)
    assert devices(capture) == [(4, "AMD Instinct MI300X", 640, 850)]


def test_more_runs_than_can_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocpd, "MAX_RUNS", 1)
    with pytest.raises(Damaged, match="more than 1 runs"):
        changed(rocpd_file(tmp_path / "x.db", ("_a", "_b")))


# --- copies -------------------------------------------------------------------------------


def test_a_copy_to_the_host_keeps_the_device_busy_and_one_inside_of_it_none(
    tmp_path: Path,
) -> None:
    capture = changed(
        rocpd_file(tmp_path / "x.db"),
        "INSERT INTO \"rocpd_info_agent_0a\" VALUES (0, 'CPU', 'EPYC', 'EPYC')",
        f'ALTER TABLE "{COPY}" ADD COLUMN src_agent_id INTEGER',
        f'UPDATE "{COPY}" SET src_agent_id = 4, dst_agent_id = 0',
        f'INSERT INTO "{COPY}" VALUES (NULL, 5000, 6000, 3, 1, 0, 0)',
    )
    assert devices(capture) == [(4, "AMD Instinct MI300X", 640, 850)]
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"].calls == 2


def test_copies_without_size_have_no_bytes_instead_of_none(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "x.db")
    capture = changed(path, f'INSERT INTO "{COPY}" VALUES (NULL, 95, 99, 3, NULL, 4)')
    [row] = tally_rows(capture.memory_ops, 9) or []
    assert (row["calls"], row["bytes"]) == (2, 4096)
    assert "bytes of 1 memory operations (their size is not said)" in capture.missing
    capture = changed(path, f'ALTER TABLE "{COPY}" DROP COLUMN size')
    [row] = tally_rows(capture.memory_ops, 9) or []
    assert (row["calls"], row["bytes"]) == (2, None)
    assert "bytes of 2 memory operations (their size is not said)" in capture.missing


def test_many_copies_are_not_many_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_NAMES", 100)
    path = rocpd_file(tmp_path / "x.db")
    many = (
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 999) "
        f'INSERT INTO "{COPY}" SELECT NULL, 1000 + i * 10, 1005 + i * 10, 3, 1, 4 FROM n'
    )
    capture = changed(path, many)
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"].calls == 1_001
    monkeypatch.setattr(rocpd, "MAX_KINDS", 1)
    with pytest.raises(Damaged, match="more than 1 kinds of copies"):
        changed(path, f'INSERT INTO "{COPY}" VALUES (NULL, 95, 99, 1, NULL, 4)')


def test_a_copy_without_name_or_agent_is_still_a_copy(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "x.db")
    capture = changed(path, f'INSERT INTO "{COPY}" VALUES (NULL, 95, 99, NULL, 1, NULL)')
    assert (capture.memory_ops or {})["memory copy"].known_ns == 4
    assert {d.id for d in capture.devices or []} == {None, 4}


# --- regions ------------------------------------------------------------------------------


def test_regions_are_calls_or_ranges_by_their_category(tmp_path: Path) -> None:
    statements = [
        'CREATE TABLE "rocpd_event_0a" (id INTEGER PRIMARY KEY, category_id INTEGER)',
        'ALTER TABLE "rocpd_region_0a" ADD COLUMN event_id INTEGER',
        "INSERT INTO \"rocpd_string_0a\" VALUES (10, 'g', 'MARKER_CORE_RANGE_API'), "
        "(11, 'g', 'HIP_RUNTIME_API'), (12, 'g', 'rocking'), (13, 'g', 'hipFree')",
        'INSERT INTO "rocpd_event_0a" VALUES (1, 10), (2, 11), (3, NULL)',
        'INSERT INTO "rocpd_region_0a" VALUES (NULL, 1, 4, 12, 2), (NULL, 1, 3, 13, 1), '
        "(NULL, 1, 6, 13, 3), (NULL, 1, 9, 12, NULL)",
    ]
    capture = changed(rocpd_file(tmp_path / "x.db"), *statements)
    assert sums(capture.host_api) == {"hipLaunchKernel": 10, "rocking": 3, "hipFree": 5}
    assert sums(capture.ranges) == {"decode": 900, "hipFree": 2, "rocking": 8}


def test_regions_without_end_are_counted_and_absent_tables_named(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "x.db")
    capture = changed(path, 'INSERT INTO "rocpd_region_0a" VALUES (NULL, 9, NULL, 2), '
                            "(NULL, 9, 3, 2)")  # fmt: skip
    assert capture.incomplete == ["2 regions have no end behind their start: left out"]
    assert report.draft(capture, report.Context("derived", "x")).valid is None
    capture = changed(path, 'DROP TABLE "rocpd_region_0a"', f'DROP TABLE "{COPY}"')
    assert (capture.memory_ops, capture.host_api, capture.ranges) == (None, None, None)
    for part in ("memory operations", "host API calls", "ranges"):
        assert f"{part} (the file has no table of them)" in capture.missing
