"""The result of an examination: as text for a terminal, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from elastic_agent.agent.preflight import Finding
from elastic_agent.diagnosis.differences import differences
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import escaped, listed
from elastic_agent.protocol import count

from .folders import path_findings
from .records import Local

MOST_NAMED = 4


class Machine(Struct, frozen=True):
    """A machine that was examined together with others."""

    name: str
    """Different from those of the others."""
    address: str
    interface: str
    """The interface of its address; empty: not known."""
    facts: dict[str, str]


class Report(Struct, frozen=True):
    """The result of an examination, the same on all machines that met."""

    machines: tuple[Machine, ...] = ()
    """Those that met; empty: this machine was examined alone."""
    findings: tuple[Finding, ...] = ()
    tested: tuple[str, ...] = ()
    """The tests that found no problem, in words."""
    expected: int = 1
    """The number of machines that were expected."""
    exit_code: int = 0


def report_alone(local: Local, findings: tuple[Finding, ...], code: int | None = None) -> Report:
    """Return the report on this machine, with its folders of ``--paths``.

    ``code``: the exit code; None: what the findings require.
    """
    findings = (*findings, *path_findings({0: local.machine}, {0: local.shared}, {}))
    if code is None:
        code = ExitCode.FINISHED if is_healthy(findings) else ExitCode.FAILED
    return Report((), findings, (), local.most, code)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return whether there is no error among them."""
    return not any(finding.is_error for finding in findings)


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Return equal findings of several machines as one, with the machines' names; errors first."""
    machines: dict[Finding, list[str]] = {}
    for found in findings:
        names = machines.setdefault(replace(found, machine=""), [])
        if found.machine and found.machine not in names:
            names.append(found.machine)
    return sorted(machines.items(), key=lambda item: not item[0].is_error)


def as_text(report: Report, machine: str) -> str:
    """Return the findings, the worst first, and a line with the result. ``machine``: this one."""
    lines = [_line(finding, machines) for finding, machines in grouped(report.findings)]
    return escaped("\n".join([*lines, *([""] if lines else []), _summary(report, machine)]), keep_lines=True)


def _severity(finding: Finding) -> str:
    return "error" if finding.is_error else "warning"


def _line(finding: Finding, machines: Sequence[str]) -> str:
    where = f"{listed(machines, MOST_NAMED)}: " if machines else ""
    return f"{_severity(finding):<8} {where}{finding.cause}. Remedy: {finding.remedy}"


def _summary(report: Report, machine: str) -> str:
    came = len(report.machines)
    who = f"{machine} alone"
    if came:
        who = f"{came} of {report.expected} machines" if came < report.expected else f"{came} machines"
    tested = f"; tested: {', '.join(report.tested)}" if report.tested else ""
    found = [_severity(finding) for finding, _ in grouped(report.findings)]
    counts = [count(found.count(kind), kind) for kind in ("error", "warning") if kind in found]
    return f"{', '.join(counts) or 'no problems found'} on {who}{tested}"


def as_json(report: Report) -> str:
    """Return the report as one JSON object, with the values of what differs by machine."""
    facts = {machine.name: machine.facts for machine in report.machines}
    found = {difference.name: difference.values for difference in differences(facts)}
    return msgspec.json.encode({**asdict(report), "differences": found}).decode()
