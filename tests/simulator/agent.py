"""One life of an agent: its lanes to the store, its main loop, and what it does for its ``Node``.

The rules a driver must keep, written down where they are kept:

* the lease's deadline counts from the *first* send of the renewal that came through (:meth:`_renew`);
* a plan, a lease or a result is dropped when it comes from an earlier store or incarnation (:meth:`post`);
* the main loop looks at the lease before it looks at anything else (:meth:`_main`);
* a second ``StopWorkers`` hastens the stop under way; there is one ``stopped`` for both (:meth:`_stop`);
* the member record is written by compare-and-set, so that a write that arrives late changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from elastic_agent.protocol.leases import FirstSent, HeldLease, next_renewal_s
from elastic_agent.protocol.node import (
    Action,
    Activity,
    Announce,
    Depart,
    Grace,
    Node,
    Notify,
    Prepare,
    Rejoin,
    Request,
    StartWorkers,
    StopWorkers,
)
from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Failure,
    FailureKind,
    Lease,
    Member,
    Notice,
    Phase,
    Plan,
    State,
    World,
    decode,
    encode,
)

from .asking import Asking
from .candidate import Candidate
from .guard import Group, Guard
from .kernel import Inbox, Routine
from .machine import Machine
from .network import Connection, StoreLostError
from .store import readable

if TYPE_CHECKING:
    from .cluster import Cluster, Seatholder

REDIAL_S = 0.2
POINTS: dict[type, str] = {
    Announce: "announce",
    Prepare: "prepare",
    StartWorkers: "start",
    StopWorkers: "stop",
    Rejoin: "rejoin",
    Request: "request",
    Notify: "notice",
}
"""Where a trap may wait (see :mod:`.faults`)."""


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
        self.node = Node(self.incarnation, self.machine.disk)
        self.held: HeldLease | None = None
        self.outcome: Depart | None = None
        self.unreachable = False
        self.asked_to_leave = self.asked_for_the_end = False
        self.asking = Asking(cluster, self)
        self.store_id: str | None = None
        """The store this incarnation is registered in."""
        self.plan: Plan | None = None
        """The newest plan read, from the store ``_plan_from``."""
        self._plan_from: str | None = None
        self._mail = Inbox(cluster.kernel)
        self._keeper_mail = Inbox(cluster.kernel)
        self._writer_mail = Inbox(cluster.kernel)
        self._watcher_mail = Inbox(cluster.kernel)
        self._first_sent = FirstSent()
        self._renew_at_s = 0.0
        """By this machine's clock."""
        self._renewed = Inbox(cluster.kernel)
        self._stopping: Grace | None = None
        self._hasten = Inbox(cluster.kernel)
        self._last_contact_s = self.machine.clock()
        self._in_store: bytes | None = None
        self.member = self._first_record(proven_gone)
        cluster.embodied(self)
        in_etcd = cluster.scenario.hosting == "etcd"
        self.candidate = Candidate(cluster, self) if in_etcd else None
        for lane in (self._main(), self._keeper(), self._writer(), self._watcher()):
            self.process.spawn(lane)

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
            replaces=replaces[-64:],
            bootstrap=Address(self.machine.name, 2000),
            history=self.machine.disk,
        )

    # -- the main loop --------------------------------------------------------------------------

    def post(self, event: Callable[[], list[Action]]) -> None:
        """Have the main loop do this and carry out what comes of it."""
        store_id, incarnation = self.store_id, self.incarnation

        def unless_stale() -> list[Action]:
            same = (store_id, incarnation) == (self.store_id, self.incarnation)
            return event() if same else []

        self._mail.put(unless_stale)

    def post_always(self, event: Callable[[], list[Action]]) -> None:
        """Have the main loop do this, whatever was lost or renewed meanwhile."""
        self._mail.put(event)

    def _main(self) -> Routine:
        while self.outcome is None:
            wait_s = None
            if self.held is not None:
                wait_s = self.machine.real_s(self.held.deadline_s - self.machine.clock()) + 1e-9
            event = yield self._mail, wait_s
            if self.held is not None and self.held.expired(self.machine.clock()):
                self._lose_lease("the lease ran out")
            if event is not None and self.outcome is None:
                self._carry_out(event())
        yield from self._leave()

    def _leave(self) -> Routine:
        assert self.outcome is not None  # the loop ended
        self.cluster.story(self.name, "departs: {} ({})", self.outcome.outcome, self.outcome.reason)
        deadline = self.cluster.kernel.now + self.cluster.policy.lease_ttl_s
        while self._unwritten() and self.cluster.kernel.now < deadline:
            yield 0.05
        while self.cluster.serves(self):
            yield 0.5
        if self.candidate is not None:
            yield from self.candidate.stop()
        self.cluster.departed(self)
        self.process.kill()

    def _unwritten(self) -> bool:
        return self._in_store != encode(self.member) and not self.unreachable

    def _lose_lease(self, reason: str) -> None:
        if self.held is not None or self.store_id is not None:
            self.cluster.story(self.name, "lost its lease: {}", reason)
        self.held = None
        self._carry_out(self.node.lease_lost(reason))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if self.cluster.traps:
                self.cluster.at(POINTS.get(type(action), ""), self)
            if isinstance(action, Announce):
                self._announce(action)
            elif isinstance(action, Prepare):
                self.process.spawn(self._prepare(action.world, self.incarnation))
            elif isinstance(action, StartWorkers):
                self._start(action.world)
            elif isinstance(action, StopWorkers):
                self._stop(action)
            elif isinstance(action, Rejoin):
                self._rejoin(action)
            elif isinstance(action, Request):
                self.member = msgspec.structs.replace(self.member, ask=action.ask)
                self._writer_mail.put(None)
            elif isinstance(action, Notify):
                self._notify(action.notice)
            else:
                self._depart(action)

    def _depart(self, action: Depart) -> None:
        self.outcome = action
        self.cluster.checker.notices.departs(self, action)

    def _notify(self, notice: Notice) -> None:
        """Write the notice where the workers look."""
        group = self.guard.group
        if group is not None:
            self.cluster.story(self.name, "tells its workers: {}", notice.words)
            self.cluster.job.told(group, notice)

    def _announce(self, said: Announce) -> None:
        ready = said.state is State.READY
        self.member = msgspec.structs.replace(
            self.member,
            state=said.state,
            generation=said.generation,
            failure=said.failure,
            heeds=said.heeds,
            bootstrap=None,
            slots=self.holder.slots() if ready else self.member.slots,
            history=self.machine.disk,
        )
        self._offer_bootstrap()
        self.cluster.checker.announced(self, self.member)
        self._writer_mail.put(None)

    def _offer_bootstrap(self) -> None:
        """Hold out a bootstrap store, or say why not."""
        member = self.member
        offer = Address(self.machine.name, 2000 + member.generation % 60000)
        failure = Failure(FailureKind.BOOTSTRAP, f"{self.holder.node_id} has no port for a bootstrap store")
        if member.state is State.READY and member.bootstrap is None:
            change = {"failure": failure} if self.holder.portless else {"bootstrap": offer, "failure": None}
            self.member = msgspec.structs.replace(member, **change)

    def _rejoin(self, action: Rejoin) -> None:
        old = self.incarnation
        self.incarnation = self.cluster.new_incarnation(self.holder)
        self.cluster.story(self.name, "rejoins as {}: {}", self.incarnation, action.reason)
        first = self._first_record((*self.member.replaces, old))
        # what was asked for and not heard is said again by the new incarnation
        self.member = msgspec.structs.replace(first, ask=self.member.ask, heeds=self.member.heeds)
        self.cluster.embodied(self)
        self.held, self._in_store, self.store_id = None, None, None
        self._carry_out(self.node.rejoined(self.incarnation))
        self._keeper_mail.put(None)

    # -- the workers ----------------------------------------------------------------------------

    def _start(self, world: World) -> None:
        group = self.guard.launch(world)
        if group is None:
            self.post_always(lambda: self._lost_before_start())
            return
        self.process.spawn(self.cluster.job.starting(self, group))

    def _lost_before_start(self) -> list[Action]:
        self._lose_lease("the guard would not start workers past the deadline")
        return []

    def group_exited(self, group: Group, failure: Failure | None) -> None:
        """Workers ended by themselves (or were killed by somebody else than this agent)."""

        def tell() -> list[Action]:
            if failure is None:
                return self.node.succeeded(group.generation)
            return self.node.failed(group.generation, failure)

        self.process.do(self.post_always, tell)

    def group_left(self, group: Group) -> None:
        """Workers saved and left after a notice."""
        self.cluster.at("yield", self)
        self.process.do(self.post_always, lambda: self.node.yielded(group.generation))

    def _stop(self, action: StopWorkers) -> None:
        if self._stopping is not None:
            self._hasten.put(action.grace)
            return
        self._stopping = action.grace
        self._hasten.items.clear()
        self.process.spawn(self._stop_group(self.guard.group))

    def _stop_group(self, group: Group | None) -> Routine:
        """SIGTERM, grace, SIGKILL; whatever hastens it shortens the grace."""
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
        self._stopping = None
        self.post_always(lambda: self.node.stopped(stuck))

    def _grace(self, group: Group, gone: Inbox) -> Routine:
        assert self._stopping is not None  # set before this task began
        grace_s = self.cluster.grace_s(self._stopping)
        if grace_s == 0.0:
            return
        by_itself_s = self.cluster.reacts_to_sigterm_s()
        waited_s = 0.0
        while waited_s < min(grace_s, by_itself_s) and group.alive:
            step_s = min(min(grace_s, by_itself_s) - waited_s, 0.1)
            if (yield self._hasten, step_s) is Grace.NONE:
                return
            waited_s += step_s
        if group.alive and by_itself_s <= grace_s:
            self.guard.end(group, "stopped on SIGTERM")

    # -- preparing a start ----------------------------------------------------------------------

    def _prepare(self, world: World, incarnation: str) -> Routine:
        """Renew once more, re-read the plan, dial the bootstrap store."""
        generation = world.generation
        while self._still_preparing(generation, incarnation):
            try:
                self._renewed.items.clear()
                self._keeper_mail.put("renew")
                if (yield self._renewed, self._call_s) is None:
                    continue
                connection = yield from self._dial()
                plan = yield from self._reread_plan(connection)
            except StoreLostError:
                continue
            if plan is None or (plan.phase, plan.generation) != (Phase.RUNNING, generation):
                return
            yield from self._dial_bootstrap(world)
            return

    def _reread_plan(self, connection: Connection) -> Routine:
        data = yield from connection.call("read_plan", timeout_s=self._call_s)
        connection.close()
        return decode(Plan, data) if data is not None and connection.store.store_id == self.store_id else None

    def _still_preparing(self, generation: int, incarnation: str) -> bool:
        node = self.node
        return (node.activity, node.generation, self.incarnation) == (
            Activity.PREPARING,
            generation,
            incarnation,
        )

    def _dial_bootstrap(self, world: World) -> Routine:
        generation = world.generation
        yield self.cluster.network.delay_s(self.machine.name)
        if self.cluster.bootstrap_reachable(self.machine, world):
            self.post(lambda: self.node.prepared(generation))
            return
        yield 0.2
        failure = Failure(
            FailureKind.BOOTSTRAP, f"{world.bootstrap_node} is unreachable", blames=world.bootstrap_node
        )
        self.post(lambda: self.node.prepare_failed(generation, failure))

    @property
    def _call_s(self) -> float:
        """How long a lane waits for the store's answer."""
        return self.policy.lease_ttl_s * self.cluster.scenario.patience

    # -- lanes to the store ---------------------------------------------------------------------

    def _dial(self) -> Routine:
        """Keep trying to reach the store; the agent of the endpoint's machine hosts it if nobody does."""
        while True:
            connection = self.cluster.endpoint.connect(self)
            if connection is not None:
                try:
                    yield from connection.call("hello", timeout_s=self._call_s)
                    self._last_contact_s = self.machine.clock()
                    return connection
                except StoreLostError:
                    pass
            if self.machine.clock() - self._last_contact_s > self.cluster.policy.join_timeout_s:
                self._give_up()
            yield REDIAL_S * (0.5 + self.cluster.kernel.random.random())

    def _give_up(self) -> None:
        if not self.unreachable and self.outcome is None:
            self.unreachable = True
            self.post_always(lambda: self.node.drain("the store cannot be reached"))

    def _keeper(self) -> Routine:
        """Register, then renew in even steps; at once when the connection was lost, perhaps with a renewal."""
        connection: Connection | None = None
        while True:
            try:
                if self.node.activity is Activity.GONE:
                    return
                if connection is None or connection.closed:
                    connection = yield from self._dial()
                if self.store_id != connection.store.store_id or self.held is None:
                    if self._may_register():
                        yield from self._register(connection)
                    else:
                        yield self._keeper_mail, 0.1
                    continue
                yield self._keeper_mail, self.machine.real_s(self._renew_at_s - self.machine.clock())
                if self.held is not None:
                    yield from self._renew(connection)
            except StoreLostError:
                connection = None
                self._renew_at_s = self.machine.clock()
                self.post_always(self.node.stop_lingering)

    def _may_register(self) -> bool:
        """Not with an incarnation whose lease is lost: first the stop, then the new incarnation."""
        if self.store_id is None:
            return True
        return self.held is not None and not self.held.expired(self.machine.clock())

    def _register(self, connection: Connection) -> Routine:
        incarnation, new_store = self.incarnation, self.store_id is not None
        lease = Lease(incarnation, self.policy.lease_ttl_s)
        sent_s = self._sent_s(connection, lease)
        member = encode(self.member)
        data = yield from connection.register(incarnation, encode(lease), member, self._call_s)
        if incarnation != self.incarnation or (new_store and self.held is None):
            return
        found = decode(Lease, data)
        held = HeldLease.granted(found, self._when(sent_s))
        self._time_next_renewal(sent_s)
        if found.condemned or held.expired(self.machine.clock()):
            self.store_id = connection.store.store_id
            self.post(lambda: self._lost("the lease was lost while registering"))
            yield 0.05
        elif new_store:
            self._found_new_store(connection, held)
        else:
            self._registered(connection, held)

    def _time_next_renewal(self, sent_s: float) -> None:
        self._renew_at_s = next_renewal_s(self.policy.lease_ttl_s, sent_s, self.machine.clock())

    def _sent_s(self, connection: Connection, lease: Lease) -> float:
        """When this record was first sent to this store."""
        now_s = self.machine.clock()
        if "deadline from the last attempt" in self.cluster.quirks:
            return now_s
        return self._first_sent.of((connection.store.store_id, lease), now_s)

    def _when(self, sent_s: float) -> float:
        """From when a lease counts that was sent then and answered now."""
        return self.machine.clock() if "deadline from the reply" in self.cluster.quirks else sent_s

    def _lost(self, reason: str) -> list[Action]:
        self._lose_lease(reason)
        return []

    def _registered(self, connection: Connection, held: HeldLease) -> None:
        replaced = self._plan_from not in (None, connection.store.store_id)
        self._settle_in(connection, held)
        self.cluster.story(self.name, "registered {}", self.incarnation)
        if replaced:  # the lease was lost with the store
            self.post(self.node.store_replaced)
        plan = self.plan
        if plan is not None:  # the watcher waits for a newer one only
            self.post(lambda: self.node.plan_changed(plan))

    def _found_new_store(self, connection: Connection, held: HeldLease) -> None:
        self._settle_in(connection, held)
        self.cluster.story(self.name, "found the new store {}", self.store_id)
        self.post(self.node.store_replaced)

    def _settle_in(self, connection: Connection, held: HeldLease) -> None:
        self.store_id = connection.store.store_id
        if self._plan_from != self.store_id:
            self.plan, self._plan_from = None, self.store_id
        self._in_store = None
        self._hold(held)
        self._writer_mail.put(None)
        self._watcher_mail.put(None)

    def _hold(self, held: HeldLease) -> None:
        self.held = held
        self.guard.extend(held.deadline_s)
        self._mail.put(list)  # so that the main loop waits for the new deadline

    def _renew(self, connection: Connection) -> Routine:
        held, incarnation = self.held, self.incarnation
        assert held is not None  # the caller looked
        wanted = held.record.renewed()
        sent_s = self._sent_s(connection, wanted)
        call_s = self._call_s
        self.cluster.at("renewal sent", self)
        done = yield from connection.call(
            "renew", incarnation, encode(held.record), encode(wanted), timeout_s=call_s
        )
        if not done:
            data = yield from connection.call("read_lease", incarnation, timeout_s=call_s)
            found = decode(Lease, data) if data is not None else None
            done = found == wanted
        if self.held is not held or self.incarnation != incarnation:
            return
        if held.expired(self.machine.clock()):
            self._mail.put(list)
        elif done:
            self._last_contact_s = self.machine.clock()
            self._hold(held.renewed(wanted, self._when(sent_s)))
            self._time_next_renewal(sent_s)
            if "offers once" not in self.cluster.quirks:
                self._offer_bootstrap()
                self._writer_mail.put(None)
            self._renewed.put("renewed")
            if self.candidate is not None:
                self.candidate.mark()
            self.cluster.at("renewed", self)
        else:
            self.post(lambda: self._lost("the lease was condemned"))
            yield 0.05

    def _writer(self) -> Routine:
        """Keep the member record in the store as it should be."""
        connection: Connection | None = None
        while True:
            yield self._writer_mail, None
            while self.store_id is not None and self._in_store != encode(self.member):
                try:
                    if connection is None or connection.closed:
                        connection = yield from self._dial()
                    if connection.store.store_id != self.store_id:
                        connection.close()
                        yield 0.05
                        continue
                    yield from self._write(connection)
                except StoreLostError:
                    connection = None

    def _write(self, connection: Connection) -> Routine:
        incarnation, data, store_id = self.incarnation, encode(self.member), self.store_id
        args = (incarnation, self._in_store, data)
        found = yield from connection.call("write", *args, timeout_s=self._call_s)
        if (incarnation, store_id) == (self.incarnation, self.store_id):
            self._in_store = found

    def _watcher(self) -> Routine:
        """Wait for the next plan."""
        connection: Connection | None = None
        while True:
            try:
                if self.store_id is None:
                    yield self._watcher_mail, 0.1
                    continue
                if connection is None or connection.closed:
                    connection = yield from self._dial()
                if connection.store.store_id != self.store_id:
                    connection.close()
                    yield self._watcher_mail, 0.1
                    continue
                after = self.plan.version if self.plan is not None else 0
                data = yield from connection.next_plan(after, self.cluster.watch_s())
                if connection.store.store_id == self.store_id:
                    self._plan_read(data)
            except StoreLostError:
                connection = None

    def _plan_read(self, data: bytes) -> None:
        plan = readable(Plan, data)
        assert isinstance(plan, Plan)
        if self.plan is None or plan.version > self.plan.version:
            self.plan = plan
            self.cluster.at("plan read", self)
            self.cluster.checker.notices.read(self, plan)
            self.machine.remember(plan.history())
            self.post(lambda: self.node.plan_changed(plan))
