"""Small typed values that settings have and that the rooms below the settings understand as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_PORT = 29400
"""The rendezvous port when the endpoint names none (torch's own for its c10d backend)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the agents meet. ``host``: a name or an address, IPv6 without brackets; port 0: any free port."""

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports ``low`` to ``high``, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.low, self.high + 1))
