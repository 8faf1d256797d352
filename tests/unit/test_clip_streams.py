"""The checks that need no model, at their edges: schedules, reuse, closed files, empty requests."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes import clips
from helpers.bench import run_here
from ikit_mcp.evidence.record import EvidenceRecord
from ikit_ops.clips import checker, modelfree, torchside
from ikit_ops.clips.manifest import Clip, Recipe
from ikit_ops.clips.reader import DumpReader, NotReadableHere
from ikit_ops.clips.vectors import Numpy, Plain, Vectors, vectors
from ikit_ops.clips.verdicts import ClipResult

WIDE = {"video": (1, 4, 2, 4, 6)}
BOTH = {"video": clips.VIDEO, "audio": clips.AUDIO}


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python of this machine may help."""
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: None)


def checked(folder: Path, line: dict[str, Any], **more: Any) -> EvidenceRecord:
    manifest = clips.write_manifest(folder, [line])
    return run_here(
        folder / "home", "clip_steps", manifest=str(manifest), dumps=str(folder / "dumps"), **more
    )


def word(record: EvidenceRecord) -> Any:
    return record.get("data", "verdict")


def found(record: EvidenceRecord, name: str) -> tuple[Any, str]:
    (entry,) = [c for c in record.get("data", "clips", 0, "checks") if c["name"] == name]
    return entry["ok"], entry["detail"]


def own_levels(**levels: Any) -> dict[str, str]:
    told = {name: {"sigma": s, "sigma_next": n} for name, (s, n) in levels.items()}
    return {"sigmas": json.dumps(told)}


# --- schedules -----------------------------------------------------------------------


def test_a_video_that_went_another_way_than_its_tensors_say_is_caught(tmp_path: Path) -> None:
    """The dump shows the reference's levels, and names others, which fit its arithmetic."""
    foreign = [1 - (n / 6) ** 0.5 for n in range(6)], [1 - (n / 6) ** 0.5 for n in range(1, 7)]
    path, line = clips.write_clip(tmp_path, metadata=own_levels(video=foreign))
    sigma, after = clips.schedule(6)
    with DumpReader(path) as reader:
        assert reader.sigmas() == (sigma, after)
        assert modelfree.levels_of(reader, "video") == foreign
    record = checked(tmp_path, line)
    assert (word(record), record.valid) == ("schedule", False)
    detail = f"the video went by sigma[1] {foreign[0][1]:.6f}, the tensor says {sigma[1]:.6f}"
    assert found(record, "schedule")[0] is False
    assert detail in found(record, "schedule")[1]


def test_each_streams_own_levels_are_held_against_the_recipe(tmp_path: Path) -> None:
    sigma, after = clips.schedule(6)
    squared = [s**2 for s in sigma], [s**2 for s in after]
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"sigmas": sigma}), encoding="utf-8")
    _, line = clips.write_clip(tmp_path, streams=BOTH, metadata=own_levels(audio=squared))
    with_recipe = checked(tmp_path, line, recipe=str(recipe))
    assert word(with_recipe) == "schedule"
    assert (
        f"audio: sigma[3] is {sigma[3] ** 2:.6f}, expected {sigma[3]:.6f}"
        in found(with_recipe, "schedule")[1]
    )
    _, line = clips.write_clip(tmp_path, 1, streams=BOTH, metadata=own_levels(audio=(sigma, after)))
    assert found(checked(tmp_path, line, recipe=str(recipe)), "schedule") == (True, "the recipe's")


def test_each_streams_own_levels_are_held_against_the_reference(tmp_path: Path) -> None:
    sigma, after = clips.schedule(6)
    squared = [s**2 for s in sigma], [s**2 for s in after]
    done = checker.Examined(0, Clip(tmp_path, {}), ClipResult("00"))
    row = {"stream": "video", "step": 0, "r": 1.0, "rel_l2": 0.01, "cosine": 1.0, "floor": 0.01}
    told = {"steps": [row], "schedule": [*sigma, 0.0], "shapes": {"video": [1]}}
    done.levels = {"video": (sigma, after), "audio": squared}
    checker.absorb(done, told, replayed=True)
    (check,) = [c for c in done.result.checks if c.name == "reference schedule"]
    assert check.ok is False
    assert check.detail.startswith("audio: sigma[3]")


def test_a_fault_that_streams_share_is_told_once(tmp_path: Path) -> None:
    path, line = clips.write_clip(tmp_path, streams=BOTH)
    clips.change(path, "sigma_next", lambda data: data[:-8] + struct.pack("<d", 0.05))
    detail = found(checked(tmp_path, line), "schedule")[1]
    assert detail == "the last step ends at sigma 0.050000, not 0"


