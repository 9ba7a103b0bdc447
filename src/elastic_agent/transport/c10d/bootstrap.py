"""Bootstrap stores: a fresh store for each generation, where its workers initialise their process group."""

from __future__ import annotations

import errno
import math
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from elastic_agent.protocol import Address
from elastic_agent.transport.addresses import connect, is_loopback_name, listen
from elastic_agent.transport.base import TransportError, UnreachableError
from elastic_agent.transport.name_lookups import no_dns_queries
from elastic_agent.transport.sealing import Seal, Secret

from .responder import Responder, check_users_are_told
from .store import one_line
from .store_relay import StoreRelay, is_loopback, keep_other_users_out
from .wire import probe_store

MAX_TRIES = 64

MOST_OPEN_FILES = 65536

_WHAT = "the bootstrap store of the workers"


class PortPicker:
    """Chooses ports that have not been used for a while.

    Workers of an old generation that were paused with their whole host must not find a later generation's
    store on the port they know; a port that no other host's workers know can be reused at once. Ports of a range
    are taken in turn, from a random one on, so that a restarted agent, which has no record of them, most likely
    takes others than before.
    """

    def __init__(
        self, ports: Iterable[int] | None, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``ports``: those allowed, None for any; ``rest_s``: for how long a port is not reused."""
        self._ports = list(ports) if ports is not None else None
        self._rest_s = rest_s
        self._clock = clock
        self._next = secrets.randbelow(len(self._ports)) if self._ports else 0
        self._rests_until: dict[int, float] = {}
        self._lock = threading.Lock()

    def listen(self, host: str) -> socket.socket:
        """A listening socket on a rested port, which is in use until :meth:`released`.

        Raises:
            TransportError: no allowed port is free.
        """
        with self._lock:
            now_s = self._clock()
            self._rests_until = {port: end for port, end in self._rests_until.items() if end > now_s}
            for candidate in self._candidates():
                sock = _try_to_listen(host, candidate)
                if sock is None:
                    continue
                port = int(sock.getsockname()[1])
                if port not in self._rests_until:
                    self._rests_until[port] = math.inf
                    return sock
                sock.close()
        raise TransportError(self._nothing_left())

    def _candidates(self) -> Iterator[int]:
        if self._ports is None:
            yield from [0] * MAX_TRIES
            return
        for _ in self._ports:
            candidate = self._ports[self._next]
            self._next = (self._next + 1) % len(self._ports)
            if candidate not in self._rests_until:
                yield candidate

    def _nothing_left(self) -> str:
        if self._ports is None:
            return "no free port for a bootstrap store: all ephemeral ports of the system are in use"
        in_use = sum(end == math.inf for end in self._rests_until.values())
        resting = len(self._rests_until) - in_use
        requested = f"{self._ports[0]}:{self._ports[-1]}" if self._ports else "an empty range"
        return (
            f"no port of {requested} is free for a bootstrap store: {in_use} in use, {resting} not reused "
            f"until {self._rest_s:g} s after use, {len(self._ports) - in_use - resting} held by other "
            "programs; widen port_range"
        )

    def released(self, port: int, *, rests: bool = True) -> None:
        """The port is not used any more: it rests from now on, or is free again at once."""
        with self._lock:
            if port in self._rests_until:
                self._rests_until[port] = self._clock() + (self._rest_s if rests else 0.0)


def _try_to_listen(host: str, port: int) -> socket.socket | None:
    """None if another program has the port."""
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise TransportError(f"cannot listen on port {port}: {error.strerror}") from None


class BootstrapStore:
    """A TCPStore server that was never used before."""

    def __init__(
        self, store: TCPStore, address: Address, ports: PortPicker, relay: StoreRelay | None = None
    ) -> None:
        self._store: TCPStore | None = store
        self._relay = relay
        self._ports = ports
        self.address = address
        """Where workers dial it."""
        self.rests = True
        """Whether its port is not used again for a while: workers of other machines may know it."""

    @classmethod
    def open(cls, local_address: str, ports: PortPicker, seal: Seal | None = None) -> BootstrapStore:
        """Serve a new store under ``local_address``; on a loopback address, for processes of this user only.

        Args:
            local_address: of this machine.
            ports: which port to use.
            seal: of the run (:func:`bootstrap_seal`), if its agents share a secret: then the store is served, on other
                addresses too, to processes of this user and of the users of the other agents only.

        Raises:
            TransportError: no port is free, or the store cannot be made.
        """
        sock = ports.listen(local_address)
        port = int(sock.getsockname()[1])
        relay = None
        try:
            relay = _relay(sock, seal)
            store = serve(sock if relay is None else relay.store_listener, own_address(sock))
        except (RuntimeError, TransportError) as error:
            if relay is not None:
                relay.close()
            sock.close()
            ports.released(port, rests=False)
            raise TransportError(f"cannot start a bootstrap store: {one_line(error)}") from None
        return cls(store, Address(local_address, port), ports, relay)

    def close(self) -> None:
        """Stop serving; connected workers lose it."""
        if self._store is not None:
            self._store = None
            if self._relay is not None:
                self._relay.close()
            self._ports.released(self.address.port, rests=self.rests)


def _relay(sock: socket.socket, seal: Seal | None) -> StoreRelay | None:
    """What keeps others from the store that is to be served at this socket; None: nothing.

    Raises:
        TransportError: the run has a secret, and this machine has no means to keep others from the store.
    """
    if seal is None or is_loopback(sock):
        return keep_other_users_out(sock, _WHAT)
    check_users_are_told()
    allow_many_connections()
    try:
        return StoreRelay(sock, _WHAT, seal)
    except OSError as error:
        raise TransportError(
            f"with a secret, it has to be kept from others, and this machine has no means for that ({error})"
        ) from None


def bootstrap_seal(secret: Secret, run_id: str) -> Seal:
    """The seal of what agents say about connections to the bootstrap stores of a run."""
    return secret.seal(b"bootstrap stores of run " + run_id.encode())


def serve(sock: socket.socket, address: str | None = None) -> TCPStore:
    """A TCPStore server on a listening socket, which becomes the store's.

    ``address``: where the server's own client connects, at the port of the socket; None: to the socket.
    """
    address, port = address or own_address(sock), int(sock.getsockname()[1])
    limit = timedelta(seconds=30)
    with no_dns_queries():  # the server dials itself, too
        return TCPStore(
            address,
            port,
            None,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=sock.detach(),
            use_libuv=True,
        )


def own_address(sock: socket.socket) -> str:
    """How this process itself reaches its listening socket."""
    address = str(sock.getsockname()[0])
    return "127.0.0.1" if address in ("0.0.0.0", "::") else address  # "::" takes IPv4 too, see listen()


def allow_many_connections() -> None:
    """Every node holds three connections to the host; the usual limit of 1024 open files would end at 340 nodes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def join_bootstrap(address: Address, seal: Seal | None, timeout_s: float) -> Responder | None:
    """Check that a bootstrap store answers, and have it admit this machine's workers.

    Returns:
        What has to stay open while workers connect. None: nothing; the store admits everything that can connect, or
        this machine alone.

    Raises:
        TransportError: it does not answer, or does not have the seal of the run; the message is one line.
    """
    if seal is not None and not is_loopback_name(address.host):
        return Responder(address, seal, timeout_s)
    dial_bootstrap(address, timeout_s)
    return None


def dial_bootstrap(address: Address, timeout_s: float) -> None:
    """Check that a store answers at a bootstrap store's address.

    Raises:
        TransportError: none does; the message is one line.
    """
    try:
        sock = connect(address.host, address.port, timeout_s)
    except UnreachableError as error:
        raise TransportError(f"{address}: {error}") from None
    with sock:
        probe_store(sock, timeout_s, str(address))
