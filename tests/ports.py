"""Ports for servers that a test starts, which no other process takes between the choice and the start."""

from __future__ import annotations

import contextlib
import secrets
import socket

FIRST, LAST = 10_000, 32_000
"""Below those that the system gives to outgoing connections (32768 and up on Linux)."""

_given: set[int] = set()


def free_port() -> int:
    """One without a listener, which is given to no other caller."""
    while True:
        port = FIRST + secrets.randbelow(LAST - FIRST)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


def free_ports(count: int) -> list[int]:
    """Several."""
    return [free_port() for _ in range(count)]
