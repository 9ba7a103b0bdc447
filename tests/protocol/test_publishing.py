"""Whatever stands in the store, the coordinator publishes only what every node can read."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_agent.protocol.codec import (
    MAX_AHEAD,
    MAX_PLAN_BYTES,
    MAX_REPORTED_GENERATION,
    RecordError,
    check_follows,
    check_whole,
    decode,
    encode,
)
from elastic_agent.protocol.coordinator import MAX_REFUSED, Coordinator
from elastic_agent.protocol.records import (
    Cause,
    Growth,
    History,
    Lease,
    Member,
    Phase,
    Plan,
    Policy,
    State,
    StopRequest,
)
from elastic_agent.transport.record_reader import RecordReader
from tests.protocol import strategies as any_
from tests.protocol.support import SETTLE_S, TTL_S, Table, member, plan, policy, running, world

FORMING, RUNNING, FAILED = Phase.FORMING, Phase.RUNNING, Phase.FAILED
UNREADABLE = "the run cannot continue"
POD = "training-job-with-a-name-as-long-as-kubernetes-allows-worker-{:02}"

long_names = st.sampled_from("abcdefghijkl").map(lambda letter: letter * 128)
edges = st.sampled_from([0, 1, 2, 3, MAX_REPORTED_GENERATION, 2**53 - 1, 2**53])
asks = st.builds(
    StopRequest,
    st.integers(1, 2**31),
    st.sampled_from(Cause),
    st.sampled_from([0.0, 1e7]),
    st.just("w" * 512),
    st.none() | long_names,
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Of generations at the edges, with worlds of nodes that come as well."""
    known, generation = draw(any_.histories), draw(edges)
    sealed = known.world
    if sealed is not None:
        sealed = msgspec.structs.replace(sealed, generation=draw(st.sampled_from([0, generation])))
    charged = draw(st.sampled_from([0, 2**31]))
    budget = draw(any_.budgets(charged))
    return msgspec.structs.replace(known, generation=generation, world=sealed, charged=charged, budget=budget)


@st.composite
def members(draw: st.DrawFn, newest: Plan | None) -> Member:
    """A node that says something that bears on the newest plan, in as many words as it may."""
    here = newest.generation if newest is not None else 1
    node = draw(long_names)
    return msgspec.structs.replace(
        draw(any_.members),
        node_id=node,
        incarnation=draw(st.just(node) | long_names),
        state=draw(st.sampled_from([State.READY, State.RUNNING, State.FAILED, State.SAVED, State.LEFT])),
        generation=draw(st.sampled_from([0, here, here, min(here + 1, 2**53)]) | edges),
        policy=Policy(
            1,
            draw(st.integers(1, 12)),
            draw(st.sampled_from([0, 2**31])),
            grow=draw(st.sampled_from(Growth)),
        ),
        history=draw(st.none() | histories()),
        handles_notices=draw(st.booleans()),
        stop_request=draw(st.none() | asks),
        replaces=tuple(draw(st.lists(long_names, max_size=2))),
    )


def store_of(data: st.DataObject, coordinator: Coordinator, *, steps: int = 8) -> list[Plan]:
    """Everything published while nodes say what they like and time goes by, each plan read as a node reads it."""
    reader = RecordReader("job", lambda problem: None)
    published: list[Plan] = []
    now_s = 0.0
    for _ in range(steps):
        said = data.draw(members(coordinator.plan))
        seen = reader.member(said.incarnation, encode(said))
        assert seen is not None
        beat = data.draw(st.integers(0, 3))
        coordinator.observe(
            seen, Lease(said.incarnation, data.draw(st.sampled_from([5.0, 3600.0])), beat), now_s
        )
        for _ in range(20):
            decision = coordinator.decide(now_s)
            for key in decision.revoke:
                coordinator.revoked(key)
            for key in decision.forget:
                coordinator.forgotten(key)
            if decision.plan is None:
                break
            newest = decode(Plan, encode(decision.plan))
            assert newest == decision.plan
            assert decode(History, encode(newest.history())) == newest.history()
            published.append(newest)
            coordinator.published(newest, now_s)
        now_s += data.draw(st.sampled_from([0.0, 1.0, 10.0, 700.0]))
    return published


thorough = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(st.data(), st.none() | histories())
def test_no_record_of_a_node_makes_the_next_plan_unreadable(
    data: st.DataObject, remembered: History | None
) -> None:
    if remembered is not None and remembered.generation > MAX_REPORTED_GENERATION:
        remembered = None  # this machine's own, which it wrote itself
    published = store_of(data, Coordinator(0.0, remembered=remembered))
    assert not [one.reason for one in published if one.reason.startswith(UNREADABLE)]


@thorough
@given(st.data(), any_.plans, edges, edges.filter(bool))
def test_a_plan_after_a_foreign_one_is_readable(
    data: st.DataObject, stored: Plan, generation: int, version: int
) -> None:
    stored = msgspec.structs.replace(stored, generation=generation, version=version)
    try:
        check_whole(stored)
    except RecordError:
        stored = msgspec.structs.replace(
            stored, phase=FORMING
        )  # the coordinator never gets to see it as it was
    store_of(data, Coordinator(0.0, stored))


