"""Writes this node's reports for the other nodes of the run, and gathers theirs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.agent.worker_group.collectives import WorkerCollectives
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.records import KEPT_REPORTS, NodeReport, WorkerReport, WorkerState
from elastic_agent.linux import read_process
from elastic_agent.monitoring.rates import StepRate
from elastic_agent.monitoring.run_log import RunLog
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Seat, State, World
from elastic_agent.rendezvous.reports import Reports
from elastic_agent.transport import Snapshot, TransportError

from .worker_usage import WorkerUsage

LEAST_OFTEN_S = 30.0
"""The age at which a report is written again while the workers make no progress."""

KEPT_BLOCKED = 8
"""So many blocked connections of a node are reported."""

READ_EVERY_S = 0.25
"""The time between readings of the other nodes' reports while some of them are missing."""

LONGEST_TEXT = 512


@dataclass(eq=False, repr=False)
class NodeReports:
    """One node's reports on its workers, and access to those of the others. For the event loop."""

    node_id: str
    """This node."""
    store: Reports
    """Access to the reports of all nodes."""
    supervisor: Supervisor
    """Runs the workers."""
    log: RunLog
    """The worlds of the run."""
    start_facts: dict[str, str]
    """How this node was started."""
    log_dir: str
    """Where the output of the run's workers is; empty: nowhere."""
    tasks: BackgroundTasks
    """Runs what waits for the store."""

    def __post_init__(self) -> None:
        self._log_dir = without_surrogates(self.log_dir)[:LONGEST_TEXT]
        self._rate = StepRate()
        self._usage = WorkerUsage()
        self._own: dict[int, NodeReport] = {}
        self._in_lost_store = 0
        """The last generation that a store ran which was lost since: its nodes may have to register again."""

    @property
    def incarnation(self) -> str:
        """Of this node."""
        return self.supervisor.node.incarnation

    @property
    def own(self) -> list[NodeReport]:
        """This node's on the last generations, the oldest first."""
        return [self._own[number] for number in sorted(self._own)]

    def on_progress(self) -> None:
        """Report the present workers, if they have made progress since the last report, or that is old."""
        progress = self.supervisor.progress
        world = self.log.world(progress.generation) if progress is not None else None
        if progress is None or world is None:
            return
        workers = _present_workers(progress, self._first_rank(world))
        is_counted = not any(progress.steps.values())
        now_s = asyncio.get_running_loop().time()
        self._rate.see(progress.generation, progress.newest_step, now_s, is_counted=is_counted)
        self._usage.look(progress.pids, now_s)
        known = self._own.get(progress.generation)
        if known is None or (not known.is_final and _is_news(known, workers, progress)):
            report = self._report(progress.generation, workers)
            stalled_s, usage = progress.stalled_s, self._usage.by_slot
            speed = self._rate.per_s if stalled_s is None else None
            self._keep(msgspec.structs.replace(report, stalled_s=stalled_s, steps_per_s=speed, usage=usage))

    def on_ended(self, event: events.GenerationEnded) -> None:
        """Report how the workers of a generation ended."""
        world = self.log.world(event.generation)
        if world is None:
            return
        first_rank = self._first_rank(world)
        workers = tuple(msgspec.structs.replace(end, rank=first_rank + end.rank) for end in event.workers)
        report = self._report(event.generation, workers)
        self._keep(msgspec.structs.replace(report, facts={**self.start_facts, **event.facts}, is_final=True))

    def on_new_store(self) -> None:
        """Write the reports of the last generations to a store that was restarted empty."""
        self._in_lost_store = max(self._own, default=0)
        self.store.close()  # the connection to the old one
        self.tasks.start(self._publish())

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
                found[self.node_id] = self._own[generation]
            may_register = generation <= self._in_lost_store
            awaited = [seat for seat in world.seats if not _is_lost(seat, snapshot, may_register)]
            complete = all(seat.node_id in found and is_enough(found[seat.node_id]) for seat in awaited)
            if complete or loop.time() > until_s:
                return found
            await asyncio.sleep(READ_EVERY_S)

    def _first_rank(self, world: World) -> int:
        return next((seat.first_rank for seat in world.seats if seat.node_id == self.node_id), 0)

    def _report(self, generation: int, workers: tuple[WorkerReport, ...]) -> NodeReport:
        known = self._own.get(generation)
        return NodeReport(
            self.node_id,
            self.incarnation,
            generation,
            time.time(),
            host=os.uname().nodename[:LONGEST_TEXT],
            workers=workers,
            facts=self.start_facts,
            blocked=known.blocked if known is not None else (),
            log_dir=self._log_dir,
        )

    def _keep(self, report: NodeReport) -> None:
        self._own[report.generation] = report
        while len(self._own) > KEPT_REPORTS:
            self._own.pop(min(self._own))
        self.tasks.start(self._publish())

    async def _publish(self) -> None:
        with contextlib.suppress(TransportError):  # the next report is written over a new connection
            await self.store.write(self.node_id, self.own)


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


def _present_workers(progress: Progress, first_rank: int) -> tuple[WorkerReport, ...]:
    """Return the workers of a generation that runs, by slot; in detail where they are if they make no progress."""
    running = {slot: _running(progress, slot, first_rank) for slot in progress.pids}
    exited = {
        slot: WorkerReport(
            slot,
            first_rank + slot,
            WorkerState.SUCCEEDED if end.returncode == 0 else WorkerState.FAILED,
            end.pid,
            end.returncode,
        )
        for slot, end in progress.exited.items()
    }
    return tuple(report for _, report in sorted({**running, **exited}.items()))


def _running(progress: Progress, slot: int, first_rank: int) -> WorkerReport:
    pid = progress.pids[slot]
    known = progress.collectives.get(slot) or WorkerCollectives(pid)
    process = read_process(pid) if progress.stalled_s is not None else None
    return WorkerReport(
        slot,
        first_rank + slot,
        WorkerState.RUNNING,
        pid,
        step=progress.steps.get(slot) or None,
        optimizer_steps=progress.optimizer_steps.get(slot) or None,
        progress=known.groups,
        process_state=process.state if process is not None else "",
        is_silent=known.is_silent,
        waits=round(known.waits, 2) if known.waits is not None else None,
        **known.as_place(),
    )
