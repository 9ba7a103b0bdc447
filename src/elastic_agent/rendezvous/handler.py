"""torch's ``RendezvousHandler`` over a :class:`~elastic_agent.rendezvous.session.Session`.

Two of them. :class:`ElasticRendezvous` gives stock torchrun the same agreement: its session runs in a thread
with an event loop of its own, and torchrun's agent polls it. What torchrun cannot give: its workers are not
fenced (no guard), and it counts restarts for each agent by itself. :class:`AgentRendezvous` is how
elastic-agent's own agent, which is driven by events and never polls, presents its rendezvous to torch's
interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_agent.protocol import node as machine
from elastic_agent.protocol.node import Activity, Node, Outcome
from elastic_agent.protocol.records import Failure, FailureKind, Member, Phase, World

from . import events
from .incarnation import new_incarnation
from .session import Session

if TYPE_CHECKING:
    from .meeting import Meeting

STORE_TIMEOUT_S = 300.0
GOODBYE_S = 10.0
"""How long a host keeps its store for the others after torchrun is done here."""


async def _bounded(wait: Coroutine[None, None, None], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wait, timeout_s)


class AgentRendezvous(RendezvousHandler):
    """elastic-agent's rendezvous as torch's interface shows it; the agent itself drives the session."""

    def __init__(self, run_id: str, backend: str = "c10d") -> None:
        self._run_id = run_id
        self._backend = backend

    def get_backend(self) -> str:
        """The store that holds the agreement."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Workers meet over a store that an agent hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Not to be called: elastic-agent's worlds are formed by its own event loop."""
        raise RendezvousStateError("elastic-agent forms its worlds itself; nobody else can ask for one")

    def is_closed(self) -> bool:
        """Never closed from outside."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: the run ends by its verdict."""

    def num_nodes_waiting(self) -> int:
        """Nobody needs to ask: the agent is told."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the agent closes its session itself."""
        return True


