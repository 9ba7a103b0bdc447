"""A stock torchrun's node in a run, in an event loop beside torchrun (see :mod:`.handler`).

    next_world ──world sealed──▶ gathering ──all nodes join──▶ torchrun runs its workers ──▶ finish ──▶ leave
       ▲                            │ cancelled                      │ is_stale
       └────────────────────────────┴────────────────────────────────┘

torchrun exchanges ranks over the bootstrap store without checking whether a node has died meanwhile, so it gets the
world only after all its nodes have joined at that store (:class:`~.barrier.Gathering`). Whether they have, or whether
one of them saw the world end before, is decided by one compare-and-set on that store.

The node's state machine is the same as the agent's. Workers count as started when torchrun is about to start them,
and as stopped when torchrun requests the next world.
"""

from __future__ import annotations

import asyncio
import contextlib

from elastic_agent.logs import get_logger
from elastic_agent.protocol import (
    Activity,
    Address,
    Announce,
    Depart,
    Failure,
    FailureKind,
    Member,
    Outcome,
    Phase,
    Plan,
    State,
    World,
)
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.backends import RendezvousBackend
from elastic_agent.rendezvous.participant import Owner, Participant
from elastic_agent.rendezvous.session import Session
from elastic_agent.rendezvous.waits import until_one_ends
from elastic_agent.transport import Obstacle, TransportError, run_abandonable
from elastic_agent.transport.c10d import C10dTable, StoreServers, reach
from elastic_agent.values import Endpoint, new_incarnation

LEAVE_TIMEOUT_S = 10.0
"""The longest wait for others when torchrun ends: for their acknowledgements, and the outcome."""

START_S = 60.0
FLUSH_S = 2.0
UNREACHABLE_S = 5.0
"""If the store has not answered for this long, the reason is logged; at once if its name does not resolve."""

NOTICE_S = 10.0
"""If torchrun's exit takes longer than this, the reason is logged."""


