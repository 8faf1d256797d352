"""A stand-in for nsys, ncu, rocprofv3: takes their command lines, leaves what they leave.

``install(folder, name, mode)`` puts an executable of that name into a folder.  It keeps what it
was started with beside itself (``NAME.seen``), runs the target, and writes a report; what it
exports was recorded from the real tool or made up.  Modes: ``ok``; ``leaky``: the report holds
its own environment and whatever lies beside it as ``others``, as a careless profiler's would;
``silent``: no report; ``late``: fails once before it starts the target; ``slow``: waits for an
interrupt, then writes; ``deaf``: waits for ever.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

DEAF = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", daemon, __file__])
print("started", flush=True)
while True: sum(range(9999))
"""
"""A target that ignores what asks it to end, and leaves a daemon."""


def install(folder: Path, name: str, mode: str = "ok", capture: Path | None = None) -> Path:
    """The executable; ``capture`` is what it hands out as its export."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.mode").write_text(mode, encoding="utf-8")
    if capture is not None:
        shutil.copyfile(capture, folder / f"{name}.capture")
    program = folder / name
    script = f'#!/bin/sh\nexec {sys.executable} -I {Path(__file__)} {folder} {name} "$@"\n'
    program.write_text(script, encoding="utf-8")
    program.chmod(0o755)
    return program


def seen(folder: Path, name: str) -> list[dict[str, object]]:
    """What the program was started with, each time but for its version."""
    path = folder / f"{name}.seen"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def after(words: list[str], option: str) -> str:
    """The word that follows an option."""
    return words[words.index(option) + 1]


def main() -> int:
    folder, name, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if words == ["--version"]:
        print(f"{name} version 9.8.7-fake")
        return 0
    with (folder / f"{name}.seen").open("a", encoding="utf-8") as file:
        environment = {k: v for k, v in os.environ.items() if k != "IKIT_RUNS"}
        file.write(json.dumps({"argv": words, "env": environment, "cwd": str(Path.cwd())}) + "\n")
    capture = folder / f"{name}.capture"
    if words[0] == "export":
        shutil.copyfile(capture, after(words, "--output"))
        return 0
    if "--import" in words:
        print(capture.read_text(encoding="utf-8"), end="")
        return 0
    return profile(folder, name, words, (folder / f"{name}.mode").read_text(encoding="utf-8"))


def profile(folder: Path, name: str, words: list[str], mode: str) -> int:
    """Run the target behind the options, then leave a report."""
    if mode == "late":  # its agent does not come up the first time
        (folder / f"{name}.mode").write_text("ok", encoding="utf-8")
        return 1
    interrupted = []
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(1))
    target = subprocess.Popen(words[words.index("/bin/sh") :], start_new_session=True)
    if mode in ("slow", "deaf"):
        signal.pause()
        while mode == "deaf":
            signal.pause()
        target.kill()
    status = target.wait()
    if mode == "silent":
        print("made-up complaint of a profiler")
        return 1
    report = Path(after(words, "--output" if name == "nsys" else "--export"))
    text = b"NVIDIA Tegra Profiler Report 1.\n" if name == "nsys" else b"NVR\0"
    if mode == "leaky":
        text += Path(f"/proc/{os.getpid()}/environ").read_bytes()
        text += (folder / "others").read_bytes()
    report.with_suffix(f".{name}-rep").write_bytes(text)
    return 130 if interrupted else status


if __name__ == "__main__":
    sys.exit(main())
