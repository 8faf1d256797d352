"""Whether the mp4 shows the latent that the dump ends with.

A hash ties a dump to its mp4 by name only: an engine could ship the steps of one clip beside the
pixels of another.  So the final latent is decoded by the reference's own decoder and compared
with the decoded mp4, frame by frame.

What an honest mp4 loses is its engine's choice: another codec, a lower quality, a decoder that
works in tiles.  So there are two bars, far apart.  Above what the same frames lose when they are
encoded here, less three dB, the mp4 shows the latent.  Below what *unrelated* pictures reach it
does not.  In between nobody can tell a coarse encoder from a cheat, and nothing is claimed.

Unrelated pictures are made of the clip itself: mirrored and shifted by half, its frames have the
same light and contrast and nothing in its place.  They are compared as thumbnails, by their
likeness, since coarse codecs and tiles spoil detail first.  The best frame decides, for a
starved codec loses a clip's later frames before its first.  A file smaller than the same frames
encoded at the worst quality of use shows nothing of anything, so it is not held against them.

Two things convict without any bar: the latent's own frames at other places, and the frames of
another clip of the same check.  A decoder that draws noise of its own is not a function of the
latent; then nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from ikit_ops.clips.engine import mp4, pipelines
from ikit_ops.clips.reader import DumpReader
from ikit_ops.clips.recorder import StepDumpError

MARGIN_DB = 3.0
ROOM_DB = 6.0  # between unrelated pictures and encoding alone, or the pictures tell nothing
MISPLACED_DB = 10.0
THUMBNAIL = 8  # pixels of a side
CONTRAST = 6.0  # of 255: a codec may well drop less than that
FAR = 48.0  # of 255, in the mean over squares: no encoder and no decoder is that wrong
LIKE, MOST_CHANCE, MOST_LIKE = 0.3, 0.5, 0.6
WORST_CRF = "45"
MAX_FRAMES = 2_000
MAX_OTHERS = 3
SHORTEST, TOLERANCE_S = 0.5, 0.25

Frames = Any
"""uint8 [F, H, W, 3]."""


@dataclass(frozen=True)
class Sound:
    """The audio of an mp4: whether there is a track, and the seconds that it decodes to."""

    there: bool
    seconds: float = 0.0


def compare(
    reference: Any, reader: DumpReader, clip: Mapping[str, Any], others: Sequence[str] = ()
) -> dict[str, Any]:
    """``{"clip": {ok, detail}}``, and ``audio`` where the mp4 must have some.

    ``others`` are the dumps of other clips, whose pixels the mp4 may show instead.
    """
    video = Path(clip["video"])
    made: dict[str, Any] = {}
    if _wants_audio(reference, reader, clip["request"]):
        made["audio"] = audio_finding(sound_of(video), _seconds_of_audio(reference, reader))
    if getattr(reference.pipe.vae.config, "timestep_conditioning", False):
        return {**made, "clip": _open("the decoder draws noise of its own")}
    shown = mp4.decode(video, MAX_FRAMES)
    wanted = pipelines.decode_video(reference.pipe, reader.get("final.video"))

    def another(path: str) -> Frames | None:
        return _decoded(reference, path, wanted.shape)

    made["clip"] = judge_frames(
        shown, wanted, float(clip["request"]["fps"]), video_bytes(video), others, another
    )
    return made


def judge_frames(
    shown: Frames, wanted: Frames, fps: float, size: int | None,
    others: Sequence[str] = (), decoded: Callable[[str], Frames | None] = lambda path: None,
) -> dict[str, Any]:  # fmt: skip
    """``{ok, detail}`` of the mp4's frames against the latent's; ``size`` is the video's bytes."""
    if shown.shape != wanted.shape:
        return _failed(f"frames {list(shown.shape)}, the latent gives {list(wanted.shape)}")
    own = psnr(shown, wanted)
    usual = float(psnr(_encoded(wanted, fps), wanted).min())
    unrelated = float(np.median([np.median(psnr(shown, view)) for view in views(wanted)]))
    told = f"least PSNR of a frame {own.min():.1f} dB; encoding alone gives {usual:.1f} dB"
    if usual - unrelated >= ROOM_DB and own.min() >= usual - MARGIN_DB:
        return {"ok": True, "detail": told}
    told += f", an unrelated picture {unrelated:.1f} dB"
    if (place := misplaced(shown, wanted, own, usual)) is not None:
        return _failed(f"frame {place[0]} shows frame {place[1]} of the latent; {told}")
    if usual - unrelated >= ROOM_DB:
        for number, path in enumerate(others[:MAX_OTHERS]):
            other = decoded(path)
            if other is not None and psnr(shown, other).min() >= usual - MARGIN_DB:
                return _failed(f"it shows the latent of another clip ({number + 1}.); {told}")
    return _by_thumbnails(shown, wanted, fps, size, told)


