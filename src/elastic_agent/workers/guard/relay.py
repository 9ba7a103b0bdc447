"""Passes what the workers print on to the guard's own stdout and stderr, without ever blocking, and keeps it.

A worker whose output goes to no file writes into a pipe (a pseudo-terminal when the guard's own stream is a
terminal, so that `isatty` stays true). When the guard's stream is not read, the guard stops reading those pipes:
the workers then block in their own writes, as they would without the guard. If both of its streams are the same open
file, both of a worker are one pipe, so that their order stays exact.

A stdout that is a file is left to the workers: what they write there may be their result, and they must see that the
disk is full.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import fcntl
import os
import select
import stat
import termios
import time

from elastic_agent import linux
from elastic_agent.workers.guard.kept_output import KeptOutputs
from elastic_agent.workers.guard.line import TAIL_BYTES, WRITABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import SimpleNamespace

    from elastic_agent.workers.guard.kept_output import KeptOutput
    from elastic_agent.workers.guard.line import Loop

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
        self.has_no_reader = False

    @property
    def blocked(self) -> bool:
        return bool(self._backlog)

    @property
    def notices_errors(self) -> bool:
        """Errors are not left to a thread, where they would come too late to be the worker's."""
        return self._writer is None

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
            except OSError as error:
                self._backlog.clear()  # the reader is gone for good
                self.has_no_reader = error.errno in (errno.EPIPE, errno.ECONNRESET)
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
            sink = Sink(len, fd)
            sink.has_no_reader = True
            return sink
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
    """One worker's output on its way to a sink (None: not shown), and to the file in which it is kept."""

    def __init__(self, sink: Sink | None, kept: KeptOutput | None) -> None:
        self._sink = sink
        self._kept = kept
        self._tail = bytearray()
        self._closed = False
        # The second end becomes the worker's stream.
        self.read_fd, self.worker_fd = _open_channel(sink is not None and sink.is_terminal, sink)
        self._is_terminal = os.isatty(self.read_fd)
        os.set_blocking(self.read_fd, False)

    @property
    def tail(self) -> str:
        """The last 32 KiB that passed."""
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

    def keep_in(self, kept: KeptOutput | None) -> None:
        """Keep what passes from now on in another file; the tail begins anew."""
        self._kept = kept
        self._tail.clear()

    @property
    def is_held_up(self) -> bool:
        """True if the sink does not take more now."""
        return self._sink is not None and self._sink.blocked

    def close(self) -> None:
        if not self._closed:
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
        if data and self._kept is not None:
            self._kept.put(data)
        if data and self._sink is not None:
            if self._is_terminal:  # which may have been resized
                _copy_size(self._sink.fd, self.read_fd)
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
    import tty

    master, slave = os.openpty()
    tty.setraw(slave)
    _copy_size(like_fd, slave)
    return master, slave


def _copy_size(from_fd: int, to_fd: int) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        fcntl.ioctl(to_fd, termios.TIOCSWINSZ, fcntl.ioctl(from_fd, termios.TIOCGWINSZ, b"\0" * 8))


class Relays:
    """All relays of a generation to one sink (None: not shown), watched by the loop while that takes their output.

    `ends_writers`: a worker that writes when the sink has no reader any more gets the error that it would get without
    the guard.
    """

    def __init__(self, loop: Loop, sink: Sink | None, *, ends_writers: bool = False) -> None:
        self._loop = loop
        self.sink = sink
        self._ends_writers = ends_writers
        self._relays: list[Relay] = []
        self._held_up = False

    def open(self, kept: KeptOutput | None) -> Relay:
        """Return a relay for a worker."""
        relay = Relay(self.sink, kept)
        self._relays.append(relay)
        if not self._held_up:
            self._watch(relay)
        return relay

    def balance(self) -> None:
        """Hold up or resume reading, as the sink demands. Call after every round of the loop."""
        sink = self.sink
        if sink is None:
            return
        if self._ends_writers and sink.has_no_reader:
            self.close_all()
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

    def close_all(self, spared: Collection[Relay] = ()) -> None:
        """Pass on what is left; call when no writer is left, but for those of the `spared`."""
        for relay in self._relays:
            relay.drain()
            if relay not in spared:
                self._loop.remove(relay.read_fd)
                relay.close()
        self._relays = [relay for relay in self._relays if relay in spared]

    def _watch(self, relay: Relay) -> None:
        self._loop.add(relay.read_fd, lambda: self._ready(relay))

    def _ready(self, relay: Relay) -> None:
        if not relay.is_held_up and not relay.pump():
            self._loop.remove(relay.read_fd)
            relay.close()
            self._relays.remove(relay)


