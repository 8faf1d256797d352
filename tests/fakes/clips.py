"""Made-up clips: dumps as an honest engine writes them, and ways to spoil one byte of them.

The steps are real arithmetic on seeded numbers, in float32 and rounded to the dump's dtype,
without numpy or torch, so that the checks that need neither are tested without either.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikit_ops.clips.stepdump import StepRecorder, dump_path, request_of

VIDEO = (1, 4, 2, 2, 3)
AUDIO = (1, 2, 4, 4)


@dataclass
class Latent:
    """A tensor: what a recorder needs of one."""

    values: list[float]
    shape: tuple[int, ...]
    dtype: str = "float32"

    def tobytes(self) -> bytes:
        """The little-endian bytes of its dtype."""
        return encode(self.values, self.dtype)


def encode(values: Sequence[float], dtype: str) -> bytes:
    """Numbers as bytes: bfloat16 rounded to nearest even, float16, float32."""
    if dtype == "float32":
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == "float16":
        return struct.pack(f"<{len(values)}e", *values)
    wide = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
    halves = [(bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in wide]
    return struct.pack(f"<{len(values)}H", *halves)


def decode(data: bytes, dtype: str) -> list[float]:
    """The inverse of ``encode``."""
    if dtype == "bfloat16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        dtype = "float32"
    if dtype == "float16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    return array("f", data).tolist()


def rounded(values: Sequence[float], dtype: str) -> list[float]:
    """The numbers as the dtype holds them."""
    return decode(encode(values, dtype), dtype)


def request(**changed: Any) -> dict[str, Any]:
    """A request of the contract."""
    given = {
        "task": "t2v", "prompt": "a red kite over the sea", "width": 96, "height": 64,
        "num_frames": 9, "fps": 24, "steps": 6, "guidance_scale": 3.0, "seed": 7, "audio": False,
    }  # fmt: skip
    return request_of({**given, **changed})


def schedule(steps: int) -> tuple[list[float], list[float]]:
    """Noise levels as a flow-match scheduler holds them: float32, from 1 to 0."""
    levels = [*rounded([1.0 - i / steps for i in range(steps)], "float32"), 0.0]
    return levels[:-1], levels[1:]


Out = Callable[[int, str, list[list[float]]], list[float] | None]


def write_dump(
    directory: Path,
    mp4: bytes = b"clip",
    *,
    asked: Mapping[str, Any] | None = None,
    streams: Mapping[str, Sequence[int]] | None = None,
    dtype: str = "float32",
    first_dtype: str | None = None,
    out: Out = lambda step, stream, earlier: None,
    metadata: Mapping[str, str] | None = None,
    streaming: bool = True,
) -> Path:
    """Write a dump; its path.  ``out`` may replace a step's output, given the earlier ones."""
    asked = dict(asked or request())
    shapes = {name: tuple(shape) for name, shape in (streams or {"video": VIDEO}).items()}
    first = first_dtype or dtype
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    declared = {name: (shape, (names[first], names[dtype])) for name, shape in shapes.items()}
    recorder = StepRecorder(
        asked, directory, streams=declared if streaming else None, metadata=metadata
    )
    sigmas, nexts = schedule(asked["steps"])
    with recorder:
        for stream, shape in shapes.items():
            numbers = random.Random(f"{asked['noise_seed']}:{stream}")
            x = rounded([numbers.gauss(0, 1) for _ in range(math.prod(shape))], first)
            earlier: list[list[float]] = []
            for step, (sigma, after) in enumerate(zip(sigmas, nexts, strict=True)):
                made = out(step, stream, earlier)
                if made is None:
                    made = [0.8 * a + 0.3 * numbers.gauss(0, 1) for a in x]
                v = rounded(made, dtype)
                earlier.append(v)
                ds = after - sigma
                x_next = rounded([a + ds * b for a, b in zip(x, v, strict=True)], dtype)
                here = first if step == 0 else dtype
                recorder.step(
                    step, stream, Latent(x, shape, here), Latent(v, shape, dtype),
                    Latent(x_next, shape, dtype), sigma, after,
                )  # fmt: skip
                x = x_next
            recorder.final(stream, Latent(x, shape, dtype))
        return recorder.save(hashlib.sha256(mp4).hexdigest())


def write_clip(folder: Path, number: int = 0, **options: Any) -> tuple[Path, dict[str, Any]]:
    """Write an mp4 (any bytes), its dump beside it in ``dumps``, and the manifest's line."""
    dumps = folder / "dumps"
    dumps.mkdir(exist_ok=True)
    mp4 = f"clip {number}".encode()
    video = folder / f"clip-{number}.mp4"
    video.write_bytes(mp4)
    asked = options.pop("asked", None) or request(seed=number, prompt=f"kite number {number}")
    path = write_dump(dumps, mp4, asked=asked, **options)
    return path, {"video": str(video), "request": asked}


def write_manifest(folder: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """Write the manifest; its path."""
    path = folder / "clips.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """A dump's header as JSON, and the bytes of its tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: Any, body: bytes) -> None:
    """Rewrite a dump with another header (JSON, or bytes) and these tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode("utf-8")
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def change(path: Path, tensor: str, edit: Callable[[bytes], bytes]) -> None:
    """Rewrite the bytes of one tensor in place."""
    header, body = header_of(path)
    begin, end = header[tensor]["data_offsets"]
    changed = edit(body[begin:end])
    assert len(changed) == end - begin
    with_header(path, header, body[:begin] + changed + body[end:])


def spoiled_path(directory: Path, mp4: bytes = b"clip") -> Path:
    """Where the dump of these bytes belongs."""
    return dump_path(directory, hashlib.sha256(mp4).hexdigest())
