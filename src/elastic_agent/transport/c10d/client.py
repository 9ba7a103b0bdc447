"""A client of torch's TCPStore server (the libuv one), for asyncio, that does not import torch.

The protocol is private to torch. A request is one byte, followed by its arguments: keys and values, each behind its
length, and numbers, all in the byte order of the machine. Answers have no header, and come in the order of the
requests; only the answer to a wait comes when its keys are there. Keys of torch's clients begin with a slash, which is
added here, so that all clients see the same keys. Requests to set or push have no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import socket
import ssl
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_agent.transport.addresses import set_up_for_messages
from elastic_agent.transport.base import Obstacle, StoreLostError, UnreachableError, not_a_store, silent

Answer = TypeVar("Answer")

MAX_KEY_BYTES = 8 * 1024 - 1
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
"""The server closes the connection without an answer if a request exceeds one of these. Keys: without the slash."""
MOST_READ_BYTES = 1 << 28
"""A value to which other clients append may be larger than one that is sent at once."""

NONCE_BYTES = 4
"""The length of what a ping contains and its answer repeats."""

LATE_S = 0.02
"""The time that it may take to read an answer that had come before the time was over."""

_MAGIC = 0x3C85F7CE
_STOP_WAITING, _WAIT_CANCELLED = b"\0", b"\1"
"""The answers to a wait, and to its cancellation, which comes after the former if both are sent."""
_UNREAD_BYTES = 1 << 20
"""If nobody reads so many, no more are received."""


class Request(enum.IntEnum):
    """The kinds of requests."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    WAIT = 6
    DELETE = 8
    MULTI_GET = 10
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    LIST_KEYS = 17


