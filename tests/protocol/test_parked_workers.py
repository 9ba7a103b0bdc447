"""One node whose workers park, or are started before it has a place in a world."""

from __future__ import annotations

import pytest

from elastic_agent.protocol.node import (
    Announce,
    Depart,
    Grace,
    Node,
    Outcome,
    Prepare,
    Rejoin,
    StartWorkers,
    StopWorkers,
    WarmUp,
)
from elastic_agent.protocol.records import (
    Phase,
    State,
)
from tests.protocol.node_stories import (
    LEFT,
    READY,
    RUNNING,
    Story,
    departs,
    ended,
    fails,
    forming,
    parked,
    sealed,
    stopping,
    told,
)
from tests.protocol.support import CRASH, plan, world

ALL_PARKED, SOME_PARKED = {"parked": True, "all_parked": True}, {"parked": True, "all_parked": False}
PARKED: dict[str, Story] = {
    "a node is ready when its workers are parked": (
        stopping,
        [("stopped", ALL_PARKED, [Announce(READY, 2)])],
    ),
    "parked workers go on in the next world, after the same checks": (
        parked,
        [
            ("plan_changed", sealed(2, 4, "a-1"), [Prepare(world(2, "a-1"))]),
            ("prepared", 2, [StartWorkers(world(2, "a-1"))]),
        ],
    ),
    "when their world has succeeded, none of them is left to be stopped": (
        parked,
        [
            ("plan_changed", sealed(2, 4, "a-1"), [Prepare(world(2, "a-1"))]),
            ("prepared", 2, [StartWorkers(world(2, "a-1"))]),
            ("started", 2, [Announce(RUNNING, 2)]),
            ("succeeded", 2, [Announce(State.SUCCEEDED, 2)]),
            ("plan_changed", plan(Phase.FINISHED, 2, 5), departs(Outcome.FINISHED, "finished 2", 2)),
        ],
    ),
    "nothing is kept when the lease is lost": (
        parked,
        [("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]), ("stopped", [Rejoin("cut off")])],
    ),
    "nor if it was lost while they parked": (
        stopping,
        [
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", ALL_PARKED, [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", [Rejoin("cut off")]),
        ],
    ),
    "they wait for another world when one is sealed without this node": (
        parked,
        [
            ("plan_changed", sealed(2, 4, "b-1"), []),
            ("plan_changed", forming(3, 5), [Announce(READY, 3)]),
        ],
    ),
    "nor when the run has ended": (
        parked,
        [
            ("plan_changed", ended(Phase.FAILED), [StopWorkers(Grace.NONE, "it is over")]),
            ("stopped", [Announce(LEFT, 1), Depart(Outcome.FAILED, "it is over")]),
        ],
    ),
}


def fresh() -> Node:
    """Node a, which has just got its lease and starts workers before it has a place in a world."""
    node = Node("a-1", warms_up=True)
    node.registered()
    return node


def apart() -> Node:
    """Node a, whose workers are being started apart from any world while generation 1 forms."""
    node = fresh()
    node.plan_changed(forming(1, 1))
    return node


def warm() -> Node:
    """Node a, whose workers run in generation 1, before which they were started apart."""
    node = apart()
    node.warmed_up()
    node.plan_changed(sealed(1, 2, "a-1", "b-1"))
    node.prepared(1)
    node.started(1)
    return node


APART: dict[str, Story] = {
    "workers are not started apart before the node has a lease": (
        lambda: Node("a-1", warms_up=True),
        [
            ("plan_changed", forming(1, 1), [Announce(READY, 1, warms_up=True)]),
            ("registered", [WarmUp()]),
            ("registered", []),
        ],
    ),
    "nobody waits for a node while its workers are started apart": (
        fresh,
        [
            ("plan_changed", forming(1, 1), [Announce(READY, 1, warms_up=True), WarmUp()]),
            ("plan_changed", forming(1, 2), []),
            ("warmed_up", [Announce(READY, 1)]),
        ],
    ),
    "a node that joins a running world starts its workers first": (
        fresh,
        [
            ("plan_changed", sealed(1, 2, "b-1", "c-1"), [WarmUp()]),
            ("warmed_up", [Announce(READY, 0)]),
            ("plan_changed", forming(2, 3), [Announce(READY, 2)]),
        ],
    ),
    "a node some of whose workers are parked starts the others": (
        warm,
        [
            ("failed", 1, CRASH, fails(CRASH)),
            ("plan_changed", forming(2, 3), []),
            ("stopped", SOME_PARKED, [Announce(READY, 2, warms_up=True), WarmUp()]),
            ("plan_changed", sealed(2, 4, "b-1"), []),
            ("warmed_up", [Announce(READY, 2)]),
        ],
    ),
    "a node all of whose workers are parked starts none": (
        warm,
        [
            ("plan_changed", forming(2, 3), [StopWorkers(Grace.RESTART, "forming 2", keep=True)]),
            ("stopped", ALL_PARKED, [Announce(READY, 2)]),
        ],
    ),
    "workers that cannot be started apart start in their world from then on": (
        apart,
        [
            ("warmed_up", {"again": False}, [Announce(READY, 1)]),
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", [Rejoin("cut off")]),
            ("rejoined", "a-2", []),
            ("plan_changed", forming(2, 3), [Announce(READY, 2)]),
        ],
    ),
    "workers that could not be started apart this time are, later": (
        apart,
        [
            ("warmed_up", [Announce(READY, 1)]),
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", [Rejoin("cut off")]),
            ("rejoined", "a-2", [Announce(READY, 0, warms_up=True)]),
        ],
    ),
    "they are stopped with the lease, and the next incarnation starts others when it has its own": (
        apart,
        [
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", [Rejoin("cut off")]),
            ("rejoined", "a-2", [Announce(READY, 0, warms_up=True)]),
            ("plan_changed", forming(1, 3), [Announce(READY, 1, warms_up=True)]),
            ("registered", [WarmUp()]),
        ],
    ),
    "a node that resumes a stopped run starts its workers when that is resumed": (
        lambda: Node("a-1", warms_up=True),
        [
            ("plan_changed", ended(Phase.STOPPED), [Announce(READY, 2, warms_up=True)]),
            ("registered", []),
            ("plan_changed", forming(2, 10), [WarmUp()]),
        ],
    ),
    **{
        f"workers that have {event} have others started in their place": (
            warm,
            [
                (event, 1, [Announce(State(event), 1)]),
                ("plan_changed", forming(2, 3), [Announce(READY, 2, warms_up=True), WarmUp()]),
            ],
        )
        for event in ("succeeded", "saved")
    },
    "they are stopped when the run ends": (
        apart,
        [
            ("plan_changed", ended(Phase.FAILED), [StopWorkers(Grace.NONE, "it is over")]),
            ("stopped", [Announce(LEFT, 1), Depart(Outcome.FAILED, "it is over")]),
        ],
    ),
}


STORIES = PARKED | APART


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_a_node_does_with_parked_workers(story: Story) -> None:
    for event, does, expected in told(story):
        assert does == expected, event
