"""The c10d backend of an agent on the machine of the endpoint: when it hosts the store, and when it stops."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from elastic_agent.protocol import Address
from elastic_agent.rendezvous import backends as base
from elastic_agent.rendezvous.backends import BackendOptions
from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.transport import StoreLostError, c10d
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, background_loop, in_loop
from tests.ports import free_port
from tests.waiting import wait_for_async

from .support import Participant, policy, run


class Stores:
    """The stores of this process that were asked for, and how to end each."""

    def __init__(self) -> None:
        self.ends: list[Callable[[], None]] = []
        self.addresses: list[str] = []

    def serve(self, sock: socket.socket, address: str) -> Callable[[], None]:
        host, port = sock.getsockname()[:2]
        self.addresses.append(f"{host}:{port}")
        self.ends.append(c10d.serve_here(sock, address))
        return self.ends[-1]


@pytest.fixture
def stores() -> Stores:
    return Stores()


@asynccontextmanager
async def opened(stores: Stores, folder: Path, port: int | None = None) -> AsyncIterator[C10dBackend]:
    """A backend whose store nobody hosts yet; nothing of it goes on in the end. ``port``: None: one that is free."""
    endpoint = Endpoint("127.0.0.1", free_port() if port is None else port)
    backend = C10dBackend(BackendOptions(endpoint, folder, serve=stores.serve))
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
            (await backend.connect()).close()  # the store may answer before the attempt has ended
            await wait_for_async("the end of the attempt to host", lambda: backend.is_host)
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


def test_other_users_are_kept_from_the_next_store_of_a_run_on_one_machine_too(
    stores: Stores, tmp_path: Path
) -> None:
    async def story() -> None:
        async with opened(stores, tmp_path, port=0) as backend:
            for number in (0, 1):
                (await backend.connect()).close()
                assert stores.addresses[number] != backend.shown, "the port that users see is the relay's"
                stores.ends[number]()
                await wait_for_async("its end", lambda: not backend.is_host)

    run(story())


def test_a_run_goes_on_while_the_loop_of_the_agent_that_hosts_its_store_hangs(tmp_path: Path) -> None:
    endpoint, goes_on = Endpoint("127.0.0.1", free_port()), threading.Event()
    host = C10dBackend(BackendOptions(endpoint, tmp_path / "host"))
    host.run_id = "run"
    in_loop(host.connect()).close()
    background_loop().call_soon_threadsafe(goes_on.wait)

    async def story() -> None:
        async with Participant("a", endpoint, policy(1, 1), tmp_path / "a") as a:
            assert (await a.running("a")).generation == 1

    try:
        run(story())
    finally:
        goes_on.set()
        Blocking(host).close()


@pytest.mark.parametrize(
    ("address", "depending"),
    [("198.51.100.9", ("b", "c")), ("lab9.example", ("b", "c")), ("127.0.0.1", ()), ("localhost", ())],
    ids=["on other machines", "on other machines, by name", "on this machine", "on this machine, by name"],
)
def test_the_host_of_the_store_knows_which_nodes_cannot_go_on_without_it(
    address: str, depending: tuple[str, ...], tmp_path: Path
) -> None:
    """An agent on the machine of the store takes over."""
    endpoint = Endpoint("127.0.0.1", free_port())

    async def story() -> None:
        async with opened(Stores(), tmp_path, endpoint.port) as host:
            (await host.connect()).close()
            assert host.depending("a") == ()
            async with AsyncExitStack() as stack:
                for name, at in (("a", "127.0.0.1"), ("b", address), ("c", address)):
                    node = Participant(name, endpoint, policy(3, 3), tmp_path / name, address=at)
                    await stack.enter_async_context(node)
                await wait_for_async("the world", lambda: (plan := host._plans.get("run")) and plan.world)
                assert host.depending("a") == depending

    run(story())


def test_a_resolver_that_hangs_holds_up_the_dial_of_a_bootstrap_store_for_a_while_only(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time-out of looking up a name is longer than a world may wait for its nodes."""
    answers = threading.Event()

    def look_up(*_: object, **__: object) -> None:
        answers.wait()
        raise socket.gaierror

    async def story() -> None:
        async with opened(stores, tmp_path) as backend:
            with pytest.raises(StoreLostError, match=r"no answer within 0\.02 s"):
                await backend.dial_bootstrap(Address("node.example", 1))

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(base, "BOOTSTRAP_TIMEOUT_S", 0.01)
    try:
        in_loop(story())
    finally:
        answers.set()
