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

from msgspec.structs import replace

from elastic_agent.protocol import Failure, FailureKind, Plan, Seat, World
from elastic_agent.values import largest_world

from .cause import CauseKind, RootCause
from .collective_calls import ERRORS, MISMATCH, Mismatch, find_mismatch
from .known_errors import NOT_RECOGNISED, Nature, known_error
from .records import NodeReport, WorkerReport, WorkerState
from .signals import signal_name
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
    seats = world.seats if world is not None else ()
    reports = list(reports)
    generation = _generation(reports, world)
    addresses = {seat.node_id: seat.address for seat in seats}
    reports = [
        replace(report, address=addresses.get(report.node_id, report.address))
        for report in reports
        if report.generation == generation
    ]
    reports = _with_announced(reports, seats, plan)
    verdicts = [judge(report, worker) for report in reports for worker in report.workers]
    known = {report.node_id for report in reports if _tells_the_end(report)}
    missing = [seat for seat in seats if seat.node_id not in known]
    planned = _planned_failure(generation, seats, plan)
    cause = planned if planned is not None and planned.kind is CauseKind.HANG else None
    cause = cause or _choose(generation, verdicts, missing, plan) or planned
    if cause is None:
        return None
    others = _describe_others(cause, verdicts, missing)
    machines = {report.node_id: report.host or report.address for report in reports}
    host = cause.host or machines.get(cause.node_id, "") or addresses.get(cause.node_id, "")
    return replace(cause, generation=generation, others=others, host=host)


def _generation(reports: Sequence[NodeReport], world: World | None) -> int:
    if world is not None:
        return world.generation
    return max((report.generation for report in reports), default=0)


def _tells_the_end(report: NodeReport) -> bool:
    """Return whether it says how the workers ended; that of a node that was lost while it trained does not."""
    return report.is_final or any(worker.state is not WorkerState.RUNNING for worker in report.workers)


def _choose(
    generation: int, verdicts: list[Verdict], missing: list[Seat], plan: Plan | None
) -> RootCause | None:
    failures = sorted(
        (verdict for verdict in verdicts if verdict.standing is not Standing.STOPPED),
        key=lambda verdict: verdict.order,
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
        if first.recognised.name in ERRORS:
            return _mismatched(first, verdicts)
        return _worker_failed(first, verdicts)
    if lost is not None:
        return _node_lost(generation, lost, plan)
    if not consequences:
        return None
    if first is not None and first.standing is Standing.EXITED:
        return _exited_early(first, consequences, verdicts)
    return _only_consequences(consequences, verdicts)


# -- what the plan tells ----------------------------------------------------------------------------


def _planned_failure(generation: int, seats: Sequence[Seat], plan: Plan | None) -> RootCause | None:
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
        generation,
        kind,
        failure.words,
        node_id=node_id,
        slot=slot,
        rank=seat.first_rank + slot if seat is not None and slot is not None else None,
        remedy=_WAITS if kind is CauseKind.HANG and slot is not None else "",
        tail=failure.tail,
        is_certain=failure.is_certain,
    )


def _with_announced(
    reports: Sequence[NodeReport], seats: Sequence[Seat], plan: Plan | None
) -> list[NodeReport]:
    """Return the reports, with the end of the worker that a node announced and has not reported."""
    failure = plan.failure if plan is not None else None
    seat = next((seat for seat in seats if plan is not None and seat.node_id == plan.failed_node), None)
    if failure is None or seat is None or failure.slot is None or failure.kind is not FailureKind.WORKER:
        return list(reports)
    known = next((report for report in reports if report.node_id == seat.node_id), None)
    if known is None:
        known = NodeReport(seat.node_id, seat.incarnation, 0, 0.0, seat.address)
    if any(worker.state is WorkerState.FAILED for worker in known.workers):
        return list(reports)
    others = [report for report in reports if report.node_id != seat.node_id]
    workers = (worker for worker in known.workers if worker.slot != failure.slot)
    return [*others, replace(known, workers=(_announced(failure, failure.slot, seat), *workers))]


def _announced(failure: Failure, slot: int, seat: Seat) -> WorkerReport:
    recognised = known_error(failure.error) or NOT_RECOGNISED
    return WorkerReport(
        slot,
        seat.first_rank + slot,
        WorkerState.FAILED,
        returncode=failure.returncode,
        error=failure.error,
        tail=failure.tail,
        known=recognised.name,
        peer=recognised.peer,
        peer_rank=recognised.rank,
    )


