"""The store, as a c10d store behaves: one request after the other, compare-and-set, a hint queue, waits.

It lives in a process and is gone with it. Everything in it is bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic_agent.protocol.codec import RecordError, decode
from elastic_agent.protocol.records import Lease, Member, Plan
from elastic_agent.transport.record_reader import GONE

from .kernel import Inbox, Process
from .network import Connection

if TYPE_CHECKING:
    from .checker import Checker
    from .machine import Machine
    from .network import Network

Answer = Callable[[Any], None]


class Stored(NamedTuple):
    """What is stored of an incarnation."""

    member: bytes
    lease: bytes
    written_in: int
    """The revision of the lease; 0 where writes are not numbered."""


class Store:
    """One life of the store of the run."""

    def __init__(
        self, store_id: str, machine: Machine, process: Process, network: Network, checker: Checker
    ) -> None:
        self.store_id = store_id
        self.machine = machine
        self.process = process
        self.network = network
        self.checker = checker
        self.members: dict[str, bytes] = {}
        self.leases: dict[str, bytes] = {}
        self.written_in: dict[str, int] = {}
        """Incarnation → the revision in which its lease was written, where writes are numbered."""
        self.life: str | None = None
        """Of the run's records; another one means that they were removed meanwhile."""
        self._lives = 0
        self.roster: set[str] = set()
        """Who has registered."""
        self.plan: bytes | None = None
        self.version = 0
        self.status = ""
        self.hints: list[Inbox] = []
        """Inboxes of the coordinators that listen (one, but for the time of a change)."""
        self.hint_loss = 0.0
        self.quirks = checker.cluster.quirks
        self.connections: list[Connection] = []
        self._waits: list[tuple[int, Answer]] = []
        self._graves: set[str] = set()
        process.when_killed.append(self._die)

    def _die(self) -> None:
        for connection in self.connections:
            connection.reset()

    def connect(self, machine: Machine) -> Connection:
        """A client's connection from this machine."""
        return Connection(self.network, machine, self)

    def listen(self, inbox: Inbox, machine: Machine) -> None:
        """Have hints put into this inbox."""
        self.hints.append(inbox)

    def unlisten(self, inbox: Inbox) -> None:
        """No more hints."""
        self.hints.remove(inbox)

    def serve(self, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Carry out one request."""
        if method == "next_plan":
            (after,) = args
            if self.version > after:
                answer(self.plan)
            else:
                self._waits.append((after, answer))
            return
        answer(getattr(self, method)(*args))

    # -- what nodes ask -------------------------------------------------------------------------

    def hello(self) -> str:
        return self.store_id

    def run_life(self) -> str:
        """The life of the run's records, which begins with the first node that asks."""
        if self.life is None:
            self._lives += 1
            self.life = f"life{self._lives}"
        return self.life

    def enroll(self, incarnation: str) -> str | None:
        """Put it on the roster; the life of the run's records."""
        self.roster.add(incarnation)
        return self.life

    def look_up(self, incarnation: str) -> bytes | None:
        """Its lease, or that it was forgotten."""
        return GONE if incarnation in self._graves else self.leases.get(incarnation)

    def claim(self, incarnation: str, expected: bytes | None, lease: bytes) -> bool:
        """Write the lease if it is as it was read."""
        if incarnation in self._graves or self.leases.get(incarnation) != expected:
            return False
        self.leases[incarnation] = lease
        self.checker.renewed(incarnation)
        return True

    def read_member(self, incarnation: str) -> bytes | None:
        return self.members.get(incarnation)

    def write(self, incarnation: str, expected: bytes | None, member: bytes) -> bytes | None:
        """Compare-and-set the member record and hint that it changed; the record as it then stands."""
        if self.members.get(incarnation) == expected and incarnation not in self._graves:
            self.members[incarnation] = member
            self.hint(incarnation)
        return self.members.get(incarnation)

    def hint(self, incarnation: str) -> None:
        """Tell the coordinator, late, twice or not at all."""
        random = self.process.kernel.random
        chance = random.random()
        if chance < self.hint_loss:
            return
        for inbox in self.hints:
            for _ in range(2 if chance > 0.98 else 1):
                self.process.kernel.after(random.random() * 0.002, inbox.put, incarnation)

    def renew(self, incarnation: str, expected: bytes, renewed: bytes) -> bool:
        """Compare-and-set a lease. As c10d's ``compare_set``, it cannot tell who wrote what was wanted."""
        if self.leases.get(incarnation) == expected or "renews revoked" in self.quirks:
            self.leases[incarnation] = renewed
            self.checker.renewed(incarnation)
        return self.leases.get(incarnation) == renewed

    def read_plan(self) -> bytes | None:
        return self.plan

    # -- what the coordinator asks --------------------------------------------------------------

    def read_records(self, incarnations: Collection[str] | None) -> dict[str, Stored]:
        """What is stored of these incarnations, or of all (None)."""
        names = list(self.members) if incarnations is None else incarnations
        return {
            name: Stored(
                self.members.get(name, GONE), self.leases.get(name, GONE), self.written_in.get(name, 0)
            )
            for name in names
        }

    def read_leases(self) -> dict[str, bytes]:
        return dict(self.leases)

    def write_status(self, text: str) -> None:
        self.status = text

    def publish(self, expected_version: int, plan: bytes) -> bool:
        """Write the plan if the newest has this version."""
        if self.version != expected_version and "blind publish" not in self.quirks:
            return False
        self.set_plan(plan)
        return True

    def set_plan(self, data: bytes) -> None:
        """Write the plan whatever is there."""
        plan = decode(Plan, data)
        before = decode(Plan, self.plan) if self.plan is not None else None
        self.plan = data
        self.version = plan.version
        self.checker.published(self, before, plan)
        waits, self._waits = self._waits, []
        for after, answer in waits:
            if self.version > after:
                answer(self.plan)
            else:
                self._waits.append((after, answer))

    def revoke(self, incarnation: str, expected: bytes, revoked: bytes) -> bool:
        if self.leases.get(incarnation) == expected:
            self.leases[incarnation] = revoked
            self.checker.revoked(self, decode(Lease, revoked))
        return self.leases.get(incarnation) == revoked

    def scribble(self, name: str, member: bytes, lease: bytes) -> None:
        """Another client writes this as records of an incarnation."""
        self.members[name], self.leases[name] = member, lease
        self.hint(name)

    def end_life(self) -> None:
        """The run's records are about to be removed: who registers now does that anew."""
        self.life = None

    def remove_run(self, known: Collection[str]) -> bool:
        """Remove every record of the run, unless a node has registered of which the coordinator does not know."""
        if not self.roster <= set(known):
            return False
        self.remove_all()
        return True

    def remove_all(self) -> None:
        """Leave no record of the run behind."""
        self.plan, self.version, self.life = None, 0, None
        for kept in (self.members, self.leases, self.written_in, self.roster, self._graves):
            kept.clear()
        self.checker.cluster.story("store", "the run is removed")

    def forget(self, incarnation: str) -> bool:
        self._graves.add(incarnation)
        self.members.pop(incarnation, None)
        self.leases.pop(incarnation, None)
        return True


def readable(kind: type[Any], data: bytes) -> Member | Lease | Plan | None:
    """The record, or None if it is none: reported and ignored, as the real transports do."""
    try:
        return decode(kind, data)  # type: ignore[no-any-return]
    except RecordError:
        return None
