"""Stories of one node: where it begins, what happens to it step by step, and what it does then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from elastic_agent.protocol.node import (
    Announce,
    Depart,
    Grace,
    Node,
    Outcome,
    StopWorkers,
)
from elastic_agent.protocol.records import (
    Cause,
    Failure,
    FailureKind,
    Notice,
    Phase,
    Plan,
    State,
    StopRequest,
)
from tests.protocol.support import plan, world

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


def told(story: Story) -> Iterator[tuple[str, Any, Any]]:
    """Each event of a story, what the node does, and what it is to do."""
    begin, steps = story
    node = begin()
    for event, *arguments, actions in steps:
        facts = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        yield event, getattr(node, event)(*arguments, **facts), actions
