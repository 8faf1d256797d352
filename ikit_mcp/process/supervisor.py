"""The supervisor: one small process per run, which alone can end *all* of that run.

A process can leave its parent's reach in three ways: a new process group or session
(``setsid``), a second fork whose first half exits (the orphan goes to pid 1), a cleared
environment.  Killing a group, or the children that ``/proc`` shows, misses each of them.
Linux has one relation that none of them breaks: a *subreaper* (``PR_SET_CHILD_SUBREAPER``)
inherits every orphan below it.  So each run has its own subreaper, and "everything is gone"
is a fact that the kernel states: ``wait`` says that there is no child left.

Three ways of ending meet here:

* The caller asks, or the time is up: the program is interrupted first (a profiler writes its
  report then), gets a grace, and then the tree is killed.
* The caller dies, by whatever signal: its end of the *lifeline* socket closes, or the parent
  pid changes; the tree is killed at once.
* The supervisor itself is killed: the kernel kills the leader (parent-death signal; it is
  bound to the *thread* that forked, so it is only safe here, in a process with one thread),
  and the caller ends the rest from the list of pids and start times that it was sent.

A tree is killed by freezing it first: a stopped process cannot fork, so a pass over the tree
that finds nothing new has found everything.

The file runs by its path (``python -I -S supervisor.py``), reads a marshalled ``spec`` from
standard input and talks marshalled messages over a SOCK_SEQPACKET socket.  It imports only
what is cheap: ``json``, ``socket`` and ``signal`` (which imports ``enum``) would each cost as
much CPU as the rest of it.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False  # what type checkers know by name; ``typing`` itself is dear to import
if TYPE_CHECKING:
    import signal
    from typing import Any
else:
    import _signal as signal  # the C part alone: ``signal`` makes enums at import, for 5 ms of CPU

if sys.platform != "linux":
    raise ImportError("the supervisor needs Linux: ikit_mcp.process.portable does without")

if __package__ or TYPE_CHECKING:
    from ikit_mcp.process.procfs import (
        PR_SET_CHILD_SUBREAPER,
        PR_SET_PDEATHSIG,
        Stat,
        child_pids,
        descendants,
        has_children_files,
        newest_pid,
        prctl,
        send_signal,
    )
else:  # pragma: no cover - run by its path, isolated: only the standard library is on sys.path
    # It may be the compiled file that runs.  (No pathlib: it is dear to import.)
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - see above
    sys.path.insert(0, here.removesuffix("__pycache__"))
    from procfs import (
        PR_SET_CHILD_SUBREAPER,
        PR_SET_PDEATHSIG,
        Stat,
        child_pids,
        descendants,
        has_children_files,
        newest_pid,
        prctl,
        send_signal,
    )

    del sys.path[0]  # or ``platform`` and ``secrets`` would be ours

TICK = 0.25  # seconds between two looks at the tree, at the caller and at the clock
RESCAN = 8  # ticks after which the tree is walked even if no process seems to be new
LINGER = 0.25  # what a program's helpers get to end by themselves after it ended
KILL_PATIENCE = 5.0  # seconds after SIGKILL until what is left counts as unkillable
REPORT_LIMIT = 2000  # processes told to the caller: what surely fits into one message
FREEZE_PASSES = 64  # looks at a tree that keeps growing before what is known is killed
CAP_RATE = 2e9  # bytes/s that no output file grows faster than: how soon to look at a capped one


def stop_child(pid: int) -> None:
    """Stop a direct child of this process, without a look at who it is."""
    try:
        os.kill(pid, signal.SIGSTOP)
    except OSError:  # of another user now; what cannot be stopped may still be killed
        return


# No coverage tool sees what follows: this process becomes another program.
def become_leader(spec: dict[str, Any], parent: int, errors: int) -> None:  # pragma: no cover
    """In the forked child: set the process up and execute the program; never returns."""
    stage = "set-up"
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above took hold
            os._exit(127)
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                # Caught or ignored above (nohup, a shell's background job): an engine that
                # inherits an ignored SIGINT could never be interrupted.
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        set_limits(spec)
        for source, target in ((spec["stdout"], 1), (spec["stderr"], 2)):
            os.dup2(source, target)
        stage = "cwd"
        if spec["cwd"] is not None:
            os.chdir(spec["cwd"])
        stage = "exec"
        os.execve(spec["path"], spec["argv"], spec["env"])  # noqa: S606 - starting it is the task
    except OSError as error:
        os.write(errors, marshal.dumps((stage, error.errno)))
    finally:
        os._exit(127)


def set_limits(spec: dict[str, Any]) -> None:  # pragma: no cover - in the forked child, too
    """No core files; a soft limit on private memory (RLIMIT_DATA: mapped files do not count)."""
    import resource  # needed once, in the child

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if spec["memory_limit"] is not None:
        limit = spec["memory_limit"]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    elif spec["nested"]:
        # The limit of the run around this one was for its leader's own parsing, not for the
        # engine that it starts.
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


class Supervisor:
    """One run: starts the leader, waits for whatever ends it, ends the tree, reports."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.control: int = spec["control"]
        self.leader = 0
        self.status: int | None = None  # the leader's wait status, once it has ended
        self.started = 0.0
        self.seconds = 0.0
        self.max_rss = 0
        self.begun = False  # exec has succeeded
        self.failure: tuple[str, int] | None = None  # stage and errno when it did not
        self.reason = ""  # why the run is being ended: timeout, cancel, cap, signal, orphan
        self.kill_at: float | None = None  # the end of the grace
        self.killed: dict[tuple[int, int], bytes] = {}
        self.reported: list[tuple[int, int]] = []
        self.seen_pid = 0
        self.ticks = 0
        self.whole_table = not has_children_files()
        self.listening: set[int] = set()  # descriptors in the poller

    # --- start -----------------------------------------------------------------------------

    def start(self) -> None:
        """Take the signals, become the subreaper and fork the leader."""
        self.wake, wake_writer = os.pipe()
        for end in (self.wake, wake_writer, self.control):
            os.set_blocking(end, False)
        for fd in (self.control, self.spec["stdout"], self.spec["stderr"], *self.spec["hold"]):
            os.set_inheritable(fd, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda _number, _frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.errors, errors_writer = os.pipe()
        self.started = time.monotonic()
        supervisor = os.getpid()
        self.leader = os.fork()
        if self.leader == 0:
            become_leader(self.spec, supervisor, errors_writer)
        for fd in (errors_writer, *self.spec["pass"]):  # the leader's: a reader waits for the end
            os.close(fd)
        self.poller = select.poll()
        for fd in (self.control, self.wake, self.errors):
            self.poller.register(fd, select.POLLIN)
            self.listening.add(fd)

    # --- events ----------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Sleep until something happens or ``seconds`` pass; take in what happened."""
        for fd, _ in self.poller.poll(max(0, int(seconds * 1000) + 1)):
            if fd == self.wake:
                for number in os.read(fd, 4096):
                    if number != signal.SIGCHLD:
                        self.end("signal")
            elif fd == self.errors:
                self.learn_start()
            else:
                self.hear()

    def stop_listening(self, fd: int) -> None:
        """Take a descriptor out of the poller, if it is in."""
        if fd in self.listening:
            self.listening.discard(fd)
            self.poller.unregister(fd)

    def learn_start(self) -> None:
        """Read whether exec succeeded: the pipe closes, or says the stage and errno."""
        if self.errors in self.listening:
            self.stop_listening(self.errors)
            data = os.read(self.errors, 256)
            self.begun = not data
            self.failure = marshal.loads(data) if data else None  # noqa: S302 - our own child's
            if self.begun:
                self.tell("begun", self.leader)

    def hear(self) -> None:
        """Take the caller's word: any is a cancel; a closed lifeline kills at once."""
        try:
            command = os.read(self.control, 16)
        except BlockingIOError:
            return
        except OSError:
            command = b""
        if command:
            self.end("cancel")
        else:
            self.stop_listening(self.control)
            self.end("orphan", at_once=True)

    def tell(self, *message: Any) -> bool:
        """Send one message to the caller, if it can take it now."""
        try:
            os.write(self.control, marshal.dumps(message))
        except OSError:  # a caller that is stopped (full) or gone (noticed by ``hear``)
            return False
        return True

    def reap(self) -> bool:
        """Collect what has ended; False when not one child, and so no descendant, is left."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self.max_rss = max(self.max_rss, usage.ru_maxrss * 1024)
            if pid == self.leader and self.status is None:
                self.status = status
                self.seconds = time.monotonic() - self.started
                self.learn_start()

    # --- a running tree --------------------------------------------------------------------

    def run(self) -> None:
        """Watch until the run is over: the leader has ended, or the tree has to be killed."""
        while self.reap() and self.status is None:
            now = time.monotonic()
            if self.kill_at is None and now >= self.started + self.spec["timeout"]:
                self.end("timeout")
            if self.capped():
                self.end("cap")
            if os.getppid() != self.spec["parent"]:  # a fork of the caller may hold its lifeline
                self.end("orphan", at_once=True)
            if self.kill_at is not None and now >= self.kill_at:
                return
            self.report_tree()
            self.wait(self.next_look(now))
        if self.reason and self.spec["gentle"] == "group":
            self.wait_until(self.kill_at or 0, self.group_is_empty)
        elif not self.reason:
            self.wait_until(time.monotonic() + LINGER, lambda: False)

    def next_look(self, now: float) -> float:
        """Seconds until something can be due."""
        due: list[float] = [TICK, self.started + self.spec["timeout"] - now]
        if self.kill_at is not None:
            due = [TICK, self.kill_at - now]
        if self.spec["byte_cap"] is not None:
            due.append(max(0.01, (self.spec["byte_cap"] - self.output_bytes()) / CAP_RATE))
        return max(0.0, min(due))

    def wait_until(self, deadline: float, done: Any) -> None:
        """Wait for the rest of the tree until none is left, ``done()``, or the deadline."""
        while self.reap() and not done() and not self.must_die():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.wait(min(left, TICK))

    def must_die(self) -> bool:
        """Whether no grace is left: the caller is gone, or asked for an end at once."""
        return self.kill_at is not None and self.kill_at <= time.monotonic()

    def group_is_empty(self) -> bool:
        """Whether the leader's process group has nobody left."""
        try:
            os.killpg(self.leader, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)  # others' processes are somebody, too
        return False

    def output_bytes(self) -> int:
        """How much the larger of the two output files holds."""
        return max(os.fstat(self.spec[name]).st_size for name in ("stdout", "stderr"))

    def capped(self) -> bool:
        """Whether an output file has passed its cap."""
        cap = self.spec["byte_cap"]
        return cap is not None and self.output_bytes() > cap

    def report_tree(self) -> None:
        """Tell the caller who is below, when that may have changed.

        Walking the tree of an engine with hundreds of threads four times a second would
        disturb what is measured, so it is walked only if the kernel has given out a pid
        since the last walk (and every RESCAN ticks, in case /proc/loadavg does not say).
        """
        newest = newest_pid()
        self.ticks += 1
        if newest and newest == self.seen_pid and self.ticks % RESCAN:
            return
        tree = [p.identity for p in descendants(os.getpid(), self.whole_table)[:REPORT_LIMIT]]
        if tree == self.reported or self.tell("tree", tree):
            self.reported, self.seen_pid = tree, newest

    # --- the end ---------------------------------------------------------------------------

    def end(self, reason: str, at_once: bool = False) -> None:
        """Begin to end the run: gently, unless it must be ``at_once`` or was asked before."""
        now = time.monotonic()
        if self.status is not None and not self.reason:
            self.kill_at = now  # it has ended by itself: only what it left behind is killed
            return
        if not self.reason:
            self.reason = reason
        elif reason == "signal":
            at_once = True  # who signals twice does not want to wait
        if reason == "cap" or not self.begun or self.spec["gentle"] is None or at_once:
            self.kill_at = now if self.kill_at is None else min(now, self.kill_at)
        elif self.kill_at is None and self.status is None:
            self.kill_at = now + self.spec["grace"]
            self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """SIGINT to the leader's group; a leader that has runs of its own gets SIGTERM alone."""
        try:
            if self.spec["gentle"] == "group":
                os.killpg(self.leader, signal.SIGINT)
                os.killpg(self.leader, signal.SIGCONT)  # a stopped process cannot obey
            else:
                os.kill(self.leader, signal.SIGTERM)
                os.kill(self.leader, signal.SIGCONT)
        except OSError:
            self.kill_at = time.monotonic()  # gone, or of another user: no grace helps

    def kill_tree(self, patience: float) -> list[Stat]:
        """Freeze, kill and reap until nothing is left; what could not be killed in time."""
        deadline = time.monotonic() + patience
        while self.reap():
            frozen = self.freeze()
            for process in frozen:
                send_signal(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                return frozen
            self.wait(0.02)
        return []

    def freeze(self) -> list[Stat]:
        """Stop every descendant; a pass that finds nobody new has found everybody.

        Processes that fork and exit without end are outrun: their orphans are our children,
        whom one read lists, and who need no check before the signal, as a child's pid cannot be
        reused until it is reaped here.
        """
        frozen: dict[tuple[int, int], Stat] = {}
        us = os.getpid()
        new = False

        def stop(process: Stat) -> None:
            nonlocal new
            if process.identity not in frozen:
                new = True
                frozen[process.identity] = process
                send_signal(process, signal.SIGSTOP)
                self.killed.setdefault(process.identity, process.name)

        for _ in range(FREEZE_PASSES):
            new = False
            self.reap()  # or the dead of a fork bomb would fill the list
            for pid in child_pids(us):
                stop_child(pid)
            tree = descendants(us, self.whole_table, stop)
            if not new:
                return tree
        return list(frozen.values())  # somebody keeps waking them: kill these, and look again

    def finish(self) -> None:
        """Kill what is left, let go of the held descriptors, send the result."""
        survivors = self.kill_tree(KILL_PATIENCE)
        if not survivors:
            self.let_go()
        os.set_blocking(self.control, True)
        self.tell("end", self.result(survivors))
        self.stop_listening(self.control)
        while survivors:  # in an uninterruptible call (a driver): stay, and keep the locks
            self.wait(1.0)
            survivors = self.kill_tree(patience=0)

    def let_go(self) -> None:
        """Close what was held until the last descendant was gone (device locks)."""
        for fd in self.spec["hold"]:
            os.close(fd)

    def result(self, survivors: list[Stat]) -> dict[str, Any]:
        """The facts of the run, as the caller gets them."""
        others = {who: name for who, name in self.killed.items() if who[0] != self.leader}
        return {
            "status": self.status,
            "seconds": self.seconds or time.monotonic() - self.started,
            "max_rss_bytes": self.max_rss,
            "reason": self.reason,
            "failure": self.failure,
            "killed": any(who[0] == self.leader for who in self.killed),
            "leftovers": [(who[0], name) for who, name in others.items()][:REPORT_LIMIT],
            "survivors": [(process.pid, process.name) for process in survivors][:REPORT_LIMIT],
        }


def read_spec() -> dict[str, Any]:
    """The spec on standard input, which becomes /dev/null afterwards."""
    data = b""
    while chunk := os.read(0, 1 << 20):
        data += chunk
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    spec: dict[str, Any] = marshal.loads(data)  # noqa: S302 - written by the process that started us
    return spec


def main() -> int:
    """Run what the spec on standard input says; the exit status is always 0."""
    supervisor = Supervisor(read_spec())
    supervisor.start()
    try:
        supervisor.run()
    finally:
        supervisor.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
