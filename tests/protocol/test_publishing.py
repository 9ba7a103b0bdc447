"""Whatever stands in the store, the coordinator publishes only what every node can read."""

from __future__ import annotations

import pytest

from elastic_agent.protocol.codec import (
    MAX_PLAN_BYTES,
    MAX_REPORTED_GENERATION,
    RecordError,
    check_whole,
    decode,
    encode,
)
from elastic_agent.protocol.coordinator import MAX_REFUSED
from elastic_agent.protocol.records import (
    Growth,
    Lease,
    Phase,
    Plan,
    State,
)
from elastic_agent.transport.record_reader import RecordReader
from tests.protocol.support import SETTLE_S, TTL_S, Table, member, on_disk, plan, policy, running, world

FORMING, RUNNING, FAILED = Phase.FORMING, Phase.RUNNING, Phase.FAILED
UNREADABLE = "the run cannot continue"
POD = "training-job-with-a-name-as-long-as-kubernetes-allows-worker-{:02}"


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


@pytest.mark.parametrize("of", [None, 1, 3])
def test_a_running_plan_without_a_world_is_refused(of: int | None) -> None:
    with pytest.raises(RecordError, match="generation 2 runs without a world"):
        check_whole(plan(RUNNING, 2, 1, world=world(of, "a-1") if of is not None else None))
    check_whole(plan(RUNNING, 2, 1, world=world(2, "a-1")))


def test_a_world_later_than_its_record_is_refused() -> None:
    with pytest.raises(RecordError, match="plan of generation 2 with the world of a later one"):
        check_whole(plan(FORMING, 2, 1, world=world(3, "a-1")))
    check_whole(plan(FORMING, 2, 1, world=world(1, "a-1")))
    for record in (on_disk(2, world(3, "a-1")), member("a", history=on_disk(2, world(3, "a-1")))):
        with pytest.raises(RecordError, match="plan of generation 2 with the world of a later one"):
            decode(type(record), encode(record))


def test_an_impossible_generation_in_a_record_is_reported_and_ignored() -> None:
    told = on_disk(MAX_REPORTED_GENERATION + 1, world(3, "b-1"))
    rejected: list[str] = []
    reader = RecordReader("run/", rejected.append)
    seen = reader.member("a-1", encode(member("a", history=told)))
    assert seen == member("a")
    assert len(rejected) == 1
    assert "run/m/a-1: reports generation" in rejected[0]
    assert reader.member("a-1", encode(member("a", history=told))) == seen
    assert len(rejected) == 1, "once is enough"


def test_the_next_generation_after_the_maximum_can_be_published() -> None:
    table = running("a", "b")
    table.comes("c", history=on_disk(MAX_REPORTED_GENERATION, world(MAX_REPORTED_GENERATION, "c-1")))
    assert table.stand == (FORMING, MAX_REPORTED_GENERATION + 1)
    assert decode(Plan, encode(table.plan)) == table.plan
