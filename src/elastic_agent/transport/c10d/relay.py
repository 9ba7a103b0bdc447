"""Keeps others away from a store: processes of this user on this machine connect, and clients with the secret.

torch's store answers every client that can connect, and workers unpickle what they find there. So the store itself
listens at another, loopback address, where only the relay can connect (:class:`HiddenListener`). The relay asks the
kernel whose each connection of this machine is:

    worker, 127.0.0.1:40123 ──▶ relay at 127.0.0.1:29401, 127.8.15.2:40124 ──▶ store at 127.93.7.20:29401

At a second port, it may serve clients of any machine in TLS (:mod:`elastic_agent.transport.certificates`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import ipaddress
import itertools
import math
import os
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Iterator

from elastic_agent.logs import get_logger
from elastic_agent.transport.peers import check_peers_are_told, peer_uid

PAUSE_S = 0.1
"""The time for which no connections are accepted when this process has no descriptors left."""
HANDSHAKE_S = 10.0
"""The time that a client may take to show that it has the secret."""
MOST_UNPROVEN = 1024
"""The most clients that have not shown that yet; for one more, the oldest is closed."""

_CHUNK_BYTES = 1 << 18
_MOST_WARNINGS = 100
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OTHER_SECRET = ("CERTIFICATE_VERIFY_FAILED", "TLSV1_ALERT_UNKNOWN_CA")
"""OpenSSL's names for a client whose certificate was made from another secret, or that does not accept ours."""


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
        self._shown = f"{store} (port {self.port if secure is None else int(secure[0].getsockname()[1])})"
        self._closing = asyncio.Event()
        self._admissions: dict[asyncio.Task[None], None] = {}
        """Clients that have not shown yet whose they are, or that they have the secret; the earliest first."""
        self._gave_up_s: dict[str, float] = {}
        """The time at which a client at this address last hung up before it had shown that it has the secret."""
        self._warned: set[object] = set()
        """The causes that were warned of, each once, as anybody can bring them about."""
        self._sides: set[_Side] = set()
        """The connections that are open, two for each client that was admitted."""
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
                side.abort()
            await asyncio.sleep(0)

    def _listen(self, listener: socket.socket) -> None:
        if not self._closing.is_set():
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, address = listener.accept()
        except OSError as error:
            self._dropped(error)
            if error.errno in _FULL:
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._listen, listener)
            return
        client.setblocking(False)
        if len(self._admissions) >= MOST_UNPROVEN:
            oldest = next(iter(self._admissions))
            del self._admissions[oldest]
            oldest.cancel()
        host = str(address[0]).removeprefix("::ffff:")
        admission = self._loop.create_task(self._admit(client, host, self._listeners[listener]))
        self._admissions[admission] = None
        admission.add_done_callback(lambda ended: self._admissions.pop(ended, None))

    async def _admit(self, client: socket.socket, host: str, context: ssl.SSLContext | None) -> None:
        is_admitted = False
        try:
            if context is not None:
                async with asyncio.timeout(HANDSHAKE_S):
                    side: _Side = await _prove(client, context, self._sides)
            elif self._is_own(client):
                side = _Side(self._sides)
            else:
                return
            await self._pair(client, side)
            is_admitted = True
        except ssl.SSLError as error:
            self._refused(client, host, error)
        except OSError as error:  # the client is gone, or no descriptor is left
            self._dropped(error)
        finally:
            if not is_admitted:
                if context is not None and _has_hung_up(client):
                    if len(self._gave_up_s) >= MOST_UNPROVEN:  # anybody can hang up
                        self._gave_up_s.clear()
                    self._gave_up_s[host] = self._loop.time()
                client.close()

    def _is_own(self, client: socket.socket) -> bool:
        """Return whether a client is a process of this user; another one is reported."""
        uid = peer_uid(client)
        if uid is not None and uid != os.geteuid():  # None: its other end is closed
            self._warn(
                uid, f"refused a connection to {self._shown} by another user of this machine, user id {uid}"
            )
        return uid == os.geteuid()

    async def _pair(self, client: socket.socket, side: _Side) -> None:
        """Connect a client to the store. Raises OSError: the store was closed, or no descriptor is left."""
        loop, store = asyncio.get_running_loop(), _Side(self._sides)
        side.other, store.other = store, side
        hidden = self._hidden.connect()
        hidden.setblocking(False)
        for sock in (client, hidden):  # asyncio does so only for sockets that name their protocol
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.connect_accepted_socket(lambda: store, hidden)
        await loop.connect_accepted_socket(lambda: side, client)

    # -- the log --------------------------------------------------------------------------------

    def _refused(self, client: socket.socket, host: str, error: ssl.SSLError) -> None:
        """Warn that a client did not prove that it has the secret, unless it has only hung up, or had before.

        An agent with the secret that gets no answer in time looks next whether the store has none.
        """
        has_other = error.reason in _OTHER_SECRET
        may_look = self._loop.time() < self._gave_up_s.get(host, -math.inf) + HANDSHAKE_S
        if has_other or not (may_look or _has_hung_up(client)):
            why = "it has another secret" if has_other else "it has no secret"
            self._warn(
                host,
                f"refused a connection to {self._shown} from {host}: {why}; start every agent with the same "
                "--secret-file",
            )

    def _dropped(self, error: OSError) -> None:
        """Note that a connection broke before it was admitted."""
        if error.errno in _FULL:
            self._warn(
                "full",
                f"{self._shown} cannot accept more connections at present: {error.strerror}; raise the limit of open "
                "files to four for each worker of the run and 100 more (ulimit -n; in a service LimitNOFILE)",
            )
        get_logger().debug(f"a connection to {self._shown} was dropped", error=str(error))

    def _warn(self, cause: object, text: str) -> None:
        if cause not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(cause)
            get_logger().warning(text)


