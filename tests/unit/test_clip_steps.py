"""clip_steps without a model: each fault has its word, and no dump crashes the checker."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import clips
from helpers.bench import run_here
from ikit_mcp.call import Cancelled, Settings
from ikit_mcp.evidence.record import EvidenceRecord, shape_problem
from ikit_mcp.registry import DERIVES, MEASURES, OpError, Registry, operations_in
from ikit_mcp.runner import Control, Runner
from ikit_ops import clip_steps as module
from ikit_ops.clips import checker, modelfree, torchside
from ikit_ops.clips.manifest import read_manifest, read_recipe

Check = Callable[..., EvidenceRecord]


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python of this machine may help: what needs torch is tested where torch is."""
    monkeypatch.delenv("IKIT_PYTHONS", raising=False)
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: None)


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Check a folder of clips as every way in does."""

    def checked(
        lines: list[dict[str, Any]], folder: Path = tmp_path, **more: Any
    ) -> EvidenceRecord:
        manifest = clips.write_manifest(folder, lines)
        arguments = {"manifest": str(manifest), "dumps": str(folder / "dumps"), **more}
        record = run_here(tmp_path / "home", "clip_steps", **arguments)
        assert shape_problem(record.raw) is None
        return record

    return checked


def runner(home: Path) -> Runner:
    registry = Registry()
    for op in operations_in(module):
        registry.add(op)
    return Runner(registry, Settings(home))


def verdict_of(record: EvidenceRecord) -> Any:
    return record.get("data", "verdict")


def details(record: EvidenceRecord, clip: int = 0) -> dict[str, Any]:
    checks = record.get("data", "clips", clip, "checks")
    return {entry["name"]: (entry["ok"], entry["detail"]) for entry in checks}


def test_a_clean_clip_without_a_reference_is_inconclusive(tmp_path: Path, check: Check) -> None:
    lines = [clips.write_clip(tmp_path, n)[1] for n in range(3)]
    record = check(lines)
    assert (verdict_of(record), record.valid) == ("inconclusive", None)
    assert all(ok for name, (ok, _) in details(record).items() if name != "noise")
    assert details(record)["noise"] == (None, "needs torch")
    assert "reference: without it only the model-free checks ran" in record.get(
        "coverage", "missing"
    )
    assert record.metric("clips_checked") == 3
    assert record.metric("max_r") is None
    assert record.get("data", "clips", 0, "steps") == []


SHIPPED = Path(__file__).parents[1] / "data" / "clips"


def test_the_shipped_clips_get_their_words(tmp_path: Path) -> None:
    for name, verdict in (("honest", "inconclusive"), ("reusing", "step_reuse")):
        folder = SHIPPED / name
        record = run_here(
            tmp_path / "home", "clip_steps", manifest=str(folder / "clips.jsonl"),
            dumps=str(folder / "dumps"),
        )  # fmt: skip
        assert verdict_of(record) == verdict
        failed = [check for check, (ok, _) in details(record).items() if ok is False]
        assert failed == ([] if name == "honest" else ["reuse"])


def test_audio_and_video_are_both_checked(tmp_path: Path, check: Check) -> None:
    both = {"video": clips.VIDEO, "audio": clips.AUDIO}
    path, line = clips.write_clip(tmp_path, streams=both, asked=clips.request(audio=True))
    assert verdict_of(check([line])) == "inconclusive"
    clips.change(path, "step.3.audio.x_next", flip)
    assert verdict_of(check([line])) == "arithmetic"


def flip(data: bytes) -> bytes:
    """Change one number by a good part of itself."""
    return bytes([*data[:2], data[2] ^ 0x40, *data[3:]])


def nan(data: bytes) -> bytes:
    return struct.pack("<f", float("nan")) + data[4:]


def infinite(data: bytes) -> bytes:
    return data[:-4] + struct.pack("<f", float("-inf"))


def doubles(edit: Callable[[list[float]], list[float]]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        levels = list(struct.unpack(f"<{len(data) // 8}d", data))
        return struct.pack(f"<{len(levels)}d", *edit(levels))

    return changed


TENSOR_FAULTS: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "x_next off": ("step.2.video.x_next", flip, "arithmetic"),
    "out off": ("step.2.video.out", flip, "arithmetic"),
    "x off": ("step.0.video.x", flip, "arithmetic"),
    "final off": ("final.video", flip, "final"),
    "NaN in out": ("step.4.video.out", nan, "non_finite"),
    "NaN in x": ("step.0.video.x", nan, "non_finite"),
    "NaN in final": ("final.video", nan, "non_finite"),
    "infinity in final": ("final.video", infinite, "non_finite"),
    "zero out": ("step.1.video.out", lambda data: bytes(len(data)), "layout"),
    "sigma up": ("sigma", doubles(lambda s: [s[0], 0.2, *s[2:]]), "schedule"),
    "sigma above 1": ("sigma", doubles(lambda s: [1.5, *s[1:]]), "schedule"),
    "sigma_next off": ("sigma_next", doubles(lambda s: [s[0] + 1e-4, *s[1:]]), "schedule"),
    "not to 0": ("sigma_next", doubles(lambda s: [*s[:-1], 0.05]), "schedule"),
    "NaN in sigma": ("sigma", doubles(lambda s: [float("nan"), *s[1:]]), "layout"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_changed_tensor_has_its_word(tmp_path: Path, check: Check, fault: str) -> None:
    tensor, edit, verdict = TENSOR_FAULTS[fault]
    path, line = clips.write_clip(tmp_path)
    clips.change(path, tensor, edit)
    record = check([line])
    assert (verdict_of(record), record.valid) == (verdict, False)
    assert record.get("gates", "violations")
    assert verdict.replace("_", " ") in record.summary


def test_a_step_that_starts_elsewhere_breaks_the_chain(tmp_path: Path, check: Check) -> None:
    path, line = clips.write_clip(tmp_path)
    header, body = clips.header_of(path)
    swap = {f"step.{a}.video.{part}": f"step.{b}.video.{part}"
            for a, b in ((2, 3), (3, 2)) for part in ("x", "out", "x_next")}  # fmt: skip
    clips.with_header(path, {k: header[swap.get(k, k)] for k in header}, body)
    record = check([line])
    assert details(record)["chain"][0] is False
    assert "step 2 of video does not start at x_next of step 1" in details(record)["chain"][1]


def reuse(every: int) -> clips.Out:
    return lambda step, stream, earlier: earlier[-1] if step % every else None


def straight(step: int, stream: str, earlier: list[list[float]]) -> list[float] | None:
    """Every later step goes on in a straight line from the two before it."""
    if step < 3 or step % 2 == 0:
        return None
    return [2 * a - b for a, b in zip(earlier[-1], earlier[-2], strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("out", [reuse(2), reuse(3), straight])
def test_reused_outputs_are_found_without_a_model(
    tmp_path: Path, check: Check, dtype: str, out: clips.Out
) -> None:
    shape = {"video": (1, 4, 2, 4, 6)}
    _, line = clips.write_clip(tmp_path, dtype=dtype, out=out, streams=shape)
    record = check([line])
    assert verdict_of(record) == "step_reuse"
    found = details(record)["reuse"][1]
    assert "out of step" in found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_honest_outputs_that_are_alike_are_no_reuse(
    tmp_path: Path, check: Check, dtype: str
) -> None:
    def near(step: int, stream: str, earlier: list[list[float]]) -> list[float] | None:
        import random

        wobble = random.Random(step)
        return [a + 0.05 * wobble.gauss(0, 1) for a in earlier[-1]] if earlier else None

    shape = {"video": (1, 4, 2, 4, 6)}
    _, line = clips.write_clip(tmp_path, dtype=dtype, out=near, streams=shape)
    assert verdict_of(check([line])) == "inconclusive"


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", "other"), ("width", 192), ("height", 128), ("num_frames", 17), ("fps", 25),
     ("steps", 8), ("guidance_scale", 1.0), ("seed", 99), ("noise_seed", 99)],
)  # fmt: skip
def test_each_field_of_the_request_is_compared(
    tmp_path: Path, check: Check, field: str, value: Any
) -> None:
    _, line = clips.write_clip(tmp_path)
    record = check([{**line, "request": {**line["request"], field: value}}])
    assert details(record)["request"][0] is False
    assert field in details(record)["request"][1]
    assert details(record)["layout"][0] is True
    assert verdict_of(record) == "request_mismatch"


def test_a_field_that_the_manifest_leaves_out_is_not_compared(tmp_path: Path, check: Check) -> None:
    _, line = clips.write_clip(tmp_path, asked=clips.request(noise_seed=5))
    asked = {k: v for k, v in line["request"].items() if k not in ("fps", "noise_seed", "seed")}
    assert verdict_of(check([{**line, "request": asked}])) == "inconclusive"


def test_a_clip_without_a_dump_is_told_from_an_mp4_that_was_changed(
    tmp_path: Path, check: Check
) -> None:
    path, line = clips.write_clip(tmp_path)
    video = Path(line["video"])
    video.write_bytes(b"another clip")
    assert verdict_of(check([line])) == "mp4_mismatch"
    path.unlink()
    (tmp_path / "dumps" / "broken.safetensors").write_bytes(b"broken")
    assert verdict_of(check([line])) == "no_dump"


def test_an_mp4_that_cannot_be_read_says_nothing_about_the_engine(
    tmp_path: Path, check: Check
) -> None:
    _, line = clips.write_clip(tmp_path)
    video = Path(line["video"])
    video.unlink()
    record = check([line])
    assert (verdict_of(record), record.valid) == ("not_checkable", None)
    assert "No such file" in record.summary
    video.mkdir()
    record = check([line])
    assert (verdict_of(record), record.valid) == ("not_checkable", None)
    assert "Is a directory" in record.summary


def test_a_dump_that_belongs_to_another_listed_clip_excuses_no_mp4(
    tmp_path: Path, check: Check
) -> None:
    _, first = clips.write_clip(tmp_path, 1)
    copy = tmp_path / "copy.mp4"
    copy.write_bytes(b"no engine's clip")
    record = check([first, {"video": str(copy), "request": first["request"]}])
    assert record.get("data", "clips", 1, "verdict") == "no_dump"
    assert verdict_of(record) == "no_dump"


@pytest.mark.parametrize("content", [b"", b"x" * 100, struct.pack("<Q", 2**60) + b"{}"])
def test_a_dump_that_is_no_safetensors_file_is_unreadable(
    tmp_path: Path, check: Check, content: bytes
) -> None:
    path, line = clips.write_clip(tmp_path)
    path.write_bytes(content)
    assert verdict_of(check([line])) == "unreadable"


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_a_dump_that_is_no_regular_file_is_unreadable(
    tmp_path: Path, check: Check, kind: str
) -> None:
    path, line = clips.write_clip(tmp_path)
    other = tmp_path / "other"
    path.rename(other)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(other if kind == "link" else tmp_path / "nowhere")
    assert verdict_of(check([line])) == "unreadable"


def test_a_dump_cut_short_while_it_is_read_is_unreadable(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, line = clips.write_clip(tmp_path)
    real = modelfree.scan

    def cut(reader: Any, **options: Any) -> Any:
        os.truncate(path, path.stat().st_size - 64)
        return real(reader, **options)

    monkeypatch.setattr(modelfree, "scan", cut)
    record = check([line])
    assert verdict_of(record) == "unreadable"
    assert details(record)["readable"][0] is False


def test_fewer_steps_than_its_own_request_names_are_a_fault_of_the_layout(
    tmp_path: Path, check: Check
) -> None:
    path, line = clips.write_clip(tmp_path)
    header, body = clips.header_of(path)
    asked = {**line["request"], "steps": 8}
    header["__metadata__"]["request"] = json.dumps(asked)
    clips.with_header(path, header, body)
    record = check([{**line, "request": asked}])
    assert verdict_of(record) == "layout"
    assert "6 steps, expected 8" in details(record)["layout"][1]


@pytest.mark.parametrize(
    ("shape", "word"),
    [((1, 4, 2, 2, 2), "a latent of 2x2"), ((1, 4, 7, 2, 3), "7 frames"),
     ((1, 4, 2, 3, 3), "a latent of 3x3")],
)  # fmt: skip
def test_a_latent_that_cannot_be_of_the_requested_size_is_a_fault(
    tmp_path: Path, check: Check, shape: tuple[int, ...], word: str
) -> None:
    _, line = clips.write_clip(tmp_path, streams={"video": shape})
    record = check([line])
    assert verdict_of(record) == "layout"
    assert word in details(record)["layout"][1]


def test_a_missing_audio_stream_is_a_fault_of_what_promised_it(
    tmp_path: Path, check: Check
) -> None:
    _, line = clips.write_clip(tmp_path, asked=clips.request(audio=True))
    record = check([line])
    assert verdict_of(record) == "layout"
    assert "audio was asked for" in details(record)["layout"][1]
    _, line = clips.write_clip(tmp_path, 1)
    record = check([{**line, "request": {**line["request"], "audio": True}}])
    assert verdict_of(record) == "request_mismatch"
    assert "audio was asked for" in details(record)["request"][1]
    _, line = clips.write_clip(tmp_path, 2, streams={"audio": clips.AUDIO})
    assert "no video stream" in details(check([line]))["layout"][1]


def test_a_model_that_always_makes_audio_may_do_so_unasked(tmp_path: Path, check: Check) -> None:
    both = {"video": clips.VIDEO, "audio": clips.AUDIO}
    _, line = clips.write_clip(tmp_path, streams=both)
    assert line["request"]["audio"] is False
    assert verdict_of(check([line])) == "inconclusive"


def test_another_sampler_is_not_checkable_and_no_failure(tmp_path: Path, check: Check) -> None:
    declared = {"recipe": json.dumps({"sampler": "unipc"})}
    _, line = clips.write_clip(tmp_path, metadata=declared)
    record = check([line])
    assert (verdict_of(record), record.valid) == ("not_checkable", None)
    assert "sampler unipc" in details(record)["arithmetic"][1]
    assert "sampler unipc" in record.summary
    _, line = clips.write_clip(tmp_path, 1, metadata={"recipe": "[" * 100_000})
    assert verdict_of(check([line])) == "inconclusive"


@pytest.mark.parametrize("name", ["Euler", "flow_match_euler", "FlowMatchEulerDiscreteScheduler"])
def test_the_sampler_may_be_spelled_as_others_spell_it(
    tmp_path: Path, check: Check, name: str
) -> None:
    _, line = clips.write_clip(tmp_path, metadata={"recipe": json.dumps({"sampler": name})})
    record = check([line], recipe=recipe_file(tmp_path, {"sampler": name}))
    assert details(record)["arithmetic"][0] is True
    other = check([line], recipe=recipe_file(tmp_path, {"sampler": f"{name}_ancestral"}))
    assert verdict_of(other) == "not_checkable"


def recipe_file(folder: Path, content: Any) -> str:
    path = folder / "recipe.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_a_recipe_holds_the_schedule_the_shapes_and_the_engines_recipe(
    tmp_path: Path, check: Check
) -> None:
    sigmas, _ = clips.schedule(6)
    fields = {"sigmas": [*sigmas, 0.0], "latents": {"video": list(clips.VIDEO)}}
    path = recipe_file(tmp_path, fields)
    digest = read_recipe(Path(path)).sha256
    _, line = clips.write_clip(tmp_path, metadata={"recipe_sha256": str(digest)})
    record = check([line], recipe=path)
    assert verdict_of(record) == "inconclusive"
    assert record.get("data", "recipe_sha256") == digest
    other = recipe_file(tmp_path, {**fields, "negative_prompt": "blurry"})
    assert verdict_of(check([line], recipe=other)) == "request_mismatch"
    shifted = recipe_file(tmp_path, {"sigmas": [s**2 for s in sigmas]})
    _, plain = clips.write_clip(tmp_path, 1)
    assert verdict_of(check([plain], recipe=shifted)) == "schedule"
    larger = recipe_file(tmp_path, {"latents": {"video": [1, 4, 2, 4, 6]}})
    assert verdict_of(check([plain], recipe=larger)) == "layout"
    multistep = recipe_file(tmp_path, {"sampler": "unipc"})
    assert verdict_of(check([plain], recipe=multistep)) == "not_checkable"


def test_manifests_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "clips.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(OpError, match="no clip"):
        read_manifest(empty)
    with pytest.raises(OpError, match="cannot be read"):
        read_manifest(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OpError, match="regular file"):
        read_manifest(tmp_path / "pipe")


def test_arguments_that_name_nothing_are_refused(tmp_path: Path, check: Check) -> None:
    _, line = clips.write_clip(tmp_path)
    with pytest.raises(OpError, match="no directory"):
        check([line], dumps=str(tmp_path / "none"))
    with pytest.raises(OpError, match=r"model_index\.json"):
        check([line], reference=str(tmp_path))
    with pytest.raises(OpError, match="decode needs a reference"):
        check([line], decode=True)
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OpError, match="no Python with torch, diffusers, transformers"):
        check([line], reference=str(tmp_path))


def test_a_reference_makes_it_a_measurement_and_nothing_else_does() -> None:
    (op,) = operations_in(module)
    assert op.effects_of({"reference": "/model"}) == MEASURES
    assert op.effects_of({"reference": None}) == DERIVES


def test_what_a_dump_says_is_one_short_line_in_the_record(tmp_path: Path, check: Check) -> None:
    asked = clips.request(prompt="a\nb\x1b[31m" + "x" * 5000)
    _, line = clips.write_clip(tmp_path, asked=asked, metadata={"recipe_sha256": "z" * 999})
    record = check([{**line, "request": {**asked, "prompt": "c"}}])
    for _, detail in details(record).values():
        assert len(detail) <= 900
        assert "\n" not in detail and "\x1b" not in detail
    assert verdict_of(record) == "request_mismatch"


def test_a_cancelled_call_stops_between_pieces(tmp_path: Path) -> None:
    _, line = clips.write_clip(tmp_path)
    manifest = clips.write_manifest(tmp_path, [line])
    control = Control()
    assert control.cancel is None
    import threading

    cancel = threading.Event()
    cancel.set()
    made = runner(tmp_path / "home")
    request = made.check(
        "clip_steps", {"manifest": str(manifest), "dumps": str(tmp_path / "dumps")}
    )
    with pytest.raises(Cancelled):
        made.here(request, Control(cancel=cancel))


def test_streams_with_schedules_of_their_own_are_held_to_those(
    tmp_path: Path, check: Check
) -> None:
    sigma, after = clips.schedule(6)
    own = {"video": {"sigma": sigma, "sigma_next": after}}
    _, line = clips.write_clip(tmp_path, metadata={"sigmas": json.dumps(own)})
    assert verdict_of(check([line])) == "inconclusive"
    own["video"]["sigma_next"] = [level * 0.9 for level in after]
    _, line = clips.write_clip(tmp_path, 1, metadata={"sigmas": json.dumps(own)})
    record = check([line])
    assert details(record)["schedule"][0] is False
    for text in ("[]", "{", '{"video": {"sigma": [1]}}', '{"video": {"sigma": "x"}}'):
        _, line = clips.write_clip(tmp_path, 2, metadata={"sigmas": text})
        assert verdict_of(check([line])) == "inconclusive"


def test_the_same_record_comes_from_numpy_and_from_the_standard_library(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ikit_ops.clips import vectors

    path, line = clips.write_clip(tmp_path, dtype="bfloat16", first_dtype="float32")
    clips.change(path, "step.2.video.x_next", flip)
    first = check([line]).get("data", "clips")
    monkeypatch.setattr(modelfree, "vectors", vectors.Plain)
    second = check([line]).get("data", "clips")
    assert [entry["verdict"] for entry in first] == [entry["verdict"] for entry in second]
    assert [c["ok"] for c in first[0]["checks"]] == [c["ok"] for c in second[0]["checks"]]


def told(**changed: Any) -> dict[str, Any]:
    row = {"stream": "video", "step": 0, "r": 1.0, "rel_l2": 0.01, "cosine": 1.0, "floor": 0.01}
    sigmas, _ = clips.schedule(6)
    given = {
        "noise": {"ok": True, "detail": "drawn"}, "steps": [row], "schedule": [*sigmas, 0.0],
        "shapes": {"video": list(clips.VIDEO)},
    }  # fmt: skip
    return {**given, **changed}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (told(), "pass"),
        (told(noise={"ok": False, "detail": "seed 3"}), "noise"),
        (told(noise={"ok": None, "detail": "no seed"}), "inconclusive"),
        (told(problem="out of memory"), "inconclusive"),
        (told(steps=[], shapes={"video": [1, 9, 9, 9, 9]}), "layout"),
        (told(schedule=[1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0]), "schedule"),
        (told(clip={"ok": False, "detail": "12 dB"}), "clip_mismatch"),
        (told(clip={"ok": None, "detail": "its own noise"}), "inconclusive"),
        (told(clip={"ok": True}, audio={"ok": True}), "pass"),
        (told(clip={"ok": True}, audio={"ok": False, "detail": "no audio"}), "clip_mismatch"),
        (told(problem="out of memory", clip={"ok": False}), "clip_mismatch"),
        ({}, "inconclusive"),
    ],
)
def test_what_the_replay_found_becomes_the_clips_word(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any],
    verdict: str,
) -> None:  # fmt: skip
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    _, line = clips.write_clip(tmp_path)
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: "python")
    monkeypatch.setattr(
        torchside, "run_worker", lambda call, python, task: {"clips": {"0": found}, "passes": 2}
    )
    record = check([line], reference=str(tmp_path), seed=81, steps=2)
    assert verdict_of(record) == verdict
    assert record.valid == {"pass": True, "inconclusive": None}.get(verdict, False)
    assert record.get("provenance", "request", "args", "seed") == 81
    if verdict == "pass":
        assert record.get("data", "detection", 0, "probability") == pytest.approx(1 / 3, abs=1e-3)
        assert any("(seed 81)" in line for line in record.get("limitations"))


def test_clean_clips_that_were_not_drawn_do_not_hold_the_record_back(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").write_text("{}", encoding="utf-8")
    lines = [clips.write_clip(tmp_path, n)[1] for n in range(5)]
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: "python")

    def worked(call: Any, python: str, task: dict[str, Any]) -> dict[str, Any]:
        rows = {str(clip["index"]): told() for clip in task["clips"]}
        return {"clips": rows, "passes": 2}

    monkeypatch.setattr(torchside, "run_worker", worked)
    record = check(lines, reference=str(tmp_path), clips=2)
    assert verdict_of(record) == "pass"
    verdicts = [clip["verdict"] for clip in record.get("data", "clips")]
    assert sorted(verdicts) == ["inconclusive"] * 3 + ["pass"] * 2
    assert any("2 of 5 clips" in line for line in record.get("limitations"))
    monkeypatch.setattr(
        torchside, "run_worker", lambda *_: {"clips": {}, "problem": "no weights", "passes": 0}
    )
    with pytest.raises(OpError, match="no weights"):
        check(lines, reference=str(tmp_path))


def test_failing_clips_are_replayed_only_when_too_few_clean_ones_are_there() -> None:
    import random

    from ikit_ops.clips.manifest import Clip
    from ikit_ops.clips.verdicts import ClipResult

    def one(index: int, ok: bool, readable: bool = True) -> checker.Examined:
        result = ClipResult("00")
        result.add("chain", ok)
        return checker.Examined(index, Clip(Path("a"), {}), result, readable=readable)

    examined = [one(0, True), one(1, False), one(2, False, readable=False)]
    assert [e.index for e in checker.pick_clips(examined, 1, random.Random(0))] == [0]
    assert [e.index for e in checker.pick_clips(examined, 4, random.Random(0))] == [0, 1]
