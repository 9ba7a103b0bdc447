"""Real guards, real workers, and ways to wait for what they do without sleeping."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from elastic_agent.workers.guard.client import Guard, GuardEvent, Launch, Stopped
from tests.waiting import GUARD_S as PATIENCE_S

Event = TypeVar("Event")

SLEEP = ("sleep", "1000")

TELL = """
import os, signal, sys, time

def tell(text):
    fd = os.open(sys.argv[1], os.O_WRONLY)
    os.write(fd, f"{text}\\n".encode())
    os.close(fd)
"""
"""For programs whose first argument is the path of a `News`."""

DAEMONISE = f"""{TELL}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        exec(sys.argv[2])
        tell(os.getpid())
        time.sleep(1000)
    os._exit(0)
os.wait()
exec(sys.argv[3])
"""


DEAF = f"""{TELL}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("deaf")
time.sleep(1000)
"""

FAMILY = (
    TELL
    + """
def handle(name, then=lambda signum: None):
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, lambda signum, frame: (tell(f"{name} {signal.Signals(signum).name}"), then(signum)))

def end(signum):
    os.write(ask[1], b"?")
    os.read(asked[0], 1)  # the child has handled what it got with us, and still runs
    tell("worker ends")
    os._exit(0)

def follow(signum):
    if signum == signal.SIGTERM and os.getppid() != worker:
        os._exit(0)

ask, asked, worker = os.pipe(), os.pipe(), os.getpid()
if os.fork() == 0:
    handle("child", follow)
    os.write(asked[1], b"+")
    while True:
        os.write(asked[1], os.read(ask[0], 1))
os.read(asked[0], 1)
if "handles" in sys.argv:
    handle("worker", end)
elif "stays" in sys.argv:
    handle("worker")
elif "ignores" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
tell("ready")
while True:
    time.sleep(0.01)
"""
)
"""A worker with a child in its process group, both of which tell the signals that they get. A worker that "handles"
signals ends then, and its child on the next SIGTERM; a worker that "stays" goes on."""


def python(slot: int, code: str, *args: str, **fields: Any) -> Launch:
    """Return a worker that runs `code`, with a quickly started Python."""
    argv = (sys.executable, "-I", "-S", "-c", textwrap.dedent(code), *args)
    return Launch(slot, argv, dict(os.environ), **fields)


def program(slot: int, *argv: str, **fields: Any) -> Launch:
    return Launch(slot, argv, dict(os.environ), **fields)


def daemonising(slot: int, news: News, *, daemon: str = "", worker: str = "time.sleep(1000)") -> Launch:
    """Return a worker with a double-forked grandchild in a session of its own, which tells its pid to `news`.

    `daemon` and `worker` are statements that each of the two runs.
    """
    return python(slot, DAEMONISE, str(news.path), textwrap.dedent(daemon), textwrap.dedent(worker))


def deaf(slot: int, news: News) -> Launch:
    """Return a worker that ignores SIGTERM, and tells "deaf" when it does."""
    return python(slot, DEAF, str(news.path))


class Lines:
    """Lines that come out of a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def line(self, timeout_s: float = PATIENCE_S) -> str:
        """Return the next line."""
        while b"\n" not in self._rest:
            assert select.select((self._fd,), (), (), timeout_s)[0], "no line came"
            data = os.read(self._fd, 1 << 20)
            assert data, "the process ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def close(self) -> None:
        os.close(self._fd)


