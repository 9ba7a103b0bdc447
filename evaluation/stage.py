"""Agents on machines of their own (namespaces), and what their terminals show."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from elastic_agent.testing.node import NodeProcess
from tests.faults.cluster import Cluster
from tests.faults.machines import SUBNET, Machines

LINES = 20
"""Of a terminal: the first screen."""
LONGEST_LINE = 150
PATIENCE_S = 15.0
"""Nothing may stay silent for longer."""
START_S = 20.0
"""How long starting Python and torch may take on a busy machine, where that is part of the wait."""
FOLDER = Path(__file__).parent / "scripts"
FAULTY = FOLDER / "faulty.py"
SLEEPER = "import threading\n\nthreading.Event().wait()\n"


@dataclass(frozen=True)
class Words:
    """What a terminal is to show, as regular expressions. ``machine`` may be the node or a worker of it."""

    cause: str
    machine: str
    remedy: str

    def said(self, screen: str) -> str:
        """The last line that names the cause, without its beginning and its fields; empty: none does."""
        lines = [one for one in screen.splitlines() if re.search(self.cause, one)]
        text = re.sub(r"^\w+ +(\[[^\]]*\] )?", "", lines[-1] if lines else "")
        text = re.sub(r" (waited_s|endpoint|kind|check|nodes|tail)=.*", "", text).strip()
        return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE].rpartition(' ')[0]} …"

    def points(self, screen: str) -> int:
        """3: all of it; 2: cause and machine; 1: something went wrong; 0: nothing."""
        if re.search(self.cause, screen) and re.search(self.machine, screen):
            return 3 if re.search(self.remedy, screen) else 2
        return 1 if re.search(r"(?m)^(warning|error) |: error: |waiting for", screen) else 0


@dataclass
class Terminal:
    """What one terminal showed, and when."""

    node: str
    points: int
    after_s: float | None
    """From the fault, or else its first line, until cause and machine were shown; None: they never were."""
    screen: str
    said: str = ""
    """The line that names the cause."""


def plain(text: str) -> str:
    """Without times, which would differ from run to run."""
    return re.sub(r"(?m)^\d\d:\d\d:\d\d\.\d+ ", "", text)


def last_lines(text: str) -> str:
    """What fits on a screen."""
    return "\n".join(text.rstrip("\n").splitlines()[-LINES:])


@dataclass
class Stage:
    """Machines ``nodes``, one agent on each at most, and their terminals."""

    folder: Path
    nodes: tuple[str, ...] = ("a", "b")
    nnodes: str = ""
    run_id: str | None = "job"
    options: tuple[str, ...] = ()
    setups: dict[str, str] = field(default_factory=dict)
    """Commands for a shell on a machine before its agent starts."""

    def __post_init__(self) -> None:
        self.machines = Machines(self.nodes)
        self.since_s = 0.0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.machines.remove)
            self.machines.build()
            self.cluster = stack.enter_context(
                Cluster(
                    self.folder,
                    self.nnodes or str(len(self.nodes)),
                    ("--log-format", "console", *self.options),
                    endpoint_host=f"{SUBNET}.1",
                    run_id=self.run_id,
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    # -- before and at the start ----------------------------------------------------------------

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
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
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
        hosts = "".join(f"{SUBNET}.{number} host-{one}\n" for number, one in enumerate(self.nodes, 1))
        file = self.folder / "hosts"
        file.write_text(f"127.0.0.1 localhost\n{hosts}")
        prepare = f'hostname host-{node}; mount --bind {file} /etc/hosts; {setup or ":"}; exec "$@"'
        self.since_s = time.monotonic()
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

    def wait_first_end(self, timeout_s: float) -> None:
        """Wait until an agent has ended."""
        agents = self.cluster.agents.values()
        self.cluster.wait("an end", lambda: any(one.process.poll() is not None for one in agents), timeout_s)

    def fault(self) -> None:
        """The fault happens now."""
        self.since_s = time.monotonic()

    # -- the terminals --------------------------------------------------------------------------

    def screen(self, node: str) -> str:
        """The last lines of a terminal."""
        return last_lines(plain(self.cluster.agents[node].said()))

    def watch(
        self, expected: Mapping[str, Words], patience_s: float = PATIENCE_S + START_S
    ) -> list[Terminal]:
        """Wait until all terminals show what they should, or for ``patience_s``, and rate them."""
        shown: dict[str, Terminal] = {}
        began_s = self.since_s
        """Since when all terminals show something: before, Python and torch start."""

        def look() -> bool:
            nonlocal began_s
            now_s = time.monotonic()
            for node, words in expected.items():
                screen, before = self.screen(node), shown.get(node)
                points = words.points(screen)
                if before is not None and screen and not before.screen:
                    began_s = now_s
                after_s = before.after_s if before is not None else None
                if points >= 2 and after_s is None:
                    after_s = now_s - began_s
                shown[node] = Terminal(node, points, after_s, screen, words.said(screen))
            return all(one.points == 3 for one in shown.values())

        with suppress(AssertionError):
            self.cluster.wait("all terminals", look, patience_s)
        return [shown[node] for node in expected]
