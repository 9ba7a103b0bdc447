"""The first words of torch's TCPStore protocol, spoken by hand.

torch's client, pointed at something that is no store or at one that is frozen, waits for ever, past its own
time-out. So before it is let loose, a plain socket with a time-out says hello and listens for the answer. This is
torch's private language: a test says so when a new torch speaks another.
"""

from __future__ import annotations

import secrets
import socket
import struct

from elastic_agent.transport.base import NotAStoreError, UnreachableError

_VALIDATE, _PING = 0, 13
_MAGIC = 0x3C85F7CE
PROVOKED_S = 0.5


def probe_store(sock: socket.socket, timeout_s: float, shown: str, *, provoke: bool = True) -> None:
    """Ask whoever is connected for a sign of life as a TCPStore; ``provoke``: and try to make others speak.

    Raises:
        UnreachableError: no answer in time: a frozen store, or something that only listens.
        NotAStoreError: another answer, or none before hanging up.
    """
    nonce = secrets.randbits(32)
    sock.settimeout(timeout_s)
    try:
        sock.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, nonce))
        answer = _receive(sock, 4)
    except TimeoutError:
        if provoke and (spoken := _provoke(sock)):
            raise _not_a_store(shown, spoken) from None
        raise UnreachableError(
            f"{shown} accepts connections but did not answer within {timeout_s:g} s (the agent that "
            "hosts the store is frozen or overloaded, or another program listens there)"
        ) from None
    except OSError:
        answer = b""
    if not answer:  # a host that dies while it accepts, a proxy before one that is not there yet
        raise UnreachableError(f"{shown} closed the connection without an answer")
    if answer != struct.pack("=I", nonce):
        raise _not_a_store(shown, answer)


def is_store(sock: socket.socket, timeout_s: float) -> bool:
    """Whether a TCPStore answers at the other end of a new connection."""
    try:
        probe_store(sock, timeout_s, "", provoke=False)
    except (UnreachableError, NotAStoreError):
        return False
    return True


def _provoke(sock: socket.socket) -> bytes:
    """What a server of a text protocol says to empty lines; a store that is only slow says nothing."""
    sock.settimeout(PROVOKED_S)
    try:
        sock.sendall(b"\r\n\r\n")
        return sock.recv(64)
    except OSError:
        return b""


def _not_a_store(shown: str, answer: bytes) -> NotAStoreError:
    return NotAStoreError(
        f"{shown} is used by another program, which is not a store (it answered {answer[:32]!r}); use "
        "another port, or stop that program"
    )


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            break
        data += more
    return data
