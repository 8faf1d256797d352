"""Whether the disk holds what is still to come: the mp4 files, and the dumps beside them.

A dump of steps is hundreds of megabytes a clip and is never deleted, so a long benchmark can
fill a disk, and then fails at its end.  What a clip needs is projected before the first one, from
the sizes that the contract gives, and from the largest one seen after it; dumps and mp4 files
that go to one disk are added up.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ikit_mcp.call import one_line
from ikit_mcp.registry import OpError

RESERVE_BYTES = 256 << 20
_WORTH_TELLING = 10e6
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size_text(count: float) -> str:
    """Bytes for people: three digits, and the unit that fits."""
    for scale, unit in _UNITS:
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} bytes"


def contract_bytes(request: Mapping[str, Any]) -> int:
    """The tensor bytes of a float32 dump of the contract's example model, for that request.

    3 N + 1 tensors of each stream: video [1, 128, F, H, W] with 32 pixels and 8 frames to a
    latent, audio [1, 8, L, 16] with 25 latents a second, unless the request is silent.
    """
    frames = (int(request["num_frames"]) - 1) // 8 + 1
    video = 128 * frames * -(-int(request["height"]) // 32) * -(-int(request["width"]) // 32)
    seconds = int(request["num_frames"]) / float(request["fps"])
    audio = 0 if request.get("audio") is False else 8 * 16 * round(25 * seconds)
    steps = int(request["steps"])
    return (3 * steps + 1) * 4 * (video + audio) + 16 * steps


@dataclass
class Room:
    """The disks of ``out`` and, where it is known, of the dumps."""

    out: Path
    dumps: Path | None
    dump_bytes: int | None = None
    clip_bytes: int | None = None
    projected: int | None = None
    free_bytes: int | None = None
    free_in_out: int | None = None
    _seen: bool = field(default=False, repr=False)

    def expect(self, requests: Iterable[Mapping[str, Any]]) -> None:
        """Project dumps from the contract's sizes, as long as no clip was seen."""
        self.projected = max(map(contract_bytes, requests), default=None)
        self.free_bytes = None if self.dumps is None else _free(self.dumps)
        self.free_in_out = _free(self.out)

    def saw(self, clip_bytes: int, dump_bytes: int | None) -> None:
        """Take note of a clip that was made; its dump may be missing."""
        self.clip_bytes = max(clip_bytes, self.clip_bytes or 0)
        if dump_bytes is not None:
            self.dump_bytes = max(dump_bytes, self.dump_bytes or 0)
        self._seen = True

    def check(self, remaining: int) -> str:
        """What ``remaining`` clips need, in words; OpError when a disk does not hold it.

        Empty when that is next to nothing.
        """
        a_dump = 0
        if self.dumps is not None:
            guessed = None if self._seen else self.projected
            a_dump = self.dump_bytes or guessed or 0
        needs: dict[int, tuple[int, Path]] = {}
        for folder, each in ((self.dumps, a_dump), (self.out, self.clip_bytes or 0)):
            if folder is not None:
                disk = _disk(folder)
                before = needs.get(disk, (0, folder))
                needs[disk] = (before[0] + each * remaining, before[1])
        for needed, folder in needs.values():
            free = _free(folder)
            if needed + RESERVE_BYTES > free:
                parts = f"{size_text(a_dump)} a dump, {size_text(self.clip_bytes or 0)} an mp4"
                raise OpError(
                    (f"{remaining} clips to come need {size_text(needed)} ({parts}) and" if needed
                     else "clips need") + f" {size_text(RESERVE_BYTES)} to spare;"
                    f" {size_text(free)} are free in {one_line(str(folder))}",
                    "make room, or ask for a smaller count",
                )  # fmt: skip
        total = sum(needed for needed, _ in needs.values())
        return size_text(total) if total >= _WORTH_TELLING else ""


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _disk(folder: Path) -> int:
    return folder.stat().st_dev
