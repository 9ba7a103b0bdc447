"""Detects connections between workers that a firewall or the network blocks, while the workers still wait for them.

gloo and NCCL report nothing until their time-outs of minutes. The kernel shows it within seconds: a connection that
is not answered, or data that are sent again and again. The sockets are read in a thread, in the first minutes of a
generation, when workers connect to each other.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.agent import events
from elastic_agent.agent.tasks import BackgroundTasks
from elastic_agent.protocol import World
from elastic_agent.transport import run_abandonable
from elastic_agent.workers.guard.client import GuardLost, Spawned, Stopped
from elastic_agent.workers.tcp_sockets import ESTABLISHED, SYN_SENT, SocketReader, TcpSocket

LOOK_EVERY_S = 2.0
BLOCKED_S = 4.0
"""A connection that is not answered for so long is reported. The kernel has sent at least three packets by then, and
the kernel of a machine that is only busy answers."""

WATCH_S = 180.0
"""The time from the start of a generation in which connections are watched."""

RETRANSMITS = 4
"""Data that were sent again so often in a row are reported."""


@dataclass(frozen=True)
class _Blocked:
    slot: int
    host: str
    port: int
    is_connected: bool


@dataclass(eq=False, repr=False)
class ConnectionWatch:
    """Watches the connections of this node's workers; a subscriber."""

    node_id: str
    world: Callable[[], World | None]
    """Gives the world whose workers run."""
    report: Callable[[int, str], None]
    """Takes the generation, and what is blocked, in a line."""

    def __post_init__(self) -> None:
        self._tasks = BackgroundTasks()
        self._told: set[tuple[str, bool]] = set()

    def on_event(self, event: events.Event) -> None:
        """Watch while workers run."""
        match event:
            case Spawned(generation=generation, pids=pids):
                self.stop()
                self._tasks.start(self._watch(generation, SocketReader(pids)))
            case Stopped() | GuardLost() | events.WorkersStopping():
                self.stop()

    def stop(self) -> None:
        """Watch no more."""
        self._tasks.cancel()

    async def _watch(self, generation: int, reader: SocketReader) -> None:
        until_s = time.monotonic() + WATCH_S
        since_s: dict[_Blocked, float] = {}
        while time.monotonic() < until_s:
            await asyncio.sleep(LOOK_EVERY_S)
            found = await run_abandonable(reader.read, WATCH_S)
            now_s = time.monotonic()
            blocked = filter(None, (_blocked(slot, connection) for slot, connection in found))
            since_s = {connection: since_s.get(connection, now_s) for connection in blocked}
            for connection, began_s in since_s.items():
                if connection.is_connected or now_s - began_s >= BLOCKED_S:
                    self._tell(generation, connection, now_s - began_s)

    def _tell(self, generation: int, connection: _Blocked, for_s: float) -> None:
        node = self._node_at(connection.host)
        if (connection.host, connection.is_connected) in self._told or not (node or _is_internal(connection)):
            return
        self._told.add((connection.host, connection.is_connected))
        peer = f"{node} ({connection.host})" if node else connection.host
        worker = f"{self.node_id}/{connection.slot}"
        tried_s = None if connection.is_connected else for_s
        self.report(generation, blocked_words(worker, peer, connection.port, tried_s))

    def _node_at(self, host: str) -> str:
        world = self.world()
        seats = world.seats if world is not None else ()
        return next(
            (seat.node_id for seat in seats if seat.address == host and seat.node_id != self.node_id), ""
        )


def blocked_words(worker_id: str, peer: str, port: int, tried_s: float | None) -> str:
    """Say in a line what is blocked and what to do; ``tried_s``: None: connected, but data are not acknowledged."""
    if tried_s is None:
        return (
            f"worker {worker_id} is connected to {peer}, port {port}, but data that it sends do not arrive: that "
            "machine is down, the network between the machines is broken, or large packets are lost; compare the MTU "
            "of the interfaces on both (ip link)"
        )
    return (
        f"worker {worker_id} has tried for {tried_s:.0f} s to connect to {peer}, port {port}, and nothing answers: "
        "probably a firewall drops the packets; allow TCP connections between the nodes on all ports from 1024 "
        "(workers listen on ports that the system chooses)"
    )


def _blocked(slot: int, connection: TcpSocket) -> _Blocked | None:
    if connection.state == SYN_SENT:
        return _Blocked(slot, connection.remote_host, connection.remote_port, is_connected=False)
    if (
        connection.state == ESTABLISHED
        and connection.unacknowledged
        and connection.retransmits >= RETRANSMITS
    ):
        return _Blocked(slot, connection.remote_host, connection.remote_port, is_connected=True)
    return None


def _is_internal(connection: _Blocked) -> bool:
    """Return whether it may be another worker on an address that its node did not announce, and not some service."""
    address = ipaddress.ip_address(connection.host)
    return connection.port >= 1024 and address.is_private
