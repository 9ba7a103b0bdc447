"""An etcd as the run's store: no process of a node, with records that go by themselves and an office of coordinator.

What differs from :class:`~.store.Store`: requests of one connection may overtake each other, and a lost one
loses nothing but itself; every answer names the newest revision; what an incarnation wrote goes when nothing was
heard of it for long; ``decree`` is the transaction that compares the leader key. etcd's clock (:attr:`Etcd.now_s`)
stands still while etcd does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .kernel import Inbox, Routine
from .network import Connection
from .store import Answer, Store

if TYPE_CHECKING:
    from .election import SimulatedElection
    from .machine import Machine

LEADER_LEASES = 0.6
KEPT_LEASES, LEAST_KEPT_S = 4.0, 20.0
"""As in ``transport/etcd/links.py``."""

TICKS_PER_OFFICE = 6
DEPOSED = "deposed"
ANOTHER_LIFE = "another life"


@dataclass
class LeaderKey:
    """The leader key."""

    holder: str
    since: int
    """Its creation: no two terms share one."""
    ends_s: float
    """By etcd's clock, unless kept alive."""


class Etcd(Store):
    """One life of an etcd's data."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cluster = self.checker.cluster
        self.now_s = 0.0
        self._forgotten = self.cluster.endpoint.may_forget
        """Its coordinators have to make do with what their disks and the nodes say of the run."""
        self.leader_key: LeaderKey | None = None
        self.leader_key_s = LEADER_LEASES * self.cluster.policy.lease_ttl_s
        self.kept_s = max(LEAST_KEPT_S, KEPT_LEASES * self.cluster.policy.lease_ttl_s)
        self.down = False
        """What is asked now is lost."""
        self._kept: dict[str, float] = {}
        """Incarnation → when its etcd lease ends."""
        self.ended: bytes | None = None
        """How the last run of this name ended, whose records were removed."""
        self._terms = 0
        self.revision = 1
        """Of the newest write."""
        self._leader_watchers: list[SimulatedElection] = []
        self._candidates: list[Answer] = []
        self._listeners: list[tuple[Inbox, Machine]] = []
        self.process.spawn(self._tick())

    def serve(self, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Carry out one request."""
        if self.down or self.cluster.over:  # what comes after the run waits until all are started again
            return
        if method == "await_no_leader":
            self._await_no_leader(args[0], answer)
            return
        super().serve(method, args, lambda value: answer((self.revision, value)))

    def connect(self, machine: Machine) -> Connection:
        return EtcdConnection(self.network, machine, self)

    def fail(self) -> None:
        """Give no answers for a while; every stream breaks."""
        self.down = True
        self.break_streams()

    def break_streams(self) -> None:
        """Clients that wait for an answer or for news are told that the connection broke, if the network lets it."""
        for connection in self.connections:
            connection.reset()
        self.connections.clear()

    def _tick(self) -> Routine:
        tick_s = self.leader_key_s / TICKS_PER_OFFICE
        while True:
            yield tick_s
            if not self.down:
                self.now_s += tick_s
                self._let_go()

    def _let_go(self) -> None:
        if self.leader_key is not None and self.now_s >= self.leader_key.ends_s:
            self.vacate("ran out")
        for incarnation in [one for one, ends_s in self._kept.items() if self.now_s >= ends_s]:
            self.cluster.story("etcd", "the records of {} go by themselves", incarnation)
            self._remove(incarnation)

    def _remove(self, incarnation: str) -> None:
        for kept in (self._kept, self.members, self.leases, self.written_in):
            kept.pop(incarnation, None)

    # -- the nodes' records ---------------------------------------------------------------------

    def register_after(
        self, life: str, incarnation: str, expected: bytes | None, lease: bytes, member: bytes
    ) -> bool | str:
        """Write both records if the run's life is still this one, and the lease as it was read."""
        if self.life != life:
            return ANOTHER_LIFE
        if not self.claim(incarnation, expected, lease):
            return False
        self._number(incarnation)
        self.members[incarnation] = member
        self.hint(incarnation)
        self._keep(incarnation)
        return True

    def write(self, incarnation: str, expected: bytes | None, member: bytes) -> bytes | None:
        """As in every store; what is written of a forgotten incarnation goes unnoticed, its lease tells."""
        if incarnation not in self.leases:
            return member
        found = super().write(incarnation, expected, member)
        self._keep(incarnation)
        return found

    def renew(self, incarnation: str, expected: bytes, renewed: bytes) -> bool:
        if incarnation not in self.leases:
            return False
        self._keep(incarnation)
        before = self.leases[incarnation]
        done = super().renew(incarnation, expected, renewed)
        if self.leases[incarnation] != before:
            self._number(incarnation)
        return done

    def revoke(self, incarnation: str, expected: bytes, revoked: bytes) -> bool:
        before = self.leases.get(incarnation)
        done = super().revoke(incarnation, expected, revoked)
        if self.leases.get(incarnation) != before:
            self._number(incarnation)
        return done

    def _number(self, incarnation: str) -> None:
        """Its lease was written just now."""
        self.revision += 1
        self.written_in[incarnation] = self.revision

    def _keep(self, incarnation: str) -> None:
        """Its etcd lease is kept alive now and then, not with every request."""
        if self._kept.get(incarnation, 0.0) - self.now_s < 0.75 * self.kept_s:
            self._kept[incarnation] = self.now_s + self.kept_s

    def range_leases(self) -> dict[str, tuple[bytes, int]]:
        return {name: (lease, self.written_in.get(name, 0)) for name, lease in self.leases.items()}

    def range_members(self) -> dict[str, bytes]:
        return dict(self.members)

    # -- news -----------------------------------------------------------------------------------

    def listen(self, inbox: Inbox, machine: Machine) -> None:
        self._listeners.append((inbox, machine))

    def unlisten(self, inbox: Inbox) -> None:
        self._listeners = [one for one in self._listeners if one[0] is not inbox]

    def hint(self, incarnation: str) -> None:
        """News of a watch: a gap in it is closed by the next reading alone."""
        network, kernel = self.network, self.process.kernel
        for inbox, machine in self._listeners:
            lost = kernel.random.random() < self.hint_loss
            if not lost and machine.name not in network.cut | network.deaf:
                kernel.after(network.delay_s(machine.name, "answers"), inbox.put, incarnation)

    def set_plan(self, data: bytes) -> None:
        random = self.process.kernel.random
        self.revision += 1
        self._waits = [one for one in self._waits if random.random() >= self.hint_loss]
        super().set_plan(data)

    def run_life(self) -> str:
        is_new = self.life is None
        life = super().run_life()
        if is_new:
            self._answer_candidates()
        return life

    def _await_no_leader(self, patience_s: float, answer: Answer) -> None:
        """Answer with the run's life when it has one and no leader, or with None after a while."""
        if self.leader_key is None and self.life is not None:
            answer((self.revision, self.life))
            return
        self._candidates.append(answer)

        def still_held() -> None:
            if answer in self._candidates and not self.down:
                self._candidates.remove(answer)
                answer((self.revision, None))

        self.process.kernel.after(patience_s, self.process.do, still_held)

    # -- the office -----------------------------------------------------------------------------

    def campaign_for(self, holder: str, machine: Machine, life: str) -> int | None:
        """Create the leader key unless there is one or the run has another life; what marks the term."""
        if self.leader_key is not None or self.life != life:
            return None
        self._terms += 1
        self.revision += 1
        self.leader_key = LeaderKey(holder, self._terms, self.now_s + self.leader_key_s)
        self.cluster.story("etcd", "{} is elected (term {})", holder, self._terms)
        newest, kept = self.checker.newest_history, machine.disk
        if self.plan is None and newest is not None and not self._forgotten and self.ended is None:
            is_newer = kept is not None and kept.rank > newest.rank
            machine.disk = kept if is_newer else newest  # an assumption, see the package's docstring
        return self._terms

    def read_ended(self) -> bytes | None:
        return self.ended

    def age_s(self) -> float:
        """How long ago its data were lost; the first one of a run was set up long before."""
        return self.now_s if self.cluster.endpoint.lives > 1 else float("inf")

    def watch_leader(self, candidate: SimulatedElection) -> None:
        """Tell it of every mark in the leader key, if the network lets it."""
        if candidate not in self._leader_watchers:
            self._leader_watchers.append(candidate)

    def mark(self) -> bool:
        """The leader key is written anew by its holder."""
        self.revision += 1
        network, kernel = self.network, self.process.kernel
        self._leader_watchers = [one for one in self._leader_watchers if one.agent.process.alive]
        for candidate in self._leader_watchers:
            name = candidate.agent.machine.name
            lost = kernel.random.random() < self.hint_loss
            if not lost and name not in network.cut | network.deaf:
                told = (candidate.saw, self.store_id, self.revision)
                kernel.after(network.delay_s(name, "answers"), candidate.agent.process.do, *told)
        return True

    def keep_office(self, since: int) -> bool:
        """Keep the leader key alive; False if it is gone."""
        if self.leader_key is None or self.leader_key.since != since:
            return False
        self.leader_key.ends_s = self.now_s + self.leader_key_s
        return True

    def resign(self, since: int) -> bool:
        """Give the leader key back."""
        if self.leader_key is not None and self.leader_key.since == since:
            self.vacate("was given back")
        return True

    def vacate(self, why: str) -> None:
        """The leader key goes."""
        if self.leader_key is None:
            return
        self.cluster.story("etcd", "the office of {} {}", self.leader_key.holder, why)
        self.leader_key = None
        self._answer_candidates()

    def _answer_candidates(self) -> None:
        candidates, self._candidates = self._candidates, []
        for answer in candidates:
            if self.process.kernel.random.random() >= self.hint_loss:
                answer((self.revision, self.life))

    def decree(self, since: int, method: str, args: tuple[Any, ...]) -> Any:
        """A write of the coordinator, if it is in office still."""
        is_leader = self.leader_key is not None and self.leader_key.since == since
        if not is_leader and "former leader writes" not in self.quirks:
            return DEPOSED
        before = (self.plan, dict(self.leases), dict(self.members))
        done = getattr(self, method)(*args)
        if not is_leader:
            self.checker.require(
                before == (self.plan, self.leases, self.members),
                "a deposed coordinator writes nothing",
                f"{method} of term {since}",
            )
        return done

    def forget(self, incarnation: str) -> bool:
        self._graves.add(incarnation)
        self._remove(incarnation)
        return True

    def replace_run(self, ended: bytes) -> None:
        """Leave nothing of the run behind but how it ended."""
        self.ended, self.leader_key = ended, None
        self._kept.clear()
        self.remove_all()
        self.cluster.over = True


class EtcdConnection(Connection):
    """One client's connection: gRPC, each request by itself."""

    store: Etcd
    saw: Callable[[int], None] = staticmethod(lambda revision: None)
    """Told of the revision in every answer."""

    def _answered(self, value: Any) -> Any:
        revision, answer = value
        self.saw(revision)
        return answer

    def abort(self) -> None:
        """Wait for nothing any more."""
        if self._waiting is not None:
            self._waiting.put(None)
        self.close()

    def _carry(self, action: Callable[..., None], args: tuple[Any, ...], *, is_answer: bool) -> None:
        network, name = self.network, self.machine.name
        random = network.kernel.random
        if network.loss and random.random() < network.loss:
            return
        if name in network.cut or (is_answer and name in network.deaf):
            network.held.setdefault(name, []).append((action, args))
            return
        delay_s = network.delay_s(name, "answers" if is_answer else "requests")
        if network.stray and random.random() < network.stray:
            delay_s += 2.0 * self.store.cluster.policy.lease_ttl_s * random.random()
        network.kernel.after(delay_s, action, *args)
