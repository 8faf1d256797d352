"""rocpd, perf and speedscope; bounds of reading; how a file's format is found."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fakes.profilers import NCU_DETAILS, NCU_RAW, ROCPROF_TRACES, nsys_export, rocpd_file
from ikit_mcp.evidence.record import storable
from ikit_mcp.registry import OpError
from ikit_ops.profilers import formats, limits, names, profilers, report
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import Damaged, Reading, shown_name

DATA = Path(__file__).parents[1] / "data" / "profiles"
SCOPE: dict[str, Any] = {
    "$schema": "https://www.speedscope.app/file-format-schema.json",
    "exporter": "py-spy@0.4.0",
    "shared": {"frames": [{"name": "main", "file": "a.py"}, {"name": "work"}, {"name": "idle"}]},
    "profiles": [
        {"type": "sampled", "unit": "seconds", "samples": [[0, 1], [0, 1], [0], []],
         "weights": [0.5, 0.25, 0.25, 1.0]},
        {"type": "evented", "unit": "seconds", "events": [
            {"type": "O", "frame": 0, "at": 0}, {"type": "O", "frame": 2, "at": 1},
            {"type": "C", "frame": 2, "at": 2}, {"type": "C", "frame": 0, "at": 2}]},
    ],
}  # fmt: skip


def read(path: Path) -> Capture:
    reading = Reading(path)
    return formats.read(reading, formats.detect(reading))


def read_text(path: Path, text: str) -> Capture:
    path.write_text(text, encoding="utf-8")
    return read(path)


# --- rocpd --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("suffix", ["", "_0a1b2c"])
def test_dispatches_copies_and_regions_of_a_rocpd_file(
    tmp_path: Path, version: int, suffix: str
) -> None:
    capture = read(rocpd_file(tmp_path / "x.db", (suffix,), version=version))
    rows = capture.kernel_rows()
    assert [(r["name"], r["calls"], r["total_ns"]) for r in rows] == [
        ("Cijk_gemm(int)", 2, 300), ("attn_fwd", 1, 300),
    ]  # fmt: skip
    assert (rows[0]["grid"], rows[0]["block"]) == ([512, 2, 1], [256, 1, 1])
    [device] = capture.devices or []
    assert (device.id, device.name) == (4, "AMD Instinct MI300X")
    assert (device.busy_ns, device.span_ns) == (640, 850)
    memory = (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"]
    assert (memory.calls, memory.total_ns, memory.bytes) == (1, 40, 4096)
    assert {n: t.total_ns for n, t in (capture.host_api or {}).items()} == {"hipLaunchKernel": 10}
    assert {n: t.total_ns for n, t in (capture.ranges or {}).items()} == {"decode": 900}
    assert capture.incomplete == []


def test_several_runs_in_one_file_are_added_up(tmp_path: Path) -> None:
    capture = read(rocpd_file(tmp_path / "x.db", ("_a", "_b")))
    assert [row["calls"] for row in capture.kernel_rows()] == [4, 2]
    assert (capture.memory_ops or {})["MEMORY_COPY_HOST_TO_DEVICE"].calls == 2


def test_a_rocpd_file_without_dispatches_has_an_empty_table(tmp_path: Path) -> None:
    path = rocpd_file(tmp_path / "x.db")
    database = sqlite3.connect(path)
    database.execute('DELETE FROM "rocpd_kernel_dispatch_0a"')
    database.commit()
    database.close()
    capture = read(path)
    assert capture.kernels == [] and [d.busy_ns for d in capture.devices or []] == [40]


# --- perf and speedscope --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["perf_script_6.1_chains.txt", "perf_script_6.1_flat.txt"])
def test_every_sample_of_a_real_perf_script_is_counted_once(name: str) -> None:
    text = (DATA / name).read_text(encoding="utf-8")
    capture = read(DATA / name)
    heads = sum("cpu-clock" in line for line in text.splitlines())
    assert capture.facts["samples"] == heads > 20
    functions = capture.functions or []
    assert sum(f["samples"] for f in functions) == heads
    assert sum(f["share"] for f in functions) == pytest.approx(1)
    assert all(f["inclusive_share"] >= f["share"] - 1e-9 for f in functions)
    assert capture.kernels is None and capture.missing[0].startswith("GPU kernels")


def test_samples_count_by_their_period_and_chains_by_their_leaf(tmp_path: Path) -> None:
    text = (
        "# captured on a made-up day\n"
        "tmux: server 12/13 100.000001:  300 cycles:\n"
        "\t  ffff inner+0x1 (/usr/lib/a (deleted))\n\t  1234 outer (/usr/bin/b)\n\n"
        "python3 12/12 101.5:  100 cycles:\n\t  1234 outer (/usr/bin/b)\n\n"
        "python3 12/12 [001] 102.0:  100 cycles:  12ab leaf+0x3 (/usr/bin/b)\n"
        "PERF_RECORD_LOST lost 7 events\n"
    )
    capture = read_text(tmp_path / "p.txt", text)
    functions = {f["name"]: f for f in capture.functions or []}
    assert functions["inner"]["share"] == 0.6 and functions["outer"]["share"] == 0.2
    assert functions["outer"]["inclusive_share"] == 0.8
    assert functions["inner"]["object"] == "/usr/lib/a (deleted)"
    assert functions["leaf"]["samples"] == 1
    assert capture.facts["span_s"] == pytest.approx(2.0, abs=1e-3)
    assert capture.incomplete == ["perf lost samples (1 notes of it)"]


def test_counters_that_were_not_counted_are_null_and_never_zero() -> None:
    capture = read(DATA / "perf_stat_paranoid.json")
    counters = {row["event"]: row for row in capture.counters or []}
    assert counters["LLC-loads:u"]["value"] is None
    assert counters["LLC-loads:u"]["why"] == "not supported"
    assert counters["cycles:u"]["value"] == 1_500_000
    assert capture.incomplete == ["2 of 9 counters were not counted"]
    assert any("took turns" in line for line in capture.limitations)


def test_sampled_and_evented_speedscope_profiles_are_weighed(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x.speedscope.json", json.dumps(SCOPE))
    functions = {f["name"]: f for f in capture.functions or []}
    assert functions["work"]["share"] == 0.75 / 4 and functions["main"]["share"] == 1.25 / 4
    assert functions["main"]["inclusive_share"] == 3.0 / 4 and functions["idle"]["share"] == 0.25
    assert functions["main"]["object"] == "a.py" and capture.facts["exporter"] == "py-spy@0.4.0"


def scope(*profiles: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"shared": SCOPE["shared"], "profiles": list(profiles), **more}


def events(*told: tuple[str, int, float], **more: Any) -> dict[str, Any]:
    listed = [{"type": kind, "frame": frame, "at": at} for kind, frame, at in told]
    return {"type": "evented", "unit": "seconds", "events": listed, **more}


def sampled(*weights: float, unit: str = "seconds") -> dict[str, Any]:
    stacks = [[n % 3] for n in range(len(weights))]
    return {"type": "sampled", "unit": unit, "samples": stacks, "weights": list(weights)}


def shares(capture: Capture) -> dict[str, float | None]:
    return {row["name"]: row["share"] for row in capture.functions or []}


def test_time_of_a_frame_runs_to_the_bounds_of_its_profile(tmp_path: Path) -> None:
    told = (("O", 0, 1), ("O", 1, 2), ("C", 1, 5), ("C", 0, 9))
    whole = events(*told, startValue=0, endValue=10)
    capture = read_text(tmp_path / "x.json", json.dumps(scope(whole)))
    assert shares(capture) == {"main": 0.5, "work": 0.3}  # of 10 s: two were idle
    assert capture.incomplete == [] and capture.limitations == []
    assert [row["samples"] for row in capture.functions or []] == [None, None]
    cut = events(*told[:2], startValue=0, endValue=10)
    capture = read_text(tmp_path / "x.json", json.dumps(scope(cut)))
    assert shares(capture) == {"main": 0.1, "work": 0.8}
    assert capture.incomplete == ["2 frames are never closed: the profile may be cut off"]


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        (sampled(5, -4), "less than nothing"),
        (sampled(1e308, 1e308), "too large"),
        (events(("O", 0, 8), ("O", 1, 2), ("C", 1, 5), ("C", 0, 9)), "backwards"),
        (events(("O", 0, 1), ("C", 0, 9), startValue=2), "backwards"),
        (events(("O", 0, 1), ("C", 0, 9), endValue=8), "beyond its end"),
        (events(("O", 0, 1), ("O", 1, 2), ("C", 0, 3)), "not the last one opened"),
        (events(("X", 0, 1)), "not the last one opened"),
    ],
)
def test_weights_and_times_that_cannot_be_are_refused(
    tmp_path: Path, profile: dict[str, Any], what: str
) -> None:
    with pytest.raises(Damaged, match=what):
        read_text(tmp_path / "x.json", json.dumps(scope(profile)))


def test_units_of_time_are_converted_and_others_have_no_common_share(tmp_path: Path) -> None:
    both = scope(sampled(1), sampled(0, 1000, unit="milliseconds"))
    capture = read_text(tmp_path / "x.json", json.dumps(both))
    assert shares(capture) == {"main": 0.5, "work": 0.5} and capture.incomplete == []
    other = scope(sampled(1), sampled(0, 1000, unit="bytes"))
    capture = read_text(tmp_path / "x.json", json.dumps(other))
    assert shares(capture) == {"main": None, "work": None}
    assert capture.incomplete == ["profiles of different units are in one file: no shares of both"]


def test_profiles_of_an_unknown_type_are_said_to_be_left_out(tmp_path: Path) -> None:
    capture = read_text(tmp_path / "x.json", json.dumps(scope(sampled(1), {"type": "new"})))
    assert shares(capture) == {"main": 1.0}
    assert capture.incomplete == ["1 profiles are of an unknown type: they were left out"]


@pytest.mark.parametrize("order", [("shared", "profiles"), ("profiles", "shared")])
@pytest.mark.parametrize("schema", [True, False])
def test_speedscope_is_known_wherever_its_schema_stands_and_without_it(
    tmp_path: Path, order: tuple[str, str], schema: bool
) -> None:
    frames = [{"name": "n" * 60}] * 2_000
    profile = {"type": "sampled", "unit": "none", "samples": [[0]] * 30_000}
    parts: dict[str, Any] = {"shared": {"frames": frames}, "profiles": [profile]}
    told = {"exporter": "x", **{key: parts[key] for key in order}}
    text = json.dumps(told | ({"$schema": SCOPE["$schema"]} if schema else {}))
    assert text.find("$schema") == -1 or text.find("$schema") > 64 << 10
    capture = read_text(tmp_path / "x.json", text)
    assert (capture.format, capture.facts["samples"]) == ("speedscope", 30_000)


@pytest.mark.parametrize(
    "change",
    [
        {"profiles": [{"type": "sampled", "samples": [[9]], "weights": [1]}]},
        {"profiles": [{"type": "sampled", "samples": [[-1]], "weights": [1]}]},
        {"profiles": [{"type": "sampled", "samples": [[0]], "weights": [1, 2]}]},
        {"profiles": [{"type": "evented", "events": [{"type": "O", "frame": 9, "at": 0}]}]},
        {"profiles": [{"type": "evented", "events": [{"type": "C", "frame": 0, "at": 0}]}]},
        {"profiles": "none"},
        {"shared": {"frames": [1]}},
    ],
)
def test_speedscope_files_that_refer_to_nothing_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(Damaged):
        read_text(tmp_path / "x.json", json.dumps(SCOPE | change))


# --- bounds -------------------------------------------------------------------------------


def test_what_unpacks_to_more_than_the_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UNPACKED", 1 << 20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (4 << 20)))
    assert path.stat().st_size < 1 << 16
    with pytest.raises(Damaged, match="unpacks to more than"):
        read(path)


def test_a_line_without_end_is_cut_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_LINE", 1_000)
    monkeypatch.setattr(limits, "CHUNK", 512)
    text = "x" * 5_000 + "\n" + (DATA / "rocprofv3_kernel_stats.csv").read_text(encoding="utf-8")
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8")
    reading = Reading(path)
    capture = formats.read(reading, "rocprofv3-csv")
    assert len(capture.kernels or []) == 5
    assert any("longer than" in line for line in capture.incomplete)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, what in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "absent", "no such file"),
        (Path("a\0b"), "no such file"),
        (Path("x" * 5_000), "no such file"),
        (Path("/dev/null"), "not a regular file"),
    ):
        with pytest.raises(OpError, match=what):
            limits.regular_file(str(path))
    with pytest.raises(OpError, match="not a regular file"):
        limits.open_regular(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(DATA / "rocprofv3_kernel_stats.csv")
    assert limits.regular_file(str(tmp_path / "link")).is_file()


def test_names_that_are_cut_stay_different_and_are_one_line() -> None:
    one, other = ("void k<" + "int, " * 100 + end for end in ("1>(x)", "2>(x)"))
    assert shown_name(one) != shown_name(other)
    digest = hashlib.sha256(one.encode()).hexdigest()[:8]
    assert len(shown_name(one)) <= 200 and shown_name(one).endswith(f"… #{digest}")
    assert shown_name("a\n\x1b[31mb\u202e") == "a [31mb"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("nsys_2026.1_gpu_kernels.sqlite", "sqlite"),
        ("nsys_stats_2022.4_gpukernsum.csv", "nsys-stats"),
        ("nsys_stats_2022.4_gpukernsum.json", "nsys-stats-json"),
        ("torch_cuda_trace.json", "torch-trace"),
        ("rocprofv3_kernel_stats.csv", "rocprofv3-csv"),
        ("perf_stat_paranoid.json", "perf-stat"),
        ("perf_script_6.1_chains.txt", "perf-script"),
    ],
)
def test_formats_are_found_by_content_whatever_the_name(
    tmp_path: Path, name: str, wanted: str
) -> None:
    path = tmp_path / "capture.bin"
    path.write_bytes((DATA / name).read_bytes())
    assert formats.detect(Reading(path)) == wanted


def test_made_up_captures_are_recognised_too(tmp_path: Path) -> None:
    for text, wanted in (
        (NCU_RAW, "ncu-csv"),
        (NCU_DETAILS, "ncu-csv"),
        *((trace, "rocprofv3-csv") for trace in ROCPROF_TRACES.values()),
        (json.dumps(SCOPE), "speedscope"),
        ("NVIDIA Tegra Profiler Report 1.\n", "nsys-rep"),
        ("NVR\0\2", "ncu-rep"),
        ("PERFILE2", "perf-data"),
    ):
        path = tmp_path / "x"
        path.write_text(text, encoding="utf-8")
        assert formats.detect(Reading(path)) == wanted
    for text in ("", "hello", "a,b,c\n1,2,3\n", "[1, 2]", "\0\1\2"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(OpError, match="not recognised"):
            formats.detect(Reading(path))


def test_a_format_that_is_asked_for_is_not_taken_on_trust(tmp_path: Path) -> None:
    path = nsys_export(tmp_path / "x.sqlite")
    for name in names.FORMATS:
        if name not in (*names.CONVERTED, "nsys-sqlite"):
            with pytest.raises(Damaged):
                formats.read(Reading(path), name)
    with pytest.raises(Damaged, match="no SQLite database"):
        formats.read(Reading(DATA / "torch_cuda_trace.json"), "rocpd")


def test_declared_names_are_those_that_exist() -> None:
    assert set(names.PROFILERS) == set(profilers())
    read_here = {*formats.READERS, "nsys-sqlite", "rocpd"}
    assert set(names.FORMATS) == read_here | set(names.CONVERTED)


# --- any bytes ----------------------------------------------------------------------------


def damaged_bytes(chance: random.Random, data: bytes) -> bytes:
    """The data with some bytes changed, cut off, doubled, or replaced by what parsers dislike."""
    made = bytearray(data)
    how = chance.randrange(4)
    if how == 0:
        for _ in range(chance.randrange(1, 20)):
            made[chance.randrange(len(made))] = chance.randrange(256)
    elif how == 1:
        del made[chance.randrange(len(made)) :]
    elif how == 2:
        start, place = chance.randrange(len(made)), chance.randrange(len(made))
        made[place:place] = made[start : start + chance.randrange(200)]
    else:
        words = (b"9" * 30, b"null", b'"', b"{", b"]", b"-1", b"1e400", b"\0", b",", b"true")
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(made))
            made[place : place + chance.randrange(8)] = chance.choice(words)
    return bytes(made)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_captures_are_refused_or_read_and_never_crash(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    captures = [p.read_bytes() for p in sorted(DATA.iterdir()) if p.suffix != ".md"]
    captures += [t.encode("utf-8") for t in (NCU_RAW, NCU_DETAILS, *ROCPROF_TRACES.values())]
    captures += [
        rocpd_file(tmp_path / f"{v}.db", version=v).read_bytes() for v in (3, 4)
    ]  # fmt: skip
    path = tmp_path / "x"
    for data in captures:
        path.write_bytes(damaged_bytes(chance, data))
        try:
            capture = read(path)
        except OpError as error:
            assert error.what and error.next_step
            continue
        draft = report.draft(capture, report.Context("derived", "x"))
        storable(draft.data)  # no number that JSON cannot hold
        report.artifacts_of(capture)
