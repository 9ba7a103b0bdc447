"""Keeps workers of a generation that is stopped: what is done until they have parked, and until they go on.

Missing workers are started apart from any world, and park before they have a place in one.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from elastic_agent.agent import events
from elastic_agent.logs import get_logger
from elastic_agent.workers.guard.client import Spawned

from .endings import start_failure
from .parking import GO_ON_S, PARK_S, Parked

if TYPE_CHECKING:
    from .generation import Generation

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


async def go_on(workers: Generation, parked: Parked, started: Spawned) -> None:
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
    parked = len(group.parked.pids) if group.parked is not None else 0
    if workers.stopped_s is not None:
        group.report(events.WorkersCleared(workers.unkillable, parked))
        return
    if not all_have:
        why = problem or (workers.failure.summary if workers.failure is not None else "they were ended")
        how_long = "this time" if problem is None else "from now on"
        get_logger().warning(f"workers start in their world {how_long}, not before it: {why}")
    is_whole = all_have and workers.kept.keys() == workers.pids.keys()
    group.report(events.WarmedUp(parked, is_whole, again=problem is None))


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
