"""The writing half of ``clip-steps.v1``: ``StepRecorder``, which an engine may copy.

It needs the standard library alone (Python 3.10 on).  Tensors may be torch tensors on any
device, numpy arrays, or anything with ``dtype``, ``shape`` and ``tobytes()``.

Writing must not slow the engine.  When the shapes are known, so is every byte of the header
and every offset: the file is made in its full size before the first step, so that a full disk
is found before any work is done, and a bounded background writer puts each step into its
place.  After the last step nothing is left to do but the rename.

An engine that is killed while it writes leaves a file of the whole size under a temporary name.
That name says which process wrote it, and the process holds a lock on it; the next engine that
writes there removes what nobody holds and whose process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import queue
import re
import stat
import struct
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = "clip-steps.v1"
VARIABLE = "CLIP_STEP_DUMP_DIR"
REQUEST_FIELDS = (
    "task", "prompt", "width", "height", "num_frames", "fps", "steps", "guidance_scale", "seed",
    "noise_seed", "audio",
)  # fmt: skip
PARTS = ("x", "out", "x_next")
LATENT_DTYPES = {"F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES = 4 << 20
MAX_STEPS = 10_000
QUEUED_TENSORS = 9
SLOW_BYTES_PER_SECOND = 1e9
PREEMPTED_SECONDS = 0.015  # what a busy machine takes from a thread now and then
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
STEP_KEY = re.compile(r"step\.(0|[1-9][0-9]{0,8})\.([a-z][a-z0-9_]{0,31})\.(x|out|x_next)")
FINAL_KEY = re.compile(r"final\.([a-z][a-z0-9_]{0,31})")
_STREAM = re.compile(r"[a-z][a-z0-9_]{0,31}")
_PARTIAL = re.compile(r"\.([0-9]{1,10})(?:-([0-9]{1,20}))?-[0-9a-f]{32}\.partial")
_CLEARED: set[tuple[int, str]] = set()

Dtype = str | tuple[str, str]
"""A stream's dtype, or the dtype of the first x and that of everything after it."""


class StepDumpError(ValueError):
    """A dump that cannot be written or read; the text says why."""