class ElasticRendezvous(RendezvousHandler):
    """The rendezvous for stock torchrun. One worker seat stands for each node; torchrun assigns the ranks."""

    def __init__(
        self,
        backend: str,
        meeting: Meeting,
        member: Member,
        lease_ttl_s: float,
        timeout_s: float,
        address: str | None = None,
    ) -> None:
        """``timeout_s``: how long ``next_rendezvous`` waits at most, seconds. ``address``: as for the session."""
        self._address = address
        self._backend = backend
        self._meeting = meeting
        self._member = member
        self._ttl_s = lease_ttl_s
        self._timeout_s = timeout_s
        self._node = Node(member.incarnation)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Session | None = None
        self._ended: machine.Depart | None = None
        self._sealed: Future[World] | None = None
        self._lock = threading.Condition()

    # -- torch's interface ----------------------------------------------------------------------

    def get_backend(self) -> str:
        """The name this handler was registered under."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """The workers' store is hosted by an agent, fresh in every generation."""
        return True

    def get_run_id(self) -> str:
        """The run's id."""
        return self._meeting.run_id or ""

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next world; blocks until it is sealed with this node in it."""
        self._begin()
        future: Future[World] = Future()
        self._call(lambda: self._ask(future))
        try:
            world = future.result(self._timeout_s)
        except TimeoutError:
            raise RendezvousTimeoutError(
                f"no world was formed within {self._timeout_s:g} s at {self._meeting.shown}"
            ) from None
        rank = world.node_rank(self._node.incarnation)
        assert rank is not None  # sealed with a seat
        address = world.bootstrap
        try:
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise RendezvousConnectionError(
                f"the bootstrap store at {address} cannot be reached: {error}"
            ) from None
        info = RendezvousStoreInfo(address.host, address.port)
        return RendezvousInfo(PrefixStore("torchelastic-agents", store), rank, len(world.seats), info)

    def num_nodes_waiting(self) -> int:
        """More than 0 as soon as the world of the last rendezvous is over, so that torchrun comes again."""
        plan = self._node.plan
        running = self._node.activity is Activity.RUNNING
        stale = (
            plan is not None and plan.generation > self._node.generation and plan.phase is not Phase.FINISHED
        )
        return 1 if stale or not running else 0

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._ended is not None

    def set_closed(self) -> None:
        """torchrun's workers are done here, or it gives up: leave."""
        self._call(lambda: self._perform(self._node.drain("torchrun closed the rendezvous")))

    def shutdown(self) -> bool:
        """Leave the run and let go of the store."""
        if self._loop is None:
            return True
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._say_goodbye(), loop).result(10.0)
        self._thread.join(10.0)
        self._await_others()
        self._meeting.close()
        return True

    def _await_others(self) -> None:
        """If the store is hosted here, the other nodes may still need it for their last words."""
        ends_s = time.monotonic() + GOODBYE_S
        while self._meeting.busy_with and time.monotonic() < ends_s:
            asyncio.run(_bounded(self._meeting.changed(), ends_s - time.monotonic()))

    # -- the session's thread -------------------------------------------------------------------

    def _begin(self) -> None:
        if self._session is not None:
            return
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(ready)), name="elastic-rdzv", daemon=True
        )
        self._thread.start()
        ready.result()

    async def _live(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._session = Session(self._meeting, self._member, self._ttl_s, self._address)
        self._session.listen(self._event)
        self._goodbye = asyncio.Event()
        task = asyncio.create_task(self._session.run())
        ready.set_result(None)
        await self._goodbye.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _say_goodbye(self) -> None:
        if self._ended is None:
            self._perform(self._node.drain("torchrun ended"))
        if self._session is not None:
            await self._session.flush(2.0)
        self._goodbye.set()

    def _call(self, work: object) -> None:
        if self._loop is not None and callable(work):
            self._loop.call_soon_threadsafe(work)

    def _ask(self, future: Future[World]) -> None:
        """torchrun has stopped its workers and wants the next world."""
        self._sealed = future
        if self._ended is not None:
            self._refuse(future)
            return
        if self._node.activity in (Activity.STARTING, Activity.RUNNING):
            # torchrun stopped them by itself: they failed, or the world changed
            failure = Failure(FailureKind.WORKER, f"{self._member.node_id}: torchrun restarts its workers")
            self._perform(self._node.failed(self._node.generation, failure))
        if self._node.activity is Activity.STOPPING:
            self._perform(self._node.stopped())

    def _refuse(self, future: Future[World]) -> None:
        assert self._ended is not None  # the caller looked
        error: RendezvousError = RendezvousClosedError(f"the run is over: {self._ended.reason}")
        if self._ended.outcome is Outcome.UNREACHABLE:
            error = RendezvousConnectionError(self._ended.reason)
        if not future.done():
            future.set_exception(error)

    def _event(self, event: events.SessionEvent) -> None:
        match event:
            case events.Connected(replaced=True):
                self._perform(self._node.store_replaced())
            case events.PlanSeen(plan=plan):
                self._perform(self._node.plan_changed(plan))
            case events.LeaseLost(reason=reason):
                self._perform(self._node.lease_lost(reason))
            case events.Prepared(generation=generation):
                self._perform(self._node.prepared(generation))
            case events.PrepareFailed(generation=generation, failure=failure):
                self._perform(self._node.prepare_failed(generation, failure))
            case events.Unusable(reason=reason):
                self._over(machine.Depart(Outcome.UNREACHABLE, reason))
            case _:
                pass

    def _perform(self, actions: list[machine.Action]) -> None:
        session = self._session
        assert session is not None  # actions come from its events
        for action in actions:
            match action:
                case machine.Announce():
                    session.announce(action)
                case machine.Prepare(world=world):
                    session.prepare(world)
                case machine.StartWorkers(world=world):
                    self._perform(self._node.started(world.generation))
                    if self._sealed is not None and not self._sealed.done():
                        self._sealed.set_result(world)
                case machine.StopWorkers():
                    pass  # torchrun does, when it asks how many nodes wait; it then comes to next_rendezvous
                case machine.Rejoin():
                    incarnation = new_incarnation()
                    session.rejoin(incarnation)
                    self._perform(self._node.rejoined(incarnation))
                case machine.Depart():
                    self._over(action)

    def _over(self, ending: machine.Depart) -> None:
        self._ended = ending
        if self._sealed is not None:
            self._refuse(self._sealed)