class _Side(asyncio.Protocol):
    """One of two connections that belong together: what it receives is sent on the other one."""

    other: _Side
    """Set before either is connected."""

    def __init__(self, sides: set[_Side]) -> None:
        """``sides``: those that are open, where this one is entered."""
        self._sides = sides
        self.transport: asyncio.Transport | None = None

    def send(self, data: bytes) -> None:
        """Have this sent."""
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        """Close the connection, whatever is left to send."""
        if self.transport is not None:
            self.transport.abort()

    # -- called by the loop ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._sides.add(self)
        if self.other.transport is not None and self.other.transport.is_closing():
            transport.close()

    def data_received(self, data: bytes) -> None:
        self.other.send(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._sides.discard(self)
        if self.other.transport is not None:
            self.other.transport.close()


class _SecureSide(_Side):
    """A connection in TLS, whose client has shown that it has the secret."""

    def __init__(
        self, sides: set[_Side], tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
    ) -> None:
        """See :func:`_prove`."""
        super().__init__(sides)
        self._tls, self._incoming, self._outgoing = tls, incoming, outgoing

    def send(self, data: bytes) -> None:
        """Have this encrypted and sent."""
        self._tls.write(data)
        super().send(self._outgoing.read())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.data_received(b"")  # what came with the last message of the handshake

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        assert self.transport is not None
        try:
            while decrypted := self._tls.read(_CHUNK_BYTES):
                self.other.send(decrypted)
        except ssl.SSLWantReadError:
            self.transport.write(self._outgoing.read())
        except ssl.SSLError:
            self.transport.abort()
        else:  # the client has closed its side
            self.transport.close()


async def _prove(client: socket.socket, context: ssl.SSLContext, sides: set[_Side]) -> _SecureSide:
    """Shake hands; when this returns, the client has shown that it has the secret.

    (asyncio's own TLS does not send a refused client the alert that says why.)

    Raises:
        ssl.SSLError: it has not.
        OSError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            return _SecureSide(sides, tls, incoming, outgoing)
        finally:
            with contextlib.suppress(OSError):  # receiving shows it, too
                await loop.sock_sendall(client, outgoing.read())
        data = await loop.sock_recv(client, _CHUNK_BYTES)
        if not data:
            raise ConnectionResetError
        incoming.write(data)


def _has_hung_up(client: socket.socket) -> bool:
    try:
        return not client.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def keep_other_users_out(sock: socket.socket, store: str) -> StoreRelay | None:
    """Return the relay for a listening socket on loopback; None on others, and where the system has no means."""
    if not ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback:
        return None
    try:
        return StoreRelay(sock, store)
    except OSError as error:
        get_logger().warning(
            f"other users of this machine can connect to {store} ({error.strerror or error}): as root, modprobe "
            "tcp_diag; or give the run a network of its own: unshare -rn, then ip link set lo up"
        )
        return None


# -- the hidden listener ---------------------------------------------------------------------------

BACKLOG = 4096
CONNECT_S = 0.5

_TRIES = 8

_SO_ATTACH_REUSEPORT_CBPF = 51
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_HALF, _LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x30, 0x15, 0x06
_IP_HEADER = 0xFFF00000
"""The offset at which loads find it (SKF_NET_OFF)."""
_VERSION_4_WITHOUT_OPTIONS = 0x45
_SOURCE, _SOURCE_PORT = 12, 20
"""From the beginning of an IP header without options."""
_LOOPBACK_NETWORK = 127
_DECOY, _STORE = 0, 1
"""The sockets of an address are numbered in the order in which they begin to listen."""

_FIRST_ADDRESS, _ADDRESSES = 0x7F010000, 0xFDFFFF
"""127.1.0.0 to 127.254.255.254: none of those that programs usually listen at."""


class HiddenListener:
    """A listening socket on the loopback interface that only its owner can connect to; needs no privileges (Linux 4.5).

    Two sockets listen at the same address. A program in the kernel (``SO_ATTACH_REUSEPORT_CBPF``) gives the second
    one, the store's, what comes from the port of a third socket, and everything else to the first one, the decoy,
    which nobody reads. The third socket is bound to its port on all addresses: so no other user gets that port, by
    bind() or by connect(), and the owner binds its connections to that port on one loopback address after another.

    A filter on the listening socket itself (``SO_ATTACH_FILTER``) would be simpler, but newer kernels refuse those
    on TCP sockets to processes without CAP_NET_ADMIN.
    """

    def __init__(self, public: socket.socket) -> None:
        """Listen at a random loopback address, at the port of ``public``, which may listen on all addresses.

        Raises:
            OSError: this kernel cannot do it, or the port is in use on the loopback interface.
        """
        with contextlib.ExitStack() as opened:
            self._held = opened.enter_context(_shareable())
            self._held.bind(("0.0.0.0", 0))
            self._sources = itertools.count(secrets.randbelow(_ADDRESSES))
            self._decoy, self.store_listener = self._listen(public)
            opened.pop_all()

    def _listen(self, public: socket.socket) -> tuple[socket.socket, socket.socket]:
        port = int(public.getsockname()[1])
        for _ in range(_TRIES):
            address = _loopback_address(secrets.randbelow(_ADDRESSES)), port
            with contextlib.ExitStack() as opened:
                decoy, store = opened.enter_context(_shareable()), opened.enter_context(_shareable())
                try:
                    with _port_shared(public):
                        decoy.bind(address)
                        decoy.listen(1)
                        _choose_by_source_port(decoy, int(self._held.getsockname()[1]))
                        store.bind(address)
                        store.listen(BACKLOG)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    opened.pop_all()
                    return decoy, store
        raise OSError(errno.EADDRINUSE, f"port {port} is in use on the loopback interface")

    def connect(self) -> socket.socket:
        """Connect to the store's socket.

        Raises:
            OSError: the store is closed, or no descriptor is left.
        """
        sock = _shareable()
        sock.settimeout(CONNECT_S)  # without the store, the decoy gets the connections, and takes few
        try:
            sock.bind((_loopback_address(next(self._sources)), self._held.getsockname()[1]))
            sock.connect(self._decoy.getsockname())
        except OSError:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Close all sockets, after the store was closed: without the decoy, it would get all connections."""
        for sock in (self.store_listener, self._decoy, self._held):
            sock.close()


def _choose_by_source_port(decoy: socket.socket, port: int) -> None:
    program = (
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_JUMP_IF_EQUAL, 0, 5, _VERSION_4_WITHOUT_OPTIONS),
        (_LOAD_BYTE, 0, 0, _IP_HEADER + _SOURCE),
        (_JUMP_IF_EQUAL, 0, 3, _LOOPBACK_NETWORK),
        (_LOAD_HALF, 0, 0, _IP_HEADER + _SOURCE_PORT),
        (_JUMP_IF_EQUAL, 0, 1, port),
        (_RETURN, 0, 0, _STORE),
        (_RETURN, 0, 0, _DECOY),
    )
    code = ctypes.create_string_buffer(b"".join(itertools.starmap(_INSTRUCTION.pack, program)))
    decoy.setsockopt(
        socket.SOL_SOCKET,
        _SO_ATTACH_REUSEPORT_CBPF,
        struct.pack("@HP", len(program), ctypes.addressof(code)),
    )


def _shareable() -> socket.socket:
    """Make a socket whose address other sockets of this user may have, too."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


@contextlib.contextmanager
def _port_shared(sock: socket.socket) -> Iterator[None]:
    """Let it listen on all addresses and others on one of these, meanwhile."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)


def _loopback_address(number: int) -> str:
    return socket.inet_ntoa((_FIRST_ADDRESS + number % _ADDRESSES).to_bytes(4, "big"))
