"""How an agent is told to leave or to have the run stopped, with the timers of the real supervisor.

The coordinator is asked first. Should nobody answer, the agent leaves all the same, a little after the time given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic_agent.protocol.node import Action, Grace
from elastic_agent.protocol.records import Ask, Cause

from .kernel import Routine

if TYPE_CHECKING:
    from .agent import Agent
    from .cluster import Cluster

ANSWER_PATIENCE_S = 2.0
"""As in ``agent/supervisor.py``."""


class Asking:
    """What one agent was asked for by people, and its timers."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self.cluster = cluster
        self.agent = agent

    def drain(self) -> None:
        """The node is to leave, its workers and all others having saved."""
        agent, left_s = self.agent, self.cluster.grace_s(Grace.DRAIN)
        agent.asked_to_leave = True
        ask = self._new(Cause.DRAIN, left_s, f"{agent.holder.node_id} leaves", agent.holder.node_id)
        group = agent.guard.group
        heeded = group is not None and group.alive and group.looks
        agent.post(lambda: agent.node.drain("asked to leave", ask))
        patience_s = left_s + ANSWER_PATIENCE_S if heeded else ANSWER_PATIENCE_S
        self._in_the_end(patience_s, agent.node.leave_now)
        self.cluster.checker.notices.drains(agent, patience_s)

    def drain_at_once(self) -> None:
        """The node is to leave without asking."""
        agent = self.agent
        agent.asked_to_leave = True
        agent.post(lambda: agent.node.drain("asked to leave"))
        patience_s = self.cluster.grace_s(Grace.DRAIN) + ANSWER_PATIENCE_S  # perhaps it was asked before
        self.cluster.checker.notices.drains(agent, patience_s)

    def drain_other(self, node_id: str, left_s: float) -> None:
        """Another node is to leave."""
        ask = self._new(Cause.DRAIN, left_s, f"{node_id} is told to leave", node_id)
        self.agent.post(lambda: self.agent.node.ask(ask))
        self.cluster.checker.notices.drains_other(self.agent, ask)

    def stop(self, cause: Cause, left_s: float) -> None:
        """The whole run is to end, everybody having saved."""
        agent = self.agent
        agent.asked_to_leave = True
        words = f"{cause.value} at {agent.holder.node_id}"
        ask = self._new(cause, left_s, words, None)
        if cause is Cause.OPERATOR:  # a command, which waits until no worker of the run is left
            agent.node.linger()

        def utter() -> list[Action]:
            agent.asked_for_the_end = True
            self.cluster.checker.notices.asks_for_the_end(agent, ask)
            return agent.node.ask(ask)

        agent.post(utter)
        self._in_the_end(left_s + ANSWER_PATIENCE_S, lambda: agent.node.drain(words))
        self.cluster.checker.notices.stops(agent, ask)

    def _new(self, cause: Cause, left_s: float, words: str, leaver: str | None) -> Ask:
        return Ask(self.agent.node.next_ask, cause, left_s, words, leaver)

    def _in_the_end(self, after_s: float, act: Callable[[], list[Action]]) -> None:
        self.agent.process.spawn(self._later(after_s, act))

    def _later(self, after_s: float, act: Callable[[], list[Action]]) -> Routine:
        yield self.agent.machine.real_s(after_s)
        self.agent.post(act)
