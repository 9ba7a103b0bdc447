"""Small typed values that settings have and that the rooms below the settings understand as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_PORT = 29400
"""The rendezvous port when the endpoint names none (torch's own for its c10d backend)."""

ETCD_PORT = 2379
"""The same for etcd (its own usual port)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the agents meet. ``host``: a name or an address, IPv6 without brackets; port 0: any free port."""

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
    """How an etcd lets us in, and where in it our keys lie."""

    prefix: str = "/elastic-agent"
    ca: Path | None = None
    """The certificates to trust; with any of these three given, connections are encrypted."""
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return any((self.ca, self.cert, self.key))
