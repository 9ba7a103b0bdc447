"""Passing the workers' stderr on to the guard's own, without ever blocking, and keeping its end.

A worker whose stderr goes to no file writes into a pipe (a pseudo-terminal when the guard's stderr is a
terminal, so that `isatty` stays true). When the guard's stderr is not read, the guard stops reading those pipes:
the workers then block in their own writes, as they would without the guard.
"""

from __future__ import annotations

import _thread
import errno
import os
import select
import stat
import time

from elastic_agent.workers.guard.loop import WRITABLE
from elastic_agent.workers.guard.messages import TAIL_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_agent.workers.guard.loop import Loop

_CHUNK_BYTES = 64 * 1024
_DRAIN_BYTES = 1024 * 1024
_BACKLOG_BYTES = 1024 * 1024


class Sink:
    """The destination of relayed output: a queue in front of a descriptor that is written without blocking.

    O_NONBLOCK is a property of the open file, which the agent, the workers and perhaps a shell share with
    the guard, so it is never set on descriptor 2 itself.
    """

    def __init__(self, write: Callable[[bytes], int], fd: int, writer: _Writer | None = None) -> None:
        """Use `write`, which writes to `fd`. `writer`: the thread at its other end, if there is one."""
        self._write = write
        self._backlog = bytearray()
        self._writer = writer
        self.fd = fd
        self.is_terminal = os.isatty(fd)

    @property
    def blocked(self) -> bool:
        return bool(self._backlog)

    def put(self, data: bytes) -> None:
        """Write `data`, or what the descriptor takes of it now and the rest with a later `flush`.

        What would make the queue longer than 1 MiB is dropped.
        """
        self._backlog += data[: max(0, _BACKLOG_BYTES - len(self._backlog))]
        self.flush()

    def flush(self) -> None:
        """Write what the descriptor takes now."""
        while self._backlog:
            try:
                written = self._write(bytes(self._backlog[:_CHUNK_BYTES]))
            except BlockingIOError:
                return
            except OSError:
                self._backlog.clear()  # the reader is gone for good
                return
            del self._backlog[:written]

    def finish(self, patience_s: float) -> bool:
        """Wait until everything is written, at most `patience_s`; return whether it is. Nothing may be put any more."""
        ends = time.monotonic() + patience_s
        while self.blocked and time.monotonic() < ends:
            select.select((), (self.fd,), (), max(0.0, ends - time.monotonic()))
            self.flush()
        if self._writer is None:
            return not self.blocked
        os.close(self.fd)
        return self._writer.ended(max(0.0, ends - time.monotonic())) and not self.blocked


def open_sink(fd: int) -> Sink:
    """Return a sink for what `fd` refers to."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISSOCK(mode):
        return _socket_sink(fd)
    if stat.S_ISREG(mode):
        return _threaded_sink(fd)
    if stat.S_ISCHR(mode) and not os.isatty(fd):  # such as /dev/null
        return Sink(lambda data: os.write(fd, data), fd)
    try:
        # A second open file on the same pipe or terminal, with flags of its own.
        own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader
            return Sink(len, fd)
        return _threaded_sink(fd)  # another user's
    return Sink(lambda data: os.write(own, data), own)


def _socket_sink(fd: int) -> Sink:
    import socket  # 3 ms, and only under a service manager is stderr a socket

    stream = socket.socket(fileno=os.dup(fd))
    return Sink(lambda data: stream.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL), stream.fileno())


def _threaded_sink(fd: int) -> Sink:
    """Return a sink for what cannot be written without blocking; files above all: their disk or server may be slow, or
    gone."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    return Sink(lambda data: os.write(write_end, data), write_end, _Writer(read_end, fd))


class _Writer:
    """A thread that copies from a pipe to where writing may block. It shares nothing with the guard's own thread."""

    def __init__(self, from_fd: int, to_fd: int) -> None:
        self._end, its_end = os.pipe()
        _thread.start_new_thread(self._copy, (from_fd, to_fd, its_end))

    def ended(self, timeout_s: float) -> bool:
        """Return whether it ends within `timeout_s`, as it does after the pipe has been closed and all is written."""
        return bool(select.select((self._end,), (), (), timeout_s)[0])

    @staticmethod
    def _copy(from_fd: int, to_fd: int, its_end: int) -> None:
        while data := os.read(from_fd, _CHUNK_BYTES):
            try:
                while data:
                    data = data[os.write(to_fd, data) :]
            except OSError:
                pass  # disk full, perhaps not for ever
        os.close(from_fd)
        os.close(its_end)


