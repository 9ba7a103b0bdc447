"""The wire protocol of torch's TCPStore server (the libuv one): requests as bytes, and what may be in them.

The protocol is private to torch. A request is one byte, followed by its arguments: keys and values, each behind its
length, and numbers, all in the byte order of the machine. Answers have no header, and come in the order of the
requests; only the answer to a wait comes when its keys are there. Keys of torch's clients begin with a slash, which is
added here, so that all clients see the same keys. Requests to set or push have no answer.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

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
