"""The guard: a small process beside the agent, which ensures that no worker runs longer than the node's lease.

It is the workers' parent. It starts them, reports to the agent at once when one ends, stops them, and kills them
without a command when

- the lease's deadline passes. The agent extends the deadline by writing to shared memory; an agent that is
  frozen, or hangs in a system call, does not, and the guard does not depend on it;
- the agent is gone (its socket closes, or its process ends).

When the guard itself dies, the kernel kills the workers (parent-death signal); what they had daemonised falls
to the agent, which is a subreaper too.

One loop, standard library only. Nothing in it may block: not the socket to an agent that does
not read, not a terminal that is stopped, not a file system that hangs: workers open their own log files, the
agent reads them, and threads of its own write to a stderr that is a file, and to the files in which it keeps output.

Run as `python workers/guard/__main__.py SOCKET_FD MEMORY_FD AGENT_PID KILL_PATIENCE_S [STORES_FD]`, or with `-m`, by
`client.Guard`; STORES_FD is for the spawner.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import sys
import time
from types import SimpleNamespace

if not __package__:  # run by path, without site-packages: let the package be found, after everything else
    sys.path.append(os.path.abspath(__file__).rsplit(os.sep, 4)[0])

from elastic_agent import linux
from elastic_agent.workers.guard.generation import DONE, PARKED, Generation
from elastic_agent.workers.guard.line import DEADLINE_BYTES, MAILBOX_OFFSET, NO_SLOT, Channel, Loop
from elastic_agent.workers.guard.relay import Console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from elastic_agent.workers.guard.line import Message
    from elastic_agent.workers.guard.warm import WarmPool

_REPORTED_SIGNALS = linux.JOB_SIGNALS - {signal.SIGALRM, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
"""These are reported to the agent: they may have reached the workers too."""

_LAST_OUTPUT_S = 1.0
"""The longest time that output may take to be written after everything else is done."""


class Lease:
    """The deadline in shared memory, and a timer that goes off at it."""

    def __init__(self, memory_fd: int, clock_ns: Callable[[], int] = linux.boottime_ns) -> None:
        self._clock_ns = clock_ns
        self._cell = memoryview(mmap.mmap(memory_fd, mmap.PAGESIZE, prot=mmap.PROT_READ))[
            :DEADLINE_BYTES
        ].cast("Q")
        self._armed_for = 0
        self._timer = linux.BoottimeTimer()

    def fileno(self) -> int:
        """Return a descriptor that is readable at the deadline that `late_ns` saw last."""
        return self._timer.fileno()

    def timer_fired(self) -> None:
        """Clear the timer. By another processor's clock the deadline may still be to come: then it fires again."""
        self._timer.drain()
        late_ns = self.late_ns()
        if late_ns is not None and late_ns < 0:
            self._timer.arm(self._armed_for)

    def late_ns(self) -> int | None:
        """Return how long ago the deadline was (negative: is still to come); None without a deadline."""
        deadline: int = self._cell[0]
        if deadline != self._armed_for:
            self._timer.arm(deadline)
            self._armed_for = deadline
        return self._clock_ns() - deadline if deadline else None


