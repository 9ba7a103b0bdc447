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
    Policy,
    State,
    StopRequest,
    World,
)
from elastic_agent.rendezvous import events
from elastic_agent.rendezvous.backends import BackendOptions, open_backend
from elastic_agent.rendezvous.participant import Owner, Participant
from elastic_agent.rendezvous.session import Session
from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint, new_incarnation

IN_GOOD_TIME_S = 600.0
SECRET = Secret((b"a secret of the benchmark",))


class Crowd:
    """The nodes of this process."""

    def __init__(self, numbers: range, total: int, options: argparse.Namespace) -> None:
        self.changed = asyncio.Event()
        self.nodes = [InstantNode(self, number, total, options) for number in numbers]

    async def all_reached(self, moment: str, generation: int) -> float:
        """Return when the last node came to this moment of this generation or a later one (CLOCK_BOOTTIME)."""
        while True:
            reached = [node.reached.get(moment, (0, 0.0)) for node in self.nodes]
            if all(newest >= generation for newest, _ in reached):
                return max(at_s for _, at_s in reached)
            self.changed.clear()
            await self.changed.wait()


class InstantNode:
    """A node of the run whose workers start and stop at once."""

    def __init__(self, crowd: Crowd, number: int, total: int, options: argparse.Namespace) -> None:
        self.reached: dict[str, tuple[int, float]] = {}
        """What happened to it (``sealed``, ``started``, ``told``): the newest generation in which, and when."""
        self._crowd = crowd
        policy = Policy(min_nodes=total, max_nodes=total)
        own = BackendOptions(
            Endpoint("127.0.0.1", options.port),
            options.folder / str(number),
            policy.lease_ttl_s,
            policy.fence_margin_s,
            secret=SECRET if options.secret else None,
        )
        backend = open_backend(own, None)
        backend.run_id = "benchmark"
        member = Member(
            version=RECORD_VERSION,
            node_id=f"n{number}",
            incarnation=new_incarnation(),
            address="127.0.0.1",
            slots=1,
            state=State.READY,
            generation=0,
            policy=policy,
        )
        self.session = Session(backend, member, policy.lease_ttl_s)
        self.session.listen(self._hear)
        self._part = Participant(
            self.session,
            Owner(
                set_deadline=lambda deadline_s: None,
                warm_up=lambda: None,
                start=self._start,
                stop=lambda action: self._part.perform(self.node.stopped()),
                notify=lambda notice: self._reach("told", self.node.generation),
                departs=lambda ending: tell("trouble", what=f"departed: {ending.reason}"),
            ),
            new_incarnation,
        )
        self.node = self._part.node

    def _hear(self, event: events.SessionEvent) -> None:
        match event:
            case events.PlanSeen(plan=plan) if plan.world is not None and plan.phase.value == "running":
                self._reach("sealed", plan.generation)
            case events.PrepareFailed(failure=failure):
                tell("trouble", what=failure.summary)
            case events.LeaseLost() | events.Disconnected():
                tell("trouble", what=event.reason)
        self._part.take_in(event)

    def _start(self, world: World) -> None:
        self._reach("started", world.generation)
        self._part.perform(self.node.started(world.generation))

    def _reach(self, moment: str, generation: int) -> None:
        if generation > self.reached.get(moment, (0, 0.0))[0]:
            self.reached[moment] = generation, now_s()
            self._crowd.changed.set()

    def fail(self) -> None:
        failure = Failure(FailureKind.WORKER, "a failure for the benchmark")
        self._part.perform(self.node.failed(self.node.generation, failure))

    def request_stop(self) -> None:
        stop_request = StopRequest(
            self.node.next_stop_request, Cause.WALLTIME, IN_GOOD_TIME_S, "a notice for the benchmark"
        )
        self._part.perform(self.node.request_stop(stop_request))


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
    for what in ("sealed", "started"):
        tell(what, moment=await crowd.all_reached(what, 1))
    before = max(node.node.generation for node in crowd.nodes)
    tell("calm")
    if await line_of_stdin() == "fail":
        tell("failing")
        crowd.nodes[0].fail()
    for what in ("sealed", "started"):
        tell(what, moment=await crowd.all_reached(what, before + 1))
    tell("done")
    if await line_of_stdin() == "ask":
        crowd.nodes[0].request_stop()
    tell("told", moment=await crowd.all_reached("told", 1))
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
