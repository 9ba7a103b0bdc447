"""Leadership of a run in etcd: the coordinator's link, and how an agent becomes the coordinator.

A node's lease is renewed and revoked by transactions on its record, as in a c10d store, and expires by the
coordinator's clock. The leases of etcd itself serve two purposes: the records of a run whose agents have all died
are removed by etcd, and the ``leader`` key is removed when the agent that holds it dies. Every write of the
coordinator is a transaction that compares that key, so a former leader writes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from typing import Any

from elastic_agent.logs import get_logger
from elastic_agent.protocol import History, Lease, Member, Plan, RecordError, decode, encode
from elastic_agent.transport.base import Snapshot, StoreLostError
from elastic_agent.transport.record_reader import GONE, RecordReader, lease_in, log_invalid

from .client import (
    MAX_OPERATIONS,
    CompactedError,
    EtcdClient,
    LeaseGoneError,
    delete,
    get,
    has_value,
    is_missing,
    prefix_end,
    put,
    was_created_at,
    was_written_at,
)
from .keys import AGE_KNOWN_S, MAX_STATUS_CHARS, NAME_WITH_AGE, RunKeys, found_in
from .plans import PlanReader, UnknownPlanError
from .watch import Watch

LEADER_LEASES = 0.6
"""The coordinator's key lasts this part of a lease: another agent is to take over within one."""

LEAST_LEADER_S = 2
"""No shorter etcd lease is granted with etcd's usual timers."""

GRAVE_S = 3600
"""How long no forgotten incarnation can be written again."""

ENDED_S = 30 * 24 * 3600
"""How long the generation of an ended run is kept in etcd, so that the next run of its name goes above it."""

_Pair = tuple[Any | None, Any | None]
"""A member record and a lease, each as etcd stores it (KeyValue)."""


class NotLeaderError(StoreLostError):
    """Another agent coordinates the run now."""


