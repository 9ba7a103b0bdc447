"""A coordinator that was paused does not count the pause against nodes, and still revokes dead ones in the end."""

from __future__ import annotations

import pytest

from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.leases import MAX_PAUSE_COMPENSATIONS, LeaseLedger
from elastic_agent.protocol.records import Lease, Member, Phase, Policy
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


def test_a_pause_of_the_coordinator_does_not_use_up_join_timeout() -> None:
    coordinator = coordinator_waiting_for_a_second_node()
    slept = coordinator_waiting_for_a_second_node()
    for one in (coordinator, slept):
        one.observe(member("a"), Lease("a", TTL_S, 9), 150.0)
    slept.stood_still(150.0, 140.0)
    late = coordinator.decide(150.0).plan
    assert late is not None
    assert late.phase is Phase.FAILED, "without an excuse the time to join is over"
    assert slept.decide(150.0).plan is None
