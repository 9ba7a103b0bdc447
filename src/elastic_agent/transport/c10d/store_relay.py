"""Keeps others away from a store: processes of this user on this machine connect, and clients with the secret.

torch's store answers every client that can connect, and workers unpickle what they find there. So the store itself
listens at another, loopback address, where only the relay can connect (:mod:`..hidden_listener`). The relay asks the
kernel whose each connection of this machine is:

    worker, 127.0.0.1:40123 ──▶ relay at 127.0.0.1:29401, 127.8.15.2:40124 ──▶ store at 127.93.7.20:29401

At a second port, it may serve clients of any machine in TLS (:mod:`elastic_agent.transport.certificates`).
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

from elastic_agent.logs import get_logger
from elastic_agent.transport.hidden_listener import HiddenListener
from elastic_agent.transport.peers import check_peers_are_told, peer_uid

from .relay_ends import End, SecureEnd
from .relay_log import RelayLog

PAUSE_S = 0.1
"""How long no connections are accepted when this process has no descriptors left."""
HANDSHAKE_S = 10.0
"""How long a client may take to show that it has the secret."""
MOST_UNPROVEN = 1024
"""So many clients may not have shown that yet; for one more, the oldest is closed."""

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class StoreRelay:
    """Forwards the connections of this user's processes, and of clients with the secret, to a hidden store."""

    def __init__(
        self,
        public: socket.socket,
        what: str,
        secure: tuple[socket.socket, ssl.SSLContext] | None = None,
    ) -> None:
        """Begin to forward, in a thread.

        Args:
            public: the listening socket on a loopback address to which processes of this user connect; it becomes the
                relay's.
            what: the store, as the log names it.
            secure: the listening socket for clients in TLS, which becomes the relay's, too, and what they have to
                prove; None: there are none.

        Raises:
            OSError: this system cannot keep others from the store; both sockets are unchanged.
        """
        self.port = int(public.getsockname()[1])
        check_peers_are_told(public.getsockname()[0], public.family)
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._hidden = HiddenListener(public)
        except BaseException:
            self._selector.close()
            os.close(self._wake)
            raise
        self.store_listener = self._hidden.store_listener
        """For the store, which takes it over (:meth:`socket.socket.detach`)."""
        self._log = RelayLog(what, self.port if secure is None else int(secure[0].getsockname()[1]))
        self._closing = threading.Event()
        self._ends: set[End] = set()
        self._unproven: dict[SecureEnd, None] = {}
        """Clients that have not shown yet that they have the secret, the earliest first."""
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: None)
        self._listeners: dict[socket.socket, Callable[[socket.socket, str], None]] = {
            public: lambda client, _: self._check_user(client)
        }
        if secure is not None:
            listener, context = secure
            self._listeners[listener] = lambda client, host: self._begin_handshake(client, host, context)
        for listener in self._listeners:
            listener.setblocking(False)
        self._accepts_from_s: float | None = -math.inf
        """When to accept connections again; None: they are accepted."""
        self._thread = threading.Thread(target=self._run, name="store relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, when the store has been closed. The ports are free when this returns."""
        if not self._closing.is_set():
            self._closing.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._resume_accepting()
                for key, _ in self._selector.select(self._wait_s()):
                    if self._closing.is_set():
                        break
                    self._carry_out(key)
                self._give_up_handshakes()
        finally:
            self._close_all()

    def _carry_out(self, key: selectors.SelectorKey) -> None:
        on_event: Callable[[], None] = key.data
        try:
            on_event()
        except (
            OSError
        ) as error:  # the system's memory for events, say: it costs this connection, and no other
            self._log.dropped(error, is_full=error.errno in _FULL)
            for end in [end for end in self._ends if end.sock is key.fileobj]:
                self._drop(end)

    def _wait_s(self) -> float | None:
        pause_s = None if self._accepts_from_s is None else PAUSE_S
        first = next(iter(self._unproven), None)
        handshake_s = None if first is None else max(0.0, first.until_s - time.monotonic())
        return min((wait_s for wait_s in (pause_s, handshake_s) if wait_s is not None), default=None)

    def _close_all(self) -> None:
        for end in self._ends:
            end.sock.close()
        self._selector.close()
        for listener in self._listeners:
            listener.close()
        self._hidden.close()

    # -- new connections ------------------------------------------------------------------------

    def _resume_accepting(self) -> None:
        if self._accepts_from_s is None or time.monotonic() < self._accepts_from_s:
            return
        for listener, admit in self._listeners.items():
            self._selector.register(listener, selectors.EVENT_READ, self._accepting(listener, admit))
        self._accepts_from_s = None

    def _accepting(
        self, listener: socket.socket, admit: Callable[[socket.socket, str], None]
    ) -> Callable[[], None]:
        def accept() -> None:
            if self._accepts_from_s is not None:
                return  # no descriptor was left for the one before
            try:
                client, address = listener.accept()
            except OSError as error:
                if error.errno in _FULL:
                    self._pause_accepting(error)
                return
            try:
                admit(client, str(address[0]).removeprefix("::ffff:"))
            except OSError as error:  # the client is gone, or no descriptor is left
                self._log.dropped(error, is_full=error.errno in _FULL)
                client.close()

        return accept

    def _pause_accepting(self, error: OSError) -> None:
        self._log.dropped(error, is_full=True)
        for listener in self._listeners:
            self._selector.unregister(listener)
        self._accepts_from_s = time.monotonic() + PAUSE_S

    def _check_user(self, client: socket.socket) -> None:
        uid = peer_uid(client)
        if uid == os.geteuid():
            self._pair(End(client))
            return
        client.close()
        if uid is not None:  # else its other end is closed
            self._log.refused_user(uid)

    def _begin_handshake(self, client: socket.socket, host: str, context: ssl.SSLContext) -> None:
        end = SecureEnd(client, host, context, time.monotonic() + HANDSHAKE_S)
        if len(self._unproven) >= MOST_UNPROVEN:
            self._drop(next(iter(self._unproven)))
        self._ends.add(end)
        self._unproven[end] = None
        self._watch(end)

    def _shake_hands(self, end: SecureEnd) -> None:
        try:
            if end.is_admitted():
                del self._unproven[end]
                self._pair(end)
                self._pass_on(end, end.decrypted())
            self._watch(end)
            if end.other is not None:
                self._watch(end.other)
        except ssl.SSLError as error:
            self._drop(end)
            # An agent with the secret that has waited long for an answer looks, beside it, for a store without one.
            if all(unproven.host != end.host for unproven in self._unproven):
                self._log.refused_client(end.host, error)
        except OSError as error:
            self._log.dropped(error, is_full=error.errno in _FULL)
            self._drop(end)

    def _give_up_handshakes(self) -> None:
        now_s = time.monotonic()
        while (first := next(iter(self._unproven), None)) is not None and first.until_s <= now_s:
            self._drop(first)

    def _pair(self, client: End) -> None:
        """Connect a client to the store. Raises OSError: the store was closed, or no descriptor is left."""
        store = End(self._hidden.connect())
        client.other, store.other = store, client
        self._ends |= {client, store}
        self._watch(client)
        self._watch(store)

    # -- a pair of connections ------------------------------------------------------------------

    def _move(self, end: End) -> None:
        """Send what waits, and pass on what there is."""
        if end.sock.fileno() < 0:
            return  # closed by an event of its other end
        if isinstance(end, SecureEnd) and end in self._unproven:
            self._shake_hands(end)
            return
        other = end.other
        assert other is not None
        try:
            end.send()
            self._finish(end, other)
            if end.wanted & selectors.EVENT_READ:
                self._pass_on(end, end.receive())
        except OSError:  # one of the two was reset
            self._drop(end)
            return
        if end.is_over and other.is_over and not end.unsent and not other.unsent:
            self._drop(end)
            return
        self._watch(end)
        self._watch(other)

    def _pass_on(self, end: End, data: bytes) -> None:
        other = end.other
        assert other is not None
        if data:
            other.put(data)
            other.send()
        self._finish(other, end)

    def _finish(self, end: End, other: End) -> None:
        """Tell this end's peer that nothing more comes, if that is so."""
        if other.is_over and not end.unsent and not end.is_finished:
            end.finish()

    def _watch(self, end: End) -> None:
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

    def _drop(self, end: End) -> None:
        if isinstance(end, SecureEnd):
            self._unproven.pop(end, None)
        for closed in (end, end.other):
            if closed is None:
                continue
            self._ends.discard(closed)
            if closed.watched:
                self._selector.unregister(closed.sock)
                closed.watched = 0
            closed.sock.close()


def keep_other_users_out(sock: socket.socket, what: str) -> StoreRelay | None:
    """The relay for a listening socket on a loopback address; None on others, and where the system has no means."""
    if not is_loopback(sock):
        return None
    try:
        return StoreRelay(sock, what)
    except OSError as error:
        get_logger().warning(
            f"other users of this machine can connect to {what} ({error.strerror or error}): as root, modprobe "
            "tcp_diag; or give the run a network of its own: unshare -rn, then ip link set lo up"
        )
        return None


def is_loopback(sock: socket.socket) -> bool:
    """Whether only this machine can connect to a listening socket."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
