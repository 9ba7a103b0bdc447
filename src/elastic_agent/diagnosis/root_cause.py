"""Finds what failed first in a generation, from the reports of its nodes. Pure.

By causality rather than by the order in which ends were observed: an error of its own, a signal, a hang or a lost node
comes before a worker that exited early, that before time-outs, and those before broken connections and stops. Time
decides among equals. See `docs/look.md`.

The plan that ended the generation is the cause of hangs, and of workers that could not start. For others it completes
the reports: one may be late, or may not have been written.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from elastic_agent.printable import cut, listed
from elastic_agent.protocol import FailureKind, Plan, Seat, World, count
from elastic_agent.values import largest_world

from .cause import CauseKind, RootCause
from .collective_calls import ERRORS, MISMATCH, find_mismatch
from .known_errors import NOT_RECOGNISED, Nature, known_error, signal_name
from .records import NodeReport, WorkerReport, WorkerState
from .verdicts import Standing, Verdict, judge

_FREEING_S = 0.1
"""The connections of a process may break this much later than it ends: the kernel frees its memory first."""

_CONNECTING = frozenset({"connect-refused", "loopback-address", "store-timeout"})
"""Errors of connections that could not be made."""

_START_KINDS = frozenset({FailureKind.START, FailureKind.BOOTSTRAP, FailureKind.TOO_FEW})

_WAITS = "see what the worker does at that line; if that may take so long, raise --hang-timeout"

_MOST_NAMES = 4
_MOST_LINES = 5
_WHAT_CHARACTERS = 160


def root_cause(
    reports: Iterable[NodeReport], plan: Plan | None = None, world: World | None = None
) -> RootCause | None:
    """Return what ended the generation, or None if nothing failed in it.

    Args:
        reports: of one generation, at most one per node; those of other generations are ignored.
        plan: the plan that ended the generation, if it is known.
        world: the generation's, if it is known: which nodes belong to it, and their addresses. By default the plan's.
    """
    if world is None and plan is not None:
        world = plan.world
    reports = list(reports)
    seats = world.seats if world is not None else ()
    newest = max((report.generation for report in reports), default=0)
    generation = world.generation if world is not None else newest
    addresses = {seat.node_id: seat.address for seat in seats}
    known = [
        replace(report, address=addresses.get(report.node_id, report.address))
        for report in reports
        if report.generation == generation
    ]
    known = _with_announced(known, seats, plan)
    verdicts = [judge(report, worker) for report in known for worker in report.workers]
    told = {report.node_id for report in known if _tells_the_end(report)}
    missing = [seat for seat in seats if seat.node_id not in told]
    planned = _planned_failure(seats, plan)
    cause = planned if planned is not None and planned.kind is CauseKind.HANG else None
    cause = cause or _choose(generation, verdicts, missing, plan) or planned
    if cause is None:
        return None
    machines = addresses | {report.node_id: report.host or report.address for report in known}
    host = cause.host or machines.get(cause.node_id, "")
    others = _describe_others(cause, verdicts, missing)
    return replace(cause, generation=generation, others=others, host=host)


def _tells_the_end(report: NodeReport) -> bool:
    """Return whether it says how the workers ended; that of a node that was lost while it trained does not."""
    return report.is_final or any(worker.state is not WorkerState.RUNNING for worker in report.workers)


def _choose(
    generation: int, verdicts: list[Verdict], missing: list[Seat], plan: Plan | None
) -> RootCause | None:
    """Set aside what follows from other failures, and explain the earliest of the rest."""
    failures = sorted(
        (verdict for verdict in verdicts if verdict.standing is not Standing.STOPPED), key=_order
    )
    consequences = [verdict for verdict in failures if verdict.standing >= Standing.GOT_NO_ANSWER]
    first = failures[0] if failures else None
    lost = _lost_seat(missing, consequences, plan)
    if first is not None and first.standing <= Standing.FAILED_WHILE_STOPPED:
        if lost is not None and _is_lost_first(lost, consequences, first):
            return _node_lost(generation, lost, plan)
        early = _exited_before(failures, consequences, first)
        if early is not None:
            return _exited_early(early, consequences, verdicts)
        return _mismatched(first, verdicts) if first.recognised.name in ERRORS else _failed(first, verdicts)
    if lost is not None:
        return _node_lost(generation, lost, plan)
    if not consequences:
        return None
    if first is not None and first.standing is Standing.EXITED:
        return _exited_early(first, consequences, verdicts)
    return _only_consequences(consequences, verdicts)


def _order(verdict: Verdict) -> tuple[int, float, int]:
    return verdict.standing, verdict.failed_s, verdict.worker.rank


# -- what the plan tells ----------------------------------------------------------------------------


def _planned_failure(seats: Sequence[Seat], plan: Plan | None) -> RootCause | None:
    """Return the failure that the plan contains; None without one."""
    failure = plan.failure if plan is not None else None
    if plan is None or failure is None:
        return None
    kind = CauseKind.START if failure.kind in _START_KINDS else CauseKind.UNKNOWN
    node_id, slot = plan.failed_node or "", failure.slot
    if failure.kind is FailureKind.HANG:  # every node announces it, so it names the one to blame
        kind, node_id, slot = CauseKind.HANG, failure.culprit or "", failure.culprit_slot
    seat = next((seat for seat in seats if seat.node_id == node_id), None)
    slot = slot if kind is not CauseKind.START else None
    return RootCause(
        0,
        kind,
        failure.words,
        node_id=node_id,
        slot=slot,
        rank=seat.first_rank + slot if seat is not None and slot is not None else None,
        remedy=_WAITS if kind is CauseKind.HANG and slot is not None else "",
        tail=failure.tail,
        is_certain=failure.is_certain,
    )


def _with_announced(reports: list[NodeReport], seats: Sequence[Seat], plan: Plan | None) -> list[NodeReport]:
    """Return the reports, with the end of the worker that a node announced and has not reported."""
    failure = plan.failure if plan is not None else None
    seat = next((seat for seat in seats if plan is not None and seat.node_id == plan.failed_node), None)
    if failure is None or seat is None or failure.slot is None or failure.kind is not FailureKind.WORKER:
        return reports
    unknown = NodeReport(seat.node_id, seat.incarnation, 0, 0.0, seat.address)
    known = next((report for report in reports if report.node_id == seat.node_id), unknown)
    if any(worker.state is WorkerState.FAILED for worker in known.workers):
        return reports
    recognised = known_error(failure.error) or NOT_RECOGNISED
    announced = WorkerReport(
        failure.slot,
        seat.first_rank + failure.slot,
        WorkerState.FAILED,
        returncode=failure.returncode,
        error=failure.error,
        tail=failure.tail,
        known=recognised.name,
        peer=recognised.peer,
        peer_rank=recognised.rank,
    )
    others = [report for report in reports if report is not known]
    workers = (worker for worker in known.workers if worker.slot != failure.slot)
    return [*others, replace(known, workers=(announced, *workers))]


# -- candidates -----------------------------------------------------------------------------------


def _cause_at(verdict: Verdict, kind: CauseKind, what: str, **more: Any) -> RootCause:
    """Return a root cause that names the worker of this verdict, with ``more`` fields."""
    worker, report = verdict.worker, verdict.report
    return RootCause(
        report.generation,
        kind,
        what,
        node_id=report.node_id,
        host=verdict.host,
        slot=worker.slot,
        rank=worker.rank,
        **more,
    )


def _failed(first: Verdict, verdicts: list[Verdict]) -> RootCause:
    return _cause_at(
        first,
        first.kind,
        first.what,
        where=_where(first, verdicts),
        line=first.line,
        meaning=_with_fact(first),
        remedy=first.remedy,
        next_step=_next_step(first),
        tail=first.worker.tail,
        is_certain=first.standing is Standing.FAILED,
    )


def _mismatched(first: Verdict, verdicts: list[Verdict]) -> RootCause:
    """Explain the error of the first worker, which says that the collectives differ: name the one that is unlike."""
    mismatch = find_mismatch(first, verdicts)
    if mismatch is None:
        found = _failed(first, verdicts)
        if first.worker.returncode != -signal.SIGABRT and first.recognised.name != MISMATCH:
            return found
        next_step = "another worker may be the one that is wrong: compare what all ranks do there"
        return replace(found, next_step=next_step, is_certain=False)
    meaning, remedy, kind = _with_fact(first), first.remedy, first.kind
    if mismatch.unlike is None:
        next_step = "compare what these ranks do there: it cannot be told which of them is wrong"
        generation = first.report.generation
        return RootCause(generation, kind, mismatch.what, meaning=meaning, remedy=remedy, next_step=next_step)
    return _cause_at(
        mismatch.unlike,
        kind,
        mismatch.what,
        meaning=meaning,
        remedy=remedy,
        next_step=_next_step(first),
        is_certain=mismatch.is_certain,
    )


def _with_fact(first: Verdict) -> str:
    """Return what the error means, with the observation of the machine that belongs to it."""
    facts, known = first.report.facts, first.recognised.explanation
    log = facts.get("kernel_log", "") if first.kind is CauseKind.SIGNAL else ""
    observed = known.observed(facts) if known is not None and known.fact else log
    if not first.meaning:
        return f"kernel log: {log}" if log else ""
    return f"{first.meaning} ({observed})" if observed else first.meaning


def _next_step(first: Verdict) -> str:
    if (first.worker.tail and first.kind is CauseKind.EXCEPTION) or first.worker.stdout is None:
        return ""
    if first.worker.stdout in ("", os.devnull):
        seen = (
            "not kept" if first.worker.stdout else f"beside the log of its agent on {first.host}, in no file"
        )
        return f"the output of worker {first.id} was {seen}; --log-dir DIR keeps it, without --logs-specs"
    if os.path.basename(first.worker.stdout) not in ("output.log", "stdout.log", "stderr.log"):
        return f"read the end of the output of worker {first.id}, {first.worker.stdout}, on {first.host}"
    command = f"elastic-agent logs {first.id} --generation {first.report.generation}"
    return f"{command} (the end of its output; on {first.host}: {first.worker.stdout})"


def _exited_early(first: Verdict, consequences: list[Verdict], verdicts: list[Verdict]) -> RootCause:
    others = sum(verdict.standing is not Standing.EXITED for verdict in verdicts)
    waiting = consequences[0]
    shows = f"the traceback of {waiting.id} shows in which collective it was then"
    return _cause_at(
        first,
        CauseKind.EARLY_EXIT,
        first.what,
        where=_where(first, verdicts),
        meaning=f"its connections closed while {count(others, 'other worker')} still needed it",
        remedy="give all ranks the same number of batches and collectives, and let none return or call sys.exit(0) "
        "before the others",
        next_step=shows if waiting.worker.tail else "",
        tail=waiting.worker.tail,
        tail_of=waiting.id,
        is_certain=first.ended_s <= min(verdict.ended_s for verdict in consequences)
        and all(verdict.standing > Standing.FAILED_WHILE_STOPPED for verdict in verdicts),
    )


def _node_lost(generation: int, seat: Seat, plan: Plan | None) -> RootCause:
    is_certain = _is_reported_lost(seat, plan)
    return RootCause(
        generation,
        CauseKind.NODE_LOST,
        f"node {seat.node_id} {'was lost' if is_certain else 'stopped reporting'}",
        node_id=seat.node_id,
        host=seat.address,
        meaning="its machine, its agent or its network failed"
        + (": it did not renew its lease" if is_certain else ", or it could not stop its workers in time"),
        remedy="see on that machine whether it was rebooted, ran out of memory or lost its network "
        f"(journalctl -k, uptime){_how_to_return(seat, plan)}",
        next_step=f"when {seat.node_id} is back, read what its workers wrote last: elastic-agent logs {seat.node_id}/0 "
        f"--generation {generation}, there",
        is_certain=is_certain,
    )


def _how_to_return(seat: Seat, plan: Plan | None) -> str:
    """Return what brings the node back, as the end of the remedy; empty: the run is over, or may be."""
    if plan is None or plan.world is None or plan.is_terminal:
        return ""
    policy, nodes = plan.policy, {other.node_id for other in plan.world.seats}
    remaining = nodes - {seat.node_id, *plan.lost}
    goes_on = largest_world(len(remaining), policy.min_nodes, policy.max_nodes, policy.node_counts)
    then = "it joins the run" if goes_on else "the run waits for it"
    return f"; if its agent is gone, start the same command on {seat.node_id} again: {then}"


def _only_consequences(consequences: list[Verdict], verdicts: list[Verdict]) -> RootCause:
    """Explain a generation in which no worker is known to have failed by itself."""
    first = consequences[0]
    error, worker = first.recognised, first.worker
    awaited = _awaited_worker(consequences, verdicts) if error.name not in _CONNECTING else None
    if awaited is not None:
        return _cause_at(
            awaited,
            CauseKind.HANG,
            "did not take part in a collective for which the other workers waited",
            meaning=f"{first.id} reported: {first.what}",
            remedy=first.remedy,
            next_step=f"see what worker {awaited.id} did: saving, evaluating, loading data, or one batch less",
            tail=awaited.worker.stack or worker.tail,
            tail_of="" if awaited.worker.stack else first.id,
            is_certain=False,
        )
    is_network = error.nature is Nature.PEER or error.name in _CONNECTING
    lost_peer = first.standing is Standing.LOST_PEER
    has_others = "other_machines" in first.report.facts
    check = "check the network between these machines, and " if has_others else ""
    return _cause_at(
        first,
        CauseKind.NETWORK if is_network else CauseKind.UNKNOWN,
        f"{first.id} lost its connection to {error.peer or 'another worker'}" if lost_peer else first.what,
        where=_where(first, verdicts),
        meaning="no worker is known to have failed before" if lost_peer else first.meaning,
        remedy=first.remedy or f"{check}look at the output of the other worker",
        next_step=f"compare with the output of the workers on {error.peer}" if error.peer else "",
        tail=worker.tail,
        is_certain=False,
    )


def _awaited_worker(consequences: list[Verdict], verdicts: list[Verdict]) -> Verdict | None:
    """Return the worker that the others waited for: one that they name, or the only one that did something else."""
    waited = [verdict for verdict in consequences if verdict.standing is Standing.GOT_NO_ANSWER]
    named = [verdict.recognised.rank for verdict in waited if verdict.recognised.rank is not None]
    if named:
        return next((other for other in verdicts if other.worker.rank == named[0]), None)
    if not waited or len(verdicts) <= 2:
        return None
    rest = [verdict for verdict in verdicts if verdict not in waited]
    running = [verdict for verdict in rest if verdict.standing is Standing.STOPPED]
    unlike = [verdict for verdict in waited if verdict.recognised.name != waited[0].recognised.name]
    like_none = [waited[0]] if len(unlike) == len(waited) - 1 else []
    return next((found[0] for found in (rest, running, unlike, like_none) if len(found) == 1), None)


# -- lost nodes, and workers that left ----------------------------------------------------------------


def _lost_seat(missing: list[Seat], consequences: list[Verdict], plan: Plan | None) -> Seat | None:
    """Return the node without a report that most likely was lost first."""
    reported = [seat for seat in missing if _is_reported_lost(seat, plan)]
    candidates = reported or (missing if consequences else [])
    peers = {verdict.recognised.peer for verdict in consequences}
    blamed = [seat for seat in candidates if seat.address in peers]
    return next(iter(blamed or candidates), None)


def _is_reported_lost(seat: Seat, plan: Plan | None) -> bool:
    """Return whether the generation was ended because this node was lost, and nothing is known that it did."""
    return plan is not None and seat.node_id in plan.lost and seat.node_id != plan.failed_node


def _is_lost_first(lost: Seat, consequences: Sequence[Verdict], first: Verdict) -> bool:
    """Return whether connections to a lost node broke before a worker of another node failed by itself."""
    breaks = [verdict.failed_s for verdict in consequences if verdict.recognised.peer == lost.address]
    if not breaks:
        return False
    broke_s, peers = min(breaks), {verdict.recognised.peer for verdict in consequences}
    if broke_s < first.failed_s or first.report.address not in peers:
        return True
    # Not because of the other worker, which still held its own connections. It may have ended because of the same loss:
    # with a code or an abort, and no error, as a collective failed.
    is_quiet = first.kind is CauseKind.EXIT_CODE or signal_name(first.worker.returncode) == "SIGABRT"
    return is_quiet and broke_s < min(first.ended_s, first.failed_s + _FREEING_S)


def _exited_before(
    failures: Sequence[Verdict], consequences: Sequence[Verdict], first: Verdict
) -> Verdict | None:
    """Return the worker that exited with 0 before another one failed by itself, if it is why connections broke.

    It is if they broke before the process of the other one had ended. A worker that exits with 0 while nothing breaks
    has finished its part. Of several that exit shortly after one another, those of a later one may break first.
    """
    if math.isinf(first.ended_s):
        return None
    broken = [
        verdict
        for verdict in consequences
        if verdict.standing is Standing.LOST_PEER and verdict.failed_s < first.ended_s
    ]
    if not broken:
        return None
    peers = {verdict.recognised.peer for verdict in broken} - {""}
    before_s = min(first.failed_s, *(verdict.failed_s for verdict in broken))
    exited = [
        verdict for verdict in failures if verdict.standing is Standing.EXITED and verdict.failed_s < before_s
    ]
    involved = [verdict.failed_s for verdict in exited if not peers or verdict.report.address in peers]
    since_s = min(involved, default=math.inf) - _FREEING_S
    return next((verdict for verdict in exited if verdict.failed_s >= since_s), None)


# -- the other workers ------------------------------------------------------------------------------


def _where(first: Verdict, verdicts: Sequence[Verdict]) -> str:
    """Return which workers had the same error: "on 2 of 6 workers, only on host1"; empty if only this one."""
    same = [
        verdict for verdict in verdicts if verdict.standing <= first.standing and verdict.key == first.key
    ]
    if len(same) < 2:
        return ""
    hosts, all_hosts = ({verdict.host for verdict in some} for some in (same, verdicts))
    only = f", only on {hosts.pop()}" if len(hosts) == 1 < len(all_hosts) else ""
    return f"on {len(same)} of {len(verdicts)} workers{only}"


def _describe_others(
    cause: RootCause, verdicts: Sequence[Verdict], missing: Sequence[Seat]
) -> tuple[str, ...]:
    """Return lines about the other workers, with identical errors as one; those first that failed by themselves."""
    rest = [verdict for verdict in verdicts if verdict.id != cause.worker]
    first = next((verdict for verdict in verdicts if verdict.id == cause.worker), None)
    own = [verdict for verdict in rest if verdict.standing <= Standing.FAILED_WHILE_STOPPED]
    lines = _own_failures(first, own)
    for standing, did in (
        (Standing.GOT_NO_ANSWER, "timed out waiting for other workers"),
        (Standing.LOST_PEER, "lost the connection to another worker or to the store"),
        (Standing.EXITED, "exited with code 0"),
    ):
        group = [verdict for verdict in rest if verdict.standing is standing]
        if group:
            lines.append(f"{_names(group)} {did}")
    stopped = [
        verdict for verdict in rest if verdict.worker.state is WorkerState.STOPPED and verdict not in own
    ]
    if stopped:
        lines.append(f"{_names(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped by the agent")
    lost = cause.node_id if cause.kind is CauseKind.NODE_LOST else None
    silent = [seat.node_id for seat in missing if seat.node_id != lost]
    if silent:
        lines.append(f"no report from {listed(silent, _MOST_NAMES)}")
    return tuple(lines)


def _own_failures(first: Verdict | None, own: list[Verdict]) -> list[str]:
    """Return one line for each different error; ``first``: the worker that is the cause, if it is one."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in sorted(own, key=_order):
        groups.setdefault(verdict.key, []).append(verdict)
    lines = []
    for key, group in groups.items():
        is_same = first is not None and key == first.key
        did, error = "failed with the same error" if is_same else "failed too", group[0].what
        line = f"{_names(group)} {did}{_later(first, group[0])}"
        lines.append(line if is_same else f"{line}: {cut(error, _WHAT_CHARACTERS)}")
    return lines[:_MOST_LINES]


def _later(first: Verdict | None, other: Verdict) -> str:
    """Return how much later it failed; empty if the clocks, which differ, contradict the cause."""
    later_s = other.failed_s - first.failed_s if first is not None else 0.0
    if not 0 < later_s < math.inf:
        return ""
    return f" {1000 * later_s:.0f} ms later" if later_s < 1 else f" {later_s:.1f} s later"


def _names(group: list[Verdict]) -> str:
    if len(group) == 1:
        return f"{group[0].id} (rank {group[0].worker.rank})"
    in_order = sorted(group, key=lambda verdict: verdict.worker.rank)
    return f"{len(group)} workers ({listed([verdict.id for verdict in in_order], _MOST_NAMES)})"
