"""One node's side: when it says ready, when it starts workers, what stops them, and how it leaves.

Each story is what happens to a node, step by step, and what it does then. Stories that need others (the coordinator,
the store, the guard) are told by the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from elastic_agent.protocol.node import (
    Announce,
    Depart,
    Grace,
    Node,
    Notify,
    Outcome,
    Prepare,
    Rejoin,
    RequestStop,
    StartWorkers,
    StopWorkers,
    WarmUp,
)
from elastic_agent.protocol.records import (
    Cause,
    Failure,
    FailureKind,
    Notice,
    Phase,
    Plan,
    Refusal,
    State,
    StopRequest,
)
from tests.protocol.support import CRASH, HANG, NO_START, on_disk, plan, world

READY, RUNNING, LEFT = State.READY, State.RUNNING, State.LEFT
UNREACHABLE = Failure(FailureKind.BOOTSTRAP, "b:29500 could not be reached", unreachable_node="b")
SIGNAL = Failure(FailureKind.INTERRUPTED, "worker a/0 was terminated by SIGTERM")
TOGETHER = world(1, "a-1", "b-1")
LEAVE = StopRequest(1, Cause.DRAIN, 30.0, "a leaves", leaver="a", life=1)
DRAIN_B = StopRequest(1, Cause.DRAIN, 30.0, "b leaves", leaver="b", life=1)
STOP = StopRequest(1, Cause.PREEMPTED, 30.0, "SIGUSR1 at a", life=1)
ENDS = Notice(3, Cause.WALLTIME, 30.0, "SIGUSR1 at b", ends=True)
MILD = Notice(3, Cause.GROW, 60.0, "c wants to join")


def forming(generation: int, version: int, **fields: object) -> Plan:
    return plan(Phase.FORMING, generation, version, **fields)


def sealed(generation: int, version: int, *incarnations: str, **fields: object) -> Plan:
    return plan(Phase.RUNNING, generation, version, world=world(generation, *incarnations), **fields)


def departs(outcome: Outcome, reason: str = "it is over", generation: int = 1) -> list[object]:
    """The end of the node's part."""
    return [Announce(LEFT, generation), Depart(outcome, reason)]


def fails(failure: Failure) -> list[object]:
    """A failure that leaves workers to be stopped."""
    return [Announce(State.FAILED, 1, failure), StopWorkers(Grace.RESTART, failure.summary, keep=True)]


def ended(phase: Phase, version: int = 9, **fields: object) -> Plan:
    return plan(phase, 1, version, world=TOGETHER, reason="it is over", **fields)


def waiting() -> Node:
    """Node a, which is ready for generation 1."""
    node = Node("a-1")
    node.plan_changed(forming(1, 1))
    return node


def preparing() -> Node:
    node = waiting()
    node.plan_changed(sealed(1, 2, "a-1", "b-1"))
    return node


def starting() -> Node:
    node = preparing()
    node.prepared(1)
    return node


def running() -> Node:
    """Node a, whose workers of generation 1 run."""
    node = starting()
    node.started(1)
    return node


def stopping() -> Node:
    """Node a, which stops its workers because generation 2 forms."""
    node = running()
    node.plan_changed(forming(2, 3))
    return node


def parked() -> Node:
    """Node a, whose workers of generation 1 are parked: it is ready for generation 2."""
    node = stopping()
    node.stopped(parked=True)
    return node


def succeeded() -> Node:
    node = running()
    node.succeeded(1)
    return node


def rejoined(node: Node) -> Node:
    """Node a, which has lost its lease and registers as a-2."""
    node.lease_lost("the lease ran out")
    node.stopped()
    node.rejoined("a-2")
    return node


def outside() -> Node:
    """Node c, without a seat."""
    node = Node("c-1")
    node.plan_changed(sealed(1, 8, "a-1", "b-1"))
    return node


def told_of_the_end() -> Node:
    node = running()
    node.plan_changed(sealed(1, 3, "a-1", "b-1", notice=ENDS))
    return node


