"""What a soak test recorded, in the form in which the safety rules read it."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.testing.processes import Line
from tests.faults.cluster import worlds_of
from tests.faults.rules import safety_problems

from .cluster import SoakCluster

THAWING_S = 5.0
"""So long after a node was continued, a worker of it may show up once more (the stated exception of rule 2)."""


@dataclass(frozen=True)
class Pause:
    """A node as a whole was stopped."""

    node: str
    from_s: float
    to_s: float


class RecordedRun:
    """Lines of the observer and events of the agents, without what paused nodes did."""

    def __init__(self, cluster: SoakCluster, pauses: list[Pause]) -> None:
        self.nnodes = cluster.nnodes
        self._cluster = cluster
        self._pauses = pauses

    def problems(self) -> list[str]:
        """Return what violates a safety rule."""
        return safety_problems(self)

    def journal(self, event: str) -> list[Line]:
        lines = self._cluster.journal(event)
        if event != "worker_exited":
            return lines
        return [line for line in lines if not self._was_paused(line["node"], line["exited_boottime_s"])]

    def worlds(self) -> dict[int, list[Line]]:
        return worlds_of(self._cluster)

    def steps(self) -> list[Line]:
        return [
            {**self._names(line), "step": line["taken"]}
            for line in self._cluster.records("step")
            if not self._was_paused(line["node"], line["boottime_s"])
        ]

    def born(self) -> list[Line]:
        return [{**self._names(line), "run_id": line["run"]} for line in self._cluster.records("born")]

    def _names(self, line: Line) -> Line:
        return {**line, "node_id": line["node"], "worker_id": line["worker"], "world_size": line["world"]}

    def _was_paused(self, node: str, at_s: float) -> bool:
        return any(
            pause.node == node and pause.from_s <= at_s <= pause.to_s + THAWING_S for pause in self._pauses
        )
