"""A socket on which the workers of this agent report to it, by datagrams; nothing here waits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable

import msgspec

from elastic_agent.logs import get_logger

LARGEST_MESSAGE = 256 * 1024

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the sender, from the kernel."""


class WorkerDatagrams:
    """Receives datagrams of this user's processes. To be opened and closed in the agent's loop."""

    def __init__(self, purpose: str, receive: Callable[[bytes, bytes], None]) -> None:
        """Listen to nothing yet.

        Args:
            purpose: part of the socket's name, which ``ss -x`` shows.
            receive: takes a message and its sender's address, which is empty if it has none; raises
                :class:`msgspec.MsgspecError`, :class:`UnicodeDecodeError` or :class:`RecursionError` for a message that
                it does not understand.
        """
        self._purpose = purpose
        self._receive = receive
        self._socket: socket.socket | None = None
        self.address: str | None = None
        """The name of the abstract Unix socket; None while it is closed."""

    def open(self) -> bool:
        """Listen; whether that was possible (logged if not)."""
        address = f"elastic-agent-{self._purpose}/{os.getuid()}/{os.getpid()}-{secrets.token_hex(8)}"
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            opened.bind("\0" + address)
        except OSError as error:
            opened.close()
            get_logger().debug("workers cannot report to the agent", what=self._purpose, reason=str(error))
            return False
        self._socket, self.address = opened, address
        asyncio.get_running_loop().add_reader(opened.fileno(), self._readable)
        return True

    def close(self) -> None:
        """Stop listening."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = self.address = None

    def send(self, data: bytes, peer: bytes) -> None:
        """Send it, unless the peer has gone, or has not read what it was sent before."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto(data, peer)

    def _readable(self) -> None:
        while self._socket is not None:
            try:
                data, ancillary, _, peer = self._socket.recvmsg(LARGEST_MESSAGE, socket.CMSG_SPACE(12))
            except BlockingIOError:
                return
            except OSError:
                continue
            if _is_own(ancillary):
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    self._receive(data, peer if isinstance(peer, bytes) else b"")


def _is_own(ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Return whether a process of this user, or of root, has sent it."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[1] in (os.geteuid(), 0)
    return False
