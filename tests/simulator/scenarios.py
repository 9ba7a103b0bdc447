"""All directed scenarios, by name: worlds, leases and stores; failures, membership and notices; a run in etcd."""

from __future__ import annotations

from typing import Any

from elastic_agent.protocol.records import Cause, Phase
from tests.protocol.support import on_disk

from .directed import Directed, Step, at

ALONE = at(0.0, "compute_alone")

FENCE = (
    Directed(
        name="cut off past its lease",
        rule="No world is sealed before the workers of the previous one are cleared.",
        steps=(ALONE, at(3.0, "cut", "n1", for_s=6.0)),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="cut off and frozen past its lease",
        rule="The guard kills the workers at the deadline of the lease, whatever the agent does.",
        steps=(ALONE, at(3.0, "cut", "n1", for_s=6.0), at(3.0, "freeze", "n1", for_s=6.0)),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="last of the seats cut off",
        rule="Every seat of the previous world is cleared first.",
        steps=(ALONE, at(3.0, "cut", "n2", for_s=6.0), at(3.1, "fail", "n0")),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="agent dies",
        rule="No worker outlives its agent, and losing a node is not charged.",
        steps=(at(3.0, "crash", "n1", back_s=0.1),),
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="restarted while a generation forms",
        rule="A node has one seat.",
        nodes=2,
        policy={"min_nodes": 3, "max_nodes": 4},
        steps=(at(1.0, "crash", "n1", back_s=0.1), at(1.3, "join", "n2")),
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="late answer to a renewal",
        rule="A lease counts from when its renewal was sent.",
        steps=(
            ALONE,
            at(3.0, "slow", "n1", "answers", extra_s=0.9, for_s=3.0),
            at(4.0, "when", "n1", "renewed", "cut", "n1", for_s=6.0),
        ),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="lost answer to a renewal",
        rule="A renewal that is repeated counts from its first attempt.",
        steps=(
            ALONE,
            at(3.0, "deafen", "n1", for_s=0.9),
            at(3.9, "when", "n1", "renewed", "cut", "n1", for_s=6.0),
        ),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="frozen while a renewal is under way",
        rule="Once the guard has killed the workers, no answer renews the lease.",
        steps=(ALONE, at(3.0, "when", "n1", "renewal sent", "freeze", "n1", for_s=1.7)),
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="a start that hangs",
        rule="A node that does not start in time costs no restart, and takes part in the next world.",
        policy={"min_nodes": 3},
        steps=(at(0.0, "hang_starts", "n0", count=1),),
        end="finished, generation 2, 0 charged",
        quiet_s=8.0,
    ),
    Directed(
        name="a stop that hangs",
        rule="A node that does not stop its workers is revoked, and a revoked lease is never renewed.",
        steps=(at(0.0, "hang_stops", "n1"), at(3.0, "fail", "n0")),
        end="finished, generation 2, 0 charged",
    ),
)

