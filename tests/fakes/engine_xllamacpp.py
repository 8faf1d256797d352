"""A module to be found instead of ``xllamacpp``: it hangs, dies or floods where it is told.

``HOW`` in the environment is ``PHASE:WAY``.  Copied as ``xllamacpp.py`` into a folder that
stands on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

PHASE, _, WAY = os.environ["HOW"].partition(":")
__version__ = "0"


def misbehave(phase: str) -> None:
    """Do what was asked for, when this is the phase."""
    if phase != PHASE:
        return
    print(f"the engine is in {phase}", file=sys.stderr, flush=True)
    if WAY in ("hang", "stuck"):
        if WAY == "stuck":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as native code can
        if os.fork() == 0:
            os.setsid()
        time.sleep(600)
    elif WAY == "raise":
        raise RuntimeError("made up")
    elif WAY == "exit":
        os._exit(7)
    elif WAY == "flood":
        line = b"z" * 4095 + b"\n"
        while True:
            sys.stderr.buffer.write(line)
    else:
        os.kill(os.getpid(), getattr(signal, WAY))
        time.sleep(600)


class CommonParams(SimpleNamespace):
    """Takes every attribute."""

    def __init__(self) -> None:
        super().__init__(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(n_threads=1),
            cpuparams_batch=SimpleNamespace(), n_batch=1, n_ubatch=1, n_gpu_layers=-1,
            no_kv_offload=False, no_op_offload=False, n_parallel=1,
        )  # fmt: skip


class Server:
    """A fake server; ``engine_server`` stands beside this file."""

    def __init__(self, params: Any) -> None:
        misbehave("load")
        engine_server: Any = importlib.import_module("engine_server")
        self._server = engine_server.FakeServer("ids")
        stream = engine_server._Handler._stream
        self.requests = 0

        def streamed(handler: Any, body: dict[str, Any]) -> None:
            """The third request is the first round, behind two of warm-up."""
            self.requests += 1
            if self.requests == 1:
                misbehave("warm-up")
            elif self.requests == 3:
                misbehave("round")
            stream(handler, body)

        engine_server._Handler._stream = streamed
        self._server.__enter__()
        self.listening_address = f"http://127.0.0.1:{self._server.port}"


def get_device_info() -> list[dict[str, Any]]:
    """One CPU; called when the flags are asked for."""
    misbehave("flags")
    return [{"name": "CPU", "type": SimpleNamespace(name="TYPE_CPU")}]


misbehave("import")
