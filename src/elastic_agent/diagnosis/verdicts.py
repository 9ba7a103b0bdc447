"""Judges each worker of a generation by itself: did it fail, and can its end be the first cause? Pure.

The order in which ends are observed says little: a worker whose peer raised an exception may exit before that peer has
torn down its own process. What a worker wrote says more. So every end gets a `Standing`, and time decides only among
ends of the same standing.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace

from .cause import CauseKind
from .known_errors import (
    CAUSES,
    MEANINGS,
    NOT_RECOGNISED,
    REMEDIES,
    Nature,
    Recognised,
    ending,
    known_error,
    known_errors,
    readable,
    signal_name,
)
from .records import NodeReport, WorkerReport, WorkerState

_TRACEBACK = "Traceback (most recent call last):"
_LINKS = ("During handling of the above ", "The above exception was the direct cause ")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:: .*|:?)$")
_HANDLED = re.compile(r"^(?:_?queue\.Empty|Empty|StopIteration|KeyError|AttributeError|ImportError)\b")
"""Exceptions that libraries handle in the normal course; what is raised while they do so is the error."""
_FORWARDED = re.compile(r"Caught \w+ in (?:DataLoader worker process|replica|pin memory thread)")
"""PyTorch's message for an exception of another process or thread, whose traceback follows."""
_NEVER_THE_SAME = re.compile(r"0x[0-9a-fA-F]+|\d+")
_KILLED_BY_STOP = frozenset({"SIGTERM", "SIGKILL", "SIGABRT", "SIGINT"})
"""Signals that end a worker which its agent stops; its libraries may abort while they are torn down."""


class Standing(enum.IntEnum):
    """The likelihood that an end is the first cause; lower is more likely."""

    FAILED = 0
    """It failed by itself."""
    FAILED_WHILE_STOPPED = 1
    """It failed by itself, but its agent had begun to stop it, for another failure."""
    EXITED = 2
    """It exited with 0; others may have needed it."""
    GOT_NO_ANSWER = 3
    """It timed out waiting for another worker."""
    LOST_PEER = 4
    """A connection to another worker or to the bootstrap store broke."""
    STOPPED = 5
    """Its agent stopped it, or it runs."""


@dataclass(frozen=True)
class Verdict:
    """The end of a worker, judged by itself."""

    report: NodeReport
    worker: WorkerReport
    standing: Standing
    kind: CauseKind
    what: str = ""
    recognised: Recognised = NOT_RECOGNISED
    meaning: str = ""
    remedy: str = ""

    @property
    def id(self) -> str:
        """The worker's id."""
        return f"{self.report.node_id}/{self.worker.slot}"

    @property
    def host(self) -> str:
        """The name of the machine, or its address."""
        return self.report.host or self.report.address

    @property
    def line(self) -> str:
        """The line of the script where it failed; empty: not known."""
        error = self.worker.error
        is_last = first_error(self.worker) == error or _FORWARDED.search(error) is not None
        return self.worker.line if is_last else ""

    @property
    def key(self) -> str:
        """A text that is the same for the same error."""
        return _NEVER_THE_SAME.sub("#", self.what)

    @property
    def failed_s(self) -> float:
        """The time at which it failed, by the clock of its node; infinite: not known."""
        return self.worker.failed_s if self.worker.failed_s is not None else self.ended_s

    @property
    def ended_s(self) -> float:
        """The time at which its process had ended, and its connections broke; infinite: not known."""
        return self.worker.ended_s if self.worker.ended_s is not None else float("inf")


def judge(report: NodeReport, worker: WorkerReport) -> Verdict:
    """Decide whether the worker failed, and whether that can be the first cause."""
    match worker.state:
        case WorkerState.SUCCEEDED:
            what = "exited with code 0 while other workers still ran"
            return Verdict(report, worker, Standing.EXITED, CauseKind.EARLY_EXIT, what)
        case WorkerState.HUNG:
            standing = Standing.FAILED if worker.error else Standing.GOT_NO_ANSWER
            return Verdict(report, worker, standing, CauseKind.HANG, worker.error or "made no progress")
        case WorkerState.FAILED:
            return _failed(report, worker)
        case WorkerState.STOPPED:
            return _stopped(report, worker)
    return Verdict(report, worker, Standing.STOPPED, CauseKind.UNKNOWN)


_STANDINGS = {
    Nature.OWN: Standing.FAILED,
    Nature.ENVIRONMENT: Standing.FAILED,
    Nature.NO_ANSWER: Standing.GOT_NO_ANSWER,
    Nature.PEER: Standing.LOST_PEER,
    Nature.STOPPED: Standing.STOPPED,
}


