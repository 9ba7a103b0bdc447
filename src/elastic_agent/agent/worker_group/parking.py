"""Workers that park: they leave their world when it ends, keep process and state, and go on in the next one.

New ones that are started apart from any world park before their first one.

A worker that can do so says it on the line over which it is asked for its progress (:mod:`.collectives`), and there it
is told to park and to go on. What has not parked within :data:`PARK_S` is stopped, and what does not go on within
:data:`GO_ON_S` counts as a worker that could not be started.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic_agent.agent import events
from elastic_agent.agent.tasks import in_this_loop
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.linux import is_frozen
from elastic_agent.logs import get_logger
from elastic_agent.workers.cleanup import Cleanup
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.guard import client as guard_events

from .endings import log_cleanup, start_failure

if TYPE_CHECKING:
    from .generation import Generation

PARK_S = 1.0
"""The time that workers may take to park."""

GO_ON_S = 5.0
"""The time that a worker may take to say that it goes on."""

CAN_PARK, HAS_PARKED, GOES_ON = "can park", "has parked", "goes on"
"""The words that workers say; anything else means that they cannot park any more."""

PARK, RAISE = b"park", b"raise"
"""The words to them: to leave their world; that there is no next one, so that the error with which they left it is
raised; or, as JSON, what differs in the world in which they go on."""


class Parking:
    """The words that the workers of the present generation have said about parking."""

    def __init__(self, send: Callable[[bytes, bytes], bool]) -> None:
        """``send``: sends a message to the worker at this address, and returns whether that was possible."""
        self._send = send
        self.can: dict[int, bytes] = {}
        """By slot, where the workers that can park are told to."""
        self.have_parked: set[int] = set()
        """The slots of workers that have parked."""
        self.go_on: set[int] = set()
        """The slots of workers that have parked in the generation before, and go on."""
        self.on_news: Callable[[int], None] = lambda slot: None
        """Called with the slot of each worker that has said something."""

    def clear(self) -> None:
        """Forget the workers: those of another generation begin."""
        self.can.clear()
        self.have_parked.clear()
        self.go_on.clear()

    def take_in(self, slot: int, said: str, peer: bytes) -> None:
        """Take note of what a worker says."""
        if said == CAN_PARK:
            self.can[slot] = peer
        elif said == GOES_ON:
            self.go_on.add(slot)
        elif said == HAS_PARKED and self.can.get(slot) == peer:
            self.have_parked.add(slot)
        elif self.can.get(slot) == peer:  # its training is over, or it has another process group
            del self.can[slot]
            self.have_parked.discard(slot)
        self.on_news(slot)

    def forget_replaced(self, parked: Parked, pids: Mapping[int, int]) -> None:
        """Forget parked workers that have ended, and others were started in their place; these may have parked."""
        for slot, pid in parked.pids.items():
            if pids.get(slot) != pid and self.can.get(slot) == parked.peers.get(slot):
                self.can.pop(slot, None)
                self.have_parked.discard(slot)

    def tell_to_park(self) -> None:
        """Have the workers park that can."""
        for peer in self.can.values():
            self._send(PARK, peer)

    def tell_to_raise(self, slot: int) -> None:
        """Have a worker that has parked by itself raise the error with which it left its world."""
        self.have_parked.discard(slot)
        if peer := self.can.pop(slot, None):
            self._send(RAISE, peer)

    def tell_to_go_on(self, peer: bytes, context: WorkerContext, slot: int) -> None:
        """Have a parked worker go on as the one of this slot; it says so when it does."""
        order = {
            "generation": context.generation,
            "variables": context.variables(slot),
            "stdout": context.stdouts[slot],
            "stderr": context.stderrs[slot],
        }
        self._send(json.dumps(order).encode(errors="surrogateescape"), peer)


@dataclass
class Parked:
    """The parked workers of a generation that is over, between two worlds."""

    generation: int
    pids: dict[int, int]
    """By slot."""
    peers: Mapping[int, bytes]
    """Where each is told to go on."""
    heartbeats: HeartbeatFile
    """They go on using it."""
    cleanup: Cleanup
    """It knows what their processes hold, and what those have left that ended."""
    left_world: bool
    """Some of them have been in a world."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def end(self, guard: guard_events.Guard) -> None:
        """Have the guard stop them at once: they are in the middle of nothing. A guard that is frozen is killed."""
        guard.stop(0.0)
        if is_frozen(guard.pid):
            os.kill(guard.pid, signal.SIGKILL)
        await self.gone.wait()

    def take_in(self, event: guard_events.GuardEvent) -> None:
        """Take note of an event of the guard."""
        if isinstance(event, guard_events.Exited):
            if self.pids.pop(event.slot, None) is not None and not event.stopping:
                code = event.returncode
                get_logger().warning(
                    f"worker {event.slot} ended while it waited for its next world", code=code
                )
        elif isinstance(event, guard_events.Stopped | guard_events.GuardLost):
            self.pids.clear()
            self.heartbeats.close()
            leftovers = self.cleanup.for_next()
            leftovers.started()
            leftovers.clear(in_this_loop(log_cleanup))
            self.gone.set()


# -- keeping the workers of a generation that is stopped ------------------------------------------

LOOK_EVERY_S = 0.5
"""The pause between two looks whether a worker trains that was started apart from any world."""


