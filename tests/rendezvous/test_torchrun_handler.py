"""The handler that stock torchrun calls, with its sidecar, while messages wait unread in their channel."""

from __future__ import annotations

import asyncio
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)

from elastic_agent.protocol.node import Depart, Outcome
from elastic_agent.protocol.records import RECORD_VERSION, Member, State
from elastic_agent.rendezvous import events
from elastic_agent.torchrun.handler import ElasticRendezvous
from elastic_agent.torchrun.messages import Begin, Channel, FromSidecar, FromTorchrun, Over, Trouble
from elastic_agent.torchrun.plugin import create_handler
from elastic_agent.torchrun.sidecar import Sidecar
from elastic_agent.transport.c10d import serve_here
from elastic_agent.values import Endpoint
from tests.ports import free_port

from .support import PATIENCE_S, policy


@contextmanager
def handlers(
    count: int, state_dir: Path, monkeypatch: pytest.MonkeyPatch, port: int = 0, **conf: str
) -> Iterator[list[ElasticRendezvous]]:
    """The handlers of so many torchruns, which form one world."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state_dir))
    params = RendezvousParameters(
        "elastic",
        f"127.0.0.1:{port or free_port()}",
        "job",
        count,
        count,
        settle="0.1",
        lease_ttl="60",
        **conf,
    )
    made = [create_handler(params) for _ in range(count)]
    try:
        yield [handler for handler in made if isinstance(handler, ElasticRendezvous)]
    finally:
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda handler: handler.set_closed() or handler.shutdown(), made))


def test_news_of_the_last_world_that_was_not_read_does_not_end_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun asks whether its world is over only while its workers are healthy."""
    with handlers(2, tmp_path, monkeypatch) as (a, b), ThreadPoolExecutor(2) as threads:
        first = [threads.submit(handler.next_rendezvous) for handler in (a, b)]
        assert {one.result().rank for one in first} == {0, 1}

        of_b = threads.submit(b.next_rendezvous)  # its workers failed
        assert a._sidecar._channel.wait(PATIENCE_S), "a's torchrun is told that the world is over"
        of_a = threads.submit(a.next_rendezvous)  # its workers failed as well
        second: list[RendezvousInfo] = [of_a.result(), of_b.result()]

        assert {one.rank for one in second} == {0, 1}
        assert [a.num_nodes_waiting(), b.num_nodes_waiting()] == [0, 0]


def test_bootstrap_stores_are_on_the_ports_of_rdzv_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with handlers(1, tmp_path, monkeypatch, port_range=f"{port}:{port}", start_timeout="70") as (handler,):
        assert handler._begin.member.policy.start_timeout_s == 70.0
        assert handler.next_rendezvous().bootstrap_store_info.master_port == port


def test_a_port_of_another_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ssh(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"SSH-2.0-something\r\n")
            self.request.recv(64)

    port = free_port()
    with socketserver.ThreadingTCPServer(("127.0.0.1", port), Ssh) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with (
                handlers(1, tmp_path, monkeypatch, port) as (handler,),
                pytest.raises(RendezvousConnectionError, match="is used by another program"),
            ):
                handler.next_rendezvous()
        finally:
            server.shutdown()


def test_a_torchrun_that_was_stopped_finds_the_end_of_the_run_behind_what_it_did_not_read(
    tmp_path: Path,
) -> None:
    member = Member(RECORD_VERSION, "a", "a-1", "127.0.0.1", 1, State.READY, 0, policy(1, 1))
    begin = Begin(Endpoint("127.0.0.1", free_port()), None, "job", member, tmp_path, None, "warning")

    async def story() -> None:
        torchruns, sidecars = socket.socketpair()
        with torchruns, sidecars:
            of_torchrun: Channel[FromSidecar] = Channel(torchruns, FromSidecar)
            channel: Channel[FromTorchrun] = Channel(sidecars, FromTorchrun)
            sidecar = Sidecar(begin, channel, os.getppid(), serve_here)
            for _ in range(20_000):  # one a second
                sidecar._event(events.Disconnected("connection refused"))
            sidecar._over(Depart(Outcome.UNREACHABLE, "gave up"))
            assert of_torchrun.arrived() == [
                Trouble("connection refused"),
                Over("gave up", unreachable=True),
            ]

    asyncio.run(story())
