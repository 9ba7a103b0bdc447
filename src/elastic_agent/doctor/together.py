"""What the machines of an examination do together, once they have met."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Iterable

from msgspec.structs import replace

from elastic_agent.diagnosis.differences import compared_variables
from elastic_agent.transport import StoreLostError, interface_of

from .differences import difference_findings
from .findings import Finding, error, warning
from .interpreter import REDUCE_S, Interpreter
from .local import LocalResult, in_time
from .meeting import Meeting
from .pairs import TEST_S, connect_to_all, connection_findings, targets
from .paths import SharedFolders, path_findings
from .records import Attendance, Connection, Left, MachineFacts, Reduced, Results, Shared
from .report import counted
from .request import Request

EXCHANGE_S = 10.0
"""How long to wait for the records of the others beside what making them may take; machines may be slow."""
LEAVE_S = 4.0
STORAGE_S = 8.0
_FACTS, _RESULTS, _END = "facts", "results", "end"
_USELESS = {"connection", "gloo-interface", "interpreter"}
"""After an error of these checks, an all-reduce would only wait for its time-out."""


class Together:
    """The part of one machine."""

    def __init__(
        self,
        request: Request,
        local: LocalResult,
        meeting: Meeting,
        interpreter: Interpreter,
        *,
        hosts_store: bool,
    ) -> None:
        """Take part in a meeting that was joined; an ``EchoServer`` answers at this machine's address and port."""
        self._request = request
        self._local = local
        self._meeting = meeting
        self._interpreter = interpreter
        self._hosts_store = hosts_store
        self._address = meeting.attendances[meeting.id].address
        self._attendances = _named(meeting.attendances)
        self._names = {member: attendance.machine for member, attendance in self._attendances.items()}
        """The names of the members in the report; different ones."""
        self._folders = SharedFolders(request.paths, meeting.id)
        self._own_connections: list[Connection] = []
        self.machines: dict[str, MachineFacts] = {}
        """Those that have told their facts, by id, in the order of their names."""
        self.tested: list[str] = []

    async def run(self) -> list[Finding]:
        """Do all of it, and return the findings of all machines. Raises ``StoreLostError``."""
        meeting, folders = self._meeting, self._folders
        others = targets(meeting.id, [*meeting.attendances])
        to_test = {member: meeting.attendances[member] for member in others}
        try:
            shared, self._own_connections = await asyncio.gather(
                in_time(folders.mark, STORAGE_S, _unanswered(self._request)),
                connect_to_all(to_test),
            )
            facts = await meeting.exchange(_FACTS, self._own_facts(shared), TEST_S + EXCHANGE_S)
            self._order(facts)
            machines = [*self.machines.values()]
            findings = [*self._missing(), *(finding for machine in machines for finding in machine.findings)]
            findings += [*difference_findings(machines), *self._compare_connections()]
            backends = self._backends(findings)
            seen = await in_time(
                lambda: folders.look(meeting.members), STORAGE_S, tuple[tuple[str, ...], ...]()
            )
            mine = Results(seen, await self._reduce_over(backends))
            limit_s = STORAGE_S + sum(REDUCE_S[backend] for backend in backends) + EXCHANGE_S
            results = await meeting.exchange(_RESULTS, mine, limit_s)
        finally:
            await in_time(folders.remove_marks, STORAGE_S, None)
        findings += [*self._compare_folders(results), *self._compare_results(results, backends)]
        await self._end()
        return findings

    def own_findings(self) -> list[Finding]:
        """Return what this machine found without the records of the others."""
        me = self._meeting.id
        named = [replace(finding, machine=self._names[me]) for finding in self._local.findings]
        return [*connection_findings(self._attendances, {me: self._own_connections}), *named]

    # -- facts ----------------------------------------------------------------------------------

    def _own_facts(self, shared: tuple[Shared, ...]) -> MachineFacts:
        family = f"IPv{ipaddress.ip_address(self._address.partition('%')[0]).version}"
        return MachineFacts(
            self._request.machine,
            self._address,
            interface_of(self._address) or "",
            self._local.gpus,
            self._local.store_port,
            {**self._local.facts, "address family": family},
            compared_variables(self._request.environ),
            self._local.findings,
            shared,
            tuple(self._own_connections),
        )

    def _order(self, facts: dict[str, MachineFacts]) -> None:
        named: dict[str, MachineFacts] = {}
        for member, name in self._names.items():
            if member in facts:
                findings = tuple(replace(finding, machine=name) for finding in facts[member].findings)
                named[member] = replace(facts[member], machine=name, findings=findings)
        order = sorted(named, key=lambda member: named[member].machine)
        self.machines = {member: named[member] for member in order}

    def _missing(self) -> Iterable[Finding]:
        meeting, count = self._meeting, len(self._meeting.members)
        lacking = meeting.expected - count
        if lacking > 0:
            make = error if count < meeting.least else warning
            yield make(
                "missing-machines",
                f"{lacking} of {meeting.expected} machines did not come within {self._request.wait_s:g} s; here: "
                f"{', '.join(meeting.present)}",
                "run the same command on the others too; where it already runs, its output tells why that machine "
                "does not reach the endpoint",
            )
        for member, name in self._names.items():
            if member not in self.machines:
                yield error(
                    "silent-machines",
                    f"this machine did not report within {TEST_S + EXCHANGE_S:g} s",
                    "look at the output of the command there, and whether large packets arrive (ping -M do -s SIZE)",
                    name,
                )

    def _compare_connections(self) -> list[Finding]:
        each = {member: facts.connections for member, facts in self.machines.items()}
        count = sum(map(len, each.values()))
        if count and not any(connection.problem for made in each.values() for connection in made):
            self.tested.append(counted(count, "connection"))
        return [*connection_findings(self._attendances, each)]

    def _compare_folders(self, results: dict[str, Results]) -> list[Finding]:
        shared = {member: facts.shared for member, facts in self.machines.items()}
        found = [
            *path_findings(self._names, shared, {member: result.seen for member, result in results.items()})
        ]
        if self._request.paths and not found:
            self.tested.append(counted(len(self._request.paths), "shared folder"))
        return found

    # -- collectives ----------------------------------------------------------------------------

    def _backends(self, findings: Iterable[Finding]) -> list[str]:
        """Return the backends of the all-reduces that all machines take part in."""
        machines = self.machines.values()
        errors = {finding.check for finding in findings if finding.severity == "error"}
        is_possible = len(machines) == len(self._meeting.members) and all(
            machine.store_port for machine in machines
        )
        if len(machines) < 2 or not is_possible or errors & _USELESS:
            return []
        return ["gloo", "nccl"] if all(machine.gpus for machine in machines) else ["gloo"]

    async def _reduce_over(self, backends: list[str]) -> dict[str, Reduced]:
        """Take part in one all-reduce after the other, until one of them fails."""
        reduced: dict[str, Reduced] = {}
        for backend in backends:
            reduced[backend] = await self._reduce(backend)
            if reduced[backend].problem:
                break
        return reduced

    async def _reduce(self, backend: str) -> Reduced:
        environment = {}
        interface = interface_of(self._address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in self._request.environ:
            environment["GLOO_SOCKET_IFNAME"] = interface  # as the agent does for its workers
        ranks = [*self.machines]
        host = self.machines[ranks[0]]
        place = ranks.index(self._meeting.id), len(ranks)
        return await self._interpreter.reduce(backend, place, (host.address, host.store_port), environment)

    def _compare_results(self, results: dict[str, Results], backends: list[str]) -> Iterable[Finding]:
        for backend in backends:
            silent = Results(reduced={backend: Reduced("this machine did not report how it ended")})
            ended = {
                member: each[backend]
                for member in self.machines
                if backend in (each := results.get(member, silent).reduced)
            }
            for member, reduced in ended.items():
                if reduced.problem:
                    yield error(
                        f"{backend}-all-reduce",
                        f"an all-reduce over {backend} failed: {reduced.problem}",
                        "look at the other findings first; connections between the machines work, so look at the "
                        f"variables {backend.upper()}_* and the versions of torch and its libraries, and whether large "
                        "packets arrive (ping -M do -s SIZE): all interfaces and switches need the same MTU",
                        self._names[member],
                    )
            if ended and not any(reduced.problem for reduced in ended.values()):
                slowest_s = max(reduced.took_s for reduced in ended.values())
                self.tested.append(
                    f"an all-reduce over {backend} ({slowest_s:.2f} s with its initialisation)"
                )

    # -- the end --------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Wait until all have read everything: the machine that hosts the store leaves last."""
        begun_s = time.monotonic()
        is_last = self._hosts_store or self._meeting.members[0] == self._meeting.id
        with contextlib.suppress(StoreLostError):
            await self._meeting.exchange(_END, Left(), LEAVE_S)
            if is_last:
                await asyncio.sleep(max(0.0, min(1.0, LEAVE_S - (time.monotonic() - begun_s))))
            await self._meeting.leave()


def _unanswered(request: Request) -> tuple[Shared, ...]:
    lost = "does not answer (a file server that is down?)"
    return tuple(Shared(str(path)[:500], lost) for path in request.paths)


def _named(attendances: dict[str, Attendance]) -> dict[str, Attendance]:
    """Return them with different names: where several machines have one, the address is added."""
    given = [attendance.machine for attendance in attendances.values()]
    return {
        member: attendance
        if given.count(attendance.machine) == 1
        else replace(attendance, machine=f"{attendance.machine} ({attendance.address})")
        for member, attendance in attendances.items()
    }
