"""Finds what failed first in a generation, from the reports of its nodes. Pure.

By causality rather than by the order in which ends were observed: an error of its own, a signal, a hang or a lost node
comes before a worker that exited early, that before time-outs, and those before broken connections and stops. Time
decides among equals. See `docs/look.md`.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from elastic_agent.protocol import Plan, Seat, World
from elastic_agent.values import largest_world

from .cause import CauseKind, RootCause
from .findings import Finding, Standing, judge
from .known_errors import Nature
from .mismatch import ERRORS, MISMATCH, Mismatch, find_mismatch
from .others import describe_others, where
from .planned import is_hang, planned_failure, with_announced
from .records import NodeReport, WorkerState
from .signals import signal_name

_FREEING_S = 0.1
"""So much later than a process ended its connections may break: the kernel frees its memory first."""

_CONNECTING = frozenset({"connect-refused", "loopback-address", "store-timeout"})
"""Errors of connections that could not be made."""


def root_cause(
    reports: Iterable[NodeReport], plan: Plan | None = None, world: World | None = None
) -> RootCause | None:
    """What ended the generation, or None if nothing failed in it.

    Args:
        reports: of one generation, at most one per node; those of other generations are ignored.
        plan: the plan that ended the generation, if it is known.
        world: the generation's, if it is known: which nodes belong to it, and their addresses. By default the plan's.
    """
    if world is None and plan is not None:
        world = plan.world
    seats = world.seats if world is not None else ()
    reports = list(reports)
    generation = _generation(reports, world)
    addresses = {seat.node_id: seat.address for seat in seats}
    reports = [
        replace(report, address=addresses.get(report.node_id, report.address))
        for report in reports
        if report.generation == generation
    ]
    reports = with_announced(reports, seats, plan)
    findings = [judge(report, worker) for report in reports for worker in report.workers]
    known = {report.node_id for report in reports if _tells_the_end(report)}
    missing = [seat for seat in seats if seat.node_id not in known]
    cause = planned_failure(generation, seats, plan) if is_hang(plan) else None
    cause = cause or _choose(generation, findings, missing, plan) or planned_failure(generation, seats, plan)
    if cause is None:
        return None
    others = describe_others(cause, findings, missing)
    host = cause.host or next((_host(one) for one in reports if one.node_id == cause.node_id), "")
    host = host or addresses.get(cause.node_id, "")
    return replace(cause, generation=generation, others=others, host=host)


def _generation(reports: Sequence[NodeReport], world: World | None) -> int:
    if world is not None:
        return world.generation
    return max((report.generation for report in reports), default=0)


def _tells_the_end(report: NodeReport) -> bool:
    """Whether it says how the workers ended. A node that was lost while it trained has left one that does not."""
    return report.is_final or any(one.state is not WorkerState.RUNNING for one in report.workers)


def _host(report: NodeReport) -> str:
    return report.host or report.address


def _choose(
    generation: int, findings: list[Finding], missing: list[Seat], plan: Plan | None
) -> RootCause | None:
    failures = sorted(
        (one for one in findings if one.standing is not Standing.STOPPED), key=lambda one: one.order
    )
    consequences = [one for one in failures if one.standing >= Standing.GOT_NO_ANSWER]
    first = failures[0] if failures else None
    lost = _lost(missing, consequences, plan)
    if first is not None and first.standing <= Standing.FAILED_WHILE_STOPPED:
        if lost is not None and _is_lost_first(lost, consequences, first):
            return _node_lost(generation, lost, plan)
        early = _exited_before(failures, consequences, first)
        if early is not None:
            return _exited_early(early, consequences, findings)
        if _name(first) in ERRORS:
            return _mismatched(first, findings)
        return _worker_failed(first, findings)
    if lost is not None:
        return _node_lost(generation, lost, plan)
    if not consequences:
        return None
    if first is not None and first.standing is Standing.EXITED:
        return _exited_early(first, consequences, findings)
    return _only_consequences(consequences, findings)


# -- candidates -----------------------------------------------------------------------------------


def _blamed(one: Finding, kind: CauseKind, what: str) -> RootCause:
    """The worker of this finding is the cause."""
    report, worker = one.report, one.worker
    return RootCause(
        report.generation,
        kind,
        what,
        node_id=report.node_id,
        host=_host(report),
        slot=worker.slot,
        rank=worker.rank,
    )


def _worker_failed(first: Finding, findings: list[Finding]) -> RootCause:
    return replace(
        _blamed(first, first.kind, first.what),
        where=where(first, findings),
        line=first.line,
        meaning=_with_fact(first),
        remedy=first.remedy,
        next_step=_next_step(first),
        tail=first.worker.tail,
        is_certain=first.standing is Standing.FAILED,
    )


def _mismatched(first: Finding, findings: list[Finding]) -> RootCause:
    """``first``: the worker with the error that says that the collectives differ."""
    mismatch = find_mismatch(first, findings)
    if mismatch is not None:
        return _called_another(mismatch, first)
    found = _worker_failed(first, findings)
    if first.worker.returncode != -signal.SIGABRT and _name(first) != MISMATCH:
        return found
    next_step = "another worker may be the one that is wrong: compare what all ranks do there"
    return replace(found, next_step=next_step, is_certain=False)


def _called_another(mismatch: Mismatch, first: Finding) -> RootCause:
    """``first``: the worker with the error that says that the collectives differ."""
    found = replace(
        _blamed(mismatch.odd or first, first.kind, mismatch.what),
        meaning=_with_fact(first),
        remedy=first.remedy,
    )
    if mismatch.odd is not None:
        return replace(found, next_step=_next_step(first), is_certain=mismatch.is_certain)
    next_step = "compare what these ranks do there: it cannot be told which of them is wrong"
    return replace(found, node_id="", host="", slot=None, rank=None, next_step=next_step)


def _with_fact(first: Finding) -> str:
    """What the error means, with the observation of the machine that belongs to it."""
    facts = first.report.facts
    known = first.recognised.explanation if first.recognised is not None else None
    log = facts.get("kernel_log", "") if first.kind is CauseKind.SIGNAL else ""
    observed = known.observed(facts) if known is not None and known.fact else log
    if not first.meaning:
        return f"kernel log: {log}" if log else ""
    return f"{first.meaning} ({observed})" if observed else first.meaning


def _next_step(first: Finding) -> str:
    if (first.worker.tail and first.kind is CauseKind.EXCEPTION) or first.worker.stdout is None:
        return ""
    if first.worker.stdout == os.devnull:
        return (
            f"the output of worker {first.id} was not kept (--local-ranks-filter); start with --redirects 3 and "
            "--log-dir DIR, and read its files there"
        )
    host = _host(first.report)
    if not first.worker.stdout:
        return (
            f"read the end of the output of worker {first.id}, beside the log of its agent on {host} (in its terminal, "
            "or the journal of its service); --tee 3 keeps it in a file, too"
        )
    return f"read the end of the output of worker {first.id}, {first.worker.stdout}, on {host}"


def _exited_early(first: Finding, consequences: list[Finding], findings: list[Finding]) -> RootCause:
    others = [one for one in findings if one.standing is not Standing.EXITED]
    waiting = consequences[0]
    return replace(
        _blamed(first, CauseKind.EARLY_EXIT, first.what),
        where=where(first, findings),
        meaning=f"its connections closed while {len(others)} other worker{'s' * (len(others) > 1)} still needed it",
        remedy="give all ranks the same number of batches and collectives, and let none return or call sys.exit(0) "
        "before the others",
        next_step=f"the traceback of {waiting.id} shows in which collective it was then"
        if waiting.worker.tail
        else "",
        tail=waiting.worker.tail,
        tail_of=waiting.id,
        is_certain=first.ended_s <= min(one.ended_s for one in consequences)
        and all(one.standing > Standing.FAILED_WHILE_STOPPED for one in findings),
    )


def _node_lost(generation: int, seat: Seat, plan: Plan | None) -> RootCause:
    is_certain = _is_reported_lost(seat, plan)
    return RootCause(
        generation,
        CauseKind.NODE_LOST,
        f"node {seat.node_id} was lost" if is_certain else f"node {seat.node_id} stopped reporting",
        node_id=seat.node_id,
        host=seat.address,
        meaning="its machine, its agent or its network failed"
        + (": it did not renew its lease" if is_certain else ", or it could not stop its workers in time"),
        remedy="see on that machine whether it was rebooted, ran out of memory or lost its network "
        f"(journalctl -k, uptime){_how_to_return(seat, plan)}",
        next_step=f"read the log of the agent on {seat.node_id} ({seat.address})",
        is_certain=is_certain,
    )


def _how_to_return(seat: Seat, plan: Plan | None) -> str:
    """What brings the node back, to follow the rest of the remedy; empty: the run is over, or may be."""
    if plan is None or plan.world is None or plan.is_terminal:
        return ""
    policy, left = plan.policy, {one.node_id for one in plan.world.seats} - {seat.node_id, *plan.lost}
    goes_on = largest_world(len(left), policy.min_nodes, policy.max_nodes, policy.node_counts)
    then = "it joins the run" if goes_on else "the run waits for it"
    return f"; if its agent is gone, start the same command on {seat.node_id} again: {then}"


def _only_consequences(consequences: list[Finding], findings: list[Finding]) -> RootCause:
    """No worker failed by itself, as far as is known."""
    first = consequences[0]
    absent = _absent(consequences, findings)
    if absent is not None and _name(first) not in _CONNECTING:
        return _absentee(absent, first)
    is_peer = first.recognised is not None and first.recognised.nature is Nature.PEER
    kind = CauseKind.NETWORK if is_peer or _name(first) in _CONNECTING else CauseKind.UNKNOWN
    peer = _peer(first)
    lost_peer = first.standing is Standing.LOST_PEER
    broke = f"{first.id} lost its connection to {peer or 'another worker'}"
    return replace(
        _blamed(first, kind, broke if lost_peer else first.what),
        where=where(first, findings),
        meaning="no worker is known to have failed before" if lost_peer else first.meaning,
        remedy=first.remedy or f"{_check_network(first)}look at the output of the other worker",
        next_step=f"compare with the output of the workers on {peer}" if peer else "",
        tail=first.worker.tail,
        is_certain=False,
    )


def _check_network(first: Finding) -> str:
    return "check the network between these machines, and " if "other_machines" in first.report.facts else ""


def _absent(consequences: list[Finding], findings: list[Finding]) -> Finding | None:
    """The worker that the others waited for: the one that they name, or the only one that did something else."""
    waited = [one for one in consequences if one.standing is Standing.GOT_NO_ANSWER]
    for one in waited:
        rank = one.recognised.rank if one.recognised is not None else None
        if rank is not None:
            return next((other for other in findings if other.worker.rank == rank), None)
    if not waited:
        return None
    rest = [one for one in findings if one not in waited]
    running = [one for one in rest if one.standing is Standing.STOPPED]
    odd = [one for one in waited if _name(one) != _name(waited[0])]
    for candidates in (rest, running, odd, [waited[0]] if len(odd) == len(waited) - 1 else []):
        if len(candidates) == 1 and len(findings) > 2:
            return candidates[0]
    return None


def _name(one: Finding) -> str:
    """Of the known error that it raised; empty: none."""
    return one.recognised.name if one.recognised is not None else ""


def _absentee(absent: Finding, first: Finding) -> RootCause:
    did = "did not take part in a collective for which the other workers waited"
    return replace(
        _blamed(absent, CauseKind.HANG, did),
        meaning=f"{first.id} reported: {first.what}",
        remedy=first.remedy,
        next_step=f"see what worker {absent.id} did: saving, evaluating, loading data, or one batch less",
        tail=absent.worker.stack or first.worker.tail,
        tail_of="" if absent.worker.stack else first.id,
        is_certain=False,
    )


# -- lost nodes -----------------------------------------------------------------------------------


def _lost(missing: list[Seat], consequences: list[Finding], plan: Plan | None) -> Seat | None:
    """The node without a report that most likely was lost first."""
    reported = [seat for seat in missing if _is_reported_lost(seat, plan)]
    candidates = reported or (missing if consequences else [])
    blamed = [seat for seat in candidates if _blame(consequences, seat)]
    return next(iter(blamed or candidates), None)


def _is_reported_lost(seat: Seat, plan: Plan | None) -> bool:
    """Whether the coordinator ended the generation because this node was lost, and knows of nothing that it did."""
    return plan is not None and seat.node_id in plan.lost and seat.node_id != plan.failed_node


def _blame(consequences: Iterable[Finding], seat: Seat) -> bool:
    """Whether a broken connection led to this node."""
    return any(_peer(one) == seat.address for one in consequences)


def _is_lost_first(lost: Seat, consequences: Sequence[Finding], first: Finding) -> bool:
    """Whether connections to a lost node broke before a worker of another node failed by itself."""
    blaming = [one for one in consequences if _peer(one) == lost.address]
    if not blaming:
        return False
    broke_s = min(one.failed_s for one in blaming)
    if broke_s < first.failed_s or not any(_peer(one) == first.report.address for one in consequences):
        return True
    # Not because of the other worker, which still held its own connections. It may have ended because of the same loss.
    return _says_nothing(first) and broke_s < min(first.ended_s, first.failed_s + _FREEING_S)


def _says_nothing(one: Finding) -> bool:
    """Whether it may have ended like this because a collective failed: with a code or an abort, and no error."""
    return one.kind is CauseKind.EXIT_CODE or signal_name(one.worker.returncode) == "SIGABRT"


def _exited_before(
    failures: Sequence[Finding], consequences: Sequence[Finding], first: Finding
) -> Finding | None:
    """The worker that exited with 0 before another one failed by itself, if it is why connections broke.

    It is if they broke before the process of the other one had ended. A worker that exits with 0 while nothing breaks
    has finished its part. Of several that exit shortly after one another, those of a later one may break first.
    """
    if math.isinf(first.ended_s):
        return None
    broken = [
        one for one in consequences if one.standing is Standing.LOST_PEER and one.failed_s < first.ended_s
    ]
    peers = {_peer(one) for one in broken} - {""}
    since_s = min((one.failed_s for one in broken), default=-math.inf)
    exited = [
        one
        for one in failures
        if one.standing is Standing.EXITED and one.failed_s < min(since_s, first.failed_s)
    ]
    left = [one for one in exited if not peers or one.report.address in peers]
    since_s = min((one.failed_s for one in left), default=math.inf) - _FREEING_S
    return next((one for one in exited if one.failed_s >= since_s), None)


def _peer(one: Finding) -> str:
    """The address of the machine to which its connection broke, if it is known."""
    return one.recognised.peer if one.recognised is not None else ""
