"""Linux: which user a TCP connection within this machine comes from."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST, _NLMSG_ERROR = 1, 2
_ALL_STATES = _NO_COOKIE = 0xFFFFFFFF
_ESTABLISHED = 1
_ANSWER_S = 1.0
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_INTERFACE_AND_COOKIE = struct.Struct("=III")
_UID = struct.Struct("=I")
_STATE_AT, _UID_AT = _HEADER.size + 1, _HEADER.size + 4 + 48 + 12
"""In an inet_diag_msg: after family, state, timer, retransmissions; the socket's id; expiry and two queues."""


def peer_uid(connection: socket.socket) -> int | None:
    """Return the user who has the other end of a TCP connection; None if it is closed, or not of this machine.

    The kernel is asked for the one socket (sock_diag(7)): its table in /proc takes it milliseconds.

    Raises:
        OSError: the kernel does not answer, or the connection was reset.
    """
    uid = _owner(connection.family, connection.getpeername(), connection.getsockname())
    # Raises an error if this connection was reset: only then can a later one have the same ports, and another owner.
    connection.getpeername()
    return uid


def check_peers_are_told(host: str, family: int) -> None:
    """Have the kernel tell the user of a connection within this process.

    Raises:
        OSError: it does not; so :func:`peer_uid` is of no use here (the kernel has no inet_diag, say).
    """
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as own,
    ):
        uid = _owner(family, own.getsockname(), own.getpeername())
    if uid != os.geteuid():
        raise OSError(errno.EOPNOTSUPP, "the kernel does not tell whose a connection is (inet_diag)")


def _owner(family: int, own: tuple[str, int], peer: tuple[str, int]) -> int | None:
    """Return the user of the established socket with these ends."""
    ends = (socket.inet_pton(family, end[0].partition("%")[0]).ljust(16, b"\0") for end in (own, peer))
    body = b"".join(
        (
            _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES),
            _PORTS.pack(own[1], peer[1]),
            *ends,
            _INTERFACE_AND_COOKIE.pack(0, _NO_COOKIE, _NO_COOKIE),
        )
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_ANSWER_S)
        header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
        netlink.sendto(header + body, (0, 0))
        answer = netlink.recv(1 << 16)
    if _HEADER.unpack_from(answer)[1] == _NLMSG_ERROR:
        error = -int.from_bytes(answer[_HEADER.size : _HEADER.size + 4], sys.byteorder, signed=True)
        if error == errno.ENOENT:
            return None
        raise OSError(error, f"sock_diag: {os.strerror(error)}")
    if answer[_STATE_AT] != _ESTABLISHED:
        return None  # of a socket that no process holds any more, the kernel gives root as the user
    return int(_UID.unpack_from(answer, _UID_AT)[0])
