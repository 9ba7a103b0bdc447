"""Directed scenarios of failures, the restart budget, membership and notices."""

from __future__ import annotations

from elastic_agent.protocol.records import Cause

from .directed import ANOTHER_END, Directed, at

UNDISTURBED = {"faults": ()}
"""Nothing happens to the coordinator, so that all progress must be counted."""
NOTICES = {"handles_notices": True}

BUDGET = (
    Directed(
        name="one failure too many",
        rule="The budget is exact: each failure is charged once.",
        policy={"max_restarts": 1},
        steps=(at(3.0, "fail", "n0"), at(5.0, "fail", "n0")),
        end="failed, generation 3, 1 charged",
        mutants={"budget-off-by-one": "safety 5", "never-charges": "safety 5"},
    ),
    Directed(
        name="fails before a window of progress",
        rule="A failure is forgiven after a whole window of progress.",
        policy={"max_restarts": 1, "restart_window_s": 2.0},
        steps=(at(3.0, "fail", "n0"), at(4.5, "fail", "n0")),
        universe={**UNDISTURBED, "beats": True},
        end="failed, generation 3, 1 charged",
        mutants={"forgives-early": "safety 5", "saves-credit": "safety 5"},
    ),
    Directed(
        name="progress forgives once",
        rule="Progress forgives one failure for each window, once.",
        policy={"max_restarts": 1, "restart_window_s": 2.0},
        steps=(at(3.0, "fail", "n0"), at(7.0, "fail", "n0"), at(7.6, "fail", "n0")),
        universe=UNDISTURBED,
        end="failed, generation 4, 2 charged",
        mutants={"forgives-twice": ANOTHER_END, "counts-nothing": "safety 5"},
    ),
    Directed(
        name="store lost after a failure was forgiven",
        rule="A new store knows what was charged and forgiven.",
        policy={"max_restarts": 2, "restart_window_s": 2.0},
        steps=(at(3.0, "fail", "n0"), at(7.0, "fail", "n0"), at(9.0, "lose_store", back_s=0.5)),
        end="finished, generation 3, 2 charged",
        mutants={"loses-forgiveness": "safety 5"},
    ),
    Directed(
        name="broken script",
        rule="A failure that repeats without progress ends the run after one retry.",
        policy={"restart_window_s": 30.0},
        steps=(at(0.0, "break_script", for_s=100.0),),
        universe=UNDISTURBED,
        end="failed, generation 3, 1 charged",
        mutants={
            "never-gives-up": "the same failure ends the run after one retry",
            "gives-up-at-once": "only what repeats ends a run early",
        },
    ),
    Directed(
        name="crash loop of unknown failures",
        rule="A crash loop slows down, and failures without a signature are not the same.",
        policy={"restart_window_s": 30.0, "restart_backoff_s": 8.0},
        steps=(at(1.0, "fail", "n0"), at(1.4, "fail", "n0")),
        universe=UNDISTURBED,
        end="finished, generation 3, 2 charged",
        mutants={
            "unknown-counts-as-same": "only what repeats ends a run early",
            "never-pauses": "a crash loop slows down",
            "counts-anything": "",
        },
    ),
    Directed(
        name="same failure in another world",
        rule="A failure repeats only the one of the world before.",
        policy={"restart_window_s": 30.0},
        steps=(
            at(0.8, "fail", "n0", "e1"),
            at(1.2, "crash", "n1"),
            at(4.5, "fail", "n0", "e1"),
        ),
        end="finished, generation 5, 2 charged",
        mutants={"repeats-across-worlds": "only what repeats ends a run early"},
    ),
)

MEMBERSHIP = (
    Directed(
        name="second agent with the same node id",
        rule="Of two agents with one node id the second is refused.",
        policy={"min_nodes": 4, "max_nodes": 4},
        steps=(at(3.0, "impostor", "n1"),),
        end="failed, generation 1, 0 charged",
        mutants={
            "accepts-duplicate-ids": "a second agent is refused",
        },
        quiet_s=4.0,
    ),
    Directed(
        name="one node succeeds early",
        rule="The run is finished when the workers of all nodes have succeeded.",
        steps=(at(3.0, "succeed", "n1"),),
        end="finished, generation 1, 0 charged",
        mutants={"finishes-early": "finished when all succeeded"},
    ),
    Directed(
        name="workers that take long to stop",
        rule="A node is ready when its workers are stopped.",
        steps=(at(3.0, "fail", "n0"),),
        universe={"prompt_workers": False},
        end="finished, generation 2, 1 charged",
        mutants={"ready-before-stopped": "safety 2 (ready only when stopped)"},
    ),
    Directed(
        name="machine pauses as a whole",
        rule="Workers that wake past their deadline are killed before they do anything.",
        steps=(at(3.0, "pause", "n1", for_s=6.0),),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="all processes die",
        rule="Generations never repeat, though every process was killed.",
        steps=(
            *(at(3.0, "crash", node, back_s=0.5) for node in ("n0", "n1", "n2")),
            at(3.0, "lose_store", back_s=0.2),
        ),
        end="finished, generation 2, 0 charged",
        mutants={"generation-reused": "safety 1"},
    ),
    Directed(
        name="only pairs of nodes",
        rule="Only worlds of allowed sizes are sealed.",
        policy={"node_counts": (2,)},
        steps=(at(3.0, "crash", "n1"),),
        end="finished, generation 2, 0 charged",
        mutants={"any-size": "notices: only worlds of allowed sizes"},
    ),
    Directed(
        name="a node whose workers cannot be killed",
        rule="It does not keep the others from a world.",
        steps=(at(0.0, "stick", "n1"), at(3.0, "fail", "n0")),
        end="finished, generation 2, 0 charged",
    ),
)

