"""Whether an mp4 shows its latent: no honest encoder or decoder is accused, no other clip passes.

These run in a Python with torch, diffusers and PyAV (``make clips``); elsewhere they are skipped.
"""

from __future__ import annotations

import io
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("IKIT_TEST_CLIPS") != "inside":
    pytest.skip("make clips runs these in a Python with torch", allow_module_level=True)

import av
import numpy as np
import torch

from fakes import clips_engine, clips_models
from ikit_ops.clips.engine import clipmaker, mp4, pipelines, pixels, task
from ikit_ops.clips.engine.replay import Reference
from ikit_ops.clips.reader import DumpReader

SHAPE = (9, 128, 192, 3)
ENCODERS: dict[str, dict[str, Any]] = {
    "x264 crf 0": {"crf": "0"}, "x264 crf 18": {"crf": "18"}, "x264 crf 28": {"crf": "28"},
    "x264 crf 35": {"crf": "35"}, "x264 crf 45": {"crf": "45"}, "x264 crf 51": {"crf": "51"},
    "x264 fast": {"crf": "35", "preset": "ultrafast"}, "x264 20 kb/s": {"bit_rate": 20_000},
    "mpeg4": {"codec": "mpeg4", "q": "2"}, "mpeg4 coarse": {"codec": "mpeg4", "q": "31"},
    "4:4:4": {"pix": "yuv444p", "crf": "18"},
}  # fmt: skip


def pictures(seed: int, contrast: float = 35.0) -> Any:
    """Moving clouds over a sky that is lighter than its ground, and a thing that crosses them."""
    numbers = np.random.default_rng(seed)
    count, height, width, _ = SHAPE
    down, across = np.fft.fftfreq(2 * height)[:, None], np.fft.fftfreq(2 * width)[None]
    falling = 1 / np.maximum(np.hypot(down, across), 1 / (2 * width)) ** 1.3
    wave = np.exp(2j * np.pi * numbers.random(falling.shape))
    cloud = np.fft.ifft2(falling * wave).real
    cloud = (cloud - cloud.mean()) / cloud.std() * contrast
    sky = np.linspace(contrast, -contrast, height)[:, None]
    frames = np.stack([
        np.roll(cloud, (3 * t, -5 * t), (0, 1))[:height, :width] + sky + 120 for t in range(count)
    ])  # fmt: skip
    coloured = frames[..., None] + np.array([10.0, 0.0, -10.0])
    for t, frame in enumerate(coloured):
        frame[40:70, 20 + 9 * t : 60 + 9 * t] += 3 * contrast * numbers.random(3)
    return np.clip(coloured, 0, 255).astype("uint8")


