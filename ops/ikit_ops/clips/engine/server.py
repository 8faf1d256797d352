"""The clip server: an engine whose every clip has its steps on disk before it is answered.

A full queue answers 429, a dump that cannot be written 5xx: a clip without a dump never leaves.
``web`` is its HTTP side, ``service`` the queue, ``clipmaker`` makes the clips.

It is run by path in a Python with torch and diffusers, reads its configuration from the file
named by IKIT_CONFIG, and writes its address to the file named there when it listens.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _make_importable() -> None:
    """Load the package this file is in from its folder, without touching sys.path."""
    root = Path(__file__).resolve().parents[2]
    if "ikit_ops" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "ikit_ops", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"no package at {root}")
        module = importlib.util.module_from_spec(spec)
        sys.modules["ikit_ops"] = module
        spec.loader.exec_module(module)


def serve(config: Mapping[str, Any]) -> Any:
    """A listening server and its engine, which loads in the background; OSError: no port."""
    from ikit_ops.clips.engine import recipes, service, web

    served = recipes.Served(config.get("recipe") or {}, config.get("recipe_members"))

    def load() -> Any:
        import torch  # seconds: it listens before

        from ikit_ops.clips.engine import clipmaker

        torch.set_num_threads(max(1, int(config.get("threads") or 1)))
        return clipmaker.ClipMaker(config, served)

    return web.Server(
        ("127.0.0.1", int(config.get("port", 0))),
        lambda: service.Engine(config, load),
        int(config.get("queue", 8)),
        Path(config["model"]),
    )


def main() -> None:
    """Serve until the process is ended; SIGINT and SIGTERM leave nothing unfinished behind."""
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).resolve().parent)]
    _make_importable()
    logging.basicConfig(level=logging.WARNING)
    config = json.loads(Path(os.environ["IKIT_CONFIG"]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = serve(config)
    except OSError as error:
        raise SystemExit(f"port {config.get('port')} cannot be served: {error.strerror}") from None
    address = Path(config["address"])
    partial = address.with_suffix(".partial")
    partial.write_text(f"http://127.0.0.1:{server.server_address[1]}", encoding="utf-8")
    partial.replace(address)
    threading.Thread(target=_end_when_failed, args=(server,), daemon=True).start()
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        for again in (signal.SIGINT, signal.SIGTERM):  # asked twice, it still tidies up
            signal.signal(again, signal.SIG_IGN)
        server.server_close()
        server.engine.stop()
        return
    raise SystemExit(f"the model cannot be loaded: {server.engine.problem}")


def _end_when_failed(server: Any) -> None:
    """A server without a model is of no use to anybody who waits for it."""
    server.engine.failed.wait()
    server.shutdown()


if __name__ == "__main__":
    main()