class Leadership:
    """One agent's time as coordinator of a run; a ``CoordinatorLink`` that ends when another agent leads.

    Every call raises :class:`NotLeaderError` when another agent coordinates, and ``StoreLostError``
    when etcd does not answer; either ends the term.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: RunKeys,
        lease_id: int,
        ttl_s: int,
        since: int,
        who: str,
        life: bytes,
    ) -> None:
        """``since``: the revision in which our leader key was written. See :func:`campaign_for`."""
        self.ttl_s = ttl_s
        """How long the leader key lives without :meth:`keep_alive`, seconds.

        Up to twice as long if etcd changes its own leader or restarts meanwhile: it renews every lease then.
        """
        self._client = client
        self._keys = keys
        self._lease_id = lease_id
        self._who = who
        self._is_leader = was_created_at(keys.leader, since)
        self._life = life
        self._life_is_ours = has_value(keys.life, life)
        self._since = since
        self._records = RecordReader(keys.shown)
        self._plans = PlanReader(client, keys.plan, log_invalid)
        self._next_revision = since
        self._watch: Watch | None = None
        self._lost = ""
        """Why leadership was lost; empty while this agent leads, as far as known."""
        self._resigned = False

    def keep_alive(self) -> bool:
        """Keep the leader key alive; False if it is gone."""
        try:
            self._client.keep_alive(self._lease_id)
        except LeaseGoneError:
            return False
        return True

    def write_mark(self) -> None:
        """Write the leader key again, which every agent of the run watches.

        So each of them can date everything that had been written before: above all the lease of the coordinator's
        own node, which may be lost together with it.
        """
        self._while_leading([], [put(self._keys.leader, self._who.encode(), self._lease_id)])

    def lose(self, reason: str) -> None:
        """Leadership is lost: end every call that waits for etcd over this connection (any thread)."""
        self._lost = reason
        self._client.close()

    def resign(self) -> None:
        """Resign, so that another agent takes over at once. Best effort; raises nothing."""
        if self._resigned:
            return
        self._resigned = True
        try:
            self._client.revoke(self._lease_id)
        except Exception as error:  # then the key goes with its lease
            get_logger().debug("the leader key was not released", error=str(error))
        self._client.close()

    # -- reading --------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> list[str]:
        """Incarnations whose member records changed since the last time; empty at the time-out.

        Raises:
            NotLeaderError: our etcd lease ran out, before or while we waited.
        """
        try:
            if self._watch is None:
                members = self._keys.members
                self._watch = Watch(self._client, members, prefix_end(members), self._next_revision)
            news = self._watch.wait(timeout_s)
        except StoreLostError:
            if self._lost:
                raise NotLeaderError(self._lost) from None
            raise
        except CompactedError:
            self._watch = None
            self._next_revision = int(self._client.range(self._keys.leader).header.revision) + 1
            return list(self.read(None).members)
        return list(dict.fromkeys(self._name(key, self._keys.members) for one in news for key in one.written))

    def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Records of these incarnations, or of all."""
        found = self._everything() if incarnations is None else self._some(incarnations)
        rejected: list[str] = []
        members: dict[str, Member] = {}
        for name, (record, _) in found.items():
            member = self._records.member(name, record.value, rejected) if record is not None else None
            if member is not None:
                members[name] = member
        stored = {name: lease for name, (_, lease) in found.items() if lease is not None}
        leases = self._records.leases({name: one.value for name, one in stored.items()}, rejected)
        written_s = {name: self._client.revisions.written_by(stored[name].mod_revision) for name in leases}
        known_s = {name: at_s for name, at_s in written_s.items() if at_s is not None}
        return Snapshot(members, leases, tuple(rejected), known_s)

    def _everything(self) -> dict[str, _Pair]:
        leases = self._range(self._keys.leases)
        members = self._range(self._keys.members)
        return {name: (members.get(name), leases.get(name)) for name in {**members, **leases}}

    def _some(self, incarnations: Iterable[str]) -> dict[str, _Pair]:
        names, found = list(incarnations), {}
        if 2 * len(names) > MAX_OPERATIONS:
            everything = self._everything()
            return {name: everything[name] for name in names if name in everything}
        wanted = [get(key) for name in names for key in (self._keys.member(name), self._keys.lease(name))]
        answers = [found_in(one) for one in self._client.transact([], wanted).responses] if wanted else []
        for position, name in enumerate(names):
            found[name] = (answers[2 * position], answers[2 * position + 1])
        return found

    def read_leases(self) -> Mapping[str, Lease]:
        """All leases."""
        stored = self._range(self._keys.leases)
        return self._records.leases({name: one.value for name, one in stored.items()}, None)

    def _range(self, prefix: bytes) -> dict[str, Any]:
        found = self._client.range(prefix, prefix_end(prefix))
        return {self._name(one.key, prefix): one for one in found.kvs}

    @staticmethod
    def _name(key: bytes, prefix: bytes) -> str:
        return key[len(prefix) :].decode("utf-8", "replace")

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first.

        Raises:
            UnknownPlanError: what is there is not a plan, so that the next one cannot be determined.
        """
        plan = self._plans.read()
        if self._plans.is_unknown:
            raise UnknownPlanError(self._keys.plan)
        return plan

    def read_ended(self) -> History | None:
        """The history of the last run of this name, whose records were removed."""
        found = self._client.get(self._keys.ended)
        if found is None:
            return None
        try:
            return decode(History, found.value)
        except RecordError as error:
            log_invalid(f"{self._keys.ended.decode()}: {error}")
            return None

    def store_age_s(self) -> float:
        """For how long this etcd has had its data at least; infinite if that is longer than any lease may last.

        Counted from when the first agent came after etcd was set up, or after it had lost its data.
        """
        found = self._client.get(self._keys.id)
        if found is None:  # lost this moment: who dials next begins the next life
            return 0.0
        named = NAME_WITH_AGE.fullmatch(found.value.decode("ascii", "replace"))
        left_s = self._client.left_s(int(named[1], 16)) if named is not None else -1
        return max(0.0, AGE_KNOWN_S - left_s - 1.0) if left_s >= 0 else math.inf  # etcd reports whole seconds

    # -- writing --------------------------------------------------------------------------------

    def publish(self, plan: Plan) -> bool:
        """Write the plan if it follows the newest; False if there is another one of that version."""
        has_read = False
        while True:
            before = self._plans.best
            if (before.version if before is not None else 0) + 1 != plan.version:
                if has_read:
                    return False
                self._plans.read()  # what is known may be old, or nothing
                has_read = True
                continue
            done = self._while_leading([self._plan_is_as_read], [put(self._keys.plan, encode(plan))])
            if done.succeeded:
                self._plans.wrote(plan, done.header.revision)
                return True
            self._plans.read()
            has_read = True

    @property
    def _plan_is_as_read(self) -> Any:
        return was_written_at(self._keys.plan, self._plans.revision)

    def write_status(self, text: str) -> None:
        """Write, in words, what is awaited; removed when leadership ends."""
        data = text[:MAX_STATUS_CHARS].encode("utf-8", "replace")
        self._while_leading([], [put(self._keys.status, data, self._lease_id)])

    def revoke(self, lease: Lease, why: str = "") -> bool:
        """Compare-and-set the lease to its revoked form."""
        key = self._keys.lease(lease.incarnation)
        stored = self._client.get(key)
        if stored is None or lease_in(stored.value, lease.incarnation) != lease:
            return False
        done = self._while_leading(
            [was_written_at(key, stored.mod_revision)], [put(key, encode(lease.revoke(why)), stored.lease)]
        )
        return bool(done.succeeded)

    def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records; for an hour they cannot be written again."""
        grave = self._client.grant(GRAVE_S)
        self._while_leading(
            [],
            [
                put(self._keys.lease(incarnation), GONE, grave),
                put(self._keys.member(incarnation), GONE, grave),
            ],
        )

    def remove_run(self, ended: History) -> None:
        """The run is over and all live agents know it: remove all but what the next run of its name needs."""
        key = self._keys.ended
        kept = self._client.grant(ENDED_S)
        # Nodes read the reports of the others now; each hangs on an etcd lease.
        reports, end = self._keys.reports, prefix_end(self._keys.root)
        spans = (self._keys.root, key), (key + b"\0", reports), (prefix_end(reports), end)
        self._while_leading([], [*(delete(*span) for span in spans), put(key, encode(ended), kept)])

    def _while_leading(self, compare: list[Any], then: list[Any]) -> Any:
        """The transaction's answer.

        Raises:
            NotLeaderError: another agent coordinates, or the run's records have another life; nothing was written.
                Also if leadership was found lost while the answer was awaited.
        """
        conditions = [self._is_leader, self._life_is_ours, *compare]
        try:
            done = self._client.transact(conditions, then, [get(self._keys.leader), get(self._keys.life)])
        except StoreLostError:
            if self._lost:
                raise NotLeaderError(self._lost) from None
            raise
        if not done.succeeded:
            leader, life = map(found_in, done.responses)
            if leader is None:
                raise NotLeaderError("the leader key no longer exists")
            if leader.create_revision != self._since:
                who = leader.value.decode("utf-8", "replace")
                raise NotLeaderError(f"{who} is now the coordinator of the run")
            if life is None or life.value != self._life:
                raise NotLeaderError("the records of the run were removed")
        return done


