"""``ikit clips serve``: a video engine that writes down its steps, for clients and for tests.

It is a command and no tool: it runs until it is ended, and an agent's calls do not.  The server
itself (``clips.engine.server``) runs below the usual supervisor in a Python that has torch and
diffusers; ending this command ends it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from ikit_mcp.call import Call, Cancelled, one_line
from ikit_mcp.registry import READS, Arg, OpError, operation
from ikit_ops.clips import manifest, torchside

SERVER = Path(torchside.__file__).parent / "engine" / "server.py"
FOREVER = float("inf")
LOG_CAP = 1 << 30


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
    folder, target = Path(model).expanduser().absolute(), Path(dumps).expanduser().absolute()
    if not (folder / "model_index.json").is_file():
        raise OpError(f"model {one_line(model)} has no model_index.json", "give a diffusers model")
    if not target.is_dir():
        raise OpError(f"dumps {one_line(dumps)} is no directory", "make it, and give its path")
    followed = manifest.Recipe() if recipe is None else manifest.read_recipe(Path(recipe))
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
        "recipe_sha256": followed.sha256,
        "address": str(address),
    }
    path = call.folder / "server.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config), encoding="utf-8")
    return _run(call, python, path, address, target)


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
    lines = [one_line(line) for line in ended.stdout.splitlines() if line.strip()]
    if ended.returncode:
        raise OpError(
            f"the clip server ended with {ended.returncode}: {' / '.join(lines[-3:])}",
            "see the last lines",
        )
    return {"summary": "the clip server ended", "returncode": ended.returncode}


def _tell(call: Call, address: Path, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        try:
            url = address.read_text(encoding="utf-8")
        except OSError:
            continue
        with contextlib.suppress(Cancelled):
            call.progress(0, None, f"clips at {url} (loading; see {url}/health)")
        return