def drained(node: Node) -> Node:
    """A node that was asked to leave, and has asked the coordinator."""
    node.drain("SIGTERM", msgspec.structs.replace(LEAVE, leaver=node.incarnation[0]))
    return node


Story = tuple[Callable[[], Node], list[tuple[Any, ...]]]
"""How it begins, and for each event: its name, its arguments (those by name in a dict), and the actions that follow."""

STARTS: dict[str, Story] = {
    "workers are started once, after lease, plan and bootstrap store were checked": (
        waiting,
        [
            ("prepared", 1, []),
            ("plan_changed", sealed(1, 2, "a-1", "b-1"), [Prepare(TOGETHER)]),
            ("prepared", 1, [StartWorkers(TOGETHER)]),
            ("prepared", 1, []),
            ("started", 1, [Announce(RUNNING, 1)]),
        ],
    ),
    "not without having said ready": (lambda: Node("a-1"), [("plan_changed", sealed(1, 2, "a-1"), [])]),
    "not in another generation": (waiting, [("plan_changed", sealed(2, 2, "a-1"), [])]),
    "not on the seat of another incarnation": (waiting, [("plan_changed", sealed(1, 2, "a-2"), [])]),
    "a node without a seat stands by": (
        outside,
        [
            ("plan_changed", forming(2, 9), [Announce(READY, 2)]),
            ("plan_changed", sealed(2, 10, "c-1"), [Prepare(world(2, "c-1"))]),
        ],
    ),
    "a newer plan cancels a start that is prepared": (
        preparing,
        [("plan_changed", forming(2, 3), [Announce(READY, 2)]), ("prepared", 1, []), ("prepared", 2, [])],
    ),
    "a store that cannot be reached is reported": (
        preparing,
        [("prepare_failed", 1, UNREACHABLE, [Announce(State.FAILED, 1, UNREACHABLE)]), ("prepared", 1, [])],
    ),
    "a failed start is reported, and what it left is stopped": (
        starting,
        [("failed", 1, NO_START, fails(NO_START))],
    ),
    "a cancelled start is not reported as running": (
        starting,
        [
            (
                "plan_changed",
                forming(2, 3, reason="b lost"),
                [StopWorkers(Grace.RESTART, "b lost", keep=True)],
            ),
            ("started", 1, []),
            ("stopped", [Announce(READY, 2)]),
        ],
    ),
}

