"""The picture of a roofline: what is in it, what it may not hold, and what it may not claim."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.checkpoints import LLAMA, in_memory, llama_tensors, rehydrate, write_model
from helpers.records import make_draft, save_record
from ikit_mcp.call import Settings
from ikit_mcp.evidence.record import Device, Engine, EvidenceRecord, Identity, Model, metric
from ikit_mcp.evidence.store import Store
from ikit_mcp.registry import MEASURES, Operation, OpError, Registry, operations_in
from ikit_mcp.runner import Control, Runner
from ikit_ops import roofline as module
from ikit_ops.checkpoint.resolve import read_checkpoint
from ikit_ops.decode import curve, picture
from ikit_ops.decode.count import count_checkpoint, kv_bytes_at
from ikit_ops.decode.tally import Counts, Options
from ikit_ops.pictures import svg

Ask = Callable[..., EvidenceRecord]
NS = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 40_000


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config = {**LLAMA, "max_position_embeddings": 8192}
    return write_model(tmp_path / "small", config, {"model.safetensors": llama_tensors()})


@pytest.fixture
def ask(home: Path) -> Ask:
    """Ask for a roofline as every way in does."""

    def asked(model: Path, *more: Operation, **arguments: Any) -> EvidenceRecord:
        registry = Registry()
        for op in (*operations_in(module), *more):
            registry.add(op)
        runner = Runner(registry, Settings(home))
        request = runner.check("roofline", {"model": str(model), **arguments})
        record = runner.here(request, Control()).record
        assert record is not None
        return record

    return asked


def picture_of(home: Path, record: EvidenceRecord) -> bytes:
    """The bytes of the record's one artifact, after what every picture must be."""
    (artifact,) = record.get("artifacts")
    assert (artifact["name"], artifact["media_type"]) == ("roofline.svg", "image/svg+xml")
    content = (Store(home).folder(record.evidence_id) / "roofline.svg").read_bytes()
    check(content)
    return content


def check(content: bytes) -> list[str]:
    """The texts of a picture; it is well-formed, self-contained, small, and inside its frame."""
    root = ElementTree.fromstring(content)
    assert root.tag == f"{NS}svg" and len(content) <= MAX_BYTES
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert root.attrib["viewBox"] == f"0 0 {width:g} {height:g}"
    known = {"svg", "title", "desc", "style", "rect", "line", "text", "polyline", "circle"}
    for element in root.iter():
        assert element.tag.removeprefix(NS) in known
        assert not any("href" in name or name.startswith("on") for name in element.attrib)
        for name, value in element.attrib.items():
            if name in ("x", "x1", "x2", "cx"):
                assert 0 <= float(value) <= width
            if name in ("y", "y1", "y2", "cy"):
                assert 0 <= float(value) <= height
    style = root.findtext(f"{NS}style") or ""
    assert "prefers-color-scheme:dark" in style
    assert not re.search(r"url|@import|@font-face|expression", style, re.IGNORECASE)
    return texts(content)


def texts(content: bytes) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(content).iter(f"{NS}text")]


