"""What the workers did that are not the cause: in a few lines, with identical errors folded. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastic_agent.protocol import Seat

from .cause import CauseKind, RootCause
from .findings import Finding, Standing
from .records import WorkerState

_MOST_NAMES = 4
_MOST_LINES = 5
_WHAT_CHARACTERS = 160


def where(first: Finding, findings: Sequence[Finding]) -> str:
    """Which workers had the same error: "on 2 of 6 workers, only on host1"; empty if only this one."""
    same = [one for one in findings if one.standing <= first.standing and one.key == first.key]
    if len(same) < 2:
        return ""
    hosts = {one.report.host or one.report.address for one in same}
    all_hosts = {one.report.host or one.report.address for one in findings}
    only = f", only on {hosts.pop()}" if len(hosts) == 1 < len(all_hosts) else ""
    return f"on {len(same)} of {len(findings)} workers{only}"


def describe_others(
    cause: RootCause, findings: Sequence[Finding], missing: Sequence[Seat]
) -> tuple[str, ...]:
    """Lines about the other workers, those first that also failed by themselves."""
    rest = [one for one in findings if (one.report.node_id, one.worker.slot) != (cause.node_id, cause.slot)]
    own = [one for one in rest if one.standing <= Standing.FAILED_WHILE_STOPPED]
    lines = _own_failures(cause, own, findings)
    for standing, words in (
        (Standing.GOT_NO_ANSWER, "timed out waiting for other workers"),
        (Standing.LOST_PEER, "lost the connection to another worker or to the store"),
        (Standing.EXITED, "exited with code 0"),
    ):
        group = [one for one in rest if one.standing is standing]
        if group:
            lines.append(f"{_names(group)} {words}")
    stopped = [one for one in rest if one.worker.state is WorkerState.STOPPED and one not in own]
    if stopped:
        lines.append(f"{_names(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped by the agent")
    silent = [
        seat.node_id
        for seat in missing
        if cause.kind is not CauseKind.NODE_LOST or seat.node_id != cause.node_id
    ]
    if silent:
        lines.append(f"no report from {', '.join(silent[:_MOST_NAMES])}{_more(len(silent))}")
    return tuple(lines)


def _own_failures(cause: RootCause, own: list[Finding], findings: Sequence[Finding]) -> list[str]:
    """One line for each different error."""
    first = next(
        (one for one in findings if (one.report.node_id, one.worker.slot) == (cause.node_id, cause.slot)),
        None,
    )
    groups: dict[str, list[Finding]] = {}
    for one in sorted(own, key=lambda one: one.order):
        groups.setdefault(one.key, []).append(one)
    lines = []
    for key, group in groups.items():
        if first is not None and key == first.key:
            lines.append(f"{_names(group)} failed with the same error{_later(first, group[0])}")
        else:
            lines.append(f"{_names(group)} failed too{_later(first, group[0])}: {_short(group[0].what)}")
    return lines[:_MOST_LINES]


def _later(first: Finding | None, other: Finding) -> str:
    """Clocks of machines differ, so an order that contradicts the cause is not shown."""
    if first is None:
        return ""
    later_s = other.failed_s - first.failed_s
    if not 0 < later_s < math.inf:
        return ""
    return f" {1000 * later_s:.0f} ms later" if later_s < 1 else f" {later_s:.1f} s later"


def _names(group: list[Finding]) -> str:
    if len(group) == 1:
        return f"{group[0].id} (rank {group[0].worker.rank})"
    names = ", ".join(one.id for one in sorted(group, key=lambda one: one.worker.rank)[:_MOST_NAMES])
    return f"{len(group)} workers ({names}{_more(len(group))})"


def _more(total: int) -> str:
    return f" and {total - _MOST_NAMES} more" if total > _MOST_NAMES else ""


def _short(what: str) -> str:
    return what if len(what) <= _WHAT_CHARACTERS else what[: _WHAT_CHARACTERS - 1] + "…"