STOPS: dict[str, Story] = {
    "ready is published when the workers are stopped, whatever happens meanwhile": (
        stopping,
        [
            ("failed", 1, CRASH, []),
            ("succeeded", 1, []),
            ("plan_changed", forming(3, 4), []),
            ("stopped", [Announce(READY, 3)]),
        ],
    ),
    "ready is published once for each generation": (
        waiting,
        [("plan_changed", forming(1, 2), []), ("plan_changed", forming(2, 3), [Announce(READY, 2)])],
    ),
    "a failed node is ready when the next generation forms": (
        running,
        [
            ("failed", 1, CRASH, fails(CRASH)),
            ("stopped", []),
            ("plan_changed", forming(2, 3), [Announce(READY, 2)]),
        ],
    ),
    "after a hang stacks are dumped on the other nodes, too": (
        running,
        [
            (
                "plan_changed",
                forming(2, 3, failure=HANG),
                [StopWorkers(Grace.RESTART, "forming 2", dump_stacks=True)],
            )
        ],
    ),
    "workers of a world without this node are stopped without grace": (
        running,
        [
            (
                "plan_changed",
                sealed(2, 3, "b-1"),
                [StopWorkers(Grace.NONE, "generation 2 runs without this node")],
            )
        ],
    ),
    "older plans and events of older workers are ignored": (
        running,
        [("plan_changed", forming(9, 2), []), ("failed", 0, CRASH, []), ("stopped", [])],
    ),
    "a plan of a coordinator that knows less is ignored": (
        running,
        [
            ("store_replaced", [Announce(RUNNING, 1)]),
            ("plan_changed", plan(Phase.FINISHED, 0, 1), []),
            ("plan_changed", sealed(1, 2, "a-1", "b-1"), []),
        ],
    ),
    "a lost lease stops without grace, and then the node rejoins": (
        running,
        [
            ("lease_lost", "revoked", [StopWorkers(Grace.NONE, "revoked")]),
            ("lease_lost", "expired", []),
            ("plan_changed", forming(3, 4), []),
            ("stopped", [Rejoin("revoked")]),
            ("rejoined", "a-2", []),
            ("plan_changed", forming(3, 4), [Announce(READY, 3)]),
        ],
    ),
    "a node without workers rejoins at once": (
        preparing,
        [("lease_lost", "expired", [Rejoin("expired")]), ("prepared", 1, [])],
    ),
    "workers that are stuck in the kernel end the node's part": (
        stopping,
        [
            (
                "stopped",
                (71, 72),
                departs(Outcome.STUCK, "processes 71, 72 are stuck in the kernel and cannot be killed", 2),
            )
        ],
    ),
    "a signal that ended workers is reported until the next ones run": (
        running,
        [
            ("interrupted", 0, SIGNAL, []),
            ("interrupted", 1, SIGNAL, [Announce(RUNNING, 1, SIGNAL)]),
            ("saved", 1, [Announce(State.SAVED, 1, SIGNAL)]),
            ("plan_changed", forming(2, 3), [Announce(READY, 2)]),
        ],
    ),
    "that workers handle notices is reported once": (
        running,
        [
            ("handles_notices", 1, [Announce(RUNNING, 1, handles_notices=True)]),
            ("handles_notices", 1, []),
        ],
    ),
}

