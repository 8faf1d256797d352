"""Chrome traces: streamed in pieces, the same sums as a whole, whatever the text looks like."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.profilers import trace_event
from ikit_ops.profilers import chrome_trace, formats, json_events
from ikit_ops.profilers.capture import Capture
from ikit_ops.profilers.limits import (
    CUT,
    DAMAGED,
    TRAILING,
    Damaged,
    Reading,
    file_digest,
    open_bytes,
)

DATA = Path(__file__).parents[1] / "data" / "profiles"
SAMPLE = DATA / "torch_cuda_trace.json"


def read(path: Path) -> Capture:
    reading = Reading(path)
    return formats.read(reading, formats.detect(reading))


def read_text(path: Path, text: str | bytes) -> Capture:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return read(path)


def sums(capture: Capture) -> dict[Any, tuple[int, int]]:
    return {
        (k.key.name, k.key.grid, k.key.block): (k.tally.calls, k.tally.total_ns)
        for k in capture.kernels or []
    }


def expected(events: list[dict[str, Any]]) -> dict[Any, tuple[int, int]]:
    found: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for event in events:
        if event.get("cat") == "kernel" and event.get("ph") == "X":
            args = event.get("args", {})
            shapes = (tuple(args[k]) if k in args else None for k in ("grid", "block"))
            entry = found[(event["name"], *shapes)]
            entry[0] += 1
            entry[1] += round(event["dur"] * 1000)
    return {key: (calls, total) for key, (calls, total) in found.items()}


def test_the_real_trace_has_the_sums_of_its_events() -> None:
    whole = json.loads(SAMPLE.read_text(encoding="utf-8"))
    capture = read(SAMPLE)
    assert sums(capture) == expected(whole["traceEvents"])
    assert capture.kernel_ns == 51_391 and capture.incomplete == []
    [device] = capture.devices or []
    assert device.name == "NVIDIA GeForce RTX 4060 Laptop GPU"
    api = capture.host_api or {}
    assert (api["cudaLaunchKernel"].calls, api["cudaDeviceSynchronize"].calls) == (9, 2)
    assert capture.ranges == {} and capture.memory_ops == {}
    assert capture.facts["cuda_driver_version"] == 13030


def test_packed_traces_are_read_like_plain_ones(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(SAMPLE.read_bytes()))
    assert sums(read(path)) == sums(read(SAMPLE))


@pytest.mark.parametrize("indent", [None, 1, 4])
@pytest.mark.parametrize("block", [64, 1_000, 1 << 17])
def test_no_cut_changes_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, block: int
) -> None:
    monkeypatch.setattr(json_events, "BLOCK", block)
    whole = json.loads(SAMPLE.read_text(encoding="utf-8"))
    capture = read_text(tmp_path / "t.json", json.dumps(whole, indent=indent))
    assert sums(capture) == expected(whole["traceEvents"]) and capture.incomplete == []


_names = st.sampled_from(["gemm", 'a "},{" trap', "}],[{", "\\", '\\\\"},', "ünï", "k<int, 3>(x)"])
_nested = st.recursive(
    st.one_of(st.integers(0, 9), st.sampled_from(["},", "]}", '"', "x"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_names, inner, max_size=3)
    ),
    max_leaves=6,
)
_events = st.lists(
    st.builds(
        lambda cat, name, ts, dur, extra, shaped: trace_event(
            cat, name, ts / 8, dur / 8,
            args={"device": 0, "more": extra}
            | ({"grid": [ts % 3 + 1, 1, 1], "block": [32, 1, 1]} if shaped else {}),
        ),
        st.sampled_from(["kernel", "gpu_memcpy", "cpu_op", "python_function"]),
        _names, st.integers(0, 10_000), st.integers(0, 500), _nested, st.booleans(),
    ),
    max_size=30,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(events=_events, block=st.integers(8, 300), indent=st.sampled_from([None, 2]))
def test_any_events_in_any_pieces_sum_up_as_json_says(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[dict[str, Any]],
    block: int,
    indent: int | None,
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.json"
    head = {"deviceProperties": [{"id": 0, "name": '"traceEvents": ['}], "x": {"traceEvents": [1]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_events, "BLOCK", block)
        text = json.dumps({**head, "traceEvents": events, "traceName": "},{"}, indent=indent)
        capture = read_text(path, text)
    assert sums(capture) == expected(events)
    assert not [line for line in capture.incomplete if "no sound JSON" in line]


def test_a_bare_list_is_a_trace_too(tmp_path: Path) -> None:
    events = [trace_event("kernel", "a", 1, 2), trace_event("kernel", "a", 5, 1.5)]
    assert sums(read_text(tmp_path / "t.json", json.dumps(events))) == {
        ("a", None, None): (2, 3500)
    }


PROPERTIES = [{"id": 0, "name": "A GPU"}, {"id": 1, "name": "Another, {a}, [b]"}]


@pytest.mark.parametrize("block", [16, 200, 1 << 17])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("behind", [("traceEvents",), ("schemaVersion", "traceEvents")])
def test_what_stands_behind_the_events_is_read_like_what_stands_before_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    indent: int | None,
    behind: tuple[str, ...],
) -> None:
    monkeypatch.setattr(json_events, "BLOCK", block)
    events = [trace_event("kernel", "a", n, 1, args={"device": n % 2}) for n in range(20)]
    parts = {"schemaVersion": 1, "traceEvents": events, "deviceProperties": PROPERTIES}
    ordered = {key: parts[key] for key in (*behind, *parts)} | {"cupti_version": 28}
    capture = read_text(tmp_path / "t.json", json.dumps(ordered, indent=indent))
    assert [d.name for d in capture.devices or []] == ["A GPU", "Another, {a}, [b]"]
    assert capture.facts == {"schemaVersion": 1, "cupti_version": 28}
    assert capture.incomplete == [] and capture.missing == [] and capture.kernel_ns == 20_000


def test_a_trace_of_a_cpu_is_known_by_what_stands_behind_its_events(tmp_path: Path) -> None:
    events = [trace_event("cpu_op", "aten::mm", 1, 10)]
    text = json.dumps({"traceEvents": events, "deviceProperties": []})
    capture = read_text(tmp_path / "t.json", text)
    assert capture.cpu_only is True and capture.incomplete == []
    assert {n: t.total_ns for n, t in (capture.host_ops or {}).items()} == {"aten::mm": 10_000}


@pytest.mark.parametrize("end", ["", ', "deviceProp', ', "x": nan}', "} {", ', "x": "\udcff"}'])
def test_a_trace_that_breaks_off_behind_its_events_is_doubtful(tmp_path: Path, end: str) -> None:
    text = json.dumps({"traceEvents": [trace_event("kernel", "a", 1, 2)]})[:-1] + end
    capture = read_text(tmp_path / "t.json", text.encode("utf-8", "surrogateescape"))
    assert capture.kernel_ns == 2_000 and capture.incomplete == [json_events.BAD_TAIL]


def test_a_second_list_of_events_is_said_to_be_unread(tmp_path: Path) -> None:
    event = json.dumps(trace_event("kernel", "a", 1, 2))
    capture = read_text(
        tmp_path / "t.json", f'{{"traceEvents": [{event}], "traceEvents": [{event}]}}'
    )
    assert capture.kernel_ns == 2_000 and capture.incomplete == [json_events.SECOND_LIST]


@pytest.mark.parametrize("named_before", [False, True])
def test_too_much_behind_the_events_is_left_alone_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named_before: bool
) -> None:
    monkeypatch.setattr(json_events, "MAX_HEAD", 1_000)
    monkeypatch.setattr(json_events, "BLOCK", 64)
    events = [trace_event("kernel", "a", 1, 2, args={"device": 0})]
    parts = {"traceEvents": events, "stackFrames": "x" * 5_000, "deviceProperties": PROPERTIES}
    if named_before:
        parts = {"deviceProperties": PROPERTIES} | parts
    capture = read_text(tmp_path / "t.json", json.dumps(parts))
    assert capture.kernel_ns == 2_000 and capture.incomplete == []
    assert capture.missing == (
        [] if named_before else ["names of devices: too much follows the events to be read"]
    )


def test_bytes_that_some_copies_do_not_say_are_null_and_named(tmp_path: Path) -> None:
    events = [
        trace_event("gpu_memcpy", "Memcpy DtoH", 1, 4, args={"device": 0, "bytes": 64}),
        trace_event("gpu_memcpy", "Memcpy DtoH", 9, 4, args={"device": 0}),
        trace_event("gpu_memcpy", "Memcpy HtoD", 19, 4, args={"device": 0, "bytes": 0}),
        trace_event("gpu_memset", "Memset", 29, 4, args={"device": 0, "bytes": "many"}),
    ]
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    assert {n: (t.calls, t.bytes) for n, t in (capture.memory_ops or {}).items()} == {
        "Memcpy DtoH": (2, None), "Memcpy HtoD": (1, 0), "Memset": (1, None),
    }  # fmt: skip
    assert capture.missing == [
        f"bytes of {name}: some events do not say theirs" for name in ("Memcpy DtoH", "Memset")
    ]


@pytest.mark.parametrize("cut", [40, 200, 900])
def test_a_trace_that_breaks_off_is_read_so_far_and_said_to_be_incomplete(
    tmp_path: Path, cut: int
) -> None:
    events = [trace_event("kernel", f"k{n}", n, 1) for n in range(40)]
    text = json.dumps({"traceEvents": events})
    capture = read_text(tmp_path / "t.json", text[:-cut])
    assert 0 < len(capture.kernels or []) < 40
    assert json_events.CUT_OFF in capture.incomplete


def test_a_packed_trace_that_breaks_off_is_said_to_be_incomplete(tmp_path: Path) -> None:
    events = [trace_event("kernel", f"k{n * n * 7919}", n, n % 7) for n in range(5_000)]
    data = gzip.compress(json.dumps({"traceEvents": events}).encode("utf-8"))
    path = tmp_path / "t.json.gz"
    path.write_bytes(data[: len(data) * 2 // 3])
    capture = read(path)
    assert 0 < len(capture.kernels or []) < 5_000
    assert any("breaks off" in line for line in capture.incomplete)


def packed_trace(count: int) -> bytes:
    events = [trace_event("kernel", f"k{n}", n, 1) for n in range(count)]
    return gzip.compress(json.dumps({"traceEvents": events}).encode("utf-8"), mtime=0)


@pytest.mark.parametrize("left_out", [9, 30, 60])
def test_a_small_packed_trace_that_breaks_off_gives_what_can_be_unpacked(
    tmp_path: Path, left_out: int
) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed_trace(40)[:-left_out])
    capture = read(path)
    assert 0 < len(capture.kernels or []) <= 40
    assert CUT in capture.incomplete


@pytest.mark.parametrize("count", [40, 5_000])
def test_a_packed_trace_with_a_wrong_checksum_is_read_to_its_end_and_doubtful(
    tmp_path: Path, count: int
) -> None:
    data = bytearray(packed_trace(count))
    data[-6] ^= 1
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    capture = read(path)
    assert len(capture.kernels or []) == count and capture.incomplete == [DAMAGED]


def test_a_packed_trace_that_is_damaged_inside_is_read_up_to_there(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(gzip.decompress(packed_trace(20_000)), compresslevel=0))
    place = 10  # blocks are stored as they are: a byte, their length, and its complement
    for _ in range(3):
        place += 5 + int.from_bytes(data[place + 1 : place + 3], "little")
    data[place + 3] ^= 0xFF
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    capture = read(path)
    assert 1 < len(capture.kernels or []) < 20_000
    assert DAMAGED in capture.incomplete


@pytest.mark.parametrize(
    ("padding", "notes"), [(b"", []), (b"\0" * 100_000, []), (b"GARBAGE", [TRAILING])]
)
@pytest.mark.parametrize("packed", [1, 7, 64 << 10])
def test_packed_members_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: bytes, notes: list[str], packed: int
) -> None:
    monkeypatch.setattr("ikit_ops.profilers.limits.PACKED", packed)
    text = gzip.decompress(packed_trace(60))
    third = len(text) // 3
    path = tmp_path / "t.json.gz"
    members = [text[:third], b"", text[third : 2 * third], text[2 * third :]]
    path.write_bytes(b"".join(gzip.compress(part) for part in members) + padding)
    capture = read(path)
    assert len(capture.kernels or []) == 60 and capture.incomplete == notes


@pytest.mark.parametrize("data", [b"\x1f\x8b", b"\x1f\x8b" + b"\0" * 40, packed_trace(3)[:10]])
def test_what_cannot_be_unpacked_at_all_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    with pytest.raises(Damaged, match="no readable gzip file"):
        formats.read(Reading(path), "torch-trace")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("text", ['{"traceEvents": [], "x": 1}\n', '[{"ph": "X"}]\n\n', "[]"])
def test_a_trace_is_hashed_as_it_is_read(tmp_path: Path, packed: bool, text: str) -> None:
    path = tmp_path / "t.json"
    data = gzip.compress(text.encode()) if packed else text.encode()
    path.write_bytes(data)
    reading = Reading(path)
    formats.read(reading, "torch-trace")
    assert reading.digest == (hashlib.sha256(data).hexdigest(), len(data))
    assert file_digest(reading) == reading.digest
    assert file_digest(Reading(path)) == reading.digest


def test_a_file_of_which_only_a_part_was_read_is_hashed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"x" * 3_000)
    reading = Reading(path)
    with open_bytes(reading) as stream:
        stream.read(1_000)
    assert reading.digest is None
    assert file_digest(reading) == (hashlib.sha256(b"x" * 3_000).hexdigest(), 3_000)


def test_events_that_are_no_json_are_left_out_and_counted(tmp_path: Path) -> None:
    good = json.dumps(trace_event("kernel", "a", 1, 2))
    bad = '{"ph": "X", "cat": "kernel", "name": "b", "ts": 3, "dur": nan}'
    text = f'{{"traceEvents": [{good},\n{bad},\n{good}]}}'
    capture = read_text(tmp_path / "t.json", text)
    assert sums(capture) == {("a", None, None): (2, 4000)}
    assert "1 events are no sound JSON: they were left out" in capture.incomplete


def test_bytes_that_are_no_text_do_not_spoil_the_others(tmp_path: Path) -> None:
    good = json.dumps(trace_event("kernel", "a", 1, 2)).encode("utf-8")
    bad = good.replace(b'"a"', b'"\xff\xfe"')
    capture = read_text(tmp_path / "t.json", b'{"traceEvents": [' + good + b",\n" + bad + b"]}")
    assert len(capture.kernels or []) == 2 and capture.incomplete == []


def test_numbers_written_as_text_are_numbers_and_words_are_not(tmp_path: Path) -> None:
    events = [
        trace_event("kernel", "a", 1, 2) | {"ts": "10.5", "dur": "1.25", "pid": 0},
        trace_event("kernel", "a", 1, 2) | {"ts": "soon"},
        trace_event("kernel", "a", 1, -2),
        trace_event("kernel", "a", 1e300, 2),
        trace_event("kernel", "a", 1, 2, args={"device": "1", "grid": "8", "block": [1, 2]}),
    ]
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    assert sums(capture) == {("a", None, None): (2, 3250)}
    assert "3 events have no sound times: left out" in capture.incomplete
    assert sorted(d.id for d in capture.devices or [] if d.id is not None) == [0, 1]


def test_containers_are_never_added_to_what_they_contain(tmp_path: Path) -> None:
    events = [
        trace_event("kernel", "a", 10, 2, args={"device": 0}),
        trace_event("gpu_user_annotation", "step", 0, 100, args={"device": 0}),
        trace_event("python_function", "f", 0, 100),
        trace_event("Trace", "PyTorch Profiler (0)", 0, 100),
        trace_event("user_annotation", "decode", 0, 50),
        trace_event("gpu_memcpy", "Memcpy DtoH", 12, 4, args={"device": 0, "bytes": 64}),
    ]
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    assert capture.kernel_ns == 2_000
    [device] = capture.devices or []
    assert (device.busy_ns, device.span_ns) == (6_000, 6_000)
    assert {n: t.total_ns for n, t in (capture.ranges or {}).items()} == {"decode": 50_000}
    assert (capture.memory_ops or {})["Memcpy DtoH"].bytes == 64


def graph_launch(ts: float, **args: Any) -> dict[str, Any]:
    return trace_event("cuda_runtime", "cudaGraphLaunch", ts, 1, args=args)


@pytest.mark.parametrize("launches_first", [False, True])
@pytest.mark.parametrize(
    ("launched", "of_kernels", "line"),
    [
        ([7, 8], [7, 7, 8], None),
        ([7, 8], [7, 9, 10], "1 of 2 CUDA graph launches have no kernel"),
        ([7, 8], [70_000, 3], "2 of 2 CUDA graph launches have no kernel"),
        ([7, None], [7], "1 of 2 CUDA graph launches have no kernel"),
        (["7"], [7], None),
        ([7], [None, None], "1 CUDA graph launches: the trace does not say"),
        ([7], [-1, 1 << 40], "1 CUDA graph launches: the trace does not say"),
        ([7], [], "1 CUDA graph launches, and no kernel of them"),
    ],
)
def test_graph_launches_whose_kernels_were_not_seen_leave_the_trace_doubtful(
    tmp_path: Path,
    launches_first: bool,
    launched: list[Any],
    of_kernels: list[Any],
    line: str | None,
) -> None:
    events = [graph_launch(5, correlation=c) if c else graph_launch(6) for c in launched]
    kernels = [
        trace_event("kernel", "k", 10 + n, 1, args={"correlation": c} if c else {})
        for n, c in enumerate(of_kernels)
    ]
    events = [*events, *kernels] if launches_first else [*kernels, *events]
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    found = [text for text in capture.incomplete if "graph" in text]
    assert found == [] if line is None else found[0].startswith(line) and len(found) == 1


def test_graph_launches_without_kernels_are_named(tmp_path: Path) -> None:
    events = [trace_event("cuda_runtime", "cudaGraphLaunch", n, 1) for n in range(3)]
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    assert any(line.startswith("3 CUDA graph launches") for line in capture.incomplete)


def test_operators_of_a_cpu_run_are_listed_by_their_own_time(tmp_path: Path) -> None:
    events = [
        trace_event("cpu_op", "aten::mm", 20, 30),
        trace_event("cpu_op", "aten::linear", 10, 60),
        trace_event("cpu_op", "aten::add", 80, 5),
        trace_event("cpu_op", "aten::t", 10, 4),  # starts with its caller
        trace_event("cpu_op", "aten::mm", 0, 1000) | {"tid": 99},
    ]
    text = json.dumps({"deviceProperties": [], "traceEvents": events})
    capture = read_text(tmp_path / "t.json", text)
    assert capture.cpu_only is True and capture.kernels == []
    own = {name: (t.calls, t.total_ns) for name, t in (capture.host_ops or {}).items()}
    assert own == {
        "aten::mm": (2, 1_030_000), "aten::linear": (1, 26_000),
        "aten::add": (1, 5_000), "aten::t": (1, 4_000),
    }  # fmt: skip


def test_times_too_large_for_their_fraction_are_said_to_be_coarse(tmp_path: Path) -> None:
    events = [trace_event("kernel", "a", 1.7e15, 2)]
    far = read_text(tmp_path / "far.json", json.dumps({"traceEvents": events}))
    assert far.kernel_ns == 2_000 and any("0.25 us" in line for line in far.limitations)
    near = read_text(tmp_path / "near.json", json.dumps({"traceEvents": [events[0] | {"ts": 5}]}))
    assert near.limitations == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', "holds no list"),
        ('{"traceEvents": {"a": 1}}', "holds no list"),
        ('{"x": ' + "[" * 100 + "]" * 100 + ', "traceEvents": []}', "64 deep"),
        ('{"traceEvents": [{"a": ' + "[" * 100 + "]" * 100 + ", nan}]}", "64 deep"),
        ('{"x": nan, "traceEvents": []}', "beginning is no JSON"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_sentence(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(Damaged, match=message):
        read_text(tmp_path / "t.json", text)


def test_an_event_of_many_megabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_events, "MAX_EVENT", 1 << 18)
    text = '{"traceEvents": [{"name": "' + "x" * (1 << 19) + '"}]}'
    with pytest.raises(Damaged, match="longer than"):
        read_text(tmp_path / "t.json", text)


def test_a_long_event_is_not_scanned_again_for_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_events, "BLOCK", 1_000)
    scanned: list[int] = []
    real = json_events.EventReader._scan

    def scan(self: json_events.EventReader, data: bytes) -> Any:
        scanned.append(len(data))
        return real(self, data)

    monkeypatch.setattr(json_events.EventReader, "_scan", scan)
    events = [trace_event("kernel", "a", 1, 2, args={"x": "y" * 1_000_000})] * 2
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    assert capture.kernel_ns == 4_000
    assert sum(scanned) < 10_000_000


def test_too_many_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ikit_ops.profilers.limits.MAX_NAMES", 10)
    for cat in ("kernel", "cuda_runtime", "user_annotation", "gpu_memcpy"):
        events = [trace_event(cat, f"name{n}", n, 1) for n in range(20)]
        with pytest.raises(Damaged, match="more than 10 different names"):
            read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))


def test_begin_and_end_events_are_not_silently_dropped(tmp_path: Path) -> None:
    events = [trace_event("kernel", "a", 1, 2) | {"ph": "B"}]
    capture = read_text(tmp_path / "t.json", json.dumps({"traceEvents": events}))
    assert "1 begin and end events were not paired" in capture.incomplete


def test_loose_events_need_a_phase() -> None:
    assert chrome_trace.loose_event({"cat": "kernel", "name": "a"}) is None
