"""One life of an agent: the session and the node state machine that ship, and what it does for its ``Node``.

What is simulated here is the rest of the agent: the events of its session and of its workers reach the node, and the
node's actions are carried out (as in ``agent/supervisor.py``). A second ``StopWorkers`` hastens the stop under way;
there is one ``stopped`` for both (:meth:`Agent._stop`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from elastic_agent.protocol.forming import STOP_SLACK_S
from elastic_agent.protocol.node import (
    Action,
    Announce,
    Depart,
    Grace,
    Notify,
    Outcome,
    Prepare,
    Rejoin,
    RequestStop,
    StartWorkers,
    StopWorkers,
    WarmUp,
)
from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Cause,
    Failure,
    Lease,
    Member,
    Notice,
    Plan,
    State,
    World,
)
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.participant import ANSWER_PATIENCE_S, Owner, Participant
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import NodeRecords, StoreLostError, TransportError, UnreachableError

from .election import SimulatedElection
from .etcd import EtcdConnection, EtcdTable
from .guard import Group, Guard
from .kernel import Inbox, Process, Routine
from .machine import RUN, Machine
from .network import Connection
from .store import SimulatedTable
from .waits import SimulatedWaits, awaited, pause

if TYPE_CHECKING:
    from .cluster import Cluster, Seatholder

POINTS: dict[type, str] = {
    Announce: "announce",
    Prepare: "prepare",
    WarmUp: "warm up",
    StartWorkers: "start",
    StopWorkers: "stop",
    Rejoin: "rejoin",
    RequestStop: "request",
    Notify: "notice",
}
"""Where a trap may wait (see :mod:`.faults`)."""

HANGS_S, IDLE_S = 1.0, 0.05
"""Workers that would take so long to end on SIGTERM make no progress; before a restart, the guard kills them then."""

CLEARED_S = 0.01
"""How long it takes to remove what the workers left."""

PARK_S = 1.0
"""Workers that have not parked within this time are stopped."""


@dataclass
class Offer:
    """A bootstrap store that a node serves."""

    address: Address
    node_id: str
    process: Process
    open: bool = True
    rests: bool = True

    def close(self) -> None:
        """Stop serving it."""
        self.open = False


class _Records(NodeRecords):
    """The shipped records; something may happen just before a renewal is sent."""

    agent: Agent

    async def renew(self, expected: Lease, renewed: Lease) -> bool:
        self.agent.cluster.at("renewal sent", self.agent)
        return await super().renew(expected, renewed)


class Dialer:
    """What an agent's session reaches: the store, and bootstrap stores."""

    def __init__(self, agent: Agent, waits: SimulatedWaits) -> None:
        self._agent = agent
        self._cluster = agent.cluster
        self._waits = waits

    async def connect(self) -> NodeRecords:
        """The agent of the endpoint's machine hosts the store if no other does."""
        agent = self._agent
        connection = self._cluster.endpoint.connect(agent)
        if connection is None:
            raise UnreachableError("no answer")
        opening = _Records.open(
            self._table(connection),
            RUN,
            self._cluster.reports_invalid(agent.name),
            agent.lease_written,
            agent.machine.clock,
        )
        try:
            records = cast(_Records, await self._waits.in_time(opening, self._cluster.call_s()))
        except StoreLostError as error:
            raise UnreachableError(str(error)) from None
        records.agent = agent
        return records

    def _table(self, connection: Connection) -> SimulatedTable:
        election = self._agent.election
        if election is None or not isinstance(connection, EtcdConnection):
            return SimulatedTable(connection)
        return EtcdTable(connection, writes=("of_node", self._agent.name), revisions=election.revisions)

    async def offer_bootstrap(self, local_address: str) -> Offer:
        holder = self._agent.holder
        if holder.portless:
            raise TransportError("no port is free for a bootstrap store")
        return self._cluster.offer(holder, self._agent.process)

    async def dial_bootstrap(self, address: Address) -> None:
        await pause(self._cluster.network.delay_s(self._agent.machine.name))
        if not self._cluster.bootstrap_reachable(self._agent.machine, address):
            await pause(0.2)
            raise UnreachableError(f"no answer from {address}")


class _Trapped(Participant):
    """A participant to whom something may happen just before it acts."""

    def __init__(self, agent: Agent, owner: Owner) -> None:
        cluster, holder = agent.cluster, agent.holder
        super().__init__(agent.session, owner, lambda: cluster.new_incarnation(holder))
        self._agent = agent

    def _carry_out(self, action: Action) -> None:
        if self._agent.cluster.traps:
            self._agent.cluster.at(POINTS.get(type(action), ""), self._agent)
        super()._carry_out(action)


