"""The client of torch's store without torch: it and torch's own client see the same keys of the same server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any, cast

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore

from elastic_agent.store import TCPStoreClient, wait_for_keys
from elastic_agent.testing.node import freeze
from elastic_agent.transport import NotAStoreError, Obstacle, StoreLostError, TransportError, UnreachableError
from elastic_agent.transport.tcpstore_wire import MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from elastic_agent.values import Endpoint

PATIENCE_S = 60.0

HOST = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def torchs() -> TCPStore:
    """Return torch's client of a server in this process."""
    patience = timedelta(seconds=PATIENCE_S)
    return TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """Start a server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, Endpoint("127.0.0.1", int(process.stdout.readline()))
        process.kill()


def endpoint_of(store: TCPStore) -> Endpoint:
    return Endpoint("127.0.0.1", store.port)


def run(
    endpoint: Endpoint,
    use: Callable[[TCPStoreClient], Coroutine[Any, Any, Any]],
    timeout_s: float = PATIENCE_S,
) -> Any:
    async def connected() -> Any:
        client = await TCPStoreClient.connect(endpoint, PATIENCE_S, timeout_s)
        try:
            return await use(client)
        finally:
            client.close()

    return asyncio.run(connected())


def test_what_torchs_client_has_written_is_read_and_the_other_way_round(torchs: TCPStore) -> None:
    torchs.set("theirs", b"\0\xff")
    torchs.add("number", 5)

    async def use(client: TCPStoreClient) -> None:
        assert await client.get(["theirs", "missing", "number"]) == [b"\0\xff", b"", b"5"]
        await client.set("ours", b"value")
        assert await client.add("number", -7) == -2
        assert await client.add("new", 3) == 3
        assert {"theirs", "ours", "number", "new"} <= {*await client.list_keys()}
        assert await client.delete("theirs")
        assert not await client.delete("theirs")

    run(endpoint_of(torchs), use)
    assert torchs.get("ours") == b"value"
    assert torchs.add("number", 0) == -2
    assert not torchs.check(["theirs"])


def test_values_are_compared_and_set_at_once(torchs: TCPStore) -> None:
    async def use(client: TCPStoreClient) -> list[bytes]:
        return [
            await client.compare_and_set("key", b"", b"first"),
            await client.compare_and_set("key", b"", b"second"),
            await client.compare_and_set("key", b"first", b"third"),
            await client.compare_and_set("missing", b"something", b"else"),
            *await client.get(["missing"]),
        ]

    assert run(endpoint_of(torchs), use) == [b"first", b"first", b"third", b"something", b""]
    assert torchs.compare_set("key", "third", "fourth") == b"fourth"


def test_one_of_many_that_compare_and_set_at_once_wins(torchs: TCPStore) -> None:
    async def use(client: TCPStoreClient) -> list[bytes]:
        names = [f"{number}".encode() for number in range(100)]
        return await asyncio.gather(*(client.compare_and_set("leader", b"", name) for name in names))

    assert len({*run(endpoint_of(torchs), use)}) == 1


def test_calls_that_overlap_get_their_own_answers(torchs: TCPStore) -> None:
    async def use(client: TCPStoreClient) -> None:
        await asyncio.gather(*(client.set(f"key {number}", b"%d" % number) for number in range(100)))
        found = await asyncio.gather(*(client.get([f"key {number}"]) for number in range(100)))
        assert found == [[b"%d" % number] for number in range(100)]

    run(endpoint_of(torchs), use)


def test_the_answer_of_a_cancelled_call_is_not_taken_for_that_of_the_next(torchs: TCPStore) -> None:
    torchs.set("large", b"l" * 1_000_000)
    torchs.set("small", b"s")

    async def use(client: TCPStoreClient) -> list[bytes]:
        cancelled = asyncio.create_task(client.get(["large"] * 5))
        await asyncio.sleep(0)  # it sends its request
        cancelled.cancel()
        return await client.get(["small"])

    assert run(endpoint_of(torchs), use) == [b"s"]


def test_a_wait_ends_when_its_keys_are_there(torchs: TCPStore) -> None:
    endpoint = endpoint_of(torchs)

    async def use(client: TCPStoreClient) -> None:
        waiting = asyncio.create_task(wait_for_keys(endpoint, ["one", "two"], PATIENCE_S))
        await client.set("one", b"")
        await client.set("unrelated", b"")
        assert not waiting.done()
        await client.set("two", b"2")
        await waiting
        await wait_for_keys(endpoint, ["one", "two"], PATIENCE_S)

    run(endpoint, use)


def test_a_wait_that_is_given_up_closes_its_connection(host: tuple[subprocess.Popen[str], Endpoint]) -> None:
    process, endpoint = host

    def connections() -> int:
        return len(psutil.Process(process.pid).net_connections())

    async def use(client: TCPStoreClient) -> None:
        await client.set("now", b"")
        before = connections()
        waits = [asyncio.create_task(wait_for_keys(endpoint, ["never"], PATIENCE_S)) for _ in range(10)]
        while connections() < before + 10:
            await asyncio.sleep(0)
        for wait in waits:
            wait.cancel()
        while connections() > before:
            await asyncio.sleep(0)

    run(endpoint, use)


def test_the_largest_values_and_keys_arrive_and_larger_ones_are_not_sent(torchs: TCPStore) -> None:
    key = "k" * MAX_KEY_BYTES
    largest = b"v" * MAX_VALUE_BYTES

    async def use(client: TCPStoreClient) -> None:
        await client.set(key, largest)
        for call in (
            client.set("key", largest + b"v"),
            client.compare_and_set("key", b"", largest + b"v"),
            client.set(key + "k", b""),
            client.get([key + "k"]),
            client.get(["key"] * (MAX_KEYS + 1)),
        ):
            with pytest.raises(ValueError, match="a store takes at most"):
                await call
        assert await client.get([key, "key"]) == [largest, b""]

    run(endpoint_of(torchs), use)


def test_a_server_that_is_frozen_is_lost_for_every_call(host: tuple[subprocess.Popen[str], Endpoint]) -> None:
    process, endpoint = host

    async def use() -> None:
        client = await TCPStoreClient.connect(endpoint, PATIENCE_S, 0.5)
        freeze(process.pid)
        calls = [client.get(["key"]), client.list_keys(), client.set("key", b"v" * MAX_VALUE_BYTES)]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, StoreLostError)
            assert str(endpoint) in str(outcome)
        with pytest.raises(StoreLostError, match="did not answer within"):
            await client.get(["key"])
        with pytest.raises(UnreachableError, match="accepts connections but did not answer") as caught:
            await TCPStoreClient.connect(endpoint, 0.2, PATIENCE_S)
        assert caught.value.obstacle is Obstacle.SILENT

    asyncio.run(use())


def test_a_server_that_ends_is_lost_for_calls_and_waits(host: tuple[subprocess.Popen[str], Endpoint]) -> None:
    process, endpoint = host

    async def use(client: TCPStoreClient) -> None:
        await client.set("key", b"value")
        process.kill()
        for lost in (client.get(["key"]), client.add("number", 1)):
            with pytest.raises(StoreLostError):
                await lost
        process.wait()
        with pytest.raises(UnreachableError) as caught:
            await wait_for_keys(endpoint, ["key"], PATIENCE_S)
        assert caught.value.obstacle is Obstacle.REFUSED

    run(endpoint, use)


async def _answer_with(
    said: bytes, use: Callable[[Endpoint], Awaitable[object]], *, echo: bool = False
) -> None:
    """Run a server that answers the first message rightly if ``echo``, then says this to whatever it gets."""

    conversations: list[asyncio.Task[object]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        conversations.append(cast("asyncio.Task[object]", asyncio.current_task()))
        greeting = await reader.readexactly(10)
        if echo:
            writer.write(greeting[6:])
            await reader.read(1)
        writer.write(said)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        await use(Endpoint("127.0.0.1", int(server.sockets[0].getsockname()[1])))
        await asyncio.gather(*conversations, return_exceptions=True)


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"abcd", b"\0\0"])
def test_another_server_is_recognised(said: bytes) -> None:
    async def use(endpoint: Endpoint) -> None:
        with pytest.raises(NotAStoreError, match="is used by another program, which is not a store"):
            await TCPStoreClient.connect(endpoint, PATIENCE_S, PATIENCE_S)

    asyncio.run(_answer_with(said, use))


def test_a_port_on_which_nothing_or_nobody_answers_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1", int(silent.getsockname()[1]))
        with pytest.raises(UnreachableError, match=f"{endpoint} accepts connections but did not answer"):
            asyncio.run(TCPStoreClient.connect(endpoint, 0.2, PATIENCE_S))
    with pytest.raises(UnreachableError, match="nothing is listening there"):
        asyncio.run(TCPStoreClient.connect(endpoint, PATIENCE_S, PATIENCE_S))

    async def use(endpoint: Endpoint) -> None:
        with pytest.raises(UnreachableError, match="closed the connection without an answer"):
            await TCPStoreClient.connect(endpoint, PATIENCE_S, PATIENCE_S)

    asyncio.run(_answer_with(b"", use))


CALLS: dict[str, Callable[[TCPStoreClient], Coroutine[Any, Any, object]]] = {
    "get": lambda client: client.get(["a", "b"]),
    "set": lambda client: client.set("a", b"b"),
    "compare": lambda client: client.compare_and_set("a", b"", b"c"),
    "add": lambda client: client.add("a", 1),
    "delete": lambda client: client.delete("a"),
    "list": lambda client: client.list_keys(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@given(said=st.binary(max_size=64))
def test_wrong_answers_are_errors_of_the_store(
    call: Callable[[TCPStoreClient], Coroutine[Any, Any, object]], said: bytes
) -> None:
    async def use(endpoint: Endpoint) -> None:
        client = await TCPStoreClient.connect(endpoint, PATIENCE_S, PATIENCE_S)
        with contextlib.suppress(TransportError):
            await call(client)
        client.close()

    asyncio.run(_answer_with(said, use, echo=True))


def test_the_client_needs_no_torch() -> None:
    program = "import sys, elastic_agent.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.prove
@pytest.mark.parametrize("version", ["2.14.*", "2.15.*"])
def test_servers_of_later_versions_speak_the_same_protocol(
    version: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("torch")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    plain = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*install, "--target", str(folder), f"torch=={version}"], check=True, env=plain)
    with subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=plain | {"PYTHONPATH": str(folder)},
    ) as process:
        assert process.stdout is not None
        endpoint = Endpoint("127.0.0.1", int(process.stdout.readline()))

        async def use(client: TCPStoreClient) -> None:
            await client.set("key", b"value")
            assert await client.compare_and_set("key", b"value", b"other") == b"other"
            assert await client.get(["key", "missing"]) == [b"other", b""]
            assert await client.add("number", 2) == 2
            assert {*await client.list_keys()} >= {"key", "number"}
            waiting = asyncio.create_task(wait_for_keys(endpoint, ["late"], PATIENCE_S))
            await client.set("late", b"")
            await waiting
            assert await client.delete("key")

        run(endpoint, use)
        process.kill()
