"""A client of torch's TCPStore server (the libuv one) that does not import torch.

A wait, whose answer comes when its keys are there, has a connection of its own, and is given up by closing that. The
protocol is described in :mod:`elastic_agent.transport.tcpstore_wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from elastic_agent.transport import (
    Obstacle,
    StoreLostError,
    TransportError,
    UnreachableError,
    connect_in_loop,
    not_a_store,
    set_up_for_messages,
    silent,
)
from elastic_agent.transport import (
    tcpstore_wire as wire,
)
from elastic_agent.values import Endpoint

PROVOKED_S = 0.5
"""How long another server may take to answer empty lines; a store that is only slow does not answer them."""

Answer = TypeVar("Answer")


class TCPStoreClient:
    """One connection to a server. Calls may overlap. All are bounded in time, and may be cancelled.

    Every call raises:
        StoreLostError: no answer in time, or the connection broke; whether the call was carried out is not known. All
            later calls raise it too.
        NotAStoreError: the answer is none that this protocol has.
        ValueError: a key, a value or the number of keys is larger than the server accepts; nothing was sent.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        shown: str,
        call_timeout_s: float | None,
    ) -> None:
        """See :meth:`connect`."""
        self._reader = reader
        self._writer = writer
        self._shown = shown
        self._call_timeout_s = call_timeout_s
        self._failure: TransportError | None = None
        self._expected: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._has_expected = asyncio.Event()
        self._receiver = asyncio.create_task(self._receive())

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, timeout_s: float, call_timeout_s: float | None
    ) -> TCPStoreClient:
        """Connect to a server, and check that it is one.

        Args:
            endpoint: its host and port.
            timeout_s: how long the connection may take, and then the first answer.
            call_timeout_s: how long each call may take; None: for ever.

        Raises:
            UnreachableError: nothing listens there, or what does has not answered in time or hung up.
            NotAStoreError: it answers otherwise than a store.
        """
        shown = str(endpoint)
        sock = await connect_in_loop(endpoint.host, endpoint.port, timeout_s)
        try:
            set_up_for_messages(sock)
            reader, writer = await asyncio.open_connection(sock=sock)
        except OSError as error:
            sock.close()
            raise _closed(shown) from error
        try:
            await _greet(reader, writer, shown, timeout_s)
        except BaseException:
            writer.transport.abort()
            raise
        return cls(reader, writer, shown, call_timeout_s)

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys, in their order; an empty one for a key that is not there."""

        async def values() -> list[bytes]:
            return [await self._read_bytes(wire.MAX_VALUE_BYTES) for _ in keys]

        return await self._call(wire.Request.MULTI_GET, wire.packed_keys(keys), values)

    async def set(self, key: str, value: bytes) -> None:
        """Store a value; returns when the server has it."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        # The server does not answer a SET.
        request = wire.packed_key(key) + wire.packed_value(value) + wire.ping(nonce)

        async def pong() -> None:
            answer = await self._reader.readexactly(wire.NONCE_BYTES)
            if answer != nonce:
                raise not_a_store(self._shown, answer)

        await self._call(wire.Request.SET, request, pong)

    async def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, and return the value that is there then.

        An empty ``expected`` stands for a key that is not there. If one is not, but another value was expected, the
        server returns ``expected``.
        """
        request = wire.packed_key(key) + wire.packed_value(expected) + wire.packed_value(desired)
        return await self._call(
            wire.Request.COMPARE_SET, request, lambda: self._read_bytes(wire.MAX_VALUE_BYTES)
        )

    async def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if there is none, and return the sum."""
        return await self._call(
            wire.Request.ADD, wire.packed_key(key) + wire.packed_number(amount), self._read_number
        )

    async def delete(self, key: str) -> bool:
        """Delete a key; returns whether it was there."""
        return await self._call(wire.Request.DELETE, wire.packed_key(key), self._read_number) > 0

    async def list_keys(self) -> list[str]:
        """Return all keys."""

        async def keys() -> list[str]:
            count = wire.size_in(await self._reader.readexactly(8))
            found = [await self._read_bytes(wire.MAX_KEY_BYTES + 1) for _ in range(count)]
            return [key.decode(errors="surrogateescape").removeprefix("/") for key in found]

        return await self._call(wire.Request.LIST_KEYS, b"", keys)

    async def _wait(self, arguments: bytes) -> None:
        async def woken() -> None:
            answer = await self._reader.readexactly(1)
            if answer != wire.STOP_WAITING:
                raise not_a_store(self._shown, answer)

        await self._call(wire.Request.WAIT, arguments, woken)

    def close(self) -> None:
        """Close the connection; never blocks. Calls in progress raise StoreLostError."""
        self._fail(StoreLostError(f"the connection to {self._shown} was closed here"))

    async def _call(
        self,
        request: wire.Request,
        arguments: bytes,
        parse: Callable[[], Awaitable[Answer]],
    ) -> Answer:
        if self._failure is not None:
            raise self._failure
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._expected.append((parse, answer))
        self._has_expected.set()
        self._writer.write(bytes([request]) + arguments)
        try:
            return await asyncio.wait_for(answer, self._call_timeout_s)
        except TimeoutError:
            lost = StoreLostError(f"{self._shown} did not answer within {self._call_timeout_s} s")
            self._fail(lost)
            raise lost from None

    async def _receive(self) -> None:
        """Read the answers, those too whose calls were cancelled."""
        try:
            while await self._has_expected.wait():
                parse, answer = self._expected[0]
                parsed = await parse()
                self._expected.popleft()
                if not self._expected:
                    self._has_expected.clear()
                if not answer.done():
                    answer.set_result(parsed)
        except TransportError as error:
            self._fail(error)
        except (OSError, EOFError):
            self._fail(StoreLostError(f"{self._shown} closed the connection"))

    def _fail(self, failure: TransportError) -> None:
        if self._failure is None:
            self._failure = failure
            self._writer.transport.abort()  # to flush could take for ever
            self._receiver.cancel()
        for _, answer in self._expected:
            if not answer.done():
                answer.set_exception(self._failure)
        self._expected.clear()

    async def _read_bytes(self, most: int) -> bytes:
        header = await self._reader.readexactly(8)
        size = wire.size_in(header)
        if size > most:
            raise not_a_store(self._shown, header)
        return await self._reader.readexactly(size)

    async def _read_number(self) -> int:
        return wire.number_in(await self._reader.readexactly(8))


