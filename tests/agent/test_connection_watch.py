"""Connections of workers that the network blocks are reported while the workers wait for them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from elastic_agent.agent.worker_group import connection_watch
from elastic_agent.agent.worker_group.connection_watch import ConnectionWatch, blocked_words
from elastic_agent.protocol.records import Address, Seat, World
from elastic_agent.workers.guard.client import Spawned, Stopped
from elastic_agent.workers.tcp_sockets import SocketReader, TcpSocket
from tests.waiting import wait_for_async

PEER = "127.0.0.2"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of another address of this machine at which nothing answers: the kernel drops what the queue has no
    room for."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((PEER, 0))
        listener.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


CONNECTS = """
import socket, sys
waiting = socket.socket()
waiting.setblocking(False)
waiting.connect_ex((sys.argv[1], int(sys.argv[2])))
print("connects", flush=True)
sys.stdin.read()
"""


def test_a_connection_that_is_not_answered_is_reported_once_with_its_node(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    class CountingReader(SocketReader):
        def read(self) -> list[tuple[int, TcpSocket]]:
            reads.append(len(found))
            return super().read()

    monkeypatch.setattr(connection_watch, "SocketReader", CountingReader)
    monkeypatch.setattr(connection_watch, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(connection_watch, "BLOCKED_S", 0.1)
    seats = Seat("n1", "n1-a", "127.0.0.1", 1, 0), Seat("n2", "n2-a", PEER, 1, 1)
    world = World(1, seats, Address("127.0.0.1", 4000), "n1")
    found: list[tuple[int, str]] = []

    def report(generation: int, line: str) -> None:
        found.append((generation, line))

    async def watched(worker: int) -> None:
        watch = ConnectionWatch("n1", lambda: world, report)
        watch.on_event(Spawned(1, {0: worker}))
        # A second line would be reported when what was read third has been looked at.
        await wait_for_async("four looks after the report", lambda: reads.count(1) >= 4 or len(found) > 1)
        watch.on_event(Stopped(1, ()))

    command = [sys.executable, "-c", CONNECTS, PEER, str(silent_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"connects\n"
        asyncio.run(watched(worker.pid))
        assert worker.stdin is not None
        worker.stdin.close()
    ((generation, line),) = found
    assert generation == 1
    assert line.startswith("worker n1/0 has tried for ")
    assert (
        f" s to connect to n2 ({PEER}), port {silent_port}, and nothing answers: probably a firewall" in line
    )


def test_a_connection_whose_data_do_not_arrive_is_reported_with_what_to_do() -> None:
    line = blocked_words("n0/0", "n1 (10.0.0.2)", 4321, None)
    assert "n0/0 is connected to n1 (10.0.0.2), port 4321" in line
    assert "MTU" in line
