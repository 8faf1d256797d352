"""What in a dump is not as ``clip-steps.v1`` says: names, shapes, dtypes, finite values.

Every message names the tensor and both what was found and what was expected, since an engine's
author has to find the line that wrote it: an audio latent one frame too long is a rounding in
the engine, a video latent with the frames in the channels' place is a forgotten unpacking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ikit_ops.clips.reader import MAX_TOLD, DumpReader
from ikit_ops.clips.recorder import (
    FORMAT,
    LATENT_DTYPES,
    MAX_STEPS,
    latent_keys,
    stream_of,
)
from ikit_ops.clips.vectors import vectors

RANKS = {"video": 5, "audio": 4}
SCAN_BYTES = 1 << 18


def layout_problems(
    reader: DumpReader,
    shapes: Mapping[str, Sequence[int]] | None = None,
    steps: int | None = None,
    *,
    values: bool = True,
) -> list[str]:
    """What in a dump is not as the contract says; empty when all is.

    ``shapes`` maps the expected streams to their shapes (None: whatever the dump holds, in the
    contract's rank, and the same throughout), ``steps`` is the expected number of steps.
    ``values=False`` leaves out the pass over the latents that looks for NaN and infinity.
    """
    problems = []
    if reader.meta.get("format") != FORMAT:
        problems.append(
            f"metadata format is {reader.meta.get('format', '')[:MAX_TOLD]!r}, not {FORMAT!r}"
        )
    if reader.request is None:
        problems.append("metadata request is no JSON object")
    if not reader.streams:
        return [*problems, "there are no steps"]
    count = reader.n_steps if steps is None else steps
    if reader.n_steps != count:
        problems.append(f"{reader.n_steps} steps, expected {count}")
    expected = set(reader.streams) if shapes is None else set(shapes)
    if set(reader.streams) != expected:
        problems.append(
            f"streams {', '.join(reader.streams)}, expected {', '.join(sorted(expected))}"
        )
    wanted = 2 + len(reader.streams) * (3 * reader.n_steps + 1)
    if reader.n_steps > MAX_STEPS or len(reader.keys()) != wanted:
        problems.append(f"{len(reader.keys())} tensors, expected {wanted}")
    problems += _sigma_problems(reader)
    if reader.n_steps <= MAX_STEPS:
        problems += _tensor_problems(reader, shapes)
    if values and not problems:
        problems += [f"{name} is not finite" for name in non_finite(reader)[:8]]
    return problems


def _sigma_problems(reader: DumpReader) -> list[str]:
    problems = []
    for name in ("sigma", "sigma_next"):
        if not reader.has(name):
            problems.append(f"there is no {name}")
        elif (reader.dtype(name), reader.shape(name)) != ("F64", (reader.n_steps,)):
            problems.append(
                f"{name} is {reader.dtype(name)} {list(reader.shape(name))}, "
                f"expected F64 [{reader.n_steps}]"
            )
    if not problems:
        for name, levels in zip(("sigma", "sigma_next"), reader.sigmas(), strict=True):
            if not all(map(math.isfinite, levels)):
                problems.append(f"{name} is not finite")
    return problems


def _tensor_problems(reader: DumpReader, shapes: Mapping[str, Sequence[int]] | None) -> list[str]:
    """Missing tensors, and tensors of another shape or dtype; the first eight are told."""
    problems: list[str] = []
    known: dict[str, tuple[int, ...]] = {k: tuple(v) for k, v in (shapes or {}).items()}
    for name in latent_keys(reader.streams, reader.n_steps):
        if len(problems) == 8:
            return [*problems, "and more"]
        if not reader.has(name):
            problems.append(f"there is no {name}")
            continue
        stream, shape, dtype = stream_of(name), reader.shape(name), reader.dtype(name)
        if shape != known.setdefault(stream, shape):
            problems.append(f"{name} has shape {list(shape)}, expected {list(known[stream])}")
        if dtype not in LATENT_DTYPES:
            problems.append(f"{name} is {dtype}, expected one of {', '.join(LATENT_DTYPES)}")
    for stream, shape in known.items():
        rank = RANKS.get(stream, len(shape))
        if len(shape) != rank or not math.prod(shape) or shape[0] != 1:
            problems.append(
                f"{stream} has shape {list(shape)}, expected rank {rank}, batch 1, no 0"
            )
    return problems


def non_finite(reader: DumpReader) -> list[str]:
    """The latents that hold a NaN or an infinity, in the order of the steps."""
    return [
        name
        for name in latent_keys(reader.streams, reader.n_steps)
        if reader.has(name) and not _is_finite(reader, name)
    ]


def _is_finite(reader: DumpReader, name: str) -> bool:
    ops, buffer = vectors(), memoryview(bytearray(SCAN_BYTES))
    start, size, dtype = 0, reader.nbytes(name), reader.dtype(name)
    while start < size:
        count = reader.read_into(name, start, buffer)
        if not ops.finite(ops.floats(buffer[:count], dtype)):
            return False
        start += count
    return True
