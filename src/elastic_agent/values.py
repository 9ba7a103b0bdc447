"""Small typed values that settings have and that the packages below the settings use as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME_PATTERN = r"(?!\.{1,2}\Z)[A-Za-z0-9._:@+-]{1,128}"
"""The pattern of names of runs, nodes and incarnations: parts of keys and of paths, so never `.` or `..`."""

DEFAULT_PORT = 29400
"""The rendezvous port when the endpoint names none (torch's own for its c10d backend)."""

ETCD_PORT = 2379
"""The same for etcd (its own usual port)."""

# Bounds of settings that the records of the protocol have too.
MOST_NODES = 65_536
MOST_SLOTS = 65_536
LONGEST_TIME_S = 1e7
"""Four months."""
SHORTEST_LEASE_S = 0.5
LONGEST_LEASE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The rendezvous endpoint. ``host``: a name or an address, IPv6 without brackets; port 0: any free port."""

    host: str
    port: int = DEFAULT_PORT
    others: tuple[Endpoint, ...] = ()
    """More members of the same cluster (etcd); any of them will do."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return ",".join((f"{host}:{self.port}", *map(str, self.others)))

    @property
    def members(self) -> tuple[Endpoint, ...]:
        """Every member by itself, in the order given."""
        return (Endpoint(self.host, self.port), *self.others)


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports ``low`` to ``high``, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The access to an etcd, and the prefix of our keys in it."""

    prefix: str = "/elastic-agent"
    ca: Path | None = None
    """The certificates to trust; with any of these three given, connections are encrypted."""
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def tls(self) -> bool:
        """True if connections are encrypted."""
        return any((self.ca, self.cert, self.key))


def largest_world(nodes: int, least: int, most: int, counts: tuple[int, ...]) -> int:
    """Return how many of so many nodes a world may have; 0 if it may have none.

    Args:
        nodes: how many there are.
        least: how many a world has at least.
        most: how many at most.
        counts: which numbers are allowed: none given, any; one, its multiples; several, these.

    >>> largest_world(7, 1, 8, (2,)), largest_world(7, 1, 8, (1, 2, 4, 8)), largest_world(1, 1, 8, (2,))
    (6, 4, 0)
    """
    bound = min(nodes, most)
    if not counts:
        fitting = bound
    elif len(counts) == 1:
        fitting = bound - bound % counts[0]
    else:
        fitting = max((count for count in counts if count <= bound), default=0)
    return fitting if fitting >= least else 0


def smallest_world(above: int, least: int, most: int, counts: tuple[int, ...]) -> int | None:
    """Return the smallest number of nodes above ``above`` that a world may have; None if there is none.

    Computed from ``counts``, not by trial of every size: the coordinator calls it often, for up to 65,536 nodes.
    The other arguments are those of :func:`largest_world`.

    >>> smallest_world(3, 1, 8, (2,)), smallest_world(0, 3, 8, (1, 2, 4, 8)), smallest_world(4, 1, 7, (4, 8))
    (4, 4, None)
    """
    low = max(above + 1, least)
    if not counts:
        found = low
    elif len(counts) == 1:
        found = -(-low // counts[0]) * counts[0]
    else:
        found = min((count for count in counts if count >= low), default=most + 1)
    return found if found <= most else None


def new_incarnation() -> str:
    """Return a random name for one life of an agent (a new one after a lost lease)."""
    return os.urandom(8).hex()
