"""What a cluster uses: processes, descriptors, memory, files, keys."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from elastic_agent import linux

from .cluster import SoakCluster

MIB = 1 << 20
VARIATION = 3
"""By how much a number may differ: with the node that coordinates, and what it has written at this moment. If each
fault left something, it would be hundreds."""


@dataclass(frozen=True)
class Agent:
    """What the agent of one node uses."""

    pid: int
    age_s: float
    memory: int
    """Bytes of its own data. Of mapped files, more or less is resident as the kernel sees fit."""
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Counts:
    """What all nodes use while they train; of their agents, the sum."""

    processes: int
    descriptors: int
    threads: int
    files: list[str]
    """In the state directories."""
    keys: list[str]
    """In the store."""

    def numbers(self) -> dict[str, int]:
        """Return how many of each."""
        return {name: value if isinstance(value, int) else len(value) for name, value in vars(self).items()}


def exceeding(before: Counts, after: Counts) -> list[str]:
    """Of which there is more than before."""
    found = []
    for (name, was), now in zip(before.numbers().items(), after.numbers().values(), strict=True):
        if now > was + VARIATION:
            value = getattr(after, name)
            new = [] if isinstance(value, int) else sorted({*value}.difference(getattr(before, name)))
            found.append(f"{name} {was} -> {now} {' '.join(new)}".strip())
    return found


def agent_of(cluster: SoakCluster, name: str, now_s: float) -> Agent:
    """``now_s``: seconds since the start of the soak test."""
    pid = cluster.agents[name].pid
    return Agent(
        pid,
        now_s,
        _own_bytes(pid),
        len(os.listdir(f"/proc/{pid}/fd")),
        len(linux.threads(pid)),
    )


def counts(cluster: SoakCluster) -> Counts:
    """As of now."""
    agents = [agent_of(cluster, name, 0.0) for name in cluster.names]
    state = cluster.folder / "state"
    return Counts(
        processes=len(cluster.marked_processes()),
        descriptors=sum(agent.descriptors for agent in agents),
        threads=sum(agent.threads for agent in agents),
        files=[str(path.relative_to(state)) for path in state.rglob("*") if path.is_file()],
        keys=cluster.keys(),
    )


def _own_bytes(pid: int) -> int:
    """Memory that its own data take, swapped or not, without files that are mapped. Raises OSError: it is gone."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_bytes().splitlines())
    return sum(int(line[1]) for line in lines if line[0] in (b"RssAnon:", b"VmSwap:")) * 1024
