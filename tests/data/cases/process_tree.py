"""A leader whose children leave its reach in one of the known ways; all of them sleep.

plain: a child in the leader's group; daemon: a double fork into a session of its own; clear:
the same with an empty environment; close: the same with closed standard streams; all: these
together; exit: a daemon and a child, and the leader exits.
"""

import os
import subprocess
import sys
import time

tag, mode = sys.argv[1], sys.argv[2]
SLEEPER = [sys.executable, "-S", "-c", f"import time; time.sleep(60) #{tag}"]


def daemon(clear: bool = False, close: bool = False) -> None:
    """Fork twice, with a new session between: the orphan sleeps."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    if close:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
    environment = {"PATH": "/usr/bin:/bin"} if clear else dict(os.environ)
    os.execve(sys.executable, SLEEPER, environment)


if mode in ("plain", "all", "exit"):
    subprocess.Popen(SLEEPER)
if mode in ("daemon", "all", "exit"):
    daemon()
if mode in ("clear", "all"):
    daemon(clear=True)
if mode in ("close", "all"):
    daemon(close=True)
print("ready", flush=True)
if mode != "exit":
    time.sleep(60)
