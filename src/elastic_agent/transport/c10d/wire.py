"""The wire protocol of torch's TCPStore server (the libuv one): requests as bytes, and what may be in them.

The protocol is private to torch. A request is one byte, followed by its arguments: keys and values, each behind its
length, and numbers, all in the byte order of the machine. Answers have no header, and come in the order of the
requests; only the answer to a wait comes when its keys are there. Keys of torch's clients begin with a slash, which is
added here, so that all clients see the same keys. Requests to set or push have no answer.

Its first messages, sent over a blocking socket, show whether a store answers at all.
"""

from __future__ import annotations

import enum
import secrets
import socket
import ssl
import struct
from collections.abc import Sequence

from elastic_agent.transport.addresses import connect
from elastic_agent.transport.base import NotAStoreError, Obstacle, UnreachableError, not_a_store, silent

MAX_KEY_BYTES = 8 * 1024 - 1
MAX_VALUE_BYTES = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
"""The server closes the connection without an answer if a request exceeds one of these. Keys: without the slash."""
MOST_READ_BYTES = 1 << 28
"""A value to which other clients append may be larger than one that is sent at once."""

NONCE_BYTES = 4
"""The length of what a ping contains and its answer repeats."""

STOP_WAITING, WAIT_CANCELLED = b"\0", b"\1"
"""The answers to a wait, and to its cancellation, which comes after the former if both are sent."""

PROVOCATION = b"\r\n\r\n"
"""Makes servers of text protocols answer; a store that is only slow does not answer it."""

PROVOKED_S = 0.5
"""How long another server may take to answer it."""

_MAGIC = 0x3C85F7CE


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


def greeting(nonce: bytes) -> bytes:
    """Return what a client sends first; the answer is ``nonce``."""
    return struct.pack("=BI", Request.VALIDATE, _MAGIC) + ping(nonce)


def ping(nonce: bytes) -> bytes:
    """Return a request whose answer is ``nonce``."""
    return bytes([Request.PING]) + nonce


def packed_key(key: str) -> bytes:
    """Return a key as it is sent.

    Raises:
        ValueError: it is larger than the server accepts.
    """
    encoded = key.encode(errors="surrogateescape")
    if len(encoded) > MAX_KEY_BYTES:
        raise ValueError(f"a key has {len(encoded)} bytes; a store takes at most {MAX_KEY_BYTES}")
    return packed_size(len(encoded) + 1) + b"/" + encoded


def packed_keys(keys: Sequence[str]) -> bytes:
    """Return keys as they are sent.

    Raises:
        ValueError: one is larger, or there are more, than the server accepts.
    """
    if len(keys) > MAX_KEYS:
        raise ValueError(f"there are {len(keys)} keys in one request; a store takes at most {MAX_KEYS}")
    return packed_size(len(keys)) + b"".join(map(packed_key, keys))


def packed_value(value: bytes) -> bytes:
    """Return a value as it is sent.

    Raises:
        ValueError: it is larger than the server accepts.
    """
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a value has {len(value)} bytes; a store takes at most {MAX_VALUE_BYTES}")
    return packed_size(len(value)) + value


def packed_size(size: int) -> bytes:
    """Return a length or a count as it is sent."""
    return struct.pack("=Q", size)


def size_in(data: bytes) -> int:
    """Return the length or the count in 8 bytes."""
    return int(struct.unpack("=Q", data)[0])


def number_in(data: bytes) -> int:
    """Return the signed number in 8 bytes."""
    return int(struct.unpack("=q", data)[0])


def no_answer(shown: str) -> UnreachableError:
    """Return the error of a server that hung up at the first messages."""
    return UnreachableError(f"{shown} closed the connection without an answer", Obstacle.CLOSED)


def dial_store(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a store, which has answered then; raises as :func:`connect` and :func:`probe_store` do.

    ``timeout_s``: how long the connection may take, and then the answer.
    """
    sock = connect(host, port, timeout_s)
    try:
        probe_store(sock, timeout_s, f"{host}:{port}")
    except BaseException:
        sock.close()
        raise
    return sock


def probe_store(sock: socket.socket, timeout_s: float, shown: str, *, provoke: bool = True) -> None:
    """Check that the other end answers as a TCPStore does; ``provoke``: also send what makes other servers answer.

    Raises:
        UnreachableError: no answer in time (a frozen store, or something that only listens), or it hung up.
        NotAStoreError: another answer, or none before hanging up.
        ssl.SSLError: the connection is in TLS, and the other end ends it.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(timeout_s)
    try:
        sock.sendall(greeting(nonce))
        answer = _receive(sock, len(nonce))
    except TimeoutError:
        spoken = _provoke(sock) if provoke else b""
        if spoken and not spoken.startswith(nonce):  # a store that was only late: the next attempt will do
            raise not_a_store(shown, spoken) from None
        raise silent(shown, timeout_s) from None
    except ssl.SSLError:
        raise
    except OSError:
        answer = b""
    if not answer:  # a host that dies while it accepts, a proxy before one that is not there yet
        raise no_answer(shown)
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
        sock.sendall(PROVOCATION)
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