class News(Lines):
    """A pipe with a name, into which processes that inherit nothing can write lines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "news"
        os.mkfifo(self.path)
        super().__init__(os.open(self.path, os.O_RDWR | os.O_NONBLOCK))

    def silent(self) -> bool:
        """True if no message has come since the last line."""
        return not self._rest and not select.select((self._fd,), (), (), 0)[0]


class Watched:
    """A process, not necessarily a child, whose end can be awaited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def ended(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait for its end, and return whether it has ended."""
        return bool(select.select((self._fd,), (), (), timeout_s)[0])

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def watching(*pids: int) -> Iterator[tuple[Watched, ...]]:
    """Watches processes; those still alive at the end are killed."""
    watched = tuple(Watched(pid) for pid in pids)
    try:
        yield watched
    finally:
        for process in watched:
            if not process.ended(0):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, 9)
            process.close()


class Driver:
    """A guard of this process, and its events in order."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.events: list[GuardEvent] = []
        self._unread: list[GuardEvent] = []

    def until(self, kind: type[Event]) -> Event:
        """Return the next event of that kind; earlier ones are in `events`."""
        ends = time.monotonic() + PATIENCE_S
        while True:
            while self._unread:
                event = self._unread.pop(0)
                self.events.append(event)
                if isinstance(event, kind):
                    return event
            left = max(0.0, ends - time.monotonic())
            assert select.select((self.guard,), (), (), left)[0], f"no {kind.__name__}, only {self.events}"
            self._unread = self.guard.read_events()

    def stop(self, grace_s: float = 0.0) -> Stopped:
        """Stop the generation, and wait until nothing of it is left."""
        self.guard.stop(grace_s)
        return self.until(Stopped)

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


class StandIn:
    """A small agent (`standin.py`) in a process of its own, to be frozen and killed."""

    def __init__(
        self, stdout: int = subprocess.DEVNULL, patience_s: float = PATIENCE_S, **popen: Any
    ) -> None:
        """Start it; ``patience_s``: how long nothing may happen while an event is awaited."""
        script = Path(__file__).with_name("standin.py")
        (told, its_told), (its_commands, commands) = os.pipe(), os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(its_commands), str(its_told)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            pass_fds=(its_commands, its_told),
            **popen,
        )
        os.close(its_commands)
        os.close(its_told)
        self._told, self._commands = Lines(told), os.fdopen(commands, "wb", buffering=0)
        self._patience_s = patience_s
        self.events: list[dict[str, Any]] = []
        self.guard_pid: int = self.until("standin")["guard"]
        self.until("Ready")

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, command: str, **arguments: Any) -> None:
        self._commands.write(json.dumps({"do": command, **arguments}).encode() + b"\n")

    def start(self, *launches: Launch, generation: int = 1) -> None:
        """Asks for workers."""
        fields = [{**vars(launch), "argv": list(launch.argv)} for launch in launches]
        self.do("spawn", generation=generation, launches=fields)

    def spawn(self, *launches: Launch) -> dict[int, int]:
        """Starts workers; returns their pids by slot."""
        self.start(*launches)
        return {int(slot): pid for slot, pid in self.until("Spawned")["pids"].items()}

    def stop(self, grace_s: float = 0.0) -> None:
        """Stop the generation, and wait until nothing of it is left."""
        self.do("stop", grace_s=grace_s)
        self.until("Stopped")

    def until(self, name: str) -> dict[str, Any]:
        """Return the next event of that name."""
        while True:
            try:
                self.events.append(json.loads(self._told.line(self._patience_s)))
            except AssertionError as error:
                raise AssertionError(f"{error}: no {name}, only {self.events}") from None
            if self.events[-1]["name"] == name:
                return self.events[-1]

    def close(self) -> None:
        """Ends it if need be, and waits for its guard to end, which means that nothing is left."""
        with suppress(ProcessLookupError):
            guard = Watched(self.guard_pid)
            self.process.kill()
            os.kill(self.guard_pid, 18)  # SIGCONT
            assert guard.ended(), "the guard outlived its agent"
            guard.close()
        self.process.kill()
        self.process.wait()
        self._told.close()
        self._commands.close()


@contextmanager
def agent_with(stdout: int, stderr: int) -> Iterator[StandIn]:
    """Run an agent with these streams, which are closed here."""
    agent = StandIn(stdout, stderr=stderr)
    for fd in {stdout, stderr} - {subprocess.DEVNULL}:
        os.close(fd)
    try:
        yield agent
    finally:
        agent.close()


@contextmanager
def agent_with_stderr(kind: str) -> Iterator[tuple[StandIn, int]]:
    """Run an agent whose stderr is a "pipe", "terminal" or "socket", and the end at which it can be read."""
    if kind == "pipe":
        read_end, write_end = os.pipe()
    elif kind == "terminal":
        read_end, write_end = os.openpty()
    else:
        read_end, write_end = (end.detach() for end in socket.socketpair())
    try:
        with agent_with(subprocess.DEVNULL, write_end) as agent:
            yield agent, read_end
    finally:
        os.close(read_end)


HOLDER = """
import os, sys
name = sys.argv[1].replace("PID", str(os.getpid()))
held = open(f"/dev/shm/{name}", "rb" if "attached" in sys.argv else "x+b")
if held.writable():
    held.write(b"tensor")
    held.flush()
if "mapped" in sys.argv:
    import mmap
    memory = mmap.mmap(held.fileno(), 6)
if "mapped" in sys.argv or "closed" in sys.argv:
    held.close()
print(name, flush=True)
sys.stdin.read()
"""


class Holder:
    """A process that makes a file and keeps it open, mapped or closed, or that is attached to the one of another."""

    def __init__(self, name: str, how: str = "open") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", HOLDER, name, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.path = Path("/dev/shm") / self.process.stdout.readline().decode().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