@dataclass(eq=False, repr=False)
class TCPStoreClient:
    """One connection to a server; see :meth:`over`. Calls of several tasks wait for each other.

    It is closed when nobody has it any more. Every call raises:
        StoreLostError: no answer in time, or none that this protocol has, or the connection broke; whether the call was
            carried out is not known. All later calls raise it too, as they do after one that was cancelled: its answer
            must not be taken for theirs.
        ValueError: a key, a value or the number of keys is larger than the server accepts; nothing was sent.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    shown: str
    call_timeout_s: float

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        weakref.finalize(self, _abandon, loop, self.writer).atexit = False
        self._ends_s = 0.0
        """The time from which the present call is late."""
        self._failure = ""
        self._lock = asyncio.Lock()

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        shown: str,
        timeout_s: float,
        call_timeout_s: float,
        context: ssl.SSLContext | None = None,
    ) -> TCPStoreClient:
        """Use a socket that is connected, which becomes the client's; the store has answered when this returns.

        Args:
            sock: the connection.
            shown: the store's address, for messages.
            timeout_s: how long the handshake in TLS may take, and then the first answer.
            call_timeout_s: how long each call may take.
            context: for TLS.

        Raises:
            UnreachableError: there is no answer in time, or the other end hung up.
            NotAStoreError: it answers otherwise than a store.
            ssl.SSLError: it does not speak TLS, or one side does not accept the other.
        """
        try:
            set_up_for_messages(sock)
            async with asyncio.timeout(timeout_s):
                streams = await asyncio.open_connection(
                    sock=sock,
                    limit=_UNREAD_BYTES,
                    ssl=context,
                    server_hostname=None if context is None else "",
                )
        except (ssl.SSLError, asyncio.CancelledError):
            sock.close()
            raise
        except TimeoutError:
            raise silent(shown, timeout_s) from None
        except OSError as error:
            sock.close()
            raise UnreachableError(_closed(shown, error), Obstacle.CLOSED) from None
        client = cls(*streams, shown, call_timeout_s)
        try:
            await client._greet(timeout_s)
        except BaseException:
            client.close()
            raise
        return client

    async def _greet(self, timeout_s: float) -> None:
        nonce, answer = secrets.token_bytes(NONCE_BYTES), b""
        self._ends_s = self._now_s() + timeout_s
        self.writer.write(greeting(nonce))
        try:
            answer = await self._read(len(nonce))
        except TimeoutError:
            raise silent(self.shown, timeout_s) from None
        except asyncio.IncompleteReadError as error:
            answer = error.partial
        except ssl.SSLError:
            raise
        except OSError:
            pass
        if not answer:  # a host that dies while it accepts, a proxy before one that is not there yet
            raise UnreachableError(f"{self.shown} closed the connection without an answer", Obstacle.CLOSED)
        if answer != nonce:
            raise not_a_store(self.shown, answer)

    @property
    def own_address(self) -> str:
        """The address of this machine on the connection."""
        return str(self.writer.get_extra_info("sockname")[0])

    # -- calls ----------------------------------------------------------------------------------

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of these keys, in their order; an empty one for a key that is not there."""

        async def values() -> list[bytes]:
            return [await self._read_value() for _ in keys]

        return await self._call(_request(Request.MULTI_GET, _packed_keys(keys)), values)

    async def list_keys(self) -> list[str]:
        """Return all keys, in no order."""

        async def keys() -> list[str]:
            found = [await self._read_value() for _ in range(await self._read_number())]
            return [key.decode(errors="surrogateescape").removeprefix("/") for key in found]

        return await self._call(_request(Request.LIST_KEYS), keys)

    async def set(self, key: str, value: bytes) -> None:
        """Store a value; returns when the server has it."""
        await self._tell(Request.SET, _packed_key(key) + _packed_value(value))

    async def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` if the value is ``expected``, and return the value that is there then.

        An empty ``expected`` stands for a key that is not there. If one is not, but another value was expected, the
        server returns ``expected``.
        """
        arguments = _packed_key(key) + _packed_value(expected) + _packed_value(desired)
        return await self._call(_request(Request.COMPARE_SET, arguments), self._read_value)

    async def delete(self, keys: Sequence[str]) -> int:
        """Delete keys; returns how many were there."""

        async def deleted() -> int:
            return sum([await self._read_number() > 0 for _ in keys])

        return await self._call(b"".join(_request(Request.DELETE, _packed_key(key)) for key in keys), deleted)

    async def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until the key, or the queue of this name, is there; False at the time-out. Other calls wait."""

        async def is_there() -> bool:
            self._ends_s = self._now_s() + timeout_s
            try:
                answer = await self._read(1, late_s=0.0)
            except TimeoutError:
                self._ends_s = self._now_s() + self.call_timeout_s
                self.writer.write(_request(Request.CANCEL_WAIT))
                answer = await self._read(1)
                if answer == _STOP_WAITING:  # the answers crossed
                    await self._read(1)
            if answer not in (_STOP_WAITING, _WAIT_CANCELLED):
                raise self._unexpected(answer)
            return answer == _STOP_WAITING

        return await self._call(_request(Request.WAIT, _packed_keys([key])), is_there)

    async def queue_push(self, queue: str, item: bytes) -> None:
        """Add to the end of a queue; returns when the server has it."""
        await self._tell(Request.QUEUE_PUSH, _packed_key(queue) + _packed_value(item))

    async def queue_pop(self, queue: str, most: int) -> list[bytes]:
        """Remove up to so many items from the beginning of a queue, and return them."""

        async def items() -> list[bytes]:
            return [await self._read_value() for _ in range(most) if await self._read_number() > 0]

        return await self._call(_request(Request.QUEUE_POP, _packed_key(queue)) * most, items)

    def close(self) -> None:
        """Close the connection; never blocks. Calls in progress raise StoreLostError."""
        self._fail("the connection was closed")

    # -- one call -------------------------------------------------------------------------------

    async def _tell(self, kind: Request, arguments: bytes) -> None:
        """Make a request that the server does not answer; it answers a ping after it."""
        nonce = secrets.token_bytes(NONCE_BYTES)

        async def pong() -> None:
            answer = await self._read(len(nonce))
            if answer != nonce:
                raise self._unexpected(answer)

        await self._call(_request(kind, arguments) + _request(Request.PING, nonce), pong)

    async def _call(self, request: bytes, parse: Callable[[], Awaitable[Answer]]) -> Answer:
        async with self._lock:
            if self._failure:
                raise StoreLostError(self._failure)
            self._ends_s = self._now_s() + self.call_timeout_s
            try:
                self.writer.write(request)
                return await parse()
            except TimeoutError:
                self._fail(f"{self.shown} did not answer within {self.call_timeout_s:g} s")
            except (OSError, EOFError) as error:
                self._fail(_closed(self.shown, error))
            except StoreLostError as error:
                self._fail(str(error))
            except asyncio.CancelledError:
                self._fail("a call was given up before it was answered")
                raise
            raise StoreLostError(self._failure)

    def _fail(self, failure: str) -> None:
        if not self._failure:
            self._failure = failure
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self.writer.transport.abort()  # to send the rest could take for ever

    def _unexpected(self, answer: bytes) -> StoreLostError:
        return StoreLostError(str(not_a_store(self.shown, answer)))

    async def _read(self, size: int, late_s: float = LATE_S) -> bytes:
        """Return the next bytes. What has come when it is late still counts: this process may have been stopped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._ends_s):
                return await self.reader.readexactly(size)
        async with asyncio.timeout(late_s):
            return await self.reader.readexactly(size)

    async def _read_value(self) -> bytes:
        size = await self._read_number()
        if not 0 <= size <= MOST_READ_BYTES:
            raise self._unexpected(struct.pack("=q", size))
        return await self._read(size)

    async def _read_number(self) -> int:
        return int(struct.unpack("=q", await self._read(8))[0])


def _abandon(loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter closes the socket
        loop.call_soon_threadsafe(lambda: writer.transport.abort())


def _closed(shown: str, error: BaseException) -> str:
    reason = getattr(error, "strerror", None)
    return f"{shown} closed the connection{f' ({reason})' if reason else ''}"


# -- requests ------------------------------------------------------------------------------------


def greeting(nonce: bytes) -> bytes:
    """Return what a client sends first; the answer is ``nonce``."""
    return _request(Request.VALIDATE, struct.pack("=I", _MAGIC)) + _request(Request.PING, nonce)


def _request(kind: Request, arguments: bytes = b"") -> bytes:
    return bytes([kind]) + arguments


def _packed_keys(keys: Sequence[str]) -> bytes:
    if len(keys) > MAX_KEYS:
        raise ValueError(f"there are {len(keys)} keys in one request; a store takes at most {MAX_KEYS}")
    return struct.pack("=Q", len(keys)) + b"".join(map(_packed_key, keys))


def _packed_key(key: str) -> bytes:
    encoded = key.encode(errors="surrogateescape")
    if len(encoded) > MAX_KEY_BYTES:
        raise ValueError(f"a key has {len(encoded)} bytes; a store takes at most {MAX_KEY_BYTES}")
    return struct.pack("=Q", len(encoded) + 1) + b"/" + encoded


def _packed_value(value: bytes) -> bytes:
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a value has {len(value)} bytes; a store takes at most {MAX_VALUE_BYTES}")
    return struct.pack("=Q", len(value)) + value
