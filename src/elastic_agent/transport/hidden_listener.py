"""A listening socket on the loopback interface that only its owner can connect to; needs no privileges (Linux 4.5).

Two sockets listen at the same address. A program in the kernel (``SO_ATTACH_REUSEPORT_CBPF``) gives the second one,
the store's, what comes from the port of a third socket, and everything else to the first one, the decoy, which nobody
reads. The third socket is bound to its port on all addresses: so no other user gets that port, by bind() or by
connect(), and the owner binds its connections to that port on one loopback address after another.

A filter on the listening socket itself (``SO_ATTACH_FILTER``) would be simpler, but newer kernels refuse those on TCP
sockets to processes without CAP_NET_ADMIN.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import secrets
import socket
import struct
from collections.abc import Iterator

BACKLOG = 4096
CONNECT_S = 0.5

_TRIES = 8

_SO_ATTACH_REUSEPORT_CBPF = 51
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_HALF, _LOAD_BYTE, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x30, 0x15, 0x06
_IP_HEADER = 0xFFF00000
"""Where loads find it (SKF_NET_OFF)."""
_VERSION_4_WITHOUT_OPTIONS = 0x45
_SOURCE, _SOURCE_PORT = 12, 20
"""From the beginning of an IP header without options."""
_LOOPBACK_NETWORK = 127
_DECOY, _STORE = 0, 1
"""The sockets of an address are numbered in the order in which they begin to listen."""

_FIRST_ADDRESS, _ADDRESSES = 0x7F010000, 0xFDFFFF
"""127.1.0.0 to 127.254.255.254: none of those that programs usually listen at."""


class HiddenListener:
    """Keeps all connections from the store's socket but those of :meth:`connect`."""

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