# --- numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["final.video", "final.audio"])
@pytest.mark.parametrize("ops", [Numpy, Plain])
def test_a_final_latent_that_is_no_number_is_non_finite(
    tmp_path: Path, name: str, ops: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    made: Vectors = ops() if ops is Plain else ops(numpy)
    monkeypatch.setattr(modelfree, "vectors", lambda: made)
    path, line = clips.write_clip(tmp_path, streams=BOTH)
    clips.change(path, name, lambda data: data[:-4] + struct.pack("<f", float("inf")))
    record = checked(tmp_path, line)
    assert word(record) == "non_finite"
    assert found(record, "finite") == (False, name)
    assert found(record, "final")[0] is False


def test_a_step_that_overflows_is_still_held_against_its_arithmetic() -> None:
    """Where x + ds * out leaves float32, a finite x_next is not that sum."""
    data = struct.pack("<f", 3.0e38)
    for ops in (vectors(), Plain()):
        x = out = ops.floats(memoryview(data), "F32")
        wrong = ops.floats(memoryview(struct.pack("<f", 1.0)), "F32")
        euler = ops.euler(x, out, wrong, 0.9, ("F32", "F32"))
        assert (euler.finite, euler.bad) == (True, 1)


def scaled(factor: float) -> clips.Out:
    return lambda step, stream, earlier: [factor * a for a in earlier[0]] if step == 1 else None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [1.0, 1.1, 0.5, -1.0])
def test_the_second_step_may_not_be_a_multiple_of_the_first(
    tmp_path: Path, dtype: str, factor: float
) -> None:
    _, line = clips.write_clip(tmp_path, dtype=dtype, out=scaled(factor), streams=WIDE)
    record = checked(tmp_path, line)
    assert word(record) == "step_reuse"
    assert "out of step 1 of video is" in found(record, "reuse")[1]


# --- files that are not ours to open -------------------------------------------------


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """The rights of a user to whom nothing belongs, for whoever runs these tests."""
    if os.geteuid():
        mode = folder.stat().st_mode
        folder.chmod(0)
        try:
            yield
        finally:
            folder.chmod(mode)
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_dump_of_another_user_is_not_checkable_and_accuses_nobody(tmp_path: Path) -> None:
    path, line = clips.write_clip(tmp_path)
    clip = Clip(Path(line["video"]), line["request"])
    digests = checker.digests([clip], lambda share: None)
    folder = checker.DumpFolder(path.parent, set())
    with as_nobody(path.parent):
        with pytest.raises(NotReadableHere, match="Permission denied"):
            folder.find(str(digests[0].sha256))
        done = checker.examine(0, clip, digests[0], folder, Recipe(), lambda share: None)
    assert done.result.verdict == "not_checkable"
    assert "private to the user that wrote it" in done.result.checks[-1].detail


def test_an_mp4_of_another_user_is_not_checkable(tmp_path: Path) -> None:
    _, line = clips.write_clip(tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    video = Path(line["video"]).rename(closed / "clip.mp4")
    clip = Clip(video, line["request"])
    with as_nobody(closed):
        (digest,) = checker.digests([clip], lambda share: None)
    assert digest == checker.Digest(None, "cannot be read: Permission denied")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ENOMEM])
def test_what_keeps_this_machine_from_reading_is_not_the_dumps_fault(number: int) -> None:
    from ikit_ops.clips import reader

    assert isinstance(reader._unopened(OSError(number, "no")), NotReadableHere)
    assert not isinstance(reader._unopened(OSError(errno.ELOOP, "no")), NotReadableHere)


def test_a_disk_that_fails_while_it_is_read_is_not_the_dumps_fault(tmp_path: Path) -> None:
    path, _ = clips.write_clip(tmp_path)
    with DumpReader(path) as reader:
        os.dup2(os.open(tmp_path, os.O_RDONLY), reader._file.fileno())  # reading it is an error
        with pytest.raises(NotReadableHere, match="cannot be read here: Is a directory"):
            reader.raw("sigma")


def test_a_dump_that_is_broken_is_told_in_a_sentence(tmp_path: Path) -> None:
    path, line = clips.write_clip(tmp_path)
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    record = checked(tmp_path, line)
    assert found(record, "readable")[1] == (
        f"the dump: its header claims {2**60} bytes of a file of 10"
    )
    path.write_bytes(b"abc")
    assert found(checked(tmp_path, line), "readable")[1].startswith("the dump: it is shorter")


# --- requests ------------------------------------------------------------------------


def test_an_empty_request_compares_nothing_and_says_so(tmp_path: Path) -> None:
    _, line = clips.write_clip(tmp_path)
    record = checked(tmp_path, {"video": line["video"], "request": {}})
    ok, detail = found(record, "request")
    assert (ok, word(record)) == (None, "inconclusive")
    assert detail.startswith("not named by the manifest, so not compared: prompt, width")
    assert any(f"clip 0: request: {detail}" == text for text in record.get("coverage", "missing"))