def _by_thumbnails(
    shown: Frames, wanted: Frames, fps: float, size: int | None, told: str
) -> dict[str, Any]:
    """Failed when no frame is more like the latent's than unrelated pictures are; else open."""
    small, target = thumbnails(shown), thumbnails(wanted)
    gaps = np.sqrt(((small - target) ** 2).reshape(len(target), -1).mean(axis=1))
    if gaps.min() >= FAR:
        return _failed(f"{told}: the light is off by {gaps.min():.0f} of 255 in every frame")
    clear = _without_layout(target).std(axis=1) >= CONTRAST
    if 2 * clear.sum() < len(clear):
        return _open(f"{told}: too little in the pictures to tell clips apart")
    best = float(likeness(small, target)[clear].max())
    chance = max(float(likeness(small, thumbnails(view))[clear].max()) for view in views(wanted))
    told += f"; best likeness of a frame {best:.2f}, of an unrelated picture {chance:.2f}"
    by_chance = min(chance, MOST_CHANCE)  # a symmetric picture is like its own mirror image
    if best > min(by_chance + LIKE * (1 - by_chance), MOST_LIKE):
        return _open(f"{told}: a coarse encoder or other pixels, which cannot be told apart")
    if size is None or size <= len(mp4.encode(wanted, fps, crf=WORST_CRF)):
        return _open(f"{told}: too few bytes to show anything")
    return _failed(f"{told}: no frame is like the latent's")


def misplaced(shown: Frames, wanted: Frames, own: Any, usual: float) -> tuple[int, int] | None:
    """A frame that shows another frame of the latent as well as encoding can, and which one."""
    doubtful = np.flatnonzero(own < usual - MISPLACED_DB)
    if not len(doubtful):
        return None
    small, target = thumbnails(shown[doubtful]), thumbnails(wanted)
    for place, frame in enumerate(doubtful):
        gaps = ((target - small[place]) ** 2).reshape(len(target), -1).mean(axis=1)
        nearest = int(gaps.argmin())
        one = psnr(shown[frame : frame + 1], wanted[nearest : nearest + 1])
        if nearest != frame and one[0] >= usual - MARGIN_DB:
            return int(frame), nearest
    return None


