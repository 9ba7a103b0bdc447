"""Runs an agent's part in the election of a run's coordinator, over connections to etcd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from elastic_agent.logs import get_logger
from elastic_agent.rendezvous.asyncio_runner import run_async
from elastic_agent.rendezvous.coordinator_effects import LEAST_WAIT_S, WaitForHints, performer
from elastic_agent.rendezvous.effects import BackOff, Effect, Sleep
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import LifeKeys, RunKeys
from elastic_agent.transport.etcd import EtcdClient, Leadership, await_no_leader, campaign_for

from .election import (
    AwaitNoLeader,
    Campaign,
    Connect,
    Election,
    LeaderCall,
    Resign,
    WaitForMark,
    keep_leading,
)

RESIGN_S = 1.0
"""For how long an agent that ends waits for etcd, which is to let another one take over at once."""


class ElectionTask:
    """Takes part in a run's election until stopped, or until the run is over and every live node knows it."""

    def __init__(
        self,
        run_id: str,
        root: str,
        dial: Callable[[], Awaitable[EtcdClient]],
        history_store: RunHistoryStore,
        lease_ttl_s: float,
        on_change: Callable[[], None],
        *,
        compares: bool = True,
    ) -> None:
        """Begin.

        Args:
            run_id: the run's name.
            root: of all keys in etcd.
            dial: a new connection to a member that answers.
            history_store: the run histories on this machine's disk.
            lease_ttl_s: of the run's nodes, seconds.
            on_change: called whenever ``winding_up`` may have changed.
            compares: whether to warn of nodes whose software or settings differ.
        """
        self._run_id = run_id
        self._root = root
        self._run = RunKeys(run_id)
        self._dial = dial
        self._history_store = history_store
        self._lease_ttl_s = lease_ttl_s
        self._on_change = on_change
        self._who = f"{platform.node()}:{os.getpid()}"
        self._election = Election(time.monotonic, get_logger(run=run_id), compares=compares)
        self._client: EtcdClient | None = None
        self._leadership: Leadership | None = None
        self._keeper: LeaderKeyTask | None = None
        self._resigning: asyncio.Task[None] | None = None
        """The last time that this agent gave up its leadership."""
        self.winding_up = False
        """Whether this agent coordinates a run that has its outcome, and whose records it is still to remove."""
        self._task = asyncio.create_task(self._take_part())

    async def ended(self) -> None:
        """Wait until the run is over."""
        await asyncio.wait([self._task])

    def cancel(self) -> None:
        """End, as far as the event loop goes on; does not wait."""
        self._task.cancel()

    async def stop(self) -> None:
        """End; another agent takes over at once. Waits for etcd a second at most."""
        self.cancel()
        await asyncio.wait([self._task], timeout=RESIGN_S)

    def mark(self) -> None:
        """This agent's own lease was just renewed: have a mark written, if it leads."""
        if self._keeper is not None:
            self._keeper.mark()

    async def _take_part(self) -> None:
        try:
            await run_async(self._election.run(), self._perform)
        finally:
            try:
                await self._resign()
            finally:
                self._close()
                self._report(winding_up=False)

    def _report(self, *, winding_up: bool) -> None:
        if winding_up != self.winding_up:
            self.winding_up = winding_up
            self._on_change()

    # -- performing the election's effects ------------------------------------------------------

    async def _perform(self, effect: Effect[Any]) -> Any:
        self._report(winding_up=self._election.winding_up)
        match effect:
            case Sleep(pause_s):
                await asyncio.sleep(pause_s)
            case BackOff(most_s):
                await asyncio.sleep(random.uniform(0.0, most_s))
            case Connect():
                self._close()
                self._client = await self._dial()
            case AwaitNoLeader(patience_s):
                return await await_no_leader(self._connected(), self._root, self._run, patience_s)
            case Campaign(life):
                return await self._campaign(life)
            case Resign():
                await self._resign()
            case _:
                return await self._perform_as_leader(effect)
        return None

    def _connected(self) -> EtcdClient:
        assert self._client is not None  # the election connects first
        return self._client

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _campaign(self, life: str) -> bool:
        sent_s, keys = time.monotonic(), LifeKeys(self._run, life)
        elected = await campaign_for(self._connected(), self._root, keys, self._who, self._lease_ttl_s)
        if elected is not None:
            self._leadership, self._keeper = elected, LeaderKeyTask(elected, sent_s)
        return elected is not None

    async def _perform_as_leader(self, effect: Effect[Any]) -> Any:
        leadership = self._leadership
        assert leadership is not None  # elected
        match effect:
            case WaitForHints(until_s):
                return await leadership.wait(max(LEAST_WAIT_S, until_s - time.monotonic()))
            case LeaderCall():
                return await effect.perform(leadership)
            case _:
                return await performer(self._run_id, leadership.records, self._history_store)(effect)

    async def _resign(self) -> None:
        leadership, self._leadership = self._leadership, None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
        if leadership is not None:
            self._resigning = asyncio.create_task(leadership.resign())
        if self._resigning is not None:  # the agent may end meanwhile
            await asyncio.shield(self._resigning)


class LeaderKeyTask:
    """Keeps the leader key alive. When leadership is lost it closes the connection, so that no call waits longer."""

    def __init__(self, leadership: Leadership, elected_s: float) -> None:
        """Begin. ``elected_s``: when the key was requested (``time.monotonic()``)."""
        self._leadership = leadership
        self._elected_s = elected_s
        self._mark_due = asyncio.Event()
        self._task = asyncio.create_task(self._keep())

    def cancel(self) -> None:
        """Leadership is given up."""
        self._task.cancel()

    def mark(self) -> None:
        """Have a mark written now."""
        self._mark_due.set()

    async def _keep(self) -> None:
        try:
            keeping = keep_leading(time.monotonic, self._leadership.ttl_s, self._elected_s)
            lost = await run_async(keeping, self._perform)
        except Exception as error:
            get_logger().exception("internal error while renewing the lease of the leader key")
            lost = f"the lease of the leader key is no longer renewed: {error}"
        self._leadership.lose(lost)

    async def _perform(self, effect: Effect[Any]) -> Any:
        if isinstance(effect, LeaderCall):
            return await effect.perform(self._leadership)
        assert isinstance(effect, WaitForMark)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, effect.until_s - time.monotonic())):
                await self._mark_due.wait()
        is_due = self._mark_due.is_set()
        self._mark_due.clear()
        return is_due
