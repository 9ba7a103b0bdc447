"""Tells systemd how a service is doing, where it runs as one (``Type=notify``)."""

from __future__ import annotations

import contextlib
import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(*lines: str) -> None:
    """Send these lines to the socket that ``NOTIFY_SOCKET`` names, if it names one; nobody has to listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):  # a name outside the file system
        address = f"\0{address[1:]}"
    elif not address.startswith("/"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto("\n".join(lines).encode(), address)
