"""How a worker ended: what the guard knows, and what it wrote; for the failure that nodes exchange, and for reports."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_agent.agent import events
from elastic_agent.diagnosis.known_errors import ending, known_error
from elastic_agent.diagnosis.records import GroupProgress, WorkerReport, WorkerState
from elastic_agent.exit_note import Note
from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger
from elastic_agent.printable import plain, without_surrogates
from elastic_agent.protocol import Failure, FailureKind, count
from elastic_agent.workers.cleanup import SweepReport
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.failure import WorkerFailure
from elastic_agent.workers.guard.client import Exited
from elastic_agent.workers.output.final_output import NOTHING_READ, FinalOutput

ENDED_BY_STOP = (0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)
"""Ends of a worker that was being stopped, which need no explanation, unless it wrote a traceback before."""

_LONGEST_ERROR = 500


@dataclass(frozen=True)
class Remains:
    """What a worker left in memory: in the heartbeat file, and in its answers."""

    step: int = 0
    """The last step that it reported by a heartbeat; 0: none."""
    note: Note | None = None
    """On the end of its script."""
    progress: tuple[GroupProgress, ...] = ()
    """Its last collectives, if an exception ended its script or gloo aborted another worker; empty: not known."""
    has_left: bool = False
    """It has saved and left after a notice."""


def protocol_failure(
    context: WorkerContext, exited: Exited, output: FinalOutput, note: Note | None, node_id: str
) -> Failure:
    """Return the failure of a worker that the nodes exchange."""
    found = _failure(context, exited, output, valid_note(note, exited))
    return Failure(
        FailureKind.WORKER,
        found.summary(node_id)[:512],
        found.tail[-4096:],
        slot=exited.slot,
        returncode=exited.returncode,
        signature=found.signature,
        error=found.message[:512],
    )


def read_output(context: WorkerContext, slot: int) -> FinalOutput:
    """Return what can be read of a failed worker's files; a package decides where they are, so that any error can
    occur. May block as long as a file system hangs."""
    try:
        return context.final_output(slot)
    except Exception:
        get_logger().exception(f"cannot read the files of worker {slot}; the run continues")
        return NOTHING_READ


def read_ends(
    context: WorkerContext,
    remains: Mapping[int, Remains],
    outputs: Mapping[int, FinalOutput],
    stopped_s: float | None,
) -> events.GenerationEnded:
    """Return how each worker of a generation ended. May block as long as a file system hangs.

    Args:
        context: the workers, all of which have ended.
        remains: what they left in memory, by slot.
        outputs: what has been read of their files.
        stopped_s: when the agent began to stop them (CLOCK_BOOTTIME); None: it did not.
    """
    ends = []
    for slot, exited in sorted(context.exits.items()):
        is_failure = exited.returncode != 0
        output = outputs.get(slot) or (read_output(context, slot) if is_failure else NOTHING_READ)
        ends.append(_worker_end(context, exited, output, remains.get(slot, Remains()), stopped_s))
    found = context.machine_facts() if any(end.failure is not None for end in ends) else {}
    return events.GenerationEnded(context.generation, tuple(ends), found)


def has_not_saved(end: events.WorkerEnd, signum: signal.Signals | None) -> bool:
    """Return whether a worker that got this signal failed, or was killed, instead of ending because of it."""
    returncode, was_stopped = end.report.returncode, end.report.state is WorkerState.STOPPED
    if signum is None or not was_stopped or returncode == 128 + signum:
        return False
    return end.failure is not None or returncode not in (0, -signum)


def warn_of_unsaved(node_id: str, ends: Iterable[events.WorkerEnd], signum: signal.Signals | None) -> None:
    """Log which worker was to save and exit on a signal, and failed instead or was killed; and how many others."""
    unsaved = [end for end in ends if has_not_saved(end, signum)]
    if not unsaved or signum is None:
        return
    end, others = unsaved[0], len(unsaved) - 1
    error = f": {end.failure.message}" if end.failure is not None and end.failure.message else ""
    who = f"it and {count(others, 'other worker')} of this node" if others else "it"
    get_logger().warning(
        f"worker {node_id}/{end.report.slot} {ending(end.report.returncode or 0)} after {signum.name}{error}; {who} "
        "may not have saved"
    )


def log_cleanup(report: SweepReport) -> None:
    """Log which shared memory that workers had left was removed, or kept and why."""
    log = get_logger()
    if report.removed:
        log.info("removed shared memory left behind by workers", files=report.removed)
    for held in report.held:
        log.warning(
            f"kept shared memory of the workers: {held.file} is in use by {held.process} ({held.pid})"
        )


def _worker_end(
    context: WorkerContext, exit_: Exited, output: FinalOutput, remains: Remains, stopped_s: float | None
) -> events.WorkerEnd:
    note, offset_s = valid_note(remains.note, exit_), time.time() - boottime_s()
    failed_s = _failed_s(exit_, note)
    exit_ = _by_itself(exit_, note, failed_s, stopped_s)
    errors = tuple(plain(error)[:_LONGEST_ERROR] for error in note.errors) if note is not None else ()
    failure = _failure(context, exit_, output, note) if exit_.returncode != 0 else None
    # A worker may have failed just before its agent stopped it because of what this caused elsewhere. That SIGINT ended
    # it shows that its last exception was the KeyboardInterrupt.
    if failure is not None and exit_.stopping and exit_.returncode in ENDED_BY_STOP:
        failure = failure if failure.message and exit_.returncode != -signal.SIGINT else None
    stdout = context.output_file(exit_.slot)
    report = WorkerReport(
        exit_.slot,
        exit_.slot,
        _state(exit_, failure),
        exit_.pid,
        exit_.returncode,
        exit_.at_boottime_s + offset_s,
        stdout=stdout and without_surrogates(stdout)[:512],
        step=remains.step or None,
        progress=remains.progress,
        origin=errors[-1] if len(errors) > 1 else "",
        failed_s=failed_s + offset_s,
        **(failure_fields(failure) if failure is not None else {}),
    )
    return events.WorkerEnd(report, failure, context.shows_stderr(exit_.slot))


def _failure(context: WorkerContext, exited: Exited, output: FinalOutput, note: Note | None) -> WorkerFailure:
    return context.failure(exited, output, "" if output.no_room else noted_error(note))


def _state(exit_: Exited, failure: WorkerFailure | None) -> WorkerState:
    if exit_.stopping:
        return WorkerState.STOPPED
    return WorkerState.SUCCEEDED if failure is None else WorkerState.FAILED


def failure_fields(failure: WorkerFailure) -> dict[str, Any]:
    """Return what a report contains of a worker's failure."""
    error = _error(failure)
    found = failure.recognised if error == failure.message else known_error(error)
    return {
        "error": error[:512],
        "last_line": failure.last_line,
        "tail": failure.tail[-4096:],
        "signature": failure.signature,
        "line": failure.line,
        "known": found.name if found is not None else "",
        "reason": found.reason.name if found is not None and found.reason is not None else "",
        "evidence": found.evidence if found is not None else "",
        "peer": found.peer[:512] if found is not None else "",
        "peer_rank": found.rank if found is not None else None,
    }


