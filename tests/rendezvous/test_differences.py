"""Nodes that were not started alike are noticed, on every node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from elastic_agent.diagnosis.differences import NO_RUN_ID, RUN_ID, differences, member_facts, policy_facts
from elastic_agent.protocol.records import Fingerprint, Member, Policy
from tests.protocol import support

SAME = Fingerprint("abc", "3.11.7", "2.13.0", "0.1.0", "train.py")


def member(name: str, fingerprint: Fingerprint = SAME, policy: Policy | None = None) -> Member:
    return support.member(name, policy=policy or Policy(), fingerprint=fingerprint)


def texts(
    members: list[Member], facts: Mapping[str, Mapping[str, str]] | None = None, used: Policy | None = None
) -> list[str]:
    known = {
        member.node_id: member_facts(member) | (facts or {}).get(member.node_id, {}) for member in members
    }
    found = differences(known, policy_facts(used) if used is not None else None)
    return [f"{difference.text}; {difference.rule.remedy}" for difference in found]


@pytest.mark.parametrize(("run_id", "waits"), [("cats", False), (NO_RUN_ID, True)])
def test_different_scripts_are_different_runs_only_without_a_run_id(run_id: str, waits: bool) -> None:
    nodes = [member("n1"), member("n2", Fingerprint("xyz", "3.11.7", "2.13.0", "0.1.0", "train.py"))]
    (line,) = texts(nodes, {node.node_id: {RUN_ID: run_id} for node in nodes})
    assert "workers run different code" in line
    assert ("wait for each other for ever" in line) is waits


def test_each_line_names_the_nodes_that_differ_from_most_and_what_to_do() -> None:
    odd = member(
        "n2",
        Fingerprint("xyz", "3.11.7", "2.12.1", "0.1.0", "train.py"),
        Policy(min_nodes=2, max_nodes=4, settle_s=3),
    )
    nodes = [member("n1", policy=Policy(max_nodes=4)), odd, member("n3", policy=Policy(max_nodes=4))]
    assert texts(nodes, used=Policy(max_nodes=4)) == [
        (
            "script: train.py (xyz) on n2; train.py (abc) on n1, n3; workers run different code; copy the same script "
            "to all machines"
        ),
        (
            "torch: 2.12.1 on n2; 2.13.0 on n1, n3; workers hang or fail in collectives; install the same version on "
            "all machines"
        ),
        "--nnodes: 2:4 on n2; 1:4 on n1, n3; the run uses 1:4; start all agents with the same command",
        "--settle: 3 on n2; 1 on n1, n3; the run uses 1; start all agents with the same command",
    ]