def line_of(content: bytes) -> list[tuple[float, float]]:
    """The points of the drawn curve."""
    element = ElementTree.fromstring(content).find(f"{NS}polyline")
    assert element is not None
    pairs = [pair.split(",") for pair in element.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def subject_of(counts: Counts, options: Options, raw: Any, **changed: Any) -> picture.Subject:
    made = picture.Subject(
        "made-up", counts, options, curve.trace(counts, options, raw), 1000.0, "made up",
        lambda size: 1e12 / size if size > 0 else None, "tok/s",
    )  # fmt: skip
    return replace(made, **changed)


def small_subject(config: dict[str, Any] | None = None, **changed: Any) -> picture.Subject:
    raw = {**LLAMA, **(config or {})}
    options = changed.pop("options", Options())
    counts = count_checkpoint(in_memory(raw, llama_tensors()), options)
    return subject_of(counts, options, raw, **changed)


# --- what is in it ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v2-lite", "qwen3-next-80b-a3b"])
def test_every_group_with_bytes_is_a_bar_with_its_size(
    name: str, ask: Ask, home: Path, tmp_path: Path
) -> None:
    record = ask(rehydrate(name, tmp_path / name), gpu_bw="4193")
    content = picture_of(home, record)
    said = texts(content)
    sizes = dict(record.get("data", "counts", "groups"))
    shown = {(one, other.partition(", ")[0]) for one, other in pairwise(said)}
    wanted = {picture.NAMES.get(group, group): size for group, size in sizes.items()}
    wanted["KV cache"] = record.metric("kv_bytes")
    if state := record.metric("state_bytes"):
        wanted["state (read + written)"] = state
    assert {(label, picture.size_text(size)) for label, size in wanted.items()} <= shown
    bars = [e for e in ElementTree.fromstring(content).iter(f"{NS}rect")
            if e.attrib.get("height") == "14"]  # fmt: skip
    lengths = [float(bar.attrib["width"]) for bar in bars]
    assert len(bars) == len(wanted) and lengths == sorted(lengths, reverse=True)
    assert lengths[-1] >= 1


def test_model_context_bandwidth_and_its_source_are_told(ask: Ask, home: Path, small: Path) -> None:
    said = texts(picture_of(home, ask(small, gpu_bw="100", context=4096, kv_dtype="fp8")))
    assert said[0] == "small"
    assert said[1] == "weights bf16 · KV fp8 · from headers · context 4,096 tokens · batch 1"
    assert said[2].startswith("Bandwidth 100 GB/s: given by the user; datasheet figures are 5 to")
    assert "tok/s" in said and "context (cached tokens)" in said and "8,192" in said
    record = ask(small, gpu_bw="100", context=4096)
    assert any(text.endswith(" tok/s at 4,096") for text in texts(picture_of(home, record)))


def test_a_measured_bandwidth_is_told_with_its_device_and_record(
    ask: Ask, home: Path, small: Path
) -> None:
    ceiling = ceiling_of(home, Device(name="H<&200", uuid="GPU-1"), valid=None)
    said = texts(picture_of(home, ask(small, gpu_bw=ceiling)))
    assert f"Bandwidth 4,100 GB/s: measured on H<&200 (evidence {ceiling[:12]})" in said
    assert "In doubt: the ceiling record does not claim to be valid" in said


def test_without_a_bandwidth_the_curve_is_bytes_and_says_so(
    ask: Ask, home: Path, small: Path
) -> None:
    content = picture_of(home, ask(small))
    said = texts(content)
    assert "Bandwidth: none given, so no ceiling in tokens per second" in said
    assert "Bytes of one token against context" in said and "tok/s" not in said
    heights = [y for _, y in line_of(content)]
    assert heights == sorted(heights, reverse=True)  # y points down: bytes rise
    assert heights[0] > heights[-1]


def test_an_unproven_term_is_said_in_the_picture(ask: Ask, home: Path, tmp_path: Path) -> None:
    tensors = llama_tensors() | {"model.layers.0.warp.weight": ("BF16", (1024, 1024))}
    model = write_model(tmp_path / "m", LLAMA, {"model.safetensors": tensors})
    said = texts(picture_of(home, ask(model, gpu_bw="100")))
    assert "UNPROVEN: weights; the ceiling is an upper bound" in said
    assert "UNPROVEN: weights" in texts(picture_of(home, ask(model)))


def test_batch_devices_and_prediction_layers_are_told() -> None:
    options = Options(batch=4, tensor_parallel=2, include_mtp=True)
    said = check(picture.draw(small_subject(options=options, rate_unit="steps/s")))
    assert "batch 4 · one of 2 devices · with prediction layers" in said[1]
    assert "Ceiling against context, all sequences together" in said and "steps/s" in said
    assert any(text.startswith("Bytes of one step: ") for text in said)


def test_the_config_method_is_told(ask: Ask, home: Path, small: Path) -> None:
    said = texts(picture_of(home, ask(small / "config.json", gpu_bw="100")))
    assert "from config.json alone" in said[1]


def test_the_same_record_has_the_same_bytes(ask: Ask, home: Path, small: Path) -> None:
    first, second = (picture_of(home, ask(small, gpu_bw="100")) for _ in range(2))
    assert first == second


# --- the curve ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma-3-27b-it", Options(kv_dtype="fp8")),
        ("gemma-3n-e4b", Options(kv_dtype="q8_0")),
        ("deepseek-v2-lite", Options(mla_cache="fp8_ds_mla")),
        ("gpt-oss-20b", Options(batch=3, tensor_parallel=4)),
        ("qwen3-next-80b-a3b", Options()),
    ],
)
def test_the_curve_is_the_count_at_each_context(
    name: str, options: Options, tmp_path: Path
) -> None:
    checkpoint = read_checkpoint(str(rehydrate(name, tmp_path / name)))
    counts = count_checkpoint(checkpoint, options)
    line = curve.trace(counts, options, checkpoint.config)
    assert line.proven_bytes == line.step_bytes == sorted(line.step_bytes)
    assert line.contexts == sorted(set(line.contexts)) and line.contexts[0] == 0
    for at in (0, 1, len(line.contexts) // 2, -1):
        there = replace(options, context=line.contexts[at])
        again = count_checkpoint(checkpoint, there)
        assert line.step_bytes[at] == again.step_bytes
        assert kv_bytes_at(counts, options, [there.context]) == [again.kv_bytes]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-3-27b-it", "llama-4-scout"])
def test_the_ceiling_falls_from_context_0_to_the_end(
    name: str, ask: Ask, home: Path, tmp_path: Path
) -> None:
    points = line_of(picture_of(home, ask(rehydrate(name, tmp_path / name), gpu_bw="4193")))
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert [y for _, y in points] == sorted(y for _, y in points)  # y points down
    assert points[0][0] == 88 and points[-1][0] == 840 and len(points) > 30


@pytest.mark.parametrize(
    ("config", "stated"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 2048.0}, 2048),
        ({"text_config": {"model_type": "llama", "max_position_embeddings": 77}}, 77),
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "<script>"}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": float("inf")}, None),
        ({"max_position_embeddings": 10**30}, None),
        (None, None),
        ([1], None),
    ],
)
def test_the_models_maximum_is_what_the_configuration_says_or_unknown(
    config: Any, stated: int | None
) -> None:
    assert curve.model_maximum(config) == stated