ENDS_OF_A_NODE: dict[str, Story] = {
    "drained without a request": (
        running,
        [
            ("drain", "SIGTERM", [Announce(State.LEAVING, 1), StopWorkers(Grace.DRAIN, "SIGTERM")]),
            ("plan_changed", forming(2, 3), []),
            ("lease_lost", "expired", [StopWorkers(Grace.NONE, "expired")]),
            ("stopped", departs(Outcome.DRAINED, "SIGTERM", 2)),
            ("plan_changed", forming(3, 4), []),
        ],
    ),
    "drained without workers": (
        waiting,
        [
            ("drain", "SIGTERM", departs(Outcome.DRAINED, "SIGTERM")),
            ("drain", "SIGTERM", []),
            ("lease_lost", "expired", []),
            ("store_replaced", []),
        ],
    ),
    "drained after its success, which counts": (
        succeeded,
        [("drain", "SIGTERM", [Depart(Outcome.DRAINED, "SIGTERM")])],
    ),
    "drained by a request": (
        running,
        [
            ("drain", "SIGTERM", LEAVE, [RequestStop(LEAVE)]),
            ("saved", 1, [Announce(State.SAVED, 1)]),
            (
                "plan_changed",
                forming(2, 4, leaving=("a-1",), acknowledged={"a-1": 1}),
                [RequestStop(None), Announce(LEFT, 2), Depart(Outcome.DRAINED, "SIGTERM")],
            ),
        ],
    ),
    "drained by a request that is not answered": (
        lambda: drained(running()),
        [
            ("leave_now", [Announce(State.LEAVING, 1), StopWorkers(Grace.DRAIN, "SIGTERM")]),
            ("leave_now", []),
        ],
    ),
    "told to leave under the incarnation before": (
        lambda: rejoined(running()),
        [
            (
                "plan_changed",
                forming(2, 4, leaving=("a-1",), reason="a is told to leave"),
                departs(Outcome.DRAINED, "a is told to leave", 2),
            )
        ],
    ),
    "not by the leave of a predecessor that was another process": (
        lambda: Node("a-2"),
        [("plan_changed", forming(2, 4, leaving=("a-1",)), [Announce(READY, 2)])],
    ),
    "without workers it stays until the others had the time to leave, too": (
        lambda: drained(outside()),
        [
            (
                "plan_changed",
                sealed(1, 9, "a-1", leaving=("c-1",), acknowledged={"c-1": 1}),
                [RequestStop(None)],
            ),
            ("leave_now", departs(Outcome.DRAINED, "SIGTERM")),
        ],
    ),
    "without workers it ends with a run that all others leave": (
        lambda: drained(outside()),
        [
            (
                "plan_changed",
                sealed(1, 9, "a-1", leaving=("c-1",), acknowledged={"c-1": 1}),
                [RequestStop(None)],
            ),
            ("plan_changed", ended(Phase.STOPPED, 10), departs(Outcome.STOPPED)),
        ],
    ),
    "finished": (succeeded, [("plan_changed", ended(Phase.FINISHED), departs(Outcome.FINISHED))]),
    "failed": (
        running,
        [
            ("plan_changed", ended(Phase.FAILED), [StopWorkers(Grace.NONE, "it is over")]),
            ("stopped", departs(Outcome.FAILED)),
        ],
    ),
    "refused": (
        waiting,
        [
            ("plan_changed", forming(1, 2, refused={"a-2": Refusal("held")}), []),
            (
                "plan_changed",
                forming(1, 3, refused={"a-1": Refusal("held", is_node_id_held=True)}),
                departs(Outcome.NODE_ID_HELD, "held"),
            ),
        ],
    ),
    "stopped: it stays until no worker of any node is left": (
        running,
        [
            (
                "plan_changed",
                ended(Phase.STOPPED, uncleared=TOGETHER.seats),
                [StopWorkers(Grace.DRAIN, "it is over")],
            ),
            ("stopped", [Announce(State.STOPPED, 1)]),
            ("drain", "the deadline has passed", []),
            ("plan_changed", ended(Phase.STOPPED, 10), departs(Outcome.STOPPED)),
        ],
    ),
    "stopped, and the others cannot be heard of": (
        outside,
        [
            ("plan_changed", ended(Phase.STOPPED, uncleared=TOGETHER.seats), [Announce(State.STOPPED, 1)]),
            ("stop_lingering", departs(Outcome.STOPPED)),
        ],
    ),
    "stopped, also a node that lost its lease meanwhile": (
        lambda: rejoined(running()),
        [("plan_changed", ended(Phase.STOPPED), departs(Outcome.STOPPED))],
    ),
    "stopped, also who asked for it and comes late": (
        lambda: Node("c-1"),
        [
            ("request_stop", STOP, []),
            ("plan_changed", ended(Phase.STOPPED), departs(Outcome.STOPPED)),
        ],
    ),
    "not stopped: a node that comes after the stop resumes the run": (
        lambda: Node("c-1"),
        [
            ("plan_changed", ended(Phase.STOPPED), [Announce(READY, 2)]),
            ("plan_changed", forming(2, 10), []),
            ("plan_changed", sealed(2, 11, "c-1"), [Prepare(world(2, "c-1"))]),
        ],
    ),
}

