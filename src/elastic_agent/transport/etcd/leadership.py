"""Leadership of a run in etcd: how an agent becomes the coordinator, and for how long it writes the run's records.

A node's lease is renewed and revoked by transactions on its record, as in a c10d store, and expires by the
coordinator's clock. The leases of etcd itself serve two purposes: the records of a run whose agents have all died
are removed by etcd, and the ``leader`` key is removed when the agent that holds it dies. Every write of the
coordinator is a transaction that compares that key, so a former leader writes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from elastic_agent.logs import get_logger
from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.coordinator_records import CoordinatorRecords
from elastic_agent.transport.keys import LifeKeys, RunKeys, name_in

from .api import found_in, get, has_value, is_missing, prefix_end, put, was_created_at
from .client import AGE_KNOWN_S, NAME_WITH_AGE, CompactedError, EtcdClient, LeaseGoneError, News, id_key
from .table import EtcdTable, Watch

LEADER_LEASES = 0.6
"""The coordinator's key lasts this part of a lease: another agent is to take over within one."""

LEAST_LEADER_S = 2
"""No shorter etcd lease is granted with etcd's usual timers."""


class NotLeaderError(StoreLostError):
    """Another agent coordinates the run now."""


@dataclass(eq=False, repr=False)
class Leadership:
    """One agent's time as coordinator of a run; it ends when another agent leads.

    Every call raises :class:`NotLeaderError` when another agent coordinates, and ``StoreLostError``
    when etcd does not answer; either ends the term. See :func:`campaign_for`.
    """

    client: EtcdClient
    root: str
    keys: LifeKeys
    lease_id: int
    ttl_s: int
    """The time for which the leader key lives without :meth:`keep_alive`, seconds.

    Up to twice as long if etcd changes its own leader or restarts meanwhile: it renews every lease then.
    """
    since: int
    """The revision in which our leader key was written."""
    who: str

    def __post_init__(self) -> None:
        self._table = EtcdTable(self.client, self.root, transact=self._while_leading)
        self.records = CoordinatorRecords(self._table, self.keys)
        """Of the run; each write is under the condition that this agent leads."""
        self._leader = _bytes(self.root, self.keys.run.leader)
        self._next_revision = self.since
        self._watch: Watch | None = None

    async def keep_alive(self) -> bool:
        """Keep the leader key alive; False if it is gone."""
        try:
            await self.client.keep_alive(self.lease_id)
        except LeaseGoneError:
            return False
        return True

    async def write_mark(self) -> None:
        """Write the leader key again, which every agent of the run watches.

        So each of them can date everything that had been written before: above all the lease of the coordinator's
        own node, which may be lost together with it.
        """
        await self._while_leading([], [put(self._leader, self.who.encode(), self.lease_id)])

    async def resign(self) -> None:
        """Resign, so that another agent takes over at once. Best effort; raises nothing."""
        try:
            await self.client.revoke(self.lease_id)
        except Exception as error:  # then the key goes with its lease
            get_logger().debug("the leader key was not released", error=str(error))
        finally:
            self.client.close()

    async def wait(self, timeout_s: float) -> Sequence[str]:
        """Return incarnations whose member records changed since the last time; empty at the time-out."""
        folder = _bytes(self.root, self.keys.members)
        try:
            if self._watch is None:
                self._watch = Watch(self.client, folder, prefix_end(folder), self._next_revision)
            news = await self._watch.wait(timeout_s)
        except CompactedError:
            self._watch = None
            self._next_revision = int((await self.client.range(self._leader)).header.revision) + 1
            names = await self._table.keys(self.keys.members)
            return [key.removeprefix(self.keys.members) for key in names]
        keys = dict.fromkeys(key for change in news for key in change.written)
        return [key.removeprefix(folder).decode("utf-8", "replace") for key in keys]

    async def store_age_s(self) -> float:
        """Return for how long this etcd has had its data at least; infinite if that is longer than any lease may last.

        Counted from when the first agent came after etcd was set up, or after it had lost its data. A run whose id was
        drawn in this life of the data has no nodes from before it.
        """
        if await self.client.get(_bytes(self.root, self.keys.run.new)) is not None:
            return math.inf
        found = await self.client.get(id_key(self.root))
        if found is None:  # lost this moment: who dials next begins the next life
            return 0.0
        named = NAME_WITH_AGE.fullmatch(found.value.decode("ascii", "replace"))
        left_s = await self.client.left_s(int(named[1], 16)) if named is not None else -1
        return max(0.0, AGE_KNOWN_S - left_s - 1.0) if left_s >= 0 else math.inf  # etcd reports whole seconds

    async def _while_leading(
        self, compare: Sequence[Any], then: Sequence[Any], otherwise: Sequence[Any] = ()
    ) -> Any:
        """Return the transaction's answer.

        Raises:
            NotLeaderError: another agent coordinates; nothing was written.
        """
        is_leader = was_created_at(self._leader, self.since)
        done = await self.client.transact([is_leader, *compare], then, [*otherwise, get(self._leader)])
        if not done.succeeded:
            leader = found_in(done.responses[-1])
            if leader is None:
                raise NotLeaderError("the leader key no longer exists")
            if leader.create_revision != self.since:
                who = leader.value.decode("utf-8", "replace")
                raise NotLeaderError(f"{who} is now the coordinator of the run")
        return done


