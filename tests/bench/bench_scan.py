"""What a search of a finished file costs: run it by hand, ``python tests/bench/bench_scan.py``.

CPU seconds decide, as MB per CPU second for 10 secrets in all their forms, over a file of
random bytes and one of log text: against a plain read, and against ``bytes.find`` per pattern.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from ikit_mcp.process.scan import CHUNK_BYTES
from ikit_mcp.process.secrets import scan_file, variants

SIZE = 256 << 20
ROUNDS = 3


def made_up_secrets() -> dict[str, str]:
    """Ten values as issuers make them."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    dice = random.Random(7)
    return {f"SECRET_{i}": "".join(dice.choices(letters, k=36)) for i in range(10)}


def rate(function: Callable[[], object]) -> float:
    """The best MB per CPU second of a few rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return SIZE / 1e6 / min(seconds)


def plain_read(path: Path) -> None:
    """Read the file in chunks."""
    buffer = bytearray(CHUNK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def find_each(path: Path, patterns: list[bytes]) -> None:
    """Look for each pattern in each chunk."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            for pattern in patterns:
                chunk.find(pattern)


def main() -> None:
    """Print the table."""
    secrets = made_up_secrets()
    patterns = sorted({form for value in secrets.values() for form in variants(value)})
    line = b"INFO 11-30 model.layers.17.self_attn.q_proj.weight loaded in 0.25 s, 128 tokens\n"
    contents = {"random bytes": random.Random(1).randbytes(1 << 20), "log text": line * 13000}
    print(f"{len(secrets)} secrets, {len(patterns)} patterns, {SIZE >> 20} MiB; MB per CPU second")
    with tempfile.TemporaryDirectory() as folder:
        for name, block in contents.items():
            path = Path(folder) / "file"
            with path.open("wb") as file:
                while file.tell() < SIZE:
                    file.write(block)
            rates = [
                rate(partial(plain_read, path)),
                rate(partial(scan_file, path, secrets)),
                rate(partial(find_each, path, patterns)),
            ]
            print(f"{name:13} read {rates[0]:7.0f}  scan {rates[1]:7.0f}  find {rates[2]:7.0f}")


if __name__ == "__main__":
    main()