class Agent:
    """An agent process on a machine."""

    def __init__(self, cluster: Cluster, holder: Seatholder, proven_gone: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.holder = holder
        self.machine: Machine = holder.machine
        self.name = f"{holder.node_id}{holder.mark}.{holder.lives}"
        self.began_s = cluster.kernel.now
        self.policy = cluster.policy_for(holder)
        self.incarnation = cluster.new_incarnation(holder)
        self.guard = Guard(cluster, self)
        self.process = self.machine.process(f"agent {self.name}")
        self.process.when_killed.append(self.guard.agent_died)
        self.died_s: float | None = None
        self.process.when_killed.append(self._died)
        self.outcome: Depart | None = None
        self.asked_to_leave = self.asked_for_the_end = False
        self.asked_to_leave_s: float | None = None
        """When it was asked, in good order."""
        self._mail = Inbox(cluster.kernel)
        self._stopping, self._keeps = cast(Grace | None, None), False
        """Whether the stop under way lets workers park."""
        self.parked_gone = Inbox(cluster.kernel)
        self._warm_ups = 0
        """Counts what begins or ends a warm-up: one that goes on after that is over."""
        self.prepared: int | None = None
        """The generation for which this node has last passed its preparation."""
        self.stop_hangs = False
        """Whether it does not get on with a stop, while it renews its lease."""
        self._hasten = Inbox(cluster.kernel)
        waits = SimulatedWaits(self.machine, self.process)
        self.session = Session(
            Dialer(self, waits),
            self._first_record(proven_gone),
            self.policy.lease_ttl_s,
            join_timeout_s=self.policy.join_timeout_s,
            clock=self.machine.clock,
            waits=waits,
        )
        self.session.history = self.machine.disk
        self.session.listen(self._heard)
        self.participant = _Trapped(self, self._owner())
        self.node = self.participant.node
        self.asking = Asking(cluster, self)
        cluster.embodied(self)
        in_etcd = cluster.scenario.hosting == "etcd"
        self.election = SimulatedElection(cluster, self) if in_etcd else None
        self._life = waits.spawn(self.session.run)
        self.process.spawn(self._main())

    def _died(self) -> None:
        self.died_s = self.cluster.kernel.now

    def _first_record(self, replaces: tuple[str, ...]) -> Member:
        return Member(
            version=RECORD_VERSION,
            node_id=self.holder.node_id,
            incarnation=self.incarnation,
            address=self.machine.name,
            slots=self.holder.slots(),
            state=State.READY,
            generation=0,
            policy=self.policy,
            stop_s=self.cluster.stop_takes_s(),
            warms_up=self.cluster.scenario.warm_up_s > 0,
            replaces=replaces[-64:],
        )

    def _owner(self) -> Owner:
        return Owner(
            self._set_deadline,
            self._warm_up,
            self._start,
            self._stop,
            self._notify,
            self._depart,
            self._rejoins,
            self._announced,
            self._workers_handle_notices,
            self.call_later,
        )

    def _workers_handle_notices(self) -> bool:
        group = self.guard.group
        return group is not None and group.alive and group.handles_notices

    @property
    def registered(self) -> bool:
        """Return whether it holds a lease."""
        return self.session.deadline_s is not None

    @property
    def stopping(self) -> bool:
        """Return whether it stops its workers, however long that takes."""
        return self._stopping is not None

    # -- the main loop --------------------------------------------------------------------------

    def post(self, event: Callable[[], list[Action]]) -> None:
        """Have the main loop do this and carry out what comes of it."""
        self._mail.put(event)

    def _main(self) -> Routine:
        while self.outcome is None:
            event = yield self._mail, None
            if self.outcome is None:
                self.participant.perform(event())
        yield from self._leave()

    def _leave(self) -> Routine:
        assert self.outcome is not None  # the loop ended
        self.cluster.story(self.name, "departs: {} ({})", self.outcome.outcome, self.outcome.reason)
        yield from awaited(self.session.flush(self.cluster.policy.lease_ttl_s))
        self._life.cancel()
        while self.cluster.serves(self):
            yield self.cluster.kernel.random.choice((0.001, 0.01, 0.3))
        if self.election is not None:
            yield from self.election.stop()
        self.cluster.departed(self)
        self.process.kill()

    def _heard(self, event: events.SessionEvent) -> None:
        """The session tells something."""
        match event:
            case events.Connected(replaced=True):
                self.cluster.story(self.name, "found the new store {}", event.store_id)
            case events.Registered() | events.Renewed():
                self.cluster.at("renewed", self)
            case events.LeaseLost(reason=reason):
                self.cluster.story(self.name, "{}", reason)
            case events.PlanSeen(plan=plan):
                self._plan_read(plan)
            case events.Prepared(generation=generation):
                self.prepared = generation
            case events.GivenUp(reason=reason):
                self._give_up(reason)
        self.participant.take_in(event)

    def lease_written(self) -> None:
        """Its lease is in the store."""
        if self.election is not None:
            self.election.mark()

    def _set_deadline(self, deadline_s: float | None) -> None:
        self.guard.extend(deadline_s if deadline_s is not None else float("-inf"))

    def _plan_read(self, plan: Plan) -> None:
        self.cluster.at("plan read", self)
        self.cluster.checker.notices.read(self, plan)
        self.machine.history_store(self.process).save_soon(RUN, plan)

    def call_later(self, after_s: float, act: Callable[[], None]) -> None:
        """Have this done after so many seconds of its machine's clock."""
        self.cluster.kernel.after(self.machine.real_s(after_s), self.process.do, act)

    def _give_up(self, reason: str) -> None:
        if self.outcome is None:
            self._depart(Depart(Outcome.UNREACHABLE, reason))

    def _announced(self, said: Announce) -> None:
        self.cluster.checker.announced(self, self.session.member)

    def _depart(self, action: Depart) -> None:
        self.outcome = action
        self.cluster.checker.notices.departs(self, action)
        self.post(list)  # so that the main loop goes on

    def _notify(self, notice: Notice) -> None:
        """Write the notice where the workers look."""
        group = self.guard.group
        if group is not None:
            self.cluster.story(self.name, "tells its workers: {}", notice.words)
            self.cluster.job.told(group, notice)

    def _rejoins(self, incarnation: str, reason: str) -> None:
        self.incarnation = incarnation
        self.cluster.story(self.name, "rejoins as {}: {}", incarnation, reason)
        self.cluster.embodied(self)

    # -- the workers ----------------------------------------------------------------------------

    def _start(self, world: World) -> None:
        group = self.guard.launch(world)
        if group is None:
            self.fenced("the guard would not start workers past the deadline")
            return
        self.process.spawn(self.cluster.job.starting(self, group))

    def _warm_up(self) -> None:
        if self.guard.warm_up(self.session.member.slots):
            self._warm_ups += 1
            self.process.spawn(self._warming(self._warm_ups))
        else:
            self.fenced("the guard would not start workers past the deadline")

    def _warming(self, warm_up: int) -> Routine:
        """Wait until the workers that were started apart from any world have parked."""
        yield self.cluster.warm_up_takes_s()
        fails = self.holder.fails_at_start()

        def tell() -> list[Action]:
            if self._warm_ups != warm_up:
                return []
            if fails and self.guard.parked:
                self.guard.parked_ends()
            parked = len(self.guard.parked)
            self.cluster.story(self.name, "has {} workers parked before their world", parked)
            all_parked = parked == self.session.member.slots
            return self.node.warmed_up(again=all_parked or self.cluster.kernel.random.random() < 0.5)

        self.post(tell)

    def fenced(self, why: str) -> None:
        """The guard says that the lease's deadline is over, whatever was renewed meanwhile."""

        def lose() -> list[Action]:
            self.session.fenced(why)
            return []

        self.process.do(self.post, lose)

    def group_exited(self, group: Group, failure: Failure | None) -> None:
        """Workers ended by themselves (or were killed by another process than this agent)."""

        if failure is None:
            self.told(group, lambda: self.node.succeeded(group.generation))
        else:
            self.told(group, lambda: self.node.failed(group.generation, failure))

    def group_left(self, group: Group) -> None:
        """Workers saved and left after a notice."""
        self.cluster.at("yield", self)
        self.told(group, lambda: self.node.saved(group.generation))

    def told(self, group: Group, event: Callable[[], list[Action]]) -> None:
        """The guard tells something of workers; nothing more once it has answered that they are stopped."""
        self.process.do(self.post, lambda: [] if group.stopped else event())

    def _stop(self, action: StopWorkers) -> None:
        if self._stopping is not None:
            self._keeps &= action.keep
            self._hasten.put(action.grace)
            return
        self._warm_ups += 1
        self._stopping, self._keeps = action.grace, action.keep
        self._hasten.items.clear()
        self.process.spawn(self._stop_group(self.guard.group))

    def _stop_group(self, group: Group | None) -> Routine:
        """SIGTERM, grace, SIGKILL; whatever hastens it shortens the grace."""
        if group is not None and group.alive and self.holder.hangs_at_stop():
            self.stop_hangs = True
            yield 3.0 * (self.cluster.scenario.bound_s + STOP_SLACK_S)
            self.stop_hangs = False
            self.cluster.stop_hung()
        if group is not None and self._keeps and self.cluster.scenario.survives:
            yield from self._parking(group)
        if not self._keeps and self.guard.parked:
            self.parked_gone.items.clear()
            self.guard.kill_parked("stopped by its agent")
            yield self.parked_gone, None
        if group is not None and group.alive:
            gone = Inbox(self.cluster.kernel)
            group.ends.append(gone)
            yield from self._grace(group, gone)
            if group.alive:
                self.guard.kill(group, "stopped by its agent")
                yield gone, None
            if group.unkillable:
                yield self.cluster.kill_takes_s()
        stuck = (4711,) if group is not None and group.unkillable else ()

        def tell() -> list[Action]:
            self._stopping = None  # until now, whatever hastened it is answered by this
            if group is not None:
                group.stopped = True
            parked = len(self.guard.parked)
            all_parked = parked == self.session.member.slots
            return self.node.stopped(stuck, parked=parked > 0, all_parked=all_parked)

        self.post(tell)

    def _parking(self, group: Group) -> Routine:
        """Let the workers park, unless they take too long, or must not any more."""
        takes_s = self.holder.parks_after_s()
        waited_s = 0.0
        while waited_s < min(takes_s, PARK_S) and self._keeps:
            step_s = min(min(takes_s, PARK_S) - waited_s, 0.1)
            yield self._hasten, step_s
            waited_s += step_s
        if self._keeps and takes_s <= PARK_S and group.alive and not group.dying and group.started:
            self.cluster.story(self.name, "keeps the workers of generation {}", group.generation)
            self.guard.park(group)
            self.cluster.at("parked", self)
            yield CLEARED_S

    def _grace(self, group: Group, gone: Inbox) -> Routine:
        assert self._stopping is not None  # set before this task began
        grace_s = self.cluster.grace_s(self._stopping)
        if grace_s == 0.0:
            return
        by_itself_s = self.cluster.reacts_to_sigterm_s()
        if self._stopping is Grace.RESTART and by_itself_s > HANGS_S:
            grace_s = min(grace_s, IDLE_S)
        waited_s = 0.0
        while waited_s < min(grace_s, by_itself_s) and group.alive:
            step_s = min(min(grace_s, by_itself_s) - waited_s, 0.1)
            if (yield self._hasten, step_s) is Grace.NONE:
                return
            waited_s += step_s
        if group.alive and by_itself_s <= grace_s:
            self.guard.end(group, "stopped on SIGTERM")


class Asking:
    """What one agent was asked for by people."""

    def __init__(self, cluster: Cluster, agent: Agent) -> None:
        self.cluster = cluster
        self.agent = agent

    def drain(self) -> None:
        """The node is to leave, its workers and all others having saved."""
        agent = self.agent
        agent.asked_to_leave = True
        agent.asked_to_leave_s = self.cluster.kernel.now
        patience_s = agent.participant.leave("asked to leave", self.cluster.grace_s(Grace.DRAIN))
        self.cluster.checker.notices.drains(agent, patience_s)

    def drain_at_once(self) -> None:
        """The node is to leave without asking."""
        agent = self.agent
        agent.asked_to_leave = True
        self.cluster.checker.notices.left_at_once_s = self.cluster.kernel.now
        agent.participant.perform(agent.node.stop_lingering())
        agent.participant.perform(agent.node.drain("asked to leave"))
        patience_s = self.cluster.grace_s(Grace.DRAIN) + ANSWER_PATIENCE_S  # perhaps it was asked before
        self.cluster.checker.notices.drains(agent, patience_s)

    def drain_other(self, node_id: str, left_s: float) -> None:
        """Another node is to leave."""
        stop_request = self.agent.participant.remove(node_id, left_s, f"{node_id} is told to leave")
        self.cluster.checker.notices.drains_other(self.agent, stop_request)

    def stop(self, cause: Cause, left_s: float) -> None:
        """The whole run is to end after all workers have saved."""
        agent = self.agent
        agent.asked_to_leave = agent.asked_for_the_end = True
        stop_request = agent.participant.end_run(cause, left_s, f"{cause.value} at {agent.holder.node_id}")
        self.cluster.checker.notices.asks_for_the_end(agent, stop_request)
        self.cluster.checker.notices.stops(agent, stop_request)
