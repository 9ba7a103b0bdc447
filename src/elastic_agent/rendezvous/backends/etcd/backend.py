"""The etcd rendezvous backend: dialling etcd's members, and electing one agent as the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_agent.protocol import RevisionTimes, Seat
from elastic_agent.rendezvous.backends import BackendOptions, RendezvousBackend
from elastic_agent.transport import (
    NodeRecords,
    NotAStoreError,
    Obstacle,
    ReportRecords,
    Secret,
    TransportError,
    UnreachableError,
    WrongKeyError,
    how_to_reach,
)
from elastic_agent.transport.etcd import (
    CALL_TIMEOUT_S,
    EtcdClient,
    EtcdTable,
    KeptLease,
    root_of,
    store_id,
)
from elastic_agent.values import Endpoint, EtcdAccess

from .election import Election

RESIGN_S = 1.0
"""For how long an agent that ends waits for etcd, which is to let another one take over at once."""

TIMEOUT_LEASES = 0.25
"""A member that hangs must not cost a lease: after this part of one it is given up, or after a second."""


@dataclass(eq=False, repr=False)
class Members:
    """The members of an etcd cluster, of which one that answers is used."""

    endpoint: Endpoint
    """All members."""
    access: EtcdAccess
    """Prefix, certificates and user."""
    timeout_s: float = CALL_TIMEOUT_S
    """After so long without an answer a member is given up for the next one."""
    secret: Secret | None = None
    """Connects with certificates made from it, in place of those of ``access``."""

    def __post_init__(self) -> None:
        self.root = root_of(self.access.prefix)
        """Of the keys of all runs."""
        self._members = self.endpoint.members
        self._times = RevisionTimes()
        self.preferred = 0
        """By number, the one that answered last, or is to be tried first: everything of this process goes there."""

    async def dial(self) -> EtcdClient:
        """Return a connection to a member that answers, which knows this etcd's name.

        Raises:
            UnreachableError: none answers; the message gives the reason for each.
            WrongKeyError: all have another secret, or have one and this agent has none, or the reverse.
            NotAStoreError: none will, after any number of retries.
        """
        problems: list[TransportError] = []
        first = self.preferred
        for offset in range(len(self._members)):
            number = (first + offset) % len(self._members)
            try:
                found = await self._dial_one(number)
            except TransportError as error:
                problems.append(error)
            else:
                self.preferred = number
                return found
        reasons = "; ".join(dict.fromkeys(str(problem) for problem in problems))
        if all(isinstance(problem, WrongKeyError) for problem in problems):
            raise problems[0]  # the members have one secret
        if all(isinstance(problem, NotAStoreError) for problem in problems):
            raise NotAStoreError(reasons)
        obstacles = {problem.obstacle for problem in problems if not isinstance(problem, NotAStoreError)}
        raise UnreachableError(reasons, obstacles.pop() if len(obstacles) == 1 else Obstacle.OTHER)

    async def _dial_one(self, number: int) -> EtcdClient:
        client = await EtcdClient.dial(self._members[number], self.access, self.timeout_s, self.secret)
        try:
            client.store, client.times = await store_id(client, self.root), self._times
        except BaseException:
            client.close()
            raise
        return client

    def suspect(self, client: EtcdClient) -> None:
        """Begin the next dial with another member: this connection was given up."""
        if self._members[self.preferred] == client.endpoint:
            self.preferred = (self.preferred + 1) % len(self._members)


class EtcdBackend(RendezvousBackend):
    """One run in an etcd that others may use as well."""

    def __init__(self, options: BackendOptions, access: EtcdAccess) -> None:
        """Prepare; connects to nothing yet."""
        super().__init__(options)
        lease_ttl_s = options.lease_ttl_s
        timeout_s = min(CALL_TIMEOUT_S, lease_ttl_s * TIMEOUT_LEASES)
        self._members = Members(options.endpoint, access, timeout_s, self.secret)
        self._lease_ttl_s = lease_ttl_s
        self._kept = KeptLease.of_node(lease_ttl_s)
        self._kept_reports = KeptLease.of_node(lease_ttl_s)
        """Another one, as reports are written by a task of their own."""
        self._election: Election | None = None
        self._taking_part: asyncio.Task[None] | None = None

    async def _agree_on(self, fingerprint: str, known: str | None) -> str:
        """Raise an error: in etcd, which is shared, every run has a name (the settings enforce it)."""
        raise NotAStoreError("a run in etcd requires a run id; give --rdzv-id, the same on every node")

    async def release(self) -> None:
        """Do nothing: no name was agreed."""

    async def connect(self) -> NodeRecords:
        """Return a connection to one member; this agent takes part in the election from the first one on."""
        client = await self._members.dial()
        table = EtcdTable(
            client,
            self._members.root,
            lease=self._kept,
            on_close=lambda: self._members.suspect(client),
        )
        try:
            records = await NodeRecords.open(table, self.run_id, on_renewal=self._mark)
        except BaseException:
            table.close()
            raise
        if self._election is None:
            self._election = Election(
                self.run_id,
                self._members.root,
                self._members.dial,
                self.history_store,
                self._lease_ttl_s,
                on_resigned=self._poke,
            )
            self._taking_part = asyncio.create_task(self._election.live())
        return records

    async def connect_reports(self) -> ReportRecords:
        """Return a connection to one member."""
        client = await self._members.dial()
        return ReportRecords(EtcdTable(client, self._members.root, lease=self._kept_reports), self.run_id)

    def how_to_reach(self, obstacle: Obstacle, had_answered: bool, seats: Sequence[Seat]) -> str:
        """Return how to reach etcd, which no node hosts; see :class:`RendezvousBackend`."""
        members = self._endpoint.members
        hosts = ", ".join(member.host for member in members)
        return how_to_reach(obstacle, hosts, members[0].port, "etcd", had_answered=had_answered)

    def _mark(self) -> None:
        """Write a mark, if this agent coordinates, by which others can date the renewal of its lease."""
        if self._election is not None:
            self._election.mark()

    @property
    def busy_with(self) -> list[str]:
        """The run, while this agent coordinates it and not every node knows its outcome."""
        election = self._election
        return [self.run_id] if election is not None and election.winding_up else []

    async def leave(self) -> None:
        """Resign as the coordinator, and close; see :class:`RendezvousBackend`."""
        if self._taking_part is not None:
            self._taking_part.cancel()
            await asyncio.wait([self._taking_part], timeout=RESIGN_S)
        self.close()

    def close(self) -> None:
        """Take no part in the election any more."""
        if self._taking_part is not None:
            self._taking_part.cancel()
