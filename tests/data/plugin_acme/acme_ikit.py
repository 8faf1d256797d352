"""Operations of a third party: what a plug-in can do, and what one may do wrong."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from ikit_mcp.evidence.record import Draft, metric
from ikit_mcp.registry import DERIVES, EXECUTES, MEASURES, READS, Arg, OpError, operation

print("acme_ikit prints at import")


@operation("acme_echo", ("acme", "echo"), "Give back the text, as the smallest of operations.",
           [Arg("text", "string", "What to give back", required=True, positional=True)], effects=READS)
def acme_echo(call, text):
    """The text."""
    print("an operation prints")
    subprocess.run([sys.executable, "-c", "print('a child prints')"], check=True)
    return {"text": text}


@operation("acme_block", ("acme", "block"), "Block the thread until a file is there, bounded.",
           [Arg("path", "string", "The file", required=True)], effects=READS)
def acme_block(call, path):
    """Whether the file came."""
    for _ in range(600):
        if Path(path).exists():
            return {"came": True}
        time.sleep(0.05)
    return {"came": False}


@operation("acme_bug", ("acme", "bug"), "Fail as no operation should, with a secret in the text.",
           [], effects=READS)
def acme_bug(call):
    """Never."""
    raise RuntimeError("unexpected: " + os.environ.get("ACME_API_KEY", "no key"))


@operation("acme_exit", ("acme", "exit"), "Try to end the process that runs the operation.",
           [], effects=READS)
def acme_exit(call):
    """Never."""
    sys.exit(7)


@operation("acme_tell", ("acme", "tell"), "Tell its progress, with a secret in it.",
           [], effects=MEASURES, long=True)
def acme_tell(call):
    """A record."""
    for step in range(10):
        call.progress(step, 10, "connecting with " + os.environ["ACME_API_KEY"])
        time.sleep(0.05)
    return call.save(Draft(kind="acme", claim_class="measured", valid=True, summary="told"))


@operation("acme_long", ("acme", "long"), "Save a record after some steps, in a worker.",
           [Arg("steps", "integer", "How many steps", default=3, minimum=0, maximum=100_000),
            Arg("device", "string", "What to be alone on", default="cpu"),
            Arg("child", "boolean", "Start a program that stays", default=False),
            Arg("size", "integer", "Characters of data", default=0, minimum=0)],
           effects=MEASURES, long=True)
def acme_long(call, steps, device, child, size):
    """A record with start and end."""
    begun = time.time()
    if child:
        call.run([sys.executable, "-c", "import time; time.sleep(300)"], timeout=300, grace=1.0)
    pause = threading.Event()
    for step in range(steps):
        call.progress(step, steps, f"step {step}")
        pause.wait(0.05)
    return call.save(
        Draft(kind="acme", claim_class="measured", valid=True, summary=f"{steps} steps",
              metrics=[metric("steps", steps, "steps", "count")],
              data={"start": begun, "end": time.time(), "text": "x" * size}),
        reply=["start", "end"],
    )


@operation("acme_fail", ("acme", "fail"), "Fail in the ways that an operation may, in a worker.",
           [Arg("how", "string", "How", required=True,
                choices=("error", "bug", "kill", "memory", "exit", "secret_error"))],
           effects=DERIVES, long=True)
def acme_fail(call, how):
    """Never."""
    if how == "error":
        raise OpError("it went wrong", "do it right")
    if how == "secret_error":
        raise OpError("bad key " + os.environ["ACME_API_KEY"], "use " + os.environ["ACME_API_KEY"])
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "memory":
        keep = [bytearray(1 << 30) for _ in range(64)]
        raise RuntimeError(len(keep))
    if how == "exit":
        os._exit(7)
    raise RuntimeError("a bug with " + os.environ.get("ACME_API_KEY", "no key"))


@operation("acme_leak", ("acme", "leak"), "Save a record that holds a secret in many places.",
           [Arg("where", "string", "Where", required=True,
                choices=("summary", "data", "key", "artifact_text", "artifact_file", "log"))],
           effects=EXECUTES, long=True)
def acme_leak(call, where):
    """A record without the secret, or an error."""
    secret = os.environ["ACME_API_KEY"]
    data, artifacts, summary = {}, {}, "leak"
    if where == "summary":
        summary = f"the key is {secret}"
    elif where == "data":
        data = {"log": ["fine", f"Authorization: Bearer {secret}"]}
    elif where == "key":
        data = {f"with {secret} as a key": 1}
    elif where == "artifact_text":
        artifacts["log.txt"] = (f"key={secret}\n".encode(), "text/plain")
    elif where == "artifact_file":
        path = call.folder / "report.bin"
        path.write_bytes(b"\0" * 1000 + secret.encode() + b"\0" * 1000)
        artifacts["report.bin"] = (path, "application/octet-stream")
    else:
        done = call.run([sys.executable, "-c", "import os; print(os.environ['K'])"], timeout=30,
                        env={**call.clean_environment(), "K": secret})
        data = {"log": done.stdout}
    return call.save(Draft(kind="acme", claim_class="checked", valid=None, summary=summary, data=data),
                     artifacts=artifacts, reply=list(data))


NOISE = {
    "gigabyte": "import sys\nb = b'x' * (1 << 20)\nfor _ in range(1024): sys.stdout.buffer.write(b)",
    "rubbish": "import os\nfor _ in range(2000): os.write(1, bytes(range(256)) * 16)",
    "silent": "import time; time.sleep(3)",
    "stubborn": "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
                "print('ready', flush=True)\ntime.sleep(300)",
    "forks": "import os, time\nfor _ in range(300):\n    if os.fork() == 0:\n        time.sleep(0.2)\n        os._exit(0)\n"
             "time.sleep(300)",
}


@operation("acme_noise", ("acme", "noise"), "Run a program that misbehaves, in a worker.",
           [Arg("how", "string", "How", required=True, choices=tuple(NOISE)),
            Arg("timeout", "number", "Seconds until it is ended", default=20)],
           effects=DERIVES, long=True)
def acme_noise(call, how, timeout):
    """A record with what came of the run."""
    call.progress(0, 1, "running")
    done = call.run([sys.executable, "-c", NOISE[how]], timeout=timeout, grace=0.5)
    data = {"bytes": done.stdout_bytes, "kept": len(done.stdout), "timed_out": done.timed_out,
            "leftovers": len(done.leftovers), "survivors": len(done.survivors)}
    return call.save(Draft(kind="acme", claim_class="checked", valid=True, summary=how, data=data),
                     reply=list(data))


@operation("acme_tree", ("acme", "tree"), "Run the program of the process-tree cases, in a worker.",
           [Arg("script", "string", "The program", required=True),
            Arg("tag", "string", "A word in every process's command line", required=True),
            Arg("mode", "string", "Which tree", default="all"),
            Arg("timeout", "number", "Seconds until it is ended", default=100)],
           effects=DERIVES, long=True)
def acme_tree(call, script, tag, mode, timeout):
    """A record with what was left and ended."""
    call.progress(0, 1, "running")
    done = call.run([sys.executable, script, tag, mode], timeout=timeout, grace=0.5)
    data = {"timed_out": done.timed_out, "leftovers": len(done.leftovers),
            "survivors": len(done.survivors), "returncode": done.returncode}
    return call.save(Draft(kind="acme", claim_class="checked", valid=True, summary=mode, data=data),
                     reply=list(data))
