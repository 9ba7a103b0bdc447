"""Both sides of a lease. Pure: time comes in as an argument, in seconds.

The holder counts from the moment it *sent* its last successful renewal; the coordinator counts from the
moment it *saw* that renewal, or from an earlier moment by which the renewal had certainly been written (see
:class:`RevisionTimes`); either is later. So by the coordinator's reckoning a lease never ends before it has ended by
the holder's, save for the clocks' rates, which the fence margin covers.

A new coordinator finds leases in the store and does not know when they were renewed: clocks of
two machines are never compared, and it did not read them before its term. But every answer of such a store names the
newest revision there is. Whatever carries that revision or a lower one had been written before the answer came. So a
process that keeps, for each answer, the revision and the moment by its own clock knows of every record it finds later
a moment before which it was written: that of the earliest answer that names the record's revision or a higher one.

The moment is never too early, because the answer came after the write. It may be too late by as long as no answer
came; without any that counts, the moment of the reading has to do.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .records import Lease, Member, Policy

FAR_S = float("inf")

RENEWALS_PER_LEASE, ANSWERS_PER_LEASE = 3, 4
"""A renewal is sent each third of a lease, and its answer is awaited for a quarter. So a lease survives two lost
renewals in a row: the third one is sent when five sixths of the lease are over."""

LEAST_PAUSE = 1 / 10
"""Of a lease: how long after an answer the next renewal is sent at the earliest."""

RENEWALS_THAT_PROVE_LIFE = 3
"""A dead agent's last renewal may be noticed late, and one more may have been under way when it died."""

PAUSE_COMPENSATION_LEASES = 1 / 3
"""The part of its time that a lease has left at least, after the coordinator itself was paused."""

MAX_PAUSE_COMPENSATIONS = 3
"""So often since its last renewal: a coordinator that is always late must revoke the leases of dead agents, too."""

MOST_KEPT = 64
"""Of the newest answers. What is older is dated by the oldest that is kept: later than need be, which is safe."""


def next_renewal_s(ttl_s: float, sent_s: float, now_s: float) -> float:
    """Return when to send the renewal after one that was sent at ``sent_s`` and is answered now.

    Counted from the sending, so that the coordinator sees renewals in even steps however long answers take.
    """
    return max(sent_s + ttl_s / RENEWALS_PER_LEASE, now_s + ttl_s * LEAST_PAUSE)


@dataclass(frozen=True)
class HeldLease:
    """The holder's side: the record it believes to be in the store, and its own deadline."""

    record: Lease
    deadline_s: float
    """By the holder's clock (CLOCK_BOOTTIME). After it, no worker may run."""

    @classmethod
    def granted(cls, record: Lease, sent_s: float) -> HeldLease:
        """Return a lease whose first record was written by a request sent at ``sent_s``."""
        return cls(record, sent_s + record.ttl_s)

    def renewed(self, record: Lease, sent_s: float) -> HeldLease:
        """Return the lease after ``record`` was written by a request sent at ``sent_s``."""
        return HeldLease(record, max(self.deadline_s, sent_s + record.ttl_s))

    def expired(self, now_s: float) -> bool:
        """Return whether the deadline has come."""
        return now_s >= self.deadline_s


@dataclass(frozen=True)
class Sighting:
    """One incarnation as the coordinator sees it: its record, and its lease by the coordinator's clock."""

    member: Member
    lease: Lease
    first_seen_s: float
    renewed_s: float
    renewals_s: tuple[float, ...] = ()
    """When its last few renewals were noticed."""
    pause_compensations: int = 0
    """The number of times that its end was postponed since its last renewal."""

    def seen_alive_since(self, moment_s: float) -> bool:
        """Return whether it has certainly renewed after this moment."""
        return len(self.renewals_s) == RENEWALS_THAT_PROVE_LIFE and self.renewals_s[0] > moment_s

    @property
    def alive(self) -> bool:
        """Return whether its lease still counts (it may be overdue; only a revocation ends it)."""
        return not self.lease.revoked

    @property
    def ends_s(self) -> float:
        """When its lease runs out by the coordinator's clock unless renewed."""
        return self.renewed_s + self.lease.ttl_s