def request_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request as the contract keeps it: its eleven fields, in order.

    Absent fields are None, other fields are left out; ``noise_seed`` defaults to ``seed``.
    """
    request = {name: fields.get(name) for name in REQUEST_FIELDS}
    if request["noise_seed"] is None:
        request["noise_seed"] = request["seed"]
    return request


def dump_path(directory: str | os.PathLike[str], video_sha256: str) -> Path:
    """Where the dump of a clip is; StepDumpError when that is no lowercase hex sha256."""
    if not _SHA256.fullmatch(video_sha256):
        raise StepDumpError(f"{video_sha256[:80]!r} is no lowercase hex sha256")
    return Path(directory) / f"{video_sha256}.safetensors"


def _step_key(step: int, stream: str, part: str) -> str:
    return f"step.{step}.{stream}.{part}"


class StepRecorder:
    """Writes the dump of one clip, step by step.

    ``streams`` maps each stream to (shape, dtype): the file is then made at once, in its full
    size, and steps are written as they come.  Without it, steps are kept in memory until
    ``save``.  ``metadata`` is added to the contract's two entries (``recipe``,
    ``recipe_sha256``, and ``sigmas`` for streams with schedules of their own).  Used from one
    thread; a context that ends without ``save`` leaves nothing.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        directory: str | os.PathLike[str],
        streams: Mapping[str, tuple[Sequence[int], Dtype]] | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.request = request_of(request)
        steps = self.request["steps"]
        if not isinstance(steps, int) or not 0 < steps <= MAX_STEPS:
            raise StepDumpError(f"steps is {steps!r}: not 1 to {MAX_STEPS}")
        self.steps = steps
        self._metadata = {
            **{str(k): str(v) for k, v in (metadata or {}).items()},
            "format": FORMAT,
            "request": json.dumps(self.request),
        }
        self._directory = Path(directory)
        mine = f".{os.getpid()}-{_started(os.getpid())}-{uuid.uuid4().hex}.partial"
        self._partial = self._directory / mine
        if (key := (os.getpid(), str(directory))) not in _CLEARED:
            _CLEARED.add(key)
            clear_leftovers(directory)
        self._sigmas: dict[int, tuple[float, float]] = {}
        self._kept: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        self._writer: _Writer | None = None
        self._entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        self._written: set[str] = set()
        if streams is not None:
            self._start(_plan(streams, steps))

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def step(
        self, index: int, stream: str, x: Any, out: Any, x_next: Any, sigma: Any, sigma_next: Any
    ) -> None:
        """Record one step of one stream; the tensors are copied before this returns.

        The video gives a step's sigmas, or the first stream that comes to it.  StepDumpError
        when the step was written before, does not fit its declared shape or dtype, or the
        writer failed.
        """
        if not 0 <= index < self.steps:
            raise StepDumpError(f"step {index} of {self.steps}")
        levels = (float(sigma), float(sigma_next))
        known = self._sigmas.setdefault(index, levels)
        if known != levels and "sigmas" not in self._metadata:
            raise StepDumpError(
                f"step {index} of {stream} goes from {levels[0]} to {levels[1]}, another stream"
                f" from {known[0]} to {known[1]}: give the schedules as metadata sigmas"
            )
        if stream == "video":  # the two tensors are the video's, whatever stream came first
            known = self._sigmas[index] = levels
        if self._writer is not None:
            for name, value in zip(("sigma", "sigma_next"), known, strict=True):
                where = self._entries[name][2] + 8 * index
                self._writer.put(where, struct.pack("<d", value))
        for part, tensor in zip(PARTS, (x, out, x_next), strict=True):
            self._add(_step_key(index, stream, part), tensor)

    def final(self, stream: str, latent: Any) -> None:
        """Record the latent that the clip is decoded from: the normalised last ``x_next``."""
        self._add(f"final.{stream}", latent)

    def save(self, video_sha256: str) -> Path:
        """Give the dump its name; the path.  StepDumpError when a step lacks or writing failed."""
        target = dump_path(self._directory, video_sha256)
        try:
            if self._writer is None:
                self._write_kept()
            missing = [name for name in self._entries if name not in self._written]
            missing = [name for name in missing if not name.startswith("sigma")]
            if missing or len(self._sigmas) != self.steps:
                what = missing[0] if missing else "a sigma"
                raise StepDumpError(f"the dump lacks {what} ({len(missing)} tensors lack)")
            if self._writer is not None:
                self._writer.finish()
                if sys.platform == "win32":  # there, an open file cannot be renamed
                    self._writer.close()
            self._partial.replace(target)
        except OSError as error:
            self.abort()
            raise StepDumpError(f"the dump could not be written: {error.strerror}") from error
        except StepDumpError:
            self.abort()
            raise
        if self._writer is not None:  # locked until it has its name
            self._writer.close()
        self._writer = None
        return target

    def abort(self) -> None:
        """Give the clip up: nothing of it is left.  After ``save``, does nothing."""
        if self._writer is not None:
            self._writer.stop()
            self._writer = None
            with contextlib.suppress(OSError):
                self._partial.unlink()

    def _start(self, plan: Mapping[str, tuple[str, tuple[int, ...]]]) -> _Writer:
        header, self._entries, end = _header(self._metadata, plan)
        self._writer = _Writer(self._partial, header, end)
        return self._writer

    def _add(self, name: str, tensor: Any) -> None:
        dtype, shape = _dtype_of(tensor), tuple(int(n) for n in tensor.shape)
        if name in self._written or name in self._kept:
            raise StepDumpError(f"{name} was recorded before")
        here = _on_cpu(tensor)  # alive until its bytes were copied
        if self._writer is None:
            self._kept[name] = (dtype, shape, bytes(_bytes_of(here)))
            return
        if name not in self._entries:
            raise StepDumpError(f"{name} was not declared")
        declared, wanted, begin, _ = self._entries[name]
        if (dtype, shape) != (declared, wanted):
            raise StepDumpError(f"{name} is {dtype} {shape}, declared was {declared} {wanted}")
        self._writer.put(begin, _bytes_of(here))
        self._written.add(name)

    def _write_kept(self) -> None:
        """Write what was kept in memory, in the order of the steps."""
        plan: dict[str, tuple[str, tuple[int, ...]]] = {
            "sigma": ("F64", (self.steps,)), "sigma_next": ("F64", (self.steps,)),
        }  # fmt: skip
        streams = sorted({stream_of(name) for name in self._kept})
        for name in latent_keys(streams, self.steps):
            if name not in self._kept:
                raise StepDumpError(f"the dump lacks {name}")
            plan[name] = self._kept[name][:2]
        writer = self._start(plan)
        for name, (_, _, data) in self._kept.items():
            writer.put(self._entries[name][2], data)
            self._written.add(name)
        for row, name in enumerate(("sigma", "sigma_next")):
            values = [self._sigmas[i][row] for i in range(self.steps)]
            writer.put(self._entries[name][2], struct.pack(f"<{self.steps}d", *values))


