"""What the test connections between machines mean: which machine or which pair is behind a firewall."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .findings import Finding, error
from .pairs import Problem
from .records import Attendance, Connection

Edge = tuple[str, str]
"""The ids of two machines: from, to."""

_CAUSES = {
    Problem.REJECTED: "refused, although a program listens there: a firewall rejects it, or another machine has "
    "this address",
    Problem.DROPPED: "not answered: a firewall drops the packets",
    Problem.UNROUTED: "not possible",
    Problem.NO_ANSWER: "accepted, but nothing arrives: another program or a proxy answers",
}
_OPEN = (
    "allow TCP between all machines of the run on all ports (gloo and NCCL use the ports of "
    "net.ipv4.ip_local_port_range)"
)
_OPEN_RANGE = "allow the ports of --port-range between all machines of the run"
_SAME_MTU = (
    "set the same MTU on all interfaces and switches between them (test: ping -M do -s SIZE), or allow ICMP "
    '"fragmentation needed"'
)
_MOST_NAMED = 4


def connection_findings(
    machines: Mapping[str, Attendance], made: Mapping[str, Sequence[Connection]]
) -> Iterator[Finding]:
    """Yield the problems of the test connections; those that share their cause in one.

    Args:
        machines: by id.
        made: the connections that each machine has tested, by its id.
    """
    tests = [(source, one) for source, each in made.items() for one in each if one.to in machines]
    for is_ranged in (False, True):
        some = [(source, one) for source, one in tests if one.is_ranged is is_ranged]
        yield from _blocked(machines, some, is_ranged)
    yield from _lost(machines, tests)


def _blocked(
    machines: Mapping[str, Attendance], tests: Sequence[tuple[str, Connection]], is_ranged: bool
) -> Iterator[Finding]:
    """Yield connections that could not be made."""
    tested = {(source, one.to) for source, one in tests}
    failed: dict[tuple[str, str], set[Edge]] = {}
    for source, one in tests:
        if one.problem in _CAUSES:
            failed.setdefault((one.problem, one.detail), set()).add((source, one.to))
    port = "a port of --port-range" if is_ranged else "an ephemeral port"
    for (problem, detail), edges in failed.items():
        reason = f" ({detail})" if problem == Problem.UNROUTED and detail else ""
        for machine, origin, target in _attributed(machines, edges, tested):
            yield error(
                "connection",
                f"TCP from {origin} to {target} on {port} is {_CAUSES[Problem(problem)]}{reason}",
                _OPEN_RANGE if is_ranged else _OPEN,
                machine,
            )


def _lost(machines: Mapping[str, Attendance], tests: Sequence[tuple[str, Connection]]) -> Iterator[Finding]:
    """Yield large messages that did not arrive, although small ones did."""
    lost, tested = set(), set()
    for source, one in tests:
        if one.problem == Problem.LARGE_LOST:
            lost.add((source, one.to))
        elif one.problem == Problem.LARGE_LOST_BACK:
            lost.add((one.to, source))
        if one.problem not in _CAUSES:
            tested |= {(source, one.to), (one.to, source)}
    for machine, origin, target in _attributed(machines, lost, tested):
        yield error(
            "large-messages",
            f"64 kB from {origin} to {target} are lost, although small messages arrive: large packets are dropped "
            "on the way",
            _SAME_MTU,
            machine,
        )


def _attributed(
    machines: Mapping[str, Attendance], edges: Collection[Edge], tested: Collection[Edge]
) -> Iterator[tuple[str, str, str]]:
    """Yield machine, origin and target of each problem; all that goes to or from one machine is one problem."""
    left = set(edges)
    for end in (1, 0):
        for member in machines:
            every = {edge for edge in tested if edge[end] == member}
            if len(every) > 1 and every <= set(edges) and every & left:
                left -= every
                other, this = "any other machine", _shown(machines[member])
                yield machines[member].machine, *((other, this) if end == 1 else (this, other))
    for origin in dict.fromkeys(edge[0] for edge in edges if edge in left):
        names = [_shown(machines[edge[1]]) for edge in edges if edge in left and edge[0] == origin]
        shown = ", ".join(sorted(names)[:_MOST_NAMED]) + (" ..." if len(names) > _MOST_NAMED else "")
        yield machines[origin].machine, machines[origin].machine, shown


def _shown(machine: Attendance) -> str:
    return f"{machine.machine} ({machine.address})"