class TorchrunNode:
    """One torchrun's part in the run. Other threads only read its attributes, and call it through its loop."""

    def __init__(
        self, backend: RendezvousBackend, member: Member, address: str | None, stores: StoreServers
    ) -> None:
        """Prepare; connects to nothing yet.

        ``address``: under which the other nodes reach this one; None: the one it reaches the store from.
        ``stores``: serve the backend's stores; closed at the end.
        """
        self.shown, self.policy = backend.shown, member.policy
        self.over: Depart | None = None
        """Why there will be no other world."""
        self.trouble = ""
        """Why the store cannot be reached at present."""
        self.is_stale = False
        """The last world is over: torchrun is to stop its workers and request the next."""
        self._backend, self._node_id, self._stores = backend, member.node_id, stores
        self._session = Session(backend, member, member.policy.lease_ttl_s, address)
        self._session.listen(self._event)
        self._worlds: asyncio.Queue[World | None] = asyncio.Queue()
        """Those that this node is to start; None: there will be no other one."""
        self._participant = Participant(
            self._session,
            Owner(
                set_deadline=lambda deadline_s: None,  # torchrun's workers cannot be fenced
                warm_up=lambda: None,  # torchrun starts them, when they have a world
                start=self._worlds.put_nowait,
                stop=lambda action: self._stop(),
                notify=lambda notice: None,  # torchrun cannot give its workers a notice
                departs=self._departs,
            ),
            new_incarnation,
        )
        self._node, self._perform = self._participant.node, self._participant.perform
        self._gathering: Gathering | None = None
        self._warning: asyncio.TimerHandle | None = None
        """That the store does not answer, to be given or given."""
        self._finishing = self._succeeded = False
        self._leaving, self._settled = asyncio.Event(), asyncio.Event()
        """Settled: while finishing, the run has ended, or the others continue without this node."""

    async def run(self) -> None:
        """Take part until torchrun leaves and the others need nothing more of this node."""
        try:
            await until_one_ends(self._take_part(), self._until_left())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._succeeded else LEAVE_TIMEOUT_S):
                    await self._host_on()
            await self._backend.leave()
        finally:
            if self._gathering is not None:
                self._gathering.close()
            self._backend.close()
            self._stores.close()

    async def _take_part(self) -> None:
        # Before a port is bound: a store that is not served yet does not answer.
        await run_abandonable(self._stores.await_ready, START_S)
        await self._session.run()

    # -- torchrun -------------------------------------------------------------------------------

    async def next_world(self) -> Gathering | None:
        """Wait for a world all of whose nodes have joined, while torchrun runs no worker; None: there is no other."""
        self.is_stale = False
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None
            if self._node.activity is Activity.RUNNING:
                self._fail(FailureKind.WORKER, f"{self._node_id}: torchrun is restarting its workers")
            self._workers_stopped()
        while self.over is None:
            world = await self._worlds.get()
            now = (self._node.activity, self._node.generation)
            if world is None or now != (Activity.STARTING, world.generation):
                continue  # it has ended already
            gathering = await self._gather(world)
            if gathering.is_complete:
                return gathering
        return None

    def finish(self) -> None:
        """Take in that torchrun's workers all succeeded: it will not request another world."""
        if self._finishing:
            return
        self._finishing = True
        if self._node.activity is Activity.RUNNING:
            self._perform(self._node.succeeded(self._node.generation))
        else:
            self._leave("torchrun's workers exited while their world was ending")

    def leave(self, succeeded: bool) -> None:
        """Leave: torchrun is about to exit, and no worker of it runs. ``succeeded``: they had all exited with 0."""
        self._succeeded = succeeded
        self._leaving.set()

    def _leave(self, why: str) -> None:
        self._perform(self._node.drain(why))
        self._workers_stopped()

    def _workers_stopped(self) -> None:
        """Take in that torchrun has no workers any more."""
        if self._node.activity is Activity.STOPPING:
            self._perform(self._node.stopped())

    # -- the run --------------------------------------------------------------------------------

    def _event(self, event: events.SessionEvent) -> None:
        match event:
            case events.Connected():
                self.trouble = ""
                if self._warning is not None:
                    self._warning.cancel()
                self._warning = None
            case events.Disconnected(reason=reason, obstacle=obstacle):
                self.trouble = reason
                if self._warning is None:
                    # torchrun tells only when its time-out is over, after ten minutes
                    text = f"the store at {self.shown} does not answer, still trying: {reason}"
                    wait_s = 0.0 if obstacle is Obstacle.UNKNOWN_NAME else UNREACHABLE_S
                    self._warning = asyncio.get_running_loop().call_later(wait_s, get_logger().warning, text)
            case events.GivenUp(reason=reason):
                self._departs(Depart(Outcome.UNREACHABLE, reason))
            case events.PlanSeen(plan=plan) if self._finishing:
                self._settle_by(plan)
                return
            case events.LeaseLost(reason=reason):
                get_logger().warning("this node lost its lease", reason=reason)
                if self._finishing:
                    self._settled.set()
                    return
        self._participant.take_in(event)

    def _settle_by(self, plan: Plan) -> None:
        if plan.phase is Phase.FINISHED:
            self._perform(self._node.plan_changed(plan))
        elif plan.phase is Phase.FAILED or plan.generation > self._node.generation:
            # the others start again; torchrun's agent here cannot
            self._session.announce(Announce(State.LEFT, plan.generation))
        else:
            return
        self._settled.set()

    def _stop(self) -> None:
        """End the world for this node."""
        if self._gathering is None:
            self._workers_stopped()  # torchrun has no workers
        elif self._gathering.is_complete:
            self.is_stale = True
        else:
            self._gathering.cancelled.set()

    def _fail(self, kind: FailureKind, summary: str) -> None:
        self._perform(self._node.failed(self._node.generation, Failure(kind, summary[:512])))

    def _departs(self, ending: Depart) -> None:
        self.over = ending
        self._worlds.put_nowait(None)

    # -- gathering at the bootstrap store -------------------------------------------------------

    async def _gather(self, world: World) -> Gathering:
        """Wait for all nodes, or for the next world if this one ends or its store is lost before."""
        rank = world.node_rank(self._node.incarnation)
        assert rank is not None  # only seated nodes start
        gathering = self._gathering = Gathering(world.bootstrap, len(world.seats), rank)
        self._perform(self._node.started(world.generation))
        problem = ""
        try:
            await gathering.come(self.policy.start_timeout_s)
        except TransportError as error:
            problem = f"{self._node_id} could not connect to the other nodes at {world.bootstrap}: {error}"
        is_over = self._node.activity is not Activity.RUNNING
        if gathering.is_complete:
            self.is_stale = is_over
            return gathering
        gathering.close()
        self._gathering = None
        if problem and not is_over:
            self._fail(FailureKind.BOOTSTRAP, problem)
        self._workers_stopped()
        return gathering

    # -- the end --------------------------------------------------------------------------------

    async def _until_left(self) -> None:
        await self._leaving.wait()
        if self._succeeded or self._finishing:
            await self._part_in_order()
        else:
            self._leave("torchrun exited")
        await self._session.flush(FLUSH_S)

    async def _part_in_order(self) -> None:
        """Keep what the others need after the workers succeeded, and see the outcome if it comes soon."""
        self.finish()
        if self._gathering is not None:
            # torchrun has passed its exit barrier here; the node that hosts it waits until all have.
            offer = self._session.offer
            hosts = offer is not None and offer.address == self._gathering.store
            with contextlib.suppress(TransportError):
                await self._gathering.go(await_all_s=LEAVE_TIMEOUT_S if hosts else 0.0)
        if self.over is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), LEAVE_TIMEOUT_S)

    async def _host_on(self) -> None:
        """Keep serving until no run needs this host's store any more."""
        notice = asyncio.get_running_loop().call_later(NOTICE_S, self._log_why_not_ended)
        while self._backend.busy_with:
            await self._backend.changed()
        notice.cancel()

    def _log_why_not_ended(self) -> None:
        runs = ", ".join(self._backend.busy_with)
        get_logger().warning(f"torchrun is done; keeping the rendezvous store at {self.shown} up for {runs}")


