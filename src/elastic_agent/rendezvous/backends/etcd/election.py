"""The election of a run's coordinator in etcd: every agent takes part, and one at a time leads.

:class:`Election` waits until there is no leader, campaigns, and then coordinates the run until it is over or leadership
is lost; beside it :func:`keep_leading` keeps the leader key alive. Every write of the leader is a transaction that
compares that key, so that a former leader writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import KW_ONLY, dataclass, field

from structlog.stdlib import BoundLogger

from elastic_agent.logs import get_logger
from elastic_agent.rendezvous.coordinator_driver import LEAST_WAIT_S, RunDriver
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.rendezvous.waits import Signal, Waits, back_offs
from elastic_agent.transport import LifeKeys, RunKeys, TransportError, UnknownPlanError
from elastic_agent.transport.etcd import (
    EtcdClient,
    Leadership,
    NotLeaderError,
    await_no_leader,
    campaign_for,
)

PATIENCE_S = 10.0
"""The pause between reads of the leader key, beside waiting for it to go."""

RENEWALS_PER_LEADERSHIP = 4
"""The number of times that the leader key is kept alive in its time to live."""

RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
REST_S = 5.0
"""The pause after an internal error."""


@dataclass(eq=False, repr=False)
class Election:
    """One agent's part in the election of a run's coordinator, until the run is over; :meth:`live` begins."""

    run_id: str
    """The run's name."""
    root: str
    """Of all keys in etcd."""
    dial: Callable[[], Awaitable[EtcdClient]]
    """Returns a new connection to a member that answers."""
    history_store: RunHistoryStore
    """The run histories on this machine's disk."""
    lease_ttl_s: float
    """Of the run's nodes, seconds."""
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    """Seconds of this machine's clock."""
    waits: Waits = field(default_factory=Waits)
    """How to wait: in asyncio, unless in the simulator."""
    log: BoundLogger | None = None
    """None: the agent's."""
    on_resigned: Callable[[], None] = lambda: None
    """Called when this agent does not coordinate the run any more."""

    def __post_init__(self) -> None:
        self._run = RunKeys(self.run_id)
        self._log = self.log or get_logger(run=self.run_id)
        self._mark_due = self.waits.signal()
        self._client: EtcdClient | None = None
        self._leadership: Leadership | None = None
        """While this agent leads."""
        self._driver: RunDriver | None = None
        """While this agent coordinates the run."""
        self._resigning: asyncio.Task[None] | None = None
        """The last time that this agent gave up its leadership."""
        self._over = False
        self._reported_loss = ""
        """The last reason for giving up that was logged."""

    @property
    def winding_up(self) -> bool:
        """True if this agent coordinates a run that has its outcome, and whose records it is still to remove."""
        return self._driver is not None and self._driver.winding_up

    def mark(self) -> None:
        """Have a mark written if this agent, whose lease was just renewed, leads."""
        if self._leadership is not None:
            self._mark_due.set()

    async def live(self) -> None:
        """Take part until the run is over and every live node knows it, or until cancelled: then resign."""
        try:
            await self.run()
        finally:
            try:
                await self._resign()
                if self._resigning is not None:
                    await asyncio.shield(self._resigning)
            finally:
                self._close()

    async def run(self) -> None:
        """Take part, again and again, until the run is over."""
        pauses_s = back_offs(RETRY_MIN_S, RETRY_MAX_S)
        while not self._over:
            try:
                await self._take_part()
                pauses_s = back_offs(RETRY_MIN_S, RETRY_MAX_S)
            except TransportError:
                await self.waits.back_off(next(pauses_s))
            except OSError as error:
                self._log.warning(
                    "cannot read the run's history in the state directory; not coordinating the run, "
                    f"retrying in {REST_S:g} s",
                    reason=str(error),
                )
                await self.waits.sleep(REST_S)
            except Exception:
                self._log.exception(f"error in the coordinator; retrying in {REST_S:g} s")
                await self.waits.sleep(REST_S)

    async def _take_part(self) -> None:
        """Campaign over one connection until elected, and lead until that ends."""
        await self._connect()
        while True:
            life = await self._await_no_leader()
            sent_s = self.clock()
            if life is not None and (elected := await self._campaign(life)) is not None:
                return await self._lead(elected, sent_s)

    async def _lead(self, leadership: Leadership, elected_s: float) -> None:
        self._log.debug("this agent is now the coordinator of the run")
        self._leadership = leadership
        self._mark_due.take()
        lost = ""
        failure: Exception | None = None

        async def keep() -> None:
            nonlocal lost
            lost = await keep_leading(leadership, self._mark_due, self.clock, elected_s)

        try:
            await self.waits.until_one_ends(self._coordinate(leadership), keep())
        except NotLeaderError as error:
            lost = str(error)
        except Exception as error:
            failure = error
        await self._resign()
        if lost:
            self._log.info("this agent is no longer the coordinator of the run", reason=lost)
        if failure is not None:
            self._report_loss(failure)
            raise failure

    async def _resign(self) -> None:
        self._driver = None
        self.on_resigned()
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            await self._give_back(leadership)

    def _report_loss(self, failure: Exception) -> None:
        """Log why leadership was given up; it may be so again each second."""
        if isinstance(failure, TransportError) and str(failure) != self._reported_loss:
            self._reported_loss = str(failure)
            level = self._log.error if isinstance(failure, UnknownPlanError) else self._log.info
            level("this agent is resigning as the coordinator of the run", reason=str(failure))

    async def _coordinate(self, leadership: Leadership) -> None:
        plan = await leadership.records.read_plan()
        store_born_s = await self._begin_run(leadership) if plan is None else -math.inf

        async def wait_for_hints(until_s: float) -> Collection[str]:
            return await leadership.wait(max(LEAST_WAIT_S, until_s - self.clock()))

        self._driver = RunDriver(
            self.run_id,
            leadership.records,
            self.history_store,
            wait_for_hints,
            self.clock,
            self._log,
            store_born_s=store_born_s,
        )
        await self._driver.coordinate_until_over()
        self._over = True

    async def _begin_run(self, leadership: Leadership) -> float:
        """Read how the last run of this name ended, which this machine may have missed.

        If that is not in etcd either, it is the first of its name, or etcd has lost its data: then an outcome in
        this machine's run history is kept, unless every node is known to have acknowledged it.

        Returns:
            By when at the latest etcd had its data.
        """
        ended = await leadership.records.read_ended()
        if ended is not None:
            with contextlib.suppress(OSError):  # the run's driver logs it
                await self.history_store.save(self.run_id, ended)
        age_s = await leadership.store_age_s()
        return self.clock() - age_s  # at the latest: the answer took a while

    # -- etcd, in whose place the simulator has its own -------------------------------------------

    async def _connect(self) -> None:
        """Connect to a member that answers, in place of an earlier connection."""
        self._close()
        self._client = await self.dial()

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _await_no_leader(self) -> str | None:
        """Wait until the run has nodes and no leader: the life of its records; None if that takes longer."""
        assert self._client is not None  # connected first
        return await await_no_leader(self._client, self.root, self._run, PATIENCE_S)

    async def _campaign(self, life: str) -> Leadership | None:
        """Create the leader key, unless there is one or the run's records have another life."""
        assert self._client is not None  # connected first
        who, keys = f"{platform.node()}:{os.getpid()}", LifeKeys(self._run, life)
        return await campaign_for(self._client, self.root, keys, who, self.lease_ttl_s)

    async def _give_back(self, leadership: Leadership) -> None:
        """Delete the leader key, so that another agent takes over at once; this agent may end meanwhile."""
        self._resigning = asyncio.create_task(leadership.resign())
        await asyncio.shield(self._resigning)


async def keep_leading(
    leadership: Leadership, mark_due: Signal, clock: Callable[[], float], elected_s: float
) -> str:
    """Keep the leader key alive until leadership is lost. The deadline is our own: etcd may end the key right after.

    Args:
        leadership: just gained.
        mark_due: set when a mark is to be written.
        clock: seconds of this machine's clock.
        elected_s: when the key was requested.

    Returns:
        Why leadership is lost.
    """
    ttl_s = leadership.ttl_s
    renewed_s = sent_s = elected_s
    while True:
        is_marking = await mark_due.wait(max(0.0, sent_s + ttl_s / RENEWALS_PER_LEADERSHIP - clock()))
        try:
            if is_marking:
                await leadership.write_mark()
            if clock() - sent_s >= ttl_s / RENEWALS_PER_LEADERSHIP:
                sent_s = clock()
                if not await leadership.keep_alive():
                    return "the coordinator's etcd lease expired"
                renewed_s = sent_s
        except NotLeaderError as error:
            return str(error)
        except TransportError as error:
            if clock() - renewed_s > ttl_s:
                return f"the coordinator's etcd lease was not renewed: {error}"
