"""The rules of workers that are kept: parked while a world forms, they go on in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_agent.protocol.records import Member, State, World

from .guard import Doing, Worker

if TYPE_CHECKING:
    from .agent import Agent
    from .checker import Checker
    from .cluster import Cluster

EPSILON_S = 1e-6


class ParkingRules:
    """Holds what is parked against the rules."""

    def __init__(self, cluster: Cluster, checker: Checker) -> None:
        self.cluster = cluster
        self.checker = checker
        self._parked: list[Agent] = []
        """Those with parked workers, perhaps."""

    def parks(self, agent: Agent) -> None:
        """Workers of this agent park."""
        if agent not in self._parked:
            self._parked.append(agent)

    def step(self) -> None:
        """No parked worker lives past its node's deadline, or longer than its agent."""
        margin_s = self.cluster.policy.fence_margin_s
        for agent in self._parked:
            machine = agent.machine
            if not agent.guard.parked or machine.paused or self.checker.kills_after_thaw(agent):
                continue
            past_s = machine.clock() - agent.guard.deadline_s - margin_s
            died_s = agent.died_s if agent.died_s is not None else float("inf")
            outlived_s = self.cluster.kernel.now - max(died_s, machine.last_thaw_s) - margin_s
            if max(past_s, outlived_s) > EPSILON_S:
                self.checker.broken(
                    "the fence (parked workers)",
                    f"parked workers on {agent.name} live {past_s:.3f} s past the deadline and the margin, "
                    f"{outlived_s:.3f} s past the end of their agent and the margin",
                )
        if self._parked:
            self._parked = [agent for agent in self._parked if agent.guard.parked]

    def goes_on(self, agent: Agent, worker: Worker, world: World) -> None:
        """A parked worker is about to act again."""
        self.checker.require(
            worker.doing is Doing.PARKED,
            "a slot has one process",
            f"{agent.name}/{worker.slot}: {worker.doing}",
        )
        self.checker.require(
            worker.incarnation == agent.incarnation,
            "a survivor keeps its incarnation",
            f"the worker of {worker.incarnation} goes on for {agent.incarnation}",
        )
        is_later = world.generation > worker.generation or self.checker.forgot
        self.checker.require(
            is_later and agent.prepared == world.generation,
            "a parked worker goes on only in a world for which its node is prepared",
            f"{agent.name}/{worker.slot} left generation {worker.generation}, its node is prepared for "
            f"{agent.prepared}, and it goes on in {world.generation}",
        )
        worker.doing, worker.generation = Doing.ACTS, world.generation

    def left_over(self, agent: Agent, parked: list[Worker]) -> None:
        """Workers were started, and these parked ones were not among them."""
        self.checker.require(
            not parked, "a parked worker goes on or is stopped", f"{agent.name}: {len(parked)} are left over"
        )

    def announced(self, agent: Agent, member: Member) -> None:
        """A node is about to write this about itself: with its part over, nothing of its workers is left."""
        over = member.state in (State.STOPPED, State.LEFT) or member.incarnation != agent.incarnation
        self.checker.require(
            not (over and agent.guard.parked),
            "safety 2 (nothing is parked in the end)",
            f"{agent.name} says {member.state} while workers of it are parked",
        )