class GuardProcess:
    """The guard's components and its loop."""

    def __init__(
        self, socket_fd: int, memory_fd: int, agent_pid: int, kill_patience_s: float, stores_fd: int | None
    ) -> None:
        self._stores_fd = stores_fd
        self._loop = Loop()
        self._channel = Channel(self._loop, socket_fd, self._obey, self._agent_gone)
        self._memory_fd = memory_fd
        self._lease = Lease(memory_fd)
        self._loop.add(self._lease.fileno(), self._lease.timer_fired)
        self._console = Console(self._loop)
        self._kill_patience_s = kill_patience_s
        self._abandoned: set[tuple[int, int]] = set()
        self._generation: Generation | None = None
        self._pool: WarmPool | None = None
        self._orphaned = False
        self._news = False
        self._watch_signals()
        self._watch_agent(agent_pid)

    def _watch_signals(self) -> None:
        self._wakeup, write_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(write_end, False)
        for signum in (signal.SIGCHLD, *_REPORTED_SIGNALS):
            signal.signal(signum, lambda signum, frame: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._loop.add(self._wakeup, self._signals_came)

    def _watch_agent(self, agent_pid: int) -> None:
        """Watch for the end of the agent, as a child that it forked may hold the socket open."""
        try:
            self._agent_pidfd = os.pidfd_open(agent_pid)
            self._loop.add(self._agent_pidfd, self._agent_ended)
        except OSError:  # an old kernel, or the agent is gone already
            pass
        if os.getppid() != agent_pid:
            self._orphaned = True

    def _agent_ended(self) -> None:
        self._loop.remove(self._agent_pidfd)
        self._agent_gone()

    # --- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until the agent is gone and so is everything below the guard."""
        self._channel.send({"event": "Ready"})
        while not (self._orphaned and self._generation is None):
            ready = self._loop.wait(self._timeout_s())
            self._enforce_deadline()  # before anything else: everything may have been stopped for long
            self._signals_came()  # before the ends of workers that such a signal caused
            for fd in ready:
                self._loop.dispatch(fd)
            self._enforce_deadline()
            self._reap()
            self._console.balance()
            self._tick()
        if self._pool is not None:
            self._pool.kill()
        self._console.finish(_LAST_OUTPUT_S)

    def _timeout_s(self) -> float | None:
        clocks = (self._generation, self._pool)
        ticks = [clock.next_tick() for clock in clocks if clock is not None]
        due = [tick for tick in ticks if tick is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _tick(self) -> None:
        if self._pool is not None:
            self._pool.tick()
        if self._generation is not None:
            self._generation.tick()
            self._generation.report_read()
            if self._generation.phase == DONE:
                self._generation = None

    def _enforce_deadline(self) -> None:
        late_ns = self._lease.late_ns()
        generation = self._generation
        if late_ns is None or late_ns < 0 or generation is None or generation.is_over:
            return
        generation.kill()
        self._news = True
        late_s = (self._lease.late_ns() or late_ns) / 1e9
        self._channel.send({"event": "Fenced", "generation": generation.number, "late_s": late_s})

    def _agent_gone(self) -> None:
        self._orphaned = True
        if self._generation is not None:
            self._generation.kill()
            self._news = True

    def kill_everything(self) -> None:
        """Kill what the kernel would not kill with the guard; for its own failure."""
        for _ in range(20):
            for process in linux.descendants(os.getpid()):
                if self._pool is None or process.pid != self._pool.stores_pid:
                    linux.send_signal(process.pid, signal.SIGKILL)

    # --- children ---------------------------------------------------------------------------------

    def _signals_came(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for signum in set(os.read(self._wakeup, 4096)):  # one byte each
                if signum == signal.SIGCHLD:
                    self._news = True
                else:
                    self._channel.send({"event": "Signalled", "signum": signum})

    def _reap(self) -> None:
        """Collect the dead: workers, and what they left and the guard inherited."""
        childless = False
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                childless = True
                break
            if dead is None:
                break
            if self._generation is not None and self._generation.announces(dead.si_pid):
                # Its turn comes in the next round, in the order of the deaths; so does the rest of this.
                return
            if self._generation is not None and self._generation.owns(dead.si_pid):
                self._generation.reap(dead.si_pid)
            else:
                _, status = os.waitpid(dead.si_pid, 0)
                if self._pool is not None:
                    self._pool.reaped(dead.si_pid, status)
        if self._generation is not None:
            if self._news and self._pool is not None:  # standbys are no generation's
                childless = childless or self._pool.owns_all(linux.children(os.getpid()))
            self._generation.after_reaping(childless, self._news)
        self._news = False

    # --- commands ---------------------------------------------------------------------------------

    def _obey(self, message: Message) -> None:
        command = message["do"]
        if command == "spawn":
            mailbox = os.pread(self._memory_fd, message["size"], MAILBOX_OFFSET)
            self._spawn(message["generation"], mailbox, message["patience_s"])
        elif command == "stop":
            keep = message.get("keep", ())
            self._stop(message["generation"], message["grace_s"], message["signum"], message["idle_s"], keep)
        elif command == "warm":
            self._have_spawner(message["config"])
        # "look" only wakes the guard: the deadline was read on the way here.

    def _have_spawner(self, config: dict[str, Any]) -> None:
        from elastic_agent.workers.guard.warm import WarmPool  # 3 ms that only warm starts need

        self._pool = WarmPool(self._loop, config, self._channel.send, self._pool_changed, self._stores_fd)
        self._pool.start()

    def _pool_changed(self) -> None:
        if self._generation is not None:
            self._generation.start_more()

    def _spawn(self, number: int, mailbox: bytes, patience_s: float) -> None:
        late_ns = self._lease.late_ns()
        launches = [SimpleNamespace(**fields) for fields in json.loads(mailbox)]
        before = self._generation
        if before is not None and before.phase != PARKED:
            self._refuse(number, f"generation {before.number} is not stopped yet")
        elif late_ns is None:
            self._refuse(number, "this node holds no lease")
        elif late_ns >= 0:
            self._refuse(number, f"the lease expired {late_ns / 1e9:.3f} s ago")
        elif before is not None and not before.all_go_on(launches):
            self._refuse(number, f"parked workers of generation {before.number} have no place in it")
        elif not self._orphaned:
            parked = before.release() if before is not None else {}
            self._generation = Generation(
                number,
                self._loop,
                self._console,
                self._channel.send,
                self._kill_patience_s,
                self._abandoned,
                self._pool,
                patience_s,
                parked,
            )
            self._generation.start(launches)

    def _refuse(self, number: int, error: str) -> None:
        message = {"event": "SpawnFailed", "generation": number, "slot": NO_SLOT, "error": error}
        self._channel.send(message)
        if self._generation is not None and self._generation.phase == PARKED:
            self._generation.number = number  # so that its end is the answer
            self._generation.kill()
            self._news = True
        else:
            self._channel.send({"event": "Stopped", "generation": number, "unkillable": ()})

    def _stop(
        self, number: int, grace_s: float, signum: int, idle_s: float | None, keep: Collection[int]
    ) -> None:
        if self._generation is not None:
            self._generation.stop(grace_s, signum, idle_s, keep)
            self._news = True
        else:
            self._channel.send({"event": "Stopped", "generation": number, "unkillable": ()})


def main(arguments: list[str]) -> None:
    socket_fd, memory_fd, agent_pid = map(int, arguments[:3])
    stores_fd = int(arguments[4]) if arguments[4:] else None
    linux.open_missing_standard_streams()
    for fd in (socket_fd, memory_fd, stores_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    for signum in linux.JOB_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    linux.become_subreaper()
    linux.set_process_name(linux.GUARD_NAME)
    guard = GuardProcess(socket_fd, memory_fd, agent_pid, float(arguments[3]), stores_fd)
    linux.unblock_job_signals()
    linux.lock_memory()
    try:
        guard.run()
    except BaseException:
        guard.kill_everything()  # first: the traceback may have to wait for a blocked stderr
        raise
    os._exit(0)  # without waiting for a thread that cannot write


if __name__ == "__main__":
    main(sys.argv[1:])
