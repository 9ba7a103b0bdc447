"""The agent's side of the commands of its machine's users: describe the run, drain a node, stop the run.

The last answer to ``drain`` and ``stop`` is sent when the last worker process of the node, or of the run, has
exited, so that the machine can be rebooted; or it states that this could not be confirmed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_agent.agent.local_node import LocalNode
from elastic_agent.agent.reporting.run_observer import RunObserver
from elastic_agent.agent.slurm.requeue import how_to_join_again
from elastic_agent.agent.supervisor import Ending, Supervisor
from elastic_agent.protocol import Cause, Outcome, Phase, Seat, names

from .socket import Answer, Command

T = TypeVar("T")

LOOK_EVERY_S = 2.5
SILENT_LOOKS = 2
"""A command gives up when it has found so often in a row that the store does not answer."""

_AGAIN = "the same command is started"
_RESUME = "to resume it, start it again with this run id"


class StoreSilentError(Exception):
    """The store does not answer, so the command reaches no other node; ``str()`` is the message for the user."""


@dataclass(eq=False, repr=False)
class Commands:
    """Carries commands out on a node of a run."""

    node: LocalNode
    supervisor: Supervisor
    observer: RunObserver

    async def act(self, command: Command) -> AsyncGenerator[Answer]:
        """Yield the answers to a command, as they become available."""
        match command.do:
            case "describe":
                yield Answer(run_id=self.node.run_id, node=self.node.node_id)
            case "status":
                status = await self.observer.status()
                yield Answer(run_id=self.node.run_id, node=self.node.node_id, status=status)
            case "ask" if command.question is not None:
                async with aclosing(self.observer.questions.ask(command.question, command.node)) as answers:
                    async for answer in answers:
                        yield answer
            case "drain" | "stop" as do:
                try:
                    async for answer in self._drain(command) if do == "drain" else self._stop(command):
                        yield answer
                except StoreSilentError as error:
                    yield Answer(str(error), failed=True, unconfirmed=True)
            case other:
                yield Answer(
                    f"this agent does not support the command {other!r}; use the elastic-agent command of "
                    "the agent's version",
                    failed=True,
                )

    def _seats(self) -> dict[str, Seat]:
        plan = self.supervisor.node.plan
        seats = plan.world.seats if plan is not None and plan.world else ()
        return {seat.node_id: seat for seat in seats}

    @property
    def _store_problem(self) -> str:
        """Why the store does not answer; empty: it does."""
        problem = self.node.console.last_problem
        shown = self.node.backend.shown
        return f"run {self.node.run_id}: the store at {shown} does not answer: {problem}" if problem else ""

    async def _unless_silent(self, outcome: Coroutine[Any, Any, T]) -> T:
        """Return what the command waits for; raises ``StoreSilentError``."""
        task, silent_looks = asyncio.create_task(outcome), 0
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_EVERY_S))[0]:
                problem = self._store_problem
                silent_looks = silent_looks + 1 if problem else 0
                if silent_looks >= SILENT_LOOKS:
                    raise StoreSilentError(
                        f"{problem}; other nodes learn of this command when it answers. To end the "
                        f"agent here without it: Ctrl-C there, or kill {os.getpid()}"
                    )
            return task.result()
        finally:
            task.cancel()

    def _what_remains(self, node: str) -> str:
        """Return what the run does without this node."""
        others = self._seats().keys() - {node}
        plan = self.supervisor.node.plan
        if not others:
            return "no other node is training"
        if plan is not None and len(others) < plan.policy.min_nodes:
            return f"the run continues when it has {plan.policy.min_nodes} nodes again (--nnodes)"
        return "the other nodes continue"

    async def _drain(self, command: Command) -> AsyncIterator[Answer]:
        node, seats = command.node or self.node.node_id, self._seats()
        is_own = node == self.node.node_id
        if not is_own and node not in seats:
            if problem := self._store_problem:
                raise StoreSilentError(f"{problem}; whether it has a node {node} is not known")
            known = ", ".join(sorted({*seats, self.node.node_id}))
            yield Answer(f"run {self.node.run_id} has no node {node}; expected one of {known}", failed=True)
            return
        left_s = command.left_s if command.left_s is not None else self.node.settings.shutdown_timeout
        yield Answer(
            f"run {self.node.run_id}: draining {node}; workers that handle notices have {left_s:g} s to save",
            done=False,
        )
        if is_own:
            self.supervisor.drain(command.words, left_s)
        else:
            self.supervisor.drain_other(node, left_s, f"{node} leaves ({command.words})")
        has_left = f"run {self.node.run_id}: {node} has left; {self._what_remains(node)}"
        is_at_store = node in seats and self.node.backend.is_at_store(seats[node])
        ending = await self._unless_silent(self.supervisor.node_left(node))
        if ending is None or (is_own and ending.outcome is Outcome.DRAINED):
            if is_own and self.node.backend.busy_with:
                depending = names(self.node.depending())
                follows = (
                    f": without it, {depending} cannot go on until {_AGAIN} here again" if depending else ""
                )
                yield Answer(
                    f"run {self.node.run_id}: the agent of {node} keeps running until the run ends, because it hosts "
                    f"the rendezvous store{follows}",
                    done=False,
                )
            elif is_at_store:
                yield Answer(
                    f"run {self.node.run_id}: the machine of {node} hosts the store; keep it up until the run ends: "
                    f"without it, training stops on all nodes until {_AGAIN} there again",
                    done=False,
                )
            yield Answer(f"{has_left}{how_to_join_again(None, self.node.scheduled, 'there')}")
        elif is_own and ending.outcome is Outcome.STOPPED:
            yield Answer(
                f"run {self.node.run_id}: the workers of {node} have exited, and the run is stopped; {_RESUME}"
            )
        elif is_own and ending.outcome is not Outcome.STUCK:
            yield Answer(f"run {self.node.run_id}: the workers of {node} have exited ({_how(ending)})")
        else:
            yield self._end_of_run(ending, node)

    async def _stop(self, command: Command) -> AsyncIterator[Answer]:
        left_s = command.left_s if command.left_s is not None else self.node.settings.notice_time
        yield Answer(
            f"stopping run {self.node.run_id}; workers that handle notices have {left_s:g} s to save",
            done=False,
        )
        self.supervisor.stop(Cause.OPERATOR, left_s, command.words)
        yield self._end_of_run(await self._unless_silent(self.supervisor.over()), "every node")

    def _end_of_run(self, ending: Ending, whose: str) -> Answer:
        """Return the last answer when this agent's part is over; it says whether the workers are known to be gone."""
        plan = ending.plan
        if plan is not None and plan.is_terminal and not plan.uncleared:
            resume = f"; {_RESUME}" if plan.phase is Phase.STOPPED else ""
            return Answer(f"run {self.node.run_id} {Outcome(plan.phase.value)}: {plan.reason}{resume}")
        if plan is not None and plan.is_terminal:
            others = (seat.node_id for seat in plan.uncleared if seat.node_id != self.node.node_id)
            whose = names(others) or self.node.node_id
        return Answer(
            f"run {self.node.run_id}: this agent exited ({_how(ending)}) before it could confirm that the "
            f"workers of {whose} have exited; check for remaining worker processes there before you "
            "continue",
            failed=True,
            unconfirmed=True,
        )


def _how(ending: Ending) -> str:
    return f"{ending.outcome.value}: {ending.reason}"