def _failed(report: NodeReport, worker: WorkerReport) -> Verdict:
    name, what = signal_name(worker.returncode), ending(worker.returncode)
    # Python raises KeyboardInterrupt for SIGINT: where the agent did not stop the worker, the signal is the cause.
    was_interrupted = name == "SIGINT" and worker.state is WorkerState.FAILED
    error = "" if was_interrupted else first_error(worker)
    recognised = NOT_RECOGNISED if was_interrupted else _recognised(report, worker, error)
    if _was_out_of_memory(report, worker, recognised):
        limit = report.facts.get("memory_limit", "")
        return Verdict(
            report,
            worker,
            Standing.FAILED,
            CauseKind.OUT_OF_MEMORY,
            f"out of memory: {what if name else error}",
            meaning="the kernel killed it because the memory was used up"
            + (f" (limit {limit})" if limit else ""),
            remedy="use fewer DataLoader workers or smaller batches, or raise the memory limit of the job",
        )
    kind, meaning, remedy = CauseKind.EXCEPTION, recognised.meaning, recognised.remedy
    if not error and name:
        kind = CauseKind.SIGNAL
        meaning = "; ".join(filter(None, (MEANINGS.get(name, ""), meaning)))
        remedy = remedy or REMEDIES.get(name, "")
    elif not error:
        kind = CauseKind.EXIT_CODE
        what = f"{what}; its last line: {worker.last_line}" if worker.last_line else what
    standing = _STANDINGS[recognised.nature]
    return Verdict(report, worker, standing, kind, readable(error) or what, recognised, meaning, remedy)


def _stopped(report: NodeReport, worker: WorkerReport) -> Verdict:
    """Judge a worker that its agent stopped: it may have failed just before, which led to the stop elsewhere."""
    verdict = _failed(report, worker)
    name = signal_name(worker.returncode)
    wrote_traceback = _TRACEBACK in worker.tail and bool(worker.error)
    crashed = worker.returncode is not None and worker.returncode < 0 and name not in _KILLED_BY_STOP
    is_own = verdict.standing is Standing.FAILED and (
        wrote_traceback or crashed or verdict.kind is CauseKind.OUT_OF_MEMORY
    )
    return replace(verdict, standing=Standing.FAILED_WHILE_STOPPED if is_own else Standing.STOPPED)


_KILLED = re.compile(r"Killed process (\d+)\b", re.ASCII)


def _was_out_of_memory(report: NodeReport, worker: WorkerReport, recognised: Recognised) -> bool:
    killed = signal_name(worker.returncode) == "SIGKILL" or recognised.is_killed_loader
    is_named = str(worker.pid) in _KILLED.findall(report.facts.get("kernel_log", ""))
    return killed and (report.facts.get("oom_kills", "0") not in ("", "0") or is_named)


def _recognised(report: NodeReport, worker: WorkerReport, error: str) -> Recognised:
    """Return the known error, as the worker's node found it, which read all of its output."""
    if error != worker.error:  # what is known otherwise concerns the exceptions that followed
        return known_error(error, facts=report.facts) or NOT_RECOGNISED
    known, reason = (
        row.given(report.facts) if (row := known_errors().get(name)) is not None else None
        for name in (worker.known, worker.reason)
    )
    return Recognised(known, reason, worker.evidence, worker.peer, worker.peer_rank)


def first_error(worker: WorkerReport) -> str:
    """Return the error in one line; empty: none is known.

    Of a chain of exceptions it is the last, or the first where one of the two follows from another worker's failure.
    """
    if _FORWARDED.search(worker.error):
        errors = [line for line in worker.tail.splitlines() if _EXCEPTION.match(line)]
        return errors[-1] if errors else worker.error
    if worker.origin and _is_consequence(worker.origin):
        return worker.origin
    links = [error for error in _links(worker.tail) if not _HANDLED.match(error)]
    if not links or not worker.error:
        return worker.error
    return links[0] if _is_consequence(links[0]) or _is_consequence(worker.error) else worker.error


def _is_consequence(error: str) -> bool:
    known = known_error(error)
    return known is not None and known.nature not in CAUSES


def _links(tail: str) -> list[str]:
    """Return the exceptions of the last chain, the first cause first."""
    chain: list[str] = []
    is_linked = True
    for part in tail.split(_TRACEBACK)[1:]:
        lines = part.splitlines()
        if not is_linked:
            chain = []
        chain.append(next((line for line in lines if line and not line.startswith(" ")), ""))
        is_linked = any(line.startswith(_LINKS) for line in lines)
    return [" ".join(error.split()) for error in chain if error]
