"""Keeps the other users of this machine away from a store on a loopback address.

torch's store answers every client that can connect, and workers unpickle what they find there. On a loopback address,
every user of the machine can connect. So the store itself listens at another loopback address, where the kernel drops
all connections but the relay's, and the relay, to which the workers connect, asks the kernel whose each connection is:

    worker, 127.0.0.1:40123 ──▶ relay at 127.0.0.1:29401, 127.0.0.1:40124 ──▶ store at 127.93.7.20:29401

The relay needs Python's global lock: a call in the same process that holds it while it waits for the store
(``list_keys``, see :mod:`.store`) would wait forever.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from elastic_agent.logs import get_logger
from elastic_agent.transport.peers import MOST_PORTS, admit_only, check_peers_are_told, peer_uid

HOST = "127.0.0.1"
"""Where the relay's connections to the store come from."""

CHUNK_BYTES = 1 << 18
BACKLOG = 4096
PAUSE_S = 0.1
"""How long no connections are accepted when this process has no descriptors left."""

_TRIES = 8


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


class SameUserRelay:
    """Forwards the connections of this user's processes to a store that nothing else can connect to."""

    def __init__(self, public: socket.socket, what: str) -> None:
        """Begin to forward, in a thread.

        Args:
            public: listens on a loopback address; it becomes the relay's.
            what: the store, as the log names it.

        Raises:
            OSError: this system cannot keep others from the store; ``public`` is unchanged.
        """
        self.port = int(public.getsockname()[1])
        check_peers_are_told(public.getsockname()[0], public.family)
        self.store_listener = _hidden_listener(self.port)
        """For the store, which takes it over (:meth:`socket.socket.detach`)."""
        self._filtered = self.store_listener.dup()
        self._what = what
        self._public = public
        self._public.setblocking(False)
        self._pending: dict[_End, int] = {}
        """The port of each connection to the store on which the store has not answered yet."""
        self._refused: set[int | None] = set()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._accepts_from_s: float | None = -math.inf
        """When to accept connections again; None: they are accepted."""
        self._thread = threading.Thread(target=self._run, name="store relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections. The port is free when this returns."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._resume_accepting()
                for key, _ in self._selector.select(None if self._accepts_from_s is None else PAUSE_S):
                    if isinstance(key.data, _End):
                        self._move(key.data)
                    elif key.fileobj is self._public:
                        self._accept()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for key in [*self._selector.get_map().values()]:
            if isinstance(key.data, _End):
                key.data.sock.close()
                key.data.other.sock.close()
        self._selector.close()
        self._public.close()
        self._filtered.close()

    def _resume_accepting(self) -> None:
        if self._accepts_from_s is not None and time.monotonic() >= self._accepts_from_s:
            self._selector.register(self._public, selectors.EVENT_READ)
            self._accepts_from_s = None

    def _pause_accepting(self) -> None:
        self._selector.unregister(self._public)
        self._accepts_from_s = time.monotonic() + PAUSE_S

    def _accept(self) -> None:
        try:
            client, _ = self._public.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause_accepting()
            return
        try:
            if not self._may_enter(client):
                client.close()
                return
            self._pair(client)
        except OSError as error:  # the client is gone, the store was closed, or no descriptor is left
            get_logger().debug(f"a connection to {self._what} was dropped", error=str(error))
            client.close()

    def _may_enter(self, client: socket.socket) -> bool:
        uid = peer_uid(client)
        if uid == os.geteuid():
            return True
        if uid is not None and uid not in self._refused:
            self._refused.add(uid)
            get_logger().warning(
                f"refused a connection to {self._what} (port {self.port}) by another user of this machine, "
                f"user id {uid}"
            )
        return False

    def _pair(self, client: socket.socket) -> None:
        store = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        here, there = _End(client), _End(store)
        here.other, there.other = there, here
        try:
            store.bind((HOST, 0))  # no other socket has this port until it is closed
            self._pending[there] = store.getsockname()[1]
            admit_only(self._filtered, HOST, [*self._pending.values()][-MOST_PORTS:])
            store.connect(self._filtered.getsockname())
            for one in (here, there):
                one.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.sock.setblocking(False)
        except OSError:
            self._pending.pop(there, None)
            store.close()
            raise
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
        self._pending.pop(end, None)
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
            self._selector.register(end.sock, wanted, end)
        elif not wanted:
            self._selector.unregister(end.sock)
        else:
            self._selector.modify(end.sock, wanted, end)
        end.watched = wanted

    def _drop(self, end: _End) -> None:
        for one in (end, end.other):
            self._pending.pop(one, None)
            if one.watched:
                self._selector.unregister(one.sock)
                one.watched = 0
            one.sock.close()


def keep_other_users_out(sock: socket.socket, what: str) -> SameUserRelay | None:
    """The relay for a listening socket on a loopback address; None on others, and where the system has no means."""
    if not ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
        return None
    try:
        return SameUserRelay(sock, what)
    except OSError as error:
        get_logger().warning(
            f"other users of this machine can connect to {what}: the system does not tell whose a connection "
            "is, or has no socket filters, or only one loopback address",
            error=str(error),
        )
        return None


def _hidden_listener(port: int) -> socket.socket:
    """Listens on some loopback address, for connections that :func:`admit_only` admits; none as yet."""
    for host in _loopback_addresses():
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((host, port))
            admit_only(sock, HOST, ())
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return sock
    raise OSError(errno.EADDRINUSE, f"port {port} is in use on the loopback interface")


def _loopback_addresses() -> Iterator[str]:
    for _ in range(_TRIES):
        yield "127." + ".".join(str(1 + secrets.randbelow(254)) for _ in range(3))
