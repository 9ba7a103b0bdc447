"""What the revisions of a store's answers tell of when a record was written."""

from __future__ import annotations

from elastic_agent.protocol.leases import MOST_KEPT, LeaseLedger, RevisionTimes
from elastic_agent.protocol.records import Lease, Policy, State
from tests.protocol.support import member

POLICY = Policy(lease_ttl_s=5.0, fence_margin_s=1.0)


def told(*answers: tuple[int, float]) -> RevisionTimes:
    times = RevisionTimes()
    for revision, now_s in answers:
        times.saw("etcd", revision, now_s)
    return times


def test_a_record_is_dated_by_the_first_answer_with_its_revision_or_a_later_one() -> None:
    times = told((10, 1.0), (20, 2.0), (30, 3.0))
    dated = {revision: times.written_by("etcd", revision) for revision in (1, 10, 11, 20, 30, 31)}
    assert dated == {1: 1.0, 10: 1.0, 11: 2.0, 20: 2.0, 30: 3.0, 31: None}


def test_an_answer_without_a_new_revision_changes_nothing() -> None:
    times = told((10, 1.0), (10, 2.0), (9, 3.0))
    assert times.written_by("etcd", 10) == 1.0


def test_revisions_of_another_store_are_independent() -> None:
    times = told((10, 1.0))
    assert times.written_by("another", 5) is None
    times.saw("another", 3, 7.0)
    assert times.written_by("another", 3) == 7.0
    assert times.written_by("another", 5) is None
    assert times.written_by("etcd", 5) is None


def test_revisions_older_than_those_kept_are_never_dated_too_early() -> None:
    times = told(*((revision, float(revision)) for revision in range(1, 10 * MOST_KEPT)))
    oldest = 9 * MOST_KEPT
    assert times.written_by("etcd", 1) == float(oldest)
    assert times.written_by("etcd", oldest + 1) == float(oldest + 1)


def test_a_new_coordinator_counts_a_lease_from_when_it_was_written_or_renewed() -> None:
    said = member("a", state=State.RUNNING, policy=POLICY)
    ledger = LeaseLedger(born_s=100.0)
    ledger.observe(said, Lease("a-1", 5.0, beat=7), 100.0, 97.0)
    assert (ledger.sightings["a-1"].ends_s, ledger.sightings["a-1"].first_seen_s) == (102.0, 100.0)
    ledger.observe(said, Lease("a-1", 5.0, beat=8), 101.0, 97.0)
    assert ledger.sightings["a-1"].ends_s == 106.0, "a renewal that it sees counts from then"
    ledger.revoked("a-1")
    assert ledger.fenced_s("a-1", POLICY) == 107.0
    ledger.observe(member("b"), Lease("b-1", 5.0), 100.0, 100.1)
    assert ledger.sightings["b-1"].ends_s == 105.0, "none is dated later than it was read"
