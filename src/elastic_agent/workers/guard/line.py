"""The guard's event loop, and the messages between the guard and the agent's `Guard`.

Two things are shared. A socket pair carries one JSON object per line in each direction; lines are small, so
neither side ever has reason to block on it. A memory file holds the deadline in its first eight bytes
(native order, nanoseconds of CLOCK_BOOTTIME, 0 = none), which the agent writes without a system call, and
from `MAILBOX_OFFSET` on the launches of the next generation as JSON: they contain whole environments, which
may be larger than a socket's buffer. An event has the name and the fields of its class in `client`.

Both ends are the same version of the same package on the same machine, so no version is exchanged.
"""

from __future__ import annotations

import json
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Message = dict[str, Any]

DEADLINE_BYTES = 8
MAILBOX_OFFSET = 4096
TAIL_BYTES = 32 * 1024
"""The size of the end of a worker's stderr output that is kept."""

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
_CHUNK_BYTES = 64 * 1024

NO_SLOT = -1
"""Slot of a `SpawnFailed` that concerns the whole generation."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


class LineBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Loop:
    """The event loop: calls a function when its descriptor is ready.

    epoll lists descriptors in the order in which they became ready, if it never listed them before; with one
    pidfd per worker that is the order in which the workers died.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, handler: Callable[[], None], events: int = READABLE) -> None:
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Stop watching `fd`, if it is watched; must come before it is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait until something is ready, at most `timeout_s`; return the ready descriptors in order."""
        return [fd for fd, _ in self._epoll.poll(timeout_s)]

    def dispatch(self, fd: int) -> None:
        """Call the handler of `fd`, unless an earlier handler removed it."""
        handler = self._handlers.get(fd)
        if handler is not None:
            handler()


class Channel:
    """Messages from and to the agent. Sending never blocks: a stopped agent finds them when it wakes."""

    def __init__(
        self, loop: Loop, fd: int, on_message: Callable[[Message], None], on_end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._on_message = on_message
        self._on_end = on_end
        self._lines = LineBuffer()
        self._unsent = bytearray()
        self._writing = False
        os.set_blocking(fd, False)
        loop.add(fd, self._ready)

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._fd, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the agent is gone, which the reading side handles
            self._unsent.clear()
        if bool(self._unsent) != self._writing:
            self._writing = bool(self._unsent)
            self._loop.remove(self._fd)
            self._loop.add(self._fd, self._ready, READABLE | WRITABLE if self._writing else READABLE)

    def _ready(self) -> None:
        if self._writing:
            self._flush()
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            for message in self._lines.feed(data):
                self._on_message(message)
        else:
            self._loop.remove(self._fd)
            self._on_end()
