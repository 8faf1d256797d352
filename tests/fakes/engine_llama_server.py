"""An installed ``llama-server``: the real server of the wheel, behind the program's options.

A machine without a compiler has no llama-server; its wheel holds the same C++ server.  This
gives it the command line, so that the way through a program is tried with real answers.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

WORKERS = Path(__file__).parents[2] / "ops" / "ikit_ops" / "engines" / "workers"


def main() -> None:
    """Serve until a signal comes."""
    import xllamacpp

    sys.path.insert(0, str(WORKERS))
    import llamacpp_worker as worker

    words = sys.argv[1:]
    if words == ["--version"]:
        print("version: 11549 (abcdef0)")
        return

    def take(name: str) -> str:
        at = words.index(name)
        value = words[at + 1]
        del words[at : at + 2]
        return value

    params = xllamacpp.CommonParams()
    params.model.path, params.port = take("--model"), int(take("--port"))
    params.hostnames, params.verbosity = [take("--host")], int(take("-lv"))
    words.remove("--no-ui")
    params.endpoint_props = True
    worker.apply_options(params, words, xllamacpp)
    server = xllamacpp.Server(params)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    del server


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    main()
