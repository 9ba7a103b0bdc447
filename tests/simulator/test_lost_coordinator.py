"""Losing the node whose agent coordinates a run in etcd takes the others no longer than losing any other node."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import count

import pytest

from elastic_agent.protocol.codec import decode
from elastic_agent.protocol.records import Phase, Plan

from .cluster import Cluster, Seatholder

UNIVERSES = 18


def quiet_universe(seed: int) -> Cluster | None:
    """One in which nothing goes wrong by itself, and enough nodes train long enough for one to be lost."""
    cluster = Cluster(seed, hosting="etcd")
    drawn, policy = cluster.scenario, cluster.policy
    if drawn.nodes < 3 or policy.max_nodes < drawn.nodes or policy.fit(drawn.nodes - 1) == 0:
        return None
    if drawn.housemates or cluster.endpoint.store is None:
        return None
    cluster.endpoint.store.hint_loss = 0.0
    cluster.scenario = replace(drawn, work_s=1000.0)
    return cluster


def plan_of(cluster: Cluster) -> Plan | None:
    data = cluster.endpoint.store.plan if cluster.endpoint.store is not None else None
    return decode(Plan, data) if data is not None else None


def coordinates(holder: Seatholder) -> bool:
    election = holder.agent.election if holder.agent is not None else None
    return election is not None and election.leadership is not None


def recovery_leases(seed: int, *, of_coordinator: bool) -> float | None:
    """From a node's loss to the next world, in lease times beyond what stopping takes; None: no such universe."""
    cluster = quiet_universe(seed)
    if cluster is None:
        return None
    kernel, ttl_s = cluster.kernel, cluster.policy.lease_ttl_s

    def all_run() -> bool:
        cluster.checker.step()
        plan = plan_of(cluster)
        return (
            plan is not None
            and plan.phase is Phase.RUNNING
            and len(cluster.holders) == len(plan.world.seats if plan.world is not None else ())
        )

    kernel.run(100.0, all_run)
    kernel.run(kernel.now + ttl_s * kernel.random.uniform(3.0, 4.0), lambda: False)
    before = plan_of(cluster)
    if before is None or not all_run():
        return None
    lost = next(one for one in cluster.holders if coordinates(one) is of_coordinator)
    lost.machine.crash()
    lost_s = kernel.now

    def next_runs() -> bool:
        cluster.checker.step()
        plan = plan_of(cluster)
        return plan is not None and plan.phase is Phase.RUNNING and plan.generation > before.generation

    kernel.run(lost_s + 20 * ttl_s, next_runs)
    assert next_runs(), f"seed {seed}: no world in 20 leases"
    stopping_s = max(
        cluster.policy.fence_margin_s, cluster.scenario.restart_grace_s + cluster.scenario.kill_max_s
    )
    return (kernel.now - lost_s - stopping_s) / ttl_s


@pytest.fixture(scope="module")
def recoveries() -> list[tuple[float, float]]:
    """In each universe: the recovery from the coordinator's node's loss, and from another one's."""
    found: list[tuple[float, float]] = []
    for seed in count():
        coordinators, others = (recovery_leases(seed, of_coordinator=which) for which in (True, False))
        if coordinators is not None and others is not None:
            found.append((coordinators, others))
        if len(found) == UNIVERSES:
            break
    return found


def test_a_lost_coordinator_node_is_detected_as_fast_as_any_other(
    recoveries: list[tuple[float, float]],
) -> None:
    later = [coordinators - others for coordinators, others in recoveries]
    assert statistics.median(later) < 0.1, sorted(later)


def test_the_loss_of_the_coordinators_node_takes_a_lease_and_a_renewal_at_most(
    recoveries: list[tuple[float, float]],
) -> None:
    """Also where the last renewal could not be told to the others any more."""
    assert max(coordinators for coordinators, _ in recoveries) < 1.0 + 1 / 3 + 0.1