# -- candidates -----------------------------------------------------------------------------------


def _cause_at(verdict: Verdict, kind: CauseKind, what: str) -> RootCause:
    """Return a root cause that names the worker of this verdict."""
    worker = verdict.worker
    return RootCause(
        verdict.report.generation,
        kind,
        what,
        node_id=verdict.report.node_id,
        host=verdict.host,
        slot=worker.slot,
        rank=worker.rank,
    )


def _worker_failed(first: Verdict, verdicts: list[Verdict]) -> RootCause:
    return replace(
        _cause_at(first, first.kind, first.what),
        where=_where(first, verdicts),
        line=first.line,
        meaning=_with_fact(first),
        remedy=first.remedy,
        next_step=_next_step(first),
        tail=first.worker.tail,
        is_certain=first.standing is Standing.FAILED,
    )


def _mismatched(first: Verdict, verdicts: list[Verdict]) -> RootCause:
    """Explain the error of the first worker, which says that the collectives differ."""
    mismatch = find_mismatch(first, verdicts)
    if mismatch is not None:
        return _called_another(mismatch, first)
    found = _worker_failed(first, verdicts)
    if first.worker.returncode != -signal.SIGABRT and first.recognised.name != MISMATCH:
        return found
    next_step = "another worker may be the one that is wrong: compare what all ranks do there"
    return replace(found, next_step=next_step, is_certain=False)


