"""The agent's side of the commands of its machine's users: describe the run, drain a node, stop the run.

The last answer to ``drain`` and ``stop`` is sent when the last worker process of the node, or of the run, has
exited, so that the machine can be rebooted; or it states that this could not be confirmed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from elastic_agent.agent.supervisor import Ending, Supervisor
from elastic_agent.monitoring.status import RunStatus
from elastic_agent.protocol import Cause, Outcome, Phase, Seat, names

from .socket import Answer, Command, Question

T = TypeVar("T")

LOOK_EVERY_S = 2.5
SILENT_LOOKS = 2
"""A command gives up when it has found so often in a row that the store does not answer."""


_AGAIN = "the same command is started"
_RESUME = "to resume it, start it again with this run id"


class StoreSilentError(Exception):
    """The store does not answer, so the command reaches no other node; ``str()`` is the message for the user."""


class Commands:
    """Carries commands out on a supervisor."""

    def __init__(
        self,
        supervisor: Supervisor,
        run_id: str,
        node_id: str,
        drain_s: float,
        stop_s: float,
        hosts_store: Callable[[], bool],
        depending: Callable[[], Sequence[str]],
        is_at_store: Callable[[Seat], bool],
        store_problem: Callable[[], str],
        status: Callable[[], Awaitable[RunStatus]],
        ask: Callable[[Question, str | None], AsyncGenerator[Answer]],
        join_again: str = "",
    ) -> None:
        """Serve commands.

        Args:
            supervisor: carries them out.
            run_id: the run.
            node_id: this node.
            drain_s: how long workers have after ``drain``.
            stop_s: the same after ``stop``.
            hosts_store: whether the run needs this agent's store.
            depending: gives the nodes that cannot go on without that store.
            is_at_store: whether a node is on the machine of the store.
            store_problem: why the store does not answer, in words; empty: it does.
            status: determines the status of the run.
            ask: asks nodes about their workers.
            join_again: what to do to have a node that has left join again, as a clause.
        """
        self._supervisor = supervisor
        self._run_id = run_id
        self._node_id = node_id
        self._hosts_store = hosts_store
        self._depending = depending
        self._is_at_store = is_at_store
        self._store_problem = store_problem
        self._status = status
        self._ask = ask
        self._join_again = join_again
        self._times = {"drain": drain_s, "stop": stop_s}

    async def act(self, command: Command) -> AsyncGenerator[Answer]:
        """Yield the answers to a command, as they become available."""
        match command.do:
            case "describe":
                yield Answer(run_id=self._run_id, node=self._node_id)
            case "status":
                yield Answer(run_id=self._run_id, node=self._node_id, status=await self._status())
            case "ask" if command.question is not None:
                async with aclosing(self._ask(command.question, command.node)) as answers:
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

    def _seats(self) -> tuple[Seat, ...]:
        plan = self._supervisor.node.plan
        return plan.world.seats if plan is not None and plan.world else ()

    def _nodes(self) -> tuple[str, ...]:
        return tuple(seat.node_id for seat in self._seats())

    async def _unless_silent(self, outcome: Coroutine[Any, Any, T]) -> T:
        """Return what the command waits for; raises ``StoreSilentError``."""
        task, silent_looks = asyncio.create_task(outcome), 0
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_EVERY_S))[0]:
                problem = self._store_problem()
                silent_looks = silent_looks + 1 if problem else 0
                if silent_looks >= SILENT_LOOKS:
                    raise StoreSilentError(
                        f"run {self._run_id}: {problem}; other nodes learn of this command when it answers. To end the "
                        f"agent here without it: Ctrl-C there, or kill {os.getpid()}"
                    )
            return task.result()
        finally:
            task.cancel()

    def _what_remains(self, node: str) -> str:
        """Return what the run does without this node."""
        others = {*self._nodes()} - {node}
        plan = self._supervisor.node.plan
        if not others:
            return "no other node is training"
        if plan is not None and len(others) < plan.policy.min_nodes:
            return f"the run continues when it has {plan.policy.min_nodes} nodes again (--nnodes)"
        return "the other nodes continue"

    async def _drain(self, command: Command) -> AsyncIterator[Answer]:
        node = command.node or self._node_id
        known = {*self._nodes(), self._node_id}
        if node not in known and (problem := self._store_problem()):
            raise StoreSilentError(
                f"run {self._run_id}: {problem}; whether it has a node {node} is not known"
            )
        if node not in known:
            yield Answer(
                f"run {self._run_id} has no node {node}; expected one of {', '.join(sorted(known))}",
                failed=True,
            )
            return
        left_s = command.left_s if command.left_s is not None else self._times["drain"]
        yield Answer(
            f"run {self._run_id}: draining {node}; workers that handle notices have {left_s:g} s to save",
            done=False,
        )
        if node == self._node_id:
            self._supervisor.drain(command.words, left_s)
        else:
            self._supervisor.drain_other(node, left_s, f"{node} leaves ({command.words})")
        has_left = f"run {self._run_id}: {node} has left; {self._what_remains(node)}"
        is_at_store = any(self._is_at_store(seat) for seat in self._seats() if seat.node_id == node)
        ending = await self._unless_silent(self._supervisor.node_left(node))
        if ending is None or (node == self._node_id and ending.outcome is Outcome.DRAINED):
            if node == self._node_id and self._hosts_store():
                depending = names(self._depending())
                follows = (
                    f": without it, {depending} cannot go on until {_AGAIN} here again" if depending else ""
                )
                yield Answer(
                    f"run {self._run_id}: the agent of {node} keeps running until the run ends, because it hosts the "
                    f"rendezvous store{follows}",
                    done=False,
                )
            elif is_at_store:
                yield Answer(
                    f"run {self._run_id}: the machine of {node} hosts the store; keep it up until the run ends: "
                    f"without it, training stops on all nodes until {_AGAIN} there again",
                    done=False,
                )
            yield Answer(f"{has_left}{self._join_again}")
        elif node == self._node_id and ending.outcome is Outcome.STOPPED:
            yield Answer(
                f"run {self._run_id}: the workers of {node} have exited, and the run is stopped; {_RESUME}"
            )
        elif node == self._node_id and ending.outcome is not Outcome.STUCK:
            yield Answer(f"run {self._run_id}: the workers of {node} have exited ({_how(ending)})")
        else:
            yield self._end_of_run(ending, node)

    async def _stop(self, command: Command) -> AsyncIterator[Answer]:
        left_s = command.left_s if command.left_s is not None else self._times["stop"]
        yield Answer(
            f"stopping run {self._run_id}; workers that handle notices have {left_s:g} s to save", done=False
        )
        self._supervisor.stop(Cause.OPERATOR, left_s, command.words)
        yield self._end_of_run(await self._unless_silent(self._supervisor.over()), "every node")

    def _end_of_run(self, ending: Ending, whose: str) -> Answer:
        """Return the last answer when this agent's part is over; it says whether the workers are known to be gone."""
        plan = ending.plan
        if plan is not None and plan.is_terminal and not plan.uncleared:
            resume = f"; {_RESUME}" if plan.phase is Phase.STOPPED else ""
            return Answer(f"run {self._run_id} {Outcome(plan.phase.value)}: {plan.reason}{resume}")
        awaited = plan.uncleared if plan is not None and plan.is_terminal else ()
        if awaited:
            others = (seat.node_id for seat in awaited if seat.node_id != self._node_id)
            whose = names(others) or self._node_id
        return Answer(
            f"run {self._run_id}: this agent exited ({_how(ending)}) before it could confirm that the "
            f"workers of {whose} have exited; check for remaining worker processes there before you "
            "continue",
            failed=True,
            unconfirmed=True,
        )


def _how(ending: Ending) -> str:
    return f"{ending.outcome.value}: {ending.reason}"