def _error(failure: WorkerFailure) -> str:
    """Return its error; if that is missing because the disk of its output is full, the full disk."""
    if failure.message or not failure.no_room:
        return failure.message
    return f"no space for its output: {failure.no_room}"


def valid_note(note: Note | None, exit_: Exited) -> Note | None:
    """Return the note of a worker, unless it cannot be of this end: user code may have written anything there."""
    return note if note is not None and 0 < note.at_boottime_s <= exit_.at_boottime_s else None


def noted_error(note: Note | None) -> str:
    """Return the error that ended the script, in one line; empty if none did, or that is not known."""
    return plain(note.errors[0])[:_LONGEST_ERROR] if note is not None and note.errors else ""


def _failed_s(exit_: Exited, note: Note | None) -> float:
    """Return when its script ended, or its process if that was killed or crashed after the script."""
    has_crashed = exit_.returncode < 0 and (note is None or not note.code)
    return note.at_boottime_s if note is not None and not has_crashed else exit_.at_boottime_s


def _by_itself(exit_: Exited, note: Note | None, failed_s: float, stopped_s: float | None) -> Exited:
    """Return the end as it would have been without the agent's stop, if the script had ended before.

    That holds for a worker that had failed before the agent began to stop it, and for one whose script had ended in
    order before it was killed.
    """
    if exit_.stopping and exit_.returncode == -signal.SIGKILL and note is not None and note.code == 0:
        return dataclasses.replace(exit_, returncode=0)
    if not exit_.stopping or stopped_s is None or failed_s >= stopped_s:
        return exit_
    if note is None:
        return dataclasses.replace(exit_, stopping=False)
    return exit_ if note.code is None else dataclasses.replace(exit_, returncode=note.code, stopping=False)
