"""The result of an examination: as text for a terminal, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from elastic_agent.printable import escaped

from .differences import differing
from .findings import Finding, Severity, grouped, is_healthy
from .records import MachineFacts

MOST_NAMED = 4


class Report(Struct, frozen=True):
    """The result of an examination, the same on all machines that met."""

    machines: tuple[MachineFacts, ...] = ()
    """Those that met; empty: this machine was examined alone."""
    findings: tuple[Finding, ...] = ()
    tested: tuple[str, ...] = ()
    """What was tested without finding a problem, in words."""
    expected: int = 1
    """How many machines were expected."""
    exit_code: int = 0


def as_text(report: Report, machine: str) -> str:
    """Return the findings, the worst first, and a line with the result. ``machine``: this one."""
    lines = [_line(finding, machines) for finding, machines in grouped(report.findings)]
    return escaped("\n".join([*lines, *([""] if lines else []), _summary(report, machine)]), keep_lines=True)


def _line(finding: Finding, machines: Sequence[str]) -> str:
    more = f" and {len(machines) - MOST_NAMED} more" if len(machines) > MOST_NAMED else ""
    where = f"{', '.join(machines[:MOST_NAMED])}{more}: " if machines else ""
    return f"{finding.severity.value:<8} {where}{finding.cause}. Remedy: {finding.remedy}"


def _summary(report: Report, machine: str) -> str:
    count = len(report.machines)
    who = f"{machine} alone"
    if count:
        who = f"{count} of {report.expected} machines" if count < report.expected else f"{count} machines"
    tested = f"; tested: {', '.join(report.tested)}" if report.tested else ""
    found = [finding.severity for finding, _ in grouped(report.findings)]
    counts = [counted(found.count(kind), kind.value) for kind in Severity if kind in found]
    return f"{', '.join(counts) or 'no problems found'} on {who}{tested}"


def counted(number: int, noun: str) -> str:
    """Return such as "1 connection" and "2 connections"."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def as_json(report: Report) -> str:
    """Return one JSON object."""
    document = {
        "healthy": is_healthy(report.findings) and len(report.machines) in (0, report.expected),
        "exit_code": report.exit_code,
        "expected_machines": report.expected,
        "machines": [
            {
                "machine": machine.machine,
                "address": machine.address,
                "interface": machine.interface,
                "facts": machine.facts,
                "environment": machine.environment,
            }
            for machine in report.machines
        ],
        "findings": [
            {
                "severity": finding.severity.value,
                "check": finding.check,
                "machines": machines,
                "cause": finding.cause,
                "remedy": finding.remedy,
            }
            for finding, machines in grouped(report.findings)
        ],
        "differences": differing(report.machines),
        "tested": report.tested,
    }
    return msgspec.json.encode(document).decode()
