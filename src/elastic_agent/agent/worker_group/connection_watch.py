"""Detects connections between workers that a firewall or the network blocks, while the workers still wait for them.

gloo and NCCL report nothing until their time-outs of minutes. The kernel shows it within seconds: a connection that
is not answered. The sockets are read in a thread, in the first minutes of a generation, when workers connect to each
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.protocol import World
from elastic_agent.transport import run_abandonable
from elastic_agent.workers.guard.client import GuardLost, Spawned, Stopped

LOOK_EVERY_S = 2.0
BLOCKED_S = 4.0
"""A connection that is not answered for so long is reported. The kernel has sent at least three packets by then, and
the kernel of a machine that is only busy answers."""

WATCH_S = 180.0
"""How long into a generation connections are watched."""


@dataclass(frozen=True)
class Unanswered:
    """A connection of a worker to which nothing has answered yet."""

    slot: int
    host: str
    port: int


class ConnectionWatch:
    """Watches the connections of this node's workers; a subscriber."""

    def __init__(
        self, node_id: str, world: Callable[[], World | None], report: Callable[[int, str], None]
    ) -> None:
        """Prepare; ``world``: whose workers run; ``report``: takes the generation, and what is blocked, in a line."""
        self._node_id = node_id
        self._world = world
        self._report = report
        self._tasks = BackgroundTasks()
        self._told: set[str] = set()
        """The hosts."""

    def on_event(self, event: events.Event) -> None:
        """Watch while workers run."""
        match event:
            case Spawned(generation=generation, pids=pids):
                self.stop()
                self._tasks.start(self._watch(generation, pids))
            case Stopped() | GuardLost() | events.WorkersStopping():
                self.stop()

    def stop(self) -> None:
        """Watch no more."""
        self._tasks.cancel()

    async def _watch(self, generation: int, pids: Mapping[int, int]) -> None:
        until_s = time.monotonic() + WATCH_S
        since_s: dict[Unanswered, float] = {}
        while time.monotonic() < until_s:
            await asyncio.sleep(LOOK_EVERY_S)
            found = await run_abandonable(lambda: [*unanswered(pids)], WATCH_S)
            now_s = time.monotonic()
            since_s = {connection: since_s.get(connection, now_s) for connection in found}
            for connection, began_s in since_s.items():
                if now_s - began_s >= BLOCKED_S:
                    self._tell(generation, connection, now_s - began_s)

    def _tell(self, generation: int, connection: Unanswered, tried_s: float) -> None:
        node = self._node_at(connection.host)
        if connection.host in self._told or not (node or _is_internal(connection)):
            return
        self._told.add(connection.host)
        peer = f"{node} ({connection.host})" if node else connection.host
        self._report(
            generation,
            f"worker {self._node_id}/{connection.slot} has tried for {tried_s:.0f} s to connect to {peer}, port "
            f"{connection.port}, and nothing answers: probably a firewall drops the packets; allow TCP connections "
            "between the nodes on all ports from 1024 (workers listen on ports that the system chooses)",
        )

    def _node_at(self, host: str) -> str:
        world = self._world()
        seats = world.seats if world is not None else ()
        return next(
            (seat.node_id for seat in seats if seat.address == host and seat.node_id != self._node_id), ""
        )


def unanswered(pids: Mapping[int, int]) -> Iterator[Unanswered]:
    """Yield the connections of the workers ``pids``, by slot, that wait for an answer; takes milliseconds.

    Workers that have ended, or may not be inspected, have none.
    """
    import psutil  # late: an agent starts without it

    for slot, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            for found in psutil.Process(pid).net_connections("tcp"):
                if found.status == psutil.CONN_SYN_SENT and found.raddr:
                    yield Unanswered(slot, _unmapped(found.raddr.ip), found.raddr.port)


def _unmapped(host: str) -> str:
    """Return an IPv4 address that a socket for IPv6 is connected to as what it is."""
    address = ipaddress.ip_address(host)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _is_internal(connection: Unanswered) -> bool:
    """Return whether it may be another worker on an address that its node did not announce, and not some service."""
    address = ipaddress.ip_address(connection.host)
    return connection.port >= 1024 and address.is_private
