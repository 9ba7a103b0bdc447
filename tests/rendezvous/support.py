"""Nodes with real sessions, and a store with its coordinator in a process that can be stopped."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Failure,
    FailureKind,
    Member,
    Phase,
    Plan,
    Policy,
    State,
)
from elastic_agent.rendezvous import events, participant
from elastic_agent.rendezvous.backends import BackendOptions
from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.rendezvous.backends.c10d.coordinator import StoreCoordinator
from elastic_agent.rendezvous.bootstrap_offers import StoreDialer
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import CoordinatorRecords, c10d
from elastic_agent.values import Endpoint
from tests.processes import Forked

E = TypeVar("E")

PATIENCE_S = 300.0
"""A guard against hangs."""

LONG_LEASE_S, MARGIN_S, SETTLE_S = 60.0, 0.3, 0.2

LEASE_S = 2.0
"""For a node that is to lose its lease."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    ["elastic_agent.rendezvous.backends.c10d.backend", "tests.rendezvous.support"]
)


class HostProcess(Forked):
    """A store and its coordinator, without a node."""

    def __init__(self, endpoint: Endpoint, state_dir: Path) -> None:
        self._pipe, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_host, args=(theirs, endpoint, state_dir), daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.poll(PATIENCE_S), "no store was hosted"
        assert self._pipe.recv() == "hosting"

    def kill(self) -> None:
        super().kill()
        self._pipe.close()


def _host(pipe: Connection, endpoint: Endpoint, state_dir: Path) -> None:
    async def host() -> None:
        async with coordinated(endpoint, RunHistoryStore(state_dir)):
            pipe.send("hosting")
            with contextlib.suppress(EOFError):
                await asyncio.to_thread(pipe.recv)

    asyncio.run(host())
    os._exit(0)


@contextmanager
def hosted(endpoint: Endpoint, state_dir: Path) -> Iterator[HostProcess]:
    """A host that is gone in the end."""
    host = HostProcess(endpoint, state_dir)
    try:
        yield host
    finally:
        host.kill()


@asynccontextmanager
async def coordinated(
    endpoint: Endpoint,
    history_store: RunHistoryStore,
    open_records: Callable[
        [c10d.C10dInbox, str], Awaitable[CoordinatorRecords | None]
    ] = c10d.C10dInbox.records,
    **how: Any,
) -> AsyncIterator[StoreCoordinator]:
    """A store and its coordinator in this process; ``how``: more of what the coordinator is given."""
    host = await c10d.find_or_host(endpoint, PATIENCE_S)
    assert host is not None

    async def open_inbox() -> c10d.C10dInbox:
        inbox = await host.inbox()
        inbox.records = partial(open_records, inbox)  # type: ignore[method-assign]
        return inbox

    coordinator = StoreCoordinator(open_inbox, history_store, **how)
    task = asyncio.create_task(coordinator.run())
    try:
        yield coordinator
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        host.close()


def policy(least: int, most: int, **changes: float) -> Policy:
    return Policy(
        min_nodes=least,
        max_nodes=most,
        lease_ttl_s=changes.get("lease_s", LONG_LEASE_S),
        fence_margin_s=MARGIN_S,
        settle_s=SETTLE_S,
        join_timeout_s=changes.get("join_s", 600.0),
        start_timeout_s=changes.get("start_s", 60.0),
    )


class Participant:
    """A node whose workers start and stop at once; keeps what its session told."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        rules: Policy,
        state_dir: Path,
        run_id: str = "run",
        *,
        address: str | None = None,
        through: Callable[[StoreDialer], StoreDialer] = lambda backend: backend,
    ) -> None:
        """``through``: what stands between the session and its store; ``address``: the one that others are told."""
        self.name = name
        self.told: list[events.SessionEvent] = []
        self.lives = 1
        backend = C10dBackend(BackendOptions(endpoint, state_dir))
        backend.run_id = run_id
        member = Member(RECORD_VERSION, name, f"{name}-1", "127.0.0.1", 1, State.READY, 0, rules)
        self.session = Session(through(backend), member, rules.lease_ttl_s, address)
        self.session.listen(self._event)
        self._part = participant.Participant(
            self.session,
            participant.Owner(
                set_deadline=_ignore,
                warm_up=lambda: None,
                start=lambda world: self._part.perform(self.node.started(world.generation)),
                stop=lambda action: self._part.perform(self.node.stopped()),
                notify=_ignore,
                departs=_ignore,
            ),
            self._next_incarnation,
        )
        self.node = self._part.node
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._backend = backend

    async def __aenter__(self) -> Participant:
        self._task = asyncio.create_task(self.session.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.vanish()
        self._backend.close()

    async def vanish(self) -> None:
        """Be silent from now on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def fail(self) -> None:
        """A worker of this node fails."""
        failure = Failure(FailureKind.WORKER, f"a worker of {self.name} failed")
        self._part.perform(self.node.failed(self.node.generation, failure))

    def succeed(self) -> None:
        """All workers of this node exit with 0."""
        self._part.perform(self.node.succeeded(self.node.generation))

    # -- what happened --------------------------------------------------------------------------

    def of(self, kind: type[E]) -> list[E]:
        """Return what was told of this kind, in order."""
        return [event for event in self.told if isinstance(event, kind)]

    async def hear(self, kind: type[E], test: Callable[[E], bool] = lambda event: True, after: int = 0) -> E:
        """The first event of this kind that passes, among those after the first ``after`` events."""

        def found() -> E | None:
            return next(
                (event for event in self.told[after:] if isinstance(event, kind) and test(event)), None
            )

        async def wait() -> E:
            async with self._news:
                await self._news.wait_for(lambda: found() is not None)
            event = found()
            assert event is not None
            return event

        try:
            return await asyncio.wait_for(wait(), PATIENCE_S)
        except TimeoutError:
            told = "\n".join(map(repr, self.told))
            raise AssertionError(
                f"{self.name} heard no {kind.__name__} in {PATIENCE_S:g} s; it heard\n{told}"
            ) from None

    async def plan(
        self, phase: Phase, test: Callable[[Plan], bool] = lambda plan: True, after: int = 0
    ) -> Plan:
        """The first plan of this phase that passes."""
        seen = await self.hear(
            events.PlanSeen, lambda event: event.plan.phase is phase and test(event.plan), after
        )
        return seen.plan

    async def running(self, *names: str, above: int = 0) -> Plan:
        """Until these nodes' world runs here."""
        plan = await self.plan(
            Phase.RUNNING,
            lambda plan: (
                plan.generation > above
                and plan.world is not None
                and [seat.node_id for seat in plan.world.seats] == list(names)
            ),
        )
        await self.hear(events.Prepared, lambda event: event.generation == plan.generation)
        return plan

    # -- the node -------------------------------------------------------------------------------

    def _event(self, event: events.SessionEvent) -> None:
        self._part.take_in(event)
        self.told.append(event)
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _next_incarnation(self) -> str:
        self.lives += 1
        return f"{self.name}-{self.lives}"


def _ignore(*_: object) -> None:
    pass


@asynccontextmanager
async def participants(
    *names: str, endpoint: Endpoint, rules: Policy, folder: Path
) -> AsyncIterator[list[Participant]]:
    """Nodes of one run, each with a state directory of its own."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Participant(name, endpoint, rules, folder / name))
            for name in names
        ]


def run(coroutine: Any) -> None:
    """Run a test's coroutine."""
    asyncio.run(coroutine)
