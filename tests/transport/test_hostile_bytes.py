"""A client that reaches the port can send anything: no bytes crash the store or keep it from serving the others.

What such a caller can do all the same is to write and delete keys, and to fill the host's memory: the port is for
the cluster's own network.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from elastic_agent.transport import c10d
from elastic_agent.transport.c10d.client import greeting
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, in_loop

from .support import PATIENCE_S, free_endpoint, lease, member, peers

HELLO = greeting(b"")[:-1]
SET, COMPARE_SET, GET, ADD, CHECK, WAIT, COUNT, DELETE, APPEND = range(1, 10)
MULTI_GET, MULTI_SET, CANCEL_WAIT, PING, QUEUE_PUSH, QUEUE_POP, QUEUE_LEN, LIST_KEYS = range(10, 18)
BEYOND = range(18, 24)
"""Torch knows no such commands."""

LENGTHS = [0, 1, 255, 1 << 20, (8 << 20) + 1, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def text(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def wrong_lengths() -> Iterator[bytes]:
    """Yield every command, with lengths and counts that are not true."""
    for command in (*range(1, 18), *BEYOND):
        yield bytes([command])
        for length in LENGTHS:
            wrong = struct.pack("=Q", length)
            yield bytes([command]) + wrong + b"k" * 20
            yield bytes([command]) + text(b"key") + wrong + b"v" * 20
            yield bytes([command]) + text(b"key") + text(b"old") + wrong + b"v" * 20
            yield bytes([command]) + struct.pack("=Q", 1) + wrong + b"k" * 20


def wrong_use() -> Iterator[bytes]:
    """Well-formed commands on what they do not fit, and waits whose end is not read."""
    for value in (b"", b"text", b"9" * 40, b"9223372036854775807"):
        yield bytes([SET]) + text(b"n") + text(value) + bytes([ADD]) + text(b"n") + struct.pack("=q", 1)
    for command in (GET, QUEUE_POP, QUEUE_LEN, DELETE):
        yield bytes([command]) + text(b"nothing there")
    for command in (MULTI_GET, CHECK, WAIT):
        yield bytes([command]) + struct.pack("=Q", 2) + text(b"none") + text(b"of these")
    yield (
        bytes([WAIT])
        + struct.pack("=Q", 1)
        + text(b"late")
        + bytes([WAIT])
        + struct.pack("=Q", 1)
        + text(b"late")
    )
    yield bytes([QUEUE_POP]) + text(b"late")
    yield bytes([SET]) + text(b"late") + text(b"now") + bytes([QUEUE_PUSH]) + text(b"late") + text(b"now")
    yield bytes([CANCEL_WAIT]) * 3
    yield bytes([COUNT, LIST_KEYS, PING])
    yield HELLO


def noise(count: int) -> Iterator[bytes]:
    dice = random.Random(11)
    for _ in range(count):
        words = [bytes([dice.randrange(20)]) + text(dice.randbytes(dice.randrange(9))) for _ in range(4)]
        yield b"".join(words) + dice.randbytes(dice.randrange(40))


def no_greeting() -> Iterator[bytes]:
    """What is no message of a store's client from its first byte on, or ends halfway."""
    dice = random.Random(7)
    yield from (dice.randbytes(dice.randrange(1, 5000)) for _ in range(40))
    yield from (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"",
        b"\x00" * 10_000,
        HELLO[:3],
    )


def test_hostile_bytes_neither_crash_nor_block_the_store() -> None:
    endpoint = free_endpoint()
    with peers(1, endpoint) as (host,), ExitStack() as lingering:
        assert host.elect()[0]
        node = Blocking(in_loop(c10d.dial(endpoint, "run", PATIENCE_S)))
        held = node.register(member("a"), lease("a"))
        assert held is not None
        messages = [HELLO + message for message in (*wrong_lengths(), *wrong_use(), *noise(300))]
        for number, message in enumerate((*no_greeting(), *messages)):
            sock = say(endpoint, message)
            if number % 4:
                sock.close()
            else:
                lingering.enter_context(sock)
            if number % 50 == 0:
                answers(endpoint)
        for _ in range(200):
            lingering.enter_context(say(endpoint, b""))
        answers(endpoint)
        assert node.renew(held, held.renewed())
        assert node.store_id.startswith(host.elect()[1])
        node.close()


def say(endpoint: Endpoint, data: bytes) -> socket.socket:
    """Open a connection and send this."""
    sock = socket.create_connection((endpoint.host, endpoint.port), PATIENCE_S)
    with suppress(ConnectionError):
        sock.sendall(data)
    return sock


def answers(endpoint: Endpoint) -> None:
    in_loop(c10d.check_store(endpoint, PATIENCE_S))