def test_an_impossible_generation_in_a_record_is_reported_and_ignored() -> None:
    told = History(MAX_REPORTED_GENERATION + 1, world(3, "b-1"))
    rejected: list[str] = []
    reader = RecordReader("run/", rejected.append)
    seen = reader.member("a-1", encode(member("a", history=told)))
    assert seen == member("a")
    assert len(rejected) == 1
    assert "run/m/a-1: reports generation" in rejected[0]
    assert reader.member("a-1", encode(member("a", history=told))) == seen
    assert len(rejected) == 1, "once is enough"


def test_the_next_generation_after_the_maximum_can_be_published_and_saved() -> None:
    table = running("a", "b")
    table.comes("c", history=History(MAX_REPORTED_GENERATION, world(MAX_REPORTED_GENERATION, "c-1")))
    assert table.stand == (FORMING, MAX_REPORTED_GENERATION + 1)
    for record in (table.plan, table.plan.history()):
        assert decode(type(record), encode(record)) == record


def test_a_notice_for_many_nodes_with_long_names_can_be_read() -> None:
    table = running("a", "b", rules=policy(max_nodes=12, grow=Growth.AT_NOTICE))
    table.all_say(State.RUNNING, "a", "b")
    table.says("a", State.RUNNING, handles_notices=True)
    for number in range(8):
        table.comes(POD.format(number))
    table.wait(2 * SETTLE_S)
    assert table.plan.notice is not None
    assert "training-job" in table.plan.notice.words
    assert decode(Plan, encode(table.plan)) == table.plan


def test_an_unreadable_next_plan_ends_the_run_with_the_reason() -> None:
    """A world too large for one record: no node would ever hear of it."""
    table = Table(policy(min_nodes=8000, max_nodes=8000))
    for number in range(8000):
        said = member(f"n{number}", f"n{number}-1", role="r" * 512, policy=table.rules)
        table.coordinator.observe(said, Lease(said.incarnation, TTL_S), 0.0)
    table.carry_out()
    assert table.plan.phase is FAILED
    assert table.plan.reason.startswith(UNREADABLE)
    assert f"at most {MAX_PLAN_BYTES} are accepted" in table.plan.reason
    assert decode(Plan, encode(table.plan)) == table.plan


def test_many_refused_nodes_do_not_fill_the_plan() -> None:
    table = running("a", "b", rules=policy(max_nodes=2))
    for number in range(8000):
        said = member(f"n{number}", POD.format(number), policy=table.rules)
        table.coordinator.observe(said, Lease(said.incarnation, 2 * TTL_S), table.now_s)
    table.carry_out()
    assert len(table.plan.refused) == MAX_REFUSED
    assert (table.stand, table.world) == ((RUNNING, 1), ["a", "b"])
    assert decode(Plan, encode(table.plan)) == table.plan


def test_a_node_with_a_longer_lease_takes_no_part_before_it_is_refused() -> None:
    table = Table(policy(max_nodes=2))
    table.comes("a")
    for number in range(MAX_REFUSED + 2):
        said = member(f"n{number}", policy=table.rules)
        table.coordinator.observe(said, Lease(said.incarnation, 2 * TTL_S), table.now_s)
    table.carry_out()
    table.comes("z")
    assert (table.stand, table.world) == ((RUNNING, 1), ["a", "z"])


@pytest.mark.parametrize("version", [0, 2**53 + 1, 10**30])
def test_a_plan_of_an_impossible_version_is_refused(version: int) -> None:
    with pytest.raises(ValueError, match=r"\$\.version"):
        decode(Plan, encode(plan(FORMING, 1, version)))


def test_a_plan_far_ahead_or_of_an_impossible_generation_is_refused() -> None:
    known = plan(FORMING, 1, 5)
    check_follows(plan(FORMING, 1, 5 + MAX_AHEAD), known)
    check_follows(plan(FORMING, 1, 2**53), None)
    with pytest.raises(RecordError, match="version 1000006 does not follow version 5"):
        check_follows(plan(FORMING, 1, 6 + MAX_AHEAD), known)
    with pytest.raises(RecordError, match="above the maximum"):
        check_whole(plan(FORMING, 2**53, 1))


@pytest.mark.parametrize("of", [None, 1, 3])
def test_a_running_plan_without_a_world_is_refused(of: int | None) -> None:
    with pytest.raises(RecordError, match="generation 2 runs without a world"):
        check_whole(plan(RUNNING, 2, 1, world=world(of, "a-1") if of is not None else None))
    check_whole(plan(RUNNING, 2, 1, world=world(2, "a-1")))


def test_a_world_later_than_its_record_is_refused() -> None:
    with pytest.raises(RecordError, match="plan of generation 2 with the world of a later one"):
        check_whole(plan(FORMING, 2, 1, world=world(3, "a-1")))
    check_whole(plan(FORMING, 2, 1, world=world(1, "a-1")))
    for record in (History(2, world(3, "a-1")), member("a", history=History(2, world(3, "a-1")))):
        with pytest.raises(RecordError, match="history of generation 2 with the world of a later one"):
            decode(type(record), encode(record))


@pytest.mark.parametrize("phase", [FORMING, RUNNING])
def test_a_history_with_an_outcome_that_ends_no_run_is_refused(phase: Phase) -> None:
    history = History(2, outcome=phase)
    for record in (history, member("a", history=history)):
        with pytest.raises(RecordError, match=f"outcome {phase}; a run ends finished, failed or stopped"):
            decode(type(record), encode(record))