def _called_another(mismatch: Mismatch, first: Verdict) -> RootCause:
    """Name the worker that called something else than the others; ``first``: the worker with the error."""
    found = replace(
        _cause_at(mismatch.unlike or first, first.kind, mismatch.what),
        meaning=_with_fact(first),
        remedy=first.remedy,
    )
    if mismatch.unlike is not None:
        return replace(found, next_step=_next_step(first), is_certain=mismatch.is_certain)
    next_step = "compare what these ranks do there: it cannot be told which of them is wrong"
    return replace(found, node_id="", host="", slot=None, rank=None, next_step=next_step)


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
    others = [verdict for verdict in verdicts if verdict.standing is not Standing.EXITED]
    waiting = consequences[0]
    return replace(
        _cause_at(first, CauseKind.EARLY_EXIT, first.what),
        where=_where(first, verdicts),
        meaning=f"its connections closed while {len(others)} other worker{'s' * (len(others) > 1)} still needed it",
        remedy="give all ranks the same number of batches and collectives, and let none return or call sys.exit(0) "
        "before the others",
        next_step=f"the traceback of {waiting.id} shows in which collective it was then"
        if waiting.worker.tail
        else "",
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
        f"node {seat.node_id} was lost" if is_certain else f"node {seat.node_id} stopped reporting",
        node_id=seat.node_id,
        host=seat.address,
        meaning="its machine, its agent or its network failed"
        + (": it did not renew its lease" if is_certain else ", or it could not stop its workers in time"),
        remedy="see on that machine whether it was rebooted, ran out of memory or lost its network "
        f"(journalctl -k, uptime){_how_to_return(seat, plan)}",
        next_step=f"when {seat.address} is back, read what its workers wrote last: elastic-agent logs {seat.node_id}/0 "
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
    error = first.recognised
    absent = _awaited_worker(consequences, verdicts)
    if absent is not None and error.name not in _CONNECTING:
        return _cause_of_absence(absent, first)
    is_network = error.nature is Nature.PEER or error.name in _CONNECTING
    kind = CauseKind.NETWORK if is_network else CauseKind.UNKNOWN
    peer = error.peer
    lost_peer = first.standing is Standing.LOST_PEER
    broke = f"{first.id} lost its connection to {peer or 'another worker'}"
    return replace(
        _cause_at(first, kind, broke if lost_peer else first.what),
        where=_where(first, verdicts),
        meaning="no worker is known to have failed before" if lost_peer else first.meaning,
        remedy=first.remedy or f"{_check_network(first)}look at the output of the other worker",
        next_step=f"compare with the output of the workers on {peer}" if peer else "",
        tail=first.worker.tail,
        is_certain=False,
    )


def _check_network(first: Verdict) -> str:
    return "check the network between these machines, and " if "other_machines" in first.report.facts else ""


def _awaited_worker(consequences: list[Verdict], verdicts: list[Verdict]) -> Verdict | None:
    """Return the worker that the others waited for: one that they name, or the only one that did something else."""
    waited = [verdict for verdict in consequences if verdict.standing is Standing.GOT_NO_ANSWER]
    for verdict in waited:
        rank = verdict.recognised.rank
        if rank is not None:
            return next((other for other in verdicts if other.worker.rank == rank), None)
    if not waited:
        return None
    rest = [verdict for verdict in verdicts if verdict not in waited]
    running = [verdict for verdict in rest if verdict.standing is Standing.STOPPED]
    unlike = [verdict for verdict in waited if verdict.recognised.name != waited[0].recognised.name]
    for candidates in (rest, running, unlike, [waited[0]] if len(unlike) == len(waited) - 1 else []):
        if len(candidates) == 1 and len(verdicts) > 2:
            return candidates[0]
    return None


def _cause_of_absence(absent: Verdict, first: Verdict) -> RootCause:
    did = "did not take part in a collective for which the other workers waited"
    return replace(
        _cause_at(absent, CauseKind.HANG, did),
        meaning=f"{first.id} reported: {first.what}",
        remedy=first.remedy,
        next_step=f"see what worker {absent.id} did: saving, evaluating, loading data, or one batch less",
        tail=absent.worker.stack or first.worker.tail,
        tail_of="" if absent.worker.stack else first.id,
        is_certain=False,
    )


# -- lost nodes -----------------------------------------------------------------------------------


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
    broke_s = min(
        (verdict.failed_s for verdict in consequences if verdict.recognised.peer == lost.address),
        default=None,
    )
    if broke_s is None:
        return False
    peers = {verdict.recognised.peer for verdict in consequences}
    if broke_s < first.failed_s or first.report.address not in peers:
        return True
    # Not because of the other worker, which still held its own connections. It may have ended because of the same loss.
    return _ended_without_error(first) and broke_s < min(first.ended_s, first.failed_s + _FREEING_S)


def _ended_without_error(verdict: Verdict) -> bool:
    """Return whether it may have ended because a collective failed: with a code or an abort, and no error."""
    return verdict.kind is CauseKind.EXIT_CODE or signal_name(verdict.worker.returncode) == "SIGABRT"


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
    peers = {verdict.recognised.peer for verdict in broken} - {""}
    before_s = min(first.failed_s, *(verdict.failed_s for verdict in broken)) if broken else -math.inf
    exited = [
        verdict for verdict in failures if verdict.standing is Standing.EXITED and verdict.failed_s < before_s
    ]
    involved = [verdict for verdict in exited if not peers or verdict.report.address in peers]
    since_s = min((verdict.failed_s for verdict in involved), default=math.inf) - _FREEING_S
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
    first = next((verdict for verdict in verdicts if _is_at(verdict, cause)), None)
    rest = [verdict for verdict in verdicts if verdict is not first]
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
    silent = [
        seat.node_id
        for seat in missing
        if cause.kind is not CauseKind.NODE_LOST or seat.node_id != cause.node_id
    ]
    if silent:
        lines.append(f"no report from {', '.join(silent[:_MOST_NAMES])}{_more(len(silent))}")
    return tuple(lines)


def _is_at(verdict: Verdict, cause: RootCause) -> bool:
    return (verdict.report.node_id, verdict.worker.slot) == (cause.node_id, cause.slot)


def _own_failures(first: Verdict | None, own: list[Verdict]) -> list[str]:
    """Return one line for each different error; ``first``: the worker that is the cause, if it is one."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in sorted(own, key=lambda verdict: verdict.order):
        groups.setdefault(verdict.key, []).append(verdict)
    lines = []
    for key, group in groups.items():
        if first is not None and key == first.key:
            lines.append(f"{_names(group)} failed with the same error{_later(first, group[0])}")
        else:
            lines.append(f"{_names(group)} failed too{_later(first, group[0])}: {_short(group[0].what)}")
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
    names = ", ".join(verdict.id for verdict in in_order[:_MOST_NAMES])
    return f"{len(group)} workers ({names}{_more(len(group))})"


def _more(total: int) -> str:
    return f" and {total - _MOST_NAMES} more" if total > _MOST_NAMES else ""


def _short(what: str) -> str:
    return what if len(what) <= _WHAT_CHARACTERS else what[: _WHAT_CHARACTERS - 1] + "…"
