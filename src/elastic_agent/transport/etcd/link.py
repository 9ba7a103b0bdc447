"""A node's link to one run in etcd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from elastic_agent.protocol import Lease, Member, Plan, encode
from elastic_agent.transport.base import OtherVersionError, StoreLostError
from elastic_agent.transport.record_reader import GONE, ReportInvalid, lease_in, lease_over, log_invalid

from .client import (
    CompactedError,
    EtcdClient,
    LeaseGoneError,
    exists,
    get,
    has_value,
    put,
    was_written_at,
)
from .keys import MAX_STATUS_CHARS, RunKeys, found_in, run_life
from .plans import PlanReader
from .watch import Watch

T = TypeVar("T")

KEPT_LEASES = 4.0
"""After this many lease times without a keep-alive, etcd removes a node's records."""

LEAST_KEPT_S = 20.0


class KeptLeases:
    """The etcd leases that a node's records hang on; they outlive any one connection."""

    def __init__(self, lease_ttl_s: float) -> None:
        """``lease_ttl_s``: of the node's own lease, seconds."""
        self._ttl_s = math.ceil(max(LEAST_KEPT_S, KEPT_LEASES * lease_ttl_s))
        self._ids: dict[str, int] = {}
        self._renewed_s: dict[str, float] = {}

    def of(self, client: EtcdClient, incarnation: str) -> int:
        """The lease of this incarnation's records; kept alive now and then."""
        lease_id, now_s = self._ids.get(incarnation), time.monotonic()
        if lease_id is not None and now_s - self._renewed_s[incarnation] > self._ttl_s / 4:
            try:
                client.keep_alive(lease_id)
                self._renewed_s[incarnation] = now_s
            except LeaseGoneError:
                lease_id = None
        if lease_id is None:
            lease_id = self._ids[incarnation] = client.grant(self._ttl_s)
            self._renewed_s[incarnation] = now_s
        return lease_id

    def write(self, client: EtcdClient, incarnation: str, write: Callable[[int], T]) -> T:
        """Write keys that hang on this lease, whose id ``write`` gets; with a new one if it is gone.

        Raises:
            StoreLostError: the new one is gone as well.
        """
        for _ in range(2):
            lease_id = self.of(client, incarnation)
            try:
                return write(lease_id)
            except LeaseGoneError:
                self._ids.pop(incarnation, None)
        raise StoreLostError("etcd leases expire as fast as they are granted")