def encoded(frames: Any, codec: str = "libx264", pix: str = "yuv420p", **options: Any) -> bytes:
    """An mp4 as somebody else's encoder makes it."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(24))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix
        if "bit_rate" in options:
            stream.bit_rate = options.pop("bit_rate")
        stream.codec_context.thread_count = 1
        if codec == "mpeg4":  # a constant quantiser
            stream.codec_context.flags |= 2
            stream.codec_context.global_quality = 118 * int(options.pop("q"))
        stream.options = options
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def judged(data: bytes, wanted: Any, **more: Any) -> dict[str, Any]:
    with av.open(io.BytesIO(data)) as container:
        size = sum(packet.size for packet in container.demux(video=0))
    return pixels.judge_frames(mp4.decode_bytes(data, 100), wanted, 24.0, size, **more)


@pytest.mark.parametrize("contrast", [35.0, 8.0, 1.0])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_no_encoder_is_taken_for_a_cheat(encoder: str, contrast: float) -> None:
    wanted = pictures(1, contrast)
    found = judged(encoded(wanted, **ENCODERS[encoder]), wanted)
    assert found["ok"] is not False, found["detail"]
    if contrast == 35.0 and encoder in ("x264 crf 0", "x264 crf 18", "4:4:4"):
        assert found["ok"] is True, found["detail"]
    if encoder in ("x264 crf 45", "x264 crf 51", "x264 20 kb/s"):
        assert found["ok"] is None, found["detail"]


def test_other_pictures_never_pass_and_most_are_called_other() -> None:
    wanted = pictures(1)
    found = [judged(mp4.encode(pictures(seed), 24.0), wanted)["ok"] for seed in range(2, 14)]
    assert True not in found
    assert found.count(False) >= 9, found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frames: frames[::-1], "frame 0 shows frame 8"),
        (lambda frames: frames[[0, 1, 2, 3, 5, 4, 6, 7, 8]], "frame 4 shows frame 5"),
        (lambda frames: frames[[0] * 9], "shows frame 0"),
        (lambda frames: frames[:-1], "frames [8, 128, 192, 3], the latent gives [9,"),
        (lambda frames: frames[:, ::2, ::2], "frames [9, 64, 96, 3]"),
        (lambda frames: frames * 0, "the light is off by"),
        (lambda frames: frames[:, :, ::-1], "no frame is like the latent's"),
    ],
)
def test_changed_pictures_are_told_by_what_was_changed(change: Any, said: str) -> None:
    wanted = pictures(1)
    found = judged(mp4.encode(change(wanted), 24.0), wanted)
    assert found["ok"] is False, found["detail"]
    assert said in found["detail"]


def test_the_latent_of_another_clip_of_the_check_is_known_again() -> None:
    wanted, near = pictures(1), pictures(1)
    near = np.clip(near * 0.7 + pictures(3) * 0.3, 0, 255).astype("uint8")  # much like the latent
    data = mp4.encode(near, 24.0)
    assert judged(data, wanted)["ok"] is None
    there = {"none": None, "other": pictures(5), "this": near}
    found = judged(data, wanted, others=list(there), decoded=there.get)
    assert found["ok"] is False
    assert "another clip" in found["detail"]


def test_pictures_without_anything_in_them_tell_nothing() -> None:
    wanted: np.ndarray = np.full(SHAPE, 77, "uint8")
    found = judged(mp4.encode(wanted, 24.0), wanted)
    assert found["ok"] is None
    assert "too little in the pictures" in found["detail"]


def test_a_file_too_small_to_show_anything_is_not_held_against_its_pictures() -> None:
    grey: np.ndarray = np.full(SHAPE, 128, "uint8")
    assert "too few bytes" in judged(mp4.encode(grey, 24.0), pictures(1))["detail"]
    found = pixels.judge_frames(grey, pictures(1), 24.0, 10**6)
    assert (found["ok"], "no frame is like" in found["detail"]) == (False, True)


# --- with a model --------------------------------------------------------------------


@pytest.fixture(scope="module")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return clips_models.save_ltx(tmp_path_factory.mktemp("ltx"))


def finding(reference: Reference, made: Any, video: Path, asked: Any, **more: Any) -> Any:
    with DumpReader(made.dump) as reader:
        return pixels.compare(reference, reader, {"video": str(video), "request": asked}, **more)


def test_a_served_clip_shows_its_latent_and_another_does_not(tmp_path: Path, ltx: Path) -> None:
    reference = Reference(ltx, "cpu", clips_engine.RECIPE)
    pipe = pipelines.load(ltx, torch.float32, "cpu")
    asked, video = clips_engine.request(4), tmp_path / "clip.mp4"
    made = clipmaker.make(pipe, asked, tmp_path, clips_engine.RECIPE, {})
    video.write_bytes(made.mp4)
    found = finding(reference, made, video, asked)
    assert found["clip"]["ok"] is True and "audio" not in found
    other = clipmaker.make(pipe, clips_engine.request(5), tmp_path, clips_engine.RECIPE, {})
    video.write_bytes(other.mp4)
    unknown = finding(reference, made, video, asked)["clip"]
    assert unknown["ok"] is False, unknown["detail"]
    known = finding(reference, made, video, asked, others=["none", str(other.dump)])
    assert "it shows the latent of another clip (2.)" in known["clip"]["detail"]
    # what cannot be looked at keeps what the steps say
    video.write_bytes(b"no mp4")
    clip = {"index": 0, "dump": str(made.dump), "video": str(video), "request": asked,
            "steps": [0, 5]}  # fmt: skip
    told = task._clip(clip, {"decode": True, "clips": [clip]}, reference, Told())
    assert len(told["steps"]) == 2 and "problem" not in told
    assert told["clip"]["ok"] is None
    assert told["clip"]["detail"].startswith("not compared: the mp4 cannot be decoded")


class Told:
    """Progress that nobody looks at."""

    def tell(self, what: str) -> None:
        """Nothing."""


def test_a_tiled_decoder_is_honest(tmp_path: Path, ltx: Path) -> None:
    reference = Reference(ltx, "cpu", clips_engine.RECIPE)
    pipe = pipelines.load(ltx, torch.float32, "cpu")
    pipe.vae.enable_tiling(
        tile_sample_min_height=128, tile_sample_min_width=128, tile_sample_stride_height=96,
        tile_sample_stride_width=96,
    )  # fmt: skip
    asked, video = clips_engine.request(4), tmp_path / "clip.mp4"
    made = clipmaker.make(pipe, asked, tmp_path, clips_engine.RECIPE, {})
    video.write_bytes(made.mp4)
    found = finding(reference, made, video, asked)["clip"]
    assert found["ok"] is None, found["detail"]


def test_audio_must_be_there_and_of_the_length_of_its_latent(tmp_path: Path) -> None:
    folder, recipe = tmp_path / "model", {"max_sequence_length": 24}
    clips_models.ltx2().save_pretrained(folder)
    asked = clips_engine.request(
        3, width=64, height=64, num_frames=17, steps=4, audio=True
    )  # fmt: skip
    made = clipmaker.make(pipelines.load(folder, torch.float32, "cpu"), asked, tmp_path, recipe, {})
    reference, video = Reference(folder, "cpu", recipe), tmp_path / "clip.mp4"
    video.write_bytes(made.mp4)
    whole = finding(reference, made, video, asked)["audio"]
    assert whole["ok"] is True
    assert "what is to be heard was not compared" in whole["detail"]
    frames = mp4.decode_bytes(made.mp4, 100)
    video.write_bytes(mp4.encode(frames, 24.0))
    silent = finding(reference, made, video, asked)["audio"]
    assert silent["ok"] is False and "the mp4 has no audio" in silent["detail"]
    assert "audio" not in finding(reference, made, video, {**asked, "audio": False})


@pytest.mark.parametrize(
    ("seconds", "ok"), [(0.0, False), (1.0, False), (2.6, None), (4.9, True), (5.1, True),
                        (6.0, None)],
)  # fmt: skip
def test_audio_that_is_a_good_part_shorter_is_not_all(seconds: float, ok: bool | None) -> None:
    assert pixels.audio_finding(pixels.Sound(True, seconds), 5.0)["ok"] is ok


def test_the_audio_of_an_mp4_is_as_long_as_it_decodes(tmp_path: Path) -> None:
    video = tmp_path / "clip.mp4"
    tone = np.sin(np.arange(16_000) / 20, dtype=np.float32)[None] * 0.5
    video.write_bytes(mp4.encode(pictures(1), 24.0, tone, 16_000))
    assert pixels.sound_of(video).seconds == pytest.approx(1.0, abs=0.15)
    assert 0 < (pixels.video_bytes(video) or 0) < video.stat().st_size
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(mp4.ClipError, match="no regular file"):
        pixels.sound_of(tmp_path / "pipe")
    video.write_bytes(b"no mp4")
    with pytest.raises(mp4.ClipError, match="cannot be decoded"):
        pixels.sound_of(video)