def await_no_leader(client: EtcdClient, keys: RunKeys, patience_s: float) -> bytes | None:
    """Wait until the run has nodes and no coordinator: the life of its records; None if that takes longer.

    A run whose records were removed has none until a node comes to the next one of its name.
    """
    life = client.range(keys.life)
    if not life.kvs:
        with contextlib.suppress(CompactedError):
            client.watch(keys.life, None, life.header.revision + 1, patience_s)
        return None
    found = client.range(keys.leader)
    if found.kvs and not _becomes_free(client, keys.leader, found.header.revision + 1, patience_s):
        return None
    return bytes(life.kvs[0].value)


def campaign_for(
    client: EtcdClient, keys: RunKeys, who: str, lease_ttl_s: float, life: bytes
) -> Leadership | None:
    """Become the run's coordinator, unless there is one; its key has to be kept alive then.

    Args:
        client: becomes the term's own if there is one.
        keys: of the run.
        who: a name for logs.
        lease_ttl_s: of the run's nodes, seconds; the leader key outlives its holder by less than that.
        life: of the run's records.
    """
    ttl_s = max(LEAST_LEADER_S, math.floor(lease_ttl_s * LEADER_LEASES))
    lease_id = client.grant(ttl_s)
    free = [has_value(keys.life, life), is_missing(keys.leader)]
    try:
        done = client.transact(free, [put(keys.leader, who.encode(), lease_id)])
        if not done.succeeded:
            client.revoke(lease_id)
            return None
    except LeaseGoneError:  # this process was paused for longer than the lease
        return None
    return Leadership(client, keys, lease_id, ttl_s, int(done.header.revision), who, life)


def _becomes_free(client: EtcdClient, leader: bytes, revision: int, timeout_s: float) -> bool:
    """Whether the leader key is removed within this time. Meanwhile its holder's marks date the writes of others."""
    with (
        contextlib.suppress(CompactedError),
        closing(client.follow(leader, None, revision, timeout_s)) as changes,
    ):
        if any(leader in news.deleted for news in changes):
            return True
    return client.get(leader) is None