@dataclass
class LeaseLedger:
    """The coordinator's ledger of incarnations and when each was seen. Times are by its own clock, in seconds."""

    born_s: float
    sightings: dict[str, Sighting] = field(default_factory=dict)
    nodes_since_s: dict[str, float] = field(default_factory=dict)
    """When each node (not: incarnation) was first seen."""

    def observe(self, member: Member, lease: Lease, now_s: float, written_s: float | None = None) -> None:
        """Take in the newest record and lease of an incarnation.

        ``written_s``: by when at the latest the lease was written, if that is known. It counts for an incarnation that
        is seen for the first time, whose lease may have been renewed long before this ledger was born.
        """
        known = self.sightings.get(member.incarnation)
        self.nodes_since_s.setdefault(member.node_id, now_s)
        if known is None:
            renewed_s = now_s if written_s is None else min(written_s, now_s)
            self.sightings[member.incarnation] = Sighting(member, lease, now_s, renewed_s)
            return
        if lease.beat > known.lease.beat:
            renewals_s = (*known.renewals_s, now_s)[-RENEWALS_THAT_PROVE_LIFE:]
            known = replace(known, renewed_s=now_s, renewals_s=renewals_s, pause_compensations=0)
        revoked = lease.revoked or known.lease.revoked
        lease = lease if lease.revoked == revoked else lease.revoke()
        self.sightings[member.incarnation] = replace(known, member=member, lease=lease)

    def revoked(self, incarnation: str, gone_s: float | None = None) -> None:
        """Take in that this lease was revoked in the store.

        ``gone_s``: it was not there to be revoked at this time. Another client has removed or changed it, perhaps after
        a renewal that was not seen here; it was not renewed any more since.
        """
        known = self.sightings.get(incarnation)
        if known is not None and known.alive:
            renewed_s = known.renewed_s if gone_s is None else max(known.renewed_s, gone_s)
            self.sightings[incarnation] = replace(known, lease=known.lease.revoke(), renewed_s=renewed_s)

    def compensate_pause(self, now_s: float) -> None:
        """Postpone the end of every live lease: the coordinator itself was paused until now.

        What was sent to it meanwhile may still be on its way. To postpone a revocation is always safe.
        """
        for key, node in self.sightings.items():
            if not node.alive or node.pause_compensations >= MAX_PAUSE_COMPENSATIONS:
                continue
            # As if renewed that long ago.
            renewed_s = now_s + (PAUSE_COMPENSATION_LEASES - 1.0) * node.lease.ttl_s
            if renewed_s > node.renewed_s:
                self.sightings[key] = replace(
                    node, renewed_s=renewed_s, pause_compensations=node.pause_compensations + 1
                )

    def forget(self, incarnation: str) -> None:
        """Drop an incarnation whose records were removed."""
        self.sightings.pop(incarnation, None)

    def replaced(self) -> set[str]:
        """Return the incarnations that a later one of their node has proven gone."""
        return {earlier for node in self.sightings.values() for earlier in node.member.replaces}

    def fenced_s(self, incarnation: str, policy: Policy) -> float:
        """Return when this incarnation's workers are certainly dead by its lease alone; infinite while it lives.

        An incarnation that was never seen here cannot have renewed since this ledger was born, and no
        lease of the run is longer than the policy's (members with a longer one are refused).
        """
        known = self.sightings.get(incarnation)
        if known is None:
            return self.born_s + policy.lease_ttl_s + policy.fence_margin_s
        return FAR_S if known.alive else known.ends_s + policy.fence_margin_s


class RevisionTimes:
    """The revisions in the answers of one store to one process, with the times by its clock, in seconds.

    It may be used from several threads: of two answers that are entered at once one may get lost, and what it would
    have dated is dated later.
    """

    def __init__(self) -> None:
        self._seen: tuple[str, tuple[tuple[int, float], ...]] = ("", ())
        """The store, and (revision, when it was seen), both growing."""

    def saw(self, store: str, revision: int, now_s: float) -> None:
        """Note that this store has come to this revision. Another store counts from its own beginning."""
        known, seen = self._seen
        if store != known:
            seen = ()
        if not seen or revision > seen[-1][0]:
            self._seen = (store, (*seen, (revision, now_s))[-MOST_KEPT:])

    def written_by(self, store: str, revision: int) -> float | None:
        """Return the latest time at which this revision can have been written; None if unknown."""
        known, seen = self._seen
        if store != known:
            return None
        return next((at_s for seen_revision, at_s in seen if seen_revision >= revision), None)
