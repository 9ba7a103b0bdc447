"""A node's side of the rendezvous, over a store that may stall, vanish and come back.

:meth:`Session.run` runs four parts side by side. They share the object's state, and none waits for a request
of another one:

    timer requests renewals; detects that the lease has run out, also while every request hangs
    connection   dials; once connected, runs two parts until the connection breaks, and dials again:
                     pump registers, renews the lease, writes the member record, checks before a start
                     watch    waits for the next plan, on a connection of its own
    bootstrap    dials the bootstrap store of the world that is about to start

What has to be written is kept as *state*, not as a queue: after a broken connection the newest record is written
again, so nothing is lost or reordered. The agent runs the parts as tasks of its event loop, so the timer that detects
the end of the lease runs while any request to the store hangs; an agent whose loop hangs does not renew. The simulator
runs them in virtual time (see :mod:`.waits`).

The owner calls methods that only change the state, and receives events in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import msgspec

from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger
from elastic_agent.protocol import (
    ANSWERS_PER_LEASE,
    RENEWALS_PER_LEASE,
    Announce,
    Failure,
    FailureKind,
    HeldLease,
    Lease,
    Member,
    Phase,
    Plan,
    State,
    StopRequest,
    Waiting,
    World,
    next_renewal_s,
    waiting_in,
)
from elastic_agent.transport import (
    NodeRecords,
    NotAStoreError,
    Obstacle,
    OtherVersionError,
    StoreLostError,
    TransportError,
    UnreachableError,
)

from . import events
from .bootstrap_offers import BootstrapOffer, BootstrapOffers, StoreDialer
from .waits import Waits, back_offs

T = TypeVar("T")

DIAL_TIMEOUT_S = 30.0
"""An attempt to connect that takes longer than this is abandoned."""

REGISTRATIONS_PER_LEASE = 2
"""A registration is several requests, at a time when many nodes may register: it may take this part of a lease."""

REDIAL_MIN_S, REDIAL_MAX_S = 0.05, 1.0


@dataclass(eq=False, repr=False)
class Session:
    """Keeps one node registered, its lease renewed and its owner informed, across losses of the store.

    Nothing is dialled before :meth:`run`.
    """

    dialer: StoreDialer
    """How to reach the store."""
    member: Member
    """The node's record, in its first state."""
    lease_ttl_s: float
    """How long a lease lasts, seconds."""
    address: str | None = None
    """Under which the other nodes reach this one; None: the one it reaches the store from."""
    _: KW_ONLY
    join_timeout_s: float = math.inf
    """After so many seconds without an answer the store is given up; see ``GivenUp``."""
    clock: Callable[[], float] = boottime_s
    """CLOCK_BOOTTIME, seconds."""
    waits: Waits = field(default_factory=Waits)
    """How to wait: in asyncio, unless in the simulator."""

    def __post_init__(self) -> None:
        self.store_id: str | None = None
        self.history: Plan | None = None
        """The run history, for a store without one."""
        self._patience_s = self.lease_ttl_s / ANSWERS_PER_LEASE
        """An answer that takes longer is not waited for: a fresh connection may save the lease."""
        self._callback: Callable[[events.SessionEvent], None] = lambda event: None
        self._lease: HeldLease | None = None
        # To which store which record of the lease was sent last, and when for the first time:
        self._attempt: tuple[tuple[str, Lease] | None, float] = None, 0.0
        self._work = self.waits.signal()
        """The pump may have something to do."""
        self._written: Member | None = None
        self._renew_due = self._offer_due = False
        """Offer: a bootstrap store could not be offered, and it is time to try again."""
        self._renew_at_s, self._timer_due_s = 0.0, math.inf
        """When the timer requests the next renewal, and when it runs next: if later, the agent was paused."""
        self._prepare: World | None = None
        self._offers = BootstrapOffers(self.dialer)
        self._dialled: World | None = None
        """The world whose bootstrap store is being dialled."""
        self._dialled_changed = self.waits.signal()
        self.plan: Plan | None = None
        """The newest plan that was followed."""
        self._read_version = 0
        """Of the newest plan that was read, followed or not."""
        self._registered_in: tuple[str, str] | None = None
        """Store and incarnation of the last registration."""
        self._retell = False
        """The plan has not been delivered to the new incarnation yet."""
        self._over: str | None = None
        """The incarnation whose lease was lost: it is never registered again."""
        self._local_address = ""
        self._all_written = self.waits.signal()
        self._commands: NodeRecords | None = None
        # What went wrong with the store since the lease was renewed last, and since when it has not answered:
        self._problem, self._silent_since_s = "", math.inf

    def listen(self, callback: Callable[[events.SessionEvent], None]) -> None:
        """Call ``callback`` with every event, in the loop."""
        self._callback = callback

    # -- requests of the owner ------------------------------------------------------------------

    def announce(self, announced: Announce) -> None:
        """Have this written into the member record as soon as the store answers."""
        self.member = msgspec.structs.replace(
            self.member,
            state=announced.state,
            generation=announced.generation,
            failure=announced.failure,
            handles_notices=announced.handles_notices,
            warms_up=announced.warms_up,
            bootstrap=None,
        )
        if announced.state is State.READY:
            self._offers.ready(announced.generation)
        self._work.set()

    def request_stop(self, stop_request: StopRequest | None) -> None:
        """Have this written into the member record, for the coordinator."""
        self.member = msgspec.structs.replace(self.member, stop_request=stop_request)
        self._work.set()

    def prepare(self, world: World) -> None:
        """Renew, re-read the plan and dial the bootstrap store; ``Prepared`` or ``PrepareFailed`` follows."""
        self._prepare = world
        self._work.set()

    def rejoin(self, incarnation: str) -> None:
        """Register as a new incarnation that replaces the present one, whose workers are gone."""
        replaces = (*self.member.replaces, self.member.incarnation)[-64:]
        self.member = msgspec.structs.replace(
            self.member,
            incarnation=incarnation,
            replaces=replaces,
            state=State.READY,
            generation=0,
            failure=None,
            bootstrap=None,
        )
        self._lease = None
        self._prepare = None
        self._dial_bootstrap_of(None)
        self._retell = True
        self._work.set()

    def fenced(self, why: str, *, at_deadline: bool = True) -> None:
        """Take in that the workers were killed: no answer that is still under way renews the lease."""
        paused = self._paused(self.clock()) if at_deadline else ""
        if paused:  # an agent that was paused may hear of it before its own timer runs
            self._lose(paused)
        elif at_deadline and self._problem:
            self._lose(f"{why}: {self._problem}", unanswered=True)
        else:
            self._lose(why)

    @property
    def offer(self) -> BootstrapOffer | None:
        """The newest bootstrap store that this node serves."""
        return self._offers.newest

    @property
    def deadline_s(self) -> float | None:
        """When the lease ends (CLOCK_BOOTTIME), or None without one."""
        return self._lease.deadline_s if self._lease is not None else None

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the store has the newest member record; False if that takes longer."""
        if self.store_id is None or self._over == self.member.incarnation:
            return False  # there is no store to write to, or no lease
        self._all_written.take()
        if self._written is self.member:
            return True
        return await self._all_written.wait(timeout_s)

    async def status(self) -> Waiting:
        """Read what the coordinator waits for; without a reason if it cannot be read."""
        if self._commands is None:
            return Waiting()
        try:
            return waiting_in(await self._ask(self._commands.read_status()))
        except StoreLostError:
            return Waiting()

    # -- the session's life ---------------------------------------------------------------------

    async def run(self) -> None:
        """Stay registered until cancelled. Raises what went wrong in here or in ``listen``'s callback."""
        try:
            await self.waits.until_one_ends(
                self._keep_time(), self._stay_connected(), self._dial_bootstrap_stores()
            )
        finally:
            self._offers.close()

    async def _keep_time(self) -> None:
        """Request renewals, and detect when the lease has run out."""
        self._time_next_renewal(self.clock())
        while True:
            now_s = self.clock()
            if self._lease is not None and self._lease.expired(now_s):
                self._expire(now_s)
            if now_s >= self._renew_at_s:
                self._time_next_renewal(now_s)
                self._renew_due = True
                self._work.set()
            deadline_s = self._lease.deadline_s if self._lease is not None else self._renew_at_s
            self._timer_due_s = min(self._renew_at_s, deadline_s)
            await self.waits.sleep(self._timer_due_s - now_s)

    def _expire(self, now_s: float) -> None:
        if paused := self._paused(now_s):
            self._lose(paused)
        else:
            why = f"it was not renewed in time: {self._problem or 'the store did not answer'}"
            self._lose(why, unanswered=True)

    def _paused(self, now_s: float) -> str:
        """Return in words for how long this agent was paused; empty if it was not.

        A late timer means that (Ctrl-Z, a suspended machine), not a store that does not answer.
        """
        paused_s = now_s - self._timer_due_s
        if paused_s <= self.lease_ttl_s / RENEWALS_PER_LEASE:
            return ""
        return f"this agent was paused for {paused_s:.1f} s (stopped, or its machine was suspended or overloaded)"

    def _time_next_renewal(self, sent_s: float) -> None:
        """Plan the next renewal an even step after the last write: then the coordinator reads the lease.

        A renewal out of step is seen late, and so is the loss of this node.
        """
        self._renew_at_s = next_renewal_s(self.lease_ttl_s, sent_s, self.clock())

    def _lose(self, why: str, *, unanswered: bool = False) -> None:
        """End this incarnation; the owner stops the workers and rejoins."""
        self._lease = None
        self._prepare = None
        self._dial_bootstrap_of(None)
        if self._over == self.member.incarnation:
            return
        self._over = self.member.incarnation
        self._callback(events.LeaseLost(f"lost the lease of {self.lease_ttl_s:g} s: {why}", unanswered))

    # -- the connection -------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        while True:
            try:
                await self._attend()
            except OtherVersionError as error:
                known = self.plan is not None  # then it is a bad record in a run that this node takes part in
                if known:
                    self._problem = str(error)
                    self._callback(events.Disconnected(self._problem, Obstacle.EXPLAINED))
                else:
                    self._callback(events.GivenUp(str(error)))
                await self.waits.sleep(REDIAL_MAX_S)
            except TransportError as error:  # also: no port is free for an offer, or none of ours answers
                self._lost_store(error)
                await self.waits.sleep(REDIAL_MIN_S)

    async def _attend(self) -> None:
        """Connect and work until the store is lost."""
        commands = await self._dial()
        try:
            self._connected(commands)
            await self.waits.until_one_ends(self._pump(commands), self._watch())
        finally:
            self._commands = None
            commands.close()

    async def _dial(self) -> NodeRecords:
        """Dial until the store answers; with jitter, for a whole cluster may be dialling."""
        pauses_s = back_offs(REDIAL_MIN_S, REDIAL_MAX_S)
        while True:
            try:
                return await self._connect()
            except (NotAStoreError, UnreachableError) as error:
                self._lost_store(error)
            await self.waits.back_off(next(pauses_s))

    def _lost_store(self, error: TransportError) -> None:
        """Report an attempt to reach the store that failed, and give the store up if it is of no use, or in time.

        A store that has answered may be of no use only for now: its machine restarts other things first.
        """
        self._problem = str(error)
        self._callback(events.Disconnected.by(error))
        now_s = self.clock()
        self._silent_since_s = min(self._silent_since_s, now_s)
        if isinstance(error, NotAStoreError) and self.store_id is None:
            self._callback(events.GivenUp(str(error)))
        elif now_s - self._silent_since_s >= self.join_timeout_s:
            reason = f"the store did not answer for {self.join_timeout_s:g} s: {error}"
            self._callback(events.GivenUp(reason))

    def _connected(self, commands: NodeRecords) -> None:
        replaced = self.store_id is not None and commands.store_id != self.store_id
        if replaced:
            self.plan, self._read_version = None, 0
        self.store_id = commands.store_id
        self._local_address = self.address or commands.local_address
        self._commands = commands
        self._silent_since_s = math.inf
        self._written = None
        self._renew_due = True  # the last renewal may have been lost with the connection
        self._callback(events.Connected(commands.store_id, replaced))
        if replaced:
            self._registered_in = None
            if self._lease is not None and self._lease.expired(self.clock()):
                self._lose("the store was lost for longer than the lease")

    async def _connect(self) -> NodeRecords:
        return await self.waits.in_time(self.dialer.connect(), DIAL_TIMEOUT_S)

    async def _ask(self, request: Coroutine[Any, Any, T]) -> T:
        """Make a request that is answered soon, or not at all.

        Raises:
            StoreLostError: there was no answer in time, or the connection broke. The request may or may not have been
                carried out, and the connection is of no use any more.
        """
        return await self.waits.in_time(request, self._patience_s)

    # -- the watch ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        # its dial comes after the commands' one: a lease that is about to end is renewed first
        connection = await self._connect()
        try:
            if connection.store_id != self.store_id:
                raise StoreLostError("a different store answers at the endpoint now")
            while True:
                after, wait_s = self._read_version, self.lease_ttl_s
                plan = await self.waits.in_time(connection.next_plan(after, wait_s), 2 * wait_s + 1.0)
                if plan is not None and plan.version > after:
                    self._saw(plan)
        finally:
            connection.close()

    def _saw(self, plan: Plan) -> None:
        self._read_version = plan.version
        self.plan = plan
        if self.history is None or plan.rank >= self.history.rank:
            self.history = plan.as_history
        elif self._knows_more_than(plan) and self.member.history != self.history:
            self.member = msgspec.structs.replace(self.member, history=self.history)
            self._work.set()
        self._callback(events.PlanSeen(plan))

    def _knows_more_than(self, plan: Plan | None) -> bool:
        """Return whether a coordinator at this plan needs this node's run history."""
        return self.history is not None and (plan is None or self.history.is_later_than(plan))

    # -- the pump -------------------------------------------------------------------------------

    async def _pump(self, store: NodeRecords) -> None:
        """Do what is due, the first in this order, and wait until anything is."""
        while True:
            is_over = self._over == self.member.incarnation
            if not is_over and self._registered_in != (store.store_id, self.member.incarnation):
                await self._register(store)
            elif self._renew_due and self._lease is not None:
                await self._renew(store)
            elif self._offer_due or not (is_over or self._written is self.member):
                await self._write(store)  # leaves a hint, at which the coordinator sees the renewal too
            elif self._prepare is not None and self._lease is not None:
                await self._get_ready(store, self._prepare)
            else:
                self._all_written.set()
                await self._work.wait()

    async def _register(self, store: NodeRecords) -> None:
        history = self.history if self._knows_more_than(self.plan) else None
        member = msgspec.structs.replace(self.member, address=self._local_address, history=history)
        self.member = member
        if _lacks_offer(member):
            member = await self._with_offer(member)
        lease = Lease(member.incarnation, self.lease_ttl_s)
        sent_s = self._sent_since_s(store, lease)
        timeout_s = self.lease_ttl_s / REGISTRATIONS_PER_LEASE
        granted = await self.waits.in_time(store.register(member, lease), timeout_s)
        if self.member.incarnation != member.incarnation:
            return  # a new incarnation was taken meanwhile
        if granted is None:
            stored = await self._ask(store.read_lease(member.incarnation))
            if self.member.incarnation == member.incarnation:
                self._lose(_revocation(stored))
            return
        held = HeldLease.granted(granted, sent_s)
        if held.expired(self.clock()):
            self._lose("it expired before the registration was answered")
            return
        deadline_s = self._hold(held, sent_s)
        self._registered_in = (store.store_id, member.incarnation)
        self._renew_due = False
        self._written = self.member if self._is_unchanged(member) else None
        self._callback(events.Registered(member.incarnation, deadline_s))
        if self._retell and self.plan is not None:
            self._callback(events.PlanSeen(self.plan))
        self._retell = False

    def _sent_since_s(self, store: NodeRecords, lease: Lease) -> float:
        """Return from when the lease counts if the store takes this record: its first attempt.

        A write whose answer was lost may have happened, and the coordinator may have seen the record since then.
        """
        if self._attempt[0] != (store.store_id, lease):
            self._attempt = (store.store_id, lease), self.clock()
        return self._attempt[1]

    def _hold(self, held: HeldLease, sent_s: float) -> float:
        """Note that the store has the record that was sent then; return when the lease ends now."""
        self._lease, self._problem = held, ""
        self._time_next_renewal(sent_s)
        return held.deadline_s

    def _is_unchanged(self, member: Member) -> bool:
        mine = msgspec.structs.replace(self.member, bootstrap=member.bootstrap, failure=member.failure)
        if mine != member:
            return False
        self.member = member
        return True

    async def _write(self, store: NodeRecords) -> None:
        self._offer_due = False
        member = self.member
        if _lacks_offer(member):
            member = await self._with_offer(member)
            if not self._is_unchanged(member):
                return  # overtaken while the store was being created
        if member != self._written:  # else there is still no offer, for the same reason
            await self._ask(store.write(member))
        self._written = member

    async def _with_offer(self, member: Member) -> Member:
        """Offer a fresh bootstrap store, or the reason for none; then it is tried again with the next renewal."""
        try:
            offer = await self._offers.open(self._local_address)
        except TransportError as error:
            summary = f"{member.node_id} cannot offer a bootstrap store: {error}"[:512]
            if member.failure is None or member.failure.summary != summary:
                get_logger().warning("this node cannot offer a bootstrap store", reason=str(error))
            return msgspec.structs.replace(member, failure=Failure(FailureKind.BOOTSTRAP, summary))
        return msgspec.structs.replace(member, bootstrap=offer.address, failure=None)

    async def _renew(self, store: NodeRecords) -> None:
        held = self._lease
        assert held is not None  # the caller looked
        self._renew_due = False
        if held.expired(self.clock()):
            self._expire(self.clock())
            return
        renewed = held.record.renewed()
        sent_s = self._sent_since_s(store, renewed)
        ok = await self._ask(store.renew(held.record, renewed))
        if self._lease is not held:
            return  # lost or replaced meanwhile
        if ok:
            deadline_s = self._hold(held.renewed(renewed, sent_s), sent_s)
            self._offer_due = _lacks_offer(self.member) and self._prepare is None
            self._callback(events.Renewed(deadline_s))
            return
        stored = await self._ask(store.read_lease(held.record.incarnation))
        if self._lease is not held:
            return  # lost or replaced meanwhile
        if stored is None or stored.revoked:
            self._lose(_revocation(stored))
        else:  # an earlier renewal had an unknown outcome: it did happen
            self._lease = HeldLease(stored, held.deadline_s)
            self._renew_due = True

    async def _get_ready(self, store: NodeRecords, world: World) -> None:
        """Check once more before workers are started; the lease is renewed while the store is dialled."""
        self._renew_due = True
        while self._renew_due and self._lease is not None:
            await self._renew(store)
        if self._lease is None:
            return
        plan = await self._ask(store.read_plan())
        if self._prepare is not world:
            return
        self._prepare = None
        if plan is None or (plan.phase, plan.generation) != (Phase.RUNNING, world.generation):
            return  # overtaken; the watch brings the newer plan
        self._dial_bootstrap_of(world)

    # -- the bootstrap store of the next world --------------------------------------------------

    def _dial_bootstrap_of(self, world: World | None) -> None:
        """Dial the bootstrap store of this world; what was dialled before is overtaken."""
        self._dialled = world
        self._dialled_changed.set()

    async def _dial_bootstrap_stores(self) -> None:
        """Dial one after the other; the lease continues to be renewed meanwhile."""
        while True:
            world = self._dialled
            if world is None:
                await self._dialled_changed.wait()
            else:
                await self.waits.until_one_ends(self._dial_bootstrap(world), self._until_overtaken(world))

    async def _until_overtaken(self, world: World) -> None:
        while self._dialled is world:
            await self._dialled_changed.wait()

    async def _dial_bootstrap(self, world: World) -> None:
        problem: Exception | None = None
        try:
            await self.dialer.dial_bootstrap(world.bootstrap)
        except (TransportError, OSError) as error:
            problem = error
        if self._dialled is not world:
            return
        self._dialled = None
        if problem is not None:
            self._callback(events.PrepareFailed(world.generation, _unreachable(world, problem)))
            return
        self._offers.keep_only(world)
        self._callback(events.Prepared(world.generation))


def _lacks_offer(member: Member) -> bool:
    """Return whether this node is ready for a generation without a bootstrap store for it."""
    return member.state is State.READY and member.generation > 0 and member.bootstrap is None


def _revocation(stored: Lease | None) -> str:
    """Return why a lease that is not what it should be was lost, in words."""
    if stored is None:
        return "its record is no longer in the store (revoked, and removed since)"
    return f"the coordinator revoked it: {stored.why or 'no reason given'}"


def _unreachable(world: World, error: Exception) -> Failure:
    summary = (
        f"the bootstrap store of {world.bootstrap_node} cannot be reached: {str(error)[:300]}; allow TCP connections "
        "between the nodes on all ports, or on those of --port-range (with torchrun, --rdzv-conf port_range=LOW:HIGH)"
    )
    return Failure(FailureKind.BOOTSTRAP, summary[:512], unreachable_node=world.bootstrap_node)
