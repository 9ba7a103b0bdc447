"""Directed scenarios of a run in etcd: the election of its coordinator, takeovers, and the loss of etcd's data."""

from __future__ import annotations

from typing import Any

from elastic_agent.protocol.records import History, Phase

from .directed import Directed, Step, at
from .scenarios_lease import ALONE

ANOTHER_RUN = History(900, outcome=Phase.FINISHED, settled=True)
"""What a machine knows that took part in an earlier run of the same name."""


def _in_etcd(name: str, rule: str, *steps: Step, **more: Any) -> Directed:
    return Directed(name=name, rule=rule, steps=steps, hosting="etcd", **more)


SCENARIOS = (
    _in_etcd(
        "coordinator frozen just before it reads",
        "The coordinator dates what it reads by the time after the answer.",
        ALONE,
        at(3.0, "freeze_at_reading", for_s=0.6),
        at(3.0, "when", "n1", "renewed", "cut", "n1", for_s=8.0),
        end="finished, generation 3, 0 charged",
        mutants={"time-before-the-read": "a running world is kept"},
    ),
    _in_etcd(
        "everything is started again",
        "How a run ended is written down, so that another one of its name begins.",
        universe={"again": True},
        end="finished, generation 2, 0 charged",
        mutants={
            "settles-nothing": "finished when all succeeded",
        },
    ),
    _in_etcd(
        "next run begins without the last coordinator",
        "A run begins with a look at how the last one of its name ended.",
        at(16.6, "cut", "n0", for_s=3.0),
        universe={"again": True},
        end="finished, generation 2, 0 charged",
        mutants={"forgets-how-it-ended": "finished when all succeeded"},
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
        mutants={"leads-once": "liveness"},
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
        mutants={"ignores-gaps": "liveness"},
        quiet_s=5.0,
    ),
    _in_etcd(
        "failure while the coordinator is deposed",
        "A former leader writes nothing.",
        at(3.0, "depose"),
        at(3.0, "fail", "n1"),
        end="finished, generation 2, 1 charged",
        mutants={"former-leader-writes": "a deposed coordinator writes nothing"},
    ),
    _in_etcd(
        "node with the newest history registers first",
        "A node reports its history to a store with less history.",
        ALONE,
        at(3.0, "etcd_loses_data", {"n0": 1.0, "n1": 6.0, "n2": 6.0}),
        universe={"prompt_workers": False},
        end="finished, generation 3, 0 charged",
        mutants={"reports-no-history": "safety 2 (one world at a time)"},
    ),
    _in_etcd(
        "stranger who knows another run of the name",
        "A world that a node runs and reports is cleared, whatever run the coordinator knows.",
        ALONE,
        at(3.0, "etcd_loses_data", {"n0": 1.0, "n1": 6.0, "n2": 6.0}, ANOTHER_RUN),
        universe={"prompt_workers": False},
        end="finished, generation 902, 0 charged",
        mutants={"clears-no-unknown-world": "safety 2 (one world at a time)"},
    ),
    _in_etcd(
        "node is lost while a stranger waits",
        "The world of a node is to be cleared before the node's lease is revoked.",
        ALONE,
        at(3.0, "etcd_loses_data", {"n0": 0.1, "n1": 6.0, "n2": 6.0}, ANOTHER_RUN),
        at(3.1, "when", "n0", "renewed", "cut", "n0", for_s=6.0),
        at(5.5, "freeze", "n7", for_s=0.2),
        universe={"prompt_workers": False},
        end="finished, generation 902, 0 charged",
        mutants={"revokes-before-clearing": "safety 2 (one world at a time)"},
    ),
    _in_etcd(
        "cut off when the coordinator changes",
        "A new coordinator clears a node after a lease and the margin, dated by what it was told before.",
        ALONE,
        at(3.0, "when", "n1", "renewed", "cut", "n1", for_s=6.0),
        at(3.8, "depose"),
        at(4.0, "fail", "n0"),
        end="finished, generation 3, 0 charged",
        mutants={"takeover-clears-at-once": "safety 2", "dates-before-the-write": "safety 2"},
    ),
    _in_etcd(
        "coordinator changes",
        "A new coordinator keeps the running world.",
        at(3.0, "depose"),
        end="finished, generation 1, 0 charged",
        mutants={"takeover-revokes": "a running world is kept"},
    ),
    _in_etcd(
        "stranger first",
        "In an etcd that lost its data nothing forms before the nodes of the last world have registered.",
        at(3.0, "etcd_loses_data", {"n0": 1.0, "n1": 1.0, "n2": 1.0}),
        policy={"max_nodes": 4},
        end="finished, generation 2, 0 charged",
        mutants={"ignores-unregistered-nodes": "safety 2 (one world at a time)"},
    ),
    _in_etcd(
        "nodes come back above the stranger's world",
        "A later generation of which a node tells is gone above.",
        at(1.5, "fail", "n1"),
        at(2.2, "fail", "n1"),
        at(3.0, "etcd_loses_data", {"n0": 6.0, "n1": 6.0, "n2": 6.0}),
        policy={"max_nodes": 4},
        end="finished, generation 4, 2 charged",
        mutants={"stays-below": "safety 4 (a later generation is gone above)"},
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
