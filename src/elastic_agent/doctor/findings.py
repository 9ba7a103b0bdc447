"""What an examination finds: one line with machine, cause and remedy for each problem."""

from __future__ import annotations

import enum
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from elastic_agent.protocol import Name, Text


class Severity(enum.StrEnum):
    """How bad it is, the worst first."""

    ERROR = "error"
    """The run will not start, or will hang or fail."""
    WARNING = "warning"
    """The run may fail, be slow, or be misleading."""


_ORDER = list(Severity)


class Finding(Struct, frozen=True):
    """A problem of one machine. Cause and remedy are clauses without a full stop."""

    severity: Severity
    check: Name
    """The check that found it, such as ``port-in-use``; stable, for programs."""
    cause: Text
    remedy: Text
    machine: Text = ""
    """The machine that has the problem; empty: the one that was examined."""


def finding(severity: Severity, check: str, cause: str, remedy: str, machine: str = "") -> Finding:
    """Return a finding whose texts are in one line, and short enough for a record."""
    return Finding(severity, check, _bounded(cause), _bounded(remedy), machine)


def error(check: str, cause: str, remedy: str, machine: str = "") -> Finding:
    """Return a finding of severity error."""
    return finding(Severity.ERROR, check, cause, remedy, machine)


def warning(check: str, cause: str, remedy: str, machine: str = "") -> Finding:
    """Return a finding of severity warning."""
    return finding(Severity.WARNING, check, cause, remedy, machine)


def _bounded(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 500 else f"{line[:497]}..."


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return whether there is no error among them."""
    return all(found.severity is not Severity.ERROR for found in findings)


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Return equal findings of several machines as one, with the machines' names; errors first."""
    machines: dict[Finding, list[str]] = {}
    for found in findings:
        names = machines.setdefault(replace(found, machine=""), [])
        if found.machine and found.machine not in names:
            names.append(found.machine)
    return sorted(machines.items(), key=lambda item: _ORDER.index(item[0].severity))