def test_an_unknown_maximum_is_told_with_the_range_that_is_drawn() -> None:
    said = check(picture.draw(small_subject()))
    assert "The configuration states no longest context: drawn to 131,072." in said


@pytest.mark.parametrize("context", [9000, 20_000, 1 << 30])
def test_a_context_beyond_the_stated_maximum_is_drawn_and_marked(context: int) -> None:
    subject = small_subject({"max_position_embeddings": 8192}, options=Options(context=context))
    assert subject.curve.contexts[-1] == context
    said = check(picture.draw(subject))
    assert "stated maximum 8,192" in said
    assert any(text.endswith(f" tok/s at {context:,}") for text in said)


@pytest.mark.parametrize("context", [0, 1])
def test_a_model_of_one_token_is_drawn(context: int) -> None:
    check(picture.draw(small_subject({"max_position_embeddings": 1},
                                     options=Options(context=context))))  # fmt: skip


def test_a_thousand_windows_of_different_sizes_stay_a_small_picture() -> None:
    subject = small_subject()
    counts = subject.counts
    (one, *_) = counts.kv_layers
    counts.kv_layers = [replace(one, layer=n, window=100 * n + 1) for n in range(1000)]
    line = curve.trace(counts, Options(), {}, [77])
    assert len(line.contexts) < 400 and {0, 77, 1024, 131_072} <= set(line.contexts)
    assert line.step_bytes == sorted(line.step_bytes)


def test_no_proven_bytes_give_no_ceiling() -> None:
    subject = small_subject()
    subject.counts.doubt("weights", "all of it", subject.counts.step_bytes)
    line = curve.trace(subject.counts, subject.options, {})
    nothing = replace(line, proven_bytes=[0] * len(line.contexts))
    said = check(picture.draw(replace(subject, curve=nothing)))
    assert "Bytes of one token against context" in said and "UNPROVEN: weights" in said


# --- hostile text and numbers ----------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        '</text><script>alert(1)</script><text x="',
        "a&b<c>\"d'e]]>",
        "\x00\x1b[31m\u202eevil\ud800\ufffe\uffff\n next",
        "模型" * 200,
        "W" * 500,
        "",
        "e\u0301" * 300,
    ],
)
def test_a_hostile_name_is_one_short_line_of_text(name: str) -> None:
    said = check(picture.draw(small_subject(model=name, source=name, doubt=name or None)))
    assert all("\n" not in text and "\u202e" not in text for text in said)
    assert svg.width_of(said[0], 17 * svg.BOLD) <= picture.WIDTH - 2 * picture.MARGIN
    assert "script" not in {e.tag for e in ElementTree.fromstring(
        picture.draw(small_subject(model=name))).iter()}  # fmt: skip


@given(st.text(max_size=300))
def test_any_text_is_escaped_to_what_xml_gives_back(text: str) -> None:
    element = ElementTree.fromstring(f"<t>{svg.escaped(text)}</t>".encode())
    assert (element.text or "") == svg.clean(text)