async def await_no_leader(client: EtcdClient, root: str, run: RunKeys, patience_s: float) -> str | None:
    """Wait until the run has nodes and no coordinator: the life of its records; None if that takes longer.

    A run whose records were removed has none until a node comes to the next one of its name.
    """
    life_key, leader = _bytes(root, run.life), _bytes(root, run.leader)
    stored = await client.range(life_key)
    life = name_in(stored.kvs[0].value) if stored.kvs else None
    if life is None:
        await _is_seen(client, life_key, stored.header.revision + 1, patience_s, lambda news: True)
        return None
    found = await client.range(leader)
    if found.kvs and not await _becomes_free(client, leader, found.header.revision + 1, patience_s):
        return None
    return life


async def campaign_for(
    client: EtcdClient, root: str, keys: LifeKeys, who: str, lease_ttl_s: float
) -> Leadership | None:
    """Become the run's coordinator, unless there is one; its key has to be kept alive then.

    Args:
        client: becomes the term's own if there is one.
        root: of all keys.
        keys: of this life of the run's records.
        who: a name for logs.
        lease_ttl_s: of the run's nodes, seconds; the leader key outlives its holder by less than that.
    """
    ttl_s = max(LEAST_LEADER_S, math.floor(lease_ttl_s * LEADER_LEASES))
    lease_id = await client.grant(ttl_s)
    life, leader = _bytes(root, keys.run.life), _bytes(root, keys.run.leader)
    free = [has_value(life, keys.life.encode()), is_missing(leader)]
    try:
        done = await client.transact(free, [put(leader, who.encode(), lease_id)])
        if not done.succeeded:
            await client.revoke(lease_id)
            return None
    except LeaseGoneError:  # this process was paused for longer than the lease
        return None
    return Leadership(client, root, keys, lease_id, ttl_s, int(done.header.revision), who)


async def _becomes_free(client: EtcdClient, leader: bytes, revision: int, timeout_s: float) -> bool:
    """Return whether the leader key is removed in this time. Its holder's marks date the writes of others."""
    return (
        await _is_seen(client, leader, revision, timeout_s, lambda news: leader in news.deleted)
        or await client.get(leader) is None
    )


async def _is_seen(
    client: EtcdClient, key: bytes, revision: int, timeout_s: float, is_wanted: Callable[[News], bool]
) -> bool:
    """Return whether a change of the key since ``revision`` is the wanted one; False at the time-out."""
    with contextlib.suppress(CompactedError, TimeoutError):
        async with asyncio.timeout(timeout_s), aclosing(client.follow(key, None, revision)) as changes:
            async for news in changes:
                if is_wanted(news):
                    return True
    return False


def _bytes(root: str, key: str) -> bytes:
    return f"{root}{key}".encode()
