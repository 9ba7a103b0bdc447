"""The course of an examination: this machine alone, then all machines together at the run's endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from elastic_agent.exit_codes import ExitCode
from elastic_agent.rendezvous.asyncio_runner import in_time
from elastic_agent.transport import (
    Exchange,
    NotAStoreError,
    Obstacle,
    TransportError,
    UnreachableError,
    WrongKeyError,
)
from elastic_agent.values import Endpoint, EtcdAccess

from . import network
from .collective import CollectiveProcess
from .differences import Column
from .findings import Finding, error, is_healthy
from .local import LocalResult, stops_meeting
from .meeting import EARLY_S, FOLDER, Meeting
from .pairs import EchoServer
from .records import Attendance, MachineFacts
from .request import Request
from .together import Together

DIAL_TIMEOUT_S = 4.0
REDIAL_S = 0.5


class Report(Struct, frozen=True):
    """The result of an examination, the same on all machines that met."""

    machines: tuple[MachineFacts, ...] = ()
    """Those that met, in the order of the table; empty: this machine was examined alone."""
    findings: tuple[Finding, ...] = ()
    columns: tuple[Column, ...] = ()
    tested: tuple[str, ...] = ()
    """What was tested without finding a problem, in words."""
    expected: int = 1
    """How many machines were expected."""
    exit_code: int = 0


def meets_others(request: Request, local: LocalResult) -> bool:
    """Whether there are other machines, and this one can meet them."""
    has_others = request.is_distributed and request.endpoint is not None and not request.alone
    return has_others and not stops_meeting(local.findings)


def report_alone(request: Request, local: LocalResult) -> Report:
    """The report on this machine."""
    return _report_alone(request, local.findings)


async def examine_together(
    request: Request, local: LocalResult, helper: CollectiveProcess | None, show: Callable[[str], None]
) -> Report:
    """Examine all machines of the run.

    Args:
        request: the run.
        local: the examination of this machine.
        helper: for the all-reduce; None: there is none.
        show: called with one line when something takes long.
    """
    dialled = _Dialled(request)
    try:
        problem = await dialled.reach(request.wait_s, show)
        if problem is not None:
            return _report_alone(request, (problem, *local.findings), ExitCode.NO_STORE)
        assert dialled.link is not None  # reached
        return await _examine_together(request, local, dialled.link, helper, show)
    finally:
        dialled.close()


def _report_alone(request: Request, findings: tuple[Finding, ...], code: int | None = None) -> Report:
    named = tuple(_of(request.machine, one) for one in findings)
    if code is None:
        code = ExitCode.FINISHED if is_healthy(named) else ExitCode.FAILED
    return Report((), named, (), (), request.most, code)


def _of(machine: str, finding: Finding) -> Finding:
    """The finding with the machine's name, if it has none."""
    if finding.machine:
        return finding
    return Finding(finding.severity, finding.check, finding.cause, finding.remedy, machine)


async def _examine_together(
    request: Request,
    local: LocalResult,
    link: Exchange,
    helper: CollectiveProcess | None,
    show: Callable[[str], None],
) -> Report:
    echo = EchoServer()
    await echo.start(request.port_range)
    meeting = Meeting(link, _attendance(request, link, echo))
    together = None
    try:
        await meeting.join(request.wait_s, show)
        together = Together(request, local, meeting, helper)
        findings = await together.run()
    except TransportError as failure:
        lost = error(
            "store-lost",
            f"the connection to the endpoint {request.endpoint} broke during the examination: {failure}",
            "see the other findings; else run the command again on all machines, and do not stop it early on the "
            "machine of the endpoint",
        )
        known = local.findings if together is None else tuple(together.own_findings())
        return _report_alone(request, (*known, lost), ExitCode.NO_STORE)
    finally:
        echo.close()
        meeting.close()
    code = ExitCode.FINISHED if is_healthy(findings) else ExitCode.FAILED
    if len(meeting.members) < meeting.least:
        code = ExitCode.TOO_FEW_NODES
    return Report(
        tuple(together.machines.values()),
        tuple(findings),
        tuple(together.columns),
        tuple(together.tested),
        meeting.expected,
        code,
    )


def _attendance(request: Request, link: Exchange, echo: EchoServer) -> Attendance:
    address = request.local_addr or link.local_address
    return Attendance(request.machine, request.least, request.most, address, echo.port, echo.ranged_port)


class _Dialled:
    """The connection to the endpoint, and the store that this process hosts if no run hosts one."""

    def __init__(self, request: Request) -> None:
        assert request.endpoint is not None  # the run is distributed
        self._endpoint: Endpoint = request.endpoint
        self._access: EtcdAccess | None = request.access
        self._secret = request.secret
        self._host: Any = None
        self.link: Exchange | None = None

    async def reach(self, wait_s: float, show: Callable[[str], None]) -> Finding | None:
        """Connect; what is wrong if that is not possible in time."""
        begun_s = time.monotonic()
        shown = ""
        while True:
            try:
                self.link = await in_time(self._dial(), 3 * DIAL_TIMEOUT_S)
                return None
            except WrongKeyError as failure:
                return error(
                    "secret", str(failure), "start every agent, and every doctor, with the same --secret-file"
                )
            except NotAStoreError as failure:
                if self._access is None:
                    return network.foreign_port_holder(self._endpoint, str(failure))
                return error("not-a-store", str(failure), "check --rdzv-endpoint and the options for etcd")
            except TransportError as failure:
                waited_s = time.monotonic() - begun_s
                problem = str(failure)
                if waited_s > wait_s:
                    obstacle = getattr(failure, "obstacle", Obstacle.OTHER)
                    return network.explain_unreachable(self._endpoint, problem, obstacle)
                if waited_s > EARLY_S and problem != shown:
                    shown = problem
                    show(f"cannot reach the endpoint {self._endpoint} yet: {problem}")
                await asyncio.sleep(REDIAL_S)

    async def _dial(self) -> Exchange:
        if self._access is not None:
            return await self._dial_etcd(self._access)
        from elastic_agent.transport import c10d

        if self._host is None:
            self._host = await c10d.find_or_host(self._endpoint, DIAL_TIMEOUT_S, self._secret)
        return await c10d.dial_exchange(self._endpoint, FOLDER, DIAL_TIMEOUT_S, self._secret)

    async def _dial_etcd(self, access: EtcdAccess) -> Exchange:
        from elastic_agent.transport import etcd

        problems, obstacles = [], set()
        for member in self._endpoint.members:
            try:
                return await etcd.dial_exchange(member, access, FOLDER, self._secret)
            except UnreachableError as failure:
                problems.append(str(failure))
                obstacles.add(failure.obstacle)
        raise UnreachableError(
            "; ".join(problems), obstacles.pop() if len(obstacles) == 1 else Obstacle.OTHER
        )

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
