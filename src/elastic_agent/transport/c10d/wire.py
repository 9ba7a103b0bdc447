"""The first messages of torch's TCPStore protocol, sent over a plain socket.

torch's client, when it connects to something that is not a store or is frozen, waits for ever, past its own
time-out. So before it is used, a plain socket with a time-out sends the first message and reads the answer. The
protocol is private to torch: a test fails when a new version of torch changes it.
"""

from __future__ import annotations

import secrets
import socket
import struct

from elastic_agent.transport.base import NotAStoreError, Obstacle, UnreachableError, not_a_store, silent

_VALIDATE, _PING = 0, 13
_MAGIC = 0x3C85F7CE
PROVOKED_S = 0.5


def probe_store(sock: socket.socket, timeout_s: float, shown: str, *, provoke: bool = True) -> None:
    """Check that the other end answers as a TCPStore does; ``provoke``: also send what makes other servers answer.

    Raises:
        UnreachableError: no answer in time (a frozen store, or something that only listens), or it hung up.
        NotAStoreError: another answer, or none before hanging up.
    """
    nonce = secrets.randbits(32)
    sock.settimeout(timeout_s)
    try:
        sock.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, nonce))
        answer = _receive(sock, 4)
    except TimeoutError:
        if provoke and (spoken := _provoke(sock)):
            raise not_a_store(shown, spoken) from None
        raise silent(shown, timeout_s) from None
    except OSError:
        answer = b""
    if not answer:  # a host that dies while it accepts, a proxy before one that is not there yet
        raise UnreachableError(f"{shown} closed the connection without an answer", Obstacle.CLOSED)
    if answer != struct.pack("=I", nonce):
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
        sock.sendall(b"\r\n\r\n")
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
