"""Keeps others away from a store: processes of this user on this machine connect, and clients with the secret.

torch's store answers every client that can connect, and workers unpickle what they find there. So the store itself
listens at another, loopback address, where only the relay can connect (:mod:`..hidden_listener`). The relay asks the
kernel whose each connection of this machine is:

    worker, 127.0.0.1:40123 ──▶ relay at 127.0.0.1:29401, 127.8.15.2:40124 ──▶ store at 127.93.7.20:29401

At a second port, it may serve clients of any machine in TLS (:mod:`elastic_agent.transport.certificates`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import math
import os
import socket
import ssl
import threading

from elastic_agent.logs import get_logger
from elastic_agent.transport.hidden_listener import HiddenListener
from elastic_agent.transport.peers import check_peers_are_told, peer_uid

from .relay_log import RelayLog
from .relay_sides import Side, prove

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
        store: str,
        secure: tuple[socket.socket, ssl.SSLContext] | None = None,
    ) -> None:
        """Begin to forward, in an event loop of its own, as the agent's may be busy.

        Args:
            public: the listening socket on a loopback address to which processes of this user connect; it becomes the
                relay's.
            store: as the log names it.
            secure: the listening socket for clients in TLS, which becomes the relay's, too, and what they have to
                prove; None: there are none.

        Raises:
            OSError: this system cannot keep others from the store; both sockets are unchanged.
        """
        self.port = int(public.getsockname()[1])
        check_peers_are_told(public.getsockname()[0], public.family)
        with contextlib.ExitStack() as opened:
            self._loop = opened.enter_context(contextlib.closing(asyncio.new_event_loop()))
            self._hidden = HiddenListener(public)
            opened.pop_all()
        self.store_listener = self._hidden.store_listener
        """For the store, which takes it over (:meth:`socket.socket.detach`)."""
        self._log = RelayLog(store, self.port if secure is None else int(secure[0].getsockname()[1]))
        self._closing = asyncio.Event()
        self._sides: set[Side] = set()
        """The connections that are open, two for each client that was admitted."""
        self._admissions: dict[asyncio.Task[None], str] = {}
        """Clients that have not shown yet whose they are, or that they have the secret; the earliest first.

        Each with its address, if it is to show the latter.
        """
        self._proved_s: dict[str, float] = {}
        """When a client at this address has last shown that it has the secret."""
        self._listeners: dict[socket.socket, ssl.SSLContext | None] = {public: None}
        """Each with what clients have to prove there; None: whose processes they are."""
        if secure is not None:
            self._listeners[secure[0]] = secure[1]
        for listener in self._listeners:
            listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="store relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, when the store has been closed. The ports are free when this returns."""
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            for listener in self._listeners:
                listener.close()
            self._hidden.close()

    async def _serve(self) -> None:
        for listener in self._listeners:
            self._listen(listener)
        await self._closing.wait()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        # Those accepted last begin: a task that never began would not close its client.
        await asyncio.sleep(0)
        for admission in self._admissions:
            admission.cancel()
        while self._admissions or self._sides:
            for side in self._sides:
                if side.transport is not None:
                    side.transport.abort()
            await asyncio.sleep(0)

    def _listen(self, listener: socket.socket) -> None:
        if not self._closing.is_set():
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, address = listener.accept()
        except OSError as error:
            if self._dropped(error):
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._listen, listener)
            return
        client.setblocking(False)
        if len(self._admissions) >= MOST_UNPROVEN:
            oldest = next(iter(self._admissions))
            del self._admissions[oldest]
            oldest.cancel()
        host = str(address[0]).removeprefix("::ffff:")
        context = self._listeners[listener]
        admission = self._loop.create_task(self._admit(client, host, context))
        self._admissions[admission] = host if context is not None else ""
        admission.add_done_callback(lambda ended: self._admissions.pop(ended, None))

    def _dropped(self, error: OSError) -> bool:
        """Note that a connection was not admitted; return whether this process has no descriptor left."""
        is_full = error.errno in _FULL
        self._log.dropped(error, is_full=is_full)
        return is_full

    async def _admit(self, client: socket.socket, host: str, context: ssl.SSLContext | None) -> None:
        is_admitted = False
        try:
            if context is not None:
                async with asyncio.timeout(HANDSHAKE_S):
                    side: Side = await prove(client, context, self._sides)
                self._proved_s[host] = self._loop.time()
            elif self._is_own(client):
                side = Side(self._sides)
            else:
                return
            await self._pair(client, side)
            is_admitted = True
        except ssl.SSLError as error:
            may_have_secret = _has_hung_up(client) or self._has_other_handshake(host)
            self._log.refused_client(host, error, may_have_secret=may_have_secret)
        except OSError as error:  # the client is gone, or no descriptor is left
            self._dropped(error)
        finally:
            if not is_admitted:
                client.close()

    def _has_other_handshake(self, host: str) -> bool:
        """Return whether another client at this address is showing that it has the secret, or just did."""
        this = asyncio.current_task()
        if any(address == host for admission, address in self._admissions.items() if admission is not this):
            return True
        return self._loop.time() - self._proved_s.get(host, -math.inf) < HANDSHAKE_S

    def _is_own(self, client: socket.socket) -> bool:
        """Return whether a client is a process of this user; another one is reported."""
        uid = peer_uid(client)
        if uid is not None and uid != os.geteuid():  # None: its other end is closed
            self._log.refused_user(uid)
        return uid == os.geteuid()

    async def _pair(self, client: socket.socket, side: Side) -> None:
        """Connect a client to the store. Raises OSError: the store was closed, or no descriptor is left."""
        loop, store = asyncio.get_running_loop(), Side(self._sides)
        side.other, store.other = store, side
        hidden = self._hidden.connect()
        hidden.setblocking(False)
        for sock in (client, hidden):  # asyncio does so only for sockets that name their protocol
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.connect_accepted_socket(lambda: store, hidden)
        await loop.connect_accepted_socket(lambda: side, client)


def _has_hung_up(client: socket.socket) -> bool:
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def keep_other_users_out(sock: socket.socket, store: str) -> StoreRelay | None:
    """Return the relay for a listening socket on loopback; None on others, and where the system has no means."""
    if not is_loopback(sock):
        return None
    try:
        return StoreRelay(sock, store)
    except OSError as error:
        get_logger().warning(
            f"other users of this machine can connect to {store} ({error.strerror or error}): as root, modprobe "
            "tcp_diag; or give the run a network of its own: unshare -rn, then ip link set lo up"
        )
        return None


def is_loopback(sock: socket.socket) -> bool:
    """Return whether only this machine can connect to a listening socket."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback
