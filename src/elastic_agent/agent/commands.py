"""What an agent does when a user of its machine asks: tell about the run, have a node leave, end the run."""

from __future__ import annotations

from collections.abc import AsyncIterator

from elastic_agent.protocol.node import Outcome
from elastic_agent.protocol.records import Cause, Plan

from .control import Answer, Command
from .supervisor import Supervisor


class Commands:
    """Carries commands out on a supervisor."""

    def __init__(
        self, supervisor: Supervisor, run_id: str, node_id: str, drain_s: float, stop_s: float
    ) -> None:
        self._supervisor = supervisor
        self._run_id = run_id
        self._node_id = node_id
        self._times = {"drain": drain_s, "stop": stop_s}

    async def act(self, command: Command) -> AsyncIterator[Answer]:
        """The answers to a command, as they come about."""
        match command.do:
            case "describe":
                yield Answer(run_id=self._run_id, node=self._node_id, nodes=self._nodes())
            case "drain":
                async for answer in self._drain(command):
                    yield answer
            case "stop":
                async for answer in self._stop(command):
                    yield answer
            case other:
                yield Answer(f"this agent does not know the command {other!r}", failed=True)

    def _nodes(self) -> tuple[str, ...]:
        plan = self._supervisor.node.plan
        return tuple(seat.node_id for seat in plan.world.seats) if plan is not None and plan.world else ()

    async def _drain(self, command: Command) -> AsyncIterator[Answer]:
        node = command.node or self._node_id
        known = {*self._nodes(), self._node_id}
        if node not in known:
            yield Answer(
                f"run {self._run_id} has no node {node}; expected one of {', '.join(sorted(known))}",
                failed=True,
            )
            return
        left_s = command.left_s if command.left_s is not None else self._times["drain"]
        yield Answer(f"run {self._run_id}: {node} leaves; workers have {left_s:g} s to save", done=False)
        before = self._generation()
        if node == self._node_id:
            self._supervisor.drain(command.words, left_s)
        else:
            self._supervisor.drain_other(node, left_s, f"{node} leaves ({command.words})")
        alone = known == {node}
        plan = await self._supervisor.plan_with(lambda one: one.generation > before or one.is_terminal)
        rest = "no other node trains" if alone else "the others go on"
        yield self._how_it_went(plan, f"{node} has left, {rest}")

    async def _stop(self, command: Command) -> AsyncIterator[Answer]:
        left_s = command.left_s if command.left_s is not None else self._times["stop"]
        yield Answer(f"run {self._run_id} ends; workers have {left_s:g} s to save", done=False)
        self._supervisor.stop(Cause.OPERATOR, left_s, command.words)
        plan = await self._supervisor.plan_with(lambda one: one.is_terminal)
        yield self._how_it_went(plan, "it has ended")

    def _generation(self) -> int:
        plan = self._supervisor.node.plan
        return plan.generation if plan is not None else 0

    def _how_it_went(self, plan: Plan | None, words: str) -> Answer:
        if plan is None:  # this agent is gone
            return Answer(f"run {self._run_id}: {words}")
        if plan.is_terminal:
            return Answer(f"run {self._run_id} {Outcome(plan.phase.value)}: {plan.reason}")
        return Answer(f"run {self._run_id}: {words}")
