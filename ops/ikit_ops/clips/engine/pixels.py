"""Whether the mp4 shows the latent that the dump ends with.

A hash ties a dump to its mp4 by name only: an engine could ship the steps of one clip beside the
pixels of another.  So the final latent is decoded by the reference's own decoder and compared
with the decoded mp4, frame by frame.  Codecs lose something, and how much depends on the
content, so the bar is what the same frames lose when they are encoded here, less three dB.
A decoder that draws noise of its own is not a function of the latent; then nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ikit_ops.clips.engine import mp4, pipelines
from ikit_ops.clips.reader import DumpReader

MARGIN_DB = 3.0
LEAST_DB = 20.0
MAX_FRAMES = 2_000


def compare(reference: Any, reader: DumpReader, clip: Mapping[str, Any]) -> dict[str, Any]:
    """``{ok, detail}``: the least PSNR over the frames against what encoding alone costs."""
    if getattr(reference.pipe.vae.config, "timestep_conditioning", False):
        return {"ok": None, "detail": "the decoder draws noise of its own"}
    shown = mp4.decode(Path(clip["video"]), MAX_FRAMES)
    wanted = pipelines.decode_video(reference.pipe, reader.get("final.video"))
    if shown.shape != wanted.shape:
        return {"ok": False, "detail": f"frames {shown.shape}, the latent gives {wanted.shape}"}
    again = mp4.decode_bytes(mp4.encode(wanted, float(clip["request"]["fps"])), MAX_FRAMES)
    least, usual = _psnr(shown, wanted), _psnr(again, wanted)
    detail = f"least PSNR of a frame {least:.1f} dB; encoding alone gives {usual:.1f} dB"
    if usual < LEAST_DB:
        return {"ok": None, "detail": f"{detail}: too little to tell clips apart"}
    return {"ok": least >= usual - MARGIN_DB, "detail": detail}


def _psnr(one: Any, other: Any) -> float:
    """The least peak signal-to-noise ratio over the frames, in dB."""
    gap = (one.astype(np.float64) - other.astype(np.float64)) ** 2
    worst = float(gap.reshape(len(gap), -1).mean(axis=1).max())
    return float(10 * np.log10(255.0**2 / worst)) if worst else 99.0