class EtcdLink:
    """A node's connection to one run (see ``NodeLink``)."""

    def __init__(
        self,
        client: EtcdClient,
        keys: RunKeys,
        store: str,
        kept: KeptLeases,
        report_invalid: ReportInvalid = log_invalid,
        let_go: Callable[[], None] = lambda: None,
        on_renewal: Callable[[], None] = lambda: None,
    ) -> None:
        """Use a connection.

        Args:
            client: closed with the link.
            keys: of the run.
            store: this etcd's name.
            kept: the etcd leases that records hang on.
            report_invalid: called with each invalid record.
            let_go: called when the link is closed.
            on_renewal: called when a lease was written.
        """
        self._client = client
        self._let_go = let_go
        self._on_renewal = on_renewal
        self._keys = keys
        self._kept = kept
        self._plans = PlanReader(client, keys.plan, report_invalid)
        self._watch: Watch | None = None
        self._written: dict[str, int] = {}
        """In which revision this incarnation's member record was written, as far as known."""
        self._life = run_life(client, keys)
        self._life_is_ours = has_value(keys.life, self._life)
        self.store_id = f"{store}.{self._life.decode('ascii', 'replace')}"
        """Name of this etcd's life, and of the run's in it."""
        self.local_address = client.local_address
        """This machine's address on the way to etcd."""

    def register(self, member: Member, lease: Lease) -> Lease | None:
        """Write both records at once, unless the lease was revoked.

        Raises:
            StoreLostError: also if an earlier run of this name was removed since this link was dialled; plan
                versions restart then, as in a new store.
        """
        name = lease.incarnation
        lease_key, member_key = self._keys.lease(name), self._keys.member(name)
        while True:
            stored = self._client.get(lease_key)
            following = lease_over(stored.value if stored is not None else None, lease)
            if following is None:
                return None
            lease = following
            done = self._transact(
                name,
                [
                    self._life_is_ours,
                    was_written_at(lease_key, stored.mod_revision if stored is not None else 0),
                ],
                {lease_key: encode(lease), member_key: encode(member)},
                [get(self._keys.life)],
            )
            if done.succeeded:
                self._written[name] = done.header.revision
                self._on_renewal()
                return lease
            self._check_life(found_in(done.responses[0]))

    def write(self, member: Member) -> None:
        """Replace the member record, if the incarnation is still known; a late write never undoes a newer one."""
        name, data, known = member.incarnation, encode(member), self._written.get(member.incarnation, -1)
        key, lease = self._keys.member(name), self._keys.lease(name)
        while True:
            conditions = [self._life_is_ours, was_written_at(key, known), exists(lease)]
            questions = [get(key), get(lease), get(self._keys.life)]
            done = self._transact(name, conditions, {key: data}, questions)
            if done.succeeded:
                self._written[name] = done.header.revision
                return
            found, found_lease, found_life = map(found_in, done.responses)
            if found_lease is None or (found is not None and found.value == GONE):
                return  # it was forgotten, as its lease shows
            self._check_life(found_life)
            known = self._written[name] = found.mod_revision if found is not None else 0

    def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Compare-and-set the lease.

        Raises:
            StoreLostError: also if the records of this run were removed. Others would begin the next run of its name,
                in which nothing of this link counts.
        """
        name, key = expected.incarnation, self._keys.lease(expected.incarnation)
        conditions = [self._life_is_ours, has_value(key, encode(expected))]
        questions = [get(key), get(self._keys.life)]
        done = self._transact(name, conditions, {key: encode(renewed)}, questions)
        if not done.succeeded:
            found, found_life = map(found_in, done.responses)
            if found is not None and lease_in(found.value, name) == expected:
                self._check_life(found_life)
            return False
        self._on_renewal()
        return True

    def _check_life(self, found: Any | None) -> None:
        """Raise StoreLostError if the run's records have another life than when this link was dialled."""
        if found is None or found.value != self._life:
            raise StoreLostError("etcd has removed the records of the earlier run of this name")

    def _transact(
        self, name: str, compare: list[Any], write: Mapping[bytes, bytes], otherwise: Sequence[Any] = ()
    ) -> Any:
        """A transaction that writes keys which hang on this incarnation's etcd lease."""

        def transact(lease_id: int) -> Any:
            puts = [put(key, value, lease_id) for key, value in write.items()]
            return self._client.transact(compare, puts, otherwise)

        return self._kept.write(self._client, name, transact)

    def read_lease(self, incarnation: str) -> Lease | None:
        """The lease as it stands, or None; also where something else was written over it."""
        found = self._client.get(self._keys.lease(incarnation))
        return lease_in(found.value if found is not None else None, incarnation)

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.read()

    def read_status(self) -> str:
        """What the coordinator waits for, in words."""
        found = self._client.get(self._keys.status)
        text = found.value.decode("utf-8", "replace") if found is not None else ""
        return "".join(char if char.isprintable() else " " for char in text[:MAX_STATUS_CHARS])

    def next_plan(self, after_version: int, timeout_s: float) -> Plan | None:
        """Wait for a newer plan, by a watch that stays open."""
        plan = self._plans.read()  # by a majority: a member that was cut off from it is found out here
        deadline_s = time.monotonic() + timeout_s
        while plan is None or plan.version <= after_version:
            if plan is None and self._plans.foreign:
                raise OtherVersionError(self._plans.foreign)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            if self._watch is None:
                self._watch = Watch(self._client, self._keys.plan, None, self._plans.next_revision)
            try:
                plan = self._plans.follow(self._watch.wait(left_s))
            except CompactedError:
                self._watch = None
                plan = self._plans.read()
        return plan

    def close(self) -> None:
        """Release the connection; ends calls in progress."""
        self._let_go()
        self._client.close()
