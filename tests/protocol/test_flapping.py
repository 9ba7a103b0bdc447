"""A node that comes and goes may disturb the others a few times, not for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_agent.protocol.cluster_view import PROGRESS_S
from elastic_agent.protocol.records import Failure, FailureKind, Lease, Phase, State
from elastic_agent.protocol.running import EXPLAIN_S
from tests.protocol.support import (
    CRASH,
    MARGIN_S,
    NO_START,
    SETTLE_S,
    STEP_S,
    TTL_S,
    Table,
    member,
    policy,
    running,
)
from tests.protocol.test_notices import asks, leave

INTERRUPTED = Failure(FailureKind.INTERRUPTED, "a worker was terminated by SIGTERM")
NO_BOOTSTRAP = Failure(FailureKind.BOOTSTRAP, "a:29500 could not be reached", unreachable_node="a")

ALONE = ("a", "b")


def admit(table: Table, life: int) -> float:
    """``c`` comes once more; how long it waits until the world is ended for its sake."""
    table.comes("c", life)
    came_s = table.now_s
    while table.plan.phase is Phase.RUNNING:
        table.wait(0.5)
        assert table.now_s < came_s + 400.0
    return table.now_s - came_s


def die_noticed_by_the_others(table: Table) -> None:
    """``c`` dies; the others' collectives fail long before its lease ends, and the next world forms without it."""
    table.all_say(State.RUNNING, *ALONE, "c")
    table.falls_silent("c")
    table.says("a", State.FAILED, failure=CRASH)
    table.all_say(State.READY, *ALONE)
    table.wait(TTL_S + 2.0)
    assert table.world == ["a", "b"]
    table.all_say(State.RUNNING, *ALONE)


def test_a_loss_detected_while_the_next_world_forms_counts() -> None:
    table = running(*ALONE, rules=policy(max_nodes=3))
    waits = []
    for life in range(1, 5):
        waits.append(admit(table, life))
        table.all_say(State.READY, *ALONE, "c")
        die_noticed_by_the_others(table)
    assert waits == [SETTLE_S, SETTLE_S, PROGRESS_S - MARGIN_S, SETTLE_S], "after progress it is forgotten"


ENDINGS: dict[str, Callable[[Table], None]] = {
    "failure": lambda table: table.says("a", State.FAILED, failure=CRASH),
    "growth": lambda table: (table.comes("d"), table.wait(2 * SETTLE_S)),
    "notice": lambda table: asks(table, "b", leave("b")),
    "saved without a notice": lambda table: table.says("a", State.SAVED),
    "signal": lambda table: (table.says("a", State.RUNNING, failure=INTERRUPTED), table.wait(EXPLAIN_S)),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("progress", [False, True])
def test_what_nodes_did_wrong_is_forgotten_after_progress_whatever_ends_the_world(
    ending: str, progress: bool
) -> None:
    table = running("a", "b", "c", rules=policy(max_nodes=4))
    table.falls_silent("c")
    table.wait(TTL_S + STEP_S)
    table.all_say(State.READY, "a", "b")
    table.wait(MARGIN_S + 2 * SETTLE_S)
    table.says("b", State.FAILED, failure=NO_BOOTSTRAP)
    table.all_say(State.READY, "a", "b")
    assert table.world == ["a", "b"]
    plan = table.plan
    assert (plan.losses, plan.start_failures, plan.avoid_bootstrap) == ({"c": 1}, {"b": 1}, ("a",))

    table.all_say(State.RUNNING, "a", "b")
    table.wait(PROGRESS_S if progress else 1.0)
    ENDINGS[ending](table)
    assert table.stand == (Phase.FORMING, plan.generation + 1)
    known = table.plan
    assert (known.start_failures, known.avoid_bootstrap) == ({}, ()), "they have run"
    assert known.losses == ({} if progress else {"c": 1})


def test_an_admitted_node_that_does_not_join_counts_as_lost() -> None:
    table = running(*ALONE, rules=policy(max_nodes=3))
    for life, losses in ((1, 1), (2, 2)):
        admit(table, life)
        table.falls_silent("c")
        table.all_say(State.READY, *ALONE)
        table.wait(3 * SETTLE_S)
        assert table.world == ["a", "b"]
        assert table.plan.losses == {"c": losses}
        table.all_say(State.RUNNING, *ALONE)


def test_a_node_without_room_in_the_world_does_not_count_as_lost() -> None:
    table = running(*ALONE, rules=policy(max_nodes=3))
    table.comes("c")
    table.comes("d")
    table.wait(SETTLE_S)
    table.all_say(State.READY, *ALONE, "c", "d")
    assert table.world == ["a", "b", "c"]
    assert table.plan.losses == {}


def test_a_node_that_is_lost_again_and_again_makes_room_for_one_that_could_not_start() -> None:
    """Otherwise the run would depend on it for ever, although the other one may start by now."""
    table = running("a", "b", rules=policy(min_nodes=1, max_nodes=2))
    for _ in range(2):
        table.says("b", State.FAILED, failure=NO_START)
        table.all_say(State.READY, "a", "b")
    assert table.world == ["a"]
    for life in range(2, 5):
        assert table.world == ["a"]
        table.all_say(State.RUNNING, "a")
        table.falls_silent("a")
        while table.plan.phase is Phase.RUNNING:
            table.wait(0.5)
        table.comes("a", life)
        table.says("b", State.READY)
        table.wait(TTL_S + MARGIN_S)
        assert table.plan.phase is Phase.RUNNING
    assert table.plan.losses == {"a": 3}
    assert table.world == ["b"]


def test_records_of_many_dead_agents_are_removed_a_few_at_a_time() -> None:
    """Each removal takes a round trip to the store, and the living must not wait for hundreds."""
    table = running(*ALONE, rules=policy(max_nodes=3))
    coordinator = table.coordinator
    for life in range(100):
        lease = Lease(f"c-{life}", TTL_S)
        coordinator.observe(member("c", lease.incarnation, generation=0), lease, table.now_s)
        coordinator.revoked(lease.incarnation)
    gone_s = table.now_s + TTL_S + MARGIN_S
    for key in ("a-1", "b-1"):
        coordinator.observe(table.members[key], table.leases[key].renewed(), gone_s)
    decisions = []
    while (decision := coordinator.decide(gone_s)).forget:
        decisions.append(decision)
        for incarnation in decision.forget:
            coordinator.forgotten(incarnation)
    assert sum(len(decision.forget) for decision in decisions) == 100
    assert max(len(decision.forget) for decision in decisions) <= 20
    assert all(decision.wake_s == gone_s for decision in decisions[:-1]), (
        "it goes on at once, after looking at what is new"
    )
