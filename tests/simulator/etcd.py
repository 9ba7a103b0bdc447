"""An etcd as the run's store: no process of a node, with records that go by themselves and an office of coordinator.

What differs from :class:`~.store.Store`: requests of one connection may overtake each other, and a lost one
loses nothing but itself; writes are numbered, and every answer names the newest revision; what a node process wrote
goes when nothing was heard of it for long; ``decree`` is the transaction that compares the leader key; changes are
watched. etcd's clock (:attr:`Etcd.now_s`) stands still while etcd does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.leases import RevisionTimes
from elastic_agent.transport.etcd import NotLeaderError
from elastic_agent.transport.keys import GONE, LifeKeys

from .kernel import Inbox, Routine
from .network import Connection
from .store import KEYS, Answer, SimulatedTable, Store, ask_to_wait

if TYPE_CHECKING:
    from .election import SimulatedElection
    from .machine import Machine

LEADER_LEASES = 0.6
KEPT_LEASES, LEAST_KEPT_S = 4.0, 20.0
"""As in ``transport/etcd``."""

TICKS_PER_OFFICE = 6
DEPOSED = "deposed"


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
        """Node process → when its etcd lease ends."""
        self._hangs_on: dict[str, str] = {}
        """Key → the node process on whose etcd lease it hangs."""
        self._writer: str | None = None
        """The node process whose request is carried out."""
        self._terms = 0
        self.revision = 1
        """Of the newest write."""
        self._written_in: dict[str, int] = {}
        self._leader_watchers: list[SimulatedElection] = []
        self._candidates: list[Answer] = []
        self._listeners: list[tuple[Inbox, Machine]] = []
        self.process.spawn(self._tick())

    def serve(self, connection: Connection, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Carry out one request."""
        assert isinstance(connection, EtcdConnection)
        if self.down or (self.cluster.over and not connection.is_leaders):
            return  # what comes after the run waits until all are started again
        if method == "await_no_leader":
            self._await_no_leader(args[0], answer)
            return
        super().serve(connection, method, args, lambda value: answer((self.revision, value)))

    def connect(self, machine: Machine) -> EtcdConnection:
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
        for process in [process for process, ends_s in self._kept.items() if self.now_s >= ends_s]:
            del self._kept[process]
            gone = [key for key, owner in self._hangs_on.items() if owner == process]
            self.cluster.story("etcd", "what {} wrote goes by itself: {}", process, ", ".join(gone))
            self.delete(*gone)

    # -- requests -------------------------------------------------------------------------------

    def read(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the values with their revisions."""
        return {key: (value, self._written_in[key]) for key, value in super().read(keys).items()}

    def range(self, *folders: str) -> dict[str, Any]:
        return self.read(self.keys(*folders))

    def delete_all(self, keys: Collection[str], folders: Collection[str]) -> None:
        """Remove keys, and what lies in folders, at once."""
        self.delete(*keys, *(self.keys(*folders) if folders else ()))

    def of_node(self, process: str, method: str, args: tuple[Any, ...]) -> Any:
        """A write whose records hang on the etcd lease of this process, which is kept alive now and then."""
        if self._kept.get(process, 0.0) - self.now_s < 0.75 * self.kept_s:
            self._kept[process] = self.now_s + self.kept_s
        self._writer = process
        try:
            return getattr(self, method)(*args)
        finally:
            self._writer = None

    def decree(self, since: int, method: str, args: tuple[Any, ...]) -> Any:
        """A write of the coordinator, if it is in office still."""
        is_leader = self.leader_key is not None and self.leader_key.since == since
        return getattr(self, method)(*args) if is_leader else DEPOSED

    def _set(self, key: str, value: bytes) -> None:
        self.revision += 1
        self._written_in[key] = self.revision
        if value == GONE:
            self._hangs_on.pop(key, None)
        elif self._writer is not None and key != KEYS.life:
            self._hangs_on[key] = self._writer
        random = self.process.kernel.random
        self._waits[key] = [
            answer for answer in self._waits.get(key, ()) if random.random() >= self.hint_loss
        ]
        super()._set(key, value)

    def _remove(self, key: str) -> None:
        self.revision += 1
        self._hangs_on.pop(key, None)
        if key == KEYS.life and key in self.values:
            self.cluster.over = True
        super()._remove(key)

    # -- news -----------------------------------------------------------------------------------

    def listen(self, inbox: Inbox, machine: Machine) -> None:
        self._listeners.append((inbox, machine))

    def unlisten(self, inbox: Inbox) -> None:
        self._listeners = [listener for listener in self._listeners if listener[0] is not inbox]

    def _wrote(self, keys: LifeKeys, key: str, value: bytes) -> None:
        super()._wrote(keys, key, value)
        if key.startswith(keys.members):
            self.hint(key.removeprefix(keys.members))

    def hint(self, incarnation: str) -> None:
        """News of a watch: a gap in it is closed by the next reading alone."""
        network, kernel = self.network, self.process.kernel
        for inbox, machine in self._listeners:
            lost = kernel.random.random() < self.hint_loss
            if not lost and machine.name not in network.cut | network.deaf:
                kernel.after(network.delay_s(machine.name, "answers"), inbox.put, incarnation)

    def _wait(self, key: str, *args: Any) -> None:
        """Answer when the key has been written after a revision; that may get lost like all news."""
        since, answer = args
        if self._written_in.get(key, 0) > since:
            answer(True)
        else:
            self._waits.setdefault(key, []).append(answer)

    def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        begins = key == KEYS.life and key not in self.values
        stored = super().swap(key, expected, desired)
        if begins:
            self._answer_candidates()
        return stored

    def _await_no_leader(self, patience_s: float, answer: Answer) -> None:
        """Answer with the life of the run's records if they have one and no leader, or with None after a while."""
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
        is_first = self.plan is None and KEYS.ended not in self.values
        if is_first and newest is not None and not self._forgotten:
            is_newer = kept is not None and kept.rank > newest.rank
            machine.disk = kept if is_newer else newest  # an assumption, see the package's docstring
        return self._terms

    def age_s(self) -> float:
        """Return how long ago its data were lost; the first one of a run was set up long before."""
        return self.now_s if self.cluster.endpoint.lives > 1 else float("inf")

    def watch_leader(self, candidate: SimulatedElection) -> None:
        """Tell it of every mark in the leader key, if the network lets it."""
        if candidate not in self._leader_watchers:
            self._leader_watchers.append(candidate)

    def mark(self) -> None:
        """The leader key is written anew by its holder."""
        self.revision += 1
        network, kernel = self.network, self.process.kernel
        self._leader_watchers = [watcher for watcher in self._leader_watchers if watcher.agent.process.alive]
        for candidate in self._leader_watchers:
            name = candidate.agent.machine.name
            lost = kernel.random.random() < self.hint_loss
            if not lost and name not in network.cut | network.deaf:
                told = (candidate.saw, self.store_id, self.revision)
                kernel.after(network.delay_s(name, "answers"), candidate.agent.process.do, *told)

    def keep_office(self, since: int) -> bool:
        """Keep the leader key alive; False if it is gone."""
        if self.leader_key is None or self.leader_key.since != since:
            return False
        self.leader_key.ends_s = self.now_s + self.leader_key_s
        return True

    def resign(self, since: int) -> None:
        """Give the leader key back."""
        if self.leader_key is not None and self.leader_key.since == since:
            self.vacate("was given back")

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
                life = self.life if self.leader_key is None else None
                answer((self.revision, life))


class EtcdConnection(Connection):
    """One client's connection: gRPC, each request by itself."""

    store: Etcd
    saw: Callable[[int], None] = staticmethod(lambda revision: None)
    """Told of the revision in every answer."""
    is_leaders = False
    """Whether the coordinator uses it."""
    revision = 0
    """In the last answer."""

    def _answered(self, value: Any) -> Any:
        self.revision, answer = value
        self.saw(self.revision)
        return answer

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


class EtcdTable(SimulatedTable):
    """A connection to etcd as a :class:`Table`, of a node or of the coordinator in one term."""

    is_shared = True
    connection: EtcdConnection

    def __init__(
        self,
        connection: EtcdConnection,
        timeout_s: float | None = None,
        *,
        writes: tuple[str, str | int],
        revisions: RevisionTimes,
    ) -> None:
        """Use a connection.

        Args:
            connection: becomes the table's.
            timeout_s: for how long each answer is waited for.
            writes: how etcd is to carry writes out: of which node process, or in which term.
            revisions: what this process knows of their times.
        """
        super().__init__(connection, timeout_s)
        self._writes = writes
        self._revisions = revisions
        self._written_in: dict[str, int] = {}
        """Of the keys that were read last."""
        self._read_at = 0
        """The revision as of which was read last."""

    async def _write(self, method: str, *args: Any) -> Any:
        how, by = self._writes
        answer = await self._ask(how, by, method, args)
        if answer == DEPOSED:
            raise NotLeaderError("another agent leads")
        return answer

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        return self._found(await self._ask("read", tuple(keys)))

    async def read_folders(self, *folders: str) -> dict[str, bytes]:
        return self._found(await self._ask("range", *folders))

    def _found(self, answer: dict[str, tuple[bytes, int]]) -> dict[str, bytes]:
        self._read_at = self.connection.revision
        self._written_in = {key: revision for key, (_, revision) in answer.items()}
        return {key: value for key, (value, _) in answer.items()}

    async def delete(self, keys: Collection[str], *folders: str) -> None:
        await self._write("delete_all", tuple(keys), folders)

    async def wait(self, key: str, timeout_s: float) -> bool:
        wait_s = self.connection.machine.real_s(timeout_s)
        return await ask_to_wait(self.connection, wait_s, key, self._read_at)

    async def hint(self, run_id: str, incarnation: str) -> None:
        """Do nothing: the coordinator watches the member records."""

    def written_by(self, key: str) -> float | None:
        return self._revisions.written_by(self.store_id, self._written_in[key])
