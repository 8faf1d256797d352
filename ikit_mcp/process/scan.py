"""The last gate: the bytes of a finished file are searched for our own secrets.

Profilers store more than they say: the whole environment, a command line, a captured output,
each in its own format and changing with every version.  Parsing them in order to clean them
would always be one version late.  But the values are known, so the bytes are searched for
them, in every form that ``redaction.variants`` knows; a file that holds one is removed, and
the call fails.  So does a file that cannot be read: what was not seen is not clean.

An Aho-Corasick automaton reads the file once for all patterns together; chunks overlap by the
longest pattern, so that nothing hides on a seam.

Compressed files (gzip, the members of a zip) are not unpacked: scan what goes into them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ikit_mcp.process.redaction import variants
from ikit_mcp.registry import OpError

CHUNK_BYTES = 1 << 20  # what is read at once: it stays in the cache between reading and searching

PathLike = str | os.PathLike[str]


class Scanner:
    """Searches files for the secrets it was made with; nothing of them shows in its repr."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        forms = {form: name for name, value in secrets.items() for form in sorted(variants(value))}
        self._names = list(forms.values())
        self._overlap = max(map(len, forms), default=1) - 1
        self._automaton = _automaton(list(forms)) if forms else None

    def names_in(self, path: PathLike) -> list[str]:
        """The variables whose values the file holds, sorted; OSError if it can't be read whole."""
        if self._automaton is None:
            return []
        found: set[str] = set()
        buffer = bytearray(self._overlap + CHUNK_BYTES)
        view = memoryview(buffer)
        kept = 0
        # A pipe or a device would block, or never end.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(fd, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(f"{path} is not a regular file")
            while count := file.readinto(view[kept : kept + CHUNK_BYTES]):
                filled = kept + count
                for index, _, _ in self._automaton.find_matches_as_indexes(
                    view[:filled], overlapping=True
                ):
                    found.add(self._names[index])
                kept = min(self._overlap, filled)
                buffer[:kept] = buffer[filled - kept : filled]
        return sorted(found)


def _automaton(patterns: list[bytes]) -> Any:
    """A deterministic automaton over the patterns: the fastest to run, small for our few."""
    from ahocorasick_rs import BytesAhoCorasick, Implementation  # a native library: only here

    return BytesAhoCorasick(patterns, implementation=Implementation.DFA)


def scan_file(path: PathLike, secrets: Mapping[str, str]) -> list[str]:
    """The names of the variables whose values the file holds, sorted ([]: it holds none).

    OSError when the file is not a regular one or cannot be read to its end.
    """
    return Scanner(secrets).names_in(path)


def scan_or_remove(paths: Iterable[PathLike], secrets: Mapping[str, str]) -> None:
    """Search finished files; return only if all of them could be read and hold no secret.

    Otherwise every file in which something was found, or that could not be read, is removed,
    and OpError names the file and the variables, never a value.
    """
    scanner = Scanner(secrets)
    problems = []
    for path in map(Path, paths):
        try:
            names = scanner.names_in(path)
        except OSError as error:
            problems.append(f"{path.name} could not be searched ({error.strerror or error})")
        else:
            if not names:
                continue
            problems.append(f"{path.name} holds the value of {', '.join(names)}")
        _remove(path, problems)
    if problems:
        raise OpError(
            "; ".join(problems),
            "the files were removed: run it again without these variables in the environment,"
            " and without printing them",
        )


def _remove(path: Path, problems: list[str]) -> None:
    """Remove the file; a failure to do so is one more problem to tell."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        problems.append(f"{path.name} COULD NOT BE REMOVED ({error.strerror})")
