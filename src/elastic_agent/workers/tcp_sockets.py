"""The TCP sockets of a worker: which of them wait for an answer, and how often data were sent again."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator, Mapping
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
    """The number of times in a row that the oldest of them was sent again."""
    inode: int


class SocketReader:
    """Reads the TCP sockets of the workers of a node. The kernel takes milliseconds for its tables."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Read those of the workers ``pids``, by slot, in one network namespace."""
        self._pids = dict(pids)

    def read(self) -> list[tuple[int, TcpSocket]]:
        """Return the connected and connecting sockets with their slots.

        Workers that have ended, or may not be inspected, have none.
        """
        owners = {inode: slot for slot, pid in self._pids.items() for inode in _inodes(pid)}
        return [(owners[found.inode], found) for found in self._tables() if found.inode in owners]

    def _tables(self) -> Iterator[TcpSocket]:
        for pid in self._pids.values():
            with contextlib.suppress(OSError):  # it has ended: another one shows the same
                tables = tcp_tables(pid)
                for table in tables:
                    yield from parse(table)
                return


def _inodes(pid: int) -> list[int]:
    """Return the sockets of a process, of any kind."""
    with contextlib.suppress(OSError):
        return [int(found[1]) for name in open_files(pid) if (found := _SOCKET.fullmatch(name))]
    return []


def parse(table: bytes) -> list[TcpSocket]:
    """Return the sockets with a peer in a table such as /proc/net/tcp; lines that are none are skipped."""
    found: list[TcpSocket] = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        with contextlib.suppress(IndexError, ValueError, struct.error):
            host, port = _address(fields[2])
            queued = int(fields[4].partition(b":")[0], 16)
            if port:
                found.append(
                    TcpSocket(host, port, int(fields[3], 16), queued, int(fields[6], 16), int(fields[9]))
                )
    return found


def _address(text: bytes) -> tuple[str, int]:
    """Return host and port; the kernel prints an address as 32-bit numbers in the byte order of the machine."""
    digits, _, port = text.partition(b":")
    numbers = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(numbers)}I", *numbers)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(family, packed))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
