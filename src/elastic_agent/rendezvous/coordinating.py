"""Drives the coordinators of all runs of a store, in a thread of the process that hosts it.

The thread sleeps in a blocking wait on the store's inbox. Items there are only hints that a record changed;
all records are read again every lease period, so a lost hint costs time, never correctness.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from elastic_agent.logs import get_logger
from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.differences import differences
from elastic_agent.protocol.leases import RENEWALS_PER_LEASE
from elastic_agent.protocol.records import History, Member, Plan
from elastic_agent.protocol.situation import Decision
from elastic_agent.transport.base import CoordinatorLink, Snapshot, StoreLostError

from .memory import RunMemory

LEASE_READS_PER_TTL, LEASE_READS_OF_MANY = 50, 10
"""How often the leases are looked at, at most, of a node or two and of many: a renewal, and so the loss of a node, is
noticed that part of a lease late at most."""

MANY_NODES = 50

READ_EARLY = 1 / 500
"""Of a lease: how much sooner than the last one a renewal is looked for, so that it is noticed less and less late. When
it is not there yet, it is looked for again like one that is overdue."""

PAUSE_LEASES, PAUSE_S = 1 / 3, 1.0
"""A coordinator that comes this much of a lease, or this long, too late was paused, or its whole machine was."""

KEEP_OVER_S = 60.0
"""How long the records of a run that is over stay in the store after nobody of it is left."""

IDLE_S = 60.0
"""How often runs are looked at of which nobody is left, and which are not over."""

RUNS_READ_EVERY_S = 2.0
"""How often it is looked whether runs have come of which no hint told."""

MAX_RUNS = 1000
"""How many runs of a store are coordinated at a time."""

LOOKS_PER_TURN = 64
"""At how many runs that are not coordinated it is looked in a turn: names alone do not hold up those that are."""

RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
"""How long a run is left alone after an internal error with it."""


class Inbox(Protocol):
    """Where nodes leave hints."""

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Hints as (run id, incarnation); empty at the time-out."""

    def runs(self) -> Collection[str]:
        """Every run that ever registered here and was not struck off."""

    def strike(self, run_id: str) -> None:
        """Take a removed run off that list."""


class HostLink(CoordinatorLink, Protocol):
    """A coordinator's link to a run in a store that is for many runs."""

    def has_begun(self) -> bool:
        """Whether there is more of the run than its name."""

    def remove_run(self) -> bool:
        """Remove everything of a run that nobody needs any more; False if somebody new has come."""


