"""How fast nodes and workers are: steps per second, ages of leases, and stragglers. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elastic_agent.diagnosis.records import NodeReport
from elastic_agent.protocol import Lease

SHORTEST_S = 4.0
"""A rate over less time would mostly show chance."""

LEAST_LAG = 0.25
"""A worker that waits for this part of the time less than most others is a straggler."""


class StepRate:
    """Steps per second of one generation, between two looks."""

    def __init__(self) -> None:
        self._generation = 0
        self._begin: tuple[int, float] | None = None
        self.per_s: float | None = None
        """The newest rate; None: not known."""

    def see(self, generation: int, step: int, now_s: float) -> None:
        """The newest step of any worker, by a clock that does not jump; 0: none was reported."""
        if generation != self._generation:
            self._generation, self._begin, self.per_s = generation, None, None
        if step <= 0:
            return
        if self._begin is None:
            self._begin = step, now_s
            return
        before, since_s = self._begin
        if now_s - since_s >= SHORTEST_S:
            self.per_s = max(0.0, (step - before) / (now_s - since_s))
            self._begin = step, now_s


class LeaseAges:
    """Watches the leases of a run; a lease has no time in it, so its age is known once it was seen to be renewed."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float | None]] = {}
        """By incarnation: the number of renewals, and when a new one was first seen."""

    def see(self, leases: Mapping[str, Lease], now_s: float) -> None:
        """Take note of the leases that the store holds, at this time of a clock that does not jump."""
        known = self._seen
        self._seen = {
            name: known[name]
            if name in known and known[name][0] == lease.beat
            else (lease.beat, now_s if name in known else None)
            for name, lease in leases.items()
        }

    def ages_s(self, now_s: float) -> dict[str, float]:
        """By incarnation: at most how long ago its lease was renewed last, in seconds, where that is known."""
        return {name: now_s - at_s for name, (_, at_s) in self._seen.items() if at_s is not None}


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
    """Find workers that the others wait for in every step, the slowest first; ``reports``: one per node.

    A worker that is slower than the others arrives last at their common collectives: it waits less there than they
    do. How much each worker waits is sampled by its agent, which asks every few seconds how far the worker is, so no
    clocks of different machines are compared.
    """
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
