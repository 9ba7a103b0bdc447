"""The agent's handle on its guard process (see `__main__` for what that does and why).

Nothing here blocks except `close` and `kill_orphans`, which take a time limit. Not thread-safe: one thread, the
agent's loop, owns a `Guard`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, get_args

import msgspec

from elastic_agent import linux
from elastic_agent.workers.guard.line import DEADLINE_BYTES, MAILBOX_OFFSET, LineBuffer, encode

if TYPE_CHECKING:
    from elastic_agent.workers.guard.line import Message

# Isolated and without site-packages: a third of the start time, and nothing there can break it.
_GUARD_OPTIONS = ("-I", "-S", os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py"))
_CHUNK_BYTES = 64 * 1024
_END_WAIT_S = 0.1


@dataclass(frozen=True)
class Launch:
    """One worker to start.

    `env` is its whole environment. A path for `stdout` or `stderr` is appended to, and created if need be;
    None is the guard's own stream, which for stderr passes through the guard so that its last 32 KiB are
    known. `os.devnull` as `stderr` means: not shown, last 32 KiB known all the same. With `kept`, stdout passes through
    the guard, too, unless its own is a file, and what passes is kept in this file, of which the first third
    and the end stay when it grows beyond `kept_bytes` (0: all of it stays). `argv[0]` is searched
    in `env`'s PATH. `warm`: fork it from the spawner, if there is one (`Guard.keep_warm`); then `argv` must be
    `(PYTHON, "-u", SCRIPT, ...)` or `(PYTHON, "-u", "-m", MODULE, ...)` with the spawner's Python. It begins with the
    signals in `ignored` ignored, and with all others as any program does. With
    `startup_hook`, a cold one adapts frameworks as warm ones do. `parked`: the parked process that goes on in this
    place if it lives; its streams stay what they are, but for `kept`.
    """

    slot: int
    argv: tuple[str, ...]
    env: dict[str, str]
    stdout: str | None = None
    stderr: str | None = None
    kept: str | None = None
    kept_bytes: int = 0
    warm: bool = False
    ignored: tuple[int, ...] = ()
    startup_hook: bool = False
    parked: int | None = None


@dataclass(frozen=True)
class Ready:
    """The guard is up and accepts commands (they may be sent before)."""


@dataclass(frozen=True)
class Spawned:
    """Every worker runs its program. `pids` by slot."""

    generation: int
    pids: dict[int, int]


@dataclass(frozen=True)
class SpawnFailed:
    """The generation could not be started; `slot` is the one that failed, or NO_SLOT when it is none in particular.

    Workers already started are being killed; `Stopped` follows.
    """

    generation: int
    slot: int
    error: str


@dataclass(frozen=True)
class Exited:
    """A worker ended. Events come in the order of the deaths, so the first with a returncode other than 0
    failed first.

    `returncode` is negative for a signal; `stderr_tail` is empty when it is 0, and when stderr went to a file, which
    is not read here; it has stdout in it, too, if both are the same open file. `stopping`: the guard was stopping or
    killing the generation by then, so this is no failure of the worker's own.
    """

    generation: int
    slot: int
    pid: int
    returncode: int
    at_boottime_s: float
    stderr_tail: str = ""
    stopping: bool = False


@dataclass(frozen=True)
class Stopped:
    """Every process of the generation is gone, but for `unkillable` ones, and for those of the workers that are kept.

    The unkillable were sent SIGKILL and are asleep in the kernel: no user code of theirs runs again. `kept` are the
    processes of kept workers by slot: the next `spawn` names those that go on, or another `stop` ends them.
    """

    generation: int
    unkillable: tuple[int, ...]
    kept: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Survivor:
    """A process that SIGKILL has not ended."""

    pid: int
    name: str
    state: str
    """As `ps` has it; D if one of its threads is blocked in the kernel."""
    foreign_user: int | None
    """The id of its user, if the guard may not signal it."""


@dataclass(frozen=True)
class StopDelayed:
    """`alive` were sent SIGKILL `waited_s` ago, and not all of them are asleep in the kernel.

    Comes after `kill_patience_s`, and again whenever they have lived twice as long; `Stopped` comes later.
    """

    generation: int
    alive: tuple[Survivor, ...]
    waited_s: float


@dataclass(frozen=True)
class Fenced:
    """The deadline passed; all workers were sent SIGKILL, the last `late_s` after it. `Stopped` follows."""

    generation: int
    late_s: float


@dataclass(frozen=True)
class Signalled:
    """The guard received this signal, which the agent does not send to it: other processes received it too."""

    signum: int


@dataclass(frozen=True)
class GuardLost:
    """The guard is gone, and its workers with it; call `kill_orphans`. None: it is not known how it ended."""

    returncode: int | None


@dataclass(frozen=True)
class Warm:
    """The spawner has imported everything: so many `modules`, in `ready_s`."""

    ready_s: float
    modules: int = 0


@dataclass(frozen=True)
class Cold:
    """There is no spawner and there will be none: workers start cold. `detail` is a traceback, or empty."""

    reason: str
    detail: str


@dataclass(frozen=True)
class NotPreloaded:
    """The packages that the script imports cannot be preloaded, but for torch."""

    reason: str


@dataclass(frozen=True)
class SpawnerDied:
    """The spawner ended; another one is being started. Workers and standbys live on."""

    how: str


@dataclass(frozen=True)
class WarmLate:
    """`generation` has waited long enough for its standbys: its workers start cold.

    `importing`: the spawner is still importing; otherwise it is too slow or does not answer, and is replaced.
    """

    generation: int
    importing: bool


GuardEvent: TypeAlias = (
    Ready
    | Warm
    | Cold
    | NotPreloaded
    | SpawnerDied
    | WarmLate
    | Spawned
    | SpawnFailed
    | Exited
    | Stopped
    | StopDelayed
    | Fenced
    | Signalled
    | GuardLost
)


@dataclass(frozen=True)
class SpawnerConfig:
    """The configuration of a spawner.

    `python` runs it. It imports torch, `imports` (modules of curated packages, each with the names that scripts import
    from it) and `preload`, with `folder` first on its path for the latter, and `environment` on top of the guard's own;
    `standbys` processes are kept ready.
    """

    python: str
    folder: str
    preload: tuple[str, ...]
    environment: dict[str, str]
    standbys: int
    imports: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Guard:
    """A guard process and the line to it.

    A generation goes `spawn` … `stop` … `Stopped`; the next `spawn` comes after that event, and `stop` is
    due also when all workers have exited, because they may have left processes behind.
    """

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, memory_fd: int) -> None:
        """Use `Guard.start`."""
        self._process = process
        self._line = line
        self._memory_fd = memory_fd
        self._memory = mmap.mmap(memory_fd, mmap.PAGESIZE)
        self._deadline = memoryview(self._memory)[:DEADLINE_BYTES].cast("Q")
        self._lines = LineBuffer()
        self._unsent = b""
        self._generation = 0
        self._lost = False
        self._closed = False

    @classmethod
    def start(cls, kill_patience_s: float = 5.0, stores: socket.socket | None = None) -> Guard:
        """Start a guard for this process; `Ready` reports when it is up. It ends with this process, or by
        `close`.

        `kill_patience_s`: how long after SIGKILL a process may live before `Stopped` is reported without it.
        `stores`: the line to the process in which stores are served, which the spawner forks; it is closed here.
        Raises OSError when no process can be created.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_failure:
            if stores is not None:
                theirs.enter_context(stores)
            ours, other_end = socket.socketpair()
            theirs.enter_context(other_end)
            on_failure.enter_context(ours)
            memory_fd = os.memfd_create("elastic-agent-guard")
            on_failure.callback(os.close, memory_fd)
            os.ftruncate(memory_fd, MAILBOX_OFFSET)
            stores_fds = () if stores is None else (stores.fileno(),)
            arguments = (other_end.fileno(), memory_fd, os.getpid(), kill_patience_s, *stores_fds)
            # A session of its own: Ctrl-C and Ctrl-Z on the agent's terminal are for the agent only.
            with linux.signals_blocked():
                process = subprocess.Popen(
                    [sys.executable, *_GUARD_OPTIONS, *map(str, arguments)],
                    pass_fds=(other_end.fileno(), memory_fd, *stores_fds),
                    start_new_session=True,
                )
            on_failure.pop_all()
        ours.setblocking(False)
        return cls(process, ours, memory_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read_events` has something."""
        return self._line.fileno()

    # --- commands ---------------------------------------------------------------------------------

    def keep_warm(self, config: SpawnerConfig) -> None:
        """Have a spawner from which warm launches are forked; answered by `Warm` or `Cold`. Call it once at most."""
        self._send({"do": "warm", "config": vars(config)})

    def spawn(self, generation: int, launches: Sequence[Launch], warm_patience_s: float = 10.0) -> None:
        """Start the workers of `generation`; answered by `Spawned` or `SpawnFailed`.

        A spawner that still imports is awaited for `warm_patience_s`, then they start cold.
        The guard refuses without a deadline in the future, and while an earlier generation has not been reported
        `Stopped`.
        """
        self._generation = generation
        payload = json.dumps([vars(launch) for launch in launches]).encode()  # may hold surrogates
        os.ftruncate(self._memory_fd, MAILBOX_OFFSET + len(payload))
        os.pwrite(self._memory_fd, payload, MAILBOX_OFFSET)
        self._send(
            {"do": "spawn", "generation": generation, "size": len(payload), "patience_s": warm_patience_s}
        )

    def stop(
        self,
        grace_s: float,
        signum: int = signal.SIGTERM,
        *,
        idle_s: float | None = None,
        keep: Collection[int] = (),
    ) -> None:
        """End the generation; answered by `Stopped`, at once if nothing runs.

        Each worker's own process gets `signum` now, and with it its process group, if `signum` is SIGINT or ends
        the worker at once (`Generation.stop`). Once the workers are gone, SIGTERM goes to what they have left. After
        `grace_s` all that is left gets SIGKILL; with `idle_s` also when none of it has made progress for so long. May
        be repeated to shorten the grace, not to lengthen it. Workers whose processes are in `keep` are spared, with
        their own processes; a repeated stop spares none that it does not name.
        """
        message: Message = {
            "do": "stop",
            "generation": self._generation,
            "grace_s": grace_s,
            "signum": int(signum),
            "idle_s": idle_s,
        }
        self._send({**message, "keep": [*keep]} if keep else message)

    def set_deadline(self, at_boottime_s: float | None) -> None:
        """Let the workers live until `at_boottime_s` (seconds of CLOCK_BOOTTIME); None: no limit, and no
        new workers.

        Moving it on, as every renewal does, takes no system call.
        """
        new = 0 if at_boottime_s is None else max(1, int(at_boottime_s * 1e9))
        old: int = self._deadline[0]
        self._deadline[0] = new
        if new and (new < old or not old):
            self._send({"do": "look"})  # the guard sleeps until the old one

    def _send(self, message: Message) -> None:
        """Send without blocking: what a stopped guard does not take goes out with a later call."""
        self._unsent += encode(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._line.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""

    # --- events -----------------------------------------------------------------------------------

    def read_events(self) -> list[GuardEvent]:
        """Return the events since the last call, in order; may be none. `GuardLost` is the last ever."""
        events: list[GuardEvent] = []
        if self._lost:
            return events
        self._flush()
        while True:
            try:
                data = self._line.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return events
            except OSError:
                data = b""
            if not data:
                self._lost = True
                events.append(GuardLost(self._returncode()))
                return events
            events.extend(map(_event, self._lines.feed(data)))

    def _returncode(self) -> int | None:
        """Return how the guard ended: its line closed, so it is dying if not dead."""
        try:
            return self._process.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            return None

    # --- the end ----------------------------------------------------------------------------------

    def close(self, timeout_s: float = 5.0) -> None:
        """End the guard, which first kills all that is left.

        Blocks until it has, at most `timeout_s`; then the guard is killed. May be called repeatedly.
        """
        if self._closed:
            return
        self._closed = self._lost = True
        self._line.close()
        self._deadline.release()
        self._memory.close()
        os.close(self._memory_fd)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # asleep in the kernel: it goes when it can
                self._process.wait(timeout_s)


_EVENTS = {kind.__name__: kind for kind in get_args(GuardEvent)}


def _event(message: Message) -> GuardEvent:
    event: GuardEvent = msgspec.convert(message, _EVENTS[message["event"]], str_keys=True)
    return event


def kill_orphans(patience_s: float, spared: Collection[int | None] = ()) -> tuple[int, ...]:
    """Send SIGKILL to every descendant of this process but those that are spared, and wait until they are gone.

    For the time after `GuardLost`: what the workers had daemonised is now below this process, if it is a
    subreaper. Children that have ended already are reaped. Blocks for `patience_s` at most, normally some
    milliseconds; returns the pids that are still there after that.
    """
    ends = time.monotonic() + patience_s
    clean_scans = 0
    while True:
        alive = [process for process in linux.descendants(os.getpid()) if process.pid not in spared]
        for process in alive:
            linux.send_signal(process.pid, signal.SIGKILL)
        # One clean scan can have missed a process whose parent died just then.
        clean_scans = 0 if alive else clean_scans + 1
        if clean_scans == 2 or (alive and time.monotonic() >= ends):
            _reap_dead_children()
            return tuple(sorted(process.pid for process in alive))
        if alive:
            linux.await_exit(alive[0].pid, min(0.05, max(0.0, ends - time.monotonic())))


def _reap_dead_children() -> None:
    for pid in linux.dead_children(os.getpid()):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
