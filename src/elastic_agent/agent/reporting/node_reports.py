"""Writes this node's reports for the other nodes of the run, and gathers theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.records import NodeReport, WorkerReport
from elastic_agent.monitoring.rates import StepRate
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Seat, State, World
from elastic_agent.rendezvous.reports import Reports
from elastic_agent.transport import Snapshot, TransportError

from .worker_reports import WorkerUsage, present_workers

REPORT_EVERY_S, LEAST_OFTEN_S = 5.0, 30.0
"""How often a node reports the progress of its workers, if there was any, and what they take of the machine."""

KEPT_REPORTS = 3

KEPT_BLOCKED = 8
"""So many blocked connections of a node are reported."""

READ_EVERY_S = 0.25
"""How often the reports of the other nodes are read while some of them are missing."""

LONGEST_TEXT = 512


class NodeReports:
    """One node's reports on its workers, and access to those of the others. For the event loop."""

    def __init__(
        self,
        node_id: str,
        reports: Reports,
        progress: Callable[[], Progress | None],
        world: Callable[[int], World | None],
        facts: Mapping[str, str],
        log_dir: str,
        tasks: BackgroundTasks,
    ) -> None:
        """Report nothing yet.

        Args:
            node_id: this node.
            reports: access to the reports of all nodes.
            progress: of the present workers; None without any.
            world: the world of a generation, if it is known.
            facts: how this node was started.
            log_dir: where the output of the run's workers is; empty: nowhere.
            tasks: runs what waits for the store.
        """
        self._node_id = node_id
        self.store = reports
        """Access to the reports of all nodes."""
        self._progress = progress
        self._world = world
        self._facts = dict(facts)
        self._log_dir = without_surrogates(log_dir)[:LONGEST_TEXT]
        self._rate = StepRate()
        self._usage = WorkerUsage()
        self._tasks = tasks
        self._own: dict[int, NodeReport] = {}
        self._in_lost_store = 0
        """The last generation that a store ran which was lost since: its nodes may have to register again."""
        self._timer: asyncio.TimerHandle | None = None
        self.incarnation = "unknown"
        """Of this node."""

    @property
    def own(self) -> list[NodeReport]:
        """This node's on the last generations, the oldest first."""
        return [self._own[number] for number in sorted(self._own)]

    @property
    def facts(self) -> dict[str, Mapping[str, str]]:
        """How this node was started, by its id."""
        return {self._node_id: self._facts}

    def on_progress(self) -> None:
        """Report the present workers, and again after a while if they have made progress."""
        self._stop_timer()
        progress = self._progress()
        world = self._world(progress.generation) if progress is not None else None
        if progress is None or world is None:
            return
        workers = present_workers(progress, self._first_rank(world))
        is_counted = not any(progress.steps.values())
        now_s = asyncio.get_running_loop().time()
        self._rate.see(progress.generation, progress.newest_step, now_s, is_counted=is_counted)
        self._usage.look(progress.pids, now_s)
        known = self._own.get(progress.generation)
        if known is None or (not known.is_final and _is_news(known, workers, progress)):
            self._write(
                progress.generation, workers, stalled_s=progress.stalled_s, collectives_s=_asked_s(progress)
            )
        self._timer = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self.on_progress)

    def refresh(self) -> None:
        """Report the present workers now, if they are reported from time to time."""
        if self._timer is not None:
            self.on_progress()

    def on_ended(self, event: events.GenerationEnded) -> None:
        """Report how the workers of a generation ended."""
        world = self._world(event.generation)
        if world is not None:
            first_rank, reports = self._first_rank(world), (end.report for end in event.workers)
            workers = tuple(msgspec.structs.replace(end, rank=first_rank + end.rank) for end in reports)
            self._write(event.generation, workers, is_final=True, found=event.facts)

    def on_new_store(self) -> None:
        """Write the reports of the last generations to a store that was restarted empty."""
        self._in_lost_store = max(self._own, default=0)
        self.store.close()  # the connection to the old one
        self._tasks.start(self._publish())

    def on_blocked(self, generation: int, line: str) -> None:
        """Report a connection of a worker that the network blocks, in words."""
        known = self._own.get(generation)
        if known is not None:
            self._keep(msgspec.structs.replace(known, blocked=(*known.blocked, line)[:KEPT_BLOCKED]))

    def confirm(self, generation: int) -> None:
        """Tell the other nodes that this one has read their reports on a generation."""
        known = self._own.get(generation)
        if known is not None:
            self._keep(msgspec.structs.replace(known, has_read=True))

    async def gather(
        self, generation: int, world: World, is_enough: Callable[[NodeReport], bool], within_s: float
    ) -> Mapping[str, NodeReport]:
        """Return the reports of the world's nodes on the generation, by node id.

        Args:
            generation: which one.
            world: its world.
            is_enough: whether a report says what is wanted.
            within_s: how long those of nodes that are alive are waited for.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        found: dict[str, NodeReport] = {}
        while True:
            snapshot = Snapshot()
            with contextlib.suppress(TransportError):
                known = await self.store.read()
                found |= known.of(generation)
                snapshot = known.view.snapshot
            if generation in self._own:
                found[self._node_id] = self._own[generation]
            may_register = generation <= self._in_lost_store
            awaited = [seat for seat in world.seats if not _is_lost(seat, snapshot, may_register)]
            complete = all(seat.node_id in found and is_enough(found[seat.node_id]) for seat in awaited)
            if complete or loop.time() > until_s:
                return found
            await asyncio.sleep(READ_EVERY_S)

    def stop(self) -> None:
        """Report no more progress."""
        self._stop_timer()

    def close(self) -> None:
        """Give up the connection."""
        self._stop_timer()
        self.store.close()

    def _first_rank(self, world: World) -> int:
        return next((seat.first_rank for seat in world.seats if seat.node_id == self._node_id), 0)

    def _write(
        self,
        generation: int,
        workers: tuple[WorkerReport, ...],
        *,
        is_final: bool = False,
        found: Mapping[str, str] | None = None,
        stalled_s: float | None = None,
        collectives_s: float | None = None,
    ) -> None:
        report = NodeReport(
            self._node_id,
            self.incarnation,
            generation,
            time.time(),
            host=os.uname().nodename[:LONGEST_TEXT],
            workers=workers,
            facts={**self._facts, **(found or {})},
            is_final=is_final,
            blocked=known.blocked if (known := self._own.get(generation)) is not None else (),
            stalled_s=stalled_s,
            steps_per_s=self._rate.per_s if not is_final and stalled_s is None else None,
            log_dir=self._log_dir,
            collectives_s=collectives_s,
            usage={} if is_final else self._usage.by_slot,
        )
        self._keep(report)

    def _keep(self, report: NodeReport) -> None:
        self._own[report.generation] = report
        while len(self._own) > KEPT_REPORTS:
            self._own.pop(min(self._own))
        self._tasks.start(self._publish())

    async def _publish(self) -> None:
        with contextlib.suppress(TransportError):  # the next report is written over a new connection
            await self.store.write(self._node_id, self.own)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _asked_s(progress: Progress) -> float | None:
    """Return when the workers last answered how far they are, by the machine's clock; None: they stall, or unknown."""
    answered_s = min((answer.answered_s for answer in progress.collectives.values()), default=None)
    if answered_s is None or progress.stalled_s is not None:
        return None
    return time.time() - (asyncio.get_running_loop().time() - answered_s)


def _is_lost(seat: Seat, snapshot: Snapshot, may_register: bool) -> bool:
    """Return whether, by what is in the store, this node will not report any more.

    ``may_register``: the store is newer than the seat, so that the node may still have to register there.
    """
    lease, member = snapshot.leases.get(seat.incarnation), snapshot.members.get(seat.incarnation)
    if lease is not None:
        return lease.revoked
    if may_register:  # unless its agent was restarted
        return any(
            member.node_id == seat.node_id and member.incarnation != seat.incarnation
            for member in snapshot.members.values()
        )
    return bool(snapshot.members) and (member is None or member.state is not State.LEFT)


def _is_news(known: NodeReport, workers: tuple[WorkerReport, ...], progress: Progress) -> bool:
    is_old = time.time() - known.written_s >= LEAST_OFTEN_S
    return is_old or known.workers != workers or (known.stalled_s is None) != (progress.stalled_s is None)
