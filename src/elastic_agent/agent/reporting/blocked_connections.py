"""Logs connections of workers that the network blocks, on every node.

Only the node of the worker that connects can see it. It reports it, and the other nodes, whose workers wait as well,
look for such reports for a while.
"""

from __future__ import annotations

import asyncio
import contextlib

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.logs import get_logger
from elastic_agent.monitoring.rates import LeaseAges
from elastic_agent.transport import TransportError

from .node_reports import NodeReports

LOOK_EVERY_S = 2.0
SHOWN = 4
"""So many blocked connections of other nodes are logged."""
LOOK_FOR_S = 20.0
"""From the first stall of a generation on: the other nodes notice what is blocked some seconds sooner or later."""


class BlockedConnections:
    """Logs and reports those of this node's workers, and logs those that other nodes report."""

    def __init__(self, node_id: str, reports: NodeReports, tasks: BackgroundTasks) -> None:
        """``node_id``: this node; ``tasks``: runs what waits for the store."""
        self._node_id = node_id
        self._reports = reports
        self._tasks = tasks
        self._told: set[str] = set()
        self._looked_at = 0
        """The newest generation in which other nodes' reports were looked at."""
        self._ended = 0
        """The newest generation of which the workers have ended, and their connections with them."""
        self._is_over = asyncio.Event()

    def on_end(self, generation: int) -> None:
        """Say no more of connections of this generation."""
        self._ended = max(self._ended, generation)

    def on_blocked(self, blocked: events.ConnectionBlocked) -> None:
        """Log and report it; if the machine at the other end may simply be gone, only once it is known to be there."""
        if blocked.is_connected and blocked.node:
            self._tasks.start(self._report_if_there(blocked))
        else:
            self._report(blocked)

    def _report(self, blocked: events.ConnectionBlocked) -> None:
        line = blocked_words(blocked)
        get_logger().warning(line)
        self._reports.on_blocked(blocked.generation, line)

    def on_stall(self, stall: events.Stalled) -> None:
        """Look for what other nodes report, in the first stall of a generation."""
        if stall.generation > self._looked_at:
            self._looked_at = stall.generation
            self._tasks.start(self._look(stall.generation))

    def stop(self) -> None:
        """Look no more: the node's part in the run is over."""
        self._is_over.set()

    async def _report_if_there(self, blocked: events.ConnectionBlocked) -> None:
        """Report it when the other node has renewed its lease since.

        Not at all if that is revoked or gone first, or the generation is over.
        """
        ages = LeaseAges()
        while not self._is_over.is_set() and blocked.generation > self._ended:
            with contextlib.suppress(TransportError):
                snapshot = (await self._reports.read()).view.snapshot
                leases = {
                    name: lease
                    for name, lease in snapshot.leases.items()
                    if not lease.revoked
                    and name in snapshot.members
                    and snapshot.members[name].node_id == blocked.node
                }
                ages.see(leases, 0.0)
                if ages.ages_s(0.0) and blocked.generation > self._ended:
                    self._report(blocked)
                if ages.ages_s(0.0) or not leases:
                    return
            await self._pause()

    async def _look(self, generation: int) -> None:
        until_s = asyncio.get_running_loop().time() + LOOK_FOR_S
        while (
            self._looked_at == generation
            and not self._is_over.is_set()
            and asyncio.get_running_loop().time() < until_s
        ):
            with contextlib.suppress(TransportError):
                for one in (await self._reports.read()).of(generation).values():
                    if one.node_id != self._node_id:
                        self._tell(one.blocked)
            await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), LOOK_EVERY_S)

    def _tell(self, lines: tuple[str, ...]) -> None:
        fresh = [line for line in lines if line not in self._told]
        for line in fresh[: max(0, SHOWN - len(self._told))]:
            get_logger().warning(line)
        if len(self._told) <= SHOWN < len(self._told) + len(fresh):
            get_logger().warning(
                "more connections of workers on other nodes are blocked; elastic-agent doctor, with the same options "
                "on each machine, tests all of them"
            )
        self._told.update(fresh)


def blocked_words(blocked: events.ConnectionBlocked) -> str:
    """What is blocked and what to do, in a line."""
    peer = f"{blocked.node} ({blocked.host})" if blocked.node else blocked.host
    if blocked.is_connected:
        down = "" if blocked.node else "that machine is down, "
        return (
            f"worker {blocked.worker_id} is connected to {peer}, port {blocked.port}, but data that it sends do not "
            f"arrive: {down}the network between the machines is broken, or large packets are lost; compare the MTU of "
            "the interfaces on both (ip link)"
        )
    return (
        f"worker {blocked.worker_id} has tried for {blocked.for_s:.0f} s to connect to {peer}, port {blocked.port}, "
        "and nothing answers: probably a firewall drops the packets; allow TCP connections between the nodes on all "
        "ports from 1024 (workers listen on ports that the system chooses)"
    )
