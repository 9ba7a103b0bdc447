"""Bootstrap stores: a fresh store for each generation, where its workers initialise their process group."""

from __future__ import annotations

import errno
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from elastic_agent.protocol import Address
from elastic_agent.transport.addresses import listen
from elastic_agent.transport.base import TransportError

from .relay import StoreRelay, keep_other_users_out
from .server_process import ServeStore, serve_here

MAX_TRIES = 64

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
        """Return a listening socket on a rested port, which is in use until :meth:`released`.

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
        """Let a port that is not used any more rest from now on, or free it at once."""
        with self._lock:
            if port in self._rests_until:
                self._rests_until[port] = self._clock() + (self._rest_s if rests else 0.0)


def _try_to_listen(host: str, port: int) -> socket.socket | None:
    """Return a listening socket; None if another program has the port."""
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return None
        raise TransportError(f"cannot listen on port {port}: {error.strerror}") from None


class BootstrapStore:
    """A TCPStore server that was never used before."""

    def __init__(
        self, close: Callable[[], None], address: Address, ports: PortPicker, relay: StoreRelay | None = None
    ) -> None:
        self._close: Callable[[], None] | None = close
        self._relay = relay
        self._ports = ports
        self.address = address
        """The address at which workers dial it."""
        self.rests = True
        """True if its port is not used again for a while: workers of other machines may know it."""

    @classmethod
    def open(
        cls,
        local_address: str,
        ports: PortPicker,
        serve: ServeStore = serve_here,
    ) -> BootstrapStore:
        """Serve a new store under ``local_address``; on a loopback address, for processes of this user only.

        On another address, it is served to everybody who can connect, as under torchrun.

        Args:
            local_address: of this machine.
            ports: which port to use.
            serve: serves the store.

        Raises:
            TransportError: no port is free, or the store cannot be made.
        """
        sock = ports.listen(local_address)
        port = int(sock.getsockname()[1])
        relay = None
        try:
            relay = keep_other_users_out(sock, _WHAT)
            address = own_address(sock)
            close = serve(sock if relay is None else relay.store_listener, address)
        except TransportError as error:
            if relay is not None:
                relay.close()
            sock.close()
            ports.released(port, rests=False)
            raise TransportError(f"cannot start a bootstrap store: {error}") from None
        return cls(close, Address(local_address, port), ports, relay)

    def close(self) -> None:
        """Stop serving; connected workers lose it."""
        close, self._close = self._close, None
        if close is not None:
            close()
            if self._relay is not None:
                self._relay.close()
            self._ports.released(self.address.port, rests=self.rests)


def own_address(sock: socket.socket) -> str:
    """Return how this process itself reaches its listening socket."""
    address = str(sock.getsockname()[0])
    return "127.0.0.1" if address in ("0.0.0.0", "::") else address  # "::" takes IPv4 too, see listen()
