"""The client of torch's store without torch: it and torch's own see the same store, and no answer is mixed up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.testing.processes import freeze
from elastic_agent.transport import Obstacle, StoreLostError, UnreachableError
from elastic_agent.transport.c10d import reach
from elastic_agent.transport.c10d.client import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_VALUE_BYTES,
    MOST_READ_BYTES,
    TCPStoreClient,
)
from elastic_agent.values import Endpoint

from .support import PATIENCE_S, TorchStore, torchs_server

HOST = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

Use = Callable[[TCPStoreClient], Coroutine[Any, Any, Any]]


@pytest.fixture
def torchs() -> TorchStore:
    """Return torch's client of a server in this process."""
    return torchs_server()


@contextlib.contextmanager
def hosting(environ: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a server in a process of its own, and tell its port."""
    with subprocess.Popen(
        [sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    with hosting() as started:
        yield started


async def dial(port: int, timeout_s: float = PATIENCE_S, connects_in_s: float = PATIENCE_S) -> TCPStoreClient:
    return await reach(Endpoint("127.0.0.1", port), connects_in_s, None, timeout_s)


def run(port: int, use: Use, timeout_s: float = PATIENCE_S) -> Any:
    async def connected() -> Any:
        with contextlib.closing(await dial(port, timeout_s)) as client:
            return await use(client)

    return asyncio.run(connected())


def test_torchs_client_sees_the_same_values(torchs: TorchStore) -> None:
    torchs.set("theirs", b"\0\xff")
    torchs.set("empty", b"")

    async def use(client: TCPStoreClient) -> None:
        assert await client.get(["theirs", "empty", "missing"]) == [b"\0\xff", b"", b""]
        await client.set("ours", b"value")
        assert {"theirs", "empty", "ours"} <= {*await client.list_keys()}
        assert await client.delete(["theirs", "missing", "empty"]) == 2
        assert await client.delete(["theirs"]) == 0

    run(torchs.port, use)
    assert torchs.get("ours") == b"value"
    assert not torchs.check(["theirs"])


def test_calls_that_overlap_get_their_own_answers(torchs: TorchStore) -> None:
    async def use(client: TCPStoreClient) -> None:
        await asyncio.gather(*(client.set(f"key {number}", b"%d" % number) for number in range(100)))
        found = await asyncio.gather(*(client.get([f"key {number}"]) for number in range(100)))
        assert found == [[b"%d" % number] for number in range(100)]

    run(torchs.port, use)


def test_answers_stay_in_order_when_waits_end_by_time_out_and_key_at_once(torchs: TorchStore) -> None:
    """The key may be set before the wait, while it is on, when it is just being cancelled, and after."""
    chance = random.Random(44)

    async def use(client: TCPStoreClient) -> None:
        other = await dial(torchs.port)
        found: list[bool] = []
        for number in range(300):
            key, value = f"key {number}", b"%d" % number
            setting = asyncio.create_task(other.set(key, value))
            found.append(await client.wait(key, chance.random() * 0.001))
            await setting
            assert await client.get([key]) == [value]
        assert True in found
        other.close()

    run(torchs.port, use)


@pytest.mark.parametrize("turns", [1, 2, 5, 50])
def test_the_answer_of_a_cancelled_call_is_not_taken_for_that_of_the_next(
    torchs: TorchStore, turns: int
) -> None:
    torchs.set("small", b"s")

    async def use(client: TCPStoreClient) -> None:
        cancelled = asyncio.create_task(client.wait("never", 10 * PATIENCE_S))
        for _ in range(turns):  # it waits, or has sent its request
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(StoreLostError, match="a call was given up before it was answered"):
            await client.get(["small"])
        assert cancelled.done()

    run(torchs.port, use)


def test_the_largest_values_arrive_and_larger_ones_are_not_sent(torchs: TorchStore) -> None:
    key = "k" * MAX_KEY_BYTES
    largest = b"v" * MAX_VALUE_BYTES

    async def use(client: TCPStoreClient) -> None:
        await client.set(key, largest)
        await asyncio.to_thread(torchs.append, key, largest)
        for call in (
            client.set("key", largest + b"v"),
            client.compare_and_set("key", b"", largest + b"v"),
            client.set(key + "k", b""),
            client.get([key + "k"]),
            client.get(["key"] * (MAX_KEYS + 1)),
        ):
            with pytest.raises(ValueError, match="a store takes at most"):
                await call
        assert await client.get([key, "key"]) == [2 * largest, b""]

    run(torchs.port, use)


def test_an_answer_that_has_come_in_time_counts_although_it_is_read_late() -> None:
    """This process may be stopped, or busy, for longer than a call may take."""

    async def use() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            reader, writer = await asyncio.open_connection(*server.getsockname())
            there, _ = server.accept()
        writer.write = lambda _: there.sendall(struct.pack("=Q", 1))  # type: ignore[method-assign]
        with there, contextlib.closing(TCPStoreClient(reader, writer, "the store", 0.0)) as client:
            assert await client.delete(["key"]) == 1

    asyncio.run(use())


def test_a_server_that_is_frozen_is_lost_for_every_call(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host

    async def use() -> None:
        client, waiting, pushing = [await dial(port, 0.5) for _ in range(3)]
        freeze(process.pid)
        calls = [
            client.get(["key"]),
            client.list_keys(),
            client.set("key", b"v" * MAX_VALUE_BYTES),
            waiting.wait("key", 0.01),
            *(pushing.queue_push("queue", b"v" * MAX_VALUE_BYTES) for _ in range(3)),
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, StoreLostError)
            assert str(outcome) == f"127.0.0.1:{port} did not answer within 0.5 s"
        with pytest.raises(UnreachableError, match="accepts connections but did not answer") as caught:
            await dial(port, connects_in_s=0.2)
        assert caught.value.obstacle is Obstacle.SILENT

    asyncio.run(use())


async def _answer_with(said: bytes, use: Callable[[int], Awaitable[object]], *, echo: bool = False) -> None:
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
        await use(int(server.sockets[0].getsockname()[1]))
        await asyncio.gather(*conversations, return_exceptions=True)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", struct.pack("=Q", MOST_READ_BYTES + 1)])
def test_a_server_that_answers_otherwise_is_lost(answer: bytes) -> None:
    async def use(port: int) -> None:
        client = await dial(port)
        for _ in range(2):
            with pytest.raises(StoreLostError, match="is used by another program, which is not a store"):
                await client.get(["key"])

    asyncio.run(_answer_with(answer, use, echo=True))


CALLS: dict[str, Use] = {
    "get": lambda client: client.get(["a", "b"]),
    "set": lambda client: client.set("a", b"b"),
    "compare": lambda client: client.compare_and_set("a", b"", b"c"),
    "delete": lambda client: client.delete(["a"]),
    "list": lambda client: client.list_keys(),
    "wait": lambda client: client.wait("a", 0.0),
    "pop": lambda client: client.queue_pop("a", 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@given(said=st.binary(max_size=64))
def test_wrong_answers_are_errors_of_the_store(call: Use, said: bytes) -> None:
    async def use(port: int) -> None:
        with contextlib.closing(await dial(port)) as client, contextlib.suppress(StoreLostError):
            await call(client)

    asyncio.run(_answer_with(said, use, echo=True))


@pytest.mark.prove
@pytest.mark.parametrize("version", ["2.14.*", "2.15.*"])
def test_servers_of_later_versions_speak_the_same_protocol(
    version: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("torch")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    plain = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*install, "--target", str(folder), f"torch=={version}"], check=True, env=plain)

    async def use(client: TCPStoreClient) -> None:
        await client.set("key", b"value")
        assert await client.compare_and_set("key", b"value", b"other") == b"other"
        assert await client.get(["key", "missing"]) == [b"other", b""]
        assert "key" in await client.list_keys()
        await client.queue_push("queue", b"item")
        assert await client.wait("queue", PATIENCE_S)
        assert await client.queue_pop("queue", 2) == [b"item"]
        assert not await client.wait("late", 0.0)
        assert await client.delete(["key"]) == 1

    with hosting(plain | {"PYTHONPATH": str(folder)}) as (_, port):
        run(port, use)
