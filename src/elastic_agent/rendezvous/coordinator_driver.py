"""Coordinates one run: reads its records, and carries the coordinator's decisions out on the store and the disk.

The agent runs it in a task, the simulator in virtual time, and can stop or kill its process between any two of its
calls. Hints name the nodes whose records changed. They only save time: the leases are read whenever a renewal is due,
and all records every lease period, so that a lost hint costs time and never correctness.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec
from structlog.stdlib import BoundLogger

from elastic_agent.files import with_remedy
from elastic_agent.protocol import (
    RENEWALS_PER_LEASE,
    Coordinator,
    Decision,
    Plan,
    Waiting,
    waiting_text,
)
from elastic_agent.transport import CoordinatorRecords, Snapshot

from .run_history import RunHistoryStore

LEASE_READS_PER_TTL, LEASE_READS_OF_MANY = 50, 10
"""The most reads of the leases, of a node or two and of many nodes: a renewal, and so the loss of a node, is
noticed that part of a lease late at most."""

MANY_NODES = 50

READ_EARLY = 1 / 500
"""Of a lease: how much sooner than the last one a renewal is looked for, so that it is noticed less and less late. When
it is not there yet, it is looked for again like one that is overdue."""

PAUSE_LEASES, PAUSE_S = 1 / 3, 1.0
"""A coordinator that comes this much of a lease, or this long, too late was paused, or its whole machine was."""

KEEP_OVER_S = 60.0
"""The time for which the records of a run that is over stay in the store once no node of it is left."""

IDLE_S = 60.0
"""The pause between checks of a run that has no live node and is not over."""

LEAST_WAIT_S = 0.001
"""For which hints are waited for at least: a time that is over by a rounding error must not make the driver spin."""


@dataclass(eq=False, repr=False)
class RunDriver:
    """Coordinates one run, in a store that this coordinator alone writes plans to."""

    run_id: str
    """The run's name."""
    records: CoordinatorRecords
    """Of the run, in the store."""
    history_store: RunHistoryStore
    """The run histories on this machine's disk."""
    wait_for_hints: Callable[[float], Awaitable[Collection[str]]]
    """Waits until records changed, or until this time, for :data:`LEAST_WAIT_S` at least: the incarnations whose
    records did."""
    clock: Callable[[], float]
    """Seconds of the coordinator's own clock."""
    log: BoundLogger
    """The agent's log."""
    _: KW_ONLY
    store_born_s: float = -math.inf
    """See :class:`~elastic_agent.protocol.coordinator.Coordinator`."""
    keep_over_s: float = KEEP_OVER_S
    """How long the records of a run that is over, or never began, stay when no node is left."""
    idle_s: float = IDLE_S
    """How often a run without live nodes is checked."""

    def __post_init__(self) -> None:
        self.needed = True
        """A live node still depends on the store for this run."""
        self.over = False
        """The run has its outcome, and every live node knows it."""
        self.winding_up = False
        """The run has its outcome, or is about to, and its records are still there."""
        now_s = self.clock()
        self._coordinator = Coordinator(now_s)
        self._decide_s = self._full_read_s = self._lease_read_s = now_s
        """When to decide again, to read all records, and to read the leases."""
        self._unused_since_s = math.inf
        """Since when the run is over, or never began, and no node of it is alive."""
        self._on_time_s = now_s
        """When this was last known to be where it should be."""
        self._reason = ""
        self._save_fails = False

    @property
    def plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._coordinator.plan

    # -- the life of a run ----------------------------------------------------------------------

    async def coordinate(self) -> None:
        """Coordinate until no node has used the run for a while, and its records are removed."""
        await self._begin()
        hints: Collection[str] = ()
        while True:
            await self._turn(hints)
            if self.clock() < self._unused_since_s + self.keep_over_s:
                hints = await self._wait(self._next_turn_s if self.needed else self._next_idle_turn_s)
            elif await self._remove_unused():
                return
            else:
                hints = ()

    async def coordinate_until_over(self) -> None:
        """Coordinate until every live node knows the run's outcome, and remove its records."""
        await self._begin()
        await self._turn(())
        while not self.over:
            hints = await self._wait(self._next_turn_s)
            await self._turn(hints)
        await self.records.remove_run(self._settled_history)
        self.winding_up = False

    async def _begin(self) -> None:
        """Read the state of the run from the store and the disk."""
        plan = await self.records.read_plan()
        history = await self.history_store.load(self.run_id)
        # After the answers: a notice in the plan has its time from here on.
        self._coordinator = Coordinator(self.clock(), plan, history, self.store_born_s)

    async def _wait(self, until_s: float) -> Collection[str]:
        hints = await self.wait_for_hints(until_s)
        self._on_time_s = min(self.clock(), until_s)
        return hints

    @property
    def _next_turn_s(self) -> float:
        return min(self._decide_s, self._full_read_s, self._lease_read_s)

    @property
    def _next_idle_turn_s(self) -> float:
        """The same when no node is left: nothing is to be expected but a hint, or that the run's time is over."""
        removal_s = self._unused_since_s + self.keep_over_s
        return min(self._decide_s, removal_s, self.clock() + self.idle_s)

    async def _turn(self, hints: Collection[str]) -> None:
        """Read what may have changed, and act until there is nothing to do."""
        now_s = self.clock()
        if now_s >= self._full_read_s:
            await self._read_all()
        else:
            if hints:
                await self._read(hints)
            if now_s >= self._lease_read_s:
                await self._read_leases()
        decision = await self._act()
        self._decide_s = decision.wake_s
        self.over = decision.done
        self.winding_up = self.plan is not None and self.plan.is_terminal
        self.needed = self._coordinator.has_live_members and not decision.done
        unused = not self._coordinator.has_live_members and (decision.done or self.plan is None)
        self._unused_since_s = min(self._unused_since_s, now_s) if unused else math.inf

    async def _remove_unused(self) -> bool:
        """Remove the run's records, unless a node has registered meanwhile: its records are then read at once."""
        await self._read(None)
        if not self._coordinator.has_live_members:
            await self.records.remove_run(self._settled_history)
            return True
        self._unused_since_s = math.inf
        self._full_read_s = self.clock()
        return False

    @property
    def _settled_history(self) -> Plan | None:
        return msgspec.structs.replace(self.plan, settled=True) if self.plan is not None else None

    # -- reading --------------------------------------------------------------------------------

    async def _read_all(self) -> None:
        now_s = self.clock()
        await self._read(None)
        self._full_read_s = now_s + self._ttl_s
        self._lease_read_s = self._next_lease_read_s(now_s)

    async def _read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Read these incarnations' records again, or all of them (None)."""
        snapshot = await self.records.read(incarnations)
        now_s = self.clock()  # after the answer: what it holds was written before
        for key, member in snapshot.members.items():
            lease = snapshot.leases.get(key)
            if lease is not None:
                self._coordinator.observe(member, lease, now_s, snapshot.written_s.get(key))
        return snapshot

    async def _read_leases(self) -> None:
        started_s = self.clock()
        sightings = self._coordinator.ledger.sightings
        leases = await self.records.read_leases(tuple(sightings))
        now_s = self.clock()  # after the answer, too
        for key, lease in leases.items():
            if key in sightings:
                self._coordinator.observe(sightings[key].member, lease, now_s)
        self._lease_read_s = self._next_lease_read_s(started_s)

    def _next_lease_read_s(self, now_s: float) -> float:
        """Return when the next renewal should be there to be seen; a while from now if one is overdue."""
        ttl_s = self._ttl_s
        interval_s = ttl_s * (1 / RENEWALS_PER_LEASE - READ_EARLY)
        due = [
            node.renewed_s + interval_s for node in self._coordinator.ledger.sightings.values() if node.alive
        ]
        share = min(len(due) / MANY_NODES, 1.0) / LEASE_READS_OF_MANY
        return max(now_s + ttl_s * max(share, 1 / LEASE_READS_PER_TTL), min(due, default=now_s + ttl_s))

    @property
    def _ttl_s(self) -> float:
        return self.plan.policy.lease_ttl_s if self.plan is not None else 1.0

    # -- acting ---------------------------------------------------------------------------------

    async def _act(self) -> Decision:
        """Decide and carry out, again and again, until the decision is to wait."""
        while True:
            await self._allow_for_own_pause()
            decision = self._coordinator.decide(self.clock())
            if decision.plan is not None and self.plan is None:
                # A node that has just registered may run a world that no other node knows.
                await self._read_all()
                decision = self._coordinator.decide(self.clock())
            if decision.revoke:
                # The hint to a node's newest record may have been lost.
                await self._read(decision.revoke)
                decision = self._coordinator.decide(self.clock())
            await self._report(decision)
            progress = await self._revoke(decision.revoke)
            if decision.plan is not None:
                await self._publish(decision.plan)
                progress = True
            for incarnation in decision.forget:
                await self.records.forget(incarnation)
                self._coordinator.forgotten(incarnation)
            if not progress:
                if decision.done and self._settled_history is not None:
                    await self._save(self._settled_history)
                return decision

    async def _allow_for_own_pause(self) -> None:
        """Count neither a pause of this process nor what was read before it against any node."""
        late_s = self.clock() - self._on_time_s
        if late_s > min(self._ttl_s * PAUSE_LEASES, PAUSE_S):
            self.log.info("the coordinator was paused", for_s=round(late_s, 3))
            await self._read_all()
            self._coordinator.stood_still(self.clock(), late_s)
        self._on_time_s = self.clock()

    async def _report(self, decision: Decision) -> None:
        if decision.reason != self._reason:
            self._reason = decision.reason
            self.log.debug("coordinator", decision=decision.reason)
            waiting = Waiting(decision.reason, decision.lacks_nodes, decision.joined)
            await self.records.write_status(waiting_text(waiting))

    async def _revoke(self, incarnations: Mapping[str, str]) -> bool:
        """End these leases, unless they were renewed meanwhile; whether any has ended."""
        progress = False
        for incarnation, reason in incarnations.items():
            lease = self._coordinator.ledger.sightings[incarnation].lease
            if await self.records.revoke(lease, reason):
                self._coordinator.revoked(incarnation)
                progress = True
            elif incarnation not in (await self._read([incarnation])).leases:
                self._coordinator.revoked(incarnation, self.clock())
                progress = True
        return progress

    async def _publish(self, plan: Plan) -> None:
        if plan.generation > 0:
            await self._save(plan)  # before any node can read it
        self.winding_up |= plan.is_terminal  # before our own agent can read it, and end
        await self.records.publish(plan)
        self._coordinator.published(plan, self.clock())

    async def _save(self, history: Plan) -> None:
        """Write the run history to disk, for a new store; if that fails, training continues."""
        try:
            await self.history_store.save(self.run_id, history)
        except OSError as error:
            if not self._save_fails:
                self._save_fails = True
                self.log.error(
                    "cannot write the state directory; the run continues, but if this machine loses the "
                    "store and all agents with it, generations may repeat and the restart budget starts "
                    "over",
                    error=with_remedy(error),
                )
        else:
            if self._save_fails:
                self._save_fails = False
                self.log.info("the state directory is writable again")
