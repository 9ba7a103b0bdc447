"""The course of an examination: this machine alone, then all machines together at the run's endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import replace

from elastic_agent.exit_codes import ExitCode
from elastic_agent.rendezvous.waits import in_time
from elastic_agent.transport import (
    NotAStoreError,
    Obstacle,
    OtherVersionError,
    Table,
    TransportError,
    WrongKeyError,
    c10d,
)
from elastic_agent.values import Endpoint, EtcdAccess

from . import network
from .findings import Finding, error, is_healthy
from .interpreter import Interpreter
from .local import LocalResult, examine_alone, stops_meeting
from .meeting import EARLY_S, FOLDER, Meeting
from .pairs import EchoServer
from .records import Attendance
from .report import Report
from .request import Request
from .together import Together

DIAL_TIMEOUT_S = 4.0
REDIAL_S = 0.5
KEPT_S = 600.0
"""What is written to etcd disappears after this time, should the doctors be killed."""


async def examine(request: Request, show: Callable[[str], None]) -> Report:
    """Examine this machine, and all machines of the run if this one can meet them.

    ``show`` is called with one line when something takes long.
    """
    interpreter = Interpreter(request.python, request.environ)
    try:
        local = await examine_alone(request, interpreter)
        if request.meets_others and not stops_meeting(local.findings):
            return await _examine_all(request, local, interpreter, show)
        return report_alone(request, local.findings)
    finally:
        await interpreter.close()


def report_alone(request: Request, findings: tuple[Finding, ...], code: int | None = None) -> Report:
    """Return the report on this machine. ``code``: the exit code; None: what the findings require."""
    if code is None:
        code = ExitCode.FINISHED if is_healthy(findings) else ExitCode.FAILED
    named = tuple(replace(finding, machine=finding.machine or request.machine) for finding in findings)
    return Report((), named, (), request.most, code)


async def _examine_all(
    request: Request, local: LocalResult, interpreter: Interpreter, show: Callable[[str], None]
) -> Report:
    store = MeetingPoint(request)
    try:
        link = await store.reach(request.wait_s, show)
        if isinstance(link, Finding):
            return report_alone(request, (link, *local.findings), ExitCode.NO_STORE)
        return await _examine_at(link, request, local, interpreter, show, hosts_store=store.is_host)
    finally:
        store.close()


async def _examine_at(
    link: Table,
    request: Request,
    local: LocalResult,
    interpreter: Interpreter,
    show: Callable[[str], None],
    *,
    hosts_store: bool,
) -> Report:
    echo = EchoServer()
    await echo.start(request.port_range)
    address = request.local_addr or link.local_address
    meeting = Meeting(
        link, Attendance(request.machine, request.least, request.most, address, echo.port, echo.ranged_port)
    )
    together = None
    try:
        await meeting.join(request.wait_s, show)
        together = Together(request, local, meeting, interpreter, hosts_store=hosts_store)
        findings = await together.run()
    except TransportError as failure:
        lost = error(
            "store-lost",
            f"the connection to the endpoint {request.endpoint} broke during the examination: {failure}",
            "see the other findings; else run the command again on all machines, and do not stop it early on the "
            "machine of the endpoint",
        )
        known = local.findings if together is None else tuple(together.own_findings())
        return report_alone(request, (*known, lost), ExitCode.NO_STORE)
    finally:
        echo.close()
        meeting.close()
    code = ExitCode.FINISHED if is_healthy(findings) else ExitCode.FAILED
    if len(meeting.members) < meeting.least:
        code = ExitCode.TOO_FEW_NODES
    machines = tuple(together.machines.values())
    return Report(machines, tuple(findings), tuple(together.tested), meeting.expected, code)


class MeetingPoint:
    """The store at the endpoint, which this process hosts if no run does."""

    def __init__(self, request: Request) -> None:
        """Take the endpoint of a run with several nodes."""
        assert request.endpoint is not None
        self._endpoint: Endpoint = request.endpoint
        self._access: EtcdAccess | None = request.access
        self._secret = request.secret
        self._host: c10d.C10dHost | None = None

    async def reach(self, wait_s: float, show: Callable[[str], None]) -> Table | Finding:
        """Connect; return what is wrong if that is not possible in time."""
        begun_s = time.monotonic()
        shown = ""
        while True:
            try:
                return await self._dial()
            except WrongKeyError as failure:
                others = "doctor" if self._access is None else "doctor and etcd"
                return error("secret", str(failure), f"use the same secret for every agent, {others}")
            except OtherVersionError as failure:
                return error("other-version", failure.problem, failure.remedy)
            except NotAStoreError as failure:
                if self._access is None:
                    return network.foreign_port_holder(self._endpoint, str(failure))
                return error("not-a-store", str(failure), "check --rdzv-endpoint and the options for etcd")
            except TransportError as failure:
                waited_s = time.monotonic() - begun_s
                problem = str(failure)
                if waited_s > wait_s:
                    obstacle = getattr(failure, "obstacle", Obstacle.OTHER)
                    store = "the same command" if self._access is None else "etcd"
                    return network.explain_unreachable(self._endpoint, problem, obstacle, store)
                if waited_s > EARLY_S and problem != shown:
                    shown = problem
                    show(f"cannot reach the endpoint {self._endpoint} yet: {problem}")
                await asyncio.sleep(REDIAL_S)

    async def _dial(self) -> Table:
        if self._access is not None:
            return await in_time(self._dial_etcd(self._access), 3 * DIAL_TIMEOUT_S)
        if self._host is None:  # imports torch if there is none yet: that takes its time
            self._host = await c10d.find_or_host(self._endpoint, DIAL_TIMEOUT_S, self._secret)
        dialled = c10d.open_table(self._endpoint, DIAL_TIMEOUT_S, self._secret, f"{FOLDER}/")
        return await in_time(dialled, 3 * DIAL_TIMEOUT_S)

    async def _dial_etcd(self, access: EtcdAccess) -> Table:
        from elastic_agent.rendezvous.backends.etcd.backend import Members
        from elastic_agent.transport import etcd

        members = Members(self._endpoint, access, DIAL_TIMEOUT_S, self._secret)
        client = await members.dial()
        root = f"{access.prefix.rstrip('/')}/{FOLDER}/"
        return etcd.EtcdTable(client, root, lease=etcd.KeptLease(KEPT_S))

    @property
    def is_host(self) -> bool:
        """Whether this process hosts the store."""
        return self._host is not None

    def close(self) -> None:
        """Close the store, if this process hosts it."""
        if self._host is not None:
            self._host.close()
