"""Several agents on this machine, each a node of its own, that run these tests' training scripts."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from elastic_agent import linux
from elastic_agent.testing.processes import JOURNAL, Agents, Line, Lines, NodeProcess
from tests.cli.support import elastic_agent
from tests.etcd import set_up_long_ago
from tests.names import unique
from tests.ports import free_port
from tests.processes import Processes

TRAIN = Path(__file__).parent / "train.py"
HANDLING_NOTICES = Path(__file__).parent / "handling_notices.py"
COUNTING_SAMPLES = Path(__file__).parent / "counting_samples.py"
SAVING = Path(__file__).parent / "saving_on_sigterm.py"
LEASE_S, MARGIN_S, SETTLE_S = 30.0, 1.0, 0.4
SHORT_LEASE_S, SHORT_MARGIN_S = 2.0, 0.5
"""For tests of `make prove`, which run on an idle machine."""
EXPIRING_LEASE_S = 4.0
"""For stories about a lease that expires. A machine that stands still for longer costs them another generation."""
UNIQUE = ""


def worlds_of(agents: Agents) -> dict[int, list[Line]]:
    """Return what every agent saw of each running generation."""
    seen: dict[int, list[Line]] = {}
    for line in agents.journal("plan"):
        if line["phase"] == "running":
            seen.setdefault(line["generation"], []).append(line)
    return seen


class Cluster(Processes):
    """Starts agents, orders faults, keeps the story of their training."""

    mark_variable = "ELASTIC_TEST_MARK"

    def __init__(
        self,
        folder: Path,
        nnodes: str = "1:4",
        options: tuple[str, ...] = (),
        *,
        port: int | None = None,
        endpoint_host: str = "127.0.0.1",
        run_id: str | None = UNIQUE,
        etcd: str | None = None,
        hosts: tuple[str, ...] = (),
        lease_s: float = LEASE_S,
        margin_s: float = MARGIN_S,
        alone: bool = False,
    ) -> None:
        """Nothing is started yet.

        Args:
            folder: exists, and is this cluster's alone.
            nnodes: the agents' ``--nnodes``.
            options: more options of all agents.
            port: of the c10d store; a free one by default.
            endpoint_host: of the c10d store.
            run_id: the agents' ``--rdzv-id``, by default one that no other cluster has; None: they derive it.
            etcd: the members of the etcd to meet in; None: a c10d store at ``endpoint_host`` and ``port``.
            hosts: machines that host the store together, at ``port``; none: only ``endpoint_host`` does.
            lease_s: the agents' ``--lease-ttl``.
            margin_s: the agents' ``--fence-margin``.
            alone: ``train.py`` uses no collectives, and no worker imports torch.
        """
        super().__init__(folder)
        self.nnodes = nnodes
        self.options = options
        self.port = free_port() if port is None else port
        self.endpoint_host = endpoint_host
        self.run_id = unique("run") if run_id == UNIQUE else run_id
        self.etcd = etcd
        self.hosts = hosts
        self.lease_s = lease_s
        self.margin_s = margin_s
        self.alone = alone
        # The folder's disk does not get full: a damaged line is a bug.
        self._journal = Lines(folder / JOURNAL, "event", strict=True)
        self._steps = Lines(folder / "steps.jsonl", strict=True)

    def __enter__(self) -> Self:
        super().__enter__()
        if self.etcd is not None:
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
    ) -> NodeProcess:
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
            *(
                "--lease-ttl",
                str(self.lease_s),
                "--fence-margin",
                str(self.margin_s),
                "--settle",
                str(SETTLE_S),
            ),
            *("--state-dir", str(self.folder / state), "--log-dir", str(self.folder / "logs")),
            *("--event-journal", str(self.folder / JOURNAL), "--log-format", "json"),
            *("--start-timeout", "120"),  # importing torch takes long on a busy machine
            *(("--worker-start", "cold") if self.alone else ()),
            *self.options,
            *options,
            *(str(script), *arguments),
            *(("--alone",) if self.alone and script == TRAIN else ()),
            *(
                ("--folder", str(self.folder))
                if script in (TRAIN, HANDLING_NOTICES, COUNTING_SAMPLES)
                else ()
            ),
        ]
        agent = self.agents[name] = self.launch(name, command, env)
        return agent

    def serve(self, name: str, *options: str, within: Iterable[str] = (), **env: str) -> NodeProcess:
        """Host the store without a node, with a state directory of its own; returns when it serves."""
        command = [
            *within,
            *(sys.executable, "-m", "elastic_agent", "serve", "--rdzv-endpoint"),
            *(f"{self.endpoint_host}:{self.port}", "--state-dir", str(self.folder / f"state-{name}")),
            *("--log-format", "json", *options),
        ]
        # Without the mark: it outlives the agents, of which nothing may be left.
        server = self.servers[name] = self.launch(name, command, {self.mark_variable: "", **env})
        self.wait_said(name, "serving at")
        return server

    def _meeting(self) -> tuple[str, ...]:
        """Return where the agents meet, as options."""
        if self.etcd is None:
            hosts = self.hosts or (self.endpoint_host,)
            return "--rdzv-endpoint", ",".join(f"{host}:{self.port}" for host in hosts)
        return "--rdzv-backend", "etcd", "--rdzv-endpoint", self.etcd, "--etcd-prefix", self._etcd_prefix

    @property
    def _etcd_prefix(self) -> str:
        return f"/tests/{self.mark}"  # the etcd is shared

    def start_host(self, name: str, slots: int = 1, *options: str, **how: Any) -> NodeProcess:
        """Start an agent and wait until it hosts the store, or coordinates; the first to come does."""
        agent = self.start(name, slots, *options, **how)
        if self.etcd is None:
            self.wait_said(name, "hosting the store")
        else:
            self.wait_event("plan", name)  # no other agent can have written it
        return agent

    def start_training(self, *nodes: str) -> int:
        """Start these nodes with one worker each, the first as the store's host; returns when all train, and where."""
        for node in nodes:
            (self.start if self.agents else self.start_host)(node)
        return self.wait_training(*nodes)

    def start_saving(self, **save_s: float) -> None:
        """Start a node of each name whose worker saves for so long when it gets SIGTERM; returns when all work."""
        for node in save_s:
            start = self.start if self.agents else self.start_host
            start(node, script=SAVING, arguments=(str(self.folder), json.dumps(save_s)))
        for node in save_s:
            self.wait_event("state", node, state="running")
        self.wait("all workers", lambda: {worker["node_id"] for worker in self.born()} == {*save_s} or None)

    def order(self, worker_id: str, what: str) -> None:
        """Have a worker misbehave at the end of its next step (see train.py)."""
        draft = self.folder / f".order.{secrets.token_hex(4)}"
        draft.write_text(what)
        draft.rename(self.folder / f"order.{worker_id.replace('/', '.')}")

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ``elastic-agent`` for this run."""
        return elastic_agent(*words, "--run", str(self.run_id))

    def signal_all(self, node: str, signum: int) -> None:
        """Send all processes below an agent a signal, then the agent, as Slurm does with ``proctrack/linuxproc``."""
        agent = self.agents[node].pid
        for process in reversed([*linux.descendants(agent)]):
            linux.send_signal(process.pid, signum)
        linux.send_signal(agent, signum)

    def let_finish(self) -> None:
        """Training may end."""
        (self.folder / "finish").touch()

    # -- what happened --------------------------------------------------------------------------

    def steps(self) -> list[Line]:
        """Every step every worker took, in order of time."""
        return self.notes("step")

    def born(self) -> list[Line]:
        """Every worker that came to user code, in order of time."""
        return self.notes("born")

    def worlds(self) -> dict[int, list[Line]]:
        """Return what every agent saw of each running generation."""
        return worlds_of(self)

    def world(self, generation: int) -> dict[str, tuple[int, int]]:
        """A generation's nodes in order, with slots and first rank of each."""
        seats = self.worlds()[generation][0]["world"]
        return {node: (slots, first) for node, _, slots, first in seats}

    def pid_of(self, worker_id: str) -> int:
        """The newest process of this worker."""
        return int([worker["pid"] for worker in self.born() if worker["worker_id"] == worker_id][-1])

    # -- waiting --------------------------------------------------------------------------------

    def wait_event(self, event: str, node: str | None = None, **values: object) -> Line:
        """Wait until an agent recorded this event (with these values); returns the first such."""

        def look() -> Line | None:
            lines = self.journal(event, node)
            return next((line for line in lines if all(line.get(k) == v for k, v in values.items())), None)

        return self.wait(f"{event} of {node or 'any node'} {values or ''}", look)

    def wait_training(self, *nodes: str, after: int = 0, steps: int = 5) -> int:
        """Until exactly these nodes took ``steps`` steps together in a generation above ``after``; which one."""

        def look() -> int | None:
            newest = max((step["generation"] for step in self.steps()), default=0)
            taken = [step for step in self.steps() if step["generation"] == newest]
            enough = len({step["step"] for step in taken}) >= steps
            return (
                newest
                if newest > after and enough and {step["node_id"] for step in taken} == {*nodes}
                else None
            )

        return self.wait(f"{steps} steps of {', '.join(nodes)} in a generation above {after}", look)

    def wait_steps(self, count: int) -> None:
        """Until so many more steps were taken."""
        reached = self.steps()[-1]["step"]
        self.wait(f"{count} more steps", lambda: self.steps()[-1]["step"] >= reached + count or None)

    def notes(self, kind: str) -> list[Line]:
        """Return what workers wrote down of this kind (see notes.py), in order of time."""
        return [*self._steps.of(kind)]

    def wait_daemon(self) -> int:
        """Until a worker left a daemon behind; its pid."""
        return int(self.wait("a daemon", lambda: next(iter(self.notes("daemon")), None))["pid"])

    def more_lines(self) -> list[Line]:
        return [*self.born(), *self._last_steps()]

    def _last_steps(self) -> list[Line]:
        """First and last step of each worker in each generation; all would drown the story."""
        ends: dict[tuple[Any, ...], list[Line]] = {}
        for step in self.steps():
            ends.setdefault((step["generation"], step["pid"]), []).append(step)
        return [line for ones in ends.values() for line in (ones[0], ones[-1])]