class Channels:
    """The streams of one worker that the guard passes on; None: it has the guard's own, or a file.

    `kept`: where the guard keeps what passes.
    """

    def __init__(self, stdout: Relay | None, stderr: Relay | None, kept: KeptOutput | None) -> None:
        self._stdout, self._stderr = stdout, stderr
        self.kept = kept
        self.relays = {relay for relay in (stdout, stderr) if relay is not None}
        self._is_drained = False

    @property
    def fds(self) -> dict[int, int]:
        """The worker's ends, by the descriptors that they become."""
        ends = {1: self._stdout, 2: self._stderr}
        return {fd: relay.worker_fd for fd, relay in ends.items() if relay is not None}

    @property
    def tail(self) -> str:
        """The end of what it wrote to stderr, and to stdout if that is the same file."""
        return self._stderr.tail if self._stderr is not None else ""

    def keep_in(self, kept: KeptOutput | None) -> None:
        """Have the guard keep from now on what passes here."""
        self.drain()
        self.kept = kept
        for relay in self.relays:
            relay.keep_in(kept)

    def is_taken(self) -> bool:
        """Pass on what there was when the reader of stdout took it; return whether that has taken all.

        Processes that the worker has left may go on to write.
        """
        if self._stdout is None:
            return True
        if not (self._is_drained or self._stdout.is_held_up):
            self._is_drained = True
            self.drain()
        return self._is_drained and not self._stdout.is_held_up

    def started(self) -> None:
        """Call after the fork."""
        for relay in self.relays:
            relay.started()

    def drain(self) -> None:
        """Pass on all that is there now."""
        for relay in self.relays:
            relay.drain()


class Console:
    """The guard's own stdout and stderr: there goes what workers print, unless their launches name files."""

    def __init__(self, loop: Loop) -> None:
        stderr = open_sink(2)
        is_log = linux.is_same_file(1, 2)
        stdout = stderr if is_log else open_sink(1) if _fails_without_reader_only(1) else None
        is_relayed = stdout is not None and (is_log or stdout.notices_errors)
        self._hidden = Relays(loop, None)
        self._stdout = Relays(loop, stdout, ends_writers=not is_log) if is_relayed else None
        self._stderr = self._stdout if self._stdout and stdout is stderr else Relays(loop, stderr)
        streams = (self._hidden, self._stdout, self._stderr)
        self._all = [*dict.fromkeys(relays for relays in streams if relays is not None)]
        self._kept_outputs = KeptOutputs()
        self._kept: list[KeptOutput] = []

    def open(self, launch: SimpleNamespace) -> Channels:
        """Return the channels of a worker."""
        kept = self._open_kept(launch)
        # Without a file, too: the end of a failed worker's stderr is needed for its error.
        stderr = {None: self._stderr, os.devnull: self._hidden}.get(launch.stderr)
        stdout = {None: self._stdout, os.devnull: self._hidden}.get(launch.stdout) if kept else None
        opened = {relays: relays.open(kept) for relays in {stdout, stderr} if relays is not None}
        return Channels(opened[stdout] if stdout else None, opened[stderr] if stderr else None, kept)

    def move(self, channels: Channels, launch: SimpleNamespace) -> None:
        """Keep the output of a worker that goes on in the file of another launch."""
        before = channels.kept
        if before is not None and before.path == launch.kept:
            return
        channels.keep_in(self._open_kept(launch))
        if before is not None:
            before.close()
            self._kept.remove(before)

    def _open_kept(self, launch: SimpleNamespace) -> KeptOutput | None:
        if launch.kept is not None:
            with contextlib.suppress(RuntimeError):  # there are too many threads: nothing is kept
                self._kept.append(self._kept_outputs.open(launch.kept, launch.kept_bytes))
                return self._kept[-1]
        return None

    def balance(self) -> None:
        """Hold up or resume reading. Call after every round of the loop."""
        for relays in self._all:
            relays.balance()

    def close_all(self, spared: Collection[Channels] = ()) -> None:
        """Pass on what is left; call when no writer is left, but for those of the `spared`."""
        relays_spared = {relay for channels in spared for relay in channels.relays}
        kept_spared = [channels.kept for channels in spared]
        for relays in self._all:
            relays.close_all(relays_spared)
        for kept in self._kept:
            if kept not in kept_spared:
                kept.close()
        self._kept = [kept for kept in self._kept if kept in kept_spared]

    def finish(self, patience_s: float) -> None:
        """Wait until everything is written, at most `patience_s`, and for the files twice that."""
        ends = time.monotonic() + patience_s
        for sink in (relays.sink for relays in self._all if relays.sink is not None):
            sink.finish(max(0.0, ends - time.monotonic()))
        self._kept_outputs.finish(2 * patience_s)


def _fails_without_reader_only(fd: int) -> bool:
    """Return whether a worker gets no error from writing to it but that it has no reader: to no disk, nor /dev/full."""
    known = os.fstat(fd)
    is_null = known.st_rdev == os.stat(os.devnull).st_rdev
    return stat.S_ISFIFO(known.st_mode) or stat.S_ISSOCK(known.st_mode) or os.isatty(fd) or is_null
