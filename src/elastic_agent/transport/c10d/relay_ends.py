"""The connections of a relay: plain ones, and ones in TLS whose client has to have the secret; they never block."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl

CHUNK_BYTES = 1 << 18


class End:
    """One of two connections that belong together, with what is to be sent on it."""

    def __init__(self, sock: socket.socket) -> None:
        """``sock``: connected; it becomes this end's."""
        self.sock = sock
        self.unsent = bytearray()
        self.is_over = False
        """Whether its peer sends nothing more."""
        self.is_finished = False
        """Whether its peer was told that nothing more comes."""
        self.watched = 0
        """The events that its relay waits for."""
        self.other: End | None = None
        """None: its client has not shown yet that it has the secret."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)

    @property
    def wanted(self) -> int:
        """The events to wait for: to read only if what was read before has been passed on."""
        is_full = self.other is not None and bool(self.other.unsent)
        reads = 0 if self.is_over or is_full else selectors.EVENT_READ
        return reads | (selectors.EVENT_WRITE if self.unsent else 0)

    def receive(self) -> bytes:
        """Return what has arrived, which may be nothing yet, and note whether it was the last. Raises OSError."""
        try:
            data = self.sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return b""
        self.is_over = not data
        return data

    def put(self, data: bytes) -> None:
        """Have this sent."""
        self.unsent += data

    def finish(self) -> None:
        """Tell the peer that nothing more comes, now that everything was sent. Raises OSError."""
        self.is_finished = True
        self.sock.shutdown(socket.SHUT_WR)

    def send(self) -> None:
        """Send what can be sent now. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]


class SecureEnd(End):
    """A connection of a client in TLS."""

    def __init__(self, sock: socket.socket, host: str, context: ssl.SSLContext, until_s: float) -> None:
        """Begin.

        Args:
            sock: connected; it becomes this end's.
            host: the client's address.
            context: what it has to prove.
            until_s: by when, by time.monotonic().
        """
        super().__init__(sock)
        self.host = host
        self.until_s = until_s
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def is_admitted(self) -> bool:
        """Go on with the handshake; return whether it is complete: then the client has the secret.

        Raises:
            ssl.SSLError: the client has not the secret.
            OSError: the connection broke.
        """
        with contextlib.suppress(BlockingIOError):
            data = self.sock.recv(CHUNK_BYTES)
            if not data:
                raise ConnectionResetError
            self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._take_outgoing()
            self.send()
        return True

    def receive(self) -> bytes:
        """Return what has arrived, decrypted (see :meth:`End.receive`)."""
        self._incoming.write(super().receive())
        return self.decrypted()

    def decrypted(self) -> bytes:
        """Return what arrived before, decrypted."""
        data = bytearray()
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self._tls.read(CHUNK_BYTES):
                data += part
            self.is_over = True  # the client has closed its side
        self._take_outgoing()
        return bytes(data)

    def put(self, data: bytes) -> None:
        """Have this encrypted and sent."""
        self._tls.write(data)
        self._take_outgoing()

    def finish(self) -> None:
        """See :meth:`End.finish`."""
        with contextlib.suppress(ssl.SSLError):  # it waits for the client to say the same
            self._tls.unwrap()
        self._take_outgoing()
        self.send()
        super().finish()

    def _take_outgoing(self) -> None:
        self.unsent += self._outgoing.read()