STORES = (
    Directed(
        name="store lost right after the run finished",
        rule="What is published is on disk: the outcome stands.",
        steps=(
            at(3.0, "crash_at", "published"),
            *(at(3.0, "succeed", node) for node in ("n0", "n1", "n2")),
        ),
        end="finished, generation 1, 0 charged",
    ),
    Directed(
        name="full disk",
        rule="The run goes on without the coordinator's disk.",
        steps=(at(0.0, "fill_disk", "store", for_s=8.0), at(3.0, "crash", "n1", back_s=0.1)),
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="store lost while a world runs",
        rule="In a new store the world goes on, and the next failure forms the generation above it.",
        policy={"min_nodes": 3},
        steps=(
            at(3.0, "fail", "n1"),
            at(5.0, "fail", "n1"),
            at(7.0, "lose_store", back_s=0.5),
            at(11.0, "fail", "n1"),
        ),
        end="finished, generation 4, 3 charged",
        quiet_s=11.5,
    ),
    Directed(
        name="store lost with its machine's disk in the first generation",
        rule="A world that a node runs and reports is cleared, also one of the generation that the new store forms.",
        hosting="agent",
        universe={"prompt_workers": False},
        policy={"min_nodes": 2},
        steps=(
            at(0.0, "hang_stops", "n1"),
            at(3.0, "lose_store", back_s=0.1, with_disk=True),
        ),
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="another world of the first generation runs in a new store",
        rule="A node that finds the world of a store that knew nothing stops its workers, and waits to be let in.",
        nodes=2,
        steps=(
            ALONE,
            at(3.0, "cut", "n0", for_s=0.6),
            at(3.0, "cut", "n1", for_s=0.6),
            at(3.0, "lose_store", back_s=0.1, with_disk=True),
            at(3.1, "join", "n4"),
        ),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="fenced while a generation waits for nodes",
        rule="A new incarnation learns of the plan that the node has read before.",
        nodes=2,
        policy={"min_nodes": 3},
        steps=(
            at(2.0, "freeze", "n1", for_s=1.9),
            at(4.5, "join", "n2"),
        ),
        end="finished, generation 1, 0 charged",
        quiet_s=5.0,
    ),
    Directed(
        name="no port for a bootstrap store",
        rule="A node that could not offer a bootstrap store tries again.",
        nodes=1,
        steps=(at(0.0, "no_port", "n0", for_s=3.0),),
        end="finished, generation 1, 0 charged",
        quiet_s=4.0,
    ),
    Directed(
        name="world starts",
        rule="The bootstrap store of a starting world is served.",
        end="finished, generation 1, 0 charged",
    ),
)


NOTICES = {"handles_notices": True}

BUDGET = (
    Directed(
        name="one failure too many",
        rule="The budget is exact: each failure is charged once.",
        policy={"max_restarts": 1},
        steps=(at(3.0, "fail", "n0"), at(5.0, "fail", "n0")),
        end="failed, generation 3, 1 charged",
    ),
    Directed(
        name="fails before a window of progress",
        rule="A failure is forgiven after a whole window of progress.",
        policy={"max_restarts": 1, "restart_window_s": 2.0},
        steps=(at(3.0, "fail", "n0"), at(4.5, "fail", "n0")),
        universe={"beats": True},
        end="failed, generation 3, 1 charged",
    ),
    Directed(
        name="progress forgives once",
        rule="Progress forgives one failure for each window, once.",
        policy={"max_restarts": 1, "restart_window_s": 2.0},
        steps=(at(3.0, "fail", "n0"), at(7.0, "fail", "n0"), at(7.6, "fail", "n0")),
        end="failed, generation 4, 2 charged",
    ),
    Directed(
        name="store lost after a failure was forgiven",
        rule="A new store knows what was charged and forgiven.",
        policy={"max_restarts": 2, "restart_window_s": 2.0},
        steps=(at(3.0, "fail", "n0"), at(7.0, "fail", "n0"), at(9.0, "lose_store", back_s=0.5)),
        end="finished, generation 3, 2 charged",
    ),
    Directed(
        name="broken script",
        rule="A failure that repeats without progress ends the run after one retry.",
        policy={"restart_window_s": 30.0},
        steps=(at(0.0, "break_script", for_s=100.0),),
        end="failed, generation 3, 1 charged",
    ),
    Directed(
        name="crash loop of unknown failures",
        rule="A crash loop slows down, and failures without a signature are not the same.",
        policy={"restart_window_s": 30.0},
        steps=(at(1.0, "fail", "n0"), at(1.4, "fail", "n0")),
        end="finished, generation 3, 2 charged",
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
    ),
)

