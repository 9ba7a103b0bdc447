"""The typed values of settings that are more than a number or a word, and that only the upper packages use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

STATIC_PORT = 29500
"""The port torchrun uses for ``--master-addr`` without ``--master-port``."""


@dataclass(frozen=True, slots=True)
class NodeRange:
    """The number of nodes that a world may have: ``1 <= least <= most``."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


class Host(NamedTuple):
    """A machine of ``--hosts``: its text, what ssh is given, its name without the user, and its workers, if given."""

    text: str
    target: str
    name: str
    workers: str


@dataclass(frozen=True, slots=True)
class StreamChoice:
    """The standard streams chosen for local ranks: torch's ``Std`` numbers (0 none, 1 out, 2 err, 3 both).

    Attributes:
        everywhere: the streams of every local rank that ``by_rank`` does not name.
        by_rank: pairs of local rank and streams, in the order they were given.
    """

    everywhere: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    def of(self, local_rank: int) -> int:
        """Return the streams of one local rank, as torch's ``Std`` number."""
        return dict(self.by_rank).get(local_rank, self.everywhere)

    def __str__(self) -> str:
        if self.by_rank:
            return ",".join(f"{rank}:{streams}" for rank, streams in self.by_rank)
        return str(self.everywhere)
