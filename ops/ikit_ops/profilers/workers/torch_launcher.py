"""Run a Python script or module below torch.profiler, and write the trace.

A script for the target's own interpreter: standard library and torch alone, Python 3.10.
Arguments: the trace to write, ``all`` or ``window``, then the script (or ``-m MODULE``) and its
arguments.  In ``window`` the script says when to capture, by ``torch.cuda.profiler.start`` and
``stop`` as for every other profiler; a worker of ours says it by ``torch_capture``.

The trace is written however the script ends, also when it is interrupted.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

NO_TORCH = 97


class Window:
    """The profiler, opened and closed at most once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._profiler: Any = None
        self._done = False

    def start(self) -> None:
        """Open the capture."""
        if self._profiler is not None or self._done:
            return
        from torch import profiler

        kinds = [profiler.ProfilerActivity.CPU]
        if profiler.ProfilerActivity.CUDA in profiler.supported_activities():
            kinds.append(profiler.ProfilerActivity.CUDA)
        self._profiler = profiler.profile(activities=kinds)
        self._profiler.start()

    def stop(self) -> None:
        """Close it and write the trace; a trace can be written once."""
        if self._profiler is None:
            return
        taken, self._profiler, self._done = self._profiler, None, True
        taken.stop()
        fresh = self.path + ".new"
        taken.export_chrome_trace(fresh)
        os.replace(fresh, self.path)  # noqa: PTH105 -- scripts in an engine's Python stay small

    def capture(self, what: str) -> bool:
        """``start`` or ``stop``, as the workers call it; whether it could be done."""
        getattr(self, what)()
        return True


def give_window(window: Window, folder: str) -> None:
    """Let the script's own start and stop open and close the window."""
    import torch

    torch.cuda.profiler.start = window.start  # type: ignore[assignment, unused-ignore]
    torch.cuda.profiler.stop = window.stop  # type: ignore[assignment, unused-ignore]
    sys.path.insert(0, folder)
    try:
        import ikit_harness
    except ImportError:
        return  # not one of our workers
    ikit_harness.torch_capture = window.capture


def run(words: list[str]) -> None:
    """The script or module, as the interpreter itself would run it."""
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = ""
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # noqa: PTH100, PTH120 -- as above
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Run it; the script's own exit status is kept."""
    path, mode, *words = sys.argv[1:]
    try:
        import torch  # noqa: F401 -- to fail here, with a status of its own, when it is not there
    except ImportError:
        sys.exit(NO_TORCH)
    window = Window(path)
    leave = os._exit

    def leave_after_trace(status: int) -> None:
        """Our workers leave by ``os._exit``: the trace is written before."""
        window.stop()
        leave(status)

    os._exit = leave_after_trace  # type: ignore[assignment]
    if mode == "all":
        window.start()
    else:
        script = words[0] if words[0] != "-m" else "."
        give_window(window, os.path.dirname(os.path.abspath(script)))  # noqa: PTH100, PTH120 -- as above
    try:
        run(words)
    finally:
        window.stop()


if __name__ == "__main__":
    main()
