"""The connections of a relay: plain ones, and ones in TLS whose client has to have the secret."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

CHUNK_BYTES = 1 << 18


class Side(asyncio.Protocol):
    """One of two connections that belong together: what it receives is sent on the other one."""

    other: Side
    """Set before either is connected."""

    def __init__(self, sides: set[Side]) -> None:
        """``sides``: those that are open, where this one is entered."""
        self._sides = sides
        self.transport: asyncio.Transport | None = None

    def send(self, data: bytes) -> None:
        """Have this sent."""
        if self.transport is not None:
            self.transport.write(data)

    # -- called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._sides.add(self)
        if self.other.transport is not None and self.other.transport.is_closing():
            transport.close()

    def data_received(self, data: bytes) -> None:
        self.other.send(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._sides.discard(self)
        if self.other.transport is not None:
            self.other.transport.close()


class SecureSide(Side):
    """A connection in TLS, whose client has shown that it has the secret."""

    def __init__(
        self, sides: set[Side], tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        """See :func:`prove`."""
        super().__init__(sides)
        self._tls, self._incoming, self._outgoing = tls, incoming, outgoing

    def send(self, data: bytes) -> None:
        """Have this encrypted and sent."""
        self._tls.write(data)
        super().send(self._outgoing.read())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.data_received(b"")  # what came with the last message of the handshake

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        assert self.transport is not None
        try:
            while decrypted := self._tls.read(CHUNK_BYTES):
                self.other.send(decrypted)
        except ssl.SSLWantReadError:
            self.transport.write(self._outgoing.read())
        except ssl.SSLError:
            self.transport.abort()
        else:  # the client has closed its side
            self.transport.close()


async def prove(client: socket.socket, context: ssl.SSLContext, sides: set[Side]) -> SecureSide:
    """Shake hands; when this returns, the client has shown that it has the secret.

    Raises:
        ssl.SSLError: it has not.
        OSError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            return SecureSide(sides, tls, incoming, outgoing)
        finally:
            with contextlib.suppress(OSError):  # receiving shows it, too
                await loop.sock_sendall(client, outgoing.read())
        data = await loop.sock_recv(client, CHUNK_BYTES)
        if not data:
            raise ConnectionResetError
        incoming.write(data)
