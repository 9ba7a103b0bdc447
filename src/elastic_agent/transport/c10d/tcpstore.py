"""A client of torch's TCPStore server (the libuv one), for asyncio, that does not import torch.

The protocol is described in :mod:`.wire`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from elastic_agent.transport.base import StoreLostError, not_a_store

from . import wire
from .stream import ByteStream

Answer = TypeVar("Answer")


class TCPStoreClient:
    """One connection to a server. Calls of several tasks wait for each other.

    A call may be cancelled; if its request was sent, its answer is awaited all the same, and thrown away, before the
    next one begins. Every call raises:
        StoreLostError: no answer in time, or none that this protocol has, or the connection broke; whether the call was
            carried out is not known. All later calls raise it too.
        ValueError: a key, a value or the number of keys is larger than the server accepts; nothing was sent.
    """

    def __init__(self, stream: ByteStream, shown: str, call_timeout_s: float) -> None:
        """Use a connection to a store, which has answered.

        Args:
            stream: becomes the client's.
            shown: the store's address, for messages.
            call_timeout_s: how long each call may take.
        """
        self._stream = stream
        self._shown = shown
        self._call_timeout_s = call_timeout_s
        self._ends_s = 0.0
        """When the present call is late."""
        self._is_given_up = False
        """Whether nobody waits for the present call any more."""
        self._failure: str | None = None
        self._lock = asyncio.Lock()
        stream.abort_with(self)

    # -- calls ----------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys, in their order; an empty one for a key that is not there."""

        async def values() -> list[bytes]:
            return [await self._read_value() for _ in keys]

        return await self._call(_request(wire.Request.MULTI_GET, wire.packed_keys(keys)), values)

    async def list_keys(self) -> list[str]:
        """Return all keys, in no order."""

        async def keys() -> list[str]:
            count = wire.size_in(await self._read(8))
            found = [await self._read_value() for _ in range(count)]
            return [key.decode(errors="surrogateescape").removeprefix("/") for key in found]

        return await self._call(_request(wire.Request.LIST_KEYS), keys)

    async def set(self, key: str, value: bytes) -> None:
        """Store a value; returns when the server has it."""
        await self._tell(wire.Request.SET, wire.packed_key(key) + wire.packed_value(value))

    async def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, and return the value that is there then.

        An empty ``expected`` stands for a key that is not there. If one is not, but another value was expected, the
        server returns ``expected``.
        """
        arguments = wire.packed_key(key) + wire.packed_value(expected) + wire.packed_value(desired)
        return await self._call(_request(wire.Request.COMPARE_SET, arguments), self._read_value)

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete keys; returns how many were there."""

        async def deleted() -> int:
            return sum([await self._read_number() > 0 for _ in keys])

        requests = [_request(wire.Request.DELETE, wire.packed_key(key)) for key in keys]
        return await self._call(b"".join(requests), deleted)

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key, or the queue of this name, is there; False at the time-out. Other calls wait."""

        async def is_there() -> bool:
            is_answered = await self._is_answered_within(timeout_s)
            if not is_answered:
                self._stream.write(_request(wire.Request.CANCEL_WAIT))
            answer = await self._read(1)
            if answer == wire.STOP_WAITING and not is_answered:  # the answers crossed
                await self._read(1)
            elif answer not in (wire.STOP_WAITING, wire.WAIT_CANCELLED):
                raise self._unexpected(answer)
            return answer == wire.STOP_WAITING

        return await self._call(_request(wire.Request.WAIT, wire.packed_keys([key])), is_there)

    async def queue_push(self, queue: str, item: bytes) -> None:
        """Add to the end of a queue; returns when the server has it."""
        await self._tell(wire.Request.QUEUE_PUSH, wire.packed_key(queue) + wire.packed_value(item))

    async def queue_pop(self, queue: str, most: int) -> list[bytes]:
        """Remove up to so many items from the beginning of a queue, and return them."""

        async def items() -> list[bytes]:
            return [await self._read_value() for _ in range(most) if await self._read_number() > 0]

        return await self._call(_request(wire.Request.QUEUE_POP, wire.packed_key(queue)) * most, items)

    def close(self) -> None:
        """Close the connection; never blocks. Calls in progress raise StoreLostError."""
        self._fail("the connection was closed")

    # -- one call -------------------------------------------------------------------------------

    async def _tell(self, kind: wire.Request, arguments: bytes) -> None:
        """Make a request that the server does not answer; it answers a ping after it."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)

        async def pong() -> None:
            answer = await self._read(len(nonce))
            if answer != nonce:
                raise self._unexpected(answer)

        await self._call(_request(kind, arguments) + wire.ping(nonce), pong)

    async def _call(self, request: bytes, parse: Callable[[], Awaitable[Answer]]) -> Answer:
        await self._lock.acquire()
        self._is_given_up = False
        # What the server still answers to a cancelled call must not be taken for the answer to a later one.
        call = asyncio.create_task(self._carry_out(request, parse))
        call.add_done_callback(self._ended)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.done():
                self._is_given_up = True
                self._stream.wake()
            raise

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._lock.release()
        if not call.cancelled():
            call.exception()  # or asyncio would log it if nobody waits for the call any more

    async def _carry_out(self, request: bytes, parse: Callable[[], Awaitable[Answer]]) -> Answer:
        if self._failure is not None:
            raise StoreLostError(self._failure)
        self._ends_s = self._stream.now_s() + self._call_timeout_s
        try:
            self._stream.write(request)
            return await parse()
        except TimeoutError:
            self._fail(f"{self._shown} did not answer within {self._call_timeout_s:g} s")
        except OSError as error:
            self._fail(_closed(self._shown, error))
        except BaseException as error:
            self._fail(str(error) if isinstance(error, StoreLostError) else _closed(self._shown))
            raise
        assert self._failure is not None
        raise StoreLostError(self._failure)

    def _fail(self, failure: str) -> None:
        if self._failure is None:
            self._failure = failure
            self._stream.abort()  # to send the rest could take for ever

    def _unexpected(self, answer: bytes) -> StoreLostError:
        return StoreLostError(str(not_a_store(self._shown, answer)))

    async def _is_answered_within(self, timeout_s: float) -> bool:
        """Wait for an answer, which extends the call by as much; also until nobody waits for it any more."""
        until_s = self._stream.now_s() + timeout_s
        try:
            while not self._is_given_up and not self._stream.has_received:
                await self._stream.more(until_s)
        except TimeoutError:
            pass
        self._ends_s = self._stream.now_s() + self._call_timeout_s
        return self._stream.has_received

    async def _read(self, size: int) -> bytes:
        return await self._stream.read(size, self._ends_s)

    async def _read_value(self) -> bytes:
        header = await self._read(8)
        size = wire.size_in(header)
        if size > wire.MOST_READ_BYTES:
            raise self._unexpected(header)
        return await self._read(size)

    async def _read_number(self) -> int:
        return wire.number_in(await self._read(8))


def _closed(shown: str, error: OSError | None = None) -> str:
    reason = f" ({error.strerror})" if error is not None and error.strerror else ""
    return f"{shown} closed the connection{reason}"


def _request(kind: wire.Request, arguments: bytes = b"") -> bytes:
    return bytes([kind]) + arguments
