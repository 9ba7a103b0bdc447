"""Tests connections between machines, and finds which machine or which pair is behind a firewall.

On ephemeral ports, as gloo and NCCL make them. Whether large packets arrive, the all-reduce shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import random
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct

from elastic_agent.agent.preflight import Finding, error
from elastic_agent.printable import listed
from elastic_agent.values import Endpoint, PortRange

CONNECT_S = 3.5
"""Long enough for two lost packets (the system repeats after 1 and after 3 s)."""
ANSWER_S = 3.0
TEST_S = CONNECT_S + ANSWER_S
"""The time that a test may take."""
RETRY_S = 0.2
ALL_PAIRS_UP_TO = 32
"""Machines; of more, each one connects to its neighbour and to some others at random."""
RANDOM_PAIRS = 8
_HELLO = b"elastic-agent-doctor\n"
ANY, RANGED = "an ephemeral port", "a port of --port-range"
"""The kinds of ports that are tested."""


class Problem(enum.StrEnum):
    """The problem with which a test connection ended."""

    REJECTED = "rejected"
    """Refused, although the other machine listens: by a firewall, or another machine has the address."""
    DROPPED = "dropped"
    """No answer."""
    UNROUTED = "no-route"
    NO_ANSWER = "no-answer"
    """Connected, but a message was not answered."""


class Place(Struct, frozen=True):
    """Where a machine answers test connections."""

    address: str
    ports: dict[str, int]
    """By their kinds, :data:`ANY` and :data:`RANGED`; no ranged one: none is free, or there is no range."""


class Connection(Struct, frozen=True):
    """A test connection to the machine of a rank."""

    to: int
    port: str = ANY
    """The kind of its port."""
    problem: Problem | None = None
    detail: str = ""


class EchoServer:
    """Answers test connections of the other machines."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []

    async def listen(self, address: str, ports: PortRange | None) -> Place:
        """Listen on an ephemeral port, and on one of ``ports``.

        Args:
            address: this machine's, for the others.
            ports: of ``--port-range``.

        Raises:
            OSError: there is no free ephemeral port.
        """
        place = Place(address, {ANY: await self._listen(0)})
        for port in ports or ():
            with contextlib.suppress(OSError):
                place.ports[RANGED] = await self._listen(port)
                break
        return place

    async def _listen(self, port: int) -> int:
        dual = socket.has_dualstack_ipv6()
        family, address = (socket.AF_INET6, "::") if dual else (socket.AF_INET, "0.0.0.0")
        sock = socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=512)
        self._servers.append(await asyncio.start_server(_echo, sock=sock))
        return int(sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening; connections in progress end by themselves."""
        for server in self._servers:
            server.close()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
        async with asyncio.timeout(ANSWER_S):
            if await reader.readexactly(len(_HELLO)) == _HELLO:
                writer.write(_HELLO)
                await writer.drain()
                await reader.read(1)  # until the other side closes: a reset could overtake the data
    writer.close()


def targets(me: int, size: int) -> list[int]:
    """Return the ranks that this one connects to: all; of more than 32, its neighbour and eight at random."""
    others = [rank for rank in range(size) if rank != me]
    if size <= ALL_PAIRS_UP_TO:
        return others
    return list(dict.fromkeys(((me + 1) % size, *random.Random(me).sample(others, RANDOM_PAIRS))))


async def connect_to_all(places: Mapping[int, Place]) -> list[Connection]:
    """Test connections to all of these machines at once; they are given by their ranks."""
    ports = [(rank, kind, port) for rank, place in places.items() for kind, port in place.ports.items()]
    ended = await asyncio.gather(*(_test(places[rank].address, port) for rank, _, port in ports))
    return [Connection(rank, kind, *problem) for (rank, kind, _), problem in zip(ports, ended, strict=True)]


async def _test(address: str, port: int) -> tuple[Problem | None, str]:
    """Connect, and have a message answered; return the problem and its detail."""
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(address, port)
    except OSError as failure:
        return _connect_problem(failure)
    with contextlib.closing(writer):
        try:
            async with asyncio.timeout(ANSWER_S):
                writer.write(_HELLO)
                await reader.readexactly(len(_HELLO))
        except (OSError, asyncio.IncompleteReadError):
            return Problem.NO_ANSWER, ""
    return None, ""


async def closed_ports(places: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Return those at which no program accepts a connection; one may be just starting there."""
    accept = await asyncio.gather(*(_accepts(host, port) for host, port in places))
    return tuple(str(Endpoint(*place)) for place, accepts in zip(places, accept, strict=True) if not accepts)


async def _accepts(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        async with asyncio.timeout(CONNECT_S):
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    (await asyncio.open_connection(host, port))[1].close()
                    return True
                await asyncio.sleep(RETRY_S)
    return False


def _connect_problem(failure: OSError) -> tuple[Problem, str]:
    number = failure.errno  # None: the time-out ended
    if number == errno.ECONNREFUSED:
        return Problem.REJECTED, "connection refused"
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM, errno.ECONNRESET):
        return Problem.UNROUTED, (failure.strerror or "").lower()
    if number is not None and number != errno.ETIMEDOUT:
        return Problem.UNROUTED, (failure.strerror or str(failure)).lower()
    return Problem.DROPPED, f"no answer within {CONNECT_S:g} s"


# -- what the tests mean --------------------------------------------------------------------------

Edge = tuple[int, int]
"""The ranks of two machines: from, to."""

_OPEN = {
    ANY: "allow TCP between all machines of the run on all ports (gloo and NCCL use the ports of "
    "net.ipv4.ip_local_port_range)",
    RANGED: "allow the ports of --port-range between all machines of the run",
}
_BLOCKED = {
    Problem.REJECTED: "refused, although a program listens there: a firewall rejects it, or another machine has "
    "this address",
    Problem.DROPPED: "not answered: a firewall drops the packets",
    Problem.UNROUTED: "not possible",
    Problem.NO_ANSWER: "accepted, but nothing arrives: another program or a proxy answers",
}
_MOST_NAMED = 4


def connection_findings(
    names: Mapping[int, str], addresses: Mapping[int, str], made: Mapping[int, Sequence[Connection]]
) -> Iterator[Finding]:
    """Yield the problems of the test connections; those that share their cause in one.

    Args:
        names: of the machines, by rank.
        addresses: likewise.
        made: the connections that each machine has tested.
    """
    tested: dict[str, set[Edge]] = {}
    blocked: dict[tuple[str, Problem, str], set[Edge]] = {}
    for source, test in ((source, test) for source, tests in made.items() for test in tests):
        tested.setdefault(test.port, set()).add((source, test.to))
        if test.problem is not None:
            blocked.setdefault((test.port, test.problem, test.detail), set()).add((source, test.to))
    shown = {rank: f"{name} ({addresses[rank]})" for rank, name in names.items()}
    for (port, problem, detail), edges in blocked.items():
        reason = f" ({detail})" if problem is Problem.UNROUTED and detail else ""
        for machine, origin, target in _attributed(names, shown, edges, tested[port]):
            cause = f"TCP from {origin} to {target} on {port} is {_BLOCKED[problem]}{reason}"
            yield error("connection", cause, _OPEN[port], machine)


def _attributed(
    names: Mapping[int, str], shown: Mapping[int, str], edges: Collection[Edge], tested: Collection[Edge]
) -> Iterator[tuple[str, str, str]]:
    """Yield machine, origin and target of each problem; all that goes to or from one machine is one problem."""
    unexplained = set(edges)
    for end in (1, 0):
        for rank, name in names.items():
            every = {edge for edge in tested if edge[end] == rank}
            if len(every) > 1 and every <= set(edges) and every & unexplained:
                unexplained -= every
                here, others = shown[rank], "any other machine"
                yield (name, others, here) if end == 1 else (name, here, others)
    for origin in dict.fromkeys(edge[0] for edge in edges if edge in unexplained):
        ends = sorted(shown[edge[1]] for edge in edges if edge in unexplained and edge[0] == origin)
        yield names[origin], names[origin], listed(ends, _MOST_NAMED)
