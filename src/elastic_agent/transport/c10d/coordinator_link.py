"""The coordinator's link to one run in a c10d store, and its inbox of hints."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection, Mapping

from elastic_agent.protocol import Lease, Member, Plan, encode
from elastic_agent.transport.base import Snapshot
from elastic_agent.transport.record_reader import GONE, RecordReader, ReportInvalid, lease_in, log_invalid

from .keys import CLEARING, MAX_STATUS_CHARS, ROOT, name_in, names_in, run_prefix
from .plans import PlanReader, PlanWriter
from .reports import remove_old_reports
from .store import StoreClient

MAX_HINTS = 4096
"""So many hints are taken at once; the rest is taken the next time."""
RECEIVE_S = 300.0
"""How long one wait for hints takes at most."""
MAX_RUNS_BYTES = 1024 * 1024
"""So much of the list of runs is read; runs beyond it make themselves known by hints."""

_INBOX = f"{ROOT}/inbox"


class _Receiver(threading.Thread):
    """Takes hints from the store as they come.

    Not the coordinator itself, which turns at certain times: each time-out of a wait for the store costs 0.3 ms.
    """

    def __init__(self, client: StoreClient) -> None:
        super().__init__(name="elastic-inbox", daemon=True)
        self._client = client
        self.batches: queue.SimpleQueue[list[bytes] | Exception] = queue.SimpleQueue()
        """What came; at the end, why no more will come."""

    def run(self) -> None:
        """Until the store is gone."""
        try:
            while True:
                if hints := self._client.pop(_INBOX, RECEIVE_S, MAX_HINTS):
                    self.batches.put(list(dict.fromkeys(hints)))
        except Exception as error:
            self.batches.put(error)


class C10dInbox:
    """Hints for the coordinator, over all runs of the store."""

    def __init__(
        self, waiting: StoreClient, requests: StoreClient, report_invalid: ReportInvalid = log_invalid
    ) -> None:
        """``waiting``: a connection that a thread occupies; ``requests``: one for everything else."""
        self._receiver = _Receiver(waiting)
        self._requests = requests
        self._report_invalid = report_invalid
        self._reported = False
        self._lost: Exception | None = None

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Block until a hint comes; all that are there. Empty at the time-out, or when woken."""
        if self._receiver.ident is None:
            self._receiver.start()
        items: dict[bytes, None] = {}
        with contextlib.suppress(queue.Empty):
            self._take(items, timeout_s)
            while len(items) < MAX_HINTS:
                self._take(items, 0)
        return [hint for item in items if (hint := self._hint(item)) is not None]

    def _take(self, items: dict[bytes, None], timeout_s: float) -> None:
        """One batch; raises ``queue.Empty`` at the time-out."""
        if self._lost is not None:
            raise self._lost
        batch = self._receiver.batches.get(block=timeout_s > 0, timeout=timeout_s)
        if isinstance(batch, Exception):
            self._lost = batch
            raise batch
        items.update(dict.fromkeys(batch))

    def _hint(self, item: bytes) -> tuple[str, str] | None:
        if not item:
            return None  # only to wake us
        run_id, _, incarnation = item[:512].partition(b" ")
        names = name_in(run_id), name_in(incarnation)
        if names[0] is not None and names[1] is not None:
            return names[0], names[1]
        if not self._reported:  # once is enough: such a writer may write a lot
            self._reported = True
            self._report_invalid(f"{_INBOX}: {item[:64]!r} is not a hint")
        return None

    def runs(self) -> tuple[str, ...]:
        """Every run that ever registered here."""
        return tuple(names_in((self._requests.peek(f"{ROOT}/runs") or b"")[:MAX_RUNS_BYTES]))

    def strike(self, run_id: str) -> None:
        """Remove a run from that list."""
        key = f"{ROOT}/runs"
        while run_id in names_in(listed := self._requests.peek(key) or b""):
            others = [name for name in names_in(listed) if name != run_id]
            self._requests.exchange(key, listed, "".join(f"\n{name}\n" for name in others).encode())

    def wake(self) -> None:
        """Wake the waiting thread (from another one)."""
        self._receiver.batches.put([])