@given(st.text(max_size=120), st.integers(20, 800), st.sampled_from([11, 12, 17]))
def test_text_is_cut_to_its_room(text: str, width: int, size: int) -> None:
    assert svg.width_of(svg.fit(text, width, size), size) <= width
    assert all(svg.width_of(line, size) <= width for line in svg.wrap(text, width, size))


@given(st.floats(1e-6, 1e15), st.integers(2, 8), st.booleans())
def test_ticks_start_at_zero_and_never_pass_the_top(top: float, count: int, binary: bool) -> None:
    step = svg.step_of(top, count, binary)
    marks = svg.ticks(top, step)
    assert marks[0] == 0 and marks[-1] <= top * (1 + 1e-6) and len(marks) <= count + 1
    assert svg.step_of(0.0, count) == 1.0


@pytest.mark.parametrize("gbs", [1e-9, 1.0, 1e6, 1e12])
def test_any_bandwidth_is_drawn(gbs: float) -> None:
    def rate(size: int) -> float | None:
        return gbs * 1e9 / size

    check(picture.draw(small_subject(bandwidth_gbs=gbs, rate_of=rate)))


# --- benchmarks as points -----------------------------------------------------------------


def bench(home: Path, model: Path | str, **changed: Any) -> EvidenceRecord:
    """A stored benchmark of that model."""
    draft = make_draft()
    draft.identity.model = Model(id=str(model), revision=changed.pop("revision", None))
    data = {**draft.data, "flags": changed.pop("flags", {})}
    return save_record(home, identity=draft.identity, data=data, **changed)


def ceiling_of(home: Path, device: Device | None, valid: bool | None = True) -> str:
    """The id of a stored ceiling record of 4100 GB/s."""
    read = metric("dram_read_gbs", 4100.0, "GB/s", "best_sustained")
    identity = Identity(device=device)
    return save_record(
        home, kind="ceiling", valid=valid, identity=identity, metrics=[read]
    ).evidence_id


def test_a_benchmark_is_a_point_a_parent_and_a_share(ask: Ask, home: Path, small: Path) -> None:
    run = bench(home, small)
    record = ask(small, gpu_bw="100", benches=[run.evidence_id[:10]])
    assert record.get("provenance", "parents") == [run.evidence_id]
    assert record.get("provenance", "request", "args", "benches") == [run.evidence_id]
    (held,) = record.get("data", "benches")
    at = ask(small, gpu_bw="100", context=576)
    assert held["context"] == 576 and held["decode_tok_s"] == 123.5
    assert held["ceiling_tok_s"] == pytest.approx(at.metric("ceiling_tok_s"))
    assert held["share_of_ceiling"] == pytest.approx(123.5 / held["ceiling_tok_s"])
    said = texts(picture_of(home, record))
    shown = run.evidence_id[:12]
    assert any(t.startswith(f"1 vllm 0.33 ({shown}): 123.5 tok/s at 576, ") for t in said)
    assert "benches" not in ask(small, gpu_bw="100").get("data")


def test_a_benchmark_twice_is_one_point(ask: Ask, home: Path, small: Path) -> None:
    run = bench(home, small).evidence_id
    record = ask(small, gpu_bw="100", benches=[run, run])
    assert len(record.get("data", "benches")) == 1


@pytest.mark.parametrize(("valid", "words"), [(False, ", not valid"), (None, ", validity unknown")])
def test_a_benchmark_that_is_not_valid_is_hollow_and_has_no_share(
    valid: bool | None, words: str, ask: Ask, home: Path, small: Path
) -> None:
    run = bench(home, small, valid=valid)
    record = ask(small, gpu_bw="100", benches=[run.evidence_id])
    assert record.get("data", "benches")[0]["share_of_ceiling"] is None
    content = picture_of(home, record)
    assert any(text.endswith(f"at 576{words}") for text in texts(content))
    circles = [e.attrib["class"] for e in ElementTree.fromstring(content).iter(f"{NS}circle")]
    assert circles == ["one", "hollow ground"]


def test_a_rate_above_the_ceiling_is_said_to_be_impossible(
    ask: Ask, home: Path, small: Path
) -> None:
    run = bench(home, small, metrics=[metric("decode_tok_s", 1e9, "tok/s", "median")])
    content = picture_of(home, ask(small, gpu_bw="100", benches=[run.evidence_id]))
    assert any(text.endswith("more than is possible") for text in texts(content))


