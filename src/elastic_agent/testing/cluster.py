"""A cluster of several nodes on one machine: real agents over loopback, with real workers that run a script."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from elastic_agent import linux
from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.course import Course
from elastic_agent.testing.processes import (
    JOURNAL,
    WAIT_TIMEOUT_S,
    Agents,
    Line,
    Lines,
    NodeProcess,
    free_port,
)
from elastic_agent.worker_variables import PREFIX

LEASE_S, MARGIN_S, SETTLE_S = 4.0, 1.0, 3.0
"""As the agent's defaults, or a little shorter."""
OBSERVER = Path(__file__).with_name("observer.py")
DIE_SAVING = "die-saving"
"""The file that makes the next worker that saves die halfway (see ``observer.py``)."""
LEFT = (ExitCode.DRAINED, ExitCode.STOPPED)


class ClusterError(RuntimeError):
    """Something that was waited for did not happen; the message tells what did."""


class LocalCluster(Agents):
    """Nodes ``node-a``, ``node-b``, … on this machine, which run a training script.

    Each node has an agent with a guard and workers of its own, a state directory and a TMPDIR. The first node hosts the
    store. Home and working directory are those of the calling process, as on machines that share them.
    """

    error = ClusterError

    def __init__(
        self,
        script: list[str],
        folder: Path,
        *,
        nodes: int = 3,
        min_nodes: int = 1,
        max_nodes: int | None = None,
        nproc_per_node: int = 1,
        hang_timeout_s: float = 10.0,
        options: tuple[str, ...] = (),
        working_folder: Callable[[str], Path] | None = None,
    ) -> None:
        """Prepare the cluster; nothing is started yet.

        Args:
            script: the script and its arguments, or ``-m``, a module and its arguments.
            folder: for everything that the cluster writes; exists, and is empty.
            nodes: how many nodes :meth:`start_all` starts.
            min_nodes: with how many training goes on.
            max_nodes: how many there can be, with those that join; ``nodes`` by default.
            nproc_per_node: workers of each node.
            hang_timeout_s: the agents' ``--hang-timeout``.
            options: more options of the agents.
            working_folder: where the workers of a node run; the current folder by default.
        """
        super().__init__(folder)
        self.script = script
        self.names = [f"node-{chr(ord('a') + number)}" for number in range(nodes)]
        self.run_id = f"chaos-{self.mark}"
        self.hang_timeout_s = hang_timeout_s
        self._nproc = nproc_per_node
        self._working_folder = working_folder or (lambda _: Path.cwd())
        self._options = (
            *("--rdzv-id", self.run_id, "--nnodes", f"{min_nodes}:{max(nodes, max_nodes or 0)}"),
            *("--nproc-per-node", str(nproc_per_node), "--max-restarts", "1000"),
            *("--lease-ttl", str(LEASE_S), "--fence-margin", str(MARGIN_S), "--settle", str(SETTLE_S)),
            *("--hang-timeout", str(hang_timeout_s), "--log-format", "console"),
            *("--log-dir", str(folder / "logs"), "--event-journal", str(folder / JOURNAL)),
            *options,
        )
        self._port = free_port()
        self._secret = secrets.token_hex(32)
        self._machines: list[Path] = []
        self._records = Lines(folder / "records.jsonl")
        self._course = Course()
        self._fed = 0

    # -- nodes ----------------------------------------------------------------------------------

    @property
    def host(self) -> str:
        """The node that hosts the store; empty if none does."""
        return self.names[0]

    @property
    def spared(self) -> set[str]:
        """The nodes that no fault of a whole node hits."""
        return {self.host}

    def start_all(self) -> None:
        """Start every node, the host of the store first."""
        for name in self.names:
            self.start(name)
            if name == self.host:
                self.wait_said(name, "hosting the store")

    def start(self, name: str, *, new_machine: bool = True) -> NodeProcess:
        """Start a node. ``new_machine``: its TMPDIR is empty, as on a machine that replaces another."""
        if name not in self.names:
            self.names.append(name)
        state = self.folder / "state" / name
        state.mkdir(parents=True, exist_ok=True)
        agent = (
            sys.executable,
            "-P",
            "-c",
            linux.ENDS_WITH_PARENT,
            str(os.getpid()),
            "-P",
            "-m",
            "elastic_agent",
        )
        command = [
            *(*agent, "run", *self.rendezvous(name), "--node-id", name, "--state-dir", str(state)),
            *(*self._options, str(OBSERVER), str(self.folder), *self.script),
        ]
        environment = {"TMPDIR": str(self._temp(name, new_machine)), PREFIX + "SECRET": self._secret}
        self.agents[name] = self.launch(name, command, environment, self._working_folder(name))
        return self.agents[name]

    def _temp(self, name: str, new_machine: bool) -> Path:
        earlier = [folder for folder in self._machines if folder.name.partition("-")[2] == name]
        if earlier and not new_machine:
            return earlier[-1]
        folder = self.folder / "machines" / f"{len(self._machines)}-{name}"
        folder.mkdir(parents=True)
        self._machines.append(folder)
        return folder

    def rendezvous(self, name: str) -> tuple[str, ...]:
        """Return the options of this node's agent that say where it reaches the store."""
        return "--rdzv-endpoint", f"127.0.0.1:{self._port}"

    # -- workers --------------------------------------------------------------------------------

    def workers(self) -> dict[str, int]:
        """Return the newest process of each worker that lives, by worker id."""
        newest = {line["worker"]: int(line["pid"]) for line in self.records("born")}
        return {worker: pid for worker, pid in newest.items() if linux.start_ticks(pid) is not None}

    def command(self, *arguments: str, timeout_s: float = WAIT_TIMEOUT_S) -> str:
        """Run ``elastic-agent`` with these words, for this run; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "elastic_agent", *arguments, "--run", self.run_id],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise ClusterError(
                f"elastic-agent {' '.join(arguments)} ended with {done.returncode}: {done.stdout}"
            )
        return done.stdout

    # -- what happened --------------------------------------------------------------------------

    def records(self, kind: str | None = None) -> list[Line]:
        """Return what workers did (see ``observer.py``), in order of time."""
        return [*(self._records.all() if kind is None else self._records.of(kind))]

    def more_lines(self) -> list[Line]:
        return [line for line in self.records() if line["kind"] not in ("step", "stepped", "beat")]

    @property
    def generation(self) -> int:
        """The newest generation that has workers; 0 before the first."""
        return max((int(line["generation"]) for line in self.records("born")), default=0)

    @property
    def course(self) -> Course:
        """The course of training so far."""
        for line in self._records.arrived(self._fed):
            self._course.feed(line)
            self._fed += 1
        return self._course

    def is_over(self) -> bool:
        """Return whether the run has ended: no agent runs, or one has ended by itself other than by leaving the run."""
        codes = [agent.process.poll() for agent in self.agents.values()]
        return None not in codes or any(code is not None and code >= 0 and code not in LEFT for code in codes)

    def wait_training(
        self, *nodes: str, after: int = 0, steps: int = 2, timeout_s: float = WAIT_TIMEOUT_S
    ) -> int:
        """Wait until exactly these nodes made ``steps`` steps in a generation above ``after``.

        Returns:
            The number of the generation; 0 if the run has ended.
        """

        def trained() -> int:
            newest = self.course.newest
            if newest is None or newest.number <= after or newest.nodes != {*nodes}:
                return 0
            is_complete = (
                len(newest.steps) == self._nproc * len(nodes) and min(newest.steps.values()) >= steps
            )
            return newest.number if is_complete else 0

        awaited = f"{steps} steps of {', '.join(nodes)} in a generation above {after}"
        return max(0, self.wait(awaited, lambda: trained() or (-1 if self.is_over() else None), timeout_s))
