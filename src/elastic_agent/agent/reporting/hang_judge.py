"""Decides whether a stall of this node's workers is a hang of the run, and which worker the others wait for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.agent import events
from elastic_agent.diagnosis.hangs import Hang, find_standstill, stands_still, where_all_are
from elastic_agent.diagnosis.records import NodeReport, WorkerState
from elastic_agent.logs import get_logger
from elastic_agent.printable import duration
from elastic_agent.protocol import Failure, FailureKind, remaining_restarts

from .node_reports import NodeReports

STALL_GATHER_S = 6.0
"""The longest wait for the other nodes' reports on a stall, which they notice some seconds sooner or later."""

OVER_GATHER_S = 2.0
"""The same when the stall has lasted for the hang time-out."""

CULPRIT_FIRST_S = 1.0
"""The other nodes report the hang so much later than the node of the worker that is the cause."""

SHOWN_BLOCKED = 4
"""So many blocked connections of workers on other nodes are logged at once."""


@dataclass(eq=False, repr=False)
class HangJudge:
    """Compares where the workers of all nodes are when those of this node make no progress."""

    reports: NodeReports
    """Of all nodes, with the worlds of the run."""
    report_hang: Callable[[int, Failure], None]
    """Takes a generation whose workers hang, and the failure."""

    def __post_init__(self) -> None:
        self._stacks: dict[int, str] = {}
        self._told: dict[tuple[object, ...], float] = {}
        """The length that a stall had when it was logged, by generation, kind and culprits."""
        self._told_blocked: set[str] = set()
        """Connections that other nodes have reported and that were logged."""

    def stacks(self, generation: int) -> str:
        """Return where the workers of a generation that hung were, with their stacks; empty: it did not hang."""
        return self._stacks.get(generation, "")

    async def judge(self, stall: events.Stalled) -> None:
        """Log which worker the others wait for; after the hang time-out, report the hang."""
        world = self.reports.log.world(stall.generation)
        if world is None:
            return
        within_s = OVER_GATHER_S if stall.is_over else STALL_GATHER_S
        gathered = await self.reports.gather(stall.generation, world, _tells_where, within_s)
        self._tell_blocked(
            {
                line
                for node_id, report in gathered.items()
                for line in report.blocked
                if node_id != self.reports.node_id
            }
        )
        hang = find_standstill(gathered.values(), world.world_size)
        if hang is not None:
            self._tell(hang, stall)
        if not stall.is_over or (hang is None and stall.silent_slot is None):
            return
        where = hang.details if hang is not None else where_all_are(gathered.values(), world.world_size)
        self._stacks = {stall.generation: where}
        get_logger().warning(f"where the workers of generation {stall.generation} are:\n{where}")
        culprits = hang.culprits if hang is not None else ()
        if culprits and self.reports.node_id not in {culprit.node_id for culprit in culprits}:
            await asyncio.sleep(CULPRIT_FIRST_S)
        self.report_hang(stall.generation, self._failure(stall, hang))

    def _failure(self, stall: events.Stalled, hang: Hang | None) -> Failure:
        shown = _shown(stall.stalled_s)
        if hang is None:
            return Failure(
                FailureKind.HANG,
                f"worker {self.reports.node_id}/{stall.silent_slot} made no progress for {shown} s "
                f"(--hang-timeout); its last heartbeat was at step {stall.step}; it may have been waiting for "
                "another worker: elastic-agent why shows where all of them were"[:512],
                slot=stall.silent_slot,
                stalled_s=stall.stalled_s,
                culprit=self.reports.node_id,
                culprit_slot=stall.silent_slot,
                is_certain=False,
            )
        blamed = hang.culprits[0] if len(hang.culprits) == 1 and hang.culprits[0].node_id else None
        own = (culprit.slot for culprit in hang.culprits if culprit.node_id == self.reports.node_id)
        return Failure(
            FailureKind.HANG,
            f"the workers made no progress for {shown} s (--hang-timeout)",
            detail=hang.summary[:512],
            slot=next(own, None),
            stalled_s=stall.stalled_s,
            culprit=blamed.node_id if blamed is not None else None,
            culprit_slot=blamed.slot if blamed is not None else None,
        )

    def _tell_blocked(self, found: set[str]) -> None:
        """Log connections that the network blocks: only the node of the worker that connects sees them."""
        shown = sorted(found - self._told_blocked)[:SHOWN_BLOCKED]
        for line in shown:
            get_logger().warning(line)
        self._told_blocked.update(shown)

    def _tell(self, hang: Hang, stall: events.Stalled) -> None:
        """Log it, unless the same has been logged and the stall has not become much longer."""
        key = (stall.generation, hang.kind, hang.culprits)
        is_new = key not in self._told
        self._stacks = {stall.generation: hang.details}
        if not stall.is_over and stall.stalled_s >= 2 * self._told.get(key, 0.0):
            self._told[key] = stall.stalled_s
            description = f": {hang.summary_now}" if is_new else ", as told above"
            stalled = f"no worker has made progress for {_shown(stall.stalled_s)} s"
            get_logger().warning(f"{stalled}{description}{self._what_follows(stall)}")

    def _what_follows(self, stall: events.Stalled) -> str:
        """Return what happens if the stall lasts, and when; it follows the description of the stall."""
        if math.isinf(stall.over_at_s):
            return ""
        plan = self.reports.log.plan
        fails = plan is not None and remaining_restarts(plan) <= 0
        then = "the run fails, as no restart is left," if fails else "all workers restart"
        left_s = max(1, math.ceil(stall.over_at_s - asyncio.get_running_loop().time()))
        return f"; {then} in {duration(left_s)} ({stall.limit}) unless it goes on"


def _tells_where(report: NodeReport) -> bool:
    """Return whether its workers make no progress and have answered where they are: they are asked a moment later."""
    return stands_still(report) and all(
        worker.stack
        or worker.line
        or worker.is_silent
        or not worker.progress
        or worker.process_state[:1] in ("T", "t")
        for worker in report.workers
        if worker.state is WorkerState.RUNNING
    )


def _shown(length_s: float) -> str:
    return f"{round(length_s, 0 if length_s >= 2 else 1):g}"
