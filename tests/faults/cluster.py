"""Several agents on this machine, each a node of its own, with everything they did on record."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.etcd import set_up_long_ago
from tests.ports import free_port
from tests.processes import freeze, parent_of, state_of, thaw

from .watching import FolderWatch

T = TypeVar("T")
Line = dict[str, Any]

TRAIN = Path(__file__).parent / "train.py"
HANDLING_NOTICES = Path(__file__).parent / "handling_notices.py"
COUNTING_SAMPLES = Path(__file__).parent / "counting_samples.py"
LEASE_S, MARGIN_S, SETTLE_S = 2.0, 0.5, 0.4
PATIENCE_S = 90.0
"""How long anything may take before a test fails; on a busy machine importing torch takes much of it."""
MARK = "ELASTIC_TEST_MARK"


@dataclass
class AgentProcess:
    """One running agent."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where this agent's part of the log begins; an earlier one of that name may have written before."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def guard(self) -> int:
        """The guard's pid."""
        return next(pid for pid in children(self.pid) if _command(pid).find(b"workers/guard/") >= 0)

    def said(self) -> str:
        """What this agent (and its workers) wrote to the console so far."""
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def lines(self, *words: str) -> list[str]:
        """Log lines that contain all of these words."""
        return [line for line in self.said().splitlines() if all(word in line for word in words)]

    def kill_agent(self) -> None:
        """SIGKILL to the agent alone."""
        os.kill(self.pid, signal.SIGKILL)

    def kill_node(self) -> None:
        """SIGKILL to everything at once, as a power cut would."""
        for pid in self._frozen():  # no process reacts before all are dead
            _send(pid, signal.SIGKILL)

    def freeze_agent(self) -> None:
        freeze(self.pid)

    def freeze_node(self) -> None:
        self._frozen()

    def _frozen(self) -> list[int]:
        """Stop the whole tree, what it forks meanwhile included."""
        stopped: dict[int, None] = {}
        while new := [pid for pid in (self.pid, *descendants(self.pid)) if pid not in stopped]:
            for pid in new:
                freeze(pid)
                stopped[pid] = None
        return list(stopped)

    def thaw(self) -> None:
        for pid in (self.pid, *descendants(self.pid)):
            thaw(pid)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def signal_all(self, signum: signal.Signals) -> None:
        """To every process below the agent, and then to the agent, as Slurm does with ``proctrack/linuxproc``."""
        for pid in (*reversed(descendants(self.pid)), self.pid):
            _send(pid, signum)


