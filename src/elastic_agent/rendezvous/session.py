"""A node's side of the rendezvous over a store that may stall, vanish and come back.

A :class:`Session` lives in its owner's asyncio loop and holds no lock: blocking store calls are made in
threads that can be abandoned (:class:`~elastic_agent.transport.lane.Lane`), two connections are used
(one is always occupied by the wait for the next plan), and what has to be written is kept as *state*, not
as a queue: after a broken connection the newest record is written again, so nothing is lost or reordered.

The lease is renewed by a timer of the owner's loop: an agent whose loop does not turn does not renew.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import tenacity

from elastic_agent.logs import get_logger
from elastic_agent.protocol.leases import (
    ANSWERS_PER_LEASE,
    RENEWALS_PER_LEASE,
    FirstSent,
    HeldLease,
    next_renewal_s,
)
from elastic_agent.protocol.node import Announce, misquoted
from elastic_agent.protocol.records import (
    Address,
    Ask,
    Failure,
    FailureKind,
    History,
    Lease,
    Member,
    Phase,
    Plan,
    State,
    World,
)
from elastic_agent.transport.base import (
    NodeLink,
    NotAStoreError,
    StoreLostError,
    TransportError,
    UnreachableError,
)
from elastic_agent.transport.lane import Lane

from . import events
from .clock import boottime_s
from .connector import BootstrapOffer, Connector
from .threads import aside, call, until_one_ends

T = TypeVar("T")

REGISTRATIONS_PER_LEASE = 2
"""A registration is several requests, at a time when many nodes may register: it may take this part of a lease."""

DIAL_TIMEOUT_S = 30.0
"""An attempt to connect that takes longer than this is abandoned."""

BOOTSTRAP_TIMEOUT_S = 5.0
REDIAL_MIN_S, REDIAL_MAX_S = 0.05, 1.0


class _Connection:
    """A link with the thread that may be blocked in it."""

    def __init__(self, name: str) -> None:
        self._lane = Lane(name)
        self.link: NodeLink | None = None

    async def dial(self, connector: Connector) -> NodeLink:
        self.link = await self.call(connector.connect, DIAL_TIMEOUT_S)
        return self.link

    async def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """One request; after a :class:`StoreLostError` the connection is of no use any more."""
        return await call(self._lane, work, timeout_s)

    def close(self) -> None:
        self._lane.abandon()
        if self.link is not None:
            self.link.close()


class Session:
    """Keeps one node registered, its lease renewed and its owner informed, across losses of the store."""

    def __init__(
        self,
        connector: Connector,
        member: Member,
        lease_ttl_s: float,
        address: str | None = None,
    ) -> None:
        """Prepare; nothing is dialled before :meth:`run`.

        Args:
            connector: how to reach the store.
            member: the node's record, in its first state.
            lease_ttl_s: how long a lease lasts, seconds.
            address: under which the other nodes reach this one; None: the one it reaches the store from.
        """
        self.member = member
        self.offer: BootstrapOffer | None = None
        self._last_offer: BootstrapOffer | None = None
        """The one before: others may still be reading from it while they stop."""
        self.store_id: str | None = None
        self.history: History | None = None
        """What is told to a store that knows nothing of the run."""
        self._connector = connector
        self._ttl_s = lease_ttl_s
        self._patience_s = lease_ttl_s / ANSWERS_PER_LEASE
        """An answer that takes longer is not waited for: a fresh connection may save the lease."""
        self._tell: Callable[[events.SessionEvent], None] = lambda event: None
        self._may_renew: Callable[[], bool] = lambda: True
        self._lease: HeldLease | None = None
        self._first_sent = FirstSent()
        self._wake = asyncio.Event()
        self._written: Member | None = None
        self._renew_due = False
        self._offer_due = False
        """A bootstrap store could not be offered, and it is time to try again."""
        self._renew_at_s, self._timer_due_s = 0.0, math.inf
        """When the timer asks for the next renewal; when it is to run next: if it runs later, the agent was paused."""
        self._prepare: World | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._plan: Plan | None = None
        self._read_version = 0
        """Of the newest plan that was read, followed or not."""
        self._registered_in: tuple[str, str] | None = None
        """Store and incarnation of the last registration."""
        self._retell = False
        """The new incarnation has not been told the plan yet."""
        self._over: str | None = None
        """The incarnation whose lease was lost: it is never registered again."""
        self._own_address = address
        self._local_address = ""
        self._flushed = asyncio.Event()
        self._failed: asyncio.Future[None]
        """Ends the session with what went wrong beside its conversations."""
        self._commands: _Connection | None = None

    def listen(self, tell: Callable[[events.SessionEvent], None]) -> None:
        """Have every event told to ``tell``, in the loop."""
        self._tell = tell

    def renew_only_if(self, test: Callable[[], bool]) -> None:
        """Have the lease renewed only while ``test`` holds; without it, as long as the loop turns."""
        self._may_renew = test

    # -- what the owner asks --------------------------------------------------------------------

    def announce(self, said: Announce) -> None:
        """Have this written into the member record as soon as the store answers."""
        self.member = msgspec.structs.replace(
            self.member,
            state=said.state,
            generation=said.generation,
            failure=said.failure,
            heeds=said.heeds,
            bootstrap=None,
        )
        self._wake.set()

    def ask(self, ask: Ask | None) -> None:
        """Have this stand in the member record, for the coordinator to hear."""
        self.member = msgspec.structs.replace(self.member, ask=ask)
        self._wake.set()

    def prepare(self, world: World) -> None:
        """Renew, re-read the plan and dial the bootstrap store; ``Prepared`` or ``PrepareFailed`` follows."""
        self._prepare = world
        self._wake.set()

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
        self._stop_reaching()
        self._retell = True
        self._wake.set()

    def fenced(self, why: str) -> None:
        """The workers were killed at the lease's deadline: no answer that is still under way renews it."""
        self._lose(why)

    @property
    def deadline_s(self) -> float | None:
        """When the lease ends (CLOCK_BOOTTIME), or None without one."""
        return self._lease.deadline_s if self._lease is not None else None

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the store has the newest member record; False if that takes longer."""
        if self.store_id is None or self._over == self.member.incarnation:
            return False  # there is nobody to tell
        self._flushed.clear()
        if self._written is self.member:
            return True
        try:
            await asyncio.wait_for(self._flushed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def status(self) -> str:
        """What the coordinator waits for, in words; empty if it cannot be asked."""
        connection = self._commands
        if connection is None or connection.link is None:
            return ""
        try:
            return await connection.call(connection.link.read_status, self._patience_s)
        except StoreLostError:
            return ""

    # -- the session's life ---------------------------------------------------------------------

    async def run(self) -> None:
        """Stay registered until cancelled. Raises what went wrong in here or in ``listen``'s callback."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            await until_one_ends(self._keep_time(), self._stay_connected(), self._failed)
        finally:
            self._stop_reaching()
            self._drop_offers()

    async def _stay_connected(self) -> None:
        while True:
            commands, watch = _Connection("store-commands"), _Connection("store-watch")
            try:
                await self._attend(commands, watch)
            except TransportError as error:  # also: no port is free for an offer, or none of ours answers
                self._tell(events.Disconnected(str(error)))
                await asyncio.sleep(REDIAL_MIN_S)
            finally:
                commands.close()
                watch.close()

    async def _attend(self, commands: _Connection, watch: _Connection) -> None:
        """Connect and work until the store is lost."""
        link = await self._dial(commands)
        replaced = self.store_id is not None and link.store_id != self.store_id
        if replaced:
            self._plan, self._read_version = None, 0
        self.store_id = link.store_id
        self._local_address = self._own_address or link.local_address
        self._commands = commands
        self._written = None
        self._renew_due = True  # the last renewal may have been lost with the connection
        self._tell(events.Connected(link.store_id, replaced))
        if replaced:
            self._registered_in = None
            if self._lease is not None and self._lease.expired(boottime_s()):
                self._lose("the store was lost for longer than that")
        await until_one_ends(self._pump(commands), self._watch(watch))

    async def _dial(self, connection: _Connection) -> NodeLink:
        """Dial until somebody answers; with jitter, for a whole cluster may be dialling."""
        pauses = tenacity.AsyncRetrying(
            wait=tenacity.wait_random_exponential(multiplier=REDIAL_MIN_S, max=REDIAL_MAX_S),
            retry=tenacity.retry_if_exception_type((UnreachableError, NotAStoreError)),
            before_sleep=self._tell_why_not,
        )
        return await pauses(connection.dial, self._connector)

    def _tell_why_not(self, attempt: tenacity.RetryCallState) -> None:
        error = attempt.outcome.exception() if attempt.outcome is not None else None
        unusable = isinstance(error, NotAStoreError)
        self._tell(events.Unusable(str(error)) if unusable else events.Disconnected(str(error)))

    async def _keep_time(self) -> None:
        """The loop's own timer: ask for renewals, and notice when the lease has run out."""
        self._time_next_renewal(boottime_s())
        while True:
            now_s = boottime_s()
            if self._lease is not None and self._lease.expired(now_s):
                self._lose(self._why_not_renewed(now_s))
            if now_s >= self._renew_at_s:
                self._time_next_renewal(now_s)
                if self._may_renew():
                    self._renew_due = True
                    self._wake.set()
            deadline_s = self._lease.deadline_s if self._lease is not None else self._renew_at_s
            self._timer_due_s = min(self._renew_at_s, deadline_s)
            await asyncio.sleep(self._timer_due_s - now_s)

    def _why_not_renewed(self, now_s: float) -> str:
        """What the timer shows: a paused agent (Ctrl-Z, a suspended machine) must not be taken for a silent store."""
        paused_s = now_s - self._timer_due_s
        if paused_s > self._ttl_s / RENEWALS_PER_LEASE:
            return f"this agent was paused for {paused_s:.1f} s (stopped, or its machine was suspended or overloaded)"
        return "it was not renewed in time: the store did not answer"

    def _time_next_renewal(self, sent_s: float) -> None:
        """In even steps from the last one, whatever that was for: the coordinator looks when it expects the next.

        What is out of step it notices late, and with it the loss of this node.
        """
        self._renew_at_s = next_renewal_s(self._ttl_s, sent_s, boottime_s())

    def _lose(self, why: str) -> None:
        """This incarnation is over; the owner stops the workers and rejoins."""
        self._lease = None
        self._prepare = None
        self._stop_reaching()
        if self._over == self.member.incarnation:
            return
        self._over = self.member.incarnation
        self._tell(events.LeaseLost(f"the lease of {self._ttl_s:g} s is lost: {why}"))

    # -- the two conversations ------------------------------------------------------------------

    async def _watch(self, connection: _Connection) -> None:
        link = await connection.dial(
            self._connector
        )  # only here: a lease that is about to end is renewed first
        if link.store_id != self.store_id:
            raise StoreLostError("another store answers there now")
        while True:
            after, patience_s = self._read_version, self._ttl_s
            plan = await connection.call(partial(link.next_plan, after, patience_s), 2 * patience_s + 1.0)
            if plan is not None and plan.version > after:
                self._saw(plan)

    def _saw(self, plan: Plan) -> None:
        self._read_version = plan.version
        if objection := misquoted(plan, self.member):
            get_logger().warning("ignored a plan in the store", version=plan.version, what=objection)
            return
        self._plan = plan
        told = plan.history()
        if self.history is None or told.rank >= self.history.rank:
            self.history = told
        elif self._knows_more_than(plan) and self.member.history != self.history:
            self.member = msgspec.structs.replace(self.member, history=self.history)
            self._wake.set()
        self._tell(events.PlanSeen(plan))

    def _knows_more_than(self, plan: Plan | None) -> bool:
        """Whether a coordinator that has got to this plan has to be told what this node remembers of the run."""
        return self.history is not None and (plan is None or self.history.generation > plan.generation)

    async def _pump(self, connection: _Connection) -> None:
        link = connection.link
        assert link is not None  # dialled by the caller
        while True:
            if self._unregistered(link):
                await self._register(connection, link)
            if self._renew_due and self._lease is not None:
                await self._renew(connection, link)
            if (
                self._unwritten() or self._offer_due
            ):  # leaves a hint, at which the coordinator sees the renewal too
                await self._write(connection, link)
            if self._prepare is not None:
                await self._get_ready(connection, link, self._prepare)
            if not self._pending(link):
                self._flushed.set()
                self._wake.clear()
                await self._wake.wait()

    def _unregistered(self, link: NodeLink) -> bool:
        key = (link.store_id, self.member.incarnation)
        return self._over != self.member.incarnation and self._registered_in != key

    def _unwritten(self) -> bool:
        return self._over != self.member.incarnation and self._written is not self.member

    def _pending(self, link: NodeLink) -> bool:
        renewing = self._renew_due and self._lease is not None
        writing = self._unwritten() or self._offer_due
        return self._unregistered(link) or writing or renewing or self._prepare is not None

    async def _register(self, connection: _Connection, link: NodeLink) -> None:
        history = self.history if self._knows_more_than(self._plan) else None
        member = msgspec.structs.replace(self.member, address=self._local_address, history=history)
        self.member = member
        if _lacks_offer(member):
            member = await self._with_offer(member)
        lease = Lease(member.incarnation, self._ttl_s)
        sent_s = self._first_sent.of((link.store_id, lease), boottime_s())
        granted = await connection.call(
            lambda: link.register(member, lease), self._ttl_s / REGISTRATIONS_PER_LEASE
        )
        if self.member.incarnation != member.incarnation:
            return  # a new incarnation was taken meanwhile
        if granted is None:
            await self._find_out_why_lost(connection, link, member.incarnation)
            return
        held = HeldLease.granted(granted, sent_s)
        if held.expired(boottime_s()):
            self._lose("it was over before the registration was answered")
            return
        self._lease = held
        self._time_next_renewal(sent_s)
        self._registered_in = (link.store_id, member.incarnation)
        self._renew_due = False
        self._written = self.member if self._same_word(member) else None
        self._tell(events.Registered(member.incarnation, held.deadline_s))
        if self._retell and self._plan is not None:
            self._tell(events.PlanSeen(self._plan))
        self._retell = False

    async def _find_out_why_lost(self, connection: _Connection, link: NodeLink, incarnation: str) -> None:
        """This incarnation may not register (again)."""
        stored = await connection.call(lambda: link.read_lease(incarnation), self._patience_s)
        if self.member.incarnation == incarnation:
            self._lose(_condemnation(stored))

    def _same_word(self, member: Member) -> bool:
        mine = msgspec.structs.replace(self.member, bootstrap=member.bootstrap, failure=member.failure)
        if mine != member:
            return False
        self.member = member
        return True

    async def _write(self, connection: _Connection, link: NodeLink) -> None:
        self._offer_due = False
        member = self.member
        if _lacks_offer(member):
            member = await self._with_offer(member)
            if not self._same_word(member):
                return  # overtaken while the store was being created
        if member != self._written:  # else there is still no offer, for the same reason
            await connection.call(lambda: link.write(member), self._patience_s)
        self._written = member

    async def _with_offer(self, member: Member) -> Member:
        """Hold out a fresh bootstrap store, or say why not; then it is tried again with the next renewal."""
        try:
            offer = await self._open_offer()
        except TransportError as error:
            summary = f"{member.node_id} cannot offer a bootstrap store: {error}"[:512]
            if member.failure is None or member.failure.summary != summary:
                get_logger().warning("this node cannot offer a bootstrap store", reason=str(error))
            return msgspec.structs.replace(member, failure=Failure(FailureKind.BOOTSTRAP, summary))
        if self._last_offer is not None:
            self._last_offer.close()
        self.offer, self._last_offer = offer, self.offer
        return msgspec.structs.replace(member, bootstrap=offer.address, failure=None)

    async def _open_offer(self) -> BootstrapOffer:
        """A fresh store; the one before stays until the next world is ready, unless its port is what is missing."""
        address = self._local_address
        try:
            return await aside(lambda: self._connector.offer_bootstrap(address), 2 * BOOTSTRAP_TIMEOUT_S)
        except TransportError:
            if self.offer is None and self._last_offer is None:
                raise
        self._drop_offers()
        return await aside(lambda: self._connector.offer_bootstrap(address), 2 * BOOTSTRAP_TIMEOUT_S)

    def _drop_offers(self, needed: Address | None = None) -> None:
        """Stop serving every bootstrap store but the one that is needed."""
        kept = None
        for offer in (self.offer, self._last_offer):
            if offer is not None and offer.address == needed:
                kept = offer
            elif offer is not None:
                offer.close()
        self.offer, self._last_offer = kept, None

    async def _renew(self, connection: _Connection, link: NodeLink) -> None:
        held = self._lease
        assert held is not None  # the caller looked
        self._renew_due = False
        if held.expired(boottime_s()):
            self._lose(self._why_not_renewed(boottime_s()))
            return
        renewed = held.record.renewed()
        sent_s = self._first_sent.of((link.store_id, renewed), boottime_s())
        ok = await connection.call(lambda: link.renew(held.record, renewed), self._patience_s)
        if self._lease is not held:
            return  # lost or replaced meanwhile
        if ok:
            self._lease = held.renewed(renewed, sent_s)
            self._time_next_renewal(sent_s)
            self._offer_due = _lacks_offer(self.member) and self._prepare is None
            self._tell(events.Renewed(self._lease.deadline_s))
            return
        stored = await connection.call(lambda: link.read_lease(held.record.incarnation), self._patience_s)
        if self._lease is not held:
            return  # lost or replaced meanwhile
        if stored is None or stored.condemned:
            self._lose(_condemnation(stored))
        else:  # an earlier renewal had an unknown outcome: it did happen
            self._lease = HeldLease(stored, held.deadline_s)
            self._renew_due = True

    async def _get_ready(self, connection: _Connection, link: NodeLink, world: World) -> None:
        """The last look before workers are started. The lease goes on being renewed while the store is dialled."""
        self._renew_due = True
        while self._renew_due and self._lease is not None:
            await self._renew(connection, link)
        if self._lease is None:
            return
        plan = await connection.call(link.read_plan, self._patience_s)
        if self._prepare is not world:
            return
        self._prepare = None
        if plan is None or (plan.phase, plan.generation) != (Phase.RUNNING, world.generation):
            return  # overtaken; the watch brings the newer plan
        self._stop_reaching()
        self._reaching = asyncio.create_task(self._reach_bootstrap(world))
        self._reaching.add_done_callback(self._reached)

    async def _reach_bootstrap(self, world: World) -> None:
        address = world.bootstrap
        try:
            await aside(
                lambda: self._connector.dial_bootstrap(address, BOOTSTRAP_TIMEOUT_S), 2 * BOOTSTRAP_TIMEOUT_S
            )
        except (TransportError, OSError) as error:
            self._tell(events.PrepareFailed(world.generation, _unreachable(world, error)))
            return
        if self.offer is not None and (self.offer.address != world.bootstrap or len(world.seats) == 1):
            self.offer.rests = False
        self._drop_offers(needed=world.bootstrap)
        self._tell(events.Prepared(world.generation))

    def _reached(self, reaching: asyncio.Task[None]) -> None:
        """An error of our own ends the session: without it nobody would know that this node never starts."""
        error = None if reaching.cancelled() else reaching.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _stop_reaching(self) -> None:
        """What was to be started is overtaken."""
        if self._reaching is not None:
            self._reaching.cancel()
            self._reaching = None


def _lacks_offer(member: Member) -> bool:
    """Whether this node is ready for a generation without a bootstrap store for it."""
    return member.state is State.READY and member.generation > 0 and member.bootstrap is None


def _condemnation(stored: Lease | None) -> str:
    """Why a lease that is not what it should be was lost, in words."""
    if stored is None:
        return "the store has no record of it any more (it was condemned, and removed since)"
    return f"the coordinator condemned it: {stored.why or 'it does not say why'}"


def _unreachable(world: World, error: Exception) -> Failure:
    summary = f"the bootstrap store of {world.bootstrap_node} cannot be reached: {error}"
    return Failure(FailureKind.BOOTSTRAP, summary[:512], blames=world.bootstrap_node)
