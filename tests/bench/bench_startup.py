"""Start to tools/list answered over stdio: ours against the SDK's smallest server.

Interleaved rounds; CPU seconds and peak memory of the whole server process, as the
operating system accounts them when it has ended.  Ratios hold on a loaded machine,
seconds do not.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.stdio import Wire

ROUNDS = 9
MINIMAL = Path(__file__).with_name("minimal_server.py")


def measure(command: list[str], home: Path) -> tuple[float, float, int]:
    """CPU seconds, peak MiB and tools/list bytes of one start."""
    wire = Wire(home, command=command)
    wire.initialize()
    listed = wire.ask("tools/list")()["result"]
    assert wire.process.stdin is not None and wire.process.stdout is not None
    wire.process.stdin.close()
    _, _, usage = os.wait4(wire.process.pid, 0)
    wire.process.returncode = 0
    wire.close()
    size = len(json.dumps(listed, separators=(",", ":")))
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, size


def main() -> None:
    """Print the table."""
    commands = {
        "SDK's smallest server": [sys.executable, str(MINIMAL)],
        "ikit serve": [sys.executable, "-m", "ikit_mcp.cli", "serve"],
    }
    rounds: dict[str, list[tuple[float, float, int]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            for name, command in commands.items():
                rounds[name].append(measure(command, Path(folder)))
    base = rounds["SDK's smallest server"]
    print(f"{'server':24} {'CPU s':>7} {'ratio':>6} {'MiB':>6} {'ratio':>6} {'tools/list B':>13}")
    for name, taken in rounds.items():
        cpu = statistics.median(t[0] for t in taken)
        memory = statistics.median(t[1] for t in taken)
        cpu_ratio = statistics.median(t[0] / b[0] for t, b in zip(taken, base, strict=True))
        memory_ratio = statistics.median(t[1] / b[1] for t, b in zip(taken, base, strict=True))
        print(
            f"{name:24} {cpu:7.2f} {cpu_ratio:6.2f} {memory:6.0f} {memory_ratio:6.2f}"
            f" {taken[0][2]:13,}"
        )


if __name__ == "__main__":
    main()
