"""The speed of nodes and workers: steps per second, and stragglers. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_agent.diagnosis.records import NodeReport

SHORTEST_S = 4.0
"""A rate over less time would mostly show chance."""

LEAST_LAG = 0.25
"""A worker that waits for this part of the time less than most others is a straggler."""


class StepRate:
    """Steps per second of one generation, between two looks."""

    def __init__(self) -> None:
        self._of = 0, False
        self._begin: tuple[int, float] | None = None
        self.per_s: float | None = None
        """The newest rate; None: not known."""

    def see(self, generation: int, step: int, now_s: float, *, is_counted: bool = False) -> None:
        """Note the newest step of any worker, by a clock that does not jump; 0: none is known.

        ``is_counted``: it is a number of optimizer steps, unrelated to the steps that workers report.
        """
        if (generation, is_counted) != self._of or step <= 0:
            self._of, self._begin, self.per_s = (generation, is_counted), None, None
        if step <= 0:
            return
        if self._begin is None:
            self._begin = step, now_s
            return
        before, since_s = self._begin
        if now_s - since_s >= SHORTEST_S:
            self.per_s = max(0.0, (step - before) / (now_s - since_s))
            self._begin = step, now_s


def find_stragglers(reports: Iterable[NodeReport]) -> tuple[str, ...]:
    """Name workers that the others wait for in every step, a line for each, the slowest first.

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
    late = sorted(
        (waits, worker.rank, f"worker {node_id}/{worker.slot} (rank {worker.rank})")
        for waits, node_id, worker in known
        if usual - waits >= LEAST_LAG
    )
    return tuple(
        f"{who} is slower than the others: they wait in collectives for {100 * (usual - waits):.0f} % of the time "
        "while it does not"
        for waits, _, who in late
    )