class RunDriver:
    """One run: carries the coordinator's decisions out on the store."""

    def __init__(
        self,
        run_id: str,
        link: CoordinatorLink,
        memory: RunMemory,
        now_s: float,
        before_verdict: Callable[[], None] = lambda: None,
        store_born_s: float = -math.inf,
    ) -> None:
        """Take up a run.

        Args:
            run_id: its name.
            link: to the store.
            memory: the disk of this machine.
            now_s: the time.
            before_verdict: is called before anybody can read that the run is over.
            store_born_s: see :class:`~elastic_agent.protocol.coordinator.Coordinator`.
        """
        self.run_id = run_id
        self._before_verdict = before_verdict
        self.needed = True
        """Whether anybody still depends on the store for this run."""
        self.over = False
        """Whether the run has its verdict and everybody alive knows."""
        self.unused_since_s = math.inf
        """Since when the run is over, or never began, and nobody of it is alive."""
        self.wake_s = now_s
        self._link = link
        self._memory = memory
        self._log = get_logger().bind(run=run_id)
        self._coordinator = Coordinator(now_s, link.read_plan(), memory.load(run_id), store_born_s)
        self._full_read_s = self._lease_read_s = now_s
        self._on_time_s = now_s
        """When this was last known to be where it should be."""
        self._reported: set[str] = set()
        self._compared: set[str] = set()
        self._model: Member | None = None
        """The node whose rules the run follows: the first that came."""
        self._reason = ""
        self._forgetful = False
        """The state directory cannot be written."""

    @property
    def plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._coordinator.plan

    @property
    def winding_up(self) -> bool:
        """Whether the run has its verdict, but not everybody alive knows."""
        plan = self._coordinator.plan
        return plan is not None and plan.is_terminal and not self.over

    def refresh(self, incarnations: Collection[str] | None) -> Snapshot:
        """Read these incarnations' records again, or all of them (None); what was read."""
        snapshot = self._link.read(incarnations)
        now_s = time.monotonic()  # after the answer: what it holds was written before
        for complaint in snapshot.rejected:
            if complaint not in self._reported and len(self._reported) < 1000:
                self._reported.add(complaint)
                self._log.warning("ignored a bad record in the store", what=complaint)
        for key, member in snapshot.members.items():
            lease = snapshot.leases.get(key)
            if lease is not None:
                self._coordinator.observe(member, lease, now_s, snapshot.written_s.get(key))
                self._compare(member)
        return snapshot

    def _compare(self, member: Member) -> None:
        """Say once what a node would run, or was told, otherwise than the first one."""
        if member.incarnation in self._compared:
            return
        self._compared.add(member.incarnation)
        if self._model is None:
            self._model = member
        for difference in differences(self._model, member):
            if difference not in self._reported:
                self._reported.add(difference)
                self._log.warning(difference)

    @property
    def _ttl_s(self) -> float:
        return self._coordinator.plan.policy.lease_ttl_s if self._coordinator.plan is not None else 1.0

    def turn(self, hints: Collection[str], now_s: float) -> None:
        """Look at what changed and act until there is nothing to do."""
        self._on_time_s = (
            min(now_s, self.wake_s) if self.needed else now_s
        )  # others are not turned by the clock
        if now_s >= self._full_read_s:
            self._read_all(now_s)
        else:
            if hints:
                self.refresh(hints)
            if now_s >= self._lease_read_s:
                self._read_leases()
                self._lease_read_s = self._next_lease_read_s(now_s)
        decision = self._act()
        self.wake_s = min(decision.wake_s, self._full_read_s, self._lease_read_s)
        self.over = decision.done
        here = self._coordinator.anybody_here
        self.needed = here and not decision.done
        unused = not here and (decision.done or self._coordinator.plan is None)
        self.unused_since_s = min(self.unused_since_s, now_s) if unused else math.inf

    def still_unused(self) -> bool:
        """Whether, read anew, the run is as unused as it was."""
        self.refresh(None)
        if self._coordinator.anybody_here:
            self.unused_since_s = math.inf
            self.wake_s = time.monotonic()
        return not self._coordinator.anybody_here

    def _read_all(self, now_s: float) -> None:
        self.refresh(None)
        self._full_read_s = now_s + self._ttl_s
        self._lease_read_s = self._next_lease_read_s(now_s)

    def _next_lease_read_s(self, now_s: float) -> float:
        """When the next renewal should be there to be seen; a while from now if one is overdue."""
        ttl_s = self._ttl_s
        interval_s = ttl_s * (1 / RENEWALS_PER_LEASE - READ_EARLY)
        due = [one.renewed_s + interval_s for one in self._coordinator.ledger.sightings.values() if one.alive]
        share = min(len(due) / MANY_NODES, 1.0) / LEASE_READS_OF_MANY
        return max(now_s + ttl_s * max(share, 1 / LEASE_READS_PER_TTL), min(due, default=now_s + ttl_s))

    def _excuse_own_pause(self) -> None:
        """If this thread stood still: judge nobody by that time, nor by what was read before."""
        now_s = time.monotonic()
        late_s = now_s - self._on_time_s
        if late_s > min(self._ttl_s * PAUSE_LEASES, PAUSE_S):
            self._log.info("the coordinator stood still", for_s=round(late_s, 3))
            self._read_all(now_s)
            now_s = time.monotonic()
            self._coordinator.stood_still(now_s, late_s)
        self._on_time_s = now_s

    def _read_leases(self) -> None:
        sightings = self._coordinator.ledger.sightings
        leases = self._link.read_leases()
        now_s = time.monotonic()
        for key, lease in leases.items():
            if key in sightings:
                self._coordinator.observe(sightings[key].member, lease, now_s)

    def _act(self) -> Decision:
        """Decide and carry out, again and again, until the decision is to wait."""
        while True:
            self._excuse_own_pause()
            decision = self._coordinator.decide(time.monotonic())
            if decision.plan is not None and self._coordinator.plan is None:
                self._read_all(time.monotonic())  # who came in the last moment may run what nobody else knows
                decision = self._coordinator.decide(time.monotonic())
            self._say(decision)
            progress = self._condemn(decision.condemn)
            if decision.plan is not None and self._publish(decision.plan):
                progress = True
            for incarnation in decision.forget:
                self._link.forget(incarnation)
                self._coordinator.forgotten(incarnation)
            if not progress:
                if decision.done and self._coordinator.plan is not None:
                    self._remember(self._coordinator.plan.history(settled=True))
                return decision

    def _say(self, decision: Decision) -> None:
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._log.debug("coordinator", decision=decision.reason)
            self._link.write_status(decision.reason)

    def _condemn(self, incarnations: Mapping[str, str]) -> bool:
        progress = False
        for incarnation, why in incarnations.items():
            lease = self._coordinator.ledger.sightings[incarnation].lease
            if self._link.condemn(lease, why) or incarnation not in self.refresh([incarnation]).leases:
                self._coordinator.condemned(incarnation)
                progress = True
        return progress

    def _publish(self, plan: Plan) -> bool:
        """Whether there is a newer plan now: this one, or somebody else's."""
        before = self._coordinator.plan
        if plan.generation > 0:
            self._remember(plan.history())  # before anybody can read it
        if plan.is_terminal:
            self._before_verdict()
        if self._link.publish(plan):
            self._coordinator.published(plan, time.monotonic())
        elif (newest := self._link.read_plan()) is not None and newest != before:
            self._log.warning(
                f"plan version {newest.version} in the store was not written by this coordinator; going above it"
            )
            self._coordinator.intruded(newest, time.monotonic())
        return self._coordinator.plan is not before

    def _remember(self, history: History) -> None:
        """Keep on disk what a new store would have to know; training goes on where that cannot be done."""
        try:
            self._memory.save(self.run_id, history)
        except OSError as error:
            if not self._forgetful:
                self._forgetful = True
                self._log.error(
                    "cannot write the state directory; the run goes on, but should this machine lose the store "
                    "and all agents with it, generations may repeat and the restart budget is forgotten",
                    error=str(error),
                )
        else:
            if self._forgetful:
                self._forgetful = False
                self._log.info("the state directory can be written again")


