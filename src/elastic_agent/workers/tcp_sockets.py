"""The TCP sockets of a worker: which of them wait for an answer, and how often data were sent again."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from dataclasses import dataclass

from elastic_agent.linux import open_files, tcp_tables

ESTABLISHED, SYN_SENT = 1, 2
"""States of a socket in the kernel's tables."""

_SOCKET = re.compile(r"socket:\[([0-9]+)\]")


@dataclass(frozen=True)
class TcpSocket:
    """One socket with a peer, as /proc/net/tcp has it."""

    remote_host: str
    remote_port: int
    state: int
    unacknowledged: int
    """Bytes that were not acknowledged yet, or are still to be sent."""
    retransmits: int
    """How often in a row the oldest of them was sent again."""
    inode: int


def sockets_of(pid: int) -> list[TcpSocket]:
    """The connected and connecting TCP sockets of a process; empty if it has ended or may not be inspected."""
    with contextlib.suppress(OSError):
        inodes = {int(found[1]) for name in open_files(pid) if (found := _SOCKET.fullmatch(name))}
        if inodes:
            return [one for table in tcp_tables(pid) for one in parse(table) if one.inode in inodes]
    return []


def parse(table: bytes) -> list[TcpSocket]:
    """The sockets with a peer in a table such as /proc/net/tcp; lines that are none are skipped."""
    found: list[TcpSocket] = []
    for line in table.splitlines()[1:]:
        words = line.split()
        with contextlib.suppress(IndexError, ValueError, struct.error):
            host, port = _address(words[2])
            queued = int(words[4].partition(b":")[0], 16)
            if port:
                found.append(
                    TcpSocket(host, port, int(words[3], 16), queued, int(words[6], 16), int(words[9]))
                )
    return found


def _address(text: bytes) -> tuple[str, int]:
    """The kernel prints an address as 32-bit numbers in the byte order of the machine."""
    digits, _, port = text.partition(b":")
    numbers = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(numbers)}I", *numbers)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(family, packed))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