GRACEFUL = (
    Directed(
        name="a node is drained",
        rule="All workers save at one step, leave uncharged, and the others go on from there.",
        steps=(at(8.0, "drain", "n1"),),
        universe=NOTICES,
        end="finished, generation 2, 0 charged",
        mutants={"any-leaver-stops": "notices: no stop without a request"},
        quiet_s=20.0,
    ),
    Directed(
        name="another node is drained",
        rule="A leaving node gets no seat, counts as gone when its workers have exited, and its request counts once.",
        steps=(at(8.0, "drain_other", "n0", "n1"), at(8.2, "fail", "n2")),
        universe=NOTICES,
        end="finished, generation 2, 0 charged",
        quiet_s=20.0,
    ),
    Directed(
        name="a node joins",
        rule="Workers get a notice before newcomers are let in.",
        policy={"max_nodes": 4, "settle_s": 6.0},
        steps=(at(20.0, "join", "n4"),),
        universe=NOTICES,
        end="finished, generation 2, 0 charged",
        mutants={
            "delivers-no-notice": "notices: notices are delivered in time",
            "charges-a-notice": "safety 5",
        },
        quiet_s=40.0,
    ),
    Directed(
        name="the run is stopped",
        rule="A request to stop stops the run, and a node that is there is to requeue it.",
        steps=(
            at(7.0, "crash", "n0"),
            at(14.0, "slow", "n2", "requests", extra_s=0.8, for_s=5.0),
            at(14.0, "stop", "n1"),
        ),
        universe=NOTICES,
        end="stopped, generation 2, 0 charged",
        mutants={"does-not-stop": ANOTHER_END, "does-not-wait-for-all": "notices: "},
        quiet_s=40.0,
    ),
    Directed(
        name="stopped when a node was just lost",
        rule="The node that is to requeue a stopped run is there.",
        steps=(at(6.0, "when", None, "revoke", "stop", "n1"), at(7.0, "crash", "n0")),
        end="stopped, generation 2, 0 charged",
        mutants={"any-requeuer": "notices: a delegate"},
        quiet_s=20.0,
    ),
    Directed(
        name="workers that save nothing have their time",
        rule="Workers are stopped when the time of the notice is over.",
        steps=(at(8.0, "stop", "n1", Cause.WALLTIME, 4.0),),
        end="stopped, generation 1, 0 charged",
        mutants={"half-the-time": "notices: workers have the time of their notice"},
        quiet_s=20.0,
    ),
    Directed(
        name="a failure while the run is to end",
        rule="That the run ends is not forgotten.",
        steps=(at(8.0, "stop", "n1", Cause.WALLTIME, 10.0), at(9.0, "fail", "n0")),
        end="stopped, generation 2, 1 charged",
        mutants={"drops-the-stop": "notices: that the run ends is not forgotten"},
        quiet_s=20.0,
    ),
    Directed(
        name="drained without an answer",
        rule="A drained node leaves, whatever becomes of the store.",
        policy={"lease_ttl_s": 8.0},
        steps=(at(8.0, "cut", "n1", for_s=6.0), at(8.1, "drain", "n1")),
        end="finished, generation 2, 0 charged",
        mutants={"does-not-leave": "notices: a drained node leaves"},
        quiet_s=20.0,
    ),
    Directed(
        name="store lost while the run is to end",
        rule="In a new store every node repeats the request to stop.",
        hosting="agent",
        steps=(at(8.0, "stop", "n0", Cause.WALLTIME, 10.0), at(8.5, "lose_store", back_s=1.0)),
        end="stopped, generation 2, 0 charged",
        mutants={"only-requester-repeats-stop": ""},
        quiet_s=30.0,
    ),
    Directed(
        name="all nodes are drained",
        rule="A run that all nodes are asked to leave is stopped.",
        steps=tuple(at(8.0, "drain", node) for node in ("n0", "n1", "n2")),
        universe=NOTICES,
        end="stopped, generation 1, 0 charged",
        quiet_s=20.0,
    ),
    Directed(
        name="stopped and taken up again",
        rule="A stopped run is resumed by new agents, when its workers have exited.",
        steps=(at(8.0, "stop", "n1", Cause.PREEMPTED, 4.0), at(12.0, "freeze", "n2", for_s=5.0)),
        universe={"requeued": True, "prompt_workers": False},
        end="finished, generation 3, 0 charged",
        mutants={"resumes-too-early": ""},
        quiet_s=20.0,
    ),
)

SCENARIOS = (*BUDGET, *MEMBERSHIP, *GRACEFUL)
