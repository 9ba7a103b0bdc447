"""Nodes that were not started alike are noticed."""

from __future__ import annotations

from elastic_agent.protocol.records import RECORD_VERSION, Fingerprint, Member, Policy, State
from elastic_agent.rendezvous.coordinator_driver import differences


def member(name: str, fingerprint: Fingerprint, policy: Policy) -> Member:
    return Member(
        RECORD_VERSION, name, f"{name}-life", "127.0.0.1", 1, State.READY, 0, policy, fingerprint=fingerprint
    )


def test_nodes_started_alike_have_no_differences() -> None:
    same = Fingerprint("abc", "3.11.7", "2.13.0", "0.1.0")
    assert differences(member("n1", same, Policy()), member("n2", same, Policy())) == []


def test_each_difference_is_a_sentence_that_names_both_nodes() -> None:
    first = member("n1", Fingerprint("abc", "3.11.7", "2.13.0", "0.1.0"), Policy(min_nodes=1, max_nodes=4))
    other = member("n2", Fingerprint("xyz", "3.11.7", "2.12.1", "0.1.0"), Policy(min_nodes=2, max_nodes=4))
    assert differences(first, other) == [
        "n2 runs a different script than n1",
        "n2 runs a different torch than n1 (2.12.1, not 2.13.0)",
        "n2 was started with min_nodes 2, n1 with 1; the run uses 1",
    ]


def test_a_missing_value_is_not_a_difference() -> None:
    torchrun = member("n2", Fingerprint(python="3.11.7"), Policy())
    assert differences(member("n1", Fingerprint("abc", "3.11.7"), Policy()), torchrun) == []