def test_a_request_in_part_names_what_was_not_compared(tmp_path: Path) -> None:
    _, line = clips.write_clip(tmp_path)
    asked = {**line["request"], "fps": None}
    record = checked(tmp_path, {**line, "request": asked})
    assert found(record, "request") == (True, "not named by the manifest, so not compared: fps")


@pytest.mark.parametrize("request_text", ['{"width": NaN}', "[1]", "{", '{"a": Infinity}'])
def test_a_request_that_is_no_json_is_a_fault_of_the_layout(
    tmp_path: Path, request_text: str
) -> None:
    path, line = clips.write_clip(tmp_path)
    header, body = clips.header_of(path)
    header["__metadata__"]["request"] = request_text
    clips.with_header(path, header, body)
    record = checked(tmp_path, line)
    assert word(record) == "layout"
    assert "metadata request is no JSON object" in found(record, "layout")[1]


def test_the_recipes_shapes_are_those_of_what_was_asked_for(tmp_path: Path) -> None:
    """A dump of another request is another request's, whatever shape the recipe names."""
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"latents": {"video": [1, 4, 2, 4, 6]}}), encoding="utf-8")
    _, line = clips.write_clip(tmp_path)
    assert word(checked(tmp_path, line, recipe=str(recipe))) == "layout"
    other = {**line, "request": {**line["request"], "width": 192, "height": 128}}
    assert word(checked(tmp_path, other, recipe=str(recipe))) == "request_mismatch"


def test_another_requests_shapes_are_no_layout_of_the_reference(tmp_path: Path) -> None:
    done = checker.Examined(0, Clip(tmp_path, {}), ClipResult("00"))
    done.result.add("request", False, "width: asked 96, got 64", "request_mismatch")
    checker.absorb(done, {"shapes": {"video": [1, 4, 2, 4, 6]}}, replayed=True)
    assert done.result.verdict == "request_mismatch"
    assert done.result.checks[-1].ok is None


def reference_says(folder: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]) -> Any:
    (folder / "model_index.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: "python")
    monkeypatch.setattr(torchside, "run_worker", lambda call, python, task: told)
    _, line = clips.write_clip(folder)
    return checked(folder, line, reference=str(folder))


def replayed(**more: Any) -> dict[str, Any]:
    sigma, _ = clips.schedule(6)
    row = {"stream": "video", "step": 0, "r": 1.0, "rel_l2": 0.01, "cosine": 1.0, "floor": 0.01}
    whole = {"noise": {"ok": True, "detail": "drawn"}, "steps": [row], "schedule": sigma,
             "shapes": {"video": list(clips.VIDEO)}, **more}  # fmt: skip
    return {"clips": {"0": whole}, "passes": 2}


@pytest.mark.parametrize("name", ["noise", "clip"])
def test_a_check_that_could_not_run_is_missing_and_is_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    told = replayed(**{name: {"ok": None, "detail": "nothing to look at"}})
    record = reference_says(tmp_path, monkeypatch, told)
    assert (word(record), record.valid) == ("inconclusive", None)
    assert f"clip 0: {name}: nothing to look at" in record.get("coverage", "missing")
    assert record.summary.endswith(f"1 of 1 clips: {name}: nothing to look at")


def test_the_recipes_call_is_refused_in_the_words_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ikit_mcp.registry import OpError

    told = {"clips": {}, "passes": 0, "recipe_problem": "the recipe's call has nope"}
    with pytest.raises(OpError, match="the recipe's call has nope") as refused:
        reference_says(tmp_path, monkeypatch, told)
    assert "correct the recipe's call" in refused.value.next_step


def test_a_reference_without_a_schedule_of_so_few_steps_accuses_nobody(tmp_path: Path) -> None:
    done = checker.Examined(0, Clip(tmp_path, {}), ClipResult("00"))
    done.levels = {"video": clips.schedule(1)}
    told = replayed(schedule=[float("nan"), 0.0])["clips"]["0"]
    checker.absorb(done, told, replayed=True)
    (check,) = [c for c in done.result.checks if c.name == "reference schedule"]
    assert (check.ok, done.result.verdict) == (None, "inconclusive")


def test_a_fit_that_is_no_number_is_unknown_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"stream": "video", "step": 0, "r": 1.0, "rel_l2": 0.01, "cosine": 1.0, "floor": 0.01,
           "guidance_fit": float("nan"), "dsigma_fit": float("inf")}  # fmt: skip
    record = reference_says(tmp_path, monkeypatch, replayed(steps=[row]))
    step = record.get("data", "clips", 0, "steps", 0)
    assert (step["guidance_fit"], step["dsigma_fit"], step["r"]) == (None, None, 1)
