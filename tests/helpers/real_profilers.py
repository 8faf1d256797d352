"""NVIDIA's own profilers, unpacked from Debian's packages into the user's cache folder.

Their licence does not let them into a repository, and Debian keeps them in its non-free part,
which most machines do not list.  So the machine's own Debian sources are copied with that part
added, in a private folder: nothing of the system changes.

    python tests/helpers/real_profilers.py

builds it and prints the folder, or the reason why it cannot be had; tests that need it skip.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("nsight-systems", "nsight-systems-target", "nsight-compute", "nsight-compute-target",
            "libssh-4")  # fmt: skip
NCU_REPORT = "ncu-report==2026.3.1"
SECONDS = 600


class Unavailable(Exception):
    """It cannot be had here; the text says why."""


def cache() -> Path:
    """The folder that holds them."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "ikit" / "profilers" / f"nsight-{codename()}"


def programs() -> Path | None:
    """The folder with ``nsys`` and ``ncu``, or None where they were not unpacked."""
    folder = cache() / "usr" / "bin"
    return folder if (cache() / "complete").exists() else None


def ncu_report() -> Path | None:
    """The folder to put on PYTHONPATH for NVIDIA's reader of reports, or None."""
    folder = cache() / "python"
    return (
        folder if (folder / "ncu_report").is_dir() or (folder / "ncu_report.py").exists() else None
    )


def shipped_reports() -> list[Path]:
    """The real reports that the package of Nsight Compute ships as examples."""
    return sorted((cache() / "usr" / "share" / "doc").rglob("*.ncu-rep"))


def codename() -> str:
    """The release of Debian, or ``none``."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return "none"
    found = re.search(r"^VERSION_CODENAME=(\w+)$", text, re.MULTILINE)
    return found[1] if found and re.search(r"^ID=debian$", text, re.MULTILINE) else "none"


def build() -> Path:
    """Download and unpack; the folder of the programs.  Unavailable says why it failed."""
    if (there := programs()) is not None:
        return there
    if codename() == "none" or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Unavailable("this is no Debian")
    cache().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache().parent) as work:
        made = Path(work) / "root"
        _unpack(Path(work), made)
        _repair(made)
        shutil.rmtree(cache(), ignore_errors=True)
        made.rename(cache())
    _links(cache())
    (cache() / "complete").touch()
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
          str(cache() / "python"), NCU_REPORT], cache(), needed=False)  # fmt: skip
    return cache() / "usr" / "bin"


def _unpack(work: Path, made: Path) -> None:
    """Fetch the packages with a private list of sources."""
    parts = work / "parts"
    for folder in (parts, work / "lists" / "partial", work / "debs", made):
        folder.mkdir(parents=True)
    (parts / "debian.sources").write_text(_sources(), encoding="utf-8")
    options = []
    for setting in (
        "Dir::Etc::SourceList=/dev/null",
        f"Dir::Etc::SourceParts={parts}",
        f"Dir::State::Lists={work / 'lists'}",
        "APT::Sandbox::User=",
    ):
        options += ["-o", setting]
    _run(["apt-get", *options, "update"], work)
    _run(["apt-get", *options, "download", *PACKAGES], work / "debs")
    for package in sorted((work / "debs").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(made)], work)


def _sources() -> str:
    """The machine's Debian sources with the non-free part, in the newer of the two formats."""
    found = []
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace")):
            lines = [line for line in stanza.splitlines() if not line.startswith("#")]
            text = "\n".join(lines)
            if re.search(rf"^Suites:.*\b{codename()}\b", text, re.MULTILINE):
                found.append(re.sub(r"(?m)^(Components:.*)$", r"\1 non-free", text))
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*.list")]:
        if not path.exists():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = re.sub(r"\[[^]]*\]", "", line).split()
            if words[:1] == ["deb"] and len(words) > 3 and words[2].startswith(codename()):
                found.append(
                    f"Types: deb\nURIs: {words[1]}\nSuites: {words[2]}\n"
                    f"Components: {' '.join(words[3:])} non-free"
                )
    if not found:
        raise Unavailable("no Debian source is configured here")
    return "\n\n".join(found) + "\n"


def _repair(made: Path) -> None:
    """Put the library that the packages depend on where the programs look."""
    for library in list((made / "usr" / "lib").glob("*-linux-gnu/libssh.so.4*")):
        for folder in made.rglob("host-linux-x64"):
            shutil.copy(library, folder, follow_symlinks=True)


def _links(made: Path) -> None:
    """The parts look for each other side by side, which the packages do by absolute links."""
    host = made / "usr" / "lib" / "nsight-systems" / "host-linux-x64"
    found = made.rglob("nsight-systems/target-linux-x64")
    [target] = [folder for folder in found if not folder.is_symlink()]
    for name, real in (("host-linux-x64", host), ("target-linux-x64", target)):
        for folder in (host.parent, target.parent):
            link = folder / name
            if link.is_symlink() or not link.exists():
                link.unlink(missing_ok=True)
                link.symlink_to(real)
    compute = made / "usr" / "lib" / "nsight-compute"
    for link in compute.rglob("*"):
        if link.is_symlink() and not link.exists():
            points = made / str(link.readlink()).lstrip("/")
            if points.exists():
                link.unlink()
                link.symlink_to(points)


def _run(argv: list[str], folder: Path, *, needed: bool = True) -> None:
    done = subprocess.run(argv, cwd=folder, capture_output=True, timeout=SECONDS, check=False)
    if needed and done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Unavailable(f"{argv[0]}: {said[-1] if said else done.returncode}")


if __name__ == "__main__":
    try:
        print(build())
    except (Unavailable, OSError, subprocess.SubprocessError) as reason:
        print(f"skipped: NVIDIA's profilers cannot be had here: {reason}")
