"""The guard's event loop and its line to the agent."""

from __future__ import annotations

import os
import select

from elastic_agent.workers.guard.messages import LineBuffer, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_agent.workers.guard.messages import Message

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
_CHUNK_BYTES = 64 * 1024


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
        """Wait until something is ready, at most `timeout_s`; returns the ready descriptors in order."""
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
