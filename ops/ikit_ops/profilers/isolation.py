"""A process room of its own for a profiler that reads what other processes hold.

Nsight Systems notes down every process of the machine that it may look at, and with it that
process's *environment*: measured with 2022.4, whatever is traced, also when it was itself
started with an empty one.  A report thus holds the tokens of the server that asked for it, of
the user's shells, and of anybody's that are of the same user.

In a PID namespace there is nobody to look at.  The profiler and its target see only themselves,
as in a container.  Two things that it keeps by process number (shared memory, a session folder)
get a place of their own too, since numbers begin at 1 again there.  Where namespaces are not
allowed, it runs as it is; the search of the finished report then finds what this process
knows, and the record says that it knows no more.
"""

from __future__ import annotations

import os
import shutil
import sys

from ikit_mcp.call import Call
from ikit_mcp.registry import OpError

TRY_SECONDS = 20.0
_MOUNTS = (
    "for place in /dev/shm /tmp/nvidia; do "
    'mkdir -p "$place" && mount -t tmpfs ikit "$place" || exit 125; done; exec "$@"'
)


def namespace(call: Call) -> tuple[str, ...]:
    """The words that start a command in a room of its own; empty where that is not possible."""
    program = shutil.which("unshare")
    if program is None or sys.platform != "linux":
        return ()
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    words = (
        program, *user, "--pid", "--fork", "--mount-proc", "--kill-child",
        "/bin/sh", "-c", _MOUNTS, "sh",
    )  # fmt: skip
    try:
        done = call.run(
            [*words, "/bin/true"], timeout=TRY_SECONDS, grace=1.0, env=call.clean_environment()
        )
    except OpError:
        return ()
    return words if done.ok else ()
