"""Directed scenarios of worlds, leases, the guard and the store; the store is no etcd."""

from __future__ import annotations

from .directed import Directed, at

ALONE = at(0.0, "compute_alone")

FENCE = (
    Directed(
        name="cut off past its lease",
        rule="No world is sealed before the workers of the previous one are cleared.",
        steps=(ALONE, at(3.0, "cut", "n1", for_s=6.0)),
        end="finished, generation 3, 0 charged",
        mutants={
            "no-margin": "safety 2 (sealed only when all are cleared)",
            "seals-uncleared": "safety 2 (sealed only when all are cleared)",
            "ignores-lost-lease": "a node knows that its workers are gone",
        },
    ),
    Directed(
        name="cut off and frozen past its lease",
        rule="The guard kills the workers at the deadline of the lease, whatever the agent does.",
        steps=(ALONE, at(3.0, "cut", "n1", for_s=6.0), at(3.0, "freeze", "n1", for_s=6.0)),
        end="finished, generation 3, 0 charged",
        mutants={"guard-ignores-deadline": "the fence"},
    ),
    Directed(
        name="last of the seats cut off",
        rule="Every seat of the previous world is cleared first.",
        steps=(ALONE, at(3.0, "cut", "n2", for_s=6.0), at(3.1, "fail", "n0")),
        end="finished, generation 3, 0 charged",
        mutants={"omits-uncleared-seat": "safety 2 (sealed only when all are cleared)"},
    ),
    Directed(
        name="agent dies",
        rule="No worker outlives its agent, and losing a node is not charged.",
        steps=(at(3.0, "crash", "n1", back_s=0.1),),
        end="finished, generation 2, 0 charged",
        mutants={
            "guard-outlives-agent": "safety 7",
            "claims-without-proof": "safety 2 (sealed only when all are cleared)",
            "charges-membership": "safety 5",
        },
    ),
    Directed(
        name="restarted while a generation forms",
        rule="A node has one seat.",
        nodes=2,
        policy={"min_nodes": 3, "max_nodes": 4},
        steps=(at(1.0, "crash", "n1", back_s=0.1), at(1.3, "join", "n2")),
        end="finished, generation 2, 0 charged",
        mutants={"two-seats": "no run fails by its own plans"},
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
        mutants={"deadline-from-reply": "safety 2 (sealed only when all are cleared)"},
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
        mutants={"deadline-from-last-attempt": "safety 2 (sealed only when all are cleared)"},
    ),
    Directed(
        name="frozen while a renewal is under way",
        rule="Once the guard has killed the workers, no answer renews the lease.",
        steps=(ALONE, at(3.0, "when", "n1", "renewal sent", "freeze", "n1", for_s=1.7)),
        end="finished, generation 2, 0 charged",
        mutants={"renews-over-the-fence": "a node knows that its workers are gone"},
    ),
    Directed(
        name="revoked while it starts",
        rule="A revoked lease is never renewed, so that a node whose start hangs comes back as a new incarnation.",
        policy={"min_nodes": 3},
        steps=(at(0.0, "hang_starts", "n0", count=1),),
        end="finished, generation 2, 0 charged",
        mutants={"renews-revoked": "liveness"},
        quiet_s=8.0,
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
        mutants={"saves-after-publishing": "the outcome stands"},
    ),
    Directed(
        name="full disk",
        rule="The run goes on without the coordinator's disk.",
        steps=(at(0.0, "fill_disk", "store", for_s=8.0), at(3.0, "crash", "n1", back_s=0.1)),
        end="finished, generation 2, 0 charged",
        mutants={"needs-its-disk": "no exception"},
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
        mutants={"keeps-plan-version": "liveness", "generation-reused": "safety"},
        quiet_s=11.5,
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
        mutants={"plan-not-redelivered": "liveness"},
        quiet_s=5.0,
    ),
    Directed(
        name="no port for a bootstrap store",
        rule="A node that could not offer a bootstrap store tries again.",
        nodes=1,
        steps=(at(0.0, "no_port", "n0", for_s=3.0),),
        end="finished, generation 1, 0 charged",
        mutants={"offers-once": "liveness"},
        quiet_s=4.0,
    ),
    Directed(
        name="world starts",
        rule="The bootstrap store of a starting world is served.",
        end="finished, generation 1, 0 charged",
        mutants={"closes-the-needed-store": "the bootstrap store is served"},
    ),
)

SCENARIOS = (*FENCE, *STORES)
