"""Agents on this machine: started, watched and killed at the end; their records are in one folder."""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from elastic_agent import linux
from elastic_agent.worker_variables import PREFIX

T = TypeVar("T")
Line = dict[str, Any]

JOURNAL = "journal.jsonl"
WAIT_TIMEOUT_S = 90.0
"""The time that anything may take by default; on a busy machine importing torch takes much of it."""
LOOK_EVERY_S = 0.005
FREEZE_TIMEOUT_S = 10.0
FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Below those that the kernel gives to outgoing connections (32768 and up on Linux, ip_local_port_range), one of which
could take the port between the choice and the server's start."""


class Lines:
    """A file of JSON lines that other processes append to; each read goes on from where the last one ended."""

    def __init__(self, path: Path, kind: str = "kind", *, strict: bool = False) -> None:
        """Prepare to read; nothing is read yet.

        Args:
            path: the file, which need not exist yet.
            kind: the name of the value by which :meth:`of` finds lines.
            strict: raise ValueError for a torn line instead of skipping it.
        """
        self._path = path
        self._kind = kind
        self._strict = strict
        self._read = 0
        self._lines: list[Line] = []
        self._arrived: list[Line] = []
        self._of: dict[object, list[Line]] = {}

    def all(self) -> list[Line]:
        """Return all lines so far, in order of time (``boottime_s``)."""
        self._read_on()
        return self._lines

    def of(self, kind: str) -> list[Line]:
        """Return those of one kind, in order of time."""
        self._read_on()
        return self._of.get(kind, [])

    def arrived(self, after: int) -> list[Line]:
        """Return those after the first ``after`` lines of the file, in their order there."""
        self._read_on()
        return self._arrived[after:]

    def _read_on(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for data in whole.split(b"\n")[:-1]:
            line = _decoded(data)
            if line is None and self._strict:
                raise ValueError(f"{self._path} has a line that is torn or damaged: {data!r}")
            if line is not None:
                self._arrived.append(line)
                # Lines of several processes arrive almost in order of time.
                for ordered in (self._lines, self._of.setdefault(str(line.get(self._kind)), [])):
                    bisect.insort(ordered, line, key=lambda other: other["boottime_s"])


def _decoded(data: bytes) -> Line | None:
    """Decode a line; None if it was torn: on a full disk, a write ends halfway, and the next line follows at once."""
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(line, dict) and isinstance(line.get("boottime_s"), int | float)
    return line if is_whole else None


@dataclass
class NodeProcess:
    """A running agent, which represents a node, with all its descendants."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where this agent's part of the log begins; an earlier one of that name may have written before."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def runs(self) -> bool:
        """True if the agent has not ended yet."""
        return self.process.poll() is None

    @property
    def guard(self) -> int:
        """The guard's pid."""
        return next(pid for pid in linux.children(self.pid) if linux.process_name(pid) == linux.GUARD_NAME)

    def said(self) -> str:
        """Return what this agent (and its workers) wrote to the console so far."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def lines(self, *texts: str) -> list[str]:
        """Return the log lines that contain all of these texts."""
        return [line for line in self.said().splitlines() if all(text in line for text in texts)]

    def signal(self, signum: int) -> None:
        """Send the agent alone a signal; SIGTERM makes the node leave."""
        os.kill(self.pid, signum)

    def kill_node(self) -> None:
        """Kill all processes at once, as a power cut would."""
        for pid in self.freeze_node():  # no process reacts before all are dead
            linux.send_signal(pid, signal.SIGKILL)

    def freeze_node(self) -> list[int]:
        """Stop all processes, as when a virtual machine is paused, and what they fork meanwhile; returns them."""
        stopped: dict[int, None] = {}
        while new := [pid for pid in self._pids() if pid not in stopped]:
            for pid in new:
                freeze(pid)
                stopped[pid] = None
        return list(stopped)

    def thaw(self) -> None:
        """Send SIGCONT to all processes."""
        for pid in self._pids():
            thaw(pid)

    def _pids(self) -> list[int]:
        return [self.pid, *(process.pid for process in linux.descendants(self.pid))]


def freeze(pid: int) -> None:
    """Send SIGSTOP, and return when no thread of the process runs any more; without effect on one that is gone.

    The signal alone stops nothing yet: the process could still answer what it is asked next.

    Raises:
        TimeoutError: it does not stop.
    """
    linux.send_signal(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + FREEZE_TIMEOUT_S
    while any(linux.thread_state(tid) not in ("T", "t", "Z", "X", "") for tid in linux.threads(pid)):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.0005)  # only its parent would be told


def thaw(pid: int) -> None:
    """Send SIGCONT; without effect on a process that is gone."""
    linux.send_signal(pid, signal.SIGCONT)


def wait_for(look: Callable[[], T | None], timeout_s: float) -> T | None:
    """Return the first result of ``look`` that is not None or False; None at the time-out."""
    ends_s = time.monotonic() + timeout_s
    while not (found := look()) and time.monotonic() < ends_s:
        time.sleep(LOOK_EVERY_S)
    return found or None


class Agents:
    """Processes of agents and what they recorded: their events in ``journal.jsonl``, their output in ``NAME.log``.

    To be used as a context manager: at its end, every process that is left is killed.
    """

    mark_variable = "ELASTIC_CLUSTER"
    """A variable of the environment by which all processes of the cluster are found, whatever their parents are."""
    error: type[Exception] = AssertionError
    """Raised by :meth:`wait`."""

    def __init__(self, folder: Path) -> None:
        """Use a folder that exists, and is this cluster's alone."""
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.agents: dict[str, NodeProcess] = {}
        """By name, the newest of each."""
        self.servers: dict[str, NodeProcess] = {}
        """Processes that host the store and train nothing, by name, the newest of each."""
        self._all: list[NodeProcess] = []
        self._journal = Lines(folder / JOURNAL, "event")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._all:
            if agent.runs:
                agent.kill_node()
        for agent in self._all:
            agent.process.wait()
        for pid in self.marked_processes():
            linux.send_signal(pid, signal.SIGKILL)

    def launch(
        self, name: str, command: list[str], env: Mapping[str, str], cwd: Path | None = None
    ) -> NodeProcess:
        """Start a process with a log of its own; settings of agents in this environment do not reach it."""
        own = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", PREFIX))}
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=cwd,
                env={**own, "OMP_NUM_THREADS": "1", self.mark_variable: self.mark, **env},
            )
            agent = NodeProcess(name, process, log, file.tell())
        self._all.append(agent)
        return agent

    # -- what happened --------------------------------------------------------------------------

    def journal(self, event: str | None = None, node: str | None = None) -> list[Line]:
        """Return every event that the agents recorded (``--event-journal``), in order of time."""
        lines = self._journal.all() if event is None else self._journal.of(event)
        return [line for line in lines if node in (None, line.get("node"))]

    def marked_processes(self) -> list[int]:
        """Return the processes of this cluster that live."""
        found = []
        for process in linux.all_processes():
            with contextlib.suppress(OSError):
                is_other = process.pid != os.getpid() and not process.dead
                if is_other and linux.environment(process.pid).get(self.mark_variable) == self.mark:
                    found.append(process.pid)
        return found

    def story(self) -> str:
        """Return a timeline of all events and the ends of all logs, for a message."""
        lines = sorted([*self.journal(), *self.more_lines()], key=lambda line: line["boottime_s"])
        start_s = lines[0]["boottime_s"] if lines else 0.0
        rows = [_row(line, start_s) for line in lines[-200:]]
        logs = [
            f"--- {name}.log\n{process.log.read_text(errors='replace')[-3000:]}"
            for name, process in {**self.agents, **self.servers}.items()
        ]
        return "\n".join(["timeline:", *rows, *logs])

    def more_lines(self) -> list[Line]:
        """Return what belongs into the story besides the agents' events."""
        return []

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, awaited: str, look: Callable[[], T | None], timeout_s: float = WAIT_TIMEOUT_S) -> T:
        """Wait until ``look`` finds something.

        Raises:
            Exception: the time is over (``error``); the message tells what happened.
        """
        found = wait_for(look, timeout_s)
        if found is None:
            raise self.error(f"waited {timeout_s:g} s for {awaited}\n{self.story()}")
        return found

    def wait_said(self, name: str, *texts: str, timeout_s: float = WAIT_TIMEOUT_S) -> str:
        """Wait until this agent logged a line with all of these texts."""
        agent = {**self.agents, **self.servers}[name]
        return self.wait(
            f"{name} to say {' … '.join(texts)}", lambda: next(iter(agent.lines(*texts)), None), timeout_s
        )

    def wait_end(self, *names: str, timeout_s: float = WAIT_TIMEOUT_S) -> dict[str, int]:
        """Wait until these agents (all by default) ended; returns their exit codes."""
        wanted = {name: self.agents[name] for name in names or self.agents}
        self.wait(
            f"the end of {', '.join(wanted)}",
            lambda: not any(agent.runs for agent in wanted.values()),
            timeout_s,
        )
        return {name: int(agent.process.returncode) for name, agent in wanted.items()}

    def wait_gone(self, pids: Iterable[int], timeout_s: float = 5.0) -> list[int]:
        """Wait for these processes to end; returns those which did not."""
        watched = set(pids)

        def left() -> list[int]:
            return [pid for pid in watched if linux.start_ticks(pid) is not None]

        wait_for(lambda: not left(), timeout_s)
        return left()


def _row(line: Line, start_s: float) -> str:
    skip = {"boottime_s", "time_s", "run", "event", "kind", "node", "worker_id", "run_id", "node_id"}
    who = line.get("node") or line.get("worker_id") or "?"
    event = line.get("event") or line.get("kind")
    rest = " ".join(f"{key}={value}" for key, value in line.items() if key not in skip and value is not None)
    return f"{line['boottime_s'] - start_s:9.3f}  {who:8} {event:16} {rest}"


def free_port(taken: Container[int] = (), *, within: range = range(FIRST_PORT, LAST_PORT)) -> int:
    """Return a port of the loopback interface without a listener, one of ``within`` and not of ``taken``."""
    while True:
        port = secrets.choice(within)
        if port in taken:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
