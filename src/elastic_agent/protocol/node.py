"""One node's side of the protocol, without I/O: events in, actions out.

All of a node's decisions are made here; its transitions are in :mod:`.activity`. ``rendezvous/participant.py``
carries out the actions for the component that runs the workers (the agent, the plug-in for a stock torchrun, the
simulator), which reports the results.

Invariants kept here: a node publishes ``ready(g)`` only when no worker of it acts: each is gone, or *parked*, which
means that it has left its world, or was started apart from any (``WarmUp``), and waits for the next one. It starts
generation g only from ``ready(g)``, with a seat of its own incarnation, after a fresh renewal and a fresh read of the
plan (``Prepare``); a newer plan cancels a start; a lost lease stops everything without grace.

For a graceful shutdown a node does not stop its workers itself: it publishes a request (``RequestStop``), the
coordinator gives every worker of the world a notice (``Notify``), and the next plan contains what follows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from .activity import TRANSITIONS, WITH_PARKED, Activity, Event
from .records import Failure, FailureKind, Notice, Phase, Plan, State, StopRequest, World


class Outcome(enum.StrEnum):
    """The way in which a node's part in the run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    DRAINED = "drained"
    STOPPED = "stopped"
    """The run was stopped on request."""
    REFUSED = "refused"
    NODE_ID_HELD = "node id held"
    """Refused, because a living agent has the node's id."""
    UNREACHABLE = "unreachable"
    """The store could not be reached, or the endpoint is not a store."""
    STUCK = "stuck"
    """Workers could not be stopped (uninterruptible sleep)."""


class Grace(enum.StrEnum):
    """The time that workers get between SIGTERM and SIGKILL."""

    RESTART = "restart"
    DRAIN = "drain"
    NONE = "none"


@dataclass(frozen=True)
class Announce:
    """Write this into the node's member record."""

    state: State
    generation: int
    failure: Failure | None = None
    handles_notices: bool = False
    warms_up: bool = False


@dataclass(frozen=True)
class RequestStop:
    """Write this request into the node's member record for the coordinator; None: remove it from there."""

    stop_request: StopRequest | None


@dataclass(frozen=True)
class Notify:
    """Give the running workers a notice."""

    notice: Notice


@dataclass(frozen=True)
class Prepare:
    """Renew the lease, re-read the plan, dial the bootstrap store; then ``prepared`` or ``prepare_failed``."""

    world: World


@dataclass(frozen=True)
class WarmUp:
    """Start the workers that are missing, apart from any world, until they have parked; then ``warmed_up``."""


@dataclass(frozen=True)
class StartWorkers:
    """Have parked workers go on in this world, and start the others; then ``started`` or ``start_failed``."""

    world: World


@dataclass(frozen=True)
class StopWorkers:
    """Stop every worker and all they left; then ``stopped``. The last such action holds for all workers."""

    grace: Grace
    reason: str
    dump_stacks: bool = False
    keep: bool = False
    """Workers that can park may do that instead of being stopped."""


@dataclass(frozen=True)
class Rejoin:
    """Take a new incarnation that replaces the present one, and register it."""

    reason: str


@dataclass(frozen=True)
class Depart:
    """The node's part is over."""

    outcome: Outcome
    reason: str


Action: TypeAlias = (
    Announce | RequestStop | Notify | Prepare | WarmUp | StartWorkers | StopWorkers | Rejoin | Depart
)


