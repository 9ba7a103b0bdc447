"""Finds what differs between the machines: one line for each difference, with what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from elastic_agent.diagnosis.differences import (
    INSTALL_THE_SAME,
    POLICY_OPTIONS,
    USE_THE_SAME_COMMAND,
    described,
    may_differ,
    unusual,
    usual_value,
)

from .findings import Finding, Severity, finding
from .interpreter import PACKAGES
from .records import MachineFacts

ABSENT = "none"
LONGEST_SHOWN = 100

_ERRORS = {
    "elastic-agent": ("agents of different versions may refuse each other", INSTALL_THE_SAME),
    "script": (
        "without --rdzv-id, different scripts are different runs, which wait for each other for ever",
        "copy the same script to all machines",
    ),
    "torch": ("workers hang or fail in collectives", INSTALL_THE_SAME),
    "nccl": ("NCCL hangs, or fails with a version mismatch", INSTALL_THE_SAME),
    "--nnodes": ("each agent waits for another number of nodes", "pass the same --nnodes on all machines"),
    "--rdzv-id": ("these are different runs, which do not wait for each other", "pass the same --rdzv-id"),
    "address family": (
        "machines of different address families cannot connect to each other",
        "pass an address of one family as --rdzv-endpoint",
    ),
}
"""What follows if these facts differ, and what to do."""

_WARNINGS = {
    "cuda": ("NCCL and kernels may differ", "install the same build of torch on all machines"),
    "nccl library": (
        "LD_LIBRARY_PATH selects another NCCL than the one that belongs to torch",
        "set LD_LIBRARY_PATH alike on all machines, or unset it",
    ),
    "driver": ("NCCL may hang between machines", "install the same driver on all machines"),
    "gpus": ("the slowest machine determines the speed", "check nvidia-smi on this machine"),
    "python": ("objects pickled on one machine may not load on another", INSTALL_THE_SAME),
    "script arguments": ("workers may do different things", USE_THE_SAME_COMMAND),
    "--lease-ttl": ("a longer lease than the run's is refused", USE_THE_SAME_COMMAND),
}
_PACKAGE = "workers may diverge, or fail on one machine only", INSTALL_THE_SAME
_OPTION = "the run uses one of these for all machines", USE_THE_SAME_COMMAND
_VARIABLE = "libraries of the workers may behave differently", "set it alike on all machines"


def differing(machines: Sequence[MachineFacts]) -> dict[str, dict[str, str]]:
    """Return the facts and variables (after ``$``) that differ: for each the values, by machine."""
    facts_of = {
        machine.machine: {
            **machine.facts,
            **{f"${name}": value for name, value in sorted(machine.environment.items())},
        }
        for machine in machines
    }
    every = {
        name: {machine: facts.get(name, ABSENT) for machine, facts in facts_of.items()}
        for name in dict.fromkeys(name for facts in facts_of.values() for name in facts)
    }
    return {name: values for name, values in every.items() if len({*values.values()}) > 1}


def _rule(name: str) -> tuple[Severity, tuple[str, str]] | None:
    """Return what follows if this fact or variable differs, and what to do; None: nothing has to be done."""
    if name in _ERRORS:
        return Severity.ERROR, _ERRORS[name]
    if name in _WARNINGS:
        return Severity.WARNING, _WARNINGS[name]
    if name in PACKAGES:
        return Severity.WARNING, _PACKAGE
    if name in POLICY_OPTIONS.values():
        return Severity.WARNING, _OPTION
    if name.startswith("$") and not may_differ(name):
        return Severity.WARNING, _VARIABLE
    return None


def difference_findings(machines: Sequence[MachineFacts]) -> Iterator[Finding]:
    """Yield each difference that matters, of the machines that are unlike most others, if most are alike."""
    for name, values in differing(machines).items():
        rule = _rule(name)
        if rule is None:
            continue
        severity, (consequence, remedy) = rule
        cause = f"machines differ in {name.removeprefix('$')}: {described(_cut(values))}; {consequence}"
        has_usual = usual_value([*values.values()]) is not None
        for machine in unusual(values) if has_usual else [""]:
            yield finding(severity, "differs", cause, remedy, machine)


def _cut(values: Mapping[str, str]) -> dict[str, str]:
    """Shorten long values to what follows a little before the first difference."""
    shortest, *others = sorted(values.values(), key=len)
    alike = next(
        (place for place, letter in enumerate(shortest) if any(text[place] != letter for text in others)),
        len(shortest),
    )
    begin = alike - LONGEST_SHOWN // 4 if alike > LONGEST_SHOWN // 2 else 0
    return {machine: _part(value, begin) for machine, value in values.items()}


def _part(text: str, begin: int) -> str:
    if len(text) <= LONGEST_SHOWN:
        return text
    before = "..." if begin else ""
    after = "..." if len(text) > begin + LONGEST_SHOWN else ""
    return f"{before}{text[begin : begin + LONGEST_SHOWN]}{after}"