MEMBERSHIP = (
    Directed(
        name="second agent with the same node id",
        rule="Of two agents with one node id the second is refused.",
        policy={"min_nodes": 4, "max_nodes": 4},
        steps=(at(3.0, "impostor", "n1"),),
        end="failed, generation 1, 0 charged",
        quiet_s=4.0,
    ),
    Directed(
        name="one node succeeds early",
        rule="The run is finished when the workers of all nodes have succeeded.",
        steps=(at(3.0, "succeed", "n1"),),
        end="finished, generation 1, 0 charged",
    ),
    Directed(
        name="workers that take long to stop",
        rule="A node is ready when its workers are stopped.",
        steps=(at(3.0, "fail", "n0"),),
        universe={"prompt_workers": False},
        end="finished, generation 2, 1 charged",
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
    ),
    Directed(
        name="only pairs of nodes",
        rule="Only worlds of allowed sizes are sealed.",
        policy={"node_counts": (2,)},
        steps=(at(3.0, "crash", "n1"),),
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="a node that comes and goes",
        rule="A node that is lost again and again does not keep the others from their work.",
        steps=tuple(at(3.0 + 0.7 * often, "crash", "n1", back_s=0.1) for often in range(12)),
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="a node whose workers never start",
        rule="It is left out of the world after two attempts.",
        policy={"start_timeout_s": 1.0},
        steps=(at(0.0, "hang_starts", "n1", count=100),),
        end="finished, generation 3, 0 charged",
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
        quiet_s=40.0,
    ),
    Directed(
        name="stopped when a node was just lost",
        rule="The node that is to requeue a stopped run is there.",
        steps=(at(6.0, "when", None, "revoke", "stop", "n1"), at(7.0, "crash", "n0")),
        end="stopped, generation 2, 0 charged",
        quiet_s=20.0,
    ),
    Directed(
        name="workers that save nothing have their time",
        rule="Workers are stopped when the time of the notice is over.",
        steps=(at(8.0, "stop", "n1", Cause.WALLTIME, 4.0),),
        end="stopped, generation 1, 0 charged",
        quiet_s=20.0,
    ),
    Directed(
        name="a failure while the run is to end",
        rule="That the run ends is not forgotten.",
        steps=(at(8.0, "stop", "n1", Cause.WALLTIME, 10.0), at(9.0, "fail", "n0")),
        end="stopped, generation 2, 1 charged",
        quiet_s=20.0,
    ),
    Directed(
        name="drained without an answer",
        rule="A drained node leaves, whatever becomes of the store.",
        policy={"lease_ttl_s": 8.0},
        steps=(at(8.0, "cut", "n1", for_s=6.0), at(8.1, "drain", "n1")),
        end="finished, generation 2, 0 charged",
        quiet_s=20.0,
    ),
    Directed(
        name="store lost while the run is to end",
        rule="In a new store every node repeats the request to stop.",
        hosting="agent",
        steps=(at(8.0, "stop", "n0", Cause.WALLTIME, 10.0), at(8.5, "lose_store", back_s=1.0)),
        end="stopped, generation 2, 0 charged",
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
        quiet_s=20.0,
    ),
)

ANOTHER_RUN = on_disk(900, outcome=Phase.FINISHED, settled=True)
"""What a machine knows that took part in an earlier run of the same name."""


def _in_etcd(name: str, rule: str, *steps: Step, **more: Any) -> Directed:
    return Directed(name=name, rule=rule, steps=steps, hosting="etcd", **more)


