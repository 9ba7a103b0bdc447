"""What people ask of an agent: to leave, to have another node leave, or to have the run stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_agent.protocol.node import Grace
from elastic_agent.protocol.records import Cause
from elastic_agent.rendezvous.stop_requests import ANSWER_PATIENCE_S, StopRequests

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster


class Asking:
    """What one agent was asked for by people."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self.cluster = cluster
        self.agent = agent
        self._requests = StopRequests(
            agent.participant, agent.holder.node_id, self._workers_look, agent.call_later
        )

    def drain(self) -> None:
        """The node is to leave, its workers and all others having saved."""
        agent = self.agent
        agent.asked_to_leave = True
        agent.asked_to_leave_s = self.cluster.kernel.now
        patience_s = self._requests.leave("asked to leave", self.cluster.grace_s(Grace.DRAIN))
        self.cluster.checker.notices.drains(agent, patience_s)

    def drain_at_once(self) -> None:
        """The node is to leave without asking."""
        agent = self.agent
        agent.asked_to_leave = True
        self.cluster.checker.notices.left_at_once_s = self.cluster.kernel.now
        agent.participant.perform(agent.node.stop_lingering())
        agent.participant.perform(agent.node.drain("asked to leave"))
        patience_s = self.cluster.grace_s(Grace.DRAIN) + ANSWER_PATIENCE_S  # perhaps it was asked before
        self.cluster.checker.notices.drains(agent, patience_s)

    def drain_other(self, node_id: str, left_s: float) -> None:
        """Another node is to leave."""
        stop_request = self._requests.remove(node_id, left_s, f"{node_id} is told to leave")
        self.cluster.checker.notices.drains_other(self.agent, stop_request)

    def stop(self, cause: Cause, left_s: float) -> None:
        """The whole run is to end after all workers have saved."""
        agent = self.agent
        agent.asked_to_leave = agent.asked_for_the_end = True
        if cause is Cause.OPERATOR:  # a command, which waits until no worker of the run is left
            agent.node.linger()
        stop_request = self._requests.end_run(cause, left_s, f"{cause.value} at {agent.holder.node_id}")
        self.cluster.checker.notices.asks_for_the_end(agent, stop_request)
        self.cluster.checker.notices.stops(agent, stop_request)

    def _workers_look(self) -> bool:
        group = self.agent.guard.group
        return group is not None and group.alive and group.handles_notices
