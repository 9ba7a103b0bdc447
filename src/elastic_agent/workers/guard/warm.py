"""The guard's side of warm starts: it keeps a spawner and the standbys that the spawner forked.

A standby is a child of the guard that has everything imported and waits for the launch of the worker that it becomes.
Nothing here blocks: standbys arrive as the spawner sends them, and a launch that needs one before waits in the
loop.
"""

from __future__ import annotations

import json
import os
import socket
import time

from elastic_agent import linux
from elastic_agent.workers.guard import cold

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import SimpleNamespace
    from typing import Any

    from elastic_agent.linux import Process
    from elastic_agent.workers.guard.line import Loop, Message

OFF, LOADING, READY = "off", "loading", "ready"

_WORKERS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SPAWNER_PATH = os.path.join(_WORKERS, "spawner", "__main__.py")
_MESSAGE_BYTES = 64 * 1024
_REFILL_PAUSE_S = 0.5
"""The time for which workers that have just started have the processors to themselves."""
_LONGEST_PAUSE_S = 30.0
_FAILURES_IN_A_ROW = 12
_DEATHS_IN_A_ROW = 2
"""Spawners that die, and standbys that could not be had, with none used between: after so many no other is tried."""


class Standby:
    """A forked process that waits for its launch; `line` leads to it."""

    __slots__ = ("line", "pid", "pidfd")

    def __init__(self, pid: int, line: socket.socket, pidfd: int | None) -> None:
        self.pid = pid
        self.line = line
        self.pidfd = pidfd