IN_ETCD = (
    _in_etcd(
        "coordinator frozen just before it reads",
        "The coordinator dates what it reads by the time after the answer.",
        ALONE,
        at(3.0, "freeze_at_reading", for_s=0.6),
        at(3.0, "when", "n1", "renewed", "cut", "n1", for_s=8.0),
        end="finished, generation 3, 0 charged",
    ),
    _in_etcd(
        "everything is started again",
        "How a run ended is written down, so that another one of its name begins.",
        universe={"again": True},
        end="finished, generation 2, 0 charged",
    ),
    _in_etcd(
        "next run begins without the last coordinator",
        "A run begins with a look at how the last one of its name ended.",
        at(16.6, "cut", "n0", for_s=3.0),
        universe={"again": True},
        end="finished, generation 2, 0 charged",
    ),
    _in_etcd(
        "coordinator deposed again and again",
        "An agent that has lost its leadership stands for election again.",
        at(3.0, "depose"),
        at(4.5, "depose"),
        at(6.0, "depose"),
        at(7.5, "depose"),
        at(9.0, "fail", "n1"),
        end="finished, generation 2, 1 charged",
        quiet_s=10.0,
    ),
    _in_etcd(
        "coordinator dies before it announces a plan",
        "A plan counts from when it is written.",
        at(2.9, "when", None, "plan written", "with_leader", "crash", back_s=8.0),
        at(3.0, "fail", "n1"),
        end="finished, generation 3, 0 charged",
    ),
    _in_etcd(
        "news are lost",
        "A coordinator reads everything again now and then.",
        at(3.0, "lose_hints", for_s=30.0),
        at(3.1, "fail", "n1"),
        end="finished, generation 2, 1 charged",
        quiet_s=5.0,
    ),
    _in_etcd(
        "failure while the coordinator is deposed",
        "A former leader writes nothing.",
        at(3.0, "depose"),
        at(3.0, "fail", "n1"),
        end="finished, generation 2, 1 charged",
    ),
    _in_etcd(
        "node with the newest history registers first",
        "A node reports its history to a store with less history.",
        ALONE,
        at(3.0, "etcd_loses_data", {"n0": 1.0, "n1": 6.0, "n2": 6.0}),
        universe={"prompt_workers": False},
        end="finished, generation 3, 0 charged",
    ),
    _in_etcd(
        "stranger who knows another run of the name",
        "A world that a node runs and reports is cleared, whatever run the coordinator knows.",
        ALONE,
        at(3.0, "etcd_loses_data", {"n0": 1.0, "n1": 6.0, "n2": 6.0}, ANOTHER_RUN),
        universe={"prompt_workers": False},
        end="finished, generation 903, 0 charged",
    ),
    _in_etcd(
        "node is lost while a stranger waits",
        "The world of a node is to be cleared before the node's lease is revoked.",
        ALONE,
        at(3.0, "etcd_loses_data", {"n0": 0.1, "n1": 6.0, "n2": 6.0}, ANOTHER_RUN),
        at(3.1, "when", "n0", "renewed", "cut", "n0", for_s=6.0),
        at(5.5, "freeze", "n7", for_s=0.2),
        universe={"prompt_workers": False},
        end="finished, generation 903, 0 charged",
    ),
    _in_etcd(
        "cut off when the coordinator changes",
        "A new coordinator clears a node after a lease and the margin, dated by what it was told before.",
        ALONE,
        at(3.0, "when", "n1", "renewed", "cut", "n1", for_s=6.0),
        at(3.8, "depose"),
        at(4.0, "fail", "n0"),
        end="finished, generation 3, 0 charged",
    ),
    _in_etcd(
        "coordinator changes",
        "A new coordinator keeps the running world.",
        at(3.0, "depose"),
        end="finished, generation 1, 0 charged",
    ),
    _in_etcd(
        "stranger first",
        "In an etcd that lost its data nothing forms before the nodes of the last world have registered.",
        at(3.0, "etcd_loses_data", {"n0": 1.0, "n1": 1.0, "n2": 1.0}),
        policy={"max_nodes": 4},
        end="finished, generation 2, 0 charged",
    ),
    _in_etcd(
        "nodes come back above the stranger's world",
        "A later generation of which a node tells is gone above.",
        at(1.5, "fail", "n1"),
        at(2.2, "fail", "n1"),
        at(4.0, "etcd_loses_data", {"n0": 6.0, "n1": 6.0, "n2": 6.0}),
        policy={"max_nodes": 4},
        end="finished, generation 4, 2 charged",
    ),
    _in_etcd(
        "coordinator's machine is lost",
        "The others go on after a lease and a renewal.",
        at(3.0, "with_leader", "power_off"),
        end="finished, generation 3, 0 charged",
    ),
    _in_etcd(
        "another machine is lost",
        "The others go on after a lease and a renewal.",
        at(3.0, "without_leader", "power_off"),
        end="finished, generation 3, 0 charged",
    ),
)