async def until_may_start(workers: Generation) -> None:
    """Wait until the guard may start workers: it is on record, and nothing is left of parked ones that have ended."""
    group = workers.group
    await workers.until(lambda: group.may_start or workers.is_to_end())
    if workers.parked is None and group.parked is not None:
        await group.parked.gone.wait()


def can_park(workers: Generation) -> bool:
    """Return whether a worker can park, and those that went on in this generation, if any, have got on in it."""
    can = workers.group.collectives.parking.can.keys() & workers.alive().keys()
    have_left_another = workers.parked is not None and workers.parked.left_world
    return bool(can) and (not have_left_another or workers.group.is_passed_by(workers))


def take_in_news(workers: Generation, slot: int) -> None:
    """Take in that a worker has said something about parking."""
    has_parked = slot in workers.group.collectives.parking.have_parked
    if has_parked and not (workers.is_to_end() or workers.is_apart):
        workers.group.start_task(raise_unless_stopped(workers, slot))
    workers.news.set()


async def stop_after_parking(workers: Generation, grace_s: float, signum: int, idle_s: float | None) -> None:
    """Have the workers park that can, and then stop the others; also those that take too long."""
    parking = workers.group.collectives.parking
    parking.tell_to_park()

    def all_have() -> bool:
        return parking.can.keys() & workers.alive().keys() <= parking.have_parked

    await workers.until(lambda: all_have() or not workers.may_park or workers.gone, PARK_S)
    if workers.may_park and workers.gone is None:
        kept = [pid for slot, pid in workers.alive().items() if slot in parking.have_parked]
        workers.guard.stop(grace_s, signum, idle_s=idle_s, keep=kept)


async def go_on(workers: Generation, parked: Parked, started: guard_events.Spawned) -> None:
    """Have parked workers go on in their new places; report the start when they do."""
    group, parking = workers.group, workers.group.collectives.parking
    waiting = {slot for slot, pid in parked.pids.items() if started.pids.get(slot) == pid}
    for slot in waiting:
        parking.tell_to_go_on(parked.peers[slot], workers.context, slot)
    await workers.until(lambda: waiting <= parking.go_on or workers.is_to_end(), GO_ON_S)
    if missing := sorted(waiting - parking.go_on):
        error = f"worker {missing[0]}, which was kept, does not go on"
        workers.fail(start_failure(group.node_id, error, missing[0]))
    elif not workers.is_to_end():
        group.report(started)


async def raise_unless_stopped(workers: Generation, slot: int) -> None:
    """Have a worker that has parked by itself raise its error, unless its generation is stopped soon."""
    settings = workers.group.settings
    # A lost node is noticed when its lease and the margin are over; perhaps another node has to coordinate then.
    await workers.until(workers.is_to_end, 2 * settings.lease_ttl + settings.fence_margin)
    if not workers.is_to_end():
        workers.group.collectives.parking.tell_to_raise(slot)


async def run_apart(workers: Generation) -> None:
    """Start the workers that are missing, apart from any world, and report when all have parked.

    Or when one cannot: those that have not parked by then are ended, and start in their world.
    """
    group = workers.group
    try:
        await until_may_start(workers)
        if not workers.is_to_end():
            workers.start()
        problem, tell_s = None, asyncio.get_running_loop().time() + group.settings.start_timeout
        while not (_all_have_parked(workers) or workers.exits or problem or workers.is_to_end()):
            await workers.until(lambda: _all_have_parked(workers) or workers.exits, LOOK_EVERY_S)
            problem = _problem(workers)
            if workers.pids and asyncio.get_running_loop().time() >= tell_s:
                tell_s = math.inf
                missing = sorted(workers.pids.keys() - group.collectives.parking.have_parked)
                get_logger().info("still waiting for workers to come to @survive.train", slots=missing)
        all_have = _all_have_parked(workers)
        if workers.has_started and workers.stopped_s is None and workers.gone is None:
            have_parked = group.collectives.parking.have_parked
            kept = [pid for slot, pid in workers.alive().items() if slot in have_parked]
            workers.guard.stop(0.0, keep=kept)
        if workers.has_started:
            await workers.until(lambda: workers.gone)
            await workers.clear(in_order=True)
        await workers.close_output()
    finally:
        workers.leave()
        if not workers.kept and (workers.has_started or workers.parked is None):
            workers.heartbeats.close()
    if workers.stopped_s is not None:
        parked = len(group.parked.pids) if group.parked is not None else 0
        group.report(events.WorkersCleared(workers.unkillable, parked))
        return
    if not all_have:
        why = problem or (workers.failure.summary if workers.failure is not None else "they were ended")
        how_long = "this time" if problem is None else "from now on"
        get_logger().warning(f"workers start in their world {how_long}, not before it: {why}")
    group.report(events.WarmedUp(again=problem is None))


def _all_have_parked(workers: Generation) -> bool:
    slots = workers.pids.keys()
    return bool(slots) and slots <= workers.group.collectives.parking.have_parked and not workers.exits


def _problem(workers: Generation) -> str | None:
    """Return why workers cannot be started apart from any world, in words; None: nothing is known against it."""
    node_id, without = workers.group.node_id, "without @survive.train"
    for slot, exited in workers.exits.items():
        if exited.returncode >= 0:  # else something else has ended it
            return f"worker {node_id}/{slot} ended with code {exited.returncode} {without}"
    for slot in workers.pids:
        if workers.heartbeats.optimizer_steps(slot) or slot in workers.group.collectives.workers:
            return f"worker {node_id}/{slot} trains {without}"
    return None
