"""Frames to mp4 bytes and back, by PyAV: the same frames give the same bytes.

x264 splits its work by threads, and another number of threads gives other bytes; so the encoder
has one thread, one preset and one quality here, and nothing of the clock in the container.  It
makes no B frames either: where it puts them depends, for small pictures, on memory that nobody
wrote.  Other builds of x264 give other bytes all the same, so nobody may demand that encoding
again reproduces a clip.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

CRF = "18"
PRESET = "medium"
MAX_PIXELS = 4096 * 4096


class ClipError(ValueError):
    """An mp4 that cannot be decoded; the text says why."""


def encode(
    frames: Any, fps: float, audio: Any = None, audio_rate: int = 0, *, crf: str = CRF
) -> bytes:
    """The mp4 of frames [F, H, W, 3] uint8, with audio [channels, samples] float where given.

    Height and width must be even (4:2:0).  Video is never cut to the length of the audio.
    """
    buffer = io.BytesIO()
    rate = Fraction(fps).limit_denominator(1001)
    with av.open(buffer, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=rate)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = "yuv420p"
        video.options = {"crf": crf, "preset": PRESET, "threads": "1", "bf": "0"}
        video.codec_context.thread_count = 1
        sound = None
        if audio is not None:
            sound = container.add_stream("aac", rate=audio_rate)
            sound.codec_context.layout = "stereo" if len(audio) == 2 else "mono"
        for picture in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            container.mux(video.encode(frame))
        container.mux(video.encode())
        if sound is not None:
            _encode_audio(container, sound, audio, audio_rate)
    return buffer.getvalue()


def _encode_audio(container: Any, sound: Any, audio: Any, rate: int) -> None:
    samples = np.ascontiguousarray(np.clip(audio, -1, 1).astype(np.float32))
    frame = av.AudioFrame.from_ndarray(
        samples, format="fltp", layout="stereo" if len(samples) == 2 else "mono"
    )
    frame.sample_rate = rate
    container.mux(sound.encode(frame))
    container.mux(sound.encode())


def decode(path: Path, limit: int) -> Any:
    """The frames [F, H, W, 3] uint8 of an mp4 file; ClipError when it is none."""
    with opened(path) as file:
        return _decode(file, limit)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The file, open; ClipError when it is no regular one."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ClipError("the mp4 is no regular file")
        yield file


def decode_bytes(data: bytes, limit: int) -> Any:
    """The frames of an mp4 in memory."""
    return _decode(io.BytesIO(data), limit)


def _decode(file: Any, limit: int) -> Any:
    frames: list[Any] = []
    try:
        with av.open(file, "r", format="mp4") as container:
            for frame in container.decode(video=0):
                if frame.width * frame.height > MAX_PIXELS or len(frames) == limit:
                    raise ClipError(f"the mp4 has more than {limit} frames, or huge ones")
                frames.append(frame.to_ndarray(format="rgb24"))
    except (av.error.FFmpegError, IndexError) as error:
        raise ClipError(f"the mp4 cannot be decoded: {error}") from error
    if not frames:
        raise ClipError("the mp4 has no frames")
    return np.stack(frames)