def views(frames: Frames) -> Iterator[Frames]:
    """The same pictures with everything at another place."""
    yield frames[:, :, ::-1]
    yield frames[:, ::-1]
    yield frames[:, ::-1, ::-1]
    yield np.roll(frames, frames.shape[2] // 2, axis=2)
    yield np.roll(frames, frames.shape[1] // 2, axis=1)


def psnr(one: Frames, other: Frames) -> Any:
    """The peak signal-to-noise ratio of each frame, in dB; 99 for equal ones."""
    found = []
    for a, b in zip(one, other, strict=True):
        gap = float(((a.astype(np.float32) - b) ** 2).mean(dtype=np.float64))
        found.append(min(99.0, 10 * np.log10(255.0**2 / gap)) if gap else 99.0)
    return np.array(found)


def thumbnails(frames: Frames) -> Any:
    """The frames' light, [F, h, w], each number the mean of a square of pixels."""
    made = []
    for frame in frames:
        light = frame.astype(np.float32).mean(axis=2)
        h, w = (side // THUMBNAIL for side in light.shape)
        squares = light[: h * THUMBNAIL, : w * THUMBNAIL].reshape(h, THUMBNAIL, w, THUMBNAIL)
        made.append(squares.mean(axis=(1, 3)))
    return np.stack(made)


def likeness(one: Any, other: Any) -> Any:
    """For each pair of thumbnails their correlation, whatever their light; 0 if one is flat.

    The mean of each row and column is taken out first: light above and dark below is what
    landscapes have in common, not what one picture shows.
    """
    a, b = (_without_layout(each.astype(np.float64)) for each in (one, other))
    sizes = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return (a * b).sum(axis=1) / np.maximum(sizes, 1e-9)


def _without_layout(small: Any) -> Any:
    """[F, h, w] less the light of its rows and columns, as [F, h * w]."""
    rows, columns = small.mean(axis=2, keepdims=True), small.mean(axis=1, keepdims=True)
    rest = small - rows - columns + small.mean(axis=(1, 2), keepdims=True)
    return rest.reshape(len(rest), -1)


def _encoded(frames: Frames, fps: float) -> Frames:
    return mp4.decode_bytes(mp4.encode(frames, fps), MAX_FRAMES)


def _decoded(reference: Any, path: str, shape: tuple[int, ...]) -> Frames | None:
    """The frames of another dump's latent; None when they are not of that shape."""
    try:
        with DumpReader(path) as reader:
            made = pipelines.decode_video(reference.pipe, reader.get("final.video"))
    except (StepDumpError, ValueError, RuntimeError):
        return None
    return made if made.shape == shape else None


def _failed(detail: str) -> dict[str, Any]:
    return {"ok": False, "detail": detail}


def _open(detail: str) -> dict[str, Any]:
    return {"ok": None, "detail": detail}


# --- the file ------------------------------------------------------------------------


def video_bytes(path: Path) -> int | None:
    """The bytes of the mp4's video, without its audio and its boxes; None when it has none."""
    with _container(path) as container:
        if not container.streams.video:
            return None
        sizes: list[int] = [packet.size for packet in container.demux(video=0)]
        return sum(sizes)


def sound_of(path: Path) -> Sound:
    """Whether the mp4 has audio, and how long it is when it is decoded."""
    with _container(path) as container:
        if not container.streams.audio:
            return Sound(there=False)
        return Sound(True, sum(f.samples / f.sample_rate for f in container.decode(audio=0)))


@contextmanager
def _container(path: Path) -> Iterator[Any]:
    """The opened mp4; ClipError when it cannot be read to where the caller reads it."""
    try:
        with mp4.opened(path) as file, av.open(file, "r", format="mp4") as container:
            yield container
    except av.error.FFmpegError as error:
        raise mp4.ClipError(f"the mp4 cannot be decoded: {error}") from error


def audio_finding(sound: Sound, wanted_s: float) -> dict[str, Any]:
    """Whether the mp4's audio is there, and of the length that the reference's decoder gives.

    Codecs add and cut tens of milliseconds; what is a good part shorter than that is not all.
    """
    told = f"{sound.seconds:.2f} s of audio, the latent gives {wanted_s:.2f} s"
    if not sound.there or not sound.seconds:
        return _failed(f"the mp4 has no audio, the latent gives {wanted_s:.2f} s")
    if sound.seconds < SHORTEST * wanted_s:
        return _failed(told)
    if abs(sound.seconds - wanted_s) > max(TOLERANCE_S, 0.1 * wanted_s):
        return _open(f"{told}: padded or cut")
    return {"ok": True, "detail": f"{told}; what is to be heard was not compared"}


def _wants_audio(reference: Any, reader: DumpReader, request: Mapping[str, Any]) -> bool:
    made = "audio" in reader.streams and pipelines.family(reference.pipe).audio
    return made and request.get("audio") is not False


def _seconds_of_audio(reference: Any, reader: DumpReader) -> float:
    """The length of the audio that the reference makes of the final latent."""
    pipe = reference.pipe
    latent = reader.get("final.audio").to(pipe.device).float()
    _, _, length, mel = latent.shape
    with torch.no_grad():
        tokens = pipe._denormalize_audio_latents(
            pipe._pack_audio_latents(latent), pipe.audio_vae.latents_mean,
            pipe.audio_vae.latents_std,
        )  # fmt: skip
        whole = pipe._unpack_audio_latents(tokens, length, num_mel_bins=mel)
        made = pipe.vocoder(pipe.audio_vae.decode(whole.to(pipe.audio_vae.dtype)).sample)
    return float(made.shape[-1] / int(pipe.vocoder.config.output_sampling_rate))
