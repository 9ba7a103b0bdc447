"""What the machines of an examination do together, once they have met."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from elastic_agent.diagnosis.compared import compared_variables
from elastic_agent.transport import StoreLostError, interface_of, is_local, resolve, run_abandonable

from . import collective
from .collective import CollectiveProcess, Task
from .connections import connection_findings
from .differences import Column, clock_findings, difference_findings, differing
from .findings import Finding, error, note, warning
from .local import LocalResult
from .meeting import Meeting
from .pairs import CONNECT_S, LOOKUP_S, connect_to_all, targets
from .paths import SharedFolders, path_findings
from .records import (
    Attendance,
    Collectives,
    Connection,
    Connections,
    MachineFacts,
    Reduced,
    SeenPaths,
    Shared,
)
from .request import Request

EXCHANGE_S = 10.0
"""How long to wait for the records of the others in one phase; machines may be slow to examine themselves."""
LEAVE_S = 4.0
STORAGE_S = 8.0
PHASES = ("members", "facts", "marks", "seen", "connections", "store", "collectives", "end")
_GLOO = "gloo-interface"


class Arrived(Struct, frozen=True):
    """This machine has reached a point of the examination."""


class Together:
    """The part of one machine."""

    def __init__(
        self,
        request: Request,
        local: LocalResult,
        meeting: Meeting,
        helper: CollectiveProcess | None,
    ) -> None:
        """``meeting``: joined; an ``EchoServer`` answers at this machine's address and port in it."""
        self._request = request
        self._local = local
        self._meeting = meeting
        self._address = meeting.attendances[meeting.id].address
        self._helper = helper
        self.attendances = _named(meeting.attendances)
        self._folders = SharedFolders(request.paths, meeting.id)
        self.machines: dict[str, MachineFacts] = {}
        """Those that have told their facts, by id."""
        self.names = {member: one.machine for member, one in self.attendances.items()}
        """The names of the members in the report; different ones."""
        self.own_connections: list[Connection] = []
        """The test connections of this machine."""
        self.columns: list[Column] = []
        self.tested: list[str] = []

    async def run(self) -> list[Finding]:
        """All of it; the findings of all machines. Raises ``StoreLostError``."""
        # Everything is written before anything is read: reading fails first where large packets are lost.
        await self._meeting.write("facts", await self._own_facts())
        made = await connect_to_all(targets(self._meeting.id, self._meeting.members, self.attendances))
        self.own_connections = made
        await self._meeting.write("connections", Connections(tuple(made)))
        self.machines = await self._meeting.gather("facts", MachineFacts, EXCHANGE_S)
        self._order_machines()
        findings = [*self._missing(), *self._reported()]
        self.columns = differing([*self.machines.values()])
        findings += difference_findings([*self.machines.values()], self.columns)
        findings += await self._test_paths()
        findings += await self._read_connections()
        findings += await self._test_collectives(is_possible=not self._network_is_broken(findings))
        await self._end()
        return findings

    def own_findings(self) -> list[Finding]:
        """What this machine found without the records of the others."""
        me = self._meeting.id
        named = [replace(one, machine=self.names[me]) for one in self._local.findings]
        return [*connection_findings(self.attendances, {me: self.own_connections}), *named]

    # -- facts ----------------------------------------------------------------------------------

    async def _own_facts(self) -> MachineFacts:
        request = self._request
        assert request.endpoint is not None  # the machines met there
        interface = interface_of(self._address) or ""
        family = f"IPv{ipaddress.ip_address(self._address.partition('%')[0]).version}"
        with contextlib.suppress(StoreLostError):
            shared = await run_abandonable(self._folders.describe, STORAGE_S)
            is_endpoint = any(is_local(resolve(one.host)) for one in request.endpoint.members)
            return self._facts(interface, family, is_endpoint, shared)
        lost = "does not answer (a file server that is down?)"
        shared = tuple(Shared(str(one)[:500], lost) for one in request.paths)
        return self._facts(interface, family, False, shared)

    def _facts(
        self, interface: str, family: str, is_endpoint: bool, shared: tuple[Shared, ...]
    ) -> MachineFacts:
        facts = {**self._local.facts, "address family": family}
        return MachineFacts(
            self._request.machine,
            self._address,
            interface,
            is_endpoint,
            len(self._local.gpus.names),
            facts,
            compared_variables(self._request.environ),
            self._local.findings,
            shared,
        )

    def _order_machines(self) -> None:
        """The machine of the endpoint first, then by name."""
        named = {
            member: replace(one, machine=self.names[member])
            for member, one in self.machines.items()
            if member in self.names
        }
        order = sorted(named, key=lambda member: (not named[member].is_endpoint, named[member].machine))
        self.machines = {member: named[member] for member in order}

    def _reported(self) -> Iterable[Finding]:
        """What the machines found by themselves."""
        for facts in self.machines.values():
            for one in facts.findings:
                yield Finding(one.severity, one.check, one.cause, one.remedy, facts.machine)

    def _missing(self) -> Iterable[Finding]:
        lacking = self._meeting.expected - len(self._meeting.members)
        if lacking > 0:
            make = error if len(self._meeting.members) < self._meeting.least else note
            yield make(
                "missing-machines",
                f"{lacking} of {self._meeting.expected} machines did not come within {self._request.wait_s:g} s; here: "
                f"{', '.join(self._meeting.present)}",
                "run the same command on the others too; where it already runs, its output tells why that machine "
                "does not reach the endpoint",
            )
        silent = len(self._meeting.members) - len(self.machines)
        if silent:
            yield error(
                "silent-machines",
                f"{silent} of {len(self._meeting.members)} machines did not report within {EXCHANGE_S:g} s",
                "look at the output of the command on the machines that are not in the table",
            )

    # -- shared folders -------------------------------------------------------------------------

    async def _test_paths(self) -> list[Finding]:
        if not any(one.shared for one in self.machines.values()):
            return []
        mine = SeenPaths(())
        try:
            await self._in_storage(self._folders.mark)
            await self._meeting.exchange("marks", Arrived(), EXCHANGE_S)
            with contextlib.suppress(StoreLostError):
                mine = await run_abandonable(lambda: self._folders.look(self._meeting.members), STORAGE_S)
            seen = await self._meeting.exchange("seen", mine, EXCHANGE_S)
        finally:
            await self._in_storage(self._folders.remove_marks)
        shared = {member: facts.shared for member, facts in self.machines.items()}
        found = list(path_findings(self.names, shared, seen))
        if not found:
            self.tested.append(counted(len(self._request.paths), "shared folder"))
        return found

    async def _in_storage(self, work: object) -> None:
        """Call it in a thread that is abandoned if the storage does not answer."""
        assert callable(work)
        with contextlib.suppress(StoreLostError):
            await run_abandonable(work, STORAGE_S)

    # -- connections ----------------------------------------------------------------------------

    async def _read_connections(self) -> list[Finding]:
        found = await self._meeting.gather("connections", Connections, CONNECT_S + LOOKUP_S + 2)
        each = {member: one.made for member, one in found.items() if member in self.names}
        findings = list(connection_findings(self.attendances, each))
        ahead: dict[str, list[float]] = {member: [] for member in self.names}
        for one in (one for made in each.values() for one in made if not one.problem and one.to in ahead):
            ahead[one.to].append(one.ahead_s)
        findings += clock_findings(self.names, ahead)
        count = sum(len(made) for made in each.values())
        if not any(one.problem for made in each.values() for one in made):
            self.tested.append(counted(count, "connection"))
        return findings

    def _network_is_broken(self, findings: Iterable[Finding]) -> bool:
        """Whether an all-reduce would only wait for its time-out."""
        checks = {one.check for one in findings if one.severity.value == "error"}
        return bool(checks & {"connection", "large-messages", _GLOO, "interpreter"})

    # -- collectives ----------------------------------------------------------------------------

    async def _test_collectives(self, *, is_possible: bool) -> list[Finding]:
        members = [one for one in self._meeting.members if one in self.machines]
        if self._helper is None or len(members) < 2 or len(members) < len(self._meeting.members):
            return []
        store = await self._agree_on_store(members, is_possible)
        if not store.isdecimal() or store == "0":
            return []
        backends = ["gloo"]
        if all(self.machines[one].gpus for one in members):
            backends.append("nccl")
        mine: list[Reduced] = []
        for backend in backends:
            if not (mine and mine[-1].problem):
                mine.append(await self._reduce(backend, members, int(store)))
        limit_s = collective.TIMEOUT_S + collective.NCCL_TIMEOUT_S + 4
        found = await self._meeting.exchange("collectives", Collectives(tuple(mine)), limit_s)
        return list(self._collective_findings(found, backends))

    async def _agree_on_store(self, members: list[str], is_possible: bool) -> str:
        """The port of the first machine's store; 0: there will be no all-reduce."""
        assert self._helper is not None  # the caller made sure
        if members[0] != self._meeting.id:
            return await self._meeting.await_decision("store", EXCHANGE_S)
        port = await self._helper.open_store(self._request.port_range) if is_possible else 0
        return await self._meeting.decide("store", str(port))

    async def _reduce(self, backend: str, members: list[str], port: int) -> Reduced:
        assert self._helper is not None  # the caller made sure
        environment = {}
        interface = interface_of(self._address)
        if interface is not None and "GLOO_SOCKET_IFNAME" not in self._request.environ:
            environment["GLOO_SOCKET_IFNAME"] = interface  # as the agent does for its workers
        host = self.machines[members[0]].address
        task = Task(backend, members.index(self._meeting.id), len(members), host, port, environment)
        limit_s = collective.NCCL_TIMEOUT_S if backend == "nccl" else collective.TIMEOUT_S
        return await self._helper.reduce(task, 2 * limit_s)

    def _collective_findings(self, found: dict[str, Collectives], backends: list[str]) -> Iterable[Finding]:
        for backend in backends:
            results = {
                member: one
                for member, each in found.items()
                for one in each.results
                if one.backend == backend
            }
            failed = {member: one for member, one in results.items() if one.problem}
            for member, one in failed.items():
                yield error(
                    f"{backend}-all-reduce",
                    f"an all-reduce over {backend} failed: {one.problem}",
                    "look at the other findings first; the connections between the machines work, so look at "
                    f"the variables {backend.upper()}_* and at the versions of torch and its libraries",
                    self.names[member],
                )
            if results and not failed:
                slowest_s = max(one.took_s for one in results.values())
                self.tested.append(
                    f"an all-reduce over {backend} ({slowest_s:.2f} s with its initialisation)"
                )
            if len(results) < len(self.machines) and failed:
                yield warning(
                    f"{backend}-all-reduce",
                    "not all machines took part in the all-reduce",
                    "see the errors above",
                )

    # -- the end --------------------------------------------------------------------------------

    async def _end(self) -> None:
        """Wait until all have read everything: the machine of the endpoint hosts the store."""
        begun_s = time.monotonic()
        with contextlib.suppress(StoreLostError):
            await self._meeting.exchange("end", Arrived(), LEAVE_S)
            if self._machine_is_last():
                await asyncio.sleep(max(0.0, min(1.0, LEAVE_S - (time.monotonic() - begun_s))))
            await self._meeting.leave(PHASES)

    def _machine_is_last(self) -> bool:
        mine = self.machines.get(self._meeting.id)
        first = self._meeting.members[:1] == (self._meeting.id,)
        return first or (mine is not None and mine.is_endpoint)


def counted(number: int, noun: str) -> str:
    """Such as "1 connection" and "2 connections"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _named(attendances: dict[str, Attendance]) -> dict[str, Attendance]:
    """With different names: where several machines have one, the address is added."""
    given = [one.machine for one in attendances.values()]
    return {
        member: one
        if given.count(one.machine) == 1
        else replace(one, machine=f"{one.machine} ({one.address})")
        for member, one in attendances.items()
    }