@pytest.mark.parametrize(
    ("measured_on", "same"),
    [
        (Device(name="H200", uuid="GPU-1"), True),
        (Device(name="H200", uuid="GPU-2"), False),
        (Device(name="H200"), True),
        (Device(name="A100"), False),
        (None, True),
    ],
)
def test_a_bandwidth_of_another_device_gives_no_share(
    measured_on: Device | None, same: bool, ask: Ask, home: Path, small: Path
) -> None:
    ceiling = ceiling_of(home, measured_on)
    run = bench(home, small)
    record = ask(small, gpu_bw=ceiling, benches=[run.evidence_id])
    assert record.get("provenance", "parents") == [ceiling, run.evidence_id]
    assert (record.get("data", "benches")[0]["share_of_ceiling"] is not None) is same
    said = texts(picture_of(home, record))
    assert any("bandwidth is of another device" in text for text in said) is not same


def test_what_a_benchmark_record_leaves_out_makes_it_no_point(
    ask: Ask, home: Path, small: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", LLAMA, {"model.safetensors": llama_tensors()})
    none = metric("decode_tok_s", None, "tok/s", "median")
    for run, why in {
        bench(home, other): "is of another model",
        bench(home, "acme/\x1b[31mevil\u202e"): r"is of another model \(acme/ ?\[31mevil",
        bench(home, small, metrics=[none]): "no decode_tok_s",
        bench(home, small, flags={"tensor_parallel_size": 2}): "several devices",
    }.items():
        with pytest.raises(OpError, match=why):
            ask(small, gpu_bw="100", benches=[run.evidence_id])


def test_a_benchmark_of_another_revision_is_of_another_model(home: Path) -> None:
    run = bench(home, "acme/small", revision="a" * 40)
    assert curve.points_of([run], "acme/small", "a" * 40)[0].context == 576
    assert curve.points_of([run], "acme/small", None)[0].rate == 123.5
    with pytest.raises(OpError, match="another model"):
        curve.points_of([run], "acme/small", "b" * 40)


@pytest.mark.parametrize("arguments", [{"batch": 2}, {"tensor_parallel": 2}, {"include_mtp": True}])
def test_benchmarks_are_refused_beside_what_they_did_not_run(
    arguments: dict[str, Any], ask: Ask, home: Path, small: Path
) -> None:
    run = bench(home, small).evidence_id
    with pytest.raises(OpError, match="one sequence on one device"):
        ask(small, gpu_bw="100", benches=[run], **arguments)
    with pytest.raises(OpError, match="needs gpu_bw"):
        ask(small, benches=[run])
    with pytest.raises(OpError, match="is a roofline record, not a bench record"):
        ask(small, gpu_bw="100", benches=[ask(small).evidence_id])


def test_a_wrong_benchmark_is_refused_before_anything_is_measured(
    ask: Ask, home: Path, small: Path
) -> None:
    def measure(call: Any) -> EvidenceRecord:
        """Never called."""
        raise AssertionError

    op = Operation("measure_bandwidth", None, "Made up.", (), MEASURES, measure, lambda _: MEASURES)
    with pytest.raises(OpError, match="another model"):
        ask(small, op, gpu_bw="measure", benches=[bench(home, "acme/other").evidence_id])


def test_many_benchmarks_stay_in_the_frame_and_too_many_are_refused(
    ask: Ask, home: Path, small: Path
) -> None:
    runs = [
        bench(
            home,
            small,
            metrics=[metric("decode_tok_s", 100.0 + n, "tok/s", "median", [90.0, 200.0 + n])],
        )
        for n in range(curve.MAX_POINTS + 1)
    ]
    ids = [run.evidence_id for run in runs]
    picture_of(home, ask(small, gpu_bw="100", benches=ids[:-1]))
    with pytest.raises(OpError, match="21 benches"):
        ask(small, gpu_bw="100", benches=ids)


def test_a_verdict_is_never_cut_off_behind_a_long_engine_name(
    ask: Ask, home: Path, small: Path
) -> None:
    draft = make_draft()
    draft.identity.engine = Engine(name="W" * 300, version="模" * 90)
    draft.identity.model = Model(id=str(small))
    run = save_record(
        home,
        identity=draft.identity,
        valid=None,
        metrics=[metric("decode_tok_s", 123.5, "tok/s", "median")],
    )
    ceiling = ceiling_of(home, Device(name="A100"))
    record = ask(small, gpu_bw=ceiling, benches=[run.evidence_id])
    said = " ".join(texts(picture_of(home, record)))
    assert "123.5 tok/s at 576, validity unknown, the bandwidth is of another device" in said
