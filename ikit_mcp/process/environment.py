"""What of the environment a child gets, and what of it a record may say.

Profilers store the environment that they were started with, the whole of it, in the report
that one then hands on.  So a profiled program, and the profiler, get a short list of variables
that are known to be harmless, plus what the user asks to keep by name.  A benchmark stores
nothing, and engines are configured by many variables: it gets everything but the secrets.

Records say which variables configured an engine, because a number cannot be reproduced
without; they give names only.  Not even a hash of a value is kept: short values are guessed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ikit_mcp.process.secret_rules import name_finding, secret_name
from ikit_mcp.registry import OpError

CLEAN = (
    "PATH",
    "HOME",
    "LANG",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
"""The variables that every profiled program gets, where they are set."""

OFFLINE = {
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""For profiled runs: HOME is passed on, and with it the token file that lies there."""


@dataclass(frozen=True)
class EngineVariables:
    """Names of engine-configuration variables: set here, given to the child, not given to it."""

    present: tuple[str, ...]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]


def clean_environment(
    keep: Iterable[str] = (),
    *,
    private_home: str | os.PathLike[str] | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """A new environment of the CLEAN variables and those named in ``keep``.

    ``private_home`` takes the place of HOME, so that no dot file of the user is read;
    ``source`` None is this process's environment.  A name to keep that is not set is left out.
    OpError names the variable and the rule when one to keep looks like a secret.
    """
    here = os.environ if source is None else source
    environment = {name: here[name] for name in CLEAN if name in here}
    for name in keep:
        if not name or "=" in name or "\0" in name:
            raise OpError("a name to keep is not a variable's name", "give names, not NAME=value")
        rule = secret_name(name, here.get(name))
        if rule is not None:
            raise OpError(
                f"the variable {name} may not be kept ({rule}): profilers store the environment",
                "leave it out of keep_env",
            )
        if name in here:
            environment[name] = here[name]
    for name in CLEAN:
        rule = secret_name("", environment.get(name))
        if rule is not None:
            raise OpError(f"the variable {name} holds a secret ({rule})", f"clean {name} first")
    if private_home is not None:
        environment["HOME"] = os.fspath(private_home)
    return environment


def benchmark_environment(
    source: Mapping[str, str] | None = None, allow: Iterable[str] = ()
) -> dict[str, str]:
    """The environment less secret-named and secret-valued variables.

    ``allow`` names those that the engine needs all the same (a token to load a gated model).
    """
    here = os.environ if source is None else source
    allowed = frozenset(allow)
    return {
        name: value
        for name, value in here.items()
        if name in allowed or name_finding(name, value) is None
    }


def engine_variable_names(
    prefixes: Iterable[str],
    names: Iterable[str],
    source: Mapping[str, str] | None = None,
    *,
    given: Mapping[str, str] | None = None,
) -> EngineVariables:
    """Which engine-configuration variables are set, and which of them a child was given.

    A variable is one if it is among ``names`` or begins with one of ``prefixes``; ``given`` is
    the child's environment (None: a benchmark's).  Sorted names, never values.
    """
    here = os.environ if source is None else source
    child = benchmark_environment(here) if given is None else given
    heads, exact = tuple(prefixes), frozenset(names)
    present = sorted(name for name in here if name in exact or name.startswith(heads))
    return EngineVariables(
        present=tuple(present),
        kept=tuple(name for name in present if name in child),
        dropped=tuple(name for name in present if name not in child),
    )
