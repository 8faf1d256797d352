"""A Python with torch, diffusers and PyAV, kept by version in the user's cache folder.

    python tests/helpers/clips_python.py

builds it when it is absent (1.5 GB; torch is pinned: unpinned it is a CUDA build) and prints its
interpreter.  Where its packages cannot be had, it says so and exits with 3.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers.engine_pythons import cache

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch", "diffusers", "transformers", "av", "numpy", "safetensors", "accelerate", "pytest",
    "pytest-timeout",
)  # fmt: skip
CANNOT = 3


def folder() -> Path:
    """Where it is: a folder named by the versions that matter."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    versions = dict(pin.split("==") for pin in pins if "==" in pin)
    names = ("torch", "diffusers", "transformers", "av")
    return cache() / ("clips-" + "-".join(versions[name] for name in names))


def python_of() -> Path | None:
    """The interpreter; None when it was not built to its end."""
    found = folder()
    return found / "bin" / "python" if (found / ".complete").exists() else None


def build() -> Path:
    """The interpreter, built when it is absent; CalledProcessError when it cannot be."""
    if (found := python_of()) is not None:
        return found
    target = folder()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(target)], check=True)
    python = target / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([*pip, "--constraint", constraints, *PACKAGES], check=True)
    (target / ".complete").touch()
    return python


if __name__ == "__main__":
    try:
        print(build())
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"clips: skipped: {error}", file=sys.stderr)
        raise SystemExit(CANNOT) from None
