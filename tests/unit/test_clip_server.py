"""The command that serves clips: what it refuses at once, and how its end is told."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from ikit_mcp.call import Settings
from ikit_mcp.evidence.canonical import canonical_bytes
from ikit_mcp.registry import OpError, load
from ikit_mcp.runner import Control, Runner
from ikit_ops import clip_server
from ikit_ops.clips import torchside

SERVER = """
import json, os, pathlib
config = json.loads(pathlib.Path(os.environ["IKIT_CONFIG"]).read_text())
pathlib.Path({kept!r}).write_text(json.dumps(config))
{body}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torchside, "find_python", lambda call, needed: sys.executable)
    monkeypatch.setattr(clip_server, "SERVER", tmp_path / "server.py")
    return tmp_path


def serve(folder: Path, body: str = "", model: Path | None = None, **given: Any) -> dict[str, Any]:
    """What the server was told, when it has ended."""
    kept = folder / "config.json"
    (folder / "server.py").write_text(SERVER.format(kept=str(kept), body=body), encoding="utf-8")
    model = model or folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "model_index.json").write_text("{}", encoding="utf-8")
    if "recipe" in given:
        (folder / "recipe.json").write_text(json.dumps(given["recipe"]), encoding="utf-8")
        given["recipe"] = str(folder / "recipe.json")
    runner = Runner(load(None), Settings(folder / "home"))
    request = runner.check("serve_clips", {"model": str(model), "dumps": str(folder), **given})
    reply = runner.here(request, Control()).reply
    assert reply is not None and reply["returncode"] == 0
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def test_the_server_gets_the_recipe_and_what_its_hash_is_made_of(folder: Path) -> None:
    recipe = {"negative_prompt": "ü", "call": {"stg_scale": 1.0}, "sigmas": [1.0, 0.5]}
    told = serve(folder, recipe=recipe)
    assert told["recipe"] == recipe
    members = told["recipe_members"]
    text = ",".join(f'"{name}":{members[name]}' for name in sorted(members))
    digest = hashlib.sha256(("{" + text + "}").encode()).hexdigest()
    assert digest == hashlib.sha256(canonical_bytes(recipe)).hexdigest()
    alone = serve(folder)
    assert (alone["recipe"], alone["recipe_members"]) == ({}, None)


@pytest.mark.parametrize(
    ("recipe", "word"),
    [({"sampler": "unipc"}, "sampler"), ({"sigmas": [0.5, 0.7]}, "sigmas"),
     ({"max_sequence_length": 0}, "max_sequence_length")],
)  # fmt: skip
def test_a_recipe_that_would_not_be_followed_is_not_served(
    folder: Path, recipe: dict[str, Any], word: str
) -> None:
    with pytest.raises(OpError, match=word):
        serve(folder, recipe=recipe)
    assert not (folder / "config.json").exists()


def test_a_recipe_of_another_model_is_not_served_where_the_folder_tells(folder: Path) -> None:
    commit = "ab" * 20
    model = folder / "models--org--small" / "snapshots" / commit
    right = {"model": "org/small", "revision": commit}
    assert serve(folder, model=model, recipe=right)["recipe"] == right
    named = {"model": "org/small", "revision": "main"}  # which commit that is, is not told here
    assert serve(folder, model=model, recipe=named)["recipe"] == named
    for wrong in ({"model": "org/large"}, {"revision": "cd" * 20}):
        with pytest.raises(OpError, match=next(iter(wrong))):
            serve(folder, model=model, recipe=wrong)
        assert serve(folder, recipe=wrong)["recipe"] == wrong  # a folder that tells nothing


def test_a_port_that_is_taken_is_told_at_once(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OpError, match=f"port {port} cannot be served: Address already in use"):
            serve(folder, port=port)
    assert not (folder / "config.json").exists()
    assert serve(folder, port=port)["port"] == port


def test_a_server_that_dies_is_told_by_its_reason_and_no_traceback(folder: Path) -> None:
    body = "def inner():\n    raise RuntimeError('no such kernel')\ninner()"
    with pytest.raises(OpError) as caught:
        serve(folder, body)
    assert str(caught.value).splitlines()[0].endswith("with 1: RuntimeError: no such kernel")
    with pytest.raises(OpError, match="ended with 3: it said nothing"):
        serve(folder, "raise SystemExit(3)")


def test_a_server_that_is_killed_is_told_by_the_signal(folder: Path) -> None:
    with pytest.raises(OpError, match="ended by signal 9") as caught:
        serve(folder, "os.kill(os.getpid(), 9)")
    assert "memory" in caught.value.next_step


@pytest.mark.parametrize(("name", "word"), [("model", "model_index"), ("dumps", "no directory")])
def test_a_folder_that_is_none_is_refused(folder: Path, name: str, word: str) -> None:
    serve(folder)
    runner = Runner(load(None), Settings(folder / "home"))
    given = {"model": str(folder / "model"), "dumps": str(folder), name: str(folder / "nowhere")}
    with pytest.raises(OpError, match=word):
        runner.here(runner.check("serve_clips", given), Control())
