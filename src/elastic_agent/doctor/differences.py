"""What differs between the machines: one table, and a finding for each difference that matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic_agent.diagnosis.compared import (
    INSTALL_THE_SAME,
    POLICY_OPTIONS,
    USE_THE_SAME_COMMAND,
    may_differ,
    usual_value,
)

from .findings import Finding, Severity
from .records import MachineFacts

ABSENT = "-"
LATE_S = 5.0
"""Clocks may differ by so much without making the logs of the machines hard to compare."""


@dataclass(frozen=True)
class Rule:
    """What a difference means; in the other facts it is only shown."""

    severity: Severity
    consequence: str
    remedy: str


_RULES = {
    "elastic-agent": Rule(
        Severity.ERROR, "agents of different versions may refuse each other", INSTALL_THE_SAME
    ),
    "script": Rule(
        Severity.ERROR,
        "without --rdzv-id, different scripts are different runs, which wait for each other for ever",
        "copy the same script to all machines",
    ),
    "torch": Rule(Severity.ERROR, "workers hang or fail in collectives", INSTALL_THE_SAME),
    "cuda": Rule(
        Severity.WARNING, "NCCL and kernels may differ", "install the same build of torch on all machines"
    ),
    "nccl": Rule(Severity.ERROR, "NCCL hangs, or fails with a version mismatch", INSTALL_THE_SAME),
    "nccl library": Rule(
        Severity.WARNING,
        "LD_LIBRARY_PATH selects another NCCL than the one that belongs to torch",
        "set LD_LIBRARY_PATH alike on all machines, or unset it",
    ),
    "driver": Rule(
        Severity.WARNING, "NCCL may hang between machines", "install the same driver on all machines"
    ),
    "gpus": Rule(
        Severity.WARNING, "the slowest machine determines the speed", "check nvidia-smi on this machine"
    ),
    "python": Rule(
        Severity.WARNING, "objects pickled on one machine may not load on another", INSTALL_THE_SAME
    ),
    "packages": Rule(Severity.WARNING, "workers may diverge, or fail on one machine only", INSTALL_THE_SAME),
    "script arguments": Rule(Severity.WARNING, "workers may do different things", USE_THE_SAME_COMMAND),
    "--nnodes": Rule(
        Severity.ERROR,
        "each agent waits for another number of nodes",
        "pass the same --nnodes on all machines",
    ),
    "--rdzv-id": Rule(
        Severity.ERROR,
        "these are different runs, which do not wait for each other",
        "pass the same --rdzv-id",
    ),
    "--lease-ttl": Rule(Severity.WARNING, "a longer lease than the run's is refused", USE_THE_SAME_COMMAND),
    "address family": Rule(
        Severity.ERROR,
        "machines of different address families cannot connect to each other",
        "pass an address of one family as --rdzv-endpoint",
    ),
}
"""For facts that are to be equal. One for the other options of the run and one for the environment are added."""

_ENVIRONMENT = Rule(
    Severity.WARNING, "libraries of the workers may behave differently", "set it alike on all machines"
)
_OPTION = Rule(Severity.WARNING, "the run uses one of these for all machines", USE_THE_SAME_COMMAND)
_SHOWN_ONLY = Rule(Severity.NOTE, "", "")


@dataclass(frozen=True)
class Column:
    """A fact that differs: its value on each machine, and the usual one."""

    name: str
    values: tuple[str, ...]
    """In the order of the machines."""
    usual: str | None
    """The value of most machines; None: no value is more frequent than the others."""

    def is_odd(self, number: int) -> bool:
        """Whether this machine's value is to be marked."""
        return self.values[number] != self.usual


def differing(machines: Sequence[MachineFacts]) -> list[Column]:
    """The facts and variables that differ, the most important first."""
    columns = []
    for name in dict.fromkeys(name for one in machines for name in one.facts):
        columns.append(_column(name, [one.facts.get(name, ABSENT) for one in machines]))
    for name in sorted({name for one in machines for name in one.environment}):
        columns.append(_column(f"${name}", [one.environment.get(name, ABSENT) for one in machines]))
    order = list(Severity)
    found = [one for one in columns if len(set(one.values)) > 1]
    return sorted(found, key=lambda one: order.index(_rule(one.name).severity))


def _column(name: str, values: Sequence[str]) -> Column:
    return Column(name, tuple(values), usual_value(values))


def _rule(name: str) -> Rule:
    if name.startswith("$"):
        return _SHOWN_ONLY if may_differ(name) else _ENVIRONMENT
    return _RULES.get(name, _OPTION if name in POLICY_OPTIONS.values() else _SHOWN_ONLY)


def difference_findings(machines: Sequence[MachineFacts], columns: Sequence[Column]) -> Iterator[Finding]:
    """A finding for each difference that matters; without one, the table alone shows it."""
    names = [one.machine for one in machines]
    for column in columns:
        rule = _rule(column.name)
        if rule is _SHOWN_ONLY:
            continue
        shown = column.name.removeprefix("$")
        if column.usual is None:
            values = "; ".join(
                f"{value} on {_few(names, column, value)}" for value in dict.fromkeys(column.values)
            )
            yield Finding(
                rule.severity,
                "differs",
                f"{shown} differs: {_cut(values, 300)}; {rule.consequence}",
                rule.remedy,
            )
            continue
        for number, value in enumerate(column.values):
            if column.is_odd(number):
                yield Finding(
                    rule.severity,
                    "differs",
                    f"{shown} differs: {_cut(value)} here, {_cut(column.usual)} on most machines; "
                    f"{rule.consequence}",
                    rule.remedy,
                    names[number],
                )


def _few(names: Sequence[str], column: Column, value: str) -> str:
    having = [name for name, its in zip(names, column.values, strict=True) if its == value]
    return ", ".join(having[:3]) + (f" and {len(having) - 3} more" if len(having) > 3 else "")


def _cut(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def clock_findings(names: Mapping[str, str], ahead_s: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Machines whose clock is wrong.

    ``ahead_s``: for each machine, by how much the others found it ahead of themselves.
    """
    for machine, values in ahead_s.items():
        median_s = sorted(values)[len(values) // 2] if values else 0.0
        others = [names[other] for other in ahead_s if other != machine]
        is_one_of_two = len(others) == 1  # it cannot be told which is wrong: told once
        if abs(median_s) <= LATE_S or (is_one_of_two and median_s < 0):
            continue
        direction = "ahead of" if median_s > 0 else "behind"
        usual = (
            f"that of {others[0]} (one of the two is wrong)" if is_one_of_two else "those of most machines"
        )
        yield Finding(
            Severity.WARNING,
            "clock",
            f"the clock is {abs(median_s):.0f} s {direction} {usual}; log times cannot be compared, and certificates "
            "may be invalid",
            "start a time service (chrony, systemd-timesyncd)",
            names[machine],
        )
