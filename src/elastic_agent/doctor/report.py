"""A report as text for a terminal, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elastic_agent.printable import escaped

from .differences import Column
from .examination import Report
from .findings import Severity, grouped, is_healthy

MOST_ROWS = 16
"""In larger tables only the machines that differ are shown, and one of the others."""
MOST_COLUMNS = 8
WIDEST = 24


def as_text(report: Report, machine: str) -> str:
    """The findings, the worst first, the table of differences, and one line with the result."""
    lines = [
        _finding_line(finding.severity, names, finding.cause, finding.remedy)
        for finding, names in grouped(report.findings)
    ]
    if report.columns:
        has_usual = any(one.usual is not None for one in report.columns)
        marks = " (* marks what differs from most machines)" if has_usual else ""
        lines += ["", f"Differences{marks}:", *_table(report)]
    lines += ["", _summary(report, machine)] if lines else [_summary(report, machine)]
    return escaped("\n".join(lines), keep_lines=True)


def _finding_line(severity: Severity, names: Sequence[str], cause: str, remedy: str) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f"{shown}: " if shown else ""
    return f"{severity.value:<8} {where}{cause}. Remedy: {remedy}"


def _summary(report: Report, machine: str) -> str:
    if report.machines:
        count = len(report.machines)
        who = f"{count} of {report.expected} machines" if count < report.expected else f"{count} machines"
    else:
        who = f"{machine} alone"
    tested = f"; tested: {', '.join(report.tested)}" if report.tested else ""
    counts = {kind: sum(one.severity is kind for one, _ in grouped(report.findings)) for kind in Severity}
    if not report.findings:
        return f"no problems found on {who}{tested}"
    words = [
        f"{number} {kind.value}{'s' if number != 1 else ''}" for kind, number in counts.items() if number
    ]
    return f"{', '.join(words)} on {who}{tested}"


def _table(report: Report) -> list[str]:
    columns = report.columns[:MOST_COLUMNS]
    numbers = list(range(len(report.machines)))
    hidden = 0
    if len(numbers) > MOST_ROWS:
        odd = [number for number in numbers if any(one.is_odd(number) for one in columns)][:MOST_ROWS]
        usual = next((number for number in numbers if number not in odd), None)
        shown = sorted({*odd, *(() if usual is None else (usual,))})
        hidden, numbers = len(numbers) - len(shown), shown
    rows = [["machine", *(column.name for column in columns)]]
    rows += [
        [report.machines[number].machine, *(_cell(one, number) for one in columns)] for number in numbers
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if hidden:
        lines.append(f"({hidden} more machines are like those without a mark, or not shown)")
    if len(report.columns) > len(columns):
        more = ", ".join(column.name for column in report.columns[MOST_COLUMNS:])
        lines.append(f"(also different: {more}; --json shows all)")
    return lines


def _cell(column: Column, number: int) -> str:
    value = column.values[number]
    cut = value if len(value) <= WIDEST else f"{value[: WIDEST - 3]}..."
    return f"{cut} *" if column.usual is not None and column.is_odd(number) else cut


def as_json(report: Report) -> str:
    """One JSON object."""
    document = {
        "healthy": is_healthy(report.findings) and len(report.machines) in (0, report.expected),
        "exit_code": report.exit_code,
        "expected_machines": report.expected,
        "machines": [
            {
                "machine": one.machine,
                "address": one.address,
                "interface": one.interface,
                "facts": one.facts,
                "environment": one.environment,
            }
            for one in report.machines
        ],
        "findings": [
            {
                "severity": finding.severity.value,
                "check": finding.check,
                "machines": names,
                "cause": finding.cause,
                "remedy": finding.remedy,
            }
            for finding, names in grouped(report.findings)
        ],
        "differences": {
            column.name: dict(zip((one.machine for one in report.machines), column.values, strict=True))
            for column in report.columns
        },
        "tested": report.tested,
    }
    return msgspec.json.encode(document).decode()