async def wait_for_keys(endpoint: Endpoint, keys: Sequence[str], connect_timeout_s: float) -> None:
    """Wait without polling until all keys are there, on a connection of its own; cancel it to give up.

    Raises as :meth:`TCPStoreClient.connect` does, and:
        StoreLostError: the connection broke.
        ValueError: a key or their number is larger than the server accepts.
    """
    arguments = wire.packed_keys(keys)
    client = await TCPStoreClient.connect(endpoint, connect_timeout_s, None)
    try:
        await client._wait(arguments)
    finally:
        client.close()


async def _greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shown: str, timeout_s: float
) -> None:
    """Send what torch's clients send first, and check the answer.

    Raises:
        UnreachableError: no answer in time (a frozen store, or something that only listens), or it hung up.
        NotAStoreError: another answer.
    """
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    writer.write(wire.greeting(nonce))
    try:
        answer = await asyncio.wait_for(reader.read(4), timeout_s)
        if answer and len(answer) < 4:
            answer += await asyncio.wait_for(reader.read(4 - len(answer)), timeout_s)
    except TimeoutError:
        writer.write(wire.PROVOCATION)
        with contextlib.suppress(OSError, TimeoutError):
            if spoken := await asyncio.wait_for(reader.read(64), PROVOKED_S):
                raise not_a_store(shown, spoken) from None
        raise silent(shown, timeout_s) from None
    except OSError:
        answer = b""
    if not answer:
        raise _closed(shown)
    if answer != nonce:
        raise not_a_store(shown, answer)


def _closed(shown: str) -> UnreachableError:
    return UnreachableError(f"{shown} closed the connection without an answer", Obstacle.CLOSED)
