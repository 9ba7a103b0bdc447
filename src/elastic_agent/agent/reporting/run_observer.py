"""Observes the run for its users: keeps its history, and exchanges reports with the other nodes.

What it does explains the run and decides nothing: if the store or the disk does not answer, the status is less
complete, and nothing else changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from elastic_agent.agent import events
from elastic_agent.agent.reporting.status_files import StatusFiles
from elastic_agent.agent.reporting.worker_reports import ended_worker, present_workers
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.diagnosis.differences import differences
from elastic_agent.diagnosis.goodput import Goodput
from elastic_agent.diagnosis.hangs import Hang, find_hang
from elastic_agent.diagnosis.records import NodeReport, WorkerReport
from elastic_agent.diagnosis.status import GenerationStatus, RunStatus, run_status
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Phase, Plan, World
from elastic_agent.rendezvous.events import PlanSeen
from elastic_agent.rendezvous.reports import Reports, RunReports
from elastic_agent.transport import TransportError
from elastic_agent.workers.guard.client import Spawned

REPORT_EVERY_S = 5.0
"""How often a node reports the progress of its workers, if there was any."""

KEPT_GENERATIONS = 1000
KEPT_REPORTS = 3

GATHER_S = 3.0
"""How long the reports of the other nodes on a generation that failed are waited for."""

GATHER_EVERY_S = 0.25

STALL_GATHER_S = 6.0
"""How long the other nodes' reports on a stall are waited for: they notice it some seconds sooner or later."""

OVER_GATHER_S = 2.0
"""The same when the stall has lasted for the hang time-out."""

CULPRIT_FIRST_S = 1.0
"""How much later than the node of the worker that is the cause the other nodes report the hang."""

COMPARE_AFTER_S = 3.0
"""After this time of waiting for other nodes, those that wait are compared."""

SHOWN_DIFFERENCES = 8

ANSWER_S = 2.0
"""How long the store may take, when a user asks for the status, until the answer is what was known before."""

Explain = Callable[[World, Plan, Mapping[str, NodeReport]], str]
"""Explains why a generation failed: its world, the plan that ended it, reports by node id; empty: nothing to say."""


