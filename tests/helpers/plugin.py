"""A third-party distribution, installed the way a user would: ``pip install``."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "data" / "plugin_acme"


@functools.cache
def installed() -> Path:
    """A folder with the installed distribution; it goes with the temporary folder."""
    target = Path(tempfile.mkdtemp(prefix="acme-")) / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), str(SOURCE)],
        check=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return target


def environment(plugins: str = "acme", **more: str) -> dict[str, str]:
    """Variables that make a server load the distribution's entry points ``plugins``."""
    path = os.pathsep.join(p for p in (str(installed()), os.environ.get("PYTHONPATH")) if p)
    return {"PYTHONPATH": path, "IKIT_PLUGINS": plugins, **more}
