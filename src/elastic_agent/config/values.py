"""The typed values of settings that are more than a number or a word."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

DEFAULT_PORT = 29400
"""The rendezvous port when the endpoint names none (torch's own for its c10d backend)."""

STATIC_PORT = 29500
"""The port torchrun uses for ``--master-addr`` without ``--master-port``."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """How many nodes a world may have: ``1 <= least <= most``."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


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


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """Which standard streams of which local ranks: torch's ``Std`` numbers (0 none, 1 out, 2 err, 3 both).

    Attributes:
        everywhere: the streams of every local rank that ``by_rank`` does not name.
        by_rank: pairs of local rank and streams, in the order they were given.
    """

    everywhere: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    def of(self, local_rank: int) -> int:
        """The streams of one local rank, as torch's ``Std`` number."""
        return dict(self.by_rank).get(local_rank, self.everywhere)

    def __str__(self) -> str:
        if self.by_rank:
            return ",".join(f"{rank}:{streams}" for rank, streams in self.by_rank)
        return str(self.everywhere)
