"""Agents on this machine: started, watched and killed at the end; their records are in one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from elastic_agent import linux
from elastic_agent.testing.node import NodeProcess
from elastic_agent.testing.records import Line, Lines
from elastic_agent.testing.watching import FolderWatch
from elastic_agent.worker_variables import PREFIX

T = TypeVar("T")

JOURNAL = "journal.jsonl"
WAIT_TIMEOUT_S = 90.0
"""How long anything may take by default; on a busy machine importing torch takes much of it."""


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
        self._watch = FolderWatch(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._all:
            if agent.runs:
                agent.kill_node()
        for agent in self._all:
            agent.process.wait()
        for pid in self.marked_processes():
            linux.send_signal(pid, signal.SIGKILL)
        self._watch.__exit__(kind, error, trace)

    def launch(
        self, name: str, command: list[str], env: Mapping[str, str], cwd: Path | None = None
    ) -> NodeProcess:
        """Start a process with a log of its own; settings of agents in this environment do not reach it."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=cwd,
                env={**_own_environment(), "OMP_NUM_THREADS": "1", self.mark_variable: self.mark, **env},
            )
            agent = NodeProcess(name, process, log, file.tell())
        self._all.append(agent)
        return agent

    # -- what happened --------------------------------------------------------------------------

    def journal(self, event: str | None = None, node: str | None = None) -> list[Line]:
        """Return every event that the agents recorded (``--event-journal``), in order of time."""
        lines = self._journal.all() if event is None else self._journal.of(event)
        return [line for line in lines if node in (None, line.get("node"))]

    def worlds(self) -> dict[int, list[Line]]:
        """Return what every agent saw of each running generation."""
        seen: dict[int, list[Line]] = {}
        for line in self.journal("plan"):
            if line["phase"] == "running":
                seen.setdefault(line["generation"], []).append(line)
        return seen

    def marked_processes(self) -> list[int]:
        """Return the processes of this cluster that live."""
        found = []
        for process in linux.all_processes():
            if process.pid != os.getpid() and not process.dead:
                try:
                    marked = linux.environment(process.pid).get(self.mark_variable) == self.mark
                except OSError:
                    continue
                if marked:
                    found.append(process.pid)
        return found

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, awaited: str, look: Callable[[], T | None], timeout_s: float = WAIT_TIMEOUT_S) -> T:
        """Wait until ``look`` finds something.

        Raises:
            Exception: the time is over (``error``); the message tells what happened.
        """
        running = [agent.pid for agent in self._all if agent.runs]
        found = self._watch.until(look, timeout_s, running)
        if found is None:
            raise self.error(f"waited {timeout_s:g} s for {awaited}\n{self.story()}")
        return found

    def wait_event(self, event: str, node: str | None = None, **values: object) -> Line:
        """Wait until an agent recorded this event (with these values); returns the first such."""

        def look() -> Line | None:
            lines = self.journal(event, node)
            return next((line for line in lines if all(line.get(k) == v for k, v in values.items())), None)

        return self.wait(f"{event} of {node or 'any node'} {values or ''}", look)

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

        self._watch.until(lambda: not left(), timeout_s, watched)
        return left()

    def story(self) -> str:
        """Return a timeline of all events and the ends of all logs, for a message."""
        lines = sorted([*self.journal(), *self.more_lines()], key=lambda line: line["boottime_s"])
        start_s = lines[0]["boottime_s"] if lines else 0.0
        rows = [_row(line, start_s) for line in lines[-200:]]
        processes = {**self.agents, **self.servers}
        logs = [
            f"--- {name}.log\n{process.log.read_text(errors='replace')[-3000:]}"
            for name, process in processes.items()
        ]
        return "\n".join(["timeline:", *rows, *logs])

    def more_lines(self) -> list[Line]:
        """Return what belongs into the story besides the agents' events."""
        return []


def _own_environment() -> dict[str, str]:
    """Return our environment, without what would be taken for a setting."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PET_", PREFIX))}


def _row(line: dict[str, Any], start_s: float) -> str:
    skip = {"boottime_s", "time_s", "run", "event", "kind", "node", "worker_id", "run_id", "node_id"}
    who = line.get("node") or line.get("worker_id") or "?"
    event = line.get("event") or line.get("kind")
    rest = " ".join(f"{key}={value}" for key, value in line.items() if key not in skip and value is not None)
    return f"{line['boottime_s'] - start_s:9.3f}  {who:8} {event:16} {rest}"


FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Below those that the kernel gives to outgoing connections (32768 and up on Linux, ip_local_port_range), one of which
could take the port between the choice and the server's start."""


def free_port(taken: Container[int] = (), *, within: range = range(FIRST_PORT, LAST_PORT)) -> int:
    """Return a port of the loopback interface without a listener, one of ``within`` and not of ``taken``."""
    while True:
        port = secrets.choice(within)
        if port in taken:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