REQUESTS: dict[str, Story] = {
    "a notice is delivered once": (
        starting,
        [
            ("plan_changed", sealed(1, 3, "a-1", "b-1", notice=MILD), [Notify(MILD)]),
            ("plan_changed", sealed(1, 4, "a-1", "b-1", notice=MILD), []),
        ],
    ),
    "a request is kept until it has taken effect": (
        running,
        [
            ("request_stop", DRAIN_B, [RequestStop(DRAIN_B)]),
            ("plan_changed", sealed(1, 3, "a-1", "b-1", acknowledged={"a-1": 1}), []),
            (
                *("plan_changed", forming(2, 4, acknowledged={"a-1": 1})),
                [RequestStop(None), StopWorkers(Grace.RESTART, "forming 2", keep=True)],
            ),
        ],
    ),
    "a request of an earlier life of the run is withdrawn": (
        lambda: rejoined(running()),
        [
            ("request_stop", STOP, [RequestStop(STOP)]),
            ("plan_changed", forming(2, 10, life=2), [RequestStop(None), Announce(READY, 2)]),
        ],
    ),
    "a request before the first plan is published with it": (
        lambda: Node("c-1"),
        [
            ("request_stop", msgspec.structs.replace(STOP, life=0), []),
            ("plan_changed", forming(1, 1), [RequestStop(STOP), Announce(READY, 1)]),
        ],
    ),
    "a request to leave does not withdraw one to stop": (
        running,
        [("request_stop", STOP, [RequestStop(STOP)]), ("request_stop", DRAIN_B, [])],
    ),
    "a new store is told once that the run is to end, whoever asked for it": (
        told_of_the_end,
        [
            (
                "store_replaced",
                [
                    Announce(RUNNING, 1),
                    RequestStop(StopRequest(1, Cause.WALLTIME, 30.0, "SIGUSR1 at b", life=1)),
                ],
            ),
            ("store_replaced", [Announce(RUNNING, 1)]),
        ],
    ),
    "not when the run was resumed": (
        lambda: rejoined(told_of_the_end()),
        [
            ("plan_changed", forming(2, 10), [Announce(READY, 2)]),
            ("store_replaced", [Announce(READY, 2)]),
        ],
    ),
}


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
    node.warmed_up(**ALL_PARKED)
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
            ("warmed_up", ALL_PARKED, [Announce(READY, 1)]),
        ],
    ),
    "a node that joins a running world starts its workers first": (
        fresh,
        [
            ("plan_changed", sealed(1, 2, "b-1", "c-1"), [WarmUp()]),
            ("warmed_up", ALL_PARKED, [Announce(READY, 0)]),
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
            ("warmed_up", ALL_PARKED, [Announce(READY, 2)]),
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
            ("warmed_up", {**SOME_PARKED, "again": False}, [Announce(READY, 1)]),
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", [Rejoin("cut off")]),
            ("rejoined", "a-2", []),
            ("plan_changed", forming(2, 3), [Announce(READY, 2)]),
        ],
    ),
    "workers that could not be started apart this time are, later": (
        apart,
        [
            ("warmed_up", SOME_PARKED, [Announce(READY, 1)]),
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("stopped", [Rejoin("cut off")]),
            ("rejoined", "a-2", [Announce(READY, 0, warms_up=True)]),
        ],
    ),
    "they are stopped with the lease, and the next incarnation starts others": (
        apart,
        [
            ("lease_lost", "cut off", [StopWorkers(Grace.NONE, "cut off")]),
            ("warmed_up", ALL_PARKED, []),
            ("stopped", [Rejoin("cut off")]),
            ("rejoined", "a-2", [Announce(READY, 0, warms_up=True)]),
            ("registered", []),
            ("plan_changed", forming(1, 3), [Announce(READY, 1, warms_up=True), WarmUp()]),
        ],
    ),
    "they are stopped when the run ends": (
        apart,
        [
            ("plan_changed", ended(Phase.FAILED), [StopWorkers(Grace.NONE, "it is over")]),
            ("stopped", [Announce(LEFT, 1), Depart(Outcome.FAILED, "it is over")]),
        ],
    ),
}


STORIES = STARTS | STOPS | ENDS_OF_A_NODE | REQUESTS | PARKED | APART


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_a_node_does(story: Story) -> None:
    begin, steps = story
    node = begin()
    for event, *arguments, actions in steps:
        facts = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        assert getattr(node, event)(*arguments, **facts) == actions, event


def test_a_restarted_node_goes_by_the_plan_on_its_disk() -> None:
    known = on_disk(3, world(2, "a-1", "b-1"))
    node = Node("a-2", known)
    assert node.plan_changed(forming(1, 1)) == []
    assert node.plan_changed(forming(2, 2)) == [Announce(READY, 2)], "3 may never have been published"
    over = msgspec.structs.replace(known, phase=Phase.FINISHED, settled=True)
    assert Node("a-2", over).plan_changed(forming(1, 1)) == [Announce(READY, 1)], "it is another run"
