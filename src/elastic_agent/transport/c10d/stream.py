"""The bytes of one connection in an event loop, with a deadline for each wait."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import weakref

from elastic_agent.transport.addresses import set_up_for_messages

_MOST_UNREAD_BYTES = 1 << 20
"""If nobody reads them, no more are received."""
_HANDSHAKE_S = 3600.0
"""Whoever makes a stream gives up earlier."""


class ByteStream(asyncio.Protocol):
    """What one connection receives and sends. One coroutine uses it at a time; it is closed when nobody does.

    What has arrived when a deadline is over still counts: this process may have been stopped.
    """

    def __init__(self) -> None:
        """See :meth:`over`."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._end: OSError | None = None
        """Why nothing more comes."""
        self._waiter: asyncio.Future[None] | None = None
        self.now_s = asyncio.get_running_loop().time
        """The clock of all deadlines."""

    @classmethod
    async def over(cls, sock: socket.socket, context: ssl.SSLContext | None = None) -> ByteStream:
        """Use a socket that is connected, which becomes the stream's; with ``context``, in TLS.

        Raises:
            ssl.SSLError: the handshake failed.
            OSError: the connection is gone.
        """
        try:
            set_up_for_messages(sock)
        except OSError:
            sock.close()
            raise
        loop = asyncio.get_running_loop()
        if context is None:
            _, stream = await loop.create_connection(cls, sock=sock)
        else:
            _, stream = await loop.create_connection(
                cls, sock=sock, ssl=context, server_hostname="", ssl_handshake_timeout=_HANDSHAKE_S
            )
        return stream

    @property
    def own_address(self) -> str:
        """The address of this machine on the connection."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    @property
    def has_received(self) -> bool:
        """Whether something has arrived that was not read yet."""
        return bool(self._received)

    @property
    def received(self) -> bytes:
        """What has arrived and was not read yet."""
        return bytes(self._received)

    async def read(self, size: int, ends_s: float) -> bytes:
        """Return the next bytes, exactly so many.

        Raises:
            TimeoutError: they have not come.
            OSError: the other end hung up before, or the connection broke.
        """
        while len(self._received) < size:
            await self.more(ends_s)
        with memoryview(self._received) as view:
            data = bytes(view[:size])
        del self._received[:size]
        return data

    async def more(self, ends_s: float) -> None:
        """Wait until something was received, or :meth:`wake` is called; raises as :meth:`read` does."""
        if self._end is not None:
            raise self._end
        assert self._transport is not None
        self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_at(ends_s, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def write(self, data: bytes) -> None:
        """Send as soon as the other end takes it."""
        assert self._transport is not None
        self._transport.write(data)

    def wake(self) -> None:
        """Have :meth:`more` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def abort(self) -> None:
        """Close it at once, whatever is left to send; whoever waits gets an OSError."""
        assert self._transport is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._transport.abort()
        self._ended(None)

    def abort_with(self, user: object) -> None:
        """Close it when this object is gone."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        weakref.finalize(user, _abandon, loop, self._transport).atexit = False

    # -- called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _MOST_UNREAD_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self.wake()

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(error)

    def _ended(self, error: Exception | None) -> None:
        if self._end is None:
            self._end = error if isinstance(error, OSError) else ConnectionResetError()
        self.wake()


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())


def _abandon(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the interpreter closes the socket
        loop.call_soon_threadsafe(transport.abort)
