"""The fresh store over which the workers of one generation meet."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from elastic_agent.protocol.records import Address

from .addresses import connect, listen
from .base import TransportError, UnreachableError
from .wire import greet

MAX_TRIES = 64


class PortPicker:
    """Chooses ports that have not been used for a while.

    Workers of an old generation that were paused with their whole host must not find a later generation's
    store on the port they know.
    """

    def __init__(
        self, ports: Iterable[int] | None, rest_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``ports``: those allowed, None for any; ``rest_s``: how long a used one rests."""
        self._ports = list(ports) if ports is not None else None
        self._rest_s = rest_s
        self._clock = clock
        self._used: dict[int, float] = {}

    def listen(self, host: str) -> socket.socket:
        """A listening socket on a rested port.

        Raises:
            TransportError: no allowed port is free.
        """
        now_s = self._clock()
        self._used = {port: at for port, at in self._used.items() if now_s - at < self._rest_s}
        for candidate in self._ports if self._ports is not None else [0] * MAX_TRIES:
            if candidate in self._used:
                continue
            try:
                sock = listen(host, candidate)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise TransportError(f"cannot listen on port {candidate}: {error.strerror}") from None
            port = int(sock.getsockname()[1])
            if port in self._used:
                sock.close()
                continue
            self._used[port] = now_s
            return sock
        asked = f"{self._ports[0]}:{self._ports[-1]}" if self._ports else "the whole range"
        raise TransportError(
            f"no port of {asked} is free for a bootstrap store (one is used for each generation and rests "
            f"{self._rest_s:g} s afterwards); widen --port-range"
        )


class BootstrapStore:
    """A TCPStore server that was never used before."""

    def __init__(self, store: TCPStore, address: Address) -> None:
        self._store: TCPStore | None = store
        self.address = address
        """Where workers dial it."""

    @classmethod
    def open(cls, local_address: str, ports: PortPicker) -> BootstrapStore:
        """Serve a new store under ``local_address``.

        Raises:
            TransportError: no port is free, or the store cannot be made.
        """
        sock = ports.listen(local_address)
        port = int(sock.getsockname()[1])
        try:
            store = serve(sock)
        except RuntimeError as error:
            raise TransportError(f"cannot serve a bootstrap store: {one_line(error)}") from None
        return cls(store, Address(local_address, port))

    def close(self) -> None:
        """Stop serving; connected workers lose it."""
        self._store = None


def serve(sock: socket.socket) -> TCPStore:
    """A TCPStore server on a listening socket, which becomes the store's."""
    port = int(sock.getsockname()[1])
    own_name = "::1" if sock.family == socket.AF_INET6 and sock.getsockname()[0] == "::1" else "127.0.0.1"
    return TCPStore(
        own_name,
        port,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=sock.detach(),
    )


def dial_bootstrap(address: Address, timeout_s: float) -> None:
    """Check that a store answers at a bootstrap store's address.

    Raises:
        TransportError: none does; one line says how that shows.
    """
    try:
        sock = connect(address.host, address.port, timeout_s)
    except UnreachableError as error:
        raise TransportError(f"{address}: {error}") from None
    with sock:
        greet(sock, timeout_s, str(address))


def one_line(error: BaseException) -> str:
    """The first line of a torch error, without its C++ traceback."""
    return str(error).strip().split("\n", 1)[0][:300]
