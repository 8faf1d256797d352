"""The contract clip-steps.v1: what is written, what is read, what is refused."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes import clips
from ikit_ops.clips import recorder as recording
from ikit_ops.clips.stepdump import (
    REQUEST_FIELDS,
    DumpReader,
    StepDumpError,
    StepRecorder,
    dump_path,
    layout_problems,
    request_of,
)

SHA = "ab" * 32
LARGE_VIDEO, LARGE_AUDIO = (1, 128, 16, 16, 24), (1, 8, 126, 16)


class Zeros:
    """A tensor of zeros that takes no memory until it is asked for its bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, dtype

    def tobytes(self) -> bytes:
        size = 1
        for n in self.shape:
            size *= n
        return bytes(size * (4 if self.dtype == "float32" else 2))


def test_a_request_has_the_contracts_fields_and_its_noise_seed_defaults_to_its_seed() -> None:
    made = request_of({"prompt": "p", "seed": 5, "steps": 3, "colour": "red"})
    assert tuple(made) == REQUEST_FIELDS
    assert (made["noise_seed"], made["width"]) == (5, None)
    assert request_of({"seed": 5, "noise_seed": 0})["noise_seed"] == 0


@pytest.mark.parametrize("name", ["", "AB" * 32, "ab" * 31, "../" + "a" * 61, "ab" * 32 + "\n"])
def test_a_dump_is_named_by_a_lowercase_sha256_alone(name: str) -> None:
    with pytest.raises(StepDumpError, match="sha256"):
        dump_path("/dumps", name)
    assert dump_path("/dumps", SHA) == Path(f"/dumps/{SHA}.safetensors")


def test_a_long_clips_dump_has_exactly_the_bytes_that_the_contract_names(tmp_path: Path) -> None:
    asked = clips.request(
        width=768, height=512, num_frames=121, steps=30, audio=True, prompt="p" * 200
    )
    streams = {"video": (LARGE_VIDEO, "F32"), "audio": (LARGE_AUDIO, "F32")}
    with StepRecorder(asked, tmp_path, streams=streams) as recorder:
        for step in range(30):
            for name, shape in (("video", LARGE_VIDEO), ("audio", LARGE_AUDIO)):
                latent = Zeros(shape)
                recorder.step(
                    step, name, latent, latent, latent, 1 - step / 30, 1 - (step + 1) / 30
                )
        recorder.final("video", Zeros(LARGE_VIDEO))
        recorder.final("audio", Zeros(LARGE_AUDIO))
        path = recorder.save(SHA)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    assert length <= 18_000
    assert path.stat().st_size - 8 - length == 292_132_320
    with DumpReader(path) as reader:
        shapes = {"video": LARGE_VIDEO, "audio": LARGE_AUDIO}
        assert layout_problems(reader, shapes, 30, values=False) == []
        assert reader.request == asked
    path.unlink()