SURVIVES = {"survives": True}
WARMS_UP = {"survives": True, "warm_up_s": 0.5}
WAITS = {"min_nodes": 3, "join_timeout_s": 60.0}
"""Two nodes of three wait for the third, their workers parked."""

PARKED = (
    Directed(
        name="workers are kept",
        rule="A node is ready when its workers are gone or parked; parked ones go on in the next world.",
        steps=(at(3.0, "fail", "n0"),),
        universe=SURVIVES,
        end="finished, generation 2, 1 charged",
    ),
    Directed(
        name="workers park late",
        rule="No world is sealed before workers have parked.",
        steps=(ALONE, at(3.0, "park_after", "n1", 0.9), at(3.0, "fail", "n0")),
        universe=SURVIVES,
        end="finished, generation 2, 1 charged",
    ),
    Directed(
        name="workers do not park",
        rule="Workers that do not park in time are stopped.",
        steps=(ALONE, at(3.0, "park_after", "n1"), at(3.0, "fail", "n0")),
        universe=SURVIVES,
        end="finished, generation 2, 1 charged",
    ),
    Directed(
        name="a parked worker dies",
        rule="A slot whose parked worker has ended gets another process.",
        policy=WAITS,
        steps=(ALONE, at(3.0, "crash", "n2", back_s=5.0), at(7.0, "end_parked", "n0")),
        universe=SURVIVES,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="lease lost while workers are parked",
        rule="The guard kills parked workers at the deadline of the lease, too, and no new incarnation has them.",
        policy=WAITS,
        steps=(ALONE, at(3.0, "crash", "n2", back_s=8.0), at(7.0, "cut", "n0", for_s=4.0)),
        universe=SURVIVES,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="frozen while workers are parked",
        rule="The guard kills parked workers at the deadline of the lease, whatever the agent does.",
        policy=WAITS,
        steps=(ALONE, at(3.0, "crash", "n2", back_s=8.0), at(7.0, "freeze", "n0", for_s=4.0)),
        universe=SURVIVES,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="agent dies while workers are parked",
        rule="No parked worker outlives its agent.",
        policy=WAITS,
        steps=(ALONE, at(3.0, "crash", "n2", back_s=8.0), at(7.0, "crash", "n0", back_s=0.5)),
        universe=SURVIVES,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="lease lost when workers have parked",
        rule="No new incarnation has parked workers.",
        steps=(ALONE, at(2.9, "when", "n1", "parked", "fence", "n1"), at(3.0, "fail", "n1")),
        universe=SURVIVES,
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="lease lost while workers park",
        rule="Nothing is kept of a stop that the loss of the lease has overtaken.",
        steps=(
            ALONE,
            at(2.0, "park_after", "n1", 0.95),
            at(3.0, "when", "n1", "renewed", "cut", "n1", for_s=6.0),
            at(4.4, "fail", "n1"),
        ),
        universe=SURVIVES,
        end="finished, generation 3, 0 charged",
    ),
    Directed(
        name="parked workers cannot go on",
        rule="Workers that do not go on count as those that could not be started.",
        steps=(ALONE, at(2.5, "fail_starts", "n1", count=1), at(3.0, "fail", "n0")),
        universe=SURVIVES,
        end="finished, generation 3, 1 charged",
    ),
    Directed(
        name="a newer world forms before parked workers go on",
        rule="Parked workers wait for the world that is started.",
        steps=(
            ALONE,
            at(2.9, "when", "n1", "prepare", "crash", "n2", back_s=0.1),
            at(3.0, "fail", "n0"),
        ),
        universe=SURVIVES,
        end="finished, generation 3, 1 charged",
    ),
    Directed(
        name="a world without a node whose workers are parked",
        rule="Workers that are parked without a seat wait for the next world.",
        nodes=4,
        policy={"min_nodes": 2, "max_nodes": 4, "node_counts": (2, 4)},
        steps=(
            ALONE,
            at(3.0, "crash", "n3"),
        ),
        universe=SURVIVES,
        end="finished, generation 3, 0 charged",
        quiet_s=9.0,
    ),
    Directed(
        name="a node whose worker fails goes on later than the others",
        rule="Nobody waits for a node that starts workers apart from the world; it joins when they have parked.",
        steps=(ALONE, at(3.0, "fail", "n0")),
        universe=WARMS_UP,
        end="finished, generation 3, 1 charged",
    ),
    Directed(
        name="a node joins whose workers are parked",
        rule="A node joins a running world when its workers have parked.",
        nodes=2,
        policy={"min_nodes": 1, "max_nodes": 3},
        steps=(at(4.0, "join", "n4"),),
        universe=WARMS_UP,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="nodes that save and end so that others join",
        rule="A world that was ended for others waits for its own nodes, which would be the next ones to join.",
        nodes=2,
        policy={"min_nodes": 2, "max_nodes": 4, "node_counts": (2, 4)},
        steps=(at(4.0, "join", "n4"), at(4.0, "join", "n5")),
        universe={**WARMS_UP, "handles_notices": True},
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="a node is lost after its workers took long to start",
        rule="The time in which workers start is not part of that in which nodes are to come.",
        nodes=2,
        policy={"min_nodes": 2, "max_nodes": 2, "join_timeout_s": 5.0},
        steps=(at(7.0, "crash", "n1", back_s=3.5),),
        universe={**WARMS_UP, "warm_up_s": 16.0},
        end="finished, generation 1, 0 charged",
        quiet_s=25.0,
    ),
    Directed(
        name="too few without the node that warms up",
        rule="A world that needs the node waits for it.",
        policy={"min_nodes": 3},
        steps=(ALONE, at(3.0, "fail", "n0")),
        universe=WARMS_UP,
        end="finished, generation 2, 1 charged",
    ),
    Directed(
        name="lease lost while workers warm up",
        rule="The guard kills workers that have had no world at the deadline of the lease.",
        steps=(at(0.0, "when", "n1", "warm up", "cut", "n1", for_s=6.0),),
        universe=WARMS_UP,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="agent dies while workers warm up",
        rule="No worker outlives its agent, with or without a world.",
        steps=(at(0.0, "when", "n1", "warm up", "crash", "n1", back_s=0.5),),
        universe=WARMS_UP,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="workers that cannot warm up",
        rule="Workers that cannot be started apart from any world start in theirs.",
        steps=(ALONE, at(0.0, "fail_starts", "n1", count=1)),
        universe=WARMS_UP,
        end="finished, generation 1, 0 charged",
    ),
    Directed(
        name="a run is stopped while workers warm up",
        rule="A stopped run has no workers that wait for a world.",
        policy=WAITS,
        steps=(ALONE, at(3.0, "crash", "n2"), at(6.5, "stop", "n0")),
        universe={**WARMS_UP, "warm_up_s": 3.0},
        end="stopped, generation 2, 0 charged",
        quiet_s=12.0,
    ),
    Directed(
        name="a node leaves while its workers are parked",
        rule="A node whose part is over has no parked workers.",
        policy={"min_nodes": 2, "max_nodes": 3, "node_counts": (3,)},
        steps=(ALONE, at(3.0, "crash", "n2", back_s=8.0), at(7.0, "drain", "n0"), at(9.0, "join", "n4")),
        universe=SURVIVES,
        end="finished, generation 2, 0 charged",
    ),
    Directed(
        name="a run is stopped while workers are parked",
        rule="A stopped run has no parked workers.",
        policy=WAITS,
        steps=(ALONE, at(3.0, "crash", "n2"), at(7.0, "stop", "n0")),
        universe=SURVIVES,
        end="stopped, generation 2, 0 charged",
        quiet_s=12.0,
    ),
)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (*FENCE, *STORES, *BUDGET, *MEMBERSHIP, *GRACEFUL, *IN_ETCD, *PARKED)
}
