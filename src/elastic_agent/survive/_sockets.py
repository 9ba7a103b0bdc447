"""The connections of this process's process groups, and their end: it frees a rank that waits in a collective."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from torch.distributed import distributed_c10d

Sockets = dict[int, str]
"""Sockets by descriptor, each with a name that no other socket gets while it is open."""


def open_sockets() -> Sockets:
    """Return all sockets of this process."""
    found: Sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


def shut_down(connections: Sockets) -> None:
    """End those of these connections by TCP that are still open.

    Listening sockets are left alone: gloo ends the process when it cannot accept connections any more.
    """
    for number, name in connections.items():
        with contextlib.suppress(OSError):
            own = os.dup(number)
            try:
                # The number may be another file's by now; that of the duplicate is not given to another one.
                if os.readlink(f"/proc/self/fd/{own}") == name:
                    _shut_down(own)
            finally:
                os.close(own)


def _shut_down(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        is_tcp = (
            connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        )
        if is_tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def group_calls() -> int | None:
    """Return a number that grows with each process group that this process makes, from 0; None: nothing counts them.

    :mod:`elastic_agent.integrations.collectives` counts them, in workers that an agent has started.
    """
    hook: Any = distributed_c10d._check_valid_timeout
    calls: int | None = getattr(hook, "calls", None)
    return calls
