"""The first messages of torch's TCPStore protocol, sent over a plain socket.

They show whether a store answers at all, before anything else is sent.
"""

from __future__ import annotations

import secrets
import socket
import ssl

from elastic_agent.transport import tcpstore_wire
from elastic_agent.transport.base import NotAStoreError, Obstacle, UnreachableError, not_a_store, silent

PROVOKED_S = 0.5


def probe_store(sock: socket.socket, timeout_s: float, shown: str, *, provoke: bool = True) -> None:
    """Check that the other end answers as a TCPStore does; ``provoke``: also send what makes other servers answer.

    Raises:
        UnreachableError: no answer in time (a frozen store, or something that only listens), or it hung up.
        NotAStoreError: another answer, or none before hanging up.
        ssl.SSLError: the connection is in TLS, and the other end ends it.
    """
    nonce = secrets.token_bytes(tcpstore_wire.NONCE_BYTES)
    sock.settimeout(timeout_s)
    try:
        sock.sendall(tcpstore_wire.greeting(nonce))
        answer = _receive(sock, len(nonce))
    except TimeoutError:
        if provoke and (spoken := _provoke(sock)):
            raise not_a_store(shown, spoken) from None
        raise silent(shown, timeout_s) from None
    except ssl.SSLError:
        raise
    except OSError:
        answer = b""
    if not answer:  # a host that dies while it accepts, a proxy before one that is not there yet
        raise UnreachableError(f"{shown} closed the connection without an answer", Obstacle.CLOSED)
    if answer != nonce:
        raise not_a_store(shown, answer)


def is_store(sock: socket.socket, timeout_s: float) -> bool:
    """Whether a TCPStore answers at the other end of a new connection."""
    try:
        probe_store(sock, timeout_s, "", provoke=False)
    except (UnreachableError, NotAStoreError):
        return False
    return True


def _provoke(sock: socket.socket) -> bytes:
    """The answer of a server of a text protocol to empty lines; a store that is only slow does not answer them."""
    sock.settimeout(PROVOKED_S)
    try:
        sock.sendall(tcpstore_wire.PROVOCATION)
        return sock.recv(64)
    except OSError:
        return b""


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            break
        data += more
    return data
