"""The agent's one loop: waits for an event and acts.

Events are: a worker ended, a newer plan, the lease, a signal, a timer. Each is handed to the node's state
machine (:mod:`elastic_agent.protocol.node`), and the actions it returns are carried out here. No decision is
taken in this module; nothing in it blocks for longer than a fraction of a lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.endings import start_failure
from elastic_agent.agent.worker_group.parking import Parked
from elastic_agent.agent.worker_group.runner import Runner
from elastic_agent.agent.worker_group.stalls import Progress
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.files import with_remedy
from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Address, Cause, Failure, Grace, Notice, Outcome, Phase, Plan, Seat, World
from elastic_agent.protocol import node as machine
from elastic_agent.rendezvous import events as session_events
from elastic_agent.rendezvous.participant import Owner, Participant
from elastic_agent.rendezvous.session import Session
from elastic_agent.values import new_incarnation
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.guard.client import Fenced, Guard, GuardLost, Spawned

LAST_WORD_S = 5.0
"""The time in which a departing agent tries to publish that it left."""


@dataclass(frozen=True)
class Ending:
    """The end of this agent's part."""

    outcome: Outcome
    reason: str
    failure: Failure | None = None
    plan: Plan | None = None
    """The newest plan that this node knew."""
    is_requeuer: bool = False
    """By that plan, this agent is the one that requeues the job."""

    def with_remedy(self, remedy: str) -> Ending:
        """Return it with what to do, if the store was not reached."""
        is_lacking = self.outcome is Outcome.UNREACHABLE and remedy
        return replace(self, reason=f"{self.reason}; {remedy}") if is_lacking else self


MakeWorkers: TypeAlias = Callable[
    [Guard, World, str, int, Parked | None, int | None], tuple[WorkerContext, HeartbeatFile]
]
_NOWHERE = Address("localhost", 1)
"""Workers that have no world do not learn it."""


