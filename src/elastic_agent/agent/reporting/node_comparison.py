"""Compares how the nodes of a run were started, and logs the differences on every node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from elastic_agent.diagnosis.differences import differences
from elastic_agent.diagnosis.run_log import RunLog
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase, World
from elastic_agent.rendezvous.reports import RunReports
from elastic_agent.transport import TransportError

from .background_tasks import BackgroundTasks
from .node_reports import NodeReports

COMPARE_AFTER_S = 3.0
"""After this time of waiting for other nodes, those that wait are compared."""

FACTS_S = 10.0
"""How long the facts of the other nodes of the first world are waited for."""

SHOWN_DIFFERENCES = 8


class NodeComparison:
    """Compares the nodes that wait for a world, and those of the first world that this node takes part in."""

    def __init__(self, log: RunLog, reports: NodeReports, tasks: BackgroundTasks) -> None:
        """``log``: the plans so far; ``reports``: of all nodes; ``tasks``: runs what waits for the store."""
        self._log = log
        self._reports = reports
        self._tasks = tasks
        self._told: set[str] = set()
        self._is_done = False
        self._timer: asyncio.TimerHandle | None = None

    def on_plan(self) -> None:
        """Take note of a new plan in the log."""
        plan = self._log.plan
        if plan is None or self._is_done:
            return
        if plan.phase is Phase.FORMING and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(COMPARE_AFTER_S, lambda: self._tasks.start(self._compare_waiting()))
        world = plan.world if plan.phase is Phase.RUNNING else None
        if world is not None and world.seat_of(self._reports.incarnation) is not None:
            self._is_done = True
            self._tasks.start(self._compare_world(plan.generation, world))

    def close(self) -> None:
        """Compare nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    async def _compare_waiting(self) -> None:
        """A difference may be why no world is formed."""
        self._timer = None
        plan = self._log.plan
        if plan is not None and plan.phase is Phase.FORMING:
            with contextlib.suppress(TransportError):
                self._tell(await self._reports.read(), {})

    async def _compare_world(self, generation: int, world: World) -> None:
        gathered = await self._reports.gather(generation, world, lambda _: True, FACTS_S)
        with contextlib.suppress(TransportError):
            known = await self._reports.read()
            self._tell(known, {node: one.facts for node, one in gathered.items()})

    def _tell(self, known: RunReports, facts: Mapping[str, Mapping[str, str]]) -> None:
        leases, plan = known.view.snapshot.leases, known.view.plan
        members = known.view.snapshot.members.items()
        alive = [one for name, one in members if name in leases and not leases[name].revoked]
        alive.sort(key=lambda one: (one.preferred_rank or 0, one.node_id))
        found = differences(alive, facts, plan.policy if plan is not None else None)
        fresh = [line for line in found if line not in self._told]
        self._told.update(fresh)
        for line in fresh[:SHOWN_DIFFERENCES]:
            get_logger().warning(line)
        if len(fresh) > SHOWN_DIFFERENCES:
            hidden = len(fresh) - SHOWN_DIFFERENCES
            get_logger().warning(f"{hidden} more differences between nodes are not shown")
