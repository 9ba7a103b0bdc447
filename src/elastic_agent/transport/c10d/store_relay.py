"""Keeps others away from a store on a loopback address: only processes of this user connect.

torch's store answers every client that can connect, and workers unpickle what they find there. So the store itself
listens at another, loopback address, where only the relay can connect (:mod:`..hidden_listener`), and the relay, to
which the workers connect, asks the kernel whose each connection is:

    worker, 127.0.0.1:40123 ──▶ relay at 127.0.0.1:29401, 127.8.15.2:40124 ──▶ store at 127.93.7.20:29401
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from elastic_agent.logs import get_logger
from elastic_agent.transport.hidden_listener import HiddenListener
from elastic_agent.transport.peers import check_peers_are_told, peer_uid

CHUNK_BYTES = 1 << 18
PAUSE_S = 0.1
"""How long no connections are accepted when this process has no descriptors left."""

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _End:
    """One of the two connections that belong together, with what waits to be sent on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.unsent = bytearray()
        self.is_over = False
        """Whether its peer sends nothing more."""
        self.watched = 0
        self.other: _End

    @property
    def wanted(self) -> int:
        """Read only if what was read before has been passed on."""
        reads = 0 if self.is_over or self.other.unsent else selectors.EVENT_READ
        return reads | (selectors.EVENT_WRITE if self.unsent else 0)


class StoreRelay:
    """Forwards the connections of this user's processes to a store that nothing else can connect to."""

    def __init__(self, public: socket.socket, what: str) -> None:
        """Begin to forward, in a thread.

        Args:
            public: the listening socket to which workers connect; it becomes the relay's.
            what: the store, as the log names it.

        Raises:
            OSError: this system cannot keep others from the store; ``public`` is unchanged.
        """
        self.port = int(public.getsockname()[1])
        check_peers_are_told(public.getsockname()[0], public.family)
        self._hidden = HiddenListener(public)
        self.store_listener = self._hidden.store_listener
        """For the store, which takes it over (:meth:`socket.socket.detach`)."""
        self._what = what
        self._public = public
        self._public.setblocking(False)
        self._refused: set[int] = set()
        self._closing = False
        self._was_full = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ends: set[_End] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._accepts_from_s: float | None = -math.inf
        """When to accept connections again; None: they are accepted."""
        self._thread = threading.Thread(target=self._run, name="store relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, when the store has been closed. The port is free when this returns."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    @property
    def _shown(self) -> str:
        return f"{self._what} (port {self.port})"

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._resume_accepting()
                for key, _ in self._selector.select(None if self._accepts_from_s is None else PAUSE_S):
                    on_event: Callable[[], None] = key.data
                    on_event()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for end in self._ends:
            end.sock.close()
        self._selector.close()
        self._public.close()
        self._hidden.close()

    def _resume_accepting(self) -> None:
        if self._accepts_from_s is not None and time.monotonic() >= self._accepts_from_s:
            self._selector.register(self._public, selectors.EVENT_READ, self._accept)
            self._accepts_from_s = None

    def _pause_accepting(self) -> None:
        self._selector.unregister(self._public)
        self._accepts_from_s = time.monotonic() + PAUSE_S

    def _report_full(self, error: OSError) -> None:
        if not self._was_full:
            self._was_full = True
            get_logger().warning(
                f"{self._shown} cannot accept more connections at present: {error.strerror}; raise the limit of open "
                "files to four for each worker of the run and 100 more (ulimit -n; in a service LimitNOFILE)"
            )

    def _accept(self) -> None:
        try:
            client, _ = self._public.accept()
        except OSError as error:
            if error.errno in _FULL:
                self._report_full(error)
                self._pause_accepting()
            return
        try:
            self._decide(client)
        except OSError as error:  # the client is gone, the store was closed, or no descriptor is left
            self._dropped(client, error)

    def _decide(self, client: socket.socket) -> None:
        uid = peer_uid(client)
        if uid is None:
            client.close()  # its other end is closed
        elif uid != os.geteuid():
            self._refuse(client, uid)
        else:
            self._pair(client)

    def _refuse(self, client: socket.socket, uid: int) -> None:
        client.close()
        if uid not in self._refused:
            self._refused.add(uid)
            get_logger().warning(
                f"refused a connection to {self._shown} by another user of this machine, user id {uid}"
            )

    def _dropped(self, client: socket.socket, error: OSError) -> None:
        if error.errno in _FULL:
            self._report_full(error)
        get_logger().debug(f"a connection to {self._what} was dropped", error=str(error))
        client.close()

    def _pair(self, client: socket.socket) -> None:
        store = self._hidden.connect()
        here, there = _End(client), _End(store)
        here.other, there.other = there, here
        try:
            for one in (here, there):
                one.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.sock.setblocking(False)
        except OSError:
            store.close()
            raise
        self._ends |= {here, there}
        self._watch(here)
        self._watch(there)

    # -- a pair of connections ------------------------------------------------------------------

    def _move(self, end: _End) -> None:
        """Send what waits, and pass on what there is."""
        if end.sock.fileno() < 0:
            return  # closed by an event of its other end
        try:
            self._send(end)
            if end.wanted & selectors.EVENT_READ:
                self._receive(end)
        except OSError:  # one of the two was reset
            self._drop(end)
            return
        if end.is_over and end.other.is_over and not end.unsent and not end.other.unsent:
            self._drop(end)
            return
        self._watch(end)
        self._watch(end.other)

    def _receive(self, end: _End) -> None:
        try:
            data = end.sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            end.other.unsent += data
            self._send(end.other)
        else:
            end.is_over = True
            end.other.sock.shutdown(socket.SHUT_WR)

    def _send(self, end: _End) -> None:
        with contextlib.suppress(BlockingIOError):
            while end.unsent:
                del end.unsent[: end.sock.send(end.unsent)]

    def _watch(self, end: _End) -> None:
        wanted = end.wanted
        if wanted == end.watched:
            return
        if not end.watched:
            self._selector.register(end.sock, wanted, lambda: self._move(end))
        elif not wanted:
            self._selector.unregister(end.sock)
        else:
            self._selector.modify(end.sock, wanted, self._selector.get_key(end.sock).data)
        end.watched = wanted

    def _drop(self, end: _End) -> None:
        for one in (end, end.other):
            self._ends.discard(one)
            if one.watched:
                self._selector.unregister(one.sock)
                one.watched = 0
            one.sock.close()


def keep_other_users_out(sock: socket.socket, what: str) -> StoreRelay | None:
    """The relay for a listening socket on a loopback address; None on others, and where the system has no means."""
    if not ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback:
        return None
    try:
        return StoreRelay(sock, what)
    except OSError as error:
        get_logger().warning(
            f"other users of this machine can connect to {what} ({error.strerror or error}): as root, modprobe "
            "tcp_diag; or give the run a network of its own: unshare -rn, then ip link set lo up"
        )
        return None