class WarmPool:
    """Standbys for the next generation.

    `config` has the fields of `client.SpawnerConfig`. `report` sends events to the agent; `changed` is called when a
    waiting launch gets a standby, or when none will come. `stores_fd` leads to the agent: the spawner forks a process
    that serves stores at it.
    """

    def __init__(
        self,
        loop: Loop,
        config: dict[str, Any],
        report: Callable[[Message], None],
        changed: Callable[[], None],
        stores_fd: int | None,
    ) -> None:
        self._loop = loop
        self._config = config
        self._report = report
        self._changed = changed
        self._state = OFF
        self._spawner_pid = 0
        self._stores_fd = stores_fd
        self.stores_pid = 0
        """The process that serves the agent's stores; it ends with the agent, not with the guard."""
        self._line: socket.socket | None = None
        self._idle: dict[int, Standby] = {}
        self._requested = 0
        self._deaths = 0
        self._failures = 0
        self._refill_at: float | None = None
        self._leaves = False
        """The spawner has reported that it ends, and is to be replaced."""

    # --- for the generation -----------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """True if there are standbys, or may be soon."""
        return self._state != OFF

    def take(self, wanted: int) -> Standby | None:
        """Take a standby; None when there is none: as many as are `wanted` are on their way, then `changed` is
        called."""
        if self._idle:
            standby = self._idle.pop(next(iter(self._idle)))
            if standby.pidfd is not None:
                self._loop.remove(standby.pidfd)
            return standby
        self._request(wanted)
        return None

    def used(self) -> None:
        """Take note that a standby has become a worker."""
        self._deaths = self._failures = 0

    def discard(self, standby: Standby) -> None:
        """Discard a standby that was taken and is of no use."""
        linux.send_signal(standby.pid, 9)  # not reaped yet, so the number is its own
        self._forget(standby)

    def overdue(self) -> bool:
        """Take note that the requested standbys do not arrive; return whether that is because the spawner still
        imports; if not, it is ended, and replaced."""
        if self._state == READY and self._spawner_pid:
            linux.send_signal(self._spawner_pid, 9)
        return self._state == LOADING

    def refill_later(self) -> None:
        """Now that the workers have started, get standbys for the next ones, in a moment."""
        if self._state == READY:
            pause_s = min(_REFILL_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
            self._refill_at = time.monotonic() + pause_s

    # --- for the guard ----------------------------------------------------------------------------

    def without_own(self, processes: list[Process]) -> list[Process]:
        """Return those of the guard's descendants, as just seen, that are neither of the spawner's nor standbys."""
        self._listen()
        own = self._pids() | {process.pid for process in linux.below(self._pids(), processes)}
        return [process for process in processes if process.pid not in own]

    def owns_all(self, children: list[int]) -> bool:
        """Return whether all these children of the guard, as just seen, are the spawner or standbys."""
        self._listen()
        return self._pids().issuperset(children)

    def _listen(self) -> None:
        """Take all messages of the spawner's: every standby was announced before it became a child of the guard."""
        while self._line is not None and self._read_one():
            pass

    def _pids(self) -> set[int]:
        return {*self._idle, self._spawner_pid, self.stores_pid} - {0}

    def reaped(self, pid: int, status: int) -> None:
        """Take note that a child that was no worker has ended and was collected."""
        self._listen()  # messages sent before its end
        if pid == self.stores_pid:
            self.stores_pid = 0
        standby = self._idle.pop(pid, None)
        if standby is not None:
            self._forget(standby)
            self._failed("they exit before they are used")
        elif pid == self._spawner_pid:
            self._spawner_died(os.waitstatus_to_exitcode(status))

    def next_tick(self) -> float | None:
        """Return when `tick` is due, by time.monotonic()."""
        return self._refill_at

    def tick(self) -> None:
        """Do what is due; to be called in every round of the loop."""
        if self._refill_at is not None and time.monotonic() >= self._refill_at:
            self._refill_at = None
            self._request(self._config["standbys"])

    def kill(self) -> None:
        """End them all; the kernel would when the guard ends."""
        for pid in self._pids():
            linux.send_signal(pid, 9)

    # --- the spawner ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a spawner."""
        settings = (self._config[name] for name in ("preload", "folder", "imports"))
        stores_fds = () if self._stores_fd is None else (self._stores_fd,)
        try:
            line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                arguments = [theirs.fileno(), self._stores_fd, os.getpid(), *settings]
                argv = [self._config["python"], "-u", _SPAWNER_PATH, json.dumps(arguments)]
                env = {**os.environ, **self._config["environment"]}
                self._spawner_pid = cold.fork_helper(argv, env, (theirs.fileno(), *stores_fds))
        except OSError as error:
            self._give_up(f"cannot start the spawner: {error.strerror}", "")
            return
        line.setblocking(False)
        self._state = LOADING
        self._line = line
        self._loop.add(line.fileno(), self._listen)

    def _read_one(self) -> bool:
        """Take one message of the spawner's, if there is one."""
        assert self._line is not None
        try:
            data, fds = linux.receive(self._line, _MESSAGE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close_line()  # its exit is handled separately
            return False
        message = json.loads(data)
        if "standby" in message and not fds:  # no descriptor was free to receive it with
            message = {"fork_failed": "this process has too many open files"}
        self._registered(message, fds)
        return True

    def _registered(self, message: Message, fds: list[int]) -> None:
        if "standby" in message:
            self._arrived(message["standby"], fds[0])
        elif "stores" in message:
            self.stores_pid = message["stores"]
            self._close_stores_line()
        elif "ready_s" in message:
            self._state = READY
            self._report({"event": "Warm", **message})
            self._request(self._config["standbys"])
        elif "fork_failed" in message:
            self._requested = max(0, self._requested - 1)
            self._failed(f"the spawner cannot fork: {message['fork_failed']}")
        elif "unusable" in message and self._config["imports"]:
            self._config = {**self._config, "imports": []}
            self._leaves = True
            self._report({"event": "NotPreloaded", "reason": message["unusable"]})
        elif "unusable" in message:
            self._give_up(message["unusable"], message["detail"])

    def _failed(self, why: str) -> None:
        """Try again after a pause, which grows, as a standby could not be had, or kept."""
        self._failures += 1
        if self._failures > _FAILURES_IN_A_ROW and self._state == READY:
            self._give_up(f"the spawner cannot keep standby processes: {why}", "")
        else:
            self.refill_later()

    def _arrived(self, pid: int, fd: int) -> None:
        self._requested = max(0, self._requested - 1)
        line = socket.socket(fileno=fd)
        line.setblocking(False)
        standby = Standby(pid, line, cold.open_pidfd(pid))
        self._idle[pid] = standby
        if standby.pidfd is not None:
            self._loop.add(standby.pidfd, lambda: None)  # wakes the guard, which reaps it
        self._changed()

    def _request(self, wanted: int) -> None:
        missing = wanted - len(self._idle) - self._requested
        if self._state != READY or self._line is None or missing <= 0:
            return
        try:
            self._line.send(json.dumps({"fork": missing}).encode())
            self._requested += missing
        except OSError:  # it is dying; its exit is handled separately
            pass

    def _spawner_died(self, returncode: int) -> None:
        self._spawner_pid = 0
        self._requested = 0
        self._close_line()
        if self._state == OFF:  # it reported the reason before
            return
        if self._leaves:  # the next one imports less
            self._leaves = False
            self.start()
            self._changed()
            return
        self._deaths += 1
        if self._deaths > _DEATHS_IN_A_ROW:
            self._give_up(f"the spawner died repeatedly ({_ending(returncode)})", "")
            return
        self._report({"event": "SpawnerDied", "how": _ending(returncode)})
        self.start()
        self._changed()

    def _give_up(self, reason: str, detail: str) -> None:
        self._state = OFF
        self._refill_at = None
        self._close_stores_line()
        self._report({"event": "Cold", "reason": reason, "detail": detail})
        self._changed()

    def _close_stores_line(self) -> None:
        """Leave it to the process that has it; if there is none, the agent learns that none will come."""
        if self._stores_fd is not None:
            os.close(self._stores_fd)
            self._stores_fd = None

    def _close_line(self) -> None:
        if self._line is not None:
            self._loop.remove(self._line.fileno())
            self._line.close()
            self._line = None

    def _forget(self, standby: Standby) -> None:
        if standby.pidfd is not None:
            self._loop.remove(standby.pidfd)
            os.close(standby.pidfd)
        standby.line.close()


def hand_over(standby: Standby, launch: SimpleNamespace, streams: Mapping[int, int]) -> int:
    """Send the standby the worker to become; takes and returns what `start_cold_worker` does.

    Raises OSError when the standby is dead.
    """
    memory = os.memfd_create("elastic-agent-launch")
    try:
        os.write(memory, json.dumps(vars(launch)).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        message = json.dumps({"streams": list(streams)}).encode()
        socket.send_fds(standby.line, [message], [memory, *streams.values()])
    finally:
        os.close(memory)
    return standby.line.detach()


def _ending(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