class Node:
    """The machine. Every method returns the actions to carry out, in order."""

    def __init__(self, incarnation: str, remembered: Plan | None = None, *, warms_up: bool = False) -> None:
        """Begin without workers.

        Args:
            incarnation: of this node.
            remembered: the run history on this machine's disk.
            warms_up: workers are started before this node has a place in a world.
        """
        self.incarnation = incarnation
        self._earlier: set[str] = set()
        """The incarnations that this process had before."""
        self._newest_sealed = 0
        """The newest generation of the run that was sealed, as far as this node knows."""
        if remembered is not None and remembered.world is not None and not remembered.settled:
            self._newest_sealed = remembered.world.generation
        self._activity = Activity.IDLE
        self.generation = 0
        """The generation the activity belongs to."""
        self.announced = Announce(State.READY, 0, warms_up=warms_up)
        """The state in the member record, and its generation."""
        self._warms_up = warms_up
        self._lacks_workers = warms_up
        """Workers are to be started before this node takes part in a world."""
        self._is_warming = self._has_lease = False
        self.plan: Plan | None = None
        """The plan that this node has last read."""
        self._draining: str | None = None
        """Why this node is to leave, once it is."""
        self._stop_request: tuple[StopRequest, int] | None = None
        """The request that the coordinator has not acknowledged yet, and the generation in which it was made."""
        self._life: int | None = None
        """The life of the run that this node has last read."""
        self._stop_requests = 0
        """Serial of the newest request."""
        self._end_known: Notice | None = None
        """The notice from which this node knows that the run is to end."""
        self._given = 0
        """Serial of the newest notice that the present workers were given."""
        self._handles_notices = False
        self._interrupted: Failure | None = None
        """The end by a signal of workers of the present generation."""
        self.has_participated = False
        """This node has seen the run in progress, under any incarnation."""
        self._lease_lost: str | None = None
        self._ending: Depart | None = None
        self._has_parked = False
        """Workers of an earlier generation, or without one, wait for the next world, as far as they have not ended."""

    @property
    def activity(self) -> Activity:
        """Return what its workers are doing."""
        return self._activity

    def _on(self, event: Event, generation: int | None = None) -> bool:
        """Change the activity by the table. ``generation``: of the workers that the event comes from.

        Returns:
            Whether the event has an effect.
        """
        if generation is not None and generation != self.generation:
            return False  # of workers that are over
        step = self._activity, event
        after = (WITH_PARKED.get(step) if self._has_parked else None) or TRANSITIONS.get(step)
        self._activity = after or self._activity
        return after is not None

    @property
    def next_stop_request(self) -> int:
        """Serial for the next request."""
        return self._stop_requests + 1

    # -- the plan -------------------------------------------------------------------------------

    def plan_changed(self, plan: Plan) -> list[Action]:
        """Take in a newer plan. Older ones are ignored (see :meth:`store_replaced`).

        So is the plan of a store that lost its data, whose coordinator knows less of the run than this node does:
        the session sends it the run history, and the plan after that is valid.
        """
        if self.activity is Activity.GONE or (self.plan is not None and plan.version <= self.plan.version):
            return []
        if plan.generation < self._newest_sealed:
            return []
        if plan.world is not None:
            self._newest_sealed = max(self._newest_sealed, plan.world.generation)
        self.plan = plan
        self._life = plan.life
        if plan.phase is not Phase.STOPPED or self.has_participated:
            # A stopped run that was resumed has no end any more.
            self._end_known = plan.notice if plan.notice is not None and plan.notice.ends else None
        if self._lease_lost is not None:
            return []  # it concerns an incarnation that is over; only the stop counts now
        if self.incarnation in plan.refused:
            refusal = plan.refused[self.incarnation]
            outcome = Outcome.NODE_ID_HELD if refusal.is_node_id_held else Outcome.REFUSED
            return self._end(Depart(outcome, refusal.why), Grace.NONE)
        if plan.is_terminal:
            return self._over(plan)
        if self.announced.state is State.STOPPED:  # it stayed only to read how the stop went
            return self._end(Depart(Outcome.STOPPED, plan.reason), Grace.NONE)
        self.has_participated = True
        return self._acknowledged(plan) + self._follow(plan)

    def _over(self, plan: Plan) -> list[Action]:
        """Take in that the run has ended, with any outcome."""
        if plan.phase is Phase.FINISHED:
            return self._end(Depart(Outcome.FINISHED, plan.reason), Grace.NONE)
        if plan.phase is Phase.FAILED:
            return self._end(Depart(Outcome.FAILED, plan.reason), Grace.NONE)
        if self._wants_next_life:
            # A node that has not read the stop yet has the same record: only the node itself knows which it is.
            self._life = plan.generation + 1
            return self._wait_for_a_seat(plan.generation + 1)
        if plan.uncleared and self._ending is None:
            return self._await_others(plan)
        return self._end(Depart(Outcome.STOPPED, plan.reason), Grace.DRAIN)

    def _await_others(self, plan: Plan) -> list[Action]:
        """Report that the run is stopped when this node's workers are, and wait for those of others."""
        if not self._on(Event.RUN_STOPPED):
            return []
        if self.activity is Activity.STOPPING:
            return [StopWorkers(Grace.DRAIN, plan.reason)]
        return self._announce(State.STOPPED, plan.generation)

    @property
    def _wants_next_life(self) -> bool:
        """Return whether the run was stopped before this node joined, and not on this node's request."""
        return not self.has_participated and not self._requests_end

    @property
    def is_lingering(self) -> bool:
        """Return whether the run is stopped and this node stays only until no worker of any node is left."""
        is_stopped = self.plan is not None and self.plan.phase is Phase.STOPPED
        return is_stopped and not self._wants_next_life

    def stop_lingering(self) -> list[Action]:
        """Do not wait for the workers of other nodes any longer."""
        if not self.is_lingering or self.plan is None:
            return []
        return self._end(Depart(Outcome.STOPPED, self.plan.reason), Grace.DRAIN)

    def _acknowledged(self, plan: Plan) -> list[Action]:
        """Withdraw a request once it has taken effect.

        A request to end the run stays to the end: should the store be lost meanwhile, the next one has to know of
        it. But not in another life of the run, which began while this node was disconnected.
        """
        if self._stop_request is None:
            return []
        stop_request, generation = self._stop_request
        if not stop_request.life:  # requested before the first plan
            return self.request_stop(stop_request)
        if stop_request.life < plan.life:
            self._stop_request = None
            return [RequestStop(None)]
        acknowledged = plan.acknowledged.get(self.incarnation, 0) >= stop_request.serial
        if stop_request.leaver is None or not acknowledged or plan.generation <= generation:
            return []
        self._stop_request = None
        return [RequestStop(None)]

    @property
    def _requests_end(self) -> bool:
        return self._stop_request is not None and self._stop_request[0].leaver is None

    def store_replaced(self) -> list[Action]:
        """Publish this node's state again in a new store, whose plan versions restart.

        Also that the run is to end, even on another node's request: that node may have read the stop and left.
        """
        self.plan = None
        if self.activity is Activity.GONE:
            return []
        known = self._end_known
        if known is None or self._requests_end:
            return [self.announced]
        again = StopRequest(self.next_stop_request, known.cause, known.left_s, known.words)
        return [self.announced, *self.request_stop(again)]

    def _follow(self, plan: Plan) -> list[Action]:
        """Do what the plan of a run that goes on requires."""
        return self._forming(plan) if plan.phase is Phase.FORMING else self._sealed(plan)

    def _forming(self, plan: Plan) -> list[Action]:
        if self._leaves_by(plan):
            return self._end(Depart(Outcome.DRAINED, self._draining or plan.reason), Grace.DRAIN)
        if not self._on(Event.FORMING):
            return []  # stopping: ready follows when stopped
        if self.activity is Activity.IDLE:
            return self._wait_for_a_seat(plan.generation)
        hang = plan.failure is not None and plan.failure.kind is FailureKind.HANG
        return [StopWorkers(Grace.RESTART, plan.reason, dump_stacks=hang, keep=not hang)]

    def _leaves_by(self, plan: Plan) -> bool:
        """Return whether this node leaves at this plan; also if it lost its lease before it could read that it is to.

        If it has no workers, and was asked itself, it stays until :meth:`leave_now`. Should all nodes be asked, the
        run is stopped meanwhile, and this node is stopped with it.
        """
        if self._ending is not None or {self.incarnation, *self._earlier}.isdisjoint(plan.leaving):
            return False
        waits = self.announced.state is State.READY and self.activity in (Activity.IDLE, Activity.PREPARING)
        return self._draining is None or not waits

    def _sealed(self, plan: Plan) -> list[Action]:
        world = plan.world
        seat = world.seat_of(self.incarnation) if world is not None else None
        if world is None or seat is None:
            if self._on(Event.UNSEATED) and self.activity is Activity.STOPPING:
                return [StopWorkers(Grace.NONE, f"generation {plan.generation} runs without this node")]
            if self._leaves_by(plan):
                return self._end(Depart(Outcome.DRAINED, self._draining or plan.reason), Grace.DRAIN)
            if self.activity is Activity.IDLE and self.announced.state is not State.READY:
                # Its workers may have run in a generation of the same number, in another store: not in that again.
                return self._wait_for_a_seat(plan.generation if plan.generation > self.generation else 0)
            return self._warm_up()
        if self.announced == Announce(State.READY, plan.generation) and self._on(Event.SEATED):
            return [Prepare(world)]
        return self._notify()

    def _notify(self) -> list[Action]:
        """Give the workers that run the notice of the plan, unless they have it."""
        plan = self.plan
        if plan is None or plan.notice is None or plan.notice.serial == self._given:
            return []
        if not self._on(Event.NOTICE, plan.generation):
            return []
        self._given = plan.notice.serial
        return [Notify(plan.notice)]

    # -- the workers ----------------------------------------------------------------------------

    def prepared(self, generation: int) -> list[Action]:
        """Take in that lease, plan and bootstrap store are in order for this generation."""
        world = self.plan.world if self.plan is not None else None
        if world is None or not self._on(Event.PREPARED, generation):
            return []
        self._given, self._handles_notices, self._interrupted = 0, False, None
        self._has_parked = False  # they go on
        return [StartWorkers(world), *self._notify()]

    def prepare_failed(self, generation: int, failure: Failure) -> list[Action]:
        """Take in that the bootstrap store could not be reached."""
        if not self._on(Event.PREPARE_FAILED, generation):
            return []
        return self._announce(State.FAILED, generation, failure)

    def started(self, generation: int) -> list[Action]:
        """Take in that all workers of this generation were started."""
        if not self._on(Event.STARTED, generation):
            return []
        return self._announce(State.RUNNING, generation)

    def failed(self, generation: int, failure: Failure) -> list[Action]:
        """Take in that a worker of this generation failed, hung, or could not be started."""
        if not self._on(Event.FAILED, generation):
            return []
        hang = failure.kind is FailureKind.HANG
        stop = StopWorkers(Grace.RESTART, failure.summary, dump_stacks=hang, keep=not hang)
        return [*self._announce(State.FAILED, generation, failure), stop]

    def succeeded(self, generation: int) -> list[Action]:
        """Take in that every worker of this generation exited with 0, and nothing of theirs is left."""
        if not self._on(Event.SUCCEEDED, generation):
            return []
        self._lacks_workers = self._warms_up
        return self._announce(State.SUCCEEDED, generation)

    def interrupted(self, generation: int, how: Failure) -> list[Action]:
        """Take in that a signal which makes this node stop as well ended a worker of this generation."""
        if not self._on(Event.INTERRUPTED, generation):
            return []
        self._interrupted = how
        return self._announce(State.RUNNING, generation)

    def saved(self, generation: int) -> list[Action]:
        """Take in that every worker has saved and left, or was interrupted, and nothing of theirs is left."""
        if not self._on(Event.SAVED, generation):
            return []
        self._lacks_workers = self._warms_up
        return self._announce(State.SAVED, generation)

    def handles_notices(self, generation: int) -> list[Action]:
        """Take in that workers of this generation handle notices."""
        if not self._on(Event.HANDLES_NOTICES, generation):
            return []
        self._handles_notices = True
        return self._announce(State.RUNNING, generation)

    def stopped(
        self, unkillable: tuple[int, ...] = (), *, parked: bool = False, all_parked: bool = False
    ) -> list[Action]:
        """Take in that every worker is gone but for ``unkillable`` processes in uninterruptible sleep.

        ``parked``, ``all_parked``: some, or all, are not gone but parked, as the action allowed.
        """
        if not self._on(Event.STOPPED):
            return []
        self._has_parked, self._is_warming = parked, False
        self._lacks_workers = self._warms_up and not all_parked
        if unkillable:
            pids = ", ".join(str(pid) for pid in unkillable)
            self._ending = Depart(
                Outcome.STUCK, f"processes {pids} are stuck in the kernel and cannot be killed"
            )
        if parked and self._lease_lost is not None:
            self._on(Event.LEASE_LOST)
            return [StopWorkers(Grace.NONE, self._lease_lost)]
        if self._lease_lost is not None and self._ending is None:
            return self._rejoin()
        if self._ending is not None:
            return self._end(self._ending, Grace.NONE)
        if self.plan is None:
            return []
        return self._await_others(self.plan) if self.plan.is_terminal else self._follow(self.plan)

    def warmed_up(self, *, again: bool = True) -> list[Action]:
        """Take in that workers which were started apart from any world have parked; those that have not are gone.

        The missing ones start in their world; unless ``again``, so do all later ones.
        """
        self._is_warming = self._lacks_workers = False
        self._warms_up &= again
        ready = self.announced.state is State.READY and self._activity is Activity.IDLE
        return self._announce(State.READY, self.announced.generation) if ready else []

    # -- the lease and the operator -------------------------------------------------------------

    def registered(self) -> list[Action]:
        """Take in that this incarnation has a lease, and may have workers."""
        self._has_lease = True
        return self._warm_up()

    def lease_lost(self, reason: str) -> list[Action]:
        """Take in that the lease ran out or was revoked: no worker may run, and this incarnation is over."""
        if self.activity is Activity.GONE or self._lease_lost is not None:
            return []
        self._lease_lost, self._has_lease = reason, False
        self._on(Event.LEASE_LOST)
        if self.activity is Activity.STOPPING:
            return [StopWorkers(Grace.NONE, reason)]
        return self._rejoin()

    def rejoined(self, incarnation: str) -> list[Action]:
        """Take in that the new incarnation is registered."""
        self._earlier.add(self.incarnation)
        self.incarnation = incarnation
        self.plan = None
        self._lease_lost = None
        return [self.announced] if self._warms_up else []

    def request_stop(self, stop_request: StopRequest) -> list[Action]:
        """Request, for a user, a signal or the scheduler at this node, that a node leaves or the run ends."""
        if self.activity is Activity.GONE or self._ending is not None:
            return []
        if self._requests_end and stop_request.leaver is not None:
            return []  # the run ends, and every node leaves with it
        if self._life is not None:
            stop_request = msgspec.structs.replace(stop_request, life=self._life)
        self._stop_request, self._stop_requests = (stop_request, self.generation), stop_request.serial
        if self._requests_end and self.plan is not None and self.plan.phase is Phase.STOPPED:
            return self._over(self.plan)  # the request has already taken effect
        return [RequestStop(stop_request)] if self._life is not None else []  # else with the first plan

    def drain(self, reason: str, stop_request: StopRequest | None = None) -> list[Action]:
        """Have this node leave; the others go on without it.

        Args:
            reason: in words.
            stop_request: the request to publish, so that workers may save first; None: leave at once.
        """
        if self._draining is not None or self._ending is not None or self.activity is Activity.GONE:
            return []
        if self.is_lingering:
            return []  # the run ends anyway
        self._draining = reason
        if stop_request is not None and self._lease_lost is None and self._concerns_others:
            return self.request_stop(stop_request)
        return self.leave_now()

    @property
    def _concerns_others(self) -> bool:
        """Return whether the coordinator has to know of it before this node leaves: for its peers, or the run's end."""
        works = self.activity in (Activity.STARTING, Activity.RUNNING) or self.announced.state is State.SAVED
        return works or (self.plan is not None and not self.plan.is_terminal)

    def leave_now(self) -> list[Action]:
        """End a graceful leave at once: the coordinator did not answer, or no workers run and others continue."""
        reason = self._draining
        if reason is None or self._ending is not None or self.activity is Activity.GONE:
            return []
        if self.is_lingering:
            return []  # the run has ended with this node
        ending = Depart(Outcome.DRAINED, reason)
        if self.announced.state is State.SUCCEEDED and self.activity is Activity.IDLE:
            self._on(Event.LEAVE)
            return [ending]  # its success counts; LEFT would revert it
        if self.activity in (Activity.STARTING, Activity.RUNNING):
            return self._announce(State.LEAVING, self.generation) + self._end(ending, Grace.DRAIN)
        return self._end(ending, Grace.DRAIN)

    # -- steps ----------------------------------------------------------------------------------

    def _warm_up(self) -> list[Action]:
        """Have missing workers started apart from any world; until they have parked, nobody waits for this node."""
        waits = self._activity is Activity.IDLE and self.announced.state is State.READY
        goes_on = self.plan is not None and not self.plan.is_terminal and self._has_lease
        if not (waits and goes_on and self._lacks_workers) or self._is_warming:
            return []
        self._is_warming = self._has_parked = True
        return [WarmUp()]

    def _wait_for_a_seat(self, generation: int) -> list[Action]:
        self.generation = generation
        return [*self._announce(State.READY, generation), *self._warm_up()]

    def _announce(self, state: State, generation: int, failure: Failure | None = None) -> list[Action]:
        works = state in (State.RUNNING, State.SAVED)
        announced = Announce(
            state,
            generation,
            self._interrupted if works else failure,
            handles_notices=self._handles_notices and works,
            warms_up=self._lacks_workers and state is State.READY,
        )
        if announced == self.announced:
            return []
        self.announced = announced
        return [announced]

    def _end(self, ending: Depart, grace: Grace) -> list[Action]:
        self._ending = ending
        if not self._on(Event.LEAVE):
            return []  # stopping: it leaves when stopped
        if self.activity is Activity.STOPPING:
            return [StopWorkers(grace, ending.reason)]
        generation = self.plan.generation if self.plan is not None else self.generation
        return [*self._announce(State.LEFT, generation), ending]

    def _rejoin(self) -> list[Action]:
        if self._draining is not None:
            return self._end(Depart(Outcome.DRAINED, self._draining), Grace.NONE)
        self.announced = Announce(State.READY, 0, warms_up=self._warms_up)
        return [Rejoin(self._lease_lost or "the lease was lost")]