class RunObserver:
    """One node's view of the run, from the start of the agent's part in it to the end."""

    def __init__(
        self,
        *,
        run_id: str,
        node_id: str,
        endpoint: Callable[[], str],
        reports: Reports,
        files: StatusFiles,
        progress: Callable[[], Progress | None],
        explain: Explain,
        facts: Mapping[str, str],
        goodput: Callable[[], Goodput],
        hung: Callable[[int, str, int | None, float], None] = lambda *_: None,
    ) -> None:
        """Observe nothing yet.

        Args:
            run_id: the run.
            node_id: this node.
            endpoint: of the store, as users write it.
            reports: access to the reports of all nodes.
            files: where the status is saved.
            progress: of the present workers; None without any.
            explain: explains failures.
            facts: how this node was started (:mod:`elastic_agent.diagnosis.differences`).
            hung: told that the workers of a generation hang: a summary, the slot that is the cause, for how long.
            goodput: the account of this node so far.
        """
        self._run_id = run_id
        self._node_id = node_id
        self._endpoint = endpoint
        self._reports = reports
        self._files = files
        self._progress = progress
        self._explain = explain
        self._facts = dict(facts)
        self._hung = hung
        self._told_stalls: dict[tuple[object, ...], float] = {}
        """How long a stall was when it was logged, by generation, kind and culprits."""
        self._goodput = goodput
        self._incarnation = "unknown"
        self._plan: Plan | None = None
        self._since_s: float | None = None
        self._worlds: dict[int, World] = {}
        self._generations: dict[int, GenerationStatus] = {}
        self._own: dict[int, NodeReport] = {}
        """This node's reports by generation."""
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._explaining: asyncio.Task[None] | None = None
        self._last_view = RunReports()
        self._told_differences: set[str] = set()
        self._has_compared = False
        self._compare_timer: asyncio.TimerHandle | None = None

    # -- events ---------------------------------------------------------------------------------

    def on_event(self, event: events.Event) -> None:
        """Take note of it."""
        match event:
            case events.AgentStarted(incarnation=incarnation) | events.Rejoining(incarnation=incarnation):
                self._incarnation = incarnation
            case PlanSeen(plan=plan):
                self._plan_seen(plan)
            case Spawned():
                self._report_progress()
            case events.Stalled():
                self._report_progress()
                self._start(self._judge_stall(event))
            case events.GenerationEnded():
                self._ended(event)

    def _plan_seen(self, plan: Plan) -> None:
        before, self._plan = self._plan, plan
        now_s = time.time()
        if before is None or (before.phase, before.generation) != (plan.phase, plan.generation):
            self._since_s = now_s
        self._end_generations(plan, now_s)
        if plan.phase is Phase.FORMING and not self._has_compared and self._compare_timer is None:
            loop = asyncio.get_running_loop()
            self._compare_timer = loop.call_later(
                COMPARE_AFTER_S, lambda: self._start(self._compare_waiting())
            )
        if (
            plan.phase is Phase.RUNNING
            and plan.world is not None
            and plan.generation not in self._generations
        ):
            self._worlds[plan.generation] = plan.world
            nodes = tuple(seat.node_id for seat in plan.world.seats)
            self._generations[plan.generation] = GenerationStatus(
                plan.generation, now_s, nodes=nodes, workers=plan.world.world_size
            )
            self._forget_old()
            if not self._has_compared and plan.world.seat_of(self._incarnation) is not None:
                self._has_compared = True
                self._start(self._compare_world(plan.generation, plan.world))

    def _end_generations(self, plan: Plan, now_s: float) -> None:
        for number, one in self._generations.items():
            over = plan.generation > number or plan.phase is not Phase.RUNNING
            if one.ended_s is None and over:
                self._generations[number] = msgspec.structs.replace(one, ended_s=now_s, end=plan.reason)
                if _needs_explanation(plan):
                    self._explaining = self._start(self._explain_failure(number, plan))
                else:
                    self._save_soon()

    def _forget_old(self) -> None:
        for kept, most in ((self._generations, KEPT_GENERATIONS), (self._worlds, KEPT_REPORTS)):
            while len(kept) > most:
                kept.pop(min(kept))

    # -- this node's reports --------------------------------------------------------------------

    def _ended(self, event: events.GenerationEnded) -> None:
        world = self._worlds.get(event.generation)
        if world is not None:
            workers = tuple(ended_worker(one, self._first_rank(world)) for one in event.workers)
            self._write(event.generation, workers, is_final=True, found=event.facts)

    def _report_progress(self) -> None:
        """Report the present workers, and again after a while if they have made progress."""
        self._stop_timer()
        progress = self._progress()
        world = self._worlds.get(progress.generation) if progress is not None else None
        if progress is None or world is None:
            return
        workers = present_workers(progress, self._first_rank(world))
        known = self._own.get(progress.generation)
        if known is None or (not known.is_final and _is_news(known, workers, progress)):
            self._write(progress.generation, workers, stalled_s=progress.stalled_s)
        self._timer = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._report_progress)

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
    ) -> None:
        report = NodeReport(
            self._node_id,
            self._incarnation,
            generation,
            time.time(),
            host=os.uname().nodename[:512],
            workers=workers,
            facts={**self._facts, **(found or {})},
            is_final=is_final,
            stalled_s=stalled_s,
        )
        self._own[generation] = report
        while len(self._own) > KEPT_REPORTS:
            self._own.pop(min(self._own))
        self._start(self._publish())

    async def _publish(self) -> None:
        with contextlib.suppress(TransportError):  # the next report is written over a new connection
            await self._reports.write(self._node_id, [self._own[number] for number in sorted(self._own)])

    # -- differences between nodes --------------------------------------------------------------

    async def _compare_waiting(self) -> None:
        """Compare the nodes that wait: a difference may be why no world is formed."""
        self._compare_timer = None
        plan = self._plan
        if plan is not None and plan.phase is Phase.FORMING:
            with contextlib.suppress(TransportError):
                self._tell_differences(await self._reports.read(), {})

    async def _compare_world(self, generation: int, world: World) -> None:
        """Compare the nodes of the first world that this node takes part in, once."""
        gathered = await self._gather(generation, world, lambda _: True)
        with contextlib.suppress(TransportError):
            self._tell_differences(
                await self._reports.read(), {node: one.facts for node, one in gathered.items()}
            )

    def _tell_differences(self, known: RunReports, facts: Mapping[str, Mapping[str, str]]) -> None:
        leases, plan = known.view.snapshot.leases, known.view.plan
        alive = [
            one
            for name, one in known.view.snapshot.members.items()
            if name in leases and not leases[name].revoked
        ]
        alive.sort(key=lambda one: (one.preferred_rank or 0, one.node_id))
        found = [
            line
            for line in differences(alive, facts, plan.policy if plan is not None else None)
            if line not in self._told_differences
        ]
        self._told_differences.update(found)
        for line in found[:SHOWN_DIFFERENCES]:
            get_logger().warning(line)
        if len(found) > SHOWN_DIFFERENCES:
            get_logger().warning(
                f"{len(found) - SHOWN_DIFFERENCES} more differences between nodes are not shown"
            )

    # -- explanations ---------------------------------------------------------------------------

    async def _explain_failure(self, generation: int, plan: Plan) -> None:
        """Log and keep the root cause, once the nodes of the generation have reported, or are not likely to."""
        world = self._worlds.get(generation)
        if world is None:
            return
        gathered = await self._gather(generation, world, lambda one: one.is_final)
        cause = self._explain(world, plan, gathered)
        one = self._generations.get(generation)
        if cause and one is not None:
            self._generations[generation] = msgspec.structs.replace(one, cause=cause)
            get_logger().info(cause)
        self._save_soon()

    async def _gather(
        self,
        generation: int,
        world: World,
        is_enough: Callable[[NodeReport], bool],
        within_s: float = GATHER_S,
    ) -> Mapping[str, NodeReport]:
        """The reports of the world's nodes on the generation; if that takes long, some of them, or not good enough."""
        expected = {seat.node_id for seat in world.seats}
        until_s = time.monotonic() + within_s
        found: dict[str, NodeReport] = {}
        while True:
            with contextlib.suppress(TransportError):
                found |= (await self._reports.read()).of(generation)
            if generation in self._own:
                found[self._node_id] = self._own[generation]
            complete = all(node in found and is_enough(found[node]) for node in expected)
            if complete or time.monotonic() > until_s:
                return found
            await asyncio.sleep(GATHER_EVERY_S)

    # -- hangs ----------------------------------------------------------------------------------

    async def _judge_stall(self, stall: events.Stalled) -> None:
        """Compare where the workers of all nodes are; log which one the others wait for, and report a hang."""
        world = self._worlds.get(stall.generation)
        if world is None:
            return
        within_s = OVER_GATHER_S if stall.is_over else STALL_GATHER_S
        gathered = await self._gather(stall.generation, world, _stands_still, within_s)
        progresses = any(not _stands_still(one) for one in gathered.values())
        hang = None if progresses else find_hang(gathered.values(), world.world_size)
        if hang is not None:
            self._tell_hang(hang, stall)
        if not stall.is_over or (hang is None and stall.silent_slot is None):
            return
        own = [one.slot for one in hang.culprits if one.node_id == self._node_id] if hang is not None else []
        if hang is not None and hang.culprits and not own:
            await asyncio.sleep(CULPRIT_FIRST_S)
        summary = self._stalled_words(stall, hang)
        slot = own[0] if own else stall.silent_slot if hang is None else None
        self._hung(stall.generation, summary, slot, stall.stalled_s)

    def _tell_hang(self, hang: Hang, stall: events.Stalled) -> None:
        """Log it, unless the same has been logged and the stall has not become much longer."""
        key = (stall.generation, hang.kind, hang.culprits)
        if stall.is_over:
            get_logger().warning(f"where the workers are:\n{hang.details}")
        elif stall.stalled_s >= 2 * self._told_stalls.get(key, 0.0):
            self._told_stalls[key] = stall.stalled_s
            get_logger().warning(
                f"no worker has made progress for {_shown(stall.stalled_s)} s: {hang.summary}"
            )

    def _stalled_words(self, stall: events.Stalled, hang: Hang | None) -> str:
        if hang is not None:
            return f"the workers made no progress for {_shown(stall.stalled_s)} s (--hang-timeout): {hang.summary}"
        return (
            f"worker {self._node_id}/{stall.silent_slot} made no progress for {_shown(stall.stalled_s)} s "
            f"(--hang-timeout); its last heartbeat was at step {stall.step}; it may have been waiting for "
            "another worker: compare the stacks in the logs of all workers"
        )

    # -- the status -----------------------------------------------------------------------------

    async def status(self) -> RunStatus:
        """The status of the run, from the store if it answers soon."""
        problem = ""
        self._refresh_own()
        try:
            self._last_view = await asyncio.wait_for(self._reports.read(), ANSWER_S)
        except (TransportError, TimeoutError) as error:
            problem = str(error) or f"no answer within {ANSWER_S:g} s"
        return self._status(problem)

    def _refresh_own(self) -> None:
        """What is known of this node's workers is not to be older than the question."""
        if self._timer is not None:
            self._report_progress()

    def _status(self, problem: str) -> RunStatus:
        view, own = self._last_view.view, [self._own[number] for number in sorted(self._own)]
        plan = view.plan
        if plan is None or (self._plan is not None and self._plan.version > plan.version):
            plan = self._plan
        is_known = (
            plan is not None
            and self._plan is not None
            and (plan.phase, plan.generation) == (self._plan.phase, self._plan.generation)
        )
        newest = {one.node_id: one for one in (*self._last_view.reports, *own)}
        return run_status(
            run_id=self._run_id,
            endpoint=self._endpoint(),
            asked_s=time.time(),
            plan=plan,
            waiting_for=view.status,
            members=view.snapshot.members,
            leases=view.snapshot.leases,
            reports=tuple(newest.values()),
            since_s=self._since_s if is_known else None,
            generations=tuple(self._generations[number] for number in sorted(self._generations)),
            goodput=self._goodput(),
            problem=problem,
        )

    # -- the end --------------------------------------------------------------------------------

    async def settle(self, timeout_s: float) -> None:
        """Wait until the last reports are written and the last failure is explained; not for longer than this."""
        self._stop_timer()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        self._files.save(self._status(""))
        await self._files.written(timeout_s)

    def close(self) -> None:
        """Give up whatever is under way."""
        self._stop_timer()
        if self._compare_timer is not None:
            self._compare_timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._reports.close()

    def _save_soon(self) -> None:
        self._files.save(self._status(""))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            get_logger().error("internal error while the run was observed; the run continues", exc_info=error)


def _shown(length_s: float) -> str:
    return f"{round(length_s, 0 if length_s >= 2 else 1):g}"


def _needs_explanation(plan: Plan) -> bool:
    """Whether this plan ended a generation because of a failure or the loss of a node."""
    return (
        plan.failure is not None
        or plan.phase is Phase.FAILED
        or (plan.free and not (plan.notice or plan.leaving))
    )


def _is_news(known: NodeReport, workers: tuple[WorkerReport, ...], progress: Progress) -> bool:
    return known.workers != workers or (known.stalled_s is None) != (progress.stalled_s is None)


def _stands_still(report: NodeReport) -> bool:
    return report.is_final or report.stalled_s is not None
