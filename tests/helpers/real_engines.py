"""What the tests of the real engines share: their Python, or the reason to skip."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import engine_pythons
from ikit_mcp.call import Call, Settings
from ikit_mcp.registry import EXECUTES, load
from ikit_ops.engines.adapter import WORKERS, Found
from ikit_ops.engines.gates import Seen
from ikit_ops.engines.planning import make_plan
from ikit_ops.engines.result import parse


def engine_python(name: str, *, always: bool = False) -> str:
    """The interpreter that has the engine; skips where it was not built, or not asked for.

    Engines that take minutes run when ``IKIT_TEST_ENGINES`` names them (``make
    engines-NAME`` does); ``always`` is for those that run whenever they are there.
    """
    asked = os.environ.get("IKIT_TEST_ENGINES", "").split(",")
    if not always and name not in asked:
        pytest.skip(f"minutes long: make engines-{name} runs it")
    python = engine_pythons.python_of(name)
    if python is None:
        pytest.skip(f"no Python with {name} here: make engines-{name} builds it")
    return str(python)


def work(folder: Path, engine: str, arguments: dict[str, Any], **config: Any) -> Seen:
    """Run an engine's worker itself, with a configuration that no operation would write."""
    operation = load(None).get("bench")
    args = {arg.name: arg.default for arg in operation.args} | arguments | {"engine": engine}
    call = Call(operation=operation, args={}, settings=Settings(folder), scope=EXECUTES)
    adapter, plan = make_plan(call, args)
    found = Found(python=arguments.get("python"))
    made = adapter.config(plan, found) | {"result_path": str(folder / "result.json")} | config
    (folder / "config.json").write_text(json.dumps(made), encoding="utf-8")
    argv = adapter.command(plan, found, folder / "config.json")
    assert str(WORKERS / adapter.worker) in argv
    environment = {**os.environ, **adapter.environment(plan)}
    subprocess.run(argv, check=True, capture_output=True, timeout=300, env=environment)
    result = parse((folder / "result.json").read_bytes())
    return Seen(plan=plan, result=result, platform="cpu", requested={}, usable_threads=8)


def nothing_left(*words: str) -> bool:
    """Whether no process whose command line or name holds one of the words is below us."""
    for child in psutil.Process().children(recursive=True):
        try:
            text = child.name() + " " + " ".join(child.cmdline())
        except psutil.Error:
            continue
        if any(word in text for word in words):
            return False
    return True