def test_safetensors_itself_opens_what_the_recorder_wrote(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = clips.write_dump(
        tmp_path, streams={"video": clips.VIDEO, "audio": clips.AUDIO}, first_dtype="float32"
    )
    with safetensors.safe_open(path, framework="numpy") as opened, DumpReader(path) as reader:
        assert sorted(opened.keys()) == sorted(reader.keys())
        assert opened.metadata() == reader.meta
        for key in reader.keys():  # noqa: SIM118 -- the method of a reader, which is no mapping
            assert opened.get_tensor(key).tobytes() == reader.raw(key)


def test_arrays_are_written_as_they_lie_and_as_they_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(12, dtype=numpy.float32).reshape(1, 1, 1, 3, 4)
    turned = values.transpose(0, 1, 2, 4, 3)
    for name, array in (("straight", values), ("turned", turned)):
        streams = {"video": (array.shape, "F32")}
        with small(tmp_path, streams=streams) as recorder:
            for step in (0, 1):
                recorder.step(step, "video", array, array, array, 1, 0.5)
            recorder.final("video", array)
            array = array.copy()
            path = recorder.save(SHA)
        with DumpReader(path) as reader:
            assert reader.raw("step.1.video.out") == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("streaming", [True, False])
def test_what_was_recorded_is_read_back(tmp_path: Path, dtype: str, streaming: bool) -> None:
    path = clips.write_dump(
        tmp_path,
        asked=clips.request(noise_seed=9),
        streams={"audio": clips.AUDIO, "video": clips.VIDEO},
        dtype=dtype,
        first_dtype="float32",
        metadata={"recipe_sha256": "00"},
        streaming=streaming,
    )
    with DumpReader(path) as reader:
        assert layout_problems(reader, {"video": clips.VIDEO, "audio": clips.AUDIO}, 6) == []
        assert reader.streams == ["video", "audio"]
        assert reader.n_steps == 6
        assert reader.meta["recipe_sha256"] == "00"
        assert reader.request == clips.request(noise_seed=9)
        assert reader.sigmas() == clips.schedule(6)
        assert reader.dtype("step.0.video.x") == "F32"
        assert reader.dtype("step.1.video.x") == clips_dtype(dtype)
        assert reader.raw("step.1.video.x") == reader.raw("step.0.video.x_next")
        assert reader.has("final.audio") and not reader.has("final.depth")
        assert reader.shape("final.audio") == clips.AUDIO
        with pytest.raises(StepDumpError, match="there is no"):
            reader.shape("step.6.video.x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def clips_dtype(dtype: str) -> str:
    return {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]


def test_the_same_steps_give_the_same_bytes_whether_streamed_or_kept(tmp_path: Path) -> None:
    whole = [
        clips.write_dump(tmp_path, f"clip {streaming}".encode(), streaming=streaming).read_bytes()
        for streaming in (True, False)
    ]
    assert whole[0] == whole[1]


def small(directory: Path, **options: Any) -> StepRecorder:
    asked = clips.request(steps=2)
    options.setdefault("streams", {"video": ((1, 1, 1, 1, 2), "F32")})
    return StepRecorder(asked, directory, **options)


def latent(*values: float, dtype: str = "float32") -> clips.Latent:
    return clips.Latent(list(values), (1, 1, 1, 1, len(values)), dtype)


def test_a_dump_that_lacks_a_step_is_never_named(tmp_path: Path) -> None:
    for streams in ({"video": ((1, 1, 1, 1, 2), "F32")}, None):
        with small(tmp_path, streams=streams) as recorder:
            recorder.step(0, "video", latent(1, 2), latent(1, 2), latent(1, 2), 1.0, 0.5)
            recorder.final("video", latent(1, 2))
            with pytest.raises(StepDumpError, match=r"lacks step\.1\.video\.x"):
                recorder.save(SHA)
        assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_its_declaration_is_refused(tmp_path: Path) -> None:
    with small(tmp_path) as recorder:
        one = latent(1, 2)
        with pytest.raises(StepDumpError, match="step 2 of 2"):
            recorder.step(2, "video", one, one, one, 1, 0)
        with pytest.raises(StepDumpError, match="not declared"):
            recorder.step(0, "depth", one, one, one, 1, 0)
        with pytest.raises(StepDumpError, match="declared was F32"):
            recorder.step(1, "video", latent(1, 2, 3), one, one, 1, 0)
        with pytest.raises(StepDumpError, match="declared was F32"):
            recorder.step(1, "video", latent(1, 2, dtype="bfloat16"), one, one, 1, 0)
        with pytest.raises(StepDumpError, match="int8"):
            recorder.step(1, "video", latent(1, 2, dtype="int8"), one, one, 1, 0)
        recorder.final("video", one)
        with pytest.raises(StepDumpError, match="recorded before"):
            recorder.final("video", one)


def test_a_stream_with_a_schedule_of_its_own_must_say_so(tmp_path: Path) -> None:
    streams = dict.fromkeys(("video", "audio"), ((1, 1, 1, 1, 2), "F32"))
    one = latent(1, 2)
    with small(tmp_path, streams=streams) as recorder:
        recorder.step(0, "video", one, one, one, 1.0, 0.5)
        with pytest.raises(StepDumpError, match="give the schedules"):
            recorder.step(0, "audio", one, one, one, 1.0, 0.6)
    with small(tmp_path, streams=streams, metadata={"sigmas": "{}"}) as recorder:
        recorder.step(0, "video", one, one, one, 1.0, 0.5)
        recorder.step(0, "audio", one, one, one, 1.0, 0.6)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("order", [("video", "audio"), ("audio", "video")])
def test_the_levels_are_the_videos_whatever_stream_comes_first(
    tmp_path: Path, order: tuple[str, str], streaming: bool
) -> None:
    streams = dict.fromkeys(order, ((1, 1, 1, 1, 2), "F32")) if streaming else None
    levels, one = {"video": (1.0, 0.5, 0.0), "audio": (1.0, 0.6, 0.0)}, latent(1, 2)
    with small(tmp_path, streams=streams, metadata={"sigmas": "{}"}) as recorder:
        for step in (0, 1):
            for name in order:
                recorder.step(step, name, one, one, one, *levels[name][step : step + 2])
        for name in order:
            recorder.final(name, one)
        path = recorder.save(SHA)
    with DumpReader(path) as reader:
        assert reader.sigmas() == ([1.0, 0.5], [0.5, 0.0])


def test_a_disk_without_room_is_found_before_the_first_step_for_real(tmp_path: Path) -> None:
    program = (
        "import resource, sys\n"
        "from fakes import clips\n"
        "from ikit_ops.clips.stepdump import StepDumpError, StepRecorder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "shape = {'video': ((1, 64, 8, 8, 8), 'F32')}\n"
        "try:\n"
        "    StepRecorder(clips.request(), sys.argv[1], streams=shape)\n"
        "except StepDumpError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "refused: no room for a dump" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_engine_may_copy_the_recorder_alone(tmp_path: Path) -> None:
    copy = tmp_path / "recorder.py"
    copy.write_bytes(Path(str(recording.__file__)).read_bytes())
    program = (
        "import sys, array; sys.path.insert(0, sys.argv[1])\n"
        "import recorder\n"
        "class Latent:\n"
        "    shape, dtype = (1, 1, 1, 1, 2), 'float32'\n"
        "    def tobytes(self): return array.array('f', [1, 2]).tobytes()\n"
        "one = Latent()\n"
        "made = recorder.StepRecorder({'steps': 1}, sys.argv[1], {'video': (one.shape, 'F32')})\n"
        "made.step(0, 'video', one, one, one, 1.0, 0.0); made.final('video', one)\n"
        "print(made.save('ab' * 32))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path)], check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    with DumpReader(done.stdout.strip()) as reader:
        assert layout_problems(reader, None, 1) == []


@pytest.mark.parametrize(
    ("streams", "steps", "word"),
    [
        ({}, 2, "no stream"),
        ({"Video": ((1,), "F32")}, 2, "stream"),
        ({"video": ((1, 0), "F32")}, 2, "shape"),
        ({"video": ((1,), "F64")}, 2, "F64"),
        ({"video": ((1,), "F32")}, 0, "steps"),
        ({"video": ((1,), "F32")}, "2", "steps"),
        ({"video": ((1,), "F32")}, 10_001, "steps"),
        ({f"s{n}": ((1,), "F32") for n in range(10)}, 10_000, "header"),
    ],
)
def test_streams_that_the_contract_does_not_have_are_refused(
    tmp_path: Path, streams: Any, steps: Any, word: str
) -> None:
    with pytest.raises(StepDumpError, match=word):
        StepRecorder(clips.request(steps=steps), tmp_path, streams=streams)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_found_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(StepDumpError, match="no dump can be made"):
        small(tmp_path / "none")


def test_a_full_disk_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StepDumpError, match="No space left"):
        small(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_filesystem_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    path = clips.write_dump(tmp_path)
    with DumpReader(path) as reader:
        assert layout_problems(reader) == []


@pytest.mark.parametrize("slow", [False, True])
def test_a_disk_that_fails_while_steps_are_written_fails_the_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    with small(tmp_path) as recorder:
        assert recorder._writer is not None
        recorder._writer._slow = slow

        def broken(fd: int, data: Any, offset: int) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(StepDumpError, match="Input/output error"):
            one = latent(1, 2)
            recorder.step(0, "video", one, one, one, 1, 0.5)
            recorder.step(1, "video", one, one, one, 0.5, 0)
            recorder.final("video", one)
            recorder.save(SHA)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_gets_the_steps_from_the_background_and_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    real = os.pwrite

    def watched(fd: int, data: Any, offset: int) -> int:
        threads.add(threading.current_thread().name)
        return real(fd, bytes(data)[:5], offset)  # and short writes

    monkeypatch.setattr(os, "pwrite", watched)
    monkeypatch.setattr(recording, "SLOW_BYTES_PER_SECOND", float("inf"))
    monkeypatch.setattr(time, "perf_counter", iter(range(10_000)).__next__)
    path = clips.write_dump(tmp_path)
    monkeypatch.undo()
    assert "clip-step-dump" in threads
    with DumpReader(path) as reader:
        assert layout_problems(reader, {"video": clips.VIDEO}, 6) == []
        assert reader.raw("final.video") == reader.raw("step.5.video.x_next")


def test_an_engine_that_is_killed_leaves_no_named_dump(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from fakes import clips\n"
        "from pathlib import Path\n"
        "def out(step, stream, earlier):\n"
        "    if step == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "clips.write_dump(Path(sys.argv[1]), out=out)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, check=False
    )
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".") and left.suffix == ".partial"


def test_two_engines_that_make_the_same_clip_do_not_meet(tmp_path: Path) -> None:
    first, second = small(tmp_path), small(tmp_path)
    one = latent(1, 2)
    for recorder in (first, second):
        for step in (0, 1):
            recorder.step(step, "video", one, one, one, 1 - step / 2, 0.5 - step / 2)
        recorder.final("video", one)
    assert first.save(SHA) == second.save(SHA)
    assert [path.name for path in tmp_path.iterdir()] == [f"{SHA}.safetensors"]
    first.abort()
    assert dump_path(tmp_path, SHA).exists()


HOSTILE: dict[str, Callable[[Any, bytes], bytes]] = {
    "empty": lambda h, b: b"",
    "seven bytes": lambda h, b: b"1234567",
    "longer than the file": lambda h, b: struct.pack("<Q", 2**40) + b"{}",
    "beyond the cap": lambda h, b: struct.pack("<Q", 5 << 20) + b"{" + bytes(6 << 20),
    "no object": lambda h, b: sized(b"[]"),
    "no JSON": lambda h, b: sized(b'{"a":'),
    "not UTF-8": lambda h, b: sized(b'{"\xff": 1}'),
    "deep": lambda h, b: sized(b'{"a":' + b"[" * 100_000),
    "NaN": lambda h, b: sized(b'{"a": NaN}'),
    "huge number": lambda h, b: sized(b'{"a": ' + b"9" * 5000 + b"}"),
    "twice": lambda h, b: sized(b'{"a": 1, "a": 2}'),
    "metadata of numbers": lambda h, b: made({**h, "__metadata__": {"format": 1}}, b),
    "entry a list": lambda h, b: made({**h, "sigma": [1]}, b),
    "entry with more": lambda h, b: made({**h, "sigma": {**h["sigma"], "more": 1}}, b),
    "dtype unknown": lambda h, b: made({**h, "sigma": {**h["sigma"], "dtype": "F128"}}, b),
    "dtype a list": lambda h, b: made({**h, "sigma": {**h["sigma"], "dtype": []}}, b),
    "shape of floats": lambda h, b: made({**h, "sigma": {**h["sigma"], "shape": [6.0]}}, b),
    "shape of truth": lambda h, b: made({**h, "sigma": {**h["sigma"], "shape": [True]}}, b),
    "shape negative": lambda h, b: made({**h, "sigma": {**h["sigma"], "shape": [-6]}}, b),
    "shape huge": lambda h, b: made({**h, "sigma": {**h["sigma"], "shape": [2**62, 4]}}, b),
    "offsets of three": lambda h, b: made(
        {**h, "sigma": {**h["sigma"], "data_offsets": [0, 1, 2]}}, b
    ),
    "offsets backwards": lambda h, b: made(
        {**h, "sigma": {**h["sigma"], "data_offsets": [48, 0]}}, b
    ),
    "overlap": lambda h, b: made({**h, "sigma_next": h["sigma"]}, b),
    "hole": lambda h, b: made({k: v for k, v in h.items() if k != "sigma_next"}, b),
    "cut short": lambda h, b: made(h, b[:-1]),
    "bytes after": lambda h, b: made(h, b + b"\0"),
}


def sized(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def made(header: Any, body: bytes) -> bytes:
    return sized(json.dumps(header).encode()) + body


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    path = clips.write_dump(tmp_path)
    header, body = clips.header_of(path)
    path.write_bytes(HOSTILE[name](header, body))
    with pytest.raises(StepDumpError):
        DumpReader(path)


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    path = clips.write_dump(tmp_path)
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "absent"):
        with pytest.raises(StepDumpError, match=r"cannot be opened|no regular file"):
            DumpReader(tmp_path / name)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = clips.write_dump(tmp_path)
    with DumpReader(path) as reader:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(StepDumpError, match="cut short"):
            reader.raw("final.video")


def problems(path: Path, **options: Any) -> str:
    with DumpReader(path) as reader:
        found = layout_problems(reader, options.get("shapes"), options.get("steps"))
    return "; ".join(found)


def test_each_fault_of_the_layout_is_named(tmp_path: Path) -> None:
    path = clips.write_dump(tmp_path, streams={"video": clips.VIDEO, "audio": clips.AUDIO})
    assert problems(path) == ""
    assert "6 steps, expected 7" in problems(path, steps=7)
    assert "streams video, audio, expected video" in problems(path, shapes={"video": clips.VIDEO})
    wrong = {"video": clips.VIDEO, "audio": (1, 2, 5, 4)}
    assert "audio.x has shape [1, 2, 4, 4], expected [1, 2, 5, 4]" in problems(path, shapes=wrong)


def renamed(path: Path, old: str, new: str) -> Path:
    header, body = clips.header_of(path)
    clips.with_header(path, {new if k == old else k: v for k, v in header.items()}, body)
    return path


def test_missing_surplus_and_misnamed_tensors_are_named(tmp_path: Path) -> None:
    path = renamed(clips.write_dump(tmp_path), "step.2.video.out", "step.2.video.v")
    assert "there is no step.2.video.out" in problems(path)
    path = renamed(clips.write_dump(tmp_path), "step.2.video.out", "step.999999999.video.out")
    assert "1000000000 steps" in problems(path, steps=6)
    path = renamed(clips.write_dump(tmp_path), "sigma", "sigma_0")
    assert "there is no sigma" in problems(path)
    path = renamed(clips.write_dump(tmp_path), "final.video", "final.depth")
    assert "streams" in problems(path, shapes={"video": clips.VIDEO})
    path = clips.write_dump(tmp_path)
    header, body = clips.header_of(path)
    steps = [k for k in header if k.startswith(("step", "final"))]
    clips.with_header(path, {f"t{n}" if k in steps else k: header[k] for n, k in enumerate(header)
                             if k != "__metadata__"}, body)  # fmt: skip
    assert "there are no steps" in problems(path)
    assert "metadata format" in problems(path)


def test_a_latent_of_another_dtype_or_rank_is_named(tmp_path: Path) -> None:
    path = clips.write_dump(tmp_path)
    header, body = clips.header_of(path)
    header["step.1.video.x"]["dtype"] = "I32"
    clips.with_header(path, header, body)
    assert "step.1.video.x is I32" in problems(path)
    packed = clips.write_dump(tmp_path, streams={"video": (1, 12, 4)})
    assert "expected rank 5" in problems(packed)
    batch = clips.write_dump(tmp_path, streams={"video": (2, 4, 2, 2, 3)})
    assert "batch 1" in problems(batch)


def test_sigmas_must_be_finite_doubles(tmp_path: Path) -> None:
    path = clips.write_dump(tmp_path)
    clips.change(path, "sigma", lambda data: data[:-8] + struct.pack("<d", float("nan")))
    assert "sigma is not finite" in problems(path)
    path = clips.write_dump(tmp_path)
    header, body = clips.header_of(path)
    header["sigma"] = {**header["sigma"], "dtype": "F32", "shape": [12]}
    clips.with_header(path, header, body)
    assert "sigma is F32 [12], expected F64 [6]" in problems(path)
    with DumpReader(path) as reader, pytest.raises(StepDumpError, match="F64"):
        reader.sigmas()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_is_found(tmp_path: Path, dtype: str, bad: float) -> None:
    path = clips.write_dump(tmp_path, dtype=dtype)
    size = 4 if dtype == "float32" else 2
    last = struct.pack("<f", bad)[2:] if dtype == "bfloat16" else clips.encode([bad], dtype)
    clips.change(path, "step.4.video.out", lambda data: data[:-size] + last)
    assert problems(path) == "step.4.video.out is not finite"


def test_a_request_that_is_no_object_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    for text in ("[]", "{", "[" * 100_000, "1"):
        path = clips.write_dump(tmp_path)
        header, body = clips.header_of(path)
        header["__metadata__"]["request"] = text
        clips.with_header(path, header, body)
        with DumpReader(path) as reader:
            assert reader.request is None
        assert "request is no JSON object" in problems(path)
