"""Finds workers that the others wait for in every step, although the training advances. Pure.

A worker that is slower than the others arrives last at their common collectives: it waits less there than they do. How
much each worker waits is sampled by its agent, which asks every few seconds how far the worker is, so no clocks of
different machines are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .records import NodeReport

LEAST_LAG = 0.25
"""A worker that waits for this part of the time less than most others is a straggler."""


@dataclass(frozen=True)
class Straggler:
    """A worker that is slower than most."""

    node_id: str
    slot: int
    rank: int
    lag: float
    """For which part of the time most other workers wait while it does not, 0 to 1."""

    @property
    def words(self) -> str:
        """One line."""
        return (
            f"worker {self.node_id}/{self.slot} (rank {self.rank}) is slower than the others: they wait in collectives "
            f"for {100 * self.lag:.0f} % of the time while it does not"
        )


def find_stragglers(reports: Iterable[NodeReport]) -> tuple[Straggler, ...]:
    """The slowest first; ``reports``: one per node, on the same generation."""
    known = [
        (worker.waits, report.node_id, worker)
        for report in reports
        for worker in report.workers
        if worker.waits is not None
    ]
    if len(known) < 2:
        return ()
    usual = sorted(waits for waits, _, _ in known)[len(known) // 2]
    late = [
        Straggler(node_id, worker.slot, worker.rank, usual - waits)
        for waits, node_id, worker in known
        if usual - waits >= LEAST_LAG
    ]
    return tuple(sorted(late, key=lambda one: (-one.lag, one.rank)))