class CoordinatorThread(threading.Thread):
    """Turns every run's driver when a hint or a moment comes. Stops when the store is closed."""

    def __init__(
        self,
        inbox: Inbox,
        open_link: Callable[[str], HostLink],
        memory: RunMemory,
        on_change: Callable[[], None] = lambda: None,
        *,
        on_plan: Callable[[str, Plan], None] = lambda run_id, plan: None,
        on_turn: Callable[[], None] = lambda: None,
        keep_over_s: float = KEEP_OVER_S,
        idle_s: float = IDLE_S,
    ) -> None:
        """Prepare; ``start()`` begins.

        Args:
            inbox: where nodes leave hints.
            open_link: opens the coordinator's link for a run id.
            memory: the disk of this machine.
            on_change: called (in this thread) whenever ``busy_with`` changed, and at the end.
            on_plan: told (in this thread) of the newest plan of each run, when it is another one.
            on_turn: called (in this thread) at each turn, so that somebody may see that it turns.
            keep_over_s: how long a run that is over, and of which nobody is left, stays in the store.
            idle_s: it turns at least this often.
        """
        super().__init__(name="elastic-coordinator", daemon=True)
        self._inbox = inbox
        self._runs_read_s = -math.inf
        self._hinted: dict[str, None] = {}
        """Runs that are not coordinated and of which a hint told, in order."""
        self._listed: dict[str, None] = {}
        """Those that are only on the store's list, in order."""
        self._open_link = open_link
        self._memory = memory
        self._on_change = on_change
        self._on_plan = on_plan
        self._on_turn = on_turn
        self._keep_over_s = keep_over_s
        self._idle_s = idle_s
        self._drivers: dict[str, _Driven] = {}
        self._resting: dict[str, _Rest] = {}
        """Runs with which something went wrong, and when to take them up anew."""
        self._too_many: dict[str, None] = {}
        """Runs that wait until one of those that are coordinated is over."""
        self._stopping = threading.Event()
        self._log = get_logger()
        self.failed = False
        """Whether it ended although nobody stopped it: the store must be given up."""
        self.busy_with: list[str] = []
        """Runs that still depend on the store."""

    def stop(self) -> None:
        """Have the thread end at its next turn."""
        self._stopping.set()

    def run(self) -> None:
        """Until stopped, or until the store is gone."""
        try:
            self._serve()
        except StoreLostError as error:
            if not self._stopping.is_set():
                self._log.error("the coordinator lost its own store", error=str(error))
        except Exception:
            self._log.exception("internal error of the coordinator; the store is given up")
        self.failed = not self._stopping.is_set()
        self.busy_with = []
        self._on_change()

    def _serve(self) -> None:
        hints: list[tuple[str, str]] = []
        while not self._stopping.is_set():
            self._turn(hints)
            self._on_turn()
            now_s = time.monotonic()
            drivers = [one.driver for one in self._drivers.values()]
            moments = [one.wake_s for one in drivers if one.needed]
            moments += [one.unused_since_s + self._keep_over_s for one in drivers]
            moments += [rest.until_s for rest in self._resting.values()]
            if self._hinted or self._listed:
                moments.append(now_s if self._hinted else now_s + RUNS_READ_EVERY_S / 10)
            hints = self._inbox.wait(max(0.001, min([*moments, now_s + self._idle_s]) - now_s))

    def _turn(self, hints: list[tuple[str, str]]) -> None:
        now_s = time.monotonic()
        by_run: dict[str, set[str]] = {run_id: set() for run_id in (*self._drivers, *self._resting)}
        for run_id, incarnation in hints:
            if run_id in by_run:
                by_run[run_id].add(incarnation)
            else:
                self._hinted.setdefault(run_id)
        if now_s >= self._runs_read_s:  # who registers leaves a hint, which may be lost
            self._listed.update(dict.fromkeys(self._inbox.runs()))
            self._runs_read_s = now_s + RUNS_READ_EVERY_S
        for run_id, incarnations in by_run.items():
            self._turn_run(run_id, incarnations)
        for run_id in self._next_to_look_at():
            self._turn_run(run_id, ())
        busy = sorted(
            {run_id for run_id, one in self._drivers.items() if one.driver.needed} | {*self._resting}
        )
        if busy != self.busy_with:
            self.busy_with = busy
            self._on_change()

    def _next_to_look_at(self) -> list[str]:
        """The next runs that are not coordinated, of which some may be only names."""
        found: list[str] = []
        for queue in (self._hinted, self._listed):
            while queue and len(found) < LOOKS_PER_TURN:
                run_id = next(iter(queue))
                del queue[run_id]
                if run_id not in self._drivers and run_id not in self._resting and run_id not in found:
                    found.append(run_id)
        return found

    def _turn_run(self, run_id: str, incarnations: Collection[str]) -> None:
        """One run's turn, if it is due. What goes wrong with one run is not to end the others."""
        now_s = time.monotonic()
        rest = self._resting.get(run_id, _Rest())
        if now_s < rest.until_s:
            return
        try:
            driven = self._drivers.get(run_id) or self._take_up(run_id, now_s)
            if driven is not None:
                if incarnations or driven.driver.wake_s <= now_s:
                    driven.driver.turn(incarnations, now_s)
                    self._tell(driven)
                if now_s >= driven.driver.unused_since_s + self._keep_over_s:
                    self._remove(run_id, driven)
            self._resting.pop(run_id, None)
        except Exception as error:
            if self._stopping.is_set():
                return
            self._drivers.pop(run_id, None)  # whoever takes it up begins with what the store says
            rest = self._resting[run_id] = rest.longer(now_s)
            trace = (
                None if isinstance(error, StoreLostError) else error
            )  # whether it is lost, the inbox tells
            self._log.error(
                f"something went wrong while coordinating; taken up anew in {rest.pause_s:g} s",
                run=run_id,
                error=str(error),
                exc_info=trace,
            )

    def _take_up(self, run_id: str, now_s: float) -> _Driven | None:
        """Coordinate a run from now on, if it is more than a name."""
        link = self._open_link(run_id)
        if not link.has_begun():
            return None
        if len(self._drivers) >= MAX_RUNS:
            if not self._too_many:
                self._log.error(
                    f"this store coordinates {MAX_RUNS} runs, which is the most; others wait until one of them is over",
                    run=run_id,
                )
            self._too_many.setdefault(run_id)
            return None
        driven = self._drivers[run_id] = _Driven(RunDriver(run_id, link, self._memory, now_s), link)
        return driven

    def _tell(self, driven: _Driven) -> None:
        plan = driven.driver.plan
        if plan is not None and plan is not driven.told:
            driven.told = plan
            self._on_plan(driven.driver.run_id, plan)

    def _remove(self, run_id: str, driven: _Driven) -> None:
        """Remove what the store has of a run, unless somebody came meanwhile."""
        if not driven.driver.still_unused():
            return
        if driven.link.remove_run():
            self._inbox.strike(run_id)
            del self._drivers[run_id]
            self._hinted |= self._too_many
            self._too_many.clear()
            self._log.debug("removed the records of a run that is over", run=run_id)
        else:  # who came has left a hint
            driven.driver.unused_since_s = math.inf
            driven.driver.wake_s = time.monotonic()


@dataclass
class _Driven:
    """A run that is looked after."""

    driver: RunDriver
    link: HostLink
    told: Plan | None = None
    """The newest plan that was told of."""


@dataclass(frozen=True)
class _Rest:
    """A run that is left alone for a while."""

    until_s: float = -math.inf
    pause_s: float = 0.0

    def longer(self, now_s: float) -> _Rest:
        """The rest after yet another failure."""
        pause_s = min(max(2 * self.pause_s, RETRY_MIN_S), RETRY_MAX_S)
        return _Rest(now_s + pause_s, pause_s)
