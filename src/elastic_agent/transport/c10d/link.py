"""A node's link to one run in a c10d store."""

from __future__ import annotations

import secrets
import time

from elastic_agent.protocol import Lease, Member, Plan, encode
from elastic_agent.transport.base import OtherVersionError, StoreLostError
from elastic_agent.transport.certificates import Secret
from elastic_agent.transport.record_reader import GONE, ReportInvalid, lease_in, lease_over, log_invalid
from elastic_agent.values import Endpoint

from .connection import open_store
from .keys import MAX_STATUS_CHARS, ROOT, enlist, names_in, run_prefix
from .plans import PlanReader
from .store import StoreClient


def dial(endpoint: Endpoint, run_id: str, timeout_s: float, secret: Secret | None = None) -> C10dLink:
    """A node's link to a run at the endpoint; arguments and errors as for :func:`open_store`."""
    return C10dLink(*open_store(endpoint, timeout_s, secret), run_id)


class C10dLink:
    """A node's connection to the store of one run (see ``NodeLink``)."""

    def __init__(
        self,
        client: StoreClient,
        store_id: str,
        local_address: str,
        run_id: str,
        report_invalid: ReportInvalid = log_invalid,
    ) -> None:
        """Begin.

        Args:
            client: the connection.
            store_id: of the store.
            local_address: this machine's on the way to the store.
            run_id: the run.
            report_invalid: called with each invalid record in the store.
        """
        self.local_address = local_address
        """This machine's address on the way to the store."""
        self._run_id = run_id
        self._prefix = run_prefix(run_id)
        # First: should the run be removed meanwhile, :meth:`register` finds another life.
        self._life = client.exchange(f"{self._prefix}/life", b"", secrets.token_hex(4).encode())
        self.store_id = f"{store_id}.{self._life.decode('ascii', 'replace')}"
        """Random name of this life of the store, and of the run in it."""
        self._client = client
        self._plans = PlanReader(self._client, self._prefix, report_invalid)
        self._written: dict[str, bytes] = {}
        """Each incarnation's member record as this connection knows it."""

    def register(self, member: Member, lease: Lease) -> Lease | None:
        """Write the records first, then the roster: a reader of the roster finds the records of each name.

        Raises:
            StoreLostError: also if an earlier run of this name was removed since this link was dialled; plan
                versions restart then, as in a new store.
        """
        granted = self._claim(lease)
        if granted is None:
            return None
        name = member.incarnation
        if not self._replace(member, self._written.get(name, b"")):
            return None  # it was forgotten meanwhile
        if self._run_id not in names_in(self._client.peek(f"{ROOT}/runs") or b""):
            enlist(self._client, f"{ROOT}/runs", self._run_id)
        enlist(self._client, f"{self._prefix}/roster", name)
        self._hint(name)
        # The answer also shows that all that was sent before has arrived.
        if self._client.peek(f"{self._prefix}/life") != self._life:
            raise StoreLostError("the store has removed the earlier run of this name")
        return granted

    def _claim(self, lease: Lease) -> Lease | None:
        """The lease as written, see :func:`lease_over`."""
        key = f"{self._prefix}/l/{lease.incarnation}"
        while True:
            stored = self._client.peek(key)
            following = lease_over(stored, lease)
            if following is None:
                return None
            wanted = encode(lease := following)
            if self._client.exchange(key, stored or b"", wanted) == wanted:
                return lease

    def write(self, member: Member) -> None:
        """Replace the member record, if the incarnation is still known; a late write never undoes a newer one."""
        name = member.incarnation
        known = self._written.get(name)
        if known is None:  # an earlier connection registered it
            known = self._client.peek(f"{self._prefix}/m/{name}") or b""
        if known != GONE and self._replace(member, known):
            self._hint(name)

    def _replace(self, member: Member, known: bytes) -> bool:
        """Compare-and-set the member record, whatever else has been written since; False if it was forgotten.

        What sits in a connection that was given up can arrive any time later: by then it expects another record.
        """
        name, data = member.incarnation, encode(member)
        key = f"{self._prefix}/m/{name}"
        while (stored := self._client.exchange(key, known, data)) != data:
            if stored == GONE or (stored == known and not self._counts(name)):
                return False
            known = stored if stored != known else b""  # what a missing key answers: it was removed
        self._written[name] = data
        return True

    def _counts(self, incarnation: str) -> bool:
        """Whether its lease is in the store: it is not forgotten, and the run was not removed."""
        lease = self.read_lease(incarnation)
        return lease is not None and not lease.revoked

    def _hint(self, incarnation: str) -> None:
        """Not confirmed: it is lost only with the connection, and over the next one the record is written again."""
        self._client.push(f"{ROOT}/inbox", f"{self._run_id} {incarnation}")

    def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Compare-and-set the lease."""
        wanted = encode(renewed)
        key = f"{self._prefix}/l/{expected.incarnation}"
        return self._client.exchange(key, encode(expected), wanted) == wanted

    def read_lease(self, incarnation: str) -> Lease | None:
        """The lease as it stands, or None; also where something else was written over it."""
        return lease_in(self._client.peek(f"{self._prefix}/l/{incarnation}"), incarnation)

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.newest()

    def read_status(self) -> str:
        """What the coordinator waits for, in words."""
        text = (self._client.peek(f"{self._prefix}/status") or b"").decode("utf-8", "replace")
        return "".join(char if char.isprintable() else " " for char in text[:MAX_STATUS_CHARS])

    def next_plan(self, after_version: int, timeout_s: float) -> Plan | None:
        """Wait for a newer plan; a reader that fell behind gets the newest at once."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            plan = self._plans.newest()
            if plan is not None and plan.version > after_version:
                return plan
            if plan is None and self._plans.foreign:
                raise OtherVersionError(self._plans.foreign)
            left_s = deadline_s - time.monotonic()
            following = max(self._plans.end, after_version) + 1
            if left_s <= 0 or not self._client.wait(self._plans.key(following), left_s):
                return None

    def close(self) -> None:
        """Release the connection; it closes when no call is in progress any more."""
        self._client.close()
