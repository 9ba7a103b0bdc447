"""Records of an examination: the task of the worker, and what the machines exchange."""

from __future__ import annotations

from msgspec import Struct

from elastic_agent.agent.preflight import Finding
from elastic_agent.values import PortRange

from .connections import Connection, Place
from .folders import Shared

TASK, GATHERED = "task", "gathered"
"""Files by which the command and its worker tell each other."""


class Reduced(Struct, frozen=True):
    """The result of an all-reduce on one machine."""

    problem: str = ""
    took_s: float = 0.0


class Local(Struct, frozen=True):
    """The facts of one machine, and its problems."""

    machine: str
    least: int
    most: int
    """The smallest and the largest number of nodes, of the settings on this machine."""
    gpus: int = 0
    has_torch: bool = False
    """Its interpreter imports torch."""
    facts: dict[str, str] = {}
    """The facts that are to be the same on all machines, by name."""
    findings: tuple[Finding, ...] = ()
    shared: tuple[Shared, ...] = ()
    """The folders of ``--paths`` on this machine."""


class Task(Struct, frozen=True):
    """The task that the command gives its worker."""

    local: Local
    python: str
    """The interpreter of the script."""
    ports: PortRange | None = None
    """``--port-range``."""
    address: str | None = None
    """Of ``--local-addr``."""
    etcd: tuple[tuple[str, int], ...] = ()
    """Hosts and ports of the etcd that machines of the run host together."""


class Arrived(Struct, frozen=True):
    """A machine that takes part."""

    local: Local
    place: Place
    interface: str
    """The interface of its address; empty: not known."""
    token: str
    """The first machine's is in the names of the files in shared folders."""


class Surroundings(Struct, frozen=True):
    """The results of connections to the others, and the shared folders as one machine finds them."""

    connections: tuple[Connection, ...]
    shared: tuple[Shared, ...]
    closed: tuple[str, ...] = ()
    """Ports of etcd that do not accept its connections."""


class Ended(Struct, frozen=True):
    """The files of the others that one machine sees in the shared folders, and its all-reduces by their backends."""

    seen: tuple[tuple[int, ...], ...]
    """For each folder of ``--paths``: the ranks whose files this machine sees."""
    reduced: dict[str, Reduced]


class Gathered(Struct, frozen=True):
    """The records of all machines, by rank; without those that did not come in time."""

    size: int
    """The number of machines that take part."""
    arrived: dict[int, Arrived]
    tested: dict[int, Surroundings]
    ended: dict[int, Ended]