class Relay:
    """One worker's stderr on its way to a sink (None: kept as the tail only)."""

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._tail = bytearray()
        self._closed = False
        # The second end becomes the worker's stderr.
        self.read_fd, self.worker_fd = _open_channel(sink is not None and sink.is_terminal, sink)
        os.set_blocking(self.read_fd, False)

    @property
    def tail(self) -> str:
        """The last 8 KiB that passed."""
        return self._tail.decode(errors="replace")

    def started(self) -> None:
        """Call after the fork: closes the worker's end, so that the end of file can be seen."""
        os.close(self.worker_fd)

    def pump(self) -> bool:
        """Pass one chunk on; False at the end of the stream, and True when there may be more now or later."""
        return self._read() != b""

    def drain(self) -> None:
        """Pass on all that is there now, blocked sink or not: the writer is dead, so this is little."""
        taken = 0
        while not self._closed and taken < _DRAIN_BYTES:
            data = self._read()
            if not data:
                return
            taken += len(data)

    def close(self) -> None:
        self._closed = True
        os.close(self.read_fd)

    def _read(self) -> bytes | None:
        try:
            data = os.read(self.read_fd, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        except OSError:  # a pseudo-terminal returns EIO at its end
            return b""
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        if self._sink is not None and data:
            self._sink.put(data)
        return data


def _open_channel(terminal: bool, sink: Sink | None) -> tuple[int, int]:
    if terminal and sink is not None:
        try:
            return _open_terminal(sink.fd)
        except OSError:
            pass  # no pseudo-terminals here: a pipe does, without the colours
    return os.pipe()


def _open_terminal(like_fd: int) -> tuple[int, int]:
    """Open a pseudo-terminal of the same size that changes nothing of what passes."""
    import fcntl
    import termios
    import tty

    master, slave = os.openpty()
    tty.setraw(slave)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, fcntl.ioctl(like_fd, termios.TIOCGWINSZ, b"\0" * 8))
    return master, slave


class Relays:
    """All relays of a generation, watched by the loop while the sink takes their output."""

    def __init__(self, loop: Loop, sink: Sink) -> None:
        self._loop = loop
        self._sink = sink
        self._relays: list[Relay] = []
        self._held_up = False

    def open(self, stderr: str | None) -> Relay | None:
        """Return a relay for a worker with this `stderr` in its launch; None when its stderr is to go there
        directly."""
        if stderr == os.devnull:
            # Not printed, but the end of a failed worker's stderr is needed for its error.
            relay = Relay(None)
        elif stderr is None:
            relay = Relay(self._sink)
        else:
            return None
        self._relays.append(relay)
        if not self._held_up:
            self._watch(relay)
        return relay

    def balance(self) -> None:
        """Hold up or resume reading, as the sink demands. Call after every round of the loop."""
        sink = self._sink
        if sink.blocked == self._held_up:
            return
        self._held_up = sink.blocked
        if self._held_up:
            self._loop.add(sink.fd, sink.flush, WRITABLE)
            for relay in self._relays:
                self._loop.remove(relay.read_fd)
        else:
            self._loop.remove(sink.fd)
            for relay in self._relays:
                self._watch(relay)

    def close_all(self) -> None:
        """Pass on what is left; call when no writer is left."""
        for relay in self._relays:
            relay.drain()
            self._loop.remove(relay.read_fd)
            relay.close()
        self._relays.clear()

    def _watch(self, relay: Relay) -> None:
        self._loop.add(relay.read_fd, lambda: self._ready(relay))

    def _ready(self, relay: Relay) -> None:
        if not self._sink.blocked and not relay.pump():
            self._loop.remove(relay.read_fd)
            relay.close()
            self._relays.remove(relay)