ROOT = "elastic-agent/gathering/"
CONNECT_TIMEOUT_S = 5.0

_CAME, _DECISION, _GONE, _ALL_GONE = "came/", "decision", "gone/", "all-gone"
_COMPLETE, _CALLED_OFF = b"complete", b"called off"


class Gathering:
    """One node among those of a world. Calls raise ``TransportError`` when the store is lost."""

    def __init__(self, store: Address, size: int, rank: int) -> None:
        """``store``: of the world; ``size``: how many nodes are to come; ``rank``: of this one."""
        self.store, self.size, self.rank = store, size, rank
        self.cancelled = asyncio.Event()
        """To be set when this node will not join: then none proceeds, unless all have joined already."""
        self.is_complete = False
        self._table: C10dTable | None = None

    async def come(self, timeout_s: float) -> bool:
        """Wait for all nodes; False if one of them cancelled. All nodes that get an answer get the same one.

        At the time-out, this node cancels.
        """
        table = await self._connect()
        decision = _CALLED_OFF
        if not self.cancelled.is_set():
            if await self._enlist(table, _CAME):
                decision = _COMPLETE
            else:
                await until_one_ends(table.wait(_DECISION, timeout_s), self.cancelled.wait())
                if self.cancelled.is_set():
                    table = await self._connect()  # what was given up cannot be used any more
        self.is_complete = await table.swap(_DECISION, None, decision) == _COMPLETE
        return self.is_complete

    async def _connect(self) -> C10dTable:
        self.close()
        store = await reach(Endpoint(self.store.host, self.store.port), CONNECT_TIMEOUT_S)
        self._table = C10dTable(store, root=ROOT)
        return self._table

    async def go(self, *, await_all_s: float) -> None:
        """Wait, so long at most, until no node needs the store any more; this one does not."""
        if self._table is None:
            return
        if await self._enlist(self._table, _GONE):
            await self._table.put(_ALL_GONE, b"yes")
        await self._table.wait(_ALL_GONE, await_all_s)

    def close(self) -> None:
        """Close the connection; calls in progress raise ``StoreLostError``."""
        if self._table is not None:
            self._table.close()

    async def _enlist(self, table: C10dTable, folder: str) -> bool:
        """Return whether all nodes are on the list now."""
        await table.put(f"{folder}{self.rank}", b"yes")
        return len(await table.keys(folder)) >= self.size
