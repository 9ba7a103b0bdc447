"""A node's links to the run's store: the requests of ``transport/c10d/link.py`` and ``transport/etcd/link.py``, in
virtual time. What may be written over which lease is decided by the shipped :func:`lease_over`.

Their methods are those of ``NodeLink``, as sub-routines of the calling task.
"""

from __future__ import annotations

from typing import Any

from elastic_agent.protocol.codec import encode
from elastic_agent.protocol.records import Lease, Member, Plan
from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.record_reader import lease_in, lease_over

from .etcd import ANOTHER_LIFE
from .kernel import Routine
from .machine import Machine
from .network import Connection
from .store import readable


class Link:
    """Over c10d: every record by itself, by compare-and-set."""

    def __init__(self, connection: Connection, machine: Machine, life: str) -> None:
        self.connection = connection
        self._life = life
        self.store_id = f"{connection.store.store_id}.{life}"
        self.local_address = machine.name
        self._machine = machine
        self._written: dict[str, bytes] = {}
        """Each incarnation's member record as this connection knows it."""

    def close(self) -> None:
        """Let go of the connection."""
        self.connection.close()

    def register(self, member: Member, lease: Lease) -> Routine:
        """The lease first, never over one that was revoked, then the member record."""
        claimed = yield from self._claim(member, lease)
        if claimed is None:
            return None
        if not (yield from self._replace(member, self._written.get(member.incarnation))):
            return None
        if (yield from self._ask("enroll", member.incarnation)) != self._life:
            raise StoreLostError("the store has removed the earlier run of this name")
        return claimed

    def _claim(self, member: Member, lease: Lease) -> Routine:
        while True:
            stored = yield from self._ask("look_up", lease.incarnation)
            following = lease_over(stored, lease)
            if following is None:
                return None
            lease = following
            if (yield from self._write_lease(stored, lease, member)):
                return lease

    def _write_lease(self, stored: bytes | None, lease: Lease, member: Member) -> Routine:
        return (yield from self._ask("claim", lease.incarnation, stored, encode(lease)))

    def write(self, member: Member) -> Routine:
        """Replace the member record, if the incarnation is still known; a late write never undoes a newer one."""
        name = member.incarnation
        known = self._written.get(name)
        if known is None:
            known = yield from self._ask("read_member", name)
        if known is not None:
            yield from self._replace(member, known)

    def _replace(self, member: Member, known: bytes | None) -> Routine:
        name, data = member.incarnation, encode(member)
        while (stored := (yield from self._ask("write", name, known, data))) != data:
            if stored in (None, known):
                return False
            known = stored
        self._written[name] = data
        return True

    def renew(self, expected: Lease, renewed: Lease) -> Routine:
        """Compare-and-set the lease."""
        return (yield from self._ask("renew", expected.incarnation, encode(expected), encode(renewed)))

    def read_lease(self, incarnation: str) -> Routine:
        """The lease as it stands, or None."""
        return lease_in((yield from self._ask("look_up", incarnation)), incarnation)

    def read_plan(self) -> Routine:
        """The newest plan, or None before the first."""
        data = yield from self._ask("read_plan")
        return readable(Plan, data) if data is not None else None

    def next_plan(self, after_version: int, timeout_s: float) -> Routine:
        """Read the newest plan; wait for a newer one if it is not."""
        plan = yield from self.read_plan()
        if plan is not None and plan.version > after_version:
            return plan
        wait_s = self._machine.real_s(timeout_s)
        data = yield from self.connection.wait("next_plan", after_version, timeout_s=wait_s)
        return readable(Plan, data) if data is not None else None

    def _ask(self, method: str, *args: Any) -> Routine:
        return (yield from self.connection.call(method, *args))


class EtcdLink(Link):
    """Over etcd: a registration is one transaction."""

    def register(self, member: Member, lease: Lease) -> Routine:
        """Both records at once, unless the lease was revoked."""
        claimed = yield from self._claim(member, lease)
        if claimed is not None:
            self._written[member.incarnation] = encode(member)
        return claimed

    def _write_lease(self, stored: bytes | None, lease: Lease, member: Member) -> Routine:
        args = (self._life, lease.incarnation, stored, encode(lease), encode(member))
        written = yield from self._ask("register_after", *args)
        if written == ANOTHER_LIFE:
            raise StoreLostError("etcd has removed the records of the earlier run of this name")
        return written
