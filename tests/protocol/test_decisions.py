"""What the coordinator decides: rule by rule, then the laws that hold whatever happens in whatever order."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.diagnosis.cause import CauseKind
from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.protocol.cluster_view import PROGRESS_S
from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.records import Address, Failure, FailureKind, Phase, State
from tests.protocol.support import (
    CRASH,
    HANG,
    MARGIN_S,
    NO_START,
    SETTLE_S,
    STEP_S,
    TTL_S,
    Table,
    on_disk,
    policy,
    running,
    world,
)

FENCE_S = TTL_S + MARGIN_S
FORMING, RUNNING, FINISHED, FAILED = Phase.FORMING, Phase.RUNNING, Phase.FINISHED, Phase.FAILED


def fails(table: Table, node: str, failure: Failure = CRASH) -> None:
    table.says(node, State.FAILED, failure=failure)


def fail_and_reform(table: Table, node: str, *nodes: str, failure: Failure = CRASH) -> None:
    """This node fails; then all of these are stopped and ready."""
    fails(table, node, failure)
    table.all_say(State.READY, *nodes)


# -- how many nodes a world may have ----------------------------------------------------------------


@given(
    st.integers(1, 40),
    st.integers(0, 40),
    st.lists(st.integers(1, 45), max_size=4).map(tuple),
    st.integers(0, 45),
)
def test_the_next_larger_world_is_the_first_allowed_size(
    least: int, more: int, counts: tuple[int, ...], above: int
) -> None:
    rules = policy(min_nodes=least, max_nodes=least + more, node_counts=counts)
    sizes = range(max(above + 1, least), least + more + 1)
    allowed = [size for size in sizes if rules.fit(size) == size]
    assert rules.least_fit(above) == (allowed[0] if allowed else least + more)


# -- the first world --------------------------------------------------------------------------------


def test_with_min_nodes_ready_the_coordinator_waits_for_settle() -> None:
    table = Table()
    table.comes("a", slots=2)
    table.wait(10.0)
    table.comes("b", slots=3, policy=policy(min_nodes=4))
    table.wait(SETTLE_S - STEP_S)
    assert table.stand == (FORMING, 1)
    assert table.last.reason == (
        "2 of up to 4 nodes have joined: a (2 workers), b (3 workers); the workers start when no other node has come "
        f"for {SETTLE_S:g} s (--settle)"
    )
    assert table.last.lacks_nodes, "the common causes are named"
    table.wait(STEP_S)
    assert (table.stand, table.plan.policy) == ((RUNNING, 1), policy()), (
        "the first member's policy is the run's"
    )
    assert table.plan.world is not None
    assert [(seat.node_id, seat.first_rank, seat.slots) for seat in table.plan.world.seats] == [
        ("a", 0, 2),
        ("b", 2, 3),
    ]


def test_each_new_node_extends_settle_but_not_beyond_three_times_settle() -> None:
    table = Table(policy(max_nodes=40))
    table.comes("n0")
    table.comes("n1")
    came = 2
    while table.plan.phase is FORMING and came < 40:
        table.wait(SETTLE_S / 2)
        if table.plan.phase is FORMING:
            table.comes(f"n{came}")
            came += 1
    assert table.now_s == 3 * SETTLE_S
    assert len(table.world) == came


def test_a_known_nodes_new_incarnation_does_not_extend_settle() -> None:
    table = Table()
    table.comes("a")
    table.comes("b")
    table.wait(SETTLE_S - 2 * STEP_S)
    table.comes("b", life=2, replaces=("b-1",))
    table.wait(2 * STEP_S)
    assert table.stand == (RUNNING, 1)
    assert table.plan.world is not None
    assert table.plan.world.node_rank("b-2") == 1


def test_without_enough_nodes_the_run_fails_after_join_timeout_and_names_those_that_joined() -> None:
    table = Table(policy(min_nodes=3))
    table.comes("a")
    table.comes("b", slots=2, policy=policy(min_nodes=2))
    table.wait(60.0 - STEP_S)
    assert table.stand == (FORMING, 1)
    assert "waiting for 1 more node (at least 3 required)" in table.last.reason
    assert table.last.lacks_nodes
    table.wait(STEP_S)
    assert table.stand == (FAILED, 1)
    for words in (
        "only 2 of at least 3 nodes joined within 60 s",
        "a (1 worker), b (2 workers)",
        "1 more needed",
        "b with 2 as the minimum of --nnodes, the run has 3: start all with the same",
    ):
        assert words in table.plan.reason
    assert table.plan.failure is not None
    assert table.plan.failure.kind is FailureKind.TOO_FEW


# -- forming again ----------------------------------------------------------------------------------


def test_survivors_form_the_next_world_without_waiting() -> None:
    table = running("a", "b", "c")
    fails(table, "a")
    before_s = table.now_s
    table.all_say(State.READY, "a", "b")
    assert table.stand == (FORMING, 2)
    table.says("c", State.READY)
    assert (table.stand, table.world, table.now_s) == ((RUNNING, 2), ["a", "b", "c"], before_s)


def test_no_world_is_sealed_until_every_live_participant_has_stopped() -> None:
    table = running("a", "b", "c", rules=policy(max_nodes=3))
    fails(table, "a")
    table.all_say(State.READY, "a", "b")
    table.says("c", State.READY, 1)  # of the generation before
    table.wait(4.0)
    assert table.stand == (FORMING, 2)
    assert table.last.reason == "waiting for the workers of c to stop or their lease to expire"
    table.says("c", State.LEFT)
    assert (table.stand, table.world) == ((RUNNING, 2), ["a", "b"])


def test_a_lost_participant_is_cleared_when_its_revoked_lease_and_the_margin_are_over() -> None:
    table = running("a", "b", "c")
    table.falls_silent("c")
    silent_s = table.now_s
    table.wait(TTL_S)
    assert (table.stand, table.revoked, table.plan.lost) == ((FORMING, 2), ["c-1"], ("c",))
    assert "c lost" in table.plan.reason
    table.all_say(State.READY, "a", "b")
    table.wait(MARGIN_S - STEP_S)
    assert table.stand == (FORMING, 2), "its guard may not have killed its workers yet"
    assert table.last.reason == "waiting for the lease of c to expire", (
        "it does not answer: nothing stops there"
    )
    table.wait(STEP_S)
    assert (table.stand, table.world, table.plan.lost) == ((RUNNING, 2), ["a", "b"], ())
    assert table.now_s == silent_s + FENCE_S


def test_a_participant_proven_gone_by_its_successor_is_cleared_at_once() -> None:
    table = running("a", "b")
    table.comes("b", life=2, replaces=("b-1",))
    assert (table.stand, table.revoked) == ((FORMING, 2), ["b-1"])
    table.all_say(State.READY, "a", "b")
    assert table.stand == (RUNNING, 2)
    assert table.plan.world is not None
    assert table.plan.world.node_rank("b-2") == 1


def test_a_successor_without_proof_waits_for_lease_and_margin() -> None:
    table = running("a", "b")
    table.falls_silent("b")
    silent_s = table.now_s
    table.comes("b", life=2)
    assert table.stand == (RUNNING, 1)
    table.wait(TTL_S)
    assert table.plan.refused == {}, "the holder of the id does not renew"
    table.all_say(State.READY, "a", "b")
    table.wait(MARGIN_S)
    assert (table.stand, table.now_s, table.plan.lost) == ((RUNNING, 2), silent_s + FENCE_S, ())
    assert table.plan.world is not None
    assert [seat.incarnation for seat in table.plan.world.seats] == ["a-1", "b-2"]


def test_a_standby_node_is_used_in_the_next_generation() -> None:
    table = running("a", "b", rules=policy(max_nodes=2))
    table.comes("c")
    table.wait(3 * SETTLE_S)
    assert table.stand == (RUNNING, 1), "no room"
    table.says("b", State.LEAVING)
    table.all_say(State.READY, "a", "c")
    assert table.stand == (FORMING, 2)
    table.says("b", State.LEFT)
    assert (table.stand, table.world) == ((RUNNING, 2), ["a", "c"])


def test_a_new_node_does_not_displace_a_participant() -> None:
    table = running("b", "c", rules=policy(max_nodes=2))
    table.comes("a")
    fail_and_reform(table, "b", "a", "b", "c")
    assert (table.stand, table.world) == ((RUNNING, 2), ["b", "c"])


def test_nodes_that_join_together_are_admitted_together_after_settle() -> None:
    table = running("a", "b")
    table.comes("c")
    table.wait(SETTLE_S / 2)
    table.comes("d")
    table.wait(SETTLE_S - STEP_S)
    assert table.stand == (RUNNING, 1)
    table.wait(STEP_S)
    assert (table.stand, table.plan.reason) == ((FORMING, 2), "c, d join")
    table.all_say(State.READY, "a", "b", "c", "d")
    assert (table.stand, table.plan.charged) == ((RUNNING, 2), 0)


def test_no_node_is_admitted_while_the_world_starts_or_once_a_node_succeeded() -> None:
    table = running("a", "b")
    table.says("b", State.READY, 1)
    table.comes("c")
    table.wait(2 * SETTLE_S)
    assert table.stand == (RUNNING, 1)
    table.says("b", State.SUCCEEDED)
    table.wait(2 * SETTLE_S)
    assert table.stand == (RUNNING, 1)


def test_a_node_that_does_not_start_its_workers_in_time_is_named_and_costs_no_restart() -> None:
    table = running("a", "b", "c", slots=200)
    table.says("c", State.READY, 1)
    table.wait(table.rules.start_timeout_s - STEP_S)
    assert table.revoked == []
    table.wait(STEP_S)
    ended = table.plan
    assert (ended.phase, ended.failed_node, table.revoked) == (FORMING, "c", [])
    cause = root_cause([], ended, ended.world)
    assert cause is not None
    assert (cause.kind, cause.node_id) == (CauseKind.START, "c")
    assert cause.what == (
        "c did not start its 200 workers within 20 s; start fewer there (--nproc-per-node), or allow more time "
        "(--start-timeout)"
    )
    table.all_say(State.READY, "a", "b")
    assert table.stand == (FORMING, 2), "c has not stopped"
    table.says("c", State.READY)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 2), ["a", "b", "c"], 0)


def test_a_node_that_started_late_twice_in_a_row_joins_when_the_others_have_made_progress() -> None:
    table = running("a", "b", "c")
    fails(table, "a")
    table.all_say(State.READY, "a", "b", "c")
    for nodes in (["a", "b", "c"], ["a", "b"]):
        table.all_say(State.RUNNING, "a", "b")
        table.wait(table.rules.start_timeout_s)
        assert table.plan.phase is FORMING
        table.all_say(State.READY, "a", "b", "c")
        assert (table.plan.phase, table.world) == (RUNNING, nodes)
    table.all_say(State.RUNNING, "a", "b")
    table.wait(PROGRESS_S - STEP_S)
    assert table.stand == (RUNNING, 4)
    table.wait(STEP_S)
    assert (table.plan.phase, table.plan.losses, table.plan.start_failures) == (FORMING, {}, {})
    table.all_say(State.READY, "a", "b", "c")
    assert table.world == ["a", "b", "c"]


def test_a_run_of_which_no_node_ever_starts_in_time_ends_when_its_restarts_are_used() -> None:
    table = running("a", slots=200, rules=policy(min_nodes=1, max_nodes=1, max_restarts=1))
    charged = []
    for _ in range(3):
        table.says("a", State.READY)
        table.wait(table.rules.start_timeout_s)
        table.says("a", State.READY)
        charged.append((table.plan.phase, table.plan.charged))
    assert charged == [(RUNNING, 0), (RUNNING, 1), (FAILED, 1)]
    assert "did not start its 200 workers" in table.plan.reason
    assert "the only restart is used" in table.plan.reason


# -- the budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [CRASH, HANG])
def test_a_failure_is_charged_once_for_any_number_of_failed_workers(failure: Failure) -> None:
    table = running("a", "b", "c")
    for node in ("a", "b", "c"):
        fails(table, node, failure)
    assert table.plan.charged == 0, "what is charged is known when the next world is sealed"
    table.all_say(State.READY, "a", "b", "c")
    assert table.stand == (RUNNING, 2)
    assert table.plan.charged == 1
    assert "restart 1 of 3" in table.plan.reason


def silent(table: Table) -> None:
    table.falls_silent("c")


def restarted(table: Table) -> None:
    table.comes("c", life=2, replaces=("c-1",))
    table.says("c", State.LEFT)


def leaving(table: Table) -> None:
    table.says("c", State.LEAVING)
    table.says("c", State.LEFT)


@pytest.mark.parametrize("participant_is", [silent, restarted, leaving])
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_is_not_charged_when_a_participant_is_gone(
    participant_is: Callable[[Table], None], first: bool
) -> None:
    table = running("a", "b", "c", rules=policy(max_restarts=0))
    if first:
        participant_is(table)
    table.says("a", State.FAILED, 1, failure=CRASH)
    if not first:
        participant_is(table)
    table.all_say(State.READY, "a", "b")
    table.wait(FENCE_S)
    assert (table.stand, table.plan.charged) == ((RUNNING, 2), 0)
    fail_and_reform(table, "a", "a", "b")
    assert (table.plan.phase, table.plan.generation) == (FAILED, 3)
    assert "no restarts are allowed" in table.plan.reason


def test_a_failure_is_not_charged_when_a_participant_is_unknown_to_a_new_coordinator() -> None:
    """Its record cannot be read any more: perhaps it was lost, and the failure only follows from that."""
    table = running("a", "b", "c")
    fails(table, "a")
    table.disappears("c")
    table.change_coordinator()
    table.all_say(State.READY, "a", "b")
    assert table.stand == (FORMING, 2), "c may still run"
    table.wait(FENCE_S)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 2), ["a", "b"], 0)


def test_a_failure_is_not_charged_when_a_participant_is_in_a_later_generation() -> None:
    table = running("a", "b")
    moved_on = msgspec.structs.replace(table.members["b-1"], state=State.READY, generation=2)
    table.coordinator.observe(moved_on, table.leases["b-1"], table.now_s)
    fails(table, "a")
    assert table.plan.reason == f"{CRASH.summary}; b dropped out"
    table.all_say(State.READY, "a", "b")
    assert (table.stand, table.plan.charged) == ((RUNNING, 2), 0)


def test_a_node_whose_start_fails_twice_in_a_row_is_left_out_while_min_remain() -> None:
    table = running("a", "b", "c")
    for generation, nodes in ((2, ["a", "b", "c"]), (3, ["a", "b"])):
        fail_and_reform(table, "c", "a", "b", "c", failure=NO_START)
        assert (table.stand, table.world, table.plan.charged) == ((RUNNING, generation), nodes, 0)
    table.all_say(State.RUNNING, "a", "b")
    table.wait(2 * PROGRESS_S)
    assert table.stand == (RUNNING, 3), "nor is it admitted later"


def test_a_node_whose_start_fails_twice_and_cannot_be_spared_is_charged() -> None:
    table = running("a", "b", rules=policy(max_restarts=1))
    fail_and_reform(table, "b", "a", "b", failure=NO_START)
    assert table.plan.charged == 0
    fail_and_reform(table, "b", "a", "b", failure=NO_START)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 3), ["a", "b"], 1)
    fail_and_reform(table, "b", "a", "b", failure=NO_START)
    assert table.stand == (FAILED, 4)
    assert NO_START.summary in table.plan.reason


def test_an_unreachable_bootstrap_store_is_replaced_and_not_charged() -> None:
    table = running("a", "b", "c")
    assert table.plan.world is not None
    assert table.plan.world.bootstrap_node == "a"
    out_of_reach = Failure(FailureKind.BOOTSTRAP, "a:29500 could not be reached", unreachable_node="a")
    fail_and_reform(table, "b", "a", "b", "c", failure=out_of_reach)
    assert (table.plan.world.bootstrap_node, table.plan.world.bootstrap) == ("b", Address("b.example", 29500))
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 2), ["a", "b", "c"], 0), (
        "only the store moves"
    )


NO_PORT = Failure(FailureKind.BOOTSTRAP, "a has no port")


def test_a_node_without_a_bootstrap_store_takes_a_seat_beside_one_that_offers_it() -> None:
    table = Table(policy(min_nodes=2, max_nodes=2))
    table.comes("a", bootstrap=None, failure=NO_PORT)
    table.comes("b")
    assert table.plan.world is not None
    assert (table.stand, table.world, table.plan.world.bootstrap_node) == ((RUNNING, 1), ["a", "b"], "b")


def test_a_node_without_a_bootstrap_store_joins_a_running_world_with_one_restart() -> None:
    table = running("a", "b", rules=policy(max_nodes=4))
    table.comes("c", bootstrap=None, failure=NO_PORT)
    table.wait(SETTLE_S)
    assert (table.stand, table.plan.joining) == ((FORMING, 2), ("c",))
    table.says("c", State.READY, bootstrap=None, failure=NO_PORT)
    table.all_say(State.READY, "a", "b")
    assert (table.stand, table.world) == ((RUNNING, 2), ["a", "b", "c"])
    table.all_say(State.RUNNING, "a", "b", "c")
    table.wait(2 * PROGRESS_S)
    assert (table.stand, table.plan.losses) == ((RUNNING, 2), {})


@pytest.mark.parametrize("offered", [False, True])
def test_without_a_bootstrap_store_the_run_waits_with_the_reason_and_fails_after_join_timeout(
    offered: bool,
) -> None:
    table = Table()
    table.wait(5.0)
    for node in "ab":
        table.comes(node, bootstrap=None, failure=NO_PORT if node == "a" else None)
    enough_s = table.now_s
    table.wait(SETTLE_S)
    assert table.stand == (FORMING, 1)
    assert table.last.reason == "waiting for a node that can offer a bootstrap store: a has no port"
    assert table.last.wake_s <= enough_s + table.rules.join_timeout_s
    table.wait(table.rules.join_timeout_s - SETTLE_S - STEP_S)
    assert table.stand == (FORMING, 1)
    if offered:  # at the last moment
        table.says("b", State.READY, bootstrap=Address("b.example", 29500))
        assert table.plan.world is not None
        assert (table.stand, table.plan.world.bootstrap_node) == ((RUNNING, 1), "b")
        return
    table.wait(STEP_S)
    assert table.stand == (FAILED, 1)
    assert table.plan.reason == "no node could offer a bootstrap store within 60 s: a has no port"
    assert table.plan.failure is not None
    assert table.plan.failure.kind is FailureKind.BOOTSTRAP


def test_a_standby_node_with_a_bootstrap_store_joins_if_no_participant_offers_one() -> None:
    table = running("a", "b", rules=policy(max_nodes=2))
    table.comes("c")
    fails(table, "a")
    table.says("a", State.READY, bootstrap=None, failure=NO_PORT)
    table.says("c", State.READY)
    table.says("b", State.READY, bootstrap=None, failure=NO_PORT)
    assert table.plan.world is not None
    assert (table.stand, table.world, table.plan.world.bootstrap_node) == ((RUNNING, 2), ["a", "c"], "c")


def test_a_node_that_failed_to_start_twice_hosts_the_bootstrap_store_where_no_other_node_can() -> None:
    table = running("a", "b", rules=policy(max_restarts=1, min_nodes=1))
    for _ in range(2):
        fail_and_reform(table, "b", "a", "b", failure=NO_START)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 3), ["a"], 0)
    fails(table, "a")
    table.says("b", State.READY)
    table.says("a", State.READY, bootstrap=None, failure=NO_PORT)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 4), ["b"], 1)
    fail_and_reform(table, "b", "b", failure=NO_START)
    table.says("a", State.READY, bootstrap=None, failure=NO_PORT)
    assert table.stand == (FAILED, 5), "its failed starts count now"


# -- finishing --------------------------------------------------------------------------------------


def test_when_every_node_succeeded_the_run_is_finished() -> None:
    table = running("a", "b")
    table.says("a", State.SUCCEEDED)
    assert table.stand == (RUNNING, 1)
    table.says("b", State.SUCCEEDED)
    fails(table, "a")
    assert (table.stand, table.plan.failure) == ((FINISHED, 1), None), "a failure after that is ignored"
    assert table.plan.reason == "generation 1 succeeded on 2 nodes"
    table.wait(2 * TTL_S - STEP_S)
    assert not table.last.done
    table.wait(STEP_S)
    assert table.last.done, "the outcome is kept for two leases at most"


@pytest.mark.parametrize("coordinator_changes", [False, True])
def test_a_success_is_kept_if_its_node_is_lost(coordinator_changes: bool) -> None:
    table = running("a", "b")
    table.says("a", State.SUCCEEDED)
    table.falls_silent("a")
    table.wait(TTL_S)
    if coordinator_changes:
        del table.members["a-1"], table.leases["a-1"]
        table.coordinator = Coordinator(table.now_s, plan=table.plan)
    table.wait(3 * FENCE_S)
    assert (table.stand, table.plan.succeeded) == ((RUNNING, 1), ("a-1",))
    table.says("b", State.SUCCEEDED)
    assert table.stand == (FINISHED, 1)


def test_a_failure_before_all_nodes_succeeded_restarts_all_nodes() -> None:
    table = running("a", "b")
    table.says("a", State.SUCCEEDED)
    fail_and_reform(table, "b", "a", "b")
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 2), ["a", "b"], 1)
    table.says("b", State.SUCCEEDED)
    assert table.stand == (RUNNING, 2), "the success of the generation before does not count"


def test_the_outcome_is_kept_until_every_live_node_acknowledged_it() -> None:
    table = running("a", "b", "c")
    table.falls_silent("c")
    table.all_say(State.SUCCEEDED, "a", "b", "c")
    table.says("a", State.LEFT)
    assert not table.last.done
    assert table.last.reason == "the run is over; waiting for b, c to acknowledge"
    table.says("b", State.LEFT)
    assert not table.last.done
    table.wait(TTL_S)
    assert table.last.done, "the lease of the last is over"


# -- who may take part ------------------------------------------------------------------------------


def test_a_new_coordinator_keeps_the_node_that_has_the_seat_and_refuses_the_second_agent_with_its_id() -> (
    None
):
    table = running("a", "b")
    table.comes("b", life=2, incarnation="b-0")
    table.change_coordinator()
    table.wait(4 * STEP_S)
    assert set(table.plan.refused) == {"b-0"}
    address = table.members["b-0"].address
    assert table.plan.refused["b-0"].why.startswith("node id b is held by a living agent at ")
    assert table.plan.reason == f"an agent at {address} also calls itself b and was refused", "to the others"
    assert table.stand == (RUNNING, 1)


def test_a_longer_lease_than_the_runs_is_refused_and_a_shorter_one_is_not() -> None:
    table = running("a", "b")
    table.comes("c", ttl_s=TTL_S + 1)
    table.comes("d", ttl_s=TTL_S - 1)
    assert set(table.plan.refused) == {"c-1"}
    assert "start every agent with the same --lease-ttl" in table.plan.refused["c-1"].why
    table.wait(SETTLE_S)
    table.all_say(State.READY, "a", "b", "d")
    assert table.world == ["a", "b", "d"]


# -- a new store ------------------------------------------------------------------------------------

KNOWN = on_disk(7, world(7, "a-1", "b-1"), charged=2, order=("a", "b"))


def test_a_new_store_forms_the_next_generation_when_a_participant_does_not_run() -> None:
    table = Table(remembered=KNOWN)
    table.comes("a", state=State.RUNNING, generation=7)
    table.comes("b", state=State.READY, generation=0)
    assert table.stand == (FORMING, 8)
    assert [seat.incarnation for seat in table.plan.uncleared] == ["a-1", "b-1"]
    table.all_say(State.READY, "b", "a")
    table.wait(SETTLE_S)
    assert (table.stand, table.world, table.plan.charged) == ((RUNNING, 8), ["a", "b"], 2)


def test_a_node_that_never_registers_in_a_new_store_is_fenced_after_lease_and_margin() -> None:
    table = Table(policy(min_nodes=1), remembered=KNOWN)
    table.comes("a", state=State.RUNNING, generation=7)
    table.wait(TTL_S)
    assert table.stand == (FORMING, 8)
    table.says("a", State.READY)
    table.wait(MARGIN_S - STEP_S)
    assert table.stand == (FORMING, 8)
    table.wait(STEP_S)
    assert (table.stand, table.world) == ((RUNNING, 8), ["a"])


def test_a_generation_that_was_only_forming_is_not_used_again() -> None:
    table = Table(remembered=on_disk(9, KNOWN.world, charged=2, order=("a", "b")))
    table.comes("a", state=State.RUNNING, generation=7)
    assert table.stand == (FORMING, 10)


def test_an_unpublished_generation_of_a_former_leader_ends_no_running_world() -> None:
    """It wrote it to its disk first; elected again (here: telling of it as a node), it must not go above it."""
    table = running("a", "b", rules=policy(max_nodes=2))
    table.comes("c", history=on_disk(table.plan.generation + 1, table.plan.world))
    table.wait(TTL_S)
    assert table.stand == (RUNNING, 1)
    fails(table, "a")
    table.all_say(State.READY, "b", "a")
    assert (table.stand, table.plan.charged) == ((RUNNING, 2), 1)
