"""Runs the user's command (``--on-event``) for the events of a run that a person wants to know of."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.agent import events
from elastic_agent.agent.run_command import CommandError, run_command
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Outcome, Phase, Plan
from elastic_agent.rendezvous.events import PlanSeen

LIMIT_S = 10.0
"""The time that the command may take for an event; then it is killed."""

_ENDS = {Phase.FINISHED: "run_finished", Phase.FAILED: "run_failed", Phase.STOPPED: "run_stopped"}
_ENDS_ALONE = (Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.STUCK)


@dataclass(eq=False, repr=False)
class EventCommand:
    """Follows the plans of a run, and gives the command each event as a line of JSON on standard input.

    Every agent is started with the same command, and a person wants to be told once: the agent of the first node of
    the world that is not lost runs it. Before there is a world, each agent does.
    """

    command: str | None
    """For ``/bin/sh -c``; None: nothing is done."""
    run_id: str
    get_node_id: Callable[[], str]
    """Gives the id of this node in the run."""

    def __post_init__(self) -> None:
        self._plan: Plan | None = None
        self._lost: frozenset[str] = frozenset()
        """The nodes of the plan's world that were lost since it was sealed."""
        self._left: frozenset[str] = frozenset()
        """Those that were told to leave."""
        self._tasks = BackgroundTasks()
        self._one_at_a_time = asyncio.Lock()

    def on_event(self, event: events.Event) -> None:
        """Run the command, if this is one of the events to report and this node is the one that reports it."""
        match event:
            case PlanSeen(plan=plan):
                self._follow(plan)
            case events.AgentEnded(outcome=outcome, reason=reason) if outcome in _ENDS_ALONE:
                self._report("node_ended", reason, nodes=[self.get_node_id()])

    async def close(self) -> None:
        """Wait until the command has got all events, as long as that takes for three at most."""
        await self._tasks.settle(3 * LIMIT_S)
        self._tasks.cancel()

    def _follow(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        if before is None or before.world != plan.world:
            self._lost = self._left = frozenset()
        new = frozenset(plan.lost) - self._lost
        self._lost |= new
        if plan.world is not None:
            leaving = (seat.node_id for seat in plan.world.seats if seat.incarnation in plan.leaving)
            self._left |= frozenset(leaving)
        if before is None or before.is_terminal or not self._is_reporter(plan):
            return  # what was over when this agent came, others have reported
        if new:
            self._report("node_lost", plan.reason, nodes=sorted(new))
        if plan.is_terminal:
            nodes = [] if plan.failed_node is None else [plan.failed_node]
            self._report(_ENDS[plan.phase], plan.reason, nodes=nodes)

    def _is_reporter(self, plan: Plan) -> bool:
        if plan.world is None:
            return True
        gone = self._lost | self._left
        present = [seat.node_id for seat in plan.world.seats if seat.node_id not in gone]
        return present[:1] == [self.get_node_id()]

    def _report(self, event: str, reason: str, nodes: list[str]) -> None:
        plan = self._plan
        record = {
            "event": event,
            "run": self.run_id,
            "reported_by": self.get_node_id(),
            "time_s": time.time(),
            "reason": reason,
            "nodes": nodes,
            "generation": 0 if plan is None else plan.generation,
            "restarts": 0 if plan is None else plan.charged,
        }
        if self.command is not None:
            self._tasks.start(self._run(self.command, event, (json.dumps(record) + "\n").encode()))

    async def _run(self, command: str, event: str, line: bytes) -> None:
        async with self._one_at_a_time:
            try:
                await run_command(("/bin/sh", "-c", command), LIMIT_S, shown=command, stdin=line)
            except CommandError as error:
                get_logger().warning(f"the command of --on-event was not told of {event}: {error}")
