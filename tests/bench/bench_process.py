"""What a supervised run costs, and how soon a cancelled one is gone.

Run it by hand: ``python tests/bench/bench_process.py``.  CPU seconds of this process and its
children decide, in interleaved rounds, as a ratio to ``python -I -S -c pass``: load changes
both.  At most 3 is the aim.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ikit_mcp.process.procfs import descendants
from ikit_mcp.process.run import run

ROUNDS = 60
ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def cpu(function: Callable[[], object]) -> float:
    """CPU seconds, here and in children, of one call."""
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    function()
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    pairs = zip(before, after, strict=True)
    return sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in pairs)


def plain() -> None:
    """The interpreter alone."""
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)


def supervised() -> None:
    """The least program, supervised."""
    run(["true"], timeout=60, env=ENVIRONMENT)


def cancelled() -> tuple[float, float]:
    """Seconds from a cancel to the end: of a program that obeys, and of one that does not."""
    ignoring = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"
    seconds = []
    for command in (["sleep", "60"], [sys.executable, "-S", "-c", ignoring]):
        cancel = threading.Event()
        asked: list[float] = []

        def ask(cancel: threading.Event = cancel, asked: list[float] = asked) -> None:
            asked.append(time.monotonic())
            cancel.set()

        timer = threading.Timer(1, ask)
        timer.start()
        run(command, timeout=60, grace=0, env=ENVIRONMENT, cancel=cancel)
        seconds.append(time.monotonic() - asked[0])
    return seconds[0], seconds[1]


def main() -> None:
    """Print the figures."""
    supervised()  # compiles the supervisor's files
    rounds = [(cpu(plain), cpu(supervised)) for _ in range(ROUNDS)]
    base, cost = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in rounds)
    print(f"python -I -S -c pass   {base * 1e3:6.2f} ms of CPU (median of {ROUNDS})")
    print(f"supervised run of true {cost * 1e3:6.2f} ms of CPU, {ratio:.2f} times as much")
    obeys, killed = cancelled()
    print(f"from cancel to gone    {obeys * 1e3:6.0f} ms; ignoring it, {killed * 1e3:.0f} ms")
    start = time.process_time()
    for _ in range(100):
        descendants(1)
    print(f"one walk over a tree   {(time.process_time() - start) * 10:6.2f} ms of CPU (pid 1's)")


if __name__ == "__main__":
    main()
