"""What the test connections between machines mean: which machine or which pair is behind a firewall."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from .findings import Finding, error
from .pairs import Problem
from .records import Attendance, Connection

Edge = tuple[str, str]
"""The ids of two machines: from, to."""

_OPEN = (
    "allow TCP between all machines of the run on all ports (gloo and NCCL use the ports of "
    "net.ipv4.ip_local_port_range)"
)
_OPEN_RANGE = "allow the ports of --port-range between all machines of the run"
_BLOCKED = {
    Problem.REJECTED: "refused, although a program listens there: a firewall rejects it, or another machine has "
    "this address",
    Problem.DROPPED: "not answered: a firewall drops the packets",
    Problem.UNROUTED: "not possible",
    Problem.NO_ANSWER: "accepted, but nothing arrives: another program or a proxy answers",
}
_MOST_NAMED = 4


def connection_findings(
    machines: Mapping[str, Attendance], made: Mapping[str, Sequence[Connection]]
) -> Iterator[Finding]:
    """Yield the problems of the test connections; those that share their cause in one.

    Args:
        machines: by id.
        made: the connections that each machine has tested, by its id.
    """
    for is_ranged in (False, True):
        tested, arrived = set[Edge](), set[Edge]()
        blocked: dict[tuple[Problem, str], set[Edge]] = {}
        lost: set[Edge] = set()
        for source, test in ((source, test) for source, tests in made.items() for test in tests):
            edge, back = (source, test.to), (test.to, source)
            if test.to not in machines or test.is_ranged is not is_ranged:
                continue
            tested.add(edge)
            if test.problem in _BLOCKED:
                blocked.setdefault((Problem(test.problem), test.detail), set()).add(edge)
                continue
            arrived |= {edge, back}
            if test.problem:
                lost.add(edge if test.problem == Problem.LARGE_LOST else back)
        port = "a port of --port-range" if is_ranged else "an ephemeral port"
        for (problem, detail), edges in blocked.items():
            reason = f" ({detail})" if problem is Problem.UNROUTED and detail else ""
            for machine, origin, target in _attributed(machines, edges, tested):
                cause = f"TCP from {origin} to {target} on {port} is {_BLOCKED[problem]}{reason}"
                yield error("connection", cause, _OPEN_RANGE if is_ranged else _OPEN, machine)
        for machine, origin, target in _attributed(machines, lost, arrived):
            yield error(
                "large-messages",
                f"64 kB from {origin} to {target} are lost, although small messages arrive: large packets are "
                "dropped on the way",
                "set the same MTU on all interfaces and switches between them (test: ping -M do -s SIZE), or allow "
                'ICMP "fragmentation needed"',
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
