"""Several agents on this machine, each a node of its own, with everything they did on record."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from .watching import FolderWatch

T = TypeVar("T")
Line = dict[str, Any]

TRAIN = Path(__file__).parent / "train.py"
LEASE_S, MARGIN_S, SETTLE_S = 2.0, 0.5, 0.4
MARK = "ELASTIC_TEST_MARK"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class AgentProcess:
    """One running agent."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def tree(self) -> list[int]:
        """The agent and everything below it."""
        return [self.pid, *descendants(self.pid)]

    def kill_agent(self) -> None:
        """SIGKILL to the agent alone."""
        os.kill(self.pid, signal.SIGKILL)

    def kill_node(self) -> None:
        """SIGKILL to everything at once, as a power cut would."""
        pids = self.tree()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # nobody reacts before all are dead
        for pid in [*pids, *self.tree()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze_agent(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def freeze_node(self) -> None:
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, found by parents in /proc."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


@dataclass
class Cluster:
    """Starts agents, injects faults, keeps the story."""

    folder: Path
    nnodes: str = "1:4"
    train: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    run_id: str = "job"

    def __enter__(self) -> Cluster:
        self._watch = FolderWatch(self.folder)
        return self

    # -- agents ---------------------------------------------------------------------------------

    def start(self, name: str, slots: int = 1, *options: str, script: Path = TRAIN, **env: str) -> AgentProcess:
        """Start the agent of node ``name``."""
        log = self.folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "elastic_agent", "run"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--nnodes", self.nnodes),
            *("--nproc-per-node", str(slots), "--rdzv-id", self.run_id, "--node-id", name),
            *("--lease-ttl", str(LEASE_S), "--fence-margin", str(MARGIN_S), "--settle", str(SETTLE_S)),
            *("--state-dir", str(self.folder / "state"), "--log-dir", str(self.folder / "logs")),
            *("--event-journal", str(self.folder / "journal.jsonl"), "--log-format", "json"),
            *self.options,
            *options,
            str(script),
            *("--folder", str(self.folder), *self.train),
        ]
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", **env},
            )
        agent = AgentProcess(name, process, log)
        self.agents[name] = agent
        return agent

    # -- what happened --------------------------------------------------------------------------

    def steps(self) -> list[Line]:
        """Every step every worker took, in order of time."""
        return [line for line in self._lines("steps.jsonl") if line["kind"] == "step"]

    def journal(self, event: str | None = None, node: str | None = None) -> list[Line]:
        """Every event every agent wrote down, in order of time."""
        return [
            line
            for line in self._lines("journal.jsonl")
            if event in (None, line["event"]) and node in (None, line.get("node"))
        ]

    def _lines(self, name: str) -> list[Line]:
        try:
            text = (self.folder / name).read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1]
        return sorted((json.loads(line) for line in whole.splitlines()), key=lambda line: line["boottime_s"])

    def worlds(self) -> dict[int, list[Line]]:
        """What every agent saw of each running generation."""
        seen: dict[int, list[Line]] = {}
        for line in self.journal("plan"):
            if line["phase"] == "running":
                seen.setdefault(line["generation"], []).append(line)
        return seen

    def marked_processes(self) -> list[int]:
        """Processes of this test that live, wherever they hang in the process tree."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX" and needle in Path(f"/proc/{entry}/environ").read_bytes():
                        found.append(int(entry))
        return found

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, what: str, look: Callable[[], T | None], timeout_s: float = 40.0) -> T:
        """Wait until ``look`` finds something; the failure tells the story."""
        found = self._watch.until(look, timeout_s)
        if found is None:
            raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self.story()}")
        return found

    def wait_steps(self, count: int, *, generation: int | None = None, nodes: set[str] | None = None) -> list[Line]:
        """Until ``count`` steps were taken (in a generation from ``generation`` on, by exactly these nodes)."""

        def look() -> list[Line] | None:
            steps = [one for one in self.steps() if generation is None or one["generation"] >= generation]
            if nodes is not None:
                newest = max((one["generation"] for one in steps), default=0)
                steps = [one for one in steps if one["generation"] == newest]
                if {one["node_id"] for one in steps} != nodes:
                    return None
            return steps if len({(one["generation"], one["step"]) for one in steps}) >= count else None

        return self.wait(f"{count} steps of nodes {nodes or 'any'} from generation {generation or 1} on", look)

    def wait_end(self, *names: str, timeout_s: float = 60.0) -> dict[str, int]:
        """Until these agents (all by default) ended; their exit codes."""
        wanted = {name: self.agents[name] for name in names or self.agents}
        self.wait(
            f"the end of {', '.join(wanted)}",
            lambda: all(one.process.poll() is not None for one in wanted.values()),
            timeout_s,
        )
        return {name: int(one.process.returncode) for name, one in wanted.items()}

    def wait_none_left(self, timeout_s: float = 5.0) -> list[int]:
        """Processes that are still there after a while, which should be none."""
        self._watch.until(lambda: not self.marked_processes(), timeout_s)
        return self.marked_processes()

    # -- the end --------------------------------------------------------------------------------

    def story(self) -> str:
        """A timeline of everything, for a failure's message."""
        lines = [*self._lines("journal.jsonl"), *self._last_steps()]
        lines.sort(key=lambda line: line["boottime_s"])
        start_s = lines[0]["boottime_s"] if lines else 0.0
        rows = [_row(line, start_s) for line in lines[-200:]]
        logs = [f"--- {name}.log\n{one.log.read_text()[-3000:]}" for name, one in self.agents.items()]
        return "\n".join(["timeline:", *rows, *logs])

    def _last_steps(self) -> list[Line]:
        """First and last step of each worker in each generation; all would drown the story."""
        ends: dict[tuple[Any, ...], list[Line]] = {}
        for one in self.steps():
            ends.setdefault((one["generation"], one["worker_id"]), []).append(one)
        return [line for ones in ends.values() for line in (ones[0], ones[-1])]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            if agent.process.poll() is None:
                agent.kill_node()
        for agent in self.agents.values():
            agent.process.wait()
        for pid in self.marked_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._watch.__exit__(kind, error, trace)


def _row(line: Line, start_s: float) -> str:
    skip = {"boottime_s", "time_s", "run", "event", "kind", "node", "worker_id"}
    who = line.get("node") or line.get("worker_id") or "?"
    what = line.get("event") or line.get("kind")
    rest = " ".join(f"{key}={value}" for key, value in line.items() if key not in skip and value is not None)
    return f"{line['boottime_s'] - start_s:9.3f}  {who:8} {what:16} {rest}"
