"""Ports for servers that start later."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Container

FIRST, LAST = 10_000, 32_000
"""Below those that the kernel gives to outgoing connections (32768 and up on Linux, ip_local_port_range), one of which
could take the port between the choice and the server's start."""


def free_port(taken: Container[int] = (), *, within: range = range(FIRST, LAST)) -> int:
    """Return a port of the loopback interface without a listener, one of ``within`` and not of ``taken``."""
    while True:
        port = secrets.choice(within)
        if port in taken:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
