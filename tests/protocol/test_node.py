"""One node's side: when it says ready, when it starts workers, what stops them, and how it leaves.

Each story is what happens to a node, step by step, and what it does then. Stories that need others (the coordinator,
the store, the guard) are told by the simulator.
"""

from __future__ import annotations

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
)
from elastic_agent.protocol.records import (
    Cause,
    Phase,
    Refusal,
    State,
    StopRequest,
)
from tests.protocol.node_stories import (
    DRAIN_B,
    ENDS,
    LEAVE,
    LEFT,
    MILD,
    READY,
    RUNNING,
    SIGNAL,
    STOP,
    TOGETHER,
    UNREACHABLE,
    Story,
    departs,
    drained,
    ended,
    fails,
    forming,
    outside,
    preparing,
    rejoined,
    running,
    sealed,
    starting,
    stopping,
    succeeded,
    told,
    told_of_the_end,
    waiting,
)
from tests.protocol.support import CRASH, HANG, NO_START, on_disk, plan, world

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
    "nor is it started in the world of another store, which has the same generation": (
        preparing,
        [
            ("store_replaced", [Announce(READY, 1)]),
            ("plan_changed", sealed(1, 2, "c-1"), []),
            ("prepared", 1, []),
        ],
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
            ("plan_changed", sealed(1, 3, "a-1", "b-1", notice=MILD), []),
            ("plan_changed", forming(2, 4), [Announce(READY, 2)]),
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
    "workers are stopped without grace when another world runs, and the node waits to be let in": (
        running,
        [
            (
                "plan_changed",
                sealed(2, 3, "b-1"),
                [StopWorkers(Grace.NONE, "generation 2 runs without this node")],
            ),
            ("stopped", [Announce(READY, 2)]),
        ],
    ),
    "and not in a world in which they have run, should its store be found again": (
        running,
        [
            ("store_replaced", [Announce(RUNNING, 1)]),
            (
                "plan_changed",
                sealed(1, 2, "c-1"),
                [StopWorkers(Grace.NONE, "generation 1 runs without this node")],
            ),
            ("stopped", [Announce(READY, 0)]),
            ("store_replaced", [Announce(READY, 0)]),
            ("plan_changed", sealed(1, 2, "a-1", "b-1"), []),
        ],
    ),
    "not before its workers have stopped": (
        stopping,
        [("plan_changed", sealed(2, 4, "b-1"), []), ("stopped", [Announce(READY, 2)])],
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
    "what is known of workers is not known of the next ones": (
        running,
        [
            ("handles_notices", 1, [Announce(RUNNING, 1, handles_notices=True)]),
            ("plan_changed", sealed(1, 3, "a-1", "b-1", notice=ENDS), [Notify(ENDS)]),
            ("interrupted", 1, SIGNAL, [Announce(RUNNING, 1, SIGNAL, handles_notices=True)]),
            (
                *("plan_changed", forming(2, 4, notice=ENDS)),
                [StopWorkers(Grace.RESTART, "forming 2", keep=True)],
            ),
            ("stopped", [Announce(READY, 2)]),
            ("plan_changed", sealed(2, 5, "a-1", notice=ENDS), [Prepare(world(2, "a-1"))]),
            ("prepared", 2, [StartWorkers(world(2, "a-1")), Notify(ENDS)]),
            ("started", 2, [Announce(RUNNING, 2)]),
        ],
    ),
    "that workers handle notices is reported once": (
        running,
        [
            ("handles_notices", 0, []),
            ("handles_notices", 1, [Announce(RUNNING, 1, handles_notices=True)]),
            ("handles_notices", 1, []),
        ],
    ),
}

ENDS_OF_A_NODE: dict[str, Story] = {
    "a node that has left before its first plan does not resume a stopped run": (
        lambda: Node("a-1"),
        [
            ("drain", "SIGTERM", departs(Outcome.DRAINED, "SIGTERM", 0)),
            ("plan_changed", ended(Phase.STOPPED), []),
        ],
    ),
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
    "drained while its workers start": (
        lambda: drained(starting()),
        [
            (
                *("plan_changed", forming(2, 4, leaving=("a-1",), acknowledged={"a-1": 1})),
                [RequestStop(None), StopWorkers(Grace.DRAIN, "SIGTERM")],
            )
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
    "told to leave when it has lost its lease: first it registers, so that the others know its workers gone": (
        running,
        [
            ("lease_lost", "expired", [StopWorkers(Grace.NONE, "expired")]),
            ("plan_changed", forming(2, 4, leaving=("a-1",)), []),
            ("stopped", [Rejoin("expired")]),
        ],
    ),
    "told to leave while it waits beside a running world": (
        outside,
        [
            (
                *("plan_changed", sealed(1, 9, "a-1", leaving=("c-1",), reason="c is told to leave")),
                departs(Outcome.DRAINED, "c is told to leave"),
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
            ("lease_lost", "expired", [StopWorkers(Grace.NONE, "expired")]),
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
    "stopped, also if it is resumed before the others are": (
        outside,
        [
            ("plan_changed", ended(Phase.STOPPED, uncleared=TOGETHER.seats), [Announce(State.STOPPED, 1)]),
            ("plan_changed", forming(2, 10), departs(Outcome.STOPPED, "forming 2", 2)),
        ],
    ),
    "stopped while it leaves": (
        running,
        [
            ("drain", "SIGTERM", [Announce(State.LEAVING, 1), StopWorkers(Grace.DRAIN, "SIGTERM")]),
            ("plan_changed", ended(Phase.STOPPED, uncleared=TOGETHER.seats), []),
            ("stopped", departs(Outcome.STOPPED)),
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
            ("stop_lingering", []),
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
            ("plan_changed", forming(3, 5, acknowledged={"a-1": 1}), []),
        ],
    ),
    "a request that the coordinator has not read is kept, and one to end the run for as long as it goes on": (
        stopping,
        [
            ("request_stop", DRAIN_B, [RequestStop(DRAIN_B)]),
            ("plan_changed", forming(3, 4), []),
            ("request_stop", STOP, [RequestStop(STOP)]),
            ("plan_changed", forming(4, 5, acknowledged={"a-1": 1}), []),
        ],
    ),
    "a request of an earlier life of the run is withdrawn": (
        lambda: rejoined(running()),
        [
            ("request_stop", STOP, [RequestStop(STOP)]),
            ("plan_changed", forming(2, 10, life=2), [RequestStop(None), Announce(READY, 2)]),
            ("plan_changed", forming(3, 11, life=2), [Announce(READY, 3)]),
        ],
    ),
    "a request of a node that resumes a stopped run is one of the next life": (
        lambda: Node("c-1"),
        [
            ("plan_changed", ended(Phase.STOPPED), [Announce(READY, 2)]),
            ("request_stop", DRAIN_B, [RequestStop(msgspec.structs.replace(DRAIN_B, life=2))]),
        ],
    ),
    "a request before the first plan is published with it": (
        lambda: Node("c-1"),
        [
            ("request_stop", msgspec.structs.replace(STOP, life=0), []),
            ("plan_changed", forming(1, 1), [RequestStop(STOP), Announce(READY, 1)]),
        ],
    ),
    "a request to leave does not withdraw one to stop, but another one to leave": (
        running,
        [
            ("request_stop", DRAIN_B, [RequestStop(DRAIN_B)]),
            ("request_stop", LEAVE, [RequestStop(LEAVE)]),
            ("request_stop", STOP, [RequestStop(STOP)]),
            ("request_stop", DRAIN_B, []),
        ],
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
    "not of another notice": (
        running,
        [
            ("handles_notices", 1, [Announce(RUNNING, 1, handles_notices=True)]),
            ("plan_changed", sealed(1, 3, "a-1", "b-1", notice=MILD), [Notify(MILD)]),
            ("store_replaced", [Announce(RUNNING, 1, handles_notices=True)]),
        ],
    ),
    "also by a node without workers that has read of the stop": (
        outside,
        [
            (
                *("plan_changed", ended(Phase.STOPPED, uncleared=TOGETHER.seats, notice=ENDS)),
                [Announce(State.STOPPED, 1)],
            ),
            (
                "store_replaced",
                [
                    Announce(State.STOPPED, 1),
                    RequestStop(StopRequest(1, Cause.WALLTIME, 30.0, "SIGUSR1 at b", life=1)),
                ],
            ),
        ],
    ),
    "not by a node that comes after the stop": (
        lambda: Node("c-1"),
        [
            ("plan_changed", ended(Phase.STOPPED, notice=ENDS), [Announce(READY, 2)]),
            ("store_replaced", [Announce(READY, 2)]),
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

STORIES = STARTS | STOPS | ENDS_OF_A_NODE | REQUESTS


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_a_node_does(story: Story) -> None:
    for event, does, expected in told(story):
        assert does == expected, event


def test_a_restarted_node_goes_by_the_plan_on_its_disk() -> None:
    known = on_disk(3, world(2, "a-1", "b-1"))
    node = Node("a-2", known)
    assert node.plan_changed(forming(1, 1)) == []
    assert node.plan_changed(forming(2, 2)) == [Announce(READY, 2)], "3 may never have been published"
    over = msgspec.structs.replace(known, phase=Phase.FINISHED, settled=True)
    assert Node("a-2", over).plan_changed(forming(1, 1)) == [Announce(READY, 1)], "it is another run"
