"""What the test connections between machines mean: which machine or which pair is behind a firewall."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .findings import Finding, error
from .network import SLOW_LOOKUP_S, slow_reverse_lookup
from .pairs import Problem
from .records import Attendance, Connection

_CAUSES = {
    Problem.REJECTED: "refused, although a program listens there: a firewall rejects it, or another machine has "
    "this address",
    Problem.DROPPED: "not answered: a firewall drops the packets",
    Problem.UNROUTED: "not possible ({detail})",
    Problem.NO_ANSWER: "accepted, but nothing arrives: another program or a proxy answers",
}
_OPEN = (
    "allow TCP between all machines of the run on all ports (gloo and NCCL use the ports of "
    "net.ipv4.ip_local_port_range)"
)
_OPEN_RANGE = "allow the ports of --port-range between all machines of the run"


def connection_findings(
    machines: Mapping[str, Attendance], made: Mapping[str, Sequence[Connection]]
) -> Iterator[Finding]:
    """The problems of the test connections; those that share their cause in one.

    Args:
        machines: by id.
        made: the connections that each machine has tested, by its id.
    """
    failed = [
        (source, one) for source, each in made.items() for one in each if one.problem and one.to in machines
    ]
    tried: dict[tuple[str, bool], int] = {}
    for each in made.values():
        for one in each:
            tried[one.to, one.is_ranged] = tried.get((one.to, one.is_ranged), 0) + 1
    groups: dict[tuple[str, str, str, bool], list[str]] = {}
    for source, one in failed:
        groups.setdefault((one.to, one.problem, one.detail, one.is_ranged), []).append(source)
    for (to, problem, detail, is_ranged), sources in groups.items():
        names = [machines[source].machine for source in sources]
        is_all = len(sources) == tried[to, is_ranged] and len(sources) > 1
        yield _finding(machines, to, Problem(problem), detail, is_ranged, names, is_all)
    yield from _slow_lookups(machines, made)


def _finding(
    machines: Mapping[str, Attendance],
    to: str,
    problem: Problem,
    detail: str,
    is_ranged: bool,
    sources: Sequence[str],
    is_all: bool,
) -> Finding:
    target = machines[to]
    origin = "any other machine" if is_all else ", ".join(sources[:4]) + (" ..." if len(sources) > 4 else "")
    if problem in (Problem.LARGE_LOST, Problem.LARGE_LOST_BACK):
        way = f"from {origin} to {target.machine}" if problem is Problem.LARGE_LOST else f"back to {origin}"
        mtus = ", ".join(f"{one.machine}: {one.mtu}" for one in list(machines.values())[:4])
        return error(
            "large-messages",
            f"connections from {origin} to {target.machine} ({target.address}): small messages arrive, but 64 kB are "
            f"lost on the way {way}; large packets are dropped (MTU: {mtus})",
            "set the same MTU on all interfaces and switches between them (test: ping -M do -s SIZE), or allow "
            'ICMP "fragmentation needed"',
            target.machine,
        )
    port = "a port of --port-range" if is_ranged else "an ephemeral port"
    cause = _CAUSES[problem].format(detail=detail)
    return error(
        "connection",
        f"TCP from {origin} to {target.machine} ({target.address}) on {port} is {cause}",
        _OPEN_RANGE if is_ranged else _OPEN,
        target.machine if is_all else sources[0],
    )


def _slow_lookups(
    machines: Mapping[str, Attendance], made: Mapping[str, Sequence[Connection]]
) -> Iterator[Finding]:
    for source, each in made.items():
        slowest = max(each, key=lambda one: one.lookup_s, default=None)
        if slowest is not None and slowest.lookup_s > SLOW_LOOKUP_S and slowest.to in machines:
            found = slow_reverse_lookup(machines[slowest.to].address, slowest.lookup_s)
            yield Finding(found.severity, found.check, found.cause, found.remedy, machines[source].machine)