@dataclass(eq=False, repr=False)
class Supervisor:
    """Runs one node until its part in the run is over. To be made in the event loop."""

    session: Session
    """With the store."""
    runner: Runner
    """Of the workers of this node; its settings hold for all of it."""
    make_workers: MakeWorkers
    """Makes the workers of an incarnation in a world after so many charged restarts, of which some may be parked; a
    number: apart from any world (see :meth:`.WorkerFactory.make`). Raises OSError if it cannot."""
    _: KW_ONLY
    publish: Callable[[events.Event], None]
    """Publishes events to the reporters; never raises."""
    remember: Callable[[Plan], None]
    """Writes the run history to disk, for a new store; returns at once."""
    write_down: Callable[[str], Awaitable[None]]
    """Keeps on disk the present incarnation and the processes it has; raises OSError if that cannot be done soon."""

    def __post_init__(self) -> None:
        self.world: World | None = None
        """The world whose workers this node runs or ran last."""
        self.node_id = self.session.member.node_id
        loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[Ending] = loop.create_future()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiters: list[tuple[Callable[[Plan], bool], asyncio.Future[Plan]]] = []
        """Futures of commands that wait for a plan, with their conditions."""
        self._noticed: int | None = None
        """The generation whose workers last got a notice to save and exit."""
        self._last_failure: Failure | None = None
        self._starts_apart = 0
        """The number of times that workers were started apart from any world."""
        self.runner.listen(self._worker_event, self._start_task)
        owner = Owner(
            set_deadline=self.runner.set_deadline,
            warm_up=self._warm_up,
            start=self._start_workers,
            stop=self._stop_workers,
            notify=self._notify,
            departs=self._departs,
            rejoins=self._rejoins,
            announced=self.publish,
            handles_notices=lambda: self.runner.handles_notices,
            call_later=loop.call_later,
        )
        self._participant = Participant(self.session, owner, new_incarnation)
        self.node, self._perform = self._participant.node, self._participant.perform
        self.session.listen(self.session_event)

    @property
    def seat(self) -> Seat | None:
        """This node's seat in the world whose workers it runs or ran last."""
        return self.world.seat_of(self.node.incarnation) if self.world is not None else None

    @property
    def progress(self) -> Progress | None:
        """The progress of the workers of this node; None while none runs."""
        return self.runner.progress

    # -- life -----------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Run until the node's part is over and its last record was written, or could not be."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._callback_failed)
        await self._write_down(self.node.incarnation)
        session = asyncio.create_task(self.session.run())
        session.add_done_callback(self._session_ended)
        try:
            ending = await self._ending
            await self.session.flush(LAST_WORD_S)  # else other nodes wait for the lease to expire
            return ending
        finally:
            session.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(session, *self._tasks, return_exceptions=True)
            self.runner.close()
            loop.set_exception_handler(None)

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        """End with an error: a session never ends by itself, and without it the agent would wait for ever."""
        if self._ending.done():
            return
        error = None if task.cancelled() else task.exception()
        self._ending.set_exception(error or RuntimeError("the session with the store ended unexpectedly"))

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End with the error of an event that was not handled completely; otherwise the agent might wait for ever."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if "handle" in context and isinstance(error, Exception) and not self._ending.done():
            self._ending.set_exception(error)

    # -- events ---------------------------------------------------------------------------------

    def session_event(self, event: session_events.SessionEvent) -> None:
        """Handle an event of the session."""
        self.publish(event)
        match event:
            case session_events.PlanSeen(plan=plan):
                self._plan_seen(plan)
            case session_events.GivenUp(reason=reason):
                self._end(Ending(Outcome.UNREACHABLE, reason))
        self._participant.take_in(event)

    def _plan_seen(self, plan: Plan) -> None:
        self.remember(plan)
        for test, waiting in self._waiters:
            if not waiting.done() and test(plan):
                waiting.set_result(plan)
        if plan.failure is not None:
            self._last_failure = plan.failure

    def _end(self, ending: Ending) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    # -- graceful shutdown ----------------------------------------------------------------------

    def drain(self, reason: str, left_s: float | None = None) -> None:
        """Have this node leave after its workers and all others have saved, for which they get this much time."""
        self.publish(events.DrainRequested(None, reason))
        self._participant.leave(reason, self.runner.settings.shutdown_timeout if left_s is None else left_s)

    def drain_other(self, node_id: str, left_s: float, reason: str) -> None:
        """Have another node leave."""
        self.publish(events.DrainRequested(node_id, reason))
        self._participant.remove(node_id, left_s, reason)

    def stop(self, cause: Cause, left_s: float, reason: str) -> None:
        """Have the whole run end after all workers have saved."""
        self.publish(events.StopRequested(cause, left_s, reason))
        self._participant.end_run(cause, left_s, reason)

    async def node_left(self, node_id: str) -> Ending | None:
        """Wait until the last worker of a node that is to leave has exited.

        Returns:
            How this agent's own part ended, if that came first; None if it continues.
        """
        if node_id != self.node_id:
            serial = self.node.next_stop_request - 1
            plan = self.node.plan
            seats = plan.seats if plan is not None else ()
            leavers = {seat.incarnation for seat in seats if seat.node_id == node_id}

            was_leaving = False

            def has_left(plan: Plan) -> bool:
                nonlocal was_leaving
                acknowledged = plan.acknowledged.get(self.node.incarnation, 0) >= serial
                if not acknowledged or not leavers.isdisjoint(plan.leaving):
                    was_leaving = was_leaving or acknowledged
                    return False
                seats = plan.uncleared if plan.is_terminal else plan.seats
                return was_leaving or leavers.isdisjoint(seat.incarnation for seat in seats)

            if await self.plan_with(has_left) is not None:
                return None
        return await self.over()

    async def over(self) -> Ending:
        """Wait until this node's part is over; after a stop, also until the workers of all others have exited."""
        return await asyncio.shield(self._ending)

    async def plan_with(self, test: Callable[[Plan], bool]) -> Plan | None:
        """Return the next plan that passes the test; None if this node's part ends before."""
        waiting: asyncio.Future[Plan] = asyncio.get_running_loop().create_future()
        waiter = test, waiting
        self._waiters.append(waiter)
        try:
            both: list[asyncio.Future[Any]] = [waiting, self._ending]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        finally:
            self._waiters.remove(waiter)

    # -- workers --------------------------------------------------------------------------------

    async def _record_guard(self, guard: Guard) -> None:
        """Record a new guard on the disk before it starts workers.

        A successor of this agent that finds the old record would take the end of the old guard for the end of the
        workers that the new one started.
        """
        incarnation = self.node.incarnation
        is_written = await self._write_down(incarnation)
        if guard is not self.runner.guards.present:
            return  # it died, too
        if not is_written and incarnation == self.node.incarnation:
            why = "its new guard process could not be recorded in the state directory"
            self.session.fenced(why, at_deadline=False)
        self.runner.release_starts()

    def _worker_event(self, event: events.Event) -> None:
        """Handle an event of the runner."""
        self.publish(event)
        match event:
            case Spawned(generation=generation):
                self._perform(self.node.started(generation))
            case events.NoticesHandled(generation=generation):
                self._perform(self.node.handles_notices(generation))
            case events.WorkersInterrupted(generation=generation, failure=failure):
                self._perform(self.node.interrupted(generation, failure))
            case events.WorkersFailed(generation=generation, failure=failure):
                self._last_failure = failure
                self._perform(self.node.failed(generation, failure))
            case events.WorkersSucceeded(generation=generation):
                self._perform(self.node.succeeded(generation))
            case events.WorkersSaved(generation=generation):
                self._perform(self.node.saved(generation))
            case events.WorkersCleared(unkillable=unkillable, parked=parked):
                all_parked = parked == self.session.member.slots
                self._perform(self.node.stopped(unkillable, parked=bool(parked), all_parked=all_parked))
            case events.WarmedUp(again=again):
                self._perform(self.node.warmed_up(again=again))
            case GuardLost():
                self._start_task(self._record_guard(self.runner.guards.present))
            case Fenced():
                self.session.fenced("the guard killed the workers when the lease expired")

    # -- actions --------------------------------------------------------------------------------

    def _notify(self, notice: Notice) -> None:
        self._noticed = self.node.generation
        workers = self.runner.notify(notice, boottime_s() + notice.left_s)
        self.publish(events.NoticeGiven(self.node.generation, notice, workers))

    def _stop_workers(self, action: machine.StopWorkers) -> None:
        self.publish(events.WorkersStopping(self.node.generation, action.reason, action.grace))
        may_save = action.grace is Grace.DRAIN or self._is_in_order()
        self.runner.stop(
            action.grace, dump_stacks=action.dump_stacks, may_save=may_save, may_park=action.keep
        )

    def _is_in_order(self) -> bool:
        """Return whether the present workers are stopped because nodes leave or join, so that they may all save."""
        plan = self.node.plan
        if plan is None or plan.failure is not None:
            return False
        return self._noticed == self.node.generation or bool(plan.joining)

    def _start_workers(self, world: World) -> None:
        self.world = world
        try:
            made = self._made(world)
        except (OSError, ValueError, RuntimeError) as error:
            failure = start_failure(self.node_id, with_remedy(error))
            self._worker_event(events.WorkersFailed(world.generation, failure))
        else:
            self.runner.start(*made)

    def _warm_up(self) -> None:
        """Start the workers that are missing with what they know before they have a place: this node alone."""
        plan = self.node.plan
        # The next one in which it may have a place.
        generation = plan.generation + (plan.phase is not Phase.FORMING) if plan is not None else 0
        me = self.session.member
        seat = Seat(me.node_id, me.incarnation, me.address, me.slots, 0, me.role)
        alone = World(generation, (seat,), _NOWHERE, me.node_id)
        self._starts_apart += 1
        try:
            made = self._made(alone, number=-self._starts_apart)
        except (OSError, ValueError, RuntimeError) as error:
            get_logger().warning("workers start in their world, not before it", reason=with_remedy(error))
            self._worker_event(events.WarmedUp(again=True))
        else:
            self.runner.start(*made, apart=True)

    def _made(self, world: World, number: int | None = None) -> tuple[WorkerContext, HeartbeatFile]:
        """Make the workers of this node; see :meth:`WorkerFactory.make`."""
        restarts = self.node.plan.charged if self.node.plan is not None else 0
        runner, incarnation = self.runner, self.node.incarnation
        return self.make_workers(runner.guards.present, world, incarnation, restarts, runner.waiting, number)

    def _rejoins(self, incarnation: str, reason: str) -> None:
        self.publish(events.Rejoining(incarnation, reason))
        # Nothing depends on it but how soon a successor is there.
        self._start_task(self._write_down(incarnation))

    def _departs(self, ending: machine.Depart) -> None:
        self.publish(ending)
        plan = self.node.plan
        is_requeuer = plan is not None and plan.requeuer == self.node.incarnation
        self._end(Ending(ending.outcome, ending.reason, self._last_failure, plan, is_requeuer))

    async def _write_down(self, incarnation: str) -> bool:
        """Write the record, and return whether that was possible; else a successor has to wait after a crash."""
        try:
            await self.write_down(incarnation)
        except OSError as error:
            get_logger().warning(
                "cannot write the state directory; if this agent is killed, its successor on this node has to wait "
                "until the lease expires",
                error=with_remedy(error),
            )
            return False
        return True

    def _start_task(self, work: Coroutine[None, None, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """End with the error of a task, which is always one of our own."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ending.done():
            self._ending.set_exception(error)
