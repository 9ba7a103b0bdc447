"""Drives the coordinators of all runs of a store, in a thread of the process that hosts it.

The thread sleeps in a blocking wait on the store's inbox. Items there are only hints that a record changed;
all records are read again every lease period, so a lost hint costs time, never correctness.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from elastic_agent.logs import get_logger
from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.records import Plan
from elastic_agent.protocol.situation import Decision
from elastic_agent.transport.base import CoordinatorLink, StoreLostError

from .memory import RunMemory

LEASE_READS_PER_TTL = 10
"""How often the leases are looked at: a lost node is noticed at most a tenth of a lease late."""


class Inbox(Protocol):
    """Where nodes leave hints."""

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Hints as (run id, incarnation); empty at the time-out."""

    def runs(self) -> Collection[str]:
        """Every run that ever registered here."""


class RunDriver:
    """One run: carries the coordinator's decisions out on the store."""

    def __init__(self, run_id: str, link: CoordinatorLink, memory: RunMemory, now_s: float) -> None:
        self.run_id = run_id
        self.needed = True
        """Whether anybody still depends on the store for this run."""
        self.wake_s = now_s
        self._link = link
        self._memory = memory
        self._log = get_logger().bind(run=run_id)
        self._coordinator = Coordinator(now_s, link.read_plan(), memory.load(run_id))
        self._full_read_s = self._lease_read_s = now_s
        self._reported: set[str] = set()
        self._reason = ""

    def refresh(self, incarnations: Collection[str] | None) -> None:
        """Read these incarnations' records again, or all of them (None)."""
        snapshot = self._link.read(incarnations)
        now_s = time.monotonic()  # after the answer: what it holds was written before
        for complaint in snapshot.rejected:
            if complaint not in self._reported and len(self._reported) < 1000:
                self._reported.add(complaint)
                self._log.warning("ignored a bad record in the store", what=complaint)
        for key, member in snapshot.members.items():
            lease = snapshot.leases.get(key)
            if lease is not None:
                self._coordinator.observe(member, lease, now_s)

    def turn(self, hints: Collection[str], now_s: float) -> None:
        """Look at what changed and act until there is nothing to do."""
        ttl_s = self._coordinator.plan.policy.lease_ttl_s if self._coordinator.plan is not None else 1.0
        if now_s >= self._full_read_s:
            self.refresh(None)
            self._full_read_s = now_s + ttl_s
            self._lease_read_s = now_s + ttl_s / LEASE_READS_PER_TTL
        else:
            if hints:
                self.refresh(hints)
            if now_s >= self._lease_read_s:
                self._read_leases()
                self._lease_read_s = now_s + ttl_s / LEASE_READS_PER_TTL
        decision = self._act()
        self.wake_s = min(decision.wake_s, self._full_read_s, self._lease_read_s)
        self.needed = self._coordinator.anybody_here and not decision.done

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
            decision = self._coordinator.decide(time.monotonic())
            self._say(decision)
            progress = self._condemn(decision.condemn)
            if decision.plan is not None:
                self._publish(decision.plan)
                progress = True
            for incarnation in decision.forget:
                self._link.forget(incarnation)
                self._coordinator.forgotten(incarnation)
            if not progress:
                if decision.done and self._coordinator.plan is not None:
                    self._memory.save(self.run_id, self._coordinator.plan.history(settled=True))
                return decision

    def _say(self, decision: Decision) -> None:
        if decision.reason != self._reason:
            self._reason = decision.reason
            self._log.debug("coordinator", decision=decision.reason)
            self._link.write_status(decision.reason)

    def _condemn(self, incarnations: Collection[str]) -> bool:
        progress = False
        for incarnation in incarnations:
            lease = self._coordinator.ledger.sightings[incarnation].lease
            if self._link.condemn(lease):
                self._coordinator.condemned(incarnation)
                progress = True
            else:  # it was renewed in the meantime, or is gone: look again
                self.refresh([incarnation])
                stored = self._link.read_leases().get(incarnation)
                if stored is None:
                    self._coordinator.condemned(incarnation)
                    progress = True
        return progress

    def _publish(self, plan: Plan) -> None:
        if plan.generation > 0:
            self._memory.save(self.run_id, plan.history())  # before anybody can read it
        if self._link.publish(plan):
            self._coordinator.published(plan, time.monotonic())
            return
        newest = self._link.read_plan()  # somebody else was first: theirs counts
        if newest is not None:
            self._coordinator.adopt_plan(newest, time.monotonic())


class CoordinatorThread(threading.Thread):
    """Turns every run's driver when a hint or a moment comes. Stops when the store is closed."""

    def __init__(
        self,
        inbox: Inbox,
        open_link: Callable[[str], CoordinatorLink],
        memory: RunMemory,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; ``start()`` begins.

        Args:
            inbox: where nodes leave hints.
            open_link: opens the coordinator's link for a run id.
            memory: the disk of this machine.
            on_change: called (in this thread) whenever ``busy_with`` changed, and at the end.
        """
        super().__init__(name="elastic-coordinator", daemon=True)
        self._inbox = inbox
        self._open_link = open_link
        self._memory = memory
        self._on_change = on_change
        self._drivers: dict[str, RunDriver] = {}
        self._stop = threading.Event()
        self._log = get_logger()
        self.failed = False
        """Whether it ended although nobody stopped it: the store must be given up."""
        self.busy_with: list[str] = []
        """Runs that still depend on the store."""

    def stop(self) -> None:
        """Have the thread end at its next turn."""
        self._stop.set()

    def run(self) -> None:
        """Until stopped, or until the store is gone."""
        try:
            self._serve()
        except StoreLostError as error:
            if not self._stop.is_set():
                self._log.error("the coordinator lost its own store", error=str(error))
        except Exception:
            self._log.exception("internal error of the coordinator; the store is given up")
        self.failed = not self._stop.is_set()
        self.busy_with = []
        self._on_change()

    def _serve(self) -> None:
        hints: list[tuple[str, str]] = []
        while not self._stop.is_set():
            self._turn(hints)
            now_s = time.monotonic()
            next_s = min([one.wake_s for one in self._drivers.values() if one.needed], default=now_s + 60.0)
            hints = self._inbox.wait(max(0.001, next_s - now_s))

    def _turn(self, hints: list[tuple[str, str]]) -> None:
        now_s = time.monotonic()
        by_run: dict[str, set[str]] = {run_id: set() for run_id in self._inbox.runs()}
        for run_id, incarnation in hints:
            by_run.setdefault(run_id, set()).add(incarnation)
        for run_id, incarnations in by_run.items():
            driver = self._drivers.get(run_id)
            if driver is None:
                driver = RunDriver(run_id, self._open_link(run_id), self._memory, now_s)
                self._drivers[run_id] = driver
            if incarnations or driver.wake_s <= now_s:
                driver.turn(incarnations, now_s)
        busy = sorted(run_id for run_id, driver in self._drivers.items() if driver.needed)
        if busy != self.busy_with:
            self.busy_with = busy
            self._on_change()
