"""Leases by the coordinator's clock: what a pause of its own changes, and what revisions of a store tell."""

from __future__ import annotations

import pytest

from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.leases import MAX_PAUSE_COMPENSATIONS, MOST_KEPT, LeaseLedger, RevisionTimes
from elastic_agent.protocol.records import Lease, Member, Policy, State
from tests.protocol import support

TTL_S = 6.0
POLICY = Policy(min_nodes=2, max_nodes=2, lease_ttl_s=TTL_S, fence_margin_s=1.0, join_timeout_s=100.0)


def member(name: str) -> Member:
    return support.member(f"node-{name}", name, policy=POLICY)


def test_a_live_lease_has_a_third_left_after_a_pause() -> None:
    ledger = ledger_with("a", 10.0)
    before = ledger.sightings["a"]
    ledger.compensate_pause(13.9)
    assert ledger.sightings["a"] == before, "more than a third is left"
    ledger.compensate_pause(15.9)
    assert ledger.sightings["a"].ends_s == pytest.approx(15.9 + TTL_S / 3)
    ledger.revoked("a")
    fenced_s = ledger.fenced_s("a", POLICY)
    assert fenced_s is not None
    assert fenced_s > 10.0 + TTL_S + POLICY.fence_margin_s, "fencing is only postponed"


def test_revoked_leases_get_no_pause_compensation() -> None:
    ledger = ledger_with("a", 10.0)
    ledger.revoked("a")
    before = ledger.sightings["a"]
    ledger.compensate_pause(15.9)
    assert ledger.sightings["a"] == before
    ledger = ledger_with("a", 10.0)
    ledger.revoked("a", gone_s=14.0)  # another client removed it, and it may have been renewed just before
    assert ledger.fenced_s("a", POLICY) == pytest.approx(14.0 + TTL_S + POLICY.fence_margin_s)


def ledger_with(name: str, at_s: float) -> LeaseLedger:
    ledger = LeaseLedger(born_s=0.0)
    ledger.observe(member(name), Lease(name, TTL_S), at_s)
    return ledger


def test_a_coordinator_that_is_always_late_still_revokes_dead_nodes() -> None:
    ledger = ledger_with("dead", 0.0)
    now_s = 0.0
    while ledger.sightings["dead"].ends_s > now_s:
        now_s += TTL_S * 0.4
        ledger.compensate_pause(now_s)
        assert now_s < 10 * TTL_S
    assert now_s <= TTL_S + MAX_PAUSE_COMPENSATIONS * TTL_S


def test_a_renewal_resets_the_pause_compensation() -> None:
    ledger = ledger_with("a", 0.0)
    lease = Lease("a", TTL_S)
    for start_s in (0.0, 100.0, 200.0):
        lease = lease.renewed()
        ledger.observe(member("a"), lease, start_s)
        for number in range(1, MAX_PAUSE_COMPENSATIONS + 1):
            ledger.compensate_pause(start_s + 5.0 * number)
            assert ledger.sightings["a"].ends_s == pytest.approx(start_s + 5.0 * number + TTL_S / 3)
        ledger.compensate_pause(start_s + 5.0 * (MAX_PAUSE_COMPENSATIONS + 1))
        assert ledger.sightings["a"].ends_s < start_s + 5.0 * (MAX_PAUSE_COMPENSATIONS + 1)


def coordinator_waiting_for_a_second_node() -> Coordinator:
    coordinator = Coordinator(0.0)
    coordinator.observe(member("a"), Lease("a", TTL_S), 0.0)
    first = coordinator.decide(0.0).plan
    assert first is not None
    coordinator.published(first, 0.0)
    return coordinator


def test_overdue_leases_are_not_revoked_right_after_a_pause() -> None:
    coordinator = coordinator_waiting_for_a_second_node()
    assert coordinator.decide(5 * TTL_S).revoke == {"a": "did not renew its lease within 6 s"}
    coordinator.stood_still(5 * TTL_S, 4 * TTL_S)
    decision = coordinator.decide(5 * TTL_S)
    assert not decision.revoke
    assert decision.wake_s <= 5 * TTL_S + TTL_S / 3
    assert "a" in coordinator.decide(5 * TTL_S + TTL_S / 3).revoke


def test_a_phase_that_began_between_two_freezes_does_not_last_longer() -> None:
    coordinator = coordinator_waiting_for_a_second_node()
    coordinator.stood_still(30.0, 35.0)  # the coordinator was late before the phase began, too
    assert coordinator.clock.since_s == 30.0


# -- revisions of the store ------------------------------------------------------------------------

REVISED = Policy(lease_ttl_s=5.0, fence_margin_s=1.0)


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
    said = support.member("a", state=State.RUNNING, policy=REVISED)
    ledger = LeaseLedger(born_s=100.0)
    ledger.observe(said, Lease("a-1", 5.0, beat=7), 100.0, 97.0)
    assert (ledger.sightings["a-1"].ends_s, ledger.sightings["a-1"].first_seen_s) == (102.0, 100.0)
    ledger.observe(said, Lease("a-1", 5.0, beat=8), 101.0, 97.0)
    assert ledger.sightings["a-1"].ends_s == 106.0, "a renewal that it sees counts from then"
    ledger.revoked("a-1")
    assert ledger.fenced_s("a-1", REVISED) == 107.0
    ledger.observe(support.member("b"), Lease("b-1", 5.0), 100.0, 100.1)
    assert ledger.sightings["b-1"].ends_s == 105.0, "none is dated later than it was read"