class C10dCoordinatorLink:
    """The coordinator's connection to one run (see ``CoordinatorLink``)."""

    def __init__(self, client: StoreClient, run_id: str, report_invalid: ReportInvalid = log_invalid) -> None:
        """``client``: may be shared with the links of other runs."""
        self._client = client
        self._prefix = run_prefix(run_id)
        self._plans = PlanReader(client, self._prefix, report_invalid)
        self._writer = PlanWriter(client, self._prefix, self._plans)
        self._known: dict[str, None] = {}
        """All incarnations on the roster that are not forgotten, in its order."""
        self._roster_read = 0
        self._forgotten: set[str] = set()
        self._records = RecordReader(self._prefix)

    def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Records of these incarnations, or of all. A bad one is described once for each content."""
        names = (
            self._registered()
            if incarnations is None
            else [one for one in incarnations if one not in self._forgotten]
        )
        keys = [f"{self._prefix}/{kind}/{name}" for name in names for kind in "ml"]
        found = self._client.peek_many(keys)
        rejected: list[str] = []
        members: dict[str, Member] = {}
        for name in names:
            data = found.get(f"{self._prefix}/m/{name}", GONE)
            member = self._records.member(name, data, rejected)
            if member is not None:
                members[name] = member
                # The roster's line of one that came while it was removed is lost.
                self._known.setdefault(name)
        leases = self._records.leases(self._leases_in(names, found), rejected)
        return Snapshot(members, leases, tuple(rejected))

    def _leases_in(self, names: Collection[str], found: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: found.get(f"{self._prefix}/l/{name}", GONE) for name in names}

    def read_leases(self) -> Mapping[str, Lease]:
        """The leases of all nodes that :meth:`read` has found on the roster."""
        names = list(self._known) or self._registered()
        found = self._client.peek_many([f"{self._prefix}/l/{name}" for name in names])
        return self._records.leases(self._leases_in(names, found), None)

    def _registered(self) -> list[str]:
        """The roster only grows: what is new of it is read."""
        roster = self._client.peek(f"{self._prefix}/roster") or b""
        if len(roster) < self._roster_read:
            self._roster_read = 0  # it was overwritten; the incarnations read before are kept
        for name in names_in(roster[self._roster_read :]):
            if name not in self._forgotten:
                self._known.setdefault(name)
        self._roster_read = len(roster)
        return list(self._known)

    def has_begun(self) -> bool:
        """Whether a node has registered, or a plan is there; else the run is only a name."""
        return bool(self.read(None).members) or self.read_plan() is not None

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.newest()

    def publish(self, plan: Plan) -> bool:
        """The first writer of a version wins."""
        return self._writer.publish(plan)

    def revoke(self, lease: Lease, why: str = "") -> bool:
        """Compare-and-set the lease to its revoked form."""
        key = f"{self._prefix}/l/{lease.incarnation}"
        wanted = encode(lease.revoke(why))
        stored = self._client.exchange(key, encode(lease), wanted)
        if stored != wanted and stored != encode(lease) and lease_in(stored, lease.incarnation) == lease:
            stored = self._client.exchange(key, stored, wanted)  # the same, spelled otherwise
        return stored == wanted

    def write_status(self, text: str) -> None:
        """Write, in words, what is awaited."""
        self._client.put(f"{self._prefix}/status", text[:MAX_STATUS_CHARS].encode("utf-8", "replace"))

    def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records, for good."""
        self._known.pop(incarnation, None)
        self._forgotten.add(incarnation)
        for kind in "lm":
            self._client.put(f"{self._prefix}/{kind}/{incarnation}", GONE)

    def remove_run(self) -> bool:
        """Remove all records of a run that is not needed any more; False if a new node has registered.

        The run's life ends first: a node that registers meanwhile detects that at the end, and registers again; one
        that had registered before is on the roster.
        """
        self._client.delete([f"{self._prefix}/life"])
        roster = names_in(self._client.peek(f"{self._prefix}/roster") or b"")
        unknown = {*roster} - self._known.keys() - self._forgotten
        if unknown and self.read(unknown).members:  # else other clients wrote these names
            return False
        self._writer.remove_all()
        self._release_jobs()
        names = {*roster, *self._known, *self._forgotten}
        records = [f"{self._prefix}/{kind}/{name}" for name in names for kind in "ml"]
        self._client.delete([*records, *(f"{self._prefix}/{name}" for name in ("status", "jobs", "roster"))])
        run_id = self._prefix.rpartition("/")[2]
        remove_old_reports(self._client, run_id)
        return True

    def _release_jobs(self) -> None:
        """Remove the keys that map a job to this run; those that map it to another one stay."""
        run_id = self._prefix.rpartition("/")[2].encode()
        for fingerprint in names_in(self._client.peek(f"{self._prefix}/jobs") or b""):
            key = f"{ROOT}/default/{fingerprint}"
            for expected in (run_id, b""):
                if self._client.exchange(key, expected, CLEARING) == CLEARING:
                    self._client.delete([key])
                    break
