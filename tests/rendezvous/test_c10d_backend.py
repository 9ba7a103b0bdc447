"""The c10d backend of an agent on the machine of the endpoint: when it hosts the store, and when it stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.transport import c10d
from elastic_agent.values import Endpoint
from tests.ports import free_port
from tests.waiting import wait_for_async

from .support import run


class Stores:
    """The stores of this process that were asked for, and how to end each."""

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []

    def serve(self, sock: socket.socket, address: str) -> Callable[[], None]:
        self.ends.append(c10d.serve_here(sock, address))
        return self.ends[-1]


@pytest.fixture
def stores() -> Stores:
    return Stores()


@asynccontextmanager
async def opened(stores: Stores, folder: Path) -> AsyncIterator[C10dBackend]:
    """A backend whose store nobody hosts yet; nothing of it goes on in the end."""
    endpoint = Endpoint("127.0.0.1", free_port())
    backend = C10dBackend(endpoint, folder, port_range=None, port_rest_s=0.0, serve=stores.serve)
    backend.run_id = "run"
    try:
        yield backend
    finally:
        backend.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


def test_parts_of_an_agent_that_dial_at_the_same_time_host_one_store(stores: Stores, tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(stores, tmp_path) as backend:
            found = await asyncio.gather(*(backend.connect() for _ in range(5)))
            assert len({records.store_id for records in found}) == 1
            assert len(stores.ends) == 1
            for records in found:
                records.close()

    run(story())


def test_a_dial_that_is_given_up_leaves_no_second_store_to_the_next(stores: Stores, tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(stores, tmp_path) as backend:
            dial = asyncio.create_task(backend.connect())
            await wait_for_async("an attempt to host", lambda: backend._hosting)
            dial.cancel()
            await asyncio.gather(dial, return_exceptions=True)
            (await backend.connect()).close()
            assert backend.is_host
            assert len(stores.ends) == 1

    run(story())


def test_a_host_that_loses_its_store_hosts_the_next(stores: Stores, tmp_path: Path) -> None:
    async def story() -> None:
        async with opened(stores, tmp_path) as backend:
            first = await backend.connect()
            stores.ends[0]()
            await wait_for_async("its end", lambda: not backend.is_host)
            second = await backend.connect()
            assert second.store_id != first.store_id
            assert backend.is_host
            first.close()
            second.close()

    run(story())
