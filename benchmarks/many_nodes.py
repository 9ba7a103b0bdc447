"""Many nodes of elastic-agent's rendezvous in one process, and no workers (see ``benchmarks/rendezvous.py``).

Every node is a real session with a meeting place of its own; whichever dials first hosts the store and its
coordinator. Workers count as started at once. Reads words on stdin: ``begin``, then ``fail`` (the first node of
this process reports a failure) or ``watch`` (another process does), then ``stop_request`` (the first node of this
process asks that the run ends, in good time) or ``listen``, then ``end``. Writes JSON lines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - the store is served in this process: forming is measured, not the import

from elastic_agent.logs import configure_logging
from elastic_agent.protocol import (
    RECORD_VERSION,
    Cause,
    Failure,
    FailureKind,
    Member,
    Node,
    Policy,
    State,
    StopRequest,
)
from elastic_agent.protocol import node as machine
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.backends import open_backend
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint, new_incarnation

IN_GOOD_TIME_S = 600.0
SECRET = Secret((b"a secret of the benchmark",))


class Crowd:
    """The nodes of this process."""

    def __init__(self, numbers: range, total: int, options: argparse.Namespace) -> None:
        self.nodes = [OneNode(self, number, total, options) for number in numbers]
        self.changed = asyncio.Event()

    async def all_in(self, generation: int) -> float:
        """When the last node had a world of this generation or a later one (CLOCK_BOOTTIME)."""
        while True:
            if all(node.sealed_generation >= generation for node in self.nodes):
                return max(node.sealed_s for node in self.nodes)
            self.changed.clear()
            await self.changed.wait()

    async def all_started(self, generation: int) -> float:
        while True:
            if all(node.started_generation >= generation for node in self.nodes):
                return max(node.started_s for node in self.nodes)
            self.changed.clear()
            await self.changed.wait()

    async def all_told(self) -> float:
        """When the last node gave its workers the notice."""
        while True:
            if all(node.told_s for node in self.nodes):
                return max(node.told_s for node in self.nodes)
            self.changed.clear()
            await self.changed.wait()


class OneNode:
    """A session and the node's state machine; carries out the actions as if workers were instant."""

    def __init__(self, crowd: Crowd, number: int, total: int, options: argparse.Namespace) -> None:
        self.crowd = crowd
        self.node = Node(new_incarnation())
        policy = Policy(min_nodes=total, max_nodes=total)
        backend = open_backend(
            Endpoint("127.0.0.1", options.port),
            None,
            options.folder / str(number),
            lease_ttl_s=policy.lease_ttl_s,
            fence_margin_s=policy.fence_margin_s,
            secret=SECRET if options.secret else None,
        )
        backend.run_id = "benchmark"
        self.backend = backend
        member = Member(
            version=RECORD_VERSION,
            node_id=f"n{number}",
            incarnation=self.node.incarnation,
            address="127.0.0.1",
            slots=1,
            state=State.READY,
            generation=0,
            policy=policy,
        )
        self.session = Session(backend, member, policy.lease_ttl_s)
        self.session.listen(self.event)
        self.sealed_generation = self.started_generation = 0
        self.sealed_s = self.started_s = self.told_s = 0.0

    def event(self, event: events.SessionEvent) -> None:
        match event:
            case events.PlanSeen(plan=plan):
                seated = plan.world is not None and plan.phase.value == "running"
                if seated and plan.generation > self.sealed_generation:
                    self.sealed_generation, self.sealed_s = plan.generation, now_s()
                    self.crowd.changed.set()
                self.perform(self.node.plan_changed(plan))
            case events.Prepared(generation=generation):
                self.perform(self.node.prepared(generation))
            case events.PrepareFailed(generation=generation, failure=failure):
                tell("trouble", what=failure.summary)
                self.perform(self.node.prepare_failed(generation, failure))
            case events.LeaseLost(reason=reason):
                tell("trouble", what=reason)
                self.perform(self.node.lease_lost(reason))
            case events.Disconnected(reason=reason) | events.Unusable(reason=reason):
                tell("trouble", what=reason)
            case _:
                pass

    def perform(self, actions: list[machine.Action]) -> None:
        for action in actions:
            match action:
                case machine.Announce():
                    self.session.announce(action)
                case machine.Prepare(world=world):
                    self.session.prepare(world)
                case machine.StartWorkers(world=world):
                    self.started_generation, self.started_s = world.generation, now_s()
                    self.crowd.changed.set()
                    self.perform(self.node.started(world.generation))
                case machine.RequestStop(stop_request=stop_request):
                    self.session.request_stop(stop_request)
                case machine.Notify():
                    self.told_s = now_s()
                    self.crowd.changed.set()
                case machine.StopWorkers():
                    self.perform(self.node.stopped())
                case machine.Rejoin():
                    incarnation = new_incarnation()
                    self.session.rejoin(incarnation)
                    self.perform(self.node.rejoined(incarnation))
                case machine.Depart(reason=reason):
                    tell("trouble", what=f"departed: {reason}")

    def fail(self) -> None:
        failure = Failure(FailureKind.WORKER, "a failure for the benchmark")
        self.perform(self.node.failed(self.node.generation, failure))

    def request_stop(self) -> None:
        stop_request = StopRequest(
            self.node.next_stop_request, Cause.WALLTIME, IN_GOOD_TIME_S, "a notice for the benchmark"
        )
        self.perform(self.node.request_stop(stop_request))


def now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def tell(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "at_s": now_s(), **more}), flush=True)


async def live(options: argparse.Namespace) -> None:
    """Read from stdin when to begin; report on stdout when each node here got its world."""
    crowd = Crowd(range(options.first, options.last), options.nodes, options)
    gc.freeze()  # as the agent does: the million objects of torch, which is loaded by now, are no garbage
    tell("here")
    await line_of_stdin()
    sessions = [asyncio.create_task(node.session.run()) for node in crowd.nodes]
    for what, wait in (("sealed", crowd.all_in), ("started", crowd.all_started)):
        tell(what, moment=await wait(1))
    before = max(node.started_generation for node in crowd.nodes)
    tell("calm")
    if await line_of_stdin() == "fail":
        tell("failing")
        crowd.nodes[0].fail()
    for what, wait in (("sealed", crowd.all_in), ("started", crowd.all_started)):
        tell(what, moment=await wait(before + 1))
    tell("done")
    if await line_of_stdin() == "ask":
        crowd.nodes[0].request_stop()
    tell("told", moment=await crowd.all_told())
    await line_of_stdin()
    del sessions
    os._exit(
        0
    )  # thousands of threads are inside the store's client; nothing of theirs needs an end in good order


async def line_of_stdin() -> str:
    return (await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Started by the rendezvous benchmark.")
    parser.add_argument("first", type=int, help="number of the first node here")
    parser.add_argument("last", type=int, help="number after the last one here")
    parser.add_argument("nodes", type=int, help="how many there are in all")
    parser.add_argument("port", type=int)
    parser.add_argument("folder", type=Path, help="for the nodes' state directories")
    parser.add_argument("--secret", action="store_true", help="they share a secret")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    configure_logging("console", "warning", sys.stderr)
    asyncio.run(live(options))


if __name__ == "__main__":
    main()
