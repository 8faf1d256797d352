"""``ikit clips serve``: a video engine that writes down its steps, for clients and for tests.

It is a command and no tool: it runs until it is ended, and an agent's calls do not.  The server
itself (``clips.engine.server``) runs below the usual supervisor in a Python that has torch and
diffusers; ending this command ends it.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Cancelled, expanded, one_line
from ikit_mcp.evidence.canonical import canonical_bytes
from ikit_mcp.registry import READS, Arg, OpError, operation
from ikit_ops.clips import manifest, torchside
from ikit_ops.clips.engine import recipes

SERVER = Path(torchside.__file__).parent / "engine" / "server.py"
FOREVER = float("inf")
LOG_CAP = 1 << 30
_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@operation(
    "serve_clips",
    ("clips", "serve"),
    "Serve clips of a diffusers model over HTTP, with a dump of every step.",
    [
        Arg("model", "string", "Model directory (diffusers)", required=True),
        Arg("dumps", "string", "Directory for the step dumps", required=True),
        Arg("recipe", "string", "JSON file: how the model is run"),
        Arg("dtype", "string", "Compute dtype", default="bf16", choices=("bf16", "fp16", "fp32")),
        Arg("device", "string", "auto, cpu, cuda:0 or a uuid", default="auto"),
        Arg("port", "integer", "Port (0: any)", default=0, minimum=0, maximum=65535),
        Arg("queue", "integer", "Requests that may wait", default=8, minimum=1, maximum=1000),
        Arg("threads", "integer", "CPU threads (default: one per core)", minimum=1, maximum=1024),
    ],
    effects=READS,
    tool=False,
)  # fmt: skip
def serve_clips(
    call: Call,
    model: str,
    dumps: str,
    recipe: str | None,
    dtype: str,
    device: str,
    port: int,
    queue: int,
    threads: int | None,
) -> dict[str, Any]:
    """How the server ended: ``{url, returncode}``; its address is told as progress.

    Raises:
        OpError: no such model or directory, no Python with torch, or a server that died.
    """
    folder, target = expanded(model), expanded(dumps)
    if not (folder / "model_index.json").is_file():
        raise OpError(f"model {one_line(model)} has no model_index.json", "give a diffusers model")
    if not target.is_dir():
        raise OpError(f"dumps {one_line(dumps)} is no directory", "make it, and give its path")
    followed = _recipe(recipe, folder)
    _port_is_free(port)
    python = torchside.find_python(call, ("torch", "diffusers", "transformers", "av"))
    if python is None:
        raise OpError(
            "no Python with torch, diffusers, transformers and av is here",
            "install ikit-mcp[clips], or name a Python that has them in IKIT_PYTHONS",
        )
    chosen = torchside.choose(call.devices(), device)
    cpu = call.cpu()
    address = call.folder / "address"
    config = {
        "model": str(folder),
        "dumps": str(target),
        "dtype": dtype,
        "device": chosen.id.replace("rocm", "cuda"),
        "port": port,
        "queue": queue,
        "threads": threads or cpu.usable_threads or cpu.threads,
        "recipe": followed.fields,
        "recipe_members": _members(followed),
        "address": str(address),
    }
    path = call.folder / "server.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config), encoding="utf-8")
    return _run(call, python, path, address, target)


def _recipe(path: str | None, model: Path) -> manifest.Recipe:
    """The recipe of a file; OpError when a flow-match Euler engine of the model cannot follow it.

    Which model a folder holds is told by its place in the Hub's cache alone; elsewhere the
    recipe's word is taken.
    """
    if path is None:
        return manifest.Recipe()
    followed = manifest.read_recipe(Path(path))
    try:
        recipes.check(followed.fields)
        if found := _SNAPSHOT.search(model.as_posix()):
            for name, there in (("model", found[1].replace("--", "/", 1)), ("revision", found[2])):
                named = followed.fields.get(name)
                exact = name == "model" or (named and _COMMIT.fullmatch(named))
                if named and exact and named != there:
                    raise recipes.RecipeError(f"the recipe's {name} is {named}, here is {there}")
    except recipes.RecipeError as error:
        raise OpError(
            one_line(str(error)), "serve another recipe: a dump may not name what was not followed"
        ) from None
    return followed


def _members(recipe: manifest.Recipe) -> dict[str, str] | None:
    """The canonical JSON of each field: what the recipe's hash is made of.  None: no recipe."""
    if recipe.sha256 is None:
        return None
    return {name: canonical_bytes(value).decode() for name, value in recipe.fields.items()}


def _port_is_free(port: int) -> None:
    """OpError when somebody listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server will
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise OpError(
                f"port {port} cannot be served: {error.strerror}", "choose another, or 0 for any"
            ) from None


def _run(call: Call, python: str, config: Path, address: Path, dumps: Path) -> dict[str, Any]:
    """Run the server to its end, and tell its address when it listens."""
    environment = call.benchmark_environment()
    environment |= {
        "IKIT_CONFIG": str(config), "HF_HUB_OFFLINE": "1", "CLIP_STEP_DUMP_DIR": str(dumps),
    }  # fmt: skip
    log = call.folder / "server.log"
    stop = threading.Event()
    teller = threading.Thread(target=_tell, args=(call, address, stop), daemon=True)
    teller.start()
    try:
        ended = call.run(
            [python, "-I", str(SERVER)],
            timeout=FOREVER,
            grace=5.0,
            env=environment,
            stdout_path=log,
            stderr_path=log,
            byte_cap=LOG_CAP,
        )
    finally:
        stop.set()
        teller.join()
    if ended.returncode and ended.returncode < 0:
        raise OpError(f"the clip server was ended by signal {-ended.returncode}",
                      "see whether the machine ran out of memory, and start it again")  # fmt: skip
    if ended.returncode:
        raise OpError(f"the clip server ended with {ended.returncode}: {_last_words(ended.stdout)}",
                      "mend what it says, and start it again")  # fmt: skip
    return {"summary": "the clip server ended", "returncode": ended.returncode}


def _last_words(log: str) -> str:
    """The last line of a log that is no part of a traceback: there the reason is."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(" ")]
    return one_line(lines[-1]) if lines else "it said nothing"


def _tell(call: Call, address: Path, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        try:
            url = address.read_text(encoding="utf-8")
        except OSError:
            continue
        with contextlib.suppress(Cancelled):
            call.progress(0, None, f"clips at {url} (loading; see {url}/health)")
        return
