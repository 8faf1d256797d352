"""Where engines are: this Python, those that IKIT_PYTHONS names, programs on PATH.

Nothing is imported to find an engine: its distribution's metadata says its version, and
importing some of them takes half a minute.  Which interpreters may run without a further
thought is decided here too: those that the user configured.  Any other is a program that
the caller of one call names, and running it is executing it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ikit_mcp.call import Call, one_line
from ikit_mcp.registry import OpError
from ikit_ops.engines.adapter import Found

if TYPE_CHECKING:
    from ikit_ops.engines.adapter import Adapter

PROBE_SECONDS = 60.0
PROGRAMS = ("llama-server", "llama-bench")
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))\n"
)


def listed_pythons() -> list[str]:
    """The interpreters of IKIT_PYTHONS, separated like PATH or by commas."""
    given = os.environ.get("IKIT_PYTHONS", "").replace(",", os.pathsep)
    return [part.strip() for part in given.split(os.pathsep) if part.strip()]


def is_listed(python: str) -> bool:
    """Whether the interpreter or program is one that the user configured or installed.

    Paths are compared as written: every virtual environment's ``python`` is a link to the
    same file, and each is another interpreter.
    """
    programs = [path for name in PROGRAMS if (path := shutil.which(name))]
    return python in {sys.executable, *listed_pythons(), *programs}


def own_version(names: tuple[str, ...]) -> str | None:
    """The version of the first of the distributions that this Python has, or None."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_in(call: Call, python: str, names: tuple[str, ...]) -> str | None:
    """The version of the first of the distributions that another Python has, or None.

    OpError when the interpreter does not answer.
    """
    told = versions(call, python, names)
    return next((told[name] for name in names if name in told), None)


def versions(
    call: Call, python: str, names: Iterable[str], timeout: float = PROBE_SECONDS
) -> dict[str, str]:
    """The versions of those of the distributions that a Python has, by name.

    OpError when the interpreter does not answer.
    """
    if python == sys.executable:
        return {name: version for name in names if (version := own_version((name,)))}
    try:
        done = call.run([python, "-I", "-c", _ASK, *names], timeout=timeout, grace=1.0)
        told = json.loads(done.stdout)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise OpError(
            f"{one_line(python)} did not answer as a Python interpreter",
            "give the path of a Python that has the engine",
        )
    return {str(name): one_line(str(version), 60) for name, version in told.items()}


def find_distribution(call: Call, adapter: Adapter, python: str | None) -> Found:
    """The engine in the given Python, else in ours, else in the first listed one that has it."""
    for candidate in [python] if python else [sys.executable, *listed_pythons()]:
        try:
            version = version_in(call, candidate, adapter.distributions)
        except OpError:
            if python:
                raise
            continue  # a stale entry of the list must not hide the engine behind it
        if version is not None:
            return Found(python=candidate, version=version)
    where = one_line(python) if python else "this Python and those that IKIT_PYTHONS names"
    raise OpError(
        f"{adapter.title} is not in {where}",
        f"install {adapter.distributions[0]} in a Python of its own, and give python=PATH "
        "or set IKIT_PYTHONS",
    )


def find_program(name: str, python: str | None) -> str | None:
    """The program: the path given as ``python`` when its name fits, else on PATH."""
    if python is not None:
        return python if Path(python).name.startswith(name) else None
    return shutil.which(name)


def is_gguf(path: Path) -> bool:
    """Whether the path is a GGUF file, or a folder that holds one and no safetensors."""
    if path.is_dir():
        suffixes = {child.suffix for child in path.iterdir()}
        return ".gguf" in suffixes and ".safetensors" not in suffixes
    return path.suffix == ".gguf"