def _send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def children(pid: int) -> list[int]:
    return _parents().get(pid, [])


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, found by parents in /proc."""
    parents = _parents()
    found: list[int] = []
    todo = [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _parents() -> dict[int, list[int]]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents.setdefault(parent_of(int(entry)), []).append(int(entry))
    return parents


class Lines:
    """A file of JSON lines that others append to; reads on from where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._lines: list[Line] = []

    def all(self) -> list[Line]:
        """Everything so far, in order of time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        if whole:
            self._read += len(whole)
            self._lines += [json.loads(line) for line in whole.splitlines()]
            self._lines.sort(key=lambda line: line["boottime_s"])  # nearly sorted: cheap
        return self._lines


@dataclass
class Cluster:
    """Starts agents, injects faults, keeps the story."""

    folder: Path
    nnodes: str = "1:4"
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    endpoint_host: str = "127.0.0.1"
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    """By name, the newest of each."""
    run_id: str | None = "job"
    etcd: str | None = None
    """The members of the etcd to meet in; None: a c10d store at ``endpoint_host`` and ``port``."""
    etcd_is_new: bool = False
    """Nothing was there before, so that the first run in it waits for a lease and the margin."""

    def __post_init__(self) -> None:
        self._all_agents: list[AgentProcess] = []
        self.servers: dict[str, AgentProcess] = {}
        """Processes that host the store and train nothing, by name, the newest of each."""
        self._steps = Lines(self.folder / "steps.jsonl")
        self._journal = Lines(self.folder / "journal.jsonl")

    def __enter__(self) -> Cluster:
        self._watch = FolderWatch(self.folder)
        if self.etcd is not None and not self.etcd_is_new:
            set_up_long_ago(self.etcd, self._etcd_prefix)
        return self

    # -- agents ---------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        slots: int = 1,
        *options: str,
        node_id: str | None = "",
        state: str = "state",
        script: Path = TRAIN,
        arguments: Iterable[str] = (),
        within: Iterable[str] = (),
        **env: str,
    ) -> AgentProcess:
        """Start an agent.

        Args:
            name: what the test calls it; its node id too, unless ``node_id`` says otherwise (None: derived).
            slots: its workers.
            options: more of the agent's options.
            node_id: an explicit node id, or None for one that the agent derives.
            state: name of its state directory.
            script: what the workers run.
            arguments: its arguments, before ``--folder`` and the cluster's folder where it is one of these tests'.
            within: a command that starts the agent somewhere (in a network namespace).
            env: more of its environment.
        """
        chosen = name if node_id == "" else node_id
        command = [
            *within,
            *(sys.executable, "-m", "elastic_agent", "run"),
            *(*self._meeting(), "--nnodes", self.nnodes),
            *("--nproc-per-node", str(slots)),
            *(("--rdzv-id", self.run_id) if self.run_id is not None else ()),
            *(("--node-id", chosen) if chosen is not None else ()),
            *("--lease-ttl", str(LEASE_S), "--fence-margin", str(MARGIN_S), "--settle", str(SETTLE_S)),
            *("--state-dir", str(self.folder / state), "--log-dir", str(self.folder / "logs")),
            *("--event-journal", str(self.folder / "journal.jsonl"), "--log-format", "json"),
            *self.options,
            *options,
            *(str(script), *arguments),
            *(
                ("--folder", str(self.folder))
                if script in (TRAIN, HANDLING_NOTICES, COUNTING_SAMPLES)
                else ()
            ),
        ]
        agent = self.agents[name] = self._launch(name, command, {MARK: self.mark, **env})
        return agent

    def serve(self, name: str, *options: str, within: Iterable[str] = (), **env: str) -> AgentProcess:
        """Host the store without a node, with a state directory of its own; returns when it serves."""
        command = [
            *within,
            *(sys.executable, "-m", "elastic_agent", "serve", "--rdzv-endpoint"),
            *(f"{self.endpoint_host}:{self.port}", "--state-dir", str(self.folder / f"state-{name}")),
            *("--log-format", "json", *options),
        ]
        server = self.servers[name] = self._launch(name, command, env)
        self.wait_said(name, "serving at")
        return server

    def _launch(self, name: str, command: list[str], env: dict[str, str]) -> AgentProcess:
        log = self.folder / f"{name}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**_own_environment(), "OMP_NUM_THREADS": "1", **env},
            )
            agent = AgentProcess(name, process, log, file.tell())
        self._all_agents.append(agent)
        return agent

    def _meeting(self) -> tuple[str, ...]:
        """Where the agents meet, as options."""
        if self.etcd is None:
            return "--rdzv-endpoint", f"{self.endpoint_host}:{self.port}"
        return "--rdzv-backend", "etcd", "--rdzv-endpoint", self.etcd, "--etcd-prefix", self._etcd_prefix

    @property
    def _etcd_prefix(self) -> str:
        return f"/tests/{self.mark}"  # the etcd is shared

    def start_host(self, name: str, slots: int = 1, *options: str, **how: Any) -> AgentProcess:
        """Start an agent and wait until it hosts the store, or coordinates; the first to come does."""
        agent = self.start(name, slots, *options, **how)
        if self.etcd is None:
            self.wait_said(name, "hosting the store")
        else:
            self.wait_event("plan", name)  # no other agent can have written it
        return agent

    def order(self, worker_id: str, what: str) -> None:
        """Have a worker misbehave at the end of its next step (see train.py)."""
        draft = self.folder / f".order.{secrets.token_hex(4)}"
        draft.write_text(what)
        draft.rename(self.folder / f"order.{worker_id.replace('/', '.')}")

    def let_finish(self) -> None:
        """Training may end."""
        (self.folder / "finish").touch()

    # -- what happened --------------------------------------------------------------------------

    def steps(self) -> list[Line]:
        """Every step every worker took, in order of time."""
        return [line for line in self._steps.all() if line["kind"] == "step"]

    def born(self) -> list[Line]:
        """Every worker that came to user code, in order of time."""
        return [line for line in self._steps.all() if line["kind"] == "born"]

    def journal(self, event: str | None = None, node: str | None = None) -> list[Line]:
        """Every event every agent wrote down, in order of time."""
        return [
            line
            for line in self._journal.all()
            if event in (None, line["event"]) and node in (None, line.get("node"))
        ]

    def worlds(self) -> dict[int, list[Line]]:
        """What every agent saw of each running generation."""
        seen: dict[int, list[Line]] = {}
        for line in self.journal("plan"):
            if line["phase"] == "running":
                seen.setdefault(line["generation"], []).append(line)
        return seen

    def world(self, generation: int) -> dict[str, tuple[int, int]]:
        """A generation's nodes in order, with slots and first rank of each."""
        seats = self.worlds()[generation][0]["world"]
        return {node: (slots, first) for node, _, slots, first in seats}

    def order_of(self, generation: int) -> list[str]:
        """A generation's nodes in the order of their ranks."""
        return list(self.world(generation))

    def silence_s(self, generation: int) -> float:
        """How long no worker trained before this generation's workers were started."""
        last = max(one["boottime_s"] for one in self.steps() if one["generation"] < generation)
        starts = [one for one in self.journal("workers_started") if one["generation"] == generation]
        return float(min(one["boottime_s"] for one in starts) - last)

    def pid_of(self, worker_id: str) -> int:
        """The newest process of this worker."""
        return int([one["pid"] for one in self.born() if one["worker_id"] == worker_id][-1])

    def marked_processes(self) -> list[int]:
        """Processes of this test that live, wherever they hang in the process tree."""
        needle = f"{MARK}={self.mark}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid():
                with contextlib.suppress(OSError):
                    if (
                        state_of(int(entry)) not in "ZX"
                        and needle in Path(f"/proc/{entry}/environ").read_bytes()
                    ):
                        found.append(int(entry))
        return found

    # -- waiting --------------------------------------------------------------------------------

    def wait(self, what: str, look: Callable[[], T | None], timeout_s: float = PATIENCE_S) -> T:
        """Wait until ``look`` finds something; the failure tells the story."""
        running = [one.pid for one in self._all_agents if one.process.poll() is None]
        found = self._watch.until(look, timeout_s, running)
        if found is None:
            raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self.story()}")
        return found

    def wait_training(self, *nodes: str, after: int = 0, steps: int = 5) -> int:
        """Until exactly these nodes took ``steps`` steps together in a generation above ``after``; which one."""

        def look() -> int | None:
            newest = max((one["generation"] for one in self.steps()), default=0)
            taken = [one for one in self.steps() if one["generation"] == newest]
            enough = len({one["step"] for one in taken}) >= steps
            return (
                newest
                if newest > after and enough and {one["node_id"] for one in taken} == {*nodes}
                else None
            )

        return self.wait(f"{steps} steps of {', '.join(nodes)} in a generation above {after}", look)

    def wait_event(self, event: str, node: str | None = None, **values: object) -> Line:
        """Until an agent wrote this event down (with these values); the first such."""

        def look() -> Line | None:
            lines = self.journal(event, node)
            return next((one for one in lines if all(one.get(k) == v for k, v in values.items())), None)

        return self.wait(f"{event} of {node or 'any node'} {values or ''}", look)

    def wait_note(self, kind: str) -> Line:
        """Until a worker wrote down that it obeys an order of this kind (see train.py)."""
        return self.wait(
            f"a worker's {kind}",
            lambda: next((one for one in self._steps.all() if one["kind"] == kind), None),
        )

    def notes(self, kind: str) -> list[Line]:
        """What workers wrote down of this kind (see handling_notices.py), in order of time."""
        return [line for line in self._steps.all() if line["kind"] == kind]

    def wait_daemon(self) -> int:
        """Until a worker left a daemon behind; its pid."""
        return int(self.wait_note("daemon")["pid"])

    def wait_said(self, name: str, *words: str, timeout_s: float = PATIENCE_S) -> str:
        """Until this agent logged a line with all of these words."""
        agent = {**self.agents, **self.servers}[name]
        return self.wait(
            f"{name} to say {' … '.join(words)}", lambda: next(iter(agent.lines(*words)), None), timeout_s
        )

    def wait_end(self, *names: str, timeout_s: float = PATIENCE_S) -> dict[str, int]:
        """Until these agents (all by default) ended; their exit codes."""
        wanted = {name: self.agents[name] for name in names or self.agents}
        self.wait(
            f"the end of {', '.join(wanted)}",
            lambda: all(one.process.poll() is not None for one in wanted.values()),
            timeout_s,
        )
        return {name: int(one.process.returncode) for name, one in wanted.items()}

    def wait_gone(self, pids: Iterable[int], timeout_s: float = 5.0) -> list[int]:
        """Wait for these processes to end; those which did not."""
        watched = set(pids)
        left = lambda: [pid for pid in watched if _alive(pid)]  # noqa: E731 - used twice, right here
        self._watch.until(lambda: not left(), timeout_s, watched)
        return left()

    # -- the end --------------------------------------------------------------------------------

    def story(self) -> str:
        """A timeline of everything, for a failure's message."""
        lines = [*self.journal(), *self.born(), *self._last_steps()]
        lines.sort(key=lambda line: line["boottime_s"])
        start_s = lines[0]["boottime_s"] if lines else 0.0
        rows = [_row(line, start_s) for line in lines[-200:]]
        processes = {**self.agents, **self.servers}
        logs = [f"--- {name}.log\n{one.log.read_text()[-3000:]}" for name, one in processes.items()]
        return "\n".join(["timeline:", *rows, *logs])

    def _last_steps(self) -> list[Line]:
        """First and last step of each worker in each generation; all would drown the story."""
        ends: dict[tuple[Any, ...], list[Line]] = {}
        for one in self.steps():
            ends.setdefault((one["generation"], one["pid"]), []).append(one)
        return [line for ones in ends.values() for line in (ones[0], ones[-1])]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self._all_agents:
            if agent.process.poll() is None:
                agent.kill_node()
        for agent in self._all_agents:
            agent.process.wait()
        for pid in self.marked_processes():
            _send(pid, signal.SIGKILL)
        self._watch.__exit__(kind, error, trace)


def _alive(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def _own_environment() -> dict[str, str]:
    """Ours, without what would be taken for a setting."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("PET_", "ELASTIC_AGENT_"))
    }


def _row(line: Line, start_s: float) -> str:
    skip = {"boottime_s", "time_s", "run", "event", "kind", "node", "worker_id", "run_id", "node_id"}
    who = line.get("node") or line.get("worker_id") or "?"
    what = line.get("event") or line.get("kind")
    rest = " ".join(f"{key}={value}" for key, value in line.items() if key not in skip and value is not None)
    return f"{line['boottime_s'] - start_s:9.3f}  {who:8} {what:16} {rest}"