def latent_keys(streams: Sequence[str], steps: int) -> Iterator[str]:
    """The names of the latents, in the order in which an engine makes them."""
    for step in range(steps):
        for stream in streams:
            for part in PARTS:
                yield _step_key(step, stream, part)
    for stream in streams:
        yield f"final.{stream}"


def stream_of(key: str) -> str:
    """The stream of a latent's name."""
    return key.split(".")[1] if key.startswith("final.") else key.split(".")[2]


def _plan(
    streams: Mapping[str, tuple[Sequence[int], Dtype]], steps: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor; StepDumpError for what the contract does not have."""
    plan: dict[str, tuple[str, tuple[int, ...]]] = {
        "sigma": ("F64", (steps,)), "sigma_next": ("F64", (steps,)),
    }  # fmt: skip
    if not streams:
        raise StepDumpError("no stream is declared")
    for name, (shape, dtype) in streams.items():
        first, rest = (dtype, dtype) if isinstance(dtype, str) else dtype
        if not _STREAM.fullmatch(name) or not {first, rest} <= set(LATENT_DTYPES):
            raise StepDumpError(f"stream {name[:40]!r} of {dtype}: not {', '.join(LATENT_DTYPES)}")
        if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
            raise StepDumpError(f"stream {name}: shape {tuple(shape)}")
    for key in latent_keys(list(streams), steps):
        shape, dtype = streams[stream_of(key)]
        first, rest = (dtype, dtype) if isinstance(dtype, str) else dtype
        is_first = key.startswith("step.0.") and key.endswith(".x")
        plan[key] = (first if is_first else rest, tuple(shape))
    return plan


def _header(
    metadata: Mapping[str, str], plan: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, dict[str, tuple[str, tuple[int, ...], int, int]], int]:
    """The header's bytes, each tensor's (dtype, shape, begin, end) in the *file*, and its end."""
    offset = 0
    offsets: dict[str, tuple[int, int]] = {}
    described: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, (dtype, shape) in plan.items():
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offsets[name] = (offset, end)
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise StepDumpError(f"a header of {len(text)} bytes: the prompt or the steps are too long")
    start = 8 + len(text)
    entries = {
        name: (*plan[name], start + begin, start + end) for name, (begin, end) in offsets.items()
    }
    return struct.pack("<Q", len(text)) + text, entries, start + offset


def _dtype_of(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _NAMES:
        raise StepDumpError(f"a tensor of {name}: not {', '.join(_NAMES)}")
    return _NAMES[name]


def _on_cpu(tensor: Any) -> Any:
    """A torch tensor whose memory this process can read in order; anything else as it is."""
    return tensor.detach().to("cpu").contiguous() if hasattr(tensor, "data_ptr") else tensor


def _bytes_of(here: Any) -> bytes | memoryview:
    """Its little-endian bytes: a view of a tensor's or an array's memory, valid while it lives."""
    if hasattr(here, "data_ptr"):
        size = here.numel() * here.element_size()
        return memoryview((ctypes.c_char * size).from_address(here.data_ptr())).cast("B")
    if hasattr(here, "__array_interface__") and here.flags.c_contiguous:
        return memoryview(here).cast("B")
    return bytes(here.tobytes())


class _Writer:
    """A file of known size, and the thread that fills it from a few reused buffers."""

    def __init__(self, path: Path, header: bytes, size: int) -> None:
        self._slow = False
        self._error: OSError | None = None
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise StepDumpError(
                f"no dump can be made in {path.parent}: {error.strerror}"
            ) from error
        _lock(self._fd)
        try:
            _reserve(self._fd, size)
            _write_all(self._fd, header, 0)
        except OSError as error:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise StepDumpError(f"no room for a dump of {size} bytes: {error.strerror}") from error
        self._work: queue.Queue[tuple[int, bytearray, int] | None] = queue.Queue()
        self._free: queue.Queue[bytearray] = queue.Queue()
        for _ in range(QUEUED_TENSORS):
            self._free.put(bytearray())
        self._thread = threading.Thread(target=self._run, name="clip-step-dump", daemon=True)
        self._thread.start()

    def put(self, offset: int, data: bytes | memoryview) -> None:
        """Take the bytes; when this returns, the caller may change them.

        Writing to the page cache costs what a copy costs, so they go there at once while that
        is as quick as memory.  When the disk holds writers back, they are copied and queued,
        and the engine waits only when the queue is full.
        """
        self._raise()
        size = len(data)
        if not self._slow and not self._work.unfinished_tasks:
            started = time.perf_counter()
            try:
                _write_all(self._fd, data, offset)
            except OSError as error:
                self._error = error
                self._raise()
            took = time.perf_counter() - started
            self._slow = took > size / SLOW_BYTES_PER_SECOND + PREEMPTED_SECONDS
            return
        self._slow = bool(self._work.unfinished_tasks)  # once it has caught up, try again
        buffer = self._free.get()
        if len(buffer) < size:
            buffer = bytearray(size)
        memoryview(buffer)[:size] = data
        self._work.put((offset, buffer, size))

    def finish(self) -> None:
        """Wait until everything is written; StepDumpError when something could not be."""
        self._work.put(None)
        self._thread.join()
        self._raise()

    def stop(self) -> None:
        """End the thread; what is queued may be lost."""
        self._error = self._error or OSError(errno.ECANCELED, "given up")
        self._work.put(None)
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Let the file go, and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _raise(self) -> None:
        if self._error is not None:
            raise StepDumpError(f"the dump could not be written: {self._error.strerror}")

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            offset, buffer, size = item
            if self._error is None:
                try:
                    _write_all(self._fd, memoryview(buffer)[:size], offset)
                except OSError as error:
                    self._error = error
            self._free.put(buffer)
            self._work.task_done()


def clear_leftovers(directory: str | os.PathLike[str]) -> int:
    """Remove what killed engines left half-written in a directory; how many files that were.

    Such a file is a regular one of this user, the process in its name is gone (another process
    that has its number now does not count), and nobody holds its lock: containers that share a
    folder do not see each other's processes.  Where locks cannot be had, nothing is removed.
    """
    removed = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            found = _PARTIAL.fullmatch(name)
            if found is not None and not _lives(int(found[1]), found[2]):
                removed += _remove_unheld(Path(directory) / name)
    return removed


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks since the boot; 0 where that is not told."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return line.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "0"


def _lives(pid: int, started: str | None) -> bool:
    """Whether the process that wrote a file is still there, as far as can be seen."""
    if sys.platform == "win32":
        return True  # there, asking with signal 0 would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return started in (None, "0") or _started(pid) in ("0", started)


def _lock(fd: int) -> bool:
    """Take a file's lock; False where another holds it, or locks cannot be had."""
    if sys.platform != "win32":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def _remove_unheld(path: Path) -> bool:
    """Remove a regular file of this user that nobody holds; whether it was."""
    with contextlib.suppress(OSError):
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(path, flags), "rb") as file:
            info = os.fstat(file.fileno())
            own = stat.S_ISREG(info.st_mode) and info.st_uid == getattr(os, "geteuid", int)()
            if own and _lock(file.fileno()):
                path.unlink()
                return True
    return False


def _reserve(fd: int, size: int) -> None:
    """Take the room now, so that a full disk shows before the work; else only set the size."""
    if sys.platform == "linux":
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, size)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        if hasattr(os, "pwrite"):
            done = os.pwrite(fd, view, offset)
        else:
            os.lseek(fd, offset, os.SEEK_SET)
            done = os.write(fd, view)
        view, offset = view[done:], offset + done
