"""Failures of agents on machines of their own (namespaces), and what the terminals are to show of each."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.testing.processes import NodeProcess
from tests.faults.cluster import Cluster
from tests.faults.machines import SUBNET, Machines, built

LINES = 20
"""The first screen of a terminal."""
PATIENCE_S = 35.0
"""How long a terminal may stay silent: 15 s, and the start of Python and torch on a busy machine."""
FOLDER = Path(__file__).parent / "scripts"
FAULTY = FOLDER / "faulty.py"
SLEEPER = "import threading\n\nthreading.Event().wait()\n"


@dataclass(frozen=True)
class Words:
    """What a terminal is to show, as regular expressions. ``machine`` may be the node or a worker of it."""

    cause: str
    machine: str
    remedy: str

    def are_on(self, screen: str) -> bool:
        return all(re.search(part, screen) for part in (self.cause, self.machine, self.remedy))


@dataclass(frozen=True)
class Case:
    """One failure on a stage of its own."""

    name: str
    play: Callable[[Stage], None]
    """Starts the agents and makes the failure."""
    expected: Mapping[str, Words]
    """By node; a machine that no agent runs on has no terminal."""
    nodes: tuple[str, ...] = ("a", "b")
    nnodes: str = ""
    run_id: str | None = "job"


def plain(text: str) -> str:
    """Without times, which would differ from run to run."""
    return re.sub(r"(?m)^\d\d:\d\d:\d\d\.\d+ ", "", text)


def last_lines(text: str) -> str:
    """What fits on a screen."""
    return "\n".join(text.rstrip("\n").splitlines()[-LINES:])


@contextmanager
def staged(
    folder: Path,
    nodes: tuple[str, ...] = ("a", "b"),
    nnodes: str = "",
    run_id: str | None = "job",
    options: tuple[str, ...] = (),
) -> Iterator[Stage]:
    """Make machines, on each of which one agent can be started."""
    options = ("--log-format", "console", *options)
    with (
        built(*nodes) as machines,
        Cluster(
            folder, nnodes or str(len(nodes)), options, endpoint_host=f"{SUBNET}.1", run_id=run_id
        ) as cluster,
        ExitStack() as background,
    ):
        yield Stage(folder, nodes, machines, cluster, background)


@dataclass(frozen=True)
class Stage:
    """Machines, one agent on each at most, and their terminals."""

    folder: Path
    nodes: tuple[str, ...]
    machines: Machines
    cluster: Cluster
    _background: ExitStack

    def shell(self, node: str, commands: str) -> str:
        """Run commands on a machine, now; what they write."""
        words = (*self.machines.within(node), "sh", "-ec", commands)
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout

    def block(self, node: str, *rules: str) -> None:
        """Rules of nftables for what comes to a machine."""
        lines = ["add table inet f", "add chain inet f in { type filter hook input priority 0 ; }"]
        lines += [f"add rule inet f in iifname eth0 {rule}" for rule in rules]
        words = (*self.machines.within(node), "nft", "; ".join(lines))
        subprocess.run(words, check=True, capture_output=True, text=True)

    def background(self, node: str, *command: str, port: int) -> None:
        """Run a server on a machine to the end; returns when it listens at this port."""
        process = subprocess.Popen((*self.machines.within(node), *command), stderr=subprocess.DEVNULL)
        self._background.callback(process.wait)
        self._background.callback(process.kill)
        while f":{port} " not in self.shell(node, "ss -ltn"):
            assert process.poll() is None

    def write(self, name: str, text: str) -> Path:
        """A file that all machines see."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(
        self,
        node: str,
        *options: str,
        slots: int = 1,
        script: Path | None = None,
        arguments: tuple[str, ...] = (),
        setup: str = "",
        node_id: str | None = "",
        under: tuple[str, ...] = (),
        state: str | None = None,
        name: str = "",
        **env: str,
    ) -> NodeProcess:
        """Start an agent on a machine with a host name of its own, such as host-a."""
        hosts = "".join(f"{SUBNET}.{number} host-{name}\n" for number, name in enumerate(self.nodes, 1))
        file = self.folder / "hosts"
        file.write_text(f"127.0.0.1 localhost\n{hosts}")
        prepare = f'hostname host-{node}; mount --bind {file} /etc/hosts; {setup or ":"}; exec "$@"'
        return self.cluster.start(
            name or node,
            slots,
            *options,
            node_id=node if node_id == "" else node_id,
            state=state or f"state-{node}",
            script=script if script is not None else self.write("sleeper.py", SLEEPER),
            arguments=arguments,
            within=(*self.machines.within(node), "unshare", "--uts", "sh", "-ec", prepare, "sh", *under),
            SCREEN_FOLDER=str(self.folder),
            **env,
        )

    def start_all(self, *options: str, **how: object) -> None:
        """The same command on all machines."""
        for node in self.nodes:
            self.start(node, *options, **how)  # type: ignore[arg-type]

    def said(self, node: str, words: str, timeout_s: float = 90.0) -> None:
        """Wait until a terminal shows these words (a regular expression)."""
        agent = self.cluster.agents[node]
        self.cluster.wait(
            f"{node} to say {words}", lambda: re.search(words, plain(agent.said())) is not None, timeout_s
        )

    def screen(self, node: str) -> str:
        """The last lines of a terminal."""
        return last_lines(plain(self.cluster.agents[node].said()))

    def check(self, expected: Mapping[str, Words]) -> None:
        """Check that each terminal shows cause, machine and remedy before long."""

        def lacking() -> dict[str, str]:
            screens = {node: self.screen(node) for node in expected}
            return {node: screen for node, screen in screens.items() if not expected[node].are_on(screen)}

        with suppress(AssertionError):
            self.cluster.wait("all terminals", lambda: not lacking() or None, PATIENCE_S)
        assert not lacking(), "\n".join(
            f"terminal of {node}:\n{screen}" for node, screen in lacking().items()
        )
