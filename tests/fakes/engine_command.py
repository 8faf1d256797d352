"""An engine as ``engine=cmd`` sees it: good, sloppy, or hostile, by its first argument."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def rounds(config: dict[str, object]) -> list[dict[str, object]]:
    """Plausible rounds."""
    return [
        {"index": n, "ttft_ms": 20.0, "total_ms": 20.0 + 1270.0 + n, "decode_ms": 1270.0 + n,
         "gen_tokens": config["gen_len"], "prompt_tokens": config["prompt_len"],
         "cached_tokens": 0, "finish_reason": "length", "speculative_tokens": 0}
        for n in range(int(str(config["rounds"])))
    ]  # fmt: skip


def result(config: dict[str, object], **more: object) -> dict[str, object]:
    """A result with them."""
    usual: dict[str, object] = {
        "engine": {"name": "acme", "version": "1.0"}, "rounds": rounds(config), "tokens": [5, 6, 7],
        "flags": {"kernels": "own"}, "load_s": 1.5,
    }  # fmt: skip
    return usual | more


def spawn_sleeper() -> None:
    """Leave a child behind that hides in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def main() -> None:
    """Do what the word says."""
    word = sys.argv[1]
    config = json.loads(Path(os.environ["IKIT_CONFIG"]).read_text(encoding="utf-8"))
    target = Path(os.environ["IKIT_RESULT_PATH"])
    good = result(config)
    marked = "IKIT_RESULT " + json.dumps(good)
    if word == "file":
        target.write_text(json.dumps(good), encoding="utf-8")
    elif word == "marker":
        print("loading\n" + marked)
    elif word == "twice":
        print("IKIT_RESULT " + json.dumps(result(config, load_s=99.0)))
        print("some log")
        print(marked)
    elif word == "broken-marker":
        print(marked + "\nIKIT_RESULT {not json")
    elif word == "polluted":
        sys.stderr.buffer.write(b"\xff\xfe\x1b[31m IKIT_RESULT {}\n" * 1000)
        print("progress 1%\rprogress 2%\r" + marked + "\n" + "x" * 100_000)
    elif word == "fifo":
        os.mkfifo(target)
    elif word == "link":
        target.symlink_to("/dev/zero")
    elif word == "rounds":  # the second word changes every round, the third how many there are
        rows = [row | json.loads(sys.argv[2]) for row in rounds(config)][: int(sys.argv[3])]
        target.write_text(json.dumps(result(config, rounds=rows)), encoding="utf-8")
    elif word == "no-flags":
        target.write_text(json.dumps(result(config, flags=None)), encoding="utf-8")
    elif word == "secret-flags":
        flags = {"kernels": "own", "api_key": "made-up", "hf_token": "made-up", "tokenizer": "x",
                 "extra": {"password": "made-up"}, "max_num_batched_tokens": 8192}  # fmt: skip
        target.write_text(json.dumps(result(config, flags=flags)), encoding="utf-8")
    elif word == "vllm-eager":
        flags = {"enforce_eager": True, "cudagraph_mode": "NONE"}
        told = result(config, engine={"name": "vllm", "version": "0.33.0"}, platform="cuda",
                      flags=flags, attention_backend="FLASH_ATTN")  # fmt: skip
        target.write_text(json.dumps(told), encoding="utf-8")
    elif word == "flood":
        line = b"y" * 1023 + b"\n"
        for _ in range(100 * 1024):
            sys.stderr.buffer.write(line)
    elif word == "no-result":
        print("all done")
    elif word == "says":
        print(sys.argv[2], file=sys.stderr)
        sys.exit(4)
    elif word == "tells-key":
        print("connecting with " + os.environ.get("ACME_API_KEY", "no key"), file=sys.stderr)
        print("its value is " + sys.argv[2][::-1], file=sys.stderr)
        sys.exit(4)
    elif word in ("SIGKILL", "SIGQUIT", "SIGSEGV"):
        print("about to die", file=sys.stderr, flush=True)
        if word == "SIGSEGV":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), getattr(signal, word))
        time.sleep(60)
    elif word == "hang":
        print("waiting for a lock", file=sys.stderr, flush=True)
        spawn_sleeper()
        Path(sys.argv[2]).write_text("ready", encoding="utf-8")
        time.sleep(600)
    elif word == "result-then-death":
        target.write_text(json.dumps(good), encoding="utf-8")
        spawn_sleeper()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
